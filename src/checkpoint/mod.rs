//! Checkpoints: safetensors files, the tensors of quantized layers in them, and their configs.
//!
//! Everything is lazy: opening a checkpoint reads headers only, and no function here holds more
//! than one tensor (for a quantized layer, the tensors of that one layer).

pub mod compressed;
pub mod config;
pub mod dtype;
mod experts;
pub mod floats;
pub mod format;
pub mod gptq;
pub mod header;
pub mod linear;
pub mod pack;
pub mod reader;
pub mod verify;
pub mod writer;

pub use config::QuantConfig;
pub use dtype::DType;
pub use format::{Format, StoredLayer};
pub use header::TensorInfo;
pub use linear::GptqLinear;
pub use pack::ZeroFormat;
pub use reader::Checkpoint;
pub use verify::VERIFY;
pub use writer::{Layout, TensorSpec, Writer};

/// The model's description; written last, so a directory without it is unfinished.
pub const CONFIG: &str = "config.json";

/// Says which shard holds which tensor when there are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// The only weights file of a model that has one.
pub const SINGLE: &str = "model.safetensors";

/// Holds the same object as `quantization_config` in [`CONFIG`], for tools that read it here.
pub const QUANTIZE_CONFIG: &str = "quantize_config.json";

/// Added to the name of a file that is still being written.
pub const PART: &str = ".part";

/// Whether a file is, or describes, weights in any format, finished or not: what is not copied
/// from a model that is being quantized, and what is stale in a directory that is overwritten.
pub fn is_weights_file(name: &str) -> bool {
    const ENDINGS: [&str; 10] = [
        ".safetensors",
        ".safetensors.index.json",
        ".bin",
        ".bin.index.json",
        ".pt",
        ".pth",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
    ];
    let name = name.strip_suffix(PART).unwrap_or(name);
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_told_from_what_goes_with_them() {
        for name in [SINGLE, INDEX, "model-00001-of-00002.safetensors.part", "pytorch_model.bin"] {
            assert!(is_weights_file(name), "{name}");
        }
        for name in [CONFIG, QUANTIZE_CONFIG, "tokenizer.json", "tokenizer.model", "modeling_x.py", PART] {
            assert!(!is_weights_file(name), "{name}");
        }
    }
}
