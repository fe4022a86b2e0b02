//! The `tojson` filter of Hugging Face chat templates: Python's `json.dumps`, not Jinja's filter.
//!
//! Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML. A model that was trained on tool
//! descriptions written by `json.dumps(x, ensure_ascii=False)` must see those characters as they
//! are, with a space after `,` and `:`, and keys in their order.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// `x | tojson(indent=…, separators=…, sort_keys=…, ensure_ascii=…)`.
pub(super) fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|indent| !indent.is_none()) {
        Some(indent) => Some(usize::try_from(indent)?),
        None => None,
    };
    let separators = match kwargs.get::<Option<Value>>("separators")?.filter(|pair| !pair.is_none()) {
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut writer = Writer { out: String::new(), indent, separators, sort_keys, ensure_ascii };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer {
    out: String,
    indent: Option<usize>,
    /// Between items, and between a key and its value.
    separators: (String, String),
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(&value.to_string()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(('[', ']'), items, depth, |writer, item, depth| writer.value(&item, depth))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key.to_string(), value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container(('{', '}'), entries, depth, |writer, (key, item), depth| {
                    writer.string(&key);
                    writer.out.push_str(&writer.separators.1.clone());
                    writer.value(&item, depth)
                })?;
            }
            kind => {
                let problem = format!("{kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(())
    }

    fn container<T>(
        &mut self,
        (open, close): (char, char),
        items: Vec<T>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.out.push_str(&self.separators.0.clone());
            }
            self.new_line(depth + 1);
            write(self, item, depth + 1)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;

    /// Every expected string is what Python's `json.dumps(x, ensure_ascii=False, …)` prints.
    fn dumps(expression: &str) -> String {
        let mut env = minijinja::Environment::new();
        env.add_filter("tojson", tojson);
        let x: serde_json::Value = serde_json::from_str(
            r#"{"b": [1, 2.5, true, null], "a": {"q": "<é'\"\n\u0001>"}, "e": [], "o": {}}"#,
        )
        .unwrap();
        let context = Value::from_pairs([("x", Value::from(Serde(x)))]);
        env.render_str(&format!("{{{{ {expression} }}}}"), context).unwrap()
    }

    #[test]
    fn writes_what_json_dumps_writes() {
        assert_eq!(
            dumps("x | tojson"),
            r#"{"b": [1, 2.5, true, null], "a": {"q": "<é'\"\n\u0001>"}, "e": [], "o": {}}"#
        );
        assert_eq!(
            dumps("x | tojson(indent=2)"),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": {\n    \"q\": \
             \"<é'\\\"\\n\\u0001>\"\n  },\n  \"e\": [],\n  \"o\": {}\n}"
        );
        assert_eq!(
            dumps("x | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true)"),
            r#"{"a":{"q":"<\u00e9'\"\n\u0001>"},"b":[1,2.5,true,null],"e":[],"o":{}}"#
        );
        assert_eq!(dumps("'😀' | tojson(ensure_ascii=true)"), r#""\ud83d\ude00""#);
    }
}
