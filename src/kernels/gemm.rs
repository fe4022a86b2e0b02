//! Matrix products: C = α·op(A)·op(B) + β·C (+ bias), with any leading dimension.
//!
//! Three of the four transpositions occur: rows × rows (`A·Bᵀ`, every linear layer and Cholesky),
//! plain (`A·B`, the sweep's compensation), columns × columns (`Aᵀ·B`, the Hessian). B may be a
//! weight as stored in a checkpoint, f16 or bf16; products and sums are f32.

use super::matmul::{Product, Strided, Values, matmul};
use super::pairs;
use crate::device::{Device, Gpu};
use crate::error::{Error, Result};
use crate::tensor::{Elem, Host, Tensor};

pub(super) mod gpu;
mod tuning;

/// A matrix inside a tensor: `rows × cols` as it takes part in the product, that is after
/// transposition.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub tensor: &'a Tensor,
    /// Elements before the first one.
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one stored row to the next.
    pub ld: usize,
    /// Stored as [cols, rows].
    pub transposed: bool,
}

impl<'a> Mat<'a> {
    /// The whole tensor, [rows, cols].
    pub fn of(tensor: &'a Tensor) -> Self {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        Self { tensor, offset: 0, rows, cols, ld: cols, transposed: false }
    }

    /// The part that starts at stored row `row` and column `col`, of stored size `rows × cols`.
    /// Call before [`Mat::t`].
    pub fn part(self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        debug_assert!(!self.transposed && row + rows <= self.rows && col + cols <= self.cols);
        Self { offset: self.offset + row * self.ld + col, rows, cols, ..self }
    }

    /// The transpose of this matrix.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    fn check(&self, name: &str) -> Result<()> {
        let (stored_rows, stored_cols) =
            if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) };
        let end = if stored_rows == 0 { 0 } else { self.offset + (stored_rows - 1) * self.ld + stored_cols };
        if stored_cols > self.ld || end > self.tensor.len() {
            return Err(Error::Internal(format!("gemm: {name} reaches past its tensor")));
        }
        Ok(())
    }
}

/// Where a product goes: rows `row..`, columns `col..` of a [rows, cols] tensor of f32.
pub struct Target<'a> {
    pub tensor: &'a mut Tensor,
    pub offset: usize,
    pub ld: usize,
}

impl<'a> Target<'a> {
    pub fn of(tensor: &'a mut Tensor) -> Self {
        let ld = tensor.cols();
        Self { tensor, offset: 0, ld }
    }

    pub fn at(tensor: &'a mut Tensor, row: usize, col: usize) -> Self {
        let ld = tensor.cols();
        Self { tensor, offset: row * ld + col, ld }
    }
}

/// What a product does to what is there.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scaling {
    pub alpha: f32,
    /// 0 overwrites (whatever was there), 1 adds.
    pub beta: f32,
}

impl Scaling {
    pub const SET: Self = Self { alpha: 1.0, beta: 0.0 };
    pub const ADD: Self = Self { alpha: 1.0, beta: 1.0 };
    pub const SUB: Self = Self { alpha: -1.0, beta: 1.0 };
}

/// C = α·A·B + β·C (+ bias on every row). A, C and the bias are f32; B is f32, f16 or bf16.
///
/// # Errors
/// [`Error::Internal`] when shapes, element types or devices do not fit.
pub fn gemm(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>) -> Result<()> {
    product(c, a, b, scaling, bias, Form::Whole)
}

/// The same, but where the device multiplies pairs of bf16 faster (see [`pairs`]), A and B, f32 or bf16, are
/// rounded to that. For what is only aimed at: no model's outputs are made of it.
///
/// # Errors
/// As [`gemm`].
pub fn gemm_rounded(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>) -> Result<()> {
    product(c, a, b, scaling, bias, Form::Rounded)
}

/// What a product may leave away.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Whole,
    /// Bits of its operands.
    Rounded,
    /// Outputs above the diagonal of C.
    Lower,
}

/// A panel of a Gram matrix, as the Hessian is stored: C = α·X[:, c0..]ᵀ·X[:, c0..c0+w] + β·C for
/// a panel [n − c0, w] and X [tokens, n]. What lies above the diagonal (row < column within the
/// panel) is unspecified, which saves half of a square panel's work.
///
/// # Errors
/// As [`gemm`].
pub fn syrk_panel(panel: &mut Tensor, x: &Tensor, c0: usize, scaling: Scaling) -> Result<()> {
    let (tokens, n, width) = (x.rows(), x.cols(), panel.cols());
    if c0 + width > n || panel.rows() != n - c0 {
        let (panel, x) = (panel.shape(), x.shape());
        return Err(Error::Internal(format!("syrk_panel: {panel:?} at column {c0} of {x:?}")));
    }
    let a = Mat::of(x).part(0, c0, tokens, n - c0).t();
    let b = Mat::of(x).part(0, c0, tokens, width);
    product(Target::of(panel), a, b, scaling, None, Form::Lower)
}

fn product(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>, form: Form) -> Result<()> {
    a.check("A")?;
    b.check("B")?;
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let c_end = if m == 0 { 0 } else { c.offset + (m - 1) * c.ld + n };
    if b.rows != k || n > c.ld || c_end > c.tensor.len() || bias.is_some_and(|bias| bias.len() != n) {
        return Err(Error::Internal(format!("gemm: {m}×{k} times {}×{n} does not fit", b.rows)));
    }
    let floats = [Some(a.tensor), Some(&*c.tensor), bias];
    if floats.iter().flatten().any(|tensor| tensor.elem() != Elem::F32)
        || !matches!(b.tensor.elem(), Elem::F32 | Elem::F16 | Elem::BF16)
    {
        return Err(Error::Internal("gemm: A, C and the bias must be f32, B floats".into()));
    }
    let device = c.tensor.device().clone();
    if ![Some(a.tensor), Some(b.tensor), bias].iter().flatten().all(|tensor| tensor.device().same(&device)) {
        return Err(Error::Internal("gemm: tensors of different devices".into()));
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    match device {
        Device::Cpu => cpu(c, a, b, scaling, bias, form),
        Device::Gpu(gpu) => gpu::gemm(&gpu, c, a, b, scaling, bias, form == Form::Lower),
    }
}

/// Y = X·Wᵀ (+ bias), the linear layer: X [tokens, in], W [out, in] → Y [tokens, out].
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut y = Tensor::uninit(x.device(), Elem::F32, &[x.rows(), weight.rows()])?;
    gemm(Target::of(&mut y), Mat::of(x), Mat::of(weight).t(), Scaling::SET, bias)?;
    Ok(y)
}

pub use gpu::{KERNELS, Variant};
pub use tuning::tune;

/// The kernels among which [`tune`] chooses.
pub fn variants() -> &'static [Variant] {
    gpu::VARIANTS
}

/// Makes `gpu` use one of [`variants`] from here on.
pub fn force(gpu: &Gpu, index: usize) {
    gpu.set_tuned(CHOICE, index as u32);
}

/// The name under which [`Gpu::tuned`](crate::device::Gpu::tuned) keeps the chosen variant.
const CHOICE: &str = "gemm";

fn cpu(c: Target, a: Mat, b: Mat, scaling: Scaling, bias: Option<&Tensor>, form: Form) -> Result<()> {
    let product = Product {
        m: a.rows,
        n: b.cols,
        k: a.cols,
        a: strided(a)?,
        b: strided(b)?,
        alpha: scaling.alpha,
        beta: scaling.beta,
        bias: bias.map(Tensor::f32s).transpose()?,
        lower: form == Form::Lower,
        parallel: true,
        rounded: form == Form::Rounded && pairs::faster(),
    };
    matmul(&mut c.tensor.f32s_mut()?[c.offset..], c.ld, product);
    Ok(())
}

// A matrix without rows may lie at the end of its tensor and beyond.
fn strided<'a>(mat: Mat<'a>) -> Result<Strided<'a>> {
    let (row, col) = if mat.transposed { (1, mat.ld) } else { (mat.ld, 1) };
    Ok(Strided { values: values(mat.tensor, mat.offset)?, row, col })
}

/// The elements of a host tensor of floats from `offset` on.
pub(super) fn values(tensor: &Tensor, offset: usize) -> Result<Values<'_>> {
    Ok(match tensor.host_data()? {
        Host::F32(v) => Values::F32(v.get(offset..).unwrap_or_default()),
        Host::F16(v) => Values::F16(v.get(offset..).unwrap_or_default()),
        Host::BF16(v) => Values::BF16(v.get(offset..).unwrap_or_default()),
        Host::U32(_) | Host::U8(_) => return Err(Error::Internal("gemm: operands must be floats".into())),
    })
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::testing::{noise, relative_error, test_gpu};

    fn naive(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f32> {
        let mut c = vec![0f32; m * n];
        for i in 0..m {
            for j in 0..n {
                c[i * n + j] =
                    (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j])).sum::<f64>() as f32;
            }
        }
        c
    }

    fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols).map(|i| x[(i % rows) * cols + i / rows]).collect()
    }

    #[test]
    fn the_cpu_twin_agrees_with_the_definition_in_every_transposition() {
        let (m, n, k) = (13, 20, 24);
        let (a, b) = (noise(m * k, 1), noise(k * n, 2));
        let want = naive(&a, &b, m, n, k);
        for (ta, tb) in [(false, false), (false, true), (true, false)] {
            let stored_a = if ta { transpose(&a, m, k) } else { a.clone() };
            let stored_b = if tb { transpose(&b, k, n) } else { b.clone() };
            let shape = |t, r, c| if t { [c, r] } else { [r, c] };
            let a = Tensor::from_f32(&Device::Cpu, &shape(ta, m, k), stored_a).unwrap();
            let b = Tensor::from_f32(&Device::Cpu, &shape(tb, k, n), stored_b).unwrap();
            let (a, b) = (Mat::of(&a), Mat::of(&b));
            let (a, b) = (if ta { a.t() } else { a }, if tb { b.t() } else { b });
            let mut c = Tensor::zeros(&Device::Cpu, Elem::F32, &[m, n]).unwrap();
            gemm(Target::of(&mut c), a, b, Scaling::SET, None).unwrap();
            assert!(relative_error(c.f32s().unwrap(), &want) < 1e-6);
            gemm(Target::of(&mut c), a, b, Scaling::SUB, None).unwrap();
            assert!(c.f32s().unwrap().iter().all(|x| x.abs() < 1e-5));
        }
    }

    /// A product somewhere inside larger tensors.
    #[derive(Debug, Clone, Copy)]
    struct Case {
        m: usize,
        n: usize,
        k: usize,
        /// Rows and columns of each tensor around its matrix.
        margin: (usize, usize),
        elem: Elem,
        scaling: Scaling,
        bias: bool,
    }

    impl Case {
        fn new(m: usize, n: usize, k: usize) -> Self {
            Self { m, n, k, margin: (0, 0), elem: Elem::F32, scaling: Scaling::SET, bias: false }
        }

        /// The whole tensor around C after the product, so that stray writes show.
        fn run(&self, device: &Device, ta: bool, tb: bool) -> Vec<f32> {
            let Self { m, n, k, margin, .. } = *self;
            let tensor = |elem, rows: usize, cols: usize, seed| {
                let shape = [rows + 2 * margin.0, cols + 2 * margin.1];
                let values = noise(shape[0] * shape[1], seed);
                let bytes = match elem {
                    Elem::F16 => {
                        bytemuck::cast_slice(&values.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>())
                            .to_vec()
                    }
                    Elem::BF16 => {
                        bytemuck::cast_slice(&values.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>())
                            .to_vec()
                    }
                    _ => bytemuck::cast_slice(&values).to_vec(),
                };
                Tensor::from_bytes(device, elem, &shape, &bytes).unwrap()
            };
            let swap = |t, rows, cols| if t { (cols, rows) } else { (rows, cols) };
            let (a_shape, b_shape) = (swap(ta, m, k), swap(tb, k, n));
            let a = tensor(Elem::F32, a_shape.0, a_shape.1, 1);
            let b = tensor(self.elem, b_shape.0, b_shape.1, 2);
            let mut c = tensor(Elem::F32, m, n, 3);
            let bias = Tensor::from_f32(device, &[n], noise(n, 4)).unwrap();
            let a = Mat::of(&a).part(margin.0, margin.1, a_shape.0, a_shape.1);
            let b = Mat::of(&b).part(margin.0, margin.1, b_shape.0, b_shape.1);
            let (a, b) = (if ta { a.t() } else { a }, if tb { b.t() } else { b });
            let target = Target::at(&mut c, margin.0, margin.1);
            gemm(target, a, b, self.scaling, self.bias.then_some(&bias)).unwrap();
            pollster::block_on(c.to_f32()).unwrap()
        }
    }

    fn cases() -> Vec<Case> {
        let mut cases: Vec<Case> = [
            (1, 1, 1),
            (1, 64, 64),
            (13, 20, 24),
            (64, 64, 64),
            (65, 68, 17),
            (33, 7, 30),
            (70, 130, 96),
            (129, 4, 3),
            (300, 12, 8),
        ]
        .into_iter()
        .map(|(m, n, k)| Case::new(m, n, k))
        .collect();
        let scaling = Scaling { alpha: -0.5, beta: 0.25 };
        for elem in [Elem::F16, Elem::BF16] {
            cases.push(Case { elem, ..Case::new(20, 72, 40) });
            cases.push(Case { elem, margin: (3, 4), ..Case::new(20, 76, 36) });
            cases.push(Case { elem, margin: (1, 3), ..Case::new(5, 9, 11) });
        }
        cases.push(Case { margin: (5, 8), scaling, bias: true, ..Case::new(66, 131, 47) });
        cases.push(Case { margin: (1, 1), scaling: Scaling::SUB, ..Case::new(66, 40, 12) });
        cases.push(Case { bias: true, ..Case::new(40, 36, 12) });
        cases.push(Case { scaling: Scaling::ADD, margin: (0, 4), ..Case::new(31, 64, 0) });
        cases.push(Case { margin: (0, 4), ..Case::new(31, 64, 0) });
        cases
    }

    fn compare(device: &Device, variant: usize, case: Case, ta: bool, tb: bool) {
        let Device::Gpu(gpu) = device else { return };
        force(gpu, variant);
        let error = relative_error(&case.run(device, ta, tb), &case.run(&Device::Cpu, ta, tb));
        assert!(error < 1e-5, "{} {ta} {tb} {case:?}: {error}", variants()[variant].name);
    }

    #[test]
    fn the_register_kernel_and_the_unaligned_one_agree_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        for case in cases() {
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                compare(&device, 0, case, ta, tb);
            }
        }
    }

    /// Fewer transpositions than above: a software adapter takes seconds to compile each.
    #[test]
    fn the_tile_kernel_agrees_with_the_cpu_twin() {
        let Some(device) = test_gpu() else { return };
        for case in cases() {
            match case.elem {
                Elem::F32 => compare(&device, 1, case, true, false),
                Elem::BF16 => compare(&device, 2, case, false, true),
                _ => {}
            }
        }
    }

    #[test]
    fn a_product_of_many_dispatches_equals_that_of_one() {
        let Some(device) = test_gpu() else { return };
        let Device::Gpu(gpu) = &device else { return };
        let case = Case { margin: (2, 4), bias: true, ..Case::new(200, 150, 40) };
        let whole = case.run(&device, false, true);
        gpu.set_submit_budget(2.0 * 64.0 * 64.0 * 40.0);
        assert_eq!(case.run(&device, false, true), whole);
        // More workgroups than one dimension of a dispatch may have.
        let tall = Case::new(32 * 65_536 + 5, 1, 1);
        gpu.set_submit_budget(1e12);
        assert!(relative_error(&tall.run(&device, false, true), &tall.run(&Device::Cpu, false, true)) < 1e-5);
    }

    #[test]
    fn a_panel_of_the_gram_matrix_is_right_on_and_below_its_diagonal() {
        let (tokens, n, c0, width) = (37, 200, 64, 72);
        let x = noise(tokens * n, 5);
        let want = |row: usize, col: usize| {
            let sum: f32 = (0..tokens).map(|t| x[t * n + c0 + row] * x[t * n + c0 + col]).sum();
            0.5 * sum + 2.0
        };
        for device in [Some(Device::Cpu), test_gpu()].into_iter().flatten() {
            let x = Tensor::from_f32(&device, &[tokens, n], x.clone()).unwrap();
            let rows = n - c0;
            let mut panel = Tensor::from_f32(&device, &[rows, width], vec![2.0; rows * width]).unwrap();
            syrk_panel(&mut panel, &x, c0, Scaling { alpha: 0.5, beta: 1.0 }).unwrap();
            let got = pollster::block_on(panel.to_f32()).unwrap();
            for row in 0..rows {
                for col in 0..width.min(row + 1) {
                    let (got, want) = (got[row * width + col], want(row, col));
                    assert!((got - want).abs() < 1e-5, "{}: {row}, {col}: {got} {want}", device.describe());
                }
            }
            assert!(syrk_panel(&mut panel, &x, c0 + 4, Scaling::ADD).is_err());
        }
    }

    /// With β = 0 what was in C does not matter, not even NaN.
    #[test]
    fn an_overwritten_output_may_hold_nan_before() {
        for device in [Some(Device::Cpu), test_gpu()].into_iter().flatten() {
            let a = Tensor::from_f32(&device, &[8, 8], noise(64, 1)).unwrap();
            let bias = Tensor::from_f32(&device, &[8], noise(8, 2)).unwrap();
            for bias in [None, Some(&bias)] {
                let mut c = Tensor::from_f32(&device, &[8, 8], vec![f32::NAN; 64]).unwrap();
                gemm(Target::of(&mut c), Mat::of(&a), Mat::of(&a), Scaling::SET, bias).unwrap();
                assert!(pollster::block_on(c.to_f32()).unwrap().iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let a = Tensor::zeros(&Device::Cpu, Elem::F32, &[4, 6]).unwrap();
        let half = Tensor::zeros(&Device::Cpu, Elem::F16, &[4, 6]).unwrap();
        let mut c = Tensor::zeros(&Device::Cpu, Elem::F32, &[4, 4]).unwrap();
        let mut refused = |a, b, bias| gemm(Target::of(&mut c), a, b, Scaling::SET, bias).is_err();
        assert!(refused(Mat::of(&a), Mat::of(&a), None));
        assert!(refused(Mat::of(&half), Mat::of(&a).t(), None));
        assert!(refused(Mat::of(&a), Mat::of(&a).t(), Some(&a)));
        assert!(refused(Mat { offset: 1, ..Mat::of(&a) }, Mat::of(&a).t(), None));
        assert!(!refused(Mat::of(&a), Mat::of(&half).t(), None));
    }

    /// Not a check but a measurement: `cargo test --lib speeds_of_gemm -- --ignored --nocapture`.
    #[test]
    #[ignore = "prints speeds"]
    fn speeds_of_gemm() {
        let time = |device: &Device, (m, n, k): (usize, usize, usize), ta: bool, tb: bool, elem: Elem| {
            let shape = |t, r, c| if t { [c, r] } else { [r, c] };
            let a = Tensor::from_f32(device, &shape(ta, m, k), noise(m * k, 1)).unwrap();
            let zeros = vec![0; n * k * elem.bytes()];
            let b = Tensor::from_bytes(device, elem, &shape(tb, k, n), &zeros).unwrap();
            let mut c = Tensor::zeros(device, Elem::F32, &[m, n]).unwrap();
            let mut best = f64::INFINITY;
            for _ in 0..4 {
                let start = std::time::Instant::now();
                let (a, b) = (Mat::of(&a), Mat::of(&b));
                let (a, b) = (if ta { a.t() } else { a }, if tb { b.t() } else { b });
                gemm(Target::of(&mut c), a, b, Scaling::SET, None).unwrap();
                pollster::block_on(device.settle()).unwrap();
                best = best.min(start.elapsed().as_secs_f64());
            }
            2.0 * (m * n * k) as f64 / best / 1e9
        };
        let forms = [("NT", false, true), ("NN", false, false), ("TN", true, false)];
        if let Some(device) = test_gpu() {
            let Device::Gpu(gpu) = &device else { return };
            for (index, variant) in variants().iter().enumerate() {
                force(gpu, index);
                for (form, ta, tb) in forms {
                    for elem in [Elem::F32, Elem::BF16] {
                        let speed = time(&device, (512, 512, 512), ta, tb, elem);
                        println!(
                            "{} {} {form} {elem:?} 512³: {speed:.1} GFLOP/s",
                            device.describe(),
                            variant.name
                        );
                    }
                }
            }
        }
        for (m, n, k) in [(512, 1536, 576), (2048, 2048, 2048), (1536, 512, 2048)] {
            for (form, ta, tb) in forms {
                let speed = time(&Device::Cpu, (m, n, k), ta, tb, Elem::F32);
                println!("cpu {form} {m}×{n}×{k}: {speed:.1} GFLOP/s");
            }
        }
    }
}
