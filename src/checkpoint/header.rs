//! The header of one safetensors file, read with 64-bit offsets and checked before it is believed.
//!
//! Layout of a file: 8 bytes, the header's length n, little-endian; n bytes of JSON, an object
//! from tensor name to `{"dtype", "shape", "data_offsets": [begin, end]}` and optionally
//! `"__metadata__"` to a map of strings, padded with spaces; then the tensors without gaps.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::dtype::DType;
use crate::error::{Error, Result};

/// Bytes before the header.
pub const LENGTH_BYTES: u64 = 8;

/// The format's own limit on the length of a header in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The one key of the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// Where a tensor lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// Name of the file in its source.
    pub file: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// One past the last byte, counted from the start of the file.
    pub end: u64,
}

impl TensorInfo {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// A header that has been checked against its file's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// In the order of their bytes in the file.
    pub tensors: Vec<TensorInfo>,
    pub metadata: BTreeMap<String, String>,
}

const DAMAGED: &str = "The file is damaged or was written wrongly; fetch it again";

/// Length of the JSON part, from the first eight bytes of a file of `file_size` bytes.
///
/// `place` is how messages name the file.
///
/// # Errors
/// [`Error::Model`] if the bytes cannot begin a safetensors file or the file ends within its header.
pub fn json_length(place: &str, first: [u8; 8], file_size: u64) -> Result<u64> {
    // A clone without large-file support leaves text files that say where the weights are.
    if &first == b"version " {
        return Err(Error::model(
            place,
            "this is a git-lfs pointer, not the weights it stands for",
            "Run `git lfs pull` in the model's directory, or download the file itself",
        ));
    }
    let length = u64::from_le_bytes(first);
    if length > MAX_HEADER_BYTES {
        return Err(Error::model(
            place,
            format_args!(
                "not a safetensors file: its header would have {length} bytes, and {MAX_HEADER_BYTES} is the most"
            ),
            DAMAGED,
        ));
    }
    if LENGTH_BYTES + length > file_size {
        return Err(Error::model(
            place,
            format_args!("the file ends within its header ({file_size} of {} bytes)", LENGTH_BYTES + length),
            "The download is incomplete; fetch the file again",
        ));
    }
    Ok(length)
}

/// A tensor as the JSON has it. Offsets count from the end of the header.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The JSON object in the order of the file, so that repeated names can be seen.
struct RawHeader {
    tensors: Vec<(String, RawTensor)>,
    metadata: Option<BTreeMap<String, String>>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: None };
                while let Some(name) = map.next_key::<String>()? {
                    if name != METADATA {
                        header.tensors.push((name, map.next_value()?));
                    } else if header.metadata.replace(map.next_value()?).is_some() {
                        return Err(serde::de::Error::custom("__metadata__ appears twice"));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Parses and checks the JSON part of the header of `file`, `file_size` bytes long in all.
///
/// Every tensor must have a known dtype, as many bytes as dtype and shape say, and a name of its
/// own; sorted by offset, the tensors must cover the rest of the file without holes or overlaps.
///
/// `place` is how messages name the file. Memory is proportional to the header.
///
/// # Errors
/// [`Error::Model`] naming the tensor and what is wrong with it; [`Error::Unsupported`] for a dtype
/// that is not known here.
pub fn parse(place: &str, file: &str, json: &[u8], file_size: u64) -> Result<Header> {
    let damaged = |problem: fmt::Arguments<'_>| Error::model(place, problem, DAMAGED);
    if json.first() != Some(&b'{') {
        return Err(damaged(format_args!("not a safetensors file: its header does not begin with '{{'")));
    }
    let raw: RawHeader = serde_json::from_slice(json)
        .map_err(|error| damaged(format_args!("the header cannot be understood ({error})")))?;

    let data_start = LENGTH_BYTES + json.len() as u64;
    let data_size = file_size
        .checked_sub(data_start)
        .ok_or_else(|| damaged(format_args!("the file ends within its header")))?;

    let mut names = HashSet::with_capacity(raw.tensors.len());
    if let Some((name, _)) = raw.tensors.iter().find(|(name, _)| !names.insert(name.as_str())) {
        return Err(damaged(format_args!("tensor {name:?} appears twice in the header")));
    }

    let mut tensors = raw.tensors;
    tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
    let mut infos = Vec::with_capacity(tensors.len());
    let mut expected = 0;
    let mut previous = String::new();
    for (name, tensor) in tensors {
        let (begin, end) = tensor.data_offsets;
        if begin > end {
            return Err(damaged(format_args!("tensor {name:?} ends ({end}) before it begins ({begin})")));
        }
        if begin > expected {
            let size = begin - expected;
            return Err(damaged(format_args!("{size} bytes before tensor {name:?} belong to no tensor")));
        }
        if begin < expected {
            return Err(damaged(format_args!("tensors {previous:?} and {name:?} overlap")));
        }
        let dtype = DType::parse(&tensor.dtype).ok_or_else(|| {
            Error::unsupported(
                format_args!("{place}: tensor {name:?} has the element type {:?}", tensor.dtype),
                "Use a checkpoint whose weights are F32, F16 or BF16",
            )
        })?;
        match dtype.bytes_of(&tensor.shape) {
            Some(bytes) if bytes == end - begin => {}
            Some(bytes) => {
                return Err(damaged(format_args!(
                    "tensor {name:?} of shape {:?} and type {dtype} needs {bytes} bytes, but {} are set aside",
                    tensor.shape,
                    end - begin
                )));
            }
            None => {
                return Err(damaged(format_args!(
                    "tensor {name:?} of shape {:?} is impossibly large",
                    tensor.shape
                )));
            }
        }
        expected = end;
        previous.clone_from(&name);
        // Only sums that the check of the whole size below allows are used; until then an absurd
        // offset must merely not overflow.
        infos.push(TensorInfo {
            name,
            file: file.to_string(),
            dtype,
            shape: tensor.shape,
            begin: data_start.saturating_add(begin),
            end: data_start.saturating_add(end),
        });
    }

    if expected > data_size {
        return Err(Error::model(
            place,
            format_args!("the file is {} bytes shorter than its header says", expected - data_size),
            "The download is incomplete; fetch the file again",
        ));
    }
    if expected < data_size {
        return Err(damaged(format_args!(
            "the file is {} bytes longer than its header says",
            data_size - expected
        )));
    }
    Ok(Header { tensors: infos, metadata: raw.metadata.unwrap_or_default() })
}

/// The header, with its length in front, of a file that holds `tensors` in this order without
/// gaps. It is padded with spaces to a multiple of 8 bytes, and its metadata is `{"format": "pt"}`,
/// without which Transformers refuses a file.
pub fn write<'a>(tensors: impl IntoIterator<Item = (&'a str, DType, &'a [u64])>) -> Result<Vec<u8>> {
    let mut object = serde_json::Map::new();
    object.insert(METADATA.to_string(), serde_json::json!({ "format": "pt" }));
    let mut begin = 0u64;
    for (name, dtype, shape) in tensors {
        let end = dtype.bytes_of(shape).and_then(|bytes| begin.checked_add(bytes)).ok_or_else(|| {
            Error::Internal(format!("tensor {name} of shape {shape:?} is larger than 64 bits can count"))
        })?;
        let entry = serde_json::json!({
            "dtype": dtype.name(),
            "shape": shape,
            "data_offsets": [begin, end],
        });
        if object.insert(name.to_string(), entry).is_some() {
            return Err(Error::Internal(format!("tensor {name} is planned twice")));
        }
        begin = end;
    }
    let mut json = serde_json::Value::Object(object).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > MAX_HEADER_BYTES {
        return Err(Error::options(
            format_args!(
                "the header of an output file would have {} bytes, and {MAX_HEADER_BYTES} is the most",
                json.len()
            ),
            "Write smaller shards",
        ));
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use safetensors::SafeTensors;

    /// Reads a whole file as the reader does, from its bytes.
    fn read(bytes: &[u8]) -> Result<Header> {
        let mut first = [0; 8];
        match bytes.get(..8) {
            Some(prefix) => first.copy_from_slice(prefix),
            None => return Err(Error::Internal("shorter than a length".into())),
        }
        let length = json_length("dir/f", first, bytes.len() as u64)? as usize;
        parse("dir/f", "f", &bytes[8..8 + length], bytes.len() as u64)
    }

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn refusal(json: &str, data: usize) -> String {
        read(&file(json, data)).expect_err(json).to_string()
    }

    const GOOD: &str = r#"{"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"a":{"dtype":"I32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F32","shape":[0,9],"data_offsets":[16,16]}}"#;

    #[test]
    fn a_good_header_gives_absolute_offsets_in_file_order() {
        let header = read(&file(GOOD, 16)).unwrap();
        let start = 8 + GOOD.len() as u64;
        let seen: Vec<_> =
            header.tensors.iter().map(|t| (t.name.as_str(), t.begin - start, t.end - start)).collect();
        assert_eq!(seen, [("a", 0, 4), ("b", 4, 16), ("e", 16, 16)]);
        assert_eq!(header.tensors[1].shape, [2, 3]);
        assert_eq!(header.tensors[1].dtype, DType::F16);
        assert_eq!(header.tensors[1].bytes(), 12);
    }

    #[test]
    fn each_fault_is_named_with_file_tensor_and_remedy() {
        let short = refusal(GOOD, 10);
        assert!(short.contains("dir/f") && short.contains("6 bytes shorter"), "{short}");
        assert!(short.contains("fetch the file again"), "{short}");
        let long = refusal(GOOD, 17);
        assert!(long.contains("1 bytes longer"), "{long}");

        let one = |offsets: &str, dtype: &str, shape: &str| {
            format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let hole = refusal(&one("[2,6]", "I32", "[1]"), 6);
        assert!(hole.contains("2 bytes before tensor \"w\""), "{hole}");
        let backwards = refusal(&one("[4,0]", "I32", "[1]"), 4);
        assert!(backwards.contains("\"w\" ends (0) before it begins (4)"), "{backwards}");
        let size = refusal(&one("[0,4]", "F16", "[3]"), 4);
        assert!(size.contains("needs 6 bytes, but 4"), "{size}");
        let dtype = refusal(&one("[0,4]", "F4", "[8]"), 4);
        assert!(dtype.contains("F4") && dtype.contains("\"w\""), "{dtype}");
        let huge = refusal(&one("[0,4]", "F16", "[18446744073709551615,2]"), 4);
        assert!(huge.contains("impossibly large"), "{huge}");
        let far = refusal(&one("[0,18446744073709551615]", "U8", "[18446744073709551615]"), 4);
        assert!(far.contains("shorter than its header"), "{far}");
        let negative = refusal(&one("[0,4]", "F32", "[-1]"), 4);
        assert!(negative.contains("cannot be understood"), "{negative}");

        let overlap = refusal(
            r#"{"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"I32","shape":[1],"data_offsets":[2,6]}}"#,
            6,
        );
        assert!(overlap.contains("\"a\" and \"b\" overlap"), "{overlap}");
        let twice = refusal(
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
            2,
        );
        assert!(twice.contains("\"a\" appears twice"), "{twice}");
        let metadata_twice = refusal(r#"{"__metadata__":{},"__metadata__":{}}"#, 0);
        assert!(metadata_twice.contains("twice"), "{metadata_twice}");

        assert!(refusal("[]", 0).contains("does not begin"));
        assert!(refusal("", 0).contains("does not begin"));
        assert!(refusal("{", 0).contains("cannot be understood"));
    }

    #[test]
    fn what_is_not_safetensors_is_recognised_from_eight_bytes() {
        let pointer = json_length("d/f", *b"version ", 130).unwrap_err().to_string();
        assert!(pointer.contains("git-lfs") && pointer.contains("git lfs pull"), "{pointer}");
        let huge = json_length("d/f", u64::MAX.to_le_bytes(), 1000).unwrap_err().to_string();
        assert!(huge.contains("not a safetensors file"), "{huge}");
        assert!(json_length("d/f", (MAX_HEADER_BYTES + 1).to_le_bytes(), u64::MAX).is_err());
        assert_eq!(json_length("d/f", 100u64.to_le_bytes(), 108).unwrap(), 100);
        let cut = json_length("d/f", 100u64.to_le_bytes(), 107).unwrap_err().to_string();
        assert!(cut.contains("107 of 108") && cut.contains("incomplete"), "{cut}");
    }

    type Spec = (String, DType, Vec<u64>);

    fn specs() -> impl Strategy<Value = Vec<Spec>> {
        let one = (
            "[a-zé\"\\\\.]{1,8}",
            proptest::sample::select(DType::ALL.to_vec()),
            proptest::collection::vec(0u64..5, 0..4),
        );
        proptest::collection::vec(one, 0..8).prop_map(|mut specs| {
            specs.sort_by(|a, b| a.0.cmp(&b.0));
            specs.dedup_by(|a, b| a.0 == b.0);
            specs.reverse();
            specs
        })
    }

    fn written(specs: &[Spec]) -> Vec<u8> {
        let mut bytes = write(specs.iter().map(|(n, d, s)| (n.as_str(), *d, s.as_slice()))).unwrap();
        let data: u64 = specs.iter().map(|(_, dtype, shape)| dtype.bytes_of(shape).unwrap()).sum();
        bytes.resize(bytes.len() + data as usize, 0);
        bytes
    }

    proptest! {
        #[test]
        fn ours_reads_back_equal_here_and_in_the_crate(specs in specs()) {
            let bytes = written(&specs);
            let header = read(&bytes).unwrap();
            prop_assert_eq!(header.metadata.get("format").map(String::as_str), Some("pt"));
            let theirs = SafeTensors::deserialize(&bytes).unwrap();
            prop_assert_eq!(theirs.len(), specs.len());
            let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
            prop_assert_eq!(length % 8, 0);
            prop_assert_eq!(header.tensors.len(), specs.len());
            for ((name, dtype, shape), tensor) in specs.iter().zip(&header.tensors) {
                prop_assert_eq!(&tensor.name, name);
                prop_assert_eq!(tensor.dtype, *dtype);
                prop_assert_eq!(&tensor.shape, shape);
                let info = metadata.info(name).unwrap();
                prop_assert_eq!(info.data_offsets.0 as u64 + 8 + length as u64, tensor.begin);
                prop_assert_eq!(info.data_offsets.1 as u64 + 8 + length as u64, tensor.end);
            }
        }

        #[test]
        fn theirs_reads_back_equal_here(specs in specs()) {
            let views: Vec<_> = specs
                .iter()
                .map(|(name, dtype, shape)| {
                    let theirs = serde_json::from_value(dtype.name().into()).unwrap();
                    let shape: Vec<usize> = shape.iter().map(|&extent| extent as usize).collect();
                    (name.clone(), theirs, shape, vec![1u8; dtype.bytes_of(&specs_shape(&specs, name)).unwrap() as usize])
                })
                .collect();
            let tensors = views.iter().map(|(name, dtype, shape, data)| {
                (name.clone(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
            });
            let bytes = safetensors::serialize(tensors, None).unwrap();
            let header = read(&bytes).unwrap();
            let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
            prop_assert_eq!(header.tensors.len(), specs.len());
            for tensor in &header.tensors {
                let info = metadata.info(&tensor.name).unwrap();
                prop_assert_eq!(info.data_offsets.0 as u64 + 8 + length as u64, tensor.begin);
                prop_assert_eq!(tensor.shape.clone(), specs_shape(&specs, &tensor.name));
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), size in any::<u64>()) {
            let _ = read(&bytes);
            let _ = parse("p", "f", &bytes, size);
        }

        /// A header damaged anywhere is refused, or means the same to the crate.
        #[test]
        fn a_damaged_header_is_accepted_only_if_the_crate_accepts_it(
            specs in specs(),
            at in any::<proptest::sample::Index>(),
            with in proptest::sample::select(b"{}[]\",:0123456789-.eE \\x\0\xff".to_vec()),
            cut in proptest::option::of(any::<proptest::sample::Index>()),
        ) {
            let mut bytes = written(&specs);
            let index = at.index(bytes.len());
            bytes[index] = with;
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(header) = read(&bytes) {
                let (length, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
                for tensor in &header.tensors {
                    let info = metadata.info(&tensor.name).unwrap();
                    prop_assert_eq!(info.data_offsets.0 as u64 + 8 + length as u64, tensor.begin);
                }
            }
        }
    }

    fn specs_shape(specs: &[Spec], name: &str) -> Vec<u64> {
        specs.iter().find(|spec| spec.0 == name).unwrap().2.clone()
    }
}
