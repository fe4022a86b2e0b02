//! The diagonal block of a blocked Cholesky factorization: A = L·Lᵀ and L⁻¹ of one small square.
//!
//! The rest of the factorization is matrix products (see `gptq/factor.rs`).

use crate::device::Device;
use crate::error::Result;
use crate::tensor::{Elem, Tensor};

/// The largest diagonal block.
pub const BLOCK: usize = 128;

/// Factor and inverse of the top square of `block` [rows ≥ w, w], of which the lower half is read.
/// Both results are [w, w], lower triangular with zeros above.
///
/// `status` u32 [1] becomes 1 when a pivot is not positive or not finite, and stays as it is
/// otherwise; the results are then finite but meaningless.
pub fn factor_diagonal(block: &Tensor, status: &mut Tensor) -> Result<(Tensor, Tensor)> {
    let w = block.cols();
    let mut factor = Tensor::uninit(block.device(), Elem::F32, &[w, w])?;
    let mut inverse = Tensor::uninit(block.device(), Elem::F32, &[w, w])?;
    match block.device().clone() {
        Device::Cpu => {
            let ok = cpu(block.f32s()?, factor.f32s_mut()?, inverse.f32s_mut()?, w);
            if !ok {
                status.u32s_mut()?[0] = 1;
            }
        }
        Device::Gpu(gpu) => gpu::factor_diagonal(&gpu, block, &mut factor, &mut inverse, status)?,
    }
    Ok((factor, inverse))
}

/// Row by row (Cholesky–Banachiewicz); a bad pivot is replaced by 1 so that all stays finite. In f64:
/// the squares are a small part of the work, and their errors are multiplied by their condition.
fn cpu(block: &[f32], factor: &mut [f32], inverse: &mut [f32], w: usize) -> bool {
    let mut ok = true;
    let mut l = vec![0f64; w * w];
    for i in 0..w {
        for j in 0..=i {
            let sum = dot(&l[i * w..i * w + j], &l[j * w..j * w + j]);
            let rest = f64::from(block[i * w + j]) - sum;
            if i == j {
                // Written so that NaN fails too.
                let good = rest > 0.0 && rest.is_finite();
                ok &= good;
                l[i * w + i] = if good { rest.sqrt() } else { 1.0 };
            } else {
                l[i * w + j] = rest / l[j * w + j];
            }
        }
    }
    // Column j of the inverse by forward substitution, built a row at a time:
    // L⁻¹[i] = (e_i − Σ_{k<i} L[i][k]·L⁻¹[k]) / L[i][i].
    let mut wide = vec![0f64; w * w];
    for i in 0..w {
        let (above, row) = wide.split_at_mut(i * w);
        let row = &mut row[..w];
        for k in 0..i {
            let factor = l[i * w + k];
            for (out, x) in row[..=k].iter_mut().zip(&above[k * w..=k * w + k]) {
                *out -= factor * x;
            }
        }
        row[i] = 1.0;
        let pivot = l[i * w + i];
        for out in &mut row[..=i] {
            *out /= pivot;
        }
    }
    factor.iter_mut().zip(&l).for_each(|(out, x)| *out = *x as f32);
    inverse.iter_mut().zip(&wide).for_each(|(out, x)| *out = *x as f32);
    ok
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Eight fixed lanes: vectorizable, and the same sum on every machine.
    let mut lanes = [0f64; 8];
    let whole = a.len() / 8 * 8;
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for l in 0..8 {
            lanes[l] += a[l] * b[l];
        }
    }
    let tail: f64 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + tail
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::error::Error;
    use crate::kernels::registry::Registered;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        w: u32,
    }

    const CHOLESKY: Kernel = Kernel {
        name: "cholesky",
        source: include_str!("../../shaders/cholesky.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite, Access::ReadWrite, Access::ReadWrite],
    };

    pub const KERNELS: &[Registered] = &[(&CHOLESKY, size_of::<Params>())];

    pub fn factor_diagonal(
        gpu: &Gpu,
        block: &Tensor,
        factor: &mut Tensor,
        inverse: &mut Tensor,
        status: &mut Tensor,
    ) -> Result<()> {
        let w = block.cols();
        if w > BLOCK || block.rows() < w {
            return Err(Error::Internal(format!("cholesky: no square of at most {BLOCK} columns")));
        }
        gpu.dispatch(
            &CHOLESKY,
            &[],
            &[block.gpu()?, factor.gpu()?, inverse.gpu()?, status.gpu()?],
            bytemuck::bytes_of(&Params { w: w as u32 }),
            [1, 1, 1],
            // One workgroup keeps a small part of a device busy, for longer than the
            // w³ operations would suggest.
            64.0 * (w * w * w) as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    /// X·Xᵀ + ½·1 for a random X, and two rows below that do not matter.
    fn positive_definite(w: usize) -> Vec<f32> {
        let x = noise(w * (w + 8), 3);
        let row = |r: usize| &x[r * (w + 8)..(r + 1) * (w + 8)];
        let mut a: Vec<f32> = (0..w * w)
            .map(|at| row(at / w).iter().zip(row(at % w)).map(|(a, b)| a * b).sum::<f32>())
            .collect();
        (0..w).for_each(|i| a[i * w + i] += 0.5);
        a.extend(noise(2 * w, 4));
        a
    }

    fn run(device: &Device, w: usize, block: Vec<f32>) -> (Vec<f32>, Vec<f32>, u32) {
        let block = Tensor::from_f32(device, &[block.len() / w, w], block).unwrap();
        let mut status = Tensor::zeros(device, Elem::U32, &[1]).unwrap();
        let (l, inverse) = factor_diagonal(&block, &mut status).unwrap();
        assert_eq!((l.shape(), inverse.shape()), (&[w, w][..], &[w, w][..]));
        pollster::block_on(async {
            let status = status.to_u32().await.unwrap()[0];
            (l.to_f32().await.unwrap(), inverse.to_f32().await.unwrap(), status)
        })
    }

    #[test]
    fn factor_times_its_transpose_is_the_block_and_the_inverse_inverts() {
        let gpu = test_gpu();
        for w in [1, 7, 64, 96, 128] {
            let a = positive_definite(w);
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let (l, inverse, status) = run(device, w, a.clone());
                assert_eq!(status, 0);
                for i in 0..w {
                    for j in 0..w {
                        let product: f32 = (0..w).map(|k| l[i * w + k] * l[j * w + k]).sum();
                        assert!((product - a[i * w + j]).abs() < 1e-4 * w as f32);
                        let unit: f32 = (0..w).map(|k| l[i * w + k] * inverse[k * w + j]).sum();
                        assert!((unit - f32::from(u8::from(i == j))).abs() < 1e-3);
                        assert!(i >= j || (l[i * w + j] == 0.0 && inverse[i * w + j] == 0.0));
                    }
                }
            }
        }
    }

    #[test]
    fn the_kernel_agrees_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        for w in [1, 7, 64, 96, 128] {
            let a = positive_definite(w);
            let (got, want) = (run(&device, w, a.clone()), run(&Device::Cpu, w, a));
            assert!(relative_error(&got.0, &want.0) < 1e-5, "{w}");
            assert!(relative_error(&got.1, &want.1) < 1e-5, "{w}");
        }
    }

    #[test]
    fn a_bad_pivot_sets_the_status_word() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
                for (w, place) in [(2, 1), (100, 0), (100, 50), (100, 99)] {
                    let mut block = vec![0.0; w * w];
                    (0..w).for_each(|i| block[i * w + i] = 1.0);
                    block[place * w + place] = bad;
                    let (l, inverse, status) = run(device, w, block);
                    assert_eq!(status, 1, "{}: {bad} at {place} of {w}", device.describe());
                    assert!(l.iter().chain(&inverse).all(|x| x.is_finite()));
                }
            }
        }
    }

    #[test]
    fn the_status_word_of_an_earlier_block_stays() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let block = Tensor::from_f32(device, &[1, 1], vec![4.0]).unwrap();
            let mut status = Tensor::from_u32(device, &[1], vec![1]).unwrap();
            factor_diagonal(&block, &mut status).unwrap();
            assert_eq!(pollster::block_on(status.to_u32()).unwrap(), [1]);
        }
    }
}
