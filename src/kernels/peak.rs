//! The most likely token and the normalizer of a row of logits, found where the logits are.

use super::simd::{exp, largest, multiversion, sum};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

/// What is read back of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// The token with the largest logit, the smallest such id.
    pub id: u32,
    /// Its logit times the scale.
    pub largest: f32,
    /// ln Σ exp(scale · logit), if it was asked for.
    pub log_sum: Option<f32>,
}

/// Of `logits` [vocab] (f32), each times `scale` (one over the temperature), and with `log_sum` also
/// their normalizer.
///
/// # Errors
/// [`Error::Numeric`] when no logit is a finite number; [`Error::Internal`] when there are none.
pub async fn peak(logits: &Tensor, scale: f32, log_sum: bool) -> Result<Peak> {
    if logits.is_empty() || scale <= 0.0 {
        return Err(Error::Internal(format!("peak: {:?} times {scale}", logits.shape())));
    }
    let (most, id, total) = match logits.device() {
        Device::Cpu => {
            let values = logits.f32s()?;
            let most = most(values);
            let id = values.iter().position(|&x| x == most).map_or(u32::MAX, |id| id as u32);
            (most * scale, id, if log_sum { total(values, scale, most * scale) } else { 1.0 })
        }
        Device::Gpu(gpu) => {
            let found = gpu::peak(gpu, logits, scale, log_sum)?.to_u32().await?;
            (f32::from_bits(found[0]), found[1], f32::from_bits(found[2]))
        }
    };
    let log_sum = log_sum.then(|| most + total.ln());
    if id as usize >= logits.len() || !most.is_finite() || log_sum.is_some_and(|sum| !sum.is_finite()) {
        return Err(Error::numeric(
            "the model's logits",
            "they are not finite",
            "The weights are damaged or overflow in 32-bit arithmetic",
        ));
    }
    Ok(Peak { id, largest: most, log_sum })
}

multiversion! {
    fn most(values: &[f32]) -> f32 {
        largest(values, |x| x)
    }
}

multiversion! {
    fn total(values: &[f32], scale: f32, most: f32) -> f32 {
        sum(values, |x| exp(x * scale - most))
    }
}

pub use gpu::KERNELS;

mod gpu {
    use std::rc::Rc;

    use super::*;
    use crate::device::{Access, Gpu, Kernel};
    use crate::kernels::cut::GROUP;
    use crate::kernels::registry::Registered;
    use crate::tensor::Elem;

    #[repr(C)]
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    struct Params {
        count: u32,
        outputs: u32,
        scale: f32,
    }

    const PEAK: Kernel = Kernel {
        name: "peak",
        source: include_str!("../../shaders/peak.wgsl"),
        bindings: &[Access::Read, Access::ReadWrite],
    };

    /// For [`crate::kernels::registry`].
    pub const KERNELS: &[Registered] = &[(&PEAK, size_of::<Params>())];

    /// What one thread folds in a round.
    const STRIP: usize = 64;

    /// [4] of u32: see the shader's `result`.
    pub fn peak(gpu: &Rc<Gpu>, logits: &Tensor, scale: f32, sums: bool) -> Result<Tensor> {
        let mut count = logits.len();
        let mut found: Option<Tensor> = None;
        loop {
            let outputs = count.div_ceil(STRIP);
            let result = Tensor::uninit(logits.device(), Elem::U32, &[outputs, 4])?;
            let params = Params { count: count as u32, outputs: outputs as u32, scale };
            let first = found.is_none();
            gpu.dispatch(
                &PEAK,
                &[("FIRST", f64::from(u8::from(first))), ("SUMS", f64::from(u8::from(sums)))],
                &[found.as_ref().unwrap_or(logits).gpu()?, result.gpu()?],
                bytemuck::bytes_of(&params),
                gpu.unfold(outputs.div_ceil(GROUP)),
                8.0 * count as f64,
            )?;
            if outputs == 1 {
                return Ok(result);
            }
            (count, found) = (outputs, Some(result));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{noise, test_gpu};

    fn run(device: &Device, values: &[f32], scale: f32, log_sum: bool) -> Result<Peak> {
        let logits = Tensor::from_f32(device, &[values.len()], values.to_vec()).unwrap();
        pollster::block_on(peak(&logits, scale, log_sum))
    }

    #[test]
    fn both_devices_agree_with_the_definition_at_every_length() {
        let gpu = test_gpu();
        for len in [1, 2, 63, 64, 65, 4096, 5000, 49_152] {
            let mut values: Vec<f32> = noise(len, len as u64).iter().map(|x| 8.0 * x).collect();
            // A tie: the smaller id wins.
            values[len / 2] = 9.0;
            values[len - 1] = 9.0;
            for scale in [1.0, 1.7] {
                let sum: f64 = values.iter().map(|&x| (f64::from(x) * f64::from(scale)).exp()).sum();
                for device in [Some(Device::Cpu), gpu.clone()].iter().flatten() {
                    let got = run(device, &values, scale, true).unwrap();
                    assert_eq!((got.id, got.largest), ((len / 2) as u32, 9.0 * scale), "{len}");
                    assert!((f64::from(got.log_sum.unwrap()) - sum.ln()).abs() < 2e-5, "{len}: {got:?}");
                    let plain = run(device, &values, scale, false).unwrap();
                    assert_eq!(plain, Peak { log_sum: None, ..got });
                }
            }
        }
    }

    #[test]
    fn logits_that_are_not_numbers_are_an_error() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let error = run(device, &[f32::NAN; 70], 1.0, false).unwrap_err();
            assert!(matches!(error, Error::Numeric { .. }), "{error}");
        }
        let one = [vec![0.0; 40], vec![f32::NAN], vec![0.0; 40]].concat();
        assert!(run(&Device::Cpu, &one, 1.0, true).is_err());
        assert!(run(&Device::Cpu, &[f32::INFINITY, 0.0], 1.0, false).is_err());
    }
}
