//! The command line; everything it does is in the library.

#[cfg(not(target_arch = "wasm32"))]
fn main() -> std::process::ExitCode {
    halftone::cli::main()
}

#[cfg(target_arch = "wasm32")]
fn main() {}
