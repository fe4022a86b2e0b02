//! Pause, Resume and Cancel: what may be said while something is under way.

use std::cell::Cell;

use web_time::Instant;

use super::post::{post, post_failure};
use super::protocol::Event;
use super::turn::next_turn;
use crate::error::Error;

/// The wishes of the page, looked at by the job at its stopping points.
pub struct Control {
    busy: Cell<bool>,
    cancelled: Cell<bool>,
    /// The Pause that is not answered yet.
    pause: Cell<Option<u32>>,
    /// The Resume that is not answered yet.
    resume: Cell<Option<u32>>,
    paused: Cell<bool>,
    wake: (flume::Sender<()>, flume::Receiver<()>),
}

impl Control {
    pub fn new() -> Self {
        Self {
            busy: Cell::default(),
            cancelled: Cell::default(),
            pause: Cell::default(),
            resume: Cell::default(),
            paused: Cell::default(),
            wake: flume::unbounded(),
        }
    }

    pub fn pause(&self, id: u32) {
        match self.busy.get() && !self.paused.get() {
            true => self.pause.set(Some(id)),
            false => self.refuse(id),
        }
    }

    pub fn resume(&self, id: u32) {
        if self.paused.get() {
            self.resume.set(Some(id));
            self.wake();
        } else if let Some(pause) = self.pause.take() {
            // It had not come to a point where it could wait.
            post(pause, Event::Paused);
            post(id, Event::Resumed);
        } else {
            self.refuse(id);
        }
    }

    /// The job's own request is what gets the answer.
    pub fn cancel(&self, id: u32) {
        match self.busy.get() {
            true => self.cancelled.set(true),
            false => self.refuse(id),
        }
        self.wake();
    }

    fn wake(&self) {
        // The receiver lives as long as the sender.
        let _ = self.wake.0.send(());
    }

    fn refuse(&self, id: u32) {
        let what = if self.paused.get() { "it is paused already" } else { "nothing is under way" };
        post_failure(id, &Error::options(what, "There is nothing to do"), false);
    }

    /// A job begins: earlier wishes are not meant for it.
    pub fn begin(&self) {
        self.cancelled.set(false);
        self.busy.set(true);
        self.wake.1.drain();
    }

    pub fn end(&self) {
        self.busy.set(false);
        self.paused.set(false);
        for id in [self.pause.take(), self.resume.take()].into_iter().flatten() {
            self.refuse(id);
        }
    }

    pub fn cancelled(&self) -> bool {
        self.cancelled.get()
    }

    /// Lets messages in, and waits while the page wants a pause; returns the seconds waited.
    pub async fn breathe(&self) -> f64 {
        next_turn().await;
        let Some(id) = self.pause.take() else { return 0.0 };
        let since = Instant::now();
        self.paused.set(true);
        post(id, Event::Paused);
        while self.resume.get().is_none() && !self.cancelled.get() {
            let _ = self.wake.1.recv_async().await;
        }
        self.paused.set(false);
        if let Some(id) = self.resume.take() {
            post(id, Event::Resumed);
        }
        since.elapsed().as_secs_f64()
    }
}
