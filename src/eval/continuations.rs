//! Where two models' greedy continuations of the same text part.

use std::rc::Rc;

use serde::Serialize;

use super::interval::Estimate;
use super::pass::go_on;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::generate::{Event, Generator, Options};
use crate::model::{ModelConfig, Stored};
use crate::text::{ModelText, Segments};

/// How long continuations stay the same.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Continuations {
    /// The mean number of tokens before the first that differs; those that never part count as `tokens`.
    pub parting: Estimate,
    /// How many continuations never part.
    pub same: usize,
    pub prompts: usize,
    /// Tokens of a prompt and of its continuation.
    pub prompt_tokens: usize,
    pub tokens: usize,
}

/// The tokens of a prompt and its continuation together, which either model must have positions for: to be
/// asked before longer work that [`continuations`] follow.
///
/// # Errors
/// [`Error::Options`] when one has fewer.
pub fn check_context(models: [&Stored; 2], [prompt_tokens, tokens]: [usize; 2]) -> Result<usize> {
    let context = prompt_tokens + tokens;
    for stored in models {
        let positions = ModelConfig::of(&stored.checkpoint)?.max_position_embeddings;
        if context > positions {
            return Err(Error::options(
                format!("{context} tokens are more than the model's {positions}"),
                "Continue shorter prompts, or by fewer tokens",
            ));
        }
    }
    Ok(context)
}

/// Continues the first `prompt_tokens` of each row by `tokens` tokens with either model, one model in memory
/// after the other. Rows that are shorter are continued whole; tokens that end a text are no end here.
/// `progress` is as in [`super::perplexity`], in continuations.
///
/// # Errors
/// [`Error::Options`] when the two do not fit the models' context; [`Error::Interrupted`], and those of
/// storage and device.
pub async fn continuations(
    models: [&Stored; 2],
    segments: &Segments,
    prompts: usize,
    [prompt_tokens, tokens]: [usize; 2],
    device: &Device,
    mut progress: impl AsyncFnMut(usize, usize) -> bool,
) -> Result<Continuations> {
    let rows: Vec<&[u32]> =
        segments.rows.iter().take(prompts).map(|row| &row[..row.len().min(prompt_tokens)]).collect();
    let context = check_context(models, [prompt_tokens, tokens])?;
    let mut texts = [vec![], vec![]];
    for (model, stored) in models.iter().enumerate() {
        let vocab = ModelConfig::of(&stored.checkpoint)?.vocab_size;
        let text = Rc::new(ModelText::new(None, None, vocab, &stored.checkpoint.source().describe()));
        let (done, all) = (model * rows.len(), models.len() * rows.len());
        let loading = async |_, _| progress(done, all).await;
        let mut generator = Generator::load(stored, text, device, context, loading).await?;
        let options = Options { ignore_stops: true, ..Options::greedy(tokens) };
        for (row, prompt) in rows.iter().enumerate() {
            go_on(progress(done + row, all).await)?;
            let mut wanted = true;
            let generated = generator
                .generate(prompt, &options, async |event| {
                    if let Event::Token { .. } = event {
                        wanted = progress(done + row, all).await;
                    }
                    wanted
                })
                .await?;
            go_on(wanted)?;
            texts[model].push(generated.ids);
        }
    }
    let [a, b] = &texts;
    let parted: Vec<(f64, usize)> = a
        .iter()
        .zip(b)
        .map(|(a, b)| (a.iter().zip(b).take_while(|(a, b)| a == b).count() as f64, 1))
        .collect();
    Ok(Continuations {
        parting: Estimate::of_rows(&parted),
        same: parted.iter().filter(|&&(common, _)| common as usize == tokens).count(),
        prompts: rows.len(),
        prompt_tokens,
        tokens,
    })
}
