//! `halftone convert`: from one file format to another, without quantizing again.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::open;
use super::options::{FormatArg, parse_size};
use super::plan::check_room;
use super::progress::stop_flag;
use crate::checkpoint::writer::DEFAULT_SHARD_BYTES;
use crate::checkpoint::{Checkpoint, QuantConfig};
use crate::error::{Error, Result};
use crate::pipeline::convert;
use crate::pipeline::plan::human_bytes;
use crate::storage::native::{DirSink, DirSource};

#[derive(clap::Args)]
pub struct Args {
    /// A quantized model directory, GPTQ or compressed-tensors
    dir: PathBuf,
    /// Directory for the result; must be new or empty
    #[arg(long)]
    out: PathBuf,
    /// The format to write
    #[arg(long, value_enum)]
    format: FormatArg,
    /// Bytes of tensors in one file at most [default: 4GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    shard_size: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    open::check_finished(&args.dir)?;
    let checkpoint = Checkpoint::open(Rc::new(DirSource::open(&args.dir)?)).await?;
    let Some(quant) = QuantConfig::of(&checkpoint).await? else {
        return Err(Error::unsupported(
            format_args!("{} is not quantized", args.dir.display()),
            "Quantize it: halftone quantize --format takes every format",
        ));
    };
    if args.out.exists() && !DirSink::open(&args.out)?.files()?.is_empty() {
        return Err(Error::options(
            format_args!("{} exists and is not empty", args.out.display()),
            "Give a new directory",
        ));
    }
    let (stop, bar) = (stop_flag(), ProgressBar::new(0));
    let mut progress = |done: usize, all: usize| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        !stop.load(Ordering::SeqCst)
    };
    let format = args.format.format();
    let shard_bytes = args.shard_size.unwrap_or(DEFAULT_SHARD_BYTES);
    let outcome = async {
        let plan = convert::plan(&checkpoint, &quant, format, shard_bytes, &mut progress).await?;
        check_room(plan.layout(), &args.out)?;
        if !args.json {
            bar.suspend(|| plan.notes.iter().for_each(|note| eprintln!("note: {note}")));
        }
        plan.write(Rc::new(DirSink::create(&args.out)?), &mut progress).await?;
        Ok(plan)
    }
    .await;
    bar.finish_and_clear();
    let plan = outcome?;
    if args.json {
        let object = serde_json::json!({"from": quant.format, "to": format, "layers": plan.layers(),
            "output_bytes": plan.layout().tensor_bytes(), "notes": plan.notes});
        say!("{object:#}");
        return Ok(());
    }
    say!(
        "{}: {} layers from {} to {format}, {} of tensors",
        args.out.display(),
        plan.layers(),
        quant.format,
        human_bytes(plan.layout().tensor_bytes())
    );
    Ok(())
}
