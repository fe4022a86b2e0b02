//! llama, and mistral, which differs in its sliding window.

use super::Family;
use super::parts::{Parts, in_turn};
use crate::error::Result;
use crate::model::arch::{BlockSpec, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static LLAMA: Family = Family { name: "llama", configure: llama, block };
pub static MISTRAL: Family = Family { name: "mistral", configure: mistral, block };

fn llama(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    // Early ones have no key heads of their own.
    let mut config = ModelConfig::common(family, keys, &Defaults { kv_heads: false, ..Defaults::default() })?;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(false);
    config.o_bias = config.qkv_bias;
    config.mlp_bias = keys.bool("mlp_bias")?.unwrap_or(false);
    Ok(config)
}

fn mistral(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config = ModelConfig::common(family, keys, &Defaults::default())?;
    config.sliding_window = vec![keys.window(Some(4096))?; config.layers];
    Ok(config)
}

pub(super) fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    in_turn([
        parts.attention("input_layernorm", Qkv::Apart, parts.qkv(), parts.o("self_attn", "o_proj")),
        parts.gated("post_attention_layernorm", parts.gate_up()),
    ])
}
