//! Rows of token ids with the account of where they come from.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

/// With fewer tokens than this per input dimension a Hessian is mostly noise.
const TOKENS_PER_DIMENSION: usize = 10;

/// What calibration or evaluation runs on: rows of token ids, each of at least two, none padded.
#[derive(Debug, Clone, PartialEq)]
pub struct Segments {
    pub rows: Vec<Vec<u32>>,
    pub report: SegmentReport,
}

/// What the segments are made from, for a person and for `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentReport {
    pub samples: usize,
    pub tokens: usize,
    /// Tokens per sample.
    pub mean_len: f64,
    pub distinct_ids: usize,
    /// Why rows were left out, and how many, over all files.
    pub skipped: Vec<(String, usize)>,
    pub sources: Vec<SourceReport>,
}

/// How the samples of one file come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// Windows at random places of a text.
    RandomWindows,
    /// Windows side by side over a text.
    ConsecutiveWindows,
    /// Rows of text or messages.
    Rows,
    /// Rows of token ids, used as they are.
    InputIds,
}

/// What one file contributes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SourceReport {
    pub name: String,
    pub kind: SourceKind,
    /// Samples that were asked of this file; `None` for all it has.
    pub asked: Option<usize>,
    /// Tokens in a text, rows in a file of rows.
    pub available: usize,
    pub samples: usize,
    pub tokens: usize,
    /// Some windows share tokens, because the text is too short for all of them.
    pub overlapping: bool,
    /// Rows cut to the segment length.
    pub truncated: usize,
    /// Tokens left out because an `attention_mask` says that they are padding.
    pub padding_dropped: usize,
    pub skipped: Vec<(String, usize)>,
}

impl Segments {
    /// No text at all: what a run that needs none is given.
    pub fn none() -> Self {
        let report = SegmentReport {
            samples: 0,
            tokens: 0,
            mean_len: 0.0,
            distinct_ids: 0,
            skipped: Vec::new(),
            sources: Vec::new(),
        };
        Self { rows: Vec::new(), report }
    }

    pub(super) fn new(rows: Vec<Vec<u32>>, sources: Vec<SourceReport>) -> Self {
        let tokens = rows.iter().map(Vec::len).sum();
        let distinct: HashSet<u32> = rows.iter().flatten().copied().collect();
        let mut skipped: Vec<(String, usize)> = Vec::new();
        for (reason, count) in sources.iter().flat_map(|source| &source.skipped) {
            match skipped.iter_mut().find(|(known, _)| known == reason) {
                Some((_, total)) => *total += count,
                None => skipped.push((reason.clone(), *count)),
            }
        }
        let report = SegmentReport {
            samples: rows.len(),
            tokens,
            mean_len: tokens as f64 / rows.len().max(1) as f64,
            distinct_ids: distinct.len(),
            skipped,
            sources,
        };
        Self { rows, report }
    }

    /// A hash over ids and row boundaries (XXH3, 64 bits of little-endian lengths and ids): equal
    /// on every platform, and in every version.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for row in &self.rows {
            hash.update(&(row.len() as u64).to_le_bytes());
            for id in row {
                hash.update(&id.to_le_bytes());
            }
        }
        hash.digest()
    }

    /// A warning if there are too few tokens for a Hessian of `in_features` dimensions.
    pub fn warn_tokens(&self, in_features: usize) -> Option<String> {
        let tokens = self.report.tokens;
        (tokens < TOKENS_PER_DIMENSION * in_features).then(|| {
            format!(
                "{tokens} calibration tokens are only {:.1} for each of {in_features} input dimensions; give \
                 at least {TOKENS_PER_DIMENSION} ({} tokens), with more samples or longer ones",
                tokens as f64 / in_features as f64,
                TOKENS_PER_DIMENSION * in_features,
            )
        })
    }
}

impl fmt::Display for SegmentReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples, {} tokens (mean length {:.1}, {} distinct ids)",
            self.samples, self.tokens, self.mean_len, self.distinct_ids
        )?;
        for source in &self.sources {
            write!(f, "\n  {source}")?;
        }
        Ok(())
    }
}

impl fmt::Display for SourceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (samples, available) = (self.samples, self.available);
        match self.kind {
            SourceKind::RandomWindows => {
                write!(f, "{}: {samples} random windows of {available} tokens", self.name)?;
            }
            SourceKind::ConsecutiveWindows => {
                write!(f, "{}: {samples} windows of {available} tokens", self.name)?
            }
            SourceKind::Rows => write!(f, "{}: {samples} of {available} rows", self.name)?,
            SourceKind::InputIds => {
                write!(f, "{}: {samples} of {available} rows of input_ids, as given", self.name)?;
            }
        }
        if self.overlapping {
            f.write_str(", overlapping because the text is short")?;
        }
        if let Some(asked) = self.asked.filter(|&asked| asked > samples) {
            write!(f, ", fewer than the {asked} asked for")?;
        }
        if self.truncated > 0 {
            write!(f, ", {} cut to the segment length", self.truncated)?;
        }
        if self.padding_dropped > 0 {
            write!(f, ", {} padding tokens dropped", self.padding_dropped)?;
        }
        for (reason, count) in &self.skipped {
            write!(f, ", {count} skipped ({reason})")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(rows: &[&[u32]]) -> Segments {
        Segments::new(rows.iter().map(|row| row.to_vec()).collect(), Vec::new())
    }

    #[test]
    fn the_report_counts() {
        let report = segments(&[&[1, 2, 3], &[3, 3]]).report;
        assert_eq!((report.samples, report.tokens, report.distinct_ids), (2, 5, 3));
        assert_eq!(report.mean_len, 2.5);
    }

    #[test]
    fn the_fingerprint_sees_ids_order_and_boundaries() {
        let base = segments(&[&[1, 2, 3], &[4, 5]]).fingerprint();
        assert_eq!(base, segments(&[&[1, 2, 3], &[4, 5]]).fingerprint());
        for other in [
            segments(&[&[1, 2], &[3, 4, 5]]),
            segments(&[&[4, 5], &[1, 2, 3]]),
            segments(&[&[1, 2, 3, 4, 5]]),
            segments(&[&[1, 2, 3], &[4, 6]]),
        ] {
            assert_ne!(base, other.fingerprint());
        }
        // Frozen: journals of unfinished runs hold fingerprints.
        assert_eq!(base, 8_174_670_326_173_917_436);
    }

    #[test]
    fn too_few_tokens_are_warned_about() {
        let segments = segments(&[&[1; 30], &[2; 9]]);
        let warning = segments.warn_tokens(4).unwrap();
        assert!(warning.contains("39 calibration tokens are only 9.8 for each of 4"), "{warning}");
        assert!(warning.contains("40 tokens"), "{warning}");
        assert_eq!(segments.warn_tokens(3), None);
    }
}
