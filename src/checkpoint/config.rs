//! The object `quantization_config`: how a checkpoint says that it is quantized, and how.

use regex::Regex;
use serde_json::{Map, Value, json};

use super::reader::{Checkpoint, parse_json, read_text};
use super::{CONFIG, QUANTIZE_CONFIG};
use crate::error::{Error, Result};

pub use super::pack::ZeroFormat;

/// The key of [`CONFIG`] that holds the object.
const KEY: &str = "quantization_config";

/// The grid of one linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Input features that share a scale; −1 is all of a row.
    pub group_size: i64,
    /// Whether groups follow a permuted order, so that `g_idx` must be looked at.
    pub desc_act: bool,
    /// Whether every zero point is the middle code.
    pub sym: bool,
}

/// One entry of `dynamic`: what differs for the modules whose name its regex matches.
#[derive(Debug, Clone)]
pub struct Override {
    /// `+:regex`, `-:regex` (left alone) or a bare regex, which means `+:`.
    pattern: String,
    values: Map<String, Value>,
    regex: Regex,
}

impl Override {
    /// `pattern` as it stands in the file; `values` may hold any field of [`Scheme`] and fields that
    /// only other tools know. As in the loaders, the regex must match from the beginning of a name
    /// but not up to its end.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a regex that cannot be used here (look-around and
    /// back-references), or a value that is no legal scheme.
    pub fn new(pattern: impl Into<String>, values: Map<String, Value>) -> Result<Self> {
        let pattern = pattern.into();
        let text = pattern.strip_prefix("+:").or_else(|| pattern.strip_prefix("-:")).unwrap_or(&pattern);
        let regex = Regex::new(&format!("^(?:{text})")).map_err(|error| {
            Error::unsupported(
                format_args!("the pattern {pattern:?} under \"dynamic\" cannot be used ({error})"),
                "Write it without look-around and back-references",
            )
        })?;
        Ok(Self { pattern, values, regex })
    }

    fn leaves_alone(&self) -> bool {
        self.pattern.starts_with("-:")
    }
}

/// A GPTQ `quantization_config`.
#[derive(Debug, Clone)]
pub struct QuantConfig {
    /// What holds for every module that `dynamic` does not name.
    pub scheme: Scheme,
    /// Whether the output head is quantized too.
    pub lm_head: bool,
    pub format: ZeroFormat,
    /// How it was made; loaders do not need these.
    pub damp_percent: Option<f64>,
    pub true_sequential: Option<bool>,
    pub static_groups: Option<bool>,
    /// The first entry that matches a module counts.
    pub dynamic: Vec<Override>,
    /// Fields of the tool's own.
    pub meta: Map<String, Value>,
}

impl QuantConfig {
    /// A config with this scheme for all modules, in the format `gptq`.
    pub fn new(scheme: Scheme) -> Self {
        Self {
            scheme,
            lm_head: false,
            format: ZeroFormat::V1,
            damp_percent: None,
            true_sequential: None,
            static_groups: None,
            dynamic: Vec::new(),
            meta: Map::new(),
        }
    }

    /// Reads the config of a checkpoint from `config.json`, or else from `quantize_config.json`;
    /// `None` if the checkpoint is not quantized.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a method or format other than GPTQ, [`Error::Model`] for an object
    /// that is not understood.
    pub async fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        if let Some(object) = checkpoint.config().get(KEY).filter(|object| !object.is_null()) {
            let place = format!("{}, {KEY}", checkpoint.place(CONFIG));
            if object.get("quant_method").is_none() {
                return Err(Error::model(place, "it does not say its \"quant_method\"", ADVICE));
            }
            return Self::parse(&place, object).map(Some);
        }
        if checkpoint.source().size(QUANTIZE_CONFIG).is_none() {
            return Ok(None);
        }
        let place = checkpoint.place(QUANTIZE_CONFIG);
        let text = read_text(&**checkpoint.source(), QUANTIZE_CONFIG).await?;
        Self::parse(&place, &parse_json(&place, &text)?).map(Some)
    }

    /// Reads the object itself. Without `quant_method` and `checkpoint_format`, as early tools
    /// wrote it, it is GPTQ of the first format.
    ///
    /// # Errors
    /// As [`QuantConfig::of`]; `place` is how they name the object.
    pub fn parse(place: &str, object: &Value) -> Result<Self> {
        let fields = Fields { place, values: as_object(place, object)? };
        match fields.text("quant_method")?.unwrap_or("gptq") {
            "gptq" => {}
            other => {
                return Err(Error::unsupported(
                    format_args!("{place}: the model is quantized with {other:?}"),
                    "Give a GPTQ or an unquantized model",
                ));
            }
        }
        let marlin = fields.flag("is_marlin_format")?.unwrap_or(false);
        let format = match fields.text("checkpoint_format")?.unwrap_or("gptq") {
            "gptq" if !marlin => ZeroFormat::V1,
            "gptq_v2" if !marlin => ZeroFormat::V2,
            other => {
                let other = if marlin { "marlin" } else { other };
                return Err(Error::unsupported(
                    format_args!("{place}: the checkpoint format is {other:?}"),
                    "Give a model in the format gptq or gptq_v2",
                ));
            }
        };
        if let Some(other) = fields.text("pack_dtype")?.filter(|&dtype| dtype != "int32") {
            return Err(Error::unsupported(
                format_args!("{place}: codes are packed in {other:?}"),
                "Give a model packed in int32",
            ));
        }
        if fields.value("bits").is_none() {
            return Err(fields.wrong("bits", "missing"));
        }
        let scheme = fields.scheme(Scheme { bits: 4, group_size: 128, desc_act: false, sym: true })?;

        let mut dynamic = Vec::new();
        match fields.value("dynamic") {
            None | Some(Value::Bool(false)) => {}
            Some(entries) => {
                for (pattern, values) in as_object(place, entries)? {
                    let values = match values {
                        Value::Null => Map::new(),
                        values => as_object(place, values)?.clone(),
                    };
                    Fields { place, values: &values }.scheme(scheme)?;
                    dynamic.push(Override::new(pattern, values)?);
                }
            }
        }
        let meta = match fields.value("meta") {
            None => Map::new(),
            Some(meta) => as_object(place, meta)?.clone(),
        };
        Ok(Self {
            scheme,
            lm_head: fields.flag("lm_head")?.unwrap_or(false),
            format,
            damp_percent: fields.value("damp_percent").and_then(Value::as_f64),
            true_sequential: fields.flag("true_sequential")?,
            static_groups: fields.flag("static_groups")?,
            dynamic,
            meta,
        })
    }

    /// The scheme of a module, `None` if `dynamic` leaves it alone. That a module is quantized at
    /// all shows in its tensors.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::Model`] for a scheme in `dynamic` that cannot be.
    pub fn scheme_of(&self, module: &str) -> Result<Option<Scheme>> {
        match self.dynamic.iter().find(|entry| entry.regex.is_match(module)) {
            None => Ok(Some(self.scheme)),
            Some(entry) if entry.leaves_alone() => Ok(None),
            Some(entry) => Fields { place: module, values: &entry.values }.scheme(self.scheme).map(Some),
        }
    }

    /// The object as `config.json` and `quantize_config.json` hold it.
    pub fn to_json(&self) -> Value {
        let Scheme { bits, group_size, desc_act, sym } = self.scheme;
        let checkpoint_format = match self.format {
            ZeroFormat::V1 => "gptq",
            ZeroFormat::V2 => "gptq_v2",
        };
        let mut object = Map::new();
        let mut put = |key: &str, value: Value| object.insert(key.to_string(), value);
        put("quant_method", json!("gptq"));
        put("bits", json!(bits));
        put("group_size", json!(group_size));
        put("desc_act", json!(desc_act));
        put("sym", json!(sym));
        put("lm_head", json!(self.lm_head));
        put("checkpoint_format", json!(checkpoint_format));
        put("pack_dtype", json!("int32"));
        if let Some(damp) = self.damp_percent {
            put("damp_percent", json!(damp));
        }
        if let Some(flag) = self.true_sequential {
            put("true_sequential", json!(flag));
        }
        if let Some(flag) = self.static_groups {
            put("static_groups", json!(flag));
        }
        let dynamic: Map<String, Value> = self
            .dynamic
            .iter()
            .map(|entry| (entry.pattern.clone(), Value::Object(entry.values.clone())))
            .collect();
        put("dynamic", Value::Object(dynamic));
        put("meta", Value::Object(self.meta.clone()));
        Value::Object(object)
    }
}

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

    /// `base` with what these fields say instead.
    fn scheme(&self, base: Scheme) -> Result<Scheme> {
        let bits = match self.value("bits").map(|value| (value.as_u64(), value)) {
            None => base.bits,
            Some((Some(bits @ (2 | 3 | 4 | 8)), _)) => bits as u32,
            Some((_, value)) => {
                return Err(Error::unsupported(
                    format_args!("{}: \"bits\" is {value}", self.place),
                    "The GPTQ format has 2, 3, 4 and 8 bits",
                ));
            }
        };
        let group_size = match self.value("group_size") {
            None => base.group_size,
            Some(value) => value.as_i64().filter(|&size| size == -1 || size > 0).ok_or_else(|| {
                self.wrong("group_size", format_args!("{value}, not -1 or a positive number"))
            })?,
        };
        Ok(Scheme {
            bits,
            group_size,
            desc_act: self.flag("desc_act")?.unwrap_or(base.desc_act),
            sym: self.flag("sym")?.unwrap_or(base.sym),
        })
    }
}

/// `config.json` with `quantization_config` added at its end, or replaced where it stands. Every
/// other byte stays as it is.
///
/// # Errors
/// [`Error::Model`] if `config_text` is not a JSON object.
pub fn edited_config(config_text: &str, quant: &QuantConfig) -> Result<String> {
    as_object(CONFIG, &parse_json(CONFIG, config_text)?)?;
    // Strings cannot hold a line break in JSON, so this only indents.
    let object = format!("{:#}", quant.to_json()).replace('\n', "\n  ");
    let spans = member_spans(config_text);
    if let Some((_, span)) = spans.iter().rev().find(|(key, _)| key == KEY) {
        return Ok(format!("{}{object}{}", &config_text[..span.start], &config_text[span.end..]));
    }
    let close = config_text.rfind('}').unwrap_or(config_text.len());
    let kept = config_text[..close].trim_end();
    let comma = if spans.is_empty() { "" } else { "," };
    Ok(format!("{kept}{comma}\n  \"{KEY}\": {object}\n{}", &config_text[close..]))
}

/// Key and place of the value of each member of the outermost object of `text`, which is known to
/// be valid JSON: only strings and nesting need to be told apart.
fn member_spans(text: &str) -> Vec<(String, std::ops::Range<usize>)> {
    let mut members = Vec::new();
    let mut depth = 0;
    // Where a string began, and whether the next character is escaped.
    let mut string: Option<(usize, bool)> = None;
    let mut last_string = 0..0;
    let mut open: Option<(String, usize)> = None;
    for (at, byte) in text.bytes().enumerate() {
        if let Some((begin, escaped)) = string {
            string = match byte {
                _ if escaped => Some((begin, false)),
                b'\\' => Some((begin, true)),
                b'"' => {
                    last_string = begin..at + 1;
                    None
                }
                _ => Some((begin, false)),
            };
            continue;
        }
        let ends_member = depth == 1 && matches!(byte, b',' | b'}');
        if ends_member && let Some((key, begin)) = open.take() {
            let value = &text[begin..at];
            let start = begin + value.len() - value.trim_start().len();
            members.push((key, start..start + value.trim().len()));
        }
        match byte {
            b'"' => string = Some((at, false)),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b':' if depth == 1 => {
                let key = serde_json::from_str(&text[last_string.clone()]).unwrap_or_default();
                open = Some((key, at + 1));
            }
            _ => {}
        }
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::memory::MemorySource;
    use pollster::block_on;
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
        assert_eq!(config.format, ZeroFormat::V2);
        assert_eq!(config.to_json().to_string(), second.to_string());
    }

    #[test]
    fn early_files_say_less() {
        let config = parse(json!({"bits": 3, "group_size": -1, "damp_percent": 0.01})).unwrap();
        assert_eq!(config.scheme, Scheme { bits: 3, group_size: -1, desc_act: false, sym: true });
        assert_eq!(config.format, ZeroFormat::V1);
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

    #[test]
    fn editing_keeps_every_other_byte() {
        let quant = parse(full()).unwrap();
        let check = |before: &str, head: &str, tail: &str| {
            let after = edited_config(before, &quant).unwrap();
            assert!(after.starts_with(head) && after.ends_with(tail), "{after}");
            let mut expected: Value = serde_json::from_str(before).unwrap();
            expected[KEY] = full();
            let read: Value = serde_json::from_str(&after).unwrap();
            assert_eq!(read.to_string(), expected.to_string());
            after
        };
        check(
            "{\n  \"eps\": 1e-05,\n  \"a\": [1, {\"b\": \"}\\\"{\"}]\n}\n",
            "{\n  \"eps\": 1e-05,\n",
            "\n}\n",
        );
        check("{\"z\":1,\"a\":{}}", "{\"z\":1,\"a\":{},\n", "\n}");
        check("{}", "{\n  \"quantization_config\": {\n    \"quant_method\"", "  }\n}");
        check(
            "{ \"quantization_config\" : {\"bits\":[8]} , \"z\": 1 }",
            "{ \"quantization_config\" : {\n",
            "} , \"z\": 1 }",
        );
        check(
            "{\"a\":\"quantization_config\",\"quantization\\u005fconfig\":null}",
            "{\"a\":\"quantization_config\",",
            "}}",
        );
        // Only the outermost object is meant.
        check("{\"a\": {\"quantization_config\": 1}}", "{\"a\": {\"quantization_config\": 1},", "\n}");
        let once =
            check("{\n  \"a\": 1\n}", "{\n  \"a\": 1,\n  \"quantization_config\": {\n    \"", "\n  }\n}");
        assert_eq!(edited_config(&once, &quant).unwrap(), once);
        for bad in ["[]", "", "{", "1"] {
            assert!(edited_config(bad, &quant).is_err(), "{bad}");
        }
    }
}
