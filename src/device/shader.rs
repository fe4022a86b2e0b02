//! WGSL sources, their one directive, and the pipelines made of them.

use crate::error::{Error, Result};

/// How a kernel uses a storage buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    ReadWrite,
}

/// A compute kernel: `shaders/<name>.wgsl`, entry point `main`.
///
/// Binding 0 is the uniform block of parameters, at a dynamic offset into an arena; bindings 1, 2, …
/// are storage buffers with the given access.
#[derive(Debug)]
pub struct Kernel {
    pub name: &'static str,
    pub source: &'static str,
    pub bindings: &'static [Access],
}

/// The files that `#import name` may name.
const SHARED: &[(&str, &str)] = &[
    ("gemm_a", include_str!("../../shaders/shared/gemm_a.wgsl")),
    ("gemm_b", include_str!("../../shaders/shared/gemm_b.wgsl")),
    ("gemm_packed", include_str!("../../shaders/shared/gemm_packed.wgsl")),
    ("gemm_params", include_str!("../../shaders/shared/gemm_params.wgsl")),
    ("gemm_store", include_str!("../../shaders/shared/gemm_store.wgsl")),
    ("gemv", include_str!("../../shaders/shared/gemv.wgsl")),
    ("qcodes", include_str!("../../shaders/shared/qcodes.wgsl")),
    ("reduce", include_str!("../../shaders/shared/reduce.wgsl")),
    ("round_scale", include_str!("../../shaders/shared/round_scale.wgsl")),
    ("unpack", include_str!("../../shaders/shared/unpack.wgsl")),
];

/// Replaces each line `#import name` by the text of `shaders/shared/name.wgsl`.
///
/// # Errors
/// [`Error::Internal`] when there is no such file.
pub fn resolve_imports(source: &str) -> Result<String> {
    let mut text = String::with_capacity(source.len() + 1024);
    for line in source.lines() {
        match line.strip_prefix("#import ") {
            None => text.push_str(line),
            Some(name) => {
                let (_, body) = SHARED
                    .iter()
                    .find(|(shared, _)| *shared == name.trim())
                    .ok_or_else(|| Error::Internal(format!("no shaders/shared/{name}.wgsl")))?;
                text.push_str(body);
            }
        }
        text.push('\n');
    }
    Ok(text)
}

/// A compiled kernel with its layout.
pub(super) struct Pipeline {
    pub raw: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

impl Pipeline {
    pub fn new(device: &wgpu::Device, kernel: &Kernel, constants: &[(&str, f64)]) -> Result<Self> {
        let entry = |binding: u32, ty| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: binding == 0, min_binding_size: None },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        for (index, access) in kernel.bindings.iter().enumerate() {
            let read_only = *access == Access::Read;
            entries.push(entry(index as u32 + 1, wgpu::BufferBindingType::Storage { read_only }));
        }
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(kernel.name),
            entries: &entries,
        });
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(kernel.name),
            source: wgpu::ShaderSource::Wgsl(resolve_imports(kernel.source)?.into()),
        });
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let raw = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants,
                // Every kernel writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Ok(Self { raw, layout })
    }
}
