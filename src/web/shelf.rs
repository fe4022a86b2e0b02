//! Results and stopped runs in the browser's private storage: a directory each, and beside them what each
//! was made with, so that a stopped run can go on after the page was closed.

use serde::{Deserialize, Serialize};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{File, FileSystemDirectoryHandle, StorageEstimate};

use super::post::scope;
use super::protocol::{Event, Settings, StoredItem};
use crate::checkpoint::CONFIG;
use crate::error::{Error, Result};
use crate::pipeline::journal::Journal;
use crate::storage::browser::{PrivateSink, call_later, children, directory, files, option, reason};
use crate::storage::{Sink, SinkFile};

const RESULTS: &str = "results";
const NOTES: &str = "notes";

/// What a result was made with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Note {
    pub model: String,
    pub settings: Settings,
    pub blocks: usize,
}

async fn part(name: &str) -> Result<FileSystemDirectoryHandle> {
    let refused = |error: JsValue| Error::io("open", "the browser's private storage", reason(&error));
    let root = JsFuture::from(scope().navigator().storage().get_directory()).await.map_err(refused)?;
    let root: FileSystemDirectoryHandle = root.unchecked_into();
    let found = directory(&root, name, true).await?;
    found.ok_or_else(|| Error::Internal(format!("the directory {name} was not created")))
}

/// The directory of a result.
///
/// # Errors
/// [`Error::Options`] if there is none of that name.
pub async fn open(name: &str) -> Result<FileSystemDirectoryHandle> {
    directory(&part(RESULTS).await?, name, false).await?.ok_or_else(|| {
        Error::options(format!("there is no stored result \"{name}\""), "List what there is again")
    })
}

/// A new directory, called `wanted` or that with a number, with its note.
pub async fn create(wanted: &str, note: &Note) -> Result<(String, FileSystemDirectoryHandle)> {
    let results = part(RESULTS).await?;
    let mut name = wanted.to_owned();
    let mut number = 1;
    while directory(&results, &name, false).await?.is_some() {
        number += 1;
        name = format!("{wanted}-{number}");
    }
    let text = serde_json::to_vec(note).map_err(|error| Error::Internal(error.to_string()))?;
    let notes = PrivateSink::new(part(NOTES).await?);
    let mut file: Box<dyn SinkFile> = notes.open(&name, 0).await?;
    file.write(&text).await?;
    file.close().await?;
    let made = directory(&results, &name, true).await?;
    let made = made.ok_or_else(|| Error::Internal(format!("the directory {name} was not created")))?;
    Ok((name, made))
}

/// The stopped run that was made with these settings from this model, the latest by name.
pub async fn stopped(model: &str, settings: &Settings) -> Result<(String, FileSystemDirectoryHandle)> {
    for item in items().await?.into_iter().rev().filter(|item| item.unfinished.is_some()) {
        let note = note(&item.name).await?;
        if note.is_some_and(|note| note.model == model && note.settings == *settings) {
            let found = open(&item.name).await?;
            return Ok((item.name, found));
        }
    }
    Err(Error::resume("no stopped run of this model with these settings is stored", "Start a new one"))
}

async fn note(name: &str) -> Result<Option<Note>> {
    let text = PrivateSink::new(part(NOTES).await?).read_back(name).await?;
    Ok(text.and_then(|text| serde_json::from_slice(&text).ok()))
}

async fn items() -> Result<Vec<StoredItem>> {
    let mut items = Vec::new();
    for (name, handle) in children(&part(RESULTS).await?).await? {
        let Ok(directory) = handle.dyn_into::<FileSystemDirectoryHandle>() else { continue };
        let there = files(&directory).await?;
        let note = note(&name).await?;
        let unfinished = match Journal::read(&PrivateSink::new(directory)).await {
            Ok(None) if there.iter().any(|file| file.name() == CONFIG) => None,
            journal => {
                let done = journal.ok().flatten().map_or(0, |journal| journal.blocks_done);
                Some((done, note.as_ref().map_or(0, |note| note.blocks)))
            }
        };
        items.push(StoredItem {
            name,
            bytes: there.iter().map(|file| file.size() as u64).sum(),
            unfinished,
            model: note.as_ref().map(|note| note.model.clone()),
            settings: note.map(|note| note.settings),
        });
    }
    Ok(items)
}

/// The answer to `List`.
pub async fn list() -> Result<Event> {
    let (quota_bytes, used_bytes) = match estimate().await {
        Some(estimate) => (estimate.get_quota(), estimate.get_usage()),
        None => (None, None),
    };
    let bytes = |value: Option<f64>| value.map(|value| value as u64);
    Ok(Event::Stored {
        items: items().await?,
        quota_bytes: bytes(quota_bytes),
        used_bytes: bytes(used_bytes),
    })
}

/// Bytes that still fit, if the browser says so.
pub async fn free_bytes() -> Option<u64> {
    let estimate = estimate().await?;
    Some((estimate.get_quota()? - estimate.get_usage()?).max(0.0) as u64)
}

async fn estimate() -> Option<StorageEstimate> {
    let estimate = JsFuture::from(scope().navigator().storage().estimate().ok()?).await.ok()?;
    Some(estimate.unchecked_into())
}

/// The files of a finished result.
///
/// # Errors
/// [`Error::Options`] if it is not there or not finished.
pub async fn fetch(name: &str) -> Result<Vec<File>> {
    let files = files(&open(name).await?).await?;
    match files.iter().any(|file| file.name() == CONFIG) {
        true => Ok(files),
        false => Err(Error::options(format!("{name} is not finished"), "Go on with it first, or remove it")),
    }
}

/// Removes a result or stopped run; one that is not there is removed already.
pub async fn remove(name: &str) -> Result<()> {
    let whole = option("recursive", true);
    let results = part(RESULTS).await?;
    if directory(&results, name, false).await?.is_some() {
        let removed = call_later(&results, "removeEntry", &[name.into(), whole.into()]).await;
        removed.map_err(|error| Error::io("remove", name, reason(&error)))?;
    }
    PrivateSink::new(part(NOTES).await?).remove(name).await
}
