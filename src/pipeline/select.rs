//! Which linear layer is quantized how: one scheme for most, what differs for some.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::allocation::{Allocation, Unit, kind};
use super::bits::Mixed;
use super::groups;
use crate::checkpoint::Format;
use crate::error::{Error, Result};
use crate::face::{self, Words};
use crate::gptq::scheme::{BITS, Scheme};
use crate::model::LinearSpec;
use crate::model::arch::Stage;

/// What is written, beyond the scheme of most layers. Part of what a stopped run must repeat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Output {
    pub format: Format,
    /// The first that matches a module counts.
    pub overrides: Vec<Override>,
    /// Modules that stay in 16 bits, by regexes; these count before any override.
    pub skip: Vec<String>,
    /// Quantize the output head too.
    pub lm_head: bool,
    /// Each layer's own largest group size instead of the scheme's.
    #[serde(default)]
    pub auto_groups: bool,
    /// Every token makes every expert's Hessian.
    #[serde(default)]
    pub all_experts: bool,
    /// An average instead of the scheme's bits.
    #[serde(default)]
    pub mixed: Option<Mixed>,
}

/// What differs for the modules whose name a regex matches, anywhere in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Override {
    pub pattern: String,
    pub values: Values,
}

/// Fields of a [`Scheme`] that may differ; `None` leaves them as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Values {
    pub bits: Option<u32>,
    /// −1 for one group per row.
    pub group_size: Option<i64>,
    pub sym: Option<bool>,
    pub desc_act: Option<bool>,
    pub static_groups: Option<bool>,
    pub mse: Option<bool>,
}

const SYNTAX: &str = "Write REGEX=bits:8,group_size:32 in quotation marks; sym, asym, desc_act, static_groups and mse may follow too";

impl Override {
    /// Reads `REGEX=key:value,key:value`. The last `=` ends the regex.
    ///
    /// # Errors
    /// [`Error::Options`] saying what cannot be understood.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |problem: fmt::Arguments| {
            Error::options(format_args!("{} {text:?}: {problem}", face::OVERRIDE), SYNTAX)
        };
        let Some((pattern, list)) = text.rsplit_once('=') else {
            return Err(wrong(format_args!("there is no \"=\"")));
        };
        if pattern.is_empty() {
            return Err(wrong(format_args!("the regex is empty")));
        }
        let mut values = Values::default();
        let mut keys = Vec::new();
        for item in list.split(',').map(str::trim) {
            let (key, value) =
                item.split_once(':').map_or((item, None), |(key, value)| (key, Some(value.trim())));
            let field = if key.trim() == "asym" { "sym" } else { key.trim() };
            if keys.contains(&field) {
                return Err(wrong(format_args!("{field} is given twice")));
            }
            keys.push(field);
            let flag = || match value {
                None | Some("true") => Ok(true),
                Some("false") => Ok(false),
                Some(other) => Err(wrong(format_args!("{key} is {other:?}, not true or false"))),
            };
            match (key.trim(), value) {
                ("bits", Some(value)) => {
                    let no_width = format_args!(
                        "bits is {value:?}, not 2, 3, 4 or 8; an average is for {} alone",
                        face::BITS
                    );
                    let bits = value.parse().map_err(|_| wrong(no_width))?;
                    values.bits = Some(bits);
                }
                ("group_size", Some(value)) => {
                    let size = value.parse().map_err(|_| wrong(format_args!("group_size is {value:?}")))?;
                    values.group_size = Some(size);
                }
                ("sym", _) => values.sym = Some(flag()?),
                ("asym", _) => values.sym = Some(!flag()?),
                ("desc_act", _) => values.desc_act = Some(flag()?),
                ("static_groups", _) => values.static_groups = Some(flag()?),
                ("mse", _) => values.mse = Some(flag()?),
                ("", _) => return Err(wrong(format_args!("nothing is said to differ"))),
                (key @ ("bits" | "group_size"), None) => {
                    return Err(wrong(format_args!("{key} is without a value")));
                }
                (key, _) => return Err(wrong(format_args!("{key:?} cannot differ from layer to layer"))),
            }
        }
        let parsed = Self { pattern: pattern.to_owned(), values };
        parsed.regex()?;
        Ok(parsed)
    }

    fn regex(&self) -> Result<Regex> {
        regex(face::OVERRIDE, &self.pattern)
    }

    /// `base` with what differs.
    fn scheme(&self, base: &Scheme) -> Result<Scheme> {
        let Values { bits, group_size, sym, desc_act, static_groups, mse } = self.values;
        let mut scheme = Scheme {
            bits: bits.unwrap_or(base.bits),
            group_size: match group_size {
                None => base.group_size,
                Some(size) => Scheme::group_size_of(size)?,
            },
            sym: sym.unwrap_or(base.sym),
            desc_act: desc_act.unwrap_or(base.desc_act),
            static_groups: static_groups.unwrap_or(base.static_groups),
            mse: mse.unwrap_or(base.mse),
            ..base.clone()
        };
        scheme.refit &= scheme.can_refit();
        scheme.check().map_err(|error| match error {
            Error::Options { problem, advice } => {
                Error::options(format_args!("{} {:?}: {problem}", face::OVERRIDE, self.pattern), advice)
            }
            other => other,
        })?;
        Ok(scheme)
    }
}

/// As it is given on the command line.
impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Values { bits, group_size, sym, desc_act, static_groups, mse } = self.values;
        let mut parts = Vec::new();
        parts.extend(bits.map(|bits| format!("bits:{bits}")));
        parts.extend(group_size.map(|size| format!("group_size:{size}")));
        let flags = [("sym", sym), ("desc_act", desc_act), ("static_groups", static_groups), ("mse", mse)];
        parts.extend(flags.iter().filter_map(|(name, flag)| flag.map(|flag| format!("{name}:{flag}"))));
        write!(f, "{}={}", self.pattern, parts.join(","))
    }
}

/// How each module is quantized.
pub struct Assignment {
    /// By module; `None` leaves it in 16 bits.
    pub schemes: HashMap<String, Option<Scheme>>,
    /// For an average, the layers whose bits count in it, and how many each has: as it was settled, or as may
    /// be assumed before that.
    pub units: Vec<Unit>,
    pub allocation: Option<Allocation>,
}

/// A module on the way to its scheme.
struct Module<'a> {
    block: usize,
    stage: &'static str,
    spec: &'a LinearSpec,
    scheme: Option<Scheme>,
    /// An override says its bits.
    told: bool,
}

/// Settles for each module of `stages`, which come with the numbers of their blocks, how it is quantized.
///
/// # Errors
/// [`Error::Options`] for a regex that cannot be read or matches no module, a scheme that cannot be, an average
/// that cannot be kept, and different schemes within a stage: what shares an input is one matrix in serving
/// engines.
pub fn assign(base: &Scheme, output: &Output, stages: &[(usize, Stage)]) -> Result<Assignment> {
    let names: Vec<&str> =
        stages.iter().flat_map(|(_, stage)| &stage.linears).map(|spec| spec.module.as_str()).collect();
    let mut skips = Vec::new();
    for pattern in &output.skip {
        let regex = regex(face::SKIP, pattern)?;
        check_matches(face::SKIP, pattern, &regex, &names)?;
        skips.push(regex);
    }
    let mut overrides = Vec::new();
    for entry in &output.overrides {
        let regex = entry.regex()?;
        check_matches(face::OVERRIDE, &entry.pattern, &regex, &names)?;
        overrides.push((regex, entry.scheme(base)?, entry.values));
    }
    let mut modules = Vec::with_capacity(names.len());
    for (block, stage) in stages {
        for spec in &stage.linears {
            let module = spec.module.as_str();
            let differs = overrides.iter().find(|(regex, _, _)| regex.is_match(module));
            let told = |value: fn(&Values) -> bool| differs.is_some_and(|(_, _, values)| value(values));
            let mut scheme = differs.map_or(base, |(_, scheme, _)| scheme).clone();
            if output.auto_groups && !told(|values| values.group_size.is_some()) {
                scheme.group_size = groups::largest(spec.in_features);
            }
            modules.push(Module {
                block: *block,
                stage: stage.name,
                spec,
                scheme: (!skips.iter().any(|regex| regex.is_match(module))).then_some(scheme),
                told: told(|values| values.bits.is_some()),
            });
        }
    }
    let (mut units, mut allocation) = (Vec::new(), None);
    if let Some(mixed) = &output.mixed {
        units = units_of(&modules, output.format);
        let allocation = allocation.insert(match &mixed.allocation {
            Some(allocation) => allocation.clone(),
            None => Allocation::assumed(mixed.average, &units)?,
        });
        for module in modules.iter_mut().filter(|module| !module.told) {
            let Some(scheme) = &mut module.scheme else { continue };
            scheme.bits = allocation.bits(module.block, kind(module.stage)).ok_or_else(|| {
                Error::resume(
                    format!("the stopped run settled no bits for {}", module.spec.module),
                    face::REPEAT_OR_START_ANEW,
                )
            })?;
        }
    }
    let mut modules = modules.into_iter();
    let mut schemes = HashMap::new();
    for (_, stage) in stages {
        let mut before: Option<(&str, Option<Scheme>, bool)> = None;
        for Module { spec, scheme, told, .. } in modules.by_ref().take(stage.linears.len()) {
            let module = spec.module.as_str();
            // Bits that are told are no others' of a unit, even where they come out the same.
            let told = told && output.mixed.is_some();
            let differs = |(_, of_other, told_other): &&(_, _, _)| *of_other != scheme || *told_other != told;
            if let Some((other, of_other, told_other)) = before.as_ref().filter(differs) {
                let by_average = |told: bool| output.mixed.is_some() && !told;
                return Err(Error::options(
                    format_args!(
                        "{other} ({}) and {module} ({}) share an input and are one matrix in serving engines, but \
                         would be quantized differently",
                        described(of_other.as_ref(), by_average(*told_other)),
                        described(scheme.as_ref(), by_average(told))
                    ),
                    format_args!(
                        "Let {} and {} match all of {}",
                        face::OVERRIDE,
                        face::SKIP,
                        names_of(stage)
                    ),
                ));
            }
            before = Some((module, scheme.clone(), told));
            schemes.insert(module.to_owned(), scheme);
        }
    }
    Ok(Assignment { schemes, units, allocation })
}

/// What is quantized with bits that nobody told, put together where serving engines do.
fn units_of(modules: &[Module], format: Format) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    for Module { block, stage, spec, .. } in modules.iter().filter(|of| of.scheme.is_some() && !of.told) {
        let fits = |width: &u32| {
            let codes = codes_together(format, *width);
            spec.in_features.is_multiple_of(codes) && spec.out_features.is_multiple_of(codes)
        };
        let weights = (spec.in_features * spec.out_features) as u64;
        let kind = kind(stage);
        match units.iter_mut().rev().take_while(|unit| unit.block == *block).find(|unit| unit.kind == kind) {
            Some(unit) => {
                unit.modules.push(spec.module.clone());
                unit.weights += weights;
                unit.widths.retain(fits);
            }
            None => units.push(Unit {
                block: *block,
                kind: kind.to_owned(),
                modules: vec![spec.module.clone()],
                weights,
                widths: BITS.into_iter().filter(fits).collect(),
            }),
        }
    }
    units
}

/// How many codes of that width a format stores together, so that a layer's inputs and outputs must be a
/// multiple of them. 32 codes of any width fill whole words; 2, 4 and 8 bits need only 32 / bits.
pub fn codes_together(format: Format, bits: u32) -> usize {
    match (format, bits) {
        (Format::CompressedTensors, _) => 1,
        (_, 3) => 32,
        (_, bits) => 32 / bits as usize,
    }
}

/// All that may differ from layer to layer.
fn described(scheme: Option<&Scheme>, by_average: bool) -> String {
    let Some(scheme) = scheme else { return "16 bits".to_owned() };
    let bits = if by_average { "bits by the average".to_owned() } else { format!("{} bits", scheme.bits) };
    let group = scheme.group_size.map_or(-1, |size| size as i64);
    let mut text = format!("{bits}, group {group}, {}", if scheme.sym { "sym" } else { "asym" });
    let flags = [("desc_act", scheme.desc_act), ("static_groups", scheme.static_groups), ("mse", scheme.mse)];
    for (name, _) in flags.iter().filter(|(_, is_on)| *is_on) {
        text.push_str(", ");
        text.push_str(name);
    }
    text
}

fn names_of(stage: &Stage) -> String {
    stage.linears.iter().map(|spec| spec.short).collect::<Vec<_>>().join(", ")
}

fn regex(option: Words, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| {
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or_default().trim().trim_start_matches("error: ");
        Error::options(
            format_args!("{option} {pattern:?} is not a regex ({reason})"),
            "A regex is searched anywhere in a module's name, such as model.layers.0.mlp.down_proj; a dot matches \
             any character",
        )
    })
}

fn check_matches(option: Words, pattern: &str, regex: &Regex, modules: &[&str]) -> Result<()> {
    if modules.iter().any(|module| regex.is_match(module)) {
        return Ok(());
    }
    let head = match regex.is_match(crate::checkpoint::config::LM_HEAD) {
        true => format!(". The head is only quantized with {}", face::QUANTIZE_LM_HEAD),
        false => String::new(),
    };
    Err(Error::options(
        format_args!("{option} {pattern:?} matches no linear layer of this model"),
        format_args!("Near it are {}{head}", near(pattern, modules).join(", ")),
    ))
}

/// The three kinds of module whose name is most like `pattern`, an example of each.
fn near<'a>(pattern: &str, modules: &[&'a str]) -> Vec<&'a str> {
    let mut kinds: BTreeMap<&str, &'a str> = BTreeMap::new();
    for module in modules {
        kinds.entry(module.rsplit('.').next().unwrap_or(module)).or_insert(module);
    }
    let literal: String = pattern.chars().filter(|c| c.is_alphanumeric() || "._".contains(*c)).collect();
    let literal = literal.trim_matches('.');
    // A pattern may stand for any number of a name's last parts.
    let like = |module: &str| {
        let ends = std::iter::successors(Some(module), |end| end.split_once('.').map(|(_, end)| end));
        ends.map(|end| distance(literal, end)).min().unwrap_or(usize::MAX)
    };
    let mut ranked: Vec<(usize, &str)> = kinds.into_values().map(|module| (like(module), module)).collect();
    ranked.sort();
    ranked.into_iter().take(3).map(|(_, module)| module).collect()
}

/// Letters to insert, remove or replace to make one text of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::scheme::Preset;
    use crate::model::ModelConfig;
    use crate::model::arch::stages;

    fn demo_stages() -> Vec<(usize, Stage)> {
        let text = include_str!("../../web/demo/model/config.json");
        let config = ModelConfig::parse(&serde_json::from_str(text).unwrap()).unwrap();
        let of = |layer| stages(&config, layer).into_iter().map(move |stage| (layer, stage));
        (0..config.layers).flat_map(of).collect()
    }

    fn settled(overrides: &[&str], skip: &[&str]) -> Result<HashMap<String, Option<Scheme>>> {
        let output = Output {
            overrides: overrides.iter().map(|text| Override::parse(text).unwrap()).collect(),
            skip: skip.iter().map(|text| text.to_string()).collect(),
            ..Output::default()
        };
        let base = Scheme::preset(Preset::Default, 4, Some(64));
        assign(&base, &output, &demo_stages()).map(|assignment| assignment.schemes)
    }

    #[test]
    fn an_override_is_read_as_it_is_shown() {
        for text in
            ["down_proj=bits:8,group_size:-1", "a=b=sym:false,desc_act:true,static_groups:false,mse:true"]
        {
            assert_eq!(Override::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Override::parse("x=asym").unwrap().values.sym, Some(false));
        assert_eq!(Override::parse("x=desc_act").unwrap().values.desc_act, Some(true));
        for (text, word) in [
            ("down_proj", "no \"=\""),
            ("=bits:8", "regex is empty"),
            ("x=", "nothing is said"),
            ("x=bits:eight", "\"eight\""),
            ("x=bits:4,bits:8", "bits is given twice"),
            ("x=sym,asym", "sym is given twice"),
            ("x=bits", "bits is without a value"),
            ("x=bits:3.5", "an average is for --bits alone"),
            ("x=alpha:0.5", "\"alpha\" cannot differ"),
            ("x=bitz:8", "\"bitz\""),
            ("x=sym:1", "\"1\", not true or false"),
            ("x(=bits:8", "is not a regex"),
        ] {
            let message = Override::parse(text).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn the_first_override_that_matches_counts_and_skipping_before_it() {
        let schemes = settled(
            &[r"layers\.0\..*down=bits:8,group_size:32", "down_proj=bits:2,asym", "mlp=bits:3"],
            &["layers.5.self_attn"],
        )
        .unwrap();
        let bits = |module: &str| schemes[module].as_ref().map(|scheme| scheme.bits);
        assert_eq!(bits("model.layers.0.mlp.down_proj"), Some(8));
        assert_eq!(schemes["model.layers.0.mlp.down_proj"].as_ref().unwrap().group_size, Some(32));
        assert_eq!(bits("model.layers.1.mlp.down_proj"), Some(2));
        assert!(!schemes["model.layers.1.mlp.down_proj"].as_ref().unwrap().sym);
        assert_eq!(bits("model.layers.1.mlp.gate_proj"), Some(3));
        assert_eq!(bits("model.layers.1.self_attn.o_proj"), Some(4));
        assert_eq!(bits("model.layers.5.self_attn.o_proj"), None);
    }

    #[test]
    fn layers_that_share_an_input_stay_together() {
        let message = settled(&["v_proj=bits:8"], &[]).unwrap_err().to_string();
        assert!(
            message
                .contains("layers.0.self_attn.k_proj (4 bits, group 64, sym, desc_act, static_groups, mse)"),
            "{message}"
        );
        assert!(message.contains("layers.0.self_attn.v_proj (8 bits"), "{message}");
        assert!(message.contains("all of q_proj, k_proj, v_proj"), "{message}");
        let message = settled(&[], &["layers.3.mlp.up"]).unwrap_err().to_string();
        assert!(message.contains("layers.3.mlp.up_proj (16 bits)"), "{message}");
        settled(&["[qkv]_proj=bits:8"], &["gate_proj|up_proj"]).unwrap();
    }

    #[test]
    fn a_regex_that_matches_nothing_is_told_what_is_near() {
        let message = settled(&["down_prj=bits:8"], &[]).unwrap_err().to_string();
        assert!(
            message.contains("\"down_prj\" matches no")
                && message.contains("Near it are model.layers.0.mlp.down_proj"),
            "{message}"
        );
        let message = settled(&[], &["self_attention.q_proj"]).unwrap_err().to_string();
        assert!(message.contains("model.layers.0.self_attn.q_proj"), "{message}");
        let message = settled(&["lm_head=bits:8"], &[]).unwrap_err().to_string();
        assert!(message.contains("--quantize-lm-head"), "{message}");
        let message = settled(&["down=bits:5"], &[]).unwrap_err().to_string();
        assert!(message.contains("--override \"down\": --bits 5"), "{message}");
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
