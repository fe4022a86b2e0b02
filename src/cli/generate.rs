//! `halftone generate`: a text continued.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;

use super::open;
use super::options::DeviceArgs;
use super::progress::stop_flag;
use super::sampling::SamplingArgs;
use crate::error::{Error, Result};
use crate::generate::{Event, Finish, Generated, GenerationSettings, Generator, Options};
use crate::model::{ModelConfig, Stored};
use crate::text::{ModelText, check_ids};

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    model: PathBuf,
    /// The text to continue
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "prompt_file",
        conflicts_with = "prompt_file"
    )]
    prompt: Option<String>,
    /// A file with the text to continue
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object at the end instead of the text as it comes
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.model).await?;
    let model = Model::open(&stored).await?;
    let options = args.sampling.options(&model.settings)?;
    let prompt = match (&args.prompt, &args.prompt_file) {
        (_, Some(file)) => read_text(file)?,
        (prompt, None) => prompt.clone().unwrap_or_default(),
    };
    let prompt = model.text.tokenizer()?.encode(&prompt, true)?;
    check_ids(&prompt, model.config.vocab_size, "the prompt")?;
    let positions = model.config.max_position_embeddings;
    if prompt.len() >= positions {
        return Err(Error::text(
            "the prompt",
            format!("its {} tokens leave no room in the model's {positions} positions", prompt.len()),
            "Shorten it",
        ));
    }
    let context = positions.min(prompt.len() + options.max_tokens);
    let device = open::device(&args.device).await?;
    let stop = stop_flag();
    let mut generator = load(&stored, model.text, &device, context, || stop.load(Ordering::SeqCst)).await?;
    let shown = !args.json;
    let generated = generator.generate(&prompt, &options, async |event| {
        if shown {
            show(event);
        }
        !stop.load(Ordering::SeqCst)
    });
    let generated = generated.await?;
    match args.json {
        true => say!("{:#}", as_json(&generated, &options, &generator)),
        false => say!(""),
    }
    eprintln!("{}", summary(&generated, &generator));
    match generated.finish {
        Finish::Stopped => Err(Error::Interrupted {
            place: format!("after {} tokens", generated.ids.len()),
            advice: "what was generated has been printed".into(),
        }),
        Finish::Context => {
            eprintln!("the text is as long as the model's context of {context} tokens");
            Ok(())
        }
        Finish::StopToken | Finish::MaxTokens => Ok(()),
    }
}

/// What is known of a model before its weights are read.
pub(super) struct Model {
    pub config: ModelConfig,
    pub settings: GenerationSettings,
    pub text: Rc<ModelText>,
}

impl Model {
    pub async fn open(stored: &Stored) -> Result<Self> {
        let config = ModelConfig::of(&stored.checkpoint)?;
        let source = stored.checkpoint.source().as_ref();
        let settings = GenerationSettings::load(source, &config).await?;
        let text = Rc::new(ModelText::load(source, config.vocab_size).await?);
        Ok(Self { config, settings, text })
    }
}

/// The weights, with a progress bar.
pub(super) async fn load(
    stored: &Stored,
    text: Rc<ModelText>,
    device: &crate::device::Device,
    context: usize,
    stop: impl Fn() -> bool,
) -> Result<Generator> {
    let bar = ProgressBar::new(0);
    let loaded = Generator::load(stored, text, device, context, async |done, of| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        !stop()
    })
    .await;
    bar.finish_and_clear();
    loaded
}

/// Text on standard output as it comes.
pub(super) fn show(event: Event) {
    if let Event::Token { text, .. } | Event::Rest { text } = event {
        let mut out = std::io::stdout();
        // A reader that has gone is noticed by the line that ends the text.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

/// Speed, in a line.
pub(super) fn summary(generated: &Generated, generator: &Generator) -> String {
    let mut line =
        format!("read {} tokens at {:.1} tokens/s", generated.read_tokens, generated.prefill_rate());
    if let Some(rate) = generated.decode_rate() {
        line += &format!(", generated {} at {rate:.1} tokens/s", generated.ids.len());
    }
    format!("{line} on {}", generator.decoder().device().describe())
}

fn as_json(generated: &Generated, options: &Options, generator: &Generator) -> serde_json::Value {
    serde_json::json!({
        "text": generated.text,
        "ids": generated.ids,
        "finish": generated.finish,
        "prompt_tokens": generated.prompt_tokens,
        "read_tokens": generated.read_tokens,
        "prefill_seconds": generated.prefill_seconds,
        "prefill_tokens_per_second": generated.prefill_rate(),
        "decode_seconds": generated.decode_seconds,
        "decode_tokens_per_second": generated.decode_rate(),
        "sampling": options.sampling,
        "repetition_penalty": options.repetition_penalty,
        "context": generator.decoder().context(),
        "device": generator.decoder().device().describe(),
    })
}

fn read_text(path: &Path) -> Result<String> {
    let name = &path.display();
    let bytes = std::fs::read(path).map_err(|error| Error::io("read", name, error))?;
    String::from_utf8(bytes).map_err(|error| {
        Error::text(name, format!("it is not UTF-8 text: {}", error.utf8_error()), "Convert it to UTF-8")
    })
}
