//! Files held in memory: the embedded demo model, tests, and what a browser keeps before saving.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::{FileEntry, LocalFuture, Sink, SinkFile, Source, checked_length};
use crate::error::{Error, Result};

/// A [`Source`] over byte strings, borrowed from the program itself or owned.
pub struct MemorySource {
    label: String,
    entries: Vec<FileEntry>,
    contents: BTreeMap<String, Cow<'static, [u8]>>,
}

impl MemorySource {
    /// `label` is what [`Source::describe`] says; of two files with one name the later one stays.
    pub fn new<N, B>(label: impl Into<String>, files: impl IntoIterator<Item = (N, B)>) -> Self
    where
        N: Into<String>,
        B: Into<Cow<'static, [u8]>>,
    {
        let contents: BTreeMap<String, Cow<'static, [u8]>> =
            files.into_iter().map(|(name, bytes)| (name.into(), bytes.into())).collect();
        let entries = contents
            .iter()
            .map(|(name, bytes)| FileEntry { name: name.clone(), size: bytes.len() as u64 })
            .collect();
        Self { label: label.into(), entries, contents }
    }

    fn slice(&self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = format!("{}/{file}", self.label);
        let content =
            self.contents.get(file).ok_or_else(|| Error::io("read", &path, "there is no such file"))?;
        checked_length(&path, content.len() as u64, &range)?;
        // Both ends lie within a slice, so they fit its index type.
        Ok(content[range.start as usize..range.end as usize].to_vec())
    }
}

impl Source for MemorySource {
    fn files(&self) -> &[FileEntry] {
        &self.entries
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move { self.slice(file, range) })
    }

    fn describe(&self) -> String {
        self.label.clone()
    }
}

/// A [`Sink`] into a map that all clones share.
///
/// It treats bytes as harshly as a crash may: what was written to a file but neither flushed nor
/// closed is lost when the file is dropped. With [`MemorySink::limited`] it also fills up like a
/// disk, so whole runs can be tested against both.
#[derive(Clone, Default)]
pub struct MemorySink {
    shared: Rc<RefCell<Shared>>,
}

#[derive(Default)]
struct Shared {
    files: BTreeMap<String, Vec<u8>>,
    capacity: Option<u64>,
    /// Bytes in `files` and in the unflushed tails of open files.
    used: u64,
}

impl MemorySink {
    pub fn new() -> Self {
        Self::default()
    }

    /// A sink that refuses to hold more than `capacity` bytes over all files.
    pub fn limited(capacity: u64) -> Self {
        let sink = Self::default();
        sink.set_capacity(Some(capacity));
        sink
    }

    /// Changes how many bytes fit; `None` is no limit. What is already there stays.
    pub fn set_capacity(&self, capacity: Option<u64>) {
        self.shared.borrow_mut().capacity = capacity;
    }

    /// Every file with its durable content, sorted by name.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        self.shared.borrow().files.clone()
    }

    /// The durable content of one file.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.shared.borrow().files.get(name).cloned()
    }

    /// Puts a whole file in place, as something outside the run would.
    pub fn insert(&self, name: impl Into<String>, content: impl Into<Vec<u8>>) {
        let (name, content) = (name.into(), content.into());
        let mut shared = self.shared.borrow_mut();
        shared.forget(&name);
        shared.used += content.len() as u64;
        shared.files.insert(name, content);
    }

    /// What was written, to be read again.
    pub fn to_source(&self) -> MemorySource {
        MemorySource::new(self.describe(), self.files())
    }
}

impl Shared {
    fn forget(&mut self, name: &str) {
        if let Some(old) = self.files.remove(name) {
            self.used -= old.len() as u64;
        }
    }
}

impl Sink for MemorySink {
    fn open<'a>(&'a self, name: &'a str, keep: u64) -> LocalFuture<'a, Result<Box<dyn SinkFile>>> {
        Box::pin(async move {
            let mut shared = self.shared.borrow_mut();
            let shared = &mut *shared;
            let content = shared.files.entry(name.to_string()).or_default();
            let length = content.len() as u64;
            if keep > length {
                return Err(Error::io(
                    "continue",
                    format_args!("memory/{name}"),
                    format_args!("it holds {length} bytes, fewer than the {keep} to keep"),
                ));
            }
            content.truncate(keep as usize);
            shared.used -= length - keep;
            let file = MemoryFile {
                shared: Rc::clone(&self.shared),
                name: name.to_string(),
                durable: keep,
                pending: Vec::new(),
            };
            Ok(Box::new(file) as Box<dyn SinkFile>)
        })
    }

    fn read_back<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move { Ok(self.get(name)) })
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(async move { Ok(self.shared.borrow().files.get(name).map(|content| content.len() as u64)) })
    }

    fn rename<'a>(&'a self, from: &'a str, to: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut shared = self.shared.borrow_mut();
            let content = shared
                .files
                .remove(from)
                .ok_or_else(|| Error::io("rename", format_args!("memory/{from}"), "there is no such file"))?;
            shared.forget(to);
            shared.files.insert(to.to_string(), content);
            Ok(())
        })
    }

    fn remove<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            self.shared.borrow_mut().forget(name);
            Ok(())
        })
    }

    fn reader<'a>(&'a self) -> LocalFuture<'a, Result<Rc<dyn Source>>> {
        Box::pin(async move { Ok(Rc::new(self.to_source()) as Rc<dyn Source>) })
    }

    fn describe(&self) -> String {
        "memory".to_string()
    }
}

struct MemoryFile {
    shared: Rc<RefCell<Shared>>,
    name: String,
    durable: u64,
    pending: Vec<u8>,
}

impl MemoryFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let mut shared = self.shared.borrow_mut();
        let room = shared.capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(shared.used));
        // Like a disk, take what still fits before refusing the rest.
        let taken = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        self.pending.extend_from_slice(&bytes[..taken]);
        shared.used += taken as u64;
        if taken < bytes.len() {
            return Err(Error::io("write", format_args!("memory/{}", self.name), "no space left"));
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        let mut shared = self.shared.borrow_mut();
        let content = shared.files.get_mut(&self.name).ok_or_else(|| {
            Error::io(
                "write",
                format_args!("memory/{}", self.name),
                "it was renamed or removed while being written",
            )
        })?;
        self.durable += self.pending.len() as u64;
        content.append(&mut self.pending);
        Ok(())
    }
}

impl SinkFile for MemoryFile {
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.append(bytes) })
    }

    fn position(&self) -> u64 {
        self.durable + self.pending.len() as u64
    }

    fn flush<'a>(&'a mut self) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.settle() })
    }

    fn close<'a>(mut self: Box<Self>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.settle() })
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.shared.borrow_mut().used -= self.pending.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pollster::block_on;

    #[test]
    fn a_source_gives_exactly_the_range_and_refuses_one_past_the_end() {
        let source = MemorySource::new("demo", [("b", &b"hello"[..]), ("a", &b""[..])]);
        assert_eq!(source.files()[0], FileEntry { name: "a".into(), size: 0 });
        assert_eq!(source.size("b"), Some(5));
        assert_eq!(block_on(source.read("b", 1..4)).unwrap(), b"ell");
        assert_eq!(block_on(source.read("b", 5..5)).unwrap(), b"");
        let past = block_on(source.read("b", 3..6)).unwrap_err().to_string();
        assert!(past.contains("demo/b") && past.contains("3..6") && past.contains("holds 5"), "{past}");
        let absent = block_on(source.read("c", 0..0)).unwrap_err().to_string();
        assert!(absent.contains("demo/c"), "{absent}");
    }

    #[test]
    fn unflushed_bytes_are_lost_and_flushed_ones_kept() {
        block_on(async {
            let sink = MemorySink::new();
            let mut file = sink.open("f", 0).await.unwrap();
            file.write(b"kept").await.unwrap();
            file.flush().await.unwrap();
            file.write(b"lost").await.unwrap();
            assert_eq!(file.position(), 8);
            drop(file);
            assert_eq!(sink.get("f").unwrap(), b"kept");

            let mut file = sink.open("f", 2).await.unwrap();
            file.write(b"en").await.unwrap();
            file.close().await.unwrap();
            assert_eq!(sink.read_back("f").await.unwrap().unwrap(), b"keen");
            assert!(sink.open("f", 5).await.is_err());
        });
    }

    #[test]
    fn a_limited_sink_fills_up_and_space_comes_back() {
        block_on(async {
            let sink = MemorySink::limited(6);
            let mut file = sink.open("f", 0).await.unwrap();
            file.write(b"1234").await.unwrap();
            let full = file.write(b"567").await.unwrap_err();
            assert_eq!(full.exit_code(), 4);
            assert!(full.to_string().contains("no space left"), "{full}");
            file.close().await.unwrap();
            assert_eq!(sink.get("f").unwrap(), b"123456");
            sink.remove("f").await.unwrap();
            sink.remove("f").await.unwrap();
            let mut file = sink.open("g", 0).await.unwrap();
            file.write(b"123456").await.unwrap();
            assert!(file.write(b"7").await.is_err());
            drop(file);
            assert_eq!(sink.size("g").await.unwrap(), Some(0));
            sink.insert("h", *b"123456");
            sink.rename("h", "g").await.unwrap();
            assert_eq!(sink.get("g").unwrap(), b"123456");
            assert!(sink.rename("h", "g").await.is_err());
        });
    }
}
