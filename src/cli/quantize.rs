//! `halftone quantize`: the main job.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::allocation;
use super::options::JobArgs;
use super::plan::{Prepared, Request, check_room, prepare};
use super::progress::{Terminal, stop_flag};
use crate::checkpoint::{CONFIG, INDEX, PART, QUANTIZE_CONFIG, SINGLE, VERIFY};
use crate::error::{Error, Result};
use crate::pipeline::journal::{JOURNAL, Journal};
use crate::pipeline::plan::human_bytes;
use crate::pipeline::run::QUANT_LOG;
use crate::pipeline::{RunOptions, RunReport, run as run_pipeline};
use crate::storage::Sink;
use crate::storage::native::DirSink;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Directory for the result; must be new or empty
    #[arg(long)]
    out: PathBuf,
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
    let stopped = match args.resume {
        true => Journal::read(&DirSink::open(&args.out)?).await?,
        false => None,
    };
    let request = Request {
        job: &args.job,
        text_optional: false,
        stopped: stopped.as_ref().map(|journal| &journal.inputs),
    };
    let mut prepared = prepare(request).await?;
    check_room(&prepared.plan.layout, &args.out)?;
    // What is to be overwritten stays until something takes its place.
    if !(args.overwrite && args.out.exists()) {
        open_out(&args)?;
    }
    let _lock = lock(&args.out)?;
    // From here on Ctrl-C leaves something to go on from.
    let stop = stop_flag();
    let mut terminal = Terminal::new(stop, !args.json);
    if !args.json {
        let Prepared { stored, segments, device, plan, .. } = &prepared;
        let from = if segments.rows.is_empty() {
            String::new()
        } else {
            format!("calibration: {}\n", segments.report)
        };
        say!(
            "{}: {}, {} layers, {} on {}\n{from}",
            args.job.model.display(),
            plan.config.family.name,
            plan.config.layers,
            human_bytes(stored.checkpoint.total_bytes()),
            device.describe()
        );
    }
    // A stopped run has settled it; one that is another is refused before it matters.
    if prepared.is_to_measure() && stopped.is_none() {
        let settled = prepared.settle(&mut terminal).await;
        if settled.is_err() {
            terminal.close();
        }
        settled?;
        check_room(&prepared.plan.layout, &args.out)?;
    }
    let sink = open_out(&args)?;
    let Prepared { stored, segments, device, plan, .. } = prepared;
    if !args.json && plan.allocation.is_some() {
        terminal.aside(|| allocation::print(&plan));
        say!("");
    }
    let options =
        RunOptions { calibration: args.job.calibration.segments().to_string(), resume: args.resume };
    let outcome =
        run_pipeline(&stored, &plan, &segments, &device, sink.clone(), &options, &mut terminal).await;
    terminal.close();
    let report = match outcome {
        Err(error) => return Err(with_what_is_kept(error, sink.as_ref()).await),
        Ok(report) => report,
    };
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
    } else {
        summarize(&report, &args.out);
    }
    Ok(())
}

fn summarize(report: &RunReport, out: &Path) {
    say!("");
    let steps: Vec<String> =
        report.seconds_by_step.iter().map(|(step, seconds)| format!("{step} {seconds:.1} s")).collect();
    say!("{} layers in {:.1} s ({})", report.modules.len(), report.seconds, steps.join(", "));
    if let Some(ratio) = report.loss_ratio() {
        say!("loss: {:.1} % of what rounding to nearest would lose", 100.0 * ratio);
    }
    let scaled = report.modules.iter().filter(|row| row.scaling.is_some()).count();
    if scaled > 0 {
        say!(
            "inputs of {scaled} of {} layers scaled, which norms and layers before them took in",
            report.modules.len()
        );
    }
    say!(
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
    if same(&args.job.model, &args.out) {
        return Err(Error::options("--out is the model's own directory", "Give another directory"));
    }
    // One that was stopped before its first block, while bits were measured, has left nothing and begins again.
    let is_empty = || std::fs::read_dir(&args.out).is_ok_and(|mut entries| entries.next().is_none());
    if args.resume && !args.out.join(JOURNAL).exists() && !is_empty() {
        let (what, advice) = match args.out.join(CONFIG).exists() {
            true => ("a finished result", "There is nothing left to do; --overwrite makes it anew"),
            false if args.out.exists() => {
                ("no stopped run", "Start one with --overwrite in place of --resume")
            }
            false => ("no stopped run", "Leave out --resume to start one"),
        };
        return Err(Error::resume(format!("{} holds {what}", args.out.display()), advice));
    }
    if args.overwrite || args.resume || !args.out.exists() {
        return Ok(());
    }
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

/// Keeps a second run out of the directory, where the system can lock one.
fn lock(out: &Path) -> Result<Option<File>> {
    let Ok(directory) = File::open(out) else { return Ok(None) };
    match directory.try_lock() {
        Err(TryLockError::WouldBlock) => Err(Error::options(
            format!("another run is writing to {}", out.display()),
            "Wait for it, or give another directory",
        )),
        _ => Ok(Some(directory)),
    }
}

fn open_out(args: &Args) -> Result<Rc<dyn Sink>> {
    if args.overwrite && args.out.exists() {
        // Only what a run writes goes away; the config first, so that no half-removed directory
        // looks finished.
        let sink = DirSink::open(&args.out)?;
        let mut stale: Vec<String> = sink.files()?;
        stale.retain(|name| is_written_by_a_run(name));
        stale.sort_by_key(|name| name != CONFIG);
        for name in stale {
            let path = args.out.join(&name);
            std::fs::remove_file(&path).map_err(|error| Error::io("remove", path.display(), error))?;
        }
        return Ok(Rc::new(sink));
    }
    let sink = if args.resume { DirSink::open(&args.out) } else { DirSink::create(&args.out) };
    Ok(Rc::new(sink?))
}

/// Config, logs, and weights under the names that a checkpoint has, finished or not. Other weights
/// files are somebody else's.
fn is_written_by_a_run(name: &str) -> bool {
    let name = name.strip_suffix(PART).unwrap_or(name);
    let shard = |rest: &str| {
        rest.strip_suffix(".safetensors").and_then(|rest| rest.split_once("-of-")).is_some_and(|(a, b)| {
            [a, b].iter().all(|n| n.len() == 5 && n.bytes().all(|c| c.is_ascii_digit()))
        })
    };
    [CONFIG, QUANTIZE_CONFIG, QUANT_LOG, JOURNAL, INDEX, SINGLE].contains(&name)
        || name.strip_prefix("model-").is_some_and(shard)
}

/// A disk that filled up is no reason to lose the finished blocks; one that changed them is.
async fn with_what_is_kept(error: Error, sink: &dyn Sink) -> Error {
    let Error::Io { action, path, reason } = error else { return error };
    if action == VERIFY {
        return Error::Io { action, path, reason };
    }
    let done = Journal::read(sink).await.ok().flatten().map_or(0, |journal| journal.blocks_done);
    let reason = match done {
        0 => reason,
        done => {
            format!("{reason}; {done} of the blocks are finished, repeat the command with --resume to go on")
        }
    };
    Error::Io { action, path, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_takes_only_what_a_run_writes() {
        for name in [
            "config.json",
            "config.json.part",
            "model.safetensors",
            "model.safetensors.part",
            "model.safetensors.index.json",
            "model-00001-of-00012.safetensors",
            "model-00001-of-00012.safetensors.part",
            "quant_log.csv",
        ] {
            assert!(is_written_by_a_run(name), "{name}");
        }
        for name in ["adapter_model.safetensors", "model-q4.gguf", "model-a-of-b.safetensors", "notes.txt"] {
            assert!(!is_written_by_a_run(name), "{name}");
        }
    }
}
