//! The embedded demo model and its texts; web/demo/README.md says where they come from.

use crate::storage::memory::MemorySource;
use crate::text::TextFile;

/// The model directory.
pub fn source() -> MemorySource {
    let files: [(&str, &'static [u8]); 5] = [
        ("config.json", include_bytes!("../web/demo/model/config.json")),
        ("generation_config.json", include_bytes!("../web/demo/model/generation_config.json")),
        ("model.safetensors", include_bytes!("../web/demo/model/model.safetensors")),
        ("tokenizer.json", include_bytes!("../web/demo/model/tokenizer.json")),
        ("tokenizer_config.json", include_bytes!("../web/demo/model/tokenizer_config.json")),
    ];
    MemorySource::new("the demo model", files)
}

/// Text for calibration, not among what the model was trained on.
pub fn calibration() -> TextFile {
    TextFile {
        name: "calibration.txt".to_owned(),
        content: include_bytes!("../web/demo/calibration.txt").to_vec(),
    }
}

/// Text for evaluation, in neither of the others.
pub fn evaluation() -> TextFile {
    TextFile {
        name: "evaluation.txt".to_owned(),
        content: include_bytes!("../web/demo/evaluation.txt").to_vec(),
    }
}
