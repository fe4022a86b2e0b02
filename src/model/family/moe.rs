//! Mixtures of experts: mixtral, qwen2_moe (with an expert that sees every token), qwen3_moe and olmoe. Their
//! attention is that of their dense kin.

use super::Family;
use super::parts::Parts;
use super::qwen::windows;
use crate::error::{Error, Result};
use crate::model::arch::{BlockSpec, Kind, Qkv, Section};
use crate::model::config::{Defaults, Experts, Keys, ModelConfig, wrong};

pub static MIXTRAL: Family = Family { name: "mixtral", configure: mixtral, block: mixtral_block };
pub static QWEN2_MOE: Family = Family { name: "qwen2_moe", configure: qwen2, block };
pub static QWEN3_MOE: Family = Family { name: "qwen3_moe", configure: qwen3, block };
pub static OLMOE: Family = Family { name: "olmoe", configure: olmoe, block: olmoe_block };

const DEFAULTS: Defaults = Defaults {
    kv_heads: true,
    head_dim: None,
    norm_eps: ("rms_norm_eps", 1e-6),
    activation: "silu",
    rotary_share: None,
    tied: false,
    experts: true,
};

fn mixtral(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let defaults = Defaults { norm_eps: ("rms_norm_eps", 1e-5), ..DEFAULTS };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    config.sliding_window = vec![keys.window(None)?; config.layers];
    config.experts = Some(experts(keys, &config, config.intermediate_size, true)?);
    Ok(config)
}

fn qwen2(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config = ModelConfig::common(family, keys, &DEFAULTS)?;
    config.qkv_bias = keys.bool("qkv_bias")?.unwrap_or(true);
    config.sliding_window = windows(keys, config.layers)?;
    let mut experts = experts(keys, &config, keys.positive("moe_intermediate_size")?, false)?;
    experts.shared_size = Some(keys.positive("shared_expert_intermediate_size")?);
    experts.sparse = sparse(keys, config.layers)?;
    config.experts = Some(experts);
    Ok(config)
}

fn qwen3(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let mut config = ModelConfig::common(family, keys, &DEFAULTS)?;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(false);
    config.o_bias = config.qkv_bias;
    config.qk_norm = true;
    config.sliding_window = windows(keys, config.layers)?;
    let mut experts = experts(keys, &config, keys.positive("moe_intermediate_size")?, false)?;
    experts.sparse = sparse(keys, config.layers)?;
    config.experts = Some(experts);
    Ok(config)
}

fn olmoe(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    if keys.get("clip_qkv").is_some() {
        return Err(Error::unsupported(
            "queries, keys and values that are clipped (clip_qkv) are not supported",
            "Use a model without it",
        ));
    }
    let defaults = Defaults { kv_heads: false, norm_eps: ("rms_norm_eps", 1e-5), ..DEFAULTS };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(false);
    config.o_bias = config.qkv_bias;
    config.qk_norm = true;
    config.experts = Some(experts(keys, &config, config.intermediate_size, false)?);
    Ok(config)
}

/// Experts in every block.
fn experts(keys: &Keys, config: &ModelConfig, inner: usize, normalized: bool) -> Result<Experts> {
    // Transformers 5 has one key for all families.
    let key = ["num_local_experts", "num_experts"].into_iter().find(|key| keys.get(key).is_some());
    let count = keys.positive(key.unwrap_or("num_experts"))?;
    let per_token = keys.positive("num_experts_per_tok")?;
    if per_token > count {
        return Err(wrong("num_experts_per_tok", format!("{per_token} of {count} experts")));
    }
    Ok(Experts {
        count,
        per_token,
        intermediate_size: inner,
        normalized: keys.bool("norm_topk_prob")?.unwrap_or(normalized),
        shared_size: None,
        sparse: vec![true; config.layers],
    })
}

/// Blocks with experts: one in `decoder_sparse_step`, but those of `mlp_only_layers`.
fn sparse(keys: &Keys, layers: usize) -> Result<Vec<bool>> {
    let step = keys.number("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense = match keys.get("mlp_only_layers").map(|list| list.as_array()) {
        None => vec![],
        Some(Some(list)) => list.iter().filter_map(serde_json::Value::as_u64).collect(),
        Some(None) => return Err(wrong("mlp_only_layers", "it is not a list of numbers")),
    };
    Ok((0..layers as u64).map(|layer| (layer + 1).is_multiple_of(step) && !dense.contains(&layer)).collect())
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    with_experts(config, layer, "mlp", ["gate_proj", "up_proj", "down_proj"])
}

fn mixtral_block(config: &ModelConfig, layer: usize) -> BlockSpec {
    with_experts(config, layer, "block_sparse_moe", ["w1", "w3", "w2"])
}

/// Its queries and keys are normalized as wholes.
fn olmoe_block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let mut spec = block(config, layer);
    let widths = Parts::of(config, layer).widths();
    for branch in spec.sections.iter_mut().flat_map(|section| &mut section.branches) {
        if let Kind::Attention { head_norms: Some(norms), .. } = &mut branch.kind {
            for (norm, width) in norms.iter_mut().zip(widths) {
                norm.1 = width;
            }
        }
    }
    spec
}

fn with_experts(config: &ModelConfig, layer: usize, part: &str, layers: [&'static str; 3]) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let norm = "post_attention_layernorm";
    let o = parts.o("self_attn", "o_proj");
    let one = |branch| Section { branches: vec![branch], post_norm: None, router: None };
    let mlp = match config.experts.as_ref().filter(|experts| experts.sparse[layer]) {
        Some(experts) => parts.experts(norm, part, layers, experts),
        None => one(parts.gated(norm, parts.gate_up())),
    };
    let attention = parts.attention("input_layernorm", Qkv::Apart, parts.qkv(), o);
    BlockSpec { sections: vec![one(attention), mlp] }
}
