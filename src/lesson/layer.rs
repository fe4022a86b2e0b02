//! A layer of a model and what its inputs are like: where the lessons on real layers get their numbers.
//!
//! The Hessian is that of the run's own steps (`pipeline/block.rs`): the calibration text goes through the blocks
//! before, the inputs of the layer's stage are summed up as (2/tokens)·XᵀX. But all weights are the original
//! ones, and tokens are few. Text that was not used for it, the evaluation text, makes a second Hessian: it
//! tells what a method's error is on text that it was not fitted to. Everything happens on the CPU device.

use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::columns::copy;
use crate::kernels::symmetric::{PANEL, SymmetricPanels};
use crate::model::arch::{EXPERT_STAGES, Stage, stages};
use crate::model::{Block, Embedding, Flow, LinearSpec, ModelConfig, Stored, linear_elem, linear_rows};
use crate::pipeline::stream::Batches;
use crate::tensor::Tensor;
use crate::text::{ModelText, SegmentOptions, TextFile, calibration_segments, evaluation_segments};

/// Tokens of a sample.
const SAMPLE: usize = 128;
/// Tokens of the text that nothing is fitted to, at most.
const HELD_OUT: usize = 1024;
/// Columns of a layer at most: its Hessian is factored many times.
const MOST_COLUMNS: usize = 4096;
/// Rows of a layer that are looked at.
const MOST_ROWS: usize = 256;
/// Hessians kept.
const KEPT: usize = 4;

/// Which layer of which model, calibrated with how much text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Place {
    /// The model that is open in the page, instead of the demo model.
    pub own: bool,
    pub tokens: usize,
    /// Its full name, such as `model.layers.0.mlp.down_proj`.
    pub module: String,
}

/// A linear layer to choose.
#[derive(Debug, Clone, Serialize)]
pub struct Listed {
    pub module: String,
    pub rows: usize,
    pub columns: usize,
    /// It is an expert's, which sees only the tokens that its router sends there.
    pub routed: bool,
}

/// The layers of a model.
#[derive(Debug, Clone, Serialize)]
pub struct Layers {
    pub model: String,
    pub layers: Vec<Listed>,
}

/// What the layers of one stage see.
pub struct Inputs {
    pub n: usize,
    /// Those that came to the stage, of an expert's fewer than the text has.
    pub tokens: usize,
    pub held_tokens: usize,
    /// (2/tokens)·XᵀX of the calibration text, as the quantizer takes it.
    pub hessian: Rc<SymmetricPanels>,
    /// The same as [n, n].
    pub dense: Tensor,
    /// That of text not used for calibration.
    pub held: Tensor,
    /// diag(H) of the calibration text.
    pub diagonal: Vec<f32>,
    /// mean |x_j| of the calibration text.
    pub magnitude: Vec<f32>,
}

/// A layer.
pub struct Layer {
    pub module: String,
    /// All of its rows.
    pub rows: usize,
    /// The first of them, f32 [up to 256, n].
    pub weight: Tensor,
    pub inputs: Rc<Inputs>,
}

/// A model with its texts.
pub struct Subject {
    name: String,
    stored: Rc<Stored>,
    config: ModelConfig,
    calibration: Batches,
    held: Batches,
    /// By block and stage, the last one used last.
    known: Vec<((usize, usize), Rc<Inputs>)>,
}

impl Subject {
    /// `calibration` and `evaluation` are the built-in texts.
    ///
    /// # Errors
    /// [`Error::Options`] for a model that is quantized already; those of text and tokenizer.
    pub fn new(
        name: &str,
        stored: Rc<Stored>,
        text: &ModelText,
        calibration: TextFile,
        evaluation: &TextFile,
        tokens: usize,
    ) -> Result<Self> {
        if stored.quant.is_some() {
            return Err(Error::options(
                format!("{name} is quantized already, so there is nothing left to round"),
                "Take the demo model, or open a model of 16 or 32 bits",
            ));
        }
        let config = ModelConfig::of(&stored.checkpoint)?;
        if !(SAMPLE..=16_384).contains(&tokens) {
            return Err(Error::options(format!("{tokens} tokens"), "Use 128 to 16384"));
        }
        let options = SegmentOptions { samples: Some(tokens / SAMPLE), seq_len: SAMPLE, seed: 0 };
        let calibration = calibration_segments(text, &[calibration], &options)?;
        let held = evaluation_segments(text, evaluation, SAMPLE, Some(HELD_OUT / SAMPLE))?;
        Ok(Self {
            name: name.to_owned(),
            stored,
            config,
            calibration: Batches::new(&calibration.rows, tokens, false),
            held: Batches::new(&held.rows, HELD_OUT, false),
            known: Vec::new(),
        })
    }

    /// The layers of its blocks.
    pub fn layers(name: &str, config: &ModelConfig) -> Layers {
        let stages = (0..config.layers).flat_map(|block| stages(config, block));
        let layers = stages.flat_map(|stage| {
            let routed = EXPERT_STAGES.contains(&stage.name);
            stage.linears.into_iter().map(move |spec| Listed {
                module: spec.module,
                rows: spec.out_features,
                columns: spec.in_features,
                routed,
            })
        });
        Layers { model: name.to_owned(), layers: layers.collect() }
    }

    /// A layer by its full name. `tell(done, all)` hears how far the text is on its way to it.
    ///
    /// # Errors
    /// [`Error::Options`] for a layer that is not there or too wide, or an expert to which no token comes; those
    /// of the source.
    pub async fn layer(
        &mut self,
        module: &str,
        tell: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Layer> {
        let mut found = None;
        for block in 0..self.config.layers {
            for (index, stage) in stages(&self.config, block).into_iter().enumerate() {
                if let Some(spec) = stage.linears.iter().find(|spec| spec.module == module) {
                    found = Some((block, index, spec.clone(), stage.clone()));
                }
            }
        }
        let Some((block, index, spec, stage)) = found else {
            return Err(Error::options(
                format!("{} has no layer {module}", self.name),
                "Choose one of those listed",
            ));
        };
        if spec.in_features > MOST_COLUMNS {
            return Err(Error::options(
                format!(
                    "{module} has {} columns; more than {MOST_COLUMNS} take too long here",
                    spec.in_features
                ),
                "Choose a narrower layer, or the demo model",
            ));
        }
        let weight = self.weight(&spec).await?;
        let inputs = self.inputs(block, index, &stage, tell).await?;
        Ok(Layer { module: spec.module, rows: spec.out_features, weight, inputs })
    }

    async fn weight(&self, spec: &LinearSpec) -> Result<Tensor> {
        let (n, rows) = (spec.in_features, spec.out_features.min(MOST_ROWS));
        let elem = linear_elem(self.stored.as_ref(), spec)?;
        let bytes = linear_rows(self.stored.as_ref(), spec, 0..rows).await?;
        let stored = Tensor::from_bytes(&Device::Cpu, elem, &[rows, n], &bytes)?;
        copy(&stored)
    }

    async fn inputs(
        &mut self,
        block: usize,
        index: usize,
        stage: &Stage,
        mut tell: impl AsyncFnMut(usize, usize) -> bool,
    ) -> Result<Rc<Inputs>> {
        let key = (block, index);
        if let Some(at) = self.known.iter().position(|(known, _)| *known == key) {
            let known = self.known.remove(at);
            let inputs = known.1.clone();
            self.known.push(known);
            return Ok(inputs);
        }
        let device = &Device::Cpu;
        let texts = [&self.calibration, &self.held];
        let longest = texts.map(Batches::longest).into_iter().max().unwrap_or(0);
        let rope = self.config.rope_tables(device, longest)?;
        let mut streams = Vec::new();
        for text in texts {
            let ids = (0..text.len()).flat_map(|batch| text.get(batch).ids.iter().copied());
            let ids = ids.collect::<Vec<_>>();
            let embedding = Embedding::load_rows(&self.config, self.stored.as_ref(), device, ids).await?;
            streams.push(text.embed(&embedding, device, true).await?);
        }
        for before in 0..block {
            let loaded = Block::load(&self.config, before, self.stored.as_ref(), device).await?;
            for (text, stream) in texts.iter().zip(&mut streams) {
                for batch in 0..text.len() {
                    let Some(hidden) = stream.take(batch)? else { continue };
                    let hidden = loaded.forward(hidden, text.get(batch).seq_len, &rope).await?;
                    stream.put(batch, hidden).await?;
                }
            }
            goes_on(tell(before + 1, block + 1).await)?;
        }
        let loaded = Block::load(&self.config, block, self.stored.as_ref(), device).await?;
        let n = stage.linears.first().map_or(0, |spec| spec.in_features);
        let mut sums = Vec::new();
        let mut tokens = [0; 2];
        let mut magnitude = vec![0f64; n];
        for (which, (text, stream)) in texts.iter().zip(&mut streams).enumerate() {
            let mut h = SymmetricPanels::zeros(device, n)?;
            for batch in 0..text.len() {
                let Some(hidden) = stream.take(batch)? else { continue };
                let mut flow = Flow::new(hidden);
                for at in 0..=index {
                    flow.inner = loaded.input(at, &mut flow, text.get(batch).seq_len, &rope).await?;
                }
                // An expert to which no token of these comes.
                let Some(x) = flow.inner else { continue };
                tokens[which] += x.rows();
                h.accumulate(&x, 2.0 / text.tokens() as f32)?;
                if which == 0 {
                    for row in x.f32s()?.chunks(n) {
                        magnitude.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(x.abs()));
                    }
                }
            }
            if tokens[which] == 0 {
                return Err(Error::options(
                    format!(
                        "no token of this text comes to {}",
                        stage.linears.first().map_or("it", |of| &of.module)
                    ),
                    "Take more tokens, or another expert",
                ));
            }
            // How many come to an expert is known only now.
            let share = text.tokens() as f32 / tokens[which] as f32;
            if share != 1.0 {
                for panel in &mut h.panels {
                    panel.f32s_mut()?.iter_mut().for_each(|sum| *sum *= share);
                }
            }
            sums.push(h);
        }
        goes_on(tell(block + 1, block + 1).await)?;
        let (Some(held), Some(hessian)) = (sums.pop(), sums.pop()) else {
            return Err(Error::Internal("a text without a Hessian".into()));
        };
        let diagonal = hessian.diagonal().await?;
        if let Some(column) = diagonal.iter().position(|d| !d.is_finite()) {
            return Err(Error::numeric(
                format!("block {block}, stage {}", stage.name),
                format!("the activations of input column {column} are not finite"),
                "The weights before it overflow in 32-bit arithmetic; check the model file",
            ));
        }
        let [tokens, held_tokens] = tokens;
        let inputs = Rc::new(Inputs {
            n,
            tokens,
            held_tokens,
            dense: dense(&hessian)?,
            held: dense(&held)?,
            hessian: Rc::new(hessian),
            diagonal,
            magnitude: magnitude.iter().map(|sum| (sum / tokens as f64) as f32).collect(),
        });
        if self.known.len() == KEPT {
            self.known.remove(0);
        }
        self.known.push((key, inputs.clone()));
        Ok(inputs)
    }
}

fn goes_on(on: bool) -> Result<()> {
    match on {
        true => Ok(()),
        false => Err(Error::Interrupted {
            place: "on the way to the layer".to_owned(),
            advice: "choose a layer to begin anew".to_owned(),
        }),
    }
}

/// All of a symmetric matrix, [n, n].
pub fn dense(h: &SymmetricPanels) -> Result<Tensor> {
    let n = h.n;
    let mut all = vec![0f32; n * n];
    for (p, panel) in h.panels.iter().enumerate() {
        let (start, width) = (p * PANEL, panel.cols());
        for (row, values) in panel.f32s()?.chunks(width).enumerate() {
            for (column, &value) in values.iter().enumerate().take(row + 1) {
                let (i, j) = (start + row, start + column);
                all[i * n + j] = value;
                all[j * n + i] = value;
            }
        }
    }
    Tensor::from_f32(&Device::Cpu, &[n, n], all)
}

/// The panels of a symmetric matrix [n, n].
pub fn panels(all: &[f32], n: usize) -> Result<SymmetricPanels> {
    let mut h = SymmetricPanels::zeros(&Device::Cpu, n)?;
    for (p, panel) in h.panels.iter_mut().enumerate() {
        let (start, width) = (p * PANEL, panel.cols());
        for (row, values) in panel.f32s_mut()?.chunks_mut(width).enumerate() {
            values.copy_from_slice(&all[(start + row) * n + start..][..width]);
        }
    }
    Ok(h)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::demo;

    /// A layer of the demo model.
    pub fn layer(module: &str, tokens: usize) -> Layer {
        pollster::block_on(async {
            let stored = Rc::new(Stored::open(Rc::new(demo::source())).await.unwrap());
            let text = ModelText::load(stored.checkpoint.source().as_ref(), 2048).await.unwrap();
            let (calibration, evaluation) = (demo::calibration(), demo::evaluation());
            let mut subject = Subject::new("demo", stored, &text, calibration, &evaluation, tokens).unwrap();
            subject.layer(module, async |_, _| true).await.unwrap()
        })
    }

    #[test]
    fn the_hessian_is_that_of_the_inputs() {
        for (module, n, rows) in
            [("model.layers.1.self_attn.q_proj", 256, 256), ("model.layers.0.mlp.down_proj", 768, 256)]
        {
            let layer = layer(module, 256);
            let inputs = &layer.inputs;
            assert_eq!((layer.weight.shape(), inputs.n, inputs.tokens), (&[rows, n][..], n, 256));
            assert_eq!(inputs.held_tokens, 1024);
            let h = inputs.dense.f32s().unwrap();
            for i in 0..n {
                assert_eq!(h[i * n + i], inputs.diagonal[i]);
                // H_jj/2 is the mean of x², which is not below the square of the mean of |x|.
                assert!(inputs.diagonal[i] / 2.0 >= inputs.magnitude[i].powi(2) * 0.999, "{module} {i}");
                for j in 0..i {
                    assert_eq!(h[i * n + j], h[j * n + i]);
                }
            }
            let again = panels(h, n).unwrap();
            assert_eq!(dense(&again).unwrap().f32s().unwrap(), h);
        }
    }
}
