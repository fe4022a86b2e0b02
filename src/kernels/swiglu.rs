//! The gate of a gated MLP: silu(gate) · up, with silu(x) = x / (1 + e⁻ˣ).

use super::parallel::for_chunks;
use super::simd::{exp, multiversion};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

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
    use crate::kernels::cut::GROUP;
    use crate::kernels::registry::Registered;

    const SWIGLU: Kernel = Kernel {
        name: "swiglu",
        source: include_str!("../../shaders/swiglu.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&SWIGLU, size_of::<u32>())];

    pub fn swiglu(gpu: &Gpu, gate: &Tensor, up: &Tensor) -> Result<()> {
        // The last quad may reach into the padding that every buffer has.
        let quads = gate.len().div_ceil(4);
        gpu.dispatch(
            &SWIGLU,
            &[],
            &[up.gpu()?, gate.gpu()?],
            bytemuck::bytes_of(&(quads as u32)),
            gpu.unfold(quads.div_ceil(GROUP)),
            10.0 * gate.len() as f64,
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
}
