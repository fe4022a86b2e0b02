//! The worker's beginning and its loop.

use std::rc::Rc;

use js_sys::{Array, JSON, Reflect};
use serde::Deserialize;
use wasm_bindgen::prelude::*;
use web_sys::{File, FileSystemDirectoryHandle, MessageEvent};

use super::control::Control;
use super::post::{catch_panics, is_dead, post_failure, scope};
use super::protocol::{Message, Request};
use super::session::Session;
use crate::error::Error;

/// A message with what JSON cannot carry.
pub struct Posted {
    pub message: Message,
    pub files: Vec<File>,
    pub directory: Option<FileSystemDirectoryHandle>,
}

/// Begins to listen; `web/worker.js` calls it by loading the program.
pub fn main() {
    catch_panics();
    let control = Rc::new(Control::new());
    let (sender, receiver) = flume::unbounded::<Posted>();
    let heard = control.clone();
    let listener = Closure::<dyn FnMut(MessageEvent)>::new(move |event: MessageEvent| {
        let posted = match read(&event.data()) {
            Ok(posted) => posted,
            Err((id, problem)) => {
                let error = Error::Internal(format!("a message of the page is not understood: {problem}"));
                return post_failure(id, &error, false);
            }
        };
        let id = posted.message.id;
        if is_dead() {
            return post_failure(
                id,
                &Error::Internal("the program has stopped; reload the page".into()),
                true,
            );
        }
        match posted.message.request {
            Request::Pause => heard.pause(id),
            Request::Resume => heard.resume(id),
            Request::Cancel => heard.cancel(id),
            // The loop below holds the receiver for ever.
            _ => drop(sender.send(posted)),
        }
    });
    scope().set_onmessage(Some(listener.as_ref().unchecked_ref()));
    listener.forget();
    wasm_bindgen_futures::spawn_local(async move {
        let mut session = Session::new(control);
        while let Ok(posted) = receiver.recv_async().await {
            session.answer(posted).await;
        }
    });
}

fn read(data: &JsValue) -> Result<Posted, (u32, String)> {
    let field = |name: &str| Reflect::get(data, &name.into()).unwrap_or(JsValue::UNDEFINED);
    let id = field("id").as_f64().unwrap_or_default() as u32;
    let text = JSON::stringify(&field("request")).map(String::from);
    let text = text.map_err(|_| (id, "it has no request".to_owned()))?;
    let request = Request::deserialize(&mut serde_json::Deserializer::from_str(&text));
    let request = request.map_err(|error| (id, error.to_string()))?;
    let files = match field("files") {
        files if files.is_object() => {
            Array::from(&files).iter().filter_map(|file| file.dyn_into().ok()).collect()
        }
        _ => Vec::new(),
    };
    Ok(Posted { message: Message { id, request }, files, directory: field("directory").dyn_into().ok() })
}
