//! Chat messages as the text that a model was trained on, rendered the way Transformers does it.
//!
//! A template is a Jinja program that ships with the model, in `chat_template.jinja` or under
//! `chat_template` in `tokenizer_config.json`. It runs in minijinja with Python's string methods,
//! the `raise_exception`, `strftime_now` and `tojson` that Transformers adds, and blocks trimmed as
//! there. What it prints already holds the special tokens, so it is tokenized without adding any.

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};

use super::read_optional;
use super::strftime::Clock;
use super::tojson::tojson;
use crate::error::{Error, Result};
use crate::storage::Source;

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";
const TOKENS_FILE: &str = "special_tokens_map.json";
const COPY_AGAIN: &str = "Copy the file again from the original model";

/// A model's chat template with the special tokens that it may name.
///
/// The template is compiled when it is rendered, so that a broken one is no obstacle to a run that
/// has no chat messages.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    template: String,
    /// The file that the template comes from, for messages.
    place: String,
    /// Names such as `bos_token` with their text.
    special_tokens: BTreeMap<String, String>,
}

/// What a template may be told besides the messages.
#[derive(Debug, Clone, Copy)]
pub struct RenderOptions<'a> {
    /// Ends the text with the opening of the assistant's answer; for generation, not calibration.
    pub add_generation_prompt: bool,
    /// Tool descriptions, a JSON array.
    pub tools: Option<&'a serde_json::Value>,
    pub clock: Clock,
}

impl ChatTemplate {
    /// A template from its text. `config` is the content of `tokenizer_config.json`, of which the
    /// special tokens are taken; `place` is the file that holds the template, for messages.
    pub fn new(template: &str, config: &serde_json::Value, place: &str) -> Self {
        Self {
            template: without_generation_tags(template),
            place: place.to_string(),
            special_tokens: special_tokens(config),
        }
    }

    /// The template of a model directory, `None` if it has none. `chat_template.jinja` goes before
    /// `tokenizer_config.json`, of whose named templates the one called `default` is taken. Special
    /// tokens that the configuration lacks come from `special_tokens_map.json`, as older files have it.
    pub async fn load(source: &dyn Source) -> Result<Option<Self>> {
        let place = |file: &str| format!("{}/{file}", source.describe());
        let config = read_json(source, CONFIG_FILE).await?;
        let template = match read_optional(source, TEMPLATE_FILE).await? {
            Some(bytes) => {
                let template = String::from_utf8(bytes).map_err(|error| {
                    let problem = format!("not UTF-8 text: {}", error.utf8_error());
                    Error::model(place(TEMPLATE_FILE), problem, COPY_AGAIN)
                })?;
                Self::new(&template, &config, &place(TEMPLATE_FILE))
            }
            None => match template_in_config(&config, &place(CONFIG_FILE))? {
                Some(template) => Self::new(&template, &config, &place(CONFIG_FILE)),
                None => return Ok(None),
            },
        };
        let mut tokens = special_tokens(&read_json(source, TOKENS_FILE).await?);
        tokens.extend(template.special_tokens);
        Ok(Some(Self { special_tokens: tokens, ..template }))
    }

    /// The text of a conversation: `messages` is a JSON array of objects with `role` and `content`.
    ///
    /// Errors name the template's line: a template that does not compile, one that uses what
    /// minijinja lacks, and messages that the template itself refuses with `raise_exception`.
    pub fn render(&self, messages: &serde_json::Value, options: RenderOptions) -> Result<String> {
        let mut environment = environment(options.clock);
        // "template" is never shown: errors name the file and the line instead.
        environment.add_template("template", &self.template).map_err(|error| self.error(&error))?;
        let template = environment.get_template("template").map_err(|error| self.error(&error))?;
        let special_tokens = self.special_tokens.iter();
        let mut context: BTreeMap<&str, Value> =
            special_tokens.map(|(name, token)| (name.as_str(), Value::from(token.as_str()))).collect();
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("add_generation_prompt", Value::from(options.add_generation_prompt));
        // Transformers always passes these two, as None when there are none.
        context.insert("tools", Value::from(Serde(options.tools)));
        context.insert("documents", Value::from(()));
        template.render(Value::from_pairs(context)).map_err(|error| self.error(&error))
    }

    fn error(&self, error: &minijinja::Error) -> Error {
        let place = match error.line() {
            Some(line) => format!("{}, line {line}", self.place),
            None => self.place.clone(),
        };
        let detail = error.detail().map_or_else(|| error.to_string(), str::to_string);
        match error.kind() {
            ErrorKind::SyntaxError => Error::text(
                place,
                format!("the chat template is not valid Jinja: {detail}"),
                "Correct the template, or use the model's original one",
            ),
            _ => Error::text(
                place,
                format!("the chat template cannot render these messages: {detail}"),
                "Correct the messages, or the template if it is yours",
            ),
        }
    }
}

fn environment(clock: Clock) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    // Only custom delimiters can be refused, and there are none.
    environment.set_syntax(syntax.unwrap_or_default());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| clock.format(format));
    environment
}

/// The content of a JSON file, null if there is no such file.
async fn read_json(source: &dyn Source, file: &str) -> Result<serde_json::Value> {
    let Some(bytes) = read_optional(source, file).await? else { return Ok(serde_json::Value::Null) };
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::model(format!("{}/{file}", source.describe()), format!("not valid JSON: {error}"), COPY_AGAIN)
    })
}

/// The `chat_template` of a `tokenizer_config.json`: a string, or a list of named ones.
fn template_in_config(config: &serde_json::Value, place: &str) -> Result<Option<String>> {
    let wrong = |problem: String| {
        Error::model(place, problem, format!("Put the template to use into {TEMPLATE_FILE} beside it"))
    };
    match config.get("chat_template") {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(template)) => Ok(Some(template.clone())),
        Some(serde_json::Value::Array(named)) => {
            let name = |entry: &serde_json::Value| entry["name"].as_str().unwrap_or("unnamed").to_string();
            let default = named.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(template) => Ok(Some(template.to_string())),
                None => {
                    let names = named.iter().map(name).collect::<Vec<_>>().join(", ");
                    Err(wrong(format!("chat_template has no template named default, only: {names}")))
                }
            }
        }
        Some(_) => Err(wrong("chat_template is neither a string nor a list of named templates".to_string())),
    }
}

/// Every `…_token` of a tokenizer configuration, written as a string or as `{"content": "…"}`.
fn special_tokens(config: &serde_json::Value) -> BTreeMap<String, String> {
    let entries = config.as_object().into_iter().flatten();
    entries
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, token)| {
            let text = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.clone(), text.to_string()))
        })
        .collect()
}

/// Replaces `{% generation %}` … `{% endgeneration %}`, a tag of Transformers that marks what the
/// assistant said and prints its body as it is, by `{% with %}` … `{% endwith %}`, which is the
/// same scope without the mark. Lines and whitespace control stay as they are.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else { break };
        let (tag, after) = rest[open..].split_at(length + 2);
        out.push_str(&rest[..open]);
        match tag[2..length].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
