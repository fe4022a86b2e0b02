//! What WebGPU offers here, told before anything is opened.

use js_sys::{Function, Reflect};
use wasm_bindgen::{JsCast, JsValue};

use super::post::scope;
use super::protocol::{Adapter, Event};
use crate::storage::browser::{call_later, option, reason};

const BROWSERS: &str = "WebGPU is in Chrome and Edge 113 or later (Windows, macOS, ChromeOS; on Linux 144 with Intel \
     and 147 with NVIDIA graphics; on Android 121), Firefox 141 on Windows and 145 on macOS, and Safari 26";
const FLAGS: &str = "elsewhere on Linux start Chrome with --enable-unsafe-webgpu --enable-features=Vulkan";
const CPU: &str = "The CPU device works everywhere";

/// The answer to `Start`.
pub async fn look() -> Event {
    let (adapter, reason) = match find().await {
        Ok(adapter) => (Some(adapter), None),
        Err(reason) => (None, Some(reason)),
    };
    Event::Ready {
        adapter,
        reason,
        simd: cfg!(target_feature = "simd128"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

async fn find() -> Result<Adapter, String> {
    let gpu = get(&scope().navigator(), "gpu");
    if gpu.is_falsy() {
        let secure = get(&js_sys::global(), "isSecureContext").is_truthy();
        return Err(match secure {
            true => format!("this browser has no WebGPU. {BROWSERS}; {FLAGS}. {CPU}"),
            false => format!("WebGPU needs a page from https or from localhost. {CPU}"),
        });
    }
    let options = option("powerPreference", "high-performance");
    let adapter = call_later(&gpu, "requestAdapter", &[options.into()])
        .await
        .map_err(|error| format!("WebGPU failed: {}. {CPU}", reason(&error)))?;
    if adapter.is_falsy() {
        return Err(format!(
            "the browser has WebGPU but no adapter for it: the graphics driver is missing, too old or on the \
             browser's list of faulty ones. Update the driver; {FLAGS}. {CPU}"
        ));
    }
    let (info, limits) = (get(&adapter, "info"), get(&adapter, "limits"));
    let text = |name: &str| get(&info, name).as_string().unwrap_or_default();
    let number = |name: &str| get(&limits, name).as_f64().unwrap_or_default() as u64;
    let (vendor, architecture, description) = (text("vendor"), text("architecture"), text("description"));
    let all = format!("{vendor} {architecture} {description}").to_lowercase();
    let imitated =
        ["swiftshader", "llvmpipe", "lavapipe", "basic render"].iter().any(|word| all.contains(word));
    Ok(Adapter {
        name: [description, text("device"), format!("{vendor} {architecture}")]
            .into_iter()
            .find(|name| !name.trim().is_empty())
            .unwrap_or_else(|| "GPU".to_owned()),
        software: imitated || get(&info, "isFallbackAdapter").is_truthy(),
        vendor,
        architecture,
        shader_f16: has(&get(&adapter, "features"), "shader-f16"),
        max_buffer_bytes: number("maxBufferSize"),
        max_binding_bytes: number("maxStorageBufferBindingSize"),
    })
}

fn get(object: &JsValue, name: &str) -> JsValue {
    Reflect::get(object, &name.into()).unwrap_or(JsValue::UNDEFINED)
}

fn has(set: &JsValue, name: &str) -> bool {
    get(set, "has")
        .dyn_into::<Function>()
        .and_then(|has| has.call1(set, &name.into()))
        .is_ok_and(|found| found.is_truthy())
}
