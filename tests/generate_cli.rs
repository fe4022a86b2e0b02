//! `halftone generate`, `chat` and `bench decode` from outside, on the demo model.

#![cfg(not(target_arch = "wasm32"))]

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("web/demo/model")
}

/// The demo model under other files.
fn copy(changes: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    for (file, content) in changes {
        match *content {
            "" => std::fs::remove_file(directory.path().join(file)).unwrap(),
            content => std::fs::write(directory.path().join(file), content).unwrap(),
        }
    }
    directory
}

fn command(name: &str, model: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halftone"));
    command.args(name.split(' ')).arg(model).args(["--device", "cpu"]).args(more).stdin(Stdio::null());
    command
}

fn generate(model: &Path, more: &[&str]) -> Output {
    command("generate", model, more).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn fails(output: &Output, code: i32, words: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert_eq!(text(&output.stdout), "");
    for word in words {
        assert!(message.contains(word), "{message} should say {word}");
    }
}

fn as_json(output: &Output) -> Value {
    serde_json::from_str(&succeeds(output)).unwrap()
}

const PROMPT: [&str; 2] = ["--prompt", "Once upon a time, there was a"];

fn with_prompt<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&PROMPT[..], more].concat()
}

#[test]
fn a_text_is_continued_with_speeds_beside_it() {
    let greedy = generate(&demo(), &with_prompt(&["--greedy", "--max-tokens", "24"]));
    let shown = succeeds(&greedy);
    let speeds = text(&greedy.stderr);
    assert!(speeds.contains("tokens/s, generated 24 at ") && speeds.contains("on cpu"), "{speeds}");
    let result = as_json(&generate(&demo(), &with_prompt(&["--greedy", "--max-tokens", "24", "--json"])));
    assert_eq!(format!("{}\n", result["text"].as_str().unwrap()), shown);
    assert!(result["ids"].as_array().unwrap().len() == 24 && result["finish"] == "max_tokens");
    assert!(result["sampling"].is_null() && result["decode_tokens_per_second"].as_f64().unwrap() > 0.0);

    // The prompt from a file is the same prompt.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompt.txt");
    std::fs::write(&file, PROMPT[1]).unwrap();
    let file = ["--prompt-file", file.to_str().unwrap(), "--greedy", "--max-tokens", "24"];
    assert_eq!(succeeds(&generate(&demo(), &file)), shown);
}

#[test]
fn the_model_says_how_to_sample_and_options_go_first() {
    let run = |more: &[&str]| {
        as_json(&generate(&demo(), &with_prompt(&[&["--json", "--max-tokens", "20"], more].concat())))
    };
    // do_sample, temperature 0.8 and top_k 40 stand in its generation_config.json.
    let of_model = run(&[]);
    let close = |value: &Value, want: f64| (value.as_f64().unwrap() - want).abs() < 1e-6;
    assert!(close(&of_model["sampling"]["temperature"], 0.8) && of_model["sampling"]["top_k"] == 40);
    assert_eq!(run(&["--seed", "0"])["ids"], of_model["ids"]);
    assert_ne!(run(&["--seed", "1"])["ids"], of_model["ids"]);
    let asked = run(&["--temperature", "0.5", "--top-p", "0.9", "--top-k", "0", "--min-p", "0.05"]);
    assert!(close(&asked["sampling"]["min_p"], 0.05) && asked["sampling"]["top_k"] == 0);
    assert!(run(&["--temperature", "0"])["sampling"].is_null());
    let greedy = run(&["--greedy"]);
    let penalized = run(&["--greedy", "--repetition-penalty", "1.8"]);
    assert_ne!(greedy["ids"], penalized["ids"]);
    assert!(close(&penalized["repetition_penalty"], 1.8));
}

#[test]
fn a_stop_token_ends_a_text_before_its_length() {
    let free = as_json(&generate(&demo(), &with_prompt(&["--greedy", "--max-tokens", "30", "--json"])));
    let ids: Vec<u64> = free["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    let at = (3..30).find(|&at| !ids[..at].contains(&ids[at])).unwrap();
    let stop = json!({"eos_token_id": [ids[at]]}).to_string();
    let model = copy(&[("generation_config.json", &stop)]);
    let ended = as_json(&generate(model.path(), &with_prompt(&["--max-tokens", "30", "--json"])));
    assert_eq!((&ended["finish"], ended["ids"].as_array().unwrap().len()), (&json!("stop_token"), at));
    assert!(ended["sampling"].is_null(), "greedy where the model does not say otherwise");
}

#[test]
fn wrong_options_and_models_are_refused_before_any_work() {
    let refused = |more: &[&str], code, words: &[&str]| fails(&generate(&demo(), more), code, words);
    refused(&[], 2, &["--prompt"]);
    refused(&with_prompt(&["--temperature=-1"]), 2, &["temperature -1"]);
    refused(&with_prompt(&["--top-k", "300"]), 2, &["top-k 300", "256"]);
    refused(&with_prompt(&["--top-p", "0"]), 2, &["top-p 0"]);
    refused(&with_prompt(&["--repetition-penalty", "0"]), 2, &["repetition penalty 0"]);
    refused(&with_prompt(&["--max-tokens", "0"]), 2, &["--max-tokens 0"]);
    refused(&with_prompt(&["--greedy", "--seed", "1"]), 2, &["cannot be used with"]);
    refused(&["--prompt", ""], 3, &["no tokens"]);
    refused(&["--prompt", &"word ".repeat(600)], 3, &["512 positions"]);
    refused(&["--prompt-file", "absent.txt"], 4, &["cannot read absent.txt"]);
    let model = copy(&[("tokenizer.json", "")]);
    fails(&generate(model.path(), &PROMPT), 3, &["no tokenizer.json"]);
    let model = copy(&[("generation_config.json", "{\"top_k\": \"many\"}")]);
    fails(&generate(model.path(), &PROMPT), 3, &["generation_config.json", "\"top_k\" is \"many\""]);
    let no_template = command("chat", &demo(), &[]).output().unwrap();
    fails(&no_template, 3, &["has no chat template"]);
}

#[test]
fn a_text_may_fill_the_context() {
    let long = "the ".repeat(500);
    let options = ["--prompt", &long, "--greedy", "--max-tokens", "1000"];
    let model = copy(&[
        ("generation_config.json", "{\"eos_token_id\": []}"),
        ("config.json", &{
            let config = std::fs::read_to_string(demo().join("config.json")).unwrap();
            let mut config: Value = serde_json::from_str(&config).unwrap();
            config.as_object_mut().unwrap().remove("eos_token_id");
            config.to_string()
        }),
    ]);
    let output = generate(model.path(), &options);
    succeeds(&output);
    assert!(text(&output.stderr).contains("as long as the model's context of 512 tokens"));
}

const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

#[test]
fn a_conversation_goes_on_until_it_is_reset() {
    let model = copy(&[("chat_template.jinja", TEMPLATE)]);
    let more = ["--greedy", "--max-tokens", "8", "--system", "Tell stories."];
    let mut chat = command("chat", model.path(), &more);
    chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = chat.spawn().unwrap();
    let said = "Hello\n\n/what\nAnd then?\n/reset\nHello\n/quit\nnever read\n";
    child.stdin.take().unwrap().write_all(said.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let answers = succeeds(&output);
    let notes = text(&output.stderr);
    let reads: Vec<&str> = notes.lines().filter(|line| line.starts_with("[read ")).collect();
    assert_eq!(reads.len(), 3, "{notes}");
    assert!(notes.contains("there is no /what") && notes.contains("the conversation is forgotten"));
    let answers: Vec<&str> = answers.split_inclusive('\n').collect();
    // After the reset all is as at first, and the system prompt was kept and read already.
    assert!(answers.len() >= 3, "{answers:?}");
    assert_eq!(answers.first(), answers.last());
}

/// What fits no more is said, and the conversation can be begun anew.
#[test]
fn a_conversation_that_is_too_long_is_no_end() {
    let model = copy(&[("chat_template.jinja", TEMPLATE)]);
    let mut chat = command("chat", model.path(), &["--greedy", "--max-tokens", "4", "--context", "40"]);
    chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = chat.spawn().unwrap();
    let said = format!("{}\nHi\n", "word ".repeat(100));
    child.stdin.take().unwrap().write_all(said.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    succeeds(&output);
    let notes = text(&output.stderr);
    assert!(notes.contains("leave no room in the context of 40"), "{notes}");
    assert!(notes.contains("[read "), "{notes}");
    let wide = command("chat", model.path(), &["--context", "600"]).output().unwrap();
    fails(&wide, 2, &["--context 600", "512 positions"]);
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_a_text_where_it_is() {
    let model = copy(&[("generation_config.json", "{}")]);
    let more = with_prompt(&["--greedy", "--max-tokens", "400"]);
    let mut run = command("generate", model.path(), &more);
    run.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = run.spawn().unwrap();
    // The first bytes of the answer: it has begun.
    let mut first = [0; 1];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut first).unwrap();
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    let message = text(&output.stderr);
    // A machine that is fast enough may have come to the end.
    if output.status.code() != Some(0) {
        assert_eq!(output.status.code(), Some(130), "{message}");
        assert!(
            message.lines().last().unwrap().starts_with("halftone: stopped on request after "),
            "{message}"
        );
        assert!(rest.ends_with('\n'));
    }
}

#[test]
fn decoding_is_measured() {
    let more = ["--prompt-tokens", "40", "--tokens", "8", "--rounds", "1", "--json"];
    let rows = as_json(&command("bench decode", &demo(), &more).output().unwrap());
    let row = &rows[0];
    assert_eq!((&row["prompt"], &row["tokens"]), (&json!(40.0), &json!(8.0)));
    assert!(
        row["decode tokens/s"].as_f64().unwrap() > 0.0 && row["weights MB/token"].as_f64().unwrap() > 1.0
    );
    let none = command("bench decode", &demo(), &["--tokens", "1"]).output().unwrap();
    fails(&none, 2, &["nothing to measure"]);
    let long = command("bench decode", &demo(), &["--prompt-tokens", "600"]).output().unwrap();
    fails(&long, 2, &["more than the model's 512"]);
}
