//! Answers to the questions of "How it works".

use super::protocol::Event;
use super::session::Session;
use crate::error::Result;
use crate::lesson::{Answer, Ask};

impl Session {
    /// Answers `Lesson`.
    pub async fn lesson(&mut self, _id: u32, ask: Ask) -> Result<Event> {
        let answer = match ask {
            Ask::Example(example) => Answer::Example(example.solve()?),
            Ask::Plane(plane) => Answer::Plane(plane.solve()?),
        };
        Ok(Event::Lesson(answer))
    }
}
