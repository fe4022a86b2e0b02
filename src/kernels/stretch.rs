//! Columns times factors of their own, in place: x[r][j] ← x[r][j] · f[j].

use super::parallel::for_chunks;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// `x` f32 [rows, n], `factors` f32 [n].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn stretch(x: &mut Tensor, factors: &Tensor) -> Result<()> {
    let n = x.cols();
    if factors.len() != n || factors.elem() != Elem::F32 || !factors.device().same(x.device()) {
        return Err(Error::Internal(format!("stretch: {:?} by {:?}", x.shape(), factors.shape())));
    }
    match x.device().clone() {
        Device::Cpu => {
            let factors = factors.f32s()?;
            for_chunks(x.f32s_mut()?, n, |_, row| {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::stretch(&gpu, x, factors),
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

    const STRETCH: Kernel = Kernel {
        name: "stretch",
        source: include_str!("../../shaders/stretch.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&STRETCH, size_of::<Params>())];

    pub fn stretch(gpu: &Gpu, x: &mut Tensor, factors: &Tensor) -> Result<()> {
        let n = x.cols() as u32;
        for part in ranges(gpu, x.len(), ELEMENT) {
            let params = Params { n, first: part.start as u32, end: part.end as u32 };
            gpu.dispatch(
                &STRETCH,
                &[],
                &[factors.gpu()?, x.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(part.len().div_ceil(GROUP)),
                ELEMENT * part.len() as f64,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    #[test]
    fn every_column_has_its_factor_on_both_devices() {
        let gpu = test_gpu();
        for (rows, n) in [(1, 1), (7, 13), (300, 68)] {
            let (x, factors) = (noise(rows * n, 1), noise(n, 2));
            let want: Vec<f32> = x.iter().enumerate().map(|(at, x)| x * factors[at % n]).collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                // The second time in many dispatches.
                for budget in [1e9, 100.0 * 64.0] {
                    if let Device::Gpu(gpu) = device {
                        gpu.set_submit_budget(budget);
                    }
                    let mut stretched = Tensor::from_f32(device, &[rows, n], x.clone()).unwrap();
                    let by = Tensor::from_f32(device, &[n], factors.clone()).unwrap();
                    stretch(&mut stretched, &by).unwrap();
                    assert_eq!(pollster::block_on(stretched.to_f32()).unwrap(), want);
                }
            }
        }
    }

    #[test]
    fn as_many_factors_as_columns_are_asked_for() {
        let mut x = Tensor::from_f32(&Device::Cpu, &[2, 3], noise(6, 1)).unwrap();
        let factors = Tensor::from_f32(&Device::Cpu, &[2], noise(2, 1)).unwrap();
        assert!(stretch(&mut x, &factors).is_err());
    }
}
