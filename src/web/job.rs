//! A run: where it goes to, and what becomes of it when something fails.

use std::rc::Rc;

use web_sys::FileSystemDirectoryHandle;

use super::post::{post, post_failure};
use super::protocol::{Event, Settings};
use super::session::{Prepared, Session, segment_options};
use super::shelf::{self, Note};
use super::watcher::Watcher;
use crate::checkpoint::{CONFIG, Format, VERIFY};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pipeline::journal::{JOURNAL, Journal};
use crate::pipeline::plan::human_bytes;
use crate::pipeline::sensitivity::settle;
use crate::pipeline::{Groups, RunOptions, RunReport, run};
use crate::storage::Sink;
use crate::storage::browser::{FolderSink, PrivateSink, children};

/// How often a lost device is opened again in one run, each time with smaller pieces of work.
const REOPENINGS: u32 = 3;

/// Where a result goes.
struct Target {
    sink: Rc<dyn Sink>,
    /// Its name in the private storage.
    stored: Option<String>,
}

impl Target {
    fn private(name: String, directory: FileSystemDirectoryHandle) -> Self {
        Self { sink: Rc::new(PrivateSink::new(directory)), stored: Some(name) }
    }
}

impl Session {
    /// Answers `Quantize`.
    pub async fn quantize(
        &mut self,
        id: u32,
        settings: Settings,
        resume: bool,
        directory: Option<FileSystemDirectoryHandle>,
    ) {
        self.control.begin();
        self.voices.clear();
        let mut target = None;
        let outcome = self.run(id, &settings, resume, directory, &mut target).await;
        self.control.end();
        match (outcome, target) {
            (Ok(report), Some(target)) => post(id, done(report, target.stored)),
            (Ok(_), None) => {}
            (Err(error), target) => {
                self.forget_broken(&error);
                let journal = match &target {
                    Some(target) => Journal::read(target.sink.as_ref()).await.ok().flatten(),
                    None => None,
                };
                let mut resumable = journal.is_some();
                let blocks = journal.map_or(0, |journal| journal.blocks_done);
                if let (0, Some(name)) = (blocks, target.and_then(|target| target.stored)) {
                    // Nothing to go on from. If it cannot be removed, a person still can.
                    resumable = shelf::remove(&name).await.is_err();
                }
                post_failure(id, &with_what_is_kept(error, blocks), resumable);
            }
        }
    }

    async fn run(
        &mut self,
        id: u32,
        settings: &Settings,
        resume: bool,
        directory: Option<FileSystemDirectoryHandle>,
        target: &mut Option<Target>,
    ) -> Result<RunReport> {
        let model = self.open_model()?.name.clone();
        let in_folder = directory.is_some();
        // A stopped run says how large its micro-batches were.
        let mut stopped = None;
        if resume {
            let found = target.insert(match directory.clone() {
                Some(directory) => {
                    check_resumable(&directory).await?;
                    Target { sink: Rc::new(FolderSink::new(directory)), stored: None }
                }
                None => {
                    let (name, directory) = shelf::stopped(&model, settings).await?;
                    Target::private(name, directory)
                }
            });
            stopped = Journal::read(found.sink.as_ref()).await?;
        } else if let Some(directory) = &directory {
            check_empty(directory).await?;
        }
        let inputs = stopped.as_ref().map(|journal| &journal.inputs);
        let Prepared { segments, mut device, mut options, mut plan } =
            self.prepare(settings, in_folder, false, inputs).await?;
        if !in_folder {
            check_room(plan.layout.file_bytes(), target.as_ref()).await?;
        }
        // The page shows the layers of earlier sittings too.
        for row in stopped.iter().flat_map(|journal| &journal.modules) {
            post(id, Event::Module(row.clone()));
        }
        let sink = match (&*target, directory) {
            (Some(target), _) => target.sink.clone(),
            (None, Some(directory)) => {
                target.insert(Target { sink: Rc::new(FolderSink::new(directory)), stored: None }).sink.clone()
            }
            (None, None) => {
                let note =
                    Note { model: model.clone(), settings: settings.clone(), blocks: plan.config.layers };
                let (name, directory) = shelf::create(&name_of(&model, settings), &note).await?;
                target.insert(Target::private(name, directory)).sink.clone()
            }
        };
        let calibration = segment_options(settings).to_string();
        let mut how = RunOptions { calibration, resume };
        for attempt in 1.. {
            let stored = &self.open_model()?.stored;
            let mut watcher = Watcher::new(id, self.control.clone(), &device);
            let outcome = async {
                let open = options.output.mixed.as_ref().is_some_and(|mixed| mixed.allocation.is_none());
                // A stopped run has settled it; one that is another is refused before it matters.
                if open && stopped.is_none() {
                    plan = settle(stored, &mut options, &plan, &segments, &device, &mut watcher).await?;
                }
                if let Some(allocation) = &plan.allocation {
                    post(id, Event::Allocated(allocation.into()));
                }
                run(stored, &plan, &segments, &device, sink.clone(), &how, &mut watcher).await
            };
            let error = match outcome.await {
                Ok(report) => {
                    self.result = Some(sink.reader().await?);
                    return Ok(report);
                }
                Err(Error::Device { step, problem, advice }) => {
                    Error::Device { step: format!("{step} {}", watcher.place()), problem, advice }
                }
                Err(error) => error,
            };
            if attempt > REOPENINGS || !is_lost(&device) {
                return Err(error);
            }
            // What took it too long comes in smaller pieces now; sums keep their order.
            post(id, Event::Warning { text: format!("{error}; the device is opened again") });
            self.forget_broken(&error);
            device = self.choose_device(&settings.device).await?;
            if let Device::Gpu(gpu) = &device {
                gpu.set_submit_budget(gpu.submit_budget() / 4f64.powi(attempt as i32));
            }
            how.resume = Journal::read(sink.as_ref()).await?.is_some();
        }
        Err(Error::Internal("a run ended without an outcome".into()))
    }
}

fn is_lost(device: &Device) -> bool {
    match device {
        Device::Cpu => false,
        Device::Gpu(gpu) => gpu.is_lost(),
    }
}

fn done(report: RunReport, stored: Option<String>) -> Event {
    Event::Done {
        seconds: report.seconds,
        loss_ratio: report.loss_ratio(),
        allocation: report.allocation.as_ref().map(Into::into),
        seconds_by_step: report.seconds_by_step.into_iter().map(|(step, s)| (step.to_owned(), s)).collect(),
        output_bytes: report.output_bytes,
        bits_per_weight: report.bits_per_weight,
        stored,
        warnings: report.warnings,
    }
}

/// What a result is called: letters that every file system takes.
fn name_of(model: &str, settings: &Settings) -> String {
    let group = match settings.group_size {
        Groups::Size(-1) => String::new(),
        size => format!("-g{size}"),
    };
    let format = match settings.format {
        Format::Gptq => String::new(),
        format => format!("-{format}"),
    };
    let preset = match settings.preset.as_str() {
        "default" => String::new(),
        preset => format!("-{preset}"),
    };
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let model: String = model.trim_start_matches('.').chars().map(plain).collect();
    format!("{model}-{}bit{group}{preset}{format}", settings.bits)
}

/// Refuses to write over what a person has in a folder.
async fn check_empty(directory: &FileSystemDirectoryHandle) -> Result<()> {
    let there = children(directory).await?;
    match there.first() {
        None => Ok(()),
        Some(_) if there.iter().any(|(name, _)| name == JOURNAL) => Err(Error::options(
            format!("{} holds a stopped run", directory.name()),
            "Go on with it, or choose another folder",
        )),
        Some((first, _)) => Err(Error::options(
            format!("the folder {} is not empty (it holds {first})", directory.name()),
            "Choose an empty one, or make a new one",
        )),
    }
}

async fn check_resumable(directory: &FileSystemDirectoryHandle) -> Result<()> {
    let there = children(directory).await?;
    if there.iter().any(|(name, _)| name == JOURNAL) {
        return Ok(());
    }
    let (what, advice) = match there.iter().any(|(name, _)| name == CONFIG) {
        true => ("a finished result", "There is nothing left to do"),
        false => ("no stopped run", "Start a new one"),
    };
    Err(Error::resume(format!("{} holds {what}", directory.name()), advice))
}

/// Refuses a storage that cannot hold the result.
async fn check_room(bytes: u64, target: Option<&Target>) -> Result<()> {
    let there = match target {
        Some(target) => target.sink.reader().await?.files().iter().map(|file| file.size).sum(),
        None => 0u64,
    };
    let needed = bytes.saturating_sub(there) + (16 << 20);
    match shelf::free_bytes().await {
        Some(free) if free < needed => Err(Error::io(
            "write",
            "to the browser's storage",
            format!(
                "the result takes another {}, the browser lets this page have {}; remove stored results, free \
                 some of the disk, or choose a folder",
                human_bytes(needed),
                human_bytes(free)
            ),
        )),
        _ => Ok(()),
    }
}

/// Neither a full disk nor a lost device is a reason to lose the finished blocks.
fn with_what_is_kept(error: Error, blocks: usize) -> Error {
    let kept = match blocks {
        0 => return error,
        1 => "1 block is finished and kept; resume to go on after it".to_owned(),
        blocks => format!("{blocks} blocks are finished and kept; resume to go on after them"),
    };
    match error {
        // Finished, but changed since.
        Error::Io { action: VERIFY, .. } => error,
        Error::Io { action, path, reason } => Error::Io { action, path, reason: format!("{reason}; {kept}") },
        Error::Device { step, problem, advice } => {
            Error::Device { step, problem, advice: format!("{advice}. {kept}") }
        }
        error => error,
    }
}
