//! The GPU side of products of few rows: one dispatch, whatever comes before and after the product.

use super::Target;
use crate::device::{Access, Gpu, GpuBuffer, Kernel};
use crate::error::Result;
use crate::kernels::cut::ranges;
use crate::kernels::input::Input;
use crate::kernels::registry::Registered;
use crate::tensor::{Elem, Tensor};

/// `GemvParams` of shaders/shared/gemv.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    n: u32,
    k: u32,
    y_offset: u32,
    y_row: u32,
    has_bias: u32,
    add: u32,
    eps: f32,
    first: u32,
    spans: u32,
    span_quads: u32,
    chunk_spans: u32,
    depth_quads: u32,
    group_spans: u32,
    groups: u32,
    word_rows: u32,
    pad: u32,
}

/// Quads of X that a workgroup holds: `STAGED` of the shader.
const STAGED: usize = 960;

const GEMV: Kernel = Kernel {
    name: "gemv",
    source: include_str!("../../../shaders/gemv.wgsl"),
    bindings: &[Access::Read, Access::Read, Access::Read, Access::Read, Access::Read, Access::ReadWrite],
};

/// For [`crate::kernels::registry`].
pub const KERNELS: &[Registered] = &[(&GEMV, size_of::<Params>())];

/// How the depth is cut.
pub struct Spans {
    /// Slots in all.
    pub depth: usize,
    /// Quads of slots in a span.
    pub quads: usize,
    /// Spans in a group, groups and rows of words: of packed weights.
    pub group_spans: usize,
    pub groups: usize,
    pub word_rows: usize,
}

/// How a kernel's threads share its work.
#[derive(Debug, Clone, Copy)]
pub struct Team {
    /// Threads of a workgroup, at most 64.
    pub threads: usize,
    /// Those that share a sum, a power of two.
    pub lanes: usize,
}

impl Team {
    /// Without threads that share a sum there is nothing to wait for, which is what software adapters
    /// are worst at; their threads are slow to start and few run at a time. Hardware needs thousands.
    pub fn of(gpu: &Gpu, lanes: usize) -> Self {
        match gpu.summary().software {
            true => Self { threads: 16, lanes: 1 },
            false => Self { threads: 64, lanes },
        }
    }
}

/// Everything about a product but its weight's buffers.
pub struct Job<'a> {
    pub y: Target<'a>,
    pub input: Input<'a>,
    pub bias: Option<&'a Tensor>,
    pub add: bool,
    pub n: usize,
    pub order: Option<&'a Tensor>,
    pub spans: Spans,
    pub team: Team,
    /// Outputs of a thread.
    pub outputs: usize,
}

impl Job<'_> {
    /// Records the dispatches, one where it is within the budget. `weight` has the kernel's first
    /// buffers.
    pub fn dispatch(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        weight: &[&GpuBuffer],
        constants: &[(&str, f64)],
    ) -> Result<()> {
        let (rows, spans) = (self.input.tokens(), &self.spans);
        let x = self.input.source().gpu()?;
        // What a kernel does not read must still be bound to something.
        fn or<'a>(x: &'a GpuBuffer, tensor: Option<&'a Tensor>) -> Result<&'a GpuBuffer> {
            tensor.map_or(Ok(x), Tensor::gpu)
        }
        let (kind, norm, eps) = match self.input {
            Input::Plain(_) => (0.0, None, 0.0),
            Input::RmsNorm { weight, eps, .. } => (1.0, Some(weight), eps),
            Input::SwiGlu(_) => (2.0, None, 0.0),
        };
        let mut all = vec![
            ("ROWS", rows as f64),
            ("THREADS", self.team.threads as f64),
            ("LANES", self.team.lanes as f64),
            ("INPUT", kind),
            ("ORDERED", u8::from(self.order.is_some()).into()),
        ];
        all.extend_from_slice(constants);
        let mut buffers = weight.to_vec();
        buffers.extend([x, or(x, norm)?, or(x, self.order)?, or(x, self.bias)?, self.y.tensor.gpu()?]);

        let count = spans.depth.div_ceil(4 * spans.quads);
        let most = (STAGED / (rows * spans.quads)).max(1);
        let per_group = self.outputs * self.team.threads / self.team.lanes;
        let cost = 2.0 * (rows * per_group * spans.depth) as f64;
        for part in ranges(gpu, self.n.div_ceil(per_group), cost) {
            let params = Params {
                n: self.n as u32,
                k: self.input.features() as u32,
                y_offset: self.y.offset as u32,
                y_row: self.y.ld as u32,
                has_bias: self.bias.is_some().into(),
                add: self.add.into(),
                eps,
                first: part.start as u32,
                spans: count as u32,
                span_quads: spans.quads as u32,
                // As many chunks as must be, all about as long.
                chunk_spans: count.div_ceil(count.div_ceil(most)) as u32,
                depth_quads: (spans.depth / 4) as u32,
                group_spans: spans.group_spans as u32,
                groups: spans.groups as u32,
                word_rows: spans.word_rows as u32,
                pad: 0,
            };
            let (params, groups) = (bytemuck::bytes_of(&params), gpu.unfold(part.len()));
            gpu.dispatch(kernel, &all, &buffers, params, groups, cost * part.len() as f64)?;
        }
        Ok(())
    }
}

/// Quads of X that belong to a vec4 of the weight's words.
fn word_quads(elem: Elem) -> usize {
    if elem == Elem::F32 { 1 } else { 2 }
}

/// Whether the kernel can read a weight: its rows must be whole vectors.
pub fn takes(w: &Tensor) -> bool {
    w.cols().is_multiple_of(4 * word_quads(w.elem()))
}

/// Lanes on hardware: neighbours read a row of the weight together.
const LANES: usize = 16;

pub fn few_rows(
    gpu: &Gpu,
    y: Target,
    input: Input,
    w: &Tensor,
    bias: Option<&Tensor>,
    add: bool,
) -> Result<()> {
    let spans =
        Spans { depth: w.cols(), quads: word_quads(w.elem()), group_spans: 1, groups: 1, word_rows: 0 };
    let team = Team::of(gpu, LANES);
    let job = Job { y, input, bias, add, n: w.rows(), order: None, spans, team, outputs: 4 };
    job.dispatch(gpu, &GEMV, &[w.gpu()?], &[("ELEM", w.elem().shader_constant())])
}
