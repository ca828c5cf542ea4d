//! Scans, and followers in the background.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use wald_client::{Batch, Client, Cursor, Gap, Lsn, Scan, ScanEvent, ScanStream, Selector};

use crate::actions::{number, optional, stored, text};

const FOLLOWED_WITHIN: Duration = Duration::from_secs(20);

/// The events that a scan has delivered.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    records: Vec<Value>,
    gaps: Vec<Value>,
    cursor: Option<Cursor>,
    caught_up: bool,
    failed: Option<String>,
}

impl Seen {
    fn batch(&mut self, batch: Batch) {
        for record in batch.records {
            let mut stored = stored(record);
            stored["log"] = json!(batch.log);
            self.records.push(stored);
        }
    }

    fn gap(&mut self, found: &Gap) {
        self.gaps.push(gap(found));
    }

    fn as_json(&self) -> Value {
        let cursor = self.cursor.as_ref();
        json!({
            "records": self.records,
            "gaps": self.gaps,
            "cursor": cursor.map(|cursor| BASE64_STANDARD.encode(cursor.as_bytes())),
            "caught_up": self.caught_up,
        })
    }
}

/// A gap as cases see it.
pub(crate) fn gap(gap: &Gap) -> Value {
    let reason = gap.reason.as_str_name();
    json!({
        "log": gap.log,
        "from_lsn": gap.from_lsn.map(Lsn::get),
        "to_lsn": gap.to_lsn.map(Lsn::get),
        "reason": reason.strip_prefix("GAP_REASON_").unwrap_or(reason),
    })
}

/// The scan that these arguments ask for.
pub(crate) fn asked(client: &Client, arguments: &Value, follow: bool) -> Result<Scan> {
    let selector = match (&arguments["log"], &arguments["prefix"]) {
        (Value::String(log), _) => Selector::Log(log.clone()),
        (_, Value::String(prefix)) => Selector::Prefix(prefix.clone()),
        _ if arguments["all"] == json!(true) => Selector::All,
        _ => bail!("a scan of what?"),
    };
    let mut scan = match follow {
        true => client.follow(selector),
        false => client.scan(selector),
    };
    if let Some(lsn) = optional(arguments, "lsn")? {
        scan = scan.from_lsn(lsn);
    }
    if let Some(time) = optional(arguments, "timestamp_us")? {
        scan = scan.from_timestamp_us(time.try_into()?);
    }
    if let Some(count) = optional(arguments, "tail_offset")? {
        scan = scan.last(count);
    }
    if let Some(cursor) = arguments["cursor"].as_str() {
        scan = scan.after(Cursor::from(Bytes::from(BASE64_STANDARD.decode(cursor)?)));
    }
    if let Some(lsn) = optional(arguments, "until_lsn")? {
        scan = scan.until_lsn(lsn);
    }
    if let Some(count) = optional(arguments, "max_records")? {
        scan = scan.max_records(count);
    }
    if let Some(log_id) = optional(arguments, "log_id")? {
        scan = scan.log_id(log_id);
    }
    Ok(scan)
}

/// Scans to the end.
pub(crate) async fn scan(client: &Client, arguments: &Value) -> Result<Value> {
    let mut stream = asked(client, arguments, false)?.open();
    let mut seen = Seen::default();
    while let Some(event) = stream.next().await {
        match event? {
            ScanEvent::Batch(batch) => seen.batch(batch),
            ScanEvent::Gap(gap) => seen.gap(&gap),
            ScanEvent::Progress(_) | ScanEvent::Interrupted(_) => {}
        }
    }
    seen.cursor = stream.cursor().cloned();
    Ok(seen.as_json())
}

/// A follower in the background.
pub(crate) struct Following {
    seen: watch::Receiver<Seen>,
    task: JoinHandle<()>,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Following {
    /// Opens a follower.
    pub(crate) fn open(client: &Client, arguments: &Value) -> Result<Self> {
        let stream = asked(client, arguments, true)?.open();
        let (sender, seen) = watch::channel(Seen::default());
        Ok(Self {
            seen,
            task: tokio::spawn(drain(stream, sender)),
        })
    }

    /// The events since it began. The receiver is its own, to be waited on.
    pub(crate) fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }
}

async fn drain(mut stream: ScanStream, sender: watch::Sender<Seen>) {
    // Reported only with the cursor that stands after it.
    let mut next = Seen::default();
    while let Some(event) = stream.next().await {
        match event {
            Ok(ScanEvent::Batch(batch)) => next.batch(batch),
            Ok(ScanEvent::Gap(gap)) => next.gap(&gap),
            Ok(ScanEvent::Interrupted(_)) => {}
            Ok(ScanEvent::Progress(progress)) => {
                let new = std::mem::take(&mut next);
                let cursor = stream.cursor().cloned();
                sender.send_modify(|seen| {
                    seen.records.extend(new.records);
                    seen.gaps.extend(new.gaps);
                    seen.cursor = cursor;
                    seen.caught_up |= progress.caught_up;
                });
            }
            Err(error) => sender.send_modify(|seen| seen.failed = Some(error.to_string())),
        }
    }
}

/// Waits until a follower has seen so much.
pub(crate) async fn followed(mut seen: watch::Receiver<Seen>, arguments: &Value) -> Result<Value> {
    let count = number(arguments, "count")?;
    let gaps = optional(arguments, "gaps")?.unwrap_or(0);
    let caught_up = arguments["caught_up"] == json!(true);
    let is_complete = |seen: &Seen| {
        let found = seen.records.len() as u64 >= count && seen.gaps.len() as u64 >= gaps;
        found && (seen.caught_up || !caught_up)
    };
    let enough = |seen: &Seen| is_complete(seen) || seen.failed.is_some();
    let waited = tokio::time::timeout(FOLLOWED_WITHIN, seen.wait_for(enough)).await;
    let waited = waited.map(|found| found.map(|found| found.clone()));
    let Ok(found) = waited else {
        let seen = seen.borrow();
        bail!(
            "{} has seen {} records and {} gaps after {FOLLOWED_WITHIN:?}",
            text(arguments, "follower")?,
            seen.records.len(),
            seen.gaps.len(),
        );
    };
    let found = found.context("the follower is gone")?;
    // It may have ended since: the events it has seen count.
    if let Some(failed) = found.failed.as_ref().filter(|_| !is_complete(&found)) {
        bail!("the follower has failed: {failed}");
    }
    Ok(found.as_json())
}
