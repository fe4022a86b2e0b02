//! Answers to the page, and what becomes of a panic.

use std::cell::Cell;

use js_sys::WebAssembly::RuntimeError;
use js_sys::{Array, JSON, Reflect};
use wasm_bindgen::prelude::*;
use web_sys::{DedicatedWorkerGlobalScope, File};

use super::protocol::{Answer, Event};
use crate::error::Error;
use crate::face;

thread_local! {
    /// The request being worked on.
    static CURRENT: Cell<u32> = const { Cell::new(0) };
    /// A panic has been told to the page.
    static DEAD: Cell<bool> = const { Cell::new(false) };
}

/// The worker's own scope.
pub fn scope() -> DedicatedWorkerGlobalScope {
    js_sys::global().unchecked_into()
}

/// From here on a panic answers the request `id`.
pub fn begin(id: u32) {
    CURRENT.set(id);
}

pub fn post(id: u32, event: Event) {
    post_with(id, event, None);
}

/// Posts an event with files beside it.
pub fn post_files(id: u32, event: Event, files: Vec<File>) {
    post_with(id, event, Some(files.into_iter().collect()));
}

fn post_with(id: u32, event: Event, files: Option<Array>) {
    // Events are plain data: they become JSON, and the JSON an object, without fail.
    let Ok(text) = serde_json::to_string(&Answer { id, event }) else { return };
    let Ok(message) = JSON::parse(&text) else { return };
    if let Some(files) = files {
        let _ = Reflect::set(&message, &"files".into(), &files);
    }
    if let Err(error) = scope().post_message(&message) {
        web_sys::console::error_1(&error);
    }
}

pub fn post_failure(id: u32, error: &Error, resumable: bool) {
    post_failed(id, error, resumable, None);
}

/// `rule`: which of the settings' rules is at fault.
pub fn post_failed(id: u32, error: &Error, resumable: bool, rule: Option<usize>) {
    post(id, Event::Failed { message: error.to_string(), code: error.exit_code(), resumable, rule });
}

/// Has panics, and what ends the program without one (no memory left), answered like any failure.
pub fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let what = panic.to_string();
        web_sys::console::error_1(&JsValue::from(what.as_str()));
        // wgpu knows two of WebGPU's three kinds of error and panics at the third, the driver's own.
        if what.contains("webgpu.rs") && what.contains("Unexpected error") {
            return die(&format!(
                "the graphics driver failed, and the browser tells no more than that it did. Reload the page. {}, or \
                 update the driver",
                face::USE_CPU
            ));
        }
        die(&Error::Internal(what.split_whitespace().collect::<Vec<_>>().join(" ")).to_string());
    }));
    for (event, field) in [("onerror", None), ("onunhandledrejection", Some("reason"))] {
        let ended = Closure::<dyn FnMut(JsValue, JsValue, JsValue, JsValue, JsValue)>::new(
            move |first: JsValue, _, _, _, fifth: JsValue| {
                let thrown =
                    field.map_or(fifth, |field| Reflect::get(&first, &field.into()).unwrap_or_default());
                if let Some(error) = thrown.dyn_ref::<RuntimeError>() {
                    die(&format!(
                        "the program stopped ({}), most likely because memory ran out. Reload the page and use \
                         fewer or shorter samples",
                        String::from(error.unchecked_ref::<js_sys::Error>().message())
                    ));
                }
            },
        );
        let _ = Reflect::set(&scope(), &event.into(), ended.as_ref());
        ended.forget();
    }
}

/// A panic leaves nothing that could answer again.
pub fn is_dead() -> bool {
    DEAD.get()
}

/// What was at work is gone, but finished blocks are kept.
fn die(message: &str) {
    if !DEAD.replace(true) {
        post(
            CURRENT.get(),
            Event::Failed { message: message.to_owned(), code: 70, resumable: true, rule: None },
        );
    }
}
