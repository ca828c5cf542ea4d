//! A program that stores effects and cursor together, and is killed again and again.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::time::timeout;
use wald_client::{Batch, Client, Cursor, Gap, Progress, ScanEvent};

use crate::actions::number;
use crate::follow::{asked, gap};

const EVENT_WITHIN: Duration = Duration::from_secs(20);

/// The effects and the cursor, stored together.
#[derive(Default)]
struct Stored {
    cursor: Option<Cursor>,
    applied: u64,
    /// The lsn that is due in each log.
    next: HashMap<String, u64>,
    twice: Vec<String>,
    skipped: Vec<String>,
    gaps: Vec<Value>,
}

/// Effects that wait for the cursor that covers them.
#[derive(Default)]
struct Effects {
    gaps: Vec<Gap>,
    batches: Vec<Batch>,
}

impl Stored {
    fn store(&mut self, effects: Effects, progress: Progress, counting: &str) {
        self.cursor = progress.cursor;
        let counts = |log: &str| log.starts_with(counting);
        for missing in effects.gaps.iter().filter(|gap| counts(&gap.log)) {
            self.gaps.push(gap(missing));
            let to = missing.to_lsn.map_or(0, wald_client::Lsn::get);
            let due = self.next.entry(missing.log.clone()).or_default();
            *due = to.max(*due);
        }
        for batch in effects.batches.iter().filter(|batch| counts(&batch.log)) {
            let due = self.next.entry(batch.log.clone()).or_default();
            for record in &batch.records {
                let lsn = record.lsn.get();
                let name = format!("{} {lsn}", batch.log);
                match lsn.cmp(due) {
                    std::cmp::Ordering::Less => self.twice.push(name),
                    std::cmp::Ordering::Greater => self.skipped.push(name),
                    std::cmp::Ordering::Equal => {}
                }
                *due = (lsn + 1).max(*due);
                self.applied += 1;
            }
        }
    }
}

pub(crate) async fn consume(client: &Client, arguments: &Value) -> Result<Value> {
    let count = number(arguments, "count")?;
    let counting = arguments["counting"].as_str().unwrap_or_default();
    let mut stored = Stored::default();
    let (mut length, mut lives) = (1, 0);
    while stored.applied < count {
        lives += 1;
        let before = stored.cursor.clone();
        let mut scan = asked(client, arguments, true)?;
        if let Some(cursor) = &before {
            scan = scan.after(cursor.clone());
        }
        let mut follower = scan.open();
        // In memory, and lost with the life.
        let mut effects = Effects::default();
        for taken in 1..=length {
            let event = timeout(EVENT_WITHIN, follower.next()).await;
            let event = event.with_context(|| format!("no event within {EVENT_WITHIN:?}"))?;
            if taken == length && lives % 2 == 0 {
                break;
            }
            match event.context("the follower has ended")?? {
                ScanEvent::Batch(batch) => effects.batches.push(batch),
                ScanEvent::Gap(gap) => effects.gaps.push(gap),
                ScanEvent::Progress(progress) => {
                    stored.store(std::mem::take(&mut effects), progress, counting);
                }
                ScanEvent::Interrupted(_) => {}
            }
            if stored.applied >= count {
                break;
            }
        }
        length = if stored.cursor == before {
            length + 1
        } else {
            1
        };
    }
    Ok(json!({
        "applied": stored.applied,
        "twice": stored.twice,
        "skipped": stored.skipped,
        "gaps": stored.gaps,
        "lives": lives,
    }))
}
