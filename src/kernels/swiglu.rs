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
        Device::Gpu(_) => return Err(Error::Internal("swiglu has no GPU kernel yet".into())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, relative_error};

    #[test]
    fn the_cpu_twin_agrees_with_the_definition_far_from_zero_too() {
        let gate: Vec<f32> = noise(20_000, 1).iter().map(|x| x * 120.0).collect();
        let up = noise(20_000, 2);
        let want: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(&g, &u)| (f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u)) as f32)
            .collect();
        let gate = Tensor::from_f32(&Device::Cpu, &[200, 100], gate).unwrap();
        let up = Tensor::from_f32(&Device::Cpu, &[200, 100], up).unwrap();
        let got = swiglu(gate, &up).unwrap();
        assert!(relative_error(got.f32s().unwrap(), &want) < 1e-6);
    }
}
