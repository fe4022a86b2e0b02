//! How good the open model and results are: what the panel "Evaluate" asks for.

use std::rc::Rc;

use web_sys::File;
use web_time::Instant;

use super::demo;
use super::post::post;
use super::protocol::{Event, Scored, Which};
use super::session::{Session, texts};
use super::shelf;
use crate::error::{Error, Result};
use crate::eval::{check_context, compare, continuations, last_words, perplexity};
use crate::model::{ModelConfig, Stored};
use crate::storage::Sink;
use crate::storage::browser::PrivateSink;
use crate::text::{ModelText, Segments, TextFile, evaluation_segments, passages};

/// Tokens in a window of text.
const WINDOW: usize = 512;

/// Continuations to compare at most, and the tokens of a prompt and of what follows it.
const PROMPTS: usize = 8;
const CONTINUED: [usize; 2] = [32, 48];

/// A model on its way to be judged.
pub struct Subject {
    pub stored: Rc<Stored>,
    pub config: ModelConfig,
    pub text: Rc<ModelText>,
}

impl Session {
    /// The open model (`Before`), a stored result by its name, or the last result (`After`).
    pub async fn subject(&mut self, which: Which, name: Option<&str>) -> Result<Subject> {
        if which == Which::Before {
            let text = self.model_text().await?;
            let model = self.open_model()?;
            return Ok(Subject { stored: model.stored.clone(), config: model.config.clone(), text });
        }
        let source = match name {
            Some(name) => PrivateSink::new(shelf::open(name).await?).reader().await?,
            None => self
                .result
                .clone()
                .ok_or_else(|| Error::options("there is no result yet", "Quantize first"))?,
        };
        let stored = Rc::new(Stored::open(source).await?);
        let config = ModelConfig::of(&stored.checkpoint)?;
        let source = stored.checkpoint.source();
        let text = Rc::new(ModelText::load(source.as_ref(), config.vocab_size).await?);
        Ok(Subject { stored, config, text })
    }

    /// Answers `Evaluate`.
    pub async fn evaluate(
        &mut self,
        id: u32,
        which: Which,
        name: Option<String>,
        wanted: Scored,
        files: &[File],
    ) -> Result<Event> {
        self.silence();
        let file = text_of(&wanted, files).await?;
        let device = self.choose_device(&wanted.device).await?;
        let subject = self.subject(which, name.as_deref()).await?;
        let segments = segments(&subject, &file, wanted.max_tokens)?;
        let result = perplexity(&subject.stored, &segments, &device, self.teller(id)).await?;
        Ok(Event::Score {
            which,
            perplexity: result.perplexity,
            tokens: result.tokens,
            seconds: result.seconds,
        })
    }

    /// Answers `Compare`.
    pub async fn compare(
        &mut self,
        id: u32,
        name: Option<String>,
        and_continue: bool,
        wanted: Scored,
        files: &[File],
    ) -> Result<Event> {
        self.silence();
        let file = text_of(&wanted, files).await?;
        let device = self.choose_device(&wanted.device).await?;
        let before = self.subject(Which::Before, None).await?;
        let after = self.subject(Which::After, name.as_deref()).await?;
        let segments = segments(&before, &file, wanted.max_tokens)?;
        let models = [before.stored.as_ref(), after.stored.as_ref()];
        if and_continue {
            check_context(models, CONTINUED)?;
        }
        let comparison = compare(models[0], models[1], &segments, &device, self.teller(id)).await?;
        let continuations = match and_continue {
            true => {
                Some(continuations(models, &segments, PROMPTS, CONTINUED, &device, self.teller(id)).await?)
            }
            false => None,
        };
        Ok(Event::Compared { comparison, continuations })
    }

    /// Answers `LastWords`.
    pub async fn last_words(
        &mut self,
        id: u32,
        and_before: bool,
        name: Option<String>,
        device: &str,
        files: &[File],
    ) -> Result<Event> {
        self.silence();
        let begun = Instant::now();
        let Some(file) = texts(files).await?.pop() else {
            return Err(Error::options("there are no passages", "Choose a .jsonl of {\"text\": …} rows"));
        };
        let device = self.choose_device(device).await?;
        let mut subjects = vec![self.subject(Which::After, name.as_deref()).await?];
        if and_before {
            subjects.insert(0, self.subject(Which::Before, None).await?);
        }
        let first = &subjects[0];
        let window = WINDOW.min(first.config.max_position_embeddings);
        let (passages, skipped) = passages(&first.text, &file, window)?;
        let models: Vec<&Stored> = subjects.iter().map(|subject| subject.stored.as_ref()).collect();
        let models = last_words(&models, &passages, &device, self.teller(id)).await?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Event::LastWords { models, passages: passages.len(), skipped, seconds })
    }

    /// Tells how far it is, and has the work wait and stop as the page wishes.
    pub fn teller(&self, id: u32) -> impl AsyncFnMut(usize, usize) -> bool + use<> {
        let control = self.control.clone();
        let mut told = Instant::now();
        async move |done, all| {
            if told.elapsed().as_millis() >= 50 {
                told = Instant::now();
                post(id, Event::Scoring { fraction: done as f64 / all as f64 });
            }
            control.breathe().await;
            !control.cancelled()
        }
    }
}

async fn text_of(wanted: &Scored, files: &[File]) -> Result<TextFile> {
    let mut texts = match wanted.builtin {
        true => vec![demo::text(demo::EVALUATION).await?],
        false => texts(files).await?,
    };
    match texts.is_empty() {
        false => Ok(texts.swap_remove(0)),
        true => Err(Error::options("there is no text to score", "Choose a file")),
    }
}

fn segments(subject: &Subject, file: &TextFile, max_tokens: usize) -> Result<Segments> {
    let window = WINDOW.min(subject.config.max_position_embeddings).min(max_tokens).max(2);
    evaluation_segments(&subject.text, file, window, Some((max_tokens / window).max(1)))
}
