//! The architecture table: what the tensors of a model are called and how large they are, and which
//! linear layers are quantized together.
//!
//! A block is a row of sections. A section reads the residual stream, each of its branches computes
//! something of it, and what they give together is added to the stream. A branch is a norm and two stages
//! of linear layers with something between them: attention, or an activation. [`super::family`] says
//! which sections a family's blocks have.

use super::config::ModelConfig;
use super::norm::NormKind;

/// Names of the tensors outside blocks, and where blocks lie; all without `.weight`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Of all but the head.
    pub prefix: String,
    pub embedding: String,
    /// A table of learned positions.
    pub positions: Option<String>,
    /// `<blocks>.<number>.` begins every tensor of a block.
    pub blocks: String,
    pub final_norm: String,
    pub head: String,
}

impl Names {
    /// With the head called lm_head.
    pub fn new(prefix: &str, embedding: &str, blocks: &str, final_norm: &str) -> Self {
        let name = |part: &str| format!("{prefix}{part}");
        Self {
            prefix: prefix.to_owned(),
            embedding: name(embedding),
            positions: None,
            blocks: name(blocks),
            final_norm: name(final_norm),
            head: LM_HEAD_MODULE.to_owned(),
        }
    }

    /// With a table of positions.
    pub fn with_positions(self, name: &str) -> Self {
        Self { positions: Some(format!("{}{name}", self.prefix)), ..self }
    }

    /// The same under another prefix.
    pub fn under(&self, prefix: &str) -> Self {
        let moved = |name: &String| format!("{prefix}{}", name.strip_prefix(&self.prefix).unwrap_or(name));
        Self {
            prefix: prefix.to_owned(),
            embedding: moved(&self.embedding),
            positions: self.positions.as_ref().map(moved),
            blocks: moved(&self.blocks),
            final_norm: moved(&self.final_norm),
            // Where the text's model is a whole one, with a head of its own.
            head: match prefix {
                "language_model.model." => format!("language_model.{}", self.head),
                _ => self.head.clone(),
            },
        }
    }
}

/// One linear layer of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// The full name without `.weight`, for example `model.layers.3.self_attn.q_proj`.
    pub module: String,
    /// The last part of the name.
    pub short: &'static str,
    pub in_features: usize,
    pub out_features: usize,
    pub bias: bool,
    /// Stored as [in, out].
    pub transposed: bool,
}

impl LinearSpec {
    /// The shape of its weight as it is stored.
    pub fn stored_shape(&self) -> [usize; 2] {
        match self.transposed {
            true => [self.in_features, self.out_features],
            false => [self.out_features, self.in_features],
        }
    }
}

/// Linear layers that see the same input: they share one Hessian and one factor. Serving engines make
/// one matrix of them, so they also share one scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub linears: Vec<LinearSpec>,
}

/// How a block is put together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSpec {
    pub sections: Vec<Section>,
}

/// Branches that read the same residual stream; the sum of what they give is added to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub branches: Vec<Branch>,
    /// The name of a norm that the sum passes first.
    pub post_norm: Option<String>,
    pub router: Option<Router>,
}

/// What decides which experts a token goes to; never quantized. Its weight is [experts, hidden].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Router {
    pub name: String,
    pub experts: usize,
    /// Experts of each token.
    pub per_token: usize,
    /// Whether the weights of those are divided by their sum.
    pub normalized: bool,
}

/// Which tokens a branch sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    Every,
    /// Those that the section's router sends to this expert.
    Expert(usize),
    /// All, with what comes out weighted by the sigmoid of their product with this weight [1, hidden].
    Gate(String),
}

/// A norm, a stage, [what lies between](Kind), and another stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Branch {
    /// The name of its norm, without `.weight`.
    pub norm: String,
    pub kind: Kind,
    pub route: Route,
    pub stages: [Stage; 2],
}

/// What is between a branch's two stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Attention over the outputs of the first stage. Norms of queries and keys go by runs of so many
    /// features: one head, or all.
    Attention { qkv: Qkv, head_norms: Option<[(String, usize); 2]> },
    /// act(gate) · up of the first stage's two layers, or of the halves of its one.
    Gated,
    /// act of the first stage's layer.
    Plain,
}

/// The names of the two stages of an expert that tokens are routed to.
pub const EXPERT_STAGES: [&str; 2] = ["expert_gate_up", "expert_down"];

/// How queries, keys and values come out of their stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qkv {
    /// Three layers.
    Apart,
    /// One layer: all queries, then all keys, then all values.
    Stacked,
    /// One layer: query, key and value of the first head, then those of the next.
    ByHead,
}

impl BlockSpec {
    /// The stages in the order in which they run.
    pub fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.branches().flat_map(|branch| &branch.stages)
    }

    /// The stages whose one layer adds its outputs to the residual stream as they are: no norm or gate stands
    /// between, and every token takes the branch.
    pub fn ends_in_stream(&self) -> impl Iterator<Item = bool> {
        self.sections.iter().flat_map(|section| {
            let plain = |branch: &Branch| section.post_norm.is_none() && branch.route == Route::Every;
            section.branches.iter().flat_map(move |branch| [false, plain(branch)])
        })
    }

    fn branches(&self) -> impl Iterator<Item = &Branch> {
        self.sections.iter().flat_map(|section| &section.branches)
    }

    /// Names of routers and gates, with the rows of their weights.
    pub(super) fn routers(&self) -> impl Iterator<Item = (&str, usize)> {
        let routers = self.sections.iter().filter_map(|section| section.router.as_ref());
        let gates = self.branches().filter_map(|branch| match &branch.route {
            Route::Gate(name) => Some((name.as_str(), 1)),
            Route::Every | Route::Expert(_) => None,
        });
        routers.map(|router| (router.name.as_str(), router.experts)).chain(gates)
    }

    /// Names of the norms over whole rows, each once.
    pub(super) fn norms(&self) -> Vec<&str> {
        let mut names: Vec<&str> = vec![];
        for section in &self.sections {
            let before = section.branches.iter().map(|branch| &branch.norm);
            for name in before.chain(&section.post_norm) {
                if !names.contains(&name.as_str()) {
                    names.push(name);
                }
            }
        }
        names
    }

    /// Names and widths of the norms of queries and keys.
    pub(super) fn head_norms(&self) -> Vec<(&str, usize)> {
        let norms = self.branches().filter_map(|branch| match &branch.kind {
            Kind::Attention { head_norms, .. } => head_norms.as_ref(),
            Kind::Gated | Kind::Plain => None,
        });
        norms.flatten().map(|(name, width)| (name.as_str(), *width)).collect()
    }
}

/// Block `layer` of a model.
pub fn block(config: &ModelConfig, layer: usize) -> BlockSpec {
    (config.family.block)(config, layer)
}

/// The stages of block `layer`, in the order in which they run. A family that stores q, k, v or gate, up
/// as one layer has it quantized as one: rows do not influence each other, so that makes the same codes.
pub fn stages(config: &ModelConfig, layer: usize) -> Vec<Stage> {
    block(config, layer).stages().cloned().collect()
}

/// The output head as a stage of its own, after the last block's; only for a head that is not tied.
pub fn head_stage(config: &ModelConfig) -> Stage {
    let spec = LinearSpec {
        module: config.names.head.clone(),
        short: LM_HEAD_MODULE,
        in_features: config.hidden_size,
        out_features: config.vocab_size,
        bias: false,
        transposed: false,
    };
    Stage { name: LM_HEAD_MODULE, linears: vec![spec] }
}

/// The head of most families, and its stage.
pub const LM_HEAD_MODULE: &str = "lm_head";
pub const LM_HEAD: &str = "lm_head.weight";

/// The prefix of every tensor of block `layer`.
pub fn block_prefix(config: &ModelConfig, layer: usize) -> String {
    format!("{}.{layer}", config.names.blocks)
}

/// The name of the weight of a module.
pub fn weight(module: &str) -> String {
    format!("{module}.weight")
}

/// Every tensor of a dense checkpoint of this model, with its shape.
pub fn expected_tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let table = vec![config.vocab_size, config.hidden_size];
    let norm = |tensors: &mut Vec<_>, name: &str| {
        tensors.push((weight(name), vec![config.hidden_size]));
        if config.norm == NormKind::Layer {
            tensors.push((format!("{name}.bias"), vec![config.hidden_size]));
        }
    };
    let mut tensors = vec![(weight(&config.names.embedding), table.clone())];
    if let Some(name) = &config.names.positions {
        let rows = config.max_position_embeddings + config.positions_offset;
        tensors.push((weight(name), vec![rows, config.hidden_size]));
    }
    for layer in 0..config.layers {
        let block = block(config, layer);
        for name in block.norms() {
            norm(&mut tensors, name);
        }
        tensors.extend(block.head_norms().into_iter().map(|(norm, width)| (weight(norm), vec![width])));
        tensors.extend(block.routers().map(|(name, rows)| (weight(name), vec![rows, config.hidden_size])));
        for spec in block.stages().flat_map(|stage| &stage.linears) {
            if spec.bias {
                tensors.push((format!("{}.bias", spec.module), vec![spec.out_features]));
            }
            tensors.push((weight(&spec.module), spec.stored_shape().to_vec()));
        }
    }
    norm(&mut tensors, &config.names.final_norm);
    if !config.tie_word_embeddings {
        tensors.push((weight(&config.names.head), table));
    }
    tensors
}
