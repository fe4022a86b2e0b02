//! What one or two models predict at given places of some rows.

use super::interval::Estimate;
use super::pass::{Pass, STREAM_BYTES, go_on, parts};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::divergence::{Divergence, divergence};
use crate::kernels::embedding::gather;
use crate::kernels::norm::{add_squared_differences, add_squares};
use crate::model::{Head, ModelConfig, Stored};
use crate::pipeline::stream::Batches;
use crate::tensor::{Elem, Tensor};
use crate::text::Passage;

/// Tokens of a micro-batch.
const BATCH_TOKENS: usize = 1024;

/// Bytes of one model's logits at a time.
const LOGITS_BYTES: usize = 32 << 20;

/// Rows to score: the predictions of `ids[from..]`, from ≥ 1.
pub struct Row<'a> {
    pub ids: &'a [u32],
    pub from: usize,
}

/// Two models beside each other; one model is beside itself.
pub struct Places {
    /// Of each row its predictions in order.
    pub rows: Vec<Vec<Divergence>>,
    /// After each block, the mean over tokens of ‖h_a − h_b‖ / ‖h_a‖, where both have the same shape.
    pub blocks: Vec<f64>,
}

/// Runs `models`, one or two, over `rows`, a block of each at a time. `progress` is as in
/// [`super::perplexity`].
///
/// # Errors
/// [`Error::Interrupted`], and those of storage and device.
pub async fn places(
    models: &[&Stored],
    rows: &[Row<'_>],
    device: &Device,
    progress: &mut impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Places> {
    let configs =
        models.iter().map(|model| ModelConfig::of(&model.checkpoint)).collect::<Result<Vec<_>>>()?;
    let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    let hidden = configs.iter().map(|config| config.hidden_size).sum();
    let parts = parts(rows, longest, hidden, STREAM_BYTES);
    let steps = configs.iter().map(|config| config.layers).max().unwrap_or(0) + 1;
    let mut found = Places { rows: Vec::with_capacity(rows.len()), blocks: vec![] };
    let mut tokens = 0;
    for (part, rows) in parts.iter().enumerate() {
        let all = parts.len() * steps;
        let mut step = async |done| go_on(progress(part * steps + done, all).await);
        score(models, &configs, rows, device, &mut found, &mut step).await?;
        tokens += rows.iter().map(|row| row.ids.len()).sum::<usize>();
    }
    for error in &mut found.blocks {
        *error /= tokens.max(1) as f64;
    }
    Ok(found)
}

/// Adds a part's predictions, and to `found.blocks` the sums over its tokens.
async fn score(
    models: &[&Stored],
    configs: &[ModelConfig],
    rows: &[Row<'_>],
    device: &Device,
    found: &mut Places,
    step: &mut impl AsyncFnMut(usize) -> Result<()>,
) -> Result<()> {
    let ids: Vec<Vec<u32>> = rows.iter().map(|row| row.ids.to_vec()).collect();
    let batches = Batches::new(&ids, BATCH_TOKENS, false);
    let mut passes = Vec::with_capacity(models.len());
    for (model, config) in models.iter().zip(configs) {
        passes.push(Pass::begin(model, config, &batches, device).await?);
    }
    let layers = configs.iter().map(|config| config.layers).max().unwrap_or(0);
    for layer in 0..layers {
        for (pass, config) in passes.iter_mut().zip(configs) {
            if layer < config.layers {
                pass.block(layer, &mut async || step(layer).await).await?;
            }
        }
        let [a, b] = passes.as_mut_slice() else { continue };
        if configs[0].layers == configs[1].layers && configs[0].hidden_size == configs[1].hidden_size {
            found.blocks.resize(layers, 0.0);
            for batch in 0..batches.len() {
                let (of_a, of_b) = (a.take(batch)?, b.take(batch)?);
                found.blocks[layer] += relative_errors(&of_a, &of_b).await?;
                a.put(batch, of_a).await?;
                b.put(batch, of_b).await?;
            }
        }
    }
    let mut heads = Vec::with_capacity(models.len());
    for (model, config) in models.iter().zip(configs) {
        heads.push(Head::load(config, *model, device).await?);
    }
    let mut rows = rows.iter();
    for batch in 0..batches.len() {
        let hidden = passes.iter_mut().map(|pass| pass.take(batch)).collect::<Result<Vec<_>>>()?;
        let batch = batches.get(batch);
        for (start, row) in (0..batch.ids.len()).step_by(batch.seq_len).zip(&mut rows) {
            step(layers).await?;
            let last = start + row.ids.len() - 1;
            let positions: Vec<u32> = (start + row.from - 1..last).map(|position| position as u32).collect();
            let mut predictions = Vec::with_capacity(positions.len());
            let tile = (LOGITS_BYTES / (4 * configs[0].vocab_size)).max(1);
            for (positions, targets) in positions.chunks(tile).zip(row.ids[row.from..].chunks(tile)) {
                let mut logits = Vec::with_capacity(models.len());
                for (head, hidden) in heads.iter().zip(&hidden) {
                    logits.push(head.logits(&gather(&[hidden], positions)?)?);
                }
                let other = logits.last().ok_or_else(|| Error::Internal("places of no model".into()))?;
                predictions.extend(divergence(&logits[0], other, targets).await?);
            }
            found.rows.push(predictions);
        }
    }
    Ok(())
}

/// Σ over tokens of ‖h_a − h_b‖ / ‖h_a‖.
async fn relative_errors(a: &Tensor, b: &Tensor) -> Result<f64> {
    let mut sums = Tensor::zeros(a.device(), Elem::F32, &[a.rows()])?;
    let mut differences = Tensor::zeros(a.device(), Elem::F32, &[a.rows()])?;
    add_squares(a, &mut sums)?;
    add_squared_differences(a, b, &mut differences)?;
    let (sums, differences) = (sums.to_f32().await?, differences.to_f32().await?);
    let relative = sums
        .iter()
        .zip(&differences)
        .map(|(&sum, &difference)| (f64::from(difference) / f64::from(sum).max(f64::MIN_POSITIVE)).sqrt());
    Ok(relative.sum())
}

/// How often a model foretells the last word of a passage.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct LastWords {
    /// The share of passages whose last word's tokens are all the most likely ones.
    pub accuracy: Estimate,
    /// exp of the mean negative log-likelihood of the last words.
    pub perplexity: f64,
}

/// [`LastWords`] of one or two models.
///
/// # Errors
/// As [`places`].
pub async fn last_words(
    models: &[&Stored],
    passages: &[Passage],
    device: &Device,
    mut progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Vec<LastWords>> {
    let rows: Vec<Row> =
        passages.iter().map(|passage| Row { ids: &passage.ids, from: passage.last_word }).collect();
    let found = places(models, &rows, device, &mut progress).await?;
    let score = |model: usize| {
        let right = |(row, places): (&Row, &Vec<Divergence>)| {
            row.ids[row.from..].iter().zip(places).all(|(&id, place)| place.top[model] == id)
        };
        let hits = rows.iter().zip(&found.rows).filter(|pair| right(*pair)).count();
        let nll =
            |places: &Vec<Divergence>| places.iter().map(|place| f64::from(place.nll[model])).sum::<f64>();
        let total: f64 = found.rows.iter().map(nll).sum();
        LastWords {
            accuracy: Estimate::of_trials(hits, rows.len()),
            perplexity: (total / rows.len().max(1) as f64).exp(),
        }
    };
    Ok((0..models.len()).map(score).collect())
}
