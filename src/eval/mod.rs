//! How good a model is: perplexity on text.

pub mod perplexity;

pub use perplexity::{Perplexity, perplexity};
