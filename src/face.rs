//! What settings and actions are called where a person meets them: as options of the command line, or
//! as fields and buttons of the page. Messages of the core name them through this table, so that each
//! face speaks its own language. A build has one face: the page is what is built for wasm32.

use std::fmt;

/// A name or a phrase of two faces.
#[derive(Debug, Clone, Copy)]
pub struct Words {
    option: &'static str,
    page: &'static str,
}

impl fmt::Display for Words {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if cfg!(target_arch = "wasm32") { self.page } else { self.option })
    }
}

const fn words(option: &'static str, page: &'static str) -> Words {
    Words { option, page }
}

// Settings. What stands in quotation marks is a label in index.html.

pub const PRESET: Words = words("--preset", "“Preset”");
pub const BITS: Words = words("--bits", "“Bits per weight”");
pub const GROUP_SIZE: Words = words("--group-size", "“Group size”");
pub const AUTO_GROUPS: Words = words("--group-size auto", "the group size “largest that divides”");
pub const WHOLE_ROW: Words = words("--group-size -1", "the group size “whole row”");
pub const SYM: Words = words("--sym", "“Zero point”");
pub const DESC_ACT: Words = words("--desc-act", "“Activation order”");
pub const ALPHA: Words = words("--alpha", "“Correction”");
pub const MEASURED_ALPHA: Words = words("--alpha auto", "“as far as held-out text asks for”");
pub const REFIT: Words = words("--refit", "“Refit of scales”");
// The page leaves the next three to the preset.
pub const SCALING: Words = words("--scaling", "the scaling of inputs");
pub const STATIC_GROUPS: Words = words("--static-groups", "the choice of static groups");
pub const MSE: Words = words("--mse", "the search of scales");
pub const DAMP_PERCENT: Words = words("--damp-percent", "“Damping”");
pub const SAMPLES: Words = words("--samples", "“Samples”");
pub const SEQ_LEN: Words = words("--seq-len", "“Tokens in a sample”");
pub const MAX_MEMORY: Words = words("--max-memory", "“Memory limit”");
pub const FORMAT: Words = words("--format", "“File format”");
pub const AS_COMPRESSED: Words = words("--format compressed-tensors", "the file format “compressed-tensors”");
pub const AS_GPTQ: Words = words("--format gptq", "the file format “gptq”");
pub const AS_GPTQ_V2: Words = words("--format gptq_v2", "the file format “gptq_v2”");
pub const OVERRIDE: Words = words("--override", "“Layers that differ”");
pub const SKIP: Words = words("--skip", "“left in 16 bits”");
pub const ALL_EXPERTS: Words = words("--all-experts", "“Calibrate every expert with every token”");
pub const QUANTIZE_LM_HEAD: Words = words("--quantize-lm-head", "“Quantize the output head too”");
pub const SHARD_SIZE: Words = words("--shard-size", "“Most in one file”");

// What to do.

pub const USE_CPU: Words = words("Use --device cpu", "Choose the CPU as device");
pub const GO_ON: Words = words("repeat the command with --resume to go on", "press “Resume” to go on");
pub const BEGIN_AGAIN: Words = words(
    "nothing is written yet; repeat the command to begin again",
    "nothing is written yet; press “Quantize” to begin again",
);
pub const START_ANEW: Words =
    words("Start again with --overwrite", "Press “Start anew instead”, or choose another folder");
pub const REPEAT_OR_START_ANEW: Words = words(
    "Repeat the command that was stopped, or start anew with --overwrite",
    "Choose what was chosen then, or press “Start anew instead”",
);
pub const WHAT_SHOWS_IT: Words = words("the command that shows it", "what was chosen and pressed before it");

/// All of the above.
pub const ALL: [Words; 32] = [
    PRESET,
    BITS,
    GROUP_SIZE,
    AUTO_GROUPS,
    WHOLE_ROW,
    SYM,
    DESC_ACT,
    SCALING,
    STATIC_GROUPS,
    MSE,
    DAMP_PERCENT,
    ALPHA,
    MEASURED_ALPHA,
    REFIT,
    SAMPLES,
    SEQ_LEN,
    MAX_MEMORY,
    FORMAT,
    AS_COMPRESSED,
    AS_GPTQ,
    AS_GPTQ_V2,
    OVERRIDE,
    SKIP,
    QUANTIZE_LM_HEAD,
    ALL_EXPERTS,
    SHARD_SIZE,
    USE_CPU,
    GO_ON,
    BEGIN_AGAIN,
    START_ANEW,
    REPEAT_OR_START_ANEW,
    WHAT_SHOWS_IT,
];

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// The words after `--` in a text.
    fn options(text: &str) -> Vec<&str> {
        let end =
            |rest: &str| rest.find(|c: char| !(c.is_ascii_lowercase() || c == '-')).unwrap_or(rest.len());
        text.match_indices("--")
            .filter(|(at, _)| text[at + 2..].starts_with(|c: char| c.is_ascii_lowercase()))
            .map(|(at, _)| &text[at..at + 2 + end(&text[at + 2..])])
            .collect()
    }

    #[test]
    fn every_name_is_that_of_its_face() {
        use clap::CommandFactory;
        let mut command = crate::cli::Cli::command();
        let quantize = command.find_subcommand_mut("quantize").unwrap().render_long_help().to_string();
        let page = include_str!("../index.html");
        for words in ALL {
            for option in options(words.option) {
                assert!(options(&quantize).contains(&option), "quantize has no option {option}");
            }
            assert!(options(words.page).is_empty(), "{}", words.page);
            for label in words.page.split('“').skip(1) {
                let label = label.split('”').next().unwrap();
                assert!(page.contains(&format!(">{label}")), "index.html has no label {label}");
            }
        }
    }

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => sources(&path, found),
                false => found.push(path),
            }
        }
    }

    /// What only one face has may use that one's words.
    #[test]
    fn the_core_names_no_option_itself() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let native = [
            "cli",
            "face.rs",
            "storage/native.rs",
            "device/adapters.rs",
            "web/adapter.rs",
            "pipeline/check.rs",
            "pipeline/convert.rs",
        ];
        let mut files = vec![];
        sources(&root, &mut files);
        assert!(files.len() > 50);
        for path in files {
            if native.iter().any(|allowed| path.starts_with(root.join(allowed))) {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                assert!(options(line).is_empty(), "{}: {line}", path.display());
            }
        }
    }
}
