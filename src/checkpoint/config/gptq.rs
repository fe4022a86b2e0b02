//! The object of the GPTQ formats.

use serde_json::{Map, Value, json};

use super::{Fields, QuantConfig, Rule, Scheme, Target, as_object};
use crate::checkpoint::format::Format;
use crate::error::{Error, Result};

pub(super) fn parse(fields: &Fields) -> Result<QuantConfig> {
    let place = fields.place;
    let marlin = fields.flag("is_marlin_format")?.unwrap_or(false);
    let format = match fields.text("checkpoint_format")?.unwrap_or("gptq") {
        "gptq" if !marlin => Format::Gptq,
        "gptq_v2" if !marlin => Format::GptqV2,
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
    let base = scheme(fields, Scheme { bits: 4, group_size: 128, desc_act: false, sym: true })?;
    let mut config = QuantConfig::new(format, base);
    match fields.value("dynamic") {
        None | Some(Value::Bool(false)) => {}
        Some(entries) => {
            for (pattern, values) in as_object(place, entries)? {
                config.rules.push(rule(place, pattern, values, base)?);
            }
        }
    }
    config.lm_head = fields.flag("lm_head")?.unwrap_or(false);
    config.damp_percent = fields.value("damp_percent").and_then(Value::as_f64);
    config.true_sequential = fields.flag("true_sequential")?;
    config.static_groups = fields.flag("static_groups")?;
    if let Some(meta) = fields.value("meta") {
        config.meta = as_object(place, meta)?.clone();
    }
    Ok(config)
}

/// An entry of `dynamic`: `+:regex` (or a bare regex) with what differs, `-:regex` for modules that are
/// left alone.
fn rule(place: &str, pattern: &str, values: &Value, base: Scheme) -> Result<Rule> {
    if let Some(text) = pattern.strip_prefix("-:") {
        return Ok(Rule { target: Target::pattern(text)?, scheme: None });
    }
    let none = Map::new();
    let values = if values.is_null() { &none } else { as_object(place, values)? };
    let scheme = scheme(&Fields { place, values }, base)?;
    let target = Target::pattern(pattern.strip_prefix("+:").unwrap_or(pattern))?;
    Ok(Rule { target, scheme: Some(scheme) })
}

/// `base` with what these fields say instead.
fn scheme(fields: &Fields, base: Scheme) -> Result<Scheme> {
    Ok(Scheme {
        bits: fields.bits("bits")?.unwrap_or(base.bits),
        group_size: fields.group_size()?.unwrap_or(base.group_size),
        desc_act: fields.flag("desc_act")?.unwrap_or(base.desc_act),
        sym: fields.flag("sym")?.unwrap_or(base.sym),
    })
}

pub(super) fn to_json(config: &QuantConfig) -> Value {
    let Scheme { bits, group_size, desc_act, sym } = config.scheme;
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| object.insert(key.to_string(), value);
    put("quant_method", json!("gptq"));
    put("bits", json!(bits));
    put("group_size", json!(group_size));
    put("desc_act", json!(desc_act));
    put("sym", json!(sym));
    put("lm_head", json!(config.lm_head));
    put("checkpoint_format", json!(config.format.name()));
    put("pack_dtype", json!("int32"));
    if let Some(damp) = config.damp_percent {
        put("damp_percent", json!(damp));
    }
    if let Some(flag) = config.true_sequential {
        put("true_sequential", json!(flag));
    }
    if let Some(flag) = config.static_groups {
        put("static_groups", json!(flag));
    }
    let dynamic: Map<String, Value> = config.rules.iter().map(|rule| entry(rule, config.scheme)).collect();
    put("dynamic", Value::Object(dynamic));
    put("meta", Value::Object(config.meta.clone()));
    Value::Object(object)
}

fn entry(rule: &Rule, base: Scheme) -> (String, Value) {
    let text = match &rule.target {
        Target::Name(name) => format!("^{}$", regex::escape(name)),
        Target::Pattern { text, .. } => text.clone(),
    };
    let Some(scheme) = rule.scheme else { return (format!("-:{text}"), json!({})) };
    let mut differs = Map::new();
    let mut put = |key: &str, value: Value| differs.insert(key.to_owned(), value);
    if scheme.bits != base.bits {
        put("bits", json!(scheme.bits));
    }
    if scheme.group_size != base.group_size {
        put("group_size", json!(scheme.group_size));
    }
    if scheme.desc_act != base.desc_act {
        put("desc_act", json!(scheme.desc_act));
    }
    if scheme.sym != base.sym {
        put("sym", json!(scheme.sym));
    }
    (format!("+:{text}"), Value::Object(differs))
}
