//! The GPU side of packed weights: qgemv is one dispatch with what comes before and after it, qgemm is
//! cut like gemm.

use super::packed::{Form, Packed};
use crate::device::{Access, Gpu, Kernel};
use crate::error::Result;
use crate::kernels::gemm::Target;
use crate::kernels::gemm::gpu::{Params, variant};
use crate::kernels::gemv::gpu::{Job, Params as GemvParams, Spans, Team};
use crate::kernels::input::Input;
use crate::kernels::registry::Registered;
use crate::tensor::Tensor;

const QGEMV: Kernel = Kernel {
    name: "qgemv",
    source: include_str!("../../../shaders/qgemv.wgsl"),
    bindings: &[
        Access::Read,
        Access::Read,
        Access::Read,
        Access::Read,
        Access::Read,
        Access::Read,
        Access::ReadWrite,
    ],
};

/// For [`crate::kernels::registry`].
pub const KERNELS: &[Registered] = &[(&QGEMV, size_of::<GemvParams>())];

/// Lanes on hardware: the other four threads of 64 / 16 share a tile's words.
const LANES: usize = 16;

/// Codes in a span at most: with lanes, so many that all of them have some; without, so few that sums
/// of codes keep their precision.
fn longest_span(team: Team) -> usize {
    if team.lanes > 1 { 32 } else { 128 }
}

fn spans(form: Form, team: Team) -> Spans {
    let (unit, group) = (form.unit_codes(), form.group);
    let most = (longest_span(team) / unit).max(1);
    let units = (1..=most).rev().find(|&units| (group / unit).is_multiple_of(units)).unwrap_or(1);
    Spans {
        depth: form.depth,
        quads: units * unit / 4,
        group_spans: group / (units * unit),
        groups: form.groups(),
        word_rows: form.word_rows(),
    }
}

fn constants(w: &Packed) -> [(&'static str, f64); 3] {
    [
        ("BITS", w.form.bits.into()),
        ("WIDE", u8::from(w.form.wide).into()),
        ("ZEROS", u8::from(w.zeros).into()),
    ]
}

pub fn few_rows(
    gpu: &Gpu,
    y: Target,
    input: Input,
    w: &Packed,
    bias: Option<&Tensor>,
    add: bool,
) -> Result<()> {
    with_team(gpu, Team::of(gpu, LANES), y, input, w, bias, add)
}

fn with_team(
    gpu: &Gpu,
    team: Team,
    y: Target,
    input: Input,
    w: &Packed,
    bias: Option<&Tensor>,
    add: bool,
) -> Result<()> {
    let order = w.order.as_ref();
    let job = Job { y, input, bias, add, n: w.n, order, spans: spans(w.form, team), team, outputs: 8 };
    job.dispatch(gpu, &QGEMV, &[w.words.gpu()?, w.grid.gpu()?], &constants(w))
}

/// `x` [tokens, depth] has its columns in the order of the weight's slots.
pub fn many_rows(
    gpu: &Gpu,
    y: Target,
    x: &Tensor,
    w: &Packed,
    bias: Option<&Tensor>,
    add: bool,
) -> Result<()> {
    let x_buffer = x.gpu()?;
    // A kernel that reads no bias must have something bound in its place.
    let bias_buffer = bias.map_or(Ok(x_buffer), Tensor::gpu)?;
    let buffers = [x_buffer, w.words.gpu()?, w.grid.gpu()?, bias_buffer, y.tensor.gpu()?];
    let params = Params {
        m: x.rows() as u32,
        n: w.n as u32,
        k: w.form.depth as u32,
        a_row: x.cols() as u32,
        a_col: 1,
        c_offset: y.offset as u32,
        c_row: y.ld as u32,
        alpha: 1.0,
        beta: if add { 1.0 } else { 0.0 },
        has_bias: bias.is_some().into(),
        group: w.form.group as u32,
        groups: w.form.groups() as u32,
        word_rows: w.form.word_rows() as u32,
        ..Params::default()
    };
    variant(gpu).packed(gpu, &constants(w), &buffers, params)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Layer, Step, expected, kinds, layers, run};
    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::{relative_error, test_gpu};

    /// What hardware does, which software adapters can do too.
    #[test]
    fn threads_that_share_sums_give_what_widened_weights_give() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let team = Team { threads: 64, lanes: LANES };
        for (index, shape) in kinds().into_iter().enumerate() {
            let layer = shape.make();
            let (step, rows) = ([Step::Norm, Step::Gate, Step::Plain][index % 3], 1 + index % 4);
            let want = expected(&layer, step, rows, true);
            let got = run(&layer, step, rows, true, &device, |y, input, w, bias, add| {
                with_team(gpu, team, y, input, w, bias, add)
            });
            assert!(relative_error(&got, &want) < 3e-6, "{shape:?} {step:?} {rows}");
        }
    }

    #[test]
    fn spans_divide_groups_and_are_not_long() {
        for team in [Team { threads: 16, lanes: 1 }, Team { threads: 64, lanes: LANES }] {
            for shape in layers().into_iter().chain([Layer::new(32, 576, 4, -1)]) {
                let layer = shape.make();
                let form = Packed::new(&layer, 0..layer.n, &Device::Cpu).unwrap().form;
                let spans = spans(form, team);
                assert_eq!(4 * spans.quads * spans.group_spans, form.group, "{shape:?}");
                assert!(
                    4 * spans.quads <= longest_span(team)
                        && (4 * spans.quads).is_multiple_of(form.unit_codes())
                );
            }
        }
        let team = Team { threads: 16, lanes: 1 };
        let whole = Packed::new(&Layer::new(32, 576, 4, -1).make(), 0..32, &Device::Cpu).unwrap().form;
        assert_eq!(spans(whole, team).quads, 24);
    }
}
