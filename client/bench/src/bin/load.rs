//! Appends with many writers at a time, and prints the result as one line of JSON.
//!
//! ```text
//! load ENDPOINT --appends 10000 --writers 64 --logs 1000 [--bytes 100] [--durability written]
//! load ENDPOINT --seconds 10 --writers 8 --pause-ms 20 --attempts 1 --tolerate --ledger FILE
//! load ENDPOINT --appends 0 --followers 1000 --prefix idle
//! load ENDPOINT --seconds 10 --across 3 --ledger FILE
//! ```
//!
//! The checks in `.ci` count the flushes that such a load costs, and compare the ledger with
//! the records that a restart finds. It is no benchmark: the driver takes its share of the
//! processor.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use wald_client::{Client, Durability, Error, ErrorKind, LogAck, Lsn, RetryPolicy, Selector};

/// Appends with many writers at a time.
#[derive(Debug, Parser)]
struct LoadArgs {
    /// Where the server listens.
    endpoint: String,
    /// How many appends in all, at most.
    #[arg(long, default_value_t = 10_000)]
    appends: u64,
    /// Seconds after which no append begins; no bound if it is missing.
    #[arg(long)]
    seconds: Option<f64>,
    /// How many writers, each with one append underway at a time.
    #[arg(long, default_value_t = 64)]
    writers: usize,
    /// How many connections the writers and followers share.
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// How long each writer rests after an append.
    #[arg(long, default_value_t = 0)]
    pause_ms: u64,
    /// How many appends a second at most, evenly spread; no bound if it is missing.
    #[arg(long)]
    rate: Option<f64>,
    /// Over how many logs the appends go, in turn.
    #[arg(long, default_value_t = 1_000)]
    logs: u64,
    /// Number of logs of one append. With more than 1, it is a batch with a record for each.
    #[arg(long, default_value_t = 1)]
    across: u64,
    /// Prefix of the logs' names, before a slash.
    #[arg(long, default_value = "load")]
    prefix: String,
    /// Size of a record.
    #[arg(long, default_value_t = 100)]
    bytes: usize,
    /// unspecified, accepted, written, durable or replicated.
    #[arg(long, default_value = "unspecified")]
    durability: String,
    /// How often an append is tried in all.
    #[arg(long, default_value_t = 5)]
    attempts: u32,
    /// File with the token of the caller.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// Count appends that fail and go on; a writer ends when the server is gone.
    #[arg(long)]
    tolerate: bool,
    /// File for one line about each append: its time, and its result.
    #[arg(long)]
    ledger: Option<PathBuf>,
    /// How many follows of all logs with the prefix to hold open, until this is killed.
    #[arg(long, default_value_t = 0)]
    followers: usize,
}

/// State that the writers share.
struct LoadRun {
    args: LoadArgs,
    durability: Durability,
    next: AtomicU64,
    start: Instant,
    until: Option<Instant>,
    ledger: Option<Mutex<BufWriter<File>>>,
}

/// Results of one writer.
#[derive(Default)]
struct WriterTally {
    times: Vec<Duration>,
    errors: BTreeMap<String, u64>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = LoadArgs::parse();
    ensure!(
        (1..=args.logs).contains(&args.across),
        "--across is 1 to the number of logs"
    );
    let name = format!("DURABILITY_{}", args.durability.to_uppercase());
    let durability = Durability::from_str_name(&name).context("no such durability")?;
    let clients = connect(&args).await?;
    let ledger = args.ledger.as_ref().map(File::create).transpose()?;
    let began = Instant::now();
    let load = Arc::new(LoadRun {
        durability,
        next: AtomicU64::new(0),
        start: began,
        until: args
            .seconds
            .map(|seconds| began + Duration::from_secs_f64(seconds)),
        ledger: ledger.map(|file| Mutex::new(BufWriter::new(file))),
        args,
    });
    let on = |index: usize| clients[index % clients.len()].clone();
    let followers: Vec<_> = (0..load.args.followers)
        .map(|index| tokio::spawn(follow(on(index), format!("{}/", load.args.prefix))))
        .collect();
    let writers: Vec<_> = (0..load.args.writers)
        .map(|index| tokio::spawn(write(on(index), Arc::clone(&load))))
        .collect();
    let mut all = WriterTally::default();
    for writer in writers {
        let done = writer.await??;
        all.times.extend(done.times);
        for (error, count) in done.errors {
            *all.errors.entry(error).or_default() += count;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    for follower in followers {
        follower.await??;
    }
    load.flush()?;
    all.print(seconds, &load.args)
}

async fn connect(args: &LoadArgs) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for _ in 0..args.connections.max(1) {
        let mut builder = Client::builder(args.endpoint.clone());
        if let Some(file) = &args.token_file {
            builder = builder.token_file(file);
        }
        let client = builder
            // Longer than any disk that a check makes slow.
            .timeout(Duration::from_secs(120))
            .retry(RetryPolicy {
                max_attempts: args.attempts,
                ..RetryPolicy::default()
            })
            .connect()
            .await?;
        clients.push(client);
    }
    Ok(clients)
}

/// One writer: takes the next append until there is none, or the time is over.
async fn write(client: Client, load: Arc<LoadRun>) -> Result<WriterTally> {
    let mut done = WriterTally::default();
    loop {
        let number = load.next.fetch_add(1, Ordering::Relaxed);
        if let Some(rate) = load.args.rate {
            let due = Duration::from_secs_f64(number as f64 / rate);
            tokio::time::sleep_until((load.start + due).into()).await;
        }
        let over = load.until.is_some_and(|until| Instant::now() >= until);
        if number >= load.args.appends || over {
            return Ok(done);
        }
        let logs: Vec<String> = (number..number + load.args.across)
            .map(|index| format!("{}/{}", load.args.prefix, index % load.args.logs))
            .collect();
        let digits = number.to_string();
        let record = "0".repeat(load.args.bytes.saturating_sub(digits.len())) + &digits;
        let sent = SystemTime::now();
        let began = Instant::now();
        match append(&client, &logs, record, load.durability).await {
            Ok(acks) => {
                done.times.push(began.elapsed());
                load.note(sent, &logs, number, &acks)?;
            }
            Err(error) if load.args.tolerate => {
                let what = failed(&error);
                let lines = vec![format!("error {what}"); logs.len()];
                load.note(sent, &logs, number, &lines)?;
                *done.errors.entry(what).or_default() += 1;
                if is_gone(&error) {
                    return Ok(done);
                }
                tokio::time::sleep(error.retry_delay().unwrap_or_default()).await;
            }
            Err(error) => bail!(error),
        }
        if load.args.pause_ms > 0 {
            tokio::time::sleep(Duration::from_millis(load.args.pause_ms)).await;
        }
    }
}

/// Reads whatever comes, for as long as the server lets it.
async fn follow(client: Client, prefix: String) -> Result<()> {
    let mut events = client.follow(Selector::Prefix(prefix)).open();
    while let Some(event) = events.next().await {
        event?;
    }
    Ok(())
}

/// Appends a record to each of the logs, to several as one batch. Returns the result for each log, as the ledger has it.
async fn append(
    client: &Client,
    logs: &[String],
    record: String,
    durability: Durability,
) -> Result<Vec<String>, Error> {
    if let [log] = logs {
        let ack = client.append(log.as_str(), record);
        let ack = ack.durability(durability).await?;
        let epoch = ack.recovery_epoch;
        return Ok(vec![acked(ack.lsn, ack.durability, ack.position, epoch)]);
    }
    let mut batch = client.append_batch().durability(durability);
    for log in logs {
        batch = batch.log(log.as_str(), [record.clone()]);
    }
    let ack = batch.await?;
    let epoch = ack.recovery_epoch;
    let line = |of: &LogAck| acked(of.first_lsn, ack.durability, ack.position, epoch);
    Ok(ack.appends.iter().map(line).collect())
}

fn acked(lsn: Lsn, durability: Durability, position: Option<u64>, epoch: u64) -> String {
    let position = position.map_or("-".to_owned(), |at| at.to_string());
    let level = durability.as_str_name();
    format!("ack {lsn} {level} {position} {epoch}")
}

/// Code, reason and outcome, as `Internal JOURNAL_FAILED Unknown`.
fn failed(error: &Error) -> String {
    let reason = error.reason_text().unwrap_or("-");
    format!("{:?} {reason} {:?}", error.code(), error.outcome())
}

/// Whether there is no server any more to append to.
fn is_gone(error: &Error) -> bool {
    let lost = matches!(
        error.kind(),
        ErrorKind::Connect { .. } | ErrorKind::ConnectionLost(_)
    );
    lost || error.code() == tonic::Code::Unavailable
}

fn micros(time: SystemTime) -> u128 {
    time.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros()
}

impl LoadRun {
    /// A line of the ledger for each log: sent and answered in microseconds since the Unix epoch, log,
    /// number of the append, and its result.
    fn note(
        &self,
        sent: SystemTime,
        logs: &[String],
        number: u64,
        results: &[String],
    ) -> Result<()> {
        let Some(ledger) = &self.ledger else {
            return Ok(());
        };
        let (sent, got) = (micros(sent), micros(SystemTime::now()));
        let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
        for (log, result) in logs.iter().zip(results) {
            writeln!(ledger, "{sent} {got} {log} {number} {result}")?;
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        if let Some(ledger) = &self.ledger {
            let mut ledger = ledger.lock().unwrap_or_else(PoisonError::into_inner);
            ledger.flush()?;
        }
        Ok(())
    }
}

impl WriterTally {
    fn print(mut self, seconds: f64, args: &LoadArgs) -> Result<()> {
        self.times.sort_unstable();
        let acks = self.times.len();
        let told = acks as u64 + self.errors.values().sum::<u64>();
        ensure!(
            args.seconds.is_some() || args.tolerate || told == args.appends,
            "an ack is missing"
        );
        let [p50, p99, max] = [50, 99, 100].map(|p| {
            let at = acks.saturating_sub(1) * p / 100;
            self.times.get(at).map_or(0, Duration::as_micros)
        });
        println!(
            "{{\"acks\": {acks}, \"seconds\": {seconds:.3}, \
             \"p50_us\": {p50}, \"p99_us\": {p99}, \"max_us\": {max}, \"errors\": {}}}",
            serde_json::to_string(&self.errors)?
        );
        Ok(())
    }
}
