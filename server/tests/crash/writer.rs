//! One writer: appends of every kind and at every level, each noted in the ledger before it is
//! sent and after it is answered; and Syncs, trims and fences between them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::transport::Channel;
use tonic_types::StatusExt;
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;
use wald_proto::v1::{Durability, SyncMode, Visibility};

use super::ledger::{Ack, Ledger, Part};
use super::producer::Producer;
use super::{MODES, mode, promised};

/// Logs of each sync mode that all writers append to; each has one of its own besides.
const SHARED_LOGS: usize = 4;
/// Records that a log may keep before it is trimmed.
const KEPT: u64 = 60;

/// State that the writers of a life share with the test.
#[derive(Debug)]
pub(crate) struct Load {
    pub(crate) ledger: Arc<Mutex<Ledger>>,
    /// One permit for every ack, for every one that is DURABLE, for every refusal for want
    /// of space.
    pub(crate) acks: Semaphore,
    pub(crate) durable_acks: Semaphore,
    pub(crate) full: Semaphore,
    /// From now on nobody asks for a flush.
    pub(crate) weak_only: AtomicBool,
}

pub(crate) struct Writer {
    random: StdRng,
    /// The log that nobody else appends to, and whether it is fenced.
    own: String,
    fences: bool,
    producer: Option<Producer>,
}

/// A writer in one life of the daemon.
struct Connected<'a> {
    writer: &'a mut Writer,
    wal: WalServiceClient<Channel>,
    load: &'a Load,
}

/// Every log that writers of these numbers append to and expect to be there.
pub(crate) fn logs(writers: usize) -> impl Iterator<Item = String> {
    let shared = MODES
        .iter()
        .flat_map(|(mode, _)| (0..SHARED_LOGS).map(move |log| format!("{mode}/{log}")));
    let own = (0..writers).map(own_log);
    let produced = MODES.iter().map(|(mode, _)| produced_log(mode));
    shared.chain(own).chain(produced)
}

fn own_log(writer: usize) -> String {
    format!("{}/own-{writer}", MODES[writer % MODES.len()].0)
}

fn produced_log(mode: &str) -> String {
    format!("{mode}/produced")
}

impl Writer {
    /// The first five are producers too, one for each sync mode; the next five fence their
    /// own logs.
    pub(crate) fn new(number: usize, random: StdRng) -> Self {
        let producer = MODES.get(number);
        Self {
            random,
            own: own_log(number),
            fences: (MODES.len()..2 * MODES.len()).contains(&number),
            producer: producer.map(|(mode, _)| Producer::new(produced_log(mode))),
        }
    }

    /// Appends until the daemon is gone.
    pub(crate) async fn run(mut self, wal: WalServiceClient<Channel>, load: Arc<Load>) -> Self {
        if let Some(producer) = &mut self.producer {
            producer.begins(&load.ledger.lock());
        }
        let mut connected = Connected {
            writer: &mut self,
            wal,
            load: &load,
        };
        while connected.step().await {}
        self
    }
}

impl Connected<'_> {
    /// Does something; whether the daemon goes on.
    async fn step(&mut self) -> bool {
        let weak_only = self.load.weak_only.load(Ordering::Relaxed);
        let modes: &[SyncMode] = if weak_only {
            &[SyncMode::Interval, SyncMode::Async, SyncMode::Manual]
        } else {
            &MODES.map(|(_, mode)| mode)
        };
        match self.writer.random.random_range(0..100) {
            0..40 => {
                let single = weak_only.then_some(SyncMode::Batch);
                let modes: Vec<SyncMode> = modes.iter().copied().chain(single).collect();
                let log = self.shared_log(&modes);
                self.append(log, None).await
            }
            40..65 => self.batch(modes).await,
            65..77 if modes.contains(&mode(&self.writer.own)) => self.append_as_expected().await,
            77..82 if modes.contains(&mode(&self.writer.own)) => self.append_otherwise().await,
            82..92 if self.produces(modes) => self.produce().await,
            92..94 if !weak_only => self.sync().await,
            94..97 if !weak_only => self.trim().await,
            97..98 if !weak_only && self.writer.fences => self.fence().await,
            98..99 if !weak_only => self.tail().await,
            99 if !weak_only && self.writer.random.random_bool(0.3) => {
                let log = format!("new/{}", self.writer.random.random_range(0..1_000));
                self.append(log, None).await
            }
            _ => true,
        }
    }

    fn produces(&self, modes: &[SyncMode]) -> bool {
        let producer = self.writer.producer.as_ref();
        producer.is_some_and(|producer| modes.contains(&mode(&producer.log)))
    }

    /// The requested durability: mostly none.
    fn durability(&mut self) -> Durability {
        let weak_only = self.load.weak_only.load(Ordering::Relaxed);
        match self.writer.random.random_range(0..6) {
            0 => Durability::Accepted,
            1 => Durability::Written,
            2 if !weak_only => Durability::Durable,
            _ => Durability::Unspecified,
        }
    }

    fn sizes(&mut self, records: usize) -> Vec<usize> {
        let mut size = || self.writer.random.random_range(0..200);
        (0..records).map(|_| size()).collect()
    }

    fn shared_log(&mut self, modes: &[SyncMode]) -> String {
        let wanted = modes.choose(&mut self.writer.random).unwrap();
        let (mode, _) = MODES.iter().find(|(_, mode)| mode == wanted).unwrap();
        format!("{mode}/{}", self.writer.random.random_range(0..SHARED_LOGS))
    }

    /// The epoch to name: that of its own log, if it fences it.
    fn writer_epoch(&self, log: &str) -> Option<u64> {
        let fenced = self.writer.fences && log == self.writer.own;
        fenced.then(|| self.load.ledger.lock().writer_epoch(log))
    }

    /// At the tail of its own log, which nobody else moves.
    async fn append_as_expected(&mut self) -> bool {
        let log = self.writer.own.clone();
        let tail = self.load.ledger.lock().tail(&log);
        let condition = v1::AppendCondition {
            expected_lsn: Some(tail),
            writer_epoch: self.writer_epoch(&log),
            ..v1::AppendCondition::default()
        };
        self.append(log, Some(condition)).await
    }

    /// Where the tail of its own log is not, or in an older epoch: must be refused, and
    /// never be seen.
    async fn append_otherwise(&mut self) -> bool {
        let log = self.writer.own.clone();
        let tail = self.load.ledger.lock().tail(&log);
        let mut condition = v1::AppendCondition {
            writer_epoch: self.writer_epoch(&log),
            ..v1::AppendCondition::default()
        };
        match condition.writer_epoch {
            Some(1..) if self.writer.random.random_bool(0.5) => condition.writer_epoch = Some(0),
            _ if tail > 0 && self.writer.random.random_bool(0.5) => {
                condition.expected_lsn = Some(tail - 1);
            }
            _ => condition.expected_lsn = Some(tail + 1),
        }
        self.append(log, Some(condition)).await
    }

    async fn append(&mut self, log: String, condition: Option<v1::AppendCondition>) -> bool {
        let sizes = self.sizes(1);
        let (attempt, parts) = self.load.ledger.lock().attempt(&[(log.clone(), sizes)]);
        let durability = self.durability();
        let least = promised([log.as_str()].into_iter(), true, durability);
        let request = v1::AppendRequest {
            condition: condition.clone(),
            durability: durability.into(),
            ..crate::support::append(&log, &parts[0].payloads[0])
        };
        match self.wal.append(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                let expected = condition.and_then(|condition| condition.expected_lsn);
                assert!(expected.is_none_or(|lsn| lsn == answer.lsn()), "{answer:?}");
                let ack = Ack {
                    firsts: vec![answer.lsn()],
                    durable: vec![answer.durable_lsn()],
                    level: answer.durability(),
                    position: answer.position,
                    recovery_epoch: answer.recovery_epoch,
                    repeated: answer.deduplicated,
                };
                self.acked(attempt, ack, least);
                true
            }
            Err(status) => {
                let expected = ["POSITION_MISMATCH", "FENCED"];
                let served = self.failed(Some(attempt), &status, &expected).await;
                let details = status.get_error_details();
                // A refusal only shows records that are as durable as requested.
                if let Some(info) = details.error_info()
                    && info.reason == "POSITION_MISMATCH"
                    && least == Durability::Durable
                {
                    let actual = info.metadata["actual_lsn"].parse().unwrap();
                    self.load
                        .ledger
                        .lock()
                        .told_durable(&log, actual, "a refusal");
                }
                served
            }
        }
    }

    /// Over two or three logs.
    async fn batch(&mut self, modes: &[SyncMode]) -> bool {
        let mut logs = Vec::new();
        let mut known = HashSet::new();
        for _ in 0..self.writer.random.random_range(2..=3) {
            let log = self.shared_log(modes);
            if known.insert(log.clone()) {
                let records = self.writer.random.random_range(1..=3);
                logs.push((log, self.sizes(records)));
            }
        }
        let (attempt, parts) = self.load.ledger.lock().attempt(&logs);
        let batches = parts.iter().map(part).collect();
        self.append_batch(attempt, &parts, batches).await
    }

    /// The next batch of the producer, or one that was answered before.
    async fn produce(&mut self) -> bool {
        let Writer {
            producer, random, ..
        } = &mut *self.writer;
        let producer = producer.as_mut().unwrap();
        let (attempt, parts, named) = producer.send(&mut self.load.ledger.lock(), random);
        let condition = v1::AppendCondition {
            producer: Some(named.clone()),
            ..v1::AppendCondition::default()
        };
        let batch = v1::LogBatch {
            condition: Some(condition),
            ..part(&parts[0])
        };
        let served = self.append_batch(attempt, &parts, vec![batch]).await;
        let ledger = self.load.ledger.lock();
        if ledger.is_there(attempt) {
            self.writer.producer.as_mut().unwrap().acked(&named);
        }
        served
    }

    async fn append_batch(
        &mut self,
        attempt: usize,
        parts: &[Part],
        batches: Vec<v1::LogBatch>,
    ) -> bool {
        let durability = self.durability();
        let logs = parts.iter().map(|part| part.log.as_str());
        let least = promised(logs, false, durability);
        let request = v1::AppendBatchRequest {
            batches,
            durability: durability.into(),
            ..v1::AppendBatchRequest::default()
        };
        match self.wal.append_batch(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                let appends = || answer.appends.iter();
                let ack = Ack {
                    firsts: appends().map(v1::LogAppend::first_lsn).collect(),
                    durable: appends().map(v1::LogAppend::durable_lsn).collect(),
                    level: answer.durability(),
                    position: answer.position,
                    recovery_epoch: answer.recovery_epoch,
                    repeated: appends().any(|append| append.deduplicated),
                };
                self.acked(attempt, ack, least);
                true
            }
            Err(status) => self.failed(Some(attempt), &status, &[]).await,
        }
    }

    fn acked(&self, attempt: usize, ack: Ack, least: Durability) {
        assert!(ack.level >= least, "{least:?} was asked for: {ack:?}");
        let durable = ack.level == Durability::Durable;
        self.load.ledger.lock().acked(attempt, ack);
        self.load.acks.add_permits(1);
        self.load.durable_acks.add_permits(usize::from(durable));
    }

    /// Whether the daemon goes on. If no answer came, the outcome stays unknown.
    async fn failed(&self, attempt: Option<usize>, status: &Status, expected: &[&str]) -> bool {
        let details = status.get_error_details();
        let Some(info) = details.error_info() else {
            return false;
        };
        let not_applied = info.metadata.get("outcome").map(String::as_str) == Some("NOT_APPLIED");
        if let Some(attempt) = attempt.filter(|_| not_applied) {
            self.load.ledger.lock().refused(attempt);
        }
        match info.reason.as_str() {
            // Its disk failed under it, or it is about to go.
            "JOURNAL_FAILED" | "DRAINING" => false,
            "DISK_FULL" => {
                assert!(not_applied || attempt.is_none(), "{status:?}");
                self.load.full.add_permits(1);
                tokio::time::sleep(Duration::from_millis(1)).await;
                true
            }
            reason => {
                assert!(not_applied && expected.contains(&reason), "{status:?}");
                true
            }
        }
    }

    /// Syncs one log or all, to the operating system or to the device.
    async fn sync(&mut self) -> bool {
        let all = self.writer.random.random_bool(0.5);
        let log = if all {
            String::new()
        } else {
            self.shared_log(&MODES.map(|(_, mode)| mode))
        };
        let (target, level) = if self.writer.random.random_bool(0.3) {
            (v1::SyncTarget::Os, Durability::Written)
        } else {
            (v1::SyncTarget::Device, Durability::Durable)
        };
        let acks = self.load.ledger.lock().acks();
        let request = v1::SyncRequest {
            target: target.into(),
            log: log.clone(),
        };
        match self.wal.sync(request).await {
            Ok(_) => {
                self.load.ledger.lock().synced(acks, &log, level);
                true
            }
            Err(status) => self.failed(None, &status, &[]).await,
        }
    }

    /// The log that has most to forget.
    async fn trim(&mut self) -> bool {
        let keep = self.writer.random.random_range(0..=KEPT);
        let (log, before) = {
            let mut ledger = self.load.ledger.lock();
            match ledger.longest() {
                Some((log, kept)) if kept > KEPT => {
                    let before = ledger.tail(&log) - keep;
                    ledger.trim(&log, before, false);
                    (log, before)
                }
                _ => return true,
            }
        };
        let request = v1::TrimRequest {
            log: log.clone(),
            before_lsn: before,
            ..v1::TrimRequest::default()
        };
        match self.wal.trim(request).await {
            Ok(answer) => {
                assert!(answer.into_inner().first_lsn() >= before);
                self.load.ledger.lock().trim(&log, before, true);
                true
            }
            Err(status) => self.failed(None, &status, &[]).await,
        }
    }

    /// Its own log, which nobody else fences.
    async fn fence(&mut self) -> bool {
        let log = self.writer.own.clone();
        let epoch = {
            let mut ledger = self.load.ledger.lock();
            let epoch = ledger.writer_epoch(&log) + 1;
            ledger.fence(&log, epoch);
            epoch
        };
        let request = v1::FenceRequest {
            log: log.clone(),
            writer_epoch: Some(epoch),
            ..v1::FenceRequest::default()
        };
        match self.wal.fence(request).await {
            Ok(answer) => {
                let tail = answer.into_inner().tail_lsn();
                self.load.ledger.lock().fenced(&log, epoch, tail);
                true
            }
            Err(status) => self.failed(None, &status, &[]).await,
        }
    }

    /// Notes the durable end that a log reports.
    async fn tail(&mut self) -> bool {
        let log = self.shared_log(&MODES.map(|(_, mode)| mode));
        let request = v1::GetTailRequest {
            log: log.clone(),
            visibility: Visibility::Durable.into(),
            ..v1::GetTailRequest::default()
        };
        match self.wal.get_tail(request).await {
            Ok(answer) => {
                let tail = answer.into_inner();
                let durable = tail.tail_lsn().max(tail.durable_lsn());
                self.load
                    .ledger
                    .lock()
                    .told_durable(&log, durable, "GetTail");
                true
            }
            Err(status) => self.failed(None, &status, &[]).await,
        }
    }
}

fn part(part: &Part) -> v1::LogBatch {
    let payloads: Vec<&str> = part.payloads.iter().map(String::as_str).collect();
    crate::support::part(&part.log, &payloads)
}
