//! All logits of a text, for comparison with what other programs compute from the same files.

use super::pass::{Pass, STREAM_BYTES, go_on, parts};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::embedding::gather;
use crate::model::{Head, ModelConfig, Stored};
use crate::pipeline::stream::Batches;
use crate::text::Segments;

/// Tokens of a micro-batch.
const BATCH_TOKENS: usize = 2048;

/// Bytes of logits at a time.
const LOGITS_BYTES: usize = 32 << 20;

/// Computes the logits of every token of `segments`, row after row, and hands them to `write` some
/// tokens at a time: [tokens, vocab] in all. `progress` is as in [`super::perplexity`].
///
/// # Errors
/// [`Error::Interrupted`](crate::error::Error::Interrupted), those of storage and device, and those of
/// `write`.
pub async fn logits(
    stored: &Stored,
    segments: &Segments,
    device: &Device,
    progress: &mut impl AsyncFnMut(usize, usize) -> bool,
    write: &mut impl FnMut(&[f32]) -> Result<()>,
) -> Result<()> {
    let config = ModelConfig::of(&stored.checkpoint)?;
    let longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
    let parts = parts(&segments.rows, longest, config.hidden_size, STREAM_BYTES);
    let steps = config.layers + 1;
    for (part, rows) in parts.iter().enumerate() {
        let all = parts.len() * steps;
        let mut step = async |done| go_on(progress(part * steps + done, all).await);
        let batches = Batches::new(rows, BATCH_TOKENS, false);
        let mut pass = Pass::begin(stored, &config, &batches, device).await?;
        for layer in 0..config.layers {
            pass.block(layer, &mut async || step(layer).await).await?;
        }
        let head = Head::load(&config, stored, device).await?;
        let tile = (LOGITS_BYTES / (4 * config.vocab_size)).max(1);
        for batch in 0..batches.len() {
            let h = pass.take(batch)?;
            let positions: Vec<u32> = (0..batches.get(batch).ids.len() as u32).collect();
            for positions in positions.chunks(tile) {
                step(config.layers).await?;
                write(&head.logits(&gather(&[&h], positions)?)?.to_f32().await?)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use pollster::block_on;

    use super::super::perplexity;
    use super::*;
    use crate::storage::native::DirSource;

    #[test]
    fn they_give_the_perplexity() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web/demo/model");
        let stored = block_on(Stored::open(Rc::new(DirSource::open(folder).unwrap()))).unwrap();
        let row = |start: u32, len: u32| (start..start + len).collect();
        let rows: Vec<Vec<u32>> = vec![row(3, 40), row(200, 25), row(300, 40)];
        let segments = Segments { rows, ..Segments::none() };
        let want = block_on(perplexity(&stored, &segments, &Device::Cpu, async |_, _| true)).unwrap();
        let mut found = Vec::new();
        let mut write = |part: &[f32]| {
            found.extend_from_slice(part);
            Ok(())
        };
        block_on(logits(&stored, &segments, &Device::Cpu, &mut async |_, _| true, &mut write)).unwrap();
        let vocab = 2048;
        assert_eq!(found.len(), (40 + 25 + 40) * vocab);
        let (mut sum, mut logits) = (0.0, found.chunks(vocab));
        for row in &segments.rows {
            for at in 0..row.len() {
                let logits = logits.next().unwrap();
                let Some(&target) = row.get(at + 1) else { continue };
                let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                sum += total.ln() - f64::from(logits[target as usize]);
            }
        }
        assert!((sum / want.tokens as f64 - want.mean_nll).abs() < 1e-5, "{sum} {want:?}");
    }
}
