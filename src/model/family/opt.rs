//! opt: learned positions, whose table begins with two rows of no position; LayerNorm, biases, ReLU.

use super::Family;
use super::parts::{Parts, in_turn};
use crate::error::{Error, Result};
use crate::model::NormKind;
use crate::model::arch::{BlockSpec, Names, Qkv};
use crate::model::config::{Defaults, Keys, ModelConfig};

pub static OPT: Family = Family { name: "opt", configure, block };

fn configure(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let filled = keys.filled(&[("ffn_dim", "intermediate_size")], &[]);
    let keys = &Keys(&filled);
    keys.refuse("do_layer_norm_before", false)?;
    keys.refuse("_remove_final_layer_norm", true)?;
    keys.refuse("layer_norm_elementwise_affine", false)?;
    let defaults = Defaults {
        kv_heads: false,
        norm_eps: ("layer_norm_eps", 1e-5),
        activation: "relu",
        tied: true,
        ..Defaults::default()
    };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    if keys.number("word_embed_proj_dim")?.is_some_and(|size| size != config.hidden_size as u64) {
        return Err(Error::unsupported(
            "embeddings of another size than the blocks (word_embed_proj_dim) are not supported",
            "Use a model without it; of the OPT models only the one of 350M has it",
        ));
    }
    config.names = Names::new("model.decoder.", "embed_tokens", "layers", "final_layer_norm")
        .with_positions("embed_positions");
    config.norm = NormKind::Layer;
    config.rope = None;
    config.positions_offset = 2;
    config.qkv_bias = keys.bool("enable_bias")?.unwrap_or(true);
    config.o_bias = config.qkv_bias;
    config.mlp_bias = config.qkv_bias;
    Ok(config)
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let o = parts.o("self_attn", "out_proj");
    in_turn([
        parts.attention("self_attn_layer_norm", Qkv::Apart, parts.qkv(), o),
        parts.plain("final_layer_norm", "", ["fc1", "fc2"]),
    ])
}
