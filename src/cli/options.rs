//! Options that several commands share.

use clap::{Args, ValueEnum};

use crate::checkpoint::Format;
use crate::checkpoint::writer::DEFAULT_SHARD_BYTES;
use crate::error::Result;
use crate::gptq::scheme::{Alpha, Choice, Preset, Scaling, Scheme};
use crate::pipeline::{Bits, Groups, Mixed, Output, Override};
use crate::text::SegmentOptions;

/// The grid and the method.
#[derive(Args, Clone)]
pub struct SchemeArgs {
    /// default: searched scales, aimed at the original model's outputs and refined; fast: one sweep with
    /// searched scales, in less than half of the time; reference: the original GPTQ program; rtn: round to
    /// nearest, no calibration; awq: inputs scaled by their size, then round to nearest
    #[arg(long, value_enum, default_value_t = PresetArg::Default)]
    preset: PresetArg,
    /// Bits per weight: 2, 3, 4 or 8; or an average of these for the layers together, such as 3.5 (two decimals at
    /// most), each layer getting as many as it was measured to need
    #[arg(long, default_value_t = 4.0, allow_negative_numbers = true)]
    bits: f64,
    /// Input columns that share a scale; -1 for one group per row; auto for the largest of 128, 64, 32 and 16 that
    /// divides a layer's inputs, layer by layer
    #[arg(long, default_value_t = Groups::Size(128), allow_negative_numbers = true, value_name = "N|auto")]
    group_size: Groups,
    /// Symmetric grid (the default): what every fast kernel loads
    #[arg(long, conflicts_with = "asym")]
    sym: bool,
    /// Grid with fitted zero points
    #[arg(long)]
    asym: bool,
    /// Take columns by falling diag(H); `=false` switches it off in presets default and fast
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    desc_act: Option<bool>,
    /// Groups of neighbouring columns, scales from the original weights
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    static_groups: Option<bool>,
    /// Search scales instead of taking min-max
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    mse: Option<bool>,
    /// Damping as a share of mean(diag H) [preset default: 0.05, others: 0.01]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    damp_percent: Option<f64>,
    /// Aim at the original model's outputs, not at its weights: by this share, 0 (off) to 1, or auto, by
    /// what rows held out of the calibration text say [preset default: auto, others: 0]
    #[arg(long, value_parser = parse_alpha, value_name = "auto|SHARE", allow_negative_numbers = true)]
    alpha: Option<Alpha>,
    /// After the sweep fit scales to the codes and move codes, group by group; `=false` switches it off in
    /// preset default
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    refit: Option<bool>,
    /// awq: divide inputs by a power of their size, folded into what comes before, and multiply weights, wherever
    /// they round better for it; GPTQ keeps that where rows held out of the calibration text say so
    /// [default: awq in preset awq, else none]
    #[arg(long, value_enum, value_name = "awq|none")]
    scaling: Option<ScalingArg>,
}

#[derive(Clone, Copy, ValueEnum)]
enum ScalingArg {
    Awq,
    None,
}

pub fn parse_alpha(text: &str) -> Result<Alpha, String> {
    match text {
        "auto" => Ok(Alpha::Measured),
        _ => text.parse().map(Alpha::Fixed).map_err(|_| "neither auto nor a number from 0 to 1".to_owned()),
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum PresetArg {
    Default,
    Fast,
    Reference,
    Rtn,
    Awq,
}

impl SchemeArgs {
    fn bits(&self) -> Result<Bits> {
        Bits::new(self.bits)
    }

    pub fn scheme(&self) -> Result<Scheme> {
        let preset = match self.preset {
            PresetArg::Default => Preset::Default,
            PresetArg::Fast => Preset::Fast,
            PresetArg::Reference => Preset::Reference,
            PresetArg::Rtn => Preset::Rtn,
            PresetArg::Awq => Preset::Awq,
        };
        Scheme::chosen(&Choice {
            preset,
            bits: self.bits()?.width(),
            group_size: self.group_size.size(),
            sym: !self.asym,
            desc_act: self.desc_act,
            static_groups: self.static_groups,
            mse: self.mse,
            damp_percent: self.damp_percent,
            alpha: self.alpha,
            refit: self.refit,
            scaling: self.scaling.map(|scaling| match scaling {
                ScalingArg::Awq => Scaling::Awq,
                ScalingArg::None => Scaling::None,
            }),
        })
    }
}

/// What is written.
#[derive(Args, Clone)]
pub struct OutputArgs {
    /// gptq: the widest known; gptq_v2: the same with zero points as they are; compressed-tensors: that
    /// of llm-compressor and vLLM, in the model's own 16-bit type
    #[arg(long, value_enum, default_value_t = FormatArg::Gptq)]
    format: FormatArg,
    /// What differs for the layers whose name a regex matches, such as 'down_proj=bits:8,group_size:32';
    /// also sym, asym, desc_act, static_groups, mse; may be repeated, the first that matches counts
    #[arg(long = "override", value_name = "REGEX=KEY:VALUE,…")]
    overrides: Vec<String>,
    /// Leave the layers whose name a regex matches in 16 bits; may be repeated
    #[arg(long, value_name = "REGEX")]
    skip: Vec<String>,
    /// Quantize the output head too, of a model whose head is not its embedding table
    #[arg(long)]
    quantize_lm_head: bool,
    /// Calibrate every expert of a mixture with every token, not only with those that its router sends there
    #[arg(long)]
    all_experts: bool,
    /// Bytes of tensors in one file at most [default: 4GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    shard_size: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum FormatArg {
    Gptq,
    #[value(name = "gptq_v2")]
    GptqV2,
    CompressedTensors,
}

impl FormatArg {
    pub fn format(self) -> Format {
        match self {
            Self::Gptq => Format::Gptq,
            Self::GptqV2 => Format::GptqV2,
            Self::CompressedTensors => Format::CompressedTensors,
        }
    }
}

impl OutputArgs {
    pub fn output(&self, scheme: &SchemeArgs) -> Result<Output> {
        Ok(Output {
            format: self.format.format(),
            overrides: self.overrides.iter().map(|text| Override::parse(text)).collect::<Result<_>>()?,
            skip: self.skip.clone(),
            lm_head: self.quantize_lm_head,
            auto_groups: scheme.group_size == Groups::Auto,
            all_experts: self.all_experts,
            mixed: scheme.bits()?.average().map(Mixed::from),
        })
    }

    pub fn shard_bytes(&self) -> u64 {
        self.shard_size.unwrap_or(DEFAULT_SHARD_BYTES)
    }
}

/// What every job on a model takes.
#[derive(Args, Clone)]
pub struct JobArgs {
    /// Directory with config.json, tokenizer.json and safetensors in f32, f16 or bf16
    pub model: std::path::PathBuf,
    #[command(flatten)]
    pub scheme: SchemeArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    #[command(flatten)]
    pub calibration: CalibrationArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

/// The calibration text.
#[derive(Args, Clone)]
pub struct CalibrationArgs {
    /// Text to calibrate on: .txt, or .jsonl with "text", "messages" or "input_ids"; may be repeated
    #[arg(long = "calibration", value_name = "FILE")]
    pub files: Vec<std::path::PathBuf>,
    /// Samples over all files [default: 128, or every row of input_ids]
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Tokens in a sample
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub seq_len: usize,
    /// Seed of the random windows
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

impl CalibrationArgs {
    pub fn segments(&self) -> SegmentOptions {
        SegmentOptions { samples: self.samples, seq_len: self.seq_len, seed: self.seed }
    }
}

/// Where to compute.
#[derive(Args, Clone)]
pub struct DeviceArgs {
    /// auto takes a hardware GPU if there is one, else the CPU
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// A part of the adapter's name, see `halftone adapters`; software adapters must be named
    #[arg(long, value_name = "NAME")]
    pub adapter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    Auto,
    Cpu,
    Gpu,
}

/// How much memory a run may take.
#[derive(Args, Clone)]
pub struct MemoryArgs {
    /// Memory for weights and activations, such as 4GB or 800MB [default: 60 % of what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max_memory: Option<u64>,
}

/// `500MB`, `4GB`, `4GiB`, or plain bytes.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        "t" | "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024f64.powi(2),
        "gib" => 1024f64.powi(3),
        _ => return Err(format!("unknown unit \"{unit}\"; use MB, GB, MiB or GiB")),
    };
    match number.parse::<f64>() {
        Ok(value) if value > 0.0 => Ok((value * factor) as u64),
        _ => Err("a size is a number with a unit, such as 4GB".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_size("4GB"), Ok(4_000_000_000));
        assert_eq!(parse_size("1.5GiB"), Ok(1_610_612_736));
        assert_eq!(parse_size("123"), Ok(123));
        assert!(parse_size("4XB").is_err() && parse_size("-1").is_err() && parse_size("0").is_err());
    }
}
