//! The one error type. Every message says what happened, where, and what to do about it.

use std::fmt;

use crate::face;

/// Shorthand used throughout the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, by the kind of remedy it has.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system or the browser refused a read or a write.
    #[error("cannot {action} {path}: {reason}")]
    Io { action: &'static str, path: String, reason: String },

    /// A model directory, a checkpoint file or a configuration is not what it should be.
    #[error("{place}: {problem}. {advice}")]
    Model { place: String, problem: String, advice: String },

    /// The model is fine, but of a kind that is not supported.
    #[error("{problem}. {advice}")]
    Unsupported { problem: String, advice: String },

    /// Options contradict each other or do not fit the model.
    #[error("{problem}. {advice}")]
    Options { problem: String, advice: String },

    /// Calibration or evaluation text cannot be used.
    #[error("{place}: {problem}. {advice}")]
    Text { place: String, problem: String, advice: String },

    /// No usable adapter, a failed self-test, a lost device, memory that ran out.
    #[error("{step}: {problem}. {advice}")]
    Device { step: String, problem: String, advice: String },

    /// Numbers went wrong: a weight or an activation is not finite.
    #[error("{place}: {problem}. {advice}")]
    Numeric { place: String, problem: String, advice: String },

    /// An unfinished run cannot go on because something changed.
    #[error("cannot resume: {problem}. {advice}")]
    Resume { problem: String, advice: String },

    /// The user asked to stop; what is finished is kept.
    #[error("stopped on request {place}; {advice}")]
    Interrupted { place: String, advice: String },

    /// A bug in Halftone itself.
    #[error(
        "internal error: {0}. This is a bug in Halftone; please report it with {what}",
        what = face::WHAT_SHOWS_IT
    )]
    Internal(String),
}

impl Error {
    pub fn io(action: &'static str, path: impl fmt::Display, reason: impl fmt::Display) -> Self {
        Self::Io { action, path: path.to_string(), reason: reason.to_string() }
    }

    pub fn model(place: impl fmt::Display, problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Model { place: place.to_string(), problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn unsupported(problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Unsupported { problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn options(problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Options { problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn text(place: impl fmt::Display, problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Text { place: place.to_string(), problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn device(step: impl fmt::Display, problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Device { step: step.to_string(), problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn numeric(place: impl fmt::Display, problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Numeric { place: place.to_string(), problem: problem.to_string(), advice: advice.to_string() }
    }

    pub fn resume(problem: impl fmt::Display, advice: impl fmt::Display) -> Self {
        Self::Resume { problem: problem.to_string(), advice: advice.to_string() }
    }

    /// The process exit code: 2 wrong options, 3 unusable model or text, 4 read or write failed,
    /// 5 device, 6 numeric failure, 7 cannot resume, 130 stopped on request, 70 a bug.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Options { .. } => 2,
            Self::Model { .. } | Self::Unsupported { .. } | Self::Text { .. } => 3,
            Self::Io { .. } => 4,
            Self::Device { .. } => 5,
            Self::Numeric { .. } => 6,
            Self::Resume { .. } => 7,
            Self::Internal(_) => 70,
            Self::Interrupted { .. } => 130,
        }
    }
}
