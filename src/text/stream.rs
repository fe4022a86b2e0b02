//! The text of tokens as they come, in pieces that never cut a character.
//!
//! A token may hold a part of a character's bytes, and how a token reads may depend on the one before it
//! (a decoder that drops the space in front of the first word). So some tokens are decoded again with
//! each new one, and what is new in the text is the next piece.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// What a decoder makes of bytes that are not complete UTF-8.
const INCOMPLETE: char = '\u{fffd}';

/// Incremental decoding of one text, special tokens left out.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    ids: Vec<u32>,
    /// Where the tokens begin that are decoded again.
    again: usize,
    /// The tokens before this one are in the text already.
    told: usize,
}

impl<'a> TextStream<'a> {
    /// After the tokens of `before`, of which nothing is repeated.
    pub fn after(tokenizer: &'a Tokenizer, before: &[u32]) -> Self {
        // A few tokens are enough to know how the next one reads.
        const CONTEXT: usize = 8;
        let ids = before[before.len().saturating_sub(CONTEXT)..].to_vec();
        let told = ids.len();
        Self { tokenizer, ids, again: 0, told }
    }

    /// The text that `id` adds, empty while a character is not complete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.next(false)
    }

    /// What is left at the end: characters that were never completed, as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        self.next(true)
    }

    fn next(&mut self, last: bool) -> Result<String> {
        let known = self.tokenizer.decode(&self.ids[self.again..self.told], true)?;
        let all = self.tokenizer.decode(&self.ids[self.again..], true)?;
        if all.ends_with(INCOMPLETE) && !last {
            return Ok(String::new());
        }
        // What was told never changes with more tokens, unless a tokenizer is stranger than those known.
        let new = all.strip_prefix(known.as_str()).map_or(String::new(), str::to_owned);
        if !new.is_empty() {
            (self.again, self.told) = (self.told, self.ids.len());
        }
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{TEXT, bpe_json};
    use super::*;

    fn stream(tokenizer: &Tokenizer, before: &[u32], ids: &[u32]) -> Vec<String> {
        let mut stream = TextStream::after(tokenizer, before);
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        pieces.push(stream.finish().unwrap());
        pieces
    }

    #[test]
    fn pieces_make_the_whole_text_and_cut_no_character() {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        for text in [TEXT, "naïve 😀 — 漢字, e\u{301}", "", "a", "😀"] {
            let ids = tokenizer.encode(text, false).unwrap();
            let pieces = stream(&tokenizer, &[], &ids);
            assert_eq!(pieces.concat(), text);
            assert!(pieces.iter().all(|piece| !piece.contains(INCOMPLETE)), "{pieces:?}");
            // A continuation is what follows, wherever it begins between two characters.
            for at in 0..ids.len() {
                let (before, after) = ids.split_at(at);
                let head = tokenizer.decode(before, true).unwrap();
                if text.starts_with(&head) {
                    assert_eq!(stream(&tokenizer, before, after).concat(), text[head.len()..]);
                }
            }
        }
    }

    #[test]
    fn a_character_that_never_ends_is_told_at_the_end() {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let ids = tokenizer.encode("a😀", false).unwrap();
        assert!(ids.len() > 2, "the emoji has several tokens");
        let pieces = stream(&tokenizer, &[], &ids[..ids.len() - 1]);
        assert_eq!(pieces.concat(), format!("a{INCOMPLETE}"));
        assert!(pieces[..pieces.len() - 1].iter().all(|piece| !piece.contains(INCOMPLETE)));
    }

    #[test]
    fn special_tokens_are_left_out() {
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let bos = tokenizer.token_to_id("<s>").unwrap();
        let mut ids = tokenizer.encode("the sea", false).unwrap();
        ids.insert(1, bos);
        assert_eq!(stream(&tokenizer, &[bos], &ids).concat(), "the sea");
    }
}
