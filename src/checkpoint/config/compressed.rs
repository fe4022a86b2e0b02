//! The object of compressed-tensors.

use serde_json::{Map, Value, json};

use super::{Fields, LM_HEAD, QuantConfig, Rule, Scheme, Target, as_object};
use crate::checkpoint::format::Format;
use crate::error::{Error, Result};

/// What the files are called by that are read and written here.
const PACKED: &str = "pack-quantized";

/// The version whose layout this is.
const VERSION: &str = "0.19.0";

/// The class of modules that all targets are instances of.
const LINEAR: &str = "Linear";

pub(super) fn parse(fields: &Fields) -> Result<QuantConfig> {
    let place = fields.place;
    let named = fields.text("format")?.unwrap_or(PACKED);
    // A mixed config says it of each group.
    if named != "mixed-precision" {
        check_format(place, named)?;
    }
    let sparsity =
        fields.value("sparsity_config").and_then(|config| config.get("format")).and_then(Value::as_str);
    if let Some(other) = sparsity.filter(|&format| format != "dense") {
        return Err(Error::unsupported(
            format_args!("{place}: the weights are sparse ({other:?})"),
            "Give a model without sparsity",
        ));
    }
    if fields.value("transform_config").and_then(Value::as_object).is_some_and(|config| !config.is_empty()) {
        return Err(Error::unsupported(
            format_args!("{place}: the model is run with transforms (\"transform_config\")"),
            "Give a model without transforms",
        ));
    }
    let Some(groups) = fields.value("config_groups") else {
        return Err(fields.wrong("config_groups", "missing"));
    };
    let mut names = Vec::new();
    let mut patterns = Vec::new();
    let mut base = None;
    let mut first = None;
    let mut act_order = false;
    for (group, values) in as_object(place, groups)? {
        let place = format!("{place}, {group}");
        let fields = Fields { place: &place, values: as_object(&place, values)? };
        let scheme = scheme(&fields, &mut act_order)?;
        first = first.or(Some(scheme));
        for target in texts(&fields, "targets")? {
            match target {
                LINEAR => base = base.or(Some(scheme)),
                target => {
                    let rules = if target.starts_with("re:") { &mut patterns } else { &mut names };
                    rules.push(Rule { target: target_of(target)?, scheme: Some(scheme) });
                }
            }
        }
    }
    let Some(first) = first else { return Err(fields.wrong("config_groups", "empty")) };
    let mut config = QuantConfig::new(Format::CompressedTensors, base.unwrap_or(first));
    config.others = base.is_some();
    config.act_order = act_order;
    for ignored in texts(fields, "ignore")? {
        config.rules.push(Rule { target: target_of(ignored)?, scheme: None });
    }
    // Loaders take what is most specific.
    config.rules.append(&mut names);
    config.rules.append(&mut patterns);
    config.lm_head = config.scheme_of(LM_HEAD)?.is_some();
    Ok(config)
}

fn check_format(place: &str, format: &str) -> Result<()> {
    match format {
        PACKED => Ok(()),
        other => Err(Error::unsupported(
            format_args!("{place}: the format is {other:?}"),
            format_args!("Give a model in the format {PACKED}: integer weights of 2, 3, 4 or 8 bits"),
        )),
    }
}

fn target_of(text: &str) -> Result<Target> {
    match text.strip_prefix("re:") {
        Some(pattern) => Target::pattern(pattern),
        None => Ok(Target::Name(text.to_owned())),
    }
}

/// A list of texts; absent is empty.
fn texts<'a>(fields: &Fields<'a>, key: &str) -> Result<Vec<&'a str>> {
    let Some(value) = fields.value(key) else { return Ok(Vec::new()) };
    let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
    texts.ok_or_else(|| fields.wrong(key, format_args!("{value}, not a list of names")))
}

/// The scheme of a group; sets `act_order` where columns were taken by importance.
fn scheme(fields: &Fields, act_order: &mut bool) -> Result<Scheme> {
    if let Some(format) = fields.text("format")? {
        check_format(fields.place, format)?;
    }
    for activations in ["input_activations", "output_activations"] {
        if fields.value(activations).is_some() {
            return Err(Error::unsupported(
                format_args!("{}: activations are quantized too ({activations:?})", fields.place),
                "Give a model whose weights alone are quantized",
            ));
        }
    }
    let Some(weights) = fields.value("weights") else { return Err(fields.wrong("weights", "missing")) };
    let place = format!("{}, weights", fields.place);
    let weights = Fields { place: &place, values: as_object(&place, weights)? };
    if let Some(other) = weights.text("type")?.filter(|&kind| kind != "int") {
        return Err(Error::unsupported(
            format_args!("{place}: the weights are of type {other:?}"),
            "Give a model with integer weights",
        ));
    }
    let Some(bits) = weights.bits("num_bits")? else { return Err(weights.wrong("num_bits", "missing")) };
    let size = weights.group_size()?;
    let strategy = weights.text("strategy")?.unwrap_or(match size {
        Some(-1) => "channel",
        Some(_) => "group",
        None => "tensor",
    });
    let group_size = match (strategy, size) {
        ("channel", _) => -1,
        ("group", Some(size)) if size > 0 => size,
        ("group", _) => return Err(weights.wrong("group_size", "missing")),
        (other, _) => {
            return Err(Error::unsupported(
                format_args!("{place}: scales are by {other:?}"),
                "Give a model whose strategy is \"group\" or \"channel\"",
            ));
        }
    };
    // The names of one thing in different versions.
    let desc_act = match weights.value("actorder") {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(Value::String(text)) => match text.to_lowercase().as_str() {
            "group" | "dynamic" => true,
            "weight" | "static" => {
                *act_order = true;
                false
            }
            _ => return Err(weights.wrong("actorder", format_args!("{text:?}, not weight or group"))),
        },
        Some(other) => return Err(weights.wrong("actorder", format_args!("{other}, not weight or group"))),
    };
    Ok(Scheme {
        bits,
        group_size,
        desc_act: desc_act && strategy == "group",
        sym: weights.flag("symmetric")?.unwrap_or(true),
    })
}

pub(super) fn to_json(config: &QuantConfig) -> Value {
    let mut groups: Vec<(Scheme, Vec<String>)> = Vec::new();
    if config.others {
        groups.push((config.scheme, vec![LINEAR.to_owned()]));
    }
    let mut ignore = Vec::new();
    for rule in &config.rules {
        let text = match &rule.target {
            Target::Name(name) => name.clone(),
            Target::Pattern { text, .. } => format!("re:{text}"),
        };
        let Some(scheme) = rule.scheme else {
            ignore.push(text);
            continue;
        };
        match groups.iter_mut().find(|(of, _)| *of == scheme) {
            Some((_, targets)) => targets.push(text),
            None => groups.push((scheme, vec![text])),
        }
    }
    // Every tied or unquantized head is a linear layer to a loader.
    if !config.lm_head && !ignore.iter().any(|name| name == LM_HEAD) {
        ignore.push(LM_HEAD.to_owned());
    }
    let groups: Map<String, Value> = groups
        .into_iter()
        .enumerate()
        .map(|(index, (scheme, targets))| (format!("group_{index}"), group(config, scheme, &targets)))
        .collect();
    json!({
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
        "sparsity_config": {},
        "transform_config": {},
    })
}

/// Loaders refuse keys that their version does not know, so only those that all know are written.
fn group(config: &QuantConfig, scheme: Scheme, targets: &[String]) -> Value {
    let grouped = scheme.group_size > 0;
    let actorder = match (grouped, scheme.desc_act) {
        (true, true) => Some("group"),
        (true, false) if config.act_order => Some("weight"),
        _ => None,
    };
    json!({
        "targets": targets,
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.sym,
            "strategy": if grouped { "group" } else { "channel" },
            "group_size": grouped.then_some(scheme.group_size),
            "dynamic": false,
            "actorder": actorder,
            "block_structure": null,
            "observer": "minmax",
            "observer_kwargs": {},
        },
        "input_activations": null,
        "output_activations": null,
        "format": PACKED,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(object: &Value) -> Result<QuantConfig> {
        QuantConfig::parse("p", object)
    }

    fn of(weights: Value) -> Value {
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]})
    }

    #[test]
    fn what_is_written_is_read_alike() {
        let four = Scheme { bits: 4, group_size: 32, desc_act: false, sym: true };
        let eight = Scheme { bits: 8, group_size: -1, desc_act: false, sym: false };
        let modules = [
            ("model.layers.0.self_attn.q_proj", Some(four)),
            ("model.layers.0.mlp.down_proj", Some(eight)),
            ("model.layers.1.self_attn.q_proj", Some(four)),
            ("model.layers.1.mlp.down_proj", None),
        ];
        let mut config = QuantConfig::of_modules(Format::CompressedTensors, four, &modules).unwrap();
        config.act_order = true;
        let object = config.to_json();
        assert_eq!(object["ignore"], json!(["model.layers.1.mlp.down_proj", "lm_head"]));
        assert_eq!(object["config_groups"]["group_0"]["weights"]["actorder"], "weight");
        assert_eq!(object["config_groups"]["group_1"]["weights"]["group_size"], Value::Null);
        assert_eq!(object["config_groups"]["group_1"]["weights"]["actorder"], Value::Null);
        let back = parse(&object).unwrap();
        for (name, scheme) in modules {
            assert_eq!(back.scheme_of(name).unwrap(), scheme, "{name}");
        }
        assert_eq!(back.scheme_of("lm_head").unwrap(), None);
        assert!(!back.lm_head && !back.others && back.act_order);
        assert_eq!(back.to_json().to_string(), object.to_string());
    }

    #[test]
    fn one_scheme_names_no_modules() {
        let four = Scheme { bits: 4, group_size: 128, desc_act: true, sym: true };
        let config = QuantConfig::of_modules(Format::CompressedTensors, four, &[("a.q_proj", Some(four))]);
        let object = config.unwrap().to_json();
        assert_eq!(object["config_groups"]["group_0"]["targets"], json!(["Linear"]));
        assert_eq!(object["config_groups"]["group_0"]["weights"]["actorder"], "group");
        assert!(object["config_groups"].get("group_1").is_none());
    }

    #[test]
    fn each_version_spells_it_its_own_way() {
        let scheme = |weights: Value| parse(&of(weights)).unwrap().scheme;
        let plain = Scheme { bits: 4, group_size: 128, desc_act: false, sym: true };
        assert_eq!(scheme(json!({"num_bits": 4, "group_size": 128})), plain);
        for actorder in [json!("static"), json!("weight"), json!(false), json!(null)] {
            assert_eq!(scheme(json!({"num_bits": 4, "group_size": 128, "actorder": actorder})), plain);
        }
        for actorder in [json!("group"), json!("dynamic"), json!("GROUP"), json!(true)] {
            let weights = json!({"num_bits": 4, "group_size": 128, "actorder": actorder,
                "scale_dtype": null, "zp_dtype": null});
            assert!(scheme(weights).desc_act);
        }
        let row =
            scheme(json!({"num_bits": 8, "strategy": "channel", "symmetric": false, "actorder": "group"}));
        assert_eq!(row, Scheme { bits: 8, group_size: -1, desc_act: false, sym: false });
        assert_eq!(scheme(json!({"num_bits": 8, "group_size": -1})).group_size, -1);
        let mut mixed = of(json!({"num_bits": 4, "group_size": 64}));
        mixed["format"] = json!("mixed-precision");
        mixed["config_groups"]["group_0"]["format"] = json!("pack-quantized");
        assert_eq!(parse(&mixed).unwrap().scheme.group_size, 64);
    }

    #[test]
    fn other_schemes_are_refused_by_name() {
        let refusal = |object: Value| parse(&object).unwrap_err().to_string();
        let good = json!({"num_bits": 4, "group_size": 128});
        let mut object = of(good.clone());
        object["format"] = json!("float-quantized");
        assert!(refusal(object).contains("\"float-quantized\""));
        let mut object = of(good.clone());
        object["config_groups"]["group_0"]["input_activations"] = json!({"num_bits": 8});
        assert!(refusal(object).contains("activations are quantized"));
        let mut object = of(good.clone());
        object["sparsity_config"] = json!({"format": "sparse-24-bitmask"});
        assert!(refusal(object).contains("sparse-24-bitmask"));
        assert!(refusal(of(json!({"num_bits": 4}))).contains("\"tensor\""));
        assert!(refusal(of(json!({"num_bits": 4, "type": "float", "group_size": 16}))).contains("\"float\""));
        assert!(refusal(of(json!({"num_bits": 6, "group_size": 16}))).contains("\"num_bits\" is 6"));
        assert!(refusal(of(json!({"group_size": 16}))).contains("\"num_bits\" is missing"));
        let bad = refusal(of(json!({"num_bits": 4, "group_size": 16, "actorder": "column"})));
        assert!(bad.contains("group_0, weights") && bad.contains("column"), "{bad}");
        assert!(refusal(json!({"quant_method": "compressed-tensors"})).contains("config_groups"));
    }

    #[test]
    fn the_most_specific_target_counts_and_what_is_ignored_first() {
        let group = |targets: Value, bits: u32| json!({"targets": targets, "weights": {"num_bits": bits, "group_size": 16}});
        let object = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "a": group(json!(["Linear"]), 2), "b": group(json!(["re:.*q_proj"]), 3),
            "c": group(json!(["x.q_proj"]), 4)}, "ignore": ["re:.*lm_head", "y.q_proj"]});
        let config = parse(&object).unwrap();
        let bits = |module: &str| config.scheme_of(module).unwrap().map(|scheme| scheme.bits);
        assert_eq!(bits("x.q_proj"), Some(4));
        assert_eq!(bits("z.q_proj"), Some(3));
        assert_eq!(bits("x.o_proj"), Some(2));
        assert_eq!((bits("y.q_proj"), bits("lm_head")), (None, None));
    }
}
