//! The browser face: a dedicated worker that owns the core; the page only shows.
//!
//! [`protocol`] is what the two say to each other. Requests are worked off one after another by
//! [`session`](self); only Pause, Resume and Cancel take effect while one is under way, at the
//! points where a run waits ([`Observer::pause`](crate::pipeline::Observer::pause)).

mod adapter;
mod control;
mod demo;
mod how;
mod job;
mod judge;
mod post;
pub mod protocol;
mod session;
mod shelf;
mod turn;
mod voice;
mod watcher;
mod worker;

pub use worker::main;
