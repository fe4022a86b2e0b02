//! How long a run will take, from a short measurement.

use web_time::Instant;

use super::plan::Plan;
use crate::device::Device;
use crate::error::Result;
use crate::kernels::gemm::linear;
use crate::tensor::Tensor;

/// Floating-point operations a second of this device's matrix product; takes a second at most.
///
/// # Errors
/// Those of the device.
pub async fn speed(device: &Device) -> Result<f64> {
    let (m, n) = (512, 1024);
    let x = Tensor::from_f32(device, &[m, n], vec![0.5; m * n])?;
    let w = Tensor::from_f32(device, &[n, n], vec![0.25; n * n])?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let begun = Instant::now();
        linear(&x, &w, None)?;
        device.settle().await?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok(2.0 * (m * n * n) as f64 / best)
}

/// Seconds that a run takes on a device of this [`speed`], with those before it where bits are measured.
pub fn seconds(plan: &Plan, speed: f64) -> f64 {
    // Norms, attention and scale search run beside the products; measured, they add about half.
    let of = |flops: f64| flops / speed * 1.5;
    of(plan.flops) + plan.measuring_seconds.unwrap_or(of(plan.measuring_flops))
}
