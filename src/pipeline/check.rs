//! What a loader would trip over in a quantized checkpoint.
//!
//! Nothing is believed here: config, headers, group indices, zero points and scales are compared with
//! each other; only the codes themselves, of which every word is valid, are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::Serialize;
use serde_json::Value;

use super::convert::{is_matrix, is_table, known_parts, module_of, quantized_modules};
use super::journal::JOURNAL;
use crate::checkpoint::config::{QuantConfig, Scheme};
use crate::checkpoint::linear::{LayerParts, natural_g_idx, parts_of};
use crate::checkpoint::{
    CONFIG, Checkpoint, DType, Format, GptqLinear, PART, QUANTIZE_CONFIG, StoredLayer, TensorSpec,
    ZeroFormat, is_weights_file,
};
use crate::error::{Error, Result};
use crate::model::arch::{LM_HEAD, LM_HEAD_MODULE, expected_tensors};
use crate::model::{ModelConfig, apart};
use crate::storage::Source;

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Loaders refuse it, or load it wrongly.
    Error,
    /// Some loaders refuse it, or it is not what it seems.
    Warning,
    /// It works, but not everywhere or not at full speed.
    Note,
}

/// Something found, and where.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub problem: String,
    pub advice: String,
    /// Modules, tensors or files.
    pub places: Vec<String>,
}

/// All that was found.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Findings {
    pub format: Option<Format>,
    /// Quantized linear layers.
    pub modules: usize,
    /// The worst first.
    pub findings: Vec<Finding>,
}

impl Findings {
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// The same problem in many places is one finding.
    fn add(&mut self, severity: Severity, place: &str, problem: impl Into<String>, advice: &str) {
        let problem = problem.into();
        let same = |finding: &&mut Finding| finding.severity == severity && finding.problem == problem;
        match self.findings.iter_mut().find(same) {
            Some(finding) => finding.places.push(place.to_owned()),
            None => self.findings.push(Finding {
                severity,
                problem,
                advice: advice.to_owned(),
                places: vec![place.to_owned()],
            }),
        }
    }

    fn error(&mut self, place: &str, problem: impl Into<String>, advice: &str) {
        self.add(Severity::Error, place, problem, advice);
    }

    fn warning(&mut self, place: &str, problem: impl Into<String>, advice: &str) {
        self.add(Severity::Warning, place, problem, advice);
    }

    fn note(&mut self, place: &str, problem: impl Into<String>, advice: &str) {
        self.add(Severity::Note, place, problem, advice);
    }
}

const QUANTIZE_AGAIN: &str = "Quantize the 16-bit model again";
const FETCH: &str = "Fetch the model again";

/// Looks through a model directory.
///
/// # Errors
/// [`Error::Io`](crate::error::Error::Io) when something cannot be read; whatever is wrong with what
/// can be is a finding.
pub async fn check(source: Rc<dyn Source>) -> Result<Findings> {
    let mut found = Findings::default();
    files(&*source, &mut found);
    let checkpoint = match Checkpoint::open(source).await {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            match error {
                Error::Model { place, problem, advice } => found.error(&place, problem, &advice),
                error => found.error(CONFIG, error.to_string(), FETCH),
            }
            return Ok(found);
        }
    };
    if checkpoint.metadata_format() != Some("pt") {
        found.warning(
            "safetensors metadata",
            "it does not say {\"format\": \"pt\"}, without which Transformers refuses the file",
            "Write the files again with that metadata",
        );
    }
    let quant = config(&checkpoint, &mut found).await?;
    if let Some(quant) = &quant {
        found.format = Some(quant.format);
        modules(&checkpoint, quant, &mut found).await?;
    }
    model(&checkpoint, &mut found);
    found.findings.sort_by_key(|finding| finding.severity);
    Ok(found)
}

/// What goes with the weights.
fn files(source: &dyn Source, found: &mut Findings) {
    let there = |name: &str| source.size(name).is_some();
    if there(JOURNAL) {
        found.error(
            JOURNAL,
            "the run that makes this directory is not finished",
            "Go on with it by --resume",
        );
    }
    for file in source.files().iter().filter(|file| file.name.ends_with(PART)) {
        found.warning(&file.name, "a file that was being written is left over", "Remove it");
    }
    let tokenizer = there("tokenizer.json")
        || there("tokenizer.model")
        || (there("vocab.json") && there("merges.txt"))
        || there("tiktoken.model");
    if !tokenizer {
        found.warning(
            "tokenizer.json",
            "there is no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)",
            "Copy the tokenizer's files from the 16-bit model",
        );
    } else if !there("tokenizer_config.json") {
        found.warning(
            "tokenizer_config.json",
            "there is no tokenizer_config.json, without which loaders guess the tokenizer's class",
            "Copy it from the 16-bit model",
        );
    }
    let other = source.files().iter().filter(|file| is_weights_file(&file.name));
    for file in other.filter(|file| !file.name.contains(".safetensors")) {
        found.warning(
            &file.name,
            "weights in another format lie beside the safetensors files",
            "Remove them",
        );
    }
}

/// The quantization config, as far as it can be understood.
async fn config(checkpoint: &Checkpoint, found: &mut Findings) -> Result<Option<QuantConfig>> {
    let packed = checkpoint
        .names()
        .find(|name| Format::ALL.iter().any(|format| name.ends_with(&format!(".{}", format.codes_part()))));
    let object = match QuantConfig::object_of(checkpoint).await {
        Ok(object) => object,
        Err(error) => {
            found.error(CONFIG, error.to_string(), FETCH);
            return Ok(None);
        }
    };
    let Some((place, object)) = object else {
        match packed {
            Some(name) => found.error(
                CONFIG,
                format!("tensor {name} is quantized, but there is no \"quantization_config\""),
                "Fetch config.json again",
            ),
            None => found.note(CONFIG, "the model is not quantized", "Nothing else was looked at"),
        }
        return Ok(None);
    };
    let quant = match QuantConfig::parse(&place, &object) {
        Ok(quant) => quant,
        Err(error) => {
            found.error(CONFIG, error.to_string(), "Correct the config, or fetch it again");
            return Ok(None);
        }
    };
    match quant.format {
        Format::CompressedTensors => compressed_keys(&object, found),
        _ => gptq_keys(checkpoint, &object, found).await?,
    }
    Ok(Some(quant))
}

async fn gptq_keys(checkpoint: &Checkpoint, object: &Value, found: &mut Findings) -> Result<()> {
    for key in ["quant_method", "bits", "group_size", "desc_act", "sym"] {
        if object.get(key).is_none_or(Value::is_null) {
            found.error(
                CONFIG,
                format!("{key:?} is missing, which loaders need"),
                "Add it to the quantization_config",
            );
        }
    }
    if object.get("checkpoint_format").is_none() {
        found.note(CONFIG, "\"checkpoint_format\" is missing; loaders take it for gptq", "Add it");
    }
    let Some(size) = checkpoint.source().size(QUANTIZE_CONFIG) else {
        found.note(
            QUANTIZE_CONFIG,
            "early loaders read this file, which is not there",
            "Copy the object into it",
        );
        return Ok(());
    };
    let bytes = checkpoint.source().read(QUANTIZE_CONFIG, 0..size).await?;
    let Ok(other) = serde_json::from_slice::<Value>(&bytes) else {
        found.error(QUANTIZE_CONFIG, "it is not valid JSON", "Copy the object of config.json into it");
        return Ok(());
    };
    for key in ["bits", "group_size", "desc_act", "sym", "checkpoint_format", "dynamic", "lm_head"] {
        if let (Some(here), Some(there)) = (object.get(key), other.get(key))
            && here != there
        {
            found.error(
                QUANTIZE_CONFIG,
                format!("{key:?} is {there}, but {here} in config.json"),
                "Copy the object of config.json into it",
            );
        }
    }
    Ok(())
}

/// Keys that some version of the library knows; it refuses all others.
fn compressed_keys(object: &Value, found: &mut Findings) {
    const GROUP: [&str; 5] = ["targets", "weights", "input_activations", "output_activations", "format"];
    const WEIGHTS: [&str; 10] = [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "observer",
        "observer_kwargs",
    ];
    const NEWER: [&str; 2] = ["scale_dtype", "zp_dtype"];
    let groups = object.get("config_groups").and_then(Value::as_object);
    for (name, group) in groups.into_iter().flatten() {
        let keys = |value: Option<&Value>| -> Vec<String> {
            value
                .and_then(Value::as_object)
                .map(|object| object.keys().cloned().collect())
                .unwrap_or_default()
        };
        for key in keys(Some(group)) {
            if !GROUP.contains(&key.as_str()) {
                found.error(
                    name,
                    format!("the key {key:?} of a config group is refused by loaders"),
                    "Remove it",
                );
            }
        }
        for key in keys(group.get("weights")) {
            if NEWER.contains(&key.as_str()) {
                found.note(
                    name,
                    format!("the key {key:?} is refused by earlier loaders"),
                    "Remove it if it is null",
                );
            } else if !WEIGHTS.contains(&key.as_str()) {
                found.error(name, format!("the key {key:?} of a scheme is refused by loaders"), "Remove it");
            }
        }
        let weights = group.get("weights").and_then(Value::as_object);
        let actorder = weights.and_then(|weights| weights.get("actorder"));
        match actorder.and_then(Value::as_str).map(str::to_lowercase).as_deref() {
            Some("static" | "dynamic") => found.warning(
                name,
                "\"actorder\" has a name that earlier loaders refuse",
                "Write \"weight\" for static and \"group\" for dynamic",
            ),
            Some("group") => found.warning(
                name,
                "\"actorder\" is \"group\", which compressed-tensors 0.19 and later refuse",
                "Quantize again with --static-groups",
            ),
            _ => {}
        }
        let channel =
            weights.and_then(|weights| weights.get("strategy")).and_then(Value::as_str) == Some("channel");
        if channel && actorder.is_some_and(|order| !order.is_null() && *order != Value::Bool(false)) {
            found.error(name, "\"actorder\" is set, but the strategy is \"channel\"", "Set it to null");
        }
    }
    if object.get("kv_cache_scheme").is_some_and(|scheme| !scheme.is_null()) {
        found.note(
            CONFIG,
            "the KV cache is to be quantized as well (\"kv_cache_scheme\")",
            "Halftone ignores that",
        );
    }
}

/// A quantized layer as its headers and the config describe it.
struct Layer {
    module: String,
    scheme: Scheme,
    n: usize,
    k: usize,
}

async fn modules(checkpoint: &Checkpoint, quant: &QuantConfig, found: &mut Findings) -> Result<()> {
    let names = quantized_modules(checkpoint, quant.format);
    for other in Format::ALL.into_iter().filter(|format| format.codes_part() != quant.format.codes_part()) {
        for module in quantized_modules(checkpoint, other) {
            let problem = format!("its tensors are those of {other}, but the config says {}", quant.format);
            found.error(&module, problem, "The config belongs to other weights; fetch both again");
        }
    }
    found.modules = names.len();
    if names.is_empty() {
        found.error(CONFIG, "the config says that the model is quantized, but no layer is", FETCH);
    }
    let mut layers = Vec::with_capacity(names.len());
    for module in names {
        let Some(scheme) = quant.scheme_of(&module)? else {
            let problem = "it is quantized, but the config leaves it alone";
            found.error(&module, problem, "Correct \"dynamic\" (GPTQ) or \"targets\" and \"ignore\"");
            continue;
        };
        let parts = match parts_of(checkpoint, &module, quant.format, scheme).await {
            Ok(parts) => parts,
            Err(error) => {
                found.error(&module, without_name(&error.to_string(), &module), QUANTIZE_AGAIN);
                continue;
            }
        };
        let layer = Layer { module, scheme, n: parts.n, k: parts.k };
        headers(checkpoint, quant.format, &layer, found);
        values(quant, &layer, &parts, found);
        speed(quant.format, &layer, found);
        layers.push(layer);
    }
    extras(checkpoint, quant, &layers, found);
    dense(checkpoint, quant, &layers, found);
    fused(checkpoint, &layers, found);
    tensor_parallel(&layers, found);
    Ok(())
}

/// The same complaint about many layers shall read alike.
fn without_name(message: &str, module: &str) -> String {
    message.replace(&format!("{module}."), "")
}

/// Types and shapes.
fn headers(checkpoint: &Checkpoint, format: Format, layer: &Layer, found: &mut Findings) {
    let Layer { module, scheme, n, k } = layer;
    let stored = StoredLayer { prefix: module, n: *n, k: *k, scheme: *scheme, scale: DType::F16, bias: None };
    let specs = match format.specs(&stored) {
        Ok(specs) => specs,
        Err(error) => {
            found.error(module, error.to_string(), QUANTIZE_AGAIN);
            return;
        }
    };
    for TensorSpec { name, dtype, shape } in specs {
        let part = name.rsplit('.').next().unwrap_or(&name);
        let Some(info) = checkpoint.info(&name) else {
            match part {
                "g_idx" => found.note(
                    module,
                    "g_idx is not there; some loaders need it",
                    "Convert it with halftone convert",
                ),
                part => found.error(module, format!("{part} is missing"), FETCH),
            }
            continue;
        };
        if info.shape != shape {
            found.error(
                module,
                format!("{part} is {:?} where the config asks for {shape:?}", info.shape),
                QUANTIZE_AGAIN,
            );
        }
        let scale = part.contains("scale");
        match (format, info.dtype) {
            (Format::CompressedTensors, DType::F16 | DType::BF16 | DType::F32) if scale => {}
            (_, found_dtype) if found_dtype == dtype => {}
            (_, other) if scale && matches!(other, DType::BF16 | DType::F32) => {
                found.warning(
                    module,
                    format!("{part} are {other}; GPTQ loaders expect F16"),
                    "Convert them if a loader refuses",
                );
            }
            (_, other) => {
                found.error(module, format!("{part} is {other} where {dtype} is needed"), QUANTIZE_AGAIN)
            }
        }
    }
}

/// Zero points, group indices and scales.
fn values(quant: &QuantConfig, layer: &Layer, parts: &LayerParts, found: &mut Findings) {
    let Layer { module, scheme, k, .. } = layer;
    let middle = 1u8 << (scheme.bits - 1);
    let mask = (2 * u32::from(middle) - 1) as u8;
    let all = |value: u8| !parts.zeros.is_empty() && parts.zeros.iter().all(|&zero| zero == value);
    let other = match quant.format.zeros() {
        Some(ZeroFormat::V1) => Some((all((middle + 1) & mask), "gptq_v2", "gptq")),
        Some(ZeroFormat::V2) => Some((all(middle.wrapping_sub(1)), "gptq", "gptq_v2")),
        None => None,
    };
    if let Some((true, stored, said)) = other {
        let problem =
            format!("zero points are stored as {stored} stores them, but \"checkpoint_format\" says {said}");
        found.error(
            module,
            problem,
            "Correct \"checkpoint_format\"; as it is, every weight is off by a step",
        );
    } else if scheme.sym && !all(middle) && !parts.zeros.is_empty() {
        let problem = "the config says that it is symmetric, but its zero points are not in the middle";
        found.error(module, problem, "Set \"sym\" (\"symmetric\") to false");
    } else if quant.format == Format::Gptq && parts.zeros.contains(&0) {
        let problem = "it has zero points of 0, which this format stores as −1: loaders disagree about them";
        found.warning(module, problem, "Convert it: halftone convert --format gptq_v2 or compressed-tensors");
    }
    if let Some(value) = parts.scales.iter().find(|scale| !scale.is_finite()) {
        found.error(module, format!("a scale is {value}"), QUANTIZE_AGAIN);
    }
    let Some(g_idx) = &parts.g_idx else { return };
    let groups = parts.groups;
    if let Some(bad) = g_idx.iter().find(|&&group| group as usize >= groups) {
        let problem = format!("the group index has group {}, but there are {groups}", *bad as i32);
        found.error(module, problem, QUANTIZE_AGAIN);
        return;
    }
    let natural = natural_g_idx(*k, scheme.group_size).is_ok_and(|natural| natural == *g_idx);
    let gptq = quant.format != Format::CompressedTensors;
    match (natural, scheme.desc_act) {
        (false, false) => {
            let (key, value) = if gptq { ("desc_act", "true") } else { ("actorder", "\"group\"") };
            let problem = format!(
                "its groups follow an order of columns, but {key:?} does not say so: kernels ignore it"
            );
            found.error(module, problem, &format!("Set {key:?} to {value}"));
        }
        (true, true) if gptq => {
            let problem = "desc_act is true, but its groups are in natural order: loaders take slower kernels for nothing";
            found.note(module, problem, "Set \"desc_act\" to false if this holds for all layers");
        }
        _ => {}
    }
    if !natural && scheme.group_size > 0 {
        let mut columns = vec![0i64; groups];
        g_idx.iter().for_each(|&group| columns[group as usize] += 1);
        if columns[..groups - 1].iter().any(|&count| count != scheme.group_size) {
            let problem =
                "its groups have different numbers of columns, which kernels that sort columns get wrong";
            found.error(module, problem, QUANTIZE_AGAIN);
        }
    }
}

/// What Marlin, the fastest kernel of serving engines, takes.
fn speed(format: Format, layer: &Layer, found: &mut Findings) {
    let Layer { module, scheme: Scheme { bits, group_size, sym, .. }, n, k } = layer;
    let size = usize::try_from(*group_size).unwrap_or(*k).max(1);
    let mut reasons = Vec::new();
    if ![4, 8].contains(bits) {
        reasons.push(format!("{bits} bits"));
    }
    if !sym && (format != Format::CompressedTensors || *bits != 4) {
        reasons.push("an asymmetric grid".to_owned());
    }
    if ![-1, 32, 64, 128].contains(group_size) {
        reasons.push(format!("groups of {group_size}"));
    }
    if n % 64 != 0 {
        reasons.push(format!("{n} output features, no multiple of 64"));
    }
    if k % 128 != 0 && k % size != 0 {
        reasons.push(format!("{k} input features, no multiple of 128 or of the group"));
    }
    if !reasons.is_empty() {
        let problem = format!("fast kernels (Marlin) do not take {}", reasons.join(", "));
        found.note(module, problem, "It loads on slower kernels where the engine has some");
    }
}

/// Tensors of a quantized layer that the format does not have.
fn extras(checkpoint: &Checkpoint, quant: &QuantConfig, layers: &[Layer], found: &mut Findings) {
    let schemes: BTreeMap<&str, Scheme> =
        layers.iter().map(|layer| (layer.module.as_str(), layer.scheme)).collect();
    for name in checkpoint.names() {
        let Some((module, part)) = name.rsplit_once('.') else { continue };
        let Some(scheme) = schemes.get(module) else { continue };
        if !known_parts(quant.format).contains(&part) {
            found.warning(
                module,
                format!("{part} is no tensor of this format"),
                "Serving engines may refuse it",
            );
        } else if part == "weight_zero_point" && scheme.sym {
            found.warning(
                module,
                "weight_zero_point is there, but the grid is symmetric",
                "Serving engines may refuse it",
            );
        } else if part == "weight_g_idx" && !scheme.desc_act {
            found.note(
                module,
                "weight_g_idx is there, but \"actorder\" is not \"group\"",
                "Loaders ignore it",
            );
        }
    }
}

/// Layers in 16 bits that a loader would take for quantized ones.
fn dense(checkpoint: &Checkpoint, quant: &QuantConfig, layers: &[Layer], found: &mut Findings) {
    // A GPTQ loader knows by architecture which layers are quantized; here their names tell.
    let kinds: BTreeSet<&str> = layers
        .iter()
        .filter_map(|layer| layer.module.rsplit('.').next())
        .filter(|kind| *kind != LM_HEAD_MODULE)
        .collect();
    for tensor in checkpoint.tensors().iter().filter(|tensor| is_matrix(tensor)) {
        let module = module_of(&tensor.name);
        let last = module.rsplit('.').next().unwrap_or(module);
        let claimed = quant.scheme_of(module).is_ok_and(|scheme| scheme.is_some());
        if is_table(module) || !claimed {
            continue;
        }
        match quant.format {
            Format::CompressedTensors => {
                let problem =
                    "it is in 16 bits, but \"ignore\" does not name it: loaders look for weight_packed";
                found.error(module, problem, "Add it to \"ignore\"");
            }
            _ if kinds.contains(last) => {
                let problem =
                    "it is in 16 bits, but \"dynamic\" does not leave it alone: loaders look for qweight";
                found.error(module, problem, "Add \"-:\" and a regex for it to \"dynamic\"");
            }
            _ => {}
        }
    }
    let head = layers.iter().any(|layer| layer.module == LM_HEAD_MODULE);
    if quant.format != Format::CompressedTensors && head != quant.lm_head {
        let problem = match head {
            true => "the output head is quantized, but \"lm_head\" is false",
            false => "\"lm_head\" is true, but the output head is not quantized",
        };
        found.error(LM_HEAD_MODULE, problem, "Correct \"lm_head\" in the quantization_config");
    }
}

/// Layers that serving engines make one matrix of.
const FUSED: [&[&str]; 4] =
    [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"], &["query", "key", "value"]];

fn fused(checkpoint: &Checkpoint, layers: &[Layer], found: &mut Findings) {
    let schemes: BTreeMap<&str, Scheme> =
        layers.iter().map(|layer| (layer.module.as_str(), layer.scheme)).collect();
    for layer in layers {
        let Some((stem, last)) = layer.module.rsplit_once('.') else { continue };
        let Some(group) = FUSED.iter().find(|group| group.contains(&last)) else { continue };
        for other in group.iter().filter(|other| **other != last) {
            let name = format!("{stem}.{other}");
            let advice = "Quantize the layers of a group alike";
            match schemes.get(name.as_str()) {
                Some(scheme) if *scheme != layer.scheme && last < *other => {
                    let problem = format!(
                        "{last} and {other} have different schemes, but engines make one matrix of them"
                    );
                    found.error(stem, problem, advice);
                }
                None if checkpoint.info(&format!("{name}.weight")).is_some() => {
                    let problem = format!(
                        "{last} is quantized and {other} is not, but engines make one matrix of them"
                    );
                    found.error(stem, problem, advice);
                }
                _ => {}
            }
        }
    }
}

/// Where a layer cannot be cut over 2, 4 or 8 devices: rows of q, k, v, gate and up, columns of what
/// follows them, which must not cut a group.
fn tensor_parallel(layers: &[Layer], found: &mut Findings) {
    const COLUMNS: [&str; 5] = ["o_proj", "down_proj", "w2", "dense", "fc2"];
    for Layer { module, scheme, n, k } in layers.iter().filter(|layer| layer.module != LM_HEAD_MODULE) {
        let last = module.rsplit('.').next().unwrap_or(module);
        let columns = COLUMNS.contains(&last);
        let (what, size) = if columns { ("input", *k) } else { ("output", *n) };
        let group = if columns { usize::try_from(scheme.group_size).unwrap_or(1).max(1) } else { 1 };
        // Codes of a word stay together.
        let pack = match scheme.bits {
            3 => 32,
            bits => 32 / bits.max(1) as usize,
        };
        let divides = |devices: &usize| {
            let part = size / devices;
            size.is_multiple_of(*devices) && part.is_multiple_of(group) && part.is_multiple_of(pack)
        };
        let not: Vec<String> =
            [2, 4, 8].iter().filter(|devices| !divides(devices)).map(usize::to_string).collect();
        if !not.is_empty() {
            let groups = if group > 1 { format!(" in groups of {group}") } else { String::new() };
            let problem = format!(
                "tensor parallel over {} devices does not divide {last}: {size} {what} features{groups}",
                not.join(", ")
            );
            found.note(module, problem, "Use another number of devices, or quantize with a smaller group");
        }
    }
}

/// What the architecture needs besides, if it is a known one.
fn model(checkpoint: &Checkpoint, found: &mut Findings) {
    let config = match ModelConfig::of(checkpoint) {
        Ok(config) => config,
        Err(error) => {
            found.note(
                CONFIG,
                format!("the architecture is not known here: {error}"),
                "Its tensors were not compared",
            );
            return;
        }
    };
    for (name, shape) in expected_tensors(&config) {
        let module = module_of(&name);
        if GptqLinear::is_in(checkpoint, module) || apart(checkpoint, module).is_some() {
            continue;
        }
        match checkpoint.info(&name) {
            None => found.error(&name, "the tensor is missing", FETCH),
            Some(info) if info.shape.iter().map(|&size| size as usize).ne(shape.iter().copied()) => {
                let problem = format!("its shape is {:?}, config.json says {shape:?}", info.shape);
                found.error(&name, problem, "Use the config.json that belongs to the weights");
            }
            Some(_) => {}
        }
    }
    let head = checkpoint.names().find(|name| module_of(name) == LM_HEAD_MODULE);
    if let Some(head) = head.filter(|_| config.tie_word_embeddings) {
        match head == LM_HEAD {
            true => found.note(
                head,
                "the head is stored twice: config.json ties it to the embedding",
                "Remove it",
            ),
            false => found.error(
                head,
                "the head is quantized, but config.json ties it to the embedding",
                QUANTIZE_AGAIN,
            ),
        }
    }
}
