//! `halftone eval`: perplexity on a text.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::open;
use super::options::DeviceArgs;
use super::progress::stop_flag;
use crate::checkpoint::PART;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::eval::{last_words, logits, perplexity};
use crate::model::{ModelConfig, Stored};
use crate::text::{ModelText, Passage, Segments, evaluation_segments, passages};

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
    /// .jsonl of {"text"} passages whose last word is to be foretold, scored too
    #[arg(long, value_name = "FILE")]
    passages: Option<PathBuf>,
    /// Write the text's logits too, as tensor "logits" [tokens, vocabulary] of a safetensors file, row after
    /// row in f32: for comparison with other programs, on short texts
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.model).await?;
    let config = ModelConfig::of(&stored.checkpoint)?;
    let device = open::device(&args.device).await?;
    let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
    let file = open::texts(std::slice::from_ref(&args.text))?.remove(0);
    let segments = evaluation_segments(&text, &file, args.seq_len, args.samples)?;
    warn_of_length(&config, &segments);
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
    let result = perplexity(&stored, &segments, &device, &mut progress).await;
    let words = match (&result, &passages) {
        (Ok(_), Some(passages)) => Some(last_words(&[&stored], passages, &device, &mut progress).await),
        _ => None,
    };
    let written = match (&result, &args.logits) {
        (Ok(_), Some(path)) => {
            let shape = [segments.report.tokens, config.vocab_size];
            Some(write_logits(path, shape, &stored, &segments, &device, &mut progress).await)
        }
        _ => None,
    };
    bar.finish_and_clear();
    let result = result?;
    written.transpose()?;
    let words = words.transpose()?.map(|mut words| words.remove(0));
    if args.json {
        let text = serde_json::to_string_pretty(&serde_json::json!({
            "perplexity": result.perplexity, "interval": result.interval, "mean_nll": result.mean_nll,
            "tokens": result.tokens, "seconds": result.seconds, "last_words": words,
            "device": device.describe(), "text": segments.report,
        }))
        .map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
        return Ok(());
    }
    say!(
        "perplexity {:.4}{} over {} predicted tokens ({} samples) on {} in {:.1} s",
        result.perplexity,
        after_space(show_interval(result.interval, 4)),
        result.tokens,
        segments.rows.len(),
        device.describe(),
        result.seconds
    );
    if let (Some(words), Some(passages)) = (words, &passages) {
        let accuracy = words.accuracy.map(|share| 100.0 * share);
        say!(
            "last word right in {:.2} %{} of {} passages, perplexity of the last word {:.4}",
            accuracy.value,
            after_space(show_interval(accuracy.interval, 2)),
            passages.len(),
            words.perplexity
        );
    }
    Ok(())
}

/// The logits of a text as a safetensors file: a header that says their number, then as they come.
async fn write_logits(
    path: &Path,
    shape: [usize; 2],
    stored: &Stored,
    segments: &Segments,
    device: &Device,
    progress: &mut impl AsyncFnMut(usize, usize) -> bool,
) -> Result<()> {
    let failed = |error: std::io::Error| Error::io("write", path.display(), error);
    let bytes = 4 * shape[0] as u64 * shape[1] as u64;
    let tensor = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [0, bytes]});
    let mut header = serde_json::json!({ "logits": tensor }).to_string();
    // Padded so that the numbers begin at a multiple of eight.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    // Under its own name only when it is whole.
    let mut part = path.as_os_str().to_owned();
    part.push(PART);
    let mut file = BufWriter::new(File::create(&part).map_err(failed)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    file.write_all(header.as_bytes()).map_err(failed)?;
    let mut write = |part: &[f32]| file.write_all(bytemuck::cast_slice(part)).map_err(failed);
    logits(stored, segments, device, progress, &mut write).await?;
    file.flush().map_err(failed)?;
    std::fs::rename(&part, path).map_err(failed)
}

/// Positions that a model never saw say little of it.
pub(super) fn warn_of_length(config: &ModelConfig, segments: &Segments) {
    let longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
    if longest > config.max_position_embeddings {
        eprintln!(
            "warning: the longest sample has {longest} tokens; the model was made for {}",
            config.max_position_embeddings
        );
    }
}

/// The passages of a file; how many rows are none goes to standard error.
pub(super) fn passages_of(text: &ModelText, path: &Path, seq_len: usize) -> Result<Vec<Passage>> {
    let file = open::texts(&[path.to_owned()])?.remove(0);
    let (found, skipped) = passages(text, &file, seq_len)?;
    if skipped > 0 {
        eprintln!("warning: {skipped} rows of {} are no passages: they have fewer than two words", file.name);
    }
    Ok(found)
}

/// The ends of an interval, nothing where there is none.
pub(super) fn show_interval(interval: Option<[f64; 2]>, digits: usize) -> String {
    interval.map_or(String::new(), |[low, high]| format!("{low:.digits$} to {high:.digits$}"))
}

fn after_space(interval: String) -> String {
    if interval.is_empty() { interval } else { format!(" (95 %: {interval})") }
}
