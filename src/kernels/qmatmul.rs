//! Y = f(X)·Wᵀ (+ bias) for a weight of 2, 3, 4 or 8 bit codes, which are widened on their way into the
//! product: qgemv for few rows, as decoding has them, qgemm for many. Sums are f32.
//!
//! The weight is `scale[group]·(code − zero[group])`; see [`Packed`] for how it lies in memory.

use super::columns;
use super::gemm::{Target, values};
use super::gemv::{FEW, check};
use super::input::Input;
use super::matmul::{Product, Strided, Values, matmul};
use super::sums::Sums;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::Tensor;

pub(super) mod cpu;
mod gpu;
mod packed;
#[cfg(target_arch = "x86_64")]
mod vnni;

pub use gpu::KERNELS;
pub use packed::{Form, Packed};

/// y = input·wᵀ + bias, or y += … if `add`: the input [tokens, in], y f32 with `out` columns from where
/// the target starts.
///
/// # Errors
/// [`Error::Internal`] when shapes, element types or devices do not fit.
pub fn multiply(y: Target, input: Input, w: &Packed, bias: Option<&Tensor>, add: bool) -> Result<()> {
    let tokens = input.tokens();
    if input.features() != w.form.k {
        let x = input.source().shape();
        return Err(Error::Internal(format!("qmatmul: {x:?} by {}×{}", w.n, w.form.k)));
    }
    check(&y, &input, w.n, w.device(), bias)?;
    if tokens == 0 || w.n == 0 {
        return Ok(());
    }
    match w.device() {
        Device::Gpu(gpu) if tokens <= FEW => gpu::few_rows(gpu, y, input, w, bias, add),
        device => input.computed(|x| {
            let gathered = w.order.as_ref().map(|order| columns::gather(x, order)).transpose()?;
            let x = gathered.as_ref().unwrap_or(x);
            match device {
                Device::Gpu(gpu) => gpu::many_rows(gpu, y, x, w, bias, add),
                Device::Cpu => on_cpu(y, x, w, bias, add),
            }
        }),
    }
}

/// `x` [tokens, depth] has its columns in the order of the weight's slots.
fn on_cpu(y: Target, x: &Tensor, w: &Packed, bias: Option<&Tensor>, add: bool) -> Result<()> {
    let weight = cpu::Weight { words: w.words.u32s()?, grid: w.grid.u32s()?, form: w.form, zeros: w.zeros };
    let tokens = x.rows();
    if tokens <= FEW {
        let mut sums = Sums::new(w.n, tokens);
        cpu::few_rows(weight, x.f32s()?, tokens, &mut sums.values);
        return sums.store(y, bias, add);
    }
    let product = Product {
        m: tokens,
        n: w.n,
        k: w.form.depth,
        a: Strided { values: values(x, 0)?, row: x.cols(), col: 1 },
        b: Strided { values: Values::Packed(weight), row: 0, col: 0 },
        alpha: 1.0,
        beta: if add { 1.0 } else { 0.0 },
        bias: bias.map(Tensor::f32s).transpose()?,
        lower: false,
        parallel: true,
        rounded: false,
    };
    matmul(&mut y.tensor.f32s_mut()?[y.offset..], y.ld, product);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::GptqLinear;
    use crate::kernels::gemm::force;
    use crate::kernels::testing::{noise, relative_error, test_gpu};
    use crate::tensor::Elem;

    /// A layer of random codes, and how it differs from the usual.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct Layer {
        pub n: usize,
        pub k: usize,
        pub bits: u32,
        pub group: i64,
        /// Groups follow a permuted order.
        pub act_order: bool,
        pub sym: bool,
        /// Scales that f16 does not have.
        pub wide: bool,
    }

    impl Layer {
        pub fn new(n: usize, k: usize, bits: u32, group: i64) -> Self {
            Self { n, k, bits, group, act_order: false, sym: true, wide: false }
        }

        pub fn make(&self) -> GptqLinear {
            let Self { n, k, bits, .. } = *self;
            let levels = 1u32 << bits;
            let size = if self.group < 0 { k } else { self.group as usize };
            let groups = k.div_ceil(size);
            let whole = |count, seed, levels: u32| -> Vec<u8> {
                noise(count, seed).iter().map(|x| ((x + 1.0) * 0.5 * levels as f32) as u8).collect()
            };
            let scales = noise(groups * n, 2).into_iter().map(|x| {
                let x = 0.05 * (x + 1.5);
                if self.wide { x } else { half::f16::from_f32(x).to_f32() }
            });
            let mut g_idx: Vec<u32> = (0..k).map(|column| (column / size) as u32).collect();
            if self.act_order {
                // A permutation: 7 has no factor in common with any k here.
                let natural = g_idx.clone();
                (0..k).for_each(|column| g_idx[column * 7 % k] = natural[column]);
            }
            GptqLinear {
                n,
                k,
                bits,
                codes: whole(n * k, 1, levels),
                scales: scales.collect(),
                zeros: if self.sym {
                    vec![(levels / 2) as u8; groups * n]
                } else {
                    whole(groups * n, 3, levels)
                },
                g_idx,
                bias: None,
            }
        }
    }

    /// Widths, groups and sizes that are legal but odd.
    pub(super) fn layers() -> Vec<Layer> {
        let mut layers = vec![];
        for bits in [2, 3, 4, 8] {
            let base = Layer::new(72, 96, bits, 32);
            layers.extend([
                base,
                Layer { sym: false, ..base },
                Layer { act_order: true, ..base },
                Layer { act_order: true, sym: false, wide: true, n: 37, ..base },
                Layer { group: -1, sym: false, ..base },
                // The last group is shorter.
                Layer { k: 160, group: 64, ..base },
                Layer { n: 200, k: 64, group: 64, wide: true, ..base },
            ]);
        }
        layers.extend([
            // Groups that do not fill words.
            Layer { sym: false, ..Layer::new(40, 48, 4, 12) },
            Layer { sym: false, act_order: true, ..Layer::new(33, 64, 2, 8) },
            // More than one chunk of X in workgroup memory.
            Layer { sym: false, ..Layer::new(9, 4096, 4, 128) },
            Layer::new(520, 32, 4, 16),
        ]);
        layers
    }

    /// Some of them, enough for each path of the kernels: a GPU makes a pipeline for every kind.
    pub(super) fn kinds() -> Vec<Layer> {
        let odd = |bits| Layer { sym: false, act_order: true, wide: true, ..Layer::new(37, 96, bits, 32) };
        vec![
            Layer::new(72, 96, 2, 32),
            odd(2),
            Layer { sym: false, ..Layer::new(40, 160, 3, 64) },
            odd(3),
            Layer::new(520, 160, 4, 64),
            Layer { sym: false, ..Layer::new(72, 96, 4, -1) },
            Layer { sym: false, act_order: true, ..Layer::new(33, 48, 4, 12) },
            // More than one chunk of X in workgroup memory.
            Layer { sym: false, ..Layer::new(9, 4096, 4, 128) },
            Layer { sym: false, ..Layer::new(72, 96, 8, 32) },
            odd(8),
        ]
    }

    #[derive(Debug, Clone, Copy)]
    pub(super) enum Step {
        Plain,
        Norm,
        Gate,
    }

    /// What the product adds to an output [rows, n + 5] that is 0.25 everywhere, from column 3 on, in f64
    /// from widened weights.
    pub(super) fn expected(layer: &GptqLinear, step: Step, rows: usize, add: bool) -> Vec<f32> {
        let (w, k) = (layer.dequantize().unwrap(), layer.k);
        let x = noise(rows * source_cols(k, step), 4);
        let norm = noise(k, 5);
        let bias = noise(layer.n, 6);
        let ld = layer.n + 5;
        let mut y = vec![0.25; rows * ld];
        for row in 0..rows {
            let x: Vec<f64> = match step {
                Step::Plain => x[row * k..][..k].iter().map(|&x| f64::from(x)).collect(),
                Step::Norm => {
                    let x = &x[row * k..][..k];
                    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / k as f64;
                    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
                    x.iter().zip(&norm).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect()
                }
                Step::Gate => {
                    let (gate, up) = x[row * 2 * k..][..2 * k].split_at(k);
                    let silu = |x: f64| x / (1.0 + (-x).exp());
                    gate.iter().zip(up).map(|(&g, &u)| silu(f64::from(g)) * f64::from(u)).collect()
                }
            };
            for out in 0..layer.n {
                let sum: f64 = w[out * k..][..k].iter().zip(&x).map(|(&w, x)| f64::from(w) * x).sum();
                let old = if add { 0.25 } else { 0.0 };
                y[row * ld + 3 + out] = (old + sum + f64::from(bias[out])) as f32;
            }
        }
        y
    }

    const EPS: f32 = 1e-3;

    fn source_cols(k: usize, step: Step) -> usize {
        if matches!(step, Step::Gate) { 2 * k } else { k }
    }

    /// The same by `multiply`.
    pub(super) fn run(
        layer: &GptqLinear,
        step: Step,
        rows: usize,
        add: bool,
        device: &Device,
        multiply: impl Fn(Target, Input, &Packed, Option<&Tensor>, bool) -> Result<()>,
    ) -> Vec<f32> {
        let packed = Packed::new(layer, 0..layer.n, device).unwrap();
        let tensor = |shape: &[usize], seed| {
            Tensor::from_f32(device, shape, noise(shape.iter().product(), seed)).unwrap()
        };
        let x = tensor(&[rows, source_cols(layer.k, step)], 4);
        let norm = tensor(&[layer.k], 5);
        let bias = tensor(&[layer.n], 6);
        let ld = layer.n + 5;
        let mut y = Tensor::from_f32(device, &[rows, ld], vec![0.25; rows * ld]).unwrap();
        let input = match step {
            Step::Plain => Input::Plain(&x),
            Step::Norm => Input::RmsNorm { x: &x, weight: &norm, eps: EPS },
            Step::Gate => Input::SwiGlu(&x),
        };
        multiply(Target::at(&mut y, 0, 3), input, &packed, Some(&bias), add).unwrap();
        pollster::block_on(y.to_f32()).unwrap()
    }

    const STEPS: [Step; 3] = [Step::Plain, Step::Norm, Step::Gate];

    #[test]
    fn the_cpu_gives_what_widened_weights_give() {
        for (index, shape) in layers().into_iter().enumerate() {
            let layer = shape.make();
            for rows in [1, 2, 3, 4, 5, 13] {
                let (step, add) = (STEPS[(index + rows) % 3], rows % 2 == 0);
                let want = expected(&layer, step, rows, add);
                let error = relative_error(&run(&layer, step, rows, add, &Device::Cpu, multiply), &want);
                assert!(error < 3e-6, "{shape:?} {step:?} {rows}: {error}");
            }
        }
    }

    #[test]
    fn the_gpu_gives_what_widened_weights_give() {
        let Some(device) = test_gpu() else { return };
        for (index, shape) in kinds().into_iter().enumerate() {
            let layer = shape.make();
            for rows in [1 + index % 4, 5, 70] {
                let (step, add) = (STEPS[(index + rows) % 3], rows % 2 == 0);
                let want = expected(&layer, step, rows, add);
                let error = relative_error(&run(&layer, step, rows, add, &device, multiply), &want);
                assert!(error < 3e-6, "{shape:?} {step:?} {rows}: {error}");
            }
        }
    }

    #[test]
    fn the_tile_kernel_gives_what_the_register_kernel_gives() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        for shape in kinds().into_iter().step_by(3) {
            let layer = shape.make();
            let got = [0, 1].map(|variant| {
                force(gpu, variant);
                run(&layer, Step::Plain, 40, true, &device, multiply)
            });
            assert!(relative_error(&got[1], &got[0]) < 3e-6, "{shape:?}");
        }
    }

    #[test]
    fn products_in_many_dispatches_equal_those_in_one() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let layer = Layer { sym: false, ..Layer::new(300, 64, 4, 32) }.make();
        for rows in [2, 150] {
            gpu.set_submit_budget(1e9);
            let whole = run(&layer, Step::Plain, rows, true, &device, multiply);
            gpu.set_submit_budget(1.0);
            assert_eq!(run(&layer, Step::Plain, rows, true, &device, multiply), whole);
        }
    }

    #[test]
    fn joined_weights_give_their_outputs_side_by_side() {
        for device in [Some(Device::Cpu), test_gpu()].iter().flatten() {
            let first = Layer { act_order: true, ..Layer::new(64, 96, 4, 32) };
            let second = Layer { sym: false, n: 40, ..first };
            let x = Tensor::from_f32(device, &[3, 96], noise(3 * 96, 4)).unwrap();
            let product = |w: &Packed| {
                let mut y = Tensor::uninit(device, Elem::F32, &[3, w.n]).unwrap();
                multiply(Target::of(&mut y), Input::Plain(&x), w, None, false).unwrap();
                pollster::block_on(y.to_f32()).unwrap()
            };
            let packed = |layer: Layer| Packed::new(&layer.make(), 0..layer.n, device).unwrap();
            let (a, b) = (packed(first), packed(second));
            let want: Vec<f32> = product(&a)
                .chunks(64)
                .zip(product(&b).chunks(40))
                .flat_map(|(a, b)| [a, b].concat())
                .collect();
            assert!(a.joins(&b) && !b.joins(&a), "a tile must be full");
            assert!(!a.joins(&packed(Layer { act_order: false, ..second })));
            assert!(!a.joins(&packed(Layer { bits: 8, ..second })));
            assert!(relative_error(&product(&a.joined(&b).unwrap()), &want) < 1e-6);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let layer = Layer::new(40, 96, 4, 32).make();
        let packed = Packed::new(&layer, 0..40, &Device::Cpu).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, Elem::F32, &[2, 40]).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(&Device::Cpu, Elem::F32, shape).unwrap();
        let mut fits = |x: &Tensor, bias: &Tensor, col: usize| {
            multiply(Target::at(&mut y, 0, col), Input::Plain(x), &packed, Some(bias), false).is_ok()
        };
        assert!(fits(&zeros(&[2, 96]), &zeros(&[40]), 0));
        assert!(!fits(&zeros(&[2, 95]), &zeros(&[40]), 0));
        assert!(!fits(&zeros(&[2, 96]), &zeros(&[39]), 0));
        assert!(!fits(&zeros(&[2, 96]), &zeros(&[40]), 1));
        assert!(!fits(&zeros(&[3, 96]), &zeros(&[40]), 0));
        assert!(Packed::new(&layer, 0..41, &Device::Cpu).is_err());
        let broken = crate::checkpoint::GptqLinear { g_idx: vec![3; 96], ..layer };
        assert!(Packed::new(&broken, 0..40, &Device::Cpu).is_err());
    }
}
