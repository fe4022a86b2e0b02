//! Files that are read in place, by ranges.

use std::collections::BTreeMap;
use std::ops::Range;

use js_sys::{ArrayBuffer, Uint8Array};
use wasm_bindgen::JsValue;
use web_sys::{Blob, FileSystemReadWriteOptions, FileSystemSyncAccessHandle};

use super::{reason, settled};
use crate::error::{Error, Result};
use crate::storage::{FileEntry, LocalFuture, Source, checked_length};

/// Where the bytes of a file are.
pub(super) enum Content {
    Blob(Blob),
    /// A file being written, which only its writer can read.
    Open(FileSystemSyncAccessHandle),
}

/// A [`Source`] over the browser's `File` objects. Offsets are exact up to 2⁵³.
pub struct FileSource {
    label: String,
    entries: Vec<FileEntry>,
    contents: BTreeMap<String, Content>,
}

impl FileSource {
    /// `label` is what [`Source::describe`] says; of two files with one name the later one stays.
    pub fn new(label: impl Into<String>, files: impl IntoIterator<Item = (String, Blob)>) -> Self {
        let files = files.into_iter().map(|(name, blob)| {
            let size = blob.size() as u64;
            (name, size, Content::Blob(blob))
        });
        Self::of(label.into(), files)
    }

    pub(super) fn of(label: String, files: impl IntoIterator<Item = (String, u64, Content)>) -> Self {
        let mut contents = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        for (name, size, content) in files {
            sizes.insert(name.clone(), size);
            contents.insert(name, content);
        }
        let entries = sizes.into_iter().map(|(name, size)| FileEntry { name, size }).collect();
        Self { label, entries, contents }
    }

    async fn slice(&self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = format!("{}/{file}", self.label);
        let absent = || Error::io("read", &path, "there is no such file");
        let content = self.contents.get(file).ok_or_else(absent)?;
        let length = checked_length(&path, self.size(file).ok_or_else(absent)?, &range)?;
        let refused = |error: JsValue| Error::io("read", &path, reason(&error));
        let bytes = match content {
            Content::Blob(blob) => {
                let part = blob.slice_with_f64_and_f64(range.start as f64, range.end as f64);
                let buffer = settled::<ArrayBuffer>(part.map_err(refused)?.array_buffer()).await;
                Uint8Array::new(&buffer.map_err(refused)?.into()).to_vec()
            }
            Content::Open(handle) => {
                let options = FileSystemReadWriteOptions::new();
                options.set_at(range.start as f64);
                let mut bytes = vec![0; length];
                let count = handle.read_with_u8_array_and_options(&mut bytes, &options).map_err(refused)?;
                bytes.truncate(count as usize);
                bytes
            }
        };
        match bytes.len() == length {
            true => Ok(bytes),
            false => Err(Error::io("read", &path, "it has become shorter since it was opened")),
        }
    }
}

impl Source for FileSource {
    fn files(&self) -> &[FileEntry] {
        &self.entries
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(self.slice(file, range))
    }

    fn describe(&self) -> String {
        self.label.clone()
    }
}
