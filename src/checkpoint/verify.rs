//! A second look at what was written: the files as they are on the disk against the layout.

use xxhash_rust::xxh3::Xxh3;

use super::INDEX;
use super::header::{self, LENGTH_BYTES};
use super::writer::{COPY_BYTES, Layout, PlannedTensor};
use crate::error::{Error, Result};
use crate::face;
use crate::storage::Source;

/// Reads every weights file of a finished `layout` again and compares size, header, each tensor's
/// name, type, shape and place, and its bytes by their XXH3, one of `sums` for each tensor. A piece of a
/// tensor is in memory at a time.
///
/// # Errors
/// [`Error::Io`] naming the first file and tensor that differ.
pub async fn verify(source: &dyn Source, layout: &Layout, sums: &[u64]) -> Result<()> {
    let mut tensors = layout.tensors().iter().zip(sums).peekable();
    for (index, shard) in layout.shards().iter().enumerate() {
        let place = format!("{}/{}", source.describe(), shard.name);
        let wrong =
            |what: String| Error::io(VERIFY, &place, format_args!("{what}; {AGAIN}. {}", face::START_ANEW));
        match source.size(&shard.name) {
            Some(size) if size == shard.size => {}
            Some(size) => {
                return Err(wrong(format!("it has {size} bytes where {} were written", shard.size)));
            }
            None => return Err(wrong("it is gone".into())),
        }
        let header = source.read(&shard.name, 0..shard.header().len() as u64).await?;
        if header != shard.header() {
            return Err(wrong("its header is not what was written".into()));
        }
        let parsed = header::parse(&place, &shard.name, &header[LENGTH_BYTES as usize..], shard.size)?;
        let mut found = parsed.tensors.iter();
        while let Some((planned, sum)) = tensors.next_if(|(planned, _)| planned.shard == index) {
            let name = &planned.spec.name;
            let same = found.next().is_some_and(|found| {
                found.name == *name
                    && found.dtype == planned.spec.dtype
                    && found.shape == planned.spec.shape
                    && (found.begin, found.end) == (planned.begin, planned.end)
            });
            if !same {
                return Err(wrong(format!("its header does not say what was planned of {name}")));
            }
            if digest(source, &shard.name, planned).await? != *sum {
                return Err(wrong(format!("tensor {name} {DIFFERS}")));
            }
        }
        if let Some(extra) = found.next() {
            return Err(wrong(format!("it has a tensor {} that was not planned", extra.name)));
        }
    }
    if let Some(index) = layout.index_json() {
        let size = source.size(INDEX).unwrap_or_default();
        if size != index.len() as u64 || source.read(INDEX, 0..size).await? != index.as_bytes() {
            return Err(Error::io(
                VERIFY,
                format!("{}/{INDEX}", source.describe()),
                format_args!("{AGAIN}. {}", face::START_ANEW),
            ));
        }
    }
    match tensors.next() {
        None if sums.len() == layout.tensors().len() => Ok(()),
        _ => Err(Error::Internal("not every tensor was verified".into())),
    }
}

/// Compares the tensors that a stopped run finished with their XXH3, one of `sums` for each, so that nothing is built on
/// a file that has changed. `going_on` is told the share that is behind before each tensor, and may end it.
///
/// # Errors
/// [`Error::Resume`] naming the first file and tensor that differ; those of the source and of `going_on`.
pub async fn verify_finished(
    source: &dyn Source,
    layout: &Layout,
    sums: &[u64],
    mut going_on: impl AsyncFnMut(f64) -> Result<()>,
) -> Result<()> {
    for (index, (planned, sum)) in layout.tensors().iter().zip(sums).enumerate() {
        going_on(index as f64 / sums.len() as f64).await?;
        let shard = &layout.shards()[planned.shard];
        let part = shard.part();
        let file = if source.size(&part).is_some() { &part } else { &shard.name };
        let wrong = |what: String| {
            Error::resume(format_args!("{}/{file}: {what}; {AGAIN}", source.describe()), face::START_ANEW)
        };
        let header = shard.header().len() as u64;
        if planned.begin == header && source.read(file, 0..header).await? != shard.header() {
            return Err(wrong("its header is not what was written".into()));
        }
        if digest(source, file, planned).await? != *sum {
            return Err(wrong(format!("tensor {} {DIFFERS}", planned.spec.name)));
        }
    }
    Ok(())
}

async fn digest(source: &dyn Source, file: &str, planned: &PlannedTensor) -> Result<u64> {
    let mut hasher = Xxh3::new();
    let mut begin = planned.begin;
    while begin < planned.end {
        let end = planned.end.min(begin + COPY_BYTES);
        hasher.update(&source.read(file, begin..end).await?);
        begin = end;
    }
    Ok(hasher.digest())
}

/// What an [`Error::Io`] of a file that has changed says was being done.
pub const VERIFY: &str = "verify";
const DIFFERS: &str = "does not read as it was written";
const AGAIN: &str = "the disk or another program changed it";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{DType, PART, SINGLE, TensorSpec, Writer};
    use crate::storage::Sink;
    use crate::storage::memory::MemorySink;
    use pollster::block_on;
    use std::rc::Rc;

    fn spec(name: &str, extent: u64) -> TensorSpec {
        TensorSpec::new(name, DType::U8, [extent])
    }

    fn layout() -> Layout {
        Layout::new(vec![spec("a", 3), spec("b", 0), spec("c", 5)], 4).unwrap()
    }

    /// Two shards, all tensors written, the index not yet.
    fn written() -> (MemorySink, Vec<u64>) {
        block_on(async {
            let sink = MemorySink::new();
            let mut writer = Writer::new(Rc::new(sink.clone()), layout()).await.unwrap();
            for (name, bytes) in [("a", &[1, 2, 3][..]), ("b", &[]), ("c", &[4, 5, 6, 7, 8])] {
                writer.write(name, bytes).await.unwrap();
            }
            let sums = writer.sums().to_vec();
            sink.insert(INDEX, layout().index_json().unwrap());
            (sink, sums)
        })
    }

    fn check(sink: &MemorySink, sums: &[u64]) -> Result<()> {
        block_on(async { verify(&*sink.reader().await?, &layout(), sums).await })
    }

    #[test]
    fn a_byte_that_changed_is_found_wherever_it_is() {
        let (sink, sums) = written();
        check(&sink, &sums).unwrap();
        for (name, content) in sink.files() {
            for at in 0..content.len() {
                let mut changed = content.clone();
                changed[at] ^= 1;
                sink.insert(name.clone(), changed);
                assert!(check(&sink, &sums).is_err(), "{name}, byte {at}");
            }
            sink.insert(name.clone(), content[..content.len() - 1].to_vec());
            let cut = check(&sink, &sums).unwrap_err().to_string();
            assert!(cut.contains(&name) && cut.contains("--overwrite"), "{cut}");
            sink.insert(name, content);
        }
        check(&sink, &sums).unwrap();
    }

    #[test]
    fn what_differs_is_named() {
        let (sink, mut sums) = written();
        sums[2] ^= 1;
        let message = check(&sink, &sums).unwrap_err().to_string();
        assert!(message.contains("00002-of-00002") && message.contains("tensor c"), "{message}");
    }

    /// A run that had finished two tensors when it was stopped.
    #[test]
    fn a_byte_that_changed_is_found_before_a_run_goes_on() {
        let (sink, sums) = written();
        let layout = || Layout::new(vec![spec("a", 3), spec("b", 2), spec("c", 5)], 100).unwrap();
        sink.insert(SINGLE, [layout().shards()[0].header(), &[1, 2, 3]].concat());
        let resume = |sums: &[u64]| {
            block_on(Writer::resume(Rc::new(sink.clone()), layout(), sums, async |_| Ok(()))).err()
        };
        assert!(resume(&sums[..1]).is_none());
        let part = format!("{SINGLE}{PART}");
        let content = sink.get(&part).unwrap().to_vec();
        for at in 0..content.len() {
            let mut changed = content.clone();
            changed[at] ^= 1;
            sink.insert(part.clone(), changed);
            let message = resume(&sums[..1]).unwrap();
            assert_eq!(message.exit_code(), 7);
            let message = message.to_string();
            assert!(message.contains(&part) && message.contains("--overwrite"), "{message}");
            assert!(!message.contains("--resume"), "{message}");
        }
    }
}
