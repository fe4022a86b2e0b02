//! qwen2, with biases on q, k and v, and qwen3, which normalizes queries and keys instead.

use super::Family;
use super::llama::block;
use crate::error::Result;
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static QWEN2: Family = Family { name: "qwen2", configure: qwen2, block };
pub static QWEN3: Family = Family { name: "qwen3", configure: qwen3, block };

fn qwen2(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config = ModelConfig::common(family, keys, &Defaults::default())?;
    config.qkv_bias = true;
    config.sliding_window = windows(keys, config.layers)?;
    Ok(config)
}

fn qwen3(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config =
        ModelConfig::common(family, keys, &Defaults { head_dim: Some(128), ..Defaults::default() })?;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(false);
    config.o_bias = config.qkv_bias;
    config.qk_norm = true;
    config.sliding_window = windows(keys, config.layers)?;
    Ok(config)
}

/// A window counts only where `use_sliding_window` says so, in the layers that `layer_types` lists or
/// else those from `max_window_layers` on.
pub(super) fn windows(keys: &Keys, layers: usize) -> Result<Vec<Option<usize>>> {
    if !keys.bool("use_sliding_window")?.unwrap_or(false) {
        return Ok(vec![None; layers]);
    }
    let window = keys.window(Some(4096))?;
    match keys.layer_types(layers)? {
        Some(sliding) => Ok(sliding.into_iter().map(|slides| window.filter(|_| slides)).collect()),
        None => {
            let full = keys.number("max_window_layers")?.unwrap_or(28) as usize;
            Ok((0..layers).map(|layer| window.filter(|_| layer >= full)).collect())
        }
    }
}
