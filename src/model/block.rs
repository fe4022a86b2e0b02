//! One transformer block, in stages.
//!
//! A block of the Llama kind has two sections of one branch each:
//!
//! ```text
//! h += o_proj(attention(rope(norm(q_proj(x))), rope(norm(k_proj(x))), v_proj(x)))   x = rmsnorm(h)
//! h += down_proj(silu(gate_proj(x)) · up_proj(x))                                   x = rmsnorm(h)
//! ```
//!
//! The quantization pipeline stops before each stage of linear layers: the stage's inputs make the
//! Hessian, and the layers are replaced before their outputs are computed. A [`Flow`] is where one
//! micro-batch of activations is on that way. Two flows may go side by side through two blocks, as those of
//! a quantized model and of its original do.

use std::collections::HashMap;

use super::arch::{self, BlockSpec, Branch, Kind, LinearSpec, Qkv, Stage};
use super::config::ModelConfig;
use super::linear::Linear;
use super::rope::RopeTables;
use super::weights::{Weights, load_f32};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::add::add_assign;
use crate::kernels::attention::{Attention, causal};
use crate::kernels::columns::gather;
use crate::kernels::rmsnorm::rmsnorm;
use crate::kernels::rope;
use crate::kernels::swiglu::{swiglu, swiglu_halves};
use crate::tensor::Tensor;

impl Attention {
    /// Of layer `layer`.
    pub(super) fn of(config: &ModelConfig, layer: usize) -> Self {
        Self {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
            window: config.sliding_window.get(layer).copied().flatten(),
        }
    }
}

/// Activations on their way through a block.
pub struct Flow {
    /// The residual stream, [tokens, hidden] in f32: sequences of equal length stacked in rows.
    pub h: Tensor,
    /// The inputs of the last stage, if whoever holds the flow kept them; computed again otherwise.
    pub inner: Option<Tensor>,
    /// What the section's finished branches gave, where others are still to come.
    pub sum: Option<Tensor>,
    /// The stage that it has come to.
    pub stage: usize,
}

impl Flow {
    /// Before a block.
    pub fn new(h: Tensor) -> Self {
        Self { h, inner: None, sum: None, stage: 0 }
    }
}

/// The weights of one block.
pub struct Block {
    layer: usize,
    spec: BlockSpec,
    norms: HashMap<String, Tensor>,
    /// By module.
    linears: HashMap<String, Linear>,
    shape: Attention,
    eps: f32,
}

/// Where a stage lies: in which section and branch, and whether it is the branch's second.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    section: usize,
    branch: usize,
    second: bool,
}

impl Block {
    /// Loads block `layer`.
    ///
    /// # Errors
    /// [`Error::Model`] naming a tensor that is absent or has the wrong shape.
    pub async fn load<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let mut block = Self::without_linears(config, layer, weights, device).await?;
        for spec in arch::stages(config, layer).into_iter().flat_map(|stage| stage.linears) {
            let linear = weights.linear(&spec, device).await?;
            block.set_linear(&spec, linear);
        }
        Ok(block)
    }

    /// Block `layer` with its norms only: the quantization pipeline adds each linear layer when it
    /// is quantized, so that the weights it came from need not stay.
    ///
    /// # Errors
    /// As [`Block::load`].
    pub async fn without_linears<W: Weights + ?Sized>(
        config: &ModelConfig,
        layer: usize,
        weights: &W,
        device: &Device,
    ) -> Result<Self> {
        let spec = arch::block(config, layer);
        let widths = (spec.norms().into_iter().map(|name| (name, config.hidden_size)))
            .chain(spec.head_norms().into_iter().map(|name| (name, config.head_dim)));
        let mut norms = HashMap::new();
        for (name, width) in widths {
            let values = load_f32(weights, &arch::weight(name), &[width]).await?;
            norms.insert(name.to_owned(), Tensor::from_f32(device, &[width], values)?);
        }
        Ok(Self {
            layer,
            norms,
            spec,
            linears: HashMap::new(),
            shape: Attention::of(config, layer),
            eps: config.rms_norm_eps,
        })
    }

    /// Adds a linear layer.
    pub fn set_linear(&mut self, spec: &LinearSpec, linear: Linear) {
        self.linears.insert(spec.module.clone(), linear);
    }

    /// The linear layer of this name.
    fn linear(&self, spec: &LinearSpec) -> Result<&Linear> {
        let absent = || Error::Internal(format!("{} is not in its block yet", spec.module));
        self.linears.get(&spec.module).ok_or_else(absent)
    }

    fn norm(&self, name: &str) -> Result<&Tensor> {
        self.norms.get(name).ok_or_else(|| Error::Internal(format!("{name} is not in its block")))
    }

    /// Its stages in forward order.
    pub fn stages(&self) -> impl Iterator<Item = &Stage> {
        self.spec.stages()
    }

    /// Whether `stage` is the first of a branch, so that the branch before must be finished for it.
    pub fn begins_branch(&self, stage: usize) -> bool {
        stage.is_multiple_of(2)
    }

    /// Whether the inputs of `stage` are worth keeping for the next stage: those of a branch's first are a
    /// norm of what is there.
    pub fn worth_keeping(&self, stage: usize) -> bool {
        !self.begins_branch(stage)
    }

    /// Stages come in pairs, a pair for each branch.
    fn place(&self, stage: usize) -> Option<Place> {
        let mut branch = stage / 2;
        for (section, spec) in self.spec.sections.iter().enumerate() {
            if branch < spec.branches.len() {
                return Some(Place { section, branch, second: !stage.is_multiple_of(2) });
            }
            branch -= spec.branches.len();
        }
        None
    }

    fn branch(&self, place: Place) -> &Branch {
        &self.spec.sections[place.section].branches[place.branch]
    }

    /// Brings `flow` to `stage`, not before the one it is at: finishes what lies behind, with the linear
    /// layers that are there now. The number of stages means the block's end.
    ///
    /// # Errors
    /// [`Error::Internal`] when a branch is left out or a layer is missing; those of the device.
    pub async fn advance(
        &self,
        stage: usize,
        flow: &mut Flow,
        seq_len: usize,
        rope: &RopeTables,
    ) -> Result<()> {
        if stage != flow.stage {
            self.step(stage, flow, seq_len, rope)?;
            flow.inner = None;
        }
        Ok(())
    }

    /// The same, but leaves the inputs of the stage before where they serve the next.
    fn step(&self, stage: usize, flow: &mut Flow, seq_len: usize, rope: &RopeTables) -> Result<()> {
        let Some(from) = self.place(flow.stage) else {
            return Err(Error::Internal(format!("block {} has no stage {}", self.layer, flow.stage)));
        };
        if stage < flow.stage || stage / 2 > flow.stage / 2 + 1 {
            return Err(Error::Internal(format!("from stage {} to stage {stage}", flow.stage)));
        }
        if stage / 2 > flow.stage / 2 {
            self.close(from, self.place(stage), flow, seq_len, rope)?;
        }
        flow.stage = stage;
        Ok(())
    }

    /// Computes what a branch gives and adds it to the stream, or to the section's sum until that is whole.
    fn close(
        &self,
        from: Place,
        to: Option<Place>,
        flow: &mut Flow,
        seq_len: usize,
        rope: &RopeTables,
    ) -> Result<()> {
        let branch = self.branch(from);
        let kept = if flow.stage % 2 == 1 { flow.inner.take() } else { None };
        flow.inner = None;
        let x = match kept {
            Some(x) => x,
            None => {
                let x = self.first_input(branch, flow)?;
                self.second_input(branch, &x, seq_len, rope)?
            }
        };
        let [spec] = &branch.stages[1].linears[..] else {
            return Err(Error::Internal(format!("block {}: a branch with several ends", self.layer)));
        };
        let mut out = self.linear(spec)?.forward(&x)?;
        if let Some(sum) = flow.sum.take() {
            add_assign(&mut out, &sum)?;
        }
        if to.is_some_and(|to| to.section == from.section) {
            flow.sum = Some(out);
            return Ok(());
        }
        add_assign(&mut flow.h, &out)
    }

    /// The inputs of `stage`, [rows, in_features], of a `flow` that was at the stage before, or at this one.
    /// Put back as `flow.inner` they need not be computed again; see [`Block::worth_keeping`].
    ///
    /// # Errors
    /// As [`Block::advance`].
    pub async fn input(
        &self,
        stage: usize,
        flow: &mut Flow,
        seq_len: usize,
        rope: &RopeTables,
    ) -> Result<Tensor> {
        let before = flow.stage;
        self.step(stage, flow, seq_len, rope)?;
        let Some(place) = self.place(stage) else {
            return Err(Error::Internal(format!("block {} has no stage {stage}", self.layer)));
        };
        let branch = self.branch(place);
        let kept = flow.inner.take();
        if !place.second {
            return self.first_input(branch, flow);
        }
        match kept {
            Some(x) if before == stage => Ok(x),
            Some(x) => self.second_input(branch, &x, seq_len, rope),
            None => self.second_input(branch, &self.first_input(branch, flow)?, seq_len, rope),
        }
    }

    /// The block's end: the flow's `h` is the next block's input.
    ///
    /// # Errors
    /// As [`Block::advance`].
    pub async fn finish(&self, flow: Flow, seq_len: usize, rope: &RopeTables) -> Result<Tensor> {
        let mut flow = flow;
        self.advance(self.stages().count(), &mut flow, seq_len, rope).await?;
        Ok(flow.h)
    }

    /// The whole block. Each run of `seq_len` rows is a sequence that starts at position 0.
    ///
    /// # Errors
    /// As [`Block::advance`].
    pub async fn forward(&self, h: Tensor, seq_len: usize, rope: &RopeTables) -> Result<Tensor> {
        let mut flow = Flow::new(h);
        for stage in 0..self.stages().count() {
            let x = self.input(stage, &mut flow, seq_len, rope).await?;
            flow.inner = Some(x);
        }
        self.finish(flow, seq_len, rope).await
    }

    /// The inputs of a branch's first stage.
    fn first_input(&self, branch: &Branch, flow: &Flow) -> Result<Tensor> {
        rmsnorm(&flow.h, self.norm(&branch.norm)?, self.eps)
    }

    /// The inputs of its second stage, from those of its first.
    fn second_input(&self, branch: &Branch, x: &Tensor, seq_len: usize, rope: &RopeTables) -> Result<Tensor> {
        let linears = &branch.stages[0].linears;
        match &branch.kind {
            Kind::Attention { qkv, head_norms } => {
                let [mut q, mut k, v] = self.heads(*qkv, linears, x)?;
                if let Some([q_norm, k_norm]) = head_norms {
                    q = rmsnorm(&q, self.norm(q_norm)?, self.eps)?;
                    k = rmsnorm(&k, self.norm(k_norm)?, self.eps)?;
                }
                rope::apply(&mut q, rope.of(self.layer), seq_len, 0)?;
                rope::apply(&mut k, rope.of(self.layer), seq_len, 0)?;
                causal(&q, &k, &v, &self.shape, seq_len)
            }
            Kind::Gated => match &linears[..] {
                [gate, up] => swiglu(self.linear(gate)?.forward(x)?, &self.linear(up)?.forward(x)?),
                [gate_up] => swiglu_halves(&self.linear(gate_up)?.forward(x)?),
                _ => Err(Error::Internal("a gated branch has one layer or two".into())),
            },
        }
    }

    /// q, k and v of an input.
    fn heads(&self, qkv: Qkv, linears: &[LinearSpec], x: &Tensor) -> Result<[Tensor; 3]> {
        match (qkv, linears) {
            (Qkv::Apart, [q, k, v]) => {
                Ok([self.linear(q)?.forward(x)?, self.linear(k)?.forward(x)?, self.linear(v)?.forward(x)?])
            }
            (Qkv::Stacked, [qkv]) => {
                let all = self.linear(qkv)?.forward(x)?;
                let (q, kv) =
                    (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim);
                let part = |from: usize, to: usize| {
                    let columns = (from as u32..to as u32).collect();
                    gather(&all, &Tensor::from_u32(all.device(), &[to - from], columns)?)
                };
                Ok([part(0, q)?, part(q, q + kv)?, part(q + kv, q + 2 * kv)?])
            }
            _ => Err(Error::Internal("q, k and v are three layers or one".into())),
        }
    }
}
