//! Reads whole logs, one after the other, and prints how long each took as one line of JSON.
//!
//! ```text
//! reading ENDPOINT LOG...
//! ```
//!
//! The time is that of a scan from its request to its end, on a connection that is there. The
//! check of sorting in `.ci` compares logs before and after, with nothing in caches.

use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use wald_client::{Client, ScanEvent};

/// Reads whole logs, one after the other.
#[derive(Debug, Parser)]
struct ReadingArgs {
    /// Where the server listens.
    endpoint: String,
    /// Names of the logs.
    #[arg(required = true)]
    logs: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = ReadingArgs::parse();
    let client = Client::connect(args.endpoint).await?;
    for log in args.logs {
        let (mut records, mut bytes, mut gaps) = (0_u64, 0_usize, 0_u64);
        let began = Instant::now();
        let mut events = client.scan(log.as_str()).open();
        while let Some(event) = events.next().await {
            match event? {
                ScanEvent::Batch(batch) => {
                    records += batch.records.len() as u64;
                    bytes += batch
                        .records
                        .iter()
                        .map(|record| record.data.len())
                        .sum::<usize>();
                }
                ScanEvent::Gap(_) => gaps += 1,
                ScanEvent::Progress(_) => {}
                ScanEvent::Interrupted(error) => return Err(error.into()),
            }
        }
        let micros = began.elapsed().as_micros();
        println!(
            "{{\"log\": {log:?}, \"micros\": {micros}, \"records\": {records}, \"bytes\": {bytes}, \"gaps\": {gaps}}}"
        );
    }
    Ok(())
}
