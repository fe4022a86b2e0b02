//! What went wrong on a GPU: wgpu tells it later, and not where it happened.
//!
//! Each fault is kept until the next wait and returned from there. Shaders and large buffers are made within an
//! error scope of their own, so that their faults come with a name or a size; what follows from them, and all
//! else, comes without. Scopes are awaited where a wait is made anyway, so they cost no round trip.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;

use crate::error::Error;
use crate::face;

/// What a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    /// A kernel was made into a pipeline.
    Shader(&'static str),
    /// A buffer of so many bytes was made.
    Buffer(u64),
    /// Memory ran out elsewhere.
    Memory,
    /// A lost device stays lost, and silently computes nothing.
    Lost,
    /// wgpu or the browser takes what we asked for to be wrong, nobody knows where.
    Call,
}

impl About {
    /// Of an error that no scope caught.
    pub fn uncaptured(error: &wgpu::Error) -> Self {
        match error {
            wgpu::Error::OutOfMemory { .. } => Self::Memory,
            _ => Self::Call,
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Fault {
    about: About,
    text: String,
}

impl Fault {
    pub fn new(about: About, text: &str) -> Self {
        // wgpu's messages span lines and end with a stop; an error here is one line, and goes on.
        let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
        Self { about, text: line.trim_end_matches('.').to_owned() }
    }

    /// What a person is told; `device` is the adapter's name.
    pub fn error(self, device: &str) -> Error {
        let running = format!("running on {device}");
        let room = || {
            format!(
                "Lower {}, close other programs that use the GPU, or use the CPU device",
                face::MAX_MEMORY
            )
        };
        let bug = || {
            format!(
                "This is a fault of Halftone or of the driver. {}, and report it with {}",
                face::USE_CPU,
                face::WHAT_SHOWS_IT
            )
        };
        match self.about {
            About::Shader(name) => {
                Error::device(format!("compiling the shader {name} for {device}"), self.text, bug())
            }
            About::Buffer(bytes) => {
                let size = bytes as f64 / 1e6;
                Error::device(running, format!("{} for a buffer of {size:.1} MB", self.text), room())
            }
            About::Memory | About::Lost => Error::device(running, self.text, room()),
            About::Call => Error::device(running, self.text, bug()),
        }
    }
}

/// The first fault since the last wait; later ones mostly follow from it.
#[derive(Default)]
pub(super) struct Faults {
    first: Option<Fault>,
    lost: bool,
}

impl Faults {
    pub fn record(slot: &Mutex<Self>, about: About, text: &str) {
        let Ok(mut faults) = slot.lock() else { return };
        let fault = Fault::new(about, text);
        let lost = about == About::Lost;
        // What a scope caught was the cause of what nobody caught, whichever is told first.
        match &faults.first {
            Some(first) if lost || first.about != About::Call || about == About::Call => {}
            _ => faults.first = Some(fault),
        }
        faults.lost |= lost;
    }

    pub fn is_lost(&self) -> bool {
        self.lost
    }

    pub fn take(&mut self) -> Option<Fault> {
        if self.lost { self.first.clone() } else { self.first.take() }
    }
}

/// A scope that is closed, and what it was around.
pub(super) struct Watched {
    pub about: About,
    pub outcome: Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(faults: &[(About, &str)]) -> String {
        let slot = Mutex::new(Faults::default());
        for (about, text) in faults {
            Faults::record(&slot, *about, text);
        }
        slot.into_inner().unwrap().take().unwrap().error("a GPU").to_string()
    }

    #[test]
    fn only_memory_gets_the_advice_for_memory() {
        let buffer = told(&[(About::Buffer(64_000_000), "Out of Memory")]);
        assert!(buffer.contains("Out of Memory for a buffer of 64.0 MB. Lower --max-memory"), "{buffer}");
        let shader = told(&[(About::Shader("sweep"), "line 3:\n  no `x`.\n")]);
        assert!(
            shader.starts_with("compiling the shader sweep for a GPU: line 3: no `x`. This is"),
            "{shader}"
        );
        assert!(shader.contains("Use --device cpu, and report it with the command"), "{shader}");
        let call = told(&[(About::Call, "buffer too small")]);
        for message in [shader, call] {
            assert!(!message.contains("--max-memory"), "{message}");
        }
    }

    #[test]
    fn the_cause_is_told_and_not_what_follows_from_it() {
        let shader = (About::Shader("sweep"), "no `x`");
        assert!(told(&[(About::Call, "invalid pipeline"), shader, (About::Call, "more")]).contains("no `x`"));
        assert!(told(&[shader, (About::Shader("gemm"), "no `y`")]).contains("no `x`"));
        assert!(told(&[(About::Memory, "out"), (About::Lost, "lost")]).contains("out"));
        let lost = Mutex::new(Faults::default());
        Faults::record(&lost, About::Lost, "the device was lost");
        for _ in 0..2 {
            let mut faults = lost.lock().unwrap();
            assert!(faults.is_lost() && faults.take().is_some());
        }
    }
}
