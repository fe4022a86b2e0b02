//! `tokenizer.json`, read by the `tokenizers` crate.

use super::read_optional;
use crate::error::{Error, Result};
use crate::storage::Source;

pub(super) const FILE: &str = "tokenizer.json";

/// A model's tokenizer. Neither truncates nor pads, whatever `tokenizer.json` asks for, as
/// Transformers does unless told otherwise.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    place: String,
}

impl Tokenizer {
    /// A tokenizer from the content of a `tokenizer.json`; `describe` names the file in messages.
    pub fn from_bytes(tokenizer_json: &[u8], describe: &str) -> Result<Self> {
        let wrong = |error: tokenizers::Error| {
            Error::model(
                describe,
                format!("not a tokenizer that can be read: {error}"),
                "Copy the file again from the original model, or write it with a current version of \
                 Transformers (tokenizer.save_pretrained)",
            )
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(wrong)?;
        inner.with_truncation(None).map_err(wrong)?;
        inner.with_padding(None);
        // Added tokens may leave gaps, so the number of tokens says nothing about the highest id.
        let highest = inner.get_vocab(true).into_values().max();
        let vocab_size = highest.map_or(0, |id| id as usize + 1);
        Ok(Self { inner, vocab_size, place: describe.to_string() })
    }

    /// The tokenizer of a model directory.
    pub async fn load(source: &dyn Source) -> Result<Self> {
        match read_optional(source, FILE).await? {
            Some(bytes) => Self::from_bytes(&bytes, &format!("{}/{FILE}", source.describe())),
            None => Err(absent(&source.describe())),
        }
    }

    /// Token ids of `text`. Special tokens that stand in the text become their ids either way;
    /// with `add_special_tokens` those of the tokenizer's template are added (often a `bos_token`
    /// in front). To be used for texts of bounded length, see [`Tokenizer::encode_long`].
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special_tokens).map_err(|error| {
            let problem = format!("the text cannot be tokenized: {error}");
            Error::text(&self.place, problem, "Check that the tokenizer belongs to the model")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of token ids, without special tokens when `skip_special`. Bytes that are not
    /// complete UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|error| {
            let problem = format!("token ids cannot be turned into text: {error}");
            Error::text(&self.place, problem, "Check that the tokenizer belongs to the model")
        })
    }

    /// One more than the highest id. The model's own vocabulary may be larger (padded rows of the
    /// embedding) but not smaller.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}

/// The error for a model directory without `tokenizer.json`.
pub(super) fn absent(place: &str) -> Error {
    Error::model(
        place,
        format!("there is no {FILE}, which is needed to read text"),
        "Copy it from the original model (Transformers writes it with tokenizer.save_pretrained), or give \
         a .jsonl file of {\"input_ids\": […]} rows, which needs no tokenizer",
    )
}

/// Checks that the model has an embedding for every id: `vocab` is the number of its rows.
/// `place` names where the ids come from.
pub fn check_ids(ids: &[u32], vocab: usize, place: &str) -> Result<()> {
    match ids.iter().position(|&id| id as usize >= vocab) {
        None => Ok(()),
        Some(position) => Err(Error::text(
            place,
            format!(
                "token id {} at position {position} is not below the model's vocab_size {vocab}",
                ids[position]
            ),
            "Use the tokenizer, or token ids, that belong to this model",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{Directory, TEXT, bpe_json, word_json};
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let ids = tokenizer.encode(TEXT, false).unwrap();
        assert!(ids.len() < TEXT.len() / 2, "merges are used");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), TEXT);
        assert_eq!(
            tokenizer.decode(&tokenizer.encode("naïve 😀", false).unwrap(), true).unwrap(),
            "naïve 😀"
        );
    }

    #[test]
    fn special_tokens_are_added_recognized_and_skipped() {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let bos = tokenizer.token_to_id("<s>").unwrap();
        let plain = tokenizer.encode("the sea", false).unwrap();
        let with = tokenizer.encode("the sea", true).unwrap();
        assert_eq!(with, [&[bos], plain.as_slice()].concat());
        assert_eq!(tokenizer.encode("<s>the sea", false).unwrap(), with);
        assert_eq!(tokenizer.decode(&with, true).unwrap(), "the sea");
        assert_eq!(tokenizer.decode(&with, false).unwrap(), "<s>the sea");
        assert_eq!(tokenizer.token_to_id("<nothing>"), None);
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let mut json: serde_json::Value = serde_json::from_slice(&word_json(&["a"])).unwrap();
        json["truncation"] = serde_json::json!(
            {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = serde_json::json!(
            {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
             "pad_type_id": 0, "pad_token": "[UNK]"});
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes(), "model").unwrap();
        assert_eq!(tokenizer.encode("a a a a", false).unwrap(), [1, 1, 1, 1]);
    }

    #[test]
    fn vocab_size_is_one_more_than_the_highest_id() {
        let mut json: serde_json::Value = serde_json::from_slice(&word_json(&["a", "b"])).unwrap();
        json["model"]["vocab"]["far"] = 41.into();
        let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes(), "model").unwrap();
        assert_eq!(tokenizer.vocab_size(), 42);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_named() {
        check_ids(&[0, 9], 10, "rows.jsonl, line 3").unwrap();
        let message = check_ids(&[0, 10], 10, "rows.jsonl, line 3").unwrap_err().to_string();
        for part in ["rows.jsonl, line 3", "token id 10", "position 1", "vocab_size 10"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn a_missing_or_broken_file_is_a_clear_error() {
        let error = pollster::block_on(Tokenizer::load(&Directory::new(&[]))).err().unwrap().to_string();
        assert!(error.contains("no tokenizer.json") && error.contains("input_ids"), "{error}");
        let directory = Directory::new(&[("tokenizer.json", b"{\"model\": 1")]);
        let error = pollster::block_on(Tokenizer::load(&directory)).err().unwrap().to_string();
        assert!(error.starts_with("model/tokenizer.json: not a tokenizer"), "{error}");
        let directory = Directory::new(&[("tokenizer.json", &word_json(&["a"]))]);
        assert_eq!(pollster::block_on(Tokenizer::load(&directory)).unwrap().vocab_size(), 2);
    }
}
