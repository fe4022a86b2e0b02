//! How tokens are chosen, as the options and the model's generation_config.json say.

use crate::error::{Error, Result};
use crate::generate::{GenerationSettings, Options, Sampling};

/// Without any of these the model's generation_config.json decides, and where it has no do_sample the
/// likeliest token is taken each time.
#[derive(clap::Args, Clone)]
pub struct SamplingArgs {
    /// Tokens to generate at most
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub max_tokens: usize,
    /// Take the likeliest token each time
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "seed"])]
    greedy: bool,
    /// Divides the logits; 0 is greedy [default: 1]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Only the N likeliest tokens, at most 256; 0 for no limit but that [default: 50]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Only the likeliest tokens that together have this probability [default: 1, all]
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Only tokens this times as likely as the likeliest [default: 0, all]
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Makes tokens that occurred less likely, above 1 [default: 1, no change]
    #[arg(long, value_name = "R")]
    repetition_penalty: Option<f32>,
    /// The same seed draws the same text [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// What they mean for a model.
    ///
    /// # Errors
    /// [`Error::Options`] for values out of range.
    pub fn options(&self, settings: &GenerationSettings) -> Result<Options> {
        let asked = self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some()
            || self.seed.is_some()
            || self.temperature.is_some();
        let of_model = settings.sampling;
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(of_model.temperature),
            top_k: self.top_k.unwrap_or(of_model.top_k),
            top_p: self.top_p.unwrap_or(of_model.top_p),
            min_p: self.min_p.unwrap_or(of_model.min_p),
            seed: self.seed.unwrap_or(0),
        };
        let sampled = !self.greedy && (asked || settings.do_sample) && sampling.temperature != 0.0;
        if sampled {
            sampling.check()?;
        }
        if self.max_tokens == 0 {
            return Err(Error::options("--max-tokens 0 generates nothing", "Ask for 1 or more"));
        }
        let options = Options {
            max_tokens: self.max_tokens,
            sampling: sampled.then_some(sampling),
            repetition_penalty: self.repetition_penalty.unwrap_or(settings.repetition_penalty),
            ignore_stops: false,
        };
        options.check()?;
        Ok(options)
    }
}
