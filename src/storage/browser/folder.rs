//! A folder that the person chose (`showDirectoryPicker`), written through streams.
//!
//! Such a stream writes into a copy, and only closing it puts the copy in place. So what must survive a
//! crash is closed, and opening the file again copies what it holds: files here are best kept small.

use std::rc::Rc;

use js_sys::{ArrayBuffer, Uint8Array};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{Blob, FileSystemDirectoryHandle, FileSystemFileHandle, FileSystemWritableFileStream};

use super::source::FileSource;
use super::{
    call, call_later, check_kept, file_handle, files, new_file, option, reason, remove, settled, snapshot,
};
use crate::error::{Error, Result};
use crate::storage::{LocalFuture, Sink, SinkFile, Source};

/// Bytes copied at a time where a file cannot be renamed.
const COPY_BYTES: f64 = 16e6;

/// A [`Sink`] into a folder of the person's.
pub struct FolderSink {
    directory: FileSystemDirectoryHandle,
    label: String,
}

impl FolderSink {
    pub fn new(directory: FileSystemDirectoryHandle) -> Self {
        Self { label: directory.name(), directory }
    }

    fn failure(&self, action: &'static str, name: &str) -> impl Fn(JsValue) -> Error {
        let path = format!("{}/{name}", self.label);
        move |error| Error::io(action, &path, reason(&error))
    }

    async fn open_file(&self, name: &str, keep: u64) -> Result<Box<dyn SinkFile>> {
        let path = format!("{}/{name}", self.label);
        let refused = self.failure("open", name);
        let handle = new_file(&self.directory, name).await.map_err(&refused)?;
        let there: web_sys::File = settled(handle.get_file()).await.map_err(&refused)?;
        check_kept(&path, there.size(), keep)?;
        let mut file = FolderFile { path, handle, stream: None, position: keep };
        file.begin().await.map_err(&refused)?;
        Ok(Box::new(file))
    }

    async fn whole(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let refused = self.failure("read", name);
        let Some(file) = snapshot(&self.directory, name).await.map_err(&refused)? else { return Ok(None) };
        let buffer: ArrayBuffer = settled(file.array_buffer()).await.map_err(&refused)?;
        Ok(Some(Uint8Array::new(&buffer.into()).to_vec()))
    }

    async fn give_name(&self, from: &str, to: &str) -> Result<()> {
        let refused = self.failure("rename", from);
        let Some(handle) = file_handle(&self.directory, from).await.map_err(&refused)? else {
            return Err(Error::io("rename", format_args!("{}/{from}", self.label), "there is no such file"));
        };
        if call_later(&handle, "move", &[to.into()]).await.is_ok() {
            return Ok(());
        }
        // Not every browser renames files outside its own storage. The copy too appears all at once.
        let file: Blob = settled(handle.get_file()).await.map_err(&refused)?;
        let copy = new_file(&self.directory, to).await.map_err(&refused)?;
        let stream: FileSystemWritableFileStream = settled(copy.create_writable()).await.map_err(&refused)?;
        let mut begin = 0.0;
        while begin < file.size() {
            let end = file.size().min(begin + COPY_BYTES);
            let part = file.slice_with_f64_and_f64(begin, end).map_err(&refused)?;
            let written = stream.write_with_blob(&part).map_err(&refused)?;
            JsFuture::from(written).await.map_err(&refused)?;
            begin = end;
        }
        call_later(&stream, "close", &[]).await.map_err(&refused)?;
        remove(&self.directory, from).await.map_err(refused)
    }
}

impl Sink for FolderSink {
    fn open<'a>(&'a self, name: &'a str, keep: u64) -> LocalFuture<'a, Result<Box<dyn SinkFile>>> {
        Box::pin(self.open_file(name, keep))
    }

    fn read_back<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(self.whole(name))
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(async move {
            let file = snapshot(&self.directory, name).await.map_err(self.failure("examine", name))?;
            Ok(file.map(|file| file.size() as u64))
        })
    }

    fn rename<'a>(&'a self, from: &'a str, to: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.give_name(from, to))
    }

    fn remove<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { remove(&self.directory, name).await.map_err(self.failure("remove", name)) })
    }

    fn reader<'a>(&'a self) -> LocalFuture<'a, Result<Rc<dyn Source>>> {
        Box::pin(async move {
            let files = files(&self.directory).await?.into_iter().map(|file| (file.name(), file.into()));
            Ok(Rc::new(FileSource::new(self.label.clone(), files)) as Rc<dyn Source>)
        })
    }

    fn describe(&self) -> String {
        self.label.clone()
    }
}

struct FolderFile {
    path: String,
    handle: FileSystemFileHandle,
    /// `None` after a flush, until more is written.
    stream: Option<FileSystemWritableFileStream>,
    position: u64,
}

impl FolderFile {
    /// Opens a stream behind what is there so far.
    async fn begin(&mut self) -> Result<&FileSystemWritableFileStream, JsValue> {
        let options = option("keepExistingData", self.position > 0);
        let stream = settled(self.handle.create_writable_with_options(options.unchecked_ref())).await?;
        let stream: &FileSystemWritableFileStream = self.stream.insert(stream);
        JsFuture::from(stream.truncate_with_f64(self.position as f64)?).await?;
        JsFuture::from(stream.seek_with_f64(self.position as f64)?).await?;
        Ok(stream)
    }

    async fn append(&mut self, bytes: &[u8]) -> Result<(), JsValue> {
        if self.stream.is_none() {
            self.begin().await?;
        }
        if let Some(stream) = &self.stream {
            // A copy: the stream reads it later, when this memory may have moved.
            JsFuture::from(stream.write_with_js_u8_array(&Uint8Array::from(bytes))?).await?;
            self.position += bytes.len() as u64;
        }
        Ok(())
    }

    async fn settle(&mut self) -> Result<()> {
        let Some(stream) = self.stream.take() else { return Ok(()) };
        let closed = call_later(&stream, "close", &[]).await;
        closed.map(drop).map_err(|error| Error::io("write", &self.path, reason(&error)))
    }
}

impl SinkFile for FolderFile {
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let written = self.append(bytes).await;
            written.map_err(|error| Error::io("write", &self.path, reason(&error)))
        })
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn flush<'a>(&'a mut self) -> LocalFuture<'a, Result<()>> {
        Box::pin(self.settle())
    }

    fn close<'a>(mut self: Box<Self>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.settle().await })
    }
}

impl Drop for FolderFile {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // What was not flushed is given up; nobody waits for that.
            let _ = call(&stream, "abort", &[]);
        }
    }
}
