//! The modes for chaos: an endless producer, and a follower of everything.

use std::collections::VecDeque;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::time::{MissedTickBehavior, interval};
use wald_client::{Client, LogAck, Lsn, Pending, ScanEvent, Selector};

use crate::variable;

const IN_FLIGHT: usize = 32;
const END: &[u8] = b"END:";

/// Appends `ID:0`, `ID:1` and so on until it is stopped, and prints their number.
pub(crate) async fn produce(client: &Client, log: &str, id: &str, rate: u32) -> Result<ExitCode> {
    ensure!(rate > 0, "a rate of 0 produces nothing");
    let stop = PathBuf::from(variable("WALD_STOP")?);
    let producer = client.producer(log).id(id, 1).open().await?;
    let mut ticks = interval(Duration::from_secs(1) / rate);
    // Not more than RATE in any second, also after a pause.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut in_flight: VecDeque<Pending<LogAck>> = VecDeque::new();
    let mut total = 0;
    while !stop.exists() {
        ticks.tick().await;
        if in_flight.len() >= IN_FLIGHT
            && let Some(oldest) = in_flight.pop_front()
        {
            oldest.await?;
        }
        in_flight.push_back(producer.append_batch([format!("{id}:{total}")]).await?);
        total += 1;
    }
    for ack in in_flight {
        ack.await?;
    }
    producer.append_batch([format!("END:{id}")]).await?.await?;
    producer.close().await?;
    println!("{id} {total}");
    Ok(ExitCode::SUCCESS)
}

/// Prints every record and gap of the logs with the prefix, until it has seen `count` ends.
pub(crate) async fn follow(client: &Client, prefix: &str, count: u64) -> Result<ExitCode> {
    let mut follower = client.follow(Selector::Prefix(prefix.to_owned())).open();
    let mut ends = 0;
    let mut out = std::io::stdout().lock();
    while let Some(event) = follower.next().await {
        match event? {
            ScanEvent::Batch(batch) => {
                for record in batch.records {
                    let data = String::from_utf8_lossy(&record.data);
                    writeln!(out, "{} {} {data}", batch.log, record.lsn)?;
                    ends += u64::from(record.data.starts_with(END));
                }
            }
            ScanEvent::Gap(gap) => {
                let lsn = |lsn: Option<Lsn>| lsn.map(|lsn| lsn.to_string()).unwrap_or_default();
                let reason = gap.reason.as_str_name();
                let reason = reason.strip_prefix("GAP_REASON_").unwrap_or(reason);
                let (from, to) = (lsn(gap.from_lsn), lsn(gap.to_lsn));
                writeln!(out, "GAP {} {from} {to} {reason}", gap.log)?;
            }
            ScanEvent::Progress(_) => {
                out.flush()?;
                if ends >= count {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            ScanEvent::Interrupted(_) => {}
        }
    }
    bail!("the follower ended")
}
