//! A dense model whose linear layers see divided inputs, without a copy of it: tensors are changed as they are
//! read.

use std::collections::HashMap;
use std::ops::Range;

use super::arch::{LinearSpec, weight};
use super::config::ModelConfig;
use super::fold::{Fold, Into};
use super::norm::NormKind;
use super::weights::{Weights, check, linear_elem, linear_rows, load_f32};
use crate::checkpoint::{DType, floats};
use crate::error::{Error, Result};
use crate::storage::LocalFuture;
use crate::tensor::Elem;

/// Weights with some [`Fold`]s made.
pub struct Folded<'a> {
    from: &'a dyn Weights,
    /// Small tensors as they are now. Norms and routers have their source's type, so that they can be stored; biases
    /// of linear layers are f32.
    changed: HashMap<String, (Elem, Vec<u8>)>,
    /// Of weights of linear layers, by name.
    factors: HashMap<String, Factors>,
}

/// What a weight is multiplied by, by rows and by columns as it is stored.
#[derive(Default)]
struct Factors {
    rows: Option<Vec<f32>>,
    columns: Option<Vec<f32>>,
}

impl<'a> Folded<'a> {
    /// Nothing folded yet.
    pub fn new(from: &'a dyn Weights) -> Self {
        Self { from, changed: HashMap::new(), factors: HashMap::new() }
    }

    /// The bytes of a norm or a router that is not as in the source, in the source's type.
    pub fn stored(&self, name: &str) -> Option<&[u8]> {
        self.changed.get(name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The factors that `fold` can make of those wished for: a norm keeps its type, and what is left of a factor
    /// behind rounding there is what the layers can make up for. `wished` are positive.
    ///
    /// # Errors
    /// As [`Folded::divide`].
    pub async fn effective(&self, config: &ModelConfig, fold: &Fold, wished: &[f32]) -> Result<Vec<f32>> {
        let Into::Norm { name, .. } = &fold.into else { return Ok(wished.to_vec()) };
        let (elem, values) = self.small(&weight(name), wished.len()).await?;
        let divided = divided_norm(config, elem, &values, wished);
        Ok(divided.into_iter().map(|(_, factor)| factor).collect())
    }

    /// Divides the inputs of `fold` by `s`, as [`Folded::effective`] gave them; `readers` are the layers of its
    /// stages. Each fold is made once.
    ///
    /// # Errors
    /// [`Error::Internal`] for factors that do not fit; those of the source.
    pub async fn divide(
        &mut self,
        config: &ModelConfig,
        fold: &Fold,
        readers: &[&LinearSpec],
        s: &[f32],
    ) -> Result<()> {
        if readers.iter().any(|reader| reader.in_features != s.len())
            || s.iter().any(|s| !(*s > 0.0 && s.is_finite()))
        {
            return Err(Error::Internal(format!("{} factors for {:?}", s.len(), fold.into)));
        }
        for reader in readers {
            self.multiply(reader, None, Some(s.to_vec()))?;
        }
        match &fold.into {
            Into::Norm { name, readers: routers } => {
                self.divide_norm(config, name, readers, s).await?;
                for router in routers {
                    self.multiply_router(&weight(router), s).await?;
                }
                Ok(())
            }
            Into::Rows { layer, rows, .. } => {
                let mut factors = vec![None; layer.out_features];
                for (&row, s) in rows.iter().zip(s) {
                    let factor = 1.0 / s;
                    if factors.get(row).is_none_or(|found| found.is_some_and(|found| found != factor)) {
                        return Err(Error::Internal(format!("{}: row {row} has two factors", layer.module)));
                    }
                    factors[row] = Some(factor);
                }
                let factors: Vec<f32> = factors.into_iter().map(|factor| factor.unwrap_or(1.0)).collect();
                if layer.bias {
                    let bias = self.bias(layer).await?;
                    let bias: Vec<f32> = bias.iter().zip(&factors).map(|(b, f)| b * f).collect();
                    self.set_bias(layer, &bias)?;
                }
                self.multiply(layer, Some(factors), None)
            }
        }
    }

    /// A norm's weight divided, and its bias where it has one. What the bias loses by rounding goes into the biases of
    /// the layers behind it, as far as these have one.
    async fn divide_norm(
        &mut self,
        config: &ModelConfig,
        name: &str,
        readers: &[&LinearSpec],
        s: &[f32],
    ) -> Result<()> {
        let (elem, values) = self.small(&weight(name), s.len()).await?;
        let divided: Vec<f32> =
            divided_norm(config, elem, &values, s).into_iter().map(|(value, _)| value).collect();
        self.set(weight(name), elem, &divided)?;
        if config.norm != NormKind::Layer {
            return Ok(());
        }
        let bias = format!("{name}.bias");
        let (elem, values) = self.small(&bias, s.len()).await?;
        let exact: Vec<f32> = values.iter().zip(s).map(|(b, s)| b / s).collect();
        let stored: Vec<f32> = exact.iter().map(|&b| floats::round_to(dtype(elem), b)).collect();
        let too_much: Vec<f32> = stored.iter().zip(&exact).map(|(stored, exact)| stored - exact).collect();
        self.set(bias, elem, &stored)?;
        if too_much.iter().all(|&x| x == 0.0) {
            return Ok(());
        }
        for reader in readers.iter().filter(|reader| reader.bias) {
            let mut bias = self.bias(reader).await?;
            let step = (PIECE / reader.in_features.max(1)).max(1);
            for start in (0..reader.out_features).step_by(step) {
                let end = reader.out_features.min(start + step);
                let elem = linear_elem(self, reader)?;
                let bytes = linear_rows(self, reader, start..end).await?;
                let rows = read(elem, &bytes);
                for (bias, row) in bias[start..end].iter_mut().zip(rows.chunks(reader.in_features)) {
                    let shift: f64 =
                        row.iter().zip(&too_much).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    *bias -= shift as f32;
                }
            }
            self.set_bias(reader, &bias)?;
        }
        Ok(())
    }

    /// The columns of a router or gate, rounded to its type.
    async fn multiply_router(&mut self, name: &str, s: &[f32]) -> Result<()> {
        let Some((elem, shape)) = self.info(name)? else {
            return Err(Error::Internal(format!("{name} is not there")));
        };
        if shape.len() != 2 || shape[1] != s.len() {
            return Err(Error::Internal(format!("{name} is {shape:?} for {} factors", s.len())));
        }
        let bytes = self.read_rows(name, 0..shape[0]).await?;
        let values: Vec<f32> = read(elem, &bytes)
            .chunks(s.len())
            .flat_map(|row| {
                row.iter().zip(s).map(|(w, s)| floats::round_to(dtype(elem), w * s)).collect::<Vec<_>>()
            })
            .collect();
        self.set(name.to_owned(), elem, &values)
    }

    /// Factors of a linear layer's outputs and inputs, beside those it has.
    fn multiply(
        &mut self,
        spec: &LinearSpec,
        outputs: Option<Vec<f32>>,
        inputs: Option<Vec<f32>>,
    ) -> Result<()> {
        let factors = self.factors.entry(weight(&spec.module)).or_default();
        let (rows, columns) = match spec.transposed {
            true => (inputs, outputs),
            false => (outputs, inputs),
        };
        for (mine, new) in [(&mut factors.rows, rows), (&mut factors.columns, columns)] {
            if mine.is_some() && new.is_some() {
                return Err(Error::Internal(format!("{} is folded twice", spec.module)));
            }
            *mine = mine.take().or(new);
        }
        Ok(())
    }

    async fn bias(&self, spec: &LinearSpec) -> Result<Vec<f32>> {
        load_f32(self, &format!("{}.bias", spec.module), &[spec.out_features]).await
    }

    fn set_bias(&mut self, spec: &LinearSpec, values: &[f32]) -> Result<()> {
        self.set(format!("{}.bias", spec.module), Elem::F32, values)
    }

    fn set(&mut self, name: String, elem: Elem, values: &[f32]) -> Result<()> {
        if let Some(at) = values.iter().position(|x| !x.is_finite()) {
            return Err(Error::numeric(
                name,
                format!("with factors folded into it number {at} is beyond what its type holds"),
                "Quantize this model without scaling of inputs",
            ));
        }
        let bytes = floats::exact_bytes(&name, dtype(elem), values)?;
        self.changed.insert(name, (elem, bytes));
        Ok(())
    }

    /// A vector with the type it is stored in.
    async fn small(&self, name: &str, len: usize) -> Result<(Elem, Vec<f32>)> {
        Ok((check(self, name, &[len])?, load_f32(self, name, &[len]).await?))
    }
}

/// Floats of a weight that are read at once.
const PIECE: usize = 1 << 22;

impl Weights for Folded<'_> {
    fn info(&self, name: &str) -> Result<Option<(Elem, Vec<usize>)>> {
        let info = self.from.info(name)?;
        Ok(info.map(|(elem, shape)| match (self.changed.get(name), self.factors.contains_key(name)) {
            (Some((elem, _)), _) => (*elem, shape),
            (None, true) => (Elem::F32, shape),
            (None, false) => (elem, shape),
        }))
    }

    fn read_rows<'a>(&'a self, name: &'a str, rows: Range<usize>) -> LocalFuture<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let Some((elem, shape)) = self.from.info(name)? else {
                return Err(Error::Internal(format!("{name} is not there")));
            };
            let width: usize = shape[1..].iter().product();
            if let Some((elem, bytes)) = self.changed.get(name) {
                let row = width * elem.bytes();
                return Ok(bytes[rows.start * row..rows.end * row].to_vec());
            }
            let bytes = self.from.read_rows(name, rows.clone()).await?;
            let Some(factors) = self.factors.get(name) else { return Ok(bytes) };
            let mut values = read(elem, &bytes);
            for (row, values) in rows.zip(values.chunks_mut(width.max(1))) {
                let own = factors.rows.as_ref().map_or(1.0, |factors| factors[row]);
                match &factors.columns {
                    Some(columns) => values.iter_mut().zip(columns).for_each(|(w, c)| *w *= own * c),
                    None => values.iter_mut().for_each(|w| *w *= own),
                }
            }
            Ok(values.iter().flat_map(|w| w.to_le_bytes()).collect())
        })
    }
}

/// A norm's weight divided by `wished`, rounded to `elem`, each with the factor that it was divided by in truth. Where there
/// is none, it stays.
fn divided_norm(config: &ModelConfig, elem: Elem, values: &[f32], wished: &[f32]) -> Vec<(f32, f32)> {
    let plus = if config.norm == NormKind::RmsPlusOne { 1.0 } else { 0.0 };
    let of = |(&value, &wished): (&f32, &f32)| {
        let before = value + plus;
        let divided = floats::round_to(dtype(elem), before / wished - plus);
        let factor = before / (divided + plus);
        match factor.is_finite() && factor > 0.0 && (divided + plus).is_normal() {
            true => (divided, factor),
            false => (value, 1.0),
        }
    };
    values.iter().zip(wished).map(of).collect()
}

fn dtype(elem: Elem) -> DType {
    match elem {
        Elem::F16 => DType::F16,
        Elem::BF16 => DType::BF16,
        Elem::F32 | Elem::U32 | Elem::U8 => DType::F32,
    }
}

fn read(elem: Elem, bytes: &[u8]) -> Vec<f32> {
    floats::to_f32(dtype(elem), bytes).unwrap_or_default()
}
