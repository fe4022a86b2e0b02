//! gemma2 and gemma3 (its text part): norms that multiply by 1 + w, before and after each part; scaled embeddings;
//! windows in most layers. gemma2 caps scores and logits; gemma3 normalizes queries and keys, and its
//! layers with a window turn at another pace.

use serde_json::{Value, json};

use super::Family;
use super::parts::Parts;
use crate::error::Result;
use crate::model::arch::{BlockSpec, Qkv, Section};
use crate::model::config::{Defaults, Keys, ModelConfig, wrong};
use crate::model::{NormKind, Rope};

pub static GEMMA2: Family = Family { name: "gemma2", configure: gemma2, block };
pub static GEMMA3: Family = Family { name: "gemma3_text", configure: gemma3, block };

fn gemma2(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let filled = keys.filled(
        &[],
        &[
            ("head_dim", json!(256)),
            ("query_pre_attn_scalar", json!(256)),
            ("sliding_window", json!(4096)),
            ("attn_logit_softcapping", json!(50.0)),
            ("final_logit_softcapping", json!(30.0)),
        ],
    );
    let mut config = common(family, &Keys(&filled))?;
    windows(&mut config, &Keys(&filled), |layer| layer % 2 == 0)?;
    Ok(config)
}

fn gemma3(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    // Published configurations leave out what equals the class's defaults.
    let filled = keys.filled(
        &[],
        &[
            ("vocab_size", json!(262_208)),
            ("num_attention_heads", json!(8)),
            ("num_key_value_heads", json!(4)),
            ("head_dim", json!(256)),
            ("query_pre_attn_scalar", json!(256)),
            ("sliding_window", json!(4096)),
            ("max_position_embeddings", json!(131_072)),
        ],
    );
    let keys = &Keys(&filled);
    keys.refuse("use_bidirectional_attention", true)?;
    let parameters = keys.get("rope_parameters").and_then(Value::as_object);
    let of = |kind: &str| parameters.and_then(|kinds| kinds.get(kind)).cloned();
    // Since Transformers 5 each kind of layer has its own parameters; before, two bases and a scaling of
    // the layers without a window.
    let (full, sliding) = match (of("full_attention"), of("sliding_attention")) {
        (Some(full), Some(sliding)) => (full, sliding),
        _ => {
            let mut full = keys.get("rope_scaling").cloned().unwrap_or_else(|| json!({}));
            let base = |key: &str, default: f64| {
                Ok::<_, crate::error::Error>(json!(keys.float(key)?.unwrap_or(default)))
            };
            if let Some(full) = full.as_object_mut() {
                full.insert("rope_theta".into(), base("rope_theta", 1e6)?);
            }
            (full, json!({ "rope_theta": base("rope_local_base_freq", 1e4)? }))
        }
    };
    let mut plain = filled.clone();
    plain.remove("rope_scaling");
    plain.insert("rope_parameters".into(), full);
    let mut config = common(family, &Keys(&plain))?;
    let pattern =
        keys.number("sliding_window_pattern")?.or(keys.number("_sliding_window_pattern")?).unwrap_or(6);
    windows(&mut config, keys, |layer| !(layer as u64 + 1).is_multiple_of(pattern.max(1)))?;
    plain.insert("rope_parameters".into(), sliding);
    let local = Rope::parse(&Keys(&plain), config.max_position_embeddings)?;
    if let Some(ropes) = &mut config.rope {
        for (rope, window) in ropes.iter_mut().zip(&config.sliding_window) {
            if window.is_some() {
                *rope = local.clone();
            }
        }
    }
    config.qk_norm = true;
    Ok(config)
}

fn common(family: &'static Family, keys: &Keys) -> Result<ModelConfig> {
    let defaults = Defaults { activation: "gelu_pytorch_tanh", tied: true, ..Defaults::default() };
    let mut config = ModelConfig::common(family, keys, &defaults)?;
    let scalar = keys.float("query_pre_attn_scalar")?.unwrap_or(config.head_dim as f64);
    if !(scalar > 0.0 && scalar.is_finite()) {
        return Err(wrong("query_pre_attn_scalar", format!("{scalar} is not positive")));
    }
    config.norm = NormKind::RmsPlusOne;
    config.embedding_scale = (config.hidden_size as f64).sqrt() as f32;
    config.attention_scale = (1.0 / scalar.sqrt()) as f32;
    config.attention_soft_cap = soft_cap(keys, "attn_logit_softcapping")?;
    config.logit_soft_cap = soft_cap(keys, "final_logit_softcapping")?;
    config.qkv_bias = keys.bool("attention_bias")?.unwrap_or(false);
    config.o_bias = config.qkv_bias;
    Ok(config)
}

fn soft_cap(keys: &Keys, key: &str) -> Result<Option<f32>> {
    match keys.float(key)? {
        Some(cap) if !(cap > 0.0 && cap.is_finite()) => Err(wrong(key, format!("{cap} is not positive"))),
        cap => Ok(cap.map(|cap| cap as f32)),
    }
}

/// The layers that `layer_types` lists have a window, or else those of the family's pattern.
fn windows(config: &mut ModelConfig, keys: &Keys, pattern: impl Fn(usize) -> bool) -> Result<()> {
    let window = keys.window(Some(4096))?;
    let slides = match keys.layer_types(config.layers)? {
        Some(listed) => listed,
        None => (0..config.layers).map(pattern).collect(),
    };
    config.sliding_window = slides.into_iter().map(|slides| window.filter(|_| slides)).collect();
    Ok(())
}

fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    let parts = Parts::of(config, layer);
    let section = |branch, post: &str| Section {
        branches: vec![branch],
        post_norm: Some(parts.name(post)),
        router: None,
    };
    let o = parts.o("self_attn", "o_proj");
    BlockSpec {
        sections: vec![
            section(
                parts.attention("input_layernorm", Qkv::Apart, parts.qkv(), o),
                "post_attention_layernorm",
            ),
            section(parts.gated("pre_feedforward_layernorm", parts.gate_up()), "post_feedforward_layernorm"),
        ],
    }
}
