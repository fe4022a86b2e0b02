//! Rotary frequencies, from the configuration.
//!
//! The formulas are those of `modeling_rope_utils.py` in Transformers, computed in f64.

use std::f64::consts::TAU;

use super::config::{Keys, wrong};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::rope::RopeTable;

/// How positions turn the pairs of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Pair i of d/2 turns by position · theta^(−2i/d), before scaling.
    pub theta: f64,
    pub kind: RopeKind,
}

/// How a model trained on short texts was stretched to longer ones.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeKind {
    Default,
    /// All frequencies divided (Chen et al. 2023, arXiv 2306.15595).
    Linear {
        factor: f64,
    },
    /// Slow pairs divided, fast ones kept, a blend between (Llama 3.1).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: f64,
    },
    /// The blend by number of turns, and larger cosines (Peng et al. 2023, arXiv 2309.00071).
    Yarn {
        factor: f64,
        original_positions: f64,
        beta_fast: f64,
        beta_slow: f64,
        /// Whether the blend's ends are rounded to whole pairs.
        truncate: bool,
        /// Multiplies cosines and sines.
        attention_factor: f64,
    },
    /// Each pair divided by a number of its own, and larger cosines (Ding et al. 2024, arXiv 2402.13753).
    LongRope {
        /// For texts of at most `original_positions`.
        short: Vec<f64>,
        /// For longer ones.
        long: Vec<f64>,
        original_positions: usize,
        attention_factor: f64,
    },
}

impl Rope {
    /// The part of each head that turns, where the configuration says.
    pub(super) fn share(config: &Keys) -> Result<Option<f64>> {
        if let Some(keys) = config.get("rope_parameters").and_then(serde_json::Value::as_object)
            && let Some(share) = Keys(keys).float("partial_rotary_factor")?
        {
            return Ok(Some(share));
        }
        let old = config.float("rotary_pct")?;
        Ok(config.float("partial_rotary_factor")?.or(old))
    }

    /// From `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (4).
    pub(super) fn parse(config: &Keys, max_positions: usize) -> Result<Self> {
        let key = if config.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
        let none = serde_json::Map::new();
        let keys = match config.get(key) {
            None => Keys(&none),
            Some(value) => Keys(value.as_object().ok_or_else(|| wrong(key, "it is not an object"))?),
        };
        let theta = match keys.float("rope_theta")? {
            Some(theta) => theta,
            None => config.float("rope_theta")?.unwrap_or(10_000.0),
        };
        if !(theta > 1.0 && theta.is_finite()) {
            return Err(wrong("rope_theta", format!("{theta} is not above 1")));
        }
        if keys.0.values().any(serde_json::Value::is_object) {
            return Err(Error::unsupported(
                format!("a \"{key}\" that differs between kinds of layers is not supported"),
                "Use a model with one rotary embedding",
            ));
        }
        let kind = match keys.string("rope_type")? {
            Some(kind) => kind,
            None => keys.string("type")?.unwrap_or("default"),
        };
        let positive = |name: &str| match keys.float(name)? {
            Some(value) if value > 0.0 && value.is_finite() => Ok(Some(value)),
            Some(value) => Err(wrong(&format!("{key}.{name}"), format!("{value} is not positive"))),
            None => Ok(None),
        };
        let required = |name: &str| {
            positive(name)?.ok_or_else(|| wrong(key, format!("type \"{kind}\" needs a \"{name}\"")))
        };
        let kind = match kind {
            "default" => RopeKind::Default,
            "linear" => RopeKind::Linear { factor: required("factor")? },
            "llama3" => {
                let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
                if high <= low {
                    return Err(wrong(key, "high_freq_factor is not above low_freq_factor"));
                }
                RopeKind::Llama3 {
                    factor: required("factor")?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_positions: required("original_max_position_embeddings")?,
                }
            }
            "yarn" => {
                let original_positions =
                    positive("original_max_position_embeddings")?.unwrap_or(max_positions as f64);
                let factor = match positive("factor")? {
                    Some(factor) => factor,
                    None => max_positions as f64 / original_positions,
                };
                // A factor or scale of 0 counts as absent, as it does in Python.
                let scale = |name: &str| Ok::<_, Error>(keys.float(name)?.filter(|&scale| scale != 0.0));
                let magnitude =
                    |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
                let attention_factor = match keys.float("attention_factor")? {
                    Some(given) => given,
                    None => match (scale("mscale")?, scale("mscale_all_dim")?) {
                        (Some(scale), Some(all)) => magnitude(scale) / magnitude(all),
                        _ => magnitude(1.0),
                    },
                };
                RopeKind::Yarn {
                    factor,
                    original_positions,
                    beta_fast: scale("beta_fast")?.unwrap_or(32.0),
                    beta_slow: scale("beta_slow")?.unwrap_or(1.0),
                    truncate: keys.bool("truncate")?.unwrap_or(true),
                    attention_factor,
                }
            }
            // Early files of Phi-3 call it su.
            "longrope" | "su" => {
                let list = |name: &str| {
                    let value = keys.get(name).and_then(serde_json::Value::as_array);
                    let numbers = value.map(|list| list.iter().map(serde_json::Value::as_f64).collect());
                    match numbers {
                        Some(Some::<Vec<f64>>(list)) if list.iter().all(|&factor| factor > 0.0) => Ok(list),
                        Some(_) => {
                            Err(wrong(&format!("{key}.{name}"), "it is not a list of positive numbers"))
                        }
                        None => Err(wrong(key, format!("type \"{kind}\" needs a \"{name}\""))),
                    }
                };
                let outside = config.float("original_max_position_embeddings")?;
                let original = match outside.or(positive("original_max_position_embeddings")?) {
                    Some(original) if original >= 2.0 => original,
                    Some(original) => {
                        return Err(wrong(
                            "original_max_position_embeddings",
                            format!("{original} is too few"),
                        ));
                    }
                    None => max_positions as f64,
                };
                let factor = positive("factor")?.unwrap_or(max_positions as f64 / original);
                let attention_factor = match keys.float("attention_factor")? {
                    Some(given) => given,
                    None if factor <= 1.0 => 1.0,
                    None => (1.0 + factor.ln() / original.ln()).sqrt(),
                };
                RopeKind::LongRope {
                    short: list("short_factor")?,
                    long: list("long_factor")?,
                    original_positions: original as usize,
                    attention_factor,
                }
            }
            other => {
                return Err(Error::unsupported(
                    format!("the rope type \"{other}\" is not supported"),
                    "Supported are default, linear, llama3, longrope, yarn",
                ));
            }
        };
        Ok(Self { theta, kind })
    }

    /// Refuses lists of factors that do not fit heads of which `rotary_dim` dimensions turn.
    pub(super) fn check(&self, rotary_dim: usize) -> Result<()> {
        let RopeKind::LongRope { short, long, .. } = &self.kind else { return Ok(()) };
        match [("short_factor", short), ("long_factor", long)]
            .iter()
            .find(|(_, list)| list.len() != rotary_dim / 2)
        {
            None => Ok(()),
            Some((name, list)) => Err(wrong(
                name,
                format!("it has {} numbers, and heads have {} pairs that turn", list.len(), rotary_dim / 2),
            )),
        }
    }

    /// How many positions turn as those of the shortest texts do; in longer texts all turn otherwise. `None`
    /// where the length of a text is of no matter.
    fn original_positions(&self) -> Option<usize> {
        match self.kind {
            RopeKind::LongRope { original_positions, .. } => Some(original_positions),
            _ => None,
        }
    }

    /// Radians per position of each pair, head_dim / 2 of them, in texts of at most `positions`.
    pub fn inv_freq(&self, head_dim: usize, positions: usize) -> Vec<f64> {
        let d = head_dim as f64;
        let plain = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / d));
        match self.kind {
            RopeKind::LongRope { ref short, ref long, original_positions, .. } => {
                let factors = if positions > original_positions { long } else { short };
                plain.zip(factors).map(|(freq, factor)| freq / factor).collect()
            }
            RopeKind::Default => plain.collect(),
            RopeKind::Linear { factor } => plain.map(|freq| freq / factor).collect(),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => plain
                .map(|freq| {
                    let turns = original_positions * freq / TAU;
                    let kept =
                        ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    (1.0 - kept) * freq / factor + kept * freq
                })
                .collect(),
            RopeKind::Yarn { factor, original_positions, beta_fast, beta_slow, truncate, .. } => {
                // The pair that makes `turns` turns over the original length.
                let pair_of =
                    |turns: f64| d * (original_positions / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(d - 1.0));
                if low == high {
                    high += 0.001;
                }
                plain
                    .enumerate()
                    .map(|(i, freq)| {
                        let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        divided * freq / factor + (1.0 - divided) * freq
                    })
                    .collect()
            }
        }
    }

    /// Cosines and sines for positions below `positions`. Pairs that do not turn come last.
    fn table(
        &self,
        device: &Device,
        head_dim: usize,
        rotary_dim: usize,
        positions: usize,
    ) -> Result<RopeTable> {
        let magnitude = match self.kind {
            RopeKind::Yarn { attention_factor, .. } | RopeKind::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        };
        let mut inv_freq = self.inv_freq(rotary_dim, positions);
        inv_freq.resize(head_dim / 2, 0.0);
        RopeTable::new(device, &inv_freq, magnitude, positions)
    }
}

/// The tables of a model's layers, each kept once.
pub struct RopeTables {
    tables: Vec<Tables>,
    /// Which one a layer uses.
    of_layer: Vec<usize>,
}

/// Those of one way to turn.
struct Tables {
    /// For the longest text.
    longest: RopeTable,
    /// For texts of at most so many positions, where they turn otherwise.
    short: Option<(usize, RopeTable)>,
}

impl RopeTables {
    /// For heads of `head_dim`, of which `rotary_dim` dimensions turn.
    pub(super) fn new(
        ropes: &[Rope],
        [head_dim, rotary_dim]: [usize; 2],
        device: &Device,
        positions: usize,
    ) -> Result<Self> {
        let mut kinds: Vec<&Rope> = vec![];
        let mut of_layer = vec![];
        for rope in ropes {
            let known = kinds.iter().position(|kind| *kind == rope);
            of_layer.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(rope);
            }
        }
        let tables = kinds.into_iter().map(|rope| {
            let table = |positions| rope.table(device, head_dim, rotary_dim, positions);
            let short = match rope.original_positions().filter(|original| positions > *original) {
                Some(original) => Some((original, table(original)?)),
                None => None,
            };
            Ok::<_, Error>(Tables { longest: table(positions)?, short })
        });
        Ok(Self { tables: tables.collect::<Result<_>>()?, of_layer })
    }

    /// That of block `layer` for texts as long as can be; `None` where positions are not turned.
    pub fn of(&self, layer: usize) -> Option<&RopeTable> {
        self.of_layer.get(layer).map(|&table| &self.tables[table].longest)
    }

    /// That of block `layer` for a text of `seq_len` tokens, all of which are there.
    pub fn of_text(&self, layer: usize, seq_len: usize) -> Option<&RopeTable> {
        let Tables { longest, short } = &self.tables[*self.of_layer.get(layer)?];
        Some(match short {
            Some((most, short)) if seq_len <= *most => short,
            _ => longest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(config: serde_json::Value) -> Result<Rope> {
        Rope::parse(&Keys::of(&config)?, 4096)
    }

    #[test]
    fn both_spellings_mean_the_same() {
        let five = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}});
        let four = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}});
        let want = Rope { theta: 5e5, kind: RopeKind::Linear { factor: 4.0 } };
        assert_eq!(parse(five).unwrap(), want);
        assert_eq!(parse(four).unwrap(), want);
        let want = Rope { theta: 1e6, kind: RopeKind::Default };
        assert_eq!(parse(json!({"rope_theta": 1e6, "rope_scaling": null})).unwrap(), want);
    }

    /// Figures of the formulas of `_compute_yarn_parameters` in Transformers for these settings.
    #[test]
    fn yarn_gives_the_frequencies_of_transformers() {
        let rope = parse(json!({"rope_theta": 10000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}))
        .unwrap();
        let got = rope.inv_freq(16, 4096);
        for (got, want) in got.iter().zip(YARN_16) {
            assert!((got - want).abs() < 1e-6 * want, "{got} {want}");
        }
        let RopeKind::Yarn { attention_factor, .. } = rope.kind else { panic!("{rope:?}") };
        assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    }

    const YARN_16: [f64; 8] = [
        1.0,
        0.316_227_766_016_837_94,
        0.1,
        0.025_693_505_988_868_08,
        0.006_25,
        0.001_383_496_476_323_665_7,
        0.000_25,
        7.905_694_150_420_948e-5,
    ];

    #[test]
    fn incomplete_parameters_are_refused_by_name() {
        let text = |config| parse(config).unwrap_err().to_string();
        assert!(text(json!({"rope_scaling": {"type": "linear"}})).contains("needs a \"factor\""));
        assert!(text(json!({"rope_scaling": {"type": "linear", "factor": -1.0}})).contains("not positive"));
        assert!(text(json!({"rope_theta": 0.0})).contains("rope_theta"));
        let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
        assert!(text(nested).contains("kinds of layers"));
    }
}
