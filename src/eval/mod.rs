//! How good a model is, and how far a quantized one is from its original.

mod compare;
mod continuations;
mod interval;
mod logits;
mod pass;
mod perplexity;
mod places;

pub use compare::{Comparison, compare};
pub use continuations::{Continuations, check_context, continuations};
pub use interval::Estimate;
pub use logits::logits;
pub use perplexity::{Perplexity, perplexity};
pub use places::{LastWords, last_words};
