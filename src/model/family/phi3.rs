//! phi3: q, k, v are the rows of one layer, gate and up of another.

use super::Family;
use super::parts::Parts;
use crate::error::Result;
use crate::model::arch::{BlockSpec, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static PHI3: Family = Family { name: "phi3", configure, block };

fn configure(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config = ModelConfig::common(family, keys, &Defaults { kv_heads: false, ..Defaults::default() })?;
    config.sliding_window = vec![keys.window(None)?; config.layers];
    Ok(config)
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let (hidden, [q, kv]) = (config.hidden_size, parts.widths());
    let qkv = parts.linear("self_attn", "qkv_proj", [hidden, q + 2 * kv], false);
    let gate_up = parts.linear("mlp", "gate_up_proj", [hidden, 2 * config.intermediate_size], false);
    BlockSpec {
        sections: vec![
            parts.attention_of("input_layernorm", Qkv::Stacked, vec![qkv]),
            parts.gated_of("post_attention_layernorm", vec![gate_up]),
        ],
    }
}
