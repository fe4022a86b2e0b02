//! `halftone bench quality`: a grid of models, widths, groups and methods, each over several calibration seeds.
//!
//! Every cell quantizes the model in memory and compares the result with its original on the same text. What
//! the presets do by default is decided by such tables.

use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::ProgressBar;
use serde::Serialize;

use super::options::{DeviceArgs, parse_alpha};
use super::progress::stop_flag;
use super::trial::Trial;
use super::{open, table};
use crate::demo;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::eval::compare;
use crate::gptq::scheme::{Preset, Scaling, Scheme};
use crate::model::{ModelConfig, Stored};
use crate::pipeline::{Bits, Groups, Mixed, Output};
use crate::text::{ModelText, SegmentOptions, Segments, TextFile, calibration_segments, evaluation_segments};

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
    /// Bits per weight, divided by commas; 3.5 is an average
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "4,3,2", value_parser = parse_bits,
        allow_hyphen_values = true)]
    bits: Vec<Bits>,
    /// Input columns that share a scale, divided by commas; -1 for one group per row, auto for each layer's own
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,…",
        default_value = "32,64,128",
        allow_hyphen_values = true
    )]
    group_size: Vec<Groups>,
    /// Presets, divided by commas, and what is changed of them: fast+alpha=0.5+refit
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "METHOD,…",
        default_value = "rtn,reference,fast,fast+refit,fast+alpha=auto,default"
    )]
    methods: Vec<Method>,
    /// How many calibration samples are drawn anew
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Calibration samples
    #[arg(long, default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Tokens in a sample and in a window of the text
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    seq_len: u32,
    /// Windows of the text that are judged [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    windows: Option<u32>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

fn parse_bits(text: &str) -> Result<Bits, String> {
    let number = text.parse().map_err(|_| format!("{text} is no number"))?;
    Bits::new(number).map_err(|error| error.to_string())
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
                        "“{part}” is none of refit, mse, asym, desc_act, static_groups, alpha=…, damp=…, scaling=awq|none"
                    ));
                }
            }
        }
        scheme.check().map_err(|error| error.to_string())?;
        if text.contains("+damp=") && !scheme.sweeps() {
            return Err(format!("{} spreads no errors, for which damp is", preset.name()));
        }
        Ok(Self { name: text.to_owned(), scheme })
    }
}

/// One way for a model to be quantized.
struct Cell {
    bits: Bits,
    group_size: Groups,
    method: String,
    trial: Trial,
}

/// A model with its texts.
struct Subject {
    name: String,
    stored: Stored,
    text: ModelText,
    evaluation: Segments,
}

/// What is the same for all cells.
struct Grid<'a> {
    args: &'a Args,
    calibration: &'a [TextFile],
    device: &'a Device,
    bar: &'a ProgressBar,
    stop: &'a AtomicBool,
}

/// What one seed gave.
struct Outcome {
    /// Of the original.
    dense: f64,
    perplexity: f64,
    divergence: f64,
    seconds: f64,
}

/// What a cell gave over its seeds.
#[derive(Serialize)]
struct Row {
    model: String,
    bits: Bits,
    group_size: Groups,
    method: String,
    /// Those that drew other samples.
    seeds: usize,
    perplexity_16bit: f64,
    perplexity: f64,
    /// Sample standard deviations; `None` of one seed.
    perplexity_spread: Option<f64>,
    kl: f64,
    kl_spread: Option<f64>,
    seconds: f64,
}

pub async fn run(args: Args) -> Result<()> {
    let cells = cells(&args)?;
    let calibration = match args.calibration.is_empty() {
        true => vec![demo::calibration()],
        false => open::texts(&args.calibration)?,
    };
    let device = open::device(&args.device).await?;
    let subjects = subjects(&args).await?;
    for subject in &subjects {
        let segments = calibration_segments(&subject.text, &calibration, &args.samples_of(0))?;
        for cell in &cells {
            cell.trial.check(&subject.stored, &segments, &device)?;
        }
    }
    let runs = cells.iter().map(|cell| args.seeds_of(cell)).sum::<u64>() * subjects.len() as u64;
    let bar = ProgressBar::new(runs);
    // A grid that ends early has been worth what is known of it.
    let mut rows = vec![];
    let grid =
        Grid { args: &args, calibration: &calibration, device: &device, bar: &bar, stop: &stop_flag() };
    let outcome = grid.all(&subjects, &cells, &mut rows).await;
    bar.finish_and_clear();
    if args.json {
        let text = serde_json::to_string_pretty(&rows).map_err(|error| Error::Internal(error.to_string()))?;
        say!("{text}");
    } else if !rows.is_empty() {
        let header = [
            "model",
            "bits",
            "group",
            "method",
            "seeds",
            "16-bit",
            "perplexity",
            "±",
            "KL",
            "± KL",
            "seconds",
        ];
        table::print(&header, &rows.iter().map(Row::cells).collect::<Vec<_>>());
    }
    outcome.map_err(|error| match error {
        Error::Interrupted { .. } => Error::Interrupted {
            place: format!("behind {} runs of {}", rows.iter().map(|row| row.seeds).sum::<usize>(), runs),
            advice: "repeat the command to begin again".into(),
        },
        error => error,
    })
}

/// The models, opened with their texts before any work.
async fn subjects(args: &Args) -> Result<Vec<Subject>> {
    let judged = match &args.text {
        Some(path) => open::texts(std::slice::from_ref(path))?.remove(0),
        None => demo::evaluation(),
    };
    let mut models = vec![];
    if args.models.is_empty() {
        models.push(("demo".to_owned(), Stored::open(Rc::new(demo::source())).await?));
    }
    for path in &args.models {
        let name = path.display().to_string();
        if !path.exists() && (name.parse::<Method>().is_ok() || name.parse::<f64>().is_ok() || name == "auto")
        {
            return Err(Error::options(
                format!("{name} is taken for a model directory, and there is none of that name"),
                "Divide lists by commas: --bits 4,3 --methods fast,default",
            ));
        }
        models.push((name, open::model(path).await?));
    }
    let mut subjects = vec![];
    for (name, stored) in models {
        let config = ModelConfig::of(&stored.checkpoint)?;
        let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
        let windows = args.windows.map(|windows| windows as usize);
        let evaluation = evaluation_segments(&text, &judged, args.seq_len as usize, windows)?;
        subjects.push(Subject { name, stored, text, evaluation });
    }
    Ok(subjects)
}

impl Grid<'_> {
    /// Fills `rows`, as far as it comes.
    async fn all(&self, subjects: &[Subject], cells: &[Cell], rows: &mut Vec<Row>) -> Result<()> {
        for subject in subjects {
            for cell in cells {
                let mut outcomes = vec![];
                let ended = self.seeds(subject, cell, &mut outcomes).await;
                if let Some(first) = outcomes.first() {
                    rows.push(cell.row(&subject.name, first.dense, &outcomes));
                }
                ended?;
            }
        }
        Ok(())
    }

    /// Fills `outcomes`, as far as it comes.
    async fn seeds(
        &self,
        Subject { name, stored, text, evaluation }: &Subject,
        cell: &Cell,
        outcomes: &mut Vec<Outcome>,
    ) -> Result<()> {
        let mut seen = vec![];
        for seed in 0..self.args.seeds_of(cell) {
            let calibration = calibration_segments(text, self.calibration, &self.args.samples_of(seed))?;
            // Rows of ids that are all taken are the same for every seed.
            if seen.contains(&calibration.fingerprint()) {
                self.bar.suspend(|| {
                    eprintln!("{name}: seed {seed} draws the samples of an earlier one and is left out")
                });
                self.bar.inc(1);
                continue;
            }
            seen.push(calibration.fingerprint());
            let (quantized, report) = cell.trial.run(stored, &calibration, self.device, self.stop).await?;
            let going_on = async |_: usize, _: usize| !self.stop.load(Ordering::SeqCst);
            let result = compare(stored, &quantized, evaluation, self.device, going_on).await?;
            let outcome = Outcome {
                dense: result.perplexity[0].value,
                perplexity: result.perplexity[1].value,
                divergence: result.kl.value,
                seconds: report.seconds,
            };
            // A grid takes hours; what is known is told at once.
            self.bar.suspend(|| {
                eprintln!(
                    "{name} {} bits, group {}, {}, seed {seed}: perplexity {:.4}, KL {:.5}, {:.1} s",
                    cell.bits,
                    cell.group_size,
                    cell.method,
                    outcome.perplexity,
                    outcome.divergence,
                    outcome.seconds
                );
            });
            outcomes.push(outcome);
            self.bar.inc(1);
        }
        Ok(())
    }
}

/// All combinations.
fn cells(args: &Args) -> Result<Vec<Cell>> {
    let mut cells = vec![];
    for &bits in &args.bits {
        for &group_size in &args.group_size {
            for method in &args.methods {
                if bits.average().is_some() && !method.scheme.needs_inputs() {
                    eprintln!(
                        "{} is left out at {bits} bits: it has no text to measure layers by",
                        method.name
                    );
                    continue;
                }
                let size = Scheme::group_size_of(group_size.size())?;
                let scheme = Scheme { bits: bits.width(), group_size: size, ..method.scheme.clone() };
                scheme.check()?;
                let output = Output {
                    auto_groups: group_size == Groups::Auto,
                    mixed: bits.average().map(Mixed::from),
                    ..Output::default()
                };
                let trial = Trial { scheme, output };
                cells.push(Cell { bits, group_size, method: method.name.clone(), trial });
            }
        }
    }
    match cells.is_empty() {
        true => Err(Error::options("there is nothing to measure", "Give other bits or other methods")),
        false => Ok(cells),
    }
}

impl Args {
    /// Rounding draws no samples.
    fn seeds_of(&self, cell: &Cell) -> u64 {
        if cell.trial.scheme.needs_inputs() { self.seeds } else { 1 }
    }

    fn samples_of(&self, seed: u64) -> SegmentOptions {
        SegmentOptions { samples: Some(self.samples as usize), seq_len: self.seq_len as usize, seed }
    }
}

impl Cell {
    fn row(&self, model: &str, dense: f64, outcomes: &[Outcome]) -> Row {
        let of = |value: fn(&Outcome) -> f64| mean_and_spread(outcomes.iter().map(value));
        let (perplexity, perplexity_spread) = of(|outcome| outcome.perplexity);
        let (kl, kl_spread) = of(|outcome| outcome.divergence);
        Row {
            model: model.to_owned(),
            bits: self.bits,
            group_size: self.group_size,
            method: self.method.clone(),
            seeds: outcomes.len(),
            perplexity_16bit: dense,
            perplexity,
            perplexity_spread,
            kl,
            kl_spread,
            seconds: of(|outcome| outcome.seconds).0,
        }
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let spread = |spread: Option<f64>, digits| spread.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
        vec![
            self.model.clone(),
            self.bits.to_string(),
            self.group_size.to_string(),
            self.method.clone(),
            self.seeds.to_string(),
            format!("{:.4}", self.perplexity_16bit),
            format!("{:.4}", self.perplexity),
            spread(self.perplexity_spread, 4),
            format!("{:.5}", self.kl),
            spread(self.kl_spread, 5),
            format!("{:.1}", self.seconds),
        ]
    }
}

/// Mean and sample standard deviation, which a single value has not.
fn mean_and_spread(values: impl Iterator<Item = f64> + Clone) -> (f64, Option<f64>) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, (count > 1.0).then(|| (squares / (count - 1.0)).sqrt()))
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
            ("fast+", "“” is none of"),
            ("awq+damp=0.1", "awq spreads no errors"),
            ("rtn+refit", "rtn rounds each weight for itself"),
        ] {
            let error = method(wrong).err().unwrap();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }

    #[test]
    fn the_spread_is_that_of_a_sample() {
        assert_eq!(mean_and_spread([1.0, 2.0, 6.0].into_iter()), (3.0, Some(7f64.sqrt())));
        assert_eq!(mean_and_spread([5.0].into_iter()), (5.0, None));
    }
}
