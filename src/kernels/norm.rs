//! Σx² of each row, for losses, and Σ(x−y)², for distances.

use super::cut::lanes;
use super::parallel::for_chunks;
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// Adds Σ_j x[r][j]² to `sums` f32 [rows].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_squares(x: &Tensor, sums: &mut Tensor) -> Result<()> {
    if sums.len() != x.rows() {
        return Err(Error::Internal("norm: one sum for each row".into()));
    }
    match x.device().clone() {
        Device::Cpu => {
            let (values, n) = (x.f32s()?, x.cols());
            for_chunks(sums.f32s_mut()?, 1, |row, sum| sum[0] += squares(&values[row * n..][..n]) as f32);
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add(&gpu, lanes(&gpu, x.cols()), x, None, sums),
    }
}

/// Adds Σ_j (x[r][j] − y[r][j])² to `sums` f32 [rows].
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn add_squared_differences(x: &Tensor, y: &Tensor, sums: &mut Tensor) -> Result<()> {
    if sums.len() != x.rows() || x.shape() != y.shape() || !x.device().same(y.device()) {
        return Err(Error::Internal(format!("norm: {:?} and {:?}", x.shape(), y.shape())));
    }
    match x.device().clone() {
        Device::Cpu => {
            let (x, y, n) = (x.f32s()?, y.f32s()?, x.cols());
            for_chunks(sums.f32s_mut()?, 1, |row, sum| {
                sum[0] += squared_differences(&x[row * n..][..n], &y[row * n..][..n]) as f32;
            });
            Ok(())
        }
        Device::Gpu(gpu) => gpu::add(&gpu, lanes(&gpu, x.cols()), x, Some(y), sums),
    }
}

/// Partial sums side by side, since each waits for the one before.
const LANES: usize = 16;

multiversion! {
    fn squares(x: &[f32]) -> f64 {
        let mut sums = [0f64; LANES];
        let (whole, rest) = x.as_chunks::<LANES>();
        for x in whole {
            sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
        }
        sums.iter_mut().zip(rest).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
        sums.iter().sum()
    }
}

multiversion! {
    fn squared_differences(x: &[f32], y: &[f32]) -> f64 {
        let square = |x: f32, y: f32| (f64::from(x) - f64::from(y)) * (f64::from(x) - f64::from(y));
        let mut sums = [0f64; LANES];
        let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
        for (x, y) in x.iter().zip(y) {
            sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (&x, &y))| *sum += square(x, y));
        }
        sums.iter_mut().zip(x_rest.iter().zip(y_rest)).for_each(|(sum, (&x, &y))| *sum += square(x, y));
        sums.iter().sum()
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

    const NORM: Kernel = Kernel {
        name: "norm",
        source: include_str!("../../shaders/norm.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::ReadWrite],
    };

    pub const KERNELS: &[Registered] = &[(&NORM, size_of::<Params>())];

    pub fn add(gpu: &Gpu, lanes: usize, x: &Tensor, y: Option<&Tensor>, sums: &mut Tensor) -> Result<()> {
        let minus = f64::from(u8::from(y.is_some()));
        let cost = ELEMENT * x.cols() as f64;
        for rows in ranges(gpu, x.rows(), cost) {
            let params = Params { n: x.cols() as u32, first: rows.start as u32, end: rows.end as u32 };
            gpu.dispatch(
                &NORM,
                &[("LANES", lanes as f64), ("MINUS", minus)],
                &[x.gpu()?, y.unwrap_or(x).gpu()?, sums.gpu()?],
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
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn both_devices_add_the_sum_of_squares() {
        let gpu = test_gpu();
        for (rows, n) in [(70, 33), (3, 5000), (5, 1)] {
            let (x, before) = (noise(rows * n, 1), noise(rows, 2));
            let squares = |row: usize| x[row * n..][..n].iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
            let want: Vec<f32> =
                (0..rows).map(|row| (f64::from(before[row]) + squares(row)) as f32).collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                let run = |add: &dyn Fn(&Tensor, &mut Tensor) -> Result<()>| {
                    let x = Tensor::from_f32(device, &[rows, n], x.clone()).unwrap();
                    let mut sums = Tensor::from_f32(device, &[rows], before.clone()).unwrap();
                    add(&x, &mut sums).unwrap();
                    let got = pollster::block_on(sums.to_f32()).unwrap();
                    assert!(relative_error(&got, &want) < 1e-6, "{}: {rows}, {n}", device.describe());
                };
                run(&|x, sums| add_squares(x, sums));
                let Device::Gpu(gpu) = device else { continue };
                // A software adapter takes one thread per row; hardware shares rows.
                for lanes in [4, 64] {
                    run(&|x, sums| super::gpu::add(gpu, lanes, x, None, sums));
                }
                gpu.set_submit_budget(2.0 * 64.0 * n as f64);
                run(&|x, sums| add_squares(x, sums));
                gpu.set_submit_budget(1e9);
            }
        }
    }

    #[test]
    fn both_devices_add_the_squares_of_differences() {
        let (rows, n) = (7, 45);
        let (x, y, before) = (noise(rows * n, 1), noise(rows * n, 2), noise(rows, 3));
        let squares = |row: usize| {
            (0..n).map(|j| (f64::from(x[row * n + j]) - f64::from(y[row * n + j])).powi(2)).sum::<f64>()
        };
        let want: Vec<f32> = (0..rows).map(|row| (f64::from(before[row]) + squares(row)) as f32).collect();
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let tensor = |values: &[f32]| Tensor::from_f32(device, &[rows, n], values.to_vec()).unwrap();
            let mut sums = Tensor::from_f32(device, &[rows], before.clone()).unwrap();
            add_squared_differences(&tensor(&x), &tensor(&y), &mut sums).unwrap();
            let got = pollster::block_on(sums.to_f32()).unwrap();
            assert!(relative_error(&got, &want) < 1e-6, "{}", device.describe());
            assert!(add_squared_differences(&tensor(&x), &sums, &mut tensor(&y)).is_err());
        }
    }
}
