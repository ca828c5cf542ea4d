//! Makes many logs, lists them page by page, or deletes them, and prints the result as one line
//! of JSON.
//!
//! ```text
//! forest make ENDPOINT --logs 1000000 [--prefix forest-tests] [--batch 500] [--writers 4] [--tolerate]
//! forest list ENDPOINT [--prefix forest-tests/] [--page-size 1000] [--rounds 1]
//! forest delete ENDPOINT --logs 1000000 [--prefix forest-tests] [--writers 64]
//! ```
//!
//! Names are PREFIX/ and seven digits, in no order, up to ten million of them; each log gets one
//! record of eight bytes. The checks in `.ci` compare the times of pages at both ends of a million
//! logs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use serde_json::json;
use wald_client::{Client, Durability, RetryPolicy};

/// Numbers of logs, and the factor that scatters them: they have no common divisor.
const NUMBERS: u64 = 10_000_000;
const SCATTER: u64 = 6_180_339;
/// How many pages make up an end.
const END: usize = 20;

/// Makes many logs, lists them, or deletes them.
#[derive(Debug, Parser)]
struct ForestArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Makes logs by appends to them.
    Make(Make),
    /// Lists logs page by page.
    List(List),
    /// Deletes the logs, one by one.
    Delete(Delete),
}

#[derive(Debug, Clone, Parser)]
struct Make {
    /// Where the server listens.
    endpoint: String,
    /// How many.
    #[arg(long)]
    logs: u64,
    /// Prefix of their names, before a slash.
    #[arg(long, default_value = "forest-tests")]
    prefix: String,
    /// How many in one batch.
    #[arg(long, default_value_t = 500)]
    batch: u64,
    /// How many batches are under way.
    #[arg(long, default_value_t = 4)]
    writers: u64,
    /// Count batches that a bound of the store refuses, and go on.
    #[arg(long)]
    tolerate: bool,
}

#[derive(Debug, Parser)]
struct List {
    /// Where the server listens.
    endpoint: String,
    /// Prefix of their names.
    #[arg(long, default_value = "")]
    prefix: String,
    /// Logs in a page, at most.
    #[arg(long, default_value_t = 1_000)]
    page_size: u32,
    /// How often to go through all of them.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
}

#[derive(Debug, Clone, Parser)]
struct Delete {
    /// Where the server listens.
    endpoint: String,
    /// How many.
    #[arg(long)]
    logs: u64,
    /// Prefix of their names, before a slash.
    #[arg(long, default_value = "forest-tests")]
    prefix: String,
    /// How many deletions are under way.
    #[arg(long, default_value_t = 64)]
    writers: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let told = match ForestArgs::parse().action {
        Action::Make(args) => make(args).await?,
        Action::List(args) => list(args).await?,
        Action::Delete(args) => delete(args).await?,
    };
    println!("{told}");
    Ok(())
}

async fn make(args: Make) -> Result<serde_json::Value> {
    let began = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let mut writers = Vec::new();
    for _ in 0..args.writers {
        let mut policy = RetryPolicy::default();
        if args.tolerate {
            policy.max_attempts = 1;
        }
        let client = connect_with(&args.endpoint, policy).await?;
        let writer = make_some(client, args.clone(), Arc::clone(&next));
        writers.push(tokio::spawn(writer));
    }
    let (mut made, mut refused) = (0, 0);
    for writer in writers {
        let some = writer.await??;
        made += some.0;
        refused += some.1;
    }
    Ok(json!({ "logs": made, "refused": refused, "seconds": began.elapsed().as_secs_f64() }))
}

/// Logs that were made, and those that were refused.
async fn make_some(client: Client, args: Make, next: Arc<AtomicU64>) -> Result<(u64, u64)> {
    let (mut made, mut refused) = (0, 0);
    loop {
        let from = next.fetch_add(args.batch, Ordering::Relaxed);
        if from >= args.logs {
            return Ok((made, refused));
        }
        let numbers = from..args.logs.min(from + args.batch);
        let count = numbers.end - numbers.start;
        let batch = numbers.fold(client.append_batch(), |batch, number| {
            batch.log(name(&args.prefix, number), [format!("{number:08}")])
        });
        match batch.durability(Durability::Written).await {
            Ok(_) => made += count,
            Err(error) if args.tolerate && error.reason() == Some(wald_client::Reason::Quota) => {
                refused += count
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn name(prefix: &str, number: u64) -> String {
    format!("{prefix}/{:07}", number * SCATTER % NUMBERS)
}

async fn delete(args: Delete) -> Result<serde_json::Value> {
    let began = Instant::now();
    let next = Arc::new(AtomicU64::new(0));
    let client = connect(&args.endpoint).await?;
    let mut writers = Vec::new();
    for _ in 0..args.writers {
        let (client, args, next) = (client.clone(), args.clone(), Arc::clone(&next));
        writers.push(tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= args.logs {
                    return Ok::<_, anyhow::Error>(());
                }
                let name = name(&args.prefix, number);
                client.delete_log(name, None).await?;
            }
        }));
    }
    for writer in writers {
        writer.await??;
    }
    Ok(json!({ "logs": args.logs, "seconds": began.elapsed().as_secs_f64() }))
}

async fn list(args: List) -> Result<serde_json::Value> {
    let client = connect(&args.endpoint).await?;
    let mut rounds = Vec::new();
    let mut pages = Vec::new();
    let mut ids = BTreeSet::new();
    for _ in 0..args.rounds {
        ids.clear();
        let mut turn = 0;
        let round = Instant::now();
        let mut token = None;
        let mut last = String::new();
        loop {
            let began = Instant::now();
            let page = client
                .list_logs(args.prefix.as_str(), args.page_size, token.take())
                .await?;
            let took = began.elapsed();
            // The shortest of its rounds: other work of the machine comes in stretches of many pages.
            match pages.get_mut(turn) {
                Some(shortest) => *shortest = took.min(*shortest),
                None => pages.push(took),
            }
            turn += 1;
            for log in page.logs {
                ensure!(last < log.name, "{} comes behind {last}", log.name);
                ids.insert(log.log_id);
                last = log.name;
            }
            token = page.next_page_token;
            if token.is_none() {
                break;
            }
        }
        rounds.push(round.elapsed().as_secs_f64());
    }
    let end = pages.len().min(END);
    let middle = (pages.len() - end) / 2;
    Ok(json!({
        "logs": ids.len(),
        "pages": pages.len(),
        "seconds": rounds.last(),
        "first_us": median(&pages[..end]),
        "middle_us": median(&pages[middle..middle + end]),
        "last_us": median(&pages[pages.len() - end..]),
    }))
}

async fn connect(endpoint: &str) -> Result<Client> {
    connect_with(endpoint, RetryPolicy::default()).await
}

async fn connect_with(endpoint: &str, policy: RetryPolicy) -> Result<Client> {
    let builder = Client::builder(endpoint.to_owned()).retry(policy);
    Ok(builder.timeout(Duration::from_secs(120)).connect().await?)
}

/// In microseconds.
fn median(times: &[Duration]) -> u128 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2].as_micros()
}
