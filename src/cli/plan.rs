//! `halftone plan`: everything about a run but the run.

use std::path::{Path, PathBuf};

use super::options::JobArgs;
use super::progress::{Terminal, stop_flag};
use super::{allocation, open, table};
use crate::checkpoint::Layout;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::model::{ModelConfig, Stored};
use crate::pipeline::journal::Inputs;
use crate::pipeline::plan::human_bytes;
use crate::pipeline::sensitivity::settle;
use crate::pipeline::{ModulePlan, Observer, Plan, PlanOptions, estimate, make_plan};
use crate::text::{DEFAULT_SAMPLES, Segments};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Where the result would go; only its disk is looked at
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A plan with what it was made from.
pub struct Prepared {
    pub stored: Stored,
    pub segments: Segments,
    pub device: Device,
    options: PlanOptions,
    pub plan: Plan,
}

impl Prepared {
    /// Whether the plan's bits are an average of which nothing is settled yet.
    pub fn is_to_measure(&self) -> bool {
        self.options.output.mixed.as_ref().is_some_and(|mixed| mixed.allocation.is_none())
    }

    /// Measures which layers should have how many bits, and makes the plan anew.
    ///
    /// # Errors
    /// As [`settle`].
    pub async fn settle(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Self { stored, segments, device, options, plan } = self;
        *plan = settle(stored, options, plan, segments, device, observer).await?;
        Ok(())
    }
}

/// What a plan is made from.
pub struct Request<'a> {
    pub job: &'a JobArgs,
    /// Without calibration text, assume as many tokens as asked for.
    pub text_optional: bool,
    /// Those of a stopped run, which keeps its micro-batches and the bits that it settled.
    pub stopped: Option<&'a Inputs>,
}

/// Opens everything and makes the plan.
pub async fn prepare(request: Request<'_>) -> Result<Prepared> {
    let JobArgs { model, scheme, output, calibration, device, memory } = request.job;
    let (scheme, shard_bytes, mut output) = (scheme.scheme()?, output.shard_bytes(), output.output(scheme)?);
    if let (Some(mixed), Some(stopped)) = (&mut output.mixed, request.stopped) {
        mixed.allocation = stopped.output.mixed.as_ref().and_then(|mixed| mixed.allocation.clone());
    }
    let stored = open::model(model).await?;
    // The model's own problems come before the calibration text's.
    let config = ModelConfig::of(&stored.checkpoint)?;
    let device = open::device(device).await?;
    let mut options = PlanOptions {
        scheme,
        output,
        tokens: 0,
        longest: 0,
        max_memory: open::memory(memory),
        batch_tokens: request.stopped.map(|stopped| stopped.batch_tokens),
        shard_bytes,
    };
    let segments = if !options.scheme.needs_inputs() {
        Segments::none()
    } else if request.text_optional && calibration.files.is_empty() {
        options.tokens = calibration.samples.unwrap_or(DEFAULT_SAMPLES).saturating_mul(calibration.seq_len);
        options.longest = calibration.seq_len;
        Segments::none()
    } else {
        // What is wrong with the model or the scheme is told before minutes of tokenizing; what memory it takes is known
        // behind it.
        make_plan(&stored, &PlanOptions { max_memory: u64::MAX, ..options.clone() }, &device)?;
        let segments = open::calibration(&stored, calibration).await?;
        options.tokens = segments.report.tokens;
        options.longest = segments.rows.iter().map(Vec::len).max().unwrap_or(0);
        segments
    };
    let mut plan = make_plan(&stored, &options, &device)?;
    let widest = config.intermediate_size.max(config.hidden_size);
    if options.scheme.needs_inputs() && !segments.rows.is_empty() {
        plan.warnings.extend(segments.warn_tokens(widest));
    }
    Ok(Prepared { stored, segments, device, options, plan })
}

/// Refuses a disk that cannot hold the result.
pub fn check_room(layout: &Layout, out: &Path) -> Result<()> {
    // What a stopped or an earlier run has left there is written over.
    let there = |name: &str| std::fs::metadata(out.join(name)).map_or(0, |file| file.len());
    let shards = layout.shards().iter();
    let left: u64 = shards.map(|shard| there(&shard.name).max(there(&shard.part())).min(shard.size)).sum();
    let needed = layout.file_bytes() - left + (16 << 20);
    match open::free_space(out) {
        Some(free) if free < needed => Err(Error::io(
            "write",
            out.display(),
            format!(
                "the result takes another {}, the disk has {} free; free some space",
                human_bytes(needed),
                human_bytes(free)
            ),
        )),
        _ => Ok(()),
    }
}

pub async fn run(args: Args) -> Result<()> {
    let request = Request { job: &args.job, text_optional: true, stopped: None };
    let mut prepared = prepare(request).await?;
    if prepared.is_to_measure() && !prepared.segments.rows.is_empty() {
        let mut terminal = Terminal::new(stop_flag(), false);
        let settled = prepared.settle(&mut terminal).await;
        terminal.close();
        settled?;
    }
    let Prepared { stored, segments, device, plan, .. } = prepared;
    if let Some(out) = &args.out {
        check_room(&plan.layout, out)?;
    }
    let seconds = estimate::seconds(&plan, estimate::speed(&device).await?);
    if args.json {
        let mut modules = serde_json::json!(plan.modules);
        for (object, module) in modules.as_array_mut().into_iter().flatten().zip(&plan.modules) {
            if is_open(&plan, module) {
                object["bits"] = serde_json::Value::Null;
            }
        }
        let object = serde_json::json!({
            "model_type": plan.config.family.name,
            "device": device.describe(),
            "format": plan.output.format,
            "modules": modules,
            "skipped": plan.skipped,
            "memory": plan.memory,
            "memory_total": plan.memory.total(),
            "micro_batch_tokens": plan.batch_tokens,
            "tokens": plan.tokens,
            "output_bytes": plan.layout.file_bytes(),
            "bits_per_weight": plan.bits_per_weight(),
            "average_bits": plan.output.mixed.as_ref().map(|mixed| mixed.average),
            "allocation": plan.output.mixed.as_ref().and_then(|mixed| mixed.allocation.as_ref()),
            "estimated_seconds": seconds,
            "calibration": (!segments.rows.is_empty()).then_some(&segments.report),
            "warnings": plan.warnings,
        });
        say!("{object:#}");
        return Ok(());
    }
    print_plan(&stored, &segments, &device, &plan);
    say!("time: about {} on {}", human_seconds(seconds), device.describe());
    Ok(())
}

/// Whether a layer's bits are only assumed so far, and so not shown.
fn is_open(plan: &Plan, module: &ModulePlan) -> bool {
    plan.output.mixed.as_ref().is_some_and(|mixed| mixed.allocation.is_none())
        && plan.units.iter().any(|unit| unit.modules.contains(&module.module))
}

/// The table and the sums.
pub fn print_plan(stored: &Stored, segments: &Segments, device: &Device, plan: &Plan) {
    let bits = |module: &ModulePlan| match &plan.output.mixed {
        Some(mixed) if is_open(plan, module) => format!("~{}", mixed.average),
        _ => module.bits.to_string(),
    };
    let rows: Vec<Vec<String>> = plan
        .modules
        .iter()
        .map(|module| {
            vec![
                module.layer.to_string(),
                module.stage.to_owned(),
                module.module.clone(),
                module.input.to_string(),
                module.output.to_string(),
                bits(module),
                module.group.to_string(),
                human_bytes(module.dense_bytes),
                human_bytes(module.quantized_bytes),
            ]
        })
        .collect();
    table::print(&["layer", "stage", "module", "in", "out", "bits", "group", "before", "after"], &rows);
    say!("");
    if !plan.skipped.is_empty() {
        say!("left in 16 bits: {}", plan.skipped.join(", "));
    }
    let memory = &plan.memory;
    say!(
        "model: {}, {} layers, {} in {} tensors",
        plan.config.family.name,
        plan.config.layers,
        human_bytes(stored.checkpoint.total_bytes()),
        stored.checkpoint.tensors().len()
    );
    if !segments.rows.is_empty() {
        say!("calibration: {}", segments.report);
    } else if plan.tokens > 0 {
        say!("calibration: {} tokens assumed; with --calibration FILE they are counted", plan.tokens);
    }
    say!(
        "output: {} as {}, {:.2} bits per weight in quantized layers",
        human_bytes(plan.layout.file_bytes()),
        plan.output.format,
        plan.bits_per_weight()
    );
    allocation::print(plan);
    say!(
        "memory on {}: about {} (text {}, between stages {}, weights {}, Hessian and factor {}, original model {}, working {})",
        device.describe(),
        human_bytes(memory.total()),
        human_bytes(memory.stream),
        human_bytes(memory.between_stages),
        human_bytes(memory.weights),
        human_bytes(memory.hessian),
        human_bytes(memory.original),
        human_bytes(memory.working)
    );
    for warning in &plan.warnings {
        eprintln!("warning: {warning}");
    }
}

pub fn human_seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "a second".to_owned(),
        s if s < 100.0 => format!("{s:.0} seconds"),
        s if s < 6000.0 => format!("{:.0} minutes", s / 60.0),
        s => format!("{:.1} hours", s / 3600.0),
    }
}
