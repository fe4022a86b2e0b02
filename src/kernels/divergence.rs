//! How far two models' predictions for the same places are apart.

use super::cut::lanes;
use super::parallel::for_chunks;
use super::simd::{exp, largest, multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Two models' predictions for one place.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// KL(a ‖ b) = Σ p_a · ln(p_a / p_b) in nats, where p = softmax(logits).
    pub kl: f32,
    /// −ln p(target) of each, in nats.
    pub nll: [f32; 2],
    /// The most likely token of each; of equals the first.
    pub top: [u32; 2],
}

/// Numbers that a row's result takes.
const RESULT: usize = 8;

/// Compares two [rows, vocab] tensors of logits row by row; `targets` are the tokens that follow.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit or a target is not below vocab.
pub async fn divergence(a: &Tensor, b: &Tensor, targets: &[u32]) -> Result<Vec<Divergence>> {
    let (rows, vocab, device) = (a.rows(), a.cols(), a.device());
    let fits = a.shape() == b.shape()
        && device.same(b.device())
        && targets.len() == rows
        && targets.iter().all(|&id| (id as usize) < vocab)
        && vocab < 1 << 24;
    if !fits {
        return Err(Error::Internal(format!("divergence: {:?} and {:?}", a.shape(), b.shape())));
    }
    let mut results = Tensor::uninit(device, Elem::F32, &[rows, RESULT])?;
    match device.clone() {
        Device::Cpu => {
            let (a, b) = (a.f32s()?, b.f32s()?);
            for_chunks(results.f32s_mut()?, RESULT, |row, result| {
                let place = row * vocab..(row + 1) * vocab;
                compare(result, &a[place.clone()], &b[place], targets[row] as usize);
            });
        }
        Device::Gpu(gpu) => gpu::divergence(&gpu, lanes(&gpu, vocab), &results, a, b, targets)?,
    }
    let results = results.to_f32().await?;
    Ok(results
        .chunks_exact(RESULT)
        .map(|row| Divergence { kl: row[0], nll: [row[1], row[2]], top: [row[4] as u32, row[5] as u32] })
        .collect())
}

multiversion! {
    fn compare(result: &mut [f32], a: &[f32], b: &[f32], target: usize) {
        let tops = [largest(a, |x| x), largest(b, |x| x)];
        let place = |values: &[f32], top| values.iter().position(|&x| x == top).unwrap_or(0) as f32;
        let logs = [sum(a, |x| exp(x - tops[0])).ln(), sum(b, |x| exp(x - tops[1])).ln()];
        // Lanes of f64: the terms of both signs nearly cancel.
        let mut weighted = [0f64; 16];
        for (a, b) in a.chunks(16).zip(b.chunks(16)) {
            for ((lane, a), b) in weighted.iter_mut().zip(a).zip(b) {
                let (a, b) = (a - tops[0], b - tops[1]);
                *lane += f64::from(exp(a) * (a - b));
            }
        }
        let weighted = (weighted.iter().sum::<f64>() / f64::from(logs[0]).exp()) as f32;
        let kl = weighted - (logs[0] - logs[1]);
        result.copy_from_slice(&[
            if kl > 0.0 { kl } else { 0.0 },
            logs[0] - (a[target] - tops[0]),
            logs[1] - (b[target] - tops[1]),
            0.0,
            place(a, tops[0]),
            place(b, tops[1]),
            0.0,
            0.0,
        ]);
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::{ELEMENT, GROUP, ranges};
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        vocab: u32,
        first: u32,
        end: u32,
    }

    const DIVERGENCE: Kernel = Kernel {
        name: "divergence",
        source: include_str!("../../shaders/divergence.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&DIVERGENCE, size_of::<Params>())];

    pub fn divergence(
        gpu: &Gpu,
        lanes: usize,
        results: &Tensor,
        a: &Tensor,
        b: &Tensor,
        targets: &[u32],
    ) -> Result<()> {
        let targets = Tensor::from_u32(a.device(), &[targets.len()], targets.to_vec())?;
        let cost = ELEMENT * a.cols() as f64;
        for rows in ranges(gpu, a.rows(), cost) {
            let params = Params { vocab: a.cols() as u32, first: rows.start as u32, end: rows.end as u32 };
            gpu.dispatch(
                &DIVERGENCE,
                &[("LANES", lanes as f64)],
                &[a.gpu()?, b.gpu()?, targets.gpu()?, results.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold((rows.len() * lanes).div_ceil(GROUP)),
                cost * rows.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    fn want(a: &[f32], b: &[f32], target: usize) -> (f64, [f64; 2], [u32; 2]) {
        let log_softmax = |x: &[f32]| {
            let sum: f64 = x.iter().map(|&x| f64::from(x).exp()).sum();
            x.iter().map(|&x| f64::from(x) - sum.ln()).collect::<Vec<_>>()
        };
        let top = |x: &[f32]| (0..x.len()).rev().max_by(|&i, &j| x[i].total_cmp(&x[j])).unwrap() as u32;
        let (p, q) = (log_softmax(a), log_softmax(b));
        let kl = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
        (kl, [-p[target], -q[target]], [top(a), top(b)])
    }

    #[test]
    fn both_devices_agree_with_the_definition() {
        let gpu = test_gpu();
        for (rows, vocab, apart) in [(5, 1000, 0.01), (70, 37, 2.0), (1, 1, 0.0), (3, 130, 0.0)] {
            let a: Vec<f32> = noise(rows * vocab, 1).iter().map(|x| 8.0 * x + 20.0).collect();
            let mut b: Vec<f32> = a.iter().zip(noise(rows * vocab, 2)).map(|(a, d)| a + apart * d).collect();
            // Two largest that are equal: the first counts.
            if vocab == 37 {
                b[vocab + 30] = 40.0;
                b[vocab + 9] = 40.0;
            }
            let targets: Vec<u32> = (0..rows).map(|row| (row * 31 % vocab) as u32).collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let tensor = |x: &[f32]| Tensor::from_f32(device, &[rows, vocab], x.to_vec()).unwrap();
                let check = |got: Vec<Divergence>| {
                    for (row, got) in got.iter().enumerate() {
                        let place = row * vocab..(row + 1) * vocab;
                        let (kl, nll, top) = want(&a[place.clone()], &b[place], targets[row] as usize);
                        let near = |got: f32, want: f64| (f64::from(got) - want).abs() < 2e-6 + 1e-5 * want;
                        let name = device.describe();
                        assert!(near(got.kl, kl), "{name} {vocab}: {} {kl}", got.kl);
                        assert!(near(got.nll[0], nll[0]) && near(got.nll[1], nll[1]), "{name} {vocab}");
                        assert_eq!(got.top, top, "{name} {vocab} row {row}");
                    }
                };
                let (a, b) = (tensor(&a), tensor(&b));
                check(pollster::block_on(divergence(&a, &b, &targets)).unwrap());
                // A software adapter takes one thread per row; hardware shares rows.
                let Device::Gpu(gpu) = device else { continue };
                let results = Tensor::uninit(device, Elem::F32, &[rows, RESULT]).unwrap();
                super::gpu::divergence(gpu, 16, &results, &a, &b, &targets).unwrap();
                let shared = pollster::block_on(results.to_f32()).unwrap();
                let alone = pollster::block_on(divergence(&a, &b, &targets)).unwrap();
                for (shared, alone) in shared.chunks(RESULT).zip(alone) {
                    assert!((shared[0] - alone.kl).abs() < 1e-5 && shared[4] as u32 == alone.top[0]);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let logits = |cols| Tensor::zeros(&Device::Cpu, Elem::F32, &[2, cols]).unwrap();
        let refused = |a, b, targets: &[u32]| pollster::block_on(divergence(&a, &b, targets)).is_err();
        assert!(refused(logits(3), logits(4), &[0, 0]));
        assert!(refused(logits(3), logits(3), &[0]));
        assert!(refused(logits(3), logits(3), &[0, 3]));
        assert!(!refused(logits(3), logits(3), &[0, 2]));
    }
}
