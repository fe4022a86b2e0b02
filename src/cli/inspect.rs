//! `halftone inspect`: what a model directory holds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use super::{open, table};
use crate::checkpoint::GptqLinear;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::arch::{LM_HEAD_MODULE, head_stage, stages};
use crate::pipeline::check::{Severity, check as check_directory};
use crate::pipeline::plan::human_bytes;
use crate::storage::native::DirSource;

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    dir: PathBuf,
    /// Look for what a loader would trip over: contradictions between config and tensors, what fast
    /// kernels refuse, what cannot be cut over several devices. Exit code 3 if there are errors
    #[arg(long)]
    check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    if args.check {
        return check(&args).await;
    }
    let stored = open::model(&args.dir).await?;
    let checkpoint = &stored.checkpoint;
    let config = ModelConfig::of(checkpoint)?;
    let mut dtypes: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let entry = dtypes.entry(tensor.dtype.name()).or_default();
        entry.0 += 1;
        entry.1 += tensor.bytes();
    }
    let mut modules = Vec::new();
    let mut parameters: u64 = 0;
    let head = (!config.tie_word_embeddings).then(|| head_stage(&config));
    let all = (0..config.layers).flat_map(|layer| stages(&config, layer)).chain(head);
    for spec in all.flat_map(|stage| stage.linears) {
        if spec.module != LM_HEAD_MODULE {
            parameters += (spec.in_features * spec.out_features) as u64;
        }
        let scheme = match &stored.quant {
            Some(quant) if GptqLinear::is_in(checkpoint, &spec.module) => quant.scheme_of(&spec.module)?,
            _ => None,
        };
        let format = match scheme {
            Some(scheme) => format!(
                "{} bits, group {}, {}{}",
                scheme.bits,
                scheme.group_size,
                if scheme.sym { "sym" } else { "asym" },
                if scheme.desc_act { ", desc_act" } else { "" }
            ),
            None => checkpoint
                .info(&format!("{}.weight", spec.module))
                .map_or("missing".to_owned(), |info| info.dtype.name().to_owned()),
        };
        let prefix = format!("{}.", spec.module);
        let of = |name: &str| name.starts_with(&prefix);
        let bytes: u64 = checkpoint.tensors().iter().filter(|t| of(&t.name)).map(|t| t.bytes()).sum();
        modules.push((spec, format, bytes));
    }
    let tables = if config.tie_word_embeddings { 1 } else { 2 };
    parameters += (tables * config.vocab_size * config.hidden_size) as u64;
    let quantization = stored.quant.as_ref().map(|quant| quant.to_json());
    if args.json {
        let modules: Vec<_> = modules
            .iter()
            .map(|(spec, format, bytes)| {
                serde_json::json!({"module": spec.module, "in": spec.in_features, "out": spec.out_features,
                    "format": format, "bytes": bytes})
            })
            .collect();
        let dtypes: BTreeMap<_, _> = dtypes
            .iter()
            .map(|(name, (count, bytes))| (name, serde_json::json!({"tensors": count, "bytes": bytes})))
            .collect();
        let object = serde_json::json!({
            "model_type": config.family.name, "layers": config.layers, "hidden_size": config.hidden_size,
            "heads": config.heads, "kv_heads": config.kv_heads, "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
            "parameters": parameters, "bytes": checkpoint.total_bytes(), "dtypes": dtypes,
            "quantization_config": quantization, "modules": modules,
        });
        say!("{object:#}");
        return Ok(());
    }
    say!(
        "{}: {}, {:.1} M parameters, {} layers, hidden {}, heads {} ({} kv) of {}, intermediate {}, vocabulary {}{}",
        args.dir.display(),
        config.family.name,
        parameters as f64 / 1e6,
        config.layers,
        config.hidden_size,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        if config.tie_word_embeddings { ", tied head" } else { "" }
    );
    let parts: Vec<String> = dtypes
        .iter()
        .map(|(name, (count, bytes))| format!("{count} tensors of {name} ({})", human_bytes(*bytes)))
        .collect();
    say!("tensors: {}, {} in all", parts.join(", "), human_bytes(checkpoint.total_bytes()));
    match quantization {
        Some(quantization) => say!("quantization: {quantization}"),
        None => say!("quantization: none"),
    }
    say!("");
    let rows: Vec<Vec<String>> = modules
        .into_iter()
        .map(|(spec, format, bytes)| {
            vec![
                spec.module,
                spec.in_features.to_string(),
                spec.out_features.to_string(),
                format,
                human_bytes(bytes),
            ]
        })
        .collect();
    table::print(&["module", "in", "out", "format", "bytes"], &rows);
    Ok(())
}

/// Places of a finding that are shown.
const PLACES: usize = 3;

async fn check(args: &Args) -> Result<()> {
    let found = check_directory(Rc::new(DirSource::open(&args.dir)?)).await?;
    let errors = found.count(Severity::Error);
    if args.json {
        let text =
            serde_json::to_string_pretty(&found).map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
    } else {
        for finding in &found.findings {
            let kind = match finding.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
                Severity::Note => "note",
            };
            let shown = finding.places.iter().take(PLACES).cloned().collect::<Vec<_>>().join(", ");
            let more = match finding.places.len().saturating_sub(PLACES) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            say!("{kind}: {shown}{more}: {}. {}", finding.problem, finding.advice);
        }
        let format = found.format.map_or_else(String::new, |format| format!(" as {format}"));
        say!(
            "{}: {} quantized layers{format}; {errors} errors, {} warnings, {} notes",
            args.dir.display(),
            found.modules,
            found.count(Severity::Warning),
            found.count(Severity::Note)
        );
    }
    match errors {
        0 => Ok(()),
        _ => Err(Error::model(
            args.dir.display(),
            "a loader would trip over it",
            "Standard output has the errors",
        )),
    }
}
