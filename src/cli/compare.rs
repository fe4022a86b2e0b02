//! `halftone compare`: a quantized model beside its original.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::eval::{passages_of, show_interval, warn_of_length};
use super::options::DeviceArgs;
use super::progress::stop_flag;
use super::{open, table};
use crate::error::{Error, Result};
use crate::eval::{
    Comparison, Continuations, Estimate, LastWords, check_context, compare, continuations, last_words,
};
use crate::model::{ModelConfig, Stored};
use crate::text::{ModelText, Segments, evaluation_segments};

#[derive(clap::Args)]
pub struct Args {
    /// The original, a model directory, dense or quantized
    a: PathBuf,
    /// The model to judge, made from it
    b: PathBuf,
    /// .txt (consecutive windows), or .jsonl with "text", "messages" or "input_ids" (row by row)
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens in a window
    #[arg(long, default_value_t = 512, value_name = "N")]
    seq_len: usize,
    /// Windows or rows to compare [default: all]
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// .jsonl of {"text"} passages whose last word is to be foretold
    #[arg(long, value_name = "FILE")]
    passages: Option<PathBuf>,
    /// Windows or rows whose beginnings are continued greedily by both, to see where they part; 0 for none
    #[arg(long, default_value_t = 16, value_name = "N")]
    prompts: usize,
    /// Tokens of such a beginning
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    prompt_tokens: u16,
    /// Tokens by which they are continued
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    tokens: u16,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let (a, b) = (open::model(&args.a).await?, open::model(&args.b).await?);
    let lengths = [args.prompt_tokens.into(), args.tokens.into()];
    if args.prompts > 0 {
        check_context([&a, &b], lengths)?;
    }
    let device = open::device(&args.device).await?;
    let text = model_text(&a).await?;
    let segments = same_segments(&text, &model_text(&b).await?, &args)?;
    let configs = [ModelConfig::of(&a.checkpoint)?, ModelConfig::of(&b.checkpoint)?];
    if let Some(shorter) = configs.iter().min_by_key(|config| config.max_position_embeddings) {
        warn_of_length(shorter, &segments);
    }
    let passages = match &args.passages {
        Some(path) => Some(passages_of(&text, path, args.seq_len)?),
        None => None,
    };
    let (stop, bar) = (stop_flag(), ProgressBar::new(0));
    let mut progress = async |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        !stop.load(Ordering::SeqCst)
    };
    let result = compare(&a, &b, &segments, &device, &mut progress).await;
    let words = match (&result, &passages) {
        (Ok(_), Some(passages)) => Some(last_words(&[&a, &b], passages, &device, &mut progress).await),
        _ => None,
    };
    let parting = match (&result, &words) {
        (Ok(_), None | Some(Ok(_))) if args.prompts > 0 => {
            Some(continuations([&a, &b], &segments, args.prompts, lengths, &device, &mut progress).await)
        }
        _ => None,
    };
    bar.finish_and_clear();
    let (result, words, parting) = (result?, words.transpose()?, parting.transpose()?);
    if args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({
            "a": args.a, "b": args.b, "comparison": result, "last_words": words, "continuations": parting,
            "device": device.describe(), "text": segments.report,
        }))
        .map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
    } else {
        show(&args, &result, words.as_deref(), parting.as_ref(), &device.describe());
    }
    Ok(())
}

async fn model_text(model: &Stored) -> Result<ModelText> {
    let config = ModelConfig::of(&model.checkpoint)?;
    ModelText::load(model.checkpoint.source().as_ref(), config.vocab_size).await
}

/// The text as both models read it, which must be the same.
fn same_segments(a: &ModelText, b: &ModelText, args: &Args) -> Result<Segments> {
    let file = open::texts(std::slice::from_ref(&args.text))?.remove(0);
    let segments = evaluation_segments(a, &file, args.seq_len, args.samples)?;
    if evaluation_segments(b, &file, args.seq_len, args.samples)?.rows != segments.rows {
        return Err(Error::text(
            args.text.display().to_string(),
            "the two models' tokenizers read it differently",
            "Compare a quantized model with the model that it was made from",
        ));
    }
    Ok(segments)
}

fn show(
    args: &Args,
    result: &Comparison,
    words: Option<&[LastWords]>,
    parting: Option<&Continuations>,
    device: &str,
) {
    let name = |path: &Path| path.display().to_string();
    say!(
        "a {}, b {}: {} predicted tokens ({} samples) on {device} in {:.1} s; intervals of 95 %\n",
        name(&args.a),
        name(&args.b),
        result.tokens,
        result.rows,
        result.seconds
    );
    let mut rows = Vec::new();
    let mut row = |what: &str, digits: usize, scale: f64, estimate: Estimate| {
        let estimate = estimate.map(|x| x * scale);
        let cell = format!("{:.digits$}", estimate.value);
        rows.push(vec![what.to_owned(), cell, show_interval(estimate.interval, digits)]);
    };
    row("perplexity of a", 4, 1.0, result.perplexity[0]);
    row("perplexity of b", 4, 1.0, result.perplexity[1]);
    row("ratio b / a", 4, 1.0, result.ratio);
    row("mean KL(a ‖ b), nats", 5, 1.0, result.kl);
    row("99 % of places below", 4, 1.0, Estimate { value: result.kl_99, interval: None });
    row("same top token, %", 2, 100.0, result.agreement);
    for (words, model) in words.unwrap_or_default().iter().zip(["a", "b"]) {
        row(&format!("last word by {model}, %"), 2, 100.0, words.accuracy);
    }
    if let Some(parting) = parting {
        row(&format!("same greedy tokens of {}", parting.tokens), 1, 1.0, parting.parting);
    }
    table::print(&["measure", "value", "interval"], &rows);
    if !result.blocks.is_empty() {
        say!("\nhidden state after each block: mean of ‖h_a − h_b‖ / ‖h_a‖");
        for line in bars(&result.blocks) {
            say!("{line}");
        }
    }
}

/// A bar for each block.
fn bars(errors: &[f64]) -> Vec<String> {
    let largest = errors.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let bar = |error: f64| "█".repeat((40.0 * error / largest).round() as usize);
    errors
        .iter()
        .enumerate()
        .map(|(block, &error)| format!("{block:>4}  {error:.4}  {}", bar(error)))
        .collect()
}
