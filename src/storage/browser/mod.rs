//! Files of a browser: those that a person chose, a folder of theirs, and the private storage of the
//! page's origin.
//!
//! Nothing here holds more than the piece at hand: a `File` is a reference that is read by ranges, and
//! output goes straight to where it stays.

mod folder;
mod private;
mod source;

use js_sys::{Array, Function, Object, Promise, Reflect};
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::{DomException, File, FileSystemDirectoryHandle, FileSystemFileHandle};

use crate::error::{Error, Result};

pub use folder::FolderSink;
pub use private::PrivateSink;
pub use source::FileSource;

/// What a browser throws, in words of this program where it has better ones.
pub fn reason(error: &JsValue) -> String {
    let Some(exception) = error.dyn_ref::<DomException>() else {
        return match error.dyn_ref::<js_sys::Error>() {
            Some(error) => String::from(error.message()),
            None => format!("{error:?}"),
        };
    };
    match exception.name().as_str() {
        "NotFoundError" => "there is no such file any more".to_owned(),
        "QuotaExceededError" => "no space left; free some, or write to another place".to_owned(),
        "NotReadableError" => "it was changed or moved since it was chosen; choose it again".to_owned(),
        "NotAllowedError" => "the browser does not permit it; choose the folder again".to_owned(),
        "NoModificationAllowedError" => "it is in use, perhaps by another tab; close that one".to_owned(),
        name => format!("{name}: {}", exception.message()),
    }
}

fn is_absent(error: &JsValue) -> bool {
    error.dyn_ref::<DomException>().is_some_and(|error| error.name() == "NotFoundError")
}

/// Calls a method that the bindings lack, or have under conditions only.
pub fn call(object: &JsValue, method: &str, arguments: &[JsValue]) -> Result<JsValue, JsValue> {
    let function: Function = Reflect::get(object, &method.into())?.dyn_into()?;
    function.apply(object, &arguments.iter().cloned().collect::<Array>())
}

/// The same for a method that answers later.
pub async fn call_later(
    object: &JsValue,
    method: &str,
    arguments: &[JsValue],
) -> std::result::Result<JsValue, JsValue> {
    JsFuture::from(Promise::resolve(&call(object, method, arguments)?)).await
}

async fn settled<T: JsCast>(promise: Promise) -> std::result::Result<T, JsValue> {
    JsFuture::from(promise).await?.dyn_into()
}

/// `{key: value}`, for options.
pub fn option(key: &str, value: impl Into<JsValue>) -> Object {
    let object = Object::new();
    // Setting a property of a fresh object cannot fail.
    let _ = Reflect::set(&object, &key.into(), &value.into());
    object
}

/// A directory within another; `None` if there is none and none is to be created.
///
/// # Errors
/// [`Error::Io`] if the browser refuses.
pub async fn directory(
    parent: &FileSystemDirectoryHandle,
    name: &str,
    create: bool,
) -> Result<Option<FileSystemDirectoryHandle>> {
    let options = option("create", create);
    match settled(parent.get_directory_handle_with_options(name, options.unchecked_ref())).await {
        Ok(handle) => Ok(Some(handle)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(Error::io("open", name, reason(&error))),
    }
}

/// Name and handle of everything in a directory, sorted by name; files first tell by their kind.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub async fn children(
    directory: &FileSystemDirectoryHandle,
) -> Result<Vec<(String, web_sys::FileSystemHandle)>> {
    let refused = |error: JsValue| Error::io("list", directory.name(), reason(&error));
    let values = directory.values();
    let mut found = Vec::new();
    loop {
        let step: JsValue = settled(values.next().map_err(refused)?).await.map_err(refused)?;
        let step: js_sys::IteratorNext = step.unchecked_into();
        if step.done() {
            break;
        }
        let handle: web_sys::FileSystemHandle = step.value().unchecked_into();
        found.push((handle.name(), handle));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The files in a directory, sorted by name.
///
/// # Errors
/// [`Error::Io`] if it cannot be listed.
pub async fn files(directory: &FileSystemDirectoryHandle) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for (name, handle) in children(directory).await? {
        let Ok(handle) = handle.dyn_into::<FileSystemFileHandle>() else { continue };
        let file = settled(handle.get_file()).await;
        files.push(file.map_err(|error| Error::io("open", name, reason(&error)))?);
    }
    Ok(files)
}

/// A file's handle; `None` if there is none.
async fn file_handle(
    directory: &FileSystemDirectoryHandle,
    name: &str,
) -> std::result::Result<Option<FileSystemFileHandle>, JsValue> {
    match settled(directory.get_file_handle(name)).await {
        Ok(handle) => Ok(Some(handle)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn new_file(
    directory: &FileSystemDirectoryHandle,
    name: &str,
) -> std::result::Result<FileSystemFileHandle, JsValue> {
    let options = option("create", true);
    settled(directory.get_file_handle_with_options(name, options.unchecked_ref())).await
}

async fn snapshot(
    directory: &FileSystemDirectoryHandle,
    name: &str,
) -> std::result::Result<Option<File>, JsValue> {
    match file_handle(directory, name).await? {
        Some(handle) => settled(handle.get_file()).await.map(Some),
        None => Ok(None),
    }
}

async fn remove(directory: &FileSystemDirectoryHandle, name: &str) -> std::result::Result<(), JsValue> {
    match JsFuture::from(directory.remove_entry(name)).await {
        Err(error) if !is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

/// A sink has this much to keep of a file; refuses one that is shorter.
fn check_kept(path: &str, length: f64, keep: u64) -> Result<()> {
    match keep as f64 > length {
        true => Err(Error::io(
            "continue",
            path,
            format_args!("it holds {length} bytes, fewer than the {keep} to keep"),
        )),
        false => Ok(()),
    }
}
