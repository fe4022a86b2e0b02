//! A quantized model beside its original: more than perplexity says.

use serde::Serialize;

use super::interval::Estimate;
use super::places::{Row, places};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::divergence::Divergence;
use crate::model::{ModelConfig, Stored};
use crate::text::Segments;

/// Model b beside model a, its original, on one text. Intervals are of 95 % over the text's rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub perplexity: [Estimate; 2],
    /// Perplexity of b over that of a, from the differences token by token: far narrower than the two
    /// intervals above, which share their text.
    pub ratio: Estimate,
    /// Mean KL(a ‖ b) in nats, from the predictions of every token.
    pub kl: Estimate,
    /// The divergence that 99 % of the tokens do not exceed.
    pub kl_99: f64,
    /// The share of places at which both have the same most likely token.
    pub agreement: Estimate,
    /// After each block, the mean over tokens of ‖h_a − h_b‖ / ‖h_a‖; empty for models of other shapes.
    pub blocks: Vec<f64>,
    pub rows: usize,
    pub tokens: usize,
    pub seconds: f64,
}

/// Compares checkpoint `b` with `a` on `segments`. `progress` is as in [`super::perplexity`].
///
/// # Errors
/// [`Error::Model`] when their vocabularies differ; [`Error::Numeric`] when predictions are not finite;
/// [`Error::Interrupted`], and those of storage and device.
pub async fn compare(
    a: &Stored,
    b: &Stored,
    segments: &Segments,
    device: &Device,
    mut progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Comparison> {
    let begun = web_time::Instant::now();
    let vocab = |model: &Stored| Ok::<_, Error>(ModelConfig::of(&model.checkpoint)?.vocab_size);
    let (of_a, of_b) = (vocab(a)?, vocab(b)?);
    if of_a != of_b {
        return Err(Error::model(
            b.checkpoint.source().describe(),
            format!("its vocabulary has {of_b} entries, that of the model to compare with {of_a}"),
            "Compare a quantized model with the model that it was made from",
        ));
    }
    let rows: Vec<Row> = segments.rows.iter().map(|ids| Row { ids, from: 1 }).collect();
    let found = places(&[a, b], &rows, device, &mut progress).await?;
    // Sums of each row with the number of its tokens.
    let sums = |f: &dyn Fn(&Divergence) -> f64| -> Vec<(f64, usize)> {
        found.rows.iter().map(|row| (row.iter().map(f).sum(), row.len())).collect()
    };
    let nll = |model: usize| Estimate::of_rows(&sums(&|place| f64::from(place.nll[model])));
    let means = [nll(0), nll(1)];
    for (mean, model) in means.iter().zip([a, b]) {
        if !mean.value.is_finite() {
            return Err(Error::numeric(
                model.checkpoint.source().describe(),
                "the model's predictions are not finite",
                "The weights are damaged or overflow in 32-bit arithmetic",
            ));
        }
    }
    let mut kls: Vec<f32> = found.rows.iter().flatten().map(|place| place.kl).collect();
    kls.sort_unstable_by(f32::total_cmp);
    let difference = sums(&|place| f64::from(place.nll[1]) - f64::from(place.nll[0]));
    Ok(Comparison {
        perplexity: means.map(|mean| mean.map(f64::exp)),
        ratio: Estimate::of_rows(&difference).map(f64::exp),
        // What an interval says beyond what there can be is left out.
        kl: Estimate::of_rows(&sums(&|place| f64::from(place.kl))).map(|kl| kl.max(0.0)),
        kl_99: kls.get((kls.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0.0).into(),
        agreement: Estimate::of_rows(&sums(&|place| f64::from(u8::from(place.top[0] == place.top[1]))))
            .map(|share| share.clamp(0.0, 1.0)),
        blocks: found.blocks,
        rows: rows.len(),
        tokens: kls.len(),
        seconds: begun.elapsed().as_secs_f64(),
    })
}
