//! A model quantized in memory, to be judged and dropped.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::checkpoint::writer::DEFAULT_SHARD_BYTES;
use crate::device::Device;
use crate::error::Result;
use crate::gptq::scheme::Scheme;
use crate::model::Stored;
use crate::pipeline::sensitivity::settle;
use crate::pipeline::{Event, Observer, Output, PlanOptions, RunOptions, RunReport, make_plan, run};
use crate::storage::memory::MemorySink;
use crate::text::Segments;

struct Stoppable<'a>(&'a AtomicBool);

impl Observer for Stoppable<'_> {
    fn event(&mut self, _: Event) {}

    fn stop_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// How a model is quantized.
#[derive(Clone)]
pub struct Trial {
    pub scheme: Scheme,
    pub output: Output,
}

impl From<Scheme> for Trial {
    /// One scheme for all layers.
    fn from(scheme: Scheme) -> Self {
        Self { scheme, output: Output::default() }
    }
}

impl Trial {
    fn options(&self, calibration: &Segments) -> PlanOptions {
        let longest = calibration.rows.iter().map(Vec::len).max().unwrap_or(0);
        let needed = self.scheme.needs_inputs();
        PlanOptions {
            output: self.output.clone(),
            scheme: self.scheme.clone(),
            tokens: if needed { calibration.report.tokens } else { 0 },
            longest: if needed { longest } else { 0 },
            max_memory: u64::MAX,
            batch_tokens: None,
            shard_bytes: DEFAULT_SHARD_BYTES,
        }
    }

    /// Whether it can be done.
    ///
    /// # Errors
    /// Those of a plan.
    pub fn check(&self, stored: &Stored, calibration: &Segments, device: &Device) -> Result<()> {
        make_plan(stored, &self.options(calibration), device).map(|_| ())
    }

    /// Quantizes `stored`.
    ///
    /// # Errors
    /// Those of a plan and a run.
    pub async fn run(
        &self,
        stored: &Stored,
        calibration: &Segments,
        device: &Device,
        stop: &AtomicBool,
    ) -> Result<(Stored, RunReport)> {
        let mut options = self.options(calibration);
        let mut observer = Stoppable(stop);
        let mut plan = make_plan(stored, &options, device)?;
        if self.output.mixed.is_some() {
            plan = settle(stored, &mut options, &plan, calibration, device, &mut observer).await?;
        }
        let sink = MemorySink::new();
        let nothing = RunOptions { calibration: String::new(), resume: false };
        let report =
            run(stored, &plan, calibration, device, Rc::new(sink.clone()), &nothing, &mut observer).await?;
        Ok((Stored::open(Rc::new(sink.to_source())).await?, report))
    }
}
