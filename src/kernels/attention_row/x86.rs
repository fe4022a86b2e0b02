//! The two products of [`super`] with AVX2, FMA and F16C, which are most of its time.

use std::arch::x86_64::*;

use half::f16;

use super::Keys;
use crate::kernels::simd::prefetch;

/// How many keys, or values, ahead memory is asked for: those of one head lie in pieces, which the processor
/// does not foresee.
const AHEAD: usize = 16;

/// What both need: AVX2, FMA, F16C, and whole vectors in a head.
pub fn fits(head_dim: usize) -> bool {
    head_dim.is_multiple_of(16)
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Elements of a cache, eight at a time.
pub trait Load: Copy {
    /// # Safety
    /// `at` points to eight elements; the processor has AVX2 and F16C.
    unsafe fn eight(at: *const Self) -> __m256;
}

impl Load for f32 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn eight(at: *const Self) -> __m256 {
        // SAFETY: passed on.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Load for f16 {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn eight(at: *const Self) -> __m256 {
        // SAFETY: passed on.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

/// scores[h][j] = q[h] · key j, for the heads in `q` that share the keys.
pub fn scores<T: Load>(scores: &mut [f32], q: &[f32], keys: Keys<T>) {
    assert!(fits(keys.head_dim) && keys.count > 0);
    let mut heads = q.chunks(keys.head_dim).len();
    let (mut q, mut out) = (q, scores);
    while heads > 0 {
        let taken = together(heads);
        let (now, later) = q.split_at(taken * keys.head_dim);
        let (out_now, out_later) = out.split_at_mut(taken * keys.count);
        // SAFETY: the processor has what `fits` asks for; the slices are as long as they must be.
        unsafe {
            match taken {
                4 => score::<T, 4, 2>(out_now, now, keys),
                3 => score::<T, 3, 2>(out_now, now, keys),
                2 => score::<T, 2, 4>(out_now, now, keys),
                _ => score::<T, 1, 8>(out_now, now, keys),
            }
        }
        (q, out, heads) = (later, out_later, heads - taken);
    }
}

/// mixes[h] = Σ_j weights[h][j] · value j; the mixes begin `step` elements apart.
pub fn mixes<T: Load>(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<T>) {
    assert!(fits(values.head_dim) && values.count > 0 && step >= values.head_dim);
    let mut heads = weights.len() / values.count;
    assert!(mixes.len() >= (heads - 1) * step + values.head_dim);
    let (mut weights, mut out) = (weights, mixes);
    while heads > 0 {
        let taken = together(heads);
        let (now, later) = weights.split_at(taken * values.count);
        // SAFETY: as in `scores`.
        unsafe {
            match (taken, values.head_dim % 32) {
                (4, _) => mix::<T, 4, 2>(out, step, now, values),
                (3, _) => mix::<T, 3, 2>(out, step, now, values),
                (2, 0) => mix::<T, 2, 4>(out, step, now, values),
                (2, _) => mix::<T, 2, 2>(out, step, now, values),
                (_, 0) => mix::<T, 1, 4>(out, step, now, values),
                (_, _) => mix::<T, 1, 2>(out, step, now, values),
            }
        }
        weights = later;
        out = out.get_mut(taken * step..).unwrap_or_default();
        heads -= taken;
    }
}

/// How many of the heads are taken together: as many as registers hold, and no single one left over.
fn together(heads: usize) -> usize {
    match heads {
        0..=4 => heads,
        5 | 6 | 9 => 3,
        _ => 4,
    }
}

/// Asks for what stands [`AHEAD`] rows behind `rows` rows from `index` on. The first head asks for all heads.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn prefetch_ahead<T: Copy>(keys: Keys<T>, index: usize, rows: usize) {
    if keys.first.is_multiple_of(keys.stride) {
        prefetch_rows(keys, index + AHEAD, rows);
    }
}

/// Asks for the whole rows from `index` on, of all heads.
#[inline(always)]
fn prefetch_rows<T: Copy>(keys: Keys<T>, index: usize, rows: usize) {
    let line = 64 / size_of::<T>();
    let begin = keys.first + index * keys.stride;
    for at in (begin..begin + rows * keys.stride).step_by(line) {
        prefetch(keys.elements.as_ptr().wrapping_add(at));
    }
}

/// Asks for the first values, which are needed after all keys.
pub fn expect<T: Copy>(values: Keys<T>) {
    prefetch_rows(values, 0, AHEAD.min(values.count));
}

/// H heads by J keys at a time, at most eight sums.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score<T: Load, const H: usize, const J: usize>(out: &mut [f32], q: &[f32], keys: Keys<T>) {
    let Keys { elements, first, stride, count, head_dim } = keys;
    assert!(q.len() == H * head_dim && out.len() == H * count);
    assert!(first + (count - 1) * stride + head_dim <= elements.len());
    for j0 in (0..count).step_by(J) {
        prefetch_ahead(keys, j0, J);
        // Past the end the last key is taken again.
        let rows: [usize; J] = std::array::from_fn(|j| first + (j0 + j).min(count - 1) * stride);
        let mut sums = [_mm256_setzero_ps(); 8];
        for d in (0..head_dim).step_by(8) {
            for j in 0..J {
                // SAFETY: within the bounds asserted above; H · J is at most 8.
                unsafe {
                    let key = T::eight(elements.as_ptr().add(rows[j] + d));
                    for h in 0..H {
                        let query = _mm256_loadu_ps(q.as_ptr().add(h * head_dim + d));
                        sums[h * J + j] = _mm256_fmadd_ps(query, key, sums[h * J + j]);
                    }
                }
            }
        }
        let totals = across(sums);
        let here = J.min(count - j0);
        for h in 0..H {
            out[h * count + j0..][..here].copy_from_slice(&totals[h * J..][..here]);
        }
    }
}

/// The sum of each vector.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn across(v: [__m256; 8]) -> [f32; 8] {
    // Sums of both halves: vectors 0..4 in one, 4..8 in the other.
    let four = |a, b, c, d| _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let (a, b) = (four(v[0], v[1], v[2], v[3]), four(v[4], v[5], v[6], v[7]));
    let sums = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
    let mut out = [0f32; 8];
    // SAFETY: eight floats fit.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

/// H heads by D vectors of a head at a time.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn mix<T: Load, const H: usize, const D: usize>(
    out: &mut [f32],
    step: usize,
    weights: &[f32],
    values: Keys<T>,
) {
    let Keys { elements, first, stride, count, head_dim } = values;
    assert!(weights.len() == H * count && head_dim.is_multiple_of(8 * D));
    assert!(first + (count - 1) * stride + head_dim <= elements.len());
    assert!(out.len() >= (H - 1) * step + head_dim);
    for d in (0..head_dim).step_by(8 * D) {
        let mut sums = [[_mm256_setzero_ps(); D]; H];
        for j in 0..count {
            if d == 0 {
                prefetch_ahead(values, j, 1);
            }
            // SAFETY: within the bounds asserted above.
            unsafe {
                let row = elements.as_ptr().add(first + j * stride + d);
                let mut value = [_mm256_setzero_ps(); D];
                for (i, value) in value.iter_mut().enumerate() {
                    *value = T::eight(row.add(8 * i));
                }
                for (h, sums) in sums.iter_mut().enumerate() {
                    let weight = _mm256_set1_ps(*weights.get_unchecked(h * count + j));
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum = _mm256_fmadd_ps(weight, value, *sum);
                    }
                }
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            for (i, &sum) in sums.iter().enumerate() {
                // SAFETY: as above.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(h * step + d + 8 * i), sum) };
            }
        }
    }
}
