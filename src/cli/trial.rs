//! A model quantized in memory, to be judged and dropped.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::checkpoint::writer::DEFAULT_SHARD_BYTES;
use crate::device::Device;
use crate::error::Result;
use crate::gptq::scheme::Scheme;
use crate::model::Stored;
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

/// Quantizes `stored` by one scheme for all layers.
///
/// # Errors
/// Those of a plan and a run.
pub async fn trial(
    stored: &Stored,
    scheme: &Scheme,
    calibration: &Segments,
    device: &Device,
    stop: &AtomicBool,
) -> Result<(Stored, RunReport)> {
    let longest = calibration.rows.iter().map(Vec::len).max().unwrap_or(0);
    let (tokens, longest) = if scheme.needs_inputs() { (calibration.report.tokens, longest) } else { (0, 0) };
    let options = PlanOptions {
        output: Output::default(),
        scheme: scheme.clone(),
        tokens,
        longest,
        max_memory: u64::MAX,
        batch_tokens: None,
        shard_bytes: DEFAULT_SHARD_BYTES,
    };
    let plan = make_plan(stored, &options, device)?;
    let sink = MemorySink::new();
    let nothing = RunOptions { calibration: String::new(), resume: false };
    let mut observer = Stoppable(stop);
    let report =
        run(stored, &plan, calibration, device, Rc::new(sink.clone()), &nothing, &mut observer).await?;
    Ok((Stored::open(Rc::new(sink.to_source())).await?, report))
}
