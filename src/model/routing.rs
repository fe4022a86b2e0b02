//! Which experts a token goes to.

use super::arch::Router;
use crate::error::Result;
use crate::tensor::Tensor;

/// The rows of each branch of a section, and what they count in its output.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routing {
    /// By branch: tokens, ascending, and the weight of each.
    pub branches: Vec<(Vec<u32>, Vec<f32>)>,
}

/// The tokens of each expert, from the router's outputs [tokens, experts]: each goes to the `per_token`
/// likeliest, weighted by their share of the softmax over all; of equal ones the first.
///
/// # Errors
/// Those of the device.
pub async fn experts(router: &Router, logits: &Tensor) -> Result<Vec<(Vec<u32>, Vec<f32>)>> {
    let mut branches = vec![(vec![], vec![]); router.experts];
    for (token, logits) in logits.to_f32().await?.chunks(router.experts).enumerate() {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shares: Vec<f32> = logits.iter().map(|x| (x - largest).exp()).collect();
        let mut order: Vec<usize> = (0..router.experts).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let chosen = &order[..router.per_token];
        let of = if router.normalized { chosen } else { &order };
        let total: f32 = of.iter().map(|&expert| shares[expert]).sum();
        for &expert in chosen {
            branches[expert].0.push(token as u32);
            branches[expert].1.push(shares[expert] / total);
        }
    }
    Ok(branches)
}

/// Every token, weighted by the sigmoid of a gate's output [tokens, 1].
///
/// # Errors
/// Those of the device.
pub async fn gate(logits: &Tensor) -> Result<(Vec<u32>, Vec<f32>)> {
    let weights: Vec<f32> = logits.to_f32().await?.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    Ok(((0..weights.len() as u32).collect(), weights))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn tokens_go_to_their_likeliest_experts() {
        let logits = [0f32, 3f32.ln(), 2f32.ln(), 0.0, 0.0, 0.0, 0.0, 4f32.ln()];
        let logits = Tensor::from_f32(&Device::Cpu, &[2, 4], logits.to_vec()).unwrap();
        let router = |normalized| Router { name: "r".into(), experts: 4, per_token: 2, normalized };
        let close = |got: &[f32], want: &[f32]| {
            got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        for (normalized, [a, b, c, d]) in
            [(true, [0.6, 0.4, 0.2, 0.8]), (false, [3.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 4.0 / 7.0])]
        {
            let got = pollster::block_on(experts(&router(normalized), &logits)).unwrap();
            let tokens: Vec<_> = got.iter().map(|(tokens, _)| tokens.clone()).collect();
            assert_eq!(tokens, [vec![1], vec![0], vec![0], vec![1]]);
            for ((_, weights), want) in got.iter().zip([[c], [a], [b], [d]]) {
                assert!(close(weights, &want), "{weights:?}, not {want:?}");
            }
        }
    }
}
