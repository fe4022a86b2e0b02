//! Perplexity of a dense or quantized checkpoint, a block at a time.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::rope::RopeTable;
use crate::model::{Block, Embedding, Head, ModelConfig, Stored};
use crate::pipeline::stream::Batches;
use crate::text::Segments;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Perplexity {
    /// exp of the mean negative log-likelihood over all predicted tokens (length − 1 of each row).
    pub perplexity: f64,
    /// The mean, in nats.
    pub mean_nll: f64,
    pub tokens: usize,
    pub seconds: f64,
}

/// Tokens of a micro-batch.
const BATCH_TOKENS: usize = 2048;

/// Bytes of hidden states held between blocks. A longer text goes through the model in parts, each of
/// which reads the weights again: that costs little beside the products of so many tokens.
const STREAM_BYTES: usize = 256 << 20;

/// Scores `segments` row by row. Only one block's weights are in memory at a time.
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
    let config = ModelConfig::parse(stored.checkpoint.config())?;
    let longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
    let rope = config.rope.table(device, config.head_dim, longest)?;
    let fitting = stream_bytes / (4 * config.hidden_size * longest.max(1));
    let parts: Vec<&[Vec<u32>]> = segments.rows.chunks(fitting.max(1)).collect();
    let (mut sum, mut tokens) = (0f64, 0);
    for (part, rows) in parts.iter().enumerate() {
        let steps = config.layers + 1;
        let all = parts.len() * steps;
        let mut step = async |done| go_on(progress(part * steps + done, all).await);
        let (part_sum, part_tokens) = score(stored, &config, &rope, rows, device, &mut step).await?;
        sum += part_sum;
        tokens += part_tokens;
    }
    let mean_nll = sum / tokens.max(1) as f64;
    if !mean_nll.is_finite() {
        return Err(Error::numeric(
            stored.checkpoint.source().describe(),
            "the model's predictions are not finite",
            "The weights are damaged or overflow in 32-bit arithmetic",
        ));
    }
    Ok(Perplexity { perplexity: mean_nll.exp(), mean_nll, tokens, seconds: begun.elapsed().as_secs_f64() })
}

/// Σ negative log-likelihood of some rows in nats, and how many tokens were predicted. `step` hears the
/// blocks done.
async fn score(
    stored: &Stored,
    config: &ModelConfig,
    rope: &RopeTable,
    rows: &[Vec<u32>],
    device: &Device,
    step: &mut impl AsyncFnMut(usize) -> Result<()>,
) -> Result<(f64, usize)> {
    let batches = Batches::new(rows, BATCH_TOKENS);
    let ids: Vec<u32> = rows.iter().flatten().copied().collect();
    let embedding = Embedding::load_rows(config, stored, device, ids).await?;
    let mut stream = batches.embed(&embedding, device, true).await?;
    drop(embedding);
    for layer in 0..config.layers {
        let block = Block::load(config, layer, stored, device).await?;
        for batch in 0..batches.len() {
            step(layer).await?;
            let Some(mut h) = stream.take(batch)? else { continue };
            block.forward(&mut h, batches.get(batch).seq_len, rope)?;
            stream.put(batch, h).await?;
            device.settle().await?;
        }
    }
    let head = Head::load(config, stored, device).await?;
    let (mut sum, mut tokens) = (0f64, 0);
    for batch in 0..batches.len() {
        step(config.layers).await?;
        let Some(h) = stream.take(batch)? else { continue };
        let (ids, seq_len) = (&batches.get(batch).ids, batches.get(batch).seq_len);
        // The last row of a sequence predicts a token that is not there; its target is any.
        let targets: Vec<u32> = (0..ids.len()).map(|i| ids[(i + 1) % ids.len()]).collect();
        let nll = head.nll(&h, &targets).await?;
        for (i, nll) in nll.into_iter().enumerate() {
            if i % seq_len + 1 < seq_len {
                sum += f64::from(nll);
                tokens += 1;
            }
        }
    }
    Ok((sum, tokens))
}

fn go_on(wanted: bool) -> Result<()> {
    match wanted {
        true => Ok(()),
        false => Err(Error::Interrupted {
            place: "during the evaluation".into(),
            advice: "it keeps nothing; start it again".into(),
        }),
    }
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
