//! Patterns that match given modules.

use std::collections::{BTreeMap, BTreeSet};

/// Modules that serving engines make one of, and its name.
pub const FUSED: [(&[&str], &str); 2] =
    [(&["q_proj", "k_proj", "v_proj"], "qkv_proj"), (&["gate_proj", "up_proj"], "gate_up_proj")];

/// A regex that matches exactly the names `modules`, the same in every dialect. With `fused` it also
/// matches what serving engines call fused groups of them: they look for the fused name.
///
/// Blocks in which the same layers are meant are written together:
/// `^model\.layers\.(?:0|1)\.mlp\.down_proj$`.
pub fn pattern_of(modules: &[&str], fused: bool) -> String {
    // What comes before the block's number and the block's modules → numbers.
    let mut blocks: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
    let mut alone = Vec::new();
    for module in modules {
        match split(module) {
            Some((before, number, after)) => {
                blocks.entry((before, number)).or_default().insert(after.to_owned());
            }
            None => alone.push(regex::escape(module)),
        }
    }
    let mut alike: BTreeMap<(&str, BTreeSet<String>), Vec<&str>> = BTreeMap::new();
    for ((before, number), mut parts) in blocks {
        if fused {
            add_fused(&mut parts);
        }
        alike.entry((before, parts)).or_default().push(number);
    }
    let mut choices = alone;
    for ((before, parts), mut numbers) in alike {
        numbers.sort_by_key(|number| (number.len(), *number));
        let numbers = one_of(numbers.into_iter().map(str::to_owned));
        let parts = one_of(parts.into_iter().map(|part| regex::escape(&part)));
        choices.push(format!("{}{numbers}{parts}", regex::escape(before)));
    }
    format!("^{}$", one_of(choices.into_iter()))
}

/// `model.layers.3.mlp.up_proj` into `model.layers.`, `3` and `.mlp.up_proj`.
fn split(module: &str) -> Option<(&str, &str, &str)> {
    let mut start = 0;
    for part in module.split('.') {
        if start > 0 && !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit()) {
            let end = start + part.len();
            return Some((&module[..start], part, &module[end..]));
        }
        start += part.len() + 1;
    }
    None
}

fn add_fused(parts: &mut BTreeSet<String>) {
    for (members, name) in FUSED {
        let stems: Vec<String> =
            parts.iter().filter_map(|part| part.strip_suffix(members[0])).map(str::to_owned).collect();
        for stem in stems {
            if members.iter().all(|member| parts.contains(&format!("{stem}{member}"))) {
                parts.insert(format!("{stem}{name}"));
            }
        }
    }
}

fn one_of(mut choices: impl ExactSizeIterator<Item = String>) -> String {
    match choices.len() {
        1 => choices.next().unwrap_or_default(),
        _ => format!("(?:{})", choices.collect::<Vec<_>>().join("|")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    #[test]
    fn blocks_with_the_same_layers_are_written_together() {
        let modules =
            ["model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj", "model.layers.2.mlp.down_proj"];
        assert_eq!(pattern_of(&modules, false), r"^model\.layers\.(?:0|2|10)\.mlp\.down_proj$");
        assert_eq!(pattern_of(&["lm_head"], false), "^lm_head$");
        let both = pattern_of(&["lm_head", "model.layers.0.mlp.down_proj"], true);
        assert_eq!(both, r"^(?:lm_head|model\.layers\.0\.mlp\.down_proj)$");
    }

    #[test]
    fn exactly_the_given_names_match() {
        let all: Vec<String> = (0..12)
            .flat_map(|layer| {
                ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"]
                    .map(|part| format!("model.layers.{layer}.{part}"))
            })
            .collect();
        for seed in 0..50usize {
            let chosen: Vec<&str> = all
                .iter()
                .enumerate()
                .filter(|(i, _)| (i * 7 + seed * 13) % 11 < 1 + seed % 9)
                .map(|(_, n)| n.as_str())
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let regex = Regex::new(&pattern_of(&chosen, true)).unwrap();
            for name in &all {
                assert_eq!(regex.is_match(name), chosen.contains(&name.as_str()), "{name} in {regex}");
            }
        }
    }

    #[test]
    fn a_whole_fused_group_matches_under_its_fused_name_too() {
        let part = |short: &str| format!("model.layers.3.self_attn.{short}");
        let modules = ["q_proj", "k_proj", "v_proj"].map(part);
        let modules: Vec<&str> = modules.iter().map(String::as_str).collect();
        let matches = |pattern: String| Regex::new(&pattern).unwrap().is_match(&part("qkv_proj"));
        assert!(matches(pattern_of(&modules, true)));
        assert!(!matches(pattern_of(&modules, false)));
        assert!(!matches(pattern_of(&modules[..2], true)));
    }
}
