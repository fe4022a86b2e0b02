//! How GPTQ works, on numbers that a person can touch: what the page's "How it works" asks for.
//!
//! Each file has one lesson: what is asked (serde), and the answer. Small problems are worked out in f64 by
//! [`trace`], a loop that writes down what happens in it and is tested to give the codes of the real one.

pub mod example;
pub mod plane;
pub mod trace;

use serde::{Deserialize, Serialize};

/// A question.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "lesson", rename_all = "snake_case")]
pub enum Ask {
    Example(example::Example),
    Plane(plane::Plane),
}

/// Its answer.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "lesson", rename_all = "snake_case")]
pub enum Answer {
    Example(example::Traced),
    Plane(plane::Solved),
}
