//! Appends with many writers at a time, and prints what came of it as one line of JSON.
//!
//! ```text
//! load ENDPOINT --appends 10000 --writers 64 --logs 1000 [--bytes 100] [--durability written]
//! ```
//!
//! The checks in `.ci` count the flushes that such a load costs. It is no benchmark: the
//! driver takes its share of the processor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use wald_client::{Client, Durability};

/// Appends with many writers at a time.
#[derive(Debug, Parser)]
struct Args {
    /// Where the server listens.
    endpoint: String,
    /// How many appends in all.
    #[arg(long, default_value_t = 10_000)]
    appends: u64,
    /// How many writers, each with one append underway at a time.
    #[arg(long, default_value_t = 64)]
    writers: usize,
    /// Over how many logs the appends go, in turn.
    #[arg(long, default_value_t = 1_000)]
    logs: u64,
    /// Size of a record.
    #[arg(long, default_value_t = 100)]
    bytes: usize,
    /// unspecified, accepted, written or durable.
    #[arg(long, default_value = "unspecified")]
    durability: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Arc::new(Args::parse());
    let name = format!("DURABILITY_{}", args.durability.to_uppercase());
    let durability = Durability::from_str_name(&name).context("no such durability")?;
    let client = Client::connect(args.endpoint.clone()).await?;
    let next = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let writers: Vec<_> = (0..args.writers)
        .map(|_| {
            let (client, next, args) = (client.clone(), Arc::clone(&next), Arc::clone(&args));
            tokio::spawn(async move { write(&client, &next, &args, durability).await })
        })
        .collect();
    let mut times = Vec::new();
    for writer in writers {
        times.extend(writer.await??);
    }
    let seconds = began.elapsed().as_secs_f64();
    times.sort_unstable();
    let acks = times.len();
    ensure!(acks as u64 == args.appends, "an ack is missing");
    let [p50, p99, max] = [50, 99, 100].map(|p| times[(acks - 1) * p / 100].as_micros());
    println!(
        "{{\"acks\": {acks}, \"seconds\": {seconds:.3}, \
         \"p50_us\": {p50}, \"p99_us\": {p99}, \"max_us\": {max}}}"
    );
    Ok(())
}

/// One writer: takes the next append until there is none; how long each took.
async fn write(
    client: &Client,
    next: &AtomicU64,
    args: &Args,
    durability: Durability,
) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= args.appends {
            return Ok(times);
        }
        let log = format!("load/{}", number % args.logs);
        let record = format!("{number:0width$}", width = args.bytes);
        let began = Instant::now();
        let ack = client.append(log, record).durability(durability).await?;
        times.push(began.elapsed());
        ensure!(
            ack.durability >= durability,
            "only {:?} was reached",
            ack.durability
        );
    }
}
