//! `config.json` with one key changed and every other byte kept.

use super::{KEY, QuantConfig, as_object};
use crate::checkpoint::CONFIG;
use crate::checkpoint::reader::parse_json;
use crate::error::Result;

/// `config.json` with `quantization_config` added at its end, or replaced where it stands. Every
/// other byte stays as it is.
///
/// # Errors
/// [`Error::Model`] if `config_text` is not a JSON object.
pub fn edited_config(config_text: &str, quant: &QuantConfig) -> Result<String> {
    as_object(CONFIG, &parse_json(CONFIG, config_text)?)?;
    // Strings cannot hold a line break in JSON, so this only indents.
    let object = format!("{:#}", quant.to_json()).replace('\n', "\n  ");
    let spans = member_spans(config_text);
    if let Some((_, span)) = spans.iter().rev().find(|(key, _)| key == KEY) {
        return Ok(format!("{}{object}{}", &config_text[..span.start], &config_text[span.end..]));
    }
    let close = config_text.rfind('}').unwrap_or(config_text.len());
    let kept = config_text[..close].trim_end();
    let comma = if spans.is_empty() { "" } else { "," };
    Ok(format!("{kept}{comma}\n  \"{KEY}\": {object}\n{}", &config_text[close..]))
}

/// Key and place of the value of each member of the outermost object of `text`, which is known to
/// be valid JSON: only strings and nesting need to be told apart.
fn member_spans(text: &str) -> Vec<(String, std::ops::Range<usize>)> {
    let mut members = Vec::new();
    let mut depth = 0;
    // Where a string began, and whether the next character is escaped.
    let mut string: Option<(usize, bool)> = None;
    let mut last_string = 0..0;
    let mut open: Option<(String, usize)> = None;
    for (at, byte) in text.bytes().enumerate() {
        if let Some((begin, escaped)) = string {
            string = match byte {
                _ if escaped => Some((begin, false)),
                b'\\' => Some((begin, true)),
                b'"' => {
                    last_string = begin..at + 1;
                    None
                }
                _ => Some((begin, false)),
            };
            continue;
        }
        let ends_member = depth == 1 && matches!(byte, b',' | b'}');
        if ends_member && let Some((key, begin)) = open.take() {
            let value = &text[begin..at];
            let start = begin + value.len() - value.trim_start().len();
            members.push((key, start..start + value.trim().len()));
        }
        match byte {
            b'"' => string = Some((at, false)),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b':' if depth == 1 => {
                let key = serde_json::from_str(&text[last_string.clone()]).unwrap_or_default();
                open = Some((key, at + 1));
            }
            _ => {}
        }
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn full() -> Value {
        json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": true,
            "lm_head": false, "checkpoint_format": "gptq", "pack_dtype": "int32", "damp_percent": 0.01,
            "true_sequential": true, "static_groups": true, "dynamic": {}, "meta": {"x": 1}})
    }

    #[test]
    fn editing_keeps_every_other_byte() {
        let quant = QuantConfig::parse("p", &full()).unwrap();
        let check = |before: &str, head: &str, tail: &str| {
            let after = edited_config(before, &quant).unwrap();
            assert!(after.starts_with(head) && after.ends_with(tail), "{after}");
            let mut expected: Value = serde_json::from_str(before).unwrap();
            expected[KEY] = full();
            let read: Value = serde_json::from_str(&after).unwrap();
            assert_eq!(read.to_string(), expected.to_string());
            after
        };
        check(
            "{\n  \"eps\": 1e-05,\n  \"a\": [1, {\"b\": \"}\\\"{\"}]\n}\n",
            "{\n  \"eps\": 1e-05,\n",
            "\n}\n",
        );
        check("{\"z\":1,\"a\":{}}", "{\"z\":1,\"a\":{},\n", "\n}");
        check("{}", "{\n  \"quantization_config\": {\n    \"quant_method\"", "  }\n}");
        check(
            "{ \"quantization_config\" : {\"bits\":[8]} , \"z\": 1 }",
            "{ \"quantization_config\" : {\n",
            "} , \"z\": 1 }",
        );
        check(
            "{\"a\":\"quantization_config\",\"quantization\\u005fconfig\":null}",
            "{\"a\":\"quantization_config\",",
            "}}",
        );
        // Only the outermost object is meant.
        check("{\"a\": {\"quantization_config\": 1}}", "{\"a\": {\"quantization_config\": 1},", "\n}");
        let once =
            check("{\n  \"a\": 1\n}", "{\n  \"a\": 1,\n  \"quantization_config\": {\n    \"", "\n  }\n}");
        assert_eq!(edited_config(&once, &quant).unwrap(), once);
        for bad in ["[]", "", "{", "1"] {
            assert!(edited_config(bad, &quant).is_err(), "{bad}");
        }
    }
}
