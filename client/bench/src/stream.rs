//! Scans, and a follower that times how long a record takes to reach it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tonic::{Status, Streaming};
use wald_client::proto;
use wald_proto::echo;

use crate::caller::{Load, LoadCaller, counted, ends};
use crate::connection::Connection;
use crate::gate::{Due, Gate};
use crate::record::{AnswerTimes, SharedRecorder};

/// Bytes of payload in a message of echo: as a scan has them.
const ECHO_MESSAGE_BYTES: u32 = 256 << 10;

/// Maximum lag of the follower behind the last ack.
const PATIENCE: Duration = Duration::from_secs(30);

fn scan_request(load: &Load, start: Option<u64>, follow: bool) -> proto::ScanRequest {
    proto::ScanRequest {
        selector: Some(proto::scan_request::Selector::Log(load.log(0))),
        start: start.map(proto::scan_request::Start::Lsn),
        until_lsn: (!follow).then_some(load.spec.filled),
        visibility: load.spec.durability.visibility(),
        follow,
        ..proto::ScanRequest::default()
    }
}

/// Scans the log again and again. Records count as they come, calls when they are whole.
pub(crate) async fn scan(
    load: Arc<Load>,
    connection: Connection,
    gate: Arc<Gate>,
    shared: SharedRecorder,
) {
    let mut pass = Pass {
        load,
        connection,
        shared,
    };
    while let Some(due) = gate.next(Instant::now()) {
        let done = match pass.load.spec.echo {
            true => pass.echo(&gate).await,
            false => pass.records(&gate).await,
        };
        match done {
            Ok(true) => {
                let answered = Instant::now();
                pass.shared.lock().answered(&AnswerTimes {
                    due: due.at,
                    sent: due.at,
                    answered,
                    records: 0,
                    bytes: 0,
                    counts: due.counts,
                });
            }
            // The time is over in the middle.
            Ok(false) => return,
            Err(status) => {
                pass.shared.lock().failed(&status);
                if ends(status.code()) {
                    return;
                }
            }
        }
    }
}

struct Pass {
    load: Arc<Load>,
    connection: Connection,
    shared: SharedRecorder,
}

impl Pass {
    /// One scan; `false` if the time was over before its end.
    async fn records(&mut self, gate: &Gate) -> Result<bool, Status> {
        let request = scan_request(&self.load, None, false);
        let mut messages = self.connection.wal().scan(request).await?.into_inner();
        while let Some(message) = messages.message().await? {
            let (mut records, mut bytes) = (0, 0);
            for batch in &message.batches {
                let (more, size) = counted(batch);
                records += more;
                bytes += size;
            }
            if !self.arrived(gate, records, bytes) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn echo(&mut self, gate: &Gate) -> Result<bool, Status> {
        let spec = &self.load.spec;
        let request = echo::EchoScanRequest {
            records: spec.filled,
            record_bytes: spec.record_bytes,
            message_records: (ECHO_MESSAGE_BYTES / spec.record_bytes.max(1)).max(1),
        };
        let answers = self.connection.echo().echo_scan(request).await?;
        let mut messages = answers.into_inner();
        while let Some(message) = messages.message().await? {
            let bytes = message.records.iter().map(|record| record.len() as u64);
            if !self.arrived(gate, message.records.len() as u64, bytes.sum()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn arrived(&self, gate: &Gate, records: u64, bytes: u64) -> bool {
        let now = Instant::now();
        self.shared.lock().arrived(now, records, bytes, None);
        !gate.is_over(now)
    }
}

/// Appends, with a follower that sees each record from the first on. `seen` counts the records
/// it gets, `shared` the acks.
pub(crate) async fn follow(
    load: Arc<Load>,
    connections: &[Connection],
    gate: Arc<Gate>,
    shared: SharedRecorder,
    seen: SharedRecorder,
    callers: Vec<LoadCaller>,
    due: Option<UnboundedReceiver<Due>>,
) -> Result<()> {
    let mut wal = connections[0].wal();
    // The first append creates the log and returns its end.
    let made = proto::AppendRequest {
        log: load.log(0),
        record: Some(crate::caller::record(load.payload.clone())),
        durability: load.spec.durability.number(),
        ..proto::AppendRequest::default()
    };
    let begin = wal.append(made).await?.into_inner().lsn() + 1;
    let (last, end) = watch::channel(None);
    // The last one: the first has the writers.
    let connection = connections.last().unwrap_or(&connections[0]);
    let request = scan_request(&load, Some(begin), true);
    let follower = LoadFollower {
        messages: connection.wal().scan(request).await?.into_inner(),
        load,
        next: begin,
        seen,
    };
    let follower = tokio::spawn(follower.run(end));
    write(callers, &gate, due).await;
    let acked = shared.lock().all_records;
    last.send_replace(Some(begin + acked));
    tokio::time::timeout(PATIENCE, follower)
        .await
        .context("the follower does not catch up")??
}

/// A follower that measures delivery times.
struct LoadFollower {
    load: Arc<Load>,
    messages: Streaming<proto::ScanResponse>,
    next: u64,
    seen: SharedRecorder,
}

impl LoadFollower {
    /// Reads until the end, which `end` reports once it is known.
    async fn run(mut self, mut end: watch::Receiver<Option<u64>>) -> Result<()> {
        loop {
            if end.borrow_and_update().is_some_and(|end| self.next >= end) {
                return Ok(());
            }
            tokio::select! {
                message = self.messages.message() => {
                    let message = message?.context("a follower's stream ended")?;
                    self.take(&message)?;
                }
                changed = end.changed() => changed?,
            }
        }
    }

    fn take(&mut self, message: &proto::ScanResponse) -> Result<()> {
        let answered = Instant::now();
        for batch in &message.batches {
            let first = batch.first_lsn();
            ensure!(
                first == self.next,
                "a follower got lsn {first}, not {}",
                self.next
            );
            self.next += batch.records.len() as u64;
            for record in &batch.records {
                let Some(proto::record::Payload::Data(data)) = &record.payload else {
                    continue;
                };
                let stamp = data.first_chunk().context("a record without its time")?;
                let sent = self.load.epoch + Duration::from_nanos(u64::from_le_bytes(*stamp));
                self.seen.lock().answered(&AnswerTimes {
                    due: sent,
                    sent,
                    answered: answered.max(sent),
                    records: 1,
                    bytes: data.len() as u64,
                    counts: true,
                });
            }
        }
        Ok(())
    }
}

/// Makes unary calls until there are none to make: as fast as they are answered, or when
/// they are due.
pub(crate) async fn write(
    callers: Vec<LoadCaller>,
    gate: &Arc<Gate>,
    due: Option<UnboundedReceiver<Due>>,
) {
    if let Some(due) = due {
        return paced(due, callers).await;
    }
    let mut running = tokio::task::JoinSet::new();
    for mut caller in callers {
        let gate = Arc::clone(gate);
        running.spawn(async move {
            while let Some(due) = gate.next(Instant::now()) {
                if !caller.call(due).await {
                    return;
                }
            }
        });
    }
    while running.join_next().await.is_some() {}
}

/// Waits for due calls and makes them, at most one for each caller at a time.
async fn paced(mut due: UnboundedReceiver<Due>, callers: Vec<LoadCaller>) {
    let (free, mut idle) = tokio::sync::mpsc::unbounded_channel();
    for caller in callers {
        // The receiver is right here.
        let _ = free.send(caller);
    }
    let mut calls = tokio::task::JoinSet::new();
    while let Some(due) = due.recv().await {
        let Some(mut caller) = idle.recv().await else {
            return;
        };
        let free = free.clone();
        calls.spawn(async move {
            caller.call(due).await;
            let _ = free.send(caller);
        });
        while calls.try_join_next().is_some() {}
    }
    while calls.join_next().await.is_some() {}
}
