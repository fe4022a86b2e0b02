//! `halftone tokens`: the token ids that a run would be calibrated on, for other programs to be given the same.

use std::path::PathBuf;

use super::open;
use super::options::CalibrationArgs;
use crate::error::Result;

#[derive(clap::Args)]
pub struct Args {
    /// A model directory, dense or quantized
    model: PathBuf,
    #[command(flatten)]
    calibration: CalibrationArgs,
}

pub async fn run(args: Args) -> Result<()> {
    let stored = open::model(&args.model).await?;
    let segments = open::calibration(&stored, &args.calibration).await?;
    for row in &segments.rows {
        say!("{}", serde_json::json!({ "input_ids": row }));
    }
    Ok(())
}
