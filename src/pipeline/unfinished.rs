//! The output of a stopped run seen as a checkpoint: its shards lie under temporary names, are
//! shorter than their headers say, and the config is not there yet.

use std::ops::Range;
use std::rc::Rc;

use crate::checkpoint::config::edited_config;
use crate::checkpoint::{CONFIG, Layout, PART, QuantConfig};
use crate::error::{Error, Result};
use crate::storage::{FileEntry, LocalFuture, Source};

/// See the module. Reading a tensor that is not written yet is an error of the source behind.
pub struct Unfinished {
    behind: Rc<dyn Source>,
    files: Vec<FileEntry>,
    config: Vec<u8>,
}

impl Unfinished {
    pub fn new(behind: Rc<dyn Source>, layout: &Layout, config: &str, quant: &QuantConfig) -> Result<Self> {
        let config = edited_config(config, quant)?.into_bytes();
        let mut files: Vec<FileEntry> = layout
            .shards()
            .iter()
            .map(|shard| FileEntry { name: shard.name.clone(), size: shard.size })
            .collect();
        files.push(FileEntry { name: CONFIG.to_owned(), size: config.len() as u64 });
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { behind, files, config })
    }
}

impl Source for Unfinished {
    fn files(&self) -> &[FileEntry] {
        &self.files
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            if file == CONFIG {
                let (from, to) = (range.start as usize, range.end as usize);
                let bytes = self.config.get(from..to);
                return bytes.map(<[u8]>::to_vec).ok_or_else(|| Error::io("read", file, "past its end"));
            }
            let part = format!("{file}{PART}");
            let name = if self.behind.size(&part).is_some() { part.as_str() } else { file };
            self.behind.read(name, range).await
        })
    }

    fn describe(&self) -> String {
        self.behind.describe()
    }
}
