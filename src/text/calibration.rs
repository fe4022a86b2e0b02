//! The segments that a model is calibrated and evaluated on, from the user's files.
//!
//! Calibration text is sampled, with a seed: random windows of a plain text, randomly chosen rows
//! of a file of rows. Evaluation text is taken in order. Rows of `input_ids` are used exactly as
//! given by both, so that two programs can be compared on the same tokens.

use super::random::SplitMix64;
use super::rows::{Row, RowFile};
use super::segments::{Segments, SourceKind, SourceReport};
use super::tokenizer::check_ids;
use super::windows::{MIN_TOKENS, consecutive_windows, random_windows};
use super::{Clock, ModelText, RenderOptions, error_in};
use crate::error::{Error, Result};

/// How many samples are drawn when the options do not say.
pub const DEFAULT_SAMPLES: usize = 128;

const NO_TEXT: &str = "no text";
const TOO_SHORT: &str = "shorter than 2 tokens";
const ADVICE: &str = "Give a .txt file (UTF-8), or a .jsonl or .json file of rows with \"text\", \"messages\" or \
                      \"input_ids\"";

/// A file with text, by the name that the user knows it by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFile {
    pub name: String,
    pub content: Vec<u8>,
}

/// How calibration text is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentOptions {
    /// Samples over all files. `None` draws [`DEFAULT_SAMPLES`] of text, and takes every row of
    /// `input_ids`.
    pub samples: Option<usize>,
    /// Tokens of a window, and the most that are used of a row of text or messages.
    pub seq_len: usize,
    pub seed: u64,
}

/// As the command line's options: how a stopped run remembers them.
impl std::fmt::Display for SegmentOptions {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let samples = self.samples.map_or("as many as usual".to_owned(), |samples| samples.to_string());
        write!(out, "--samples {samples}, --seq-len {}, --seed {}", self.seq_len, self.seed)
    }
}

/// Texts in a file: one, or its rows.
///
/// # Errors
/// As [`calibration_segments`], as far as they need no model.
pub fn documents(file: &TextFile) -> Result<usize> {
    Ok(match Opened::new(file, usize::MAX)?.content {
        Content::Text(_) => 1,
        Content::Rows(rows) => rows.len(),
    })
}

/// Calibration segments of one or several files.
///
/// - `.txt`: windows of `seq_len` tokens at random places spread over the whole text, without
///   added special tokens (a window starts in the middle of the text). They overlap only when the
///   text is too short; a text shorter than a window is one shorter sample.
/// - `.jsonl`, `.json` with `text` or `messages`: rows in random order, each cut to `seq_len`, the
///   first that have at least two tokens. Text gets the tokenizer's special tokens, messages those
///   that the chat template writes.
/// - `.jsonl`, `.json` with `input_ids`: rows as they are, in order, of any length.
///
/// Samples are divided evenly among the files that are sampled. Errors: a file of another kind,
/// text that is not UTF-8, a malformed row (by line), a missing tokenizer or chat template, a token
/// id that the model does not have, and nothing usable at all.
pub fn calibration_segments(
    text: &ModelText,
    files: &[TextFile],
    options: &SegmentOptions,
) -> Result<Segments> {
    check_sizes(options.seq_len, options.samples)?;
    if files.is_empty() {
        return Err(Error::options("no calibration file is given", ADVICE));
    }
    let files = files.iter().map(|file| Opened::new(file, text.vocab_size())).collect::<Result<Vec<_>>>()?;
    // Without a number, files of input_ids give all they have and take no part in the division.
    let counted = |file: &&Opened| options.samples.is_some() || !file.has_ids();
    let mut shares = shares(options.samples.unwrap_or(DEFAULT_SAMPLES), files.iter().filter(counted).count());
    let mut collected = Collected::default();
    for (index, file) in files.iter().enumerate() {
        let share = if counted(&file) { shares.next() } else { None };
        let mut rng = SplitMix64::new(options.seed, index as u64);
        match &file.content {
            Content::Text(content) => {
                let ids = encode_text(text, file.name, content)?;
                let placement =
                    random_windows(ids.len(), options.seq_len, share.unwrap_or(DEFAULT_SAMPLES), &mut rng);
                let mut report = file.report(SourceKind::RandomWindows, share, ids.len());
                report.overlapping = placement.overlapping;
                collected.windows(&ids, placement.windows, report);
            }
            Content::Rows(rows) => {
                let mut order: Vec<usize> = (0..rows.len()).collect();
                if !rows.has_ids() {
                    rng.shuffle(&mut order);
                }
                collected.rows(text, file, rows, &order, options.seq_len, share)?;
            }
        }
    }
    collected.finish("calibration")
}

/// Evaluation segments of one file.
///
/// - `.txt`: windows of `seq_len` tokens side by side over the whole text in its order, the last one
///   as long as it is; `samples` takes that many, evenly spaced.
/// - rows: in their order, the first `samples` usable ones or all. Text and messages are cut to
///   `seq_len`, `input_ids` are used as they are.
///
/// Errors as for [`calibration_segments`].
pub fn evaluation_segments(
    text: &ModelText,
    file: &TextFile,
    seq_len: usize,
    samples: Option<usize>,
) -> Result<Segments> {
    check_sizes(seq_len, samples)?;
    let file = Opened::new(file, text.vocab_size())?;
    let mut collected = Collected::default();
    match &file.content {
        Content::Text(content) => {
            let ids = encode_text(text, file.name, content)?;
            let windows = consecutive_windows(ids.len(), seq_len, samples);
            let report = file.report(SourceKind::ConsecutiveWindows, samples, ids.len());
            collected.windows(&ids, windows, report);
        }
        Content::Rows(rows) => {
            let order: Vec<usize> = (0..rows.len()).collect();
            collected.rows(text, &file, rows, &order, seq_len, samples)?;
        }
    }
    collected.finish("evaluation")
}

/// A file, told apart by its name, with rows checked but not tokenized.
struct Opened<'a> {
    name: &'a str,
    content: Content<'a>,
}

enum Content<'a> {
    Text(&'a str),
    Rows(RowFile<'a>),
}

impl<'a> Opened<'a> {
    fn new(file: &'a TextFile, vocab_size: usize) -> Result<Self> {
        let name = file.name.as_str();
        let extension = name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase());
        let content = match extension.as_deref() {
            Some("txt") => Content::Text(utf8(name, &file.content)?),
            Some("jsonl" | "json") => {
                Content::Rows(RowFile::parse(name, utf8(name, &file.content)?, vocab_size)?)
            }
            _ => {
                return Err(Error::options(
                    format!("{name} is not a kind of file that is read as text"),
                    ADVICE,
                ));
            }
        };
        Ok(Self { name, content })
    }

    fn has_ids(&self) -> bool {
        matches!(&self.content, Content::Rows(rows) if rows.has_ids())
    }

    fn report(&self, kind: SourceKind, asked: Option<usize>, available: usize) -> SourceReport {
        SourceReport {
            name: self.name.to_string(),
            kind,
            asked,
            available,
            samples: 0,
            tokens: 0,
            overlapping: false,
            truncated: 0,
            padding_dropped: 0,
            skipped: Vec::new(),
        }
    }
}

/// Rows and reports as they come together, file by file.
#[derive(Default)]
struct Collected {
    rows: Vec<Vec<u32>>,
    sources: Vec<SourceReport>,
}

impl Collected {
    fn windows(&mut self, ids: &[u32], windows: Vec<std::ops::Range<usize>>, report: SourceReport) {
        let rows = windows.into_iter().map(|window| ids[window].to_vec()).collect();
        self.source(rows, report);
    }

    /// The first `asked` usable rows of a file, visited in `order`.
    fn rows(
        &mut self,
        text: &ModelText,
        file: &Opened,
        rows: &RowFile,
        order: &[usize],
        seq_len: usize,
        asked: Option<usize>,
    ) -> Result<()> {
        let kind = if rows.has_ids() { SourceKind::InputIds } else { SourceKind::Rows };
        let mut report = file.report(kind, asked, rows.len());
        let mut usable = Vec::new();
        let (mut no_text, mut too_short) = (0, 0);
        for &index in order {
            if asked == Some(usable.len()) {
                break;
            }
            let ids = match rows.row(index)? {
                Row::Ids { ids, padding } => {
                    report.padding_dropped += padding;
                    ids
                }
                row if row.is_blank() => {
                    no_text += 1;
                    continue;
                }
                row => {
                    let place = rows.place(index);
                    // One id more than is used tells whether the row is cut.
                    let mut ids =
                        encode_row(text, row, seq_len + 1).map_err(|error| error_in(&place, error))?;
                    check_ids(&ids, text.vocab_size(), &place)?;
                    report.truncated += usize::from(ids.len() > seq_len);
                    ids.truncate(seq_len);
                    ids
                }
            };
            match ids.len() < MIN_TOKENS {
                true => too_short += 1,
                false => usable.push(ids),
            }
        }
        let skipped = [(NO_TEXT, no_text), (TOO_SHORT, too_short)];
        report.skipped = skipped
            .into_iter()
            .filter(|skip| skip.1 > 0)
            .map(|(why, count)| (why.to_string(), count))
            .collect();
        self.source(usable, report);
        Ok(())
    }

    fn source(&mut self, rows: Vec<Vec<u32>>, mut report: SourceReport) {
        report.samples = rows.len();
        report.tokens = rows.iter().map(Vec::len).sum();
        self.rows.extend(rows);
        self.sources.push(report);
    }

    /// The segments, or why there are none.
    fn finish(self, purpose: &str) -> Result<Segments> {
        if !self.rows.is_empty() {
            return Ok(Segments::new(self.rows, self.sources));
        }
        let why = |source: &SourceReport| match source.kind {
            SourceKind::RandomWindows | SourceKind::ConsecutiveWindows => {
                format!("{} has {} tokens and {MIN_TOKENS} are needed", source.name, source.available)
            }
            SourceKind::Rows | SourceKind::InputIds => {
                let mut why = format!("{} has {} rows", source.name, source.available);
                for (reason, count) in &source.skipped {
                    why += &format!(", {count} skipped ({reason})");
                }
                why
            }
        };
        let asked: usize = self.sources.iter().map(|source| source.asked.unwrap_or(source.available)).sum();
        let reasons = self.sources.iter().map(why).collect::<Vec<_>>().join("; ");
        Err(Error::text(
            format!("{purpose} text"),
            format!("0 usable of {asked}, because {reasons}"),
            "Give more text",
        ))
    }
}

/// Token ids of a plain text, without added special tokens.
fn encode_text(text: &ModelText, name: &str, content: &str) -> Result<Vec<u32>> {
    let ids = text.tokenizer()?.encode_long(content).map_err(|error| error_in(name, error))?;
    check_ids(&ids, text.vocab_size(), name)?;
    Ok(ids)
}

/// The first `limit` token ids of a row of text or messages.
fn encode_row(text: &ModelText, row: Row, limit: usize) -> Result<Vec<u32>> {
    match row {
        Row::Text(content) => text.tokenizer()?.encode_head(&content, true, limit),
        Row::Messages { messages, tools } => {
            let options = RenderOptions {
                add_generation_prompt: false,
                tools: tools.as_ref(),
                clock: Clock::CALIBRATION,
            };
            let rendered = text.chat()?.render(&messages, options)?;
            text.tokenizer()?.encode_head(&rendered, false, limit)
        }
        Row::Ids { ids, .. } => Ok(ids),
    }
}

/// The content of a file as text, without a byte order mark.
pub(super) fn utf8<'a>(name: &str, content: &'a [u8]) -> Result<&'a str> {
    match std::str::from_utf8(content) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').unwrap_or(text)),
        Err(error) => {
            let offset = error.valid_up_to();
            let line = content[..offset].iter().filter(|&&byte| byte == b'\n').count() + 1;
            let guess = match content {
                [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "UTF-16",
                _ => "another encoding, such as Latin-1",
            };
            Err(Error::text(
                name,
                format!(
                    "not UTF-8 text: invalid byte 0x{:02x} at offset {offset} (line {line})",
                    content[offset]
                ),
                format!("It may be in {guess}; convert it, for example with iconv -f … -t utf-8"),
            ))
        }
    }
}

/// Divides `samples` among `count` files; the first ones get one more if it does not come out even.
fn shares(samples: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| samples / count + usize::from(index < samples % count))
}

fn check_sizes(seq_len: usize, samples: Option<usize>) -> Result<()> {
    if seq_len < MIN_TOKENS {
        let problem = format!("a segment length of {seq_len} leaves nothing to predict");
        return Err(Error::options(problem, "Give at least 2; 512 is usual"));
    }
    if samples == Some(0) {
        return Err(Error::options("0 samples are asked for", "Give at least 1; 128 is usual"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{Directory, TEXT, bpe_json, word_json};
    use super::super::{SegmentReport, Tokenizer};
    use super::*;

    const OPTIONS: SegmentOptions = SegmentOptions { samples: Some(4), seq_len: 10, seed: 0 };
    const CHAT: &[u8] = b"{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}";
    /// Words `w1` … `w99` have the ids 1 … 99.
    const VOCAB: usize = 100;

    fn file(name: &str, content: impl Into<Vec<u8>>) -> TextFile {
        TextFile { name: name.to_string(), content: content.into() }
    }

    /// A model whose every word is a token, with a chat template.
    fn words() -> ModelText {
        let words: Vec<String> = (1..VOCAB).map(|id| format!("w{id}")).collect();
        let json = word_json(&words.iter().map(String::as_str).collect::<Vec<_>>());
        let directory = Directory::new(&[("tokenizer.json", &json), ("chat_template.jinja", CHAT)]);
        pollster::block_on(ModelText::load(&directory, VOCAB)).unwrap()
    }

    /// `count` words, `w1` to `w99` over and over.
    fn running(count: usize) -> String {
        (0..count).map(|at| format!("w{} ", at % (VOCAB - 1) + 1)).collect()
    }

    /// Rows `{"text": "w1 w1 …"}`, `{"text": "w2 w2 …"}`, ….
    fn numbered(rows: usize, words: usize) -> String {
        (1..=rows).map(|row| format!("{{\"text\": \"{}\"}}\n", format!("w{row} ").repeat(words))).collect()
    }

    fn error(result: Result<Segments>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_text_gives_windows_over_all_of_it() {
        let files = [file("a.txt", running(90))];
        let segments = calibration_segments(&words(), &files, &OPTIONS).unwrap();
        assert_eq!(segments.rows.len(), 4);
        for (stride, row) in segments.rows.iter().enumerate() {
            assert_eq!(row.len(), 10);
            assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1), "consecutive tokens: {row:?}");
            let start = row[0] as usize - 1;
            assert!(start >= stride * 90 / 4 && start + 10 <= (stride + 1) * 90 / 4, "{start}");
        }
        assert_eq!(segments.report.sources[0].available, 90);
        assert!(!segments.report.sources[0].overlapping);

        let again = calibration_segments(&words(), &files, &OPTIONS).unwrap();
        assert_eq!(again.fingerprint(), segments.fingerprint());
        let other = SegmentOptions { seed: 1, ..OPTIONS };
        assert_ne!(calibration_segments(&words(), &files, &other).unwrap().rows, segments.rows);
    }

    #[test]
    fn windows_overlap_only_when_the_text_is_short_and_say_so() {
        let segments = calibration_segments(&words(), &[file("a.txt", running(25))], &OPTIONS).unwrap();
        assert_eq!(segments.rows.len(), 4);
        let printed = segments.report.to_string();
        assert!(printed.contains("a.txt: 4 random windows of 25 tokens, overlapping"), "{printed}");

        let segments = calibration_segments(&words(), &[file("a.txt", running(6))], &OPTIONS).unwrap();
        assert_eq!(segments.rows, [[1, 2, 3, 4, 5, 6]]);
        let printed = segments.report.to_string();
        assert!(printed.contains("fewer than the 4 asked for"), "{printed}");
    }

    #[test]
    fn a_text_gets_no_special_tokens_and_rows_do() {
        let json = bpe_json();
        let tokenizer = Tokenizer::from_bytes(&json, "model").unwrap();
        let text = ModelText::new(Some(tokenizer), None, 420, "model");
        let long = SegmentOptions { seq_len: 1000, ..OPTIONS };
        let ids = text.tokenizer().unwrap().encode(TEXT, false).unwrap();
        let bos = text.tokenizer().unwrap().token_to_id("<s>").unwrap();

        let segments = calibration_segments(&text, &[file("a.txt", TEXT)], &long).unwrap();
        assert_eq!(segments.rows, [ids.as_slice()]);
        let row = format!("{{\"text\": {}}}", serde_json::Value::from(TEXT));
        let segments = calibration_segments(&text, &[file("a.jsonl", row)], &long).unwrap();
        assert_eq!(segments.rows, [[&[bos], ids.as_slice()].concat()]);
    }

    #[test]
    fn rows_are_shuffled_cut_and_counted() {
        let files = [file("a.jsonl", numbered(40, 12))];
        let segments = calibration_segments(&words(), &files, &OPTIONS).unwrap();
        assert_eq!(segments.rows.len(), 4);
        assert!(segments.rows.iter().all(|row| row.len() == 10 && row.iter().all(|id| *id == row[0])));
        let chosen: Vec<u32> = segments.rows.iter().map(|row| row[0]).collect();
        assert_ne!(chosen, [1, 2, 3, 4]);
        let source = &segments.report.sources[0];
        assert_eq!((source.kind, source.available, source.truncated), (SourceKind::Rows, 40, 4));
        assert_eq!(calibration_segments(&words(), &files, &OPTIONS).unwrap(), segments);
        let other = SegmentOptions { seed: 1, ..OPTIONS };
        assert_ne!(calibration_segments(&words(), &files, &other).unwrap().rows, segments.rows);

        // A row of exactly the segment length is not cut.
        let exact = calibration_segments(&words(), &[file("a.jsonl", numbered(2, 10))], &OPTIONS).unwrap();
        assert_eq!(exact.report.sources[0].truncated, 0);
    }

    #[test]
    fn unusable_rows_are_skipped_with_the_reason() {
        let rows = "{\"text\": \"\"}\n{\"text\": \" \\n\"}\n{\"text\": \"w1\"}\n{\"messages\": []}\n{\"text\": \"w1 w2\"}";
        let segments = calibration_segments(&words(), &[file("a.jsonl", rows)], &OPTIONS).unwrap();
        assert_eq!(segments.rows, [[1, 2]]);
        let skipped = [("no text".to_string(), 3), ("shorter than 2 tokens".to_string(), 1)];
        assert_eq!(segments.report.skipped, skipped);
        let printed = segments.report.to_string();
        assert!(printed.starts_with("1 samples, 2 tokens (mean length 2.0, 2 distinct ids)\n"), "{printed}");
        assert!(printed.contains("1 of 5 rows"), "{printed}");
        assert!(printed.contains("3 skipped (no text), 1 skipped (shorter than 2 tokens)"), "{printed}");
    }

    #[test]
    fn messages_go_through_the_chat_template() {
        let row = r#"{"messages": [{"role": "w1", "content": "w2"}, {"role": "w3", "content": "w4"}]}"#;
        let segments = calibration_segments(&words(), &[file("a.jsonl", row)], &OPTIONS).unwrap();
        assert_eq!(segments.rows, [[1, 2, 3, 4]]);

        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let chat = super::super::ChatTemplate::new(
            "{{ bos_token }}sea",
            &serde_json::json!({"bos_token": "<s>"}),
            "t",
        );
        let text = ModelText::new(Some(tokenizer), Some(chat), 420, "model");
        let segments = calibration_segments(&text, &[file("a.jsonl", row)], &OPTIONS).unwrap();
        assert_eq!(
            segments.rows,
            [text.tokenizer().unwrap().encode("sea", true).unwrap()],
            "one <s>, not two"
        );
    }

    #[test]
    fn a_row_that_the_template_refuses_is_named() {
        let chat = super::super::ChatTemplate::new(
            "\n{{ raise_exception('no system') }}",
            &().into(),
            "model/t.jinja",
        );
        let tokenizer = Tokenizer::from_bytes(&bpe_json(), "model").unwrap();
        let text = ModelText::new(Some(tokenizer), Some(chat), 420, "model");
        let rows = "\n{\"messages\": [{\"role\": \"system\", \"content\": \"x\"}]}";
        let message = error(calibration_segments(&text, &[file("a.jsonl", rows)], &OPTIONS));
        assert!(message.starts_with("a.jsonl, line 2: model/t.jinja, line 2: "), "{message}");
        assert!(message.contains("no system"), "{message}");
    }

    #[test]
    fn input_ids_are_used_as_given_without_a_tokenizer() {
        let nothing = ModelText::new(None, None, VOCAB, "model");
        let long: Vec<u32> = (0..99).collect();
        let rows = format!(
            "{{\"input_ids\": [7, 8, 9]}}\n{{\"input_ids\": {long:?}}}\n{{\"input_ids\": [3]}}\n\
            {{\"input_ids\": [0, 0, 5, 6], \"attention_mask\": [0, 0, 1, 1]}}\n"
        );
        let ids = file("a.jsonl", rows);
        let all = vec![vec![7, 8, 9], long.clone(), vec![5, 6]];
        let options = SegmentOptions { samples: None, ..OPTIONS };
        let segments = calibration_segments(&nothing, std::slice::from_ref(&ids), &options).unwrap();
        assert_eq!(segments.rows, all);
        assert_eq!(segments.report.skipped, [("shorter than 2 tokens".to_string(), 1)]);
        assert_eq!(segments.report.sources[0].padding_dropped, 2);
        assert_eq!(evaluation_segments(&nothing, &ids, 10, None).unwrap().rows, all);

        let two = SegmentOptions { samples: Some(2), ..OPTIONS };
        let segments = calibration_segments(&nothing, std::slice::from_ref(&ids), &two).unwrap();
        assert_eq!(segments.rows, all[..2]);
        assert_eq!(evaluation_segments(&nothing, &ids, 10, Some(2)).unwrap().rows, all[..2]);
    }

    #[test]
    fn samples_are_divided_among_files() {
        let files = [
            file("a.txt", running(400)),
            file("b.TXT", running(400)),
            file("c.jsonl", numbered(50, 5)),
            file("d.json", "[{\"input_ids\": [1, 2]}, {\"input_ids\": [3, 4]}, {\"input_ids\": [5, 6]}]"),
        ];
        let of = |segments: Segments| {
            let SegmentReport { sources, .. } = segments.report;
            sources.into_iter().map(|source| (source.asked, source.samples)).collect::<Vec<_>>()
        };
        let asked = SegmentOptions { samples: Some(10), ..OPTIONS };
        let some = of(calibration_segments(&words(), &files, &asked).unwrap());
        assert_eq!(some, [(Some(3), 3), (Some(3), 3), (Some(2), 2), (Some(2), 2)]);

        let asked = SegmentOptions { samples: None, ..OPTIONS };
        let default = of(calibration_segments(&words(), &files, &asked).unwrap());
        assert_eq!(default, [(Some(43), 43), (Some(43), 43), (Some(42), 42), (None, 3)]);

        // Two files of the same text are sampled at different places.
        let segments = calibration_segments(&words(), &files[..2], &OPTIONS).unwrap();
        assert_ne!(segments.rows[..2], segments.rows[2..]);
    }

    #[test]
    fn evaluation_text_is_taken_in_order() {
        let text = file("a.txt", running(35));
        let starts = |samples| -> Vec<(u32, usize)> {
            let segments = evaluation_segments(&words(), &text, 10, samples).unwrap();
            segments.rows.iter().map(|row| (row[0], row.len())).collect()
        };
        assert_eq!(starts(None), [(1, 10), (11, 10), (21, 10), (31, 5)]);
        assert_eq!(starts(Some(2)), [(1, 10), (21, 10)]);
        assert_eq!(starts(Some(9)).len(), 4);

        let rows = evaluation_segments(&words(), &file("a.jsonl", numbered(30, 4)), 10, None).unwrap();
        assert_eq!(rows.rows.iter().map(|row| row[0]).collect::<Vec<_>>(), (1..=30).collect::<Vec<u32>>());
    }

    #[test]
    fn nothing_usable_is_refused_with_the_reasons() {
        let rows = "{\"text\": \"\"}\n{\"text\": \"w1\"}\n{\"text\": \"\"}";
        let files = [file("a.jsonl", rows), file("b.txt", "w1"), file("c.jsonl", "\n")];
        let options = SegmentOptions { samples: Some(32), ..OPTIONS };
        let message = error(calibration_segments(&words(), &files, &options));
        assert!(
            message.starts_with("calibration text: 0 usable of 32, because a.jsonl has 3 rows, "),
            "{message}"
        );
        for part in ["2 skipped (no text)", "1 skipped (shorter", "b.txt has 1 tokens", "c.jsonl has 0 rows"]
        {
            assert!(message.contains(part), "{message}");
        }
        let message = error(evaluation_segments(&words(), &file("e.txt", ""), 10, None));
        assert!(message.starts_with("evaluation text: 0 usable"), "{message}");
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let nothing = ModelText::new(None, None, VOCAB, "model");
        let calibrate = |text: &ModelText, name: &str, content: &[u8]| {
            error(calibration_segments(text, &[file(name, content)], &OPTIONS))
        };
        let message = calibrate(&nothing, "a.txt", b"w1 w2");
        assert!(message.contains("no tokenizer.json") && message.contains("input_ids"), "{message}");
        let message = calibrate(&nothing, "a.jsonl", br#"{"messages": [{"role": "user", "content": "w1"}]}"#);
        assert!(message.contains("no chat template"), "{message}");
        let message = calibrate(&words(), "a.txt", b"ab\ncd\xe9f");
        assert!(message.contains("invalid byte 0xe9 at offset 5 (line 2)"), "{message}");
        assert!(message.contains("Latin-1"), "{message}");
        let message = calibrate(&words(), "a.txt", b"\xff\xfea\0b\0");
        assert!(message.contains("offset 0") && message.contains("UTF-16"), "{message}");
        let message = calibrate(&words(), "a.parquet", b"");
        assert!(
            message.contains("a.parquet is not a kind of file") && message.contains(".jsonl"),
            "{message}"
        );
        // A malformed row is found even where few rows are drawn.
        let message = calibrate(&words(), "a.jsonl", (numbered(90, 3) + "{oops").as_bytes());
        assert!(message.starts_with("a.jsonl, line 91: not valid JSON"), "{message}");
        // The tokenizer knows an id that the model does not have.
        let small = pollster::block_on(async {
            let directory = Directory::new(&[("tokenizer.json", &bpe_json())]);
            ModelText::load(&directory, 20).await.unwrap()
        });
        let message = calibrate(&small, "a.txt", TEXT.as_bytes());
        assert!(message.starts_with("a.txt: token id ") && message.contains("vocab_size 20"), "{message}");
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let marked = file("a.txt", [b"\xef\xbb\xbf".as_slice(), b"w1 w2"].concat());
        assert_eq!(calibration_segments(&words(), &[marked], &OPTIONS).unwrap().rows, [[1, 2]]);
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let files = [file("a.txt", running(30))];
        let with = |options| calibration_segments(&words(), &files, &options);
        for result in [
            with(SegmentOptions { seq_len: 1, ..OPTIONS }),
            with(SegmentOptions { samples: Some(0), ..OPTIONS }),
            calibration_segments(&words(), &[], &OPTIONS),
        ] {
            assert_eq!(result.unwrap_err().exit_code(), 2);
        }
    }
}
