//! A ledger that may be killed at any moment, and started again: two producers append COUNT
//! transfers exactly once, and a follower keeps the balances. Each keeps its state in one file of
//! DIR, always together with its effects. Prints the balances when all transfers are applied.
//!
//! `ledger DIR PREFIX COUNT`

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wald_client::{Client, Cursor, DEFAULT_ENDPOINT, Record, ScanEvent, Selector};

/// Batches in flight at most; the server recognises the last 1,024.
const IN_FLIGHT: usize = 32;
/// The state of a producer is stored after this number of acks.
const ACKS_PER_STORE: u64 = 20;

#[derive(Serialize, Deserialize)]
struct Transfer {
    from: String,
    to: String,
    amount: i64,
}

impl Transfer {
    /// The transfers are the same in every run, so that a repeat has the same content.
    fn of(number: u64) -> Result<Self> {
        Ok(Self {
            from: format!("account{}", number * 7 % 10),
            to: format!("account{}", (number * 3 + 1) % 10),
            amount: i64::try_from(number * 13 % 100)? + 1,
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Producing {
    id: String,
    log_id: Option<u64>,
    acked: u64,
}

#[derive(Default, Serialize, Deserialize)]
struct Ledger {
    cursor: Option<String>,
    applied: u64,
    balances: BTreeMap<String, i64>,
}

impl Ledger {
    fn apply(&mut self, transfer: &Transfer) {
        *self.balances.entry(transfer.from.clone()).or_default() -= transfer.amount;
        *self.balances.entry(transfer.to.clone()).or_default() += transfer.amount;
        self.applied += 1;
    }
}

fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes all of the state or nothing, and flushes it to the device.
fn store(path: &Path, state: &impl Serialize) -> Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(state)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    Ok(())
}

async fn produce(
    client: Client,
    directory: PathBuf,
    log: String,
    half: u64,
    count: u64,
) -> Result<()> {
    let path = directory.join(format!("producer{half}.json"));
    let mut state = load(&path)?.unwrap_or_else(|| Producing {
        id: format!("{log} {:?}", std::time::SystemTime::now()),
        log_id: None,
        acked: 0,
    });
    let mut producer = client
        .producer(log)
        .id(state.id.clone(), 0)
        .first_sequence(state.acked);
    if let Some(log_id) = state.log_id {
        producer = producer.log_id(log_id);
    }
    let producer = producer.open().await?;
    // Before the first batch: without it the next start would be another producer.
    state.log_id = Some(producer.log_id());
    store(&path, &state)?;
    let mut acks = VecDeque::new();
    for number in state.acked..count {
        let record = Record::from(serde_json::to_string(&Transfer::of(2 * number + half)?)?);
        acks.push_back(producer.append_batch([record]).await?);
        tokio::time::sleep(Duration::from_millis(1)).await;
        while acks.len() > IN_FLIGHT || number + 1 == count {
            let Some(ack) = acks.pop_front() else { break };
            ack.await?;
            state.acked += 1;
            if state.acked % ACKS_PER_STORE == 0 || acks.is_empty() {
                store(&path, &state)?;
            }
        }
    }
    producer.close().await?;
    Ok(())
}

async fn follow(client: &Client, directory: &Path, prefix: String, count: u64) -> Result<Ledger> {
    let path = directory.join("ledger.json");
    let mut state: Ledger = load(&path)?.unwrap_or_default();
    if state.applied >= count {
        return Ok(state);
    }
    let mut scan = client.follow(Selector::Prefix(prefix));
    if let Some(cursor) = &state.cursor {
        scan = scan.after(Cursor::from(Bytes::from(BASE64_STANDARD.decode(cursor)?)));
    }
    let mut follower = scan.open();
    // In memory, until the cursor comes that covers them.
    let mut gathered = Vec::new();
    while let Some(event) = follower.next().await {
        match event? {
            ScanEvent::Batch(batch) => gathered.extend(batch.records),
            ScanEvent::Gap(gap) => bail!("records are missing: {gap:?}"),
            ScanEvent::Interrupted(_) => {}
            ScanEvent::Progress(progress) => {
                for record in gathered.drain(..) {
                    state.apply(&serde_json::from_slice(&record.data)?);
                }
                let cursor = progress.cursor.context("a cursor")?;
                state.cursor = Some(BASE64_STANDARD.encode(cursor.as_bytes()));
                // Effects and cursor together.
                store(&path, &state)?;
                if state.applied >= count {
                    return Ok(state);
                }
            }
        }
    }
    bail!("the follower has ended")
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, prefix, count] = &arguments[..] else {
        bail!("usage: ledger DIR PREFIX COUNT");
    };
    let (directory, count): (_, u64) = (PathBuf::from(directory), count.parse()?);
    let endpoint = std::env::var("WALD_ENDPOINT").unwrap_or_else(|_| DEFAULT_ENDPOINT.into());
    let client = Client::connect(endpoint).await?;
    let halves = [0, 1].map(|half| {
        let log = format!("{prefix}{half}");
        tokio::spawn(produce(
            client.clone(),
            directory.clone(),
            log,
            half,
            count / 2,
        ))
    });
    let state = follow(&client, &directory, prefix.clone(), count).await?;
    for half in halves {
        half.await??;
    }
    println!(
        "{}",
        serde_json::json!({ "applied": state.applied, "balances": state.balances })
    );
    Ok(())
}
