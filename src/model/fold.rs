//! Where factors of a linear layer's inputs can go, so that a model computes what it did.
//!
//! Inputs divided by s, column by column, and weights W·diag(s) give the same outputs. The division goes into
//! what made the inputs: into the norm before them, or into the rows of a layer that they depend on linearly.
//! Values go through attention as weighted means, and the up half of a gated MLP is multiplied with the gate, so both take
//! it; an activation in between does only where f(c·x) = c·f(x), as max(x, 0).

use super::arch::{BlockSpec, Branch, Kind, LinearSpec, Qkv, Route, Section};
use super::config::ModelConfig;
use crate::kernels::activation::Function;

/// Inputs that can be divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fold {
    /// Numbers of the stages in their block that see these inputs.
    pub stages: Vec<usize>,
    pub into: Into,
}

/// What takes the division.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Into {
    /// A norm. `readers` are the routers and gates that see its outputs, too: their columns are multiplied as those of
    /// the stages' layers are.
    Norm { name: String, readers: Vec<String> },
    /// Rows of `layer`, which is in stage `stage`: column j of the inputs comes from `rows[j]`. Columns that come from
    /// one row have one factor.
    Rows { layer: LinearSpec, stage: usize, rows: Vec<usize> },
}

/// A stage whose inputs cannot be divided, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfoldable {
    pub stage: usize,
    pub reason: &'static str,
}

/// All inputs of a block's stages that can be divided, each stage in one at most, and the stages whose cannot.
pub fn folds(config: &ModelConfig, block: &BlockSpec) -> (Vec<Fold>, Vec<Unfoldable>) {
    let (mut folds, mut others) = (vec![], vec![]);
    let mut first = 0;
    for section in &block.sections {
        for (index, branch) in section.branches.iter().enumerate() {
            let stage = first + 2 * index;
            // One norm before several branches is one fold, of the first.
            let before = section.branches[..index].iter().any(|other| other.norm == branch.norm);
            if !before {
                folds.push(of_norm(section, first, &branch.norm));
            }
            match of_rows(config, branch, stage) {
                Ok(into) => folds.push(Fold { stages: vec![stage + 1], into }),
                Err(reason) => others.push(Unfoldable { stage: stage + 1, reason }),
            }
        }
        first += 2 * section.branches.len();
    }
    (folds, others)
}

/// The fold of a norm in a section whose first stage is `first`.
fn of_norm(section: &Section, first: usize, norm: &str) -> Fold {
    let branches = section.branches.iter().enumerate();
    let stages = branches.filter(|(_, branch)| branch.norm == norm).map(|(at, _)| first + 2 * at).collect();
    let mut readers = vec![];
    // Routers and gates see what the first branch does.
    if section.branches.first().is_some_and(|branch| branch.norm == norm) {
        readers.extend(section.router.iter().map(|router| router.name.clone()));
        readers.extend(section.branches.iter().filter_map(|branch| match &branch.route {
            Route::Gate(name) => Some(name.clone()),
            Route::Every | Route::Expert(_) => None,
        }));
    }
    Fold { stages, into: Into::Norm { name: norm.to_owned(), readers } }
}

/// Which rows the inputs of a branch's second stage come from.
fn of_rows(config: &ModelConfig, branch: &Branch, stage: usize) -> Result<Into, &'static str> {
    let rows_of = |layer: &LinearSpec, rows| Ok(Into::Rows { layer: layer.clone(), stage, rows });
    match (&branch.kind, &branch.stages[0].linears[..]) {
        (Kind::Attention { qkv, .. }, linears) => {
            let (d, shared) = (config.head_dim, config.heads / config.kv_heads);
            // The value that dimension `at` of a query head sees.
            let value = |j: usize| j / d / shared * d + j % d;
            let inputs = 0..config.heads * d;
            match (qkv, linears) {
                (Qkv::Apart, [_, _, v]) => rows_of(v, inputs.map(value).collect()),
                (Qkv::Stacked, [all]) => {
                    let first = (config.heads + config.kv_heads) * d;
                    rows_of(all, inputs.map(|j| first + value(j)).collect())
                }
                (Qkv::ByHead, [all]) => rows_of(all, inputs.map(|j| (3 * (j / d) + 2) * d + j % d).collect()),
                _ => Err("its values are not in a layer of their own"),
            }
        }
        (Kind::Gated, [_, up]) => rows_of(up, (0..up.out_features).collect()),
        (Kind::Gated, [both]) => rows_of(both, (both.out_features / 2..both.out_features).collect()),
        (Kind::Plain, [up]) if config.activation == Function::Relu => {
            rows_of(up, (0..up.out_features).collect())
        }
        _ => Err("the activation before it does not keep factors"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch::block;

    fn of(name: &str) -> (Vec<Fold>, Vec<Unfoldable>) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/goldens/models")
            .join(name)
            .join("config.json");
        let text = std::fs::read_to_string(path).unwrap();
        let config = ModelConfig::parse(&serde_json::from_str(&text).unwrap()).unwrap();
        folds(&config, &block(&config, 0))
    }

    #[test]
    fn a_block_of_the_llama_kind_takes_four() {
        let (folds, others) = of("llama");
        let stages: Vec<_> = folds.iter().map(|fold| fold.stages.clone()).collect();
        assert_eq!((stages, others), (vec![vec![0], vec![1], vec![2], vec![3]], vec![]));
        let Into::Norm { name, readers } = &folds[0].into else { panic!("{:?}", folds[0]) };
        assert!(name.ends_with("input_layernorm") && readers.is_empty());
        let Into::Rows { layer, stage, rows } = &folds[1].into else { panic!("{:?}", folds[1]) };
        assert_eq!((layer.short, *stage), ("v_proj", 0));
        // Query heads that share a key head share its values.
        let widest = *rows.iter().max().unwrap();
        assert!(widest + 1 == layer.out_features && rows.len() > layer.out_features);
    }

    #[test]
    fn an_activation_that_bends_takes_none() {
        for (name, reason) in [("gpt2", true), ("gpt_neox", true), ("opt", false)] {
            let (folds, others) = of(name);
            assert_eq!((folds.len(), others.len()), if reason { (3, 1) } else { (4, 0) }, "{name}");
            assert!(others.iter().all(|other| other.stage == 3));
        }
    }

    #[test]
    fn what_reads_one_norm_is_one_fold_with_its_routers() {
        for (name, gates) in [("mixtral", 1), ("qwen2_moe", 2), ("olmoe", 1)] {
            let (folds, others) = of(name);
            assert!(others.is_empty());
            let shared = folds.iter().find(|fold| fold.stages.len() > 1).unwrap();
            let Into::Norm { readers, .. } = &shared.into else { panic!("{shared:?}") };
            assert_eq!(readers.len(), gates, "{name}: {readers:?}");
            // Each expert's inner inputs are its own.
            assert_eq!(folds.len(), 3 + shared.stages.len(), "{name}");
        }
    }
}
