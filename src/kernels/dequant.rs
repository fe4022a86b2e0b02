//! Weights from codes: ŵ[r][k] = scale[r][g]·(code[r][k] − zero[r][g]) with g = group_of[k].

use super::parallel::for_chunks;
use super::scales::Grid;
use super::simd::multiversion;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// `codes` u8 [rows, n], `group_of` u32 [n] → f32 [rows, n]. Exact: an f16 scale times a small
/// integer has at most 19 significant bits.
///
/// # Errors
/// [`Error::Internal`] when shapes do not fit.
pub fn dequantize(codes: &Tensor, grid: &Grid, group_of: &Tensor) -> Result<Tensor> {
    let (rows, n) = (codes.rows(), codes.cols());
    if group_of.len() != n || grid.scales.rows() != rows {
        return Err(Error::Internal("dequant: shapes do not fit".into()));
    }
    let mut out = Tensor::uninit(codes.device(), Elem::F32, &[rows, n])?;
    match codes.device().clone() {
        Device::Cpu => {
            let (codes, group_of, groups) = (codes.u8s()?, group_of.u32s()?, grid.groups());
            let (scales, zeros) = (grid.scales.f32s()?, grid.zeros.f32s()?);
            for_chunks(out.f32s_mut()?, n, |row, out| {
                let mut start = 0;
                for run in group_of.chunk_by(|a, b| a == b) {
                    let (end, at) = (start + run.len(), row * groups + run[0] as usize);
                    let codes = &codes[row * n + start..row * n + end];
                    widen(&mut out[start..end], codes, scales[at], zeros[at]);
                    start = end;
                }
            });
        }
        Device::Gpu(gpu) => gpu::dequantize(&gpu, codes, grid, group_of, &mut out)?,
    }
    Ok(out)
}

multiversion! {
    fn widen(out: &mut [f32], codes: &[u8], scale: f32, zero: f32) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = scale * (f32::from(code) - zero);
        }
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
        groups: u32,
        first: u32,
        end: u32,
    }

    const DEQUANT: Kernel = Kernel {
        name: "dequant",
        source: include_str!("../../shaders/dequant.wgsl"),
        bindings: &[Access::Read, Access::Read, Access::Read, Access::Read, Access::ReadWrite],
    };

    pub const KERNELS: &[Registered] = &[(&DEQUANT, size_of::<Params>())];

    pub fn dequantize(
        gpu: &Gpu,
        codes: &Tensor,
        grid: &Grid,
        group_of: &Tensor,
        out: &mut Tensor,
    ) -> Result<()> {
        for part in ranges(gpu, out.len(), ELEMENT) {
            let params = Params {
                n: codes.cols() as u32,
                groups: grid.groups() as u32,
                first: part.start as u32,
                end: part.end as u32,
            };
            gpu.dispatch(
                &DEQUANT,
                &[],
                &[codes.gpu()?, grid.scales.gpu()?, grid.zeros.gpu()?, group_of.gpu()?, out.gpu()?],
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
    fn both_devices_give_exactly_the_definition() {
        let gpu = test_gpu();
        for (rows, n, groups) in [(5, 32, 4), (3, 13, 2), (1, 1, 1)] {
            let codes: Vec<u8> = noise(rows * n, 1).iter().map(|x| (127.5 * (x + 1.0)) as u8).collect();
            let scales: Vec<f32> =
                noise(rows * groups, 2).iter().map(|&x| half::f16::from_f32(x).to_f32()).collect();
            let zeros: Vec<f32> = (0..rows * groups).map(|i| (i % 256) as f32).collect();
            // Not in order, as act-order has them.
            let group_of: Vec<u32> = (0..n).map(|k| (k * 7 % groups) as u32).collect();
            let want: Vec<f32> = (0..rows * n)
                .map(|i| {
                    let at = i / n * groups + group_of[i % n] as usize;
                    scales[at] * (f32::from(codes[i]) - zeros[at])
                })
                .collect();
            for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                for budget in [1e9, 10.0 * 64.0] {
                    if let Device::Gpu(gpu) = device {
                        gpu.set_submit_budget(budget);
                    }
                    let grid = Grid {
                        scales: Tensor::from_f32(device, &[rows, groups], scales.clone()).unwrap(),
                        zeros: Tensor::from_f32(device, &[rows, groups], zeros.clone()).unwrap(),
                    };
                    let codes = Tensor::from_bytes(device, Elem::U8, &[rows, n], &codes).unwrap();
                    let group_of = Tensor::from_u32(device, &[n], group_of.clone()).unwrap();
                    let got = dequantize(&codes, &grid, &group_of).unwrap();
                    assert_eq!(pollster::block_on(got.to_f32()).unwrap(), want);
                }
            }
        }
    }
}
