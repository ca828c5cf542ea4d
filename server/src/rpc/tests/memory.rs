//! A second engine, made of public items of the storage crate only: one log in memory. It proves
//! that the seam can be implemented outside of that crate. Methods that no test calls panic.

use std::collections::HashSet;
use std::io;

use parking_lot::Mutex;
use wald_storage::{
    AdminError, Administer, Append, AppendError, AppendTimes, Appended, Backup, BackupError, Batch,
    BoxFuture, Clock as _, CursorCommit, CursorError, Durability, DurabilityTruth, EngineKind,
    FenceError, Fenced, LogAppended, LogConfig, LogConfigChange, LogId, LogInfo, LogName, LogStat,
    LogTarget, Lsn, Name, NamedCursor, Operate, Page, Position, ProducerInfo, Quota, QuotaError,
    QuotaUse, ReadError, ReadLogs, ReadRequest, ReadStart, RecoveryTimes, Scan, ScanRequest,
    SegmentInfo, Session, Statistics, StoredBatch, SyncError, SyncTarget, Ticket, TrimError, Until,
    Verification, VerifyError, Visibility, Watch, Watched,
};

use super::*;
use crate::convert;

const LOG_ID: LogId = LogId::new(1);

/// The batches of one log, and the readers that wait for more.
#[derive(Default)]
struct Log {
    batches: Mutex<Vec<StoredBatch>>,
    watch: Watch,
}

impl Watched for Log {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

impl Log {
    fn tail(&self) -> Lsn {
        let batches = self.batches.lock();
        batches.last().map_or(Lsn::ZERO, StoredBatch::next_lsn)
    }
}

/// An engine with one log in memory, whose acks claim to be on another machine.
#[derive(Default)]
pub(super) struct MemoryEngine(Arc<Log>);

impl Append for MemoryEngine {
    fn submit(&self, session: Option<&Session>, batch: Batch, _: Option<Durability>) -> Ticket {
        if session.is_some_and(Session::has_ended_at_intake) {
            return Ticket::refused(AppendError::SessionEnded);
        }
        let (ticket, answer) = Ticket::new();
        let records = &batch.logs[0];
        let mut body = Vec::new();
        records.records.put(&mut body);
        let first_lsn = self.0.tail();
        let arrival = SystemClock.now();
        let stored = StoredBatch {
            log: records.log.clone(),
            log_id: LOG_ID,
            first_lsn,
            count: u32::try_from(records.records.len()).unwrap(),
            arrival,
            body: body.into(),
        };
        let next_lsn = stored.next_lsn();
        self.0.batches.lock().push(stored);
        self.0.watch.wake();
        let append = LogAppended {
            log_id: LOG_ID,
            first_lsn,
            next_lsn,
            timestamp: arrival,
            arrival,
            deduplicated: false,
        };
        answer.settle(Ok(Appended {
            appends: [append].into_iter().collect(),
            durable_lsns: [next_lsn].into_iter().collect(),
            replicated_lsns: [next_lsn].into_iter().collect(),
            durability: Durability::Replicated,
            position: Some(Position::new(first_lsn.get())),
            times: AppendTimes::default(),
        }));
        ticket
    }

    fn join(&self, _: &mut Batch, next: Batch) -> Result<(), Batch> {
        Err(next)
    }

    fn write_gathered(&self) {}

    fn sync(
        &self,
        _: SyncTarget,
        _: Option<&LogName>,
    ) -> BoxFuture<'_, Result<Position, SyncError>> {
        unimplemented!()
    }
}

impl ReadLogs for MemoryEngine {
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>> {
        let ReadStart::Lsn(from) = request.start else {
            unimplemented!()
        };
        let mut batches = self.0.batches.lock().clone();
        batches.retain(|batch| batch.first_lsn >= from);
        let tail = self.0.tail();
        let page = Page {
            log_id: LOG_ID,
            batches,
            next_lsn: tail,
            tail_lsn: tail,
            durable_lsn: tail,
            replicated_lsn: Some(tail),
            first_lsn: Lsn::ZERO,
        };
        Box::pin(std::future::ready(Ok(page)))
    }

    fn tail_beyond(
        &self,
        _: LogTarget,
        lsn: Lsn,
        _: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>> {
        let log = Arc::clone(&self.0);
        let watched: Arc<dyn Watched> = Arc::clone(&log) as _;
        let check = move || (log.tail() > lsn).then_some(Ok(()));
        Box::pin(Until::new(vec![watched], Visibility::Durable, check))
    }

    fn scan(&self, _: ScanRequest) -> BoxFuture<'_, Result<Box<dyn Scan>, ReadError>> {
        unimplemented!()
    }

    fn stat(
        &self,
        _: LogTarget,
        _: Option<Visibility>,
        _: Option<RecoveryEpoch>,
    ) -> BoxFuture<'_, Result<LogStat, ReadError>> {
        unimplemented!()
    }
}

impl Administer for MemoryEngine {
    fn create_log(&self, _: LogName, _: LogConfig) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        unimplemented!()
    }

    fn update_log(
        &self,
        _: LogName,
        _: LogConfigChange,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        unimplemented!()
    }

    fn delete_log(&self, _: LogTarget) -> BoxFuture<'_, Result<(), AdminError>> {
        unimplemented!()
    }

    fn list_logs(
        &self,
        _: String,
        _: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<LogInfo>, ReadError>> {
        unimplemented!()
    }

    fn trim(&self, _: LogTarget, _: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>> {
        unimplemented!()
    }

    fn fence(&self, _: LogTarget, _: Option<u64>) -> BoxFuture<'_, Result<Fenced, FenceError>> {
        unimplemented!()
    }

    fn commit_cursor(&self, _: CursorCommit) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        unimplemented!()
    }

    fn delete_cursor(&self, _: LogTarget, _: Name) -> BoxFuture<'_, Result<(), CursorError>> {
        unimplemented!()
    }

    fn cursor(&self, _: LogTarget, _: Name) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        unimplemented!()
    }

    fn list_cursors(
        &self,
        _: LogTarget,
        _: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<NamedCursor>, CursorError>> {
        unimplemented!()
    }

    fn list_producers(
        &self,
        _: LogTarget,
        _: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<ProducerInfo>, ReadError>> {
        unimplemented!()
    }

    fn forget_producer(&self, _: LogTarget, _: Name) -> BoxFuture<'_, Result<(), AdminError>> {
        unimplemented!()
    }
}

impl Operate for MemoryEngine {
    fn profile(&self) -> wald_storage::Profile {
        wald_storage::Profile {
            kind: EngineKind::Object,
            limits: StorageConfig::default().limits(),
            store_id: 7,
            recovery_epoch: RecoveryEpoch::new(1),
        }
    }

    fn statistics(&self) -> Statistics {
        Statistics::default()
    }

    fn set_quotas(&self, _: Vec<Quota>) -> BoxFuture<'_, Result<Vec<QuotaUse>, QuotaError>> {
        unimplemented!()
    }

    fn segments(&self) -> Vec<SegmentInfo> {
        unimplemented!()
    }

    fn describe_segments(&self, _: Option<Position>, _: usize) -> BoxFuture<'_, Vec<SegmentInfo>> {
        unimplemented!()
    }

    fn backup(&self, _: HashSet<u128>) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        unimplemented!()
    }

    fn verify(&self, _: Option<u64>, _: u64) -> Result<Verification, VerifyError> {
        unimplemented!()
    }

    fn durability_truth(&self) -> DurabilityTruth {
        DurabilityTruth {
            file_system: String::new(),
            sync_primitive: "",
            flush_p50: Duration::ZERO,
            flush_p99: Duration::ZERO,
            volatile: true,
            caveats: Vec::new(),
        }
    }

    fn failed(&self) -> BoxFuture<'_, Arc<io::Error>> {
        unimplemented!()
    }

    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>> {
        unimplemented!()
    }
}

/// The report of a start that found nothing.
fn report() -> RecoveryReport {
    RecoveryReport {
        recovery_epoch: RecoveryEpoch::new(1),
        clean: true,
        created: true,
        logs: 0,
        records: 0,
        segments: 0,
        end: Position::new(0),
        duration: Duration::ZERO,
        times: RecoveryTimes::default(),
        torn_bytes: 0,
        damage: Vec::new(),
        accepted: Vec::new(),
        findings: Vec::new(),
    }
}

#[tokio::test]
async fn engine_from_outside_serves_appends_and_waiting_reads() {
    let engine = Arc::new(MemoryEngine::default());
    let mut fixture = Fixture::starting().await.with(engine, report());
    let acked = fixture.append("a").await.unwrap();
    assert_eq!(acked.durability(), v1::Durability::Replicated);
    assert_eq!(acked.lsn, Some(0));
    let request = v1::ReadRequest {
        log: "a".to_owned(),
        start: Some(v1::read_request::Start::Lsn(1)),
        wait: Some(convert::proto_duration(Duration::from_secs(60))),
        ..v1::ReadRequest::default()
    };
    let mut wal = fixture.wal.clone();
    let waiting = tokio::spawn(async move { wal.read(request).await });
    fixture.append("a").await.unwrap();
    let page = waiting.await.unwrap().unwrap().into_inner();
    let batch = page.batch.unwrap();
    assert_eq!((batch.first_lsn, batch.records.len()), (Some(1), 1));
    assert_eq!(page.next_lsn, Some(2));
}

#[tokio::test]
async fn session_goes_through_an_engine_from_outside() {
    let engine = Arc::new(MemoryEngine::default());
    let mut fixture = Fixture::starting().await.with(engine, report());
    let (acked, ended) = fixture.session(20).await;
    assert_eq!(acked, 20);
    ended.unwrap();
}

#[tokio::test]
async fn server_info_has_the_kind_of_the_engine() {
    use v1::ops_service_server::OpsService as _;

    let info = async |fixture: Fixture| {
        let services = Services(Arc::clone(&fixture.node));
        let mut request = Request::new(v1::GetServerInfoRequest {});
        request.extensions_mut().insert(Caller::anyone());
        let info = services.get_server_info(request).await.unwrap();
        info.into_inner().engine()
    };
    let engine = Arc::new(MemoryEngine::default());
    let outside = Fixture::starting().await.with(engine, report());
    assert_eq!(info(outside).await, v1::EngineKind::Object);
    let local = Fixture::serving(StorageConfig::default()).await;
    assert_eq!(info(local).await, v1::EngineKind::Local);
}
