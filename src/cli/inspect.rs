//! `halftone inspect`: what a model directory holds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{open, table};
use crate::checkpoint::GptqLinear;
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::arch::stages;
use crate::pipeline::plan::human_bytes;

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    dir: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.dir).await?;
    let checkpoint = &stored.checkpoint;
    let config = ModelConfig::parse(checkpoint.config())?;
    let mut dtypes: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let entry = dtypes.entry(tensor.dtype.name()).or_default();
        entry.0 += 1;
        entry.1 += tensor.bytes();
    }
    let mut modules = Vec::new();
    let mut parameters: u64 = 0;
    for layer in 0..config.layers {
        for spec in stages(&config, layer).into_iter().flat_map(|stage| stage.linears) {
            parameters += (spec.in_features * spec.out_features) as u64;
            let scheme = match &stored.quant {
                Some(quant) if GptqLinear::is_in(checkpoint, &spec.module) => {
                    quant.scheme_of(&spec.module)?
                }
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
            "model_type": config.family.name(), "layers": config.layers, "hidden_size": config.hidden_size,
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
        config.family.name(),
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
