//! Progress on the terminal, the table row of each finished layer, and Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::pipeline::{Event, ModuleRow, Observer};

/// Set by the first Ctrl-C; the second ends the process at once.
pub fn stop_flag() -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    // Fails only when a handler is there already, which then does the same.
    let _ = ctrlc::set_handler(move || {
        if set.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        eprintln!("\nstopping at the next safe point; press Ctrl-C again to stop at once");
    });
    flag
}

/// Shows a run on standard error and its table on standard output.
pub struct Terminal {
    bar: ProgressBar,
    stop: Arc<AtomicBool>,
    /// Print a row for each layer.
    rows: bool,
    tokens: usize,
    blocks: usize,
    losses: (f64, f64),
    /// The share of the work that was done at the first report, and when that was.
    first: Option<(f64, Instant)>,
}

impl Terminal {
    pub fn new(stop: Arc<AtomicBool>, rows: bool) -> Self {
        let bar = ProgressBar::new(1000);
        let style = "{wide_bar} {percent:>3} %  {msg}  {elapsed_precise}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self { bar, stop, rows, tokens: 0, blocks: 0, losses: (0.0, 0.0), first: None }
    }

    fn say(&self, line: &str) {
        // suspend keeps the bar and the table from overwriting each other.
        self.bar.suspend(|| say!("{line}"));
    }

    /// Prints something without the bar in its way.
    pub fn aside(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    pub fn close(&self) {
        self.bar.finish_and_clear();
    }
}

const WIDTHS: [usize; 10] = [5, 44, 6, 6, 4, 5, 8, 7, 11, 11];

fn header() -> String {
    let names = ["layer", "module", "in", "out", "bits", "group", "tokens", "damp", "rtn loss", "gptq loss"];
    let cells = names.iter().zip(WIDTHS).enumerate().map(|(i, (name, width))| match i {
        1 => format!("{name:<width$}"),
        _ => format!("{name:>width$}"),
    });
    format!("{}  seconds", cells.collect::<Vec<_>>().join("  "))
}

fn line(row: &ModuleRow) -> String {
    let loss = |loss: Option<f64>| loss.map_or("-".to_owned(), |loss| format!("{loss:.4e}"));
    let cells = [
        row.layer.to_string(),
        row.module.clone(),
        row.input.to_string(),
        row.output.to_string(),
        row.bits.to_string(),
        row.group.to_string(),
        row.tokens.to_string(),
        row.damp.map_or("-".to_owned(), |damp| damp.to_string()),
        loss(row.rtn_loss),
        loss(row.gptq_loss),
    ];
    let cells = cells.iter().zip(WIDTHS).enumerate().map(|(i, (cell, width))| match i {
        1 => format!("{cell:<width$}"),
        _ => format!("{cell:>width$}"),
    });
    format!("{}  {:>7.2}", cells.collect::<Vec<_>>().join("  "), row.seconds)
}

impl Observer for Terminal {
    fn event(&mut self, event: Event) {
        match event {
            Event::Measuring { block, blocks, done, total } => {
                self.bar.set_position((1000 * done / total.max(1)) as u64);
                let place = match block < blocks {
                    true => format!("block {}/{blocks}", block + 1),
                    false => "output head".to_owned(),
                };
                self.bar.set_message(format!("{place}, what bits are worth"));
            }
            Event::Verifying { done } => {
                self.bar.set_position((1000.0 * done) as u64);
                self.bar.set_message("reading the finished blocks");
            }
            Event::Started { blocks, done, tokens } => {
                self.bar.reset();
                (self.tokens, self.blocks) = (tokens, blocks);
                if done > 0 {
                    self.bar.suspend(|| eprintln!("going on after {done} of {blocks} blocks"));
                }
                if self.rows {
                    self.say(&header());
                }
            }
            Event::Replaying { block } => {
                self.bar.set_message(format!("applying finished block {} again", block + 1));
            }
            Event::Progress { block, stage, done, total } => {
                let share = done / total;
                self.bar.set_position((1000.0 * share) as u64);
                // A resumed run begins in the middle: what it found done says nothing about its speed.
                let (first, since) = *self.first.get_or_insert_with(|| {
                    self.bar.reset_eta();
                    (share, Instant::now())
                });
                let seconds = since.elapsed().as_secs_f64().max(1e-3);
                let rate = self.tokens as f64 * (share - first) / seconds;
                let removed = match self.losses {
                    (rtn, gptq) if rtn > 0.0 => format!(", {:.0} % of rtn's loss left", 100.0 * gptq / rtn),
                    _ => String::new(),
                };
                let place = match self.blocks {
                    blocks if block < blocks => format!("block {}/{blocks} {stage}", block + 1),
                    _ => "output head".to_owned(),
                };
                self.bar.set_message(format!("{place}, {rate:.0} tokens/s{removed}"));
            }
            Event::Module(row) => {
                self.losses.0 += row.rtn_loss.unwrap_or(0.0);
                self.losses.1 += row.gptq_loss.unwrap_or(0.0);
                if self.rows {
                    self.say(&line(row));
                }
            }
            Event::Warning(text) => self.bar.suspend(|| eprintln!("warning: {text}")),
            Event::Weights(_) | Event::BlockDone { .. } => {}
        }
    }

    fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}
