//! How the next token is chosen: the likeliest, or by chance among the likely ones.
//!
//! The logits stay where they are. Back come the likeliest token, or the likeliest few with their logits,
//! which the filters of Transformers then thin out in its order: repetition penalty, temperature, top-k,
//! top-p, min-p. With a top-k (at most [`MOST_CANDIDATES`], 50 by default) all of that is exact. Without one,
//! probabilities are still those over the whole vocabulary, but what is drawn is always one of the
//! [`MOST_CANDIDATES`] likeliest tokens: a top-p or min-p that would let in more does not.

use super::Options;
use crate::error::{Error, Result};
use crate::kernels::peak::peak;
use crate::kernels::penalize::penalize;
use crate::kernels::topk::topk;
use crate::tensor::Tensor;
use crate::text::SplitMix64;

/// Tokens of which one is drawn, at most.
pub const MOST_CANDIDATES: usize = 256;

/// By chance, and how.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// Logits are divided by it, above 0.
    pub temperature: f32,
    /// Only so many of the likeliest tokens, at most [`MOST_CANDIDATES`]; 0 for no such limit.
    pub top_k: usize,
    /// Only the likeliest tokens whose probabilities together reach this, in 0..=1; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this times as likely as the likeliest, in 0..=1; 0 for all.
    pub min_p: f32,
    /// The same seed draws the same tokens of the same logits.
    pub seed: u64,
}

impl Sampling {
    /// # Errors
    /// [`Error::Options`] naming a value that is out of range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &str, value: f32, range: &str| {
            Err(Error::options(format!("{name} {value} is not {range}"), "Use a value in this range"))
        };
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "a number above 0 (0 means greedy)");
        }
        if !(0.0..=1.0).contains(&self.top_p) || self.top_p == 0.0 {
            return refuse("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min-p", self.min_p, "between 0 and 1");
        }
        if self.top_k > MOST_CANDIDATES {
            return refuse("top-k", self.top_k as f32, &format!("between 0 and {MOST_CANDIDATES}"));
        }
        Ok(())
    }
}

/// Chooses the tokens of one text.
pub struct Sampler {
    sampling: Option<Sampling>,
    random: SplitMix64,
    penalty: f32,
    /// The tokens of the text so far, each once, if they are penalized.
    seen: Vec<u32>,
    is_seen: Vec<bool>,
}

impl Sampler {
    /// For a model of `vocab` tokens and a text that begins with `prompt`.
    ///
    /// # Errors
    /// [`Error::Options`] for values out of range.
    pub fn new(options: &Options, vocab: usize, prompt: &[u32]) -> Result<Self> {
        options.check()?;
        let penalty = options.repetition_penalty;
        // A stream of its own, unrelated to the windows of calibration text under the same seed.
        let random = SplitMix64::new(options.sampling.map_or(0, |sampling| sampling.seed), 0x67656e);
        let is_seen = if penalty == 1.0 { vec![] } else { vec![false; vocab] };
        let mut sampler = Self { sampling: options.sampling, random, penalty, seen: vec![], is_seen };
        prompt.iter().for_each(|&id| sampler.note(id));
        Ok(sampler)
    }

    fn note(&mut self, id: u32) {
        if let Some(is_seen) = self.is_seen.get_mut(id as usize)
            && !std::mem::replace(is_seen, true)
        {
            self.seen.push(id);
        }
    }

    /// The next token after `logits` [1, vocab], which the repetition penalty changes.
    ///
    /// # Errors
    /// [`Error::Numeric`] when the logits are not finite; [`Error::Device`].
    pub async fn choose(&mut self, logits: &mut Tensor) -> Result<u32> {
        penalize(logits, &self.seen, self.penalty)?;
        let id = match self.sampling {
            None => peak(logits, 1.0, false).await?.id,
            Some(sampling) => self.draw(logits, sampling).await?,
        };
        self.note(id);
        Ok(id)
    }

    async fn draw(&mut self, logits: &Tensor, sampling: Sampling) -> Result<u32> {
        let count = if sampling.top_k == 0 { MOST_CANDIDATES } else { sampling.top_k };
        let candidates = topk(logits, count).await?;
        let scale = 1.0 / f64::from(sampling.temperature);
        let scaled: Vec<f64> = candidates.iter().map(|&(logit, _)| f64::from(logit) * scale).collect();
        let most = scaled.first().copied().unwrap_or(f64::NAN);
        if !most.is_finite() {
            return Err(Error::numeric(
                "the model's logits",
                "they are not finite",
                "The weights are damaged or overflow in 32-bit arithmetic",
            ));
        }
        let log_sum = if sampling.top_k == 0 {
            f64::from(peak(logits, scale as f32, true).await?.log_sum.unwrap_or(f32::NAN))
        } else {
            most + scaled.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
        };
        let probabilities: Vec<f64> = scaled.iter().map(|x| (x - log_sum).exp()).collect();
        let kept = kept(&probabilities, &sampling);
        let total: f64 = probabilities[..kept].iter().sum();
        let mut point = self.random.unit() * total;
        for (probability, &(_, id)) in probabilities[..kept].iter().zip(&candidates) {
            if point < *probability {
                return Ok(id);
            }
            point -= probability;
        }
        // Rounding left the point at the very end.
        Ok(candidates[kept - 1].1)
    }
}

/// How many of the tokens, likeliest first, pass top-p and min-p: at least one.
fn kept(probabilities: &[f64], sampling: &Sampling) -> usize {
    let most = probabilities.first().copied().unwrap_or(0.0);
    let mut before = 0.0;
    let passes = |&&probability: &&f64| {
        let inside = before < f64::from(sampling.top_p) && probability >= f64::from(sampling.min_p) * most;
        before += probability;
        inside
    };
    // With top-p 1 rounding must not cut the tail.
    if sampling.top_p >= 1.0 {
        let least = f64::from(sampling.min_p) * most;
        return probabilities.iter().take_while(|&&probability| probability >= least).count().max(1);
    }
    probabilities.iter().take_while(passes).count().max(1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::{noise, test_gpu};

    const ALL: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1 };

    fn draws(device: &Device, logits: &[f32], sampling: Sampling, penalty: f32, count: usize) -> Vec<u32> {
        let options =
            Options { sampling: Some(sampling), repetition_penalty: penalty, ..Options::greedy(count) };
        let mut sampler = Sampler::new(&options, logits.len(), &[]).unwrap();
        (0..count)
            .map(|_| {
                let mut logits = Tensor::from_f32(device, &[1, logits.len()], logits.to_vec()).unwrap();
                pollster::block_on(sampler.choose(&mut logits)).unwrap()
            })
            .collect()
    }

    /// ln of 8, 4, 2, 1, 1 sixteenths, shuffled and shifted: ids 3, 0, 4, 1, 2.
    fn logits() -> Vec<f32> {
        [4f32, 1.0, 1.0, 8.0, 2.0].map(|x| x.ln() + 3.0).to_vec()
    }

    fn ids(sampling: Sampling) -> BTreeSet<u32> {
        draws(&Device::Cpu, &logits(), sampling, 1.0, 400).into_iter().collect()
    }

    #[test]
    fn each_filter_lets_in_what_it_says() {
        assert_eq!(ids(ALL), [0, 1, 2, 3, 4].into());
        assert_eq!(ids(Sampling { top_k: 2, ..ALL }), [3, 0].into());
        // 8/16 + 4/16 reach 0.7; of 0.75 exactly the same two; a little more needs the third.
        assert_eq!(ids(Sampling { top_p: 0.7, ..ALL }), [3, 0].into());
        assert_eq!(ids(Sampling { top_p: 0.76, ..ALL }), [3, 0, 4].into());
        assert_eq!(ids(Sampling { top_p: 1e-6, ..ALL }), [3].into());
        assert_eq!(ids(Sampling { min_p: 0.2, ..ALL }), [3, 0, 4].into());
        assert_eq!(ids(Sampling { min_p: 1.0, ..ALL }), [3].into());
        // Top-p counts what top-k has left: 8/12 of the first two.
        assert_eq!(ids(Sampling { top_k: 2, top_p: 0.66, ..ALL }), [3].into());
        assert_eq!(ids(Sampling { temperature: 0.01, ..ALL }), [3].into());
    }

    #[test]
    fn draws_have_the_probabilities_of_the_softmax() {
        for (temperature, want) in [(1.0, [4.0, 1.0, 1.0, 8.0, 2.0]), (0.5, [16.0, 1.0, 1.0, 64.0, 4.0])] {
            let count = 20_000;
            let drawn = draws(&Device::Cpu, &logits(), Sampling { temperature, ..ALL }, 1.0, count);
            let total: f64 = want.iter().sum();
            for (id, want) in want.iter().enumerate() {
                let share = drawn.iter().filter(|&&x| x == id as u32).count() as f64 / count as f64;
                // Four standard deviations.
                let (p, n) = (want / total, count as f64);
                assert!((share - p).abs() < 4.0 * (p * (1.0 - p) / n).sqrt(), "{id}: {share}, not {p}");
            }
        }
    }

    #[test]
    fn a_seed_repeats_on_both_devices_and_another_differs() {
        let logits: Vec<f32> = noise(1000, 1).iter().map(|x| 3.0 * x).collect();
        for sampling in [ALL, Sampling { top_k: 40, top_p: 0.9, ..ALL }] {
            let first = draws(&Device::Cpu, &logits, sampling, 1.0, 50);
            assert_eq!(draws(&Device::Cpu, &logits, sampling, 1.0, 50), first);
            assert_ne!(draws(&Device::Cpu, &logits, Sampling { seed: 2, ..sampling }, 1.0, 50), first);
            let Some(gpu) = test_gpu() else { continue };
            assert_eq!(draws(&gpu, &logits, sampling, 1.0, 50), first);
        }
    }

    #[test]
    fn what_occurred_is_penalized_from_the_prompt_on() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let options = Options { repetition_penalty: 2.0, ..Options::greedy(9) };
            let mut sampler = Sampler::new(&options, 5, &[3, 3]).unwrap();
            let mut next = || {
                let mut logits = Tensor::from_f32(device, &[1, 5], vec![4.0, 1.0, -1.0, 6.0, 2.5]).unwrap();
                pollster::block_on(sampler.choose(&mut logits)).unwrap()
            };
            // 6 counts as 3 from the start; then 4 as 2; then 3 is the largest again.
            assert_eq!([next(), next(), next()], [0, 3, 3]);
        }
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (sampling, words) in [
            (Sampling { temperature: 0.0, ..ALL }, "temperature 0"),
            (Sampling { temperature: f32::NAN, ..ALL }, "temperature NaN"),
            (Sampling { top_p: 0.0, ..ALL }, "top-p 0"),
            (Sampling { top_p: 1.5, ..ALL }, "top-p 1.5"),
            (Sampling { min_p: -0.1, ..ALL }, "min-p -0.1"),
            (Sampling { top_k: 257, ..ALL }, "top-k 257"),
        ] {
            let text = sampling.check().unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
        let options = Options { repetition_penalty: 0.0, ..Options::greedy(1) };
        assert!(Sampler::new(&options, 5, &[]).is_err());
    }
}
