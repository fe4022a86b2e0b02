//! gpt_neox: attention and MLP read the same stream, each behind its own LayerNorm; queries, keys and values of
//! each head lie together; a quarter of each head turns.

use super::Family;
use super::parts::{Parts, in_turn, side_by_side};
use crate::error::Result;
use crate::model::NormKind;
use crate::model::arch::{BlockSpec, Names, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static GPT_NEOX: Family = Family { name: "gpt_neox", configure, block };

fn configure(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let filled = keys.filled(&[("rotary_emb_base", "rope_theta")], &[]);
    let keys = &Keys(&filled);
    let defaults = Defaults {
        kv_heads: false,
        norm_eps: ("layer_norm_eps", 1e-5),
        activation: "gelu",
        rotary_share: Some(0.25),
        ..Defaults::default()
    };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    config.names = Names::new("gpt_neox.", "embed_in", "layers", "final_layer_norm");
    config.names.head = "embed_out".to_owned();
    config.norm = NormKind::Layer;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(true);
    config.o_bias = config.qkv_bias;
    config.mlp_bias = true;
    config.parallel = keys.bool("use_parallel_residual")?.unwrap_or(true);
    Ok(config)
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let (qkv, o) = (parts.stacked_qkv("attention", "query_key_value"), parts.o("attention", "dense"));
    let branches = [
        parts.attention("input_layernorm", Qkv::ByHead, qkv, o),
        parts.plain("post_attention_layernorm", "mlp", ["dense_h_to_4h", "dense_4h_to_h"]),
    ];
    match config.parallel {
        true => side_by_side(branches),
        false => in_turn(branches),
    }
}
