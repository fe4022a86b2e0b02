//! One open wgpu device: dispatches are collected, sent in bounded batches, and read back once.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use super::adapters::{AdapterSummary, summarize};
use super::faults::{About, Faults, Watched};
use super::pool::{GpuBuffer, Pool};
use super::shader::{Kernel, Pipeline};
use crate::error::{Error, Result};

/// Dispatches in one pass; more made macOS stall.
const MAX_DISPATCHES: usize = 64;
/// One uniform slot per dispatch; WebGPU wants dynamic offsets in multiples of 256.
const SLOT_BYTES: usize = 256;
/// Uploads and readbacks move in pieces of this size, so that no staging buffer is model-sized.
const PIECE_BYTES: u64 = 32 << 20;
/// Buffers from this size on are made in an error scope, so that a failure comes with their size.
const WATCHED_BYTES: u64 = 1 << 20;
/// Idle buffers beyond this are destroyed at the next wait.
const MAX_IDLE_BYTES: u64 = 512 << 20;
#[cfg(not(target_arch = "wasm32"))]
const MAX_IN_FLIGHT: usize = 3;

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct GpuOptions {
    /// Keep to WebGPU's default limits although the adapter offers more; tests do.
    pub default_limits: bool,
}

type PipelineKey = (&'static str, Vec<(String, u64)>);

struct Recorded {
    pipeline: Rc<Pipeline>,
    bind_group: wgpu::BindGroup,
    groups: [u32; 3],
}

#[derive(Default)]
struct Batch {
    recorded: Vec<Recorded>,
    params: Vec<u8>,
    cost: f64,
}

/// An open GPU.
pub struct Gpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    summary: AdapterSummary,
    limits: wgpu::Limits,
    arena: wgpu::Buffer,
    pipelines: RefCell<HashMap<PipelineKey, Rc<Pipeline>>>,
    batch: RefCell<Batch>,
    pool: RefCell<Pool>,
    faults: Arc<Mutex<Faults>>,
    /// Scopes that are closed and not yet awaited.
    watched: RefCell<Vec<Watched>>,
    /// Work, in floating-point operations, after which a batch is sent: about 50 ms' worth.
    submit_budget: Cell<f64>,
    #[cfg(not(target_arch = "wasm32"))]
    in_flight: RefCell<std::collections::VecDeque<wgpu::SubmissionIndex>>,
    dispatched: Cell<u64>,
    /// What start-up measurements chose, by name of the choice.
    tuning: RefCell<HashMap<&'static str, u32>>,
}

impl Gpu {
    /// Opens `adapter`, asking for no more than it has.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver refuses.
    pub async fn open(adapter: &wgpu::Adapter, options: &GpuOptions) -> Result<Rc<Self>> {
        let summary = summarize(adapter);
        let defaults = wgpu::Limits::default();
        let offered = adapter.limits();
        let limits = if options.default_limits {
            defaults
        } else {
            // 1 GiB is as much as any kernel here profits from; asking for more only makes
            // drivers reserve address space.
            wgpu::Limits {
                max_buffer_size: offered.max_buffer_size.min(1 << 30),
                max_storage_buffer_binding_size: offered.max_storage_buffer_binding_size.min(1 << 30),
                max_compute_workgroup_storage_size: offered.max_compute_workgroup_storage_size.min(32 << 10),
                ..defaults
            }
        };
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("halftone"),
            required_limits: limits.clone(),
            ..Default::default()
        };
        let (device, queue) = adapter.request_device(&descriptor).await.map_err(|error| {
            Error::device(
                format!("opening {}", summary.name),
                error,
                "Update the graphics driver or use the CPU device",
            )
        })?;
        let faults = Arc::new(Mutex::new(Faults::default()));
        let slot = faults.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            Faults::record(&slot, About::uncaptured(&error), &error.to_string());
        }));
        let slot = faults.clone();
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                let text = format!("the device was lost ({reason:?}): {message}");
                Faults::record(&slot, About::Lost, &text);
            }
        });
        let arena = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("parameters"),
            size: (MAX_DISPATCHES * SLOT_BYTES) as u64,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let submit_budget = Cell::new(if summary.software { 5e8 } else { 1e10 });
        Ok(Rc::new(Self {
            device,
            queue,
            summary,
            limits,
            arena,
            pipelines: RefCell::default(),
            batch: RefCell::default(),
            pool: RefCell::default(),
            faults,
            watched: RefCell::default(),
            submit_budget,
            #[cfg(not(target_arch = "wasm32"))]
            in_flight: RefCell::default(),
            dispatched: Cell::default(),
            tuning: RefCell::default(),
        }))
    }

    pub fn summary(&self) -> &AdapterSummary {
        &self.summary
    }

    pub fn describe(&self) -> String {
        format!("{} ({})", self.summary.name, self.summary.backend)
    }

    pub fn limits(&self) -> &wgpu::Limits {
        &self.limits
    }

    pub fn max_binding(&self) -> u64 {
        self.limits.max_storage_buffer_binding_size.min(self.limits.max_buffer_size)
    }

    /// Floating-point operations that one submit may hold; kernels split larger work.
    pub fn submit_budget(&self) -> f64 {
        self.submit_budget.get()
    }

    pub fn set_submit_budget(&self, flops: f64) {
        self.submit_budget.set(flops);
    }

    /// The outcome of a start-up measurement, made by `measure` on first use.
    pub fn tuned(&self, choice: &'static str) -> Option<u32> {
        self.tuning.borrow().get(choice).copied()
    }

    pub fn set_tuned(&self, choice: &'static str, value: u32) {
        self.tuning.borrow_mut().insert(choice, value);
    }

    /// Dispatches recorded so far.
    pub fn dispatches(&self) -> u64 {
        self.dispatched.get()
    }

    /// Bytes in buffers handed out, and the most there ever were (idle ones included).
    pub fn memory(&self) -> (u64, u64) {
        let pool = self.pool.borrow();
        (pool.live_bytes, pool.peak_bytes)
    }

    /// A storage buffer of at least `bytes`, with whatever content an earlier use left.
    ///
    /// # Errors
    /// [`Error::Device`] when it is larger than one binding may be.
    pub fn alloc(self: &Rc<Self>, bytes: u64) -> Result<GpuBuffer> {
        let bytes = bytes.next_multiple_of(16).max(16);
        if bytes > self.max_binding() {
            return Err(Error::device(
                "allocating a buffer",
                format!("{bytes} bytes are more than the {} that one binding may have", self.max_binding()),
                "Use another adapter or the CPU device",
            ));
        }
        let size = Pool::size_class(bytes, self.max_binding());
        let reused = self.pool.borrow_mut().take(size);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let raw = reused.unwrap_or_else(|| self.create_buffer("tensor", size, usage));
        Ok(GpuBuffer::new(self.clone(), raw, bytes))
    }

    /// A new buffer, a large one in a scope of its own.
    fn create_buffer(&self, label: &str, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let descriptor =
            wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation: false };
        match size < WATCHED_BYTES {
            true => self.device.create_buffer(&descriptor),
            false => self.watch(About::Buffer(size), wgpu::ErrorFilter::OutOfMemory, || {
                self.device.create_buffer(&descriptor)
            }),
        }
    }

    /// Does `work` in an error scope, whose outcome the next wait tells.
    fn watch<T>(&self, about: About, filter: wgpu::ErrorFilter, work: impl FnOnce() -> T) -> T {
        let scope = self.device.push_error_scope(filter);
        let done = work();
        self.watched.borrow_mut().push(Watched { about, outcome: Box::pin(scope.pop()) });
        done
    }

    /// Recorded work may still use the buffer: it runs before anything recorded later, so handing
    /// the buffer out again is safe; only writes by the queue must wait (see [`Gpu::upload`]).
    pub(super) fn give_back(&self, raw: wgpu::Buffer) {
        self.pool.borrow_mut().put(raw);
    }

    /// Writes `bytes` at `offset`, both multiples of 4. The queue writes before what is recorded
    /// but not yet sent, so that is sent first.
    pub fn upload(&self, buffer: &GpuBuffer, offset: u64, bytes: &[u8]) {
        self.flush();
        for (index, piece) in bytes.chunks(PIECE_BYTES as usize).enumerate() {
            self.queue.write_buffer(buffer.raw(), offset + index as u64 * PIECE_BYTES, piece);
            if bytes.len() as u64 > PIECE_BYTES {
                // Without a submit in between, the pieces' staging memory would add up.
                self.queue.submit([]);
            }
        }
    }

    /// Sets the whole buffer to zero bytes.
    pub fn clear(&self, buffer: &GpuBuffer) {
        self.flush();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.clear_buffer(buffer.raw(), 0, None);
        self.submit(encoder.finish());
    }

    /// Copies `bytes` from one buffer to another; all figures are multiples of 4.
    pub fn copy(&self, from: &GpuBuffer, from_offset: u64, to: &GpuBuffer, to_offset: u64, bytes: u64) {
        self.flush();
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(from.raw(), from_offset, to.raw(), to_offset, Some(bytes));
        self.submit(encoder.finish());
    }

    /// Records one dispatch.
    ///
    /// `buffers` follow the kernel's bindings; `params` is its uniform block (at most 256 bytes);
    /// `constants` are its overrides; `cost` is its work in floating-point operations, which only
    /// decides when the batch is sent.
    ///
    /// # Errors
    /// [`Error::Internal`] for a call that does not fit the kernel.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        constants: &[(&str, f64)],
        buffers: &[&GpuBuffer],
        params: &[u8],
        groups: [u32; 3],
        cost: f64,
    ) -> Result<()> {
        if buffers.len() != kernel.bindings.len() || params.len() > SLOT_BYTES {
            return Err(Error::Internal(format!("{}: wrong buffers or parameters", kernel.name)));
        }
        let most = self.limits.max_compute_workgroups_per_dimension;
        if groups.iter().any(|&count| count > most) {
            return Err(Error::Internal(format!("{}: {groups:?} workgroups exceed {most}", kernel.name)));
        }
        if groups.contains(&0) {
            return Ok(());
        }
        let over = {
            let batch = self.batch.borrow();
            !batch.recorded.is_empty()
                && (batch.recorded.len() == MAX_DISPATCHES || batch.cost + cost > self.submit_budget.get())
        };
        if over {
            self.flush();
        }
        let pipeline = self.pipeline(kernel, constants)?;
        let mut entries = vec![wgpu::BindGroupEntry {
            binding: 0,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &self.arena,
                offset: 0,
                size: std::num::NonZero::new(SLOT_BYTES as u64),
            }),
        }];
        for (index, buffer) in buffers.iter().enumerate() {
            entries.push(wgpu::BindGroupEntry {
                binding: index as u32 + 1,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: buffer.raw(),
                    offset: 0,
                    size: std::num::NonZero::new(buffer.bytes()),
                }),
            });
        }
        let bind_group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(kernel.name),
            layout: &pipeline.layout,
            entries: &entries,
        });
        self.dispatched.set(self.dispatched.get() + 1);
        let mut batch = self.batch.borrow_mut();
        batch.params.extend_from_slice(params);
        let slots = (batch.recorded.len() + 1) * SLOT_BYTES;
        batch.params.resize(slots, 0);
        batch.recorded.push(Recorded { pipeline, bind_group, groups });
        batch.cost += cost;
        Ok(())
    }

    /// `count` workgroups as a grid within the limit per dimension. A kernel numbers them
    /// `group.y * groups.x + group.x` and must ignore the few past `count`.
    pub fn unfold(&self, count: usize) -> [u32; 3] {
        let most = self.limits.max_compute_workgroups_per_dimension as usize;
        let y = count.div_ceil(most).max(1);
        [count.div_ceil(y) as u32, y as u32, 1]
    }

    fn pipeline(&self, kernel: &Kernel, constants: &[(&str, f64)]) -> Result<Rc<Pipeline>> {
        let key: PipelineKey = (
            kernel.name,
            constants.iter().map(|(name, value)| ((*name).to_owned(), value.to_bits())).collect(),
        );
        if let Some(pipeline) = self.pipelines.borrow().get(&key) {
            return Ok(pipeline.clone());
        }
        let made = self.watch(About::Shader(kernel.name), wgpu::ErrorFilter::Validation, || {
            Pipeline::new(&self.device, kernel, constants)
        });
        let pipeline = Rc::new(made?);
        self.pipelines.borrow_mut().insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// Sends what is recorded.
    pub fn flush(&self) {
        let batch = std::mem::take(&mut *self.batch.borrow_mut());
        if batch.recorded.is_empty() {
            return;
        }
        self.queue.write_buffer(&self.arena, 0, &batch.params);
        let mut encoder = self.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for (index, step) in batch.recorded.iter().enumerate() {
                pass.set_pipeline(&step.pipeline.raw);
                pass.set_bind_group(0, &step.bind_group, &[(index * SLOT_BYTES) as u32]);
                pass.dispatch_workgroups(step.groups[0], step.groups[1], step.groups[2]);
            }
        }
        self.submit(encoder.finish());
    }

    fn submit(&self, commands: wgpu::CommandBuffer) {
        let _index = self.queue.submit([commands]);
        #[cfg(not(target_arch = "wasm32"))]
        {
            let mut in_flight = self.in_flight.borrow_mut();
            in_flight.push_back(_index);
            if in_flight.len() > MAX_IN_FLIGHT {
                let submission_index = in_flight.pop_front();
                // A failed wait means a lost device, which the callback has recorded.
                let _ = self.device.poll(wgpu::PollType::Wait { submission_index, timeout: None });
            }
        }
    }

    /// Sends what is recorded and waits until it has run.
    ///
    /// # Errors
    /// [`Error::Device`] with whatever went wrong since the last wait.
    pub async fn settle(&self) -> Result<()> {
        self.flush();
        let (sender, receiver) = flume::bounded(1);
        self.queue.on_submitted_work_done(move || {
            let _ = sender.send(());
        });
        self.wait();
        let _ = receiver.recv_async().await;
        if self.pool.borrow().idle_bytes() > MAX_IDLE_BYTES {
            for buffer in self.pool.borrow_mut().drain() {
                buffer.destroy();
            }
        }
        self.check().await
    }

    /// The device is gone and computes nothing any more.
    pub fn is_lost(&self) -> bool {
        self.faults.lock().is_ok_and(|faults| faults.is_lost())
    }

    /// Native queues only move when polled; a browser's move by themselves.
    fn wait(&self) {
        #[cfg(not(target_arch = "wasm32"))]
        {
            self.in_flight.borrow_mut().clear();
            let _ = self.device.poll(wgpu::PollType::wait_indefinitely());
        }
    }

    /// What went wrong since the last wait. What it awaits was asked for before the work that has been
    /// waited for, and is there.
    async fn check(&self) -> Result<()> {
        let watched = std::mem::take(&mut *self.watched.borrow_mut());
        for Watched { about, outcome } in watched {
            let Some(error) = outcome.await else { continue };
            Faults::record(&self.faults, about, &error.to_string());
            if let About::Shader(name) = about {
                // Whoever asks for it again shall hear the same.
                self.pipelines.borrow_mut().retain(|(kernel, _), _| *kernel != name);
            }
        }
        let fault = self.faults.lock().ok().and_then(|mut faults| faults.take());
        fault.map_or(Ok(()), |fault| Err(fault.error(&self.describe())))
    }

    /// Reads `bytes` from `offset`, both multiples of 4, after everything recorded so far.
    ///
    /// # Errors
    /// As [`Gpu::settle`].
    pub async fn read(&self, buffer: &GpuBuffer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        self.flush();
        let mut content = Vec::with_capacity(bytes as usize);
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(PIECE_BYTES);
            let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
            let staging = self.create_buffer("readback", piece, usage);
            let mut encoder = self.device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(buffer.raw(), offset + done, &staging, 0, Some(piece));
            self.submit(encoder.finish());
            let (sender, receiver) = flume::bounded(1);
            staging.map_async(wgpu::MapMode::Read, .., move |outcome| {
                let _ = sender.send(outcome);
            });
            self.wait();
            let mapped = receiver.recv_async().await;
            self.check().await?;
            let lost = |what: String| {
                let advice = "Start again; the finished blocks of a run are kept";
                Error::device("reading results back", what, advice)
            };
            mapped.map_err(|error| lost(error.to_string()))?.map_err(|error| lost(error.to_string()))?;
            let view = staging.slice(..).get_mapped_range().map_err(|error| lost(error.to_string()))?;
            content.extend_from_slice(&view);
            drop(view);
            staging.unmap();
            staging.destroy();
            done += piece;
        }
        Ok(content)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.device.destroy();
    }
}
