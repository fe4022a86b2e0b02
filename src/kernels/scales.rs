//! Scales and zero points of groups of weights.
//!
//! A grid maps a code q in 0..2^bits to scale·(q − zero). Symmetric grids fix zero at 2^(bits−1);
//! their scale may be negative, which gives the longer tail the end that has one code more.

use super::parallel::for_chunks;
use super::simd::{cut, largest, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// How a scale is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fit {
    /// From the smallest and the largest weight of the group, as the original program does.
    MinMax,
    /// The original program's search: the range shrunk in 80 steps of 1 %, smallest Σ|w − ŵ|^2.4.
    Mse,
    /// Smallest Σ importance·(w − ŵ)² over 81 sizes of the scale from 1.05 times the min-max scale
    /// down in steps of 1 %, in both signs for a symmetric grid; min-max is among them.
    Weighted,
}

/// What scales are rounded to before anything is quantized with them: what the file stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleType {
    F16,
    BF16,
    F32,
}

impl ScaleType {
    /// The override STORED of shaders/shared/round_scale.wgsl.
    pub(super) fn shader_constant(self) -> f64 {
        match self {
            Self::F32 => 0.0,
            Self::F16 => 1.0,
            Self::BF16 => 2.0,
        }
    }
}

/// The kind of grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GridKind {
    pub bits: u32,
    pub sym: bool,
    pub fit: Fit,
    pub scale_type: ScaleType,
}

impl GridKind {
    /// The largest code.
    pub fn maxq(&self) -> f32 {
        ((1u32 << self.bits) - 1) as f32
    }

    /// The zero point of a symmetric grid.
    pub fn middle(&self) -> f32 {
        (1u32 << (self.bits - 1)) as f32
    }
}

/// Scales and zero points of a [rows, groups] grid, both f32 (zero points are whole numbers).
pub struct Grid {
    pub scales: Tensor,
    pub zeros: Tensor,
}

impl Grid {
    /// Scale 1 and code 0 everywhere, to be filled by [`fit`].
    pub fn new(device: &Device, rows: usize, groups: usize) -> Result<Self> {
        Ok(Self {
            scales: Tensor::zeros(device, Elem::F32, &[rows, groups])?,
            zeros: Tensor::zeros(device, Elem::F32, &[rows, groups])?,
        })
    }

    pub fn groups(&self) -> usize {
        self.scales.cols()
    }
}

/// Fits groups of `group` columns (the last may be shorter): column c0 + i of `w` belongs to group
/// `first` + i / group, for i < cols.
///
/// `w` f32 [rows, ld]; `importance` f32 [ld] is read only by [`Fit::Weighted`].
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    pub w: &'a Tensor,
    pub importance: &'a Tensor,
    pub c0: usize,
    pub cols: usize,
    pub group: usize,
    pub first: usize,
}

/// See [`Columns`].
///
/// # Errors
/// [`Error::Internal`] when the columns or groups do not exist.
pub fn fit(kind: GridKind, columns: Columns, grid: &mut Grid) -> Result<()> {
    let Columns { w, importance, c0, cols, group, first } = columns;
    if c0 + cols > w.cols()
        || importance.len() != w.cols()
        || group == 0
        || first + cols.div_ceil(group) > grid.groups()
    {
        return Err(Error::Internal("scales: columns or groups out of range".into()));
    }
    match w.device().clone() {
        Device::Cpu => cpu(kind, columns, grid),
        Device::Gpu(gpu) => gpu::fit(&gpu, kind, columns, grid),
    }
}

fn cpu(kind: GridKind, columns: Columns, grid: &mut Grid) -> Result<()> {
    let Columns { w, importance, c0, cols, group, first } = columns;
    let (w_values, importance, ld, groups) = (w.f32s()?, importance.f32s()?, w.cols(), grid.groups());
    // Scales and zero points of a row are interleaved while rows run in parallel.
    let mut pairs = vec![(0f32, 0f32); w.rows() * cols.div_ceil(group)];
    for_chunks(&mut pairs, cols.div_ceil(group), |row, pairs| {
        for (g, pair) in pairs.iter_mut().enumerate() {
            let (from, to) = (c0 + g * group, c0 + cols.min((g + 1) * group));
            *pair = fit_group(kind, &w_values[row * ld + from..row * ld + to], &importance[from..to]);
        }
    });
    let per_row = cols.div_ceil(group);
    let scales = grid.scales.f32s_mut()?;
    for (index, pair) in pairs.iter().enumerate() {
        scales[index / per_row * groups + first + index % per_row] = pair.0;
    }
    let zeros = grid.zeros.f32s_mut()?;
    for (index, pair) in pairs.iter().enumerate() {
        zeros[index / per_row * groups + first + index % per_row] = pair.1;
    }
    Ok(())
}

/// Scale and zero point of one group.
pub fn fit_group(kind: GridKind, w: &[f32], importance: &[f32]) -> (f32, f32) {
    let (low, high) = range(w);
    if low == 0.0 && high == 0.0 {
        return (1.0, kind.middle());
    }
    match kind.fit {
        Fit::MinMax => min_max(kind, low, high, 1.0),
        Fit::Mse | Fit::Weighted => search(kind, w, importance, low, high),
    }
}

multiversion! {
    /// The smallest and the largest weight, 0 included.
    fn range(w: &[f32]) -> (f32, f32) {
        (-largest(w, |x| -x).max(0.0), largest(w, |x| x).max(0.0))
    }
}

/// Sizes of the scale that a search tries at most.
const SIZES: usize = 81;

fn search(kind: GridKind, w: &[f32], importance: &[f32], low: f32, high: f32) -> (f32, f32) {
    let (first, count) = if kind.fit == Fit::Mse { (1.0, SIZES - 1) } else { (1.05, SIZES) };
    let sizes: [f32; SIZES] = std::array::from_fn(|step| first - step as f32 / 100.0);
    let mut scales = sizes.map(|size| unrounded_scale(kind, low, high, size));
    round_scales(kind.scale_type, &mut scales);
    let grids: [_; SIZES] = std::array::from_fn(|c| with_zero(kind, low, high, sizes[c], scales[c]));
    let mut candidates = Candidates {
        scale: grids.map(|(scale, _)| scale),
        inverse: grids.map(|(scale, _)| 1.0 / scale),
        low: grids.map(|(_, zero)| -zero),
        high: grids.map(|(_, zero)| kind.maxq() - zero),
        plus: [0.0; SIZES],
        minus: [0.0; SIZES],
    };
    let mirrored = kind.sym && kind.fit == Fit::Weighted;
    match kind.fit {
        Fit::Mse => power_losses(&mut candidates, w),
        _ => weighted_losses(&mut candidates, w, importance),
    }
    let mut best = (f32::INFINITY, min_max(kind, low, high, 1.0));
    for (step, &(scale, zero)) in grids[..count].iter().enumerate() {
        if candidates.plus[step] < best.0 {
            best = (candidates.plus[step], (scale, zero));
        }
        if mirrored && candidates.minus[step] < best.0 {
            best = (candidates.minus[step], (-scale, zero));
        }
    }
    best.1
}

/// Grids tried side by side, and their losses.
struct Candidates {
    scale: [f32; SIZES],
    inverse: [f32; SIZES],
    /// The smallest and the largest code, less the zero point.
    low: [f32; SIZES],
    high: [f32; SIZES],
    plus: [f32; SIZES],
    /// With the scale's negative: the same rounded quotients, cut off at mirrored ends.
    minus: [f32; SIZES],
}

multiversion! {
    /// Σ importance·(w − ŵ)².
    fn weighted_losses(candidates: &mut Candidates, w: &[f32], importance: &[f32]) {
        let Candidates { scale, inverse, low, high, plus, minus } = candidates;
        for (&w, &importance) in w.iter().zip(importance) {
            for c in 0..SIZES {
                let code = (w * inverse[c]).round_ties_even();
                let missed = w - scale[c] * cut(code, low[c], high[c]);
                let mirrored = w - scale[c] * cut(code, -high[c], -low[c]);
                plus[c] += importance * (missed * missed);
                minus[c] += importance * (mirrored * mirrored);
            }
        }
    }
}

multiversion! {
    /// Σ|w − ŵ|^2.4, the measure of the original program.
    fn power_losses(candidates: &mut Candidates, w: &[f32]) {
        let Candidates { scale, low, high, plus, .. } = candidates;
        for &w in w {
            for c in 0..SIZES {
                let code = cut((w / scale[c]).round_ties_even(), low[c], high[c]);
                plus[c] += power(w - scale[c] * code);
            }
        }
    }
}

/// |x|^2.4 within 3e-7: x² times its fifth root, which a fifth of x²'s bits come near to and three steps
/// of Newton's method on y⁵ = x² reach.
#[inline(always)]
fn power(x: f32) -> f32 {
    /// The bits of 1.0, less a fifth of them; a little less to halve the largest error.
    const BIAS: u32 = 0x3f80_0000 / 5 * 4 - 0x0007_0000;
    let square = x * x;
    let mut root = f32::from_bits(square.to_bits() / 5 + BIAS);
    for _ in 0..3 {
        let root2 = root * root;
        root = 0.8 * root + 0.2 * (square / (root2 * root2));
    }
    square * root
}

/// The grid that spans low..high, both shrunk to `size` of themselves.
///
/// The original program halves the range of a symmetric group without negative weights, which then
/// loses its upper half; here such a group keeps its full range. Zero points stay at least 1, since
/// the GPTQ v1 format stores zero − 1 and readers disagree about 0.
fn min_max(kind: GridKind, low: f32, high: f32, size: f32) -> (f32, f32) {
    let mut scale = [unrounded_scale(kind, low, high, size)];
    round_scales(kind.scale_type, &mut scale);
    with_zero(kind, low, high, size, scale[0])
}

fn unrounded_scale(kind: GridKind, low: f32, high: f32, size: f32) -> f32 {
    if kind.sym {
        2.0 * (high.max(-low) * size) / kind.maxq()
    } else {
        (high * size - low * size) / kind.maxq()
    }
}

/// The zero point for a scale, and another scale where the zero point would be below 1.
fn with_zero(kind: GridKind, low: f32, high: f32, size: f32, scale: f32) -> (f32, f32) {
    if kind.sym {
        return (scale, kind.middle());
    }
    let zero = (-(low * size) / scale).round_ties_even();
    if zero >= 1.0 {
        return (scale, zero.min(kind.maxq()));
    }
    let mut scale = [high * size / (kind.maxq() - 1.0)];
    round_scales(kind.scale_type, &mut scale);
    (scale[0], 1.0)
}

/// Rounds positive scales, at most 81, to what the file stores, never to 0.
pub(super) fn round_scales(scale_type: ScaleType, scales: &mut [f32]) {
    match scale_type {
        ScaleType::F16 => {
            let mut stored = [f16::ZERO; SIZES];
            let stored = &mut stored[..scales.len()];
            stored.convert_from_f32_slice(scales);
            stored.convert_to_f32_slice(scales);
            for scale in scales {
                *scale = scale.max(f16::MIN_POSITIVE_SUBNORMAL.to_f32());
            }
        }
        // Smaller ones are left to no device: some take them for 0.
        ScaleType::BF16 => {
            for scale in scales {
                *scale = bf16::from_f32(*scale).to_f32().max(f32::MIN_POSITIVE);
            }
        }
        ScaleType::F32 => {}
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{ELEMENT, GROUP, ranges};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        ld: u32,
        c0: u32,
        cols: u32,
        group: u32,
        row_groups: u32,
        groups: u32,
        group0: u32,
        maxq: f32,
        middle: f32,
        first: u32,
        end: u32,
    }

    const SCALES: Kernel = Kernel {
        name: "scales",
        source: include_str!("../../shaders/scales.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite, Access::ReadWrite],
    };

    pub const KERNELS: &[Registered] = &[(&SCALES, size_of::<Params>())];

    pub fn fit(gpu: &Gpu, kind: GridKind, columns: Columns, grid: &mut Grid) -> Result<()> {
        let Columns { w, importance, c0, cols, group, first } = columns;
        let row_groups = cols.div_ceil(group);
        // The override FIT, and the work for one weight.
        let (fit, cost) = match (kind.fit, kind.sym) {
            (Fit::MinMax, _) => (0, ELEMENT),
            (Fit::Mse, _) => (1, ELEMENT + 80.0 * 50.0),
            (Fit::Weighted, sym) => (2, ELEMENT + if sym { 162.0 } else { 81.0 } * 8.0),
        };
        let cost = cost * group.min(cols) as f64;
        for part in ranges(gpu, w.rows() * row_groups, cost) {
            let params = Params {
                ld: w.cols() as u32,
                c0: c0 as u32,
                cols: cols as u32,
                group: group as u32,
                row_groups: row_groups as u32,
                groups: grid.groups() as u32,
                group0: first as u32,
                maxq: kind.maxq(),
                middle: kind.middle(),
                first: part.start as u32,
                end: part.end as u32,
            };
            gpu.dispatch(
                &SCALES,
                &[
                    ("FIT", f64::from(fit)),
                    ("SYM", kind.sym.into()),
                    ("STORED", kind.scale_type.shader_constant()),
                ],
                &[w.gpu()?, importance.gpu()?, grid.scales.gpu()?, grid.zeros.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(part.len().div_ceil(GROUP)),
                cost * part.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    fn kind(bits: u32, sym: bool, fit: Fit) -> GridKind {
        GridKind { bits, sym, fit, scale_type: ScaleType::F16 }
    }

    fn loss(kind: GridKind, w: &[f32], (scale, zero): (f32, f32)) -> f32 {
        let miss = |&w: &f32| w - scale * cut((w / scale).round_ties_even(), -zero, kind.maxq() - zero);
        w.iter().map(|w| miss(w).powi(2)).sum()
    }

    #[test]
    fn the_search_is_never_worse_than_min_max() {
        for seed in 0..20 {
            let w: Vec<f32> = noise(64, seed).iter().map(|x| x * x * x).collect();
            for bits in [2, 3, 4, 8] {
                for sym in [true, false] {
                    let searched = kind(bits, sym, Fit::Weighted);
                    let plain = kind(bits, sym, Fit::MinMax);
                    let ones = vec![1.0; 64];
                    assert!(
                        loss(searched, &w, fit_group(searched, &w, &ones))
                            <= loss(plain, &w, fit_group(plain, &w, &ones))
                    );
                }
            }
        }
    }

    #[test]
    fn the_power_is_within_three_ten_millionths() {
        for step in -300..200 {
            let x = 1.07f64.powi(step) as f32;
            for x in [x, -x] {
                let want = f64::from(x).abs().powf(2.4);
                // Squares below the smallest normal number lose bits; such weights are no weights.
                let small = f64::from(x).powi(2) < 1e-37;
                assert!(small || (f64::from(power(x)) / want - 1.0).abs() < 3e-7, "{x}: {}", power(x));
            }
        }
        assert_eq!(power(0.0), 0.0);
    }

    #[test]
    fn a_group_without_negative_weights_keeps_its_range() {
        // The original program would clip 1.0 to 7/15 here.
        let (scale, zero) = fit_group(kind(4, true, Fit::MinMax), &[0.2, 1.0], &[1.0, 1.0]);
        assert!((scale * (15.0 - zero) - 7.0 / 7.5).abs() < 1e-3, "{scale} {zero}");
    }

    #[test]
    fn a_group_of_zeros_has_scale_one_and_the_middle_code() {
        assert_eq!(fit_group(kind(4, true, Fit::Weighted), &[0.0; 8], &[1.0; 8]), (1.0, 8.0));
        assert_eq!(fit_group(kind(4, false, Fit::Mse), &[0.0; 8], &[1.0; 8]), (1.0, 8.0));
    }

    #[test]
    fn the_longer_tail_gets_the_end_with_one_code_more() {
        // −8·s reaches +0.8 only with a negative scale.
        let w = [0.8, -0.7, 0.1, 0.3, -0.5, 0.2, 0.4, 0.6];
        let (scale, _) = fit_group(kind(4, true, Fit::Weighted), &w, &[1.0; 8]);
        assert!((scale + 0.1).abs() < 1e-3, "{scale}");
    }

    #[test]
    fn asymmetric_zero_points_stay_in_one_to_maxq() {
        for (low, high) in [(0.1, 1.0), (-1.0, -0.1), (-0.001, 1.0), (-1.0, 0.001)] {
            for bits in [2, 3, 4, 8] {
                for fit in [Fit::MinMax, Fit::Mse, Fit::Weighted] {
                    let kind = kind(bits, false, fit);
                    let (scale, zero) = fit_group(kind, &[low, high], &[1.0, 1.0]);
                    assert!(zero >= 1.0 && zero <= kind.maxq() && zero.fract() == 0.0 && scale > 0.0);
                }
            }
        }
    }

    #[test]
    fn scales_are_numbers_of_the_stored_type() {
        let w = noise(64, 9);
        let (scale, _) = fit_group(kind(4, true, Fit::Weighted), &w, &[1.0; 64]);
        assert_eq!(f16::from_f32(scale).to_f32(), scale);
        let kind = GridKind { scale_type: ScaleType::BF16, ..kind(4, true, Fit::Weighted) };
        let (scale, _) = fit_group(kind, &w, &[1.0; 64]);
        assert_eq!(bf16::from_f32(scale).to_f32(), scale);
    }

    /// Columns 3..3 + cols of a weight whose groups have every kind of range, in a wider grid.
    struct Fitted {
        w: Vec<f32>,
        importance: Vec<f32>,
        scales: Vec<f32>,
        zeros: Vec<f32>,
    }

    const ROWS: usize = 19;
    const COLS: usize = 90;
    const GROUP: usize = 32;
    const GROUPS: usize = 5;

    fn fitted(device: &Device, kind: GridKind) -> Fitted {
        let (ld, c0) = (COLS + 7, 3);
        let mut w: Vec<f32> = noise(ROWS * ld, 1).iter().map(|x| 0.1 * x * x * x).collect();
        let importance: Vec<f32> = noise(ld, 2).iter().map(|x| 0.1 + x * x).collect();
        for (index, w) in w.iter_mut().enumerate() {
            *w = match index / ld {
                0 => 0.0,
                1 => w.abs(),
                2 => -w.abs(),
                3 => 1e-5 * *w,
                4 => 0.01 + 0.001 * *w,
                _ => *w,
            };
        }
        let w_tensor = Tensor::from_f32(device, &[ROWS, ld], w.clone()).unwrap();
        let importance_tensor = Tensor::from_f32(device, &[ld], importance.clone()).unwrap();
        let mut grid = Grid::new(device, ROWS, GROUPS).unwrap();
        let columns =
            Columns { w: &w_tensor, importance: &importance_tensor, c0, cols: COLS, group: GROUP, first: 1 };
        fit(kind, columns, &mut grid).unwrap();
        let read = |t: &Tensor| pollster::block_on(t.to_f32()).unwrap();
        Fitted { w, importance, scales: read(&grid.scales), zeros: read(&grid.zeros) }
    }

    /// Scales may differ where two candidates are equally good but for rounding.
    #[test]
    fn the_kernel_agrees_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        let mut different = 0;
        for bits in [2, 3, 4, 8] {
            for sym in [true, false] {
                for fit in [Fit::MinMax, Fit::Mse, Fit::Weighted] {
                    for scale_type in [ScaleType::F16, ScaleType::BF16, ScaleType::F32] {
                        let kind = GridKind { scale_type, ..kind(bits, sym, fit) };
                        let (got, want) = (fitted(&device, kind), fitted(&Device::Cpu, kind));
                        for at in 0..ROWS * GROUPS {
                            let (g, w) = ((got.scales[at], got.zeros[at]), (want.scales[at], want.zeros[at]));
                            let equal = g.1 == w.1
                                && match scale_type {
                                    ScaleType::F16 | ScaleType::BF16 => g.0 == w.0,
                                    ScaleType::F32 => (g.0 - w.0).abs() <= 1e-6 * w.0.abs(),
                                };
                            if equal {
                                continue;
                            }
                            different += 1;
                            let start = at / GROUPS * (COLS + 7) + 3 + (at % GROUPS - 1) * GROUP;
                            let len = GROUP.min(COLS - (at % GROUPS - 1) * GROUP);
                            let values = &want.w[start..start + len];
                            let importance = &want.importance[3 + (at % GROUPS - 1) * GROUP..][..len];
                            let power = if fit == Fit::Mse { 2.4 } else { 2.0 };
                            let losses = [g, w].map(|(scale, zero)| {
                                let terms = values.iter().zip(importance).map(|(&w, &weight)| {
                                    let code =
                                        (w / scale).round_ties_even().max(-zero).min(kind.maxq() - zero);
                                    let miss = f64::from(w - scale * code).abs().powf(power);
                                    if fit == Fit::Mse { miss } else { f64::from(weight) * miss }
                                });
                                terms.sum::<f64>()
                            });
                            assert!(
                                fit != Fit::MinMax && (losses[0] / losses[1] - 1.0).abs() < 1e-4,
                                "{kind:?} row {}: {g:?}, not {w:?}; losses {losses:?}",
                                at / GROUPS
                            );
                        }
                    }
                }
            }
        }
        assert!(different * 100 <= 72 * ROWS * 3, "{different} grids differ");
    }

    #[test]
    fn groups_in_many_dispatches_come_out_the_same() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let kind = kind(4, true, Fit::Weighted);
        let whole = fitted(&device, kind);
        gpu.set_submit_budget(32.0 * 1500.0 * 5.0);
        let parts = fitted(&device, kind);
        assert!(whole.scales == parts.scales && whole.zeros == parts.zeros);
    }
}
