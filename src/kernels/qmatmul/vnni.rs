//! A packed weight times few rows where the processor sums products of bytes (AVX-512 VNNI).
//!
//! Within a group the inputs become whole numbers of 24 bits, x = unit·q, and each of these three digits
//! of a byte: q = 65536·q₂ + 256·q₁ + q₀. The sums Σ code·qᵢ are exact in 32 bits, four products to a lane and
//! an instruction, and no code is widened to a float. What is lost is the rounding of an input to
//! 2⁻²⁴ of its group's largest, no more than sums in f32 lose.

use std::arch::x86_64::*;

use super::cpu::Weight;
use super::cpu::x86::{WIDE, grid_of, prefetch_grid, prefetch_words};
use super::packed::{Form, TILE};

/// Bytes of an input.
const DIGITS: usize = 3;
/// What the largest input of a group becomes: below what three digits hold, so that rounding cannot pass it.
const MOST: f32 = (127 * 65536) as f32;
/// Slots of a group at most: their products, up to 2¹⁴ each, must not leave 32 bits.
const LONGEST: usize = 1 << 16;
/// Inputs taken apart at a time; buffers have so many bytes to spare.
const STEP: usize = 16;

/// Rows of inputs in digits.
pub struct Digits {
    /// [DIGITS, rows, depth] and some to spare. The four bytes that one step of a unit multiplies lie together.
    bytes: Vec<u8>,
    /// [rows, groups]: what 1 stands for.
    units: Vec<f32>,
    /// [rows, groups, DIGITS]: the sum of each digit.
    totals: Vec<[i32; DIGITS]>,
    depth: usize,
    rows: usize,
}

impl Digits {
    /// `x` [rows, depth] in digits, `None` where this is no way for such a weight or on this processor.
    pub fn of(form: &Form, x: &[f32], rows: usize) -> Option<Self> {
        // Codes of 3 bits cross bytes.
        let fits = form.bits != 3
            && form.group <= LONGEST
            && x.len() == rows * form.depth
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni");
        if !fits {
            return None;
        }
        let groups = form.groups();
        let mut digits = Self {
            bytes: vec![0; DIGITS * rows * form.depth + STEP],
            units: vec![0.0; rows * groups],
            totals: vec![[0; DIGITS]; rows * groups],
            depth: form.depth,
            rows,
        };
        // SAFETY: the processor has what is needed, as just checked.
        unsafe { digits.fill(form, x) };
        Some(digits)
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    fn fill(&mut self, form: &Form, x: &[f32]) {
        let places = places(form.bits);
        let plane = self.rows * self.depth;
        let groups = form.groups();
        for (row, x) in x.chunks_exact(self.depth).enumerate() {
            for (g, x) in x.chunks(form.group).enumerate() {
                let first = row * self.depth + g * form.group;
                let largest = largest(x);
                // Numbers that are not finite must reach the result.
                let unit = if largest.is_finite() { largest / MOST } else { f32::NAN };
                let scale = if largest > 0.0 { MOST / largest } else { 0.0 };
                // 1 / the smallest numbers is infinite; they are as good as none.
                let scale = if scale.is_finite() { scale } else { 0.0 };
                let mut totals = [_mm512_setzero_si512(); DIGITS];
                for (step, x) in x.chunks(STEP).enumerate() {
                    let values = _mm512_mul_ps(load(x), _mm512_set1_ps(scale));
                    let mut rest = _mm512_cvtps_epi32(values);
                    for (digit, total) in totals.iter_mut().enumerate() {
                        let bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(rest), places);
                        let at = digit * plane + first + step * STEP;
                        self.bytes[at..at + STEP].copy_from_slice(&bytes_of(bytes));
                        // The digit with its sign, and what is left of the number above it.
                        let signed = _mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(rest));
                        *total = _mm512_add_epi32(*total, signed);
                        rest = _mm512_srai_epi32::<8>(_mm512_add_epi32(rest, _mm512_set1_epi32(128)));
                    }
                }
                self.units[row * groups + g] = unit;
                self.totals[row * groups + g] = totals.map(|total| _mm512_reduce_add_epi32(total));
            }
        }
    }
}

/// Where each of 16 bytes comes from, so that those which one step multiplies lie together: a byte of a word
/// holds 8 / bits codes, and a step takes one of each byte.
#[target_feature(enable = "avx512f")]
fn places(bits: u32) -> __m128i {
    let steps = 8 / bits as usize;
    let unit = 4 * steps;
    let places: [u8; STEP] = std::array::from_fn(|at| {
        let (within, step, byte) = (at / unit * unit, at % unit / 4, at % 4);
        (within + byte * steps + step) as u8
    });
    // SAFETY: 16 bytes.
    unsafe { _mm_loadu_si128(places.as_ptr().cast()) }
}

/// Up to 16 numbers, and zeros.
#[target_feature(enable = "avx512f")]
fn load(x: &[f32]) -> __m512 {
    let mask = ((1u32 << x.len().min(STEP)) - 1) as u16;
    // SAFETY: only what is there is read.
    unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
fn bytes_of(vector: __m128i) -> [u8; STEP] {
    let mut bytes = [0; STEP];
    // SAFETY: 16 bytes.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), vector) };
    bytes
}

/// The largest |x|; infinite or NaN if any x is.
#[target_feature(enable = "avx512f")]
fn largest(x: &[f32]) -> f32 {
    let mut most = _mm512_setzero_si512();
    for x in x.chunks(STEP) {
        // Without their signs numbers are in the order of their bits, and NaN is above all.
        let bits = _mm512_and_si512(_mm512_castps_si512(load(x)), _mm512_set1_epi32(i32::MAX));
        most = _mm512_max_epi32(most, bits);
    }
    f32::from_bits(_mm512_reduce_max_epi32(most) as u32)
}

/// As `super::cpu::tile`: one tile of a weight by rows that [`Digits::of`] took apart.
pub fn tile(weight: Weight, x: &Digits, sums: &[f32], out: &mut [f32]) {
    // SAFETY: there are digits only where the processor has what is needed.
    unsafe {
        match x.rows {
            1 => rows::<1>(weight, x, sums, out),
            2 => rows::<2>(weight, x, sums, out),
            3 => rows::<3>(weight, x, sums, out),
            _ => rows::<4>(weight, x, sums, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn rows<const M: usize>(weight: Weight, x: &Digits, sums: &[f32], out: &mut [f32]) {
    match weight.form.bits {
        2 => walk::<2, M>(weight, x, sums, out),
        4 => walk::<4, M>(weight, x, sums, out),
        _ => walk::<8, M>(weight, x, sums, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn walk<const BITS: u32, const M: usize>(weight: Weight, x: &Digits, sums: &[f32], out: &mut [f32]) {
    let form = weight.form;
    let (unit, plane) = (32 / BITS as usize, x.rows * x.depth);
    assert!(x.rows >= M && x.depth == form.depth && out.len() >= M * TILE);
    assert!(x.bytes.len() >= DIGITS * plane && weight.words.len() >= form.word_rows() * TILE);
    let middle = 1i32 << (BITS - 1);
    let repeated = |byte: i32| _mm512_set1_epi8(byte as i8);
    let (mask, flip) = (repeated((1 << BITS) - 1), repeated(middle));
    let mut total = [[_mm512_setzero_ps(); WIDE]; M];
    let mut words = weight.words.as_ptr();
    for (g, grid) in weight.grid.chunks_exact(form.grid_words() * TILE).enumerate() {
        prefetch_grid(grid);
        let slots = g * form.group..form.depth.min((g + 1) * form.group);
        // Bytes of codes have no sign: they are 2^(bits − 1) more, which is taken off beforehand.
        let mut acc = [[[[_mm512_setzero_si512(); 2]; DIGITS]; WIDE]; M];
        for (m, acc) in acc.iter_mut().enumerate() {
            for of_vector in acc {
                for (acc, total) in of_vector.iter_mut().zip(x.totals[m * form.groups() + g]) {
                    acc[0] = _mm512_set1_epi32(-middle * total);
                }
            }
        }
        for first in slots.step_by(unit) {
            prefetch_words(words, 1);
            // SAFETY: units fill the words, and slots the bytes of x, whose lengths are checked.
            let (held, bytes) = unsafe {
                let held: [__m512i; WIDE] =
                    std::array::from_fn(|v| _mm512_loadu_si512(words.add(v * 16).cast()));
                words = words.add(TILE);
                (held, x.bytes.as_ptr().add(first))
            };
            // The steps are written out: they are constants to the compiler then.
            macro_rules! steps {
                ($($step:literal)*) => {
                    $({
                        let by = _mm512_set1_epi32($step * BITS as i32);
                        // (word >> by) & mask ^ flip
                        let codes = held.map(|word| {
                            _mm512_ternarylogic_epi32::<0x6a>(_mm512_srlv_epi32(word, by), mask, flip)
                        });
                        for m in 0..M {
                            for d in 0..DIGITS {
                                // SAFETY: four bytes of the unit.
                                let four = unsafe {
                                    bytes.add(d * plane + m * x.depth + 4 * $step).cast::<i32>().read_unaligned()
                                };
                                let four = _mm512_set1_epi32(four);
                                for v in 0..WIDE {
                                    // One row has too few sums to keep the processor busy: two turns each.
                                    let acc = &mut acc[m][v][d][if M == 1 { $step & 1 } else { 0 }];
                                    *acc = _mm512_dpbusd_epi32(*acc, codes[v], four);
                                }
                            }
                        }
                    })*
                };
            }
            match BITS {
                2 => {
                    steps!(0 1 2 3);
                }
                4 => {
                    steps!(0 1);
                }
                _ => {
                    steps!(0);
                }
            }
        }
        for v in 0..WIDE {
            let (scale, zero) = grid_of(grid, v, form.wide);
            for m in 0..M {
                let digit = |d: usize| _mm512_cvtepi32_ps(_mm512_add_epi32(acc[m][v][d][0], acc[m][v][d][1]));
                let base = _mm512_set1_ps(256.0);
                let sum = _mm512_fmadd_ps(_mm512_fmadd_ps(digit(2), base, digit(1)), base, digit(0));
                let mut sum = _mm512_mul_ps(sum, _mm512_set1_ps(x.units[m * form.groups() + g]));
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

#[cfg(test)]
mod tests {
    use super::super::packed::Packed;
    use super::super::tests::Layer;
    use super::*;
    use crate::device::Device;
    use crate::kernels::testing::noise;

    fn product(layer: Layer, x: &[f32], rows: usize) -> Option<(Vec<f32>, Vec<f64>)> {
        let made = layer.make();
        let packed = Packed::new(&made, 0..layer.n, &Device::Cpu).unwrap();
        let (words, grid) = (packed.words.u32s().unwrap(), packed.grid.u32s().unwrap());
        let weight = Weight { words, grid, form: packed.form, zeros: false };
        let digits = Digits::of(&packed.form, x, rows)?;
        let mut out = vec![0.0; rows * TILE];
        tile(weight, &digits, &[], &mut out);
        let dense = made.dequantize().unwrap();
        let mut want = vec![];
        for x in x.chunks(layer.k) {
            for w in dense.chunks(layer.k) {
                want.push(w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum());
            }
        }
        Some((out, want))
    }

    /// Errors are those of f32: a few 2⁻²⁴ of Σ |w·x|, whatever the inputs' sizes.
    #[test]
    fn digits_are_as_exact_as_floats() {
        for bits in [2, 4, 8] {
            for (k, group, rows) in [(64, 16, 1), (96, 32, 3), (160, 64, 2), (576, 64, 1), (1536, -1, 4)] {
                let layer = Layer::new(TILE, k, bits, group);
                for powers in [0, 12, 60] {
                    let sizes = noise(rows * k, 8);
                    let x: Vec<f32> = noise(rows * k, 9)
                        .iter()
                        .zip(sizes)
                        .map(|(x, size)| x * (size * powers as f32).exp2())
                        .collect();
                    let Some((got, want)) = product(layer, &x, rows) else { return };
                    let largest = x.iter().fold(0f32, |most, x| most.max(x.abs()));
                    // Weights are at most 0.125 · 2^(bits − 1).
                    let bound = f64::from(largest) * 0.125 * f64::from(1 << (bits - 1)) * k as f64;
                    for (got, want) in got.iter().zip(&want) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error < 1e-7 * bound, "{bits} bits, {k}, {powers}: {got} is not {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_or_nothing_stays_so() {
        let layer = Layer::new(TILE, 64, 4, 32);
        for (special, is) in [
            (f32::NAN, f32::is_nan as fn(f32) -> bool),
            (f32::INFINITY, |x: f32| !x.is_finite()),
            (0.0, |x: f32| x == 0.0),
            (1e-42, |x: f32| x.abs() < 1e-38),
        ] {
            let mut x = vec![0.0; 64];
            x[37] = special;
            let Some((got, _)) = product(layer, &x, 1) else { return };
            assert!(got.iter().all(|&x| is(x)), "{special}: {got:?}");
        }
    }
}
