//! Errors that need a fault to be seen, through gRPC: a node on a disk in memory that follows a
//! script. (`tests/daemon/errors.rs` has the rest of the error table.)

use std::time::{Duration, Instant};

use prost::Message as _;
use prost_types::FileDescriptorSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tonic_types::StatusExt as _;
use v1::cursor_service_client::CursorServiceClient;
use v1::log_service_client::LogServiceClient;
use v1::wal_service_client::WalServiceClient;
use wald_proto::codec::{MessageCodec, Sent};
use wald_proto::v1;
use wald_storage::{LocalEngine, LogEngine, SimDisk, StorageConfig, SystemClock};

use super::*;
use crate::admission::Admission;
use crate::auth::Authority;
use crate::config::{Layers, LogPatterns};
use crate::transport::{Calls, Listener, Routes, serve_here};

mod memory;

/// A node and its clients.
pub(super) struct Fixture {
    disk: SimDisk,
    pub(super) node: Arc<Node>,
    _phase: watch::Sender<Phase>,
    channel: Channel,
    wal: WalServiceClient<Channel>,
    logs: LogServiceClient<Channel>,
    cursors: CursorServiceClient<Channel>,
}

impl Fixture {
    /// A node whose store is not open yet.
    async fn starting() -> Self {
        Self::starting_with(Duration::from_secs(15)).await
    }

    async fn starting_with(heartbeat_interval: Duration) -> Self {
        let metrics = Arc::new(Metrics::new().unwrap());
        let (phase, receiver) = watch::channel(Phase::Serving);
        let config = StorageConfig::default();
        let node = Arc::new(Node {
            store: OnceLock::new(),
            owner: watch::channel(None).1,
            replica: Arc::default(),
            copies: Arc::default(),
            metrics: Arc::clone(&metrics),
            phase: receiver,
            heartbeat_interval,
            sync_mode: SyncMode::Strict,
            has_replica: true,
            sync_interval: config.sync_interval,
            retention: config.retention(),
            engine_limits: StorageConfig::default().limits(),
            drain: watch::Sender::new(None),
            limits: ServerLimits {
                max_timestamp_ahead: config.max_timestamp_ahead,
                producer_window: config.producer_window,
                max_producers_per_log: config.max_producers_per_log,
                max_cursors_per_log: config.max_cursors_per_log,
                session_window_bytes: 4 << 20,
                producer_max_idle: config.producer_max_idle,
            },
            auto_create: true,
            protection: v1::Protection::default(),
            cursor_lag_logs: LogPatterns::default(),
            start_time: Timestamp::from_micros(1),
            signing_key: None,
        });
        let services = || Services(Arc::clone(&node));
        let mut routes = Routes::default();
        routes.add(WalCalls(Arc::clone(&node)));
        routes.add_generated(v1::log_service_server::LogServiceServer::new(services()));
        routes.add_generated(v1::cursor_service_server::CursorServiceServer::new(
            services(),
        ));
        let calls = Arc::new(Calls {
            counter: metrics.call_counter(None),
            authority: Authority::Open,
            audit: None,
            admission: Admission::new(64 << 20, 4 << 20, 16 << 20, node.phase.clone()),
            routes,
            forward: None,
            http: None,
        });
        let mut config = Layers::default().resolve().unwrap().config;
        config.listen = "127.0.0.1:0".parse().unwrap();
        let listener = Listener::bind(&config).unwrap();
        let address = listener.address();
        let port = metrics.ports.grpc.clone();
        serve_here(listener, &calls, &config, &node.phase, port);
        let channel = Channel::from_shared(format!("http://{address}"));
        let channel = channel.unwrap().connect().await.unwrap();
        Self {
            disk: SimDisk::new(),
            node,
            _phase: phase,
            wal: WalServiceClient::new(channel.clone()),
            logs: LogServiceClient::new(channel.clone()),
            cursors: CursorServiceClient::new(channel.clone()),
            channel,
        }
    }

    async fn serving(config: StorageConfig) -> Self {
        Self::starting().await.open(config)
    }

    /// A node whose followers are given heartbeats so often.
    pub(super) async fn beating(heartbeat_interval: Duration) -> Self {
        let config = StorageConfig {
            segment_bytes: 8 << 20,
            ..StorageConfig::default()
        };
        Self::starting_with(heartbeat_interval).await.open(config)
    }

    fn open(self, config: StorageConfig) -> Self {
        let (engine, report) = LocalEngine::open(
            Arc::new(self.disk.clone()),
            config,
            Arc::new(SystemClock),
            Arc::clone(&self.node.metrics) as Arc<dyn wald_storage::Observer>,
        )
        .unwrap();
        self.with(engine, report)
    }

    /// The node serves this engine.
    fn with(self, engine: Arc<dyn LogEngine>, report: RecoveryReport) -> Self {
        let store = OpenStore {
            engine: Engine::new(engine),
            epoch: report.recovery_epoch,
            report,
            keys: None,
        };
        assert!(self.node.store.set(store).is_ok());
        self
    }

    /// A node whose next flush is that of the next append: nothing else has one to make.
    async fn quiet() -> Self {
        let config = StorageConfig {
            segment_bytes: 8 << 20,
            marker_delay: Duration::from_secs(3600),
            ..StorageConfig::default()
        };
        Self::ready(config).await
    }

    /// A node whose pool is filled: before, a full disk refuses even the first records.
    async fn ready(config: StorageConfig) -> Self {
        let ready = u64::try_from(config.pool_segments + config.reserve_segments).unwrap();
        let fixture = Self::serving(config).await;
        let store = fixture.node.store.get().unwrap();
        while store.engine.statistics().ready_segments < ready {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        fixture
    }

    pub(super) async fn append(&mut self, log: &str) -> Result<v1::AppendResponse, Status> {
        let request = v1::AppendRequest {
            log: log.to_owned(),
            ..v1::AppendRequest::default()
        };
        self.wal.append(request).await.map(Response::into_inner)
    }

    /// Every other RPC that writes, refused.
    async fn writes_refused(&mut self) -> Vec<Status> {
        let log = || "a".to_owned();
        let batch = v1::AppendBatchRequest {
            batches: vec![part("a", 1)],
            ..v1::AppendBatchRequest::default()
        };
        let fence = v1::FenceRequest {
            log: log(),
            ..v1::FenceRequest::default()
        };
        let trim = v1::TrimRequest {
            log: log(),
            ..v1::TrimRequest::default()
        };
        let create = v1::CreateLogRequest {
            log: "new".to_owned(),
            config: None,
        };
        let delete = v1::DeleteLogRequest {
            shred: false,
            log: log(),
            log_id: None,
        };
        let commit = v1::CommitCursorRequest {
            commit: Some(v1::CursorCommit {
                log: log(),
                cursor: "c".to_owned(),
                ..v1::CursorCommit::default()
            }),
        };
        vec![
            self.append("a").await.unwrap_err(),
            self.wal.append_batch(batch).await.unwrap_err(),
            self.wal.fence(fence).await.unwrap_err(),
            self.wal.trim(trim).await.unwrap_err(),
            self.logs.create_log(create).await.unwrap_err(),
            self.logs.delete_log(delete).await.unwrap_err(),
            self.cursors.commit_cursor(commit).await.unwrap_err(),
        ]
    }

    /// A session of `requests` requests of 1 KiB each, all sent before an ack is read. Returns
    /// the number of acks, and the end.
    async fn session(&mut self, requests: u64) -> (u64, Result<(), Status>) {
        let (sender, sent) = tokio::sync::mpsc::channel(1);
        tokio::spawn(async move {
            for request_id in 0..requests {
                let batch = Some(v1::AppendBatchRequest {
                    batches: vec![part("a", 1024)],
                    ..v1::AppendBatchRequest::default()
                });
                let request = v1::AppendSessionRequest {
                    request_id,
                    batch,
                    ..v1::AppendSessionRequest::default()
                };
                if sender.send(request).await.is_err() {
                    return;
                }
            }
        });
        let answers = self.wal.append_session(ReceiverStream::new(sent)).await;
        let mut answers = match answers {
            Ok(answers) => answers.into_inner(),
            Err(status) => return (0, Err(status)),
        };
        let mut acked = 0;
        loop {
            match answers.message().await {
                Ok(Some(answer)) => assert_eq!(answer.request_id, acked),
                Ok(None) => return (acked, Ok(())),
                Err(status) => return (acked, Err(status)),
            }
            acked += 1;
        }
    }

    /// A session of these independent requests, which are all sent before an answer is read.
    async fn independent(
        &mut self,
        requests: Vec<v1::AppendRequest>,
    ) -> (Vec<v1::AppendSessionResponse>, Result<(), Status>) {
        let requests = (0..)
            .zip(requests)
            .map(|(request_id, append)| v1::AppendSessionRequest {
                request_id,
                independent: true,
                append: Some(append),
                ..v1::AppendSessionRequest::default()
            });
        let requests = futures_util::stream::iter(requests.collect::<Vec<_>>());
        let mut answers = self
            .wal
            .append_session(requests)
            .await
            .unwrap()
            .into_inner();
        let mut given = Vec::new();
        loop {
            match answers.message().await {
                Ok(Some(answer)) => given.push(answer),
                Ok(None) => return (given, Ok(())),
                Err(status) => return (given, Err(status)),
            }
        }
    }

    /// Calls reads of every service, and returns their refusals.
    async fn reads_refused(&mut self) -> Vec<Status> {
        let log = || "a".to_owned();
        let scan = v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log(log())),
            ..v1::ScanRequest::default()
        };
        let read = v1::ReadRequest {
            log: log(),
            ..v1::ReadRequest::default()
        };
        let tail = v1::GetTailRequest {
            log: log(),
            ..v1::GetTailRequest::default()
        };
        let producers = v1::ListProducersRequest {
            log: log(),
            ..v1::ListProducersRequest::default()
        };
        let cursors = v1::ListCursorsRequest {
            log: log(),
            ..v1::ListCursorsRequest::default()
        };
        let get = v1::GetLogRequest { log: log() };
        vec![
            self.wal.read(read).await.unwrap_err(),
            self.wal.scan(scan).await.unwrap_err(),
            self.wal.get_tail(tail).await.unwrap_err(),
            self.logs.get_log(get).await.unwrap_err(),
            self.logs.list_producers(producers).await.unwrap_err(),
            self.cursors.list_cursors(cursors).await.unwrap_err(),
        ]
    }

    /// The value of `wald_rejected_total` for an operation and a reason.
    fn rejected(&self, operation: &str, reason: &str) -> usize {
        self.metric(&format!(
            "wald_rejected_total{{operation=\"{operation}\",reason=\"{reason}\"}}"
        ))
    }

    /// The number of appends of one record that ended with this code.
    fn appends_handled(&self, code: &str) -> usize {
        self.metric(&format!(
            "grpc_server_handled_total{{grpc_code=\"{code}\",grpc_method=\"Append\",grpc_service=\"wald.v1.WalService\",grpc_type=\"unary\"}}"
        ))
    }

    fn metric(&self, name: &str) -> usize {
        let text = self.node.metrics.encode(None, &[]).unwrap();
        let text = String::from_utf8(text).unwrap();
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        found.unwrap().trim().parse().unwrap()
    }

    async fn durable_tail(&mut self) -> u64 {
        let request = v1::GetTailRequest {
            log: "a".to_owned(),
            visibility: v1::Visibility::Durable.into(),
            ..v1::GetTailRequest::default()
        };
        let answer = self.wal.get_tail(request).await.unwrap();
        answer.into_inner().tail_lsn.unwrap()
    }
}

fn append(log: &str, bytes: usize, durability: v1::Durability) -> v1::AppendRequest {
    v1::AppendRequest {
        log: log.to_owned(),
        record: Some(v1::Record {
            payload: Some(v1::record::Payload::Data(vec![7; bytes].into())),
            ..v1::Record::default()
        }),
        durability: durability.into(),
        ..v1::AppendRequest::default()
    }
}

fn part(log: &str, bytes: usize) -> v1::LogBatch {
    v1::LogBatch {
        log: log.to_owned(),
        records: vec![v1::Record {
            payload: Some(v1::record::Payload::Data(vec![7; bytes].into())),
            ..v1::Record::default()
        }],
        condition: None,
    }
}

fn fact(status: &Status, key: &str) -> Option<String> {
    let details = status.get_error_details();
    details.error_info()?.metadata.get(key).cloned()
}

/// Code and reason, outcome and retry, and whether it says when to come back.
fn expect(
    status: &Status,
    (code, reason): (Code, &str),
    (outcome, retry): (&str, &str),
    comes_back: bool,
) {
    let details = status.get_error_details();
    let info = details.error_info().unwrap();
    assert_eq!((status.code(), info.reason.as_str()), (code, reason));
    assert_eq!(
        fact(status, "outcome").as_deref(),
        Some(outcome),
        "{status}"
    );
    assert_eq!(fact(status, "retry").as_deref(), Some(retry), "{status}");
    assert_eq!(details.retry_info().is_some(), comes_back, "{status}");
}

const NOT_APPLIED: (&str, &str) = ("NOT_APPLIED", "SAFE");
const UNKNOWN: (&str, &str) = ("UNKNOWN", "SAFE_WITH_CONDITION");

#[test]
fn request_whose_deadline_has_passed_is_refused_before_it_is_queued() {
    let mut request = Request::new(());
    assert!(refuse_late(request.extensions()).is_ok());
    let now = Instant::now();
    let later = Deadline::new(now + Duration::from_secs(3600));
    request.extensions_mut().insert(later);
    assert!(refuse_late(request.extensions()).is_ok());
    request.extensions_mut().insert(Deadline::new(now));
    let refused = refuse_late(request.extensions()).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::DeadlineExceeded);
}

#[tokio::test]
async fn before_the_store_is_open_everything_is_unavailable_and_not_applied() {
    let mut fixture = Fixture::starting().await;
    let mut refused = fixture.writes_refused().await;
    refused.push(fixture.session(1).await.1.unwrap_err());
    assert_eq!(fixture.rejected("write", "STARTING"), refused.len());
    for status in refused {
        expect(&status, (Code::Unavailable, "STARTING"), NOT_APPLIED, true);
    }
    let refused = fixture.reads_refused().await;
    for status in &refused {
        let details = status.get_error_details();
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(details.error_info().unwrap().reason, "STARTING");
    }
    assert_eq!(fixture.rejected("read", "STARTING"), refused.len());
}

#[tokio::test]
async fn append_in_flight_at_a_failed_flush_is_unknown_and_later_ones_refused() {
    let mut fixture = Fixture::quiet().await;
    fixture.append("a").await.unwrap();
    fixture.disk.fail_sync(1);
    let status = fixture.append("a").await.unwrap_err();
    expect(&status, (Code::Internal, "JOURNAL_FAILED"), UNKNOWN, false);
    assert_eq!(fixture.rejected("write", "JOURNAL_FAILED"), 0);
    let failed = (Code::Unavailable, "JOURNAL_FAILED");
    let refused = fixture.writes_refused().await;
    for status in &refused {
        expect(status, failed, NOT_APPLIED, true);
    }
    let (acked, end) = fixture.session(3).await;
    let status = end.unwrap_err();
    expect(&status, failed, NOT_APPLIED, true);
    let counted = fixture.rejected("write", "JOURNAL_FAILED");
    assert_eq!(counted, refused.len() + 1);
    assert_eq!(
        (acked, fact(&status, "request_id")),
        (0, Some("0".to_owned()))
    );
}

#[tokio::test]
async fn session_at_a_failed_flush_ends_unknown_at_its_first_unacked_request() {
    let mut fixture = Fixture::quiet().await;
    fixture.append("a").await.unwrap();
    fixture.disk.fail_sync(2);
    let (acked, end) = fixture.session(5_000).await;
    let status = end.unwrap_err();
    expect(&status, (Code::Internal, "JOURNAL_FAILED"), UNKNOWN, false);
    assert_eq!(fact(&status, "request_id"), Some(acked.to_string()));
    assert_eq!(fixture.durable_tail().await, 1 + acked);
}

#[tokio::test]
async fn full_disk_is_told_and_ends_a_session_where_it_is_met() {
    let config = StorageConfig {
        segment_bytes: 64 << 10,
        ..StorageConfig::default()
    };
    let mut fixture = Fixture::ready(config).await;
    fixture.append("a").await.unwrap();
    fixture.disk.set_full(true);
    let full = (Code::ResourceExhausted, "DISK_FULL");
    let (acked, end) = fixture.session(1_000).await;
    let status = end.unwrap_err();
    expect(&status, full, NOT_APPLIED, true);
    assert!(acked > 0);
    assert_eq!(fact(&status, "request_id"), Some(acked.to_string()));
    assert_eq!(fixture.durable_tail().await, 1 + acked);
    let status = loop {
        match fixture.session(1).await.1 {
            Ok(()) => {}
            Err(status) => break status,
        }
    };
    expect(&status, full, NOT_APPLIED, true);
}

#[tokio::test]
async fn session_waits_when_the_engine_has_no_room_and_loses_nothing() {
    let config = StorageConfig {
        max_inflight_bytes: 3 << 10,
        ..StorageConfig::default()
    };
    let mut fixture = Fixture::serving(config).await;
    let (acked, end) = fixture.session(500).await;
    end.unwrap();
    assert_eq!(acked, 500);
    assert_eq!(fixture.durable_tail().await, 500);
}

/// The reasons of the answers that are no acks, and the number of acks.
fn refusals(answers: &[v1::AppendSessionResponse]) -> (Vec<String>, u64) {
    let (mut reasons, mut acks) = (Vec::new(), 0);
    for answer in answers {
        match &answer.append_ack {
            Some(_) => acks += 1,
            None => {
                let status = tonic_types::pb::Status::decode(&answer.error[..]).unwrap();
                let status =
                    Status::with_details(status.code.into(), status.message, answer.error.clone());
                reasons.push(status.get_details_error_info().unwrap().reason);
            }
        }
    }
    (reasons, acks)
}

#[tokio::test]
async fn independent_request_is_busy_where_a_call_of_its_own_would_be() {
    let config = StorageConfig {
        max_inflight_bytes: 3 << 10,
        ..StorageConfig::default()
    };
    let mut fixture = Fixture::serving(config).await;
    let requests = vec![append("a", 1024, v1::Durability::Durable); 500];
    let (answers, end) = fixture.independent(requests).await;
    end.unwrap();
    assert_eq!(answers.len(), 500);
    let (reasons, acks) = refusals(&answers);
    assert!(!reasons.is_empty() && acks > 0, "{acks}");
    assert!(reasons.iter().all(|reason| reason == "BUSY"), "{reasons:?}");
    assert_eq!(fixture.node.metrics.totals().rejected, reasons.len() as u64);
    assert_eq!(fixture.durable_tail().await, acks);
    // Alerts and dashboards know them as calls.
    assert_eq!(fixture.appends_handled("OK"), answers.len() - reasons.len());
    assert_eq!(fixture.appends_handled("ResourceExhausted"), reasons.len());
}

#[tokio::test]
async fn failed_flush_answers_each_independent_request_that_it_met() {
    let mut fixture = Fixture::quiet().await;
    fixture.append("a").await.unwrap();
    fixture.disk.fail_sync(2);
    let requests = vec![append("a", 1024, v1::Durability::Durable); 5_000];
    let (answers, end) = fixture.independent(requests).await;
    end.unwrap();
    assert_eq!(answers.len(), 5_000);
    let (reasons, acks) = refusals(&answers);
    assert!(acks > 0, "the first flush was good");
    assert!(reasons.len() > 1 && reasons.iter().all(|reason| reason == "JOURNAL_FAILED"));
    assert_eq!(fixture.durable_tail().await, 1 + acks);
}

#[tokio::test]
async fn many_followers_of_a_log_get_all_of_it() {
    const RECORDS: u64 = 400;
    let mut fixture = Fixture::quiet().await;
    fixture.append("a").await.unwrap();
    let mut followers = tokio::task::JoinSet::new();
    for number in 0..2 * scan::MANY as u64 {
        let mut wal = fixture.wal.clone();
        // Half of them begin in the middle, wherever the log is then.
        let begin = if number % 2 == 0 {
            0
        } else {
            number * RECORDS / 100
        };
        followers.spawn(async move {
            loop {
                let tail = wal.get_tail(v1::GetTailRequest {
                    log: "a".to_owned(),
                    ..v1::GetTailRequest::default()
                });
                if begin == 0 || tail.await.unwrap().into_inner().tail_lsn() >= begin {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let request = v1::ScanRequest {
                selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
                start: Some(v1::scan_request::Start::Lsn(begin)),
                follow: true,
                ..v1::ScanRequest::default()
            };
            let mut messages = wal.scan(request).await.unwrap().into_inner();
            let (mut next, mut received) = (begin, Vec::new());
            while next <= RECORDS {
                let message = messages.message().await.unwrap().unwrap();
                for batch in &message.batches {
                    assert_eq!(batch.first_lsn(), next);
                    next += batch.records.len() as u64;
                }
                assert_eq!(message.caught_up, message.tail_lsn() == next);
                received.push((next, message.cursor));
            }
            received
        });
    }
    for _ in 0..RECORDS {
        fixture.append("a").await.unwrap();
    }
    let mut cursors = std::collections::BTreeMap::new();
    while let Some(received) = followers.join_next().await {
        cursors.extend(received.unwrap());
    }
    // A reader that resumes after any of them gets the next record.
    for (next, cursor) in cursors.into_iter().filter(|(next, _)| *next <= RECORDS) {
        let request = v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log("a".to_owned())),
            start: Some(v1::scan_request::Start::Cursor(cursor)),
            ..v1::ScanRequest::default()
        };
        let mut messages = fixture.wal.scan(request).await.unwrap().into_inner();
        let message = messages.message().await.unwrap().unwrap();
        assert_eq!(message.batches[0].first_lsn(), next);
    }
}

#[tokio::test]
async fn every_call_of_the_wal_service_is_served() {
    let fixture = Fixture::serving(StorageConfig::default()).await;
    let contract = FileDescriptorSet::decode(wald_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut services = contract.file.into_iter().flat_map(|file| file.service);
    let service = services.find(|service| service.name() == "WalService");
    for method in service.unwrap().method {
        let path = format!("/wald.v1.WalService/{}", method.name());
        let mut client = tonic::client::Grpc::new(fixture.channel.clone());
        client.ready().await.unwrap();
        // An empty message is one of every type.
        let empty = Request::new(v1::GetTailRequest::default());
        let codec = MessageCodec::<v1::GetTailRequest, Sent<()>>::default();
        let path = path.parse().unwrap();
        let answer = client.server_streaming(empty, path, codec).await;
        let code = answer.err().map(|status| status.code());
        assert_ne!(code, Some(Code::Unimplemented), "{}", method.name());
    }
}
