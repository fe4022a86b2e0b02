//! The matrix product of the CPU device: packed panels around a register tile, after Goto and van de
//! Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
//!
//! Own code, as fast as the libraries tried (see ARCHITECTURE.md), because packing is where 16-bit
//! weights are widened and the register tile is where the upper half of a symmetric product is left
//! out, and because sums must not depend on the number of threads.
//!
//! Each element of C is summed in the same order whatever the number of threads.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::pairs;
use super::parallel::{for_chunks, threads};
use super::qmatmul::cpu as packed;
use super::simd::{multiversion, prefetch};
use crate::device::host;

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
    /// The transpose of a packed weight, as B only: strides mean nothing, the depth counts its slots.
    Packed(packed::Weight<'a>),
}

impl Values<'_> {
    /// Without the first `offset` elements; a packed weight has none to leave out.
    pub fn from(self, offset: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[offset..]),
            Self::F16(values) => Self::F16(&values[offset..]),
            Self::BF16(values) => Self::BF16(&values[offset..]),
            Self::Packed(_) => self,
        }
    }
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
    /// Multiply floats, or both sides rounded as [`pairs`] has it; codes are not rounded.
    pub rounded: bool,
}

impl Product<'_> {
    /// What a strip has along the depth: floats or pairs.
    fn steps(&self) -> usize {
        if self.rounded { self.k.div_ceil(2) } else { self.k }
    }
}

/// Depth of a packed panel: a strip of A then stays in the first-level cache, what is left of it is
/// enough for B's strip to stream through from the second.
const KC: usize = 288;
/// Columns of B packed at a time.
const NC: usize = 2048;
/// Elements of B packed at a time, unless one strip has more: 16 MiB.
const PACKED: usize = 1 << 22;
/// Rows of A that one task packs at most.
const MC: usize = 192;

/// C = α·A·B + β·C (+ bias); `c` starts at C's first element and has `ldc` elements a row.
pub fn matmul(c: &mut [f32], ldc: usize, product: Product) {
    let Product { m, n, k, .. } = product;
    if m == 0 || n == 0 {
        return;
    }
    let kernel = if product.rounded { pairs::kernel(n) } else { Kernel::best(n) };
    let c = &mut c[..(m - 1) * ldc + n];
    if k == 0 {
        let nothing = vec![0.0; n];
        for row in c.chunks_mut(ldc) {
            finish_row(&mut row[..n], &nothing, &product, 0, true);
        }
        return;
    }
    let steps = product.steps();
    let depth = steps.div_ceil(steps.div_ceil(KC));
    let rows = task_rows(m, kernel.mr, product.parallel);
    let nc = NC.min(PACKED / steps).max(1).next_multiple_of(kernel.nr);
    let mut b_panel = host::take(steps * nc.min(n.next_multiple_of(kernel.nr)));
    for jc in (0..n).step_by(nc) {
        let columns = jc..n.min(jc + nc);
        let b_panel = &mut b_panel[..columns.len().next_multiple_of(kernel.nr) * steps];
        pack_b(b_panel, kernel.nr, depth, product, columns.clone());
        let b_panel = &*b_panel;
        let task = |index: usize, c: &mut [f32]| {
            let rows = index * rows..m.min((index + 1) * rows);
            Part { kernel, product, rows, columns: columns.clone(), depth }.run(c, ldc, b_panel);
        };
        if product.parallel {
            for_chunks(c, rows * ldc, task);
        } else {
            c.chunks_mut(rows * ldc).enumerate().for_each(|(index, c)| task(index, c));
        }
    }
    host::give(b_panel);
}

/// Rows a task takes: whole register tiles, and enough tasks for all threads to end together even
/// when some cost more than others.
fn task_rows(m: usize, mr: usize, parallel: bool) -> usize {
    const TASKS_PER_THREAD: usize = 4;
    let share = if parallel { m.div_ceil(TASKS_PER_THREAD * threads()) } else { m };
    // Equal shares of at most MC rows.
    share.div_ceil(share.div_ceil(MC)).next_multiple_of(mr)
}

/// One task: some rows and columns of C.
struct Part<'a> {
    kernel: Kernel,
    product: Product<'a>,
    rows: Range<usize>,
    columns: Range<usize>,
    /// How much of the depth is packed together.
    depth: usize,
}

impl Part<'_> {
    /// `b_panel` as [`pack_b`] made it; `c` starts at the first of the rows.
    fn run(&self, c: &mut [f32], ldc: usize, b_panel: &[f32]) {
        let Kernel { mr, nr, .. } = self.kernel;
        let strips = self.columns.len().div_ceil(nr);
        let mut a_panel = Vec::new();
        let mut tile = [0f32; MAX_TILE];
        let mut b_rest = b_panel;
        let steps = self.product.steps();
        for pc in (0..steps).step_by(self.depth) {
            let kc = self.depth.min(steps - pc);
            let b_part;
            (b_part, b_rest) = b_rest.split_at(strips * nr * kc);
            pack_a(&mut a_panel, mr, self.product, self.rows.clone(), pc..pc + kc);
            for (jr, b) in b_part.chunks_exact(nr * kc).enumerate() {
                let j = self.columns.start + jr * nr;
                let width = nr.min(self.columns.end - j);
                for (ir, a) in a_panel.chunks_exact(mr * kc).enumerate() {
                    let i = ir * mr;
                    let height = mr.min(self.rows.len() - i);
                    if self.product.lower && self.rows.start + i + height <= j {
                        continue;
                    }
                    let out = &mut c[i * ldc + j..];
                    prefetch_tile(out, ldc, height, width);
                    self.kernel.run(kc, a, b, &mut tile);
                    finish_tile(out, ldc, &tile, (nr, height, width), &self.product, j, pc == 0);
                }
            }
        }
    }
}

/// Asks for a tile of C while its sums are still being made: they are ready sooner than memory is.
#[inline(always)]
fn prefetch_tile(c: &[f32], ldc: usize, height: usize, width: usize) {
    const LINE: usize = 16;
    for row in c.chunks(ldc).take(height) {
        let last = width.min(row.len()).saturating_sub(1);
        for at in (0..last).step_by(LINE).chain([last]) {
            prefetch(row.as_ptr().wrapping_add(at));
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

/// For each piece of the depth the strips of `nr` columns, each [kc, nr], zeros beyond the last column.
fn pack_b(panel: &mut [f32], nr: usize, depth: usize, product: Product, columns: Range<usize>) {
    let strips = columns.len().div_ceil(nr);
    let mut parts = Vec::new();
    let mut rest = panel;
    let steps = product.steps();
    for pc in (0..steps).step_by(depth) {
        let kc = depth.min(steps - pc);
        let part;
        (part, rest) = rest.split_at_mut(strips * nr * kc);
        parts.extend(part.chunks_mut(nr * kc).enumerate().map(|(strip, out)| (strip, pc..pc + kc, out)));
    }
    let pack = |_, parts: &mut [(usize, Range<usize>, &mut [f32])]| {
        for (strip, depth, out) in parts {
            let from = columns.start + *strip * nr;
            let lanes = from..columns.end.min(from + nr);
            match product.rounded {
                true => pairs::pack_strip(out, nr, product.b.t(), lanes, depth.clone(), product.k),
                false => pack_strip(out, nr, product.b.t(), lanes, depth.clone()),
            }
        }
    };
    if product.parallel {
        for_chunks(&mut parts, 1, pack);
    } else {
        pack(0, &mut parts);
    }
}

/// Strips of `mr` rows, each [kc, mr], zeros beyond the last row.
fn pack_a(panel: &mut Vec<f32>, mr: usize, product: Product, rows: Range<usize>, depth: Range<usize>) {
    let kc = depth.len();
    panel.resize(rows.len().div_ceil(mr) * mr * kc, 0.0);
    if let (1, Values::F32(values)) = (product.a.row, product.a.values) {
        match product.rounded {
            true => pairs::pack_lines(panel, mr, values, product.a.col, rows, depth, product.k),
            false => pack_lines(panel, mr, values, product.a.col, rows, depth),
        }
        return;
    }
    for (strip, out) in panel.chunks_exact_mut(mr * kc).enumerate() {
        let from = rows.start + strip * mr;
        let lanes = from..rows.end.min(from + mr);
        match product.rounded {
            true => pairs::pack_strip(out, mr, product.a, lanes, depth.clone(), product.k),
            false => pack_strip(out, mr, product.a, lanes, depth.clone()),
        }
    }
}

multiversion! {
    /// Strips of A where its rows lie side by side, [depth, rows] with `line` from one step to the next:
    /// step by step, since a strip's own steps are a page or more apart.
    fn pack_lines(
        panel: &mut [f32],
        mr: usize,
        values: &[f32],
        line: usize,
        rows: Range<usize>,
        depth: Range<usize>,
    ) {
        let kc = depth.len();
        for (p, step) in depth.enumerate() {
            let line = &values[step * line + rows.start..][..rows.len()];
            for (strip, line) in line.chunks(mr).enumerate() {
                let out = &mut panel[strip * mr * kc + p * mr..][..mr];
                let (part, beyond) = out.split_at_mut(line.len());
                for (out, x) in part.iter_mut().zip(line) {
                    *out = *x;
                }
                beyond.fill(0.0);
            }
        }
    }
}

multiversion! {
    /// out[p][l] = element (lanes.start + l, depth.start + p) of `source`.
    fn pack_strip(
        out: &mut [f32],
        width: usize,
        source: Strided,
        lanes: Range<usize>,
        depth: Range<usize>,
    ) {
        if lanes.len() < width {
            out.fill(0.0);
        }
        if let Values::Packed(weight) = source.values {
            return packed::widen(weight, out, width, lanes, depth);
        }
        #[cfg(target_arch = "x86_64")]
        if source.col == 1
            && lanes.len() >= SIDE
            && depth.len().is_multiple_of(SIDE)
            && is_x86_feature_detected!("avx2")
        {
            let (row, steps) = (source.row, depth.len());
            let end = (lanes.end - 1) * row + depth.end;
            // Whole squares from the first lane on, and where some lanes are left, the last square.
            let whole = lanes.len() / SIDE * SIDE;
            let rest = (whole < lanes.len()).then_some((lanes.len() - SIDE, SIDE));
            for (skipped, count) in [Some((0, whole)), rest].into_iter().flatten() {
                let from = (lanes.start + skipped) * row + depth.start;
                let out = &mut out[skipped..];
                // SAFETY: the processor has AVX2; `end` bounds what is read, `out` has `width` floats a step
                // but for those skipped.
                match source.values {
                    Values::F32(v) => unsafe { x86::turn_f32(out, width, &v[from..end], row, (count, steps)) },
                    Values::BF16(v) => unsafe { x86::turn_bf16(out, width, &v[from..end], row, (count, steps)) },
                    Values::F16(_) | Values::Packed(_) => {}
                }
            }
            if matches!(source.values, Values::F32(_) | Values::BF16(_)) {
                return;
            }
        }
        match source.values {
            Values::F32(values) => copy_strip(out, width, source, lanes, depth, |from, out| {
                let part = &values[from..from + out.len()];
                for (out, x) in out.iter_mut().zip(part) {
                    *out = *x;
                }
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
            Values::Packed(_) => {}
        }
    }
}

/// `run(from, out)` copies neighbouring elements, widened.
#[inline(always)]
fn copy_strip(
    out: &mut [f32],
    width: usize,
    source: Strided,
    lanes: Range<usize>,
    depth: Range<usize>,
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

/// Side of the squares that are turned around at a time.
const SIDE: usize = 8;

pub(super) const MAX_TILE: usize = 12 * 32;

/// A register tile: `mr` rows by `nr` columns.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub mr: usize,
    pub nr: usize,
    pub run: fn(usize, &[f32], &[f32], &mut [f32; MAX_TILE]),
}

impl Kernel {
    /// For products with `n` columns.
    fn best(n: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // Fewer loads for each product, but strips of 48 columns waste more on the last one.
                if n.next_multiple_of(48) * 16 <= n.next_multiple_of(32) * 17 {
                    // SAFETY: the processor has AVX-512F, as just checked.
                    let run =
                        |kc, a: &[_], b: &[_], tile: &mut _| unsafe { x86::avx512_wide(kc, a, b, tile) };
                    return Self { mr: 8, nr: 48, run };
                }
                // SAFETY: as above.
                let run = |kc, a: &[_], b: &[_], tile: &mut _| unsafe { x86::avx512(kc, a, b, tile) };
                return Self { mr: 12, nr: 32, run };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has AVX2 and FMA, as just checked.
                return Self { mr: 6, nr: 16, run: |kc, a, b, tile| unsafe { x86::avx2(kc, a, b, tile) } };
            }
        }
        let _ = n;
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
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use super::MAX_TILE;

    /// out[p][l] = source[l][p] for shape = (lanes, steps), both multiples of 8.
    ///
    /// # Safety
    /// `source` holds `lanes` rows that start `row` apart, `out` at least `lanes` floats every `width` for each
    /// step.
    #[target_feature(enable = "avx2")]
    pub unsafe fn turn_f32(out: &mut [f32], width: usize, source: &[f32], row: usize, shape: (usize, usize)) {
        // SAFETY: passed on.
        unsafe { turn(out, width, source, row, shape, |at| _mm256_loadu_ps(at)) }
    }

    /// The same, widening.
    ///
    /// # Safety
    /// As for [`turn_f32`].
    #[target_feature(enable = "avx2")]
    pub unsafe fn turn_bf16(
        out: &mut [f32],
        width: usize,
        source: &[bf16],
        row: usize,
        shape: (usize, usize),
    ) {
        // SAFETY: passed on.
        unsafe {
            turn(out, width, source, row, shape, |at| {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            });
        }
    }

    /// Squares of eight by eight: pairs of rows are interleaved by elements, by pairs and by halves.
    ///
    /// # Safety
    /// As for [`turn_f32`], in elements of `source` as `load` makes eight floats of them.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub unsafe fn turn<T>(
        out: &mut [f32],
        width: usize,
        source: &[T],
        row: usize,
        (lanes, steps): (usize, usize),
        load: impl Fn(*const T) -> __m256,
    ) {
        debug_assert!(lanes <= width && (steps == 0 || (steps - 1) * width + lanes <= out.len()));
        for lane in (0..lanes).step_by(8) {
            for step in (0..steps).step_by(8) {
                let mut r = [_mm256_setzero_ps(); 8];
                for (l, r) in r.iter_mut().enumerate() {
                    // SAFETY: within the rows that the caller guarantees.
                    *r = load(unsafe { source.as_ptr().add((lane + l) * row + step) });
                }
                let mut pairs = [_mm256_setzero_ps(); 8];
                for i in 0..4 {
                    pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                    pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
                }
                let mut fours = [_mm256_setzero_ps(); 8];
                for half in [0, 4] {
                    for i in 0..2 {
                        let (low, high) = (pairs[half + i], pairs[half + i + 2]);
                        fours[half + 2 * i] = _mm256_shuffle_ps::<0x44>(low, high);
                        fours[half + 2 * i + 1] = _mm256_shuffle_ps::<0xee>(low, high);
                    }
                }
                for i in 0..4 {
                    let (low, high) = (fours[i], fours[i + 4]);
                    // SAFETY: within the steps that the caller guarantees.
                    unsafe {
                        let at = out.as_mut_ptr().add((step + i) * width + lane);
                        _mm256_storeu_ps(at, _mm256_permute2f128_ps::<0x20>(low, high));
                        _mm256_storeu_ps(at.add(4 * width), _mm256_permute2f128_ps::<0x31>(low, high));
                    }
                }
            }
        }
    }

    /// # Safety
    /// `a` holds 12 and `b` 32 floats for each of `kc` steps.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        // SAFETY: within the lengths that the caller guarantees.
        unsafe { avx512_tile::<12, 2>(kc, a.as_ptr(), b.as_ptr(), tile.as_mut_ptr()) }
    }

    /// # Safety
    /// `a` holds 8 and `b` 48 floats for each of `kc` steps.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn avx512_wide(kc: usize, a: &[f32], b: &[f32], tile: &mut [f32; MAX_TILE]) {
        // SAFETY: within the lengths that the caller guarantees.
        unsafe { avx512_tile::<8, 3>(kc, a.as_ptr(), b.as_ptr(), tile.as_mut_ptr()) }
    }

    /// Defines `$name`, a tile of `MR` rows and `VECTORS` times 16 columns, for processors with `$features`:
    /// `$multiply` adds the product of two vectors to a third.
    macro_rules! register_tile {
        ($name:ident, $features:literal, $multiply:expr) => {
            /// # Safety
            /// `a` holds `MR` and `b` 16 · `VECTORS` floats for each of `kc` steps, `tile` their products.
            #[target_feature(enable = $features)]
            #[inline]
            unsafe fn $name<const MR: usize, const VECTORS: usize>(
                kc: usize,
                a: *const f32,
                b: *const f32,
                tile: *mut f32,
            ) {
                let mut sums = [[_mm512_setzero_ps(); VECTORS]; MR];
                let step = |p: usize, sums: &mut [[__m512; VECTORS]; MR]| {
                    // SAFETY: the caller has `kc` steps of both.
                    unsafe {
                        let (a, b) = (a.add(p * MR), b.add(p * VECTORS * 16));
                        let mut columns = [_mm512_setzero_ps(); VECTORS];
                        for (v, column) in columns.iter_mut().enumerate() {
                            *column = _mm512_loadu_ps(b.add(16 * v));
                        }
                        for (i, row) in sums.iter_mut().enumerate() {
                            let x = _mm512_set1_ps(*a.add(i));
                            for (sum, column) in row.iter_mut().zip(columns) {
                                *sum = $multiply(x, column, *sum);
                            }
                        }
                    }
                };
                // Four steps a turn: the loop's own work is then small beside theirs.
                let whole = kc / 4 * 4;
                for p in (0..whole).step_by(4) {
                    for q in 0..4 {
                        step(p + q, &mut sums);
                    }
                }
                for p in whole..kc {
                    step(p, &mut sums);
                }
                for (i, row) in sums.into_iter().enumerate() {
                    for (v, sum) in row.into_iter().enumerate() {
                        // SAFETY: the tile holds MR · VECTORS · 16 floats.
                        unsafe { _mm512_storeu_ps(tile.add((i * VECTORS + v) * 16), sum) };
                    }
                }
            }
        };
    }
    pub(in crate::kernels) use register_tile;

    register_tile!(avx512_tile, "avx512f", _mm512_fmadd_ps);

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
                rounded: false,
            };
            matmul(&mut c, ldc, product);
            // The second time with A stored the other way round.
            let turned: Vec<f32> = (0..k * m).map(|at| a[at % m * k + at / m]).collect();
            let a = Strided { values: Values::F32(&turned), row: 1, col: m };
            matmul(&mut c, ldc, Product { a, alpha: 2.0, beta: -1.0, bias: None, ..product });
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
            rounded: false,
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
