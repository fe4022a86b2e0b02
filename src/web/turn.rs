//! Letting the worker's event loop turn.

use js_sys::Promise;
use wasm_bindgen::JsValue;
use wasm_bindgen_futures::JsFuture;
use web_sys::MessageChannel;

thread_local! {
    static CHANNEL: Option<MessageChannel> = MessageChannel::new().ok();
}

/// Comes back after the event loop has turned, so that messages of the page get in. By a message to
/// itself, since timers are held back in tabs that nobody looks at.
pub async fn next_turn() {
    let turned = CHANNEL.with(|channel| {
        let channel = channel.as_ref()?;
        Some(Promise::new(&mut |resolve, _| {
            channel.port1().set_onmessage(Some(&resolve));
            // Fails for what cannot be copied only.
            let _ = channel.port2().post_message(&JsValue::NULL);
        }))
    });
    if let Some(turned) = turned {
        let _ = JsFuture::from(turned).await;
    }
}
