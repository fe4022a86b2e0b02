//! From one file format to another without quantizing again: the same codes, zero points and scales in
//! another arrangement.
//!
//! All layers are looked at first, so that what the other format cannot hold exactly is refused before
//! anything is written. Then one layer at a time is read and written.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::loaders::{self, Traits};
use crate::checkpoint::config::{QuantConfig, Scheme, edited_config};
use crate::checkpoint::floats::has_all;
use crate::checkpoint::{
    CONFIG, Checkpoint, DType, Format, GptqLinear, Layout, QUANTIZE_CONFIG, StoredLayer, TensorInfo,
    TensorSpec, Writer, is_weights_file,
};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::arch::{LM_HEAD_MODULE, stages};
use crate::storage::Sink;

/// A layer of the source and what becomes of it.
#[derive(Debug, Clone)]
struct Layer {
    module: String,
    n: usize,
    k: usize,
    scheme: Scheme,
    scale: DType,
    bias: Option<DType>,
}

impl Layer {
    fn stored(&self) -> StoredLayer<'_> {
        let Layer { module, n, k, scheme, scale, bias } = self;
        StoredLayer { prefix: module, n: *n, k: *k, scheme: *scheme, scale: *scale, bias: *bias }
    }
}

/// A conversion that was found possible.
pub struct Conversion<'a> {
    checkpoint: &'a Checkpoint,
    from: &'a QuantConfig,
    quant: QuantConfig,
    layers: Vec<Layer>,
    layout: Layout,
    /// What a person should know.
    pub notes: Vec<String>,
}

/// Looks at every layer of `checkpoint`, quantized as `from` says, and plans its conversion to `to`.
/// `progress` hears how many layers of how many are done, and stops the work by answering false.
///
/// # Errors
/// [`Error::Unsupported`] naming the first layer that `to` cannot hold exactly; [`Error::Model`] for a
/// checkpoint that contradicts its config; [`Error::Options`] if it is in that format already.
pub async fn plan<'a>(
    checkpoint: &'a Checkpoint,
    from: &'a QuantConfig,
    to: Format,
    shard_bytes: u64,
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Conversion<'a>> {
    if from.format == to {
        return Err(Error::options(
            format_args!("{} is in the format {to} already", checkpoint.source().describe()),
            "Choose another --format",
        ));
    }
    if checkpoint.config().get("compression_config").is_some() {
        return Err(Error::unsupported(
            "config.json has the early key \"compression_config\", which would contradict the new one",
            "Save the model again with a current compressed-tensors first",
        ));
    }
    // An architecture that is not computed is converted all the same.
    let model = ModelConfig::of(checkpoint).ok();
    if let Some(model) = &model {
        loaders::check_writable(model, to)?;
    }
    let modules = quantized_modules(checkpoint, from.format);
    check_parts(checkpoint, from.format, &modules)?;
    let mut layers = Vec::with_capacity(modules.len());
    for (index, module) in modules.iter().enumerate() {
        if !progress(index, 2 * modules.len()) {
            return Err(stopped());
        }
        layers.push(look_at(checkpoint, from, to, module).await?);
    }
    if layers.is_empty() {
        return Err(Error::model(
            checkpoint.source().describe(),
            "no layer is quantized",
            "Give a quantized model",
        ));
    }
    let mut notes = Vec::new();
    if to == Format::CompressedTensors
        && layers.iter().any(|layer| layer.scale == DType::F16 && is_bf16(checkpoint))
    {
        notes.push("scales stay in F16; a loader that runs the model in BF16 rounds them".to_owned());
    }
    let head = model.as_ref().map_or(LM_HEAD_MODULE, |model| &model.names.head);
    let quant = config(checkpoint, model.as_ref(), from, to, &layers)?;
    notes.extend(loaders::refusals(&Traits {
        config: model.as_ref(),
        format: to,
        differs: !quant.rules.is_empty(),
        asymmetric: layers.iter().any(|layer| !layer.scheme.sym),
        ordered: layers.iter().any(|layer| layer.scheme.desc_act),
        quantized_head: layers.iter().any(|layer| layer.module == head),
    }));
    let layout = Layout::new(tensors(checkpoint, to, &layers)?, shard_bytes)?;
    Ok(Conversion { checkpoint, from, quant, layers, layout, notes })
}

impl Conversion<'_> {
    /// Layers that are converted.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes the result.
    ///
    /// # Errors
    /// Those of source and sink; [`Error::Interrupted`] when `progress` answers false.
    pub async fn write(
        &self,
        sink: Rc<dyn Sink>,
        progress: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<()> {
        let mut writer = Writer::new(sink, self.layout.clone()).await?;
        let by_name = by_name(&self.layers);
        let mut done = self.layers.len();
        while let Some(next) = writer.next() {
            let name = next.spec.name.clone();
            let Some(layer) = by_name.get(module_of(&name)) else {
                writer.copy(self.checkpoint, &name).await?;
                continue;
            };
            if !progress(done, 2 * self.layers.len()) {
                return Err(stopped());
            }
            done += 1;
            let quantized = GptqLinear::read(self.checkpoint, &layer.module, self.from).await?;
            for (name, bytes) in self.quant.format.tensors(&quantized, &layer.stored())? {
                writer.write(&name, &bytes).await?;
            }
        }
        let source = self.checkpoint.source();
        for file in source.files() {
            if !is_weights_file(&file.name) && ![CONFIG, QUANTIZE_CONFIG].contains(&file.name.as_str()) {
                writer.copy_file(source.as_ref(), &file.name, file.size).await?;
            }
        }
        let mut extra = Vec::new();
        if self.quant.format != Format::CompressedTensors {
            let text = serde_json::to_vec_pretty(&self.quant.to_json())
                .map_err(|error| Error::Internal(error.to_string()))?;
            extra.push((QUANTIZE_CONFIG.to_owned(), text));
        }
        writer.finish(&extra, &edited_config(self.checkpoint.config_text(), &self.quant)?).await
    }
}

fn stopped() -> Error {
    Error::Interrupted {
        place: "while converting".to_owned(),
        advice: "the unfinished result can be removed".to_owned(),
    }
}

/// Modules with packed codes, in the order of the files.
pub(super) fn quantized_modules(checkpoint: &Checkpoint, format: Format) -> Vec<String> {
    let suffix = format!(".{}", format.codes_part());
    checkpoint.names().filter_map(|name| name.strip_suffix(&suffix)).map(str::to_owned).collect()
}

/// The parts that a quantized layer may have.
pub(super) fn known_parts(format: Format) -> &'static [&'static str] {
    match format {
        Format::Gptq | Format::GptqV2 => &["qweight", "qzeros", "scales", "g_idx", "bias"],
        Format::CompressedTensors => {
            &["weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias"]
        }
    }
}

/// A tensor that nobody knows would be lost.
fn check_parts(checkpoint: &Checkpoint, format: Format, modules: &[String]) -> Result<()> {
    let modules: HashSet<&str> = modules.iter().map(String::as_str).collect();
    let unknown = checkpoint.names().find(|name| {
        name.rsplit_once('.')
            .is_some_and(|(module, part)| modules.contains(module) && !known_parts(format).contains(&part))
    });
    match unknown {
        None => Ok(()),
        Some(name) => Err(Error::unsupported(
            format_args!("tensor {name} has no place in another format"),
            "Convert a model whose weights alone are quantized",
        )),
    }
}

/// Reads a layer and settles what it will be, or why it cannot be.
async fn look_at(checkpoint: &Checkpoint, from: &QuantConfig, to: Format, module: &str) -> Result<Layer> {
    let cannot = |what: String, advice: &str| {
        Err(Error::unsupported(format_args!("{module} cannot be stored as {to}: {what}"), advice))
    };
    let layer = GptqLinear::read(checkpoint, module, from).await?;
    // Reading has refused a module without a scheme.
    let declared = from.scheme_of(module)?.unwrap_or(from.scheme);
    let middle = 1 << (layer.bits - 1);
    if declared.sym && layer.zeros.iter().any(|&zero| zero != middle) {
        return Err(Error::model(
            checkpoint.source().describe(),
            format_args!("the config says that {module} is symmetric, but its zero points are others"),
            "halftone inspect --check tells more",
        ));
    }
    let scheme = Scheme { desc_act: layer.is_act_ordered(declared.group_size)?, ..declared };
    match to {
        Format::Gptq if layer.zeros.contains(&0) => {
            return cannot(
                "it has zero points of 0, about which readers of that format disagree".into(),
                USE_V2,
            );
        }
        Format::CompressedTensors => {
            if let Err(what) = check_groups(&layer, scheme.group_size) {
                return cannot(what, KEEP);
            }
        }
        _ => {}
    }
    let stored_as = |parts: [&str; 2]| -> Result<DType> {
        let part = parts[usize::from(from.format == Format::CompressedTensors)];
        Ok(checkpoint.require(&format!("{module}.{part}"))?.dtype)
    };
    let scale = match to {
        Format::CompressedTensors => stored_as(["scales", "weight_scale"])?,
        _ => DType::F16,
    };
    if !has_all(scale, &layer.scales) {
        return cannot(format!("a scale is not a value of {scale}"), KEEP);
    }
    let bias = match layer.bias {
        Some(_) => Some(stored_as(["bias", "bias"])?),
        None => None,
    };
    let layer = Layer { module: module.to_owned(), n: layer.n, k: layer.k, scheme, scale, bias };
    match to.specs(&layer.stored()) {
        Err(Error::Unsupported { problem, .. }) => cannot(problem, KEEP),
        Err(other) => Err(other),
        Ok(_) => Ok(layer),
    }
}

const USE_V2: &str = "Use --format gptq_v2 or compressed-tensors, which store zero points as they are";
const KEEP: &str = "Keep the format it has, or quantize the 16-bit model again";

/// Readers of compressed-tensors sort columns by their group and cut them every `group_size`.
fn check_groups(layer: &GptqLinear, group_size: i64) -> Result<(), String> {
    let Ok(size) = usize::try_from(group_size) else { return Ok(()) };
    if !layer.k.is_multiple_of(size) {
        return Err(format!("its {} inputs are no multiple of the group size {size}", layer.k));
    }
    let mut columns = vec![0usize; layer.groups()];
    layer.g_idx.iter().for_each(|&group| columns[group as usize] += 1);
    match columns.iter().position(|&count| count != size) {
        None => Ok(()),
        Some(group) => Err(format!("group {group} has {} columns instead of {size}", columns[group])),
    }
}

fn is_bf16(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().iter().any(|tensor| tensor.dtype == DType::BF16)
}

/// A linear layer that stayed as it was, or a table: nothing but its shape tells.
pub(super) fn is_matrix(tensor: &TensorInfo) -> bool {
    let float = matches!(tensor.dtype, DType::F16 | DType::BF16 | DType::F32);
    float && tensor.shape.len() == 2 && tensor.name.ends_with(".weight")
}

/// Whether a module is a table of embeddings, by the names that families give it.
pub(super) fn is_table(module: &str) -> bool {
    ["embed", "wte", "wpe"]
        .iter()
        .any(|word| module.rsplit('.').next().is_some_and(|last| last.contains(word)))
}

fn config(
    checkpoint: &Checkpoint,
    model: Option<&ModelConfig>,
    from: &QuantConfig,
    to: Format,
    layers: &[Layer],
) -> Result<QuantConfig> {
    let mut modules: Vec<(&str, Option<Scheme>)> =
        layers.iter().map(|layer| (layer.module.as_str(), Some(layer.scheme))).collect();
    let quantizable: Option<HashSet<String>> = model.map(|model| {
        let stages = (0..model.layers).flat_map(|layer| stages(model, layer));
        stages.flat_map(|stage| stage.linears).map(|spec| spec.module).collect()
    });
    let left = |module: &str| {
        from.rules.iter().any(|rule| rule.scheme.is_none() && rule.target.matches(module))
            && quantizable.as_ref().is_none_or(|modules| modules.contains(module))
    };
    for tensor in checkpoint.tensors().iter().filter(|tensor| is_matrix(tensor)) {
        let module = tensor.name.trim_end_matches(".weight");
        // A GPTQ loader knows which layers its architecture quantizes, unless it is told otherwise; the
        // other one takes every linear layer that it is not told of.
        let named = match to {
            Format::CompressedTensors => !is_table(module),
            Format::Gptq | Format::GptqV2 => left(module),
        };
        if named && module != LM_HEAD_MODULE {
            modules.push((module, None));
        }
    }
    let count = |scheme: &Scheme| layers.iter().filter(|layer| layer.scheme == *scheme).count();
    let base = layers.iter().map(|layer| layer.scheme).max_by_key(count).unwrap_or(from.scheme);
    let mut quant = QuantConfig::of_modules(to, base, &modules)?;
    quant.damp_percent = from.damp_percent;
    quant.true_sequential = from.true_sequential;
    quant.static_groups = from.static_groups;
    quant.act_order =
        from.act_order || from.meta.get("act_order").and_then(serde_json::Value::as_bool).unwrap_or(false);
    quant.meta = from.meta.clone();
    if to != Format::CompressedTensors {
        let converter = format!("halftone:{}", env!("CARGO_PKG_VERSION"));
        quant.meta.entry("converter").or_insert_with(|| serde_json::json!([converter]));
    }
    Ok(quant)
}

/// The tensors of the result in the order of the source, a layer's together where its first was.
fn tensors(checkpoint: &Checkpoint, to: Format, layers: &[Layer]) -> Result<Vec<TensorSpec>> {
    let mut tensors = Vec::new();
    let mut left = by_name(layers);
    let modules: HashSet<&str> = left.keys().copied().collect();
    for tensor in checkpoint.tensors() {
        let module = module_of(&tensor.name);
        if !modules.contains(module) {
            tensors.push(TensorSpec::new(tensor.name.clone(), tensor.dtype, tensor.shape.clone()));
        } else if let Some(layer) = left.remove(module) {
            tensors.extend(to.specs(&layer.stored())?);
        }
    }
    Ok(tensors)
}

fn by_name(layers: &[Layer]) -> HashMap<&str, &Layer> {
    layers.iter().map(|layer| (layer.module.as_str(), layer)).collect()
}

/// `a.b` of `a.b.weight`.
pub(super) fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or("", |(module, _)| module)
}
