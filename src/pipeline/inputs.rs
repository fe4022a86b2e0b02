//! What a stage's inputs leave behind: the sums that its layers are quantized by, and the rows that are
//! held out of them.

use std::rc::Rc;

use crate::device::Device;
use crate::error::Result;
use crate::gptq::drift::Drift;
use crate::gptq::held::Held;
use crate::gptq::layer::Calibration;
use crate::kernels::columns::copy;
use crate::kernels::symmetric::SymmetricPanels;
use crate::tensor::Tensor;

pub(super) struct StageInputs {
    hessian: SymmetricPanels,
    drift: Option<Drift>,
    seen: Option<Tensor>,
    original: Option<Tensor>,
    /// 2 / the tokens that are summed up.
    scale: f32,
}

impl StageInputs {
    /// For inputs of `n` features, of which `tokens` are summed up; beside those of the original where it
    /// `drifts`.
    pub fn new(device: &Device, drifts: bool, n: usize, tokens: usize) -> Result<Self> {
        Ok(Self {
            hessian: SymmetricPanels::zeros(device, n)?,
            drift: if drifts { Some(Drift::zeros(device, n)?) } else { None },
            seen: None,
            original: None,
            scale: 2.0 / tokens.max(1) as f32,
        })
    }

    /// Takes a micro-batch [tokens, n]: what the quantized model `seen`, and what the `original` does where
    /// it goes along.
    pub fn take(&mut self, seen: &Tensor, original: Option<&Tensor>, held: bool) -> Result<()> {
        if held {
            let after = |rows: &Option<Tensor>, new: &Tensor| match rows {
                Some(rows) => rows.joined(new),
                None => copy(new),
            };
            self.seen = Some(after(&self.seen, seen)?);
            if let Some(original) = original {
                self.original = Some(after(&self.original, original)?);
            }
            return Ok(());
        }
        self.hessian.accumulate(seen, self.scale)?;
        if let (Some(drift), Some(original)) = (&mut self.drift, original) {
            drift.accumulate(original, seen, self.scale)?;
        }
        Ok(())
    }

    pub fn done(self) -> Calibration {
        let held = self.seen.map(|seen| Held { seen, original: self.original });
        Calibration { hessian: Rc::new(self.hessian), drift: self.drift, held }
    }
}
