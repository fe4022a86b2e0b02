//! Passages whose last word is to be foretold, as in LAMBADA (Paperno et al. 2016, arXiv 1606.06031).

use super::calibration::{TextFile, utf8};
use super::rows::{Row, RowFile};
use super::tokenizer::check_ids;
use super::{ModelText, error_in};
use crate::error::{Error, Result};

/// A passage as token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    pub ids: Vec<u32>,
    /// Where the last word's ids begin, at least 1.
    pub last_word: usize,
}

/// The passages of a file of `{"text"}` rows, cut at the front to at most `seq_len` tokens, and how many rows
/// have none: a text needs two words.
///
/// # Errors
/// [`Error::Text`] for other rows, a malformed one (by line), or a file without any passage; as
/// [`super::evaluation_segments`] for the tokenizer.
pub fn passages(text: &ModelText, file: &TextFile, seq_len: usize) -> Result<(Vec<Passage>, usize)> {
    let rows = RowFile::parse(&file.name, utf8(&file.name, &file.content)?, text.vocab_size())?;
    let tokenizer = text.tokenizer()?;
    let (mut found, mut skipped) = (Vec::new(), 0);
    for index in 0..rows.len() {
        let Row::Text(content) = rows.row(index)? else {
            return Err(Error::text(
                rows.place(index),
                "a passage is a row of \"text\"",
                "Give a .jsonl of {\"text\": …} rows",
            ));
        };
        let content = content.trim_end();
        let Some((context, _)) = content.rsplit_once(char::is_whitespace) else {
            skipped += 1;
            continue;
        };
        let place = rows.place(index);
        let encode = |part: &str| tokenizer.encode(part, true).map_err(|error| error_in(&place, error));
        let (ids, context) = (encode(content)?, encode(context.trim_end())?);
        check_ids(&ids, text.vocab_size(), &place)?;
        // Where the two part is where the last word begins, also when it begins inside a token.
        let last_word = ids.iter().zip(&context).take_while(|(a, b)| a == b).count();
        match Passage::cut(ids, last_word, seq_len) {
            Some(passage) => found.push(passage),
            None => skipped += 1,
        }
    }
    match found.is_empty() {
        true => Err(Error::text(
            &file.name,
            format!("0 usable of {}, because none has two words", rows.len()),
            "Give a .jsonl of {\"text\": …} rows, each a passage",
        )),
        false => Ok((found, skipped)),
    }
}

impl Passage {
    /// The last `seq_len` ids; `None` when no context is left.
    fn cut(mut ids: Vec<u32>, last_word: usize, seq_len: usize) -> Option<Self> {
        let dropped = ids.len().saturating_sub(seq_len);
        let last_word = last_word.checked_sub(dropped).filter(|&place| place > 0)?;
        ids.drain(..dropped);
        (last_word < ids.len()).then_some(Self { ids, last_word })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::bpe_json;
    use super::super::tokenizer::Tokenizer;
    use super::*;

    fn words() -> ModelText {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "tokenizer.json").unwrap();
        ModelText::new(Some(tokenizer), None, 1000, "model")
    }

    fn file(content: &str) -> TextFile {
        TextFile { name: "p.jsonl".into(), content: content.as_bytes().to_vec() }
    }

    #[test]
    fn the_last_word_is_what_the_context_lacks() {
        let text = words();
        let tokenizer = text.tokenizer().unwrap();
        let (found, skipped) =
            passages(&text, &file("{\"text\": \"the cat sat on the mat \"}\n{\"text\": \"cat\"}\n"), 64)
                .unwrap();
        assert_eq!(skipped, 1);
        let [passage] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(passage.ids, tokenizer.encode("the cat sat on the mat", true).unwrap());
        assert!(passage.last_word >= 1 && passage.last_word < passage.ids.len());
        let (cut, _) =
            passages(&text, &file("{\"text\": \"the cat sat on the mat\"}"), passage.ids.len() - 1).unwrap();
        assert_eq!(cut[0].ids, passage.ids[1..]);
        assert_eq!(cut[0].last_word, passage.last_word - 1);
    }

    #[test]
    fn other_rows_are_refused_by_line() {
        let refused = |content: &str| passages(&words(), &file(content), 64).unwrap_err().to_string();
        assert!(refused("{\"input_ids\": [1, 2]}").contains("line 1"));
        assert!(refused("{\"text\": \"cat\"}").contains("0 usable of 1"));
    }
}
