//! `halftone chat`: a conversation on the terminal.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::generate::{Model, load, show, summary};
use super::open;
use super::options::DeviceArgs;
use super::sampling::SamplingArgs;
use crate::error::{Error, Result};
use crate::generate::{Chat, Finish};

/// Say something and press Enter. /reset forgets the conversation, /quit or the end of the input ends
/// it; Ctrl-C stops an answer.
#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized, whose model has a chat template
    model: PathBuf,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of the longest conversation [default: 4096, or as many positions as the model has]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Room for a conversation of some pages, which costs little memory.
const CONTEXT: usize = 4096;

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.model).await?;
    let model = Model::open(&stored).await?;
    let options = args.sampling.options(&model.settings)?;
    model.text.chat()?;
    model.text.tokenizer()?;
    let positions = model.config.max_position_embeddings;
    let context = match args.context {
        Some(context) if context > positions => {
            return Err(Error::options(
                format!("--context {context} is more than the model's {positions} positions"),
                "Ask for at most as many",
            ));
        }
        Some(context) => context,
        None => CONTEXT.min(positions),
    };
    let device = open::device(&args.device).await?;
    let state = interrupts();
    let mut generator = load(&stored, model.text, &device, context, || false).await?;
    let mut chat = Chat::new(args.system.as_deref());
    while let Some(line) = read_line()? {
        match line.trim() {
            "" => continue,
            "/quit" | "/exit" => break,
            "/reset" => {
                chat.reset();
                eprintln!("the conversation is forgotten");
                continue;
            }
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                eprintln!("there is no {command}; there are /reset and /quit");
                continue;
            }
            text => chat.say(text),
        }
        state.store(ANSWERING, Ordering::SeqCst);
        let answer = chat.answer(&mut generator, &options, async |event| {
            show(event);
            state.load(Ordering::SeqCst) != STOPPING
        });
        let answer = answer.await;
        state.store(LISTENING, Ordering::SeqCst);
        match answer {
            Ok(answer) => {
                say!("");
                let why = match answer.finish {
                    Finish::StopToken => "",
                    Finish::MaxTokens => "; cut at --max-tokens",
                    Finish::Context => "; cut at the end of the context, /reset to begin anew",
                    Finish::Stopped => "; stopped",
                };
                eprintln!("[{}{why}]", summary(&answer, &generator));
            }
            // A text that does not fit is no reason to end.
            Err(error @ Error::Text { .. }) => {
                eprintln!("{error}");
                chat.take_back();
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The next line, without its end; `None` at the end of the input.
fn read_line() -> Result<Option<String>> {
    if std::io::stdin().is_terminal() {
        eprint!("> ");
        let _ = std::io::stderr().flush();
    }
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(0) => Ok(None),
        Ok(_) => Ok(Some(line)),
        Err(error) => Err(Error::io("read", "standard input", error)),
    }
}

const LISTENING: u8 = 0;
const ANSWERING: u8 = 1;
const STOPPING: u8 = 2;

/// Ctrl-C stops an answer; where there is none, or a second time, it ends the process.
fn interrupts() -> Arc<AtomicU8> {
    let state = Arc::new(AtomicU8::new(LISTENING));
    let set = state.clone();
    // Fails only when a handler is there already, which is not so in this command.
    let _ = ctrlc::set_handler(move || {
        let stopped = set.compare_exchange(ANSWERING, STOPPING, Ordering::SeqCst, Ordering::SeqCst);
        if stopped.is_err() {
            std::process::exit(130);
        }
    });
    state
}
