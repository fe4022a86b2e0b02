//! A model directory as named tensors that are read when asked for.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::experts;
use super::header::{self, LENGTH_BYTES, TensorInfo};
use super::{CONFIG, INDEX, SINGLE};
use crate::error::{Error, Result};
use crate::storage::Source;

/// Bytes of a tensor that [`Checkpoint::sampled_fingerprint`] looks at.
const SAMPLE_BYTES: u64 = 4096;

/// An opened model: all headers and `config.json` are read and checked, no tensor is.
pub struct Checkpoint {
    source: Rc<dyn Source>,
    /// Sorted by file, then by place in the file.
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata_format: Option<String>,
    config: Value,
    config_text: String,
    fingerprint: u64,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names, or the
    /// only `*.safetensors` file there is.
    ///
    /// With an index, its `weight_map` decides which tensors exist.
    ///
    /// # Errors
    /// [`Error::Model`] naming the file, and the tensor if it is about one: no `config.json`, no
    /// weights or ambiguous ones, an absent shard, a tensor that is not where the index says, and
    /// everything in [`header::parse`].
    pub async fn open(source: Rc<dyn Source>) -> Result<Self> {
        let mut hasher = Xxh3::new();
        let config_text = read_text(&*source, CONFIG).await?;
        let config = parse_json(&place(&*source, CONFIG), &config_text)?;
        hash_part(&mut hasher, CONFIG, config_text.as_bytes());

        let index = match find_weights(&*source)? {
            Weights::Single(file) => Index { files: vec![file], weight_map: None },
            Weights::Sharded => {
                let text = read_text(&*source, INDEX).await?;
                hash_part(&mut hasher, INDEX, text.as_bytes());
                Index::parse(&*source, &text)?
            }
        };

        let mut found = Vec::new();
        let mut metadata_format = None;
        for file in &index.files {
            let json = read_header(&*source, file, &mut hasher).await?;
            let size = size_of(&*source, file)?;
            let mut header = header::parse(&place(&*source, file), file, &json, size)?;
            metadata_format = metadata_format.or_else(|| header.metadata.remove("format"));
            found.extend(header.tensors);
        }

        let tensors = experts::by_expert(index.select(&*source, found)?, &config);
        let by_name =
            tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
        let fingerprint = hasher.digest();
        Ok(Self { source, tensors, by_name, metadata_format, config, config_text, fingerprint })
    }

    /// Names of all tensors, sorted by file and by place in the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// All tensors in the order of [`Checkpoint::names`].
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }

    /// # Errors
    /// [`Error::Model`] naming the tensor if it is not there.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.info(name).ok_or_else(|| {
            Error::model(
                self.source.describe(),
                format_args!("tensor {name:?} is missing from the weights"),
                "The weights do not fit config.json; fetch the model again",
            )
        })
    }

    /// The bytes of a whole tensor, row-major and little-endian.
    ///
    /// # Errors
    /// [`Error::Model`] if there is no such tensor, [`Error::Io`] if it cannot be read.
    pub async fn read(&self, name: &str) -> Result<Vec<u8>> {
        let info = self.require(name)?;
        self.source.read(&info.file, info.begin..info.end).await
    }

    /// The bytes of `rows` of a tensor, that is of a range of its first dimension.
    ///
    /// # Errors
    /// As [`Checkpoint::read`], and [`Error::Internal`] for rows that the tensor does not have.
    pub async fn read_rows(&self, name: &str, rows: Range<u64>) -> Result<Vec<u8>> {
        let info = self.require(name)?;
        let count = info.shape.first().copied().unwrap_or(0);
        if rows.start > rows.end || rows.end > count {
            return Err(Error::Internal(format!(
                "rows {}..{} of tensor {name} of shape {:?} were asked for",
                rows.start, rows.end, info.shape
            )));
        }
        // Without rows there are no bytes either, whatever one row would have.
        let row = info.bytes().checked_div(count).unwrap_or(0);
        self.source.read(&info.file, info.begin + rows.start * row..info.begin + rows.end * row).await
    }

    /// `config.json`, keys in the order of the file.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `config.json` as it is written.
    pub fn config_text(&self) -> &str {
        &self.config_text
    }

    /// The framework that the weights name as their origin, usually `pt`.
    pub fn metadata_format(&self) -> Option<&str> {
        self.metadata_format.as_deref()
    }

    pub fn source(&self) -> &Rc<dyn Source> {
        &self.source
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }

    /// Tells this model from others: the XXH3 hash of the weights files' names, sizes and headers,
    /// of the index and of `config.json`. The weights themselves are not read, so values changed in
    /// place go unseen. Stable across runs and versions.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// [`Checkpoint::fingerprint`] and a few bytes of every tensor besides: tells a model from its
    /// fine-tuned siblings, which have the same headers, without reading gigabytes.
    ///
    /// # Errors
    /// [`Error::Io`] if a file cannot be read.
    pub async fn sampled_fingerprint(&self) -> Result<u64> {
        let mut hasher = Xxh3::new();
        hasher.update(&self.fingerprint.to_le_bytes());
        for tensor in &self.tensors {
            // The middle: training moves the first rows of an embedding table (unused tokens) least.
            let begin = tensor.begin + tensor.bytes() / 2;
            let end = tensor.end.min(begin + SAMPLE_BYTES);
            hasher.update(&self.source.read(&tensor.file, begin..end).await?);
        }
        Ok(hasher.digest())
    }

    /// How messages name a file of this model.
    pub fn place(&self, file: &str) -> String {
        place(&*self.source, file)
    }
}

fn place(source: &dyn Source, file: &str) -> String {
    format!("{}/{file}", source.describe())
}

/// Parts are framed by their lengths, so that no two different sequences hash alike.
fn hash_part(hasher: &mut Xxh3, name: &str, bytes: &[u8]) {
    for part in [name.as_bytes(), bytes] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
}

fn size_of(source: &dyn Source, file: &str) -> Result<u64> {
    source.size(file).ok_or_else(|| {
        Error::model(
            source.describe(),
            format_args!("there is no {file}"),
            "Give the directory of a Hugging Face model: config.json, tokenizer.json and *.safetensors",
        )
    })
}

/// A whole text file of a source.
///
/// # Errors
/// [`Error::Model`] if it is absent or not UTF-8, [`Error::Io`] if it cannot be read.
pub(super) async fn read_text(source: &dyn Source, file: &str) -> Result<String> {
    let size = size_of(source, file)?;
    let bytes = source.read(file, 0..size).await?;
    String::from_utf8(bytes)
        .map_err(|_| Error::model(place(source, file), "it is not UTF-8 text", "Fetch the file again"))
}

/// # Errors
/// [`Error::Model`] with the line and column of the fault.
pub(super) fn parse_json(place: &str, text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| {
        Error::model(place, format_args!("it is not valid JSON ({error})"), "Fetch the file again")
    })
}

enum Weights {
    Single(String),
    Sharded,
}

fn find_weights(source: &dyn Source) -> Result<Weights> {
    if source.size(SINGLE).is_some() {
        return Ok(Weights::Single(SINGLE.to_string()));
    }
    if source.size(INDEX).is_some() {
        return Ok(Weights::Sharded);
    }
    let names = || source.files().iter().map(|entry| entry.name.as_str());
    let candidates: Vec<&str> = names().filter(|name| name.ends_with(".safetensors")).collect();
    match candidates[..] {
        [only] => Ok(Weights::Single(only.to_string())),
        [first, second, ..] => Err(Error::model(
            source.describe(),
            format_args!(
                "there are several weights files ({first}, {second}, ...) but no {INDEX} to say which belong \
                 together"
            ),
            format_args!("Fetch {INDEX} too, or leave one file"),
        )),
        [] => Err(match names().find(|name| super::is_weights_file(name)) {
            Some(other) => Error::model(
                source.describe(),
                format_args!("the weights are not in safetensors files (there is {other})"),
                "Fetch the safetensors files of this model, or convert it: load it with Transformers and \
                 save_pretrained it again",
            ),
            None => Error::model(
                source.describe(),
                "there is no *.safetensors file",
                "Give the directory of a Hugging Face model: config.json, tokenizer.json and *.safetensors",
            ),
        }),
    }
}

async fn read_header(source: &dyn Source, file: &str, hasher: &mut Xxh3) -> Result<Vec<u8>> {
    let size = size_of(source, file)?;
    let place = place(source, file);
    if size < LENGTH_BYTES {
        return Err(Error::model(
            place,
            format_args!("the file has only {size} bytes, too few for a safetensors file"),
            "The download is incomplete; fetch the file again",
        ));
    }
    let first = source.read(file, 0..LENGTH_BYTES).await?;
    let first = first
        .try_into()
        .map_err(|_| Error::Internal(format!("reading 8 bytes of {file} gave another number of them")))?;
    let length = header::json_length(&place, first, size)?;
    let json = source.read(file, LENGTH_BYTES..LENGTH_BYTES + length).await?;
    hash_part(hasher, file, &json);
    hasher.update(&size.to_le_bytes());
    Ok(json)
}

/// Which files hold the model, and which of their tensors.
struct Index {
    /// Sorted and without repetition.
    files: Vec<String>,
    /// Tensor name to file; `None` if there is one file and all of it counts.
    weight_map: Option<HashMap<String, String>>,
}

impl Index {
    fn parse(source: &dyn Source, text: &str) -> Result<Self> {
        let place = place(source, INDEX);
        let json = parse_json(&place, text)?;
        let wrong = |problem: String| Error::model(&place, problem, "Fetch the file again");
        let map = json
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| wrong("it has no object \"weight_map\"".into()))?;
        let mut weight_map = HashMap::with_capacity(map.len());
        for (tensor, file) in map {
            let file = file.as_str().ok_or_else(|| wrong(format!("the file of {tensor:?} is not a name")))?;
            weight_map.insert(tensor.clone(), file.to_string());
        }
        let mut files: Vec<String> = weight_map.values().cloned().collect();
        files.sort();
        files.dedup();
        if files.is_empty() {
            return Err(wrong("it names no tensors".into()));
        }
        let absent: Vec<&str> =
            files.iter().map(String::as_str).filter(|file| source.size(file).is_none()).collect();
        if !absent.is_empty() {
            return Err(Error::model(
                source.describe(),
                format_args!("{} of {} shards are absent: {}", absent.len(), files.len(), absent.join(", ")),
                "The download is incomplete; fetch them too",
            ));
        }
        Ok(Self { files, weight_map: Some(weight_map) })
    }

    /// Leaves of the tensors `found` those that the index names, after checking that they are all
    /// there.
    fn select(&self, source: &dyn Source, mut found: Vec<TensorInfo>) -> Result<Vec<TensorInfo>> {
        let Some(map) = &self.weight_map else { return Ok(found) };
        found.retain(|tensor| map.get(&tensor.name) == Some(&tensor.file));
        if found.len() < map.len() {
            let held: std::collections::HashSet<&str> =
                found.iter().map(|tensor| tensor.name.as_str()).collect();
            // The least name, so that the message does not change from run to run.
            let missing = map.iter().filter(|(name, _)| !held.contains(name.as_str())).min();
            if let Some((name, file)) = missing {
                return Err(Error::model(
                    place(source, file),
                    format_args!("tensor {name:?} is not in it, though {INDEX} says so"),
                    "The files are of different versions of the model; fetch all of them again",
                ));
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::DType;
    use crate::storage::memory::MemorySource;
    use pollster::block_on;

    /// A safetensors file of I16 tensors whose elements count up from 0.
    fn shard(tensors: &[(&str, &[u64])]) -> Vec<u8> {
        let mut bytes =
            header::write(tensors.iter().map(|(name, shape)| (*name, DType::I16, *shape))).unwrap();
        for (_, shape) in tensors {
            for value in 0..shape.iter().product::<u64>() {
                bytes.extend_from_slice(&(value as i16).to_le_bytes());
            }
        }
        bytes
    }

    fn open(files: Vec<(&str, Vec<u8>)>) -> Result<Checkpoint> {
        block_on(Checkpoint::open(Rc::new(MemorySource::new("dir", files))))
    }

    fn refusal(files: Vec<(&str, Vec<u8>)>) -> String {
        open(files).err().expect("must be refused").to_string()
    }

    const CONFIG_TEXT: &[u8] = br#"{"z": 1, "a": 1e-05}"#;

    fn config() -> (&'static str, Vec<u8>) {
        (CONFIG, CONFIG_TEXT.to_vec())
    }

    const A: &str = "model-00001-of-00002.safetensors";
    const B: &str = "model-00002-of-00002.safetensors";

    fn sharded(index: &str) -> Vec<(&'static str, Vec<u8>)> {
        vec![
            config(),
            (INDEX, index.as_bytes().to_vec()),
            (A, shard(&[("x", &[3, 2]), ("extra", &[1])])),
            (B, shard(&[("y", &[4])])),
        ]
    }

    #[test]
    fn a_single_file_is_read_whole_and_by_rows() {
        let checkpoint = open(vec![config(), (SINGLE, shard(&[("s", &[]), ("w", &[3, 2])]))]).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["s", "w"]);
        assert_eq!(checkpoint.total_bytes(), 14);
        assert_eq!(checkpoint.metadata_format(), Some("pt"));
        assert_eq!(checkpoint.config_text().as_bytes(), CONFIG_TEXT);
        assert_eq!(checkpoint.config().as_object().unwrap().keys().next().unwrap(), "z");
        let info = checkpoint.require("w").unwrap();
        assert_eq!((info.dtype, &info.shape[..], info.bytes()), (DType::I16, &[3, 2][..], 12));
        block_on(async {
            assert_eq!(checkpoint.read("w").await.unwrap(), [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
            assert_eq!(checkpoint.read_rows("w", 1..3).await.unwrap(), [2, 0, 3, 0, 4, 0, 5, 0]);
            assert_eq!(checkpoint.read_rows("w", 3..3).await.unwrap(), [0u8; 0]);
            assert!(checkpoint.read_rows("w", 2..4).await.is_err());
            assert!(checkpoint.read_rows("s", 0..1).await.is_err(), "a scalar has no rows");
        });
        let missing = checkpoint.require("v").unwrap_err().to_string();
        assert!(missing.contains("dir: tensor \"v\" is missing"), "{missing}");
        assert!(checkpoint.info("v").is_none());
    }

    #[test]
    fn any_other_single_name_serves_but_not_two() {
        let other = open(vec![config(), ("weights.safetensors", shard(&[("w", &[1])]))]).unwrap();
        assert_eq!(other.require("w").unwrap().file, "weights.safetensors");
        let two = refusal(vec![config(), (A, shard(&[("w", &[1])])), (B, shard(&[("v", &[1])]))]);
        assert!(two.contains(A) && two.contains(B) && two.contains(INDEX), "{two}");
        let pickle = refusal(vec![config(), ("pytorch_model.bin", vec![])]);
        assert!(pickle.contains("pytorch_model.bin") && pickle.contains("convert"), "{pickle}");
        let nothing = refusal(vec![config()]);
        assert!(nothing.contains("no *.safetensors"), "{nothing}");
    }

    #[test]
    fn the_index_decides_what_exists_and_must_be_true() {
        let good = format!(r#"{{"metadata":{{}},"weight_map":{{"y":"{B}","x":"{A}"}}}}"#);
        let checkpoint = open(sharded(&good)).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["x", "y"]);
        assert_eq!(block_on(checkpoint.read_rows("y", 3..4)).unwrap(), [3, 0]);

        let absent = refusal(sharded(r#"{"weight_map":{"x":"gone.safetensors"}}"#));
        assert!(absent.contains("1 of 1 shards are absent: gone.safetensors"), "{absent}");
        let misplaced = refusal(sharded(&format!(r#"{{"weight_map":{{"y":"{A}"}}}}"#)));
        assert!(misplaced.contains(A) && misplaced.contains("\"y\" is not in it"), "{misplaced}");
        for bad in ["{}", r#"{"weight_map":{}}"#, r#"{"weight_map":{"x":1}}"#, "{", "\u{0}"] {
            assert!(refusal(sharded(bad)).contains(INDEX), "{bad}");
        }
    }

    #[test]
    fn config_must_be_there_and_be_json() {
        let absent = refusal(vec![(SINGLE, shard(&[("w", &[1])]))]);
        assert!(absent.contains("no config.json"), "{absent}");
        let broken = refusal(vec![(CONFIG, b"{\"a\": }".to_vec()), (SINGLE, shard(&[("w", &[1])]))]);
        assert!(broken.contains("dir/config.json") && broken.contains("line 1"), "{broken}");
        let binary = refusal(vec![(CONFIG, vec![0xff]), (SINGLE, shard(&[("w", &[1])]))]);
        assert!(binary.contains("UTF-8"), "{binary}");
    }

    #[test]
    fn a_cut_file_is_named_at_every_length() {
        let whole = shard(&[("w", &[3, 2])]);
        for length in 0..whole.len() {
            let text = refusal(vec![config(), (SINGLE, whole[..length].to_vec())]);
            assert!(text.contains("dir/model.safetensors") && text.contains("incomplete"), "{text}");
        }
    }

    #[test]
    fn the_fingerprint_follows_config_headers_and_names_only() {
        let base = || vec![config(), (SINGLE, shard(&[("w", &[2])]))];
        let fingerprint = |files| open(files).unwrap().fingerprint();
        let original = fingerprint(base());
        // A fixed value: a journal written by one version is read by another.
        assert_eq!(original, 0x1da9_a583_cb53_b1ef);
        let mut with_readme = base();
        with_readme.push(("README.md", b"x".to_vec()));
        assert_eq!(fingerprint(with_readme), original);
        assert_ne!(fingerprint(vec![config(), (SINGLE, shard(&[("v", &[2])]))]), original);
        assert_ne!(fingerprint(vec![config(), ("w.safetensors", shard(&[("w", &[2])]))]), original);
        let other_config = (CONFIG, br#"{"z": 2}"#.to_vec());
        assert_ne!(fingerprint(vec![other_config, (SINGLE, shard(&[("w", &[2])]))]), original);
    }
}
