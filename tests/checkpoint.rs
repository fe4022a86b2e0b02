//! A quantized model written to a directory, stopped on the way, resumed, and read again.

#![cfg(not(target_arch = "wasm32"))]

use std::fs;
use std::path::Path;
use std::rc::Rc;

use halftone::checkpoint::config::{Scheme, edited_config};
use halftone::checkpoint::linear::natural_g_idx;
use halftone::checkpoint::{
    Checkpoint, DType, Format, GptqLinear, Layout, QUANTIZE_CONFIG, QuantConfig, StoredLayer, TensorSpec,
    Writer,
};
use halftone::storage::Source;
use halftone::storage::native::{DirSink, DirSource};
use pollster::block_on;

const LAYERS: [&str; 3] = ["model.layers.0.q_proj", "model.layers.0.k_proj", "model.layers.1.q_proj"];
const N: usize = 64;
const K: usize = 128;
const GROUP: i64 = 32;

fn layer(seed: usize) -> GptqLinear {
    let value = |index: usize| (index * 131 + seed * 17) % 257;
    GptqLinear {
        n: N,
        k: K,
        bits: 4,
        codes: (0..N * K).map(|index| (value(index) % 16) as u8).collect(),
        scales: (0..4 * N).map(|index| value(index) as f32 / 1024.0 - 0.125).collect(),
        zeros: vec![8; 4 * N],
        g_idx: natural_g_idx(K, GROUP).unwrap(),
        bias: None,
    }
}

fn embedding() -> Vec<u8> {
    (0..300 * 2 * 8).map(|index| (index % 251) as u8).collect()
}

const SCHEME: Scheme = Scheme { bits: 4, group_size: GROUP, desc_act: false, sym: true };

fn stored(prefix: &str) -> StoredLayer<'_> {
    StoredLayer { prefix, n: N, k: K, scheme: SCHEME, scale: DType::F16, bias: None }
}

/// One tensor that stays and three quantized layers, over several shards.
fn layout() -> Layout {
    let mut tensors = vec![TensorSpec::new("model.embed_tokens.weight", DType::BF16, [300, 8])];
    for name in LAYERS {
        tensors.extend(Format::Gptq.specs(&stored(name)).unwrap());
    }
    Layout::new(tensors, 6000).unwrap()
}

fn config() -> QuantConfig {
    QuantConfig::new(Format::Gptq, SCHEME)
}

async fn write_layer(writer: &mut Writer, index: usize) {
    for (name, bytes) in Format::Gptq.tensors(&layer(index), &stored(LAYERS[index])).unwrap() {
        writer.write(&name, &bytes).await.unwrap();
    }
    writer.flush().await.unwrap();
}

async fn finish(writer: Writer) {
    let files = [(QUANTIZE_CONFIG.to_string(), config().to_json().to_string().into_bytes())];
    let text = edited_config("{\n  \"rms_norm_eps\": 1e-05\n}\n", &config()).unwrap();
    writer.finish(&files, &text).await.unwrap();
}

fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let source = DirSource::open(directory).unwrap();
    let names: Vec<String> = source.files().iter().map(|entry| entry.name.clone()).collect();
    names.into_iter().map(|name| (name.clone(), fs::read(directory.join(name)).unwrap())).collect()
}

#[test]
fn a_stopped_and_resumed_directory_equals_one_written_at_once_and_decodes_to_the_same_weights() {
    block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let (at_once, resumed) = (directory.path().join("at_once"), directory.path().join("resumed"));

        let sink = Rc::new(DirSink::create(&at_once).unwrap());
        let mut writer = Writer::new(sink, layout()).await.unwrap();
        writer.write("model.embed_tokens.weight", &embedding()).await.unwrap();
        for index in 0..3 {
            write_layer(&mut writer, index).await;
        }
        finish(writer).await;

        let sink = Rc::new(DirSink::create(&resumed).unwrap());
        let mut writer = Writer::new(sink, layout()).await.unwrap();
        writer.write("model.embed_tokens.weight", &embedding()).await.unwrap();
        write_layer(&mut writer, 0).await;
        let recorded = writer.sums().to_vec();
        write_layer(&mut writer, 1).await;
        drop(writer);
        assert!(DirSource::open(&resumed).unwrap().size("config.json").is_none());
        assert!(DirSink::create(&resumed).is_err(), "a used directory is not taken for a new one");

        let sink = Rc::new(DirSink::open(&resumed).unwrap());
        let mut writer = Writer::resume(sink, layout(), &recorded, async |_| Ok(())).await.unwrap();
        for index in 1..3 {
            write_layer(&mut writer, index).await;
        }
        finish(writer).await;

        let written = contents(&at_once);
        assert!(written.iter().filter(|(name, _)| name.ends_with(".safetensors")).count() > 2);
        assert!(contents(&resumed) == written);

        let checkpoint = Checkpoint::open(Rc::new(DirSource::open(&resumed).unwrap())).await.unwrap();
        assert!(checkpoint.config_text().contains("\"rms_norm_eps\": 1e-05,"));
        assert_eq!(checkpoint.read("model.embed_tokens.weight").await.unwrap(), embedding());
        let quant = QuantConfig::of(&checkpoint).await.unwrap().unwrap();
        for (index, name) in LAYERS.into_iter().enumerate() {
            assert!(GptqLinear::is_in(&checkpoint, name));
            let read = GptqLinear::read(&checkpoint, name, &quant).await.unwrap();
            assert_eq!(read.dequantize().unwrap(), layer(index).dequantize().unwrap());
        }
    });
}

#[test]
fn a_shard_that_is_deleted_or_cut_is_named() {
    block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let sink = Rc::new(DirSink::create(directory.path()).unwrap());
        let mut writer = Writer::new(sink, layout()).await.unwrap();
        writer.write("model.embed_tokens.weight", &embedding()).await.unwrap();
        for index in 0..3 {
            write_layer(&mut writer, index).await;
        }
        let shard = writer.layout().shards()[1].name.clone();
        finish(writer).await;

        let open = async || {
            let source = Rc::new(DirSource::open(directory.path()).unwrap());
            Checkpoint::open(source).await.err().expect("must be refused").to_string()
        };
        let path = directory.path().join(&shard);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 7]).unwrap();
        let cut = open().await;
        assert!(cut.contains(&shard) && cut.contains("7 bytes shorter"), "{cut}");
        fs::remove_file(&path).unwrap();
        let absent = open().await;
        assert!(absent.contains("shards are absent") && absent.contains(&shard), "{absent}");
    });
}
