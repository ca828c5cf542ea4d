//! Sends batches over one append session without waiting for acks, and prints the result as one
//! line of JSON, with the maximum memory that this process took.
//!
//! ```text
//! session ENDPOINT --batches 10000 [--bytes 100] [--wrong 6000] [--window-bytes 16777216]
//! ```
//!
//! Batch n has record n; `--wrong` gives that batch a condition which cannot hold. The checks
//! in `.ci` compare its output with the contents of the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use tokio::sync::mpsc;
use wald_client::{BatchAck, Client, Condition, Error, ErrorKind};

/// Sends batches over one append session.
#[derive(Debug, Parser)]
struct Args {
    /// Where the server listens.
    endpoint: String,
    /// How many batches.
    #[arg(long, default_value_t = 10_000)]
    batches: u64,
    /// Size of each one's record.
    #[arg(long, default_value_t = 100)]
    bytes: usize,
    /// The batch that fails.
    #[arg(long)]
    wrong: Option<u64>,
    /// The log.
    #[arg(long, default_value = "session")]
    log: String,
    /// Bytes that may be under way; default: an appender's limit.
    #[arg(long)]
    window_bytes: Option<u32>,
}

/// Results of the batches.
#[derive(Default, serde::Serialize)]
struct Told {
    acked: u64,
    /// Whether each ack came behind that of the batch before, with the next lsn.
    in_order: bool,
    /// Most batches sent and not acked.
    most_underway: u64,
    seconds: f64,
    /// The failing batch, and how it failed.
    failed: Option<(u64, String)>,
    /// How many came to nothing behind it.
    behind: u64,
    /// Most memory that was resident, in KiB.
    peak_kib: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let client = Client::connect(args.endpoint.clone()).await?;
    let mut builder = client.appender().ack_timeout(Duration::from_secs(300));
    if let Some(bytes) = args.window_bytes {
        builder = builder.window_bytes(bytes);
    }
    let appender = builder.open();
    let (pending, mut coming) = mpsc::unbounded_channel();
    let sent = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let count = Arc::clone(&sent);
    let told = tokio::spawn(async move {
        let mut told = Told {
            in_order: true,
            ..Told::default()
        };
        let mut number = 0;
        while let Some(ack) = coming.recv().await {
            take(&mut told, number, ack_of(ack).await);
            number += 1;
            let underway = count.load(Ordering::Relaxed).saturating_sub(number);
            told.most_underway = told.most_underway.max(underway);
        }
        told
    });
    for number in 0..args.batches {
        let digits = number.to_string();
        let record = "0".repeat(args.bytes.saturating_sub(digits.len())) + &digits;
        let condition = match args.wrong {
            Some(wrong) if wrong == number => Condition::new().must_not_exist(),
            _ => Condition::new(),
        };
        let batch = client
            .append_batch()
            .log_if(args.log.as_str(), condition, [record]);
        let ack = appender.append_batch(batch).await;
        sent.fetch_add(1, Ordering::Relaxed);
        let failed = ack.is_err();
        pending.send(ack)?;
        if failed {
            break;
        }
    }
    drop(pending);
    let mut told = told.await?;
    // The batch that failed has reported the failure already.
    let _closed = appender.close().await;
    told.seconds = began.elapsed().as_secs_f64();
    told.peak_kib = peak_kib()?;
    println!("{}", serde_json::to_string(&told)?);
    Ok(())
}

async fn ack_of(
    sent: Result<impl Future<Output = Result<BatchAck, Error>>, Error>,
) -> Result<BatchAck, Error> {
    sent?.await
}

fn take(told: &mut Told, number: u64, ack: Result<BatchAck, Error>) {
    match ack {
        Ok(ack) => {
            let lsn = ack.appends.first().map(|log| log.first_lsn.get());
            told.in_order &= lsn == Some(number) && told.acked == number;
            told.acked += 1;
        }
        Err(error) if matches!(error.kind(), ErrorKind::Behind { .. }) => told.behind += 1,
        Err(error) => {
            let reason = error.reason_text().unwrap_or("-");
            told.failed = Some((number, format!("{reason} {:?}", error.outcome())));
        }
    }
}

/// Most memory of this process that was ever resident.
fn peak_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no peak in /proc/self/status")?.parse()?)
}
