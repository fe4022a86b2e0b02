//! A conversation: messages, and the prompt that the model's chat template makes of them.

use serde_json::{Value, json};

use super::{Event, Finish, Generated, Generator, Options};
use crate::error::{Error, Result};
use crate::text::{Clock, RenderOptions};

/// The messages so far. They belong to no model: two models may answer the same.
#[derive(Debug, Clone, Default)]
pub struct Chat {
    messages: Vec<Value>,
}

impl Chat {
    /// An empty conversation, under a system prompt if there is one.
    pub fn new(system: Option<&str>) -> Self {
        let mut chat = Self::default();
        chat.messages.extend(system.map(|text| json!({"role": "system", "content": text})));
        chat
    }

    /// The messages, each with `role` and `content`.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Forgets all but the system prompt.
    pub fn reset(&mut self) {
        self.messages.retain(|message| message["role"] == "system");
    }

    /// What the person says.
    pub fn say(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// Takes back the last message, if there is one that is not the system prompt.
    pub fn take_back(&mut self) {
        if self.messages.last().is_some_and(|message| message["role"] != "system") {
            self.messages.pop();
        }
    }

    /// The model's answer to what was said, which joins the messages as far as it came.
    ///
    /// # Errors
    /// [`Error::Model`] when the model has no chat template or no tokenizer; [`Error::Text`] when the
    /// template refuses the messages or they are longer than the context; those of
    /// [`Generator::generate`]. The messages then stay as they were.
    pub async fn answer(
        &mut self,
        generator: &mut Generator,
        options: &Options,
        tell: impl AsyncFnMut(Event<'_>) -> bool,
    ) -> Result<Generated> {
        let prompt = self.prompt(generator)?;
        let generated = generator.generate(&prompt, options, tell).await?;
        match generated.finish {
            // Stopped before it began: as if nothing had been said.
            Finish::Stopped if generated.ids.is_empty() => self.take_back(),
            _ => self.messages.push(json!({"role": "assistant", "content": generated.text})),
        }
        Ok(generated)
    }

    /// The token ids of the conversation up to where the answer begins.
    fn prompt(&self, generator: &Generator) -> Result<Vec<u32>> {
        let text = generator.text();
        let options = RenderOptions { add_generation_prompt: true, tools: None, clock: Clock::Now };
        let rendered = text.chat()?.render(&Value::from(self.messages.clone()), options)?;
        let ids = text.tokenizer()?.encode(&rendered, false)?;
        let context = generator.decoder().context();
        if ids.len() >= context {
            return Err(Error::text(
                "the conversation",
                format!("its {} tokens leave no room in the context of {context}", ids.len()),
                "Begin a new one, or ask for a longer context if the model has one",
            ));
        }
        Ok(ids)
    }
}
