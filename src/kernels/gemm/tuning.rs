//! The start-up measurement: which gemm kernel is fastest here, and how much work 50 ms hold.

use web_time::Instant;

use super::gpu::VARIANTS;
use super::{Mat, Scaling, Target, force, gemm};
use crate::device::{Device, Gpu};
use crate::error::Result;
use crate::tensor::{Elem, Tensor};

/// Seconds of work that one submit should hold: longer ones make the screen stutter, and some
/// systems reset a GPU that is busy for two seconds.
const SUBMIT_SECONDS: f64 = 0.05;

/// Measures the kernels of [`super::variants`] on `device` and keeps the fastest; sets the submit
/// budget to about 50 ms of its speed. Does nothing on the CPU. Takes tens of milliseconds and the
/// compilation of the kernels.
///
/// A software adapter is not asked: barriers are emulated there, and the register kernel wins by
/// far, so only its speed is measured.
///
/// # Errors
/// [`Error::Device`](crate::error::Error::Device) when the device fails.
pub async fn tune(device: &Device) -> Result<()> {
    let Device::Gpu(gpu) = device else { return Ok(()) };
    let software = gpu.summary().software;
    let candidates = if software { 0..1 } else { 0..VARIANTS.len() };
    let shape = if software { [64, 128, 256] } else { [2048, 2048, 256] };
    let mut best = (0.0, 0);
    for index in candidates {
        force(gpu, index);
        let speed = speed(device, gpu, shape).await?;
        if speed > best.0 {
            best = (speed, index);
        }
    }
    let (speed, index) = best;
    force(gpu, index);
    gpu.set_submit_budget((speed * SUBMIT_SECONDS).clamp(1e8, 1e12));
    Ok(())
}

/// Floating-point operations per second over the two forms that take most of a run's time: linear
/// layers (A·Bᵀ) and the Hessian (Aᵀ·B).
async fn speed(device: &Device, gpu: &Gpu, [m, n, k]: [usize; 3]) -> Result<f64> {
    let a = Tensor::zeros(device, Elem::F32, &[m, k])?;
    let b = Tensor::zeros(device, Elem::F32, &[n, k])?;
    let mut c = Tensor::uninit(device, Elem::F32, &[m, n])?;
    let both = |c: &mut Tensor| {
        gemm(Target::of(c), Mat::of(&a), Mat::of(&b).t(), Scaling::SET, None)?;
        let (a, b) =
            (Mat { rows: k, cols: m, ld: m, ..Mat::of(&a) }, Mat { rows: k, cols: n, ld: n, ..Mat::of(&b) });
        gemm(Target::of(c), a.t(), b, Scaling::SET, None)
    };
    // Compiles, and brings the clock of the device up.
    both(&mut c)?;
    gpu.settle().await?;
    // What a wait costs by itself: from microseconds to 100 ms in some browsers.
    let start = Instant::now();
    gpu.settle().await?;
    let wait = start.elapsed().as_secs_f64();
    let mut rounds = 1;
    loop {
        let start = Instant::now();
        for _ in 0..rounds {
            both(&mut c)?;
        }
        gpu.settle().await?;
        let spent = start.elapsed().as_secs_f64();
        if spent > 0.008 + 2.0 * wait || rounds >= 1024 {
            let work = 4.0 * (m * n * k * rounds) as f64;
            return Ok(work / (spent - wait).max(1e-6));
        }
        rounds *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::super::CHOICE;
    use super::*;
    use crate::kernels::testing::test_gpu;

    #[test]
    fn tuning_chooses_a_variant_and_a_plausible_budget() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        gpu.set_submit_budget(1.0);
        pollster::block_on(tune(&device)).unwrap();
        assert!((gpu.tuned(CHOICE).unwrap() as usize) < VARIANTS.len());
        assert!((1e8..=1e12).contains(&gpu.submit_budget()), "{}", gpu.submit_budget());
        assert!(pollster::block_on(tune(&Device::Cpu)).is_ok());
    }
}
