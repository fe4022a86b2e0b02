//! The architecture table: what the tensors of a model are called and how large they are, and which
//! linear layers are quantized together.

use super::config::ModelConfig;

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const FINAL_NORM: &str = "model.norm.weight";
pub const LM_HEAD: &str = "lm_head.weight";
pub const LM_HEAD_MODULE: &str = "lm_head";

/// One linear layer of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// The full name without `.weight`, for example `model.layers.3.self_attn.q_proj`.
    pub module: String,
    /// The last part of the name, unique within a block.
    pub short: &'static str,
    pub in_features: usize,
    pub out_features: usize,
    pub bias: bool,
}

/// Linear layers that see the same input: they share one Hessian and one factor. Serving engines make
/// one matrix of them, so they also share one scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub linears: Vec<LinearSpec>,
}

/// The stages of block `layer`, in the order in which they run: q, k, v; o; gate, up; down. A family
/// that [stores](super::Family::stores_fused) q, k, v or gate, up as one layer has it quantized as one:
/// rows do not influence each other, so that makes the same codes.
pub fn stages(config: &ModelConfig, layer: usize) -> Vec<Stage> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let spec = |part: &str, short, in_features, out_features, bias| LinearSpec {
        module: format!("{}.{part}.{short}", block_prefix(layer)),
        short,
        in_features,
        out_features,
        bias,
    };
    let attention = |short, from, to, bias| spec("self_attn", short, from, to, bias);
    let mlp = |short, from, to| spec("mlp", short, from, to, config.mlp_bias);
    let (qkv, gate_up) = match config.family.stores_fused() {
        true => (
            vec![attention("qkv_proj", hidden, q + 2 * kv, config.qkv_bias)],
            vec![mlp("gate_up_proj", hidden, 2 * inner)],
        ),
        false => (
            vec![
                attention("q_proj", hidden, q, config.qkv_bias),
                attention("k_proj", hidden, kv, config.qkv_bias),
                attention("v_proj", hidden, kv, config.qkv_bias),
            ],
            vec![mlp("gate_proj", hidden, inner), mlp("up_proj", hidden, inner)],
        ),
    };
    vec![
        Stage { name: "qkv", linears: qkv },
        Stage { name: "o", linears: vec![attention("o_proj", q, hidden, config.o_bias)] },
        Stage { name: "gate_up", linears: gate_up },
        Stage { name: "down", linears: vec![mlp("down_proj", inner, hidden)] },
    ]
}

/// The output head as a stage of its own, after the last block's; only for a head that is not tied.
pub fn head_stage(config: &ModelConfig) -> Stage {
    let spec = LinearSpec {
        module: LM_HEAD_MODULE.to_owned(),
        short: LM_HEAD_MODULE,
        in_features: config.hidden_size,
        out_features: config.vocab_size,
        bias: false,
    };
    Stage { name: LM_HEAD_MODULE, linears: vec![spec] }
}

/// The prefix of every tensor of block `layer`.
pub fn block_prefix(layer: usize) -> String {
    format!("model.layers.{layer}")
}

/// The tensors of block `layer` that are not part of a linear layer, with their shapes.
pub(super) fn norms(config: &ModelConfig, layer: usize) -> Vec<(String, Vec<usize>)> {
    let prefix = block_prefix(layer);
    let mut names = vec![
        (format!("{prefix}.input_layernorm.weight"), vec![config.hidden_size]),
        (format!("{prefix}.post_attention_layernorm.weight"), vec![config.hidden_size]),
    ];
    if config.qk_norm {
        for part in ["q_norm", "k_norm"] {
            names.push((format!("{prefix}.self_attn.{part}.weight"), vec![config.head_dim]));
        }
    }
    names
}

/// Every tensor of a dense checkpoint of this model, with its shape.
pub fn expected_tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let table = vec![config.vocab_size, config.hidden_size];
    let mut tensors = vec![(EMBEDDING.to_owned(), table.clone())];
    for layer in 0..config.layers {
        tensors.extend(norms(config, layer));
        for spec in stages(config, layer).into_iter().flat_map(|stage| stage.linears) {
            if spec.bias {
                tensors.push((format!("{}.bias", spec.module), vec![spec.out_features]));
            }
            tensors.push((format!("{}.weight", spec.module), vec![spec.out_features, spec.in_features]));
        }
    }
    tensors.push((FINAL_NORM.to_owned(), vec![config.hidden_size]));
    if !config.tie_word_embeddings {
        tensors.push((LM_HEAD.to_owned(), table));
    }
    tensors
}
