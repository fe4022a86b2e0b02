//! Where bytes come from and go to, so that no code above knows files from browsers.
//!
//! [`Source`] is a flat set of named files read by range; [`Sink`] is a flat set of named files
//! written front to back. Both are asynchronous because a browser can only answer later; native
//! implementations answer at once.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;

use crate::error::{Error, Result};

#[cfg(target_arch = "wasm32")]
pub mod browser;
pub mod memory;
#[cfg(not(target_arch = "wasm32"))]
pub mod native;

/// A boxed future that need not be `Send`: the core runs on one thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A directory of files that can be read in ranges.
pub trait Source {
    /// Names and sizes in bytes, sorted by name. Sub-directories are not entered.
    fn files(&self) -> &[FileEntry];

    /// Exactly the bytes `range` of `file`; a range past the end is an error.
    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>>;

    /// What a person would call this place (a path, a folder name), for messages.
    fn describe(&self) -> String;

    fn size(&self, file: &str) -> Option<u64> {
        self.files().iter().find(|entry| entry.name == file).map(|entry| entry.size)
    }
}

/// One file of a [`Source`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    pub name: String,
    pub size: u64,
}

/// A directory that files are written to, each front to back.
pub trait Sink {
    /// Opens `name` for writing after its first `keep` bytes; what follows them is cut off.
    /// `keep` = 0 starts the file anew.
    fn open<'a>(&'a self, name: &'a str, keep: u64) -> LocalFuture<'a, Result<Box<dyn SinkFile>>>;

    /// The whole content of a file written earlier, `None` if there is no such file.
    fn read_back<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<Vec<u8>>>>;

    /// Size of a file written earlier, `None` if there is no such file.
    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>>;

    /// Renames a finished file, replacing `to`; how a file gets its final name in one step.
    fn rename<'a>(&'a self, from: &'a str, to: &'a str) -> LocalFuture<'a, Result<()>>;

    /// Removes a file; one that is not there is already removed, which is no error.
    fn remove<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>>;

    /// The directory as it is now, for reading: what was flushed or closed is there, files still
    /// being written included.
    fn reader<'a>(&'a self) -> LocalFuture<'a, Result<Rc<dyn Source>>>;

    /// What a person would call this place, for messages.
    fn describe(&self) -> String;
}

/// A file being written.
pub trait SinkFile {
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> LocalFuture<'a, Result<()>>;

    /// Bytes in the file so far, kept ones included.
    fn position(&self) -> u64;

    /// Everything written so far survives a crash of the process after this.
    fn flush<'a>(&'a mut self) -> LocalFuture<'a, Result<()>>;

    fn close<'a>(self: Box<Self>) -> LocalFuture<'a, Result<()>>;
}

/// Number of bytes in `range`, after checking that it lies inside a file of `size` bytes and can
/// be addressed at all (a browser has 32-bit addresses).
///
/// # Errors
/// [`Error::Io`] naming `path`: every [`Source`] refuses a bad range in the same words.
fn checked_length(path: &str, size: u64, range: &Range<u64>) -> Result<usize> {
    if range.start > range.end || range.end > size {
        return Err(Error::io(
            "read",
            path,
            format_args!("bytes {}..{} were asked for, but it holds {size}", range.start, range.end),
        ));
    }
    usize::try_from(range.end - range.start).map_err(|_| {
        Error::io(
            "read",
            path,
            format_args!("{} bytes at once are more than this platform can address", range.end - range.start),
        )
    })
}
