//! New tokens into a cache of keys and values.
//!
//! From the stacked projections of some tokens: queries and keys are normalized per head where the
//! model does so, turned by their position ([`super::rope`]), and keys and values take their rows in
//! the cache, which holds f32 or f16.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::parallel::for_chunks;
use super::rope::{RopeTable, turn};
use super::simd::{multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

/// Tokens per piece of parallel work.
const PIECE: usize = 16;

/// What is done to queries and keys before they are turned.
pub struct HeadNorm<'a> {
    /// [2, head_dim]: the weights for queries, then those for keys.
    pub weights: &'a Tensor,
    pub eps: f32,
}

/// Keys and values of one layer, [rows, kv_heads · head_dim] each, f32 or f16.
pub struct Rows<'a> {
    pub keys: &'a mut Tensor,
    pub values: &'a mut Tensor,
}

/// Takes `qkv` [tokens, (heads + 2·kv_heads) · head_dim] (q, k and v side by side, f32), whose first
/// token is at position `start`: turned queries go to `q` [tokens, heads · head_dim], keys and values
/// to rows `start..` of the cache.
///
/// # Errors
/// [`Error::Internal`] when the shapes do not fit or the cache or the table ends too early.
pub fn append(
    q: &mut Tensor,
    cache: Rows,
    qkv: &Tensor,
    table: &RopeTable,
    norm: Option<HeadNorm>,
    start: usize,
) -> Result<()> {
    let (tokens, head_dim) = (qkv.rows(), table.head_dim());
    let (q_width, kv_width) = (q.cols(), cache.keys.cols());
    let fits = head_dim > 0
        && q_width.is_multiple_of(head_dim)
        && kv_width.is_multiple_of(head_dim)
        && q.rows() == tokens
        && qkv.cols() == q_width + 2 * kv_width
        && cache.values.shape() == cache.keys.shape()
        && cache.values.elem() == cache.keys.elem()
        && start + tokens <= cache.keys.rows().min(table.positions())
        && norm.as_ref().is_none_or(|norm| norm.weights.len() == 2 * head_dim)
        && [&*q, cache.keys, cache.values].iter().all(|tensor| tensor.device().same(qkv.device()));
    if !fits {
        return Err(Error::Internal(format!(
            "append: {:?} at {start} to q {:?} and a cache {:?}",
            qkv.shape(),
            q.shape(),
            cache.keys.shape()
        )));
    }
    match qkv.device() {
        Device::Cpu => cpu(q, cache, qkv, table, norm, start),
        Device::Gpu(gpu) => gpu::append(gpu, q, cache, qkv, table.tensor(), norm, start),
    }
}

fn cpu(
    q: &mut Tensor,
    cache: Rows,
    qkv: &Tensor,
    table: &RopeTable,
    norm: Option<HeadNorm>,
    start: usize,
) -> Result<()> {
    let (head_dim, width, q_width, kv_width) = (table.head_dim(), qkv.cols(), q.cols(), cache.keys.cols());
    let (qkv, angles) = (qkv.f32s()?, table.tensor().f32s()?);
    let norm = match &norm {
        Some(norm) => Some((norm.weights.f32s()?.split_at(head_dim), norm.eps)),
        None => None,
    };
    let angles = |token: usize| &angles[(start + token) * head_dim..][..head_dim];
    for_chunks(q.f32s_mut()?, PIECE * q_width, |piece, q| {
        for (index, q) in q.chunks_mut(q_width).enumerate() {
            let token = piece * PIECE + index;
            q.copy_from_slice(&qkv[token * width..][..q_width]);
            if let Some(((weight, _), eps)) = norm {
                normalize(q, weight, eps);
            }
            turn(q, angles(token));
        }
    });
    let mut key = vec![0f32; kv_width];
    for (token, row) in qkv.chunks(width).enumerate() {
        key.copy_from_slice(&row[q_width..][..kv_width]);
        if let Some(((_, weight), eps)) = norm {
            normalize(&mut key, weight, eps);
        }
        turn(&mut key, angles(token));
        let at = (start + token) * kv_width;
        store(cache.keys, at, &key)?;
        store(cache.values, at, &row[q_width + kv_width..])?;
    }
    Ok(())
}

/// Writes `row` from element `at` on.
fn store(to: &mut Tensor, at: usize, row: &[f32]) -> Result<()> {
    match to.host_data_mut()? {
        Host::F32(to) => to[at..at + row.len()].copy_from_slice(row),
        Host::F16(to) => narrow(&mut to[at..at + row.len()], row),
        _ => return Err(Error::Internal("append: the cache must hold f32 or f16".into())),
    }
    Ok(())
}

fn narrow(to: &mut [f16], row: &[f32]) {
    to.convert_from_f32_slice(row);
}

multiversion! {
    /// [`super::rmsnorm`] in place.
    fn normalize(heads: &mut [f32], weight: &[f32], eps: f32) {
        for head in heads.chunks_exact_mut(weight.len()) {
            let scale = 1.0 / (sum(head, |x| x * x) / weight.len() as f32 + eps).sqrt();
            for (x, weight) in head.iter_mut().zip(weight) {
                *x *= scale * weight;
            }
        }
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{GROUP, whole_quads};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        half: u32,
        start: u32,
        eps: f32,
    }

    const APPEND: Kernel = Kernel {
        name: "append",
        source: include_str!("../../shaders/append.wgsl"),
        bindings: &[
            Access::Read,
            Access::Read,
            Access::Read,
            Access::ReadWrite,
            Access::ReadWrite,
            Access::ReadWrite,
        ],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&APPEND, size_of::<Params>())];

    pub fn append(
        gpu: &Gpu,
        q: &Tensor,
        cache: Rows,
        qkv: &Tensor,
        table: &Tensor,
        norm: Option<HeadNorm>,
        start: usize,
    ) -> Result<()> {
        if !matches!(cache.keys.elem(), Elem::F32 | Elem::F16) {
            return Err(Error::Internal("append: the cache must hold f32 or f16".into()));
        }
        let head_dim = table.cols();
        let half = whole_quads("append", "head", head_dim, 8)? / 2;
        let params = Params {
            tokens: qkv.rows() as u32,
            heads: (q.cols() / head_dim) as u32,
            kv_heads: (cache.keys.cols() / head_dim) as u32,
            half,
            start: start as u32,
            eps: norm.as_ref().map_or(0.0, |norm| norm.eps),
        };
        // Where nothing is normalized the binding needs some buffer all the same.
        let weights = norm.as_ref().map_or(table, |norm| norm.weights);
        gpu.dispatch(
            &APPEND,
            &[("ELEM", cache.keys.elem().shader_constant()), ("NORMED", f64::from(u8::from(norm.is_some())))],
            &[qkv.gpu()?, table.gpu()?, weights.gpu()?, q.gpu()?, cache.keys.gpu()?, cache.values.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((qkv.len() / 8).div_ceil(GROUP)),
            6.0 * qkv.len() as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::rmsnorm::rmsnorm;
    use crate::kernels::rope;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    const HEADS: usize = 3;
    const KV_HEADS: usize = 2;
    const D: usize = 16;

    /// The columns `from..from + count` of each row of `width`.
    fn columns(x: &[f32], width: usize, from: usize, count: usize) -> Vec<f32> {
        x.chunks(width).flat_map(|row| row[from..from + count].to_vec()).collect()
    }

    /// The same by the operations it stands for.
    fn expected(qkv: &[f32], norms: Option<&[f32]>, start: usize) -> [Vec<f32>; 3] {
        let width = (HEADS + 2 * KV_HEADS) * D;
        let table = table(&Device::Cpu);
        let turned = |from: usize, count: usize, which: usize| {
            let part = columns(qkv, width, from, count);
            let mut x = Tensor::from_f32(&Device::Cpu, &[part.len() / count, count], part).unwrap();
            if let Some(norms) = norms {
                let weight = Tensor::from_f32(&Device::Cpu, &[D], norms[which * D..][..D].to_vec()).unwrap();
                x = rmsnorm(&x, &weight, 1e-5).unwrap();
            }
            let tokens = x.rows();
            rope::apply(&mut x, &table, tokens, start).unwrap();
            x.f32s().unwrap().to_vec()
        };
        let values = columns(qkv, width, (HEADS + KV_HEADS) * D, KV_HEADS * D);
        [turned(0, HEADS * D, 0), turned(HEADS * D, KV_HEADS * D, 1), values]
    }

    fn table(device: &Device) -> RopeTable {
        let inv_freq: Vec<f64> = (0..D / 2).map(|i| 100f64.powf(-2.0 * i as f64 / D as f64)).collect();
        RopeTable::new(device, &inv_freq, 1.0, 60).unwrap()
    }

    #[test]
    fn both_devices_do_what_norm_rope_and_copies_do() {
        let gpu = test_gpu();
        let (tokens, start, rows) = (21, 5, 30);
        let qkv = noise(tokens * (HEADS + 2 * KV_HEADS) * D, 1);
        let norms = noise(2 * D, 2);
        for device in [Some(Device::Cpu), gpu].iter().flatten() {
            for (elem, tolerance) in [(Elem::F32, 1e-6), (Elem::F16, 6e-4)] {
                for norms in [None, Some(&norms)] {
                    let [want_q, want_k, want_v] = expected(&qkv, norms.map(Vec::as_slice), start);
                    let kv = [rows, KV_HEADS * D];
                    let mut q = Tensor::uninit(device, Elem::F32, &[tokens, HEADS * D]).unwrap();
                    let mut keys = Tensor::zeros(device, elem, &kv).unwrap();
                    let mut values = Tensor::zeros(device, elem, &kv).unwrap();
                    let qkv = Tensor::from_f32(device, &[tokens, qkv.len() / tokens], qkv.clone()).unwrap();
                    let weights = norms.map(|x| Tensor::from_f32(device, &[2, D], x.clone()).unwrap());
                    let norm = weights.as_ref().map(|weights| HeadNorm { weights, eps: 1e-5 });
                    let cache = Rows { keys: &mut keys, values: &mut values };
                    append(&mut q, cache, &qkv, &table(device), norm, start).unwrap();

                    let read = |x: &Tensor| pollster::block_on(x.to_f32()).unwrap();
                    assert!(relative_error(&read(&q), &want_q) < 1e-6);
                    let at = start * KV_HEADS * D;
                    for (got, want) in [(read(&keys), want_k), (read(&values), want_v)] {
                        let (before, after) = (&got[..at], &got[at + want.len()..]);
                        assert!(before.iter().chain(after).all(|&x| x == 0.0), "other rows are left alone");
                        assert!(relative_error(&got[at..at + want.len()], &want) < tolerance);
                    }
                }
            }
        }
    }

    #[test]
    fn a_full_cache_is_refused() {
        let device = &Device::Cpu;
        let mut q = Tensor::zeros(device, Elem::F32, &[2, HEADS * D]).unwrap();
        let [mut keys, mut values] =
            [0, 1].map(|_| Tensor::zeros(device, Elem::F16, &[10, KV_HEADS * D]).unwrap());
        let qkv = Tensor::zeros(device, Elem::F32, &[2, (HEADS + 2 * KV_HEADS) * D]).unwrap();
        let mut at = |start| {
            let cache = Rows { keys: &mut keys, values: &mut values };
            append(&mut q, cache, &qkv, &table(device), None, start)
        };
        assert!(at(8).is_ok());
        assert!(at(9).is_err());
    }
}
