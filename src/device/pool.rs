//! Storage buffers and their reuse.
//!
//! On the web dropping a buffer frees nothing until the page's garbage collector runs, so buffers
//! are kept for reuse and destroyed by name when too many lie idle.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::Gpu;

/// A storage buffer that goes back to its device's pool when dropped.
pub struct GpuBuffer {
    pub(super) gpu: Rc<Gpu>,
    /// Always present; taken only while dropping.
    pub(super) raw: Option<wgpu::Buffer>,
    bytes: u64,
}

impl GpuBuffer {
    pub(super) fn new(gpu: Rc<Gpu>, raw: wgpu::Buffer, bytes: u64) -> Self {
        Self { gpu, raw: Some(raw), bytes }
    }

    pub(super) fn raw(&self) -> &wgpu::Buffer {
        self.raw.as_ref().expect("a buffer is taken only by drop")
    }

    pub fn gpu(&self) -> &Rc<Gpu> {
        &self.gpu
    }

    /// Bytes asked for, a multiple of 4; the buffer behind may be larger.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            self.gpu.give_back(raw);
        }
    }
}

/// Idle buffers by size, and how much memory is out.
#[derive(Default)]
pub(super) struct Pool {
    idle: BTreeMap<u64, Vec<wgpu::Buffer>>,
    idle_bytes: u64,
    pub live_bytes: u64,
    pub peak_bytes: u64,
}

impl Pool {
    /// Sizes are rounded up so that buffers of nearly equal size can stand in for each other:
    /// eight steps per doubling waste at most an eighth.
    pub fn size_class(bytes: u64, largest: u64) -> u64 {
        let bytes = bytes.max(256);
        let step = (bytes.next_power_of_two() / 16).max(256);
        bytes.div_ceil(step).saturating_mul(step).min(largest.max(bytes))
    }

    pub fn take(&mut self, size: u64) -> Option<wgpu::Buffer> {
        self.live_bytes += size;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes + self.idle_bytes);
        let list = self.idle.get_mut(&size)?;
        let buffer = list.pop();
        if list.is_empty() {
            self.idle.remove(&size);
        }
        if buffer.is_some() {
            self.idle_bytes -= size;
        }
        buffer
    }

    pub fn put(&mut self, buffer: wgpu::Buffer) {
        let size = buffer.size();
        self.live_bytes -= size;
        self.idle_bytes += size;
        self.idle.entry(size).or_default().push(buffer);
    }

    pub fn idle_bytes(&self) -> u64 {
        self.idle_bytes
    }

    /// Everything that lies idle, to be destroyed once no recorded work uses it.
    pub fn drain(&mut self) -> Vec<wgpu::Buffer> {
        self.idle_bytes = 0;
        std::mem::take(&mut self.idle).into_values().flatten().collect()
    }
}
