//! Σ_r |x[r][j]| of each column: how large a layer's inputs are.

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Columns per piece of parallel work.
const PIECE: usize = 64;

/// Adds the sums of the magnitudes of `x`, f32 [rows, n], to `sums`, f32 [n].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_magnitudes(x: &Tensor, sums: &mut Tensor) -> Result<()> {
    let n = x.cols();
    if sums.len() != n || x.elem() != Elem::F32 || !x.device().same(sums.device()) {
        return Err(Error::Internal(format!("magnitude: {:?} of {:?}", sums.shape(), x.shape())));
    }
    match x.device().clone() {
        Device::Cpu => {
            let x = x.f32s()?;
            for_chunks(sums.f32s_mut()?, PIECE, |piece, sums| {
                let mut totals = [0f64; PIECE];
                for row in x.chunks_exact(n) {
                    let own = &row[piece * PIECE..][..sums.len()];
                    totals.iter_mut().zip(own).for_each(|(total, x)| *total += f64::from(x.abs()));
                }
                sums.iter_mut().zip(totals).for_each(|(sum, total)| *sum += total as f32);
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add(&gpu, x, sums),
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
        n: u32,
        first: u32,
        end: u32,
    }

    const MAGNITUDE: Kernel = Kernel {
        name: "magnitude",
        source: include_str!("../../shaders/magnitude.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&MAGNITUDE, size_of::<Params>())];

    pub fn add(gpu: &Gpu, x: &Tensor, sums: &mut Tensor) -> Result<()> {
        let n = x.cols();
        let cost = ELEMENT * n as f64;
        for rows in ranges(gpu, x.rows(), cost) {
            let params = Params { n: n as u32, first: rows.start as u32, end: rows.end as u32 };
            gpu.dispatch(
                &MAGNITUDE,
                &[],
                &[x.gpu()?, sums.gpu()?],
                bytemuck::bytes_of(&params),
                [n.div_ceil(GROUP) as u32, 1, 1],
                cost * rows.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn both_devices_add_the_magnitudes_of_columns() {
        let gpu = test_gpu();
        for (rows, n) in [(1, 1), (70, 33), (5, 130), (3000, 4)] {
            let (x, before) = (noise(rows * n, 1), noise(n, 2));
            let sum = |j: usize| x.iter().skip(j).step_by(n).map(|x| f64::from(x.abs())).sum::<f64>();
            let want: Vec<f32> = (0..n).map(|j| (f64::from(before[j]) + sum(j)) as f32).collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                for budget in [1e9, 20.0 * 64.0 * n as f64] {
                    if let Device::Gpu(gpu) = device {
                        gpu.set_submit_budget(budget);
                    }
                    let x = Tensor::from_f32(device, &[rows, n], x.clone()).unwrap();
                    let mut sums = Tensor::from_f32(device, &[n], before.clone()).unwrap();
                    add_magnitudes(&x, &mut sums).unwrap();
                    let got = pollster::block_on(sums.to_f32()).unwrap();
                    assert!(relative_error(&got, &want) < 1e-6, "{}: {rows}, {n}", device.describe());
                }
            }
        }
    }

    #[test]
    fn as_many_sums_as_columns_are_asked_for() {
        let x = Tensor::from_f32(&Device::Cpu, &[2, 3], noise(6, 1)).unwrap();
        assert!(add_magnitudes(&x, &mut Tensor::zeros(&Device::Cpu, Elem::F32, &[2]).unwrap()).is_err());
    }
}
