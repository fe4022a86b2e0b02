//! Matrix products of which both sides are rounded to bf16, two steps of the depth at a time: what the instruction
//! VDPBF16PS does, at twice the speed of f32 on a processor that has it. Products and sums are f32.
//!
//! A pair is two neighbours along the depth in one u32, the first in its low half. It moves through
//! [`super::matmul`] in the bits of an f32, so that panels and strips are those of any product of half the depth.

use std::ops::Range;

use super::matmul::{Kernel, MAX_TILE, Strided, Values};
use super::simd::multiversion;

/// Whether the processor multiplies pairs faster than single floats.
pub fn faster() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The register tile for products with `n` columns.
pub(super) fn kernel(n: usize) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if faster() {
        if n.next_multiple_of(48) * 16 <= n.next_multiple_of(32) * 17 {
            // SAFETY: the processor has both, as just checked.
            let run = |kc, a: &[_], b: &[_], tile: &mut _| unsafe { x86::wide(kc, a, b, tile) };
            return Kernel { mr: 8, nr: 48, run };
        }
        // SAFETY: as above.
        let run = |kc, a: &[_], b: &[_], tile: &mut _| unsafe { x86::narrow(kc, a, b, tile) };
        return Kernel { mr: 8, nr: 32, run };
    }
    let _ = n;
    Kernel { mr: 4, nr: 8, run: plain }
}

/// The two as bf16, to nearest and ties to even, in the bits of one f32.
#[inline(always)]
fn pair(first: f32, second: f32) -> f32 {
    let rounded = |x: f32| {
        let bits = x.to_bits();
        // Rounding would carry some NaN over into zero.
        if x.is_nan() { bits | 0x40_0000 } else { bits + 0x7fff + (bits >> 16 & 1) }
    };
    f32::from_bits(rounded(first) >> 16 | rounded(second) & 0xffff_0000)
}

fn halves(pair: f32) -> [f32; 2] {
    [f32::from_bits(pair.to_bits() << 16), f32::from_bits(pair.to_bits() & 0xffff_0000)]
}

fn plain(_kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
    let mut sums = [[0f32; 8]; 4];
    for (a, b) in a.chunks_exact(4).zip(b.chunks_exact(8)) {
        for (sums, a) in sums.iter_mut().zip(a) {
            let a = halves(*a);
            for (sum, b) in sums.iter_mut().zip(b) {
                let b = halves(*b);
                *sum += a[0] * b[0] + a[1] * b[1];
            }
        }
    }
    for (row, sums) in tile.chunks_exact_mut(8).zip(sums) {
        row.copy_from_slice(&sums);
    }
}

/// out[p][l] = the pair of the elements (lanes.start + l, 2·p) and (lanes.start + l, 2·p + 1) of `source` for the
/// pairs `depth`, [pairs, width]; a pair that begins with the last of its `k` elements ends with 0, and so do
/// lanes beyond the last.
pub(super) fn pack_strip(
    out: &mut [f32],
    width: usize,
    source: Strided,
    lanes: Range<usize>,
    depth: Range<usize>,
    k: usize,
) {
    if lanes.len() < width {
        out.fill(0.0);
    }
    match source.values {
        Values::F32(values) if source.row == 1 => {
            let (first, count) = (lanes.start, lanes.len());
            for (p, out) in depth.zip(out.chunks_exact_mut(width)) {
                let line = |step: usize| &values[step * source.col + first..][..count];
                pack_line(&mut out[..count], line(2 * p), (2 * p + 1 < k).then(|| line(2 * p + 1)));
            }
        }
        #[cfg(target_arch = "x86_64")]
        Values::F32(values) if turns(&source, &lanes, &depth, k) => {
            // SAFETY: the processor has it, as `turns` found.
            unsafe { x86::turn_f32(out, width, values.as_chunks().0, source.row / 2, (lanes, depth)) }
        }
        #[cfg(target_arch = "x86_64")]
        Values::BF16(values) if turns(&source, &lanes, &depth, k) => {
            // SAFETY: as above.
            unsafe { x86::turn_bf16(out, width, values.as_chunks().0, source.row / 2, (lanes, depth)) }
        }
        Values::F32(values) => pack_any(out, width, (source, lanes, depth, k), |at| values[at]),
        Values::BF16(values) => pack_any(out, width, (source, lanes, depth, k), |at| values[at].to_f32()),
        Values::F16(values) => pack_any(out, width, (source, lanes, depth, k), |at| values[at].to_f32()),
        Values::Packed(_) => {}
    }
}

/// Whether a strip is whole squares of eight lanes by eight pairs that lie along their rows, and the processor
/// turns those in registers.
#[cfg(target_arch = "x86_64")]
fn turns(source: &Strided, lanes: &Range<usize>, depth: &Range<usize>, k: usize) -> bool {
    source.col == 1
        && source.row.is_multiple_of(2)
        && lanes.len().is_multiple_of(8)
        && depth.len().is_multiple_of(8)
        && 2 * depth.end <= k
        && faster()
}

fn pack_any(
    out: &mut [f32],
    width: usize,
    (source, lanes, depth, k): (Strided, Range<usize>, Range<usize>, usize),
    element: impl Fn(usize) -> f32,
) {
    for (p, out) in depth.zip(out.chunks_exact_mut(width)) {
        for (lane, out) in lanes.clone().zip(out) {
            let at = |step: usize| element(lane * source.row + step * source.col);
            *out = pair(at(2 * p), if 2 * p + 1 < k { at(2 * p + 1) } else { 0.0 });
        }
    }
}

multiversion! {
    /// Two lines of the depth as one of pairs; without a second one, zeros.
    fn pack_line(out: &mut [f32], first: &[f32], second: Option<&[f32]>) {
        match second {
            Some(second) => {
                for (out, (first, second)) in out.iter_mut().zip(first.iter().zip(second)) {
                    *out = pair(*first, *second);
                }
            }
            None => {
                for (out, first) in out.iter_mut().zip(first) {
                    *out = pair(*first, 0.0);
                }
            }
        }
    }
}

/// Strips of `mr` rows of an A whose rows lie side by side, [k, rows] with `line` from one step to the next: pair by
/// pair, since a strip's own steps are a page or more apart. Zeros beyond the last row.
pub(super) fn pack_lines(
    panel: &mut [f32],
    mr: usize,
    values: &[f32],
    line: usize,
    rows: Range<usize>,
    depth: Range<usize>,
    k: usize,
) {
    let pairs = depth.len();
    let mut packed = vec![0.0; rows.len()];
    for (p, step) in depth.enumerate() {
        let line = |step: usize| &values[step * line + rows.start..][..rows.len()];
        pack_line(&mut packed, line(2 * step), (2 * step + 1 < k).then(|| line(2 * step + 1)));
        for (strip, packed) in packed.chunks(mr).enumerate() {
            let out = &mut panel[strip * mr * pairs + p * mr..][..mr];
            let (part, beyond) = out.split_at_mut(packed.len());
            part.copy_from_slice(packed);
            beyond.fill(0.0);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::Range;

    use half::bf16;

    use super::super::matmul::x86::{register_tile, turn};
    use super::MAX_TILE;

    /// `source` are pairs along rows that start `row` pairs apart.
    #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
    pub fn turn_f32(
        out: &mut [f32],
        width: usize,
        source: &[[f32; 2]],
        row: usize,
        (lanes, depth): (Range<usize>, Range<usize>),
    ) {
        let (source, shape) = within(source, row, &lanes, &depth);
        assert!(shape.0 <= width && shape.1 * width <= out.len());
        // SAFETY: `within` bounds what is read, the line above what is written.
        unsafe {
            turn(out, width, source, row, shape, |at| {
                let halves = _mm512_cvtneps_pbh(_mm512_loadu_ps(at.cast()));
                std::mem::transmute::<__m256bh, __m256>(halves)
            });
        }
    }

    /// The same of what is bf16 already.
    #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
    pub fn turn_bf16(
        out: &mut [f32],
        width: usize,
        source: &[[bf16; 2]],
        row: usize,
        (lanes, depth): (Range<usize>, Range<usize>),
    ) {
        let (source, shape) = within(source, row, &lanes, &depth);
        assert!(shape.0 <= width && shape.1 * width <= out.len());
        // SAFETY: as above.
        unsafe { turn(out, width, source, row, shape, |at| _mm256_loadu_ps(at.cast())) }
    }

    /// The pairs of these lanes and of this depth, from the first to the last, and how many of both there are.
    fn within<'a, T>(
        source: &'a [T],
        row: usize,
        lanes: &Range<usize>,
        depth: &Range<usize>,
    ) -> (&'a [T], (usize, usize)) {
        let from = lanes.start * row + depth.start;
        let end = if lanes.is_empty() { from } else { from + (lanes.len() - 1) * row + depth.len() };
        (&source[from..end], (lanes.len(), depth.len()))
    }

    /// # Safety
    /// `a` holds 8 and `b` 48 pairs for each of `kc` steps.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn wide(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        // SAFETY: within the lengths that the caller guarantees.
        unsafe { pairs_tile::<8, 3>(kc, a.as_ptr(), b.as_ptr(), tile.as_mut_ptr()) }
    }

    /// # Safety
    /// `a` holds 8 and `b` 32 pairs for each of `kc` steps.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn narrow(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        // SAFETY: within the lengths that the caller guarantees.
        unsafe { pairs_tile::<8, 2>(kc, a.as_ptr(), b.as_ptr(), tile.as_mut_ptr()) }
    }

    /// sum + x·column, by pairs.
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn multiply(x: __m512, column: __m512, sum: __m512) -> __m512 {
        // SAFETY: a pair is 32 bits of any kind.
        let pairs = |x: __m512| unsafe { std::mem::transmute::<__m512, __m512bh>(x) };
        _mm512_dpbf16_ps(sum, pairs(x), pairs(column))
    }

    register_tile!(pairs_tile, "avx512f,avx512bf16", multiply);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::matmul::{Product, matmul};
    use super::*;
    use crate::kernels::testing::noise;

    fn rounded(values: &[f32]) -> Vec<f32> {
        values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect()
    }

    /// Both forms that occur, X·Wᵀ with W in bf16 and XᵀY, of whole squares and of all that is left of some.
    #[test]
    fn products_are_those_of_the_rounded_operands() {
        for (m, n, k) in
            [(16, 96, 32), (13, 20, 24), (100, 64, 31), (9, 50, 1), (64, 48, 700), (23, 192, 1154)]
        {
            let (a, b) = (noise(m * k, 1), noise(n * k, 2));
            let (wide_a, wide_b) = (rounded(&a), rounded(&b));
            let mut want = vec![0f64; m * n];
            for (i, row) in want.chunks_mut(n).enumerate() {
                for (j, want) in row.iter_mut().enumerate() {
                    let term = |p: usize| f64::from(wide_a[i * k + p]) * f64::from(wide_b[j * k + p]);
                    *want = 0.5 * (0..k).map(term).sum::<f64>() + 1.0;
                }
            }
            let halves: Vec<bf16> = b.iter().map(|&x| bf16::from_f32(x)).collect();
            let turned = |values: &[f32], rows: usize| -> Vec<f32> {
                (0..rows * k).map(|at| values[at % rows * k + at / rows]).collect()
            };
            let (turned_a, turned_b) = (turned(&a, m), turned(&b, n));
            let along = |values| Strided { values, row: k, col: 1 };
            let across = |values, rows| Strided { values, row: 1, col: rows };
            let linear = [along(Values::F32(&a)), along(Values::BF16(&halves)).t()];
            let sums = [across(Values::F32(&turned_a), m), across(Values::F32(&turned_b), n).t()];
            for [a, b] in [linear, sums] {
                let product = Product {
                    m,
                    n,
                    k,
                    a,
                    b,
                    alpha: 0.5,
                    beta: 1.0,
                    bias: None,
                    lower: false,
                    parallel: true,
                    rounded: true,
                };
                let mut got = vec![1.0; m * n];
                matmul(&mut got, n, product);
                for (got, want) in got.iter().zip(&want) {
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < 1e-6 * (k as f64 + 4.0), "{m} {n} {k}: {got} {want}");
                }
            }
        }
    }

    /// What a processor without the instruction does is what one with it does, to the last bits.
    #[test]
    fn the_plain_tile_agrees_with_the_processors() {
        let steps = 37;
        let best = kernel(48);
        let pairs = |lanes: usize, seed| -> Vec<f32> {
            noise(2 * lanes * steps, seed).chunks(2).map(|two| pair(two[0], two[1])).collect()
        };
        let (a, b) = (pairs(best.mr, 1), pairs(best.nr, 2));
        let mut got = [0f32; MAX_TILE];
        (best.run)(steps, &a, &b, &mut got);
        let part = |values: &[f32], lanes: usize, first: usize, count: usize| -> Vec<f32> {
            values.chunks(lanes).flat_map(|step| &step[first..first + count]).copied().collect()
        };
        for (i, j) in [(0, 0), (best.mr - 4, best.nr - 8)] {
            let mut want = [0f32; MAX_TILE];
            plain(steps, &part(&a, best.mr, i, 4), &part(&b, best.nr, j, 8), &mut want);
            for (row, want) in want.chunks(8).take(4).enumerate() {
                for (got, want) in got[(i + row) * best.nr + j..].iter().zip(want) {
                    assert!((got - want).abs() < 1e-5, "{got} {want}");
                }
            }
        }
    }

    #[test]
    fn pairs_are_rounded_as_bf16_is_and_nan_stays() {
        let edges = [0.0, -0.0, 1.0, 1.003_906_3, -3.7, 1e38, f32::INFINITY, f32::MIN_POSITIVE];
        for (&first, &second) in edges.iter().zip(edges.iter().rev()) {
            assert_eq!(halves(pair(first, second)), [first, second].map(|x| bf16::from_f32(x).to_f32()));
        }
        for bits in [0x7fc0_0000, 0xffc0_0000, 0x7fff_ffff, 0x7f80_0001] {
            assert!(halves(pair(f32::from_bits(bits), f32::from_bits(bits))).iter().all(|x| x.is_nan()));
        }
    }
}
