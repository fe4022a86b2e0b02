//! `halftone eval`: perplexity on a text.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::open;
use super::options::DeviceArgs;
use super::progress::stop_flag;
use crate::error::{Error, Result};
use crate::eval::perplexity;
use crate::model::ModelConfig;
use crate::text::{ModelText, evaluation_segments};

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    model: PathBuf,
    /// .txt (consecutive windows), or .jsonl with "text", "messages" or "input_ids" (row by row)
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens in a window
    #[arg(long, default_value_t = 512, value_name = "N")]
    seq_len: usize,
    /// Windows or rows to score [default: all]
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.model).await?;
    let config = ModelConfig::parse(stored.checkpoint.config())?;
    let device = open::device(&args.device).await?;
    let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
    let file = open::texts(std::slice::from_ref(&args.text))?.remove(0);
    let segments = evaluation_segments(&text, &file, args.seq_len, args.samples)?;
    let (stop, bar) = (stop_flag(), ProgressBar::new(config.layers as u64));
    let result = perplexity(&stored, &segments, &device, async |done, _| {
        bar.set_position(done as u64);
        !stop.load(Ordering::SeqCst)
    })
    .await;
    bar.finish_and_clear();
    let result = result?;
    if args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({
            "perplexity": result.perplexity, "mean_nll": result.mean_nll, "tokens": result.tokens,
            "seconds": result.seconds, "device": device.describe(), "text": segments.report,
        }))
        .map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
    } else {
        say!(
            "perplexity {:.4} over {} predicted tokens ({} samples) on {} in {:.1} s",
            result.perplexity,
            result.tokens,
            segments.rows.len(),
            device.describe(),
            result.seconds
        );
    }
    Ok(())
}
