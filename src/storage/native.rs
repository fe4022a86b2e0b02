//! Directories of the operating system.
//!
//! Nothing here is asynchronous: each future is done when it is first polled.

use std::cell::RefCell;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use super::{FileEntry, LocalFuture, Sink, SinkFile, Source, checked_length};
use crate::error::{Error, Result};

/// File handles kept open. A sharded model has more files than some systems let a process open.
const OPEN_FILES: usize = 16;

/// Bytes collected before a write reaches the operating system.
const WRITE_BUFFER: usize = 1 << 20;

/// A directory read in place.
///
/// The list of files is taken once, at [`DirSource::open`]. Symbolic links are followed (download
/// caches use them); a link to nothing and a name that is not Unicode are left out.
pub struct DirSource {
    root: PathBuf,
    entries: Vec<FileEntry>,
    /// Most recently used last.
    handles: RefCell<Vec<(String, Rc<File>)>>,
}

impl DirSource {
    /// # Errors
    /// [`Error::Io`] if there is no such directory, it is a file, or it cannot be listed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let root = path.as_ref().to_path_buf();
        let refused = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => Error::io("open", root.display(), "there is no such directory"),
            _ => Error::io("open", root.display(), error),
        };
        if !fs::metadata(&root).map_err(refused)?.is_dir() {
            return Err(Error::io(
                "open",
                root.display(),
                "it is a file; give the directory that holds config.json and the weights",
            ));
        }
        let mut entries = Vec::new();
        for entry in fs::read_dir(&root).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_file() => entries.push(FileEntry { name, size: metadata.len() }),
                _ => continue,
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { root, entries, handles: RefCell::new(Vec::new()) })
    }

    fn handle(&self, file: &str) -> io::Result<Rc<File>> {
        let mut handles = self.handles.borrow_mut();
        let handle = match handles.iter().position(|(name, _)| name == file) {
            Some(index) => handles.remove(index).1,
            None => {
                if handles.len() == OPEN_FILES {
                    handles.remove(0);
                }
                Rc::new(File::open(self.root.join(file))?)
            }
        };
        handles.push((file.to_string(), Rc::clone(&handle)));
        Ok(handle)
    }

    fn read_now(&self, file: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = self.root.join(file).display().to_string();
        // Only listed names are opened, so a name out of a file can never leave the directory.
        let size = self.size(file).ok_or_else(|| Error::io("read", &path, "there is no such file"))?;
        let mut bytes = vec![0; checked_length(&path, size, &range)?];
        self.handle(file).and_then(|handle| read_exact_at(&handle, &mut bytes, range.start)).map_err(
            |error| match error.kind() {
                ErrorKind::UnexpectedEof => {
                    Error::io("read", &path, "it has become shorter since it was opened")
                }
                _ => Error::io("read", &path, error),
            },
        )?;
        Ok(bytes)
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                bytes = &mut bytes[count..];
                offset += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Source for DirSource {
    fn files(&self) -> &[FileEntry] {
        &self.entries
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move { self.read_now(file, range) })
    }

    fn describe(&self) -> String {
        self.root.display().to_string()
    }
}

/// A directory written in place.
pub struct DirSink {
    root: PathBuf,
}

impl DirSink {
    /// A directory that is new or empty; it and its parents are created.
    ///
    /// # Errors
    /// [`Error::Options`] if there is something in it, [`Error::Io`] if it cannot be created.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let sink = Self::open(path)?;
        let first = sink.files()?.into_iter().next();
        if let Some(first) = first {
            return Err(Error::options(
                format_args!("the output directory {} is not empty (it holds {first})", sink.describe()),
                "Name another directory, or say --resume to go on with an unfinished run or --overwrite to \
                 replace what is there",
            ));
        }
        Ok(sink)
    }

    /// A directory with whatever is in it, created if it is not there.
    ///
    /// # Errors
    /// [`Error::Io`] if it is a file or cannot be created.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let root = path.as_ref().to_path_buf();
        fs::create_dir_all(&root).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                Error::io("create the directory", root.display(), "it, or a part of its path, is a file")
            }
            _ => failure("create the directory", &root, error),
        })?;
        Ok(Self { root })
    }

    /// Names of everything in the directory, sub-directories included, sorted.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be listed.
    pub fn files(&self) -> Result<Vec<String>> {
        let listing = fs::read_dir(&self.root).map_err(|error| failure("list", &self.root, error))?;
        let mut names = Vec::new();
        for entry in listing {
            let entry = entry.map_err(|error| failure("list", &self.root, error))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// The path of `name`, which must be a plain file name: a sink never writes outside itself.
    fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join(name);
        let mut components = Path::new(name).components();
        match (components.next(), components.next()) {
            (Some(Component::Normal(only)), None) if only == name => Ok(path),
            _ => Err(Error::io("write", path.display(), "this is not a plain file name")),
        }
    }

    fn open_now(&self, name: &str, keep: u64) -> Result<Box<dyn SinkFile>> {
        let path = self.path(name)?;
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(|error| failure("open", &path, error))?;
        let length = file.metadata().map_err(|error| failure("open", &path, error))?.len();
        if keep > length {
            return Err(Error::io(
                "continue",
                path.display(),
                format_args!("it holds {length} bytes, fewer than the {keep} to keep"),
            ));
        }
        file.set_len(keep)
            .and_then(|()| file.seek(SeekFrom::Start(keep)))
            .map_err(|error| failure("truncate", &path, error))?;
        Ok(Box::new(DirFile { path, position: keep, writer: BufWriter::with_capacity(WRITE_BUFFER, file) }))
    }

    fn rename_now(&self, from: &str, to: &str) -> Result<()> {
        let (from, to) = (self.path(from)?, self.path(to)?);
        fs::rename(&from, &to).map_err(|error| failure("rename", &from, error))?;
        // The new name lives in the directory, so on Unix that is what must reach the disk. File
        // systems that cannot do it have no stronger promise to give, hence no error.
        #[cfg(unix)]
        if let Ok(directory) = File::open(&self.root) {
            directory.sync_all().ok();
        }
        Ok(())
    }
}

/// An error of the operating system, with advice where the remedy is not in its words.
fn failure(action: &'static str, path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            Error::io(action, path.display(), "no space left on the disk; free some, or write to another one")
        }
        _ => Error::io(action, path.display(), error),
    }
}

fn if_present<T>(result: io::Result<T>, action: &'static str, path: &Path) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failure(action, path, error)),
    }
}

impl Sink for DirSink {
    fn open<'a>(&'a self, name: &'a str, keep: u64) -> LocalFuture<'a, Result<Box<dyn SinkFile>>> {
        Box::pin(async move { self.open_now(name, keep) })
    }

    fn read_back<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            let path = self.path(name)?;
            if_present(fs::read(&path), "read", &path)
        })
    }

    fn size<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Option<u64>>> {
        Box::pin(async move {
            let path = self.path(name)?;
            if_present(fs::metadata(&path).map(|metadata| metadata.len()), "examine", &path)
        })
    }

    fn rename<'a>(&'a self, from: &'a str, to: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.rename_now(from, to) })
    }

    fn remove<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let path = self.path(name)?;
            if_present(fs::remove_file(&path), "remove", &path).map(drop)
        })
    }

    fn reader<'a>(&'a self) -> LocalFuture<'a, Result<Rc<dyn Source>>> {
        Box::pin(async move { Ok(Rc::new(DirSource::open(&self.root)?) as Rc<dyn Source>) })
    }

    fn describe(&self) -> String {
        self.root.display().to_string()
    }
}

struct DirFile {
    path: PathBuf,
    position: u64,
    writer: BufWriter<File>,
}

impl DirFile {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(|error| failure("write", &self.path, error))?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        self.writer
            .flush()
            .and_then(|()| self.writer.get_ref().sync_data())
            .map_err(|error| failure("write", &self.path, error))
    }
}

impl SinkFile for DirFile {
    fn write<'a>(&'a mut self, bytes: &'a [u8]) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.append(bytes) })
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn flush<'a>(&'a mut self) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move { self.sync() })
    }

    fn close<'a>(mut self: Box<Self>) -> LocalFuture<'a, Result<()>> {
        // Synced before the caller renames it: a name must never stand for bytes not yet on disk.
        Box::pin(async move { self.sync() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pollster::block_on;

    #[test]
    fn a_directory_lists_its_files_and_reads_ranges() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("b.bin"), b"0123456789").unwrap();
        fs::write(directory.path().join("a.json"), b"{}").unwrap();
        fs::create_dir(directory.path().join("nested")).unwrap();
        let source = DirSource::open(directory.path()).unwrap();
        let names: Vec<_> = source.files().iter().map(|entry| (entry.name.as_str(), entry.size)).collect();
        assert_eq!(names, [("a.json", 2), ("b.bin", 10)]);
        assert_eq!(block_on(source.read("b.bin", 3..7)).unwrap(), b"3456");
        assert_eq!(block_on(source.read("b.bin", 10..10)).unwrap(), b"");
        let past = block_on(source.read("b.bin", 8..11)).unwrap_err().to_string();
        assert!(past.contains("b.bin") && past.contains("holds 10"), "{past}");
        let outside = block_on(source.read("../x", 0..1)).unwrap_err().to_string();
        assert!(outside.contains("no such file"), "{outside}");
    }

    #[test]
    fn a_file_that_shrinks_while_open_is_an_error_and_not_garbage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("w");
        fs::write(&path, [7; 100]).unwrap();
        let source = DirSource::open(directory.path()).unwrap();
        fs::write(&path, [7; 50]).unwrap();
        let error = block_on(source.read("w", 20..80)).unwrap_err().to_string();
        assert!(error.contains("shorter since"), "{error}");
    }

    #[test]
    fn more_files_than_handles_are_all_readable() {
        let directory = tempfile::tempdir().unwrap();
        for index in 0..OPEN_FILES + 5 {
            fs::write(directory.path().join(format!("{index:02}")), [index as u8]).unwrap();
        }
        let source = DirSource::open(directory.path()).unwrap();
        for _ in 0..2 {
            for index in 0..OPEN_FILES + 5 {
                assert_eq!(block_on(source.read(&format!("{index:02}"), 0..1)).unwrap(), [index as u8]);
            }
        }
        assert_eq!(source.handles.borrow().len(), OPEN_FILES);
    }

    #[test]
    fn what_is_not_a_directory_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let absent = DirSource::open(directory.path().join("absent")).err().unwrap().to_string();
        assert!(absent.contains("absent") && absent.contains("no such directory"), "{absent}");
        let file = directory.path().join("file");
        fs::write(&file, b"").unwrap();
        let not_directory = DirSource::open(&file).err().unwrap().to_string();
        assert!(not_directory.contains("it is a file"), "{not_directory}");
        let under_file = DirSink::open(file.join("out")).err().unwrap().to_string();
        assert!(under_file.contains("is a file"), "{under_file}");
        assert!(DirSink::open(&file).err().unwrap().to_string().contains("is a file"));
    }

    #[test]
    fn create_takes_only_an_empty_directory() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("deep/out");
        DirSink::create(&out).unwrap();
        DirSink::create(&out).unwrap();
        fs::write(out.join("config.json"), b"{}").unwrap();
        let error = DirSink::create(&out).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("config.json"), "{error}");
        assert_eq!(DirSink::open(&out).unwrap().files().unwrap(), ["config.json"]);
    }

    #[test]
    fn files_are_written_continued_renamed_and_removed() {
        block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let sink = DirSink::create(directory.path()).unwrap();
            let mut file = sink.open("f.part", 0).await.unwrap();
            file.write(b"first ").await.unwrap();
            assert_eq!(sink.size("f.part").await.unwrap(), Some(0), "small writes are buffered");
            file.flush().await.unwrap();
            assert_eq!(sink.size("f.part").await.unwrap(), Some(6));
            file.write(b"garbage").await.unwrap();
            file.close().await.unwrap();

            let mut file = sink.open("f.part", 6).await.unwrap();
            assert_eq!(file.position(), 6);
            file.write(b"second").await.unwrap();
            assert_eq!(file.position(), 12);
            file.close().await.unwrap();
            sink.rename("f.part", "f").await.unwrap();
            assert_eq!(sink.read_back("f").await.unwrap().unwrap(), b"first second");
            assert_eq!(sink.read_back("f.part").await.unwrap(), None);

            let short = sink.open("f", 13).await.err().unwrap().to_string();
            assert!(short.contains("holds 12"), "{short}");
            sink.remove("f").await.unwrap();
            sink.remove("f").await.unwrap();
            assert_eq!(sink.size("f").await.unwrap(), None);
            for outside in ["../f", "a/b", "", "..", "/f"] {
                assert!(sink.open(outside, 0).await.is_err(), "{outside:?} must be refused");
            }
        });
    }

    /// Linux has a device that is always full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named_with_its_path() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", directory.path().join("weights")).unwrap();
        let full = OpenOptions::new().write(true).open(directory.path().join("weights")).unwrap();
        let mut file = DirFile {
            path: directory.path().join("weights"),
            position: 0,
            writer: BufWriter::with_capacity(WRITE_BUFFER, full),
        };
        let error = file.append(&vec![0; 2 * WRITE_BUFFER]).unwrap_err();
        assert_eq!(error.exit_code(), 4);
        let text = error.to_string();
        assert!(text.contains("weights") && text.contains("no space left"), "{text}");
    }
}
