//! `halftone demo`: the embedded model at 4, 3 and 2 bits with every preset, in one table.

use std::rc::Rc;

use indicatif::ProgressBar;

use super::options::DeviceArgs;
use super::progress::stop_flag;
use super::trial::Trial;
use super::{open, table};
use crate::demo;
use crate::error::{Error, Result};
use crate::eval::perplexity;
use crate::gptq::scheme::{Preset, Scheme};
use crate::model::{ModelConfig, Stored};
use crate::pipeline::plan::human_bytes;
use crate::text::{ModelText, SegmentOptions, calibration_segments, evaluation_segments};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Calibration samples of 256 tokens
    #[arg(long, default_value_t = 128)]
    samples: usize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Row {
    bits: u32,
    preset: Option<Preset>,
    perplexity: f64,
    bits_per_weight: f64,
    bytes: u64,
    seconds: f64,
}

const SEQ_LEN: usize = 256;
const GROUP: usize = 64;

pub async fn run(args: Args) -> Result<()> {
    let device = open::device(&args.device).await?;
    let stored = Stored::open(Rc::new(demo::source())).await?;
    let config = ModelConfig::of(&stored.checkpoint)?;
    let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
    let options = SegmentOptions { samples: Some(args.samples), seq_len: SEQ_LEN, seed: 0 };
    let calibration = calibration_segments(&text, &[demo::calibration()], &options)?;
    let evaluation = evaluation_segments(&text, &demo::evaluation(), SEQ_LEN, None)?;
    let stop = stop_flag();
    let bar = ProgressBar::new(13);
    let going_on = async |_: usize, _: usize| !stop.load(std::sync::atomic::Ordering::SeqCst);
    let dense = perplexity(&stored, &evaluation, &device, &going_on).await?;
    bar.inc(1);
    let mut rows = vec![Row {
        bits: 16,
        preset: None,
        perplexity: dense.perplexity,
        bits_per_weight: 16.0,
        bytes: stored.checkpoint.total_bytes(),
        seconds: 0.0,
    }];
    for bits in [4, 3, 2] {
        for preset in [Preset::Rtn, Preset::Reference, Preset::Fast, Preset::Default] {
            let scheme = Scheme::preset(preset, bits, Some(GROUP));
            let (quantized, report) =
                Trial::from(scheme.clone()).run(&stored, &calibration, &device, &stop).await?;
            let result = perplexity(&quantized, &evaluation, &device, &going_on).await?;
            rows.push(Row {
                bits,
                preset: Some(preset),
                perplexity: result.perplexity,
                bits_per_weight: report.bits_per_weight,
                bytes: report.output_bytes,
                seconds: report.seconds,
            });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if args.json {
        let text = serde_json::to_string_pretty(&rows).map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
        return Ok(());
    }
    say!(
        "demo model: {}, {} layers, on {}; calibration {} × {SEQ_LEN} tokens, perplexity over {} tokens of \
         held-out text, groups of {GROUP}\n",
        config.family.name,
        config.layers,
        device.describe(),
        calibration.rows.len(),
        dense.tokens
    );
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            let preset =
                row.preset.map_or("16-bit".to_owned(), |preset| format!("{preset:?}").to_lowercase());
            vec![
                row.bits.to_string(),
                preset,
                format!("{:.3}", row.perplexity),
                format!("{:.2}", row.bits_per_weight),
                human_bytes(row.bytes),
                format!("{:.2}", row.seconds),
            ]
        })
        .collect();
    table::print(&["bits", "preset", "perplexity", "bits/weight", "size", "seconds"], &cells);
    Ok(())
}
