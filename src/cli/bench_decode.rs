//! `halftone bench decode`: how fast a model reads a prompt and generates.

use std::path::PathBuf;
use std::rc::Rc;

use super::options::DeviceArgs;
use super::{bench, open};
use crate::error::{Error, Result};
use crate::generate::{Generator, Options};
use crate::model::{KvCache, ModelConfig};
use crate::tensor::Elem;
use crate::text::ModelText;

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    model: PathBuf,
    /// Tokens of the prompt, any ones
    #[arg(long, default_value_t = 512, value_name = "N")]
    prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, default_value_t = 64, value_name = "N")]
    tokens: usize,
    /// Runs, of which the best counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: usize,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    if args.prompt_tokens == 0 || args.tokens < 2 || args.rounds == 0 {
        return Err(Error::options(
            "there is nothing to measure",
            "Use --prompt-tokens and --rounds of at least 1 and --tokens of at least 2",
        ));
    }
    let stored = open::model(&args.model).await?;
    let config = ModelConfig::of(&stored.checkpoint)?;
    let context = args.prompt_tokens + args.tokens;
    if context > config.max_position_embeddings {
        return Err(Error::options(
            format!("{context} tokens are more than the model's {}", config.max_position_embeddings),
            "Ask for fewer",
        ));
    }
    let device = open::device(&args.device).await?;
    // No text is read or written.
    let text = Rc::new(ModelText::new(None, None, config.vocab_size, "the model"));
    let mut generator = Generator::load(&stored, text, &device, context, async |_, _| true).await?;
    let options = Options { ignore_stops: true, ..Options::greedy(args.tokens) };
    let (mut prefill, mut decode) = (0f64, 0f64);
    for round in 0..args.rounds {
        // Another first token each time, so that nothing is known from the round before.
        let id = |i: usize| (i.wrapping_mul(2_654_435_761) + round) % config.vocab_size;
        let prompt: Vec<u32> = (0..args.prompt_tokens).map(|i| id(i) as u32).collect();
        let generated = generator.generate(&prompt, &options, async |_| true).await?;
        prefill = prefill.max(generated.prefill_rate());
        decode = decode.max(generated.decode_rate().unwrap_or(0.0));
    }
    // Keys and values at the middle of what was generated.
    let cached = KvCache::bytes(&config, Elem::F16, args.prompt_tokens + args.tokens / 2);
    let weights = generator.decoder().weight_bytes();
    let bytes = (weights + cached) as f64;
    let cells = [
        device.describe(),
        args.prompt_tokens.to_string(),
        args.tokens.to_string(),
        format!("{prefill:.1}"),
        format!("{decode:.1}"),
        format!("{:.1}", weights as f64 / 1e6),
        format!("{:.1}", cached as f64 / 1e6),
        format!("{:.1}", bytes * decode / 1e9),
    ];
    let header = [
        "device",
        "prompt",
        "tokens",
        "prefill tokens/s",
        "decode tokens/s",
        "weights MB/token",
        "cache MB/token",
        "GB/s",
    ];
    bench::show(args.json, &header, vec![cells.to_vec()]);
    Ok(())
}
