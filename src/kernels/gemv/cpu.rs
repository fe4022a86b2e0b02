//! A dense weight times few rows on the CPU: four outputs at a time, each weight read once.
//!
//! Sums run in a fixed number of lanes, whatever the number of threads.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::kernels::matmul::Values;
use crate::kernels::parallel::{for_chunks, threads};
use crate::kernels::simd::multiversion;
use crate::kernels::sums::TILE;

/// Bytes of weights below which another thread costs more than it saves.
const TASK_BYTES: usize = 64 << 10;

/// out[tile][row][lane] = Σ_k w[tile·TILE + lane][k]·x[row][k]: `w` is [n, k], `x` [rows, k] with at
/// most four rows, `out` [⌈n / TILE⌉, rows, TILE] with anything past the last output.
pub fn few_rows(w: Values, n: usize, k: usize, x: &[f32], rows: usize, out: &mut [f32]) {
    let row_bytes = match w {
        Values::F32(_) => 4 * k,
        _ => 2 * k,
    };
    let tiles = n.div_ceil(TILE);
    let tasks = (n * row_bytes / TASK_BYTES).clamp(1, 4 * threads());
    let tiles_per_task = tiles.div_ceil(tasks).max(1);
    for_chunks(out, tiles_per_task * rows * TILE, |task, out| {
        for (index, out) in out.chunks_exact_mut(rows * TILE).enumerate() {
            let first = (task * tiles_per_task + index) * TILE;
            let part = first * k..n.min(first + TILE) * k;
            match w {
                Values::F32(w) => f32s(&w[part], k, x, rows, out),
                Values::F16(w) => f16s(&w[part], k, x, rows, out),
                Values::BF16(w) => bf16s(&w[part], k, x, rows, out),
                Values::Packed(_) => {}
            }
        }
    });
}

macro_rules! of_elements {
    ($name:ident, $plain:ident, $element:ty, $widen:expr) => {
        fn $name(w: &[$element], k: usize, x: &[f32], rows: usize, out: &mut [f32]) {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has AVX-512F, as just checked.
                unsafe {
                    match rows {
                        1 => return x86::tile::<$element, 1>(w, k, x, out),
                        2 => return x86::tile::<$element, 2>(w, k, x, out),
                        3 => return x86::tile::<$element, 3>(w, k, x, out),
                        _ => return x86::tile::<$element, 4>(w, k, x, out),
                    }
                }
            }
            $plain(w, k, x, rows, out);
        }

        multiversion! {
            fn $plain(w: &[$element], k: usize, x: &[f32], rows: usize, out: &mut [f32]) {
                dots(w, k, x, rows, out, $widen);
            }
        }
    };
}

of_elements!(f32s, plain_f32s, f32, |w: &[f32], out: &mut [f32]| out.copy_from_slice(w));
of_elements!(f16s, plain_f16s, f16, |w: &[f16], out: &mut [f32]| w.convert_to_f32_slice(out));
of_elements!(bf16s, plain_bf16s, bf16, |w: &[bf16], out: &mut [f32]| {
    for (out, w) in out.iter_mut().zip(w) {
        *out = f32::from_bits(u32::from(w.to_bits()) << 16);
    }
});

/// Lanes of a sum in [`dots`].
const LANES: usize = 32;

#[inline(always)]
fn dots<T>(w: &[T], k: usize, x: &[f32], rows: usize, out: &mut [f32], widen: impl Fn(&[T], &mut [f32])) {
    for (lane, w) in w.chunks_exact(k).enumerate() {
        let mut sums = [[0f32; LANES]; 4];
        for (piece, w) in w.chunks(LANES).enumerate() {
            let mut wide = [0f32; LANES];
            widen(w, &mut wide[..w.len()]);
            for (row, sums) in sums.iter_mut().enumerate().take(rows) {
                let x = &x[row * k + piece * LANES..][..w.len()];
                for ((sum, w), x) in sums.iter_mut().zip(wide).zip(x) {
                    *sum += w * x;
                }
            }
        }
        for (row, mut sums) in sums.into_iter().enumerate().take(rows) {
            let mut width = LANES / 2;
            while width > 0 {
                for i in 0..width {
                    sums[i] += sums[i + width];
                }
                width /= 2;
            }
            out[row * TILE + lane] = sums[0];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::{bf16, f16};

    use crate::kernels::simd::prefetch;
    use crate::kernels::sums::TILE;

    /// Elements that AVX-512 widens 16 at a time.
    pub trait Element: Copy {
        /// # Safety
        /// The processor has AVX-512F, and 16 elements lie at `at`.
        unsafe fn load(at: *const Self) -> __m512;
        fn widen(self) -> f32;
    }

    impl Element for f32 {
        #[inline(always)]
        unsafe fn load(at: *const Self) -> __m512 {
            // SAFETY: passed on.
            unsafe { _mm512_loadu_ps(at) }
        }
        #[inline(always)]
        fn widen(self) -> f32 {
            self
        }
    }

    impl Element for bf16 {
        #[inline(always)]
        unsafe fn load(at: *const Self) -> __m512 {
            // SAFETY: passed on.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        fn widen(self) -> f32 {
            self.to_f32()
        }
    }

    impl Element for f16 {
        #[inline(always)]
        unsafe fn load(at: *const Self) -> __m512 {
            // SAFETY: passed on.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
        }
        #[inline(always)]
        fn widen(self) -> f32 {
            self.to_f32()
        }
    }

    /// Outputs that share each load of x.
    const BLOCK: usize = 4;
    const LINE: usize = 64;

    /// At most a tile's outputs for M rows.
    ///
    /// # Safety
    /// The processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn tile<T: Element, const M: usize>(w: &[T], k: usize, x: &[f32], out: &mut [f32]) {
        assert!(x.len() >= M * k && out.len() >= M * TILE && w.len() <= TILE * k);
        let mut lane = 0;
        let mut blocks = w.chunks_exact(BLOCK * k);
        for block in &mut blocks {
            // SAFETY: as many outputs as are named.
            unsafe { outputs::<T, M, BLOCK>(block, k, x, out, lane) };
            lane += BLOCK;
        }
        for row in blocks.remainder().chunks_exact(k) {
            // SAFETY: one output.
            unsafe { outputs::<T, M, 1>(row, k, x, out, lane) };
            lane += 1;
        }
    }

    /// # Safety
    /// `w` holds R rows of `k`, `x` M rows of `k`, `out` M tiles, and R outputs from `lane` on are in one.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn outputs<T: Element, const M: usize, const R: usize>(
        w: &[T],
        k: usize,
        x: &[f32],
        out: &mut [f32],
        lane: usize,
    ) {
        let mut sums = [[_mm512_setzero_ps(); R]; M];
        let whole = k / 16 * 16;
        let w = w.as_ptr();
        // The block after this one, if it is near; what comes next in each row otherwise.
        let ahead = if R * k * size_of::<T>() <= 16 << 10 { R * k } else { 1024 / size_of::<T>() };
        for at in (0..whole).step_by(16) {
            let mut columns = [_mm512_setzero_ps(); M];
            for (m, column) in columns.iter_mut().enumerate() {
                // SAFETY: within row m of x.
                *column = unsafe { _mm512_loadu_ps(x.as_ptr().add(m * k + at)) };
            }
            if (at * size_of::<T>()).is_multiple_of(LINE) {
                for r in 0..R {
                    prefetch(w.wrapping_add(r * k + at + ahead));
                }
            }
            for r in 0..R {
                // SAFETY: within row r of w.
                let weights = unsafe { T::load(w.add(r * k + at)) };
                for (sums, &column) in sums.iter_mut().zip(&columns) {
                    sums[r] = _mm512_fmadd_ps(weights, column, sums[r]);
                }
            }
        }
        for (m, sums) in sums.into_iter().enumerate() {
            for (r, sums) in sums.into_iter().enumerate() {
                let mut sum = _mm512_reduce_add_ps(sums);
                for at in whole..k {
                    // SAFETY: within row r of w.
                    sum += unsafe { *w.add(r * k + at) }.widen() * x[m * k + at];
                }
                out[m * TILE + lane + r] = sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error};

    /// The loops for machines without AVX-512.
    #[test]
    fn plain_loops_give_what_vectors_give() {
        let (k, rows) = (75, 3);
        let (w, x) = (noise(TILE * k, 1), noise(rows * k, 2));
        let halves: Vec<f16> = w.iter().map(|&w| f16::from_f32(w)).collect();
        let brains: Vec<bf16> = w.iter().map(|&w| bf16::from_f32(w)).collect();
        let compare = |got: &dyn Fn(&mut [f32]), want: &dyn Fn(&mut [f32])| {
            let (mut a, mut b) = (vec![0.0; rows * TILE], vec![0.0; rows * TILE]);
            got(&mut a);
            want(&mut b);
            assert!(relative_error(&a, &b) < 1e-6);
        };
        compare(&|out| plain_f32s(&w, k, &x, rows, out), &|out| f32s(&w, k, &x, rows, out));
        compare(&|out| plain_f16s(&halves, k, &x, rows, out), &|out| f16s(&halves, k, &x, rows, out));
        compare(&|out| plain_bf16s(&brains, k, &x, rows, out), &|out| bf16s(&brains, k, &x, rows, out));
    }
}
