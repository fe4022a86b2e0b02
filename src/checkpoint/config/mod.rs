//! The object `quantization_config`: how a checkpoint says that it is quantized, and how.
//!
//! `gptq` and `compressed` read and write the two kinds of it; `names` makes patterns that match given
//! modules; `edit` puts the object into a `config.json` without touching the rest.

mod compressed;
mod edit;
mod gptq;
mod names;

use regex::Regex;
use serde_json::{Map, Value};

use super::format::Format;
use super::reader::{Checkpoint, parse_json, read_text};
use super::{CONFIG, QUANTIZE_CONFIG};
use crate::error::{Error, Result};

pub use edit::edited_config;
pub use names::pattern_of;

/// The key of [`CONFIG`] that holds the object.
const KEY: &str = "quantization_config";

/// What early versions of compressed-tensors called it.
const EARLY_KEY: &str = "compression_config";

/// The grid of one linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Input features that share a scale; −1 is all of a row.
    pub group_size: i64,
    /// Whether groups follow a permuted order, so that the group index must be looked at.
    pub desc_act: bool,
    /// Whether every zero point is the middle code.
    pub sym: bool,
}

/// Which modules a [`Rule`] is about.
#[derive(Debug, Clone)]
pub enum Target {
    /// One, by its full name.
    Name(String),
    /// Those whose name the regex matches from its beginning, though not up to its end.
    Pattern { text: String, regex: Regex },
}

impl Target {
    /// # Errors
    /// [`Error::Unsupported`] for a regex that cannot be used here (look-around and
    /// back-references).
    pub fn pattern(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        let regex = Regex::new(&format!("^(?:{text})")).map_err(|error| {
            Error::unsupported(
                format_args!("the pattern {text:?} of the quantization config cannot be used ({error})"),
                "Write it without look-around and back-references",
            )
        })?;
        Ok(Self::Pattern { text, regex })
    }

    pub fn matches(&self, module: &str) -> bool {
        match self {
            Self::Name(name) => name == module,
            Self::Pattern { regex, .. } => regex.is_match(module),
        }
    }
}

/// What differs for some modules.
#[derive(Debug, Clone)]
pub struct Rule {
    pub target: Target,
    /// `None` leaves them alone.
    pub scheme: Option<Scheme>,
}

/// A `quantization_config` of any format.
#[derive(Debug, Clone)]
pub struct QuantConfig {
    pub format: Format,
    /// Of most modules.
    pub scheme: Scheme,
    /// The first that matches a module counts.
    pub rules: Vec<Rule>,
    /// Whether modules without a rule have `scheme`; otherwise they are left alone.
    pub others: bool,
    /// Whether the output head is quantized too.
    pub lm_head: bool,
    /// How it was made; loaders do not need these.
    pub damp_percent: Option<f64>,
    pub true_sequential: Option<bool>,
    pub static_groups: Option<bool>,
    /// Columns were taken by importance, which need not show in the groups.
    pub act_order: bool,
    /// Fields of the tool's own, where the format has a place for them.
    pub meta: Map<String, Value>,
}

impl QuantConfig {
    /// A config with this scheme for all modules.
    pub fn new(format: Format, scheme: Scheme) -> Self {
        Self {
            format,
            scheme,
            rules: Vec::new(),
            others: true,
            lm_head: false,
            damp_percent: None,
            true_sequential: None,
            static_groups: None,
            act_order: false,
            meta: Map::new(),
        }
    }

    /// A config that says of each module what its scheme is, `None` for one that is left alone. `base`
    /// is that of most, and need not be spelled out.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for names that no regex can match.
    pub fn of_modules(format: Format, base: Scheme, modules: &[(&str, Option<Scheme>)]) -> Result<Self> {
        let mut config = Self::new(format, base);
        config.lm_head = modules.iter().any(|(name, scheme)| *name == LM_HEAD && scheme.is_some());
        let of = |wanted: Option<Scheme>| -> Vec<&str> {
            modules.iter().filter(|(_, scheme)| *scheme == wanted).map(|(name, _)| *name).collect()
        };
        let mut schemes: Vec<Scheme> = Vec::new();
        for scheme in modules.iter().filter_map(|(_, scheme)| *scheme) {
            if !schemes.contains(&scheme) {
                schemes.push(scheme);
            }
        }
        let compressed = format == Format::CompressedTensors;
        match compressed {
            // Loaders of this format want every unquantized layer by its name.
            true => config.rules.extend(
                of(None).into_iter().map(|name| Rule { target: Target::Name(name.to_owned()), scheme: None }),
            ),
            false => {
                let left = of(None);
                if !left.is_empty() {
                    config
                        .rules
                        .push(Rule { target: Target::pattern(pattern_of(&left, true))?, scheme: None });
                }
            }
        }
        // Two targets of one module would leave it to a loader's version which one counts, so with
        // several schemes each names its modules.
        config.others = !compressed || schemes.iter().all(|scheme| *scheme == base);
        for scheme in schemes {
            if config.others && scheme == base {
                continue;
            }
            let target = Target::pattern(pattern_of(&of(Some(scheme)), !compressed))?;
            config.rules.push(Rule { target, scheme: Some(scheme) });
        }
        Ok(config)
    }

    /// Reads the config of a checkpoint from `config.json`, or else from `quantize_config.json`;
    /// `None` if the checkpoint is not quantized.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a method or format that is not among [`Format::ALL`],
    /// [`Error::Model`] for an object that is not understood.
    pub async fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        match Self::object_of(checkpoint).await? {
            None => Ok(None),
            Some((place, object)) => Self::parse(&place, &object).map(Some),
        }
    }

    /// The object of [`QuantConfig::of`] and how messages name it.
    ///
    /// # Errors
    /// [`Error::Model`] if the file is not JSON or does not say its method.
    pub async fn object_of(checkpoint: &Checkpoint) -> Result<Option<(String, Value)>> {
        let there = |key: &str| checkpoint.config().get(key).filter(|object| !object.is_null());
        if let Some(object) = there(KEY) {
            let place = format!("{}, {KEY}", checkpoint.place(CONFIG));
            if object.get("quant_method").is_none() {
                return Err(Error::model(place, "it does not say its \"quant_method\"", ADVICE));
            }
            return Ok(Some((place, object.clone())));
        }
        if let Some(object) = there(EARLY_KEY) {
            let object = object.get(KEY).unwrap_or(object);
            return Ok(Some((format!("{}, {EARLY_KEY}", checkpoint.place(CONFIG)), object.clone())));
        }
        if checkpoint.source().size(QUANTIZE_CONFIG).is_none() {
            return Ok(None);
        }
        let place = checkpoint.place(QUANTIZE_CONFIG);
        let text = read_text(&**checkpoint.source(), QUANTIZE_CONFIG).await?;
        let object = parse_json(&place, &text)?;
        Ok(Some((place, object)))
    }

    /// Reads the object itself. Without `quant_method` and `checkpoint_format`, as early tools
    /// wrote it, it is GPTQ of the first format, or compressed-tensors if it has `config_groups`.
    ///
    /// # Errors
    /// As [`QuantConfig::of`]; `place` is how they name the object.
    pub fn parse(place: &str, object: &Value) -> Result<Self> {
        let fields = Fields { place, values: as_object(place, object)? };
        let unnamed = if fields.value("config_groups").is_some() { "compressed-tensors" } else { "gptq" };
        match fields.text("quant_method")?.unwrap_or(unnamed) {
            "gptq" => gptq::parse(&fields),
            "compressed-tensors" | "sparseml" => compressed::parse(&fields),
            other => Err(Error::unsupported(
                format_args!("{place}: the model is quantized with {other:?}"),
                "Give a GPTQ, a compressed-tensors or an unquantized model",
            )),
        }
    }

    /// The scheme of a module, `None` if the config leaves it alone. That a module is quantized at
    /// all shows in its tensors.
    ///
    /// # Errors
    /// None so far; a rule may become one that cannot be applied.
    pub fn scheme_of(&self, module: &str) -> Result<Option<Scheme>> {
        Ok(match self.rules.iter().find(|rule| rule.target.matches(module)) {
            Some(rule) => rule.scheme,
            None if self.others => Some(self.scheme),
            None => None,
        })
    }

    /// The object as `config.json` holds it, and in the GPTQ formats `quantize_config.json` too.
    pub fn to_json(&self) -> Value {
        match self.format {
            Format::Gptq | Format::GptqV2 => gptq::to_json(self),
            Format::CompressedTensors => compressed::to_json(self),
        }
    }
}

/// The output head's name as a module.
pub const LM_HEAD: &str = "lm_head";

const ADVICE: &str = "Compare it with the model's source and fetch the file again";

fn as_object<'a>(place: &str, value: &'a Value) -> Result<&'a Map<String, Value>> {
    value.as_object().ok_or_else(|| Error::model(place, format_args!("{value} is not an object"), ADVICE))
}

/// An object of the file with the words for what is wrong in it. A null counts as absent.
struct Fields<'a> {
    place: &'a str,
    values: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, problem: impl std::fmt::Display) -> Error {
        Error::model(self.place, format_args!("{key:?} is {problem}"), ADVICE)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.value(key)
            .map(|value| {
                value.as_bool().ok_or_else(|| self.wrong(key, format_args!("{value}, not true or false")))
            })
            .transpose()
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.value(key)
            .map(|value| value.as_str().ok_or_else(|| self.wrong(key, format_args!("{value}, not a text"))))
            .transpose()
    }

    /// Bits for each weight.
    fn bits(&self, key: &str) -> Result<Option<u32>> {
        match self.value(key).map(|value| (value.as_u64(), value)) {
            None => Ok(None),
            Some((Some(bits @ (2 | 3 | 4 | 8)), _)) => Ok(Some(bits as u32)),
            Some((_, value)) => Err(Error::unsupported(
                format_args!("{}: {key:?} is {value}", self.place),
                "Codes of 2, 3, 4 and 8 bits can be read",
            )),
        }
    }

    /// −1 or a positive number.
    fn group_size(&self) -> Result<Option<i64>> {
        self.value("group_size")
            .map(|value| {
                value.as_i64().filter(|&size| size == -1 || size > 0).ok_or_else(|| {
                    self.wrong("group_size", format_args!("{value}, not -1 or a positive number"))
                })
            })
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::ZeroFormat;
    use crate::storage::memory::MemorySource;
    use pollster::block_on;
    use serde_json::json;
    use std::rc::Rc;

    fn parse(object: Value) -> Result<QuantConfig> {
        QuantConfig::parse("p", &object)
    }

    fn refusal(object: Value) -> String {
        parse(object).expect_err("must be refused").to_string()
    }

    fn full() -> Value {
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
            "lm_head": false, "checkpoint_format": "gptq", "pack_dtype": "int32", "damp_percent": 0.01,
            "true_sequential": true, "static_groups": true, "dynamic": {}, "meta": {"x": 1}})
    }

    #[test]
    fn what_is_written_is_read_and_written_alike() {
        let config = parse(full()).unwrap();
        assert_eq!(config.to_json().to_string(), full().to_string(), "keys keep their order");
        let mut second = full();
        second["checkpoint_format"] = json!("gptq_v2");
        second["dynamic"] = json!({"-:lm_head": {}, "+:model\\.layers\\.0\\.": {"bits": 8}});
        let config = parse(second.clone()).unwrap();
        assert_eq!(config.format.zeros(), Some(ZeroFormat::V2));
        assert_eq!(config.to_json().to_string(), second.to_string());
    }

    #[test]
    fn early_files_say_less() {
        let config = parse(json!({"bits": 3, "group_size": -1, "damp_percent": 0.01})).unwrap();
        assert_eq!(config.scheme, Scheme { bits: 3, group_size: -1, desc_act: false, sym: true });
        assert_eq!(config.format, Format::Gptq);
    }

    #[test]
    fn other_methods_and_impossible_values_are_named() {
        let method = refusal(json!({"quant_method": "awq", "bits": 4}));
        assert!(method.contains("\"awq\""), "{method}");
        assert!(refusal(json!({"bits": 4, "checkpoint_format": "marlin"})).contains("\"marlin\""));
        assert!(refusal(json!({"bits": 4, "is_marlin_format": true})).contains("\"marlin\""));
        assert!(refusal(json!({"bits": 4, "pack_dtype": "int16"})).contains("\"int16\""));
        assert!(refusal(json!({"bits": 5})).contains("2, 3, 4 and 8"));
        assert!(refusal(json!({"bits": "4"})).contains("\"bits\" is \"4\""));
        assert!(refusal(json!({"group_size": 64})).contains("\"bits\" is missing"));
        assert!(refusal(json!({"bits": 4, "group_size": 0})).contains("\"group_size\" is 0"));
        assert!(refusal(json!({"bits": 4, "sym": 1})).contains("\"sym\" is 1"));
        assert!(refusal(json!({"bits": 4, "dynamic": {"a": {"bits": 7}}})).contains("2, 3, 4 and 8"));
        assert!(refusal(json!({"bits": 4, "dynamic": {"(?!a)": {}}})).contains("(?!a)"));
        assert!(refusal(json!([])).contains("not an object"));
    }

    #[test]
    fn the_first_override_that_matches_counts() {
        let config = parse(json!({"bits": 4, "group_size": 128, "dynamic": {
            "-:.*\\.o_proj$": {},
            "+:model\\.layers\\.1\\.": {"bits": 8, "group_size": 32, "sym": false},
            "model\\.layers\\.": {"desc_act": true}
        }}))
        .unwrap();
        let scheme = |module| config.scheme_of(module).unwrap();
        assert_eq!(scheme("model.layers.1.self_attn.o_proj"), None);
        let eight = scheme("model.layers.1.self_attn.q_proj").unwrap();
        assert_eq!(eight, Scheme { bits: 8, group_size: 32, desc_act: false, sym: false });
        let ordered = scheme("model.layers.11.self_attn.q_proj").unwrap();
        assert_eq!(ordered, Scheme { bits: 4, group_size: 128, desc_act: true, sym: true });
        // A match must begin at the beginning of the name.
        assert_eq!(scheme("text.model.layers.1.mlp"), Some(config.scheme));
    }

    fn of(config: Value, other: Option<Value>) -> Result<Option<QuantConfig>> {
        let mut shard = super::super::header::write([("w", super::super::DType::U8, &[1][..])]).unwrap();
        shard.push(0);
        let mut files = vec![(CONFIG, config.to_string().into_bytes()), ("model.safetensors", shard)];
        files.extend(other.map(|other| (QUANTIZE_CONFIG, other.to_string().into_bytes())));
        let source = Rc::new(MemorySource::new("dir", files));
        block_on(async { QuantConfig::of(&Checkpoint::open(source).await?).await })
    }

    #[test]
    fn config_json_comes_before_quantize_config_json() {
        assert!(of(json!({}), None).unwrap().is_none());
        assert!(of(json!({KEY: null}), None).unwrap().is_none());
        let both = of(json!({KEY: {"quant_method": "gptq", "bits": 2}}), Some(json!({"bits": 3})));
        assert_eq!(both.unwrap().unwrap().scheme.bits, 2);
        assert_eq!(of(json!({}), Some(json!({"bits": 3}))).unwrap().unwrap().scheme.bits, 3);
        let unnamed = of(json!({KEY: {"bits": 4}}), None).unwrap_err().to_string();
        assert!(unnamed.contains("dir/config.json") && unnamed.contains("quant_method"), "{unnamed}");
    }
}
