//! What families' blocks are put together from.

use crate::model::arch::{Branch, Kind, LinearSpec, Qkv, Section, Stage};
use crate::model::config::ModelConfig;

/// Where names and sizes of one block come from.
pub struct Parts<'a> {
    pub config: &'a ModelConfig,
    /// The prefix of the block's tensors.
    prefix: String,
}

impl<'a> Parts<'a> {
    pub fn of(config: &'a ModelConfig, layer: usize) -> Self {
        Self { config, prefix: crate::model::arch::block_prefix(config, layer) }
    }

    /// The full name of a part of the block.
    pub fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    /// A linear layer; `short` is the last part of its name.
    pub fn linear(&self, part: &str, short: &'static str, sizes: [usize; 2], bias: bool) -> LinearSpec {
        let [in_features, out_features] = sizes;
        LinearSpec {
            module: format!("{}.{part}.{short}", self.prefix),
            short,
            in_features,
            out_features,
            bias,
        }
    }

    /// Features of all query heads, and of all key heads.
    pub fn widths(&self) -> [usize; 2] {
        [self.config.heads, self.config.kv_heads].map(|heads| heads * self.config.head_dim)
    }

    /// Attention with q_proj, k_proj, v_proj and o_proj.
    pub fn attention(&self, norm: &str) -> Section {
        let ([q, kv], hidden, bias) = (self.widths(), self.config.hidden_size, self.config.qkv_bias);
        let linear = |short, out| self.linear("self_attn", short, [hidden, out], bias);
        let qkv = vec![linear("q_proj", q), linear("k_proj", kv), linear("v_proj", kv)];
        self.attention_of(norm, Qkv::Apart, qkv)
    }

    /// Attention with these layers for q, k and v, and o_proj.
    pub fn attention_of(&self, norm: &str, qkv: Qkv, linears: Vec<LinearSpec>) -> Section {
        let ([q, _], hidden) = (self.widths(), self.config.hidden_size);
        let o = self.linear("self_attn", "o_proj", [q, hidden], self.config.o_bias);
        let head_norms =
            self.config.qk_norm.then(|| ["q_norm", "k_norm"].map(|n| self.name(&format!("self_attn.{n}"))));
        one(Branch {
            norm: self.name(norm),
            kind: Kind::Attention { qkv, head_norms },
            stages: [Stage { name: "qkv", linears }, Stage { name: "o", linears: vec![o] }],
        })
    }

    /// An MLP with gate_proj, up_proj and down_proj.
    pub fn gated(&self, norm: &str) -> Section {
        let (hidden, inner, bias) =
            (self.config.hidden_size, self.config.intermediate_size, self.config.mlp_bias);
        let linear = |short| self.linear("mlp", short, [hidden, inner], bias);
        self.gated_of(norm, vec![linear("gate_proj"), linear("up_proj")])
    }

    /// An MLP with these layers for gate and up, and down_proj.
    pub fn gated_of(&self, norm: &str, linears: Vec<LinearSpec>) -> Section {
        let sizes = [self.config.intermediate_size, self.config.hidden_size];
        let down = self.linear("mlp", "down_proj", sizes, self.config.mlp_bias);
        one(Branch {
            norm: self.name(norm),
            kind: Kind::Gated,
            stages: [Stage { name: "gate_up", linears }, Stage { name: "down", linears: vec![down] }],
        })
    }
}

/// A section of one branch.
fn one(branch: Branch) -> Section {
    Section { branches: vec![branch] }
}
