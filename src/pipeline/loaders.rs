//! What loaders are known not to take, said before the work: whoever needs such a loader can still choose another
//! format. Each of these was seen with Transformers 5.17, optimum 2.3, GPTQModel 7.7 and compressed-tensors 0.19
//! (`make peers`, whose list of known refusals is the same).

use crate::checkpoint::Format;
use crate::error::{Error, Result};
use crate::face;
use crate::model::ModelConfig;

/// What of a result a loader may stumble over.
pub(super) struct Traits<'a> {
    /// `None` for an architecture that is only converted.
    pub config: Option<&'a ModelConfig>,
    pub format: Format,
    /// Layers differ from each other, or some stay in 16 bits.
    pub differs: bool,
    /// Some grid has zero points of its own.
    pub asymmetric: bool,
    /// Some groups follow an order of columns.
    pub ordered: bool,
    pub quantized_head: bool,
}

/// Whether any loader takes the model's layers in this format at all.
///
/// # Errors
/// [`Error::Unsupported`] for layers that are not what the format's loaders replace.
pub(super) fn check_writable(config: &ModelConfig, format: Format) -> Result<()> {
    if config.transposed && format == Format::CompressedTensors {
        return Err(Error::unsupported(
            format!(
                "{} has Conv1D layers, which compressed-tensors does not replace when it loads",
                config.family.name
            ),
            format!("Use {}", face::AS_GPTQ),
        ));
    }
    Ok(())
}

/// A sentence for each loader that does not take it.
pub(super) fn refusals(result: &Traits) -> Vec<String> {
    match result.format {
        Format::CompressedTensors => of_compressed_tensors(result),
        Format::Gptq | Format::GptqV2 => of_gptq(result),
    }
}

fn of_compressed_tensors(result: &Traits) -> Vec<String> {
    let mut found = Vec::new();
    if result.ordered {
        found.push(format!(
            "groups that follow the order of columns (actorder \"group\") are refused by compressed-tensors 0.19 and \
             later, but not those of a model quantized with {}",
            face::STATIC_GROUPS
        ));
    }
    if result.asymmetric && result.config.is_some_and(|config| config.experts.is_some()) {
        found.push(
            "Transformers 5 leaves out the zero points of experts when it takes them together, and refuses the file; \
             it loads symmetric grids"
                .to_owned(),
        );
    }
    found
}

fn of_gptq(result: &Traits) -> Vec<String> {
    let family = result.config.map_or("", |config| config.family.name);
    let experts = result.config.and_then(|config| config.experts.as_ref());
    let mut found = Vec::new();
    if result.differs {
        found.push(format!(
            "what differs from layer to layer goes to \"dynamic\", which GPTQModel, vLLM and SGLang read; Transformers \
             alone does not, but reads the same of {}",
            face::AS_COMPRESSED
        ));
    }
    if result.quantized_head {
        found.push(format!(
            "Transformers leaves a GPTQ head unread, so that its answers are wrong; GPTQModel reads it, and Transformers \
             that of {}",
            face::AS_COMPRESSED
        ));
    }
    if result.asymmetric && result.format == Format::Gptq {
        found.push(format!(
            "GPTQModel refuses asymmetric grids in the first GPTQ format unless it wrote them itself; Transformers \
             takes them, and both take those of {}",
            face::AS_GPTQ_V2
        ));
    }
    if experts.is_some() {
        found.push(format!(
            "Transformers 5 keeps a block's experts in one tensor and reads no GPTQ layers into it; it reads those of {}",
            face::AS_COMPRESSED
        ));
    }
    let some_dense = experts.is_some_and(|experts| experts.sparse.contains(&false));
    match family {
        "gpt2" => found.push("Transformers cannot load GPTQ layers of gpt2; GPTQModel can".to_owned()),
        "gpt_neox" => found.push(
            "GPTQModel 7.7 looks for the head of gpt_neox under another name and leaves it unfilled; Transformers \
             loads it"
                .to_owned(),
        ),
        "phi3" => found.push(
            "GPTQModel 7.7 loads phi3 only with gate and up apart, as it writes them itself; Transformers loads it"
                .to_owned(),
        ),
        "mixtral" => found.push(
            "GPTQModel 7.7 loads mixtral only by the names that it gives to experts itself, not by the model's own"
                .to_owned(),
        ),
        "qwen3_moe" if some_dense => found
            .push("GPTQModel 7.7 leaves blocks without experts unfilled in a model that has both kinds".to_owned()),
        _ => {}
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(changes: Value) -> ModelConfig {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        ModelConfig::parse(&config).unwrap()
    }

    fn plain(config: &ModelConfig, format: Format) -> Traits<'_> {
        Traits {
            config: Some(config),
            format,
            differs: false,
            asymmetric: false,
            ordered: false,
            quantized_head: false,
        }
    }

    fn words(result: &Traits) -> String {
        refusals(result).join("\n")
    }

    #[test]
    fn an_ordinary_file_is_taken_by_all() {
        let config = config(json!({}));
        for format in [Format::Gptq, Format::GptqV2, Format::CompressedTensors] {
            assert_eq!(words(&plain(&config, format)), "");
        }
    }

    #[test]
    fn a_trait_is_told_with_the_format_that_has_the_trouble() {
        let config = config(json!({}));
        let all = |format| {
            let all = Traits {
                asymmetric: true,
                ordered: true,
                quantized_head: true,
                differs: true,
                ..plain(&config, format)
            };
            refusals(&all).len()
        };
        assert_eq!((all(Format::Gptq), all(Format::GptqV2), all(Format::CompressedTensors)), (3, 2, 1));
        let unknown = Traits { config: None, ..plain(&config, Format::Gptq) };
        assert_eq!(words(&unknown), "");
        let head = words(&Traits { quantized_head: true, ..plain(&config, Format::Gptq) });
        assert!(head.contains("head unread") && head.contains("compressed-tensors"), "{head}");
    }

    #[test]
    fn families_have_their_own() {
        let mixtral =
            config(json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}));
        let found = words(&plain(&mixtral, Format::Gptq));
        assert!(found.contains("one tensor") && found.contains("mixtral only by"), "{found}");
        let compressed = plain(&mixtral, Format::CompressedTensors);
        assert_eq!(words(&compressed), "");
        assert!(words(&Traits { asymmetric: true, ..compressed }).contains("zero points of experts"));
    }
}
