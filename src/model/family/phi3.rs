//! phi3: q, k, v are the rows of one layer, gate and up of another.

use super::Family;
use super::parts::{Parts, in_turn};
use crate::error::Result;
use crate::model::arch::{BlockSpec, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static PHI3: Family = Family { name: "phi3", configure, block };

fn configure(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let defaults = Defaults { kv_heads: false, rotary_share: Some(1.0), ..Defaults::default() };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    config.sliding_window = vec![keys.window(None)?; config.layers];
    Ok(config)
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let (qkv, o) = (parts.stacked_qkv("self_attn", "qkv_proj"), parts.o("self_attn", "o_proj"));
    let sizes = [config.hidden_size, 2 * config.intermediate_size];
    let gate_up = vec![parts.linear("mlp", "gate_up_proj", sizes, false)];
    in_turn([
        parts.attention("input_layernorm", Qkv::Stacked, qkv, o),
        parts.gated("post_attention_layernorm", gate_up),
    ])
}
