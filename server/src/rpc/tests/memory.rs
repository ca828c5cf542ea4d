//! A second engine, made of public items of the storage crate only: one log in memory. It proves
//! that the seam can be implemented outside of that crate. It takes appends, and refuses other changes as if its disk were
//! full.

use std::collections::HashSet;
use std::io;

use parking_lot::Mutex;
use wald_storage::{
    AdminError, Administer, Append, AppendError, AppendTimes, Appended, Backup, BackupError, Batch,
    BoxFuture, Clock as _, ContentDigest, CursorCommit, CursorError, Durability, DurabilityTruth,
    EngineKind, FenceError, Fenced, FreeSpace, LogAppended, LogConfig, LogConfigChange, LogId,
    LogInfo, LogName, LogStat, LogTarget, Lsn, Name, NamedCursor, Operate, Page, Position,
    ProducerInfo, Quota, QuotaError, QuotaUse, ReadError, ReadLogs, ReadRequest, ReadStart,
    RecoveryTimes, Scan, ScanRequest, SegmentInfo, Session, Statistics, StoredBatch, SyncError,
    SyncTarget, TargetError, Ticket, TicketAnswer, TrimError, Until, Verification, VerifyError,
    Visibility, Watch, Watched,
};

use super::*;
use crate::convert;

const LOG_ID: LogId = LogId::new(1);

/// The batches of one log, and the readers that wait for more.
#[derive(Default)]
struct Log {
    batches: Mutex<Vec<StoredBatch>>,
    /// Answers that wait for a later append.
    held: Mutex<Vec<(TicketAnswer, Appended)>>,
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

    /// The log, once it has records.
    fn info(&self) -> Option<LogInfo> {
        let (tail, batches) = (self.tail(), self.batches.lock());
        let first = batches.first()?;
        Some(LogInfo {
            name: first.log.clone(),
            log_id: LOG_ID,
            config: Arc::default(),
            first_lsn: Lsn::ZERO,
            expired: 0,
            tail_lsn: tail,
            durable_lsn: tail,
            replicated_lsn: Some(tail),
            writer_epoch: 0,
            stored_bytes: batches.iter().map(|batch| batch.body.len() as u64).sum(),
            create_time: first.arrival,
            update_time: first.arrival,
            first_producer_epoch: 0,
        })
    }

    /// The log, if it has this name and identity.
    fn named(&self, target: &LogTarget) -> Result<LogInfo, TargetError> {
        let log = target.name.clone();
        match (self.info().filter(|info| info.name == log), target.log_id) {
            (Some(info), None | Some(LOG_ID)) => Ok(info),
            (None, None) => Err(TargetError::NotFound { log }),
            (info, Some(expected)) => Err(TargetError::Replaced {
                log,
                expected,
                actual: info.map(|info| info.log_id),
            }),
        }
    }
}

/// The refusal of every change that is no append.
fn full() -> AppendError {
    AppendError::DiskFull(FreeSpace::default())
}

fn unsupported() -> io::Error {
    io::Error::from(io::ErrorKind::Unsupported)
}

fn ready<'a, T: Send + 'a>(answer: T) -> BoxFuture<'a, T> {
    Box::pin(std::future::ready(answer))
}

/// An engine with one log in memory, whose acks claim to be on another machine.
#[derive(Default)]
pub(super) struct MemoryEngine(Arc<Log>);

impl Append for MemoryEngine {
    /// An append that asks for REPLICATED is answered with the next one that asks for DURABLE.
    fn submit(&self, session: Option<&Session>, batch: Batch, level: Option<Durability>) -> Ticket {
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
        let appended = Appended {
            appends: [append].into_iter().collect(),
            durable_lsns: [next_lsn].into_iter().collect(),
            replicated_lsns: [next_lsn].into_iter().collect(),
            durability: Durability::Replicated,
            position: Some(Position::new(first_lsn.get())),
            times: AppendTimes::default(),
        };
        let mut held = self.0.held.lock();
        if level == Some(Durability::Replicated) {
            held.push((answer, appended));
            return ticket;
        }
        answer.settle(Ok(appended));
        if level == Some(Durability::Durable) {
            for (answer, appended) in held.drain(..) {
                answer.settle(Ok(appended));
            }
        }
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
        ready(Ok(Position::new(self.0.tail().get())))
    }
}

impl ReadLogs for MemoryEngine {
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>> {
        let mut batches = self.0.batches.lock().clone();
        let tail = self.0.tail();
        match request.start {
            ReadStart::First => {}
            ReadStart::Lsn(from) => batches.retain(|batch| batch.first_lsn >= from),
            ReadStart::Time(from) => batches.retain(|batch| batch.arrival >= from),
            ReadStart::TailOffset(records) => {
                batches.retain(|batch| batch.first_lsn.advance(records) >= tail);
            }
        }
        let page = Page {
            log_id: LOG_ID,
            batches,
            next_lsn: tail,
            tail_lsn: tail,
            durable_lsn: tail,
            replicated_lsn: Some(tail),
            first_lsn: Lsn::ZERO,
        };
        ready(Ok(page))
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
        ready(Err(ReadError::Io(Arc::new(unsupported()))))
    }

    fn stat(
        &self,
        log: LogTarget,
        _: Option<Visibility>,
        _: Option<RecoveryEpoch>,
    ) -> BoxFuture<'_, Result<LogStat, ReadError>> {
        let stat = self.0.named(&log).map(|info| LogStat {
            info,
            survived_position: None,
        });
        ready(stat.map_err(ReadError::from))
    }
}

impl Administer for MemoryEngine {
    fn create_log(&self, log: LogName, _: LogConfig) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        let existing = self.0.info().filter(|info| info.name == log);
        ready(Err(match existing {
            Some(LogInfo { log_id, .. }) => AdminError::LogExists { log, log_id },
            None => full().into(),
        }))
    }

    fn update_log(
        &self,
        _: LogName,
        _: LogConfigChange,
    ) -> BoxFuture<'_, Result<LogInfo, AdminError>> {
        ready(Err(full().into()))
    }

    fn delete_log(&self, _: LogTarget) -> BoxFuture<'_, Result<(), AdminError>> {
        ready(Err(full().into()))
    }

    fn list_logs(
        &self,
        prefix: String,
        after: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<LogInfo>, ReadError>> {
        let info = self.0.info().filter(|info| {
            let name = info.name.as_str();
            name.starts_with(&prefix) && after.as_deref().is_none_or(|after| name > after)
        });
        ready(Ok(info.into_iter().collect()))
    }

    fn trim(&self, _: LogTarget, _: Lsn) -> BoxFuture<'_, Result<Lsn, TrimError>> {
        ready(Err(full().into()))
    }

    fn fence(&self, _: LogTarget, _: Option<u64>) -> BoxFuture<'_, Result<Fenced, FenceError>> {
        ready(Err(full().into()))
    }

    fn commit_cursor(&self, _: CursorCommit) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        ready(Err(full().into()))
    }

    fn delete_cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<(), CursorError>> {
        let log = log.name;
        ready(Err(CursorError::NotFound { log, cursor }))
    }

    fn cursor(
        &self,
        log: LogTarget,
        cursor: Name,
    ) -> BoxFuture<'_, Result<NamedCursor, CursorError>> {
        let log = log.name;
        ready(Err(CursorError::NotFound { log, cursor }))
    }

    fn list_cursors(
        &self,
        _: LogTarget,
        _: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<NamedCursor>, CursorError>> {
        ready(Ok(Vec::new()))
    }

    fn list_producers(
        &self,
        _: LogTarget,
        _: Option<String>,
        _: usize,
    ) -> BoxFuture<'_, Result<Vec<ProducerInfo>, ReadError>> {
        ready(Ok(Vec::new()))
    }

    fn forget_producer(
        &self,
        log: LogTarget,
        producer: Name,
    ) -> BoxFuture<'_, Result<(), AdminError>> {
        let log = log.name;
        ready(Err(AdminError::ProducerNotFound { log, producer }))
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

    fn set_quotas(&self, quotas: Vec<Quota>) -> BoxFuture<'_, Result<Vec<QuotaUse>, QuotaError>> {
        let given = quotas.len();
        ready(match given {
            0 => Ok(Vec::new()),
            _ => Err(QuotaError::TooMany { given, max: 0 }),
        })
    }

    fn segments(&self) -> Vec<SegmentInfo> {
        Vec::new()
    }

    fn describe_segments(&self, _: Option<Position>, _: usize) -> BoxFuture<'_, Vec<SegmentInfo>> {
        ready(Vec::new())
    }

    fn backup(
        &self,
        _: HashSet<ContentDigest>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        ready(Err(BackupError::Io {
            path: "memory".to_owned(),
            source: Arc::new(unsupported()),
        }))
    }

    fn verify(&self, _: Option<u64>, _: u64) -> Result<Verification, VerifyError> {
        Err(VerifyError::Io(unsupported()))
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
        Box::pin(std::future::pending())
    }

    fn drain(&self) -> BoxFuture<'_, Result<(), SyncError>> {
        ready(Ok(()))
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
async fn independent_request_is_not_held_up_by_one_with_a_later_ack() {
    let engine = Arc::new(MemoryEngine::default());
    let mut fixture = Fixture::starting().await.with(engine, report());
    let (sender, sent) = tokio::sync::mpsc::channel(4);
    let send = async |request_id, level| {
        let request = v1::AppendSessionRequest {
            request_id,
            independent: true,
            append: Some(append("a", 1, level)),
            ..v1::AppendSessionRequest::default()
        };
        sender.send(request).await.unwrap();
    };
    let answers = fixture.wal.append_session(ReceiverStream::new(sent)).await;
    let mut answers = answers.unwrap().into_inner();
    send(0, v1::Durability::Replicated).await;
    send(1, v1::Durability::Written).await;
    let first = answers.message().await.unwrap().unwrap();
    assert_eq!(
        (first.request_id, first.append_ack.unwrap().lsn),
        (1, Some(1))
    );
    send(2, v1::Durability::Durable).await;
    let mut later = Vec::new();
    while later.len() < 2 {
        later.push(answers.message().await.unwrap().unwrap().request_id);
    }
    later.sort_unstable();
    assert_eq!(later, [0, 2]);
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

#[tokio::test]
async fn errors_of_an_engine_from_outside_reach_the_caller() {
    let engine = Arc::new(MemoryEngine::default());
    let mut fixture = Fixture::starting().await.with(engine, report());
    fixture.append("a").await.unwrap();
    let get = |log: &str| v1::GetLogRequest {
        log: log.to_owned(),
    };
    let found = fixture.logs.get_log(get("a")).await.unwrap().into_inner();
    assert_eq!(found.log.unwrap().tail_lsn, Some(1));
    let create = |log: &str| v1::CreateLogRequest {
        log: log.to_owned(),
        config: None,
    };
    let cursor = v1::GetCursorRequest {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        log_id: None,
    };
    let scan = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
        ..v1::ScanRequest::default()
    };
    for (code, refused) in [
        (
            Code::NotFound,
            fixture.logs.get_log(get("b")).await.unwrap_err(),
        ),
        (
            Code::AlreadyExists,
            fixture.logs.create_log(create("a")).await.unwrap_err(),
        ),
        (
            Code::ResourceExhausted,
            fixture.logs.create_log(create("b")).await.unwrap_err(),
        ),
        (
            Code::NotFound,
            fixture.cursors.get_cursor(cursor).await.unwrap_err(),
        ),
        (Code::Unavailable, fixture.wal.scan(scan).await.unwrap_err()),
    ] {
        assert_eq!(refused.code(), code, "{refused:?}");
    }
}
