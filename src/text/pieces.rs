//! Tokenizing a long text in pieces.
//!
//! A whole book as one call costs a hundred bytes and more per token, and some tokenizers treat a
//! text as one word, whose merges take more than linear time. So a text is cut every 64 KiB or so,
//! at a place where the two sides tokenize apart as they do together. That is not left to a rule
//! about whitespace (a SentencePiece tokenizer puts a space in front of every text, a byte-level
//! one glues the space to the next word): each piece starts with the character before the cut, its
//! *lead*, whose ids are dropped again, and a cut is taken only if the text around it shows that
//! this gives the ids of the uncut text.

use std::ops::Range;

#[cfg(not(target_arch = "wasm32"))]
use rayon::prelude::*;

use super::Tokenizer;
use crate::error::Result;

/// Large enough that the cuts cost nothing, small enough that an encoding takes a few MB.
const PIECE_BYTES: usize = 1 << 16;
/// Bytes on each side of a cut that must tokenize the same with and without it.
const CONTEXT_BYTES: usize = 96;
/// Places tried in one piece before a larger piece is taken.
const CANDIDATES: usize = 48;

/// A part of a text that is tokenized on its own.
struct Piece {
    /// Bytes of the text, the lead included.
    bytes: Range<usize>,
    /// Ids of the lead, which are not the piece's own.
    lead_ids: usize,
}

impl Tokenizer {
    /// Token ids of a text of any length, without added special tokens: those of
    /// `encode(text, false)`, in memory of about the text's own size and in linear time.
    pub fn encode_long(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_in_pieces(text, PIECE_BYTES)
    }

    /// The first `limit` ids of `encode(text, add_special_tokens)`, without reading far beyond them.
    pub fn encode_head(&self, text: &str, add_special_tokens: bool, limit: usize) -> Result<Vec<u32>> {
        // A token has four bytes of English text, less of most others.
        self.encode_head_in_pieces(text, add_special_tokens, limit, (8 * limit).max(4096))
    }

    fn encode_head_in_pieces(
        &self,
        text: &str,
        add_special_tokens: bool,
        limit: usize,
        mut piece_bytes: usize,
    ) -> Result<Vec<u32>> {
        // Special tokens that are added at the end stand at the end of a head too, where they do
        // not belong, so only what lies before them can be used.
        let added = if add_special_tokens { self.encode("", true)?.len() } else { 0 };
        loop {
            let (head, _) = self.first_cut(text, 0, piece_bytes)?;
            let mut ids = self.encode(&text[..head], add_special_tokens)?;
            if head == text.len() || ids.len() >= limit + added {
                ids.truncate(limit);
                return Ok(ids);
            }
            piece_bytes *= 4;
        }
    }

    fn encode_in_pieces(&self, text: &str, piece_bytes: usize) -> Result<Vec<u32>> {
        let mut pieces = Vec::new();
        let (mut start, mut lead, mut lead_ids) = (0, 0, 0);
        while start < text.len() {
            let (end, next_lead_ids) = self.first_cut(text, start, piece_bytes)?;
            pieces.push(Piece { bytes: start - lead..end, lead_ids });
            lead = text[..end].chars().next_back().map_or(0, char::len_utf8);
            (start, lead_ids) = (end, next_lead_ids);
        }
        let encode = |piece: &Piece| -> Result<Vec<u32>> {
            let mut ids = self.encode(&text[piece.bytes.clone()], false)?;
            ids.drain(..piece.lead_ids.min(ids.len()));
            Ok(ids)
        };
        #[cfg(not(target_arch = "wasm32"))]
        let encoded = pieces.par_iter().map(encode).collect::<Result<Vec<_>>>()?;
        #[cfg(target_arch = "wasm32")]
        let encoded = pieces.iter().map(encode).collect::<Result<Vec<_>>>()?;
        Ok(encoded.concat())
    }

    /// Where the piece that begins at `start` ends, and how many ids the lead of the next one has.
    fn first_cut(&self, text: &str, start: usize, piece_bytes: usize) -> Result<(usize, usize)> {
        let mut size = piece_bytes.max(1);
        loop {
            if text.len() - start <= size + size / 4 {
                return Ok((text.len(), 0));
            }
            let limit = char_boundary(text, start + size);
            let middle = char_boundary(text, start + size / 2);
            let places = || text[middle..limit].char_indices().rev().map(|(at, c)| (middle + at, c));
            let at_space = places().filter(|&(at, c)| {
                c.is_whitespace() && text[..at].chars().next_back().is_some_and(|c| !c.is_whitespace())
            });
            // Text without spaces is cut between any two characters that let it be cut.
            let anywhere = places();
            for (at, _) in at_space.take(CANDIDATES).chain(anywhere.take(CANDIDATES)) {
                if let Some(lead_ids) = self.lead_ids_if_safe(text, at)? {
                    return Ok((at, lead_ids));
                }
            }
            size *= 2;
        }
    }

    /// Whether the text can be cut at byte `at`; if so, how many ids the character before it has.
    fn lead_ids_if_safe(&self, text: &str, at: usize) -> Result<Option<usize>> {
        let from = char_boundary(text, at.saturating_sub(CONTEXT_BYTES));
        let to = char_boundary(text, at + CONTEXT_BYTES);
        let Some(lead) = text[..at].chars().next_back() else { return Ok(None) };
        let lead_ids = self.encode(&text[at - lead.len_utf8()..at], false)?;
        let right = self.encode(&text[at - lead.len_utf8()..to], false)?;
        let left = self.encode(&text[from..at], false)?;
        let whole = self.encode(&text[from..to], false)?;
        let safe = right.starts_with(&lead_ids)
            && whole.len() == left.len() + right.len() - lead_ids.len()
            && whole.starts_with(&left)
            && whole.ends_with(&right[lead_ids.len()..]);
        Ok(safe.then_some(lead_ids.len()))
    }
}

/// The last boundary between characters at or before byte `at`.
fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{TEXT, bpe_json, metaspace_json, word_json};
    use super::*;
    use proptest::prelude::*;

    fn tokenizers() -> Vec<Tokenizer> {
        let words = word_json(&["the", "whale", "sea", "and"]);
        let all = [bpe_json(), metaspace_json(), words];
        all.iter().map(|json| Tokenizer::from_bytes(json, "model").unwrap()).collect()
    }

    #[test]
    fn pieces_give_the_ids_of_the_whole() {
        let texts = [
            TEXT.to_string(),
            TEXT.repeat(20),
            "   \n\n\n  ".repeat(100),
            "鯨は海を泳ぐ。".repeat(60),
            "x".repeat(3000),
            format!("{}\n\n{}", "word ".repeat(300), "\t\tmore  words <s> here".repeat(50)),
        ];
        for tokenizer in tokenizers() {
            for text in &texts {
                let whole = tokenizer.encode(text, false).unwrap();
                for piece_bytes in [64, 200, 1000] {
                    assert_eq!(tokenizer.encode_in_pieces(text, piece_bytes).unwrap(), whole);
                }
            }
        }
    }

    #[test]
    fn a_long_text_is_really_cut() {
        for tokenizer in tokenizers() {
            let text = TEXT.repeat(20);
            let (end, _) = tokenizer.first_cut(&text, 0, 200).unwrap();
            assert!((100..=200).contains(&end), "{end}");
        }
    }

    #[test]
    fn a_head_is_the_beginning_of_the_whole() {
        for tokenizer in tokenizers() {
            for text in [TEXT.repeat(5), "the sea".to_string(), String::new()] {
                for special in [false, true] {
                    let whole = tokenizer.encode(&text, special).unwrap();
                    for limit in [0, 1, 2, 30, 90, 10_000] {
                        let head = tokenizer.encode_head_in_pieces(&text, special, limit, 100).unwrap();
                        assert_eq!(head, whole[..limit.min(whole.len())]);
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn any_text_in_pieces_gives_the_ids_of_the_whole(
            words in prop::collection::vec("[a-eä ]{0,6}|[ \n]{1,3}|<s>|[0-9.,!'é海]{1,4}", 1..120),
            piece_bytes in 40_usize..300,
        ) {
            let text = words.join(" ");
            let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
            prop_assert_eq!(
                tokenizer.encode_in_pieces(&text, piece_bytes).unwrap(),
                tokenizer.encode(&text, false).unwrap()
            );
        }
    }
}
