//! Everything that can be known before the work: what will be quantized how, whether it fits, how
//! large the result is.

use std::collections::HashMap;

use serde::Serialize;

use super::allocation::{Allocation, Unit};
use super::groups::most_common;
use super::loaders::{self, Traits};
use super::scaling;
use super::select::{Assignment, Output, assign, codes_together};
use super::sensitivity;
use super::stream::MOST_HELD;
use crate::checkpoint::config::{LM_HEAD, QuantConfig, Scheme as StoredScheme};
use crate::checkpoint::{DType, Format, Layout, StoredLayer, TensorSpec};
use crate::device::Device;
use crate::device::host::KEPT_BYTES;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::scheme::{Alpha, Scaling, Scheme};
use crate::kernels::scales::ScaleType;
use crate::kernels::symmetric::PANEL;
use crate::model::arch::{
    EXPERT_STAGES, Stage, block, block_prefix, expected_tensors, head_stage, stages, weight,
};
use crate::model::{LinearSpec, ModelConfig, Stored, Weights};

/// What the user may say about a run's resources.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Of every layer that `output` says nothing else about.
    pub scheme: Scheme,
    pub output: Output,
    /// Tokens of calibration text, and its longest sequence.
    pub tokens: usize,
    pub longest: usize,
    /// Bytes that activations and weights may take, on the device or the host.
    pub max_memory: u64,
    /// Tokens of a micro-batch where they are given: a stopped run keeps its own, because sums over
    /// other micro-batches round differently.
    pub batch_tokens: Option<usize>,
    /// Bytes of tensors in one file of the result, at most.
    pub shard_bytes: u64,
}

/// One linear layer of the plan.
#[derive(Debug, Clone, Serialize)]
pub struct ModulePlan {
    pub layer: usize,
    pub stage: &'static str,
    pub module: String,
    pub input: usize,
    pub output: usize,
    pub bits: u32,
    pub group: i64,
    pub sym: bool,
    /// Bytes in the source and in the result.
    pub dense_bytes: u64,
    pub quantized_bytes: u64,
}

/// How a linear layer is quantized and what its scales and bias are stored as.
#[derive(Debug, Clone, PartialEq)]
pub struct Assigned {
    pub scheme: Scheme,
    pub scale: DType,
    pub bias: Option<DType>,
}

impl Assigned {
    /// As a file holds it.
    pub fn stored<'a>(&self, spec: &'a LinearSpec) -> StoredLayer<'a> {
        StoredLayer {
            prefix: &spec.module,
            n: spec.out_features,
            k: spec.in_features,
            scheme: stored_scheme(&self.scheme),
            scale: self.scale,
            bias: self.bias,
        }
    }

    pub fn scale_type(&self) -> ScaleType {
        match self.scale {
            DType::F16 => ScaleType::F16,
            DType::BF16 => ScaleType::BF16,
            _ => ScaleType::F32,
        }
    }
}

fn stored_scheme(scheme: &Scheme) -> StoredScheme {
    StoredScheme {
        bits: scheme.bits,
        group_size: group_size(scheme),
        desc_act: scheme.needs_g_idx(),
        sym: scheme.sym,
    }
}

/// Bytes at the plan's most demanding moment, by what they hold.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// The text's activations between blocks.
    pub stream: u64,
    /// Activations kept between two stages.
    pub between_stages: u64,
    /// One block's quantized weights, widened.
    pub weights: u64,
    /// Hessian and factor of the widest stage; with a correction its own factor and the drift, too.
    pub hessian: u64,
    /// The original model beside the quantized one: one block's weights and the text's activations.
    pub original: u64,
    /// One micro-batch's intermediate results, or one piece of a weight being quantized; on the CPU also what is kept
    /// to be used again, and the program itself.
    pub working: u64,
}

impl Memory {
    pub fn total(&self) -> u64 {
        self.stream + self.between_stages + self.weights + self.hessian + self.original + self.working
    }
}

/// A checked plan.
pub struct Plan {
    pub config: ModelConfig,
    /// Of every layer that `output` says nothing else about.
    pub scheme: Scheme,
    pub output: Output,
    /// By module; `None` for one that stays in 16 bits.
    pub assigned: HashMap<String, Option<Assigned>>,
    /// Those that are quantized.
    pub modules: Vec<ModulePlan>,
    /// Where the bits are an average, the layers that count in it, and how many bits each has: settled if
    /// `output` has them, else assumed.
    pub units: Vec<Unit>,
    pub allocation: Option<Allocation>,
    /// Those that stay in 16 bits as asked.
    pub skipped: Vec<String>,
    /// Other matrices, that no scheme is for: routers, and what a model has beside its text.
    pub left: Vec<String>,
    pub layout: Layout,
    pub memory: Memory,
    /// Tokens of a micro-batch.
    pub batch_tokens: usize,
    /// Rows of a weight are quantized in pieces of at most so many bytes of f32.
    pub piece_bytes: usize,
    /// Activations stay on the device between blocks.
    pub stream_on_device: bool,
    /// Activations between stages are kept instead of computed again.
    pub keep_between: bool,
    /// Floating-point operations of the whole run.
    pub flops: f64,
    /// Where the bits are an average: operations of measuring what layers lose, and seconds that it took once it is done.
    pub measuring_flops: f64,
    pub measuring_seconds: Option<f64>,
    pub tokens: usize,
    pub warnings: Vec<String>,
}

/// [`Plan::piece_bytes`] for every device: well below what one buffer may hold.
const PIECE_BYTES: usize = 32 << 20;

/// Tokens in a micro-batch: enough for matrix products to run at full speed.
const BATCH_TOKENS: usize = 2048;

/// Checks `stored` and `options` against each other.
///
/// # Errors
/// [`Error::Model`] for tensors that are missing or misshapen, [`Error::Options`] for a scheme that
/// does not fit the model, [`Error::Unsupported`] for a model that is quantized already.
pub fn make_plan(stored: &Stored, options: &PlanOptions, device: &Device) -> Result<Plan> {
    options.scheme.check()?;
    let config = ModelConfig::of(&stored.checkpoint)?;
    if let Some(quant) = &stored.quant {
        return Err(Error::unsupported(
            format!(
                "{} is quantized already ({} bits)",
                stored.checkpoint.source().describe(),
                quant.scheme.bits
            ),
            "Give the 16-bit model it was made from",
        ));
    }
    check_tensors(stored, &config)?;
    loaders::check_writable(&config, options.output.format)?;
    if !device.is_cpu() {
        check_shapes(&config)?;
    }
    let output = &options.output;
    if output.lm_head && config.tie_word_embeddings {
        return Err(Error::options(
            format!(
                "{}: this model's head is its embedding table (tie_word_embeddings), which stays in 16 bits",
                face::QUANTIZE_LM_HEAD
            ),
            format!("Leave out {}", face::QUANTIZE_LM_HEAD),
        ));
    }
    if output.lm_head && config.names.head != LM_HEAD {
        return Err(Error::unsupported(
            format!(
                "the head of this model is called {}; loaders quantize none but {LM_HEAD}",
                config.names.head
            ),
            format!("Leave out {}", face::QUANTIZE_LM_HEAD),
        ));
    }
    let stages = all_stages(&config, output);
    let specs = specs_of(&stages);
    check_extras(stored, &specs)?;
    if let Some(mixed) = output.mixed.as_ref().filter(|_| !options.scheme.needs_inputs()) {
        return Err(Error::options(
            format!(
                "{} {} is an average, whose layers are measured on calibration text; {} rtn looks at none",
                face::BITS,
                mixed.average,
                face::PRESET
            ),
            format!("Choose another {}, or 2, 3, 4 or 8 bits for all layers", face::PRESET),
        ));
    }
    let mut assigned = HashMap::new();
    let mut scheme = options.scheme.clone();
    let Assignment { schemes, units, allocation } = assign(&options.scheme, output, &stages)?;
    if output.mixed.is_some() {
        scheme.bits =
            most_common(schemes.values().flatten().map(|scheme| scheme.bits)).unwrap_or(scheme.bits);
    }
    if output.auto_groups {
        scheme.group_size = most_common(schemes.values().flatten().map(|scheme| scheme.group_size)).flatten();
    }
    for (_, stage) in &stages {
        let scale = scale_dtype(stored, output.format, stage)?;
        for spec in &stage.linears {
            let scheme = schemes.get(&spec.module).cloned().flatten();
            let bias = match spec.bias {
                true => Some(bias_dtype(stored, output.format, spec)?),
                false => None,
            };
            assigned.insert(spec.module.clone(), scheme.map(|scheme| Assigned { scheme, scale, bias }));
        }
    }
    check_groups(options, &specs, &assigned)?;

    let mut modules = Vec::with_capacity(specs.len());
    let mut skipped = Vec::new();
    for (layer, stage, spec) in &specs {
        let Some(assigned) = assigned.get(&spec.module).and_then(Option::as_ref) else {
            skipped.push(spec.module.clone());
            continue;
        };
        let tensors = output.format.specs(&assigned.stored(spec))?;
        let bytes = |spec: &TensorSpec| spec.dtype.bytes_of(&spec.shape).unwrap_or(0);
        let weight = stored.checkpoint.require(&format!("{}.weight", spec.module))?;
        modules.push(ModulePlan {
            layer: *layer,
            stage,
            module: spec.module.clone(),
            input: spec.in_features,
            output: spec.out_features,
            bits: assigned.scheme.bits,
            group: group_size(&assigned.scheme),
            sym: assigned.scheme.sym,
            dense_bytes: weight.bytes(),
            quantized_bytes: tensors.iter().map(bytes).sum(),
        });
    }
    if modules.is_empty() {
        return Err(Error::options(format!("{} leaves no layer to quantize", face::SKIP), "Skip fewer"));
    }
    let layout = layout(stored, &config, options, &specs, &assigned)?;

    let ends = [Some(&config.names.embedding), config.names.positions.as_ref(), Some(&config.names.head)];
    let left = stored
        .checkpoint
        .tensors()
        .iter()
        .filter(|tensor| tensor.shape.len() == 2)
        .filter_map(|tensor| tensor.name.strip_suffix(".weight"))
        .filter(|name| !assigned.contains_key(*name))
        .filter(|name| {
            *name != LM_HEAD && (!ends.iter().flatten().any(|end| *end == name) || *name == config.names.head)
        })
        .map(str::to_owned)
        .collect();

    let mut plan = Plan {
        memory: Memory { stream: 0, between_stages: 0, weights: 0, hessian: 0, original: 0, working: 0 },
        flops: flops(&config, options, &stages, &assigned),
        measuring_flops: sensitivity::flops(&config, &units, &stages, options),
        measuring_seconds: None,
        batch_tokens: options.batch_tokens.unwrap_or(BATCH_TOKENS).max(options.longest),
        piece_bytes: PIECE_BYTES,
        stream_on_device: true,
        keep_between: true,
        tokens: options.tokens,
        warnings: Vec::new(),
        scheme,
        output: output.clone(),
        assigned,
        config,
        modules,
        units,
        allocation,
        skipped,
        left,
        layout,
    };
    fit_memory(&mut plan, options, device)?;
    if options.longest > plan.config.max_position_embeddings {
        plan.warnings.push(format!(
            "the longest calibration sequence has {} tokens; the model was made for {}",
            options.longest, plan.config.max_position_embeddings
        ));
    }
    plan.warnings.extend(unjudged(&plan, options));
    if output.all_experts && plan.config.experts.is_none() {
        plan.warnings.push(format!("{}: this model has no experts", face::ALL_EXPERTS));
    }
    if plan.scheme.scaling != Scaling::None {
        plan.warnings.extend(scaling::left_unscaled(&plan.config, &plan.assigned));
    }
    let chosen = || plan.assigned.values().flatten().map(|assigned| &assigned.scheme);
    let refusals = loaders::refusals(&Traits {
        config: Some(&plan.config),
        format: output.format,
        differs: !plan.quant_config(None)?.rules.is_empty(),
        asymmetric: chosen().any(|scheme| !scheme.sym),
        ordered: chosen().any(Scheme::needs_g_idx),
        quantized_head: output.lm_head,
    });
    plan.warnings.extend(refusals);
    Ok(plan)
}

/// What the only sequence there is cannot tell.
fn unjudged(plan: &Plan, options: &PlanOptions) -> Option<String> {
    let Scheme { alpha, refit, scaling, .. } = plan.scheme;
    if options.tokens == 0 || options.tokens > options.longest {
        return None;
    }
    let left = [
        (alpha == Alpha::Measured, "weights are not moved towards the original's outputs"),
        (refit, "a refit is judged by the text that it is made from"),
        (plan.scheme.sweeps() && scaling != Scaling::None, "inputs are not scaled"),
        (plan.output.mixed.is_some(), "each layer's bits are judged by the text that they are measured on"),
    ];
    let left: Vec<&str> = left.iter().filter(|(is_so, _)| *is_so).map(|(_, what)| *what).collect();
    (!left.is_empty())
        .then(|| format!("one calibration sequence leaves none to judge by: {}", left.join(", ")))
}

/// Every stage with the number of its block; the head's, if it is quantized, with the number after the
/// last.
fn all_stages(config: &ModelConfig, output: &Output) -> Vec<(usize, Stage)> {
    let blocks = (0..config.layers)
        .flat_map(|layer| stages(config, layer).into_iter().map(move |stage| (layer, stage)));
    blocks.chain(output.lm_head.then(|| (config.layers, head_stage(config)))).collect()
}

fn specs_of(stages: &[(usize, Stage)]) -> Vec<(usize, &'static str, LinearSpec)> {
    stages
        .iter()
        .flat_map(|(layer, stage)| stage.linears.iter().map(move |spec| (*layer, stage.name, spec.clone())))
        .collect()
}

/// What a stage's scales are stored as: GPTQ has f16 whatever the model is in, compressed-tensors the
/// model's own type.
fn scale_dtype(stored: &Stored, format: Format, stage: &Stage) -> Result<DType> {
    if format != Format::CompressedTensors {
        return Ok(DType::F16);
    }
    let mut dtypes = Vec::new();
    for spec in &stage.linears {
        dtypes.push(stored.checkpoint.require(&format!("{}.weight", spec.module))?.dtype);
    }
    let first = dtypes.first().copied().unwrap_or(DType::F32);
    Ok(if dtypes.iter().all(|dtype| *dtype == first) { first } else { DType::F32 })
}

fn bias_dtype(stored: &Stored, format: Format, spec: &LinearSpec) -> Result<DType> {
    match format {
        Format::CompressedTensors => Ok(stored.checkpoint.require(&format!("{}.bias", spec.module))?.dtype),
        _ => Ok(DType::F16),
    }
}

/// −1 for one group per row, as the file format writes it.
pub fn group_size(scheme: &Scheme) -> i64 {
    scheme.group_size.map_or(-1, |size| size as i64)
}

/// The kernels read four numbers at a time, and attention cuts heads into sixteens.
fn check_shapes(config: &ModelConfig) -> Result<()> {
    let experts = config.experts.as_ref();
    let inner = experts.map_or(config.intermediate_size, |experts| experts.intermediate_size);
    let sizes = [
        ("hidden_size", config.hidden_size, 4),
        ("intermediate_size", config.intermediate_size, 4),
        ("the experts' intermediate_size", inner, 4),
        ("shared_expert_intermediate_size", experts.and_then(|experts| experts.shared_size).unwrap_or(4), 4),
        ("head_dim", config.head_dim, 16),
    ];
    match sizes.iter().find(|(_, size, multiple)| !size.is_multiple_of(*multiple)) {
        None => Ok(()),
        Some((name, size, multiple)) => Err(Error::unsupported(
            format!("{name} {size} is not a multiple of {multiple}, as the GPU kernels need"),
            face::USE_CPU,
        )),
    }
}

fn check_tensors(stored: &Stored, config: &ModelConfig) -> Result<()> {
    let place = || stored.checkpoint.source().describe();
    for (name, shape) in expected_tensors(config) {
        match stored.info(&name)? {
            Some((_, found)) if found == shape => {}
            Some((_, found)) => {
                return Err(Error::model(
                    place(),
                    format!("tensor {name} has the shape {found:?}, config.json says {shape:?}"),
                    "Use the config.json that belongs to the weights",
                ));
            }
            None => {
                return Err(Error::model(
                    place(),
                    format!("tensor {name} is missing"),
                    "The weights are incomplete or of another architecture; fetch the model again",
                ));
            }
        }
    }
    Ok(())
}

/// A linear layer with more tensors than the architecture has (a bias that config.json does not
/// mention, another format's scales) would lose them.
fn check_extras(stored: &Stored, specs: &[(usize, &'static str, LinearSpec)]) -> Result<()> {
    let specs: HashMap<&str, &LinearSpec> =
        specs.iter().map(|(_, _, spec)| (spec.module.as_str(), spec)).collect();
    for name in stored.checkpoint.names() {
        let Some((module, part)) = name.rsplit_once('.') else { continue };
        let Some(spec) = specs.get(module) else { continue };
        if part != "weight" && !(part == "bias" && spec.bias) {
            return Err(Error::model(
                stored.checkpoint.source().describe(),
                format!("tensor {name} is not part of this architecture as config.json describes it"),
                "Use the config.json that belongs to the weights",
            ));
        }
    }
    Ok(())
}

/// Groups must divide every layer's inputs, and in the GPTQ formats codes must fill whole words both
/// ways.
fn check_groups(
    options: &PlanOptions,
    specs: &[(usize, &'static str, LinearSpec)],
    assigned: &HashMap<String, Option<Assigned>>,
) -> Result<()> {
    let scheme_of = |spec: &LinearSpec| assigned.get(&spec.module)?.as_ref().map(|assigned| &assigned.scheme);
    for (_, _, spec) in specs {
        let Some(scheme) = scheme_of(spec) else { continue };
        let run = codes_together(options.output.format, scheme.bits);
        for (what, size) in [("input", spec.in_features), ("output", spec.out_features)] {
            if !size.is_multiple_of(run) {
                return Err(Error::options(
                    format!(
                        "{} has {size} {what} features, and {}-bit codes are stored {run} at a time",
                        spec.module, scheme.bits
                    ),
                    format!(
                        "Use another bit width, {}, or {} '{}'",
                        face::AS_COMPRESSED,
                        face::SKIP,
                        spec.short
                    ),
                ));
            }
        }
    }
    for (_, _, spec) in specs {
        let Some(group) = scheme_of(spec).and_then(|scheme| scheme.group_size) else { continue };
        if spec.in_features.is_multiple_of(group) {
            continue;
        }
        let alike: Vec<&LinearSpec> = specs
            .iter()
            .map(|(_, _, spec)| spec)
            .filter(|spec| scheme_of(spec).is_some_and(|scheme| scheme.group_size == Some(group)))
            .collect();
        let legal: Vec<String> = [16, 32, 64, 128, 256, 512, 1024]
            .into_iter()
            .filter(|size| alike.iter().all(|spec| spec.in_features.is_multiple_of(*size)))
            .map(|size: usize| size.to_string())
            .collect();
        let legal = match legal.is_empty() {
            true => {
                format!(
                    "Use {}, which gives each layer its own, or {}; no usual size divides all of these layers",
                    face::AUTO_GROUPS,
                    face::WHOLE_ROW
                )
            }
            false => format!(
                "Use one that divides all of this model's layers: {}; {}, which gives each layer the largest that \
                 fits; {}; or another for some by {} '{}=group_size:…'",
                legal.join(", "),
                face::AUTO_GROUPS,
                face::WHOLE_ROW,
                face::OVERRIDE,
                spec.short
            ),
        };
        return Err(Error::options(
            format!(
                "{} {group} does not divide the {} inputs of {}",
                face::GROUP_SIZE,
                spec.in_features,
                spec.module
            ),
            legal,
        ));
    }
    Ok(())
}

/// Tensors in the order in which they are written: what is not in a block, then block by block its
/// norms and its linear layers stage by stage.
fn layout(
    stored: &Stored,
    config: &ModelConfig,
    options: &PlanOptions,
    specs: &[(usize, &'static str, LinearSpec)],
    assigned: &HashMap<String, Option<Assigned>>,
) -> Result<Layout> {
    let copied = |name: &str| {
        let info = stored.checkpoint.require(name)?;
        Ok::<_, Error>(TensorSpec::new(name, info.dtype, info.shape.clone()))
    };
    let mut tensors = Vec::new();
    for name in outside_blocks(stored, config, assigned) {
        tensors.push(copied(&name)?);
    }
    let quantized = |layer: usize| {
        specs.iter().filter(move |(of, _, _)| *of == layer).filter_map(|(_, _, spec)| {
            let assigned = assigned.get(&spec.module)?.as_ref()?;
            Some(options.output.format.specs(&assigned.stored(spec)))
        })
    };
    for layer in 0..config.layers {
        for name in block_copies(stored, config, layer, assigned) {
            tensors.push(copied(&name)?);
        }
        for specs in quantized(layer) {
            tensors.extend(specs?);
        }
    }
    for specs in quantized(config.layers) {
        tensors.extend(specs?);
    }
    Layout::new(tensors, options.shard_bytes)
}

/// Whether a tensor belongs to a layer that is quantized, and so is not copied.
fn is_quantized(name: &str, assigned: &HashMap<String, Option<Assigned>>) -> bool {
    let module = name.rsplit_once('.').map_or("", |(module, _)| module);
    assigned.get(module).is_some_and(Option::is_some)
}

/// Tensors that no block owns: embedding, final norm, head, and whatever else the file holds.
pub fn outside_blocks(
    stored: &Stored,
    config: &ModelConfig,
    assigned: &HashMap<String, Option<Assigned>>,
) -> Vec<String> {
    let head = weight(&config.names.head);
    let prefixes: Vec<String> =
        (0..config.layers).map(|layer| format!("{}.", block_prefix(config, layer))).collect();
    let mut names: Vec<String> = stored
        .checkpoint
        .names()
        .filter(|name| !prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .filter(|name| !(config.tie_word_embeddings && *name == head))
        .filter(|name| !is_quantized(name, assigned))
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

/// Tensors of a block that are copied as they are.
pub fn block_copies(
    stored: &Stored,
    config: &ModelConfig,
    layer: usize,
    assigned: &HashMap<String, Option<Assigned>>,
) -> Vec<String> {
    let prefix = format!("{}.", block_prefix(config, layer));
    let mut names: Vec<String> = stored
        .checkpoint
        .names()
        .filter(|name| name.starts_with(&prefix))
        .filter(|name| !is_quantized(name, assigned))
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

/// Multiplications and additions of the run: those of [`stage_flops`] and [`linear_flops`] together.
fn flops(
    config: &ModelConfig,
    options: &PlanOptions,
    stages: &[(usize, Stage)],
    assigned: &HashMap<String, Option<Assigned>>,
) -> f64 {
    let is_quantized = |spec: &LinearSpec| assigned.get(&spec.module).is_some_and(Option::is_some);
    let mut sum = 0.0;
    for (_, stage) in stages {
        if options.scheme.needs_inputs() && stage.linears.iter().any(is_quantized) {
            sum +=
                stage_flops(config, &options.scheme, &options.output, stage, options.tokens, options.longest);
        }
        for spec in &stage.linears {
            let rows = rows_of(config, &options.output, stage, options.tokens as f64);
            sum += linear_flops(&options.scheme, spec, rows as usize, is_quantized(spec));
        }
    }
    if options.scheme.scaling != Scaling::None {
        let measuring = |stage: &Stage| {
            measuring_flops(config, &options.scheme, &options.output, stage, options.tokens, options.longest)
        };
        sum += scaling::flops(config, assigned, measuring);
    }
    sum
}

/// A stage's part of a pass that looks at the block's own inputs only: their sums, and its layers on the way to the next.
pub fn measuring_flops(
    config: &ModelConfig,
    scheme: &Scheme,
    output: &Output,
    stage: &Stage,
    tokens: usize,
    seq_len: usize,
) -> f64 {
    let scheme = Scheme { alpha: Alpha::Fixed(0.0), ..scheme.clone() };
    let weights: usize = stage.linears.iter().map(|spec| spec.in_features * spec.out_features).sum();
    stage_flops(config, &scheme, output, stage, tokens, seq_len)
        + 2.0 * rows_of(config, output, stage, tokens as f64) * weights as f64
}

/// A stage's part for `tokens` tokens in sequences of `seq_len`: their Hessian, and the attention
/// behind the inputs of o_proj; the same for the original model beside it, with the drift.
pub fn stage_flops(
    config: &ModelConfig,
    scheme: &Scheme,
    output: &Output,
    stage: &Stage,
    tokens: usize,
    seq_len: usize,
) -> f64 {
    let n = stage.linears.first().map_or(0, |spec| spec.in_features) as f64;
    let width = (config.heads * config.head_dim) as f64;
    let attention = if stage.name == "o" { 2.0 * seq_len as f64 * width } else { 0.0 };
    let outputs = stage.linears.iter().map(|spec| spec.out_features).sum::<usize>() as f64;
    let beside = if scheme.needs_original() { 2.0 * n * n.min(outputs) + attention } else { 0.0 };
    rows_of(config, output, stage, tokens as f64) * (n * n + attention + beside)
}

/// How many of `tokens` come to a stage: an expert sees its share of them.
fn rows_of(config: &ModelConfig, output: &Output, stage: &Stage, tokens: f64) -> f64 {
    match &config.experts {
        Some(experts) if EXPERT_STAGES.contains(&stage.name) && !output.all_experts => {
            tokens * experts.per_token as f64 / experts.count as f64
        }
        _ => tokens,
    }
}

/// A linear layer's part: its product with all tokens and, if it is quantized, the sweep and the loss of
/// plain rounding to compare with; or the rounding alone.
pub fn linear_flops(scheme: &Scheme, spec: &LinearSpec, tokens: usize, quantized: bool) -> f64 {
    let (n, m) = (spec.in_features as f64, spec.out_features as f64);
    match (scheme.needs_inputs(), quantized) {
        (true, true) => {
            let product = 2.0 * tokens as f64 * n * m;
            // The sweep and the rounding to compare with; the correction and a sweep of some rows; a pass over the groups.
            let share = |used: bool, beside: f64| if used { beside } else { 0.0 };
            product * (1.0 + share(scheme.needs_original(), 1.0))
                + m * n * n * (2.0 + share(scheme.needs_original(), 4.25) + share(scheme.refit, 3.0))
        }
        (true, false) => 2.0 * tokens as f64 * n * m * if scheme.needs_original() { 2.0 } else { 1.0 },
        (false, true) => ROUNDING_FLOPS * m * n,
        (false, false) => 0.0,
    }
}

/// Numbers that are summed up of the original beside a stage's Hessian.
fn sums_beside((stage, ends): (&Stage, bool)) -> Option<usize> {
    let spec = stage.linears.first()?;
    Some(spec.in_features * if ends { spec.out_features } else { spec.in_features })
}

/// What fitting min-max scales, rounding and packing one weight costs, measured against the matrix
/// product.
pub(super) const ROUNDING_FLOPS: f64 = 500.0;

/// Of the program, its text and its tokenizer, measured.
const PROGRAM_BYTES: u64 = 32 << 20;

/// Sums up the plan's memory and gives up conveniences until it fits.
fn fit_memory(plan: &mut Plan, options: &PlanOptions, device: &Device) -> Result<()> {
    let config = &plan.config;
    let (tokens, hidden) = (options.tokens, config.hidden_size);
    let inner = (0..config.layers)
        .flat_map(|layer| stages(config, layer))
        .filter(|stage| stage.name.ends_with("down"))
        .flat_map(|stage| stage.linears)
        .map(|spec| spec.in_features)
        .max()
        .unwrap_or(0);
    let width = config.heads * config.head_dim;
    let calibrated = options.scheme.needs_inputs();
    let bytes = |count: usize| 4 * count as u64;
    let widest = hidden.max(width).max(inner);
    let panels = |n: usize| bytes(n * n / 2 + n * PANEL);
    let of_layer = |layer: usize| -> u64 {
        let specs = stages(config, layer).into_iter().flat_map(|stage| stage.linears);
        specs.map(|spec| bytes(spec.in_features * spec.out_features)).sum()
    };
    let layer_weights = (0..config.layers).map(of_layer).max().unwrap_or(0);
    // What a branch gives waits for the others that read the same stream.
    let waiting = (0..config.layers)
        .flat_map(|layer| block(config, layer).sections)
        .any(|section| section.branches.len() > 1);
    let stream = bytes(tokens * hidden) * if waiting { 2 } else { 1 };
    // A piece of a weight with its copy in the order, codes, result, and plain rounding's own copy.
    let largest = plan.modules.iter().map(|module| module.input * module.output).max().unwrap_or(0);
    // A head's codes and packed words are too large to pass over.
    let head = if options.output.lm_head { 2 * (config.vocab_size * hidden) as u64 } else { 0 };
    let (scheme, half_weights) = (&options.scheme, layer_weights / 2);
    let held = bytes(
        options.tokens.min(MOST_HELD).div_ceil(if scheme.needs_original() { 1 } else { 2 }) * 2 * widest,
    );
    // The original's inputs beside those of a stage, or the stream behind it.
    let drift = (0..config.layers)
        .flat_map(|layer| {
            let spec = block(config, layer);
            let ends: Vec<bool> = spec.ends_in_stream().collect();
            spec.stages().zip(ends).filter_map(sums_beside).collect::<Vec<_>>()
        })
        .max()
        .map_or(0, bytes);
    // To find a scale: the 16-bit block and the text again, and a sweep with either inputs.
    let scaled = scheme.scaling != Scaling::None;
    let side = if scaled { stream } else { 0 };
    let twice = if scaled && scheme.sweeps() { 2 } else { 0 };
    let sums = (2 + twice + u64::from(scheme.refit)) * panels(widest)
        + if scheme.needs_original() { panels(widest) + drift } else { 0 }
        + if scheme.needs_held() { held } else { 0 };
    // The original's inputs are kept where they are compared and not its outputs.
    let kept = (0..config.layers)
        .flat_map(|layer| {
            let spec = block(config, layer);
            let ends: Vec<bool> = spec.ends_in_stream().collect();
            let compared = |stage: &Stage, ends: bool| !ends && !EXPERT_STAGES.contains(&stage.name);
            let second = spec.stages().zip(ends).skip(1).step_by(2);
            let inputs = second.filter(|(stage, ends)| compared(stage, *ends)).map(|(stage, _)| stage);
            inputs.flat_map(|stage| &stage.linears).map(|spec| spec.in_features).collect::<Vec<_>>()
        })
        .max()
        .unwrap_or(0);
    let beside = match scheme.needs_original() {
        true => half_weights + bytes(tokens * (hidden + kept)),
        false if scaled => half_weights,
        false => 0,
    } + side;
    // Before the run, where its widths are measured.
    let beside = match &options.output.mixed {
        Some(_) => beside.max(
            half_weights
                + bytes(3 * sensitivity::tokens(widest, options.longest).min(tokens) * (hidden + inner)),
        ),
        None => beside,
    };
    let copies = if scheme.needs_held() { 11 } else { 5 };
    let pieces = copies * bytes(largest).min(plan.piece_bytes as u64) + head;
    let between = bytes(tokens * width.max(inner));
    // What the CPU keeps to use again, what the allocator loses, and the program itself with its text and tokenizer.
    let idle = |used: u64| if device.is_cpu() { KEPT_BYTES.min(used) + used / 8 + PROGRAM_BYTES } else { 0 };
    let working = |batch: usize, between: u64| {
        let own = bytes(batch * (2 * inner + 2 * hidden)).max(pieces).max(bytes(batch * 4 * width));
        own + idle(if calibrated { stream + between + own } else { own })
    };
    plan.memory = if calibrated {
        Memory {
            stream,
            between_stages: between,
            weights: layer_weights,
            hessian: sums,
            original: beside,
            working: working(plan.batch_tokens, between),
        }
    } else {
        Memory {
            stream: 0,
            between_stages: 0,
            weights: 0,
            hessian: 0,
            original: 0,
            working: pieces + idle(pieces),
        }
    };
    // A stream on the host takes none of the device's memory.
    let needed =
        |plan: &Plan| plan.memory.total() - if plan.stream_on_device { 0 } else { plan.memory.stream };
    if calibrated && needed(plan) > options.max_memory {
        plan.keep_between = false;
        plan.memory.between_stages = 0;
        plan.memory.working = working(plan.batch_tokens, 0);
    }
    if calibrated && needed(plan) > options.max_memory && !device.is_cpu() {
        plan.stream_on_device = false;
    }
    if calibrated && needed(plan) > options.max_memory && options.batch_tokens.is_none() {
        plan.batch_tokens = options.longest.max(1);
        plan.memory.working = working(plan.batch_tokens, plan.memory.between_stages);
    }
    if needed(plan) <= options.max_memory {
        return Ok(());
    }
    let advice = match calibrated {
        true => format!(
            "Use fewer or shorter samples ({}, {}), or raise {}",
            face::SAMPLES,
            face::SEQ_LEN,
            face::MAX_MEMORY
        ),
        false => format!("Raise {}", face::MAX_MEMORY),
    };
    Err(Error::options(
        format!(
            "the run needs about {} of memory, {} is allowed",
            enough_bytes(needed(plan)),
            human_bytes(options.max_memory)
        ),
        advice,
    ))
}

/// For people: `1.5 GB`, powers of 1000 as disks are sold.
pub fn human_bytes(bytes: u64) -> String {
    in_units(bytes, f64::round)
}

/// The same rounded up: who gives what it says gives enough.
fn enough_bytes(bytes: u64) -> String {
    in_units(bytes, f64::ceil)
}

/// With one decimal, `tenths` being rounded.
fn in_units(bytes: u64, tenths: fn(f64) -> f64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (mut unit, mut size) = ("kB", 1000);
    for larger in ["MB", "GB", "TB"] {
        if bytes / size < 1000 {
            break;
        }
        (unit, size) = (larger, size * 1000);
    }
    format!("{:.1} {unit}", tenths(bytes as f64 / (size / 10) as f64) / 10.0)
}

impl Plan {
    /// Bits per weight of the quantized layers, scales and zero points included.
    pub fn bits_per_weight(&self) -> f64 {
        let bytes: u64 = self.modules.iter().map(|module| module.quantized_bytes).sum();
        let weights: usize = self.modules.iter().map(|module| module.input * module.output).sum();
        // g_idx belongs to the format, not to the weights' precision; it is counted all the same.
        8.0 * bytes as f64 / weights.max(1) as f64
    }

    /// Rows of a weight of `n` inputs that are quantized at a time.
    pub fn piece_rows(&self, n: usize) -> usize {
        (self.piece_bytes / (4 * n) / 64 * 64).max(64)
    }

    /// How a linear layer is quantized, `None` for one that stays in 16 bits.
    pub fn assigned(&self, module: &str) -> Option<&Assigned> {
        self.assigned.get(module)?.as_ref()
    }

    /// What `config.json` will say. `act_ordered` are the modules that came out with groups in another
    /// order than the natural one; before the run, those that may.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for names that no pattern can match.
    pub fn quant_config(&self, act_ordered: Option<&[String]>) -> Result<QuantConfig> {
        let format = self.output.format;
        // The tensors of compressed-tensors follow what was planned.
        let settled = |scheme: &Scheme| StoredScheme {
            desc_act: scheme.needs_g_idx()
                && act_ordered.is_none_or(|modules| {
                    format == Format::CompressedTensors
                        || modules
                            .iter()
                            .any(|module| self.assigned(module).is_some_and(|of| of.scheme == *scheme))
                }),
            ..stored_scheme(scheme)
        };
        let mut modules: Vec<(&str, Option<StoredScheme>)> = Vec::with_capacity(self.assigned.len());
        for (_, _, spec) in specs_of(&all_stages(&self.config, &self.output)) {
            let Some((module, assigned)) = self.assigned.get_key_value(&spec.module) else { continue };
            modules.push((module, assigned.as_ref().map(|assigned| settled(&assigned.scheme))));
        }
        // Loaders of this format take every linear layer for quantized that is not named.
        if format == Format::CompressedTensors {
            modules.extend(self.left.iter().map(|name| (name.as_str(), None)));
        }
        let mut quant = QuantConfig::of_modules(format, settled(&self.scheme), &modules)?;
        quant.damp_percent = self.scheme.sweeps().then_some(self.scheme.damp_percent);
        quant.true_sequential = Some(true);
        quant.static_groups = Some(self.scheme.static_groups);
        quant.act_order = self.scheme.desc_act;
        quant.meta = serde_json::json!({
            "quantizer": [format!("halftone:{}", env!("CARGO_PKG_VERSION"))],
            "preset": self.scheme.preset,
            "act_order": self.scheme.desc_act,
            "scale_search": self.scheme.mse,
            "scaling": self.scheme.scaling,
        })
        .as_object()
        .cloned()
        .unwrap_or_default();
        Ok(quant)
    }

    /// The head's stage, if it is quantized.
    pub fn head(&self) -> Option<Stage> {
        self.assigned(&self.config.names.head).map(|_| head_stage(&self.config))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_to_the_nearest_tenth_and_needs_to_the_next() {
        for (bytes, nearest, enough) in [
            (999, "999 B", "999 B"),
            (1_000, "1.0 kB", "1.0 kB"),
            (258_200_000, "258.2 MB", "258.2 MB"),
            (258_200_001, "258.2 MB", "258.3 MB"),
            (258_299_999, "258.3 MB", "258.3 MB"),
            (1_234_567_890, "1.2 GB", "1.3 GB"),
            (2_000_000_000_000_000, "2000.0 TB", "2000.0 TB"),
        ] {
            assert_eq!((human_bytes(bytes).as_str(), enough_bytes(bytes).as_str()), (nearest, enough));
        }
    }

    #[test]
    fn shapes_that_the_kernels_cannot_take_are_refused_before_the_work() {
        let text = include_str!("../../web/demo/model/config.json");
        let mut config = ModelConfig::parse(&serde_json::from_str(text).unwrap()).unwrap();
        check_shapes(&config).unwrap();
        config.head_dim = 40;
        let message = check_shapes(&config).unwrap_err().to_string();
        assert!(message.contains("head_dim 40") && message.contains("--device cpu"), "{message}");
    }
}
