//! Tests of the whole engine, driven step by step without threads on a disk in memory.

mod appending;
mod archiving;
mod around_damage;
mod backups;
mod bounds;
mod cipher;
mod combined;
mod compression;
mod copies;
mod copy_on_write;
mod crafted;
mod cursors;
mod damage;
mod damaged_files;
mod deletions;
mod descriptors;
mod digests;
mod encryption;
mod exactly_once;
mod faults;
mod forged_cursors;
mod forgetting;
mod full_disk;
mod histories;
mod indexes;
#[cfg(feature = "shuttle")]
mod interleavings;
mod lost_machines;
mod month;
mod panics;
mod power_cut;
mod random_damage;
mod repair;
mod replica;
mod retention;
mod retries;
mod scanning;
mod simulation;
mod sorted_retention;
mod sorted_shown;
mod sorting;
mod space;
mod stale;
mod strangers;
mod sync_modes;
mod tails;
mod tenants;
mod trimming;
mod unreadable;
mod verifying;
mod witnesses;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use wald_proto::v1;

use crate::api::config::StorageConfig;
use crate::api::engine::{Appended, LogTarget, Page, ReadRequest, ReadStart, Scan, ScanChunk};
use crate::api::engine::{ScanRequest, ScanStart, Selector};
use crate::api::error::{AppendError, OpenError, ReadError, TargetError};
use crate::api::record::{
    Batch, Durability, Guard, LogConfig, LogConfigChange, LogRecords, Record, RetentionChange,
    StoredBatch, Visibility,
};
use crate::api::records::Records;
use crate::api::ticket::Ticket;
use crate::base::clock::Clock;
use crate::base::ids::{LogName, Lsn, Timestamp};
use crate::base::metrics::NoObserver;
use crate::disk::SimDisk;
use crate::engine::Core;
use crate::read::scan;
use crate::read::{self, Reach};
use crate::recovery::RecoveryReport;

/// A clock that moves only when a test moves it.
pub(crate) struct TestClock(Mutex<(Instant, i64)>);

impl TestClock {
    fn new() -> Arc<Self> {
        #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning")]
        let beginning = Instant::now();
        Arc::new(Self(Mutex::new((beginning, 1_700_000_000_000_000))))
    }

    fn advance(&self, micros: i64) {
        let mut now = self.0.lock();
        now.0 += Duration::from_micros(micros.unsigned_abs());
        now.1 += micros;
    }

    /// Changes the time that the clock shows, while no time passes.
    fn jump(&self, micros: i64) {
        self.0.lock().1 += micros;
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.lock().1)
    }

    fn monotonic(&self) -> Instant {
        self.0.lock().0
    }
}

/// Changes all settings.
impl From<LogConfig> for LogConfigChange {
    fn from(config: LogConfig) -> Self {
        Self {
            sync_mode: Some(config.sync_mode),
            compression: Some(config.compression),
            max_record_bytes: Some(config.max_record_bytes),
            retention: Some(RetentionChange::Whole(config.retention)),
        }
    }
}

/// One engine without threads.
struct Fixture {
    disk: SimDisk,
    clock: Arc<TestClock>,
    config: StorageConfig,
    core: Arc<Core>,
    report: RecoveryReport,
}

fn small_config() -> StorageConfig {
    StorageConfig {
        segment_bytes: 64 << 10,
        pool_segments: 1,
        // Time stands still in tests, so nothing may wait for a rate.
        scrub_bytes_per_second: 0,
        // The second tier runs the tests of crashes and damage with encryption, too.
        cipher: cipher::of_environment(),
        retention_interval: Duration::from_secs(24 * 3600),
        ..StorageConfig::default()
    }
}

fn open(
    disk: &SimDisk,
    config: &StorageConfig,
    clock: &Arc<TestClock>,
) -> Result<(Arc<Core>, RecoveryReport), OpenError> {
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    Core::open(
        Arc::new(disk.clone()),
        config.clone(),
        clock,
        Arc::new(NoObserver),
    )
}

impl Fixture {
    fn new() -> Self {
        Self::on(SimDisk::new())
    }

    fn on(disk: SimDisk) -> Self {
        Self::with(disk, small_config())
    }

    fn with(disk: SimDisk, config: StorageConfig) -> Self {
        let clock = TestClock::new();
        let (core, report) = open(&disk, &config, &clock).unwrap();
        Self {
            disk,
            clock,
            config,
            core,
            report,
        }
    }

    /// Ends the process without a shutdown, then starts again.
    fn restart(self) -> Self {
        let Self {
            disk,
            clock,
            config,
            core,
            ..
        } = self;
        drop(core);
        let (core, report) = open(&disk, &config, &clock).unwrap();
        Self {
            disk,
            clock,
            config,
            core,
            report,
        }
    }

    /// Shuts down cleanly, then starts again.
    fn restart_cleanly(self) -> Self {
        self.core.close().unwrap();
        self.restart()
    }

    fn submit(&self, batch: Batch) -> Ticket {
        self.core.enqueue(batch, Durability::Durable)
    }

    /// Appends in one turn, and waits for the device.
    fn append(&self, log: &str, data: &[u8]) -> Result<Appended, AppendError> {
        self.append_batch(batch(&[(log, &[data])]))
    }

    fn append_batch(&self, batch: Batch) -> Result<Appended, AppendError> {
        let mut ticket = self.submit(batch);
        self.core.turn();
        settled(&mut ticket).expect("a turn settles what wants the device")
    }

    fn read(&self, log: &str, from: u64) -> Result<Page, ReadError> {
        self.read_from(log, ReadStart::Lsn(Lsn::new(from)))
    }

    fn read_from(&self, log: &str, start: ReadStart) -> Result<Page, ReadError> {
        read::page(&self.core.store, &read_request(log, start), Reach::Disk)
    }

    /// Every record of a log, read page by page.
    fn contents(&self, log: &str) -> Vec<Vec<u8>> {
        contents(&self.core, log, Visibility::Durable).unwrap()
    }

    fn scan(&self, selector: Selector, start: ScanStart, follow: bool) -> Box<dyn Scan> {
        self.try_scan(selector, start, follow).unwrap()
    }

    fn try_scan(
        &self,
        selector: Selector,
        start: ScanStart,
        follow: bool,
    ) -> Result<Box<dyn Scan>, ReadError> {
        let request = ScanRequest {
            selector,
            start,
            until_lsn: None,
            max_records: 0,
            follow,
            visibility: None,
            chunk_bytes: 64 << 10,
        };
        self.begin(request)
    }

    fn begin(&self, request: ScanRequest) -> Result<Box<dyn Scan>, ReadError> {
        scan::begin(&self.core.store, &Arc::default(), request)
    }
}

/// Flips a bit of the byte at `at` of a file.
fn flip(disk: &SimDisk, path: &str, at: usize) {
    let mut bytes = disk.contents(path).unwrap();
    bytes[at] ^= 1;
    disk.replace(path, bytes);
}

fn read_request(log: &str, start: ReadStart) -> ReadRequest {
    ReadRequest {
        log: target(log),
        start,
        max_records: 1000,
        max_bytes: 1 << 20,
        visibility: None,
    }
}

/// Reads a page as a thread that may wait, and checks that a read that may not wait agrees.
fn page_either_way(core: &Arc<Core>, request: &ReadRequest) -> Result<Page, ReadError> {
    let page = read::page(&core.store, request, Reach::Disk)?;
    let of = |page: &Page| page.batches.iter().flat_map(payloads).collect::<Vec<_>>();
    if let Ok(near) = read::page(&core.store, request, Reach::Cached) {
        // This page may end where the next record is not in memory.
        assert!(near.next_lsn <= page.next_lsn);
        assert!(of(&page).starts_with(&of(&near)));
    }
    Ok(page)
}

fn target(log: &str) -> LogTarget {
    LogTarget {
        name: LogName::new(log).unwrap(),
        log_id: None,
    }
}

fn one(log: &str) -> Selector {
    Selector::Log(target(log))
}

fn record(data: &[u8]) -> Record {
    Record {
        data: Bytes::copy_from_slice(data),
        ..Record::default()
    }
}

/// Sets the time of the first of some records, which have only data.
fn set_time(records: &mut Records, time: Timestamp) {
    let mut times = std::iter::once(time);
    *records = records
        .iter()
        .map(|sent| Record {
            timestamp: times.next(),
            ..record(sent.data)
        })
        .collect();
}

fn batch(logs: &[(&str, &[&[u8]])]) -> Batch {
    let logs = logs
        .iter()
        .map(|(log, data)| LogRecords {
            log: LogName::new(log).unwrap(),
            records: data.iter().map(|data| record(data)).collect(),
            guard: Guard::default(),
            producer: None,
        })
        .collect();
    Batch {
        logs,
        ..Batch::default()
    }
}

/// The payloads of a stored batch.
fn payloads(batch: &StoredBatch) -> Vec<Vec<u8>> {
    let decoded = v1::RecordBatch::decode(batch.body.clone()).unwrap();
    assert_eq!(decoded.records.len(), batch.count as usize);
    decoded
        .records
        .into_iter()
        .map(|record| match record.payload {
            Some(v1::record::Payload::Data(data)) => data.to_vec(),
            other => panic!("stored payload {other:?}"),
        })
        .collect()
}

fn contents(
    core: &Arc<Core>,
    log: &str,
    visibility: Visibility,
) -> Result<Vec<Vec<u8>>, ReadError> {
    let mut found = Vec::new();
    let mut next = Lsn::ZERO;
    loop {
        let mut request = read_request(log, ReadStart::Lsn(next));
        request.visibility = Some(visibility);
        let page = read::page(&core.store, &request, Reach::Disk)?;
        for batch in &page.batches {
            assert_eq!(batch.first_lsn, next, "lsns are dense");
            next = batch.next_lsn();
            found.extend(payloads(batch));
        }
        assert_eq!(page.next_lsn, next);
        if next == page.tail_lsn {
            return Ok(found);
        }
        assert!(
            !page.batches.is_empty(),
            "a page below the tail has something"
        );
    }
}

/// The ticket's last answer, if it has one.
fn settled(ticket: &mut Ticket) -> Option<Result<Appended, AppendError>> {
    let mut context = Context::from_waker(Waker::noop());
    match Future::poll(Pin::new(ticket), &mut context) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

/// The scan's next chunk, if there is one. Fixture engines have no reader threads: this call does their work
/// for the scan.
fn next_chunk(scan: &mut Box<dyn Scan>) -> Option<Result<Option<ScanChunk>, ReadError>> {
    let mut next = scan.next();
    let mut context = Context::from_waker(Waker::noop());
    match next.as_mut().poll(&mut context) {
        Poll::Ready(chunk) => Some(chunk),
        Poll::Pending => None,
    }
}
