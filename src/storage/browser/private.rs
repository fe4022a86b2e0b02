//! A directory of the origin's private file system (OPFS), written through synchronous handles, which
//! only workers have. A file has one handle at a time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use js_sys::{ArrayBuffer, Uint8Array};
use wasm_bindgen::JsValue;
use web_sys::{FileSystemDirectoryHandle, FileSystemReadWriteOptions, FileSystemSyncAccessHandle};

use super::source::{Content, FileSource};
use super::{call_later, check_kept, file_handle, files, new_file, reason, remove, settled, snapshot};
use crate::error::{Error, Result};
use crate::storage::{LocalFuture, Sink, SinkFile, Source};

/// Handles of the files being written, by name.
type Open = Rc<RefCell<BTreeMap<String, FileSystemSyncAccessHandle>>>;

/// A [`Sink`] into a private directory.
pub struct PrivateSink {
    directory: FileSystemDirectoryHandle,
    label: String,
    open: Open,
}

impl PrivateSink {
    pub fn new(directory: FileSystemDirectoryHandle) -> Self {
        let label = format!("browser storage/{}", directory.name());
        Self { directory, label, open: Open::default() }
    }

    fn failure(&self, action: &'static str, name: &str) -> impl Fn(JsValue) -> Error {
        let path = format!("{}/{name}", self.label);
        move |error| Error::io(action, &path, reason(&error))
    }

    fn open_handle(&self, name: &str) -> Option<FileSystemSyncAccessHandle> {
        self.open.borrow().get(name).cloned()
    }

    async fn open_file(&self, name: &str, keep: u64) -> Result<Box<dyn SinkFile>> {
        let refused = self.failure("open", name);
        let entry = new_file(&self.directory, name).await.map_err(&refused)?;
        let handle: FileSystemSyncAccessHandle =
            settled(entry.create_sync_access_handle()).await.map_err(&refused)?;
        let file = PrivateFile {
            path: format!("{}/{name}", self.label),
            name: name.to_owned(),
            handle: handle.clone(),
            open: self.open.clone(),
            position: keep,
        };
        self.open.borrow_mut().insert(name.to_owned(), handle);
        check_kept(&file.path, file.handle.get_size().map_err(&refused)?, keep)?;
        file.handle.truncate_with_f64(keep as f64).map_err(self.failure("truncate", name))?;
        Ok(Box::new(file))
    }

    async fn whole(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let refused = self.failure("read", name);
        let Some(file) = snapshot(&self.directory, name).await.map_err(&refused)? else { return Ok(None) };
        let buffer: ArrayBuffer = settled(file.array_buffer()).await.map_err(&refused)?;
        Ok(Some(Uint8Array::new(&buffer.into()).to_vec()))
    }

    async fn length(&self, name: &str) -> Result<Option<u64>> {
        let refused = self.failure("examine", name);
        if let Some(handle) = self.open_handle(name) {
            return Ok(Some(handle.get_size().map_err(&refused)? as u64));
        }
        let file = snapshot(&self.directory, name).await.map_err(&refused)?;
        Ok(file.map(|file| file.size() as u64))
    }

    async fn give_name(&self, from: &str, to: &str) -> Result<()> {
        let refused = self.failure("rename", from);
        let Some(handle) = file_handle(&self.directory, from).await.map_err(&refused)? else {
            return Err(Error::io("rename", format_args!("{}/{from}", self.label), "there is no such file"));
        };
        // Every browser with synchronous handles has it, but not in every one does it replace `to`.
        if call_later(&handle, "move", &[to.into()]).await.is_ok() {
            return Ok(());
        }
        remove(&self.directory, to).await.map_err(&refused)?;
        call_later(&handle, "move", &[to.into()]).await.map(drop).map_err(refused)
    }

    async fn as_source(&self) -> Result<Rc<dyn Source>> {
        let mut contents = Vec::new();
        for file in files(&self.directory).await? {
            let name = file.name();
            contents.push(match self.open_handle(&name) {
                Some(handle) => {
                    let size = handle.get_size().map_err(self.failure("examine", &name))? as u64;
                    (name, size, Content::Open(handle))
                }
                None => (name, file.size() as u64, Content::Blob(file.into())),
            });
        }
        Ok(Rc::new(FileSource::of(self.label.clone(), contents)))
    }
}

impl Sink for PrivateSink {
    fn open<'a>(&'a self, name: &'a str, keep: u64) -> LocalFuture<'a, Result<Box<dyn SinkFile>>> {
        Box::pin(self.open_file(name, keep))
    }

    fn read_back<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(self.whole(name))
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(self.length(name))
    }

    fn rename<'a>(&'a self, from: &'a str, to: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.give_name(from, to))
    }

    fn remove<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { remove(&self.directory, name).await.map_err(self.failure("remove", name)) })
    }

    fn reader<'a>(&'a self) -> LocalFuture<'a, Result<Rc<dyn Source>>> {
        Box::pin(self.as_source())
    }

    fn describe(&self) -> String {
        self.label.clone()
    }
}

struct PrivateFile {
    path: String,
    name: String,
    handle: FileSystemSyncAccessHandle,
    open: Open,
    position: u64,
}

impl PrivateFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let refused = |error: JsValue| Error::io("write", &self.path, reason(&error));
        let options = FileSystemReadWriteOptions::new();
        options.set_at(self.position as f64);
        let count = self.handle.write_with_u8_array_and_options(bytes, &options).map_err(refused)?;
        self.position += count as u64;
        match count as usize == bytes.len() {
            true => Ok(()),
            false => Err(Error::io("write", &self.path, "no space left in the browser's storage; free some")),
        }
    }

    fn sync(&self) -> Result<()> {
        self.handle.flush().map_err(|error| Error::io("write", &self.path, reason(&error)))
    }
}

impl SinkFile for PrivateFile {
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.append(bytes) })
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn flush<'a>(&'a mut self) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.sync() })
    }

    fn close<'a>(self: Box<Self>) -> LocalFuture<'a, Result<()>> {
        // Dropping it gives the handle back.
        Box::pin(async move { self.sync() })
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        self.open.borrow_mut().remove(&self.name);
        self.handle.close();
    }
}
