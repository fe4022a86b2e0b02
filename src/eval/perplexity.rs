//! Perplexity of a dense or quantized checkpoint, a block at a time.

use crate::device::Device;
use crate::error::{Error, Result};
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
    mut progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Perplexity> {
    let begun = web_time::Instant::now();
    let config = ModelConfig::parse(stored.checkpoint.config())?;
    let batches = Batches::new(&segments.rows, BATCH_TOKENS);
    let rope = config.rope.table(device, config.head_dim, batches.longest())?;
    let ids: Vec<u32> = segments.rows.iter().flatten().copied().collect();
    let embedding = Embedding::load_rows(&config, stored, device, ids).await?;
    let mut stream = batches.embed(&embedding, device, true).await?;
    drop(embedding);
    for layer in 0..config.layers {
        let block = Block::load(&config, layer, stored, device).await?;
        for batch in 0..batches.len() {
            go_on(progress(layer, config.layers).await)?;
            let Some(mut h) = stream.take(batch)? else { continue };
            block.forward(&mut h, batches.get(batch).seq_len, &rope)?;
            stream.put(batch, h).await?;
            device.settle().await?;
        }
    }
    let head = Head::load(&config, stored, device).await?;
    let (mut sum, mut tokens) = (0f64, 0);
    for batch in 0..batches.len() {
        go_on(progress(config.layers, config.layers).await)?;
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

fn go_on(wanted: bool) -> Result<()> {
    match wanted {
        true => Ok(()),
        false => Err(Error::Interrupted {
            place: "during the evaluation".into(),
            advice: "it keeps nothing; start it again".into(),
        }),
    }
}
