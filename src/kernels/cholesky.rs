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

/// Row by row (Cholesky–Banachiewicz); a bad pivot is replaced by 1 so that all stays finite.
fn cpu(block: &[f32], l: &mut [f32], inverse: &mut [f32], w: usize) -> bool {
    let mut ok = true;
    l.fill(0.0);
    inverse.fill(0.0);
    for i in 0..w {
        for j in 0..=i {
            let sum = dot(&l[i * w..i * w + j], &l[j * w..j * w + j]);
            let rest = block[i * w + j] - sum;
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
    for i in 0..w {
        let (above, row) = inverse.split_at_mut(i * w);
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
    ok
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight fixed lanes: vectorizable, and the same sum on every machine.
    let mut lanes = [0f32; 8];
    let whole = a.len() / 8 * 8;
    for (a, b) in a[..whole].chunks_exact(8).zip(b[..whole].chunks_exact(8)) {
        for l in 0..8 {
            lanes[l] += a[l] * b[l];
        }
    }
    let tail: f32 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + tail
}

mod gpu {
    use super::*;
    use crate::device::Gpu;
    use crate::error::Error;

    pub fn factor_diagonal(
        _gpu: &Gpu,
        _block: &Tensor,
        _factor: &mut Tensor,
        _inverse: &mut Tensor,
        _status: &mut Tensor,
    ) -> Result<()> {
        Err(Error::Internal("factor_diagonal has no GPU kernel yet".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    #[test]
    fn factor_times_its_transpose_is_the_block_and_the_inverse_inverts() {
        for w in [1, 7, 64, 128] {
            let x = noise(w * (w + 8), 3);
            let mut a = vec![0f32; w * w];
            for i in 0..w {
                for j in 0..w {
                    let row = |r: usize| &x[r * (w + 8)..(r + 1) * (w + 8)];
                    a[i * w + j] = row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum();
                }
                a[i * w + i] += 0.5;
            }
            let block = Tensor::from_f32(&Device::Cpu, &[w, w], a.clone()).unwrap();
            let mut status = Tensor::zeros(&Device::Cpu, Elem::U32, &[1]).unwrap();
            let (l, inverse) = factor_diagonal(&block, &mut status).unwrap();
            assert_eq!(status.u32s().unwrap()[0], 0);
            let (l, inverse) = (l.f32s().unwrap(), inverse.f32s().unwrap());
            for i in 0..w {
                for j in 0..w {
                    let product: f32 = (0..w).map(|k| l[i * w + k] * l[j * w + k]).sum();
                    assert!((product - a[i * w + j]).abs() < 1e-4 * w as f32);
                    let unit: f32 = (0..w).map(|k| l[i * w + k] * inverse[k * w + j]).sum();
                    assert!((unit - f32::from(u8::from(i == j))).abs() < 1e-3);
                }
            }
        }
    }

    #[test]
    fn a_bad_pivot_sets_the_status_word() {
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let block = Tensor::from_f32(&Device::Cpu, &[2, 2], vec![1.0, 0.0, 0.0, bad]).unwrap();
            let mut status = Tensor::zeros(&Device::Cpu, Elem::U32, &[1]).unwrap();
            let (l, _) = factor_diagonal(&block, &mut status).unwrap();
            assert_eq!(status.u32s().unwrap()[0], 1);
            assert!(l.f32s().unwrap().iter().all(|x| x.is_finite()));
        }
    }
}
