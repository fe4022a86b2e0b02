//! The program itself: commands, exit codes, what is printed, and signals.

#![cfg(not(target_arch = "wasm32"))]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use common::*;
use serde_json::Value;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halftone"));
    command.stdin(Stdio::null());
    command
}

fn halftone<I: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = I>) -> Output {
    program().args(args).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn succeeds(output: Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    stdout(&output)
}

#[track_caller]
fn json(output: Output) -> Value {
    let text = succeeds(output);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// One line on standard error, nothing on standard output.
#[track_caller]
fn fails(output: Output, code: i32, words: &[&str]) {
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.starts_with("halftone: ") && message.lines().count() == 1, "{message}");
    assert_eq!(stdout(&output), "");
    for word in words {
        assert!(message.contains(word), "{message} should say {word}");
    }
}

/// A golden model and calibration rows in a directory of their own.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new(name: &str) -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap() };
        std::fs::create_dir(place.path("model")).unwrap();
        place.write_model(model(name));
        place.write("rows.jsonl", &jsonl(&rows(16, 40, 1)));
        place.write("golden.jsonl", &jsonl(&expected(name).0));
        place
    }

    fn write_model(&self, files: Files) {
        for (file, bytes) in files {
            std::fs::write(self.path("model").join(file), bytes).unwrap();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// `command` on the model with the rows, groups of 32, on the CPU, then `more`; of two equal
    /// options the last counts nowhere, so `more` must not repeat these.
    fn on_model(&self, command: &str, more: &[&str]) -> Command {
        let mut program = program();
        program.current_dir(self.directory.path()).args([command, "model", "--device", "cpu"]).args(more);
        program
    }

    fn quantize(&self, more: &[&str]) -> Output {
        let common = ["--calibration", "rows.jsonl", "--group-size", "32", "--out"];
        let mut args = common.to_vec();
        if more.first().is_none_or(|first| first.starts_with("--")) {
            args.push("out");
        }
        args.extend(more);
        self.on_model("quantize", &args).output().unwrap()
    }

    fn eval(&self, model: &str, text: &str) -> Output {
        let mut program = program();
        let args = ["eval", model, "--text", text, "--device", "cpu", "--json"];
        program.current_dir(self.directory.path()).args(args).output().unwrap()
    }
}

fn files(directory: &Path) -> Files {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    entries.map(|path| (name(&path), std::fs::read(&path).unwrap())).collect()
}

#[test]
fn a_model_is_quantized_inspected_and_evaluated() {
    let place = Place::new("qwen2");
    let said = succeeds(place.quantize(&[]));
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("model: qwen2, 3 layers") && lines[0].ends_with("on cpu"), "{said}");
    assert!(said.contains("16 samples, 640 tokens (mean length 40.0, "), "{said}");
    let rows = lines.iter().filter(|line| line.contains("model.layers.")).count();
    assert_eq!(rows, 21, "{said}");
    assert!(said.contains("rtn loss") && said.contains("21 layers in"), "{said}");
    assert!(said.contains("% of what rounding to nearest would lose"), "{said}");
    let mut names: Vec<String> = files(&place.path("out")).into_keys().collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "quant_log.csv", "quantize_config.json"]);

    for (model, quantized) in [("model", false), ("out", true)] {
        let shown = succeeds(
            program().current_dir(place.directory.path()).args(["inspect", model]).output().unwrap(),
        );
        assert!(shown.contains("qwen2") && shown.contains("model.layers.2.mlp.down_proj"), "{shown}");
        assert_eq!(shown.contains("4 bits, group 32, sym"), quantized, "{shown}");
        let object = json(
            program()
                .current_dir(place.directory.path())
                .args(["inspect", model, "--json"])
                .output()
                .unwrap(),
        );
        assert_eq!(object["modules"].as_array().unwrap().len(), 21);
        assert_eq!((&object["layers"], &object["vocab_size"]), (&3.into(), &320.into()));
        assert_eq!(object["quantization_config"].is_null(), !quantized);
        if quantized {
            assert_eq!(object["quantization_config"]["bits"], 4);
        }
    }

    let (ids, logits) = expected("qwen2");
    let want = perplexity_of(&ids, &logits);
    let dense = json(place.eval("model", "golden.jsonl"));
    let got = dense["perplexity"].as_f64().unwrap();
    assert!((got / want - 1.0).abs() < 1e-4, "{got} is not {want}");
    assert_eq!((&dense["tokens"], &dense["device"]), (&78.into(), &"cpu".into()));
    let quantized = json(place.eval("out", "golden.jsonl"))["perplexity"].as_f64().unwrap();
    assert!(quantized != got && (quantized / want - 1.0).abs() < 0.1, "{quantized}, not near {want}");

    let mut one = program();
    one.current_dir(place.directory.path());
    one.args(["eval", "model", "--text", "golden.jsonl", "--device", "cpu", "--samples", "1"]);
    let said = succeeds(one.output().unwrap());
    assert!(
        said.starts_with("perplexity ") && said.contains("39 predicted tokens (1 samples) on cpu"),
        "{said}"
    );
}

#[test]
fn logits_are_written_as_transformers_computes_them() {
    let place = Place::new("qwen2");
    let mut eval = program();
    eval.args([
        "eval",
        "model",
        "--text",
        "golden.jsonl",
        "--logits",
        "logits.safetensors",
        "--device",
        "cpu",
    ]);
    succeeds(eval.current_dir(place.directory.path()).output().unwrap());
    let (ids, want) = expected("qwen2");
    let bytes = std::fs::read(place.path("logits.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let found = tensors.tensor("logits").unwrap();
    assert_eq!(found.shape(), [ids.iter().map(Vec::len).sum::<usize>(), want.len() / ids.concat().len()]);
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(found.data());
    let worst = found.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst <= 2e-3, "{worst}");
    let mut names: Vec<_> =
        std::fs::read_dir(place.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["golden.jsonl", "logits.safetensors", "model", "rows.jsonl"]);
}

#[test]
fn inputs_are_scaled_on_request() {
    let place = Place::new("llama");
    for (out, more) in [("awq", &["--preset", "awq"][..]), ("both", &["--scaling", "awq", "--bits", "3"])] {
        let said = succeeds(place.quantize(&[&[out], more].concat()));
        assert!(said.contains("of 21 layers scaled"), "{said}");
        let log = std::fs::read_to_string(place.path(out).join("quant_log.csv")).unwrap();
        assert!(log.lines().next().unwrap().ends_with(",scaling,seconds"), "{log}");
        let checked =
            program().current_dir(place.directory.path()).args(["inspect", "--check", out]).output().unwrap();
        assert!(succeeds(checked).contains("0 errors"));
        let perplexity = |model| json(place.eval(model, "golden.jsonl"))["perplexity"].as_f64().unwrap();
        assert!((perplexity(out) / perplexity("model") - 1.0).abs() < 0.3);
    }
    let refused = |more: &[&str]| place.quantize(&[&["no"], more].concat());
    fails(refused(&["--preset", "rtn", "--scaling", "awq"]), 2, &["--scaling", "--preset awq"]);
    fails(refused(&["--preset", "awq", "--refit"]), 2, &["--preset awq rounds", "--refit"]);
    fails(refused(&["--preset", "awq", "--desc-act"]), 2, &["--preset awq takes no order"]);
}

/// The commands around formats from outside: written, looked through, converted there and back.
#[test]
fn formats_are_written_checked_and_converted() {
    let place = Place::new("llama");
    let run = |args: &[&str]| program().current_dir(place.directory.path()).args(args).output().unwrap();
    let options = ["--format", "compressed-tensors", "--quantize-lm-head", "--shard-size", "60kB"];
    let differs = ["--override", "down_proj=bits:8", "--skip", r"layers\.1\.self_attn"];
    let said = succeeds(place.quantize(&[&options[..], &differs].concat()));
    assert_eq!(said.lines().filter(|line| line.contains("lm_head")).count(), 1, "{said}");
    assert!(said.contains("18 layers in") && said.contains("verify"), "{said}");
    assert!(files(&place.path("out")).keys().any(|name| name.starts_with("model-00002-of-")));
    let shown = succeeds(run(&["inspect", "out"]));
    assert!(shown.contains("8 bits, group 32, sym") && shown.contains("lm_head"), "{shown}");

    let checked = succeeds(run(&["inspect", "--check", "out"]));
    assert!(checked.contains("18 quantized layers as compressed-tensors; 0 errors"), "{checked}");
    assert!(checked.contains("warning: tokenizer.json: there is no tokenizer"), "{checked}");

    let before = json(place.eval("out", "golden.jsonl"))["perplexity"].as_f64().unwrap();
    let said = succeeds(run(&["convert", "out", "--out", "v2", "--format", "gptq_v2"]));
    assert!(said.contains("18 layers from compressed-tensors to gptq_v2"), "{said}");
    let object = json(run(&["convert", "v2", "--out", "back", "--format", "gptq", "--json"]));
    assert_eq!((&object["from"], &object["layers"]), (&"gptq_v2".into(), &18.into()));
    for model in ["v2", "back"] {
        assert_eq!(
            json(place.eval(model, "golden.jsonl"))["perplexity"].as_f64().unwrap(),
            before,
            "{model}"
        );
        succeeds(run(&["inspect", "--check", model]));
    }
    fails(run(&["convert", "v2", "--out", "back", "--format", "gptq"]), 2, &["back", "not empty"]);
    fails(run(&["convert", "model", "--out", "new", "--format", "gptq"]), 3, &["not quantized"]);
    assert!(!place.path("new").exists());

    let config = place.path("v2/config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("gptq_v2", "gptq");
    std::fs::write(config, text).unwrap();
    std::fs::remove_file(place.path("v2/quantize_config.json")).unwrap();
    let checked = run(&["inspect", "--check", "v2"]);
    assert!(stdout(&checked).contains("error: model.layers.0.self_attn.q_proj, "), "{}", stdout(&checked));
    assert!(
        stdout(&checked).contains(" and 15 more: zero points are stored as gptq_v2"),
        "{}",
        stdout(&checked)
    );
    assert!(stderr(&checked).contains("v2: a loader would trip over it"), "{}", stderr(&checked));
    assert_eq!(checked.status.code(), Some(3));
    let object = run(&["inspect", "--check", "v2", "--json"]);
    let found: Value = serde_json::from_str(&stdout(&object)).unwrap();
    assert_eq!((&found["findings"][0]["severity"], object.status.code()), (&"error".into(), Some(3)));
}

#[test]
fn a_plan_tells_what_differs_and_refuses_what_cannot_be() {
    let place = Place::new("llama");
    let plan =
        |more: &[&str]| place.on_model("plan", &[&["--group-size", "32"], more].concat()).output().unwrap();
    let differs = ["--override", "down_proj=bits:8,group_size:-1", "--skip", "o_proj", "--format", "gptq_v2"];
    let said = succeeds(plan(&differs));
    assert!(said.contains("left in 16 bits: model.layers.0.self_attn.o_proj, "), "{said}");
    assert!(said.contains("as gptq_v2"), "{said}");
    let object = json(plan(&[&differs[..], &["--json"]].concat()));
    assert_eq!(
        (&object["format"], &object["skipped"][2]),
        (&"gptq_v2".into(), &"model.layers.2.self_attn.o_proj".into())
    );
    let warned = |object: &Value, words: &str| {
        object["warnings"].as_array().unwrap().iter().any(|text| text.as_str().unwrap().contains(words))
    };
    assert!(warned(&object, "goes to \"dynamic\"") && !warned(&object, "head unread"), "{object}");
    let head = json(plan(&["--quantize-lm-head", "--json"]));
    assert!(warned(&head, "head unread"), "{head}");
    let down = object["modules"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["module"].as_str().unwrap().contains("down"));
    assert_eq!((&down.unwrap()["bits"], &down.unwrap()["group"]), (&8.into(), &(-1).into()));
    fails(plan(&["--override", "down_proj"]), 2, &["--override \"down_proj\"", "REGEX=bits:8"]);
    fails(plan(&["--override", "dwn_proj=bits:8"]), 2, &["matches no linear layer", "down_proj"]);
    fails(plan(&["--skip", "q_proj"]), 2, &["q_proj (16 bits)", "one matrix"]);
}

#[test]
fn a_quantized_model_is_compared_with_its_original() {
    let place = Place::new("llama");
    succeeds(place.quantize(&["--bits", "3"]));
    let compare = |more: &[&str]| {
        let mut program = program();
        let args = ["compare", "model", "out", "--text", "rows.jsonl", "--device", "cpu", "--prompts", "4"];
        program.current_dir(place.directory.path()).args(args).args(more).output().unwrap()
    };
    let object = json(compare(&["--json"]));
    let found = &object["comparison"];
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    assert_eq!((&found["rows"], &found["tokens"]), (&16.into(), &(16 * 39).into()));
    assert!(number(&found["kl"]["value"]) > 1e-5 && number(&found["kl_99"]) > number(&found["kl"]["value"]));
    assert!(number(&found["blocks"][0]) > 0.0 && object["last_words"].is_null());
    let ratio = number(&found["perplexity"][1]["value"]) / number(&found["perplexity"][0]["value"]);
    assert!((number(&found["ratio"]["value"]) / ratio - 1.0).abs() < 1e-6);
    assert_eq!(object["continuations"]["prompts"], 4);
    let said = succeeds(compare(&[]));
    assert!(said.contains("624 predicted tokens (16 samples) on cpu"), "{said}");
    for line in [
        "perplexity of b",
        "mean KL(a ‖ b), nats",
        "same top token, %",
        "same greedy tokens of 64",
        "hidden state after each block",
    ] {
        assert!(said.contains(line), "{said}");
    }
    fails(compare(&["--passages", "rows.jsonl"]), 3, &["tokenizer.json"]);
    // Before the comparison, whose result would be lost.
    let late = compare(&["--tokens", "60000"]);
    assert!(!String::from_utf8_lossy(&late.stdout).contains("perplexity"));
    fails(late, 2, &["60064 tokens are more than the model's"]);
}

#[test]
fn last_words_are_scored_beside_perplexity() {
    let directory = tempfile::tempdir().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/web/demo/model");
    let passage = "The Congress of the United States and the President of the United States";
    std::fs::write(directory.path().join("t.txt"), passage).unwrap();
    let rows = format!("{{\"text\": \"{passage}\"}}\n{{\"text\": \"one\"}}\n");
    std::fs::write(directory.path().join("p.jsonl"), rows).unwrap();
    let eval = |more: &[&str]| {
        let args = ["eval", model, "--text", "t.txt", "--passages", "p.jsonl", "--device", "cpu"];
        program().current_dir(directory.path()).args(args).args(more).output().unwrap()
    };
    let output = eval(&["--json"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 rows of p.jsonl are no passages"));
    let words = &json(output)["last_words"];
    assert_eq!(words["accuracy"]["value"], 1.0, "{words}");
    assert!(
        words["perplexity"].as_f64().unwrap() < 3.0 && words["accuracy"]["interval"].is_null(),
        "{words}"
    );
    assert!(succeeds(eval(&[])).contains("last word right in 100.00 % of 1 passages"));
}

#[test]
fn methods_are_measured_over_seeds() {
    let common = ["--samples", "6", "--seq-len", "64", "--windows", "3", "--device", "cpu"];
    let bench = |more: &[&str]| halftone(["bench", "quality"].iter().chain(&common).chain(more));
    let methods = "rtn,default+alpha=auto+refit";
    let grid = ["--bits", "3", "--group-size", "-1,64", "--methods", methods, "--seeds", "2", "--json"];
    let rows = json(bench(&grid));
    let rows = rows.as_array().unwrap();
    let cells: Vec<_> = rows.iter().map(|row| (row["group_size"].as_i64(), row["method"].as_str())).collect();
    let best = Some("default+alpha=auto+refit");
    let groups = [Some(-1), Some(64)];
    assert_eq!(cells, groups.map(|group| [(group, Some("rtn")), (group, best)]).concat());
    for pair in rows.chunks(2) {
        let of = |row: usize, what: &str| pair[row][what].as_f64().unwrap();
        assert_eq!((of(0, "seeds"), of(1, "seeds")), (1.0, 2.0));
        assert!(pair[0]["perplexity_spread"].is_null() && pair[0]["kl_spread"].is_null());
        assert!(of(1, "perplexity_spread") > 0.0 && of(1, "perplexity_16bit") < of(1, "perplexity"));
        assert!(of(1, "kl") < of(0, "kl") && of(1, "perplexity") < of(0, "perplexity"));
    }
    let mixed = ["--bits", "4,3.5", "--group-size", "auto", "--methods", "fast", "--seeds", "1"];
    let table = succeeds(bench(&mixed));
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines[1][..5] == ["demo", "4", "auto", "fast", "1"] && lines[2][1] == "3.5", "{table}");
    assert_eq!((lines[1][7], lines[1][9]), ("-", "-"), "{table}");
    // All is looked at before any work.
    for (wrong, words) in [
        (&["--bits", "5"][..], ["--bits 5", ""]),
        (&["--bits", "4", "3"], ["3 is taken for a model directory", "--bits 4,3"]),
        (&["--methods", "fast", "default"], ["default is taken for a model", "commas"]),
        (&["--group-size", "64,48"], ["--group-size 48 does not divide", ""]),
    ] {
        fails(bench(wrong), 2, &words);
    }
    let output = halftone(["bench", "quality", "--windows", "0"]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("--windows <N>"), "{output:?}");
}

/// What was measured is in the table, also of a row whose seeds are not all done.
#[cfg(unix)]
#[test]
fn a_grid_that_is_stopped_tells_what_it_has() {
    let grid = ["--bits", "3", "--group-size", "64", "--methods", "fast", "--seeds", "1000", "--json"];
    let common = ["--samples", "6", "--seq-len", "64", "--windows", "3", "--device", "cpu"];
    let mut command = program();
    command.args(["bench", "quality"]).args(grid).args(common);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("seed 1:") {
        line.clear();
        assert!(told.read_line(&mut line).unwrap() > 0, "it ended by itself");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let mut rest = String::new();
    told.read_to_string(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest}");
    let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
    let seeds = rows[0]["seeds"].as_u64().unwrap();
    assert!(rows.as_array().unwrap().len() == 1 && seeds >= 2, "{rows}");
    assert!(rows[0]["kl"].as_f64().unwrap() > 0.0 && rows[0]["kl_spread"].as_f64().unwrap() > 0.0, "{rows}");
    assert!(rest.contains(&format!("behind {seeds} runs of 1000")), "{rest}");
}

/// The same rows whatever the seed, and a model that turns out wrong behind one that is not.
#[test]
fn rows_of_ids_are_one_sample_and_models_are_opened_first() {
    let place = Place::new("llama");
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/web/demo/model");
    std::fs::create_dir(place.path("broken")).unwrap();
    std::fs::copy(place.path("model/config.json"), place.path("broken/config.json")).unwrap();
    let ids: Vec<String> = (0..5).map(|row| format!("{{\"input_ids\": {:?}}}", [row + 5; 64])).collect();
    std::fs::write(place.path("ids.jsonl"), ids.join("\n")).unwrap();
    let bench = |models: &[&str]| {
        let more = ["--bits", "4", "--group-size", "64", "--methods", "fast", "--windows", "2", "--json"];
        let mut command = program();
        command.current_dir(place.directory.path()).args(["bench", "quality"]).args(models).args(more);
        command.args(["--samples", "5", "--calibration", "ids.jsonl", "--device", "cpu"]).output().unwrap()
    };
    let rows = json(bench(&[demo]));
    assert!(rows[0]["seeds"] == 1 && rows[0]["kl_spread"].is_null(), "{rows}");
    let output = bench(&[demo, "broken"]);
    assert!(!output.status.success() && !stderr(&output).contains("seed 0"), "{}", stderr(&output));
}

#[test]
fn quantize_prints_one_json_object() {
    let place = Place::new("llama");
    let object =
        json(place.quantize(&["--json", "--bits", "3", "--asym", "--preset", "reference", "--desc-act"]));
    assert_eq!(object["modules"].as_array().unwrap().len(), 21);
    assert_eq!((&object["tokens"], &object["modules"][0]["bits"]), (&640.into(), &3.into()));
    assert!(object["modules"][20]["gptq_loss"].as_f64().unwrap() > 0.0);
    let config: Value = serde_json::from_slice(&files(&place.path("out"))["config.json"]).unwrap();
    let quant = &config["quantization_config"];
    assert_eq!((&quant["desc_act"], &quant["sym"], &quant["bits"]), (&true.into(), &false.into(), &3.into()));
}

#[test]
fn plan_tells_all_without_writing() {
    let place = Place::new("mistral_sliding");
    let before = files(&place.path("model"));
    let said = succeeds(place.on_model("plan", &["--group-size", "32"]).output().unwrap());
    assert_eq!(said.lines().filter(|line| line.contains("model.layers.")).count(), 21, "{said}");
    assert!(said.contains("calibration: 65536 tokens assumed"), "{said}");
    assert!(said.contains("time: about ") && said.contains("memory on cpu: about "), "{said}");

    // Without text a plan assumes 128 × 512 tokens, with text it counts.
    let args = ["--group-size", "32", "--json"];
    let assumed = json(place.on_model("plan", &args).output().unwrap());
    assert_eq!(assumed["tokens"], 128 * 512);
    let args = ["--group-size", "32", "--json", "--calibration", "rows.jsonl", "--out", "nowhere"];
    let counted = json(place.on_model("plan", &args).output().unwrap());
    assert_eq!((&counted["tokens"], &counted["calibration"]["samples"]), (&640.into(), &16.into()));
    assert!(counted["estimated_seconds"].as_f64().unwrap() < assumed["estimated_seconds"].as_f64().unwrap());
    assert!(
        counted["warnings"][0].as_str().unwrap().contains("5.0 for each of 128"),
        "{}",
        counted["warnings"]
    );
    let sum: u64 = counted["memory"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert_eq!(counted["memory_total"], sum);
    assert!(!place.path("nowhere").exists());
    assert!(files(&place.path("model")) == before);

    // What plan says about the size is what quantize writes.
    succeeds(place.quantize(&[]));
    assert_eq!(counted["output_bytes"], files(&place.path("out"))["model.safetensors"].len());
}

#[test]
fn adapters_are_listed_as_json() {
    let list = json(halftone(["adapters", "--json"]));
    for adapter in list.as_array().unwrap() {
        assert!(adapter["name"].is_string() && adapter["software"].is_boolean(), "{adapter}");
    }
}

#[test]
fn wrong_options_exit_with_2() {
    let place = Place::new("llama");
    let quantize = |more: &[&str]| place.on_model("quantize", more).output().unwrap();
    let with_rows =
        |more: &[&str]| quantize(&[&["--calibration", "rows.jsonl", "--out", "out"], more].concat());
    fails(with_rows(&["--bits", "5"]), 2, &["--bits 5", "2, 3, 4 or 8"]);
    fails(with_rows(&[]), 2, &["--group-size 128", "64 inputs", "16, 32, 64"]);
    fails(with_rows(&["--group-size", "0"]), 2, &["--group-size 0"]);
    fails(with_rows(&["--group-size", "-7"]), 2, &["--group-size -7"]);
    fails(with_rows(&["--group-size", "32", "--damp-percent", "0"]), 2, &["--damp-percent 0"]);
    fails(with_rows(&["--group-size", "32", "--adapter", "x"]), 2, &["--adapter"]);
    fails(
        with_rows(&["--group-size", "32", "--max-memory", "1kB"]),
        2,
        &["1.0 kB is allowed", "--max-memory"],
    );
    fails(with_rows(&["--group-size", "32", "--samples", "0"]), 2, &["0 samples"]);
    fails(with_rows(&["--group-size", "32", "--preset", "rtn", "--desc-act"]), 2, &["--preset rtn"]);
    fails(quantize(&["--group-size", "32", "--out", "out"]), 2, &["--calibration", "--preset rtn"]);
    fails(place.on_model("plan", &["--group-size", "48"]).output().unwrap(), 2, &["--group-size 48"]);
    let same = place.on_model("quantize", &["--preset", "rtn", "--group-size", "32", "--out", "model"]);
    let mut same = same;
    fails(same.output().unwrap(), 2, &["the model's own directory"]);
    assert!(!place.path("out").exists(), "nothing is made for a refused run");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/web/demo/model");
    let args = ["quantize", model, "--out", "never", "--preset", "awq", "--damp-percent", "0.02"];
    fails(halftone(args), 2, &["--preset awq", "--damp-percent"]);
    fails(halftone(["quantize", model, "--out", "never", "--bits", "5"]), 2, &["--bits 5", "such as 3.5"]);
    // Clap's own refusals have the same code.
    for args in
        [&["quantize", "model"][..], &["quantise"], &["eval", "model", "--text", "a", "--seq-len", "x"]]
    {
        assert_eq!(halftone(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn unusable_models_and_texts_exit_with_3() {
    let place = Place::new("llama");
    std::fs::create_dir(place.path("empty")).unwrap();
    let inspect =
        |dir: &str| program().current_dir(place.directory.path()).args(["inspect", dir]).output().unwrap();
    fails(inspect("empty"), 3, &["empty", "config.json"]);

    let config = std::fs::read_to_string(place.path("model/config.json")).unwrap();
    place.write("model/config.json", &config.replace("\"llama\"", "\"mamba\""));
    fails(place.quantize(&[]), 3, &["\"mamba\"", "llama, mistral, qwen2, qwen3"]);
    place.write("model/config.json", &config[..100]);
    fails(place.quantize(&[]), 3, &["config.json", "not valid JSON"]);
    place.write("model/config.json", &config);

    let weights = std::fs::read(place.path("model/model.safetensors")).unwrap();
    std::fs::write(place.path("model/model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    fails(place.quantize(&[]), 3, &["model.safetensors"]);
    std::fs::write(place.path("model/model.safetensors"), &weights).unwrap();

    let text = |name: &str, content: &str| {
        place.write(name, content);
        let args = ["--group-size", "32", "--out", "out", "--calibration", name];
        place.on_model("quantize", &args).output().unwrap()
    };
    fails(text("short.jsonl", "{\"input_ids\": [1]}\n"), 3, &["0 usable of 1", "shorter than 2 tokens"]);
    fails(text("high.jsonl", "{\"input_ids\": [1, 320]}\n"), 3, &["high.jsonl, line 1", "320"]);
    fails(text("bad.jsonl", "{\"input_ids\": [1, 2]}\n{\"input_ids\""), 3, &["bad.jsonl, line 2"]);
    fails(text("plain.txt", "some words"), 3, &["tokenizer.json"]);
    fails(place.eval("model", "plain.txt"), 3, &["tokenizer.json"]);

    succeeds(place.quantize(&[]));
    let again =
        ["quantize", "out", "--out", "more", "--preset", "rtn", "--group-size", "32", "--device", "cpu"];
    let again = program().current_dir(place.directory.path()).args(again).output().unwrap();
    fails(again, 3, &["quantized already (4 bits)"]);
    assert!(!place.path("more").exists());
}

#[test]
fn a_weight_that_is_not_a_number_exits_with_6_and_is_named() {
    let place = Place::new("llama");
    let mut bad = model("llama");
    change_tensor(&mut bad, "model.layers.2.mlp.down_proj.weight", |bytes| {
        bytes[..2].copy_from_slice(&[0xc0, 0x7f])
    });
    place.write_model(bad);
    let output = place.quantize(&["--json"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(6));
    let last = message.lines().last().unwrap();
    assert!(last.starts_with("halftone: model.layers.2.mlp.down_proj.weight: "), "{message}");
    assert!(!place.path("out/config.json").exists());
}

#[test]
fn reads_and_writes_that_fail_exit_with_4() {
    let place = Place::new("llama");
    let in_place = |args: &[&str]| program().current_dir(place.directory.path()).args(args).output().unwrap();
    fails(in_place(&["inspect", "nowhere"]), 4, &["cannot open nowhere", "no such directory"]);
    fails(in_place(&["inspect", "model/config.json"]), 4, &["it is a file"]);
    let absent = ["--group-size", "32", "--out", "out", "--calibration", "absent.txt"];
    fails(place.on_model("quantize", &absent).output().unwrap(), 4, &["cannot read absent.txt"]);
    fails(place.eval("model", "absent.jsonl"), 4, &["cannot read absent.jsonl"]);
    fails(place.quantize(&["rows.jsonl/out"]), 4, &["rows.jsonl/out"]);
    assert!(!place.path("out").exists());
}

#[test]
fn an_output_that_is_there_is_replaced_only_on_request() {
    let place = Place::new("llama");
    succeeds(place.quantize(&[]));
    let first = without_seconds(files(&place.path("out")));
    fails(place.quantize(&["--bits", "8"]), 2, &["out exists and is not empty", "--overwrite"]);
    assert_same(&without_seconds(files(&place.path("out"))), &first, "a refused run");
    fails(place.quantize(&["--resume"]), 7, &["out holds a finished result", "--overwrite"]);
    fails(place.quantize(&["elsewhere", "--resume"]), 7, &["elsewhere holds no stopped run"]);
    assert!(!place.path("elsewhere").exists());
    // A plan that fails replaces nothing.
    let output = place.quantize(&["--overwrite", "--bits", "5"]);
    assert_eq!(output.status.code(), Some(2));
    assert_same(&without_seconds(files(&place.path("out"))), &first, "a refused run");

    place.write("out/model-00001-of-00002.safetensors", "an earlier, larger result");
    place.write("out/notes.txt", "mine");
    place.write("out/other.gguf", "mine too");
    succeeds(place.quantize(&["--overwrite", "--bits", "8"]));
    let second = files(&place.path("out"));
    assert!(second["config.json"] != first["config.json"]);
    assert!(second["model.safetensors"].len() > first["model.safetensors"].len());
    assert_eq!((&second["notes.txt"][..], &second["other.gguf"][..]), (&b"mine"[..], &b"mine too"[..]));
    assert!(!second.contains_key("model-00001-of-00002.safetensors"));
    // An empty directory is as good as none.
    std::fs::create_dir(place.path("empty")).unwrap();
    succeeds(place.quantize(&["empty"]));
    assert_same(&without_seconds(files(&place.path("empty"))), &first, "the first options again");
}

#[cfg(unix)]
#[test]
fn a_closed_standard_output_stops_no_run() {
    let place = Place::new("llama");
    let args = ["--calibration", "rows.jsonl", "--group-size", "32", "--out", "out"];
    let mut child =
        place.on_model("quantize", &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(place.path("out/config.json").exists());
}

// The embedded demo model takes long enough to be stopped on the way.

fn demo_run(out: &Path, more: &[&str]) -> Command {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("web/demo");
    let mut command = program();
    command.arg("quantize").arg(demo.join("model")).arg("--out").arg(out);
    command.arg("--calibration").arg(demo.join("calibration.txt"));
    command.args(["--samples", "12", "--seq-len", "256", "--group-size", "64", "--device", "cpu"]).args(more);
    command
}

/// Starts the run and returns when layer `layer` has its first row.
fn start_until(out: &Path, layer: usize, more: &[&str]) -> Child {
    let mut child = demo_run(out, more).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mark = format!("model.layers.{layer}.self_attn.q_proj");
    let found = lines.by_ref().any(|line| line.unwrap().contains(&mark));
    assert!(found, "no row of layer {layer}");
    // The rest is read by nobody but the pipe's buffer, which is large enough.
    std::mem::forget(lines);
    child
}

#[test]
fn printed_tokens_calibrate_as_the_text_does() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("web/demo");
    let tokens = |seed: &str| {
        let mut command = program();
        command.arg("tokens").arg(demo.join("model")).arg("--calibration").arg(demo.join("calibration.txt"));
        succeeds(command.args(["--samples", "3", "--seq-len", "48", "--seed", seed]).output().unwrap())
    };
    let printed = tokens("5");
    assert_eq!(printed.lines().count(), 3);
    for line in printed.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["input_ids"].as_array().unwrap().len(), 48);
    }
    assert_ne!(tokens("6"), printed);

    std::fs::write(path("rows.jsonl"), printed).unwrap();
    let quantize = |out: &str, text: PathBuf, more: &[&str]| {
        let mut command = program();
        command.arg("quantize").arg(demo.join("model")).arg("--out").arg(path(out));
        command.arg("--calibration").arg(text).args(["--group-size", "64", "--device", "cpu"]).args(more);
        succeeds(command.output().unwrap());
        std::fs::read(path(out).join("model.safetensors")).unwrap()
    };
    let rows = quantize("rows", path("rows.jsonl"), &[]);
    let sampled = ["--samples", "3", "--seq-len", "48", "--seed", "5"];
    assert!(rows == quantize("text", demo.join("calibration.txt"), &sampled), "other samples");

    let nothing = halftone(["tokens".as_ref(), demo.join("model").as_os_str()]);
    fails(nothing, 2, &["no calibration text", "--calibration"]);
}

fn blocks_done(out: &Path) -> u64 {
    let journal = std::fs::read(out.join("halftone-journal.json")).unwrap();
    serde_json::from_slice::<Value>(&journal).unwrap()["blocks_done"].as_u64().unwrap()
}

#[cfg(unix)]
#[test]
fn a_killed_or_interrupted_run_is_resumed_to_the_same_bytes() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    // The number of threads changes nothing either.
    let whole = demo_run(&path("whole"), &["--json"]).env("RAYON_NUM_THREADS", "1").output().unwrap();
    let report = json(whole);
    let ratio = report["modules"].as_array().unwrap().iter().fold((0.0, 0.0), |(gptq, rtn), row| {
        (gptq + row["gptq_loss"].as_f64().unwrap(), rtn + row["rtn_loss"].as_f64().unwrap())
    });
    assert!(ratio.0 < 0.5 * ratio.1, "loss {} of {}", ratio.0, ratio.1);
    let want = without_seconds(files(&path("whole")));
    assert!(want.contains_key("tokenizer.json") && want.contains_key("generation_config.json"));

    // Killed at once, and in the fourth of six blocks.
    for layer in [0, 3] {
        let out = path(&format!("killed{layer}"));
        let mut child = start_until(&out, layer, &[]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!out.join("config.json").exists() && !out.join("model.safetensors").exists());
        assert!(blocks_done(&out) >= layer as u64 && blocks_done(&out) < 6);
        let inspect = program().arg("inspect").arg(&out).output().unwrap();
        fails(inspect, 3, &["the run that makes this directory is not finished", "--resume"]);
        fails(demo_run(&out, &[]).output().unwrap(), 2, &["holds a stopped run", "--resume", "--overwrite"]);
        let output = demo_run(&out, &["--resume", "--bits", "3"]).output().unwrap();
        assert_eq!(output.status.code(), Some(7));
        let message = stderr(&output);
        assert!(message.lines().last().unwrap().contains("--bits changed (was 4, is 3)"), "{message}");
        if layer > 0 {
            let part = out.join("model.safetensors.part");
            let written = std::fs::read(&part).unwrap();
            let mut changed = written.clone();
            changed[written.len() / 4] ^= 1;
            std::fs::write(&part, changed).unwrap();
            let wrong = ["model.safetensors.part: tensor", "another program changed it", "--overwrite"];
            let output = demo_run(&out, &["--resume"]).output().unwrap();
            let message = stderr(&output).lines().last().unwrap().to_owned();
            assert!(
                output.status.code() == Some(7) && wrong.iter().all(|word| message.contains(word)),
                "{message}"
            );
            std::fs::write(&part, written).unwrap();
            let journal = out.join("halftone-journal.json");
            let kept = std::fs::read(&journal).unwrap();
            for done in [blocks_done(&out) - 1, blocks_done(&out) + 1, 7] {
                let mut wrong: Value = serde_json::from_slice(&kept).unwrap();
                wrong["blocks_done"] = done.into();
                std::fs::write(&journal, wrong.to_string()).unwrap();
                let output = demo_run(&out, &["--resume"]).output().unwrap();
                let message = stderr(&output).lines().last().unwrap().to_owned();
                let named = message.contains("does not say how far the run had come");
                assert!(output.status.code() == Some(7) && named, "{message}");
            }
            std::fs::write(&journal, kept).unwrap();
        }
        succeeds(demo_run(&out, &["--resume"]).output().unwrap());
        assert_same(&without_seconds(files(&out)), &want, "killed and resumed");
    }

    let out = path("interrupted");
    let child = start_until(&out, 1, &[]);
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = child.wait_with_output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{message}");
    assert!(message.contains("stopping at the next safe point"), "{message}");
    let last = message.lines().last().unwrap();
    assert!(last.starts_with("halftone: stopped on request in block "), "{message}");
    assert!(last.ends_with("repeat the command with --resume to go on"), "{message}");
    // Nobody else writes there meanwhile, and what is to be overwritten is there until bits are measured.
    let mut child = start_until(&out, 2, &["--resume"]);
    fails(demo_run(&out, &["--resume"]).output().unwrap(), 2, &["another run is writing to", "interrupted"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let new = path("overwriting nothing");
    let mut child = start_until(&new, 1, &["--overwrite"]);
    fails(
        demo_run(&new, &["--overwrite"]).output().unwrap(),
        2,
        &["another run is writing to", "overwriting"],
    );
    child.kill().unwrap();
    child.wait().unwrap();
    // --overwrite is the other way out.
    succeeds(demo_run(&out, &["--overwrite"]).output().unwrap());
    assert_same(&without_seconds(files(&out)), &want, "interrupted and overwritten");
}
