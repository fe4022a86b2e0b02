//! The command line, or in a browser the worker behind the page; everything they do is in the library.

#[cfg(not(target_arch = "wasm32"))]
fn main() -> std::process::ExitCode {
    halftone::cli::main()
}

#[cfg(target_arch = "wasm32")]
fn main() {
    halftone::web::main();
}
