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
use super::{Clock, ModelText, RenderOptions};
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
pub fn calibration_segments(text: &ModelText, files: &[TextFile], options: &SegmentOptions) -> Result<Segments> {
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
            _ => return Err(Error::options(format!("{name} is not a kind of file that is read as text"), ADVICE)),
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
                    let mut ids = encode_row(text, row, seq_len + 1).map_err(|error| error_in(&place, error))?;
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
        report.skipped =
            skipped.into_iter().filter(|skip| skip.1 > 0).map(|(why, count)| (why.to_string(), count)).collect();
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
            let options =
                RenderOptions { add_generation_prompt: false, tools: tools.as_ref(), clock: Clock::CALIBRATION };
            let rendered = text.chat()?.render(&messages, options)?;
            text.tokenizer()?.encode_head(&rendered, false, limit)
        }
        Row::Ids { ids, .. } => Ok(ids),
    }
}

/// Puts the row in front of what went wrong with it.
fn error_in(row: &str, error: Error) -> Error {
    match error {
        Error::Text { place, problem, advice } => Error::text(row, format!("{place}: {problem}"), advice),
        other => other,
    }
}

/// The content of a file as text, without a byte order mark.
fn utf8<'a>(name: &str, content: &'a [u8]) -> Result<&'a str> {
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
                format!("not UTF-8 text: invalid byte 0x{:02x} at offset {offset} (line {line})", content[offset]),
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
