//! `halftone quantize`: the main job.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::open;
use super::options::{CalibrationArgs, DeviceArgs, MemoryArgs, SchemeArgs};
use super::plan::{Prepared, check_disk, prepare};
use super::progress::{Terminal, stop_flag};
use crate::checkpoint::{CONFIG, QUANTIZE_CONFIG, is_weights_file};
use crate::error::{Error, Result};
use crate::pipeline::journal::JOURNAL;
use crate::pipeline::plan::human_bytes;
use crate::pipeline::run::QUANT_LOG;
use crate::pipeline::{RunOptions, RunReport, run as run_pipeline};
use crate::storage::Sink;
use crate::storage::native::{DirSink, DirSource};

#[derive(clap::Args)]
pub struct Args {
    /// Directory with config.json, tokenizer.json and safetensors in f32, f16 or bf16
    model: PathBuf,
    /// Directory for the result; must be new or empty
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    scheme: SchemeArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Go on with a stopped run in --out
    #[arg(long)]
    resume: bool,
    /// Replace an earlier result in --out
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    check_out(&args)?;
    let Prepared { stored, segments, device, plan } =
        prepare(&args.model, &args.scheme, &args.calibration, &args.device, &args.memory, false).await?;
    check_disk(&plan, &args.out)?;
    let (sink, resume_from) = open_out(&args)?;
    if !args.json {
        let from = if segments.rows.is_empty() {
            String::new()
        } else {
            format!("calibration: {}\n", segments.report)
        };
        println!(
            "{}: {}, {} layers, {} on {}\n{from}",
            args.model.display(),
            plan.config.family.name(),
            plan.config.layers,
            human_bytes(stored.checkpoint.total_bytes()),
            device.describe()
        );
    }
    let options = RunOptions { calibration: open::calibration_name(&args.calibration), resume_from };
    let mut terminal = Terminal::new(stop_flag(), !args.json);
    let outcome = run_pipeline(&stored, &plan, &segments, &device, sink, &options, &mut terminal).await;
    terminal.close();
    let report = outcome?;
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|error| Error::Internal(error.to_string()))?;
        println!("{text}");
    } else {
        summarize(&report, &args.out);
    }
    Ok(())
}

fn summarize(report: &RunReport, out: &Path) {
    println!();
    let steps: Vec<String> =
        report.seconds_by_step.iter().map(|(step, seconds)| format!("{step} {seconds:.1} s")).collect();
    println!("{} layers in {:.1} s ({})", report.modules.len(), report.seconds, steps.join(", "));
    if let Some(ratio) = report.loss_ratio() {
        println!("loss: {:.1} % of what rounding to nearest would lose", 100.0 * ratio);
    }
    println!(
        "{}: {} of tensors, {:.2} bits per weight in quantized layers; {QUANT_LOG} has the table",
        out.display(),
        human_bytes(report.output_bytes),
        report.bits_per_weight
    );
}

/// What can be refused before the model is even opened.
fn check_out(args: &Args) -> Result<()> {
    let same = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    if same(&args.model, &args.out) {
        return Err(Error::options("--out is the model's own directory", "Give another directory"));
    }
    if args.overwrite || args.resume || !args.out.exists() {
        return Ok(());
    }
    // The same refusal as at the end of all checks, but before minutes of tokenizing.
    let entries =
        std::fs::read_dir(&args.out).map_err(|error| Error::io("list", args.out.display(), error))?;
    match entries.count() {
        0 => Ok(()),
        _ if args.out.join(JOURNAL).exists() => Err(Error::options(
            format!("{} holds a stopped run", args.out.display()),
            "Go on with it by --resume, or start anew with --overwrite",
        )),
        _ => Err(Error::options(
            format!("{} exists and is not empty", args.out.display()),
            "Give a new directory, or replace the result in it with --overwrite",
        )),
    }
}

type Opened = (Rc<dyn Sink>, Option<Rc<dyn crate::storage::Source>>);

fn open_out(args: &Args) -> Result<Opened> {
    if args.resume {
        if !args.out.join(JOURNAL).exists() {
            return Err(Error::resume(
                format!("{} holds no stopped run", args.out.display()),
                "Leave out --resume to start one",
            ));
        }
        let sink = DirSink::open(&args.out)?;
        return Ok((Rc::new(sink), Some(Rc::new(DirSource::open(&args.out)?))));
    }
    if args.overwrite && args.out.exists() {
        // Only what a run writes goes away; the config first, so that no half-removed directory
        // looks finished.
        let sink = DirSink::open(&args.out)?;
        let mut stale: Vec<String> = sink.files()?;
        stale.retain(|name| {
            is_weights_file(name) || [CONFIG, QUANTIZE_CONFIG, QUANT_LOG, JOURNAL].contains(&name.as_str())
        });
        stale.sort_by_key(|name| name != CONFIG);
        for name in stale {
            let path = args.out.join(&name);
            std::fs::remove_file(&path).map_err(|error| Error::io("remove", path.display(), error))?;
        }
        return Ok((Rc::new(sink), None));
    }
    Ok((Rc::new(DirSink::create(&args.out)?), None))
}
