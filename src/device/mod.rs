//! Where arithmetic happens: the CPU, or a GPU through wgpu.
//!
//! A [`Device`] is a cheap handle. Operations are not here but in `kernels/`, each with a WGSL form
//! and a CPU twin; this module only opens adapters, keeps buffers, and gets dispatches to the queue.

mod adapters;
mod faults;
mod gpu;
pub mod host;
mod pool;
mod shader;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use crate::error::Result;

pub use adapters::{AdapterChoice, AdapterSummary, instance, list_adapters, pick_adapter};
pub use gpu::{Gpu, GpuOptions};
pub use pool::GpuBuffer;
pub use shader::{Access, Kernel, resolve_imports};

/// What runs the operations.
#[derive(Clone)]
pub enum Device {
    Cpu,
    Gpu(Rc<Gpu>),
}

impl Device {
    pub fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// A name for tables and messages, for example `cpu` or `llvmpipe (Vulkan)`.
    pub fn describe(&self) -> String {
        match self {
            Self::Cpu => "cpu".to_owned(),
            Self::Gpu(gpu) => gpu.describe(),
        }
    }

    /// Waits until everything submitted so far has run, and reports what went wrong in it.
    /// Nothing else bounds how far the host may run ahead of a browser's queue, so the pipeline
    /// calls this once per micro-batch.
    pub async fn settle(&self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            Self::Gpu(gpu) => gpu.settle().await,
        }
    }

    /// The largest tensor, in bytes, that one kernel may bind.
    pub fn max_tensor_bytes(&self) -> u64 {
        match self {
            Self::Cpu => u64::MAX,
            Self::Gpu(gpu) => gpu.max_binding(),
        }
    }

    /// Two handles to the same device.
    pub fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Cpu, Self::Cpu) => true,
            (Self::Gpu(a), Self::Gpu(b)) => Rc::ptr_eq(a, b),
            _ => false,
        }
    }
}
