//! The gate of a gated MLP: silu(gate) · up, with silu(x) = x / (1 + e⁻ˣ).

use super::parallel::for_chunks;
use super::simd::{exp, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{Elem, Tensor};

/// Elements per piece of parallel work.
const PIECE: usize = 1 << 14;

/// silu(gate) · up, element by element, in the memory of `gate`; both f32 of one shape.
///
/// # Errors
/// [`Error::Internal`] when the shapes differ.
pub fn swiglu(mut gate: Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.len() != up.len() || !gate.device().same(up.device()) {
        return Err(Error::Internal(format!("swiglu: {:?} and {:?}", gate.shape(), up.shape())));
    }
    match gate.device() {
        Device::Cpu => {
            let up = up.f32s()?;
            for_chunks(gate.f32s_mut()?, PIECE, |piece, gate| {
                let start = piece * PIECE;
                gated(gate, &up[start..start + gate.len()]);
            });
        }
        Device::Gpu(gpu) => gpu::swiglu(gpu, &gate, up)?,
    }
    Ok(gate)
}

/// silu(gate) · up [tokens, n] of f32 rows [tokens, 2·n] that hold the gate first and up after it, as
/// one linear layer for both makes them.
///
/// # Errors
/// [`Error::Internal`] when rows have no halves; [`Error::Unsupported`] for an n that is not a
/// multiple of 4 on a GPU.
pub fn swiglu_halves(x: &Tensor) -> Result<Tensor> {
    let n = x.cols() / 2;
    if n == 0 || !x.cols().is_multiple_of(2) {
        return Err(Error::Internal(format!("swiglu: {:?} has no halves", x.shape())));
    }
    let mut y = Tensor::uninit(x.device(), Elem::F32, &[x.rows(), n])?;
    match x.device() {
        Device::Cpu => {
            let x = x.f32s()?;
            let rows = (PIECE / n).max(1);
            for_chunks(y.f32s_mut()?, rows * n, |piece, y| {
                for (y, x) in y.chunks_mut(n).zip(x[piece * rows * 2 * n..].chunks(2 * n)) {
                    let (gate, up) = x.split_at(n);
                    y.copy_from_slice(gate);
                    gated(y, up);
                }
            });
        }
        Device::Gpu(gpu) => gpu::swiglu_halves(gpu, x, &y)?,
    }
    Ok(y)
}

multiversion! {
    fn gated(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
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
        quads: u32,
        row_quads: u32,
    }

    const SWIGLU: Kernel = Kernel {
        name: "swiglu",
        source: include_str!("../../shaders/swiglu.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&SWIGLU, size_of::<Params>())];

    pub fn swiglu(gpu: &Gpu, gate: &Tensor, up: &Tensor) -> Result<()> {
        // The last quad may reach into the padding that every buffer has.
        let quads = gate.len().div_ceil(4) as u32;
        dispatch(gpu, up, gate, Params { quads, row_quads: 0 })
    }

    pub fn swiglu_halves(gpu: &Gpu, x: &Tensor, y: &Tensor) -> Result<()> {
        let row_quads = whole_quads("swiglu", "row", y.cols(), 4)?;
        dispatch(gpu, x, y, Params { quads: row_quads * y.rows() as u32, row_quads })
    }

    fn dispatch(gpu: &Gpu, x: &Tensor, y: &Tensor, params: Params) -> Result<()> {
        gpu.dispatch(
            &SWIGLU,
            &[("HALVES", u8::from(params.row_quads > 0).into())],
            &[x.gpu()?, y.gpu()?],
            bytemuck::bytes_of(&params),
            gpu.unfold((params.quads as usize).div_ceil(GROUP)),
            40.0 * f64::from(params.quads),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    #[test]
    fn both_devices_agree_with_the_definition_far_from_zero_too() {
        let gate: Vec<f32> = noise(199 * 101, 1).iter().map(|x| x * 120.0).collect();
        let up = noise(199 * 101, 2);
        let want: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(&g, &u)| (f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u)) as f32)
            .collect();
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let gate = Tensor::from_f32(device, &[199, 101], gate.clone()).unwrap();
            let up = Tensor::from_f32(device, &[199, 101], up.clone()).unwrap();
            let got = pollster::block_on(swiglu(gate, &up).unwrap().to_f32()).unwrap();
            assert!(relative_error(&got, &want) < 1e-6);
        }
    }

    #[test]
    fn halves_of_rows_give_what_two_tensors_give() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            for (rows, n) in [(1, 4), (3, 72), (70, 300)] {
                let x = noise(rows * 2 * n, 3);
                let half = |first: usize| {
                    let part = x.chunks(n).skip(first).step_by(2).flatten().copied().collect();
                    Tensor::from_f32(device, &[rows, n], part).unwrap()
                };
                let want = swiglu(half(0), &half(1)).unwrap();
                let got = swiglu_halves(&Tensor::from_f32(device, &[rows, 2 * n], x.clone()).unwrap());
                let [got, want] = [got.unwrap(), want].map(|y| pollster::block_on(y.to_f32()).unwrap());
                assert_eq!(got, want, "{}: {rows}×{n}", device.describe());
            }
        }
    }
}
