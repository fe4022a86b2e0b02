//! The output: planned as a whole first, then written front to back.
//!
//! A shard has a temporary name until all of it is on the disk, and the index and `config.json`
//! come last, so an unfinished directory is never mistaken for a model.

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::dtype::DType;
use super::reader::Checkpoint;
use super::verify::{verify, verify_finished};
use super::{CONFIG, INDEX, PART, QUANTIZE_CONFIG, SINGLE, header};
use crate::error::{Error, Result};
use crate::face;
use crate::storage::{Sink, SinkFile, Source};

/// Tensor bytes per shard unless something else is asked for. Below 4 GiB, so that every file
/// system and 32-bit reader takes the files.
pub const DEFAULT_SHARD_BYTES: u64 = 4_000_000_000;

/// A tensor copied unchanged moves in pieces of this many bytes.
pub(super) const COPY_BYTES: u64 = 16 << 20;

/// What a tensor of the output will be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, dtype: DType, shape: impl Into<Vec<u64>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }
}

/// One tensor's place in the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTensor {
    pub spec: TensorSpec,
    /// Index into [`Layout::shards`].
    pub shard: usize,
    /// First byte, counted from the start of the shard's file.
    pub begin: u64,
    /// One past the last byte, counted from the start of the shard's file.
    pub end: u64,
}

/// One file of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    pub name: String,
    /// Length in front, JSON, padding.
    header: Vec<u8>,
    /// Bytes of the whole file.
    pub size: u64,
}

impl Shard {
    /// The name while it is being written.
    pub fn part(&self) -> String {
        format!("{}{PART}", self.name)
    }

    /// The bytes before the first tensor.
    pub fn header(&self) -> &[u8] {
        &self.header
    }
}

/// Where every tensor of the output will be. The same tensors always give the same layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<PlannedTensor>,
    shards: Vec<Shard>,
}

impl Layout {
    /// Distributes `tensors`, kept in this order, over shards with at most `max_shard_bytes` bytes
    /// of tensors each (headers come on top); a larger tensor has a shard of its own.
    ///
    /// # Errors
    /// [`Error::Internal`] if there is no tensor or two have one name.
    pub fn new(tensors: Vec<TensorSpec>, max_shard_bytes: u64) -> Result<Self> {
        if tensors.is_empty() {
            return Err(Error::Internal("a checkpoint without tensors is planned".into()));
        }
        let mut names = HashSet::new();
        if let Some(twice) = tensors.iter().find(|spec| !names.insert(spec.name.as_str())) {
            return Err(Error::Internal(format!("tensor {} is planned twice", twice.name)));
        }

        let mut groups: Vec<Vec<TensorSpec>> = Vec::new();
        let mut filled = 0u64;
        for spec in tensors {
            let bytes = spec.dtype.bytes_of(&spec.shape).ok_or_else(|| {
                Error::Internal(format!("tensor {} of shape {:?} is too large", spec.name, spec.shape))
            })?;
            match groups.last_mut() {
                Some(group) if filled.saturating_add(bytes) <= max_shard_bytes => {
                    group.push(spec);
                    filled += bytes;
                }
                _ => {
                    groups.push(vec![spec]);
                    filled = bytes;
                }
            }
        }

        let count = groups.len();
        let mut layout = Self { tensors: Vec::new(), shards: Vec::with_capacity(count) };
        for (index, group) in groups.into_iter().enumerate() {
            let name = match count {
                1 => SINGLE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            let header =
                header::write(group.iter().map(|spec| (spec.name.as_str(), spec.dtype, &spec.shape[..])))?;
            let mut begin = header.len() as u64;
            for spec in group {
                let bytes = spec.dtype.bytes_of(&spec.shape).unwrap_or_default();
                layout.tensors.push(PlannedTensor { spec, shard: index, begin, end: begin + bytes });
                begin += bytes;
            }
            layout.shards.push(Shard { name, header, size: begin });
        }
        Ok(layout)
    }

    /// In the order in which they are written.
    pub fn tensors(&self) -> &[PlannedTensor] {
        &self.tensors
    }

    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Bytes of all tensors together, the `total_size` of the index.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.end - tensor.begin).sum()
    }

    /// Bytes of all weights files, headers included: what the disk must have room for.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.size).sum()
    }

    fn is_last_of_shard(&self, tensor: usize) -> bool {
        self.tensors.get(tensor + 1).is_none_or(|next| next.shard != self.tensors[tensor].shard)
    }

    /// The index of a sharded output, `None` if there is one file.
    pub fn index_json(&self) -> Option<String> {
        if self.shards.len() == 1 {
            return None;
        }
        let weight_map: BTreeMap<&str, &str> = self
            .tensors
            .iter()
            .map(|tensor| (tensor.spec.name.as_str(), self.shards[tensor.shard].name.as_str()))
            .collect();
        let index = serde_json::json!({
            "metadata": { "total_size": self.tensor_bytes() },
            "weight_map": weight_map,
        });
        Some(format!("{index:#}\n"))
    }
}

/// Writes the tensors of a [`Layout`] in its order.
///
/// After an error the writer is of no more use; [`Writer::resume`] goes on from what was flushed.
pub struct Writer {
    sink: Rc<dyn Sink>,
    layout: Layout,
    /// Tensors finished.
    done: usize,
    /// XXH3 of each of them.
    sums: Vec<u64>,
    /// The file of the tensor that comes next, once it is open.
    file: Option<Box<dyn SinkFile>>,
}

impl Writer {
    /// Starts anew: removes what would make the directory look finished, and files of an earlier
    /// run that have the names of this one's shards.
    ///
    /// # Errors
    /// [`Error::Io`] if something cannot be removed.
    pub async fn new(sink: Rc<dyn Sink>, layout: Layout) -> Result<Self> {
        for name in [CONFIG, INDEX, QUANTIZE_CONFIG] {
            sink.remove(name).await?;
        }
        for shard in &layout.shards {
            sink.remove(&shard.name).await?;
            sink.remove(&shard.part()).await?;
        }
        Ok(Self { sink, layout, done: 0, sums: Vec::new(), file: None })
    }

    /// Goes on after the tensors that an earlier writer of the same layout finished and flushed, whose
    /// [`Writer::sums`] these are; whatever it wrote beyond them is cut off. They are read again, `going_on` as in
    /// [`verify_finished`].
    ///
    /// # Errors
    /// [`Error::Resume`] naming the file that is absent, shorter than it must be or not what was written.
    pub async fn resume(
        sink: Rc<dyn Sink>,
        layout: Layout,
        sums: &[u64],
        going_on: impl AsyncFnMut(f64) -> Result<()>,
    ) -> Result<Self> {
        let tensors_done = sums.len();
        if tensors_done > layout.tensors.len() {
            return Err(Error::resume(
                format_args!(
                    "{tensors_done} tensors are said to be written, but there are only {}",
                    layout.tensors.len()
                ),
                face::START_ANEW,
            ));
        }
        if tensors_done == 0 {
            return Self::new(sink, layout).await;
        }
        for name in [CONFIG, INDEX] {
            sink.remove(name).await?;
        }
        let last = tensors_done - 1;
        let shard_done = layout.is_last_of_shard(last);
        let whole_shards = layout.tensors[last].shard + usize::from(shard_done);
        for shard in &layout.shards[..whole_shards] {
            restore_whole(&*sink, shard).await?;
        }
        let mut writer = Self { sink, layout, done: tensors_done, sums: sums.to_vec(), file: None };
        if !shard_done {
            writer.check_part(last).await?;
        }
        verify_finished(&*writer.sink.reader().await?, &writer.layout, sums, going_on).await?;
        if !shard_done {
            let tensor = &writer.layout.tensors[last];
            let part = writer.layout.shards[tensor.shard].part();
            writer.file = Some(writer.sink.open(&part, tensor.end).await?);
        }
        Ok(writer)
    }

    /// Whether the unfinished shard of tensor `last` has everything up to its end.
    async fn check_part(&self, last: usize) -> Result<()> {
        let tensor = &self.layout.tensors[last];
        let shard = &self.layout.shards[tensor.shard];
        let part = shard.part();
        // The run may have finished this shard after it last recorded how far it was.
        if self.sink.size(&part).await?.is_none() && self.sink.size(&shard.name).await?.is_some() {
            self.sink.rename(&shard.name, &part).await?;
        }
        check_length(&*self.sink, &part, tensor.end).await
    }

    /// Number of tensors finished.
    pub fn position(&self) -> usize {
        self.done
    }

    /// XXH3 of each tensor finished, in their order.
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Name and place of the tensor that [`Writer::write`] expects next, `None` after the last.
    pub fn next(&self) -> Option<&PlannedTensor> {
        self.layout.tensors.get(self.done)
    }

    /// Writes the next tensor of the layout.
    ///
    /// # Errors
    /// [`Error::Internal`] if `name` is not the next tensor or `bytes` is not as long as planned,
    /// before anything is written; [`Error::Io`] if the sink refuses.
    pub async fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.expect(name, bytes.len() as u64)?;
        self.current().await?.write(bytes).await?;
        self.end_tensor(xxh3_64(bytes)).await
    }

    /// Writes the next tensor of the layout by copying the tensor `name` of `from` unchanged, a
    /// piece at a time, so that not even one large tensor is ever held.
    ///
    /// # Errors
    /// As [`Writer::write`], and [`Error::Model`] if `from` has no such tensor.
    pub async fn copy(&mut self, from: &Checkpoint, name: &str) -> Result<()> {
        let info = from.require(name)?;
        self.expect(name, info.bytes())?;
        if let Some(planned) =
            self.next().filter(|p| p.spec.dtype != info.dtype || p.spec.shape != info.shape)
        {
            return Err(Error::Internal(format!(
                "tensor {name} is {} {:?} where {} {:?} is planned",
                info.dtype, info.shape, planned.spec.dtype, planned.spec.shape
            )));
        }
        let mut begin = info.begin;
        let mut sum = Xxh3::new();
        let file = self.current().await?;
        while begin < info.end {
            let end = info.end.min(begin + COPY_BYTES);
            let bytes = from.source().read(&info.file, begin..end).await?;
            sum.update(&bytes);
            file.write(&bytes).await?;
            begin = end;
        }
        self.end_tensor(sum.digest()).await
    }

    fn expect(&self, name: &str, bytes: u64) -> Result<()> {
        let Some(planned) = self.next() else {
            return Err(Error::Internal(format!("tensor {name} is written after the last planned one")));
        };
        if planned.spec.name != name {
            return Err(Error::Internal(format!(
                "tensor {name} is written where {} is planned",
                planned.spec.name
            )));
        }
        if planned.end - planned.begin != bytes {
            return Err(Error::Internal(format!(
                "tensor {name} is written with {bytes} bytes; {} {:?} has {}",
                planned.spec.dtype,
                planned.spec.shape,
                planned.end - planned.begin
            )));
        }
        Ok(())
    }

    /// The file of the next tensor, started with its header if the tensor is the first in it.
    async fn current(&mut self) -> Result<&mut Box<dyn SinkFile>> {
        let planned = &self.layout.tensors[self.done];
        let file = match self.file.take() {
            Some(file) => file,
            None => {
                let shard = &self.layout.shards[planned.shard];
                let mut file = self.sink.open(&shard.part(), 0).await?;
                file.write(&shard.header).await?;
                file
            }
        };
        if file.position() != planned.begin {
            return Err(Error::Internal(format!(
                "tensor {} would begin at byte {} instead of {}",
                planned.spec.name,
                file.position(),
                planned.begin
            )));
        }
        Ok(self.file.insert(file))
    }

    /// Counts the tensor just written; with the last one of a shard, gives the shard its name.
    async fn end_tensor(&mut self, sum: u64) -> Result<()> {
        if self.layout.is_last_of_shard(self.done) {
            if let Some(file) = self.file.take() {
                file.close().await?;
            }
            let shard = &self.layout.shards[self.layout.tensors[self.done].shard];
            self.sink.rename(&shard.part(), &shard.name).await?;
        }
        self.done += 1;
        self.sums.push(sum);
        Ok(())
    }

    /// After this, [`Writer::resume`] can go on from [`Writer::position`], whatever happens.
    ///
    /// # Errors
    /// [`Error::Io`] if the sink refuses.
    pub async fn flush(&mut self) -> Result<()> {
        match &mut self.file {
            Some(file) => file.flush().await,
            None => Ok(()),
        }
    }

    /// Writes a whole file that goes with the weights, such as a tokenizer.
    ///
    /// # Errors
    /// [`Error::Internal`] for a name that the weights, the index or `config.json` have;
    /// [`Error::Io`] if the sink refuses.
    pub async fn write_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.check_free(name)?;
        self.put(name, bytes).await
    }

    /// Copies a file that goes with the weights unchanged, a piece at a time.
    ///
    /// # Errors
    /// As [`Writer::write_file`].
    pub async fn copy_file(&self, from: &dyn Source, name: &str, size: u64) -> Result<()> {
        self.check_free(name)?;
        let part = format!("{name}{PART}");
        let mut file = self.sink.open(&part, 0).await?;
        let mut begin = 0;
        while begin < size {
            let end = size.min(begin + COPY_BYTES);
            file.write(&from.read(name, begin..end).await?).await?;
            begin = end;
        }
        file.close().await?;
        self.sink.rename(&part, name).await
    }

    /// Refuses a name that the weights, the index or `config.json` have.
    fn check_free(&self, name: &str) -> Result<()> {
        match name == CONFIG || name == INDEX || self.layout.shards.iter().any(|s| s.name == name) {
            true => Err(Error::Internal(format!("{name} is the writer's own file"))),
            false => Ok(()),
        }
    }

    async fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let part = format!("{name}{PART}");
        let mut file = self.sink.open(&part, 0).await?;
        file.write(bytes).await?;
        file.close().await?;
        self.sink.rename(&part, name).await
    }

    /// Completes the directory: `files` (name and content), the index if there are several shards,
    /// and at the very end `config` as `config.json`. Before that all weights are read again and
    /// compared with what was planned and written, see [`verify`].
    ///
    /// # Errors
    /// [`Error::Internal`] if a tensor has not been written, and as [`Writer::write_file`] and
    /// [`verify`].
    pub async fn finish(self, files: &[(String, Vec<u8>)], config: &str) -> Result<()> {
        if let Some(next) = self.next() {
            return Err(Error::Internal(format!("the output ends before tensor {}", next.spec.name)));
        }
        for (name, bytes) in files {
            self.write_file(name, bytes).await?;
        }
        if let Some(index) = self.layout.index_json() {
            self.put(INDEX, index.as_bytes()).await?;
        }
        verify(&*self.sink.reader().await?, &self.layout, &self.sums).await?;
        self.put(CONFIG, config.as_bytes()).await
    }
}

/// Checks a finished shard, and renames it if the run ended just before it could.
async fn restore_whole(sink: &dyn Sink, shard: &Shard) -> Result<()> {
    if sink.size(&shard.name).await?.is_none() && sink.size(&shard.part()).await? == Some(shard.size) {
        sink.rename(&shard.part(), &shard.name).await?;
    }
    match sink.size(&shard.name).await? {
        Some(size) if size > shard.size => Err(Error::resume(
            format_args!("{}/{} has {size} bytes instead of {}", sink.describe(), shard.name, shard.size),
            face::START_ANEW,
        )),
        _ => check_length(sink, &shard.name, shard.size).await,
    }
}

async fn check_length(sink: &dyn Sink, name: &str, needed: u64) -> Result<()> {
    match sink.size(name).await? {
        Some(size) if size >= needed => Ok(()),
        Some(size) => Err(Error::resume(
            format_args!(
                "{}/{name} has only {size} bytes of the {needed} that were finished",
                sink.describe()
            ),
            face::START_ANEW,
        )),
        None => Err(Error::resume(
            format_args!("{}/{name} is gone, with {needed} bytes that were finished", sink.describe()),
            face::START_ANEW,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::memory::MemorySink;
    use pollster::block_on;

    /// Three shards at 20 bytes each: [a], [b c], [d], with an empty tensor at the end of the
    /// second.
    fn specs() -> Vec<TensorSpec> {
        vec![
            TensorSpec::new("a", DType::F32, [6]),
            TensorSpec::new("b", DType::U8, [2, 5]),
            TensorSpec::new("c", DType::I16, [5]),
            TensorSpec::new("e", DType::I64, [0, 3]),
            TensorSpec::new("d", DType::F16, []),
        ]
    }

    fn layout() -> Layout {
        Layout::new(specs(), 20).unwrap()
    }

    fn content(index: usize) -> Vec<u8> {
        let tensor = &layout().tensors[index];
        (0..tensor.end - tensor.begin).map(|byte| (byte * 7 + index as u64 * 31 + 1) as u8).collect()
    }

    fn sums() -> Vec<u64> {
        (0..specs().len()).map(|index| xxh3_64(&content(index))).collect()
    }

    fn extras() -> Vec<(String, Vec<u8>)> {
        vec![("tokenizer.json".into(), b"tok".to_vec())]
    }

    async fn write_rest(mut writer: Writer) -> Result<()> {
        for index in writer.position()..layout().tensors.len() {
            writer.write(&specs()[index].name, &content(index)).await?;
            writer.flush().await?;
        }
        writer.finish(&extras(), "{\"a\":1}").await
    }

    async fn start(sink: &MemorySink) -> Writer {
        Writer::new(Rc::new(sink.clone()), layout()).await.unwrap()
    }

    fn complete() -> BTreeMap<String, Vec<u8>> {
        let sink = MemorySink::new();
        block_on(async { write_rest(start(&sink).await).await.unwrap() });
        sink.files()
    }

    #[test]
    fn the_layout_fills_shards_in_order() {
        let layout = layout();
        let shards: Vec<_> = layout.tensors().iter().map(|tensor| tensor.shard).collect();
        assert_eq!(shards, [0, 1, 1, 1, 2]);
        let names: Vec<_> = layout.shards().iter().map(|shard| shard.name.as_str()).collect();
        assert_eq!(names[1], "model-00002-of-00003.safetensors");
        assert_eq!(names.len(), 3);
        assert_eq!(layout.tensor_bytes(), 24 + 10 + 10 + 2);
        assert_eq!(layout.tensors()[2].begin, layout.tensors()[1].end);
        let single = Layout::new(specs(), DEFAULT_SHARD_BYTES).unwrap();
        assert_eq!(single.shards().len(), 1);
        assert_eq!(single.shards()[0].name, SINGLE);
        assert!(single.file_bytes() > single.tensor_bytes());
        assert!(Layout::new(vec![], 1).is_err());
        assert!(Layout::new(vec![specs()[0].clone(), specs()[0].clone()], 1).is_err());
    }

    #[test]
    fn what_is_written_opens_as_a_checkpoint_and_in_the_crate() {
        let files = complete();
        let index: serde_json::Value = serde_json::from_slice(&files[INDEX]).unwrap();
        assert_eq!(index["metadata"]["total_size"], 46);
        assert_eq!(index["weight_map"]["e"], "model-00002-of-00003.safetensors");
        assert_eq!(files["tokenizer.json"], b"tok");
        assert!(files.keys().all(|name| !name.ends_with(PART)));

        let sink = MemorySink::new();
        files.iter().for_each(|(name, bytes)| sink.insert(name, bytes.as_slice()));
        let checkpoint = block_on(Checkpoint::open(Rc::new(sink.to_source()))).unwrap();
        assert_eq!(checkpoint.metadata_format(), Some("pt"));
        for (index, spec) in specs().iter().enumerate() {
            let info = checkpoint.require(&spec.name).unwrap();
            assert_eq!((info.dtype, &info.shape), (spec.dtype, &spec.shape));
            assert_eq!(block_on(checkpoint.read(&spec.name)).unwrap(), content(index));
            let theirs = safetensors::SafeTensors::deserialize(&files[&info.file]).unwrap();
            assert_eq!(theirs.tensor(&spec.name).unwrap().data(), content(index));
        }
    }

    #[test]
    fn one_shard_has_no_index() {
        block_on(async {
            let sink = MemorySink::new();
            sink.insert(INDEX, *b"stale");
            let layout = Layout::new(vec![specs()[1].clone()], 100).unwrap();
            let mut writer = Writer::new(Rc::new(sink.clone()), layout).await.unwrap();
            writer.write("b", &[3; 10]).await.unwrap();
            writer.finish(&[], "{}").await.unwrap();
            assert_eq!(sink.files().into_keys().collect::<Vec<_>>(), [CONFIG, SINGLE]);
        });
    }

    #[test]
    fn order_names_and_sizes_are_held_to_the_plan() {
        block_on(async {
            let sink = MemorySink::new();
            let mut writer = start(&sink).await;
            assert_eq!(writer.next().unwrap().spec.name, "a");
            assert!(writer.write("b", &content(1)).await.unwrap_err().to_string().contains("a is planned"));
            assert!(writer.write("a", &[0; 23]).await.unwrap_err().to_string().contains("23 bytes"));
            assert!(sink.files().is_empty(), "refused before anything is written");
            assert!(writer.write_file("model-00001-of-00003.safetensors", b"").await.is_err());
            let early = start(&sink).await.finish(&[], "{}").await.unwrap_err();
            assert!(early.to_string().contains("before tensor a"), "{early}");
        });
    }

    /// The run dies at every byte, with a disk that is full there; what the writer had promised by
    /// then is enough to go on to the same files.
    #[test]
    fn a_run_stopped_anywhere_resumes_to_the_same_bytes() {
        let whole = complete();
        let total: u64 = whole.values().map(|bytes| bytes.len() as u64).sum();
        let mut stopped_at = HashSet::new();
        for capacity in 0..total {
            block_on(async {
                let sink = MemorySink::limited(capacity);
                let mut done = 0;
                let mut writer = start(&sink).await;
                while let Some(name) = writer.next().map(|next| next.spec.name.clone()) {
                    if writer.write(&name, &content(writer.position())).await.is_err()
                        || writer.flush().await.is_err()
                    {
                        break;
                    }
                    done = writer.position();
                }
                if done == specs().len() {
                    assert!(writer.finish(&extras(), "{\"a\":1}").await.is_err());
                } else {
                    drop(writer);
                }
                assert!(sink.get(CONFIG).is_none(), "an unfinished directory has no config.json");
                stopped_at.insert(done);
                sink.set_capacity(None);
                let writer =
                    Writer::resume(Rc::new(sink.clone()), layout(), &sums()[..done], async |_| Ok(()))
                        .await
                        .unwrap();
                assert_eq!(writer.position(), done);
                write_rest(writer).await.unwrap();
                let mut files = sink.files();
                files.retain(|name, _| !name.ends_with(PART));
                assert_eq!(files, whole, "capacity {capacity}");
            });
        }
        // All but 3: the empty tensor after the third finishes with no room at all.
        assert_eq!(stopped_at, HashSet::from([0, 1, 2, 4, 5]));
    }

    /// The journal is always behind what is on the disk, by any number of tensors.
    #[test]
    fn resume_goes_back_to_any_recorded_position() {
        let whole = complete();
        for written in 0..=specs().len() {
            for recorded in 0..=written {
                block_on(async {
                    let sink = MemorySink::new();
                    let mut writer = start(&sink).await;
                    for index in 0..written {
                        writer.write(&specs()[index].name, &content(index)).await.unwrap();
                    }
                    writer.flush().await.unwrap();
                    drop(writer);
                    let writer = Writer::resume(
                        Rc::new(sink.clone()),
                        layout(),
                        &sums()[..recorded],
                        async |_| Ok(()),
                    )
                    .await
                    .unwrap();
                    write_rest(writer).await.unwrap();
                    assert_eq!(sink.files(), whole, "{recorded} of {written}");
                });
            }
        }
    }

    #[test]
    fn resume_refuses_what_is_gone_or_short() {
        block_on(async {
            let sink = MemorySink::new();
            let resume = |done| {
                let sink = sink.clone();
                async move {
                    Writer::resume(Rc::new(sink), layout(), &vec![0; done], async |_| Ok(()))
                        .await
                        .err()
                        .unwrap()
                }
            };
            let gone = resume(2).await;
            assert_eq!(gone.exit_code(), 7);
            assert!(gone.to_string().contains("model-00001-of-00003.safetensors is gone"), "{gone}");
            assert!(resume(6).await.to_string().contains("only 5"));

            let first = layout().shards[0].size;
            sink.insert("model-00001-of-00003.safetensors", vec![0; first as usize - 1]);
            let cut = resume(1).await.to_string();
            assert!(cut.contains(&format!("only {} bytes of the {first}", first - 1)), "{cut}");
            sink.insert("model-00001-of-00003.safetensors", vec![0; first as usize + 1]);
            assert!(resume(1).await.to_string().contains("instead of"));

            sink.insert("model-00001-of-00003.safetensors", vec![0; first as usize]);
            let needed = layout().tensors[1].end;
            sink.insert("model-00002-of-00003.safetensors.part", vec![0; needed as usize - 1]);
            let short = resume(2).await.to_string();
            assert!(short.contains("00002-of-00003.safetensors.part has only"), "{short}");
        });
    }

    #[test]
    fn tensors_are_copied_unchanged_in_pieces() {
        block_on(async {
            let size = 2 * COPY_BYTES + 5;
            let data: Vec<u8> = (0..size).map(|byte| (byte / 251) as u8).collect();
            let mut file = header::write([("w", DType::U8, &[size][..])]).unwrap();
            file.extend_from_slice(&data);
            let input = MemorySink::new();
            input.insert(SINGLE, file.as_slice());
            input.insert(CONFIG, *b"{}");
            let checkpoint = Checkpoint::open(Rc::new(input.to_source())).await.unwrap();

            let sink = MemorySink::new();
            let layout = Layout::new(vec![TensorSpec::new("w", DType::U8, [size])], u64::MAX).unwrap();
            let mut writer = Writer::new(Rc::new(sink.clone()), layout).await.unwrap();
            writer.copy(&checkpoint, "w").await.unwrap();
            writer.finish(&[], "{}").await.unwrap();
            assert!(sink.get(SINGLE).unwrap() == file);

            let other = Layout::new(vec![TensorSpec::new("w", DType::I8, [size])], u64::MAX).unwrap();
            let mut writer = Writer::new(Rc::new(MemorySink::new()), other).await.unwrap();
            assert!(writer.copy(&checkpoint, "w").await.is_err());
        });
    }
}
