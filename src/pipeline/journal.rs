//! What a stopped run needs to go on.
//!
//! At the start and after each block the journal is written anew, under another name first and then renamed, so it is
//! always whole. It names everything that the result depends on; a run that differs in any of it is
//! refused by name. Activations are not kept: they are made again by applying the finished blocks,
//! read back from the output, to the calibration text, which gives the same bits.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::report::ModuleRow;
use super::select::{Output, Override};
use crate::checkpoint::Layout;
use crate::error::{Error, Result};
use crate::face;
use crate::gptq::scheme::{Alpha, Scheme};
use crate::model::ModelConfig;
use crate::storage::Sink;

/// The journal's file name; it is removed when the run is finished.
pub const JOURNAL: &str = "halftone-journal.json";

/// What a run is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Halftone's version: another one may round differently.
    pub version: String,
    /// [`Checkpoint::sampled_fingerprint`](crate::checkpoint::Checkpoint::sampled_fingerprint).
    pub source: String,
    /// How the calibration text was chosen, as [`RunOptions`](super::RunOptions) says.
    pub calibration: String,
    /// The calibration tokens' hash.
    pub text: String,
    pub scheme: Scheme,
    pub output: Output,
    /// Files that the weights are distributed over.
    pub shards: usize,
    pub device: String,
    pub batch_tokens: usize,
}

/// A run between two blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Journal {
    pub inputs: Inputs,
    pub blocks_done: usize,
    /// XXH3 of each tensor written, to compare with when all is.
    pub sums: Vec<u64>,
    /// Of work so far, over all sittings.
    pub seconds: f64,
    /// Modules whose g_idx is not the natural one.
    pub act_ordered: Vec<String>,
    pub modules: Vec<ModuleRow>,
    pub warnings: Vec<String>,
}

impl Journal {
    /// The journal in `sink`, `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Resume`] when it cannot be read.
    pub async fn read(sink: &dyn Sink) -> Result<Option<Self>> {
        let Some(bytes) = sink.read_back(JOURNAL).await? else { return Ok(None) };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            Error::resume(
                format!("{JOURNAL} in {} cannot be read ({error})", sink.describe()),
                face::START_ANEW,
            )
        })
    }

    pub async fn write(&self, sink: &dyn Sink) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        let new = format!("{JOURNAL}.new");
        let mut file = sink.open(&new, 0).await?;
        file.write(&text).await?;
        file.flush().await?;
        file.close().await?;
        sink.rename(&new, JOURNAL).await
    }

    /// Refuses to go on with other inputs, naming the first that differs.
    ///
    /// # Errors
    /// [`Error::Resume`].
    pub fn check(&self, now: &Inputs) -> Result<()> {
        let was = &self.inputs;
        let (a, b) = (&was.scheme, &now.scheme);
        let group = |scheme: &Scheme, output: &Output| match output.auto_groups {
            true => "auto".to_owned(),
            false => scheme.group_size.map_or("-1".to_owned(), |size| size.to_string()),
        };
        let alpha = |scheme: &Scheme| match scheme.alpha {
            Alpha::Fixed(alpha) => (alpha as f32).to_string(),
            Alpha::Measured => "auto".to_owned(),
        };
        let bits = |scheme: &Scheme, output: &Output| match &output.mixed {
            Some(mixed) => mixed.average.to_string(),
            None => scheme.bits.to_string(),
        };
        let list = |texts: Vec<String>| if texts.is_empty() { "none".to_owned() } else { texts.join(" ") };
        let overrides = |output: &Output| list(output.overrides.iter().map(Override::to_string).collect());
        let (x, y) = (&was.output, &now.output);
        let batch = format!("the micro-batch size ({})", face::MAX_MEMORY);
        let shards = format!("the number of files ({})", face::SHARD_SIZE);
        let pairs: [(&dyn fmt::Display, _, _); 23] = [
            (&"the model", was.source.clone(), now.source.clone()),
            (&"the choice of calibration text", was.calibration.clone(), now.calibration.clone()),
            (&"the calibration text", was.text.clone(), now.text.clone()),
            (&face::PRESET, a.preset.name().to_owned(), b.preset.name().to_owned()),
            (&face::BITS, bits(a, x), bits(b, y)),
            (&face::GROUP_SIZE, group(a, x), group(b, y)),
            (&face::SYM, a.sym.to_string(), b.sym.to_string()),
            (&face::DESC_ACT, a.desc_act.to_string(), b.desc_act.to_string()),
            (&face::STATIC_GROUPS, a.static_groups.to_string(), b.static_groups.to_string()),
            (&face::MSE, a.mse.to_string(), b.mse.to_string()),
            // In f32, since reading JSON may cost a double its last bit.
            (&face::DAMP_PERCENT, (a.damp_percent as f32).to_string(), (b.damp_percent as f32).to_string()),
            (&face::ALPHA, alpha(a), alpha(b)),
            (&face::REFIT, a.refit.to_string(), b.refit.to_string()),
            (&face::SCALING, a.scaling.name().to_owned(), b.scaling.name().to_owned()),
            (&face::FORMAT, x.format.to_string(), y.format.to_string()),
            (&face::OVERRIDE, overrides(x), overrides(y)),
            (&face::SKIP, list(x.skip.clone()), list(y.skip.clone())),
            (&face::QUANTIZE_LM_HEAD, x.lm_head.to_string(), y.lm_head.to_string()),
            (&face::ALL_EXPERTS, x.all_experts.to_string(), y.all_experts.to_string()),
            (&shards, was.shards.to_string(), now.shards.to_string()),
            (&"the device", was.device.clone(), now.device.clone()),
            (&batch, was.batch_tokens.to_string(), now.batch_tokens.to_string()),
            (&"Halftone's version", was.version.clone(), now.version.clone()),
        ];
        match pairs.into_iter().find(|(_, was, now)| was != now) {
            None => Ok(()),
            Some((name, was, now)) => Err(Error::resume(
                format!("{name} changed (was {was}, is {now})"),
                face::REPEAT_OR_START_ANEW,
            )),
        }
    }

    /// Refuses to go on when the finished blocks are not those whose tensors were written.
    ///
    /// # Errors
    /// [`Error::Resume`].
    pub fn check_progress(&self, layout: &Layout, config: &ModelConfig) -> Result<()> {
        let blocks = format!("{}.", config.names.blocks);
        let block = |name: &str| name.strip_prefix(&blocks)?.split('.').next()?.parse::<usize>().ok();
        let mut tensors = layout.tensors().iter().enumerate();
        let agree = self.blocks_done <= config.layers
            && self.sums.len() <= layout.tensors().len()
            && tensors.all(|(at, tensor)| {
                let block = block(&tensor.spec.name).filter(|block| *block < config.layers);
                block.is_none_or(|block| (block < self.blocks_done) == (at < self.sums.len()))
            });
        match agree {
            true => Ok(()),
            false => Err(Error::resume(
                format!("{JOURNAL} does not say how far the run had come; another program changed it"),
                face::START_ANEW,
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gptq::scheme::Preset;
    use crate::storage::memory::MemorySink;

    fn journal() -> Journal {
        let inputs = Inputs {
            version: "1".into(),
            source: "s".into(),
            calibration: "c".into(),
            text: "t".into(),
            scheme: Scheme::preset(Preset::Default, 4, Some(64)),
            output: Output::default(),
            shards: 1,
            device: "cpu".into(),
            batch_tokens: 2048,
        };
        Journal {
            inputs,
            blocks_done: 1,
            sums: vec![7, u64::MAX],
            seconds: 1.5,
            act_ordered: vec![],
            modules: vec![],
            warnings: vec![],
        }
    }

    #[test]
    fn it_is_read_back_as_written() {
        let sink = MemorySink::new();
        pollster::block_on(async {
            assert_eq!(Journal::read(&sink).await.unwrap(), None);
            journal().write(&sink).await.unwrap();
            assert_eq!(Journal::read(&sink).await.unwrap(), Some(journal()));
        });
    }

    #[test]
    fn a_changed_input_is_named() {
        let was = journal();
        was.check(&was.inputs).unwrap();
        let mut now = was.inputs.clone();
        now.scheme.bits = 3;
        let message = was.check(&now).unwrap_err().to_string();
        assert!(message.contains("--bits") && message.contains("was 4, is 3"), "{message}");
        let mut now = was.inputs.clone();
        now.output.overrides.push(Override::parse("down=bits:8").unwrap());
        let message = was.check(&now).unwrap_err().to_string();
        assert!(message.contains("--override changed (was none, is down=bits:8)"), "{message}");
        let mut now = was.inputs.clone();
        now.scheme.preset = Preset::Awq;
        let message = was.check(&now).unwrap_err().to_string();
        assert!(message.contains("--preset changed (was default, is awq)"), "{message}");
        let now = Inputs { text: "u".into(), ..was.inputs.clone() };
        assert!(was.check(&now).unwrap_err().to_string().contains("the calibration text changed"));
    }
}
