//! What a run tells while it goes on.

use super::corner::Corner;
use super::report::ModuleRow;
use crate::storage::LocalFuture;

/// Something happened.
#[derive(Debug, Clone)]
pub enum Event<'a> {
    /// Before a run whose bits are an average, what each layer loses at each width is measured: `done` of
    /// `total` steps of much the same work.
    Measuring { block: usize, blocks: usize, done: usize, total: usize },
    /// Before a stopped run goes on, what it has written is read again: this share of it so far.
    Verifying { done: f64 },
    /// The run begins, or goes on after `done` blocks.
    Started { blocks: usize, done: usize, tokens: usize },
    /// Blocks that were finished earlier are applied to the calibration text again.
    Replaying { block: usize },
    /// `done` of `total` steps of the run's work are behind it, in units of one micro-batch or one
    /// linear layer weighted by its work.
    Progress { block: usize, stage: &'static str, done: f64, total: f64 },
    /// A linear layer is quantized.
    Module(&'a ModuleRow),
    /// A corner of that layer, for those who [want](Observer::wants_weights) it.
    Weights(&'a Corner),
    /// Something the user should know.
    Warning(String),
    /// A block is finished and written.
    BlockDone { block: usize, blocks: usize },
}

/// Listens to a run, and may ask it to stop.
pub trait Observer {
    fn event(&mut self, event: Event);

    /// Awaited before each question whether to stop: a paused run waits here. In a browser it is also
    /// where messages get in, since nothing else in a run on the CPU waits for anything.
    fn pause(&mut self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Asked at every point where stopping loses nothing but the block at hand.
    fn stop_requested(&self) -> bool {
        false
    }

    /// Whether to send [`Event::Weights`]; each costs a small read.
    fn wants_weights(&self) -> bool {
        false
    }
}

/// Listens to nothing.
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _: Event) {}
}
