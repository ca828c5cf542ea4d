//! Carries out the conformance cases with this library, as `client/conformance/README.md`
//! says. The harness beside the cases starts it:
//!
//! ```text
//! client/conformance/harness.py --wald target/debug/wald -- target/debug/examples/conformance
//! ```
//!
//! `chaos-producer LOG ID RATE` and `chaos-follower PREFIX COUNT` are its other modes.

mod actions;
mod chaos;
mod consume;
mod control;
mod follow;
mod steps;
mod values;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use wald_client::Client;

use crate::steps::Case;

const CASE_LIMIT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => cases().await,
        ["chaos-producer", log, id, rate] => {
            chaos::produce(&client().await?, log, id, rate.parse()?).await
        }
        ["chaos-follower", prefix, count] => {
            chaos::follow(&client().await?, prefix, count.parse()?).await
        }
        _ => bail!("usage: conformance [chaos-producer LOG ID RATE | chaos-follower PREFIX COUNT]"),
    }
}

async fn client() -> Result<Client> {
    Ok(Client::from_env().await?)
}

fn variable(name: &str) -> Result<String> {
    env::var(name).with_context(|| format!("{name} is not set"))
}

async fn cases() -> Result<ExitCode> {
    let path = variable("WALD_CASES")?;
    let file = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let file: Value = serde_json::from_str(&file).with_context(|| path)?;
    let only = env::var("WALD_ONLY").ok();
    let wanted = |name: &str| {
        let only = only.as_deref();
        only.is_none_or(|only| only.split(',').any(|wanted| wanted == name))
    };
    let control = variable("WALD_CONTROL")?;
    let (mut passed, mut failed) = (0, 0);
    let cases = file["cases"].as_array().context("no list of cases")?;
    for case in cases {
        let name = case["name"].as_str().context("a case without a name")?;
        if !wanted(name) {
            continue;
        }
        match one(name, case, &control).await {
            Ok(()) => {
                passed += 1;
                println!("ok {name}");
            }
            Err(error) => {
                failed += 1;
                println!("FAIL {name}: {}", format!("{error:#}").replace('\n', " "));
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(match failed == 0 && passed > 0 {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

async fn one(name: &str, case: &Value, control: &str) -> Result<()> {
    let steps = case["steps"].as_array().context("a case without steps")?;
    let case = Case::new(name, client().await?, control);
    match tokio::time::timeout(CASE_LIMIT, case.run(steps, None)).await {
        Ok(done) => done,
        Err(_) => {
            let last = case.last();
            Err(anyhow!(
                "not done within {CASE_LIMIT:?}; began last: {last}"
            ))
        }
    }
}
