//! The output of a stopped run seen as a checkpoint.
//!
//! Its shards lie under temporary names, are shorter than their headers say or not there at all, and
//! neither index nor config is written yet. What is missing is known from the layout, so it is served
//! from there; only tensors come from the files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use crate::checkpoint::config::edited_config;
use crate::checkpoint::{CONFIG, INDEX, Layout, PART, QuantConfig};
use crate::error::{Error, Result};
use crate::storage::{FileEntry, LocalFuture, Source};

/// See the module. Reading a tensor that is not written yet is an error of the source behind.
pub struct Unfinished {
    behind: Rc<dyn Source>,
    files: Vec<FileEntry>,
    /// The beginning of each file (all of it for config and index) that need not be in `behind`.
    known: BTreeMap<String, Vec<u8>>,
}

impl Unfinished {
    /// `config` is the text of the source's `config.json`.
    pub fn new(behind: Rc<dyn Source>, layout: &Layout, config: &str, quant: &QuantConfig) -> Result<Self> {
        let mut known = BTreeMap::from([(CONFIG.to_owned(), edited_config(config, quant)?.into_bytes())]);
        if let Some(index) = layout.index_json() {
            known.insert(INDEX.to_owned(), index.into_bytes());
        }
        let mut files: Vec<FileEntry> = known
            .iter()
            .map(|(name, bytes)| FileEntry { name: name.clone(), size: bytes.len() as u64 })
            .collect();
        for shard in layout.shards() {
            known.insert(shard.name.clone(), shard.header().to_vec());
            files.push(FileEntry { name: shard.name.clone(), size: shard.size });
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { behind, files, known })
    }
}

impl Source for Unfinished {
    fn files(&self) -> &[FileEntry] {
        &self.files
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let known = self.known.get(file).ok_or_else(|| {
                Error::io("read", format!("{}/{file}", self.describe()), "there is no such file")
            })?;
            if range.end <= known.len() as u64 {
                return Ok(known[range.start as usize..range.end as usize].to_vec());
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
