//! `halftone bench`: what this machine does, by device and kernel.
//!
//! Every figure is the best of several runs of one process; compare figures of one run only.

use std::rc::Rc;
use std::time::Instant;

use super::options::{DeviceArgs, JobArgs, SchemeArgs};
use super::{open, table};
use crate::device::Device;
use crate::error::Result;
use crate::gptq::factor::factor;
use crate::gptq::order::Order;
use crate::gptq::rows::quantize_rows;
use crate::gptq::stage::{Calibration, prepare};
use crate::kernels::gemm::{Mat, Scaling, Target, force, gemm, variants};
use crate::kernels::scales::ScaleType;
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::{Elem, Tensor};

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Matrix products of the shapes that quantization makes, for each kernel variant
    Gemm(Common),
    /// Factoring a Hessian
    Cholesky(Common),
    /// One linear layer by step
    Layer(LayerArgs),
    /// A whole run over a model directory, by step
    Model(ModelArgs),
    /// What methods make of models: perplexity and divergence over bits, groups and calibration seeds
    Quality(super::bench_quality::Args),
    /// Reading a prompt and generating from a dense or quantized model
    Decode(super::bench_decode::Args),
    /// Products of packed weights, against 16-bit ones and what the device can do
    Qmatmul(super::bench_qmatmul::Args),
}

#[derive(clap::Args)]
struct Common {
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct LayerArgs {
    /// Output and input features
    #[arg(long, default_value_t = 1536)]
    rows: usize,
    #[arg(long, default_value_t = 1536)]
    cols: usize,
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    #[command(flatten)]
    scheme: SchemeArgs,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct ModelArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    match args.what {
        What::Gemm(args) => bench_gemm(args).await,
        What::Cholesky(args) => bench_cholesky(args).await,
        What::Layer(args) => bench_layer(args).await,
        What::Model(args) => bench_model(args).await,
        What::Quality(args) => super::bench_quality::run(args).await,
        What::Decode(args) => super::bench_decode::run(args).await,
        What::Qmatmul(args) => super::bench_qmatmul::run(args).await,
    }
}

pub(super) fn show(json: bool, header: &[&str], rows: Vec<Vec<String>>) {
    if json {
        let objects: Vec<serde_json::Value> = rows
            .iter()
            .map(|row| {
                let pairs = header.iter().zip(row).map(|(name, cell)| {
                    let value = cell
                        .parse::<f64>()
                        .map_or_else(|_| serde_json::json!(cell), |x| serde_json::json!(x));
                    ((*name).to_owned(), value)
                });
                serde_json::Value::Object(pairs.collect())
            })
            .collect();
        say!("{:#}", serde_json::Value::Array(objects));
    } else {
        table::print(header, &rows);
    }
}

pub(super) fn noise(device: &Device, shape: &[usize]) -> Result<Tensor> {
    let mut state = 1u32;
    let values = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_f32(device, shape, values)
}

/// The shortest of the runs that fit in about a second, at least three.
pub(super) async fn best(device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let (begun, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 3 || (begun.elapsed().as_secs_f64() < 1.0 && runs < 50) {
        let since = Instant::now();
        work()?;
        device.settle().await?;
        best = best.min(since.elapsed().as_secs_f64());
        runs += 1;
    }
    Ok(best)
}

async fn bench_gemm(args: Common) -> Result<()> {
    let device = open::device(&args.device).await?;
    // m, n, k, form: NT is a linear layer, NN the sweep's compensation, TN the Hessian.
    let shapes = [
        (512, 512, 512, "NT"),
        (2048, 576, 576, "NT"),
        (2048, 1536, 576, "NT"),
        (2048, 576, 1536, "NT"),
        (1024, 1024, 1024, "NT"),
        (576, 128, 1024, "NN"),
        (1536, 512, 2048, "TN"),
    ];
    let names: Vec<String> = match &device {
        Device::Cpu => vec!["packed panels".to_owned()],
        Device::Gpu(_) => variants().iter().map(|variant| variant.name.to_owned()).collect(),
    };
    let mut rows = Vec::new();
    for (index, name) in names.iter().enumerate() {
        if let Device::Gpu(gpu) = &device {
            force(gpu, index);
        }
        for (m, n, k, form) in shapes {
            let (a_shape, b_shape) = match form {
                "NT" => ([m, k], [n, k]),
                "NN" => ([m, k], [k, n]),
                _ => ([k, m], [k, n]),
            };
            let (a, b) = (noise(&device, &a_shape)?, noise(&device, &b_shape)?);
            let mut c = Tensor::zeros(&device, Elem::F32, &[m, n])?;
            let seconds = best(&device, || {
                let (mut a, mut b) = (Mat::of(&a), Mat::of(&b));
                if form == "TN" {
                    a = a.t();
                }
                if form == "NT" {
                    b = b.t();
                }
                gemm(Target::of(&mut c), a, b, Scaling::SET, None)
            })
            .await?;
            let rate = 2.0 * (m * n * k) as f64 / seconds / 1e9;
            let cells = [m.to_string(), n.to_string(), k.to_string(), form.to_owned(), format!("{rate:.1}")];
            rows.push([vec![device.describe(), name.clone()], cells.to_vec()].concat());
        }
    }
    show(args.json, &["device", "kernel", "m", "n", "k", "form", "GFLOP/s"], rows);
    Ok(())
}

/// A Hessian of `tokens` random inputs.
fn hessian(device: &Device, n: usize, tokens: usize) -> Result<SymmetricPanels> {
    let mut h = SymmetricPanels::zeros(device, n)?;
    h.accumulate(&noise(device, &[tokens, n])?, 2.0 / tokens as f32)?;
    Ok(h)
}

async fn bench_cholesky(args: Common) -> Result<()> {
    let device = open::device(&args.device).await?;
    let sizes: &[usize] = if device.is_cpu() { &[576, 1536, 4096] } else { &[256, 576, 1536] };
    let mut rows = Vec::new();
    for &n in sizes {
        let h = hessian(&device, n, 2 * n)?;
        let diagonal = h.diagonal().await?;
        let mut seconds = f64::INFINITY;
        for _ in 0..3 {
            let since = Instant::now();
            factor(&h, &Order::descending(&diagonal), &diagonal, 0.01).await?;
            seconds = seconds.min(since.elapsed().as_secs_f64());
        }
        let rate = (n as f64).powi(3) / 3.0 / seconds / 1e9;
        rows.push(vec![device.describe(), n.to_string(), format!("{seconds:.4}"), format!("{rate:.1}")]);
    }
    show(args.json, &["device", "n", "seconds", "GFLOP/s"], rows);
    Ok(())
}

async fn bench_layer(args: LayerArgs) -> Result<()> {
    let device = open::device(&args.common.device).await?;
    let scheme = args.scheme.scheme()?;
    let (m, n) = (args.rows, args.cols);
    let weight = noise(&device, &[m, n])?;
    let x = noise(&device, &[args.tokens, n])?;
    let mut rows = Vec::new();
    let mut step = |name: &str, since: Instant| {
        rows.push(vec![device.describe(), name.to_owned(), format!("{:.4}", since.elapsed().as_secs_f64())]);
    };
    let since = Instant::now();
    let mut h = SymmetricPanels::zeros(&device, n)?;
    h.accumulate(&x, 2.0 / args.tokens as f32)?;
    device.settle().await?;
    step("hessian", since);
    let since = Instant::now();
    let inputs = Calibration::from(Rc::new(h));
    let prepared = prepare(&scheme, ScaleType::F16, &device, n, Some(inputs), "bench").await?;
    step("order and factor", since);
    let since = Instant::now();
    quantize_rows(&prepared, &weight, 0..weight.rows()).await?;
    step("scales, sweep, losses", since);
    let since = Instant::now();
    crate::kernels::gemm::linear(&x, &weight, None)?;
    device.settle().await?;
    step("forward", since);
    show(args.common.json, &["device", "step", "seconds"], rows);
    Ok(())
}

async fn bench_model(args: ModelArgs) -> Result<()> {
    let request = super::plan::Request { job: &args.job, text_optional: false, stopped: None };
    let mut prepared = super::plan::prepare(request).await?;
    let mut silent = crate::pipeline::events::Silent;
    if prepared.is_to_measure() {
        prepared.settle(&mut silent).await?;
    }
    let sink = std::rc::Rc::new(crate::storage::memory::MemorySink::new());
    let options = crate::pipeline::RunOptions { calibration: String::new(), resume: false };
    let super::plan::Prepared { stored, plan, segments, device, .. } = &prepared;
    let report = crate::pipeline::run(stored, plan, segments, device, sink, &options, &mut silent).await?;
    let mut rows: Vec<Vec<String>> = report
        .seconds_by_step
        .iter()
        .map(|(step, seconds)| vec![device.describe(), (*step).to_owned(), format!("{seconds:.3}")])
        .collect();
    rows.push(vec![device.describe(), "all".to_owned(), format!("{:.3}", report.seconds)]);
    show(args.json, &["device", "step", "seconds"], rows);
    Ok(())
}
