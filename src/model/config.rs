//! `config.json` of a Hugging Face model, checked.

use serde_json::{Map, Value};

use super::arch::{Names, weight};
use super::family::Family;
use super::norm::NormKind;
use super::rope::{Rope, RopeTables};
use crate::checkpoint::Checkpoint;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernels::activation::Function;

/// What the messages call the file.
pub(super) const PLACE: &str = "config.json";

/// The hyperparameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub family: &'static Family,
    pub names: Names,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// Number of blocks.
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Need not be hidden_size / heads.
    pub head_dim: usize,
    pub norm: NormKind,
    pub norm_eps: f32,
    pub activation: Function,
    /// Of each layer; `None` where positions are learned instead.
    pub rope: Option<Vec<Rope>>,
    /// Dimensions of a head that rotary embedding turns: the first ones.
    pub rotary_dim: usize,
    /// Rows before that of position 0, in a table of learned positions.
    pub positions_offset: usize,
    /// Multiplies embeddings.
    pub embedding_scale: f32,
    /// Multiplies the scores of attention.
    pub attention_scale: f32,
    /// c where scores of attention, or logits, s count as c · tanh(s / c).
    pub attention_soft_cap: Option<f32>,
    pub logit_soft_cap: Option<f32>,
    /// Experts in place of some blocks' MLPs.
    pub experts: Option<Experts>,
    /// Attention and MLP read the same stream, where a family has both kinds.
    pub parallel: bool,
    /// Linear layers are stored as [in, out], as those of GPT-2 are.
    pub transposed: bool,
    /// For each layer, how many tokens a token sees, itself included; `None` for all before it.
    pub sliding_window: Vec<Option<usize>>,
    /// The head's weight is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether q_proj, k_proj and v_proj have biases.
    pub qkv_bias: bool,
    /// Whether o_proj has a bias.
    pub o_bias: bool,
    /// Whether the linear layers of the MLP have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalized.
    pub qk_norm: bool,
    /// The longest text that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Cosines and sines of every layer for positions below `positions`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn rope_tables(&self, device: &Device, positions: usize) -> Result<RopeTables> {
        RopeTables::new(
            self.rope.as_deref().unwrap_or(&[]),
            [self.head_dim, self.rotary_dim],
            device,
            positions,
        )
    }

    /// Reads the content of `config.json`, as Transformers 4 or 5 writes it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another architecture, activation, rope type, or experts;
    /// [`Error::Model`] naming the key that is absent or out of range.
    pub fn parse(config: &Value) -> Result<Self> {
        let keys = Keys::of(config)?;
        let model_type = keys.string("model_type")?.ok_or_else(|| missing("model_type"))?;
        // A model of text and pictures keeps what is said of its text apart.
        if let Some(text) = keys.get("text_config") {
            let mut inner = Keys::of(text)?.0.clone();
            for key in ["tie_word_embeddings", "bos_token_id", "eos_token_id"] {
                if let Some(value) = keys.get(key).filter(|_| !inner.contains_key(key)) {
                    inner.insert(key.to_owned(), value.clone());
                }
            }
            let model_type = Keys(&inner).string("model_type")?.unwrap_or(model_type);
            let family = Family::find(model_type)?;
            return (family.configure)(family, &Keys(&inner));
        }
        let family = Family::find(model_type)?;
        (family.configure)(family, &keys)
    }

    /// That of a checkpoint, whose tensors may lie under another prefix than the family's usual one.
    ///
    /// # Errors
    /// As [`ModelConfig::parse`].
    pub fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let mut config = Self::parse(checkpoint.config())?;
        let usual = config.names.prefix.clone();
        let prefixes = [usual.as_str(), "model.language_model.", "language_model.model.", "model.", ""];
        for prefix in prefixes {
            let names = config.names.under(prefix);
            if checkpoint.info(&weight(&names.embedding)).is_some() {
                config.names = names;
                break;
            }
        }
        Ok(config)
    }

    /// What most families have in common: Llama's keys, names and defaults.
    ///
    /// # Errors
    /// As [`ModelConfig::parse`].
    pub(super) fn common(family: &'static Family, keys: &Keys, defaults: &Defaults) -> Result<Self> {
        for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
            if !defaults.experts && keys.number(key)?.is_some_and(|count| count > 0) {
                return Err(Error::unsupported(
                    format!("mixtures of experts ({key}) are not supported in {}", family.name),
                    "Use a model with one MLP per block, or mixtral, qwen2_moe, qwen3_moe or olmoe",
                ));
            }
        }
        let mut activation = defaults.activation;
        // The newest key of those that Transformers has had counts.
        for key in ["hidden_act", "activation_function", "hidden_activation"] {
            activation = keys.string(key)?.unwrap_or(activation);
        }
        let activation = match activation {
            "silu" | "swish" => Function::Silu,
            "gelu" => Function::Gelu,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Function::GeluTanh,
            "relu" => Function::Relu,
            other => {
                return Err(Error::unsupported(
                    format!("the activation \"{other}\" is not supported"),
                    "Supported are silu, gelu, gelu_new, gelu_pytorch_tanh, relu",
                ));
            }
        };

        let hidden_size = keys.positive("hidden_size")?;
        let layers = keys.positive("num_hidden_layers")?;
        let heads = keys.positive("num_attention_heads")?;
        let kv_heads = match keys.number("num_key_value_heads")? {
            None if !defaults.kv_heads || keys.is_null("num_key_value_heads") => heads,
            None => return Err(missing("num_key_value_heads")),
            Some(_) => keys.positive("num_key_value_heads")?,
        };
        if heads % kv_heads != 0 {
            return Err(wrong(
                "num_key_value_heads",
                format!("{kv_heads} does not divide the {heads} of num_attention_heads"),
            ));
        }
        let head_dim = match keys.number("head_dim")? {
            Some(_) => keys.positive("head_dim")?,
            None => match defaults.head_dim.filter(|_| !keys.is_null("head_dim")) {
                Some(head_dim) => head_dim,
                None if hidden_size % heads == 0 => hidden_size / heads,
                None => {
                    return Err(wrong(
                        "hidden_size",
                        format!(
                            "{hidden_size} is not a multiple of the {heads} heads, and there is no head_dim"
                        ),
                    ));
                }
            },
        };
        if head_dim % 2 != 0 {
            return Err(wrong("head_dim", format!("{head_dim} is odd, so rotary embedding has no pairs")));
        }
        let share = Rope::share(keys)?.unwrap_or(defaults.rotary_share.unwrap_or(1.0));
        let rotary_dim = (head_dim as f64 * share) as usize;
        if share != 1.0 && defaults.rotary_share.is_none() {
            return Err(partial_rotary());
        }
        if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(wrong(
                "partial_rotary_factor",
                format!("{share} of heads of {head_dim} is not a whole number of pairs"),
            ));
        }
        let max_position_embeddings = keys.positive("max_position_embeddings")?;
        let eps_key = defaults.norm_eps.0;
        let norm_eps = keys.float(eps_key)?.unwrap_or(defaults.norm_eps.1);
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(wrong(eps_key, format!("{norm_eps} is not a small positive number")));
        }
        let rope = Rope::parse(keys, max_position_embeddings)?;
        rope.check(rotary_dim)?;
        Ok(Self {
            family,
            names: Names::new("model.", "embed_tokens", "layers", "norm"),
            vocab_size: keys.positive("vocab_size")?,
            hidden_size,
            intermediate_size: keys.positive("intermediate_size")?,
            layers,
            heads,
            kv_heads,
            head_dim,
            norm: NormKind::Rms,
            norm_eps: norm_eps as f32,
            activation,
            rope: Some(vec![rope; layers]),
            rotary_dim,
            positions_offset: 0,
            embedding_scale: 1.0,
            attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
            attention_soft_cap: None,
            logit_soft_cap: None,
            experts: None,
            parallel: false,
            transposed: false,
            sliding_window: vec![None; layers],
            tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(defaults.tied),
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            max_position_embeddings,
            bos_token_id: keys.token_ids("bos_token_id")?.first().copied(),
            eos_token_ids: keys.token_ids("eos_token_id")?,
        })
    }
}

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    pub count: usize,
    pub per_token: usize,
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Of an expert that sees every token, if there is one.
    pub shared_size: Option<usize>,
    /// For each block, whether it has experts instead of one MLP.
    pub sparse: Vec<bool>,
}

/// What an absent key means, where families differ.
pub(super) struct Defaults {
    /// Whether `num_key_value_heads` must be there; else there are as many as heads.
    pub kv_heads: bool,
    /// `None` for hidden_size / heads.
    pub head_dim: Option<usize>,
    /// Key and default of ε.
    pub norm_eps: (&'static str, f64),
    pub activation: &'static str,
    /// The part of each head that is turned, where it may be less than all.
    pub rotary_share: Option<f64>,
    /// Whether the head is the embedding table.
    pub tied: bool,
    /// Whether experts are computed.
    pub experts: bool,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            kv_heads: true,
            head_dim: None,
            norm_eps: ("rms_norm_eps", 1e-6),
            activation: "silu",
            rotary_share: None,
            tied: false,
            experts: false,
        }
    }
}

pub(super) fn missing(key: &str) -> Error {
    Error::model(PLACE, format!("there is no \"{key}\""), "Use the config.json that came with the model")
}

pub(super) fn wrong(key: &str, problem: impl std::fmt::Display) -> Error {
    Error::model(
        PLACE,
        format!("\"{key}\" is wrong: {problem}"),
        "Use the config.json that came with the model",
    )
}

pub(super) fn partial_rotary() -> Error {
    Error::unsupported(
        "rotary embedding of a part of each head (partial_rotary_factor) is not supported",
        "Use a model that rotates whole heads",
    )
}

/// An object of the configuration, read by key with messages that name it.
pub(super) struct Keys<'a>(pub &'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub fn of(value: &'a Value) -> Result<Self> {
        value.as_object().map(Self).ok_or_else(|| {
            Error::model(PLACE, "it is not a JSON object", "Use the config.json that came with the model")
        })
    }

    /// The same object with `defaults` where a key is absent, and keys of another spelling under the usual
    /// one.
    pub fn filled(&self, spelled: &[(&str, &str)], defaults: &[(&str, Value)]) -> Map<String, Value> {
        let mut map = self.0.clone();
        for (from, to) in spelled {
            if let Some(value) = self.get(from).filter(|_| !self.0.contains_key(*to)) {
                map.insert((*to).to_owned(), value.clone());
            }
        }
        for (key, value) in defaults {
            map.entry(*key).or_insert_with(|| value.clone());
        }
        map
    }

    /// Refuses a switch that changes what is computed.
    pub fn refuse(&self, key: &str, value: bool) -> Result<()> {
        match self.bool(key)? == Some(value) {
            true => {
                Err(Error::unsupported(format!("{key} {value} is not supported"), "Use a model without it"))
            }
            false => Ok(()),
        }
    }

    /// The key is there and says null.
    pub fn is_null(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(Value::is_null)
    }

    /// The value, unless absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(&self, key: &str, kind: &str, convert: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        self.get(key)
            .map(|value| convert(value).ok_or_else(|| wrong(key, format!("{value} is not {kind}"))))
            .transpose()
    }

    pub fn number(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a whole number", Value::as_u64)
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_str)
    }

    /// A required size: at least 1, and small enough that products of two cannot overflow.
    pub fn positive(&self, key: &str) -> Result<usize> {
        match self.number(key)? {
            None => Err(missing(key)),
            Some(value) if (1..1 << 24).contains(&value) => Ok(value as usize),
            Some(value) => Err(wrong(key, format!("{value} is not between 1 and {}", (1 << 24) - 1))),
        }
    }

    /// `sliding_window`: an absent key means the class's default, null means no window.
    pub fn window(&self, default: Option<usize>) -> Result<Option<usize>> {
        match self.number("sliding_window")? {
            Some(_) => self.positive("sliding_window").map(Some),
            None if self.is_null("sliding_window") => Ok(None),
            None => Ok(default),
        }
    }

    /// Which layers have a window, as `layer_types` lists them; `None` without a list.
    pub fn layer_types(&self, layers: usize) -> Result<Option<Vec<bool>>> {
        let Some(types) = self.get("layer_types") else { return Ok(None) };
        let types = types.as_array().filter(|types| types.len() == layers).ok_or_else(|| {
            wrong("layer_types", format!("it is not a list of {layers} names, one for each layer"))
        })?;
        let slides = |name: &Value| match name.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => Err(Error::unsupported(
                format!("the layer type {name} is not supported"),
                "Supported are \"full_attention\" and \"sliding_attention\"",
            )),
        };
        types.iter().map(slides).collect::<Result<_>>().map(Some)
    }

    /// One id or a list of them.
    fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(key) else { return Ok(vec![]) };
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        list.iter()
            .map(|id| {
                id.as_u64()
                    .and_then(|id| u32::try_from(id).ok())
                    .ok_or_else(|| wrong(key, format!("{id} is not a token id")))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
        })
    }

    fn with(changes: Value) -> Value {
        let mut config = llama();
        let object = config.as_object_mut().unwrap();
        for (key, value) in changes.as_object().unwrap() {
            object.insert(key.clone(), value.clone());
        }
        config
    }

    fn error(config: &Value) -> String {
        ModelConfig::parse(config).unwrap_err().to_string()
    }

    #[test]
    fn absent_keys_take_the_defaults_of_transformers() {
        let config = ModelConfig::parse(&llama()).unwrap();
        assert_eq!((config.kv_heads, config.head_dim), (4, 16));
        assert_eq!(config.norm_eps, 1e-6);
        assert_eq!(config.rope.unwrap()[0].theta, 10_000.0);
        assert_eq!(config.sliding_window, [None, None]);
        assert!(!config.tie_word_embeddings && !config.qkv_bias && !config.qk_norm);
        let qwen3 = with(json!({"model_type": "qwen3", "num_key_value_heads": 2}));
        assert_eq!(ModelConfig::parse(&qwen3).unwrap().head_dim, 128);
        let null = with(json!({"head_dim": null, "num_key_value_heads": null}));
        assert_eq!(ModelConfig::parse(&null).unwrap().head_dim, 16);
    }

    #[test]
    fn windows_follow_each_family() {
        let windows = |changes| ModelConfig::parse(&with(changes)).unwrap().sliding_window;
        let mistral = |window: Value| {
            windows(json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": window}))
        };
        assert_eq!(mistral(json!(16)), [Some(16), Some(16)]);
        assert_eq!(mistral(Value::Null), [None, None]);
        assert_eq!(windows(json!({"sliding_window": 16})), [None, None]);
        let qwen = json!({"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 16});
        let qwen = |changes: Value| {
            let mut all = qwen.clone();
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            windows(all)
        };
        assert_eq!(qwen(json!({})), [None, None]);
        assert_eq!(qwen(json!({"use_sliding_window": true, "max_window_layers": 1})), [None, Some(16)]);
        let types = json!(["sliding_attention", "full_attention"]);
        assert_eq!(qwen(json!({"use_sliding_window": true, "layer_types": types})), [Some(16), None]);
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let text = error(&with(json!({"model_type": "mamba"})));
        assert!(text.contains("\"mamba\"") && text.contains("llama, mistral, qwen2, qwen3"), "{text}");
        assert!(error(&with(json!({"hidden_act": "mish"}))).contains("\"mish\""));
        assert!(error(&with(json!({"num_local_experts": 8}))).contains("num_local_experts"));
        assert!(error(&with(json!({"partial_rotary_factor": 0.5}))).contains("partial_rotary_factor"));
        let rope = json!({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}});
        let text = error(&with(rope));
        assert!(text.contains("spiral") && text.contains("longrope, yarn"), "{text}");
    }

    #[test]
    fn wrong_numbers_are_refused_by_key() {
        for key in llama().as_object().unwrap().keys() {
            let mut config = llama();
            config.as_object_mut().unwrap().remove(key);
            assert!(error(&config).contains(&format!("\"{key}\"")), "{}", error(&config));
        }
        for (changes, words) in [
            (json!({"num_attention_heads": 0}), "\"num_attention_heads\" is wrong: 0"),
            (json!({"hidden_size": -3}), "\"hidden_size\" is wrong: -3"),
            (json!({"hidden_size": "64"}), "\"hidden_size\" is wrong"),
            (json!({"hidden_size": 66}), "66 is not a multiple of the 4 heads"),
            (json!({"num_key_value_heads": 3}), "3 does not divide the 4"),
            (json!({"head_dim": 15}), "15 is odd"),
            (json!({"rms_norm_eps": 0.0}), "\"rms_norm_eps\""),
            (json!({"vocab_size": 1u64 << 40}), "\"vocab_size\""),
        ] {
            let text = error(&with(changes));
            assert!(text.contains(words), "{text}");
        }
        assert!(error(&json!([])).contains("not a JSON object"));
    }

    #[test]
    fn token_ids_may_be_one_or_many() {
        let config = with(json!({"bos_token_id": 1, "eos_token_id": [2, 3]}));
        let config = ModelConfig::parse(&config).unwrap();
        assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(1), vec![2, 3]));
    }
}
