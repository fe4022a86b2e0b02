//! Generation: a cached model against the whole forward pass, packed weights against dense ones, and
//! what ends a text.

mod common;

use std::rc::Rc;

use common::*;
use halftone::checkpoint::GptqLinear;
use halftone::device::Device;
use halftone::error::Error;
use halftone::generate::{Event, Finish, Generator, Options, Sampling};
use halftone::gptq::scheme::{Choice, Preset, Scheme};
use halftone::model::{Decoder, DecoderOptions, ModelConfig, Stored};
use halftone::pipeline::events::Silent;
use halftone::pipeline::{Output, PlanOptions, RunOptions, make_plan, run};
use halftone::storage::memory::{MemorySink, MemorySource};
use halftone::tensor::Elem;
use halftone::text::{ModelText, SegmentOptions, TextFile, calibration_segments};
use pollster::block_on;
use safetensors::SafeTensors;

fn stored(files: Files) -> Stored {
    block_on(Stored::open(Rc::new(MemorySource::new("model", files)))).unwrap()
}

fn config(stored: &Stored) -> ModelConfig {
    ModelConfig::of(&stored.checkpoint).unwrap()
}

fn decoder(stored: &Stored, device: &Device, cache: Elem) -> Decoder {
    let options = DecoderOptions { context: 64, cache };
    block_on(Decoder::load(&config(stored), stored, device, options, async |_, _| true)).unwrap()
}

fn devices() -> Vec<Device> {
    [Some(Device::Cpu), gpu()].into_iter().flatten().collect()
}

fn largest_difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let differences = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    differences.fold(0f32, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
}

/// A token at a time, and in chunks of several sizes: the logits are those of Transformers, which read
/// the text as a whole.
#[test]
fn cached_logits_are_those_of_the_whole_text() {
    for device in devices() {
        for name in MODELS {
            let stored = stored(model(name));
            let (rows, want) = expected(name);
            // f16 keeps 11 bits of keys and values, which the logits of these models show.
            for (cache, tolerance) in [(Elem::F32, 1e-4), (Elem::F16, 1e-2)] {
                let mut decoder = decoder(&stored, &device, cache);
                let row = &rows[1];
                let want = |at: usize| &want[(row.len() + at) * VOCAB..][..VOCAB];
                let mut worst = 0f32;
                let mut check = |decoder: &mut Decoder, at: usize| {
                    let logits = block_on(decoder.step(row[at])).unwrap();
                    let got = block_on(logits.to_f32()).unwrap();
                    worst = worst.max(largest_difference(&got, want(at)));
                };
                for at in 0..row.len() {
                    check(&mut decoder, at);
                }
                assert_eq!(decoder.len(), row.len());
                for chunk in [1, 3, 16, 39] {
                    decoder.rewind(0);
                    for ids in row[..39].chunks(chunk) {
                        block_on(decoder.read(ids)).unwrap();
                    }
                    check(&mut decoder, 39);
                }
                // Taken back to the middle and read again.
                decoder.rewind(20);
                block_on(decoder.read(&row[20..25])).unwrap();
                check(&mut decoder, 25);
                println!("{name} on {}, {cache:?}: {worst:e}", device.describe());
                assert!(worst <= tolerance, "{name} on {}, {cache:?}: {worst}", device.describe());
            }
        }
    }
}

/// Decoding on a GPU is bound by the number of dispatches, dense or packed.
#[test]
fn a_block_and_a_token_are_six_dispatches() {
    let Some(device) = gpu() else { return };
    let Device::Gpu(gpu) = &device else { return };
    let scheme = Scheme::preset(Preset::Default, 4, Some(32));
    for files in [model("qwen3"), quantized("qwen3", &scheme)] {
        let stored = stored(files);
        let mut decoder = decoder(&stored, &device, Elem::F16);
        let before = gpu.dispatches();
        block_on(decoder.step(3)).unwrap();
        let blocks = config(&stored).layers as u64;
        // Two more are the embedding and the head.
        assert_eq!(gpu.dispatches() - before, 6 * blocks + 2);
    }
}

#[test]
fn a_context_has_an_end() {
    let stored = stored(model("llama"));
    let mut decoder = decoder(&stored, &Device::Cpu, Elem::F16);
    block_on(decoder.read(&[1; 60])).unwrap();
    let error = block_on(decoder.read(&[1; 5])).unwrap_err();
    assert!(error.to_string().contains("65 tokens are more than the context of 64"), "{error}");
    block_on(decoder.read(&[1; 4])).unwrap();
    assert!(block_on(decoder.step(1)).is_err());
    assert!(block_on(decoder.read(&[])).is_ok());
    decoder.rewind(3);
    assert!(matches!(block_on(decoder.read(&[VOCAB as u32])), Err(Error::Text { .. })));

    let config = config(&stored);
    let too_long = DecoderOptions { context: config.max_position_embeddings + 1, cache: Elem::F16 };
    let error = block_on(Decoder::load(&config, &stored, &Device::Cpu, too_long, async |_, _| true));
    assert!(error.err().unwrap().to_string().contains("max_position_embeddings"));
    let stopped = DecoderOptions { context: 8, cache: Elem::F16 };
    let error = block_on(Decoder::load(&config, &stored, &Device::Cpu, stopped, async |done, _| done < 1));
    assert!(matches!(error, Err(Error::Interrupted { .. })));
}

fn generator(files: Files, device: &Device, context: usize) -> Generator {
    let stored = stored(files);
    let text = block_on(ModelText::load(stored.checkpoint.source().as_ref(), VOCAB)).unwrap();
    block_on(Generator::load(&stored, Rc::new(text), device, context, async |_, _| true)).unwrap()
}

fn greedy(files: Files, device: &Device, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut generator = generator(files, device, prompt.len() + count);
    let options = Options { ignore_stops: true, ..Options::greedy(count) };
    let generated = block_on(generator.generate(prompt, &options, async |_| true)).unwrap();
    assert_eq!((generated.finish, generated.ids.len()), (Finish::MaxTokens, count));
    generated.ids
}

#[test]
fn the_likeliest_tokens_are_those_of_the_logits() {
    for device in devices() {
        let (rows, want) = expected("llama");
        for at in [0, 1, 7, 39] {
            let logits = &want[at * VOCAB..][..VOCAB];
            let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            let first = greedy(model("llama"), &device, &rows[0][..=at], 1);
            assert_eq!(first, [best as u32], "after {at} on {}", device.describe());
        }
    }
}

#[test]
fn what_was_read_is_not_read_again() {
    let mut generator = generator(model("qwen2"), &Device::Cpu, 64);
    let options = Options { ignore_stops: true, ..Options::greedy(8) };
    let row = rows(1, 30, 5).remove(0);
    let mut run = |prompt: &[u32]| block_on(generator.generate(prompt, &options, async |_| true)).unwrap();
    let first = run(&row);
    assert_eq!(first.reused_tokens, 0);
    // The same prompt again: all but the last token is known.
    let again = run(&row);
    assert_eq!((again.reused_tokens, &again.ids), (29, &first.ids));
    // A conversation goes on: prompt and answer are known, but for the answer's last token.
    let longer = [&row[..], &first.ids, &[5, 6, 7]].concat();
    let on = run(&longer);
    assert_eq!(on.reused_tokens, 37);
    assert_eq!(on.ids, greedy(model("qwen2"), &Device::Cpu, &longer, 8));
    // Another text shares its beginning only.
    let other = [&row[..10], &[1, 2, 3]].concat();
    let other_run = run(&other);
    assert_eq!(other_run.reused_tokens, 10);
    assert_eq!(other_run.ids, greedy(model("qwen2"), &Device::Cpu, &other, 8));
}

#[test]
fn a_text_ends_at_a_stop_token_at_a_length_at_the_context_or_on_request() {
    let row = rows(1, 12, 3).remove(0);
    let free = greedy(model("llama"), &Device::Cpu, &row, 20);
    // The first token that did not occur before: the model's own stop.
    let at = (4..20).find(|&at| !free[..at].contains(&free[at])).unwrap();
    let mut files = model("llama");
    let stop = format!("{{\"eos_token_id\": [{}, 300]}}", free[at]);
    files.insert("generation_config.json".into(), stop.into_bytes());
    let mut generator = generator(files, &Device::Cpu, 32);

    let mut heard = vec![];
    let ended = block_on(generator.generate(&row, &Options::greedy(20), async |event| {
        if let Event::Token { id, .. } = event {
            heard.push(id);
        }
        true
    }))
    .unwrap();
    assert_eq!((ended.finish, &ended.ids[..]), (Finish::StopToken, &free[..at]));
    assert_eq!(heard, free[..at]);

    let run = |generator: &mut Generator, options: &Options, most: usize| {
        let mut count = 0;
        block_on(generator.generate(&row, options, async |event| {
            count += usize::from(matches!(event, Event::Token { .. }));
            count < most
        }))
        .unwrap()
    };
    let short = run(&mut generator, &Options::greedy(3), 99);
    assert_eq!((short.finish, &short.ids[..]), (Finish::MaxTokens, &free[..3]));
    let options = Options { ignore_stops: true, ..Options::greedy(99) };
    let full = run(&mut generator, &options, 99);
    // The last token of a full context is chosen, but not read.
    assert_eq!((full.finish, full.ids.len()), (Finish::Context, 32 - row.len() + 1));
    assert_eq!(full.ids[..20], free[..]);
    let stopped = run(&mut generator, &options, 2);
    assert_eq!((stopped.finish, &stopped.ids[..]), (Finish::Stopped, &free[..2]));

    // A stop while the prompt is read, before anything is generated.
    let none = block_on(generator.generate(&rows(1, 20, 9)[0], &options, async |_| false)).unwrap();
    assert_eq!((none.finish, none.ids.len()), (Finish::Stopped, 0));
}

#[test]
fn a_prompt_that_cannot_be_read_is_refused() {
    let mut generator = generator(model("llama"), &Device::Cpu, 16);
    let mut refused = |prompt: &[u32], options: &Options| {
        block_on(generator.generate(prompt, options, async |_| true)).unwrap_err().to_string()
    };
    let options = Options::greedy(4);
    assert!(refused(&[], &options).contains("no tokens"));
    let text = refused(&[1; 16], &options);
    assert!(text.contains("16 tokens leave no room in the context of 16"), "{text}");
    assert!(refused(&[1, VOCAB as u32], &options).contains("token id 320 at position 1"));
    let hot = Sampling { temperature: -1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };
    let text = refused(&[1], &Options { sampling: Some(hot), ..options });
    assert!(text.contains("temperature -1"), "{text}");
}

#[test]
fn a_seed_repeats_a_text_and_another_does_not() {
    let row = rows(1, 10, 4).remove(0);
    for device in devices() {
        let mut generator = generator(model("mistral_sliding"), &device, 64);
        let mut run = |seed, top_k| {
            let sampling = Sampling { temperature: 1.5, top_k, top_p: 0.95, min_p: 0.0, seed };
            let options = Options { sampling: Some(sampling), ignore_stops: true, ..Options::greedy(16) };
            block_on(generator.generate(&row, &options, async |_| true)).unwrap().ids
        };
        for top_k in [0, 50] {
            let first = run(7, top_k);
            assert_eq!(run(7, top_k), first);
            assert_ne!(run(8, top_k), first);
        }
    }
}

/// A run over a tiny model, in memory.
fn quantized(name: &str, scheme: &Scheme) -> Files {
    let stored = stored(model(name));
    let rows = rows(16, 40, 1);
    let options = PlanOptions {
        scheme: scheme.clone(),
        output: Output::default(),
        tokens: 16 * 40,
        longest: 40,
        max_memory: u64::MAX,
        batch_tokens: None,
        shard_bytes: u64::MAX,
    };
    let plan = make_plan(&stored, &options, &Device::Cpu).unwrap();
    let text = ModelText::new(None, None, VOCAB, "model");
    let file = TextFile { name: "rows.jsonl".into(), content: jsonl(&rows).into_bytes() };
    let segments = SegmentOptions { samples: None, seq_len: 512, seed: 0 };
    let segments = calibration_segments(&text, &[file], &segments).unwrap();
    let sink = MemorySink::new();
    let run_options = RunOptions { calibration: String::new(), resume: false };
    let to = Rc::new(sink.clone());
    block_on(run(&stored, &plan, &segments, &Device::Cpu, to, &run_options, &mut Silent)).unwrap();
    sink.files()
}

/// The same checkpoint with zero points as `gptq_v2` has them: one more than in the older format.
fn as_v2(files: &Files) -> Files {
    let mut changed = files.clone();
    let opened = stored(files.clone());
    let bits = opened.quant.as_ref().unwrap().scheme.bits;
    assert!(32 % bits == 0, "codes that span words need more than this");
    for tensor in opened.checkpoint.tensors().iter().filter(|tensor| tensor.name.ends_with("qzeros")) {
        change_tensor(&mut changed, &tensor.name, |bytes| {
            for word in bytes.chunks_exact_mut(4) {
                let old = u32::from_le_bytes(word.try_into().unwrap());
                let codes = (0..32 / bits).map(|i| (old >> (i * bits)).wrapping_add(1) & ((1 << bits) - 1));
                let new = codes.enumerate().fold(0, |word, (i, code)| word | code << (i as u32 * bits));
                word.copy_from_slice(&new.to_le_bytes());
            }
        });
    }
    for name in ["config.json", "quantize_config.json"] {
        let text = String::from_utf8(changed[name].clone()).unwrap();
        let text = text.replace("\"checkpoint_format\": \"gptq\"", "\"checkpoint_format\": \"gptq_v2\"");
        assert!(text.contains("gptq_v2"), "{text}");
        changed.insert(name.into(), text.into_bytes());
    }
    changed
}

/// A dense checkpoint of the weights that a quantized one stands for.
fn dequantized(files: &Files) -> Files {
    let stored = stored(files.clone());
    let quant = stored.quant.as_ref().unwrap();
    let mut tensors = vec![];
    for info in stored.checkpoint.tensors() {
        if let Some(module) = info.name.strip_suffix(".qweight") {
            let layer = block_on(GptqLinear::read(&stored.checkpoint, module, quant)).unwrap();
            let mut weight = layer.dequantize().unwrap();
            let mut shape = vec![layer.n, layer.k];
            if config(&stored).transposed {
                let at = |i: usize| weight[i % layer.n * layer.k + i / layer.n];
                weight = (0..weight.len()).map(at).collect();
                shape.reverse();
            }
            let bytes = bytemuck::cast_slice(&weight).to_vec();
            tensors.push((format!("{module}.weight"), (safetensors::Dtype::F32, shape, bytes)));
        }
    }
    let original = SafeTensors::deserialize(&files["model.safetensors"]).unwrap();
    for (name, view) in original.tensors() {
        if ![".qweight", ".qzeros", ".scales", ".g_idx"].iter().any(|part| name.ends_with(part)) {
            tensors.push((name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())));
        }
    }
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let weights = safetensors::serialize(views, None).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&files["config.json"]).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    [("config.json".into(), config.to_string().into_bytes()), ("model.safetensors".into(), weights)].into()
}

/// What is packed generates what its weights generate when they are written out: every family, every
/// width, with and without zero points and g_idx, both zero formats, both devices.
#[test]
fn packed_weights_generate_what_their_dequantized_weights_do() {
    let choice = |preset, bits, sym, desc_act| Choice {
        preset,
        bits,
        group_size: 32,
        sym,
        desc_act: Some(desc_act),
        static_groups: None,
        mse: None,
        damp_percent: None,
        alpha: None,
        refit: None,
        scaling: None,
    };
    let cases = [
        ("llama", choice(Preset::Default, 4, true, true)),
        ("llama_tied_rope3", choice(Preset::Reference, 4, false, true)),
        ("mistral_sliding", choice(Preset::Default, 3, true, true)),
        ("qwen2", choice(Preset::Reference, 8, true, false)),
        ("qwen3", choice(Preset::Reference, 4, true, true)),
        ("llama", choice(Preset::Default, 2, false, true)),
        ("phi3", choice(Preset::Default, 4, true, true)),
        ("gpt_neox", choice(Preset::Default, 4, true, true)),
        ("opt", choice(Preset::Default, 4, false, true)),
        ("gpt2", choice(Preset::Reference, 4, true, true)),
        ("gemma2", choice(Preset::Default, 4, true, true)),
        ("gemma3", choice(Preset::Default, 8, true, true)),
        ("mixtral", choice(Preset::Default, 4, true, true)),
        ("qwen2_moe", choice(Preset::Default, 4, true, true)),
        ("qwen3_moe", choice(Preset::Default, 4, false, true)),
        ("olmoe", choice(Preset::Default, 4, true, true)),
    ];
    let prompt = rows(1, 16, 11).remove(0);
    for (name, choice) in cases {
        let packed = quantized(name, &Scheme::chosen(&choice).unwrap());
        let mut forms = vec![packed.clone()];
        if choice.bits != 3 {
            forms.push(as_v2(&packed));
        }
        let want = greedy(dequantized(&packed), &Device::Cpu, &prompt, 64);
        for device in devices() {
            for files in &forms {
                let got = greedy(files.clone(), &device, &prompt, 64);
                assert_eq!(got, want, "{name}, {choice:?} on {}", device.describe());
            }
        }
    }
}
