//! What kernel tests share: devices to run on and numbers to run with.

use crate::device::{AdapterChoice, Device, Gpu, GpuOptions, pick_adapter};

/// The adapter that kernel tests run on: a software one (or the one named by
/// `HALFTONE_TEST_ADAPTER`) under WebGPU's default limits. `None` where there is none, unless
/// `HALFTONE_REQUIRE_ADAPTER` says that there must be one, as in continuous integration.
pub fn test_gpu() -> Option<Device> {
    let name = std::env::var("HALFTONE_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let choice = AdapterChoice { name: Some(name), allow_software: true };
    let opened = pollster::block_on(async {
        let adapter = pick_adapter(&choice).await?;
        Gpu::open(&adapter, &GpuOptions { default_limits: true }).await
    });
    match opened {
        Ok(gpu) => Some(Device::Gpu(gpu)),
        Err(error) => {
            assert!(std::env::var_os("HALFTONE_REQUIRE_ADAPTER").is_none(), "no test adapter: {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Uniform numbers in −1..1, the same for the same seed.
pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        })
        .collect()
}

/// The largest difference, relative to the largest magnitude of `want`.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(1e-30f32, |max, x| max.max(x.abs()));
    got.iter()
        .zip(want)
        .fold(0f32, |max, (g, w)| if g.is_finite() { max.max((g - w).abs()) } else { f32::INFINITY })
        / largest
}
