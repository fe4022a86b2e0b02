//! The native face: commands, their options, and how their results are shown.
//!
//! Results go to standard output (with `--json` as one JSON object), progress and warnings to
//! standard error. Exit codes are those of [`Error::exit_code`](crate::error::Error::exit_code).

/// A line on standard output, see [`say`].
macro_rules! say {
    ($($format:tt)*) => { $crate::cli::say(format_args!($($format)*)) };
}

mod adapters;
mod allocation;
mod bench;
mod bench_decode;
mod bench_qmatmul;
mod bench_quality;
mod chat;
mod compare;
mod convert;
mod demo;
mod eval;
mod generate;
mod inspect;
mod open;
mod options;
mod plan;
mod progress;
mod quantize;
mod sampling;
mod table;
mod tokens;
mod trial;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};

/// GPTQ quantization of language models on your own machine.
///
/// Exit codes: 0 done, 2 wrong options, 3 unusable model or text, 4 read or write failed, 5 device,
/// 6 numbers not finite, 7 cannot resume, 70 a bug, 130 stopped on request.
#[derive(Parser)]
#[command(name = "halftone", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Quantize a Hugging Face model directory to a GPTQ or compressed-tensors checkpoint
    Quantize(quantize::Args),
    /// Check a quantization without doing it: table of layers, memory, time, output size
    Plan(plan::Args),
    /// Show what a model directory holds, and what a loader would trip over
    Inspect(inspect::Args),
    /// Rewrite a quantized model in another file format, without quantizing again
    Convert(convert::Args),
    /// Print the token ids that a calibration takes, as rows that --calibration and --text read
    Tokens(tokens::Args),
    /// List the GPU adapters of this machine
    Adapters(adapters::Args),
    /// Perplexity of a dense or quantized model on a text
    Eval(eval::Args),
    /// Compare a quantized model with its original: divergence, agreement, error by block
    Compare(compare::Args),
    /// Continue a text with a dense or quantized model
    Generate(generate::Args),
    /// Talk with a model that has a chat template
    Chat(chat::Args),
    /// Quantize the embedded demo model at 4, 3 and 2 bits and compare
    Demo(demo::Args),
    /// Measure kernels and whole runs
    Bench(bench::Args),
}

/// Prints a line. A reader that has enough (`halftone plan … | head`) is no error, and no reason to
/// stop a run; any other failure ends the process as a failed write does.
fn say(line: std::fmt::Arguments) {
    use std::io::{ErrorKind, Write};
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            let error = Error::io("write", "standard output", error);
            eprintln!("halftone: {error}");
            std::process::exit(error.exit_code().into());
        }
        _ => {}
    }
}

/// Parses the command line and runs it.
pub fn main() -> ExitCode {
    quiet_vulkan_layer();
    let cli = Cli::parse();
    // On a thread of the pool that shares the work, so that no kernel waits for one to wake up first.
    match rayon::scope(|_| pollster::block_on(run(cli.command))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("halftone: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

async fn run(command: Command) -> Result<()> {
    match command {
        Command::Quantize(args) => quantize::run(args).await,
        Command::Plan(args) => plan::run(args).await,
        Command::Inspect(args) => inspect::run(args).await,
        Command::Convert(args) => convert::run(args).await,
        Command::Tokens(args) => tokens::run(args).await,
        Command::Adapters(args) => adapters::run(args).await,
        Command::Eval(args) => eval::run(args).await,
        Command::Compare(args) => compare::run(args).await,
        Command::Generate(args) => generate::run(args).await,
        Command::Chat(args) => chat::run(args).await,
        Command::Demo(args) => demo::run(args).await,
        Command::Bench(args) => bench::run(args).await,
    }
}

/// Mesa's device-select layer writes an error to standard error on every machine without a desktop.
/// It only orders devices for desktops, so it is left out unless the user has set it.
fn quiet_vulkan_layer() {
    const SWITCH: &str = "NODEVICE_SELECT";
    if std::env::var_os(SWITCH).is_none() {
        // SAFETY: the process has one thread so far, so nobody reads the environment meanwhile.
        unsafe { std::env::set_var(SWITCH, "1") };
    }
}
