//! Chat templates render as in Transformers: the cases in `chat/cases.json` come from Jinja2.

use std::ops::Range;

use halftone::error::{Error, Result};
use halftone::storage::{FileEntry, LocalFuture, Source};
use halftone::text::{ChatTemplate, Clock, RenderOptions};
use serde_json::{Value, json};

const OPTIONS: RenderOptions =
    RenderOptions { add_generation_prompt: false, tools: None, clock: Clock::CALIBRATION };

fn template(name: &str) -> &'static str {
    match name {
        "chatml" => include_str!("chat/chatml.jinja"),
        "llama" => include_str!("chat/llama.jinja"),
        "qwen" => include_str!("chat/qwen.jinja"),
        "plain" => include_str!("chat/plain.jinja"),
        other => panic!("no template {other}"),
    }
}

fn render(template: &str, messages: &Value) -> Result<String> {
    ChatTemplate::new(template, &json!({}), "model/chat_template.jinja").render(messages, OPTIONS)
}

#[test]
fn templates_render_as_in_transformers() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("chat/cases.json")).unwrap();
    assert!(cases.len() >= 8);
    let config = json!({
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": true},
        "pad_token": null,
        "add_bos_token": true,
    });
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let options = RenderOptions {
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            tools: Some(&case["tools"]).filter(|tools| !tools.is_null()),
            clock: Clock::CALIBRATION,
        };
        let text =
            ChatTemplate::new(template(name), &config, "model").render(&case["messages"], options).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn a_refusal_of_the_template_is_shown_with_its_line() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
    let message = render(template("llama"), &messages).unwrap_err().to_string();
    assert!(message.starts_with("model/chat_template.jinja, line 19: "), "{message}");
    assert!(message.contains("Roles must alternate between user and assistant"), "{message}");
}

#[test]
fn a_broken_template_is_an_error_with_its_line() {
    let messages = json!([{"role": "user", "content": "a"}]);
    for (template, line, said) in [
        ("{{ bos_token }}\n{% for m in messages %}\n{{ m.content }", 3, "not valid Jinja"),
        ("\n\n{{ messages[0].content.frobnicate() }}", 3, "frobnicate"),
        ("\n{{ messages[0].content | nosuchfilter }}", 2, "nosuchfilter"),
        ("\n{{ messages[7].content }}", 2, "undefined"),
        ("{% generation %}\n{% endgeneration %}\n\n{{ nothing() }}", 4, "nothing"),
    ] {
        let message = render(template, &messages).unwrap_err().to_string();
        assert!(message.starts_with(&format!("model/chat_template.jinja, line {line}: ")), "{message}");
        assert!(message.contains(said), "{message}");
    }
}

/// A directory in memory.
struct Directory(Vec<(FileEntry, String)>, Vec<FileEntry>);

impl Directory {
    fn new(files: &[(&str, &str)]) -> Self {
        let entry = |name: &str, text: &str| FileEntry { name: name.to_string(), size: text.len() as u64 };
        Self(
            files.iter().map(|(name, text)| (entry(name, text), text.to_string())).collect(),
            files.iter().map(|(name, text)| entry(name, text)).collect(),
        )
    }
}

impl Source for Directory {
    fn files(&self) -> &[FileEntry] {
        &self.1
    }

    fn read<'a>(&'a self, file: &'a str, range: Range<u64>) -> LocalFuture<'a, Result<Vec<u8>>> {
        let found = self.0.iter().find(|(entry, _)| entry.name == file);
        let bytes = found.map(|(_, text)| text.as_bytes()[range.start as usize..range.end as usize].to_vec());
        Box::pin(async move { bytes.ok_or_else(|| Error::io("read", file, "no such file")) })
    }

    fn describe(&self) -> String {
        "model".to_string()
    }
}

fn load(files: &[(&str, &str)]) -> Result<Option<String>> {
    let template = pollster::block_on(ChatTemplate::load(&Directory::new(files)))?;
    template.map(|template| template.render(&json!([]), OPTIONS)).transpose()
}

#[test]
fn the_template_is_found_where_transformers_finds_it() {
    let list =
        r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    let string = r#"{"chat_template": "from config {{ eos_token }}", "eos_token": {"content": "<e>"}}"#;
    assert_eq!(load(&[]).unwrap(), None);
    assert_eq!(load(&[("tokenizer_config.json", r#"{"eos_token": "x"}"#)]).unwrap(), None);
    assert_eq!(load(&[("tokenizer_config.json", string)]).unwrap().as_deref(), Some("from config <e>"));
    assert_eq!(load(&[("tokenizer_config.json", list)]).unwrap().as_deref(), Some("d"));
    let both = [("chat_template.jinja", "file {{ eos_token }}"), ("tokenizer_config.json", string)];
    assert_eq!(load(&both).unwrap().as_deref(), Some("file <e>"));
}

#[test]
fn tokens_come_from_special_tokens_map_where_the_configuration_has_none() {
    let files = [
        ("chat_template.jinja", "{{ bos_token }} {{ eos_token }}"),
        ("tokenizer_config.json", r#"{"eos_token": "<new>"}"#),
        ("special_tokens_map.json", r#"{"eos_token": "<old>", "bos_token": {"content": "<b>"}}"#),
    ];
    assert_eq!(load(&files).unwrap().as_deref(), Some("<b> <new>"));
}

#[test]
fn unusable_configurations_are_named() {
    for (file, content, said) in [
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", r#"{"chat_template": 3}"#, "neither a string nor a list"),
        ("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": ""}]}"#, "only: rag"),
    ] {
        let message = load(&[(file, content)]).unwrap_err().to_string();
        assert!(message.starts_with(&format!("model/{file}: ")) && message.contains(said), "{message}");
    }
}
