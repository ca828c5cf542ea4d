//! `walctl version`: the versions of both sides.

use anyhow::Result;
use serde_json::json;
use wald_client::Client;

use crate::exit::ExitKind;
use crate::output::{Out, Output};

pub(crate) async fn run(client: &Client, output: Output) -> Result<ExitKind> {
    let own = wald_text::VERSION;
    let server = client.server_info().await;
    let endpoint = client.endpoint();
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => {
            let version = server.as_ref().ok().map(|info| &info.version);
            out.json(&json!({ "walctl": own, "wald": version, "endpoint": endpoint }))?;
        }
        Output::Text | Output::Raw | Output::Delimited => {
            out.line(&format!("walctl {own}"))?;
            if let Ok(info) = &server {
                out.line(&format!("wald {} at {endpoint}", info.version))?;
            }
        }
    }
    // Before the error: the version of this side is good.
    out.flush()?;
    server?;
    Ok(ExitKind::Ok)
}
