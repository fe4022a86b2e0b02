//! Small tokenizers and a directory in memory for the tests of this module.

use std::ops::Range;
use std::sync::LazyLock;

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use crate::error::{Error, Result};
use crate::storage::{FileEntry, LocalFuture, Source};

pub(super) const TEXT: &str = "The whale swam past the ship, and the men who stood along the rail watched it go. \
    Nobody spoke. The sea was grey, the sky was grey, and where the two met there was no line at all.\n\n\
    \"There she blows!\" cried the boy at the mast, 30 feet above them; but the old captain's eyes were on \
    the clouds.  He had seen such a sky twice before, and twice it had cost him a ship.\n\tStill they waited. \
    Towards evening the wind went round to the north, the swell rose, and the whale came back.\n";

fn train(mut tokenizer: Tokenizer, special: &[&str], byte_level: bool) -> Tokenizer {
    let mut trainer = BpeTrainer::builder().vocab_size(420).show_progress(false);
    if byte_level {
        trainer = trainer.initial_alphabet(ByteLevel::alphabet().into_iter().collect());
    }
    let special = special.iter().map(|token| AddedToken::from(*token, true)).collect();
    let mut trainer: TrainerWrapper = trainer.special_tokens(special).build().into();
    tokenizer.train(&mut trainer, std::iter::once(TEXT)).unwrap();
    tokenizer
}

/// Byte-level BPE in the manner of GPT-2, Llama 3 and Qwen, with `<s>` put in front of a text.
pub(super) fn bpe_json() -> Vec<u8> {
    static JSON: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let mut tokenizer = Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        let mut tokenizer = train(tokenizer, &["<s>", "</s>"], true);
        let bos = tokenizer.token_to_id("<s>").unwrap();
        let template = TemplateProcessing::builder()
            .try_single("<s> $A")
            .unwrap()
            .special_tokens(vec![("<s>", bos)])
            .build();
        tokenizer.with_post_processor(Some(template.unwrap()));
        tokenizer.to_string(false).unwrap().into_bytes()
    });
    JSON.clone()
}

/// BPE in the manner of Llama 2: a space is put in front of every text, the text is one word, and
/// unknown characters next to each other become one token.
pub(super) fn metaspace_json() -> Vec<u8> {
    static JSON: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let model = BPE::builder().unk_token("<unk>".into()).fuse_unk(true).build().unwrap();
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(Metaspace::new('▁', PrependScheme::Always, true)));
        let tokenizer = train(tokenizer, &["<unk>", "<s>", "</s>"], false);
        let mut json: serde_json::Value = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
        json["pre_tokenizer"] = serde_json::Value::Null;
        json["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
        json.to_string().into_bytes()
    });
    JSON.clone()
}

/// Words between spaces; `[UNK]` is 0 and the given words are 1, 2, ….
pub(super) fn word_json(words: &[&str]) -> Vec<u8> {
    let mut vocab = serde_json::Map::new();
    for word in std::iter::once(&"[UNK]").chain(words) {
        vocab.insert(word.to_string(), vocab.len().into());
    }
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    });
    json.to_string().into_bytes()
}

/// A directory named `model` in memory.
pub(super) struct Directory {
    entries: Vec<FileEntry>,
    contents: Vec<Vec<u8>>,
}

impl Directory {
    pub(super) fn new(files: &[(&str, &[u8])]) -> Self {
        let entry = |(name, content): &(&str, &[u8])| FileEntry {
            name: name.to_string(),
            size: content.len() as u64,
        };
        Self {
            entries: files.iter().map(entry).collect(),
            contents: files.iter().map(|file| file.1.to_vec()).collect(),
        }
    }
}

impl Source for Directory {
    fn files(&self) -> &[FileEntry] {
        &self.entries
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        let found = self.entries.iter().position(|entry| entry.name == file);
        let bytes = found
            .and_then(|index| self.contents[index].get(range.start as usize..range.end as usize))
            .ok_or_else(|| Error::io("read", file, "no such bytes"));
        Box::pin(std::future::ready(bytes.map(<[u8]>::to_vec)))
    }

    fn describe(&self) -> String {
        "model".to_string()
    }
}
