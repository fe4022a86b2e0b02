//! Perplexity of a dense or quantized checkpoint.

use super::interval::Estimate;
use super::pass::{Pass, STREAM_BYTES, go_on, parts};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{Head, ModelConfig, Stored};
use crate::pipeline::stream::Batches;
use crate::text::Segments;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Perplexity {
    /// exp of the mean negative log-likelihood over all predicted tokens (length − 1 of each row).
    pub perplexity: f64,
    /// Where it would lie on other text of the kind, 95 % of the time; `None` for a few rows.
    pub interval: Option<[f64; 2]>,
    /// The mean, in nats.
    pub mean_nll: f64,
    pub tokens: usize,
    pub seconds: f64,
}

/// Tokens of a micro-batch.
const BATCH_TOKENS: usize = 2048;

/// Scores `segments` row by row.
///
/// `progress` hears the blocks done and their number, once for each micro-batch, and stops the
/// evaluation by returning false; it may take its time.
///
/// # Errors
/// [`Error::Interrupted`], and those of storage and device.
pub async fn perplexity(
    stored: &Stored,
    segments: &Segments,
    device: &Device,
    progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Perplexity> {
    in_parts(stored, segments, device, STREAM_BYTES, progress).await
}

async fn in_parts(
    stored: &Stored,
    segments: &Segments,
    device: &Device,
    stream_bytes: usize,
    mut progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Perplexity> {
    let begun = web_time::Instant::now();
    let config = ModelConfig::of(&stored.checkpoint)?;
    let longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
    let parts = parts(&segments.rows, longest, config.hidden_size, stream_bytes);
    let mut sums = Vec::with_capacity(segments.rows.len());
    for (part, rows) in parts.iter().enumerate() {
        let steps = config.layers + 1;
        let all = parts.len() * steps;
        let mut step = async |done| go_on(progress(part * steps + done, all).await);
        sums.extend(score(stored, &config, rows, device, &mut step).await?);
    }
    let mean = Estimate::of_rows(&sums);
    if !mean.value.is_finite() {
        return Err(Error::numeric(
            stored.checkpoint.source().describe(),
            "the model's predictions are not finite",
            "The weights are damaged or overflow in 32-bit arithmetic",
        ));
    }
    let perplexity = mean.map(f64::exp);
    Ok(Perplexity {
        perplexity: perplexity.value,
        interval: perplexity.interval,
        mean_nll: mean.value,
        tokens: sums.iter().map(|row| row.1).sum(),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Of each row the sum of its negative log-likelihoods in nats, and how many tokens were predicted.
/// `step` hears the blocks done.
async fn score(
    stored: &Stored,
    config: &ModelConfig,
    rows: &[Vec<u32>],
    device: &Device,
    step: &mut impl AsyncFnMut(usize) -> Result<()>,
) -> Result<Vec<(f64, usize)>> {
    let batches = Batches::new(rows, BATCH_TOKENS, false);
    let mut pass = Pass::begin(stored, config, &batches, device).await?;
    for layer in 0..config.layers {
        pass.block(layer, &mut async || step(layer).await).await?;
    }
    let head = Head::load(config, stored, device).await?;
    let mut sums = Vec::with_capacity(rows.len());
    for batch in 0..batches.len() {
        step(config.layers).await?;
        let h = pass.take(batch)?;
        let (ids, seq_len) = (&batches.get(batch).ids, batches.get(batch).seq_len);
        // The last row of a sequence predicts a token that is not there; its target is any.
        let targets: Vec<u32> = (0..ids.len()).map(|i| ids[(i + 1) % ids.len()]).collect();
        let nll = head.nll(&h, &targets).await?;
        sums.extend(nll.chunks(seq_len).map(|nll| {
            let predicted = &nll[..seq_len - 1];
            (predicted.iter().map(|&nll| f64::from(nll)).sum::<f64>(), predicted.len())
        }));
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::storage::native::DirSource;

    /// The demo model stands in for a large one, a few kilobytes for much memory.
    #[test]
    fn a_text_in_parts_scores_as_it_does_whole() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web/demo/model");
        pollster::block_on(async {
            let source = Rc::new(DirSource::open(folder).unwrap());
            let stored = Stored::open(source).await.unwrap();
            let row = |start: u32, len: u32| (start..start + len).collect();
            let rows = vec![row(3, 40), row(100, 40), row(200, 25), row(300, 40), row(400, 7)];
            let segments = Segments { rows, ..Segments::none() };
            let mut steps = Vec::new();
            let part = 4 * 256 * 40 * 2;
            let parts = in_parts(&stored, &segments, &Device::Cpu, part, async |done, of| {
                steps.push((done, of));
                true
            });
            let parts = parts.await.unwrap();
            let whole = perplexity(&stored, &segments, &Device::Cpu, async |_, of| of == 7).await.unwrap();
            assert_eq!(parts.tokens, whole.tokens);
            assert!((parts.mean_nll - whole.mean_nll).abs() < 1e-6, "{parts:?} {whole:?}");
            assert!(steps.is_sorted() && steps.last() == Some(&(20, 21)), "{steps:?}");
        });
    }
}
