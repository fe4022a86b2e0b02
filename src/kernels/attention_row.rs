//! Attention of a few queries over a cache, as decoding needs it: memory-bound, where
//! [`super::attention`] is a matrix product.
//!
//! Keys are taken in parts, each with its own largest score, sum and mix of values; the parts are put
//! together at the end (Dao et al. 2023, "Flash-Decoding"). Parts have a fixed length, so that the
//! result does not depend on the number of threads.

use std::ops::Range;

use half::f16;

use super::attention::{Attention, floats};
use super::matmul::Values;
use super::parallel::for_chunks;
use super::simd::{exp, exp_and_sum, largest, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Queries for which this is faster than a matrix product.
pub(super) const MOST_ROWS: usize = 4;

/// Keys of a part on the CPU.
const PART: usize = 128;

/// The largest head that the CPU's buffer holds; larger ones exist in no supported family.
const LARGEST_HEAD: usize = 512;

/// As [`super::attention::cached`], which has checked the shapes.
pub(super) fn cached(
    out: &mut Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &Attention,
    len: usize,
) -> Result<()> {
    match q.device() {
        Device::Cpu => {
            if shape.head_dim > LARGEST_HEAD {
                return Err(Error::unsupported(
                    format!("heads of {} are larger than {LARGEST_HEAD}", shape.head_dim),
                    "Use a model with smaller heads",
                ));
            }
            let (k, v, q) = (floats(k)?, floats(v)?, q.f32s()?);
            let width = shape.heads * shape.head_dim;
            let first = len - q.len() / width;
            for (row, (out, q)) in out.f32s_mut()?.chunks_mut(width).zip(q.chunks(width)).enumerate() {
                one(out, q, k, v, shape, first + row + 1);
            }
            Ok(())
        }
        Device::Gpu(gpu) => {
            let threads = if gpu.summary().software { 16 } else { 256 };
            gpu::cached(gpu, threads, out, [q, k, v], shape, len)
        }
    }
}

/// One query that sees the keys before `end`.
fn one(out: &mut [f32], q: &[f32], k: Values, v: Values, shape: &Attention, end: usize) {
    let begin = shape.window.map_or(0, |window| end.saturating_sub(window));
    let parts = (end - begin).div_ceil(PART);
    // Of each head: the mix of values, the largest score, the sum of weights.
    let step = shape.head_dim + 2;
    let mut found = vec![0f32; parts * shape.heads * step];
    for_chunks(&mut found, shape.heads * step, |part, found| {
        let from = begin + part * PART;
        mix(found, q, k, v, shape, from..end.min(from + PART));
    });
    let (first, others) = found.split_at_mut(shape.heads * step);
    for other in others.chunks(shape.heads * step) {
        for (head, other) in first.chunks_mut(step).zip(other.chunks(step)) {
            join(head, other);
        }
    }
    for (out, head) in out.chunks_mut(shape.head_dim).zip(first.chunks(step)) {
        let share = 1.0 / head[step - 1];
        for (out, mix) in out.iter_mut().zip(head) {
            *out = mix * share;
        }
    }
}

/// Takes another part into a head's mix, largest score and sum.
fn join(head: &mut [f32], other: &[f32]) {
    let d = head.len() - 2;
    let most = head[d].max(other[d]);
    let (kept, taken) = (exp(head[d] - most), exp(other[d] - most));
    for (mix, other) in head[..d].iter_mut().zip(other) {
        *mix = *mix * kept + other * taken;
    }
    head[d] = most;
    head[d + 1] = head[d + 1] * kept + other[d + 1] * taken;
}

fn mix(found: &mut [f32], q: &[f32], k: Values, v: Values, shape: &Attention, keys: Range<usize>) {
    match (k, v) {
        (Values::F32(k), Values::F32(v)) => mix_f32(found, q, k, v, shape, keys),
        (Values::F16(k), Values::F16(v)) => mix_f16(found, q, k, v, shape, keys),
        // `floats` gives no other kind, and `cached` has compared the two.
        _ => {}
    }
}

multiversion! {
    fn mix_f32(found: &mut [f32], q: &[f32], k: &[f32], v: &[f32], shape: &Attention, keys: Range<usize>) {
        mix_of(found, q, k, v, shape, keys, |x| x);
    }
}

multiversion! {
    fn mix_f16(found: &mut [f32], q: &[f32], k: &[f16], v: &[f16], shape: &Attention, keys: Range<usize>) {
        mix_of(found, q, k, v, shape, keys, widened);
    }
}

/// An f16 without branches, so that loops over it become vectors.
#[inline(always)]
fn widened(x: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    // The exponent's bias is 112 more in f32; a product also sets denormal numbers right.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23)).to_bits();
    let infinite = magnitude | 0x7f80_0000;
    let magnitude = if magnitude & EXPONENT == EXPONENT { infinite } else { finite };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

#[inline(always)]
fn mix_of<T: Copy>(
    found: &mut [f32],
    q: &[f32],
    k: &[T],
    v: &[T],
    shape: &Attention,
    keys: Range<usize>,
    wide: impl Fn(T) -> f32,
) {
    let Attention { heads, kv_heads, head_dim, scale, .. } = *shape;
    let (sharing, kv_width, step) = (heads / kv_heads, kv_heads * head_dim, head_dim + 2);
    let count = keys.len();
    // A key or a value is widened once for the heads that share it.
    let mut buffer = [0f32; LARGEST_HEAD];
    let buffer = &mut buffer[..head_dim];
    let mut scores = vec![0f32; sharing * count];
    for kv_head in 0..kv_heads {
        let heads = kv_head * sharing..(kv_head + 1) * sharing;
        let q = &q[heads.start * head_dim..heads.end * head_dim];
        let found = &mut found[heads.start * step..heads.end * step];
        let row = |index: usize| (keys.start + index) * kv_width + kv_head * head_dim;
        for index in 0..count {
            let at = row(index);
            for (wide_x, &x) in buffer.iter_mut().zip(&k[at..at + head_dim]) {
                *wide_x = wide(x);
            }
            for (head, q) in q.chunks_exact(head_dim).enumerate() {
                scores[head * count + index] = dot(q, buffer) * scale;
            }
        }
        for (scores, found) in scores.chunks_exact_mut(count).zip(found.chunks_exact_mut(step)) {
            let most = largest(scores, |x| x);
            found[head_dim] = most;
            found[head_dim + 1] = exp_and_sum(scores, most);
            found[..head_dim].fill(0.0);
        }
        for index in 0..count {
            let at = row(index);
            for (wide_x, &x) in buffer.iter_mut().zip(&v[at..at + head_dim]) {
                *wide_x = wide(x);
            }
            for (head, found) in found.chunks_exact_mut(step).enumerate() {
                let weight = scores[head * count + index];
                for (mix, x) in found[..head_dim].iter_mut().zip(&*buffer) {
                    *mix += weight * x;
                }
            }
        }
    }
}

/// Σ a·b in a fixed order.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tails = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(tails) {
        *lane += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::whole_quads;
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        heads: u32,
        kv_heads: u32,
        head_quads: u32,
        start: u32,
        window: u32,
        scale: f32,
    }

    const ATTENTION_ROW: Kernel = Kernel {
        name: "attention_row",
        source: include_str!("../../shaders/attention_row.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&ATTENTION_ROW, size_of::<Params>())];

    /// `threads` of a workgroup, if they suffice for the head's quads.
    pub fn cached(
        gpu: &Gpu,
        threads: usize,
        out: &Tensor,
        [q, k, v]: [&Tensor; 3],
        shape: &Attention,
        len: usize,
    ) -> Result<()> {
        let head_quads = whole_quads("attention", "head_dim", shape.head_dim, 8)?;
        let threads = threads.max(head_quads as usize);
        let tokens = q.rows();
        let params = Params {
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_quads,
            start: (len - tokens) as u32,
            window: shape.window.map_or(len, |window| window.min(len)) as u32,
            scale: shape.scale,
        };
        gpu.dispatch(
            &ATTENTION_ROW,
            &[("ELEM", k.elem().shader_constant()), ("THREADS", threads as f64)],
            &[q.gpu()?, k.gpu()?, v.gpu()?, out.gpu()?],
            bytemuck::bytes_of(&params),
            [shape.heads as u32, tokens as u32, 1],
            4.0 * q.len() as f64 * f64::from(params.window),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::attention;
    use crate::kernels::testing::{noise, relative_error, test_gpu};
    use crate::tensor::Elem;

    #[test]
    fn every_f16_widens_as_the_library_does() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            let (got, want) = (widened(x), x.to_f32());
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{bits:#x}: {got} {want}"
            );
        }
    }

    fn f16s(device: &Device, shape: &[usize], values: &[f32]) -> Tensor {
        let values: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
        Tensor::from_bytes(device, Elem::F16, shape, bytemuck::cast_slice(&values)).unwrap()
    }

    /// The last `tokens` rows of attention over the whole sequence are what the cache must give, for
    /// few queries and for many.
    #[test]
    fn the_last_rows_are_those_of_the_whole_sequence() {
        let gpu = test_gpu();
        for (heads, kv_heads, head_dim, len, tokens, window) in [
            (4, 2, 16, 40, 1, None),
            (6, 2, 32, 300, 2, Some(16)),
            (9, 3, 64, 700, 1, None),
            (2, 1, 80, 500, 3, Some(300)),
            (2, 2, 128, 130, 4, None),
            (1, 1, 256, 33, 1, Some(1)),
            (4, 2, 16, 1, 1, None),
            (4, 2, 32, 200, 70, None),
            (9, 3, 64, 150, 90, Some(40)),
            (3, 1, 80, 60, 60, None),
        ] {
            let scale = 3.0 / (head_dim as f32).sqrt();
            let shape = Attention { heads, kv_heads, head_dim, scale, window };
            let q = noise(len * heads * head_dim, 1);
            let exact = |seed| -> Vec<f32> {
                // Numbers that f16 holds, so that both kinds of cache mean the same.
                noise(len * kv_heads * head_dim, seed).iter().map(|&x| f16::from_f32(x).to_f32()).collect()
            };
            let (k, v) = (exact(2), exact(3));
            let f32s = |device: &Device, heads, x: &[f32]| {
                Tensor::from_f32(device, &[x.len() / heads / head_dim, heads * head_dim], x.to_vec()).unwrap()
            };
            let cpu = &Device::Cpu;
            let whole = attention::causal(
                &f32s(cpu, heads, &q),
                &f32s(cpu, kv_heads, &k),
                &f32s(cpu, kv_heads, &v),
                &shape,
                len,
            )
            .unwrap();
            let width = heads * head_dim;
            let want = &whole.f32s().unwrap()[(len - tokens) * width..];
            // The cache has rows that are not yet used.
            let spare = vec![f32::MAX.min(6e4); 3 * kv_heads * head_dim];
            let cache = |x: &[f32]| [x, &spare].concat();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let q = f32s(device, heads, &q[(len - tokens) * width..]);
                for half in [false, true] {
                    let kept = |x: &[f32]| match half {
                        true => f16s(device, &[len + 3, kv_heads * head_dim], &cache(x)),
                        false => f32s(device, kv_heads, &cache(x)),
                    };
                    let mut out = Tensor::uninit(device, Elem::F32, &[tokens, width]).unwrap();
                    attention::cached(&mut out, &q, &kept(&k), &kept(&v), &shape, len).unwrap();
                    let got = pollster::block_on(out.to_f32()).unwrap();
                    let error = relative_error(&got, want);
                    assert!(error < 5e-6, "{shape:?}, {tokens} of {len}, f16 {half}: {error:e}");
                    // The form that hardware takes.
                    let Device::Gpu(gpu) = device else { continue };
                    if tokens <= MOST_ROWS {
                        super::gpu::cached(gpu, 256, &out, [&q, &kept(&k), &kept(&v)], &shape, len).unwrap();
                        let got = pollster::block_on(out.to_f32()).unwrap();
                        assert!(relative_error(&got, want) < 5e-6, "{shape:?} with 256 threads");
                    }
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let cpu = &Device::Cpu;
        let shape = Attention { heads: 2, kv_heads: 1, head_dim: 16, scale: 1.0, window: None };
        let q = Tensor::zeros(cpu, Elem::F32, &[2, 32]).unwrap();
        let kv = Tensor::zeros(cpu, Elem::F32, &[8, 16]).unwrap();
        let mut out = Tensor::zeros(cpu, Elem::F32, &[2, 32]).unwrap();
        let mut at = |len| attention::cached(&mut out, &q, &kv, &kv, &shape, len);
        assert!(at(8).is_ok());
        assert!(at(9).is_err() && at(1).is_err());
    }
}
