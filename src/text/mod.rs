//! Text as a model reads it: tokenizer, chat template, and the segments of token ids that
//! calibration and evaluation run on.
//!
//! Nothing here pads: a row is as long as its text, so padding can enter no Hessian and no
//! perplexity.

mod calibration;
mod chat;
#[cfg(test)]
mod fixtures;
mod passages;
mod pieces;
mod random;
mod rows;
mod segments;
mod stream;
mod strftime;
mod tojson;
mod tokenizer;
mod windows;

pub use calibration::{
    DEFAULT_SAMPLES, SegmentOptions, TextFile, calibration_segments, documents, evaluation_segments,
};
pub use chat::{ChatTemplate, RenderOptions};
pub use passages::{Passage, passages};
pub(crate) use random::SplitMix64;
pub use segments::{SegmentReport, Segments, SourceKind, SourceReport};
pub use stream::TextStream;
pub use strftime::Clock;
pub use tokenizer::{Tokenizer, check_ids};

use crate::error::{Error, Result};
use crate::storage::Source;

/// What turns text into the token ids of one model.
///
/// A model directory may lack a tokenizer or a chat template; that is an error only when a file
/// that needs them is read, so that rows of `input_ids` need neither.
pub struct ModelText {
    tokenizer: Option<Tokenizer>,
    chat: Option<ChatTemplate>,
    vocab_size: usize,
    place: String,
}

impl ModelText {
    /// `vocab_size` is the model's (rows of its embedding); every id is checked against it.
    /// `place` names the model directory in messages.
    pub fn new(
        tokenizer: Option<Tokenizer>,
        chat: Option<ChatTemplate>,
        vocab_size: usize,
        place: &str,
    ) -> Self {
        Self { tokenizer, chat, vocab_size, place: place.to_string() }
    }

    /// Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, as far as there
    /// are any. Errors: a file that is there and is not what it should be.
    pub async fn load(source: &dyn Source, vocab_size: usize) -> Result<Self> {
        let tokenizer = match source.size(tokenizer::FILE) {
            Some(_) => Some(Tokenizer::load(source).await?),
            None => None,
        };
        let chat = ChatTemplate::load(source).await?;
        Ok(Self::new(tokenizer, chat, vocab_size, &source.describe()))
    }

    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokenizer, or an error that says what can be done without one.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| tokenizer::absent(&self.place))
    }

    /// The chat template, or an error that says what can be done without one.
    pub fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().ok_or_else(|| {
            Error::model(
                &self.place,
                "the model has no chat template (neither chat_template.jinja nor chat_template in \
                 tokenizer_config.json), which {\"messages\"} need",
                "Add one, or use a .txt file or a .jsonl of {\"text\"} rows",
            )
        })
    }
}

/// The whole of a file, `None` if there is no such file.
async fn read_optional(source: &dyn Source, file: &str) -> Result<Option<Vec<u8>>> {
    match source.size(file) {
        Some(size) => source.read(file, 0..size).await.map(Some),
        None => Ok(None),
    }
}

/// Puts the row in front of what went wrong with it.
fn error_in(row: &str, error: Error) -> Error {
    match error {
        Error::Text { place, problem, advice } => Error::text(row, format!("{place}: {problem}"), advice),
        other => other,
    }
}
