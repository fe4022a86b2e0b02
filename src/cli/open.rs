//! Opening what the options name: model directories, devices, text files.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::options::{CalibrationArgs, DeviceArg, DeviceArgs, MemoryArgs};
use crate::checkpoint::CONFIG;
use crate::device::{AdapterChoice, Device, GpuOptions, list_adapters};
use crate::error::{Error, Result};
use crate::kernels::selftest::open_gpu;
use crate::model::{ModelConfig, Stored};
use crate::pipeline::journal::JOURNAL;
use crate::storage::native::DirSource;
use crate::text::{ModelText, Segments, TextFile, calibration_segments};

/// A model directory's headers and configuration.
pub async fn model(path: &Path) -> Result<Stored> {
    check_finished(path)?;
    Stored::open(Rc::new(DirSource::open(path)?)).await
}

/// Refuses a directory that a run is still to fill.
///
/// # Errors
/// [`Error::Model`].
pub fn check_finished(path: &Path) -> Result<()> {
    if path.join(JOURNAL).exists() && !path.join(CONFIG).exists() {
        return Err(Error::model(
            path.display(),
            "the run that makes this directory is not finished",
            "Go on with it: repeat its command with --resume",
        ));
    }
    Ok(())
}

/// The device that the options mean.
pub async fn device(args: &DeviceArgs) -> Result<Device> {
    if args.device == DeviceArg::Cpu {
        if let Some(name) = &args.adapter {
            return Err(Error::options(
                format!("--device cpu has no adapter \"{name}\""),
                "Leave out one of --device and --adapter",
            ));
        }
        return Ok(Device::Cpu);
    }
    let choice = AdapterChoice { name: args.adapter.clone(), allow_software: args.adapter.is_some() };
    let wanted = args.device == DeviceArg::Gpu || args.adapter.is_some();
    match open_gpu(&choice, &GpuOptions::default()).await {
        Err(error) if !wanted => {
            // Without a hardware adapter the CPU is what auto means; one that is there but does not
            // work is news.
            if list_adapters().await.iter().any(|adapter| !adapter.software) {
                eprintln!("warning: {error} (this run uses the CPU)");
            }
            Ok(Device::Cpu)
        }
        opened => opened,
    }
}

/// Files with text, whole.
pub fn texts(paths: &[PathBuf]) -> Result<Vec<TextFile>> {
    paths
        .iter()
        .map(|path| {
            let name = path.display().to_string();
            let content = std::fs::read(path).map_err(|error| Error::io("read", &name, error))?;
            Ok(TextFile { name, content })
        })
        .collect()
}

/// The calibration text for a model.
pub async fn calibration(stored: &Stored, args: &CalibrationArgs) -> Result<Segments> {
    if args.files.is_empty() {
        return Err(Error::options(
            "there is no calibration text",
            "Give --calibration FILE (.txt or .jsonl); about 128 samples of text like the model's use are enough. \
             --preset rtn needs none",
        ));
    }
    let config = ModelConfig::of(&stored.checkpoint)?;
    let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
    calibration_segments(&text, &texts(&args.files)?, &args.segments())
}

/// Bytes that a run may take.
pub fn memory(args: &MemoryArgs) -> u64 {
    args.max_memory.unwrap_or_else(|| {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        match system.available_memory() {
            0 => 4 << 30,
            free => (free as f64 * 0.6) as u64,
        }
    })
}

/// Free bytes on the disk that holds `path`, or will; `None` when nobody knows.
pub fn free_space(path: &Path) -> Option<u64> {
    let full = std::path::absolute(path).ok()?;
    let there = full.ancestors().find_map(|part| part.canonicalize().ok())?;
    let disks = sysinfo::Disks::new_with_refreshed_list();
    disks
        .list()
        .iter()
        .filter(|disk| there.starts_with(disk.mount_point()))
        .max_by_key(|disk| disk.mount_point().components().count())
        .map(sysinfo::Disk::available_space)
}
