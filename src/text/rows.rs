//! Files of rows: JSON Lines, or one JSON array, of `{"text"}`, `{"messages"}` or `{"input_ids"}`.

use serde_json::Value;

use super::tokenizer::check_ids;
use crate::error::{Error, Result};

const KINDS: &str = "\"text\" (a string), \"messages\" (a list of {\"role\", \"content\"}) or \"input_ids\" (a \
                     list of token ids)";

/// One row. A row that has several of the fields counts as the first of these.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Row {
    /// Tokens to be used as they are. Padding, told by an `attention_mask`, is gone already.
    Ids {
        ids: Vec<u32>,
        padding: usize,
    },
    Messages {
        messages: Value,
        tools: Option<Value>,
    },
    Text(String),
}

impl Row {
    /// Nothing is said in it.
    pub(crate) fn is_blank(&self) -> bool {
        match self {
            Self::Ids { ids, .. } => ids.is_empty(),
            Self::Messages { messages, .. } => messages.as_array().is_none_or(Vec::is_empty),
            Self::Text(text) => text.trim().is_empty(),
        }
    }
}

/// The rows of one file, all of them read once and found to be well formed.
pub(crate) struct RowFile<'a> {
    name: &'a str,
    rows: Rows<'a>,
    ids: bool,
}

/// Lines are parsed again when they are used: text takes less memory than parsed JSON, and of a
/// large file few rows are used.
enum Rows<'a> {
    /// Line numbers from 1 with the lines that are not blank.
    Lines(Vec<(usize, &'a str)>),
    Array(Vec<Value>),
}

impl<'a> RowFile<'a> {
    /// Reads a file, whose content says whether it is lines or one array. Every id is checked
    /// against `vocab_size`. Errors name the line (of an array, the row).
    pub(crate) fn parse(name: &'a str, content: &'a str, vocab_size: usize) -> Result<Self> {
        let rows = match content.trim_start().starts_with('[') {
            true => Rows::Array(serde_json::from_str(content).map_err(|error| {
                let advice = format!("The file must hold one JSON array of objects, each with {KINDS}");
                Error::text(name, format!("not a JSON array: {error}"), advice)
            })?),
            false => {
                Rows::Lines((1..).zip(content.lines()).filter(|(_, line)| !line.trim().is_empty()).collect())
            }
        };
        let mut file = Self { name, rows, ids: false };
        for index in 0..file.len() {
            let row = file.row(index)?;
            let ids = matches!(row, Row::Ids { .. });
            if index == 0 {
                file.ids = ids;
            } else if file.ids != ids {
                return Err(Error::text(
                    file.place(index),
                    "rows with input_ids and rows with text are mixed in one file",
                    "Put them into files of their own: input_ids are used as given and in order, text is \
                     tokenized and sampled",
                ));
            }
            if let Row::Ids { ids, .. } = row {
                check_ids(&ids, vocab_size, &file.place(index))?;
            }
        }
        Ok(file)
    }

    pub(crate) fn len(&self) -> usize {
        match &self.rows {
            Rows::Lines(lines) => lines.len(),
            Rows::Array(rows) => rows.len(),
        }
    }

    /// Whether the rows are `input_ids`; a file has only such rows or none.
    pub(crate) fn has_ids(&self) -> bool {
        self.ids
    }

    /// What a person would look for to find a row.
    pub(crate) fn place(&self, index: usize) -> String {
        match &self.rows {
            Rows::Lines(lines) => format!("{}, line {}", self.name, lines[index].0),
            Rows::Array(_) => format!("{}, row {}", self.name, index + 1),
        }
    }

    pub(crate) fn row(&self, index: usize) -> Result<Row> {
        let parsed = match &self.rows {
            Rows::Array(rows) => row(&rows[index]),
            Rows::Lines(lines) => match serde_json::from_str(lines[index].1) {
                Ok(value) => row(&value),
                // The parser's own line number counts from this line, so only the column is kept.
                Err(error) => {
                    let text = error.to_string();
                    let reason = text.split(" at line ").next().unwrap_or_default();
                    Err(format!("not valid JSON: {reason} at column {}", error.column()))
                }
            },
        };
        parsed.map_err(|problem| {
            Error::text(self.place(index), problem, format!("A row must be one JSON object with {KINDS}"))
        })
    }
}

/// A row from its JSON, or what is wrong with it.
fn row(value: &Value) -> std::result::Result<Row, String> {
    let fields = value.as_object().ok_or("not a JSON object")?;
    let field = |name: &str| fields.get(name).filter(|value| !value.is_null());
    if let Some(ids) = field("input_ids") {
        let ids = ids.as_array().ok_or("input_ids is not a list")?;
        let ids = ids.iter().enumerate().map(|(at, id)| {
            let id_or_none = id.as_u64().and_then(|id| u32::try_from(id).ok());
            id_or_none.ok_or_else(|| format!("input_ids[{at}] is {}, which is no token id", shortened(id)))
        });
        let ids = ids.collect::<std::result::Result<Vec<u32>, _>>()?;
        let kept = match field("attention_mask") {
            Some(mask) => unmasked(mask, ids.len())?,
            None => 0..ids.len(),
        };
        return Ok(Row::Ids { padding: ids.len() - kept.len(), ids: ids[kept].to_vec() });
    }
    if let Some(messages) = field("messages") {
        let list = messages.as_array().ok_or("messages is not a list")?;
        if let Some(at) = list.iter().position(|message| !message["role"].is_string()) {
            return Err(format!("messages[{at}] has no role"));
        }
        return Ok(Row::Messages { messages: messages.clone(), tools: field("tools").cloned() });
    }
    match field("text") {
        Some(text) => Ok(Row::Text(text.as_str().ok_or("text is not a string")?.to_string())),
        None => {
            let names: Vec<_> = fields.keys().map(String::as_str).collect();
            Err(format!(
                "none of the fields text, messages, input_ids, only: {}",
                shortened(names.join(", "))
            ))
        }
    }
}

/// The tokens that an `attention_mask` leaves, which stand together: padding is at the ends.
fn unmasked(mask: &Value, length: usize) -> std::result::Result<std::ops::Range<usize>, String> {
    let mask = mask.as_array().ok_or("attention_mask is not a list")?;
    if mask.len() != length {
        return Err(format!("attention_mask has {} entries for {length} input_ids", mask.len()));
    }
    let on = |entry: &Value| entry.as_u64() != Some(0) && entry.as_bool() != Some(false);
    let first = mask.iter().position(on).unwrap_or(0);
    let end = mask.iter().rposition(on).map_or(0, |last| last + 1);
    match mask[first..end].iter().position(|entry| !on(entry)) {
        None => Ok(first..end),
        Some(at) => {
            Err(format!("attention_mask is 0 at {} between tokens, where no padding can be", first + at))
        }
    }
}

/// A value for a message, cut if it is long.
fn shortened(value: impl std::fmt::Display) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problem(content: &str) -> String {
        RowFile::parse("rows.jsonl", content, 100).err().unwrap().to_string()
    }

    #[test]
    fn lines_and_arrays_hold_the_same_rows() {
        let lines = "{\"text\": \"a\"}\n\n  \r\n{\"text\": \"b\", \"id\": 7}\r\n";
        let array = "\n[{\"text\": \"a\"},\n {\"text\": \"b\"}]";
        for content in [lines, array] {
            let file = RowFile::parse("x", content, 100).unwrap();
            assert_eq!((file.len(), file.has_ids()), (2, false));
            assert_eq!(file.row(1).unwrap(), Row::Text("b".into()));
        }
        assert_eq!(RowFile::parse("x", lines, 100).unwrap().place(1), "x, line 4");
        assert_eq!(RowFile::parse("x", array, 100).unwrap().place(1), "x, row 2");
        assert_eq!(RowFile::parse("x", "", 100).unwrap().len(), 0);
    }

    #[test]
    fn a_row_with_several_fields_counts_as_the_most_exact() {
        let all = json!({"text": "t", "messages": [{"role": "user"}], "input_ids": [1, 2]});
        assert_eq!(row(&all).unwrap(), Row::Ids { ids: vec![1, 2], padding: 0 });
        let two = json!({"text": "t", "messages": [{"role": "user"}], "input_ids": null, "tools": [1]});
        let messages = json!([{"role": "user"}]);
        assert_eq!(row(&two).unwrap(), Row::Messages { messages, tools: Some(json!([1])) });
    }

    #[test]
    fn padding_is_dropped_by_the_attention_mask() {
        let ids = |mask: Value| row(&json!({"input_ids": [5, 6, 7, 8], "attention_mask": mask}));
        assert_eq!(ids(json!([0, 1, 1, 0])).unwrap(), Row::Ids { ids: vec![6, 7], padding: 2 });
        assert_eq!(
            ids(json!([true, true, true, false])).unwrap(),
            Row::Ids { ids: vec![5, 6, 7], padding: 1 }
        );
        assert_eq!(ids(json!([0, 0, 0, 0])).unwrap(), Row::Ids { ids: vec![], padding: 4 });
        assert!(ids(json!([1, 0, 1, 1])).unwrap_err().contains("0 at 1 between"));
        assert!(ids(json!([1, 1])).unwrap_err().contains("2 entries for 4"));
    }

    #[test]
    fn malformed_rows_are_named_by_file_and_line() {
        let good = "{\"text\": \"a\"}\n";
        for (bad, said) in [
            ("{\"text\": \"a\"", "not valid JSON: EOF while parsing an object at column 12"),
            ("[1]", "not a JSON object"),
            ("{\"text\": 3}", "text is not a string"),
            ("{\"content\": \"x\", \"id\": 1}", "only: content, id"),
            ("{\"messages\": \"hello\"}", "messages is not a list"),
            ("{\"messages\": [{\"role\": \"user\"}, {}]}", "messages[1] has no role"),
            ("{\"input_ids\": [1, 2]}", "mixed"),
        ] {
            let message = problem(&format!("{good}\n{bad}\n{good}"));
            assert!(message.starts_with("rows.jsonl, line 3: "), "{message}");
            assert!(message.contains(said), "{message}");
        }
        for (bad, said) in [
            ("{\"input_ids\": [1, -2]}", "input_ids[1] is -2"),
            ("{\"input_ids\": [[1, 2]]}", "input_ids[0] is [1,2]"),
            ("{\"input_ids\": [1, 100]}", "token id 100 at position 1"),
            ("{\"input_ids\": 4}", "input_ids is not a list"),
        ] {
            let message = problem(bad);
            assert!(message.starts_with("rows.jsonl, line 1: ") && message.contains(said), "{message}");
        }
        assert!(problem("[{\"text\": \"a\"}, 1]").starts_with("rows.jsonl, row 2: not a JSON object"));
        assert!(problem("[{\"text\": \"a\"}, ").starts_with("rows.jsonl: not a JSON array"));
    }
}
