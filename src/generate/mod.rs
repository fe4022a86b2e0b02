//! Text from a model: a prompt is read, then tokens are chosen one by one until something ends them.
//!
//! [`Generator`] holds a model with its tokenizer and what it has read; a prompt that begins like the
//! last text is read only from where it differs, which makes a conversation cheap. Nothing here blocks:
//! each token is told to a callback, which may wait and may stop the rest.

mod chat;
mod sampler;
mod settings;

pub use chat::Chat;
pub use sampler::{MOST_CANDIDATES, Sampler, Sampling};
pub use settings::GenerationSettings;

use std::rc::Rc;

use web_time::Instant;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{Decoder, DecoderOptions, ModelConfig, Stored};
use crate::tensor::Elem;
use crate::text::{ModelText, TextStream, check_ids};

/// When to end, and how to choose.
#[derive(Debug, Clone)]
pub struct Options {
    /// Tokens at most.
    pub max_tokens: usize,
    /// `None` takes the most likely token each time.
    pub sampling: Option<Sampling>,
    /// Logits of tokens in the text, prompt included, are divided by this where positive and multiplied
    /// where not; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Go on where the model would end.
    pub ignore_stops: bool,
}

impl Options {
    /// The most likely token each time.
    pub fn greedy(max_tokens: usize) -> Self {
        Self { max_tokens, sampling: None, repetition_penalty: 1.0, ignore_stops: false }
    }

    /// # Errors
    /// [`Error::Options`] naming a value that is out of range.
    pub fn check(&self) -> Result<()> {
        if let Some(sampling) = &self.sampling {
            sampling.check()?;
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return Err(Error::options(
                format!("repetition penalty {} is not a number above 0", self.repetition_penalty),
                "Use 1 for none, or a little more than 1",
            ));
        }
        Ok(())
    }
}

/// What a callback hears; it returns false to stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event<'a> {
    /// Tokens of the prompt that have been read, and how many there are.
    Reading { done: usize, of: usize },
    /// The next token and the text that it adds, empty while a character is not complete.
    Token { id: u32, text: &'a str },
    /// Text that was held back to the end.
    Rest { text: &'a str },
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model chose a token that ends a text.
    StopToken,
    /// As many tokens as asked for.
    MaxTokens,
    /// No room is left in the context.
    Context,
    /// The callback wanted no more.
    Stopped,
}

/// A generated text.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Generated {
    /// What was generated, without the token that ended it.
    pub ids: Vec<u32>,
    /// Its text; empty for a model without a tokenizer.
    pub text: String,
    pub finish: Finish,
    pub prompt_tokens: usize,
    /// Tokens of the prompt that the model had read before.
    pub reused_tokens: usize,
    /// Tokens of the prompt that it has read now.
    pub read_tokens: usize,
    /// From the start to the first token.
    pub prefill_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// Tokens chosen after the first one.
    pub decoded_tokens: usize,
}

impl Generated {
    /// Tokens of the prompt read in a second.
    pub fn prefill_rate(&self) -> f64 {
        self.read_tokens as f64 / self.prefill_seconds.max(1e-9)
    }

    /// Tokens chosen in a second, the first of which belongs to the prompt; `None` of one token.
    pub fn decode_rate(&self) -> Option<f64> {
        (self.decoded_tokens > 0).then(|| self.decoded_tokens as f64 / self.decode_seconds.max(1e-9))
    }
}

/// A model that generates.
pub struct Generator {
    decoder: Decoder,
    text: Rc<ModelText>,
    settings: GenerationSettings,
    /// The tokens that the decoder has read.
    read: Vec<u32>,
}

impl Generator {
    /// Loads a dense or quantized model, whose tokenizer and template are `text`, with room for `context`
    /// tokens, at most as many as it has positions. `progress` hears the blocks loaded and their number;
    /// false stops.
    ///
    /// # Errors
    /// As [`Decoder::load`]; [`Error::Model`] for a broken generation_config.json.
    pub async fn load(
        stored: &Stored,
        text: Rc<ModelText>,
        device: &Device,
        context: usize,
        progress: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Self> {
        let config = ModelConfig::of(&stored.checkpoint)?;
        let source = stored.checkpoint.source();
        let settings = GenerationSettings::load(source.as_ref(), &config).await?;
        let options =
            DecoderOptions { context: context.min(config.max_position_embeddings), cache: Elem::F16 };
        let decoder = Decoder::load(&config, stored, device, options, progress).await?;
        Ok(Self { decoder, text, settings, read: vec![] })
    }

    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    pub fn text(&self) -> &Rc<ModelText> {
        &self.text
    }

    pub fn settings(&self) -> &GenerationSettings {
        &self.settings
    }

    /// Generates after `prompt`.
    ///
    /// # Errors
    /// [`Error::Text`] for an empty prompt, one longer than the context, or ids outside the vocabulary;
    /// [`Error::Options`]; [`Error::Numeric`] when the model's logits are not finite; [`Error::Device`].
    pub async fn generate(
        &mut self,
        prompt: &[u32],
        options: &Options,
        mut tell: impl AsyncFnMut(Event<'_>) -> bool,
    ) -> Result<Generated> {
        let begun = Instant::now();
        let (context, vocab) = (self.decoder.context(), self.decoder.vocab_size());
        check_ids(prompt, vocab, "the prompt")?;
        let Some((&last, body)) = prompt.split_last() else {
            return Err(Error::text("the prompt", "it has no tokens", "Give a prompt of one word or more"));
        };
        if prompt.len() >= context {
            return Err(Error::text(
                "the prompt",
                format!("its {} tokens leave no room in the context of {context}", prompt.len()),
                "Shorten it, or ask for a longer context if the model has one",
            ));
        }
        let mut sampler = Sampler::new(options, vocab, prompt)?;

        let common = self.read.iter().zip(body).take_while(|(a, b)| a == b).count();
        self.forget(common);
        let mut generated = Generated {
            ids: vec![],
            text: String::new(),
            finish: Finish::Stopped,
            prompt_tokens: prompt.len(),
            reused_tokens: common,
            read_tokens: 0,
            prefill_seconds: 0.0,
            decode_seconds: 0.0,
            decoded_tokens: 0,
        };
        for chunk in body[common..].chunks(Decoder::CHUNK) {
            let reading = Event::Reading { done: self.read.len(), of: prompt.len() };
            if !tell(reading).await {
                generated.prefill_seconds = begun.elapsed().as_secs_f64();
                return Ok(generated);
            }
            self.decoder.read(chunk).await?;
            self.read.extend(chunk);
            generated.read_tokens += chunk.len();
        }
        generated.read_tokens += 1;

        let mut stream = self.text.tokenizer().ok().map(|tokenizer| TextStream::after(tokenizer, prompt));
        let mut next = last;
        let mut first = None;
        generated.finish = loop {
            if generated.ids.len() == options.max_tokens {
                break Finish::MaxTokens;
            }
            if self.decoder.len() == context {
                break Finish::Context;
            }
            let logits = self.decoder.step(next).await?;
            self.read.push(next);
            let id = sampler.choose(logits).await?;
            match first {
                None => {
                    first = Some(Instant::now());
                    generated.prefill_seconds = begun.elapsed().as_secs_f64();
                }
                Some(first) => {
                    generated.decode_seconds = Instant::elapsed(&first).as_secs_f64();
                    generated.decoded_tokens += 1;
                }
            }
            if !options.ignore_stops && self.settings.stops.contains(&id) {
                break Finish::StopToken;
            }
            generated.ids.push(id);
            let piece = match &mut stream {
                Some(stream) => stream.push(id)?,
                None => String::new(),
            };
            generated.text.push_str(&piece);
            if !tell(Event::Token { id, text: &piece }).await {
                break Finish::Stopped;
            }
            next = id;
        };
        if let Some(stream) = stream {
            let rest = stream.finish()?;
            generated.text.push_str(&rest);
            if !rest.is_empty() {
                tell(Event::Rest { text: &rest }).await;
            }
        }
        Ok(generated)
    }

    /// Forgets what was read after the first `len` tokens.
    fn forget(&mut self, len: usize) {
        self.read.truncate(len);
        self.decoder.rewind(len);
    }
}
