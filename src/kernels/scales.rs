//! Scales and zero points of groups of weights.
//!
//! A grid maps a code q in 0..2^bits to scale·(q − zero). Symmetric grids fix zero at 2^(bits−1);
//! their scale may be negative, which gives the longer tail the end that has one code more.

use super::parallel::for_chunks;
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};
use half::f16;

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
    F32,
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
    let low = w.iter().fold(0f32, |min, &x| min.min(x));
    let high = w.iter().fold(0f32, |max, &x| max.max(x));
    if low == 0.0 && high == 0.0 {
        return (1.0, kind.middle());
    }
    match kind.fit {
        Fit::MinMax => min_max(kind, low, high, 1.0),
        Fit::Mse => {
            let mut best = (f32::INFINITY, min_max(kind, low, high, 1.0));
            for step in 0..80 {
                let shrink = 1.0 - step as f32 / 100.0;
                let candidate = min_max(kind, low, high, shrink);
                let loss = power_loss(w, candidate.0, candidate.1, kind.maxq());
                if loss < best.0 {
                    best = (loss, candidate);
                }
            }
            best.1
        }
        Fit::Weighted => {
            let mut best = (f32::INFINITY, min_max(kind, low, high, 1.0));
            for step in 0..=80 {
                let size = 1.05 - step as f32 / 100.0;
                let (scale, zero) = min_max(kind, low, high, size);
                let (plus, minus) = weighted_losses(w, importance, scale, zero, kind.maxq());
                if plus < best.0 {
                    best = (plus, (scale, zero));
                }
                if kind.sym && minus < best.0 {
                    best = (minus, (-scale, zero));
                }
            }
            best.1
        }
    }
}

/// The grid that spans low..high, both shrunk to `size` of themselves.
///
/// The original program halves the range of a symmetric group without negative weights, which then
/// loses its upper half; here such a group keeps its full range. Zero points stay at least 1, since
/// the GPTQ v1 format stores zero − 1 and readers disagree about 0.
fn min_max(kind: GridKind, low: f32, high: f32, size: f32) -> (f32, f32) {
    let maxq = kind.maxq();
    if kind.sym {
        let span = high.max(-low) * size;
        return (round_scale(kind, 2.0 * span / maxq), kind.middle());
    }
    let (low, high) = (low * size, high * size);
    let scale = round_scale(kind, (high - low) / maxq);
    let zero = (-low / scale).round_ties_even();
    if zero >= 1.0 {
        return (scale, zero.min(maxq));
    }
    (round_scale(kind, high / (maxq - 1.0)), 1.0)
}

/// Rounds to what the file stores, never to 0.
fn round_scale(kind: GridKind, scale: f32) -> f32 {
    match kind.scale_type {
        ScaleType::F32 => scale,
        ScaleType::F16 => f16::from_f32(scale).to_f32().max(f16::MIN_POSITIVE_SUBNORMAL.to_f32()),
    }
}

const LANES: usize = 16;

multiversion! {
    /// Σ importance·(w − ŵ)² with `scale` and with −`scale`: the same rounded quotients, cut off at
    /// mirrored ends.
    fn weighted_losses(w: &[f32], importance: &[f32], scale: f32, zero: f32, maxq: f32) -> (f32, f32) {
        let inverse = 1.0 / scale;
        let (low, high) = (-zero, maxq - zero);
        let terms = |w: f32, importance: f32| {
            let code = (w * inverse).round_ties_even();
            let plus = w - scale * code.max(low).min(high);
            let minus = w - scale * code.max(-high).min(-low);
            (importance * (plus * plus), importance * (minus * minus))
        };
        let (mut plus, mut minus) = ([0f32; LANES], [0f32; LANES]);
        let whole = w.len() / LANES * LANES;
        for (w, importance) in w[..whole].chunks_exact(LANES).zip(importance[..whole].chunks_exact(LANES)) {
            for l in 0..LANES {
                let (p, m) = terms(w[l], importance[l]);
                plus[l] += p;
                minus[l] += m;
            }
        }
        let (mut sum_plus, mut sum_minus) = (0.0, 0.0);
        for l in 0..LANES {
            sum_plus += plus[l];
            sum_minus += minus[l];
        }
        for (&w, &importance) in w[whole..].iter().zip(&importance[whole..]) {
            let (p, m) = terms(w, importance);
            sum_plus += p;
            sum_minus += m;
        }
        (sum_plus, sum_minus)
    }
}

/// Σ|w − ŵ|^2.4, the measure of the original program.
fn power_loss(w: &[f32], scale: f32, zero: f32, maxq: f32) -> f32 {
    w.iter()
        .map(|&w| {
            let code = (w / scale).round_ties_even().max(-zero).min(maxq - zero);
            (w - scale * code).abs().powf(2.4)
        })
        .sum()
}

mod gpu {
    use super::*;
    use crate::device::Gpu;

    pub fn fit(_gpu: &Gpu, _kind: GridKind, _columns: Columns, _grid: &mut Grid) -> Result<()> {
        Err(Error::Internal("scales has no GPU kernel yet".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    fn kind(bits: u32, sym: bool, fit: Fit) -> GridKind {
        GridKind { bits, sym, fit, scale_type: ScaleType::F16 }
    }

    fn loss(kind: GridKind, w: &[f32], (scale, zero): (f32, f32)) -> f32 {
        weighted_losses(w, &vec![1.0; w.len()], scale, zero, kind.maxq()).0
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
    }
}
