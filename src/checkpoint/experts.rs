//! Mixtures of experts by one set of names, whatever program has written them.
//!
//! Transformers 5 holds all experts of a layer in one tensor, and so do some files. `….mlp.experts.gate_up_proj` is
//! [experts, 2 · inner, hidden], each expert's gate above its up, and `….mlp.experts.down_proj` [experts, hidden,
//! inner]. Each expert's matrix is a run of bytes, so that nothing is read or copied to take them apart: only names,
//! shapes and places change. They get the names that files with a tensor for each expert have, which is what engines
//! know of quantized models. Mixtral's experts have other names in those files than in Transformers 5 and in what
//! GPTQModel writes with it.

use serde_json::Value;

use super::header::TensorInfo;

const GATE_UP: &str = ".experts.gate_up_proj";
const DOWN: &str = ".experts.down_proj";

/// What Mixtral's tensors are called in files with a tensor for each expert.
const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];
const USUAL: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Replaces tensors of all experts by those of each, and names by those that engines know. Tensors of other shapes
/// are left as they are.
pub fn by_expert(tensors: Vec<TensorInfo>, config: &Value) -> Vec<TensorInfo> {
    let mixtral = config.get("model_type").and_then(Value::as_str) == Some("mixtral");
    let renamed = mixtral && tensors.iter().any(|tensor| tensor.name.contains(".mlp.experts."));
    if !renamed && !tensors.iter().any(is_fused) {
        return tensors;
    }
    let [gate, up, down] = if mixtral { MIXTRAL } else { USUAL };
    let mut found = Vec::with_capacity(tensors.len());
    for mut tensor in tensors {
        if renamed {
            // That of the router, too.
            tensor.name = tensor.name.replacen(".mlp.", ".block_sparse_moe.", 1);
            for (name, other) in USUAL.iter().zip(MIXTRAL) {
                tensor.name = tensor.name.replace(&format!(".{name}."), &format!(".{other}."));
            }
        }
        match is_fused(&tensor) {
            false => found.push(tensor),
            true if tensor.name.ends_with(GATE_UP) => cut(&tensor, &[gate, up], &mut found),
            true => cut(&tensor, &[down], &mut found),
        }
    }
    found
}

/// Each expert's share of a tensor, cut into so many matrices of equally many rows.
fn cut(tensor: &TensorInfo, names: &[&str], found: &mut Vec<TensorInfo>) {
    let &[experts, rows, cols] = tensor.shape.as_slice() else { return };
    let (prefix, _) = tensor.name.rsplit_once('.').unwrap_or_default();
    let bytes = tensor.bytes() / (experts * names.len() as u64);
    let mut begin = tensor.begin;
    for expert in 0..experts {
        for name in names {
            found.push(TensorInfo {
                name: format!("{prefix}.{expert}.{name}.weight"),
                file: tensor.file.clone(),
                dtype: tensor.dtype,
                shape: vec![rows / names.len() as u64, cols],
                begin,
                end: begin + bytes,
            });
            begin += bytes;
        }
    }
}

/// Whether a tensor holds a layer of some experts, and can be cut evenly.
fn is_fused(tensor: &TensorInfo) -> bool {
    let &[experts, rows, cols] = tensor.shape.as_slice() else { return false };
    let even = experts > 0 && rows > 0 && cols > 0 && tensor.dtype.bytes_of(&[rows, cols]).is_some();
    even && (tensor.name.ends_with(DOWN) || (tensor.name.ends_with(GATE_UP) && rows.is_multiple_of(2)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::DType;

    fn tensor(name: &str, shape: &[u64], begin: u64) -> TensorInfo {
        let end = begin + 2 * shape.iter().product::<u64>();
        TensorInfo {
            name: name.into(),
            file: "f".into(),
            dtype: DType::BF16,
            shape: shape.into(),
            begin,
            end,
        }
    }

    #[test]
    fn experts_get_their_own_names_and_bytes() {
        let experts = "model.layers.0.mlp.experts";
        let fused = vec![
            tensor(&format!("{experts}.gate_up_proj"), &[2, 6, 4], 100),
            tensor(&format!("{experts}.down_proj"), &[2, 4, 3], 196),
            tensor("model.layers.0.mlp.gate.weight", &[2, 4], 244),
        ];
        let seen = |model_type: &str| {
            let found = by_expert(fused.clone(), &json!({ "model_type": model_type }));
            found.into_iter().map(|t| (t.name, t.shape, t.begin, t.end)).collect::<Vec<_>>()
        };
        let name = |rest: &str| format!("{experts}.{rest}.weight");
        let usual = seen("qwen3_moe");
        assert_eq!(
            usual[..5],
            [
                (name("0.gate_proj"), vec![3, 4], 100, 124),
                (name("0.up_proj"), vec![3, 4], 124, 148),
                (name("1.gate_proj"), vec![3, 4], 148, 172),
                (name("1.up_proj"), vec![3, 4], 172, 196),
                (name("0.down_proj"), vec![4, 3], 196, 220),
            ]
        );
        assert_eq!(usual[6].0, "model.layers.0.mlp.gate.weight");
        let mixtral = seen("mixtral");
        assert_eq!(mixtral[1].0, "model.layers.0.block_sparse_moe.experts.0.w3.weight");
        assert_eq!(mixtral[5].0, "model.layers.0.block_sparse_moe.experts.1.w2.weight");
        assert_eq!(mixtral[6].0, "model.layers.0.block_sparse_moe.gate.weight");
    }

    /// As GPTQModel writes them.
    #[test]
    fn experts_of_mixtral_get_the_names_that_engines_know() {
        let written = vec![
            tensor("model.layers.0.mlp.experts.1.up_proj.qweight", &[4, 3], 0),
            tensor("model.layers.0.mlp.gate.weight", &[4, 3], 24),
            tensor("model.layers.0.self_attn.q_proj.qweight", &[4, 3], 48),
        ];
        let names: Vec<String> =
            by_expert(written, &json!({ "model_type": "mixtral" })).into_iter().map(|t| t.name).collect();
        assert_eq!(
            names,
            [
                "model.layers.0.block_sparse_moe.experts.1.w3.qweight",
                "model.layers.0.block_sparse_moe.gate.weight",
                "model.layers.0.self_attn.q_proj.qweight"
            ]
        );
    }

    #[test]
    fn other_tensors_stay_as_they_are() {
        let plain = vec![tensor("model.layers.0.mlp.experts.0.down_proj.weight", &[4, 3], 0)];
        assert_eq!(by_expert(plain.clone(), &json!({})), plain);
        let odd = vec![tensor("a.experts.gate_up_proj", &[2, 5, 4], 0)];
        assert_eq!(by_expert(odd.clone(), &json!({})), odd);
    }
}
