//! How GPTQ works, on numbers that a person can touch: what the page's "How it works" asks for.
//!
//! Each file has one lesson: what is asked (serde), and the answer. Small problems are worked out in f64 by
//! [`trace`], a loop that writes down what happens in it and is tested to give the codes of the real one.
//! Layers of a model ([`layer`]) go through the product's own functions ([`methods`]).

pub mod diffusion;
pub mod example;
pub mod grids;
pub mod hessian;
pub mod layer;
pub mod methods;
pub mod order;
pub mod plane;
pub mod scaling;
pub mod screen;
pub mod trace;

use serde::{Deserialize, Serialize};

/// A question.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "lesson", rename_all = "snake_case")]
pub enum Ask {
    Example(example::Example),
    Plane(plane::Plane),
    Screen(screen::Screen),
    /// The layers of the demo model, or of the model that is open.
    Layers {
        own: bool,
    },
    Order(order::Ordering),
    Hessian(hessian::View),
    Damping(hessian::Damping),
    Grids(grids::Grids),
    Diffusion(diffusion::Diffusion),
    Beside(scaling::Beside),
}

impl Ask {
    /// The layer that the question is about.
    pub fn place(&self) -> Option<&layer::Place> {
        match self {
            Self::Example(_) | Self::Plane(_) | Self::Screen(_) | Self::Layers { .. } => None,
            Self::Order(ask) => Some(&ask.place),
            Self::Hessian(ask) => Some(&ask.place),
            Self::Damping(ask) => Some(&ask.place),
            Self::Grids(ask) => Some(&ask.place),
            Self::Diffusion(ask) => Some(&ask.place),
            Self::Beside(ask) => Some(&ask.place),
        }
    }
}

/// Its answer.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "lesson", rename_all = "snake_case")]
pub enum Answer {
    Example(example::Traced),
    Plane(plane::Solved),
    Screen(screen::Printed),
    Layers(layer::Layers),
    Order(order::Orders),
    Hessian(hessian::Cells),
    Damping(hessian::Damped),
    Grids(grids::Compared),
    Diffusion(diffusion::Diffused),
    Beside(scaling::Contest),
}
