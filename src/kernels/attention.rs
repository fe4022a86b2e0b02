//! Causal attention with grouped heads and an optional sliding window.
//!
//! For each head, out = softmax(scale · Q·Kᵀ + mask) · V, where query i sees the keys j with
//! j ≤ i and, under a window, j > i − window. No buffer grows with tokens²: the CPU holds the
//! scores of a tile of query rows, the GPU those of a few keys (online softmax, Milakov and
//! Gimelshein 2018, arXiv 1805.02867).

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;

use super::activation::soft_cap;
use super::attention_row;
use super::matmul::{Product, Strided, Values, matmul};
use super::parallel::for_chunks;
use super::simd::{exp_and_sum, largest, multiversion};
use crate::device::{Device, host};
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// The shape of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    pub heads: usize,
    /// Divides `heads`; query head h reads key head h / (heads / kv_heads).
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Multiplies the scores, usually 1/√head_dim.
    pub scale: f32,
    /// How many keys a query sees at most, itself included; `None` for all before it.
    pub window: Option<usize>,
    /// c where scores s count as c · tanh(s / c).
    pub soft_cap: Option<f32>,
}

impl Attention {
    /// Of query heads.
    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Of key heads.
    fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn is_sound(&self) -> bool {
        self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads) && self.window != Some(0)
    }
}

/// Attention over sequences of `seq_len` tokens stacked in rows: q [tokens, heads · head_dim],
/// k and v [tokens, kv_heads · head_dim], result [tokens, heads · head_dim], all f32.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit.
pub fn causal(q: &Tensor, k: &Tensor, v: &Tensor, shape: &Attention, seq_len: usize) -> Result<Tensor> {
    let tokens = q.rows();
    let fits = shape.is_sound()
        && seq_len > 0
        && tokens.is_multiple_of(seq_len)
        && q.shape() == [tokens, shape.width()]
        && k.shape() == [tokens, shape.kv_width()]
        && v.shape() == k.shape()
        && [q, k, v].iter().all(|tensor| tensor.elem() == Elem::F32)
        && q.device().same(k.device())
        && q.device().same(v.device());
    if !fits {
        return Err(Error::Internal(format!(
            "attention: q {:?}, k {:?}, v {:?} in sequences of {seq_len} for {shape:?}",
            q.shape(),
            k.shape(),
            v.shape()
        )));
    }
    let mut out = Tensor::uninit(q.device(), Elem::F32, &[tokens, shape.width()])?;
    run(&mut out, q, k, v, shape, Extent { seq_len, start: 0 })?;
    Ok(out)
}

/// Attention of the last tokens of one sequence over all `len` of it, whose keys and values are the
/// first rows of a cache: q [tokens, heads · head_dim] at positions `len − tokens..`, k and v
/// [at least len, kv_heads · head_dim] of f32 or f16, result in `out`, shaped as q.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit.
pub fn cached(
    out: &mut Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &Attention,
    len: usize,
) -> Result<()> {
    let tokens = q.rows();
    let fits = shape.is_sound()
        && (1..=len).contains(&tokens)
        && len <= k.rows()
        && q.shape() == [tokens, shape.width()]
        && out.shape() == q.shape()
        && k.cols() == shape.kv_width()
        && v.shape() == k.shape()
        && v.elem() == k.elem()
        && matches!(k.elem(), Elem::F32 | Elem::F16)
        && [&*out, k, v].iter().all(|tensor| tensor.device().same(q.device()));
    if !fits {
        return Err(Error::Internal(format!(
            "attention: q {:?} to {:?}, a cache {:?} with {len} tokens, for {shape:?}",
            q.shape(),
            out.shape(),
            k.shape()
        )));
    }
    if tokens <= attention_row::MOST_ROWS {
        return attention_row::cached(out, q, k, v, shape, len);
    }
    run(out, q, k, v, shape, Extent { seq_len: tokens, start: len - tokens })
}

/// Which queries there are.
#[derive(Clone, Copy)]
struct Extent {
    /// Queries of a sequence.
    seq_len: usize,
    /// Keys before its first query.
    start: usize,
}

fn run(
    out: &mut Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &Attention,
    extent: Extent,
) -> Result<()> {
    match q.device() {
        Device::Cpu => {
            let rows = q.rows() / extent.seq_len * (extent.start + extent.seq_len);
            let (k, v) = (wide(k, rows)?, wide(v, rows)?);
            cpu(out.f32s_mut()?, q.f32s()?, &k, &v, shape, extent);
            for widened in [k, v] {
                if let Cow::Owned(widened) = widened {
                    host::give(widened);
                }
            }
        }
        // A software adapter has few threads, so it rather computes less above the diagonal.
        Device::Gpu(gpu) => {
            let groups = if gpu.summary().software { 8 } else { 16 };
            return gpu::attend(gpu, groups, out, [q, k, v], shape, extent);
        }
    }
    Ok(())
}

/// The first `rows` rows of keys or values as f32.
fn wide(tensor: &Tensor, rows: usize) -> Result<Cow<'_, [f32]>> {
    let len = rows * tensor.cols();
    match tensor.host_data()? {
        Host::F32(values) => Ok(Cow::Borrowed(&values[..len])),
        Host::F16(values) => {
            let mut wide = host::take(len);
            values[..len].convert_to_f32_slice(&mut wide);
            Ok(Cow::Owned(wide))
        }
        _ => Err(Error::Internal("attention: keys and values must be f32 or f16".into())),
    }
}

/// Query rows whose scores are held at a time: enough for a matrix product to run well, few enough
/// that little is computed above the diagonal.
const TILE: usize = 64;

fn cpu(out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], shape: &Attention, extent: Extent) {
    let Extent { seq_len, start } = extent;
    let (width, kv_width) = (shape.width(), shape.kv_width());
    let keys = start + seq_len;
    // Tiles own whole rows of the result, so tasks never share memory.
    for_chunks(out, seq_len * width, |sequence, out| {
        let q = &q[sequence * seq_len * width..][..seq_len * width];
        let k = &k[sequence * keys * kv_width..][..keys * kv_width];
        let v = &v[sequence * keys * kv_width..][..keys * kv_width];
        for_chunks(out, TILE * width, |tile, out| {
            attend(out, &q[tile * TILE * width..], k, v, shape, start + tile * TILE);
        });
    });
}

/// All heads of the queries at positions `first..` of one sequence, as many as `out` has rows. The query
/// heads that share a key head are stacked into one product.
fn attend(out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], shape: &Attention, first: usize) {
    let Attention { heads, kv_heads, head_dim, scale, window, soft_cap: cap } = *shape;
    let (width, kv_width, sharing) = (heads * head_dim, kv_heads * head_dim, heads / kv_heads);
    let rows = out.len() / width;
    // The keys that some row of the tile sees.
    let start = window.map_or(0, |window| (first + 1).saturating_sub(window));
    let keys = first + rows - start;
    let mut stacked = vec![0f32; sharing * rows * head_dim];
    let mut mixtures = stacked.clone();
    let mut scores = host::take(sharing * rows * keys);
    let mut sums = vec![0f32; sharing * rows];
    for kv_head in 0..kv_heads {
        // Row r of query head h, of those that read this key head.
        let piece = |h: usize, r: usize| r * width + (kv_head * sharing + h) * head_dim;
        for (at, stacked) in stacked.chunks_exact_mut(head_dim).enumerate() {
            stacked.copy_from_slice(&q[piece(at / rows, at % rows)..][..head_dim]);
        }
        let kv_offset = start * kv_width + kv_head * head_dim;
        let rows_of = |values, ld| Strided { values: Values::F32(values), row: ld, col: 1 };
        let scored = Product {
            m: sharing * rows,
            n: keys,
            k: head_dim,
            a: rows_of(&stacked, head_dim),
            b: rows_of(&k[kv_offset..], kv_width).t(),
            alpha: scale,
            beta: 0.0,
            bias: None,
            lower: false,
            parallel: false,
            rounded: false,
        };
        matmul(&mut scores, keys, scored);
        for (at, (scores, sum)) in scores.chunks_mut(keys).zip(&mut sums).enumerate() {
            let end = first + at % rows + 1 - start;
            let begin = window.map_or(0, |window| end.saturating_sub(window));
            scores[..begin].fill(0.0);
            scores[end..].fill(0.0);
            if let Some(cap) = cap {
                soft_cap(&mut scores[begin..end], cap);
            }
            *sum = softmax_numerators(&mut scores[begin..end]);
        }
        let mixed = Product {
            m: sharing * rows,
            n: head_dim,
            k: keys,
            a: rows_of(&scores, keys),
            b: rows_of(&v[kv_offset..], kv_width),
            alpha: 1.0,
            beta: 0.0,
            bias: None,
            lower: false,
            parallel: false,
            rounded: false,
        };
        matmul(&mut mixtures, head_dim, mixed);
        for (at, (mixed, sum)) in mixtures.chunks_exact(head_dim).zip(&sums).enumerate() {
            let out = &mut out[piece(at / rows, at % rows)..][..head_dim];
            for (out, mixed) in out.iter_mut().zip(mixed) {
                *out = mixed / sum;
            }
        }
    }
    host::give(scores);
}

multiversion! {
    /// Replaces scores by exp(score − largest) and returns their sum.
    fn softmax_numerators(scores: &mut [f32]) -> f32 {
        let offset = largest(scores, |x| x);
        exp_and_sum(scores, offset)
    }
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
        seq_len: u32,
        start: u32,
        heads: u32,
        kv_heads: u32,
        first_tile: u32,
        first_sequence: u32,
        window: u32,
        scale: f32,
        soft_cap: f32,
    }

    const ATTENTION: Kernel = Kernel {
        name: "attention",
        source: include_str!("../../shaders/attention.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&ATTENTION, size_of::<Params>())];

    /// `groups`: how many fours of query rows a workgroup has at most, if its 64 threads suffice.
    pub fn attend(
        gpu: &Gpu,
        groups: usize,
        out: &Tensor,
        [q, k, v]: [&Tensor; 3],
        shape: &Attention,
        extent: Extent,
    ) -> Result<()> {
        let Extent { seq_len, start } = extent;
        let parts = whole_quads("attention", "head_dim", shape.head_dim, 16)? as usize / 4;
        let groups = (64 / parts).clamp(1, groups);
        let keys = 8 * parts.max(4);
        let rows = 4 * groups;
        let tiles = seq_len.div_ceil(rows);
        let sequences = q.rows() / seq_len;
        let all_keys = start + seq_len;
        let window = shape.window.map_or(all_keys, |window| window.min(all_keys));
        let visited = window.min(start + seq_len / 2) + rows;
        let per_sequence = 4.0 * (visited * tiles * rows) as f64 * q.cols() as f64;
        // A submit holds several sequences, or a part of one.
        let together = ((gpu.submit_budget() / per_sequence) as usize).clamp(1, sequences.max(1));
        let pieces = ((per_sequence / gpu.submit_budget()).ceil() as usize).clamp(1, tiles);
        let tile_step = tiles.div_ceil(pieces);
        for first_sequence in (0..sequences).step_by(together) {
            for first_tile in (0..tiles).step_by(tile_step) {
                let params = Params {
                    seq_len: seq_len as u32,
                    start: start as u32,
                    heads: shape.heads as u32,
                    kv_heads: shape.kv_heads as u32,
                    first_tile: first_tile as u32,
                    first_sequence: first_sequence as u32,
                    window: window as u32,
                    scale: shape.scale,
                    soft_cap: shape.soft_cap.unwrap_or(1.0),
                };
                let count = together.min(sequences - first_sequence);
                let part = tile_step.min(tiles - first_tile);
                gpu.dispatch(
                    &ATTENTION,
                    &[
                        ("ELEM", k.elem().shader_constant()),
                        ("CAPPED", u8::from(shape.soft_cap.is_some()).into()),
                        ("PARTS", parts as f64),
                        ("GROUPS", groups as f64),
                        ("KEYS", keys as f64),
                    ],
                    &[q.gpu()?, k.gpu()?, v.gpu()?, out.gpu()?],
                    bytemuck::bytes_of(&params),
                    [part as u32, shape.heads as u32, count as u32],
                    per_sequence * count as f64 * part as f64 / tiles as f64,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    /// The definition in f64.
    fn naive(q: &[f32], k: &[f32], v: &[f32], shape: &Attention, seq_len: usize) -> Vec<f32> {
        let Attention { heads, kv_heads, head_dim, scale, window, soft_cap } = *shape;
        let tokens = q.len() / (heads * head_dim);
        let mut out = vec![0f32; q.len()];
        for token in 0..tokens {
            let (first, i) = (token / seq_len * seq_len, token % seq_len);
            for head in 0..heads {
                let at = |x: &[f32], token: usize, heads: usize, head: usize, d: usize| {
                    f64::from(x[(token * heads + head) * head_dim + d])
                };
                let kv = head / (heads / kv_heads);
                let seen: Vec<usize> = (0..=i).filter(|j| window.is_none_or(|w| j + w > i)).collect();
                let weights: Vec<f64> = seen
                    .iter()
                    .map(|j| {
                        let score: f64 = (0..head_dim)
                            .map(|d| at(q, token, heads, head, d) * at(k, first + j, kv_heads, kv, d))
                            .sum();
                        let score = score * f64::from(scale);
                        soft_cap.map_or(score, |c| f64::from(c) * (score / f64::from(c)).tanh()).exp()
                    })
                    .collect();
                let total: f64 = weights.iter().sum();
                for d in 0..head_dim {
                    let mixed: f64 =
                        seen.iter().zip(&weights).map(|(j, w)| w * at(v, first + j, kv_heads, kv, d)).sum();
                    out[(token * heads + head) * head_dim + d] = (mixed / total) as f32;
                }
            }
        }
        out
    }

    fn check(device: &Device) {
        // Sequences shorter and longer than a tile, windows smaller and larger than one.
        for (heads, kv_heads, head_dim, seq_len, window) in [
            (4, 2, 16, 40, None),
            (4, 2, 32, 40, Some(16)),
            (2, 2, 64, 150, None),
            (3, 1, 80, 150, Some(70)),
            (2, 1, 128, 70, Some(1)),
            (1, 1, 256, 33, None),
        ] {
            let shape = Attention {
                heads,
                kv_heads,
                head_dim,
                scale: 3.0 / (head_dim as f32).sqrt(),
                window,
                soft_cap: window.map(|_| 2.5),
            };
            let tokens = 2 * seq_len;
            let q = noise(tokens * heads * head_dim, 1);
            let k = noise(tokens * kv_heads * head_dim, 2);
            let v = noise(tokens * kv_heads * head_dim, 3);
            let want = naive(&q, &k, &v, &shape, seq_len);
            let tensor = |x, heads| Tensor::from_f32(device, &[tokens, heads * head_dim], x).unwrap();
            let (q, k, v) = (tensor(q, heads), tensor(k, kv_heads), tensor(v, kv_heads));
            let got = causal(&q, &k, &v, &shape, seq_len).unwrap();
            let got = pollster::block_on(got.to_f32()).unwrap();
            let error = relative_error(&got, &want);
            assert!(error < 5e-6, "{shape:?}, {seq_len} tokens: {error:e}");
        }
    }

    #[test]
    fn the_cpu_twin_agrees_with_the_definition() {
        check(&Device::Cpu);
    }

    #[test]
    fn the_gpu_agrees_with_the_definition() {
        let Some(device) = test_gpu() else { return };
        check(&device);
        // Again in many small submits.
        if let Device::Gpu(gpu) = &device {
            gpu.set_submit_budget(1e5);
        }
        check(&device);
    }

    #[test]
    fn tiles_of_the_size_that_hardware_gets_agree_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let shape =
            Attention { heads: 2, kv_heads: 1, head_dim: 32, scale: 0.5, window: Some(90), soft_cap: None };
        let make = |device: &Device, heads: usize, seed| {
            Tensor::from_f32(device, &[300, heads * 32], noise(300 * heads * 32, seed)).unwrap()
        };
        let inputs = |device: &Device| (make(device, 2, 1), make(device, 1, 2), make(device, 1, 3));
        let (q, k, v) = inputs(&Device::Cpu);
        let want = causal(&q, &k, &v, &shape, 150).unwrap();
        let (q, k, v) = inputs(&device);
        let out = Tensor::uninit(&device, Elem::F32, &[300, 64]).unwrap();
        super::gpu::attend(gpu, 16, &out, [&q, &k, &v], &shape, Extent { seq_len: 150, start: 0 }).unwrap();
        let got = pollster::block_on(out.to_f32()).unwrap();
        assert!(relative_error(&got, want.f32s().unwrap()) < 5e-6);
    }

    #[test]
    fn an_infinite_activation_does_not_pass_unnoticed() {
        let shape =
            Attention { heads: 1, kv_heads: 1, head_dim: 16, scale: 1.0, window: None, soft_cap: None };
        let mut values = noise(4 * 16, 1);
        values[16] = f32::NAN;
        let x = Tensor::from_f32(&Device::Cpu, &[4, 16], values).unwrap();
        let got = causal(&x, &x, &x, &shape, 4).unwrap();
        assert!(got.f32s().unwrap()[16..].iter().any(|x| x.is_nan()));
    }
}
