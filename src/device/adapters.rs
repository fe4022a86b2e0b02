//! Which adapters there are, and which one to take.

use crate::error::{Error, Result};

/// What a person sees of an adapter.
#[derive(Debug, Clone, serde::Serialize)]
pub struct AdapterSummary {
    pub name: String,
    pub backend: String,
    pub kind: String,
    pub driver: String,
    /// A program that imitates a GPU on the CPU: correct, but many times slower than the CPU device.
    pub software: bool,
    pub max_buffer_bytes: u64,
    pub max_binding_bytes: u64,
    pub workgroup_storage_bytes: u32,
}

/// Which adapter to open.
#[derive(Debug, Clone, Default)]
pub struct AdapterChoice {
    /// A part of the name, in any case; `None` takes the fastest kind there is.
    pub name: Option<String>,
    /// Whether a software adapter may be taken when no name asks for it.
    pub allow_software: bool,
}

/// The entry to WebGPU, restricted to what browsers offer too, so that native runs find what a
/// browser would refuse.
pub fn instance() -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.backends = wgpu::Backends::PRIMARY;
    descriptor.flags |= wgpu::InstanceFlags::STRICT_WEBGPU_COMPLIANCE;
    wgpu::Instance::new(descriptor)
}

pub(super) fn summarize(adapter: &wgpu::Adapter) -> AdapterSummary {
    let info = adapter.get_info();
    let limits = adapter.limits();
    AdapterSummary {
        software: is_software(&info),
        backend: info.backend.to_string(),
        kind: format!("{:?}", info.device_type),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        name: if info.name.is_empty() { "browser adapter".to_owned() } else { info.name },
        max_buffer_bytes: limits.max_buffer_size,
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        workgroup_storage_bytes: limits.max_compute_workgroup_storage_size,
    }
}

fn is_software(info: &wgpu::AdapterInfo) -> bool {
    let name = info.name.to_lowercase();
    info.device_type == wgpu::DeviceType::Cpu
        || ["llvmpipe", "swiftshader", "lavapipe", "basic render"].iter().any(|word| name.contains(word))
}

async fn adapters() -> Vec<wgpu::Adapter> {
    instance().enumerate_adapters(wgpu::Backends::PRIMARY).await
}

/// Every adapter that wgpu finds.
pub async fn list_adapters() -> Vec<AdapterSummary> {
    adapters().await.iter().map(summarize).collect()
}

/// The adapter that `choice` means: hardware before software, discrete before integrated.
///
/// # Errors
/// [`Error::Device`] when nothing matches, naming what there is.
pub async fn pick_adapter(choice: &AdapterChoice) -> Result<wgpu::Adapter> {
    #[cfg(target_arch = "wasm32")]
    {
        // A browser shows one adapter only and never lists them.
        let options = wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            ..Default::default()
        };
        let adapter = instance().request_adapter(&options).await.map_err(|error| {
            Error::device("opening WebGPU", error, "Use a browser with WebGPU, or the CPU device")
        })?;
        if is_software(&adapter.get_info()) && !choice.allow_software {
            return Err(Error::device(
                "opening WebGPU",
                "the browser offers only software rendering, which is slower than the CPU device",
                "Use the CPU device, or allow the software adapter",
            ));
        }
        Ok(adapter)
    }
    #[cfg(not(target_arch = "wasm32"))]
    {
        let found = adapters().await;
        let names: Vec<String> = found.iter().map(|adapter| summarize(adapter).name).collect();
        let wanted = choice.name.as_ref().map(|name| name.to_lowercase());
        let rank = |info: &wgpu::AdapterInfo| match info.device_type {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other => 3,
            wgpu::DeviceType::Cpu => 4,
        };
        found
            .into_iter()
            .filter(|adapter| {
                let info = adapter.get_info();
                match &wanted {
                    Some(name) => info.name.to_lowercase().contains(name),
                    None => choice.allow_software || !is_software(&info),
                }
            })
            .min_by_key(|adapter| rank(&adapter.get_info()))
            .ok_or_else(|| {
                let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                match &choice.name {
                    Some(name) => Error::device(
                        "choosing an adapter",
                        format!("no adapter's name contains \"{name}\" (found: {there})"),
                        "Run `halftone adapters` for the list, or use --device cpu",
                    ),
                    None => Error::device(
                        "choosing an adapter",
                        format!("no hardware adapter (found: {there})"),
                        "Install a Vulkan, Metal or DX12 driver, use --device cpu, \
                         or name a software adapter with --adapter",
                    ),
                }
            })
    }
}
