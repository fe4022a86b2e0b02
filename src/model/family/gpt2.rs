//! gpt2: learned positions, LayerNorm, biases, and linear layers stored as [in, out] (`Conv1D`).

use super::Family;
use super::parts::{Parts, in_turn};
use crate::error::Result;
use crate::model::NormKind;
use crate::model::arch::{BlockSpec, Names, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static GPT2: Family = Family { name: "gpt2", configure, block };

const SPELLED: [(&str, &str); 5] = [
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_positions", "max_position_embeddings"),
    ("n_inner", "intermediate_size"),
];

fn configure(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let inner = 4 * keys.number("n_embd")?.unwrap_or(768);
    let filled = keys.filled(&SPELLED, &[("intermediate_size", inner.into())]);
    let keys = &Keys(&filled);
    keys.refuse("scale_attn_weights", false)?;
    keys.refuse("scale_attn_by_inverse_layer_idx", true)?;
    let defaults = Defaults {
        kv_heads: false,
        norm_eps: ("layer_norm_epsilon", 1e-5),
        activation: "gelu_new",
        tied: true,
        ..Defaults::default()
    };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    config.names = Names::new("transformer.", "wte", "h", "ln_f").with_positions("wpe");
    config.norm = NormKind::Layer;
    config.rope = None;
    config.transposed = true;
    config.qkv_bias = true;
    config.o_bias = true;
    config.mlp_bias = true;
    Ok(config)
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let (qkv, o) = (parts.stacked_qkv("attn", "c_attn"), parts.o("attn", "c_proj"));
    in_turn([parts.attention("ln_1", Qkv::Stacked, qkv, o), parts.plain("ln_2", "mlp", ["c_fc", "c_proj"])])
}
