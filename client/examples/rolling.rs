//! Appends until its standard input ends, over failures of the server, and prints the results
//! of each writer as one line of JSON.
//!
//! ```text
//! rolling ENDPOINT --writers 16
//! ```
//!
//! Half of the writers state the lsn that they expect, so the client may repeat everything. The
//! others do not, and note the outcome of each record. The check of rolling restarts in `.ci`
//! compares this with the contents of the logs.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;
use wald_client::{Client, ClientBuilder, Outcome, RetryPolicy};

/// Appends until its standard input ends.
#[derive(Debug, Parser)]
struct Args {
    /// Where the server listens.
    endpoint: String,
    /// How many writers, each with a connection and a log of its own.
    #[arg(long, default_value_t = 16)]
    writers: usize,
}

/// The results of one writer. Its records are the numbers from 0 on, as text.
#[derive(Debug, Serialize)]
struct Told {
    log: String,
    /// Whether it said which lsn it expects.
    conditional: bool,
    /// Records that it tried to append.
    tried: u64,
    /// Numbers with an unknown outcome.
    unknown: Vec<u64>,
    /// Numbers that certainly were not appended.
    refused: Vec<u64>,
    /// Texts of the errors.
    errors: Vec<String>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = Vec::new();
    for number in 0..args.writers {
        let client = patient(&args.endpoint).connect().await?;
        let told = Told {
            log: format!("rolling/{number}"),
            conditional: number % 2 == 0,
            tried: 0,
            unknown: Vec::new(),
            refused: Vec::new(),
            errors: Vec::new(),
        };
        writers.push(tokio::spawn(write(client, told, Arc::clone(&stop))));
    }
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    stop.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for writer in writers {
        all.push(writer.await?);
    }
    println!("{}", serde_json::to_string(&all)?);
    Ok(())
}

/// A client that does not give up while a server restarts.
fn patient(endpoint: &str) -> ClientBuilder {
    Client::builder(endpoint)
        .timeout(Duration::from_secs(60))
        .retry(RetryPolicy {
            max_attempts: u32::MAX,
            max_pause: Duration::from_millis(200),
            ..RetryPolicy::default()
        })
}

/// One writer, until it is stopped.
async fn write(client: Client, mut told: Told, stop: Arc<AtomicBool>) -> Told {
    while !stop.load(Ordering::Relaxed) {
        let number = told.tried;
        told.tried += 1;
        let mut append = client.append(told.log.clone(), number.to_string());
        if told.conditional {
            append = append.expected_lsn(number);
        }
        let Err(error) = append.await else { continue };
        told.errors.push(error.to_string());
        match error.outcome() {
            Outcome::Unknown => told.unknown.push(number),
            Outcome::NotApplied => told.refused.push(number),
        }
    }
    told
}
