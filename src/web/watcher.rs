//! A run's events as the page's.

use std::rc::Rc;

use web_time::Instant;

use super::control::Control;
use super::post::post;
use super::protocol::Event as Told;
use crate::device::Device;
use crate::pipeline::{Event, Observer};
use crate::storage::LocalFuture;

/// Seconds between two reports of progress: as often as a person can follow.
const REPORT_SECONDS: f64 = 0.05;

/// Tells the page what happens, and has the run wait and stop as it wishes.
pub struct Watcher {
    id: u32,
    control: Rc<Control>,
    device: Device,
    begun: Instant,
    blocks: usize,
    tokens: usize,
    /// The share of the work that was done at the first report, and when that was: a resumed run begins
    /// in the middle.
    first: Option<(f64, Instant)>,
    reported: Option<Instant>,
    /// Seconds of pauses since the first report.
    waited: f64,
    /// Where the run is, for messages.
    place: String,
}

impl Watcher {
    pub fn new(id: u32, control: Rc<Control>, device: &Device) -> Self {
        Self {
            id,
            control,
            device: device.clone(),
            begun: Instant::now(),
            blocks: 0,
            tokens: 0,
            first: None,
            reported: None,
            waited: 0.0,
            place: "before the first block".to_owned(),
        }
    }

    /// Block and stage last worked on.
    pub fn place(&self) -> &str {
        &self.place
    }

    fn progress(&mut self, block: usize, stage: &str, fraction: f64) {
        let now = Instant::now();
        self.place = format!("in block {} of {}, stage {stage}", block + 1, self.blocks);
        let (first, since) = *self.first.get_or_insert((fraction, now));
        let recent = |then: Instant| (now - then).as_secs_f64() < REPORT_SECONDS;
        if fraction < 1.0 && self.reported.is_some_and(recent) {
            return;
        }
        self.reported = Some(now);
        let worked = ((now - since).as_secs_f64() - self.waited).max(1e-3);
        let rate = (fraction - first) / worked;
        let blocks = self.blocks as f64;
        post(
            self.id,
            Told::Progress {
                block,
                blocks: self.blocks,
                stage: stage.to_owned(),
                fraction,
                // Every block takes the same work.
                block_fraction: (fraction * blocks - block as f64).clamp(0.0, 1.0),
                seconds: (now - self.begun).as_secs_f64() - self.waited,
                seconds_left: (rate > 0.0).then(|| (1.0 - fraction) / rate),
                tokens_per_second: self.tokens as f64 * blocks * rate,
                wasm_bytes: wasm_bytes(),
                device_bytes: device_bytes(&self.device),
            },
        );
    }

    fn measuring(&mut self, block: usize, blocks: usize, fraction: f64) {
        let now = Instant::now();
        self.place = format!("measuring what bits are worth in block {} of {blocks}", block + 1);
        let (first, since) = *self.first.get_or_insert((fraction, now));
        let worked = ((now - since).as_secs_f64() - self.waited).max(1e-3);
        let rate = (fraction - first) / worked;
        let seconds_left = (rate > 0.0).then(|| (1.0 - fraction) / rate);
        post(self.id, Told::Measuring { block, blocks, fraction, seconds_left });
    }
}

/// Bytes of wasm memory; it never shrinks, so this is the most there ever was.
pub fn wasm_bytes() -> u64 {
    core::arch::wasm32::memory_size::<0>() as u64 * (64 << 10)
}

/// Bytes of buffers in use on a device that has memory of its own.
pub fn device_bytes(device: &Device) -> u64 {
    match device {
        Device::Cpu => 0,
        Device::Gpu(gpu) => gpu.memory().0,
    }
}

impl Observer for Watcher {
    fn event(&mut self, event: Event) {
        let told = match event {
            Event::Measuring { block, blocks, done, total } => {
                return self.measuring(block, blocks, done as f64 / total.max(1) as f64);
            }
            Event::Verifying { done } => Told::Verifying { fraction: done },
            Event::Started { blocks, done, tokens } => {
                // Measuring before it says nothing about its speed.
                (self.first, self.waited) = (None, 0.0);
                (self.blocks, self.tokens) = (blocks, tokens);
                Told::Started { blocks, done, tokens }
            }
            Event::Replaying { block } => Told::Replaying { block },
            Event::Progress { block, stage, done, total } => {
                return self.progress(block, stage, done / total);
            }
            Event::Module(row) => Told::Module(row.clone()),
            Event::Weights(corner) => Told::Weights {
                module: corner.module.clone(),
                rows: corner.rows,
                cols: corner.cols,
                bits: corner.bits,
                weights: corner.weights.clone(),
                codes: corner.codes.clone(),
                errors: corner.errors.clone(),
            },
            Event::Warning(text) => Told::Warning { text },
            Event::BlockDone { block, blocks } => Told::BlockDone { block, blocks },
        };
        post(self.id, told);
    }

    fn pause(&mut self) -> LocalFuture<'_, ()> {
        Box::pin(async {
            let seconds = self.control.breathe().await;
            if self.first.is_some() {
                self.waited += seconds;
            }
        })
    }

    fn stop_requested(&self) -> bool {
        self.control.cancelled()
    }

    fn wants_weights(&self) -> bool {
        true
    }
}
