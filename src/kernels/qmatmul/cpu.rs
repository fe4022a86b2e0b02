//! A packed weight times few rows on the CPU: a tile of outputs at a time, its words streamed once.

use super::packed::{Form, TILE};
#[cfg(target_arch = "x86_64")]
use super::vnni;
use crate::kernels::parallel::{for_chunks, threads};
use crate::kernels::simd::{half_to_f32, multiversion, prefetch};

/// Bytes of words below which another thread costs more than it saves.
const TASK_BYTES: usize = 32 << 10;
/// How far ahead words are asked for: what the processor foresees by itself is too little while it
/// unpacks.
const AHEAD: usize = 1024;

/// A packed weight in host memory.
#[derive(Clone, Copy)]
pub struct Weight<'a> {
    /// [tiles, word_rows, TILE]
    pub words: &'a [u32],
    /// [tiles, groups, grid_words, TILE]
    pub grid: &'a [u32],
    pub form: Form,
    /// Zero points matter.
    pub zeros: bool,
}

/// out[tile][row][lane] = Σ_slot weight[tile·TILE + lane][slot] · x[row][slot]; `x` is [rows, depth] with
/// at most four rows, `out` [tiles, rows, TILE].
pub fn few_rows(weight: Weight, x: &[f32], rows: usize, out: &mut [f32]) {
    let Form { depth, group, .. } = weight.form;
    // Σ x over each group, which zero points multiply.
    let sums: Vec<f32> = match weight.zeros {
        true => x.chunks(depth).flat_map(|x| x.chunks(group).map(|x| x.iter().sum::<f32>())).collect(),
        false => vec![],
    };
    #[cfg(target_arch = "x86_64")]
    let digits = vnni::Digits::of(&weight.form, x, rows);
    let tiles = out.len() / (rows * TILE);
    let tasks = (weight.words.len() * 4 / TASK_BYTES).clamp(1, 4 * threads());
    let tiles_per_task = tiles.div_ceil(tasks).max(1);
    for_chunks(out, tiles_per_task * rows * TILE, |task, out| {
        for (index, out) in out.chunks_exact_mut(rows * TILE).enumerate() {
            let part = weight.tile(task * tiles_per_task + index);
            #[cfg(target_arch = "x86_64")]
            if let Some(digits) = &digits {
                vnni::tile(part, digits, &sums, out);
                continue;
            }
            tile(part, x, &sums, rows, out);
        }
    });
}

impl Weight<'_> {
    fn tile(&self, index: usize) -> Self {
        let part = |len: usize| index * len..(index + 1) * len;
        Self {
            words: &self.words[part(self.form.word_rows() * TILE)],
            grid: &self.grid[part(self.form.groups() * self.form.grid_words() * TILE)],
            ..*self
        }
    }

    /// Scale and zero point (less the middle) of a lane; `grid` is that of the group.
    #[inline(always)]
    fn scale(&self, grid: &[u32], lane: usize) -> (f32, f32) {
        let word = grid[lane];
        if self.form.wide {
            return (f32::from_bits(word), f32::from_bits(grid[TILE + lane]));
        }
        (half_to_f32(word as u16), (word as i32 >> 16) as f32)
    }
}

fn tile(weight: Weight, x: &[f32], sums: &[f32], rows: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512F, as just checked.
        unsafe {
            match rows {
                1 => return x86::tile::<1>(weight, x, sums, out),
                2 => return x86::tile::<2>(weight, x, sums, out),
                3 => return x86::tile::<3>(weight, x, sums, out),
                _ => return x86::tile::<4>(weight, x, sums, out),
            }
        }
    }
    let groups = weight.form.groups();
    for (row, (out, x)) in
        out.chunks_exact_mut(TILE).zip(x.chunks_exact(weight.form.depth)).enumerate().take(rows)
    {
        let sums = sums.get(row * groups..(row + 1) * groups).unwrap_or_default();
        match weight.form.bits {
            2 => plain_2(weight, x, sums, out),
            3 => plain_3(weight, x, sums, out),
            4 => plain_4(weight, x, sums, out),
            _ => plain_8(weight, x, sums, out),
        }
    }
}

/// One row, by loops that compilers turn into the vectors there are.
#[inline(always)]
fn one_row<const BITS: u32>(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
    let form = weight.form;
    let (unit_codes, unit_rows) = (form.unit_codes(), form.unit_codes() * BITS as usize / 32);
    let mut total = [0f32; TILE];
    let groups = weight.words.chunks(form.group_rows() * TILE).zip(x.chunks(form.group));
    for (g, (words, x)) in groups.enumerate() {
        let mut sum = [0f32; TILE];
        for (words, x) in words.chunks_exact(unit_rows * TILE).zip(x.chunks_exact(unit_codes)) {
            prefetch(words.as_ptr().wrapping_add(AHEAD));
            prefetch(words.as_ptr().wrapping_add(AHEAD + TILE / 2));
            for (i, &x) in x.iter().enumerate() {
                let codes = codes::<BITS>(words, i);
                for lane in 0..TILE {
                    sum[lane] += codes[lane] * x;
                }
            }
        }
        let grid = &weight.grid[g * form.grid_words() * TILE..][..form.grid_words() * TILE];
        let zero = sums.get(g).copied().unwrap_or(0.0);
        for lane in 0..TILE {
            let (scale, middle) = weight.scale(grid, lane);
            total[lane] += scale * (sum[lane] - middle * zero);
        }
    }
    out.copy_from_slice(&total);
}

/// Code `i` of each lane's unit.
#[inline(always)]
fn codes<const BITS: u32>(words: &[u32], i: usize) -> [f32; TILE] {
    let bit = i as u32 * BITS;
    let (row, shift) = (bit as usize / 32 * TILE, bit % 32);
    let low: &[u32; TILE] = words[row..].first_chunk().unwrap_or(&[0; TILE]);
    let up = 32 - BITS;
    if shift + BITS <= 32 {
        let left = up - shift;
        return std::array::from_fn(|lane| ((low[lane] << left) as i32 >> up) as f32);
    }
    let high: &[u32; TILE] = words[row + TILE..].first_chunk().unwrap_or(&[0; TILE]);
    std::array::from_fn(|lane| {
        let code = low[lane] >> shift | high[lane] << (32 - shift);
        ((code << up) as i32 >> up) as f32
    })
}

multiversion! {
    fn plain_2(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
        one_row::<2>(weight, x, sums, out);
    }
}
multiversion! {
    fn plain_3(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
        one_row::<3>(weight, x, sums, out);
    }
}
multiversion! {
    fn plain_4(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
        one_row::<4>(weight, x, sums, out);
    }
}
multiversion! {
    fn plain_8(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
        one_row::<8>(weight, x, sums, out);
    }
}

multiversion! {
    /// out[p·width + l] = the weight of output `lanes.start + l` and slot `depth.start + p`, for the
    /// matrix product's panels.
    pub fn widen(
        weight: Weight,
        out: &mut [f32],
        width: usize,
        lanes: std::ops::Range<usize>,
        depth: std::ops::Range<usize>,
    ) {
        let form = weight.form;
        let (bits, unit) = (form.bits, form.unit_codes());
        // Powers of two, but for the three words of a unit of 3 bits.
        let (unit_shift, unit_rows) = (unit.trailing_zeros(), unit * bits as usize / 32);
        // Strips start at multiples of eight, so eight lanes lie within a tile.
        for from in lanes.clone().step_by(OCTET) {
            let (part, first) = (weight.tile(from / TILE), from % TILE);
            let (at, count) = (from - lanes.start, OCTET.min(lanes.end - from));
            let (mut scale, mut zero) = ([0f32; OCTET], [0f32; OCTET]);
            let mut group_end = 0;
            for (p, out) in depth.clone().zip(out.chunks_exact_mut(width)) {
                if p >= group_end {
                    let group = p / form.group;
                    group_end = (group + 1) * form.group;
                    let grid = &part.grid[group * form.grid_words() * TILE..];
                    for lane in 0..OCTET {
                        (scale[lane], zero[lane]) = part.scale(grid, first + lane);
                    }
                }
                let words = &part.words[(p >> unit_shift) * unit_rows * TILE..];
                let codes = octet(words, first, (p & (unit - 1)) as u32 * bits, bits);
                let mut values = [0f32; OCTET];
                for lane in 0..OCTET {
                    values[lane] = scale[lane] * (codes[lane] - zero[lane]);
                }
                if count == OCTET {
                    out[at..at + OCTET].copy_from_slice(&values);
                } else {
                    out[at..at + count].copy_from_slice(&values[..count]);
                }
            }
        }
    }
}

const OCTET: usize = 8;

/// The code at bit `bit` of a unit, of eight lanes from `first` on.
#[inline(always)]
fn octet(words: &[u32], first: usize, bit: u32, bits: u32) -> [f32; OCTET] {
    let (row, shift, up) = (bit as usize / 32 * TILE + first, bit % 32, 32 - bits);
    let low: &[u32; OCTET] = words[row..].first_chunk().unwrap_or(&[0; OCTET]);
    if shift + bits <= 32 {
        let left = up - shift;
        return std::array::from_fn(|lane| ((low[lane] << left) as i32 >> up) as f32);
    }
    let high: &[u32; OCTET] = words[row + TILE..].first_chunk().unwrap_or(&[0; OCTET]);
    std::array::from_fn(|lane| {
        let code = low[lane] >> shift | high[lane] << (32 - shift);
        ((code << up) as i32 >> up) as f32
    })
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::{AHEAD, TILE, Weight};
    use crate::kernels::simd::prefetch;

    /// Vectors of a tile.
    pub const WIDE: usize = TILE / 16;
    /// How far ahead scales are asked for.
    const GROUPS_AHEAD: usize = 8;

    /// # Safety
    /// The processor has AVX-512F. The weight is one tile; `x` is [M, depth], `out` [M, TILE], and
    /// `sums`, [M, groups], is there if zero points matter.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn tile<const M: usize>(weight: Weight, x: &[f32], sums: &[f32], out: &mut [f32]) {
        // SAFETY: passed on.
        unsafe {
            match weight.form.bits {
                2 => walk::<2, M>(weight, x, sums, out),
                3 => walk::<3, M>(weight, x, sums, out),
                4 => walk::<4, M>(weight, x, sums, out),
                _ => walk::<8, M>(weight, x, sums, out),
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn walk<const BITS: u32, const M: usize>(
        weight: Weight,
        x: &[f32],
        sums: &[f32],
        out: &mut [f32],
    ) {
        let form = weight.form;
        let (unit_codes, unit_rows) = (form.unit_codes(), form.unit_codes() * BITS as usize / 32);
        assert!(x.len() >= M * form.depth && out.len() >= M * TILE);
        assert!(weight.words.len() >= form.word_rows() * TILE);
        let rows: [*const f32; M] = std::array::from_fn(|m| x[m * form.depth..].as_ptr());
        let mut total = [[_mm512_setzero_ps(); WIDE]; M];
        let mut words = weight.words.as_ptr();
        for (g, grid) in weight.grid.chunks_exact(form.grid_words() * TILE).enumerate() {
            prefetch_grid(grid);
            let slots = g * form.group..form.depth.min((g + 1) * form.group);
            // Two sums for each output: one would wait for itself.
            let mut acc = [[[_mm512_setzero_ps(); 2]; WIDE]; M];
            for first in slots.step_by(unit_codes) {
                // SAFETY: units fill the words, and slots the rows of x, whose lengths are checked.
                unsafe {
                    prefetch_words(words, unit_rows);
                    unit::<BITS, M>(words, rows.map(|x| x.add(first)), &mut acc);
                    words = words.add(unit_rows * TILE);
                }
            }
            for v in 0..WIDE {
                let (scale, zero) = grid_of(grid, v, form.wide);
                for m in 0..M {
                    let mut sum = _mm512_add_ps(acc[m][v][0], acc[m][v][1]);
                    if weight.zeros {
                        let x = _mm512_set1_ps(sums[m * form.groups() + g]);
                        sum = _mm512_fnmadd_ps(zero, x, sum);
                    }
                    total[m][v] = _mm512_fmadd_ps(scale, sum, total[m][v]);
                }
            }
        }
        for (m, total) in total.into_iter().enumerate() {
            for (v, total) in total.into_iter().enumerate() {
                // SAFETY: `out` has M tiles.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(m * TILE + v * 16), total) };
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    pub fn prefetch_words(words: *const u32, rows: usize) {
        for row in 0..rows {
            for v in 0..WIDE {
                prefetch(words.wrapping_add(row * TILE + v * 16 + AHEAD));
            }
        }
    }

    /// Scales come slowly, a line or two for each group: nothing else asks for them in time.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub fn prefetch_grid(grid: &[u32]) {
        for line in (0..grid.len()).step_by(16) {
            prefetch(grid.as_ptr().wrapping_add(line + GROUPS_AHEAD * grid.len()));
        }
    }

    /// Scales and zero points of 16 lanes.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub fn grid_of(grid: &[u32], v: usize, wide: bool) -> (__m512, __m512) {
        assert!(grid.len() >= if wide { 2 * TILE } else { TILE });
        // SAFETY: just checked.
        let load = |at: usize| unsafe { _mm512_loadu_si512(grid.as_ptr().add(at).cast()) };
        let words = load(16 * v);
        if wide {
            return (_mm512_castsi512_ps(words), _mm512_castsi512_ps(load(TILE + 16 * v)));
        }
        let zero = _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(words));
        (_mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)), zero)
    }

    /// One unit of each lane times its slots of x.
    ///
    /// # Safety
    /// A unit of words lies at `words`, and its slots at each of `x`.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn unit<const BITS: u32, const M: usize>(
        words: *const u32,
        x: [*const f32; M],
        acc: &mut [[[__m512; 2]; WIDE]; M],
    ) {
        // A permutation looks at four bits of its index: the code of up to four bits becomes its
        // value in one step, whatever stands above it.
        let code = |i: i32| ((i << (32 - BITS)) >> (32 - BITS)) as f32;
        let table: [f32; 16] = std::array::from_fn(|i| code(i as i32));
        // SAFETY: the table has 16 elements.
        let table = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        let load = |row: usize, v: usize| {
            // SAFETY: a unit has as many rows of words as are asked for.
            unsafe { _mm512_loadu_si512(words.add(row * TILE + v * 16).cast()) }
        };
        let shifted = |word, by: u32| _mm512_srlv_epi32(word, _mm512_set1_epi32(by as i32));
        // The steps are written out: they are constants to the compiler then.
        macro_rules! steps {
            ($value:expr; $($i:literal)*) => {
                $({
                    let values: [__m512; WIDE] = std::array::from_fn(|v| $value($i, v));
                    for m in 0..M {
                        // SAFETY: slot i of the unit.
                        let x = _mm512_set1_ps(unsafe { *x[m].add($i) });
                        for v in 0..WIDE {
                            acc[m][v][$i & 1] = _mm512_fmadd_ps(values[v], x, acc[m][v][$i & 1]);
                        }
                    }
                })*
            };
        }
        match BITS {
            2 | 4 => {
                let words: [__m512i; WIDE] = std::array::from_fn(|v| load(0, v));
                let value = |i: u32, v: usize| _mm512_permutexvar_ps(shifted(words[v], BITS * i), table);
                steps!(value; 0 1 2 3 4 5 6 7);
                if BITS == 2 {
                    steps!(value; 8 9 10 11 12 13 14 15);
                }
            }
            3 => {
                let words: [[__m512i; WIDE]; 3] =
                    std::array::from_fn(|row| std::array::from_fn(|v| load(row, v)));
                let value = |i: u32, v: usize| {
                    let (row, shift) = ((3 * i / 32) as usize, 3 * i % 32);
                    let mut index = shifted(words[row][v], shift);
                    if shift > 29 {
                        let high = _mm512_sllv_epi32(words[row + 1][v], _mm512_set1_epi32(32 - shift as i32));
                        index = _mm512_or_si512(index, high);
                    }
                    _mm512_permutexvar_ps(index, table)
                };
                steps!(value; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                steps!(value; 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
            }
            _ => {
                let words: [__m512i; WIDE] = std::array::from_fn(|v| load(0, v));
                let value = |i: u32, v: usize| {
                    let left = _mm512_sllv_epi32(words[v], _mm512_set1_epi32(24 - 8 * i as i32));
                    _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(left))
                };
                steps!(value; 0 1 2 3);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::packed::Packed;
    use super::super::tests::layers;
    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::{noise, relative_error};

    /// The loops for machines without AVX-512, which tests of products do not reach where there is.
    #[test]
    fn plain_loops_give_what_vectors_give() {
        for shape in layers() {
            let layer = shape.make();
            let packed = Packed::new(&layer, 0..layer.n, &Device::Cpu).unwrap();
            let form = packed.form;
            let whole = Weight {
                words: packed.words.u32s().unwrap(),
                grid: packed.grid.u32s().unwrap(),
                form,
                zeros: packed.zeros,
            };
            let x = noise(form.depth, 9);
            let sums: Vec<f32> = x.chunks(form.group).map(|x| x.iter().sum()).collect();
            let last = whole.tile(layer.n.div_ceil(TILE) - 1);
            let (mut got, mut want) = ([0f32; TILE], [0f32; TILE]);
            match form.bits {
                2 => plain_2(last, &x, &sums, &mut got),
                3 => plain_3(last, &x, &sums, &mut got),
                4 => plain_4(last, &x, &sums, &mut got),
                _ => plain_8(last, &x, &sums, &mut got),
            }
            tile(last, &x, &sums, 1, &mut want);
            assert!(relative_error(&got, &want) < 3e-6, "{shape:?}");
        }
    }
}
