//! What families' blocks are put together from.

use crate::model::arch::{
    BlockSpec, Branch, EXPERT_STAGES, Kind, LinearSpec, Qkv, Route, Router, Section, Stage,
};
use crate::model::config::{Experts, ModelConfig};

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

    /// A linear layer: `short` is the last part of its name, `part` what is before it.
    pub fn linear(&self, part: &str, short: &'static str, sizes: [usize; 2], bias: bool) -> LinearSpec {
        let [in_features, out_features] = sizes;
        let module = match part {
            "" => self.name(short),
            _ => self.name(&format!("{part}.{short}")),
        };
        let transposed = self.config.transposed;
        LinearSpec { module, short, in_features, out_features, bias, transposed }
    }

    /// Features of all query heads, and of all key heads.
    pub fn widths(&self) -> [usize; 2] {
        [self.config.heads, self.config.kv_heads].map(|heads| heads * self.config.head_dim)
    }

    /// q_proj, k_proj and v_proj.
    pub fn qkv(&self) -> Vec<LinearSpec> {
        let ([q, kv], hidden, bias) = (self.widths(), self.config.hidden_size, self.config.qkv_bias);
        let linear = |short, out| self.linear("self_attn", short, [hidden, out], bias);
        vec![linear("q_proj", q), linear("k_proj", kv), linear("v_proj", kv)]
    }

    /// One layer for q, k and v.
    pub fn stacked_qkv(&self, part: &str, short: &'static str) -> Vec<LinearSpec> {
        let [q, kv] = self.widths();
        vec![self.linear(part, short, [self.config.hidden_size, q + 2 * kv], self.config.qkv_bias)]
    }

    /// What follows attention.
    pub fn o(&self, part: &str, short: &'static str) -> LinearSpec {
        self.linear(part, short, [self.widths()[0], self.config.hidden_size], self.config.o_bias)
    }

    /// Attention of these layers.
    pub fn attention(&self, norm: &str, qkv: Qkv, linears: Vec<LinearSpec>, o: LinearSpec) -> Branch {
        let head_norm = |name| (self.name(&format!("self_attn.{name}")), self.config.head_dim);
        let head_norms = self.config.qk_norm.then(|| ["q_norm", "k_norm"].map(head_norm));
        Branch {
            norm: self.name(norm),
            kind: Kind::Attention { qkv, head_norms },
            route: Route::Every,
            stages: [Stage { name: "qkv", linears }, Stage { name: "o", linears: vec![o] }],
        }
    }

    /// gate_proj and up_proj.
    pub fn gate_up(&self) -> Vec<LinearSpec> {
        let sizes = [self.config.hidden_size, self.config.intermediate_size];
        ["gate_proj", "up_proj"].map(|short| self.linear("mlp", short, sizes, self.config.mlp_bias)).into()
    }

    /// An MLP of these layers and down_proj.
    pub fn gated(&self, norm: &str, linears: Vec<LinearSpec>) -> Branch {
        let sizes = [self.config.intermediate_size, self.config.hidden_size];
        let down = self.linear("mlp", "down_proj", sizes, self.config.mlp_bias);
        Branch {
            norm: self.name(norm),
            kind: Kind::Gated,
            route: Route::Every,
            stages: [Stage { name: "gate_up", linears }, Stage { name: "down", linears: vec![down] }],
        }
    }

    /// Experts `<part>.experts.<number>` with these three layers, gate, up and down, a router `<part>.gate`, and
    /// the expert that sees every token.
    pub fn experts(&self, norm: &str, part: &str, layers: [&'static str; 3], experts: &Experts) -> Section {
        let branch = |name: &str, inner: usize, stages: [&'static str; 2], route: Route| {
            let hidden = self.config.hidden_size;
            let [gate, up, down] = layers;
            let first =
                [gate, up].map(|short| self.linear(&format!("{part}.{name}"), short, [hidden, inner], false));
            let last = self.linear(&format!("{part}.{name}"), down, [inner, hidden], false);
            Branch {
                norm: self.name(norm),
                kind: Kind::Gated,
                route,
                stages: [
                    Stage { name: stages[0], linears: first.into() },
                    Stage { name: stages[1], linears: vec![last] },
                ],
            }
        };
        let inner = experts.intermediate_size;
        let mut branches: Vec<Branch> = (0..experts.count)
            .map(|e| branch(&format!("experts.{e}"), inner, EXPERT_STAGES, Route::Expert(e)))
            .collect();
        if let Some(inner) = experts.shared_size {
            let gate = Route::Gate(self.name(&format!("{part}.shared_expert_gate")));
            branches.push(branch("shared_expert", inner, ["gate_up", "down"], gate));
        }
        let router = Router {
            name: self.name(&format!("{part}.gate")),
            experts: experts.count,
            per_token: experts.per_token,
            normalized: experts.normalized,
        };
        Section { branches, post_norm: None, router: Some(router) }
    }

    /// An MLP of two layers, with an activation between.
    pub fn plain(&self, norm: &str, part: &str, [up, down]: [&'static str; 2]) -> Branch {
        let (hidden, inner, bias) =
            (self.config.hidden_size, self.config.intermediate_size, self.config.mlp_bias);
        let up = self.linear(part, up, [hidden, inner], bias);
        let down = self.linear(part, down, [inner, hidden], bias);
        Branch {
            norm: self.name(norm),
            kind: Kind::Plain,
            route: Route::Every,
            stages: [Stage { name: "up", linears: vec![up] }, Stage { name: "down", linears: vec![down] }],
        }
    }
}

/// Branches one after the other, each read from what the one before left.
pub fn in_turn(branches: impl IntoIterator<Item = Branch>) -> BlockSpec {
    let section = |branch| Section { branches: vec![branch], post_norm: None, router: None };
    BlockSpec { sections: branches.into_iter().map(section).collect() }
}

/// Branches that read the same.
pub fn side_by_side(branches: impl IntoIterator<Item = Branch>) -> BlockSpec {
    BlockSpec {
        sections: vec![Section { branches: branches.into_iter().collect(), post_norm: None, router: None }],
    }
}
