//! `halftone adapters`: what wgpu finds on this machine.

use super::table;
use crate::device::list_adapters;
use crate::error::Result;
use crate::pipeline::plan::human_bytes;

#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<()> {
    let adapters = list_adapters().await;
    if args.json {
        say!("{:#}", serde_json::json!(adapters));
        return Ok(());
    }
    if adapters.is_empty() {
        say!("no adapters: install a Vulkan, Metal or DX12 driver; --device cpu needs none");
        return Ok(());
    }
    let rows: Vec<Vec<String>> = adapters
        .into_iter()
        .map(|adapter| {
            vec![
                adapter.name,
                adapter.backend,
                if adapter.software { "software (slower than --device cpu)".into() } else { adapter.kind },
                human_bytes(adapter.max_binding_bytes),
                adapter.driver,
            ]
        })
        .collect();
    table::print(&["adapter", "backend", "kind", "largest binding", "driver"], &rows);
    Ok(())
}
