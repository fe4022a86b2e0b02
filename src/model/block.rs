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
use std::rc::Rc;

use super::arch::{self, BlockSpec, Branch, Kind, LinearSpec, Qkv, Route, Stage};
use super::cache::KvCache;
use super::config::ModelConfig;
use super::linear::Linear;
use super::norm::Norm;
use super::rope::RopeTables;
use super::routing::{self, Routing};
use super::weights::{Weights, load_row_chunks};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::activation::{self, Function};
use crate::kernels::add::add_assign;
use crate::kernels::append::Rows;
use crate::kernels::attention::{self, Attention, causal};
use crate::kernels::columns::{copy, gather};
use crate::kernels::embedding;
use crate::kernels::keep::keep;
use crate::kernels::rope;
use crate::kernels::scatter::add_rows;
use crate::kernels::swiglu::{swiglu, swiglu_halves};
use crate::tensor::{Elem, Tensor};

impl Attention {
    /// Of layer `layer`.
    pub(super) fn of(config: &ModelConfig, layer: usize) -> Self {
        Self {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale: config.attention_scale,
            window: config.sliding_window.get(layer).copied().flatten(),
            soft_cap: config.attention_soft_cap,
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
    /// In a section with experts, which tokens its branches see. Where two flows go side by side, one may
    /// be given the other's, before it comes to the section.
    pub routing: Option<Rc<Routing>>,
    /// The stage that it has come to.
    pub stage: usize,
}

impl Flow {
    /// Before a block.
    pub fn new(h: Tensor) -> Self {
        Self { h, inner: None, sum: None, routing: None, stage: 0 }
    }

    /// The residual stream with what the section's finished branches will add, f32 [tokens, hidden].
    ///
    /// # Errors
    /// Those of the device.
    pub fn stream(&self) -> Result<Tensor> {
        let mut stream = copy(&self.h)?;
        if let Some(sum) = &self.sum {
            add_assign(&mut stream, sum)?;
        }
        Ok(stream)
    }
}

/// The weights of one block.
pub struct Block {
    layer: usize,
    spec: BlockSpec,
    norms: HashMap<String, Norm>,
    /// Routers and gates by name.
    routers: HashMap<String, Linear>,
    /// By module.
    linears: HashMap<String, Linear>,
    shape: Attention,
    rotary_dim: usize,
    activation: Function,
}

/// Which tokens a block sees at once.
pub(super) enum Reading<'a> {
    /// Whole sequences of this length.
    Whole(usize),
    /// The next tokens of one, behind those whose keys and values are in a cache.
    Next(&'a mut KvCache),
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
        let widths =
            (spec.norms().into_iter().map(|name| (name, config.hidden_size))).chain(spec.head_norms());
        let mut norms = HashMap::new();
        for (name, width) in widths {
            norms.insert(name.to_owned(), Norm::load(config, name, width, weights, device).await?);
        }
        let mut routers = HashMap::new();
        for (name, rows) in spec.routers() {
            let shape = [rows, config.hidden_size];
            let chunks = load_row_chunks(weights, &arch::weight(name), shape, device).await?;
            routers.insert(name.to_owned(), Linear::new(chunks, None)?);
        }
        Ok(Self {
            layer,
            norms,
            routers,
            spec,
            linears: HashMap::new(),
            shape: Attention::of(config, layer),
            rotary_dim: config.rotary_dim,
            activation: config.activation,
        })
    }

    /// The block of a model that is only compared with, in less time; see [`Linear::rounded`].
    pub fn rounded(mut self) -> Self {
        self.linears = self.linears.into_iter().map(|(module, linear)| (module, linear.rounded())).collect();
        self
    }

    /// Adds a linear layer.
    pub fn set_linear(&mut self, spec: &LinearSpec, linear: Linear) {
        self.linears.insert(spec.module.clone(), linear);
    }

    /// Puts `linear` in the place of another, which it gives back.
    ///
    /// # Errors
    /// [`Error::Internal`] when there is no other.
    pub fn exchange(&mut self, spec: &LinearSpec, linear: Linear) -> Result<Linear> {
        let absent = || Error::Internal(format!("{} is not in its block yet", spec.module));
        self.linears.insert(spec.module.clone(), linear).ok_or_else(absent)
    }

    /// The linear layer of this name.
    fn linear(&self, spec: &LinearSpec) -> Result<&Linear> {
        let absent = || Error::Internal(format!("{} is not in its block yet", spec.module));
        self.linears.get(&spec.module).ok_or_else(absent)
    }

    fn norm(&self, name: &str) -> Result<&Norm> {
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

    /// Whether `stage` is the first of a section with experts, where the flow's [`Routing`] is made.
    pub fn routes(&self, stage: usize) -> bool {
        let first = |place: Place| place.branch == 0 && !place.second;
        self.place(stage)
            .is_some_and(|place| first(place) && self.spec.sections[place.section].router.is_some())
    }

    /// The number of `stage`'s branch in its section, and the expert that it is.
    pub fn expert(&self, stage: usize) -> Option<(usize, usize)> {
        let place = self.place(stage)?;
        match self.branch(place).route {
            Route::Expert(expert) => Some((place.branch, expert)),
            Route::Every | Route::Gate(_) => None,
        }
    }

    /// The layer of `stage` if what it gives is added to the residual stream as it is.
    pub fn end_in_stream(&self, stage: usize) -> Option<&LinearSpec> {
        let ends = self.spec.ends_in_stream().nth(stage)?;
        self.stages().nth(stage).and_then(|stage| stage.linears.first()).filter(|_| ends)
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
            self.step(stage, flow, &mut Reading::Whole(seq_len), rope).await?;
            flow.inner = None;
        }
        self.route(flow).await
    }

    /// The same, but leaves the inputs of the stage before where they serve the next.
    async fn step(
        &self,
        stage: usize,
        flow: &mut Flow,
        text: &mut Reading<'_>,
        rope: &RopeTables,
    ) -> Result<()> {
        let Some(from) = self.place(flow.stage) else {
            return Err(Error::Internal(format!("block {} has no stage {}", self.layer, flow.stage)));
        };
        if stage < flow.stage || stage / 2 > flow.stage / 2 + 1 {
            return Err(Error::Internal(format!("from stage {} to stage {stage}", flow.stage)));
        }
        if stage / 2 > flow.stage / 2 {
            self.close(from, self.place(stage), flow, text, rope)?;
        }
        flow.stage = stage;
        self.route(flow).await
    }

    /// Routes the tokens of a flow that has come to a section with experts, unless that is done.
    async fn route(&self, flow: &mut Flow) -> Result<()> {
        let Some(place) = self.place(flow.stage).filter(|_| flow.routing.is_none()) else { return Ok(()) };
        let section = &self.spec.sections[place.section];
        let Some(router) = &section.router else { return Ok(()) };
        let Some(first) = section.branches.first() else { return Ok(()) };
        let x = self.norm(&first.norm)?.apply(&flow.h)?;
        let of = |name: &str| {
            let absent = || Error::Internal(format!("{name} is not in its block"));
            self.routers.get(name).ok_or_else(absent)?.forward(&x)
        };
        let mut branches = routing::experts(router, &of(&router.name)?).await?;
        for branch in &section.branches {
            if let Route::Gate(name) = &branch.route {
                branches.push(routing::gate(&of(name)?).await?);
            }
        }
        if branches.len() != section.branches.len() {
            return Err(Error::Internal(format!(
                "{} routes for {} branches",
                branches.len(),
                section.branches.len()
            )));
        }
        flow.routing = Some(Rc::new(Routing { branches }));
        Ok(())
    }

    /// Computes what a branch gives and adds it to the stream, or to the section's sum until that is whole.
    fn close(
        &self,
        from: Place,
        to: Option<Place>,
        flow: &mut Flow,
        text: &mut Reading,
        rope: &RopeTables,
    ) -> Result<()> {
        let branch = self.branch(from);
        let kept = if flow.stage % 2 == 1 { flow.inner.take() } else { None };
        flow.inner = None;
        let x = match kept {
            Some(x) => Some(x),
            None => match self.first_input(from, flow)? {
                Some(x) => Some(self.second_input(branch, &x, text, rope)?),
                None => None,
            },
        };
        let [spec] = &branch.stages[1].linears[..] else {
            return Err(Error::Internal(format!("block {}: a branch with several ends", self.layer)));
        };
        let last = to.is_none_or(|to| to.section != from.section);
        match (x, &branch.route) {
            (None, _) => {}
            (Some(x), Route::Every) => {
                let mut out = self.linear(spec)?.forward(&x)?;
                if let Some(sum) = flow.sum.take() {
                    add_assign(&mut out, &sum)?;
                }
                flow.sum = Some(out);
            }
            (Some(x), Route::Expert(_) | Route::Gate(_)) => {
                let out = self.linear(spec)?.forward(&x)?;
                let mut sum = match flow.sum.take() {
                    Some(sum) => sum,
                    None => Tensor::zeros(flow.h.device(), Elem::F32, flow.h.shape())?,
                };
                let (tokens, weights) = self.routed(from, flow)?;
                add_rows(&mut sum, &out, tokens, weights)?;
                flow.sum = Some(sum);
            }
        }
        if !last {
            return Ok(());
        }
        flow.routing = None;
        let Some(mut out) = flow.sum.take() else { return Ok(()) };
        if let Some(norm) = &self.spec.sections[from.section].post_norm {
            out = self.norm(norm)?.apply(&out)?;
        }
        add_assign(&mut flow.h, &out)
    }

    /// The tokens of an expert, and their weights.
    fn routed<'a>(&self, place: Place, flow: &'a Flow) -> Result<&'a (Vec<u32>, Vec<f32>)> {
        let routing = flow.routing.as_ref().and_then(|routing| routing.branches.get(place.branch));
        routing.ok_or_else(|| Error::Internal(format!("block {}: tokens without a route", self.layer)))
    }

    /// The inputs of `stage`, [rows, in_features], of a `flow` that was at the stage before, or at this one;
    /// `None` when no token was routed to an expert. Put back as `flow.inner` they need not be computed again; see [`Block::worth_keeping`].
    ///
    /// # Errors
    /// As [`Block::advance`].
    pub async fn input(
        &self,
        stage: usize,
        flow: &mut Flow,
        seq_len: usize,
        rope: &RopeTables,
    ) -> Result<Option<Tensor>> {
        self.input_of(stage, flow, &mut Reading::Whole(seq_len), rope).await
    }

    /// The inputs that `stage` would have if every token were routed to its expert. Of those that are, none
    /// are kept.
    ///
    /// # Errors
    /// As [`Block::advance`].
    pub async fn input_of_all(
        &self,
        stage: usize,
        flow: &mut Flow,
        seq_len: usize,
        rope: &RopeTables,
    ) -> Result<Tensor> {
        self.advance(stage, flow, seq_len, rope).await?;
        flow.inner = None;
        let place = self.existing(stage)?;
        let branch = self.branch(place);
        let x = self.norm(&branch.norm)?.apply(&flow.h)?;
        match place.second {
            true => self.second_input(branch, &x, &mut Reading::Whole(seq_len), rope),
            false => Ok(x),
        }
    }

    fn existing(&self, stage: usize) -> Result<Place> {
        self.place(stage).ok_or_else(|| Error::Internal(format!("block {} has no stage {stage}", self.layer)))
    }

    async fn input_of(
        &self,
        stage: usize,
        flow: &mut Flow,
        text: &mut Reading<'_>,
        rope: &RopeTables,
    ) -> Result<Option<Tensor>> {
        let before = flow.stage;
        self.step(stage, flow, text, rope).await?;
        let place = self.existing(stage)?;
        let branch = self.branch(place);
        let kept = flow.inner.take();
        if !place.second {
            return self.first_input(place, flow);
        }
        match kept {
            Some(x) if before == stage => Ok(Some(x)),
            Some(x) => self.second_input(branch, &x, text, rope).map(Some),
            None => match self.first_input(place, flow)? {
                Some(x) => self.second_input(branch, &x, text, rope).map(Some),
                None => Ok(None),
            },
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
        self.read(h, &mut Reading::Whole(seq_len), rope).await
    }

    /// The whole block.
    pub(super) async fn read(&self, h: Tensor, text: &mut Reading<'_>, rope: &RopeTables) -> Result<Tensor> {
        let mut flow = Flow::new(h);
        let stages = self.stages().count();
        for stage in 0..stages {
            let x = self.input_of(stage, &mut flow, text, rope).await?;
            flow.inner = x;
        }
        self.step(stages, &mut flow, text, rope).await?;
        Ok(flow.h)
    }

    /// Bytes of the linear layers.
    pub(super) fn bytes(&self) -> u64 {
        self.linears.values().map(Linear::bytes).sum()
    }

    /// The inputs of a branch's first stage.
    fn first_input(&self, place: Place, flow: &Flow) -> Result<Option<Tensor>> {
        let branch = self.branch(place);
        let Route::Expert(_) = branch.route else {
            return self.norm(&branch.norm)?.apply(&flow.h).map(Some);
        };
        let (tokens, _) = self.routed(place, flow)?;
        if tokens.is_empty() {
            return Ok(None);
        }
        self.norm(&branch.norm)?.apply(&embedding::gather(&[&flow.h], tokens)?).map(Some)
    }

    /// The inputs of its second stage, from those of its first.
    fn second_input(
        &self,
        branch: &Branch,
        x: &Tensor,
        text: &mut Reading,
        rope: &RopeTables,
    ) -> Result<Tensor> {
        let linears = &branch.stages[0].linears;
        match (&branch.kind, &linears[..]) {
            (Kind::Attention { qkv, head_norms }, _) => {
                let [mut q, mut k, v] = self.heads(*qkv, linears, x)?;
                if let Some([(q_norm, _), (k_norm, _)]) = head_norms {
                    q = self.norm(q_norm)?.apply(&q)?;
                    k = self.norm(k_norm)?.apply(&k)?;
                }
                let (seq_len, start) = match text {
                    Reading::Whole(seq_len) => (*seq_len, 0),
                    Reading::Next(cache) => (x.rows(), cache.len()),
                };
                let table = match text {
                    Reading::Whole(seq_len) => rope.of_text(self.layer, *seq_len),
                    Reading::Next(_) => rope.of(self.layer),
                };
                if let Some(table) = table {
                    rope::apply(&mut q, table, seq_len, start)?;
                    rope::apply(&mut k, table, seq_len, start)?;
                }
                match text {
                    Reading::Whole(_) => causal(&q, &k, &v, &self.shape, seq_len),
                    Reading::Next(cache) => self.over_cache(&q, &k, &v, cache),
                }
            }
            (Kind::Gated, [gate, up]) => {
                let (gate, up) = (self.linear(gate)?.forward(x)?, self.linear(up)?.forward(x)?);
                self.gated(gate, &up)
            }
            (Kind::Gated, [gate_up]) => {
                let both = self.linear(gate_up)?.forward(x)?;
                if self.activation == Function::Silu {
                    return swiglu_halves(&both);
                }
                let half = both.cols() / 2;
                self.gated(columns(&both, 0..half)?, &columns(&both, half..2 * half)?)
            }
            (Kind::Plain, [up]) => {
                let mut inner = self.linear(up)?.forward(x)?;
                activation::apply(&mut inner, self.activation, None)?;
                Ok(inner)
            }
            _ => Err(Error::Internal(format!("{} layers before {:?}", linears.len(), branch.kind))),
        }
    }

    /// act(gate) · up
    fn gated(&self, mut gate: Tensor, up: &Tensor) -> Result<Tensor> {
        if self.activation == Function::Silu {
            return swiglu(gate, up);
        }
        activation::apply(&mut gate, self.activation, Some(up))?;
        Ok(gate)
    }

    /// Keeps keys and values, and attends to all there are.
    fn over_cache(&self, q: &Tensor, k: &Tensor, v: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let (start, mut out) = (cache.len(), Tensor::uninit(q.device(), Elem::F32, q.shape())?);
        let Rows { keys, values } = cache.rows(self.layer);
        keep(keys, k, start)?;
        keep(values, v, start)?;
        let [keys, values] = cache.layer(self.layer);
        attention::cached(&mut out, q, keys, values, &self.shape, start + q.rows())?;
        Ok(out)
    }

    /// q, k and v of an input, the dimensions of each head of q and k as [`Block::turning`] has them.
    fn heads(&self, qkv: Qkv, linears: &[LinearSpec], x: &Tensor) -> Result<[Tensor; 3]> {
        let Attention { heads, kv_heads, head_dim, .. } = self.shape;
        if let (Qkv::Apart, [q, k, v]) = (qkv, linears) {
            let [q, k, v] = [self.linear(q)?, self.linear(k)?, self.linear(v)?].map(|l| l.forward(x));
            let (q, k, v) = (q?, k?, v?);
            return match self.turning() {
                None => Ok([q, k, v]),
                Some(_) => Ok([self.head(&q, heads, 0, head_dim)?, self.head(&k, kv_heads, 0, head_dim)?, v]),
            };
        }
        let [spec] = linears else {
            return Err(Error::Internal("q, k and v are three layers or one".into()));
        };
        let all = self.linear(spec)?.forward(x)?;
        if qkv == Qkv::ByHead {
            let v = (0..heads).flat_map(|h| (0..head_dim).map(move |d| (3 * h + 2) * head_dim + d));
            return Ok([
                self.head(&all, heads, 0, 3 * head_dim)?,
                self.head(&all, heads, head_dim, 3 * head_dim)?,
                columns(&all, v)?,
            ]);
        }
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        Ok([
            self.head(&all, heads, 0, head_dim)?,
            self.head(&all, kv_heads, q, head_dim)?,
            columns(&all, q + kv..q + 2 * kv)?,
        ])
    }

    /// Heads that begin at column `first`, `stride` apart, in the order that rope wants.
    fn head(&self, x: &Tensor, heads: usize, first: usize, stride: usize) -> Result<Tensor> {
        let order = self.turning().unwrap_or_else(|| (0..self.shape.head_dim).collect());
        columns(x, (0..heads).flat_map(|head| order.iter().map(move |d| first + head * stride + d)))
    }

    /// Where a head turns in part, the order of dimensions in which its pairs lie half a head apart, as the
    /// kernel turns them: scores do not change when queries and keys are reordered alike.
    fn turning(&self) -> Option<Vec<usize>> {
        let (d, r) = (self.shape.head_dim, self.rotary_dim);
        if r == d {
            return None;
        }
        let rest = (d - r) / 2;
        Some((0..r / 2).chain(r..r + rest).chain(r / 2..r).chain(r + rest..d).collect())
    }
}

/// Some columns of a tensor.
fn columns(x: &Tensor, which: impl IntoIterator<Item = usize>) -> Result<Tensor> {
    let which: Vec<u32> = which.into_iter().map(|column| column as u32).collect();
    gather(x, &Tensor::from_u32(x.device(), &[which.len()], which)?)
}
