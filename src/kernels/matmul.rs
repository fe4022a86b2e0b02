//! The matrix product of the CPU device: packed panels around a register tile, after Goto and van de
//! Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
//!
//! Own code, as fast as the libraries tried (see ARCHITECTURE.md), because packing is where 16-bit
//! weights are widened and the register tile is where the upper half of a symmetric product is left
//! out, and because sums must not depend on the number of threads.
//!
//! Each element of C is summed in the same order whatever the number of threads.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::parallel::{for_chunks, threads};
use super::simd::multiversion;

/// Elements of a matrix by strides: element (i, j) is `values[i·row + j·col]`.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    pub values: Values<'a>,
    pub row: usize,
    pub col: usize,
}

impl Strided<'_> {
    /// The transpose.
    pub fn t(self) -> Self {
        Self { row: self.col, col: self.row, ..self }
    }
}

/// Stored elements, from the matrix's first one on.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// What C = α·A·B + β·C (+ bias) needs besides C.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Strided<'a>,
    pub b: Strided<'a>,
    pub alpha: f32,
    /// 0 ignores what C holds, NaN included.
    pub beta: f32,
    /// Added to every row, [n].
    pub bias: Option<&'a [f32]>,
    /// Leave out tiles of C that lie strictly above its diagonal.
    pub lower: bool,
    /// Use all threads; otherwise the calling one only.
    pub parallel: bool,
}

/// Depth of a packed panel: B's strip of 32 columns (36 KiB) then stays in the first-level cache.
const KC: usize = 288;
/// Columns of B packed at a time.
const NC: usize = 2048;
/// Rows of A that one task packs at most.
const MC: usize = 192;

/// C = α·A·B + β·C (+ bias); `c` starts at C's first element and has `ldc` elements a row.
pub fn matmul(c: &mut [f32], ldc: usize, product: Product) {
    let Product { m, n, k, .. } = product;
    if m == 0 || n == 0 {
        return;
    }
    let kernel = Kernel::best();
    let c = &mut c[..(m - 1) * ldc + n];
    if k == 0 {
        let nothing = vec![0.0; n];
        for row in c.chunks_mut(ldc) {
            finish_row(&mut row[..n], &nothing, &product, 0, true);
        }
        return;
    }
    let depth = k.div_ceil(k.div_ceil(KC));
    let rows = task_rows(m, kernel.mr, product.parallel);
    let mut b_panel = Vec::new();
    for jc in (0..n).step_by(NC) {
        let nc = NC.min(n - jc);
        for pc in (0..k).step_by(depth) {
            let kc = depth.min(k - pc);
            pack_b(&mut b_panel, kernel.nr, product, jc..jc + nc, pc..pc + kc);
            let task = |index: usize, c: &mut [f32]| {
                let part =
                    Part { kernel, product, rows: index * rows..m.min((index + 1) * rows), jc, nc, pc, kc };
                part.run(c, ldc, &b_panel);
            };
            if product.parallel {
                for_chunks(c, rows * ldc, task);
            } else {
                c.chunks_mut(rows * ldc).enumerate().for_each(|(index, c)| task(index, c));
            }
        }
    }
}

/// Rows a task takes: enough tasks for all threads to end together, whole register tiles each.
fn task_rows(m: usize, mr: usize, parallel: bool) -> usize {
    let tasks = if parallel { threads() } else { 1 };
    let share = m.div_ceil(tasks * m.div_ceil(tasks * MC));
    share.next_multiple_of(mr)
}

/// One task: some rows of C, a range of its columns, a range of the depth.
struct Part<'a> {
    kernel: Kernel,
    product: Product<'a>,
    rows: std::ops::Range<usize>,
    jc: usize,
    nc: usize,
    pc: usize,
    kc: usize,
}

impl Part<'_> {
    fn run(&self, c: &mut [f32], ldc: usize, b_panel: &[f32]) {
        let Kernel { mr, nr, .. } = self.kernel;
        let mut a_panel = Vec::new();
        pack_a(&mut a_panel, mr, self.product, self.rows.clone(), self.pc..self.pc + self.kc);
        let first = self.pc == 0;
        let mut tile = [0f32; MAX_TILE];
        for (jr, b) in b_panel.chunks_exact(nr * self.kc).enumerate() {
            let j = self.jc + jr * nr;
            let width = nr.min(self.jc + self.nc - j);
            for (ir, a) in a_panel.chunks_exact(mr * self.kc).enumerate() {
                let i = ir * mr;
                let height = mr.min(self.rows.len() - i);
                if self.product.lower && self.rows.start + i + height <= j {
                    continue;
                }
                self.kernel.run(self.kc, a, b, &mut tile);
                let out = &mut c[i * ldc + j..];
                finish_tile(out, ldc, &tile, (nr, height, width), &self.product, j, first);
            }
        }
    }
}

multiversion! {
    /// Writes α·tile to height × width elements of C, of which `c` holds the first; see [`finish_row`].
    fn finish_tile(
        c: &mut [f32],
        ldc: usize,
        tile: &[f32],
        shape: (usize, usize, usize),
        product: &Product,
        j: usize,
        first: bool,
    ) {
        let (nr, height, width) = shape;
        for (row, sums) in tile.chunks_exact(nr).take(height).enumerate() {
            finish_row(&mut c[row * ldc..row * ldc + width], sums, product, j, first);
        }
    }
}

/// Writes α·sums to a piece of a row of C that starts at column `j`: over β·C + bias for the first
/// range of the depth, onto what is there afterwards.
#[inline(always)]
fn finish_row(c: &mut [f32], sums: &[f32], product: &Product, j: usize, first: bool) {
    let alpha = product.alpha;
    let pairs = c.iter_mut().zip(sums);
    match (first, product.beta, product.bias) {
        (false, ..) | (true, 1.0, None) => pairs.for_each(|(c, sum)| *c += alpha * sum),
        (true, 0.0, None) => pairs.for_each(|(c, sum)| *c = alpha * sum),
        (true, beta, bias) => {
            for (index, (c, sum)) in pairs.enumerate() {
                // With β = 0 the old value may be anything, NaN included.
                let old = if beta == 0.0 { 0.0 } else { beta * *c };
                *c = old + bias.map_or(0.0, |bias| bias[j + index]) + alpha * sum;
            }
        }
    }
}

/// Strips of `nr` columns, each [kc, nr], zeros beyond the last column.
fn pack_b(
    panel: &mut Vec<f32>,
    nr: usize,
    product: Product,
    columns: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
) {
    let kc = depth.len();
    panel.resize(columns.len().div_ceil(nr) * nr * kc, 0.0);
    let pack = |strip: usize, out: &mut [f32]| {
        let from = columns.start + strip * nr;
        pack_strip(out, nr, product.b.t(), from..columns.end.min(from + nr), depth.clone());
    };
    if product.parallel {
        for_chunks(panel, nr * kc, pack);
    } else {
        panel.chunks_mut(nr * kc).enumerate().for_each(|(strip, out)| pack(strip, out));
    }
}

/// Strips of `mr` rows, each [kc, mr], zeros beyond the last row.
fn pack_a(
    panel: &mut Vec<f32>,
    mr: usize,
    product: Product,
    rows: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
) {
    let kc = depth.len();
    panel.resize(rows.len().div_ceil(mr) * mr * kc, 0.0);
    for (strip, out) in panel.chunks_exact_mut(mr * kc).enumerate() {
        let from = rows.start + strip * mr;
        pack_strip(out, mr, product.a, from..rows.end.min(from + mr), depth.clone());
    }
}

multiversion! {
    /// out[p][l] = element (lanes.start + l, depth.start + p) of `source`.
    fn pack_strip(
        out: &mut [f32],
        width: usize,
        source: Strided,
        lanes: std::ops::Range<usize>,
        depth: std::ops::Range<usize>,
    ) {
        if lanes.len() < width {
            out.fill(0.0);
        }
        match source.values {
            Values::F32(values) => copy_strip(out, width, source, lanes, depth, |from, out| {
                out.copy_from_slice(&values[from..from + out.len()]);
            }),
            Values::BF16(values) => copy_strip(out, width, source, lanes, depth, |from, out| {
                let part = &values[from..from + out.len()];
                for (out, x) in out.iter_mut().zip(part) {
                    *out = f32::from_bits(u32::from(x.to_bits()) << 16);
                }
            }),
            Values::F16(values) => copy_strip(out, width, source, lanes, depth, |from, out| {
                values[from..from + out.len()].convert_to_f32_slice(out);
            }),
        }
    }
}

/// `run(from, out)` copies neighbouring elements, widened.
#[inline(always)]
fn copy_strip(
    out: &mut [f32],
    width: usize,
    source: Strided,
    lanes: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    run: impl Fn(usize, &mut [f32]),
) {
    let (first, count) = (lanes.start, lanes.len());
    if source.row == 1 {
        // Lanes lie side by side.
        for (p, out) in depth.zip(out.chunks_exact_mut(width)) {
            run(p * source.col + first, &mut out[..count]);
        }
        return;
    }
    // Depth lies side by side (or nothing does): squares of eight by eight are read along it and
    // turned around in registers.
    const SIDE: usize = 8;
    let mut square = [[0f32; SIDE]; SIDE];
    for p0 in (0..depth.len()).step_by(SIDE) {
        let steps = SIDE.min(depth.len() - p0);
        for l0 in (0..count).step_by(SIDE) {
            let lanes = SIDE.min(count - l0);
            for (l, line) in square.iter_mut().enumerate().take(lanes) {
                let from = (first + l0 + l) * source.row + (depth.start + p0) * source.col;
                if source.col == 1 && steps == SIDE {
                    run(from, line);
                } else {
                    for (p, out) in line.chunks_exact_mut(1).enumerate().take(steps) {
                        run(from + p * source.col, out);
                    }
                }
            }
            let rows = out[p0 * width..].chunks_exact_mut(width).take(steps);
            if lanes == SIDE {
                for (p, row) in rows.enumerate() {
                    let turned: [f32; SIDE] = std::array::from_fn(|l| square[l][p]);
                    row[l0..l0 + SIDE].copy_from_slice(&turned);
                }
            } else {
                for (p, row) in rows.enumerate() {
                    for l in 0..lanes {
                        row[l0 + l] = square[l][p];
                    }
                }
            }
        }
    }
}

const MAX_TILE: usize = 12 * 32;

/// A register tile: `mr` rows by `nr` columns.
#[derive(Clone, Copy)]
struct Kernel {
    mr: usize,
    nr: usize,
    run: fn(usize, &[f32], &[f32], &mut [f32; MAX_TILE]),
}

impl Kernel {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has AVX-512F, as just checked.
                return Self { mr: 12, nr: 32, run: |kc, a, b, tile| unsafe { x86::avx512(kc, a, b, tile) } };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has AVX2 and FMA, as just checked.
                return Self { mr: 6, nr: 16, run: |kc, a, b, tile| unsafe { x86::avx2(kc, a, b, tile) } };
            }
        }
        Self { mr: 4, nr: 8, run: plain }
    }

    /// tile[i][j] = Σ_p a[p][i]·b[p][j], row-major with `nr` columns.
    #[inline(always)]
    fn run(&self, kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        assert!(a.len() == kc * self.mr && b.len() == kc * self.nr);
        (self.run)(kc, a, b, tile);
    }
}

/// Four by eight: what 128-bit vectors (SSE2, NEON, wasm) hold in registers.
fn plain(_kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
    let mut sums = [[0f32; 8]; 4];
    for (a, b) in a.chunks_exact(4).zip(b.chunks_exact(8)) {
        for i in 0..4 {
            for j in 0..8 {
                sums[i][j] += a[i] * b[j];
            }
        }
    }
    for (row, sums) in tile.chunks_exact_mut(8).zip(sums) {
        row.copy_from_slice(&sums);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::MAX_TILE;

    /// # Safety
    /// `a` holds 12 and `b` 32 floats for each of `kc` steps.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        let mut sums = [[_mm512_setzero_ps(); 2]; 12];
        for _ in 0..kc {
            // SAFETY: within the lengths that the caller guarantees.
            unsafe {
                let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(i));
                    sum[0] = _mm512_fmadd_ps(x, b0, sum[0]);
                    sum[1] = _mm512_fmadd_ps(x, b1, sum[1]);
                }
                a = a.add(12);
                b = b.add(32);
            }
        }
        for (row, sum) in tile.chunks_exact_mut(32).zip(sums) {
            // SAFETY: each row has 32 floats.
            unsafe {
                _mm512_storeu_ps(row.as_mut_ptr(), sum[0]);
                _mm512_storeu_ps(row.as_mut_ptr().add(16), sum[1]);
            }
        }
    }

    /// # Safety
    /// `a` holds 6 and `b` 16 floats for each of `kc` steps.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn avx2(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        let mut sums = [[_mm256_setzero_ps(); 2]; 6];
        for _ in 0..kc {
            // SAFETY: within the lengths that the caller guarantees.
            unsafe {
                let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*a.add(i));
                    sum[0] = _mm256_fmadd_ps(x, b0, sum[0]);
                    sum[1] = _mm256_fmadd_ps(x, b1, sum[1]);
                }
                a = a.add(6);
                b = b.add(16);
            }
        }
        for (row, sum) in tile.chunks_exact_mut(16).zip(sums) {
            // SAFETY: each row has 16 floats.
            unsafe {
                _mm256_storeu_ps(row.as_mut_ptr(), sum[0]);
                _mm256_storeu_ps(row.as_mut_ptr().add(8), sum[1]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    #[test]
    fn products_of_all_shapes_agree_with_the_definition_and_nothing_else_is_touched() {
        let sizes = [1, 3, 12, 31, 64, 100, 300];
        for (m, n, k) in sizes.iter().flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| (m, n, k))))
        {
            if m * n * k > 4_000_000 {
                continue;
            }
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let mut want = vec![0f32; m * n];
            for i in 0..m {
                for p in 0..k {
                    for j in 0..n {
                        want[i * n + j] += a[i * k + p] * b[p * n + j];
                    }
                }
            }
            let bias = noise(n, 3);
            let (ldc, mark) = (n + 3, 77.0);
            let mut c = vec![mark; m * ldc + 5];
            let product = Product {
                m,
                n,
                k,
                a: Strided { values: Values::F32(&a), row: k, col: 1 },
                b: Strided { values: Values::F32(&b), row: n, col: 1 },
                alpha: 1.0,
                beta: 0.0,
                bias: Some(&bias),
                lower: false,
                parallel: true,
            };
            matmul(&mut c, ldc, product);
            matmul(&mut c, ldc, Product { alpha: 2.0, beta: -1.0, bias: None, ..product });
            for (i, want) in want.iter().enumerate() {
                let got = c[i / n * ldc + i % n] + bias[i % n];
                // Terms are below 1, so a sum's rounding errors are bounded by its length.
                assert!((got - want).abs() < 1e-6 * (k as f32 + 4.0), "{m} {n} {k}: {got} {want}");
            }
            for i in 0..m {
                assert!(c[i * ldc + n..(i + 1) * ldc].iter().all(|&x| x == mark), "{m} {n} {k}");
            }
        }
    }

    #[test]
    fn the_order_of_sums_does_not_depend_on_threads_and_tiles_above_the_diagonal_are_left() {
        let (m, k) = (500, 700);
        let x = noise(m * k, 4);
        let product = Product {
            m,
            n: m,
            k,
            a: Strided { values: Values::F32(&x), row: k, col: 1 },
            b: Strided { values: Values::F32(&x), row: 1, col: k },
            alpha: 1.0,
            beta: 0.0,
            bias: None,
            lower: true,
            parallel: true,
        };
        let (mut one, mut many) = (vec![0f32; m * m], vec![0f32; m * m]);
        matmul(&mut one, m, Product { parallel: false, lower: false, ..product });
        matmul(&mut many, m, product);
        for i in 0..m {
            assert_eq!(one[i * m..=i * m + i], many[i * m..=i * m + i]);
        }
        assert_eq!(many[m - 1], 0.0);
    }
}
