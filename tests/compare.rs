//! Comparisons of two checkpoints against the definitions, from whole logits.

mod common;

use std::rc::Rc;

use common::{Files, VOCAB, change_tensor, expected, gpu, model, perplexity_of, rows};
use halftone::device::Device;
use halftone::eval::{compare, continuations, last_words, perplexity};
use halftone::model::{Block, Embedding, Head, ModelConfig, Stored};
use halftone::storage::memory::MemorySource;
use halftone::text::{Passage, Segments};
use pollster::block_on;

fn open(files: &Files) -> Stored {
    block_on(Stored::open(Rc::new(MemorySource::new("model", files.clone())))).unwrap()
}

/// Logits [rows · len, vocab] of rows of one length.
fn logits(model: &Stored, rows: &[Vec<u32>]) -> Vec<f32> {
    let config = ModelConfig::of(&model.checkpoint).unwrap();
    let device = Device::Cpu;
    let len = rows[0].len();
    let rope = config.rope_tables(&device, len).unwrap();
    let embedding = block_on(Embedding::load(&config, model, &device)).unwrap();
    let mut h = embedding.embed(&rows.concat(), len, 0).unwrap();
    for layer in 0..config.layers {
        let block = block_on(Block::load(&config, layer, model, &device)).unwrap();
        h = block_on(block.forward(h, len, &rope)).unwrap();
    }
    let head = block_on(Head::load(&config, model, &device)).unwrap();
    block_on(head.logits(&h).unwrap().to_f32()).unwrap()
}

/// The model with another down_proj in its last block.
fn damaged(files: &Files) -> Files {
    let mut files = files.clone();
    let config: serde_json::Value = serde_json::from_slice(&files["config.json"]).unwrap();
    let last = config["num_hidden_layers"].as_u64().unwrap() - 1;
    change_tensor(&mut files, &format!("model.layers.{last}.mlp.down_proj.weight"), |bytes| {
        // Half of bf16's mantissa in every third value.
        for value in bytes.chunks_exact_mut(2).step_by(3) {
            value[0] ^= 0x40;
        }
    });
    files
}

fn segments(rows: Vec<Vec<u32>>) -> Segments {
    Segments { rows, ..Segments::none() }
}

#[test]
fn a_damaged_model_is_as_far_away_as_its_logits_say() {
    let original = model("llama");
    let (a, b) = (open(&original), open(&damaged(&original)));
    let rows = rows(6, 30, 7);
    let (of_a, of_b) = (logits(&a, &rows), logits(&b, &rows));
    let log_softmax = |logits: &[f32]| {
        let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        logits.iter().map(|&x| f64::from(x) - total.ln()).collect::<Vec<f64>>()
    };
    let top = |logits: &[f32]| (0..VOCAB).max_by(|&i, &j| logits[i].total_cmp(&logits[j])).unwrap();
    let (mut kls, mut same) = (vec![], 0);
    for (at, (a, b)) in of_a.chunks(VOCAB).zip(of_b.chunks(VOCAB)).enumerate() {
        if at % 30 == 29 {
            continue;
        }
        let (p, q) = (log_softmax(a), log_softmax(b));
        kls.push(p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
        same += usize::from(top(a) == top(b));
    }
    let mean = kls.iter().sum::<f64>() / kls.len() as f64;
    kls.sort_by(f64::total_cmp);
    assert!(mean > 1e-4 && same < kls.len(), "the damage is too small to test: {mean} {same}");
    for device in [Some(Device::Cpu), gpu()].into_iter().flatten() {
        let found = block_on(compare(&a, &b, &segments(rows.clone()), &device, async |_, _| true)).unwrap();
        let near = |got: f64, want: f64, by: f64| {
            assert!((got - want).abs() <= by * want.abs(), "{}: {got} {want}", device.describe());
        };
        assert_eq!((found.rows, found.tokens), (6, 6 * 29));
        near(found.perplexity[0].value, perplexity_of(&rows, &of_a), 1e-5);
        near(found.perplexity[1].value, perplexity_of(&rows, &of_b), 1e-5);
        near(found.ratio.value, perplexity_of(&rows, &of_b) / perplexity_of(&rows, &of_a), 1e-5);
        near(found.kl.value, mean, 2e-3);
        near(found.kl_99, kls[(kls.len() * 99).div_ceil(100) - 1], 2e-3);
        near(found.agreement.value, same as f64 / kls.len() as f64, 0.011);
        // Only the last block is damaged.
        let (last, before) = found.blocks.split_last().unwrap();
        assert!(before.iter().all(|&error| error == 0.0) && *last > 1e-3, "{:?}", found.blocks);
        let [low, high] = found.ratio.interval.unwrap();
        assert!(low < found.ratio.value && found.ratio.value < high);
        // The text is the same for both, so their ratio is known better than either.
        let [wide_low, wide_high] = found.perplexity[0].interval.unwrap();
        assert!((high - low) / found.ratio.value < (wide_high - wide_low) / found.perplexity[0].value);
    }
}

#[test]
fn a_model_is_no_distance_from_itself() {
    for device in [Some(Device::Cpu), gpu()].into_iter().flatten() {
        let a = open(&model("qwen3"));
        let text = segments(rows(2, 12, 1));
        let found = block_on(compare(&a, &a, &text, &device, async |_, _| true)).unwrap();
        let alone = block_on(perplexity(&a, &text, &device, async |_, _| true)).unwrap();
        assert!(found.kl.value < 1e-6 && found.kl_99 < 1e-5);
        assert_eq!((found.agreement.value, found.ratio.value), (1.0, 1.0));
        assert!(found.blocks.iter().all(|&error| error == 0.0) && !found.blocks.is_empty());
        assert!((found.perplexity[0].value / alone.perplexity - 1.0).abs() < 1e-5);
        // Two rows are too few for an interval.
        assert_eq!((found.kl.interval, alone.interval), (None, None));
    }
}

#[test]
fn other_vocabularies_are_refused_and_a_wish_to_stop_is_heard() {
    let a = open(&model("llama"));
    let mut other = model("llama");
    let config = String::from_utf8(other["config.json"].clone()).unwrap();
    other.insert("config.json".into(), config.replace("\"vocab_size\": 320", "\"vocab_size\": 64").into());
    let text = segments(rows(2, 12, 1));
    let refused = block_on(compare(&a, &open(&other), &text, &Device::Cpu, async |_, _| true)).unwrap_err();
    assert!(refused.to_string().contains("64 entries"), "{refused}");
    let stopped = block_on(compare(&a, &a, &text, &Device::Cpu, async |done, _| done < 1)).unwrap_err();
    assert_eq!(stopped.exit_code(), 130);
}

#[test]
fn a_last_word_counts_when_each_of_its_tokens_is_the_likeliest() {
    let (rows, logits) = expected("llama");
    let top = |row: usize, at: usize| {
        let logits = &logits[(row * 40 + at) * VOCAB..][..VOCAB];
        (0..VOCAB as u32).max_by(|&i, &j| logits[i as usize].total_cmp(&logits[j as usize])).unwrap()
    };
    // What the model itself would say after 20 tokens is right; after 10 a wrong word follows.
    let mut right = rows[0][..20].to_vec();
    right.push(top(0, 19));
    let mut wrong = rows[1][..10].to_vec();
    wrong.push((top(1, 9) + 1) % VOCAB as u32);
    // The first of two tokens is right, the second is not.
    let mut half = rows[1][..15].to_vec();
    half.push(top(1, 14));
    half.push(0);
    let passages = [(right, 20), (wrong, 10), (half, 15)].map(|(ids, last_word)| Passage { ids, last_word });
    for device in [Some(Device::Cpu), gpu()].into_iter().flatten() {
        let model = open(&model("llama"));
        let found = block_on(last_words(&[&model], &passages, &device, async |_, _| true)).unwrap();
        assert_eq!(found.len(), 1);
        assert!((found[0].accuracy.value - 1.0 / 3.0).abs() < 1e-12, "{found:?}");
        let one = block_on(last_words(&[&model], &passages[..1], &device, async |_, _| true)).unwrap();
        let row = &logits[19 * VOCAB..20 * VOCAB];
        let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        let likeliest = f64::from(row[*passages[0].ids.last().unwrap() as usize]);
        assert!((one[0].perplexity / (total / likeliest.exp()) - 1.0).abs() < 1e-3, "{one:?}");
    }
}

#[test]
fn continuations_part_where_one_would_say_something_else() {
    let original = model("llama");
    let (a, b) = (open(&original), open(&damaged(&original)));
    let text = segments(rows(6, 12, 3));
    // Greedy continuations by whole passes, without a cache.
    let greedy = |model: &Stored, prompt: &[u32]| {
        let mut ids = prompt.to_vec();
        for _ in 0..9 {
            let logits = logits(model, std::slice::from_ref(&ids));
            let last = &logits[logits.len() - VOCAB..];
            ids.push(
                (0..VOCAB as u32).max_by(|&i, &j| last[i as usize].total_cmp(&last[j as usize])).unwrap(),
            );
        }
        ids[prompt.len()..].to_vec()
    };
    let common = |row: &Vec<u32>| {
        let (a, b) = (greedy(&a, &row[..8]), greedy(&b, &row[..8]));
        a.iter().zip(&b).take_while(|(a, b)| a == b).count()
    };
    let want: Vec<usize> = text.rows.iter().map(common).collect();
    assert!(want.iter().any(|&common| common < 9), "the damage is too small to test");
    for device in [Some(Device::Cpu), gpu()].into_iter().flatten() {
        let both = continuations([&a, &b], &text, 6, [8, 9], &device, async |_, _| true);
        let found = block_on(both).unwrap();
        assert!((found.parting.value - want.iter().sum::<usize>() as f64 / 6.0).abs() < 1e-12, "{found:?}");
        assert_eq!((found.prompts, found.same), (6, want.iter().filter(|&&common| common == 9).count()));
    }
    let all = block_on(continuations([&a, &a], &text, 2, [8, 9], &Device::Cpu, async |_, _| true)).unwrap();
    assert_eq!((all.parting.value, all.same, all.prompts), (9.0, 2, 2));
    let long = block_on(continuations([&a, &b], &text, 2, [8, 1 << 20], &Device::Cpu, async |_, _| true));
    assert!(long.unwrap_err().to_string().contains("more than the model's"));
    let stopped = block_on(continuations([&a, &b], &text, 2, [8, 9], &Device::Cpu, async |done, _| done < 1));
    assert_eq!(stopped.unwrap_err().exit_code(), 130);
}
