//! Text from the open model and from results: what the panel "Try it" asks for.

use web_time::Instant;

use super::post::post;
use super::protocol::{Event, Generate, Which};
use super::session::{Session, memory};
use super::watcher::{device_bytes, wasm_bytes};
use crate::error::{Error, Result};
use crate::generate::{self, Chat, Finish, Generator, Options, Sampling};
use crate::pipeline::plan::human_bytes;

/// Tokens of the longest text, prompt and answer together.
const CONTEXT: usize = 2048;

/// A model that generates, and its conversation.
pub struct Voice {
    which: Which,
    /// The stored result that it is, if it is one by name.
    name: Option<String>,
    device: String,
    /// What its weights take in the file, about what they take in memory.
    bytes: u64,
    /// `None` when its memory was needed for something else.
    generator: Option<Generator>,
    chat: Chat,
}

impl Session {
    /// Frees the memory of loaded models; their conversations stay.
    pub fn silence(&mut self) {
        for voice in &mut self.voices {
            voice.generator = None;
        }
    }

    /// Answers `Generate`.
    pub async fn generate(&mut self, id: u32, wanted: Generate) -> Result<Event> {
        if wanted.max_tokens == 0 {
            return Err(Error::options("0 tokens are none", "Ask for 1 or more"));
        }
        // Told before the model is loaded.
        options(&wanted, None).check()?;
        let at = self.voice(id, &wanted).await?;
        let control = self.control.clone();
        let voice = &mut self.voices[at];
        let Some(generator) = &mut voice.generator else {
            return Err(Error::Internal("a loaded model is gone".into()));
        };
        let options = options(&wanted, Some(generator));
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
            let answered = voice.chat.answer(generator, &options, tell).await;
            if answered.is_err() {
                voice.chat.take_back();
            }
            answered?
        } else {
            let prompt = generator.text().tokenizer()?.encode(&wanted.prompt, true)?;
            generator.generate(&prompt, &options, tell).await?
        };
        let device = self.choose_device(&wanted.device).await?;
        Ok(Event::Generated {
            wasm_bytes: wasm_bytes(),
            device_bytes: device_bytes(&device),
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
        if let Some(at) = found.filter(|&at| self.voices[at].generator.is_some()) {
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
        let loaded = self.voices.iter().filter(|voice| voice.generator.is_some()).map(|voice| voice.bytes);
        if loaded.sum::<u64>() + bytes > most {
            self.silence();
        }
        let load = Generator::load(&subject.stored, subject.text, &device, CONTEXT, self.teller(id));
        let generator = Some(load.await?);
        if let Some(at) = found {
            self.voices[at].generator = generator;
            return Ok(at);
        }
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
    let sampling = (wanted.temperature > 0.0).then_some(Sampling {
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
