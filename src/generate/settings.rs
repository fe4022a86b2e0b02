//! `generation_config.json`: what ends a text, and how its makers had the model sample.

use serde_json::Value;

use super::sampler::Sampling;
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::storage::Source;

const FILE: &str = "generation_config.json";
const ADVICE: &str = "Copy it again from the original model, or remove it";

/// What a model directory says about generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationSettings {
    /// Tokens that end a text: those of generation_config.json and of config.json.
    pub stops: Vec<u32>,
    /// Whether the model's makers sample, rather than take the most likely token.
    pub do_sample: bool,
    /// How they do, with the defaults of Transformers for what the file does not say.
    pub sampling: Sampling,
    pub repetition_penalty: f32,
}

impl GenerationSettings {
    /// Reads the file, if there is one.
    ///
    /// # Errors
    /// [`Error::Model`] naming a key that is not what it should be.
    pub async fn load(source: &dyn Source, config: &ModelConfig) -> Result<Self> {
        let content = match source.size(FILE) {
            Some(size) => source.read(FILE, 0..size).await?,
            None => b"{}".to_vec(),
        };
        let place = format!("{}/{FILE}", source.describe());
        let value = serde_json::from_slice(&content)
            .map_err(|error| Error::model(&place, format!("not valid JSON: {error}"), ADVICE))?;
        Self::parse(&value, &config.eos_token_ids, &place)
    }

    /// From the file's content; `stops` are those of config.json.
    fn parse(value: &Value, stops: &[u32], place: &str) -> Result<Self> {
        let get = |key: &str| value.get(key).filter(|value| !value.is_null());
        let wrong = |key: &str, what: &str| {
            let found = get(key).map_or(String::new(), Value::to_string);
            Error::model(place, format!("\"{key}\" is {found}, not {what}"), ADVICE)
        };
        let number = |key: &str, default: f64| match get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| wrong(key, "a number")),
        };
        let mut all = vec![];
        if let Some(value) = get("eos_token_id") {
            let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for id in list {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                all.push(id.ok_or_else(|| wrong("eos_token_id", "a token id or a list of them"))?);
            }
        }
        all.extend(stops);
        all.sort_unstable();
        all.dedup();
        let top_k = match get("top_k") {
            None => 50,
            Some(value) => value.as_u64().ok_or_else(|| wrong("top_k", "a whole number"))? as usize,
        };
        Ok(Self {
            stops: all,
            do_sample: match get("do_sample") {
                None => false,
                Some(value) => value.as_bool().ok_or_else(|| wrong("do_sample", "true or false"))?,
            },
            sampling: Sampling {
                temperature: number("temperature", 1.0)? as f32,
                top_k,
                top_p: number("top_p", 1.0)? as f32,
                min_p: number("min_p", 0.0)? as f32,
                seed: 0,
            },
            repetition_penalty: number("repetition_penalty", 1.0)? as f32,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<GenerationSettings> {
        GenerationSettings::parse(&value, &[2], "m/generation_config.json")
    }

    #[test]
    fn stops_are_one_or_many_and_those_of_config_json_count_too() {
        assert_eq!(parse(json!({})).unwrap().stops, [2]);
        assert_eq!(parse(json!({"eos_token_id": 7})).unwrap().stops, [2, 7]);
        assert_eq!(parse(json!({"eos_token_id": [9, 2, 7]})).unwrap().stops, [2, 7, 9]);
        assert_eq!(parse(json!({"eos_token_id": null})).unwrap().stops, [2]);
    }

    #[test]
    fn what_the_file_does_not_say_is_as_in_transformers() {
        let settings = parse(json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9})).unwrap();
        let sampling = Sampling { temperature: 0.6, top_k: 50, top_p: 0.9, min_p: 0.0, seed: 0 };
        assert!(settings.do_sample);
        assert_eq!((settings.sampling, settings.repetition_penalty), (sampling, 1.0));
        assert!(!parse(json!({})).unwrap().do_sample);
    }

    #[test]
    fn wrong_values_are_named() {
        for (value, words) in [
            (json!({"eos_token_id": "x"}), "\"eos_token_id\" is \"x\""),
            (json!({"eos_token_id": [1, -2]}), "\"eos_token_id\" is [1,-2]"),
            (json!({"top_k": 0.5}), "\"top_k\" is 0.5"),
            (json!({"do_sample": 1}), "\"do_sample\" is 1"),
            (json!({"temperature": "hot"}), "\"temperature\" is \"hot\""),
        ] {
            let text = parse(value).unwrap_err().to_string();
            assert!(text.starts_with("m/generation_config.json: ") && text.contains(words), "{text}");
        }
    }
}
