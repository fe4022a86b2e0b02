//! `halftone bench qmatmul`: products of packed weights, by shape and kernel, against what the device
//! can do at best and against 16-bit weights.

use std::time::Instant;

use super::options::DeviceArgs;
use super::{bench, open};
use crate::checkpoint::GptqLinear;
use crate::checkpoint::linear::natural_g_idx;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::ceiling::ceiling;
use crate::kernels::gemm::{force, variants};
use crate::kernels::input::Input;
use crate::model::Linear;
use crate::tensor::{Elem, Tensor};

#[derive(clap::Args)]
pub struct Args {
    /// Bits of a code: 2, 3, 4 or 8
    #[arg(long, default_value_t = 4, value_name = "N")]
    bits: u32,
    /// Inputs that share a scale
    #[arg(long, default_value_t = 64, value_name = "N")]
    group_size: usize,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Outputs and inputs: the layers of SmolLM2-135M and of larger models.
const SHAPES: [[usize; 2]; 5] = [[576, 576], [1536, 576], [576, 1536], [2048, 2048], [4096, 4096]];
/// The head of SmolLM2-135M, which stays in 16 bits.
const HEAD: [usize; 2] = [49_152, 576];
/// Rows of decoding, of a few texts together, and of reading a prompt.
const ROWS: [usize; 3] = [1, 4, 128];
/// Weights of one shape that are taken in turn: more than caches hold on the CPU, less where a byte
/// takes longer.
const CYCLE_BYTES: usize = 48 << 20;
const SOFTWARE_CYCLE_BYTES: usize = 4 << 20;

/// GB/s that a copy moves (reads and writes) and GFLOP/s of multiplications and additions.
struct Ceilings {
    copy: f64,
    fma: f64,
}

/// A product that was measured.
struct Measured {
    weight: String,
    tokens: usize,
    bits: u32,
    kernel: String,
    seconds: f64,
    /// Of the weight.
    bytes: usize,
    flops: f64,
    /// Seconds of the same by 16-bit weights.
    wide: f64,
}

impl Measured {
    fn row(&self, device: &str, ceilings: &Ceilings) -> Vec<String> {
        let moved = self.bytes as f64 / self.seconds / 1e9;
        let work = self.flops / self.seconds / 1e9;
        vec![
            device.to_owned(),
            self.weight.clone(),
            self.tokens.to_string(),
            self.bits.to_string(),
            self.kernel.clone(),
            format!("{:.1}", self.seconds * 1e6),
            format!("{moved:.2}"),
            format!("{:.0} %", 100.0 * moved / ceilings.copy),
            format!("{work:.2}"),
            format!("{:.0} %", 100.0 * work / ceilings.fma),
            format!("{:.2}", self.wide / self.seconds),
        ]
    }
}

pub async fn run(args: Args) -> Result<()> {
    let (bits, group) = (args.bits, args.group_size);
    if ![2, 3, 4, 8].contains(&bits) || group == 0 || !group.is_multiple_of(32) {
        return Err(Error::options(
            format!("codes of {bits} bits in groups of {group}"),
            "Use --bits 2, 3, 4 or 8 and a --group-size that is a multiple of 32",
        ));
    }
    let device = open::device(&args.device).await?;
    let before = ceilings(&device).await?;
    let mut measured = vec![];
    for shape in SHAPES {
        bench_shape(&device, shape, Some((bits, group)), &mut measured).await?;
    }
    bench_shape(&device, HEAD, None, &mut measured).await?;
    let wide = stack(&device, None).await?;
    for (bits, (bytes, seconds)) in [(16, wide), (bits, stack(&device, Some((bits, group))).await?)] {
        let weights = 30 * (576 * 960 + 576 * 576 + 3072 * 576 + 576 * 1536) + HEAD[0] * HEAD[1];
        measured.push(Measured {
            weight: "SmolLM2-135M".to_owned(),
            tokens: 1,
            bits,
            kernel: "all of a token's".to_owned(),
            seconds,
            bytes,
            flops: 2.0 * weights as f64,
            wide: wide.1,
        });
    }
    // The better of two, lest a pause of the machine makes the ceilings low.
    let after = ceilings(&device).await?;
    let ceilings = Ceilings { copy: before.copy.max(after.copy), fma: before.fma.max(after.fma) };
    let rows = measured.iter().map(|product| product.row(&device.describe(), &ceilings)).collect();
    if !args.json {
        say!(
            "{}: a copy moves {:.1} GB/s, multiplications and additions run at {:.1} GFLOP/s",
            device.describe(),
            ceilings.copy,
            ceilings.fma
        );
    }
    let header = [
        "device",
        "weight",
        "rows",
        "bits",
        "kernel",
        "µs",
        "GB/s",
        "of copy",
        "GFLOP/s",
        "of FMA",
        "times 16-bit",
    ];
    bench::show(args.json, &header, rows);
    Ok(())
}

async fn ceilings(device: &Device) -> Result<Ceilings> {
    const STEPS: usize = 512;
    let len = cycle_bytes(device) / 4;
    let x = Tensor::zeros(device, Elem::F32, &[len])?;
    let mut y = Tensor::zeros(device, Elem::F32, &[len])?;
    let copy = 8.0 * len as f64 / bench::best(device, || ceiling(&mut y, &x, 0)).await? / 1e9;
    let x = Tensor::zeros(device, Elem::F32, &[1 << 18])?;
    let mut y = Tensor::zeros(device, Elem::F32, &[1 << 18])?;
    let work = 2.0 * (STEPS << 18) as f64;
    let fma = work / bench::best(device, || ceiling(&mut y, &x, STEPS)).await? / 1e9;
    Ok(Ceilings { copy, fma })
}

fn cycle_bytes(device: &Device) -> usize {
    match device {
        Device::Gpu(gpu) if gpu.summary().software => SOFTWARE_CYCLE_BYTES,
        _ => CYCLE_BYTES,
    }
}

async fn bench_shape(
    device: &Device,
    [n, k]: [usize; 2],
    packed: Option<(u32, usize)>,
    measured: &mut Vec<Measured>,
) -> Result<()> {
    let mut kinds = vec![None];
    kinds.extend(packed.map(Some));
    let bytes = |kind: Option<(u32, usize)>| n * k * kind.map_or(16, |(bits, _)| bits as usize) / 8;
    let mut linears = vec![];
    for kind in kinds {
        let copies = (cycle_bytes(device) / bytes(kind)).clamp(1, 64);
        let copies: Result<Vec<Linear>> = (0..copies).map(|_| linear(device, n, k, kind)).collect();
        linears.push((kind, copies?));
    }
    for tokens in ROWS {
        // One kernel serves few rows; many are served by the one that the start-up measurement chose.
        let names: Vec<Option<usize>> = match device {
            Device::Gpu(gpu) if tokens > 4 && !gpu.summary().software => {
                (0..variants().len()).map(Some).collect()
            }
            _ => vec![None],
        };
        let x = bench::noise(device, &[tokens, k])?;
        let mut y = Tensor::zeros(device, Elem::F32, &[tokens, n])?;
        for variant in names {
            if let (Device::Gpu(gpu), Some(index)) = (device, variant) {
                force(gpu, index);
            }
            let mut wide = 0.0;
            for (kind, copies) in &linears {
                // A software adapter takes long: as many as show the same.
                let enough = (2e8 / (2.0 * (tokens * n * k) as f64)).max(1.0) as usize;
                let copies = &copies[..copies.len().min(enough)];
                let all = || copies.iter().try_for_each(|w| w.project(&mut y, Input::Plain(&x), false));
                let seconds = bench::best(device, all).await? / copies.len() as f64;
                if kind.is_none() {
                    wide = seconds;
                }
                let form = if tokens > 4 { "gemm" } else { "gemv" };
                let kernel = match (kind, variant) {
                    (Some(_), None) => format!("q{form}"),
                    (None, None) => form.to_owned(),
                    (Some(_), Some(index)) => format!("q{form} {}", variants()[index].name),
                    (None, Some(index)) => format!("{form} {}", variants()[index].name),
                };
                measured.push(Measured {
                    weight: format!("{n}x{k}"),
                    tokens,
                    bits: kind.map_or(16, |(bits, _)| bits),
                    kernel,
                    seconds,
                    bytes: copies[0].bytes() as usize,
                    flops: 2.0 * (tokens * n * k) as f64,
                    wide,
                });
            }
        }
    }
    Ok(())
}

/// Random bf16 weights, or random codes of some bits in groups.
fn linear(device: &Device, n: usize, k: usize, kind: Option<(u32, usize)>) -> Result<Linear> {
    let mut state = (n + k) as u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let Some((bits, group)) = kind else {
        // Between 1/2 and 2 in magnitude.
        let bytes: Vec<u8> =
            (0..n * k).flat_map(|_| ((next() & 0x80ff | 0x3f00) as u16).to_le_bytes()).collect();
        return Linear::new(vec![Tensor::from_bytes(device, Elem::BF16, &[n, k], &bytes)?], None);
    };
    let groups = k.div_ceil(group);
    let layer = GptqLinear {
        n,
        k,
        bits,
        codes: (0..n * k).map(|_| (next() & ((1 << bits) - 1)) as u8).collect(),
        scales: vec![0.015_625; groups * n],
        zeros: vec![1 << (bits - 1); groups * n],
        g_idx: natural_g_idx(k, group as i64)?,
        bias: None,
    };
    Linear::packed(&layer, device)
}

/// Bytes and seconds of the products of one token in SmolLM2-135M: 30 blocks, and the head in 16 bits
/// either way.
async fn stack(device: &Device, kind: Option<(u32, usize)>) -> Result<(usize, f64)> {
    const BLOCKS: usize = 30;
    let mut blocks = vec![];
    for _ in 0..BLOCKS {
        let one = |n, k| linear(device, n, k, kind);
        blocks.push([
            Linear::stacked(vec![one(576, 576)?, one(192, 576)?, one(192, 576)?])?,
            one(576, 576)?,
            Linear::stacked(vec![one(1536, 576)?, one(1536, 576)?])?,
            one(576, 1536)?,
        ]);
    }
    let head = linear(device, HEAD[0], HEAD[1], None)?;
    let bytes = blocks.iter().flatten().chain([&head]).map(|linear| linear.bytes() as usize).sum();
    let norm = bench::noise(device, &[576])?;
    let mut h = bench::noise(device, &[1, 576])?;
    let tensor = |n| Tensor::zeros(device, Elem::F32, &[1, n]);
    let (mut qkv, mut gate_up, mut logits) = (tensor(960)?, tensor(3072)?, tensor(HEAD[0])?);
    let mixed = bench::noise(device, &[1, 576])?;
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let since = Instant::now();
        for [q, o, g, d] in &blocks {
            q.project(&mut qkv, Input::RmsNorm { x: &h, weight: &norm, eps: 1e-5 }, false)?;
            o.project(&mut h, Input::Plain(&mixed), true)?;
            g.project(&mut gate_up, Input::RmsNorm { x: &h, weight: &norm, eps: 1e-5 }, false)?;
            d.project(&mut h, Input::SwiGlu(&gate_up), true)?;
        }
        head.project(&mut logits, Input::RmsNorm { x: &h, weight: &norm, eps: 1e-5 }, false)?;
        device.settle().await?;
        best = best.min(since.elapsed().as_secs_f64());
    }
    Ok((bytes, best))
}
