//! What a run has to say about each linear layer, and in total.

use serde::{Deserialize, Serialize};

use super::allocation::Allocation;
use super::run::QUANT_LOG;
use crate::gptq::losses::Choice;

/// One quantized linear layer; a row of `quant_log.csv`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModuleRow {
    /// Number of the block.
    pub layer: usize,
    /// Full name, such as `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Input and output features.
    pub input: usize,
    pub output: usize,
    pub bits: u32,
    /// −1 for one group per row.
    pub group: i64,
    /// Calibration tokens in the Hessian.
    pub tokens: usize,
    /// Of an expert, the tokens that were routed to it; where `tokens` is more, it had too few.
    pub routed: Option<usize>,
    /// λ / mean(diag H) as used; `None` when rounded to nearest.
    pub damp: Option<f64>,
    /// tr(E·H·Eᵀ), H = (2/tokens)·XᵀX, of rounding to nearest on min-max grids and of GPTQ, both
    /// [`logged`].
    pub rtn_loss: Option<f64>,
    pub gptq_loss: Option<f64>,
    /// What held-out rows say, where some were held out.
    #[serde(default)]
    pub held: Option<HeldRow>,
    /// The power of their mean magnitude that its inputs are divided by, where they are.
    #[serde(default)]
    pub scaling: Option<f64>,
    pub seconds: f64,
}

/// (2/tokens)·Σ‖W·x − Ŵ·x̃‖² over rows held out of the Hessian, x the original model's inputs and x̃ the
/// quantized one's; all [`logged`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HeldRow {
    /// The share of the correction by which weights were moved, a mean over pieces of the weight.
    pub alpha: f64,
    pub rtn: f64,
    /// Of a sweep without correction and refit.
    pub plain: f64,
    /// Of what was kept, and what that was.
    pub kept: f64,
    pub choice: Choice,
}

/// A figure with the seven digits that the log keeps. A resumed run reads its first rows back from
/// JSON, whose reader is exact for so few digits only.
pub fn logged(value: f64) -> f64 {
    format!("{value:.6e}").parse().unwrap_or(value)
}

impl ModuleRow {
    pub const CSV_HEADER: &str = "layer,module,in,out,bits,group,tokens,routed,damp,rtn_loss,gptq_loss,alpha,\
        held_rtn,held_plain,held_kept,kept,scaling,seconds";

    pub fn csv(&self) -> String {
        let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:e}"));
        let held = |value: fn(&HeldRow) -> String| self.held.as_ref().map_or(String::new(), value);
        format!(
            "{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{:.3}",
            self.layer,
            self.module,
            self.input,
            self.output,
            self.bits,
            self.group,
            self.tokens,
            self.routed.map_or(String::new(), |routed| routed.to_string()),
            self.damp.map_or(String::new(), |damp| damp.to_string()),
            number(self.rtn_loss),
            number(self.gptq_loss),
            held(|held| held.alpha.to_string()),
            held(|held| format!("{:e}", held.rtn)),
            held(|held| format!("{:e}", held.plain)),
            held(|held| format!("{:e}", held.kept)),
            held(|held| format!("{:?}", held.choice).to_lowercase()),
            self.scaling.map_or(String::new(), |alpha| alpha.to_string()),
            self.seconds
        )
    }
}

/// Layers that a warning names.
const NAMED: usize = 10;

/// What to tell a person of layers that lose more on held-out rows than if they were rounded to nearest, which could
/// not take their place: its groups lie in another order, or what comes before carries the layers' scale already.
pub fn behind_rounding(rows: &[ModuleRow]) -> Option<String> {
    let more = |row: &ModuleRow| row.held.map_or(0.0, |held| held.kept / held.rtn - 1.0);
    let mut behind: Vec<&ModuleRow> = rows.iter().filter(|row| more(row) > 0.0).collect();
    behind.sort_by(|a, b| more(b).total_cmp(&more(a)));
    let most = 100.0 * more(behind.first()?);
    let named: Vec<&str> = behind.iter().take(NAMED).map(|row| row.module.as_str()).collect();
    let rest = if behind.len() > NAMED { " …" } else { "" };
    let (lose, they) = if behind.len() == 1 { ("loses", "it was") } else { ("lose", "they were") };
    Some(format!(
        "{} of {} layers {lose} more on held-out rows than if {they} rounded to nearest, at most {most:.2} % more: \
         {}{rest} (held_kept and held_rtn in {QUANT_LOG})",
        behind.len(),
        rows.len(),
        named.join(", "),
    ))
}

/// The content of `quant_log.csv`.
pub fn csv(rows: &[ModuleRow]) -> String {
    let mut text = format!("{}\n", ModuleRow::CSV_HEADER);
    for row in rows {
        text.push_str(&row.csv());
        text.push('\n');
    }
    text
}

/// A finished run.
#[derive(Debug, Clone, Serialize)]
pub struct RunReport {
    pub modules: Vec<ModuleRow>,
    pub tokens: usize,
    pub seconds: f64,
    /// Of this sitting, by step: "forward", "hessian", "quantize", "read", "write" and the like.
    pub seconds_by_step: std::collections::BTreeMap<&'static str, f64>,
    /// Bytes of all tensors in the output.
    pub output_bytes: u64,
    /// Bits per weight of the quantized linear layers, scales and zero points included.
    pub bits_per_weight: f64,
    /// Where the bits are an average, which layers have how many.
    pub allocation: Option<Allocation>,
    pub warnings: Vec<String>,
}

impl RunReport {
    /// Σ gptq_loss / Σ rtn_loss over all modules, `None` without losses.
    pub fn loss_ratio(&self) -> Option<f64> {
        let sum = |value: fn(&ModuleRow) -> Option<f64>| self.modules.iter().filter_map(value).sum::<f64>();
        let rtn = sum(|row| row.rtn_loss);
        (rtn > 0.0).then(|| sum(|row| row.gptq_loss) / rtn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(module: &str, rtn: f64, kept: f64) -> ModuleRow {
        let held = HeldRow { alpha: 0.0, rtn, plain: kept, kept, choice: Choice::Swept };
        ModuleRow {
            layer: 0,
            module: module.into(),
            input: 1,
            output: 1,
            bits: 4,
            group: 32,
            tokens: 1,
            routed: None,
            damp: None,
            rtn_loss: None,
            gptq_loss: None,
            held: Some(held),
            scaling: None,
            seconds: 0.0,
        }
    }

    #[test]
    fn a_layer_behind_rounding_is_told() {
        assert_eq!(behind_rounding(&[row("a", 2.0, 2.0), row("b", 2.0, 1.0)]), None);
        let told = behind_rounding(&[row("a", 2.0, 2.02), row("b", 2.0, 2.2), row("c", 2.0, 1.0)]).unwrap();
        assert!(told.starts_with("2 of 3 layers") && told.contains("at most 10.00 % more: b, a ("), "{told}");
    }

    #[test]
    fn logged_figures_come_back_from_json_as_they_were() {
        let mut value = 1.234_567_890_123e-9;
        for _ in 0..500 {
            value *= 1.173;
            let logged = logged(value);
            assert!((logged / value - 1.0).abs() < 1e-6);
            let text = serde_json::to_string(&logged).unwrap();
            assert_eq!(serde_json::from_str::<f64>(&text).unwrap(), logged, "{text}");
        }
    }
}
