//! Text from the open model and from results: what the panel "Try it" asks for.

use web_time::Instant;

use super::post::post;
use super::protocol::{Event, Generate, Which};
use super::session::{Session, memory};
use crate::error::{Error, Result};
use crate::generate::{self, Chat, Finish, Generator, Options, Sampling};
use crate::pipeline::plan::human_bytes;

/// Tokens of the longest text, prompt and answer together.
const CONTEXT: usize = 2048;

/// A model that is loaded to generate, and its conversation.
pub struct Voice {
    which: Which,
    /// The stored result that it is, if it is one by name.
    name: Option<String>,
    device: String,
    /// What its weights take in the file, about what they take in memory.
    bytes: u64,
    generator: Generator,
    chat: Chat,
}

impl Session {
    /// Answers `Generate`.
    pub async fn generate(&mut self, id: u32, wanted: Generate) -> Result<Event> {
        if wanted.max_tokens == 0 {
            return Err(Error::options("0 tokens are none", "Ask for 1 or more"));
        }
        // Told before the model is loaded.
        options(&wanted, None).check()?;
        let at = self.voice(id, &wanted).await?;
        let control = self.control.clone();
        let Some(voice) = self.voices.get_mut(at) else {
            return Err(Error::Internal("a loaded model is gone".into()));
        };
        let options = options(&wanted, Some(&voice.generator));
        let mut asked = Instant::now();
        let tell = async |event: generate::Event<'_>| {
            match event {
                generate::Event::Reading { done, of } => post(id, Event::Reading { done, of }),
                generate::Event::Token { text, .. } | generate::Event::Rest { text } => {
                    post(id, Event::Token { text: text.to_owned() });
                }
            }
            // The event loop turns often enough for a press on Stop, not for each of many quick tokens.
            if asked.elapsed().as_millis() >= 20 {
                control.breathe().await;
                asked = Instant::now();
            }
            !control.cancelled()
        };
        let generated = if wanted.chat {
            if wanted.anew {
                voice.chat.reset();
            }
            voice.chat.say(&wanted.prompt);
            let answered = voice.chat.answer(&mut voice.generator, &options, tell).await;
            if answered.is_err() {
                voice.chat.take_back();
            }
            answered?
        } else {
            let prompt = voice.generator.text().tokenizer()?.encode(&wanted.prompt, true)?;
            voice.generator.generate(&prompt, &options, tell).await?
        };
        Ok(Event::Generated {
            tokens: generated.ids.len(),
            prompt_tokens: generated.prompt_tokens,
            reused_tokens: generated.reused_tokens,
            prefill_tokens_per_second: generated.prefill_rate(),
            tokens_per_second: generated.decode_rate(),
            finish: match generated.finish {
                Finish::StopToken => "end",
                Finish::MaxTokens => "max_tokens",
                Finish::Context => "context",
                Finish::Stopped => "stopped",
            }
            .to_owned(),
        })
    }

    /// Where the wanted model is among the loaded ones, loaded if it is not; others go if memory asks for it.
    async fn voice(&mut self, id: u32, wanted: &Generate) -> Result<usize> {
        let found = self.voices.iter().position(|voice| {
            voice.which == wanted.which && voice.name == wanted.stored && voice.device == wanted.device
        });
        if let Some(at) = found {
            return Ok(at);
        }
        let device = self.choose_device(&wanted.device).await?;
        let subject = self.subject(wanted.which, wanted.stored.as_deref()).await?;
        if wanted.chat {
            subject.text.chat()?;
        }
        let (bytes, most) = (subject.stored.checkpoint.total_bytes(), memory(&device));
        if bytes > most {
            return Err(Error::options(
                format!(
                    "the model takes {} of memory, this page allows {}",
                    human_bytes(bytes),
                    human_bytes(most)
                ),
                "Generate with the command line, or with a smaller model",
            ));
        }
        if self.voices.iter().map(|voice| voice.bytes).sum::<u64>() + bytes > most {
            self.voices.clear();
        }
        let load = Generator::load(&subject.stored, subject.text, &device, CONTEXT, self.teller(id));
        let generator = load.await?;
        self.voices.push(Voice {
            which: wanted.which,
            name: wanted.stored.clone(),
            device: wanted.device.clone(),
            bytes,
            generator,
            chat: Chat::new(None),
        });
        Ok(self.voices.len() - 1)
    }
}

/// What was asked for, and for the rest what the model's makers say.
fn options(wanted: &Generate, generator: Option<&Generator>) -> Options {
    let sampling = (wanted.temperature > 0.0).then(|| Sampling {
        temperature: wanted.temperature,
        top_k: wanted.top_k,
        top_p: wanted.top_p,
        min_p: 0.0,
        seed: wanted.seed,
    });
    Options {
        max_tokens: wanted.max_tokens,
        sampling,
        repetition_penalty: generator.map_or(1.0, |generator| generator.settings().repetition_penalty),
        ignore_stops: false,
    }
}
