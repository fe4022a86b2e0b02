//! Answers to the questions of "How it works".

use std::rc::Rc;

use super::demo;
use super::protocol::Event;
use super::session::Session;
use crate::error::{Error, Result};
use crate::lesson::layer::{Place, Subject};
use crate::lesson::{Answer, Ask};
use crate::model::{ModelConfig, Stored};
use crate::text::ModelText;

/// The model that the last question was about.
pub struct Learning {
    own: bool,
    tokens: usize,
    subject: Subject,
}

impl Learning {
    /// It is the model that is open, not the demo model.
    pub fn own(&self) -> bool {
        self.own
    }
}

const DEMO: &str = "the demo model";

impl Session {
    /// Answers `Lesson`.
    pub async fn lesson(&mut self, id: u32, ask: Ask) -> Result<Event> {
        let tell = self.teller(id);
        let on_the_way = self.teller(id);
        if let Some(place) = ask.place() {
            self.silence();
            self.study(place).await?;
            let Some(learning) = &mut self.learning else {
                return Err(Error::Internal("a lesson without a model".into()));
            };
            let layer = learning.subject.layer(&place.module, on_the_way).await?;
            return Ok(Event::Lesson(match &ask {
                Ask::Order(ask) => Answer::Order(ask.solve(&layer).await?),
                Ask::Hessian(ask) => Answer::Hessian(ask.solve(&layer).await?),
                Ask::Damping(ask) => Answer::Damping(ask.solve(&layer, tell).await?),
                Ask::Grids(ask) => Answer::Grids(ask.solve(&layer)?),
                Ask::Diffusion(ask) => Answer::Diffusion(ask.solve(&layer).await?),
                Ask::Beside(ask) => Answer::Beside(ask.solve(&layer, tell).await?),
                _ => return Err(Error::Internal("a layer that no lesson asked for".into())),
            }));
        }
        Ok(Event::Lesson(match ask {
            Ask::Example(ask) => Answer::Example(ask.solve()?),
            Ask::Plane(ask) => Answer::Plane(ask.solve()?),
            Ask::Screen(ask) => Answer::Screen(ask.solve().await?),
            Ask::Layers { own: true } => {
                let model = self.open_model()?;
                Answer::Layers(Subject::layers(&model.name, &model.config))
            }
            Ask::Layers { own: false } => {
                let stored = Stored::open(demo::model().await?).await?;
                let config = ModelConfig::of(&stored.checkpoint)?;
                Answer::Layers(Subject::layers(DEMO, &config))
            }
            _ => return Err(Error::Internal("a lesson without its layer".into())),
        }))
    }

    /// Has the model at hand, with its texts.
    async fn study(&mut self, place: &Place) -> Result<()> {
        let (own, tokens) = (place.own, place.tokens);
        if self.learning.as_ref().is_some_and(|known| known.own == own && known.tokens == tokens) {
            return Ok(());
        }
        self.learning = None;
        let texts = (demo::text(demo::CALIBRATION).await?, demo::text(demo::EVALUATION).await?);
        let (name, stored, text) = if own {
            let text = self.model_text().await?;
            let model = self.open_model()?;
            (model.name.clone(), model.stored.clone(), text)
        } else {
            let stored = Rc::new(Stored::open(demo::model().await?).await?);
            let config = ModelConfig::of(&stored.checkpoint)?;
            let text = ModelText::load(stored.checkpoint.source().as_ref(), config.vocab_size).await?;
            (DEMO.to_owned(), stored, Rc::new(text))
        };
        let subject = Subject::new(&name, stored, &text, texts.0, &texts.1, tokens)?;
        self.learning = Some(Learning { own, tokens, subject });
        Ok(())
    }
}
