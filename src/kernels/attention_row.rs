//! Attention of a few queries over a cache, as decoding needs it: memory-bound, where
//! [`super::attention`] is a matrix product.
//!
//! Keys are taken in parts, each with its own largest score, sum and mix of values; the parts are put
//! together at the end (Dao et al. 2023, "Flash-Decoding"). Parts have a fixed length, so that the
//! result does not depend on the number of threads.

use std::ops::Range;

use half::f16;

use super::activation::soft_cap;
use super::attention::Attention;
use super::parallel::for_chunks;
use super::simd::{exp, exp_and_sum, largest, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Host, Tensor};

#[cfg(target_arch = "x86_64")]
mod x86;

/// Queries for which this is faster than a matrix product.
pub(super) const MOST_ROWS: usize = 4;

/// Keys of a part on the CPU.
const PART: usize = 128;

/// Products below which waking another thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 15;

/// The largest head that the CPU's buffer holds; larger ones exist in no supported family.
const LARGEST_HEAD: usize = 512;

/// Keys or values on the host.
#[derive(Clone, Copy)]
enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    fn of(tensor: &'a Tensor) -> Result<Self> {
        match tensor.host_data()? {
            Host::F32(values) => Ok(Self::F32(values)),
            Host::F16(values) => Ok(Self::F16(values)),
            _ => Err(Error::Internal("attention: keys and values must be f32 or f16".into())),
        }
    }
}

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
            let (k, v, q) = (Floats::of(k)?, Floats::of(v)?, q.f32s()?);
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
fn one(out: &mut [f32], q: &[f32], k: Floats, v: Floats, shape: &Attention, end: usize) {
    let begin = shape.window.map_or(0, |window| end.saturating_sub(window));
    let parts = (end - begin).div_ceil(PART);
    // Of each head: the mix of values, the largest score, the sum of weights.
    let step = shape.head_dim + 2;
    let mut found = vec![0f32; parts * shape.heads * step];
    let each = |part: usize, found: &mut [f32]| {
        let from = begin + part * PART;
        mix(found, q, k, v, shape, from..end.min(from + PART));
    };
    if (end - begin) * q.len() < WORTH_SHARING {
        found.chunks_mut(shape.heads * step).enumerate().for_each(|(part, found)| each(part, found));
    } else {
        for_chunks(&mut found, shape.heads * step, each);
    }
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

fn mix(found: &mut [f32], q: &[f32], k: Floats, v: Floats, shape: &Attention, keys: Range<usize>) {
    match (k, v) {
        (Floats::F32(k), Floats::F32(v)) => mix_of(found, q, k, v, shape, keys),
        (Floats::F16(k), Floats::F16(v)) => mix_of(found, q, k, v, shape, keys),
        // `cached` has compared the two.
        _ => {}
    }
}

/// The keys, or values, of one head in a part.
#[derive(Clone, Copy)]
struct Keys<'a, T> {
    elements: &'a [T],
    /// Where the first one begins, and how far apart they are.
    first: usize,
    stride: usize,
    count: usize,
    head_dim: usize,
}

impl<T> Keys<'_, T> {
    fn row(&self, index: usize) -> &[T] {
        &self.elements[self.first + index * self.stride..][..self.head_dim]
    }
}

fn mix_of<T: Stored>(found: &mut [f32], q: &[f32], k: &[T], v: &[T], shape: &Attention, keys: Range<usize>) {
    let Attention { heads, kv_heads, head_dim, scale, soft_cap: cap, .. } = *shape;
    let (sharing, stride, step) = (heads / kv_heads, kv_heads * head_dim, head_dim + 2);
    let count = keys.len();
    let mut scores = vec![0f32; sharing * count];
    for kv_head in 0..kv_heads {
        let first = keys.start * stride + kv_head * head_dim;
        let of = |elements| Keys { elements, first, stride, count, head_dim };
        let q = &q[kv_head * sharing * head_dim..][..sharing * head_dim];
        let found = &mut found[kv_head * sharing * step..][..sharing * step];
        #[cfg(target_arch = "x86_64")]
        if kv_head == 0 {
            x86::expect(of(v));
        }
        T::scores(&mut scores, q, of(k));
        for (scores, found) in scores.chunks_exact_mut(count).zip(found.chunks_exact_mut(step)) {
            (found[head_dim], found[head_dim + 1]) = weigh(scores, scale, cap);
        }
        T::mixes(found, step, &scores, of(v));
    }
}

multiversion! {
    /// Scales and caps scores, replaces them by exp(score − largest), and gives the largest scaled score and the sum.
    fn weigh(scores: &mut [f32], scale: f32, cap: Option<f32>) -> (f32, f32) {
        for score in scores.iter_mut() {
            *score *= scale;
        }
        if let Some(cap) = cap {
            soft_cap(scores, cap);
        }
        let most = largest(scores, |x| x);
        (most, exp_and_sum(scores, most))
    }
}

/// What a cache holds.
trait Stored: Copy {
    /// scores[h][j] = q[h] · key j, for the heads in `q` that share the keys.
    fn scores(scores: &mut [f32], q: &[f32], keys: Keys<Self>);

    /// mixes[h] = Σ_j weights[h][j] · value j; the mixes begin `step` elements apart.
    fn mixes(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<Self>);
}

impl Stored for f32 {
    fn scores(scores: &mut [f32], q: &[f32], keys: Keys<Self>) {
        #[cfg(target_arch = "x86_64")]
        if x86::fits(keys.head_dim) {
            return x86::scores(scores, q, keys);
        }
        scores_f32(scores, q, keys);
    }

    fn mixes(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<Self>) {
        #[cfg(target_arch = "x86_64")]
        if x86::fits(values.head_dim) {
            return x86::mixes(mixes, step, weights, values);
        }
        mixes_f32(mixes, step, weights, values);
    }
}

impl Stored for f16 {
    fn scores(scores: &mut [f32], q: &[f32], keys: Keys<Self>) {
        #[cfg(target_arch = "x86_64")]
        if x86::fits(keys.head_dim) {
            return x86::scores(scores, q, keys);
        }
        scores_f16(scores, q, keys);
    }

    fn mixes(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<Self>) {
        #[cfg(target_arch = "x86_64")]
        if x86::fits(values.head_dim) {
            return x86::mixes(mixes, step, weights, values);
        }
        mixes_f16(mixes, step, weights, values);
    }
}

// What other processors run, and heads that are not whole vectors.
multiversion! {
    fn scores_f32(scores: &mut [f32], q: &[f32], keys: Keys<f32>) {
        plain_scores(scores, q, keys, |x| x);
    }
}

multiversion! {
    fn scores_f16(scores: &mut [f32], q: &[f32], keys: Keys<f16>) {
        plain_scores(scores, q, keys, widened);
    }
}

multiversion! {
    fn mixes_f32(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<f32>) {
        plain_mixes(mixes, step, weights, values, |x| x);
    }
}

multiversion! {
    fn mixes_f16(mixes: &mut [f32], step: usize, weights: &[f32], values: Keys<f16>) {
        plain_mixes(mixes, step, weights, values, widened);
    }
}

/// A key is widened once for the heads that share it.
#[inline(always)]
fn plain_scores<T: Copy>(scores: &mut [f32], q: &[f32], keys: Keys<T>, wide: impl Fn(T) -> f32) {
    let mut buffer = [0f32; LARGEST_HEAD];
    let buffer = &mut buffer[..keys.head_dim];
    for index in 0..keys.count {
        for (wide_x, &x) in buffer.iter_mut().zip(keys.row(index)) {
            *wide_x = wide(x);
        }
        for (head, q) in q.chunks_exact(keys.head_dim).enumerate() {
            scores[head * keys.count + index] = dot(q, buffer);
        }
    }
}

#[inline(always)]
fn plain_mixes<T: Copy>(
    mixes: &mut [f32],
    step: usize,
    weights: &[f32],
    values: Keys<T>,
    wide: impl Fn(T) -> f32,
) {
    let mut buffer = [0f32; LARGEST_HEAD];
    let buffer = &mut buffer[..values.head_dim];
    for mix in mixes.chunks_mut(step) {
        mix[..values.head_dim].fill(0.0);
    }
    for index in 0..values.count {
        for (wide_x, &x) in buffer.iter_mut().zip(values.row(index)) {
            *wide_x = wide(x);
        }
        for (mix, weights) in mixes.chunks_mut(step).zip(weights.chunks_exact(values.count)) {
            let weight = weights[index];
            for (mix, x) in mix[..values.head_dim].iter_mut().zip(&*buffer) {
                *mix += weight * x;
            }
        }
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
        soft_cap: f32,
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
            soft_cap: shape.soft_cap.unwrap_or(1.0),
        };
        gpu.dispatch(
            &ATTENTION_ROW,
            &[
                ("ELEM", k.elem().shader_constant()),
                ("THREADS", threads as f64),
                ("CAPPED", u8::from(shape.soft_cap.is_some()).into()),
            ],
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
            let soft_cap = window.map(|_| 2.5);
            let shape = Attention { heads, kv_heads, head_dim, scale, window, soft_cap };
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

    /// What this processor does not run must be right too.
    #[test]
    fn the_plain_form_agrees_with_that_of_this_processor() {
        for (sharing, head_dim, count) in
            [(1, 16, 5), (2, 48, 9), (3, 64, 128), (4, 80, 33), (7, 128, 20), (9, 64, 1)]
        {
            let (kv_heads, start) = (2, 3);
            let elements: Vec<f16> =
                noise((start + count) * kv_heads * head_dim, 1).iter().map(|&x| f16::from_f32(x)).collect();
            let stride = kv_heads * head_dim;
            let keys =
                Keys { elements: &elements, first: start * stride + head_dim, stride, count, head_dim };
            let q = noise(sharing * head_dim, 2);
            let [mut got, mut want] = [0, 1].map(|_| vec![0f32; sharing * count]);
            <f16 as Stored>::scores(&mut got, &q, keys);
            scores_f16(&mut want, &q, keys);
            assert!(relative_error(&got, &want) < 2e-6);
            let step = head_dim + 2;
            let [mut got, mut mixed] = [0, 1].map(|_| vec![0f32; sharing * step]);
            <f16 as Stored>::mixes(&mut got, step, &want, keys);
            mixes_f16(&mut mixed, step, &want, keys);
            assert!(relative_error(&got, &mixed) < 2e-6);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let cpu = &Device::Cpu;
        let shape =
            Attention { heads: 2, kv_heads: 1, head_dim: 16, scale: 1.0, window: None, soft_cap: None };
        let q = Tensor::zeros(cpu, Elem::F32, &[2, 32]).unwrap();
        let kv = Tensor::zeros(cpu, Elem::F32, &[8, 16]).unwrap();
        let mut out = Tensor::zeros(cpu, Elem::F32, &[2, 32]).unwrap();
        let mut at = |len| attention::cached(&mut out, &q, &kv, &kv, &shape, len);
        assert!(at(8).is_ok());
        assert!(at(9).is_err() && at(1).is_err());
    }
}
