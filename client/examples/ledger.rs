//! A ledger that may be killed at any moment, and started again: two producers append COUNT
//! transfers exactly once, and a follower keeps the balances. Each keeps its state in one file of
//! DIR, always together with its effects. Prints the balances when all transfers are applied.
//!
//! `ledger DIR PREFIX COUNT`

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use wald_client::{Client, DEFAULT_ENDPOINT, FileState, Selector};

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

#[derive(Default, Serialize, Deserialize)]
struct Ledger {
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

async fn produce(
    client: Client,
    state: FileState,
    log: String,
    half: u64,
    count: u64,
) -> Result<()> {
    let mut producer = client.producer(log).open_durable(state).await?;
    for number in producer.next_sequence()..count {
        let transfer = serde_json::to_string(&Transfer::of(2 * number + half)?)?;
        producer.append_batch([transfer]).await?;
    }
    producer.close().await?;
    Ok(())
}

async fn follow(client: &Client, state: FileState, prefix: String, count: u64) -> Result<Ledger> {
    let mut follower = client
        .follow(Selector::Prefix(prefix))
        .open_durable(state)
        .await?;
    let mut ledger: Ledger = match follower.effects() {
        Some(effects) => serde_json::from_slice(effects)?,
        None => Ledger::default(),
    };
    while ledger.applied < count {
        for batch in follower.next().await?.context("the follower has ended")? {
            for record in batch.records {
                ledger.apply(&serde_json::from_slice(&record.data)?);
            }
        }
        // Together with the cursor behind these records.
        follower.keep(serde_json::to_vec(&ledger)?).await?;
    }
    Ok(ledger)
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
        let state = FileState::new(directory.join(format!("producer{half}.state")));
        tokio::spawn(produce(client.clone(), state, log, half, count / 2))
    });
    let state = FileState::new(directory.join("ledger.state"));
    let ledger = follow(&client, state, prefix.clone(), count).await?;
    for half in halves {
        half.await??;
    }
    println!(
        "{}",
        serde_json::json!({ "applied": ledger.applied, "balances": ledger.balances })
    );
    Ok(())
}
