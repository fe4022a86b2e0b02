//! Columns times factors of their own, in place: x[r][j] ← x[r][j] · f[j]. Rows times factors of their own.

use super::parallel::for_chunks;
use super::simd::multiversion;
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

/// `x` f32 [rows, n], `factors` f32 [rows] → f32 [rows, n], out[r][j] = x[r][j] · f[r].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn stretch_rows(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    if factors.len() != x.rows() || factors.elem() != Elem::F32 || !factors.device().same(x.device()) {
        return Err(Error::Internal(format!("stretch: rows of {:?} by {:?}", x.shape(), factors.shape())));
    }
    let mut out = Tensor::uninit(x.device(), Elem::F32, x.shape())?;
    match x.device().clone() {
        Device::Cpu => {
            let (x, factors, n) = (x.f32s()?, factors.f32s()?, x.cols());
            for_chunks(out.f32s_mut()?, n, |row, out| times(out, &x[row * n..][..n], factors[row]));
        }
        Device::Gpu(gpu) => gpu::stretch_rows(&gpu, x, factors, &out)?,
    }
    Ok(out)
}

multiversion! {
    fn times(out: &mut [f32], x: &[f32], factor: f32) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
    }
}

pub use gpu::KERNELS;

mod gpu {
    use super::*;
    use crate::device::{Access, Gpu, GpuBuffer, Kernel};
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

    const STRETCH_ROWS: Kernel = Kernel {
        name: "stretch_rows",
        source: include_str!("../../shaders/stretch_rows.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] =
        &[(&STRETCH, size_of::<Params>()), (&STRETCH_ROWS, size_of::<Params>())];

    pub fn stretch(gpu: &Gpu, x: &mut Tensor, factors: &Tensor) -> Result<()> {
        run(gpu, &STRETCH, x, &[factors.gpu()?, x.gpu()?])
    }

    pub fn stretch_rows(gpu: &Gpu, x: &Tensor, factors: &Tensor, out: &Tensor) -> Result<()> {
        run(gpu, &STRETCH_ROWS, x, &[factors.gpu()?, x.gpu()?, out.gpu()?])
    }

    fn run(gpu: &Gpu, kernel: &'static Kernel, x: &Tensor, buffers: &[&GpuBuffer]) -> Result<()> {
        let n = x.cols() as u32;
        for part in ranges(gpu, x.len(), ELEMENT) {
            let params = Params { n, first: part.start as u32, end: part.end as u32 };
            gpu.dispatch(
                kernel,
                &[],
                buffers,
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
    fn every_row_has_its_factor_on_both_devices() {
        let gpu = test_gpu();
        for (rows, n) in [(1, 1), (7, 13), (300, 68)] {
            let (x, factors) = (noise(rows * n, 1), noise(rows, 2));
            let want: Vec<f32> = x.iter().enumerate().map(|(at, x)| x * factors[at / n]).collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                for budget in [1e9, 100.0 * 64.0] {
                    if let Device::Gpu(gpu) = device {
                        gpu.set_submit_budget(budget);
                    }
                    let tensor = Tensor::from_f32(device, &[rows, n], x.clone()).unwrap();
                    let by = Tensor::from_f32(device, &[rows], factors.clone()).unwrap();
                    let stretched = stretch_rows(&tensor, &by).unwrap();
                    assert_eq!(pollster::block_on(stretched.to_f32()).unwrap(), want);
                }
            }
        }
    }

    #[test]
    fn as_many_factors_as_columns_or_rows_are_asked_for() {
        let mut x = Tensor::from_f32(&Device::Cpu, &[2, 3], noise(6, 1)).unwrap();
        let factors = Tensor::from_f32(&Device::Cpu, &[2], noise(2, 1)).unwrap();
        assert!(stretch(&mut x, &factors).is_err());
        let factors = Tensor::from_f32(&Device::Cpu, &[3], noise(3, 1)).unwrap();
        assert!(stretch_rows(&x, &factors).is_err());
    }
}
