//! `halftone bench quality`: a grid of models, widths, groups and methods, each over several calibration seeds.
//!
//! Every cell quantizes the model in memory and compares the result with its original on the same text. What
//! the presets do by default is decided by such tables.

use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::options::{DeviceArgs, parse_alpha};
use super::progress::stop_flag;
use super::trial::trial;
use super::{bench, open};
use crate::demo;
use crate::error::{Error, Result};
use crate::eval::compare;
use crate::gptq::scheme::{Preset, Scaling, Scheme};
use crate::model::{ModelConfig, Stored};
use crate::text::{ModelText, SegmentOptions, calibration_segments, evaluation_segments};

#[derive(clap::Args)]
pub struct Args {
    /// Model directories [default: the embedded demo model]
    models: Vec<PathBuf>,
    /// Calibration text; may be repeated [default: the demo model's]
    #[arg(long, value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Text to judge by [default: the demo model's]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Bits per weight
    #[arg(long, value_delimiter = ',', default_values_t = [4, 3, 2])]
    bits: Vec<u32>,
    /// Input columns that share a scale; -1 for one group per row
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true, default_values_t = [32, 64, 128])]
    group_size: Vec<i64>,
    /// A preset, and what is changed of it: fast+alpha=0.5+refit
    #[arg(long, value_delimiter = ',', value_name = "METHOD", default_values = [
        "rtn", "reference", "fast", "fast+refit", "fast+alpha=auto", "default",
    ])]
    methods: Vec<Method>,
    /// How many calibration samples are drawn anew
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Calibration samples
    #[arg(long, default_value_t = 128, value_name = "N")]
    samples: usize,
    /// Tokens in a sample and in a window of the text
    #[arg(long, default_value_t = 256, value_name = "N")]
    seq_len: usize,
    /// Windows of the text that are judged [default: all]
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// A method by its name.
#[derive(Clone)]
struct Method {
    name: String,
    /// With any bits and groups.
    scheme: Scheme,
}

impl FromStr for Method {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('+');
        let preset = match parts.next() {
            Some("rtn") => Preset::Rtn,
            Some("reference") => Preset::Reference,
            Some("default") => Preset::Default,
            Some("fast") => Preset::Fast,
            Some("awq") => Preset::Awq,
            _ => return Err("begins with rtn, awq, reference, fast or default".to_owned()),
        };
        let mut scheme = Scheme::preset(preset, 4, Some(128));
        for part in parts {
            match part.split_once('=') {
                None if part == "refit" => scheme.refit = true,
                Some(("scaling", "awq")) => scheme.scaling = Scaling::Awq,
                Some(("scaling", "none")) => scheme.scaling = Scaling::None,
                None if part == "mse" => scheme.mse = true,
                None if part == "asym" => scheme.sym = false,
                None if part == "desc_act" => scheme.desc_act = true,
                None if part == "static_groups" => scheme.static_groups = true,
                Some(("alpha", value)) => scheme.alpha = parse_alpha(value)?,
                Some(("damp", value)) => {
                    scheme.damp_percent = value.parse().map_err(|_| format!("{value} is no number"))?;
                }
                _ => {
                    return Err(format!(
                        "{part} is none of refit, mse, asym, desc_act, static_groups, alpha=…, damp=…, scaling=awq|none"
                    ));
                }
            }
        }
        scheme.check().map_err(|error| error.to_string())?;
        Ok(Self { name: text.to_owned(), scheme })
    }
}

/// What one seed gave.
struct Outcome {
    perplexity: f64,
    divergence: f64,
    seconds: f64,
}

pub async fn run(args: Args) -> Result<()> {
    let models = match args.models.is_empty() {
        true => vec![("demo".to_owned(), Stored::open(Rc::new(demo::source())).await?)],
        false => {
            let mut models = vec![];
            for path in &args.models {
                models.push((path.display().to_string(), open::model(path).await?));
            }
            models
        }
    };
    let calibration = match args.calibration.is_empty() {
        true => vec![demo::calibration()],
        false => open::texts(&args.calibration)?,
    };
    let judged = match &args.text {
        Some(path) => open::texts(std::slice::from_ref(path))?.remove(0),
        None => demo::evaluation(),
    };
    let schemes = schemes(&args)?;
    let device = open::device(&args.device).await?;
    let stop = stop_flag();
    let seeds = |scheme: &Scheme| if scheme.needs_inputs() { args.seeds } else { 1 };
    let cells: u64 = schemes.iter().map(|(_, scheme)| seeds(scheme)).sum();
    let bar = ProgressBar::new(cells * models.len() as u64);
    let mut rows = vec![];
    for (name, stored) in &models {
        let config = ModelConfig::of(&stored.checkpoint)?;
        let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
        let evaluation = evaluation_segments(&text, &judged, args.seq_len, args.windows)?;
        for (method, scheme) in &schemes {
            let mut outcomes = vec![];
            let mut dense = 0.0;
            for seed in 0..seeds(scheme) {
                let options = SegmentOptions { samples: Some(args.samples), seq_len: args.seq_len, seed };
                let calibration = calibration_segments(&text, &calibration, &options)?;
                let (quantized, report) = trial(stored, scheme, &calibration, &device, &stop).await?;
                let going_on = async |_: usize, _: usize| !stop.load(Ordering::SeqCst);
                let result = compare(stored, &quantized, &evaluation, &device, going_on).await?;
                dense = result.perplexity[0].value;
                let outcome = Outcome {
                    perplexity: result.perplexity[1].value,
                    divergence: result.kl.value,
                    seconds: report.seconds,
                };
                // A grid takes hours; what is known is told at once.
                bar.suspend(|| {
                    eprintln!(
                        "{name} {} bits, group {}, {method}, seed {seed}: perplexity {:.4}, KL {:.5}, {:.1} s",
                        scheme.bits,
                        group(scheme),
                        outcome.perplexity,
                        outcome.divergence,
                        outcome.seconds
                    );
                });
                outcomes.push(outcome);
                bar.inc(1);
            }
            rows.push(row(name, method, scheme, dense, &outcomes));
        }
    }
    bar.finish_and_clear();
    let header =
        ["model", "bits", "group", "method", "seeds", "16-bit", "perplexity", "±", "KL", "± KL", "seconds"];
    bench::show(args.json, &header, rows);
    Ok(())
}

/// All combinations, checked before any work.
fn schemes(args: &Args) -> Result<Vec<(String, Scheme)>> {
    let mut schemes = vec![];
    for &bits in &args.bits {
        for &size in &args.group_size {
            for method in &args.methods {
                let group_size = Scheme::group_size_of(size)?;
                let scheme = Scheme { bits, group_size, ..method.scheme.clone() };
                scheme.check()?;
                schemes.push((method.name.clone(), scheme));
            }
        }
    }
    if schemes.is_empty() {
        return Err(Error::options(
            "there is nothing to measure",
            "Give at least one width, group and method",
        ));
    }
    Ok(schemes)
}

fn group(scheme: &Scheme) -> i64 {
    scheme.group_size.map_or(-1, |size| size as i64)
}

fn row(model: &str, method: &str, scheme: &Scheme, dense: f64, outcomes: &[Outcome]) -> Vec<String> {
    let of = |value: fn(&Outcome) -> f64| mean_and_spread(outcomes.iter().map(value));
    let (perplexity, spread) = of(|outcome| outcome.perplexity);
    let (divergence, spread_kl) = of(|outcome| outcome.divergence);
    vec![
        model.to_owned(),
        scheme.bits.to_string(),
        group(scheme).to_string(),
        method.to_owned(),
        outcomes.len().to_string(),
        format!("{dense:.4}"),
        format!("{perplexity:.4}"),
        format!("{spread:.4}"),
        format!("{divergence:.5}"),
        format!("{spread_kl:.5}"),
        format!("{:.1}", of(|outcome| outcome.seconds).0),
    ]
}

/// Mean and sample standard deviation, 0 for a single value.
fn mean_and_spread(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, if count > 1.0 { (squares / (count - 1.0)).sqrt() } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::scheme::Alpha;

    #[test]
    fn a_method_is_a_preset_and_what_is_changed_of_it() {
        let method = |text: &str| text.parse::<Method>().map(|method| method.scheme);
        let half = method("fast+alpha=0.5+refit").unwrap();
        assert_eq!(
            half,
            Scheme { alpha: Alpha::Fixed(0.5), refit: true, ..Scheme::preset(Preset::Fast, 4, Some(128)) }
        );
        assert!(method("default").unwrap().refit);
        assert!(method("reference+mse+desc_act").unwrap().desc_act);
        for (wrong, says) in [
            ("best", "begins with"),
            ("fast+refits", "none of refit"),
            ("default+alpha=2", "out of range"),
            ("rtn+refit", "rtn rounds each weight for itself"),
        ] {
            let error = method(wrong).err().unwrap();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn the_spread_is_that_of_a_sample() {
        assert_eq!(mean_and_spread([1.0, 2.0, 6.0].into_iter()), (3.0, 7f64.sqrt()));
        assert_eq!(mean_and_spread([5.0].into_iter()), (5.0, 0.0));
    }
}
