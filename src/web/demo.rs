//! The demo model and the built-in texts: files beside the page, fetched once soon after it is loaded, so
//! that the page then works without a network. They stay the browser's; nothing is held in wasm memory.

use std::rc::Rc;

use js_sys::Uint8Array;
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{Blob, Response};

use super::post::scope;
use crate::error::{Error, Result};
use crate::storage::Source;
use crate::storage::browser::{FileSource, reason};
use crate::text::TextFile;

const MODEL: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
pub const CALIBRATION: &str = "calibration.txt";
pub const EVALUATION: &str = "evaluation.txt";

/// The model directory.
pub async fn model() -> Result<Rc<dyn Source>> {
    let mut files = Vec::new();
    for name in MODEL {
        files.push((name.to_owned(), fetched(&format!("demo/model/{name}")).await?));
    }
    Ok(Rc::new(FileSource::new("the demo model", files)))
}

/// A built-in text.
pub async fn text(name: &str) -> Result<TextFile> {
    let blob = fetched(&format!("demo/{name}")).await?;
    let buffer = JsFuture::from(blob.array_buffer()).await;
    let buffer = buffer.map_err(|error| Error::io("read", name, reason(&error)))?;
    Ok(TextFile { name: name.to_owned(), content: Uint8Array::new(&buffer).to_vec() })
}

/// Fetches everything, so that later calls need no network. What cannot be had now is asked for again
/// when it is needed, and the failure told then.
pub async fn prefetch() {
    let _ = model().await;
    for name in [CALIBRATION, EVALUATION] {
        let _ = fetched(&format!("demo/{name}")).await;
    }
}

thread_local! {
    static FETCHED: std::cell::RefCell<std::collections::BTreeMap<String, Blob>> = Default::default();
}

async fn fetched(path: &str) -> Result<Blob> {
    if let Some(blob) = FETCHED.with_borrow(|fetched| fetched.get(path).cloned()) {
        return Ok(blob);
    }
    let failed = |why: String| Error::io("fetch", path, format!("{why}; check the connection and try again"));
    let refused = |error: JsValue| failed(reason(&error));
    let response = JsFuture::from(scope().fetch_with_str(path)).await.map_err(refused)?;
    let response: Response = response.unchecked_into();
    if !response.ok() {
        return Err(failed(format!("the server answered {}", response.status())));
    }
    let blob = JsFuture::from(response.blob().map_err(refused)?).await.map_err(refused)?;
    let blob: Blob = blob.unchecked_into();
    FETCHED.with_borrow_mut(|fetched| fetched.insert(path.to_owned(), blob.clone()));
    Ok(blob)
}
