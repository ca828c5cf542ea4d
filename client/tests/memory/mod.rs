//! A server in memory: enough of the contract for a command line to be tried on.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails where it stands"
)]

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures_core::Stream;
use futures_util::stream;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt};
use wald_client::proto::log_service_server::{LogService, LogServiceServer};
use wald_client::proto::ops_service_server::{OpsService, OpsServiceServer};
use wald_client::proto::scan_request::{Selector, Start};
use wald_client::proto::wal_service_server::{WalService, WalServiceServer};
use wald_client::proto::*;

/// All logs; a record's time is its lsn.
#[derive(Default)]
pub(crate) struct Memory {
    logs: Mutex<BTreeMap<String, Vec<Record>>>,
    /// Sizes of the requests seen.
    pub(crate) requests: Mutex<Vec<usize>>,
    /// What every scan begins with.
    pub(crate) gap: Mutex<Option<Gap>>,
}

type Answer<T> = Result<Response<T>, Status>;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Memory {
    /// Starts the server; returns it with its endpoint.
    pub(crate) async fn start() -> (Arc<Self>, String) {
        let memory = Arc::new(Self::default());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        // Without it each answer's trailers wait 40 ms for the client's delayed ack.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (health, health_service) = tonic_health::server::health_reporter();
        health
            .set_service_status("", tonic_health::ServingStatus::Serving)
            .await;
        let limit = 8 << 20;
        let server = tonic::transport::Server::builder()
            .add_service(
                WalServiceServer::from_arc(memory.clone()).max_decoding_message_size(limit),
            )
            .add_service(LogServiceServer::from_arc(memory.clone()))
            .add_service(OpsServiceServer::from_arc(memory.clone()))
            .add_service(health_service);
        tokio::spawn(server.serve_with_incoming(incoming));
        (memory, endpoint)
    }

    fn batches(&self, matches: impl Fn(&str) -> bool) -> Vec<RecordBatch> {
        let logs = self.logs.lock().unwrap();
        let batch = |(log, records): (&String, &Vec<Record>)| RecordBatch {
            log: log.clone(),
            first_lsn: Some(0),
            records: records.clone(),
            timestamp_us: 1_000_000,
            log_id: 1,
        };
        logs.iter()
            .filter(|(log, _)| matches(log))
            .map(batch)
            .collect()
    }
}

fn refusal(code: Code, reason: &str, message: &str) -> Status {
    refusal_with(code, reason, message, HashMap::new())
}

fn refusal_with(code: Code, reason: &str, message: &str, facts: HashMap<String, String>) -> Status {
    let details = ErrorDetails::with_error_info(reason, "wald.dev", facts);
    Status::with_error_details(code, message, details)
}

fn unforeseen<T>() -> Answer<T> {
    Err(Status::unimplemented("not in this test"))
}

#[tonic::async_trait]
impl WalService for Memory {
    async fn append_batch(
        &self,
        request: Request<AppendBatchRequest>,
    ) -> Answer<AppendBatchResponse> {
        let mut logs = self.logs.lock().unwrap();
        let mut appends = Vec::new();
        let batches = request.into_inner().batches;
        let size = batches.iter().map(|batch| batch.records.len()).sum();
        if size > 1_000 {
            return Err(refusal(
                Code::InvalidArgument,
                "REQUEST_TOO_LARGE",
                "too many records",
            ));
        }
        self.requests.lock().unwrap().push(size);
        for batch in batches {
            let records = logs.entry(batch.log.clone()).or_default();
            let first = records.len() as u64;
            let expected = batch.condition.and_then(|condition| condition.expected_lsn);
            if let Some(expected) = expected.filter(|expected| *expected != first) {
                let facts = [
                    ("expected_lsn", expected.to_string()),
                    ("actual_lsn", first.to_string()),
                    ("outcome", "NOT_APPLIED".to_owned()),
                ];
                return Err(refusal_with(
                    Code::FailedPrecondition,
                    "POSITION_MISMATCH",
                    &format!("the next lsn of {} is {first}", batch.log),
                    facts.map(|(name, fact)| (name.to_owned(), fact)).into(),
                ));
            }
            records.extend(batch.records);
            appends.push(LogAppend {
                log: batch.log,
                first_lsn: Some(first),
                next_lsn: Some(records.len() as u64),
                ..Default::default()
            });
        }
        Ok(Response::new(AppendBatchResponse {
            appends,
            ..Default::default()
        }))
    }

    async fn read(&self, request: Request<ReadRequest>) -> Answer<ReadResponse> {
        let request = request.into_inner();
        let name = request.log;
        let mut batches = self.batches(|log| log == name);
        let Some(mut batch) = batches.pop() else {
            return Err(refusal(
                Code::NotFound,
                "LOG_NOT_FOUND",
                &format!("no log {name}"),
            ));
        };
        let tail = Some(batch.records.len() as u64);
        batch.records.truncate(request.max_records as usize);
        let next = Some(batch.records.len() as u64);
        Ok(Response::new(ReadResponse {
            batch: Some(batch),
            next_lsn: next,
            tail_lsn: tail,
            ..Default::default()
        }))
    }

    type ScanStream = Answers<ScanResponse>;

    async fn scan(&self, request: Request<ScanRequest>) -> Answer<Self::ScanStream> {
        let request = request.into_inner();
        let mut batches = match request.selector.unwrap() {
            Selector::Log(name) => self.batches(|log| log == name),
            Selector::Prefix(prefix) => self.batches(|log| log.starts_with(&prefix)),
            Selector::All(_) => self.batches(|_| true),
        };
        if let (Some(Start::Lsn(lsn)), [batch]) = (&request.start, batches.as_mut_slice()) {
            batch.records.drain(..usize::try_from(*lsn).unwrap());
            batch.first_lsn = Some(*lsn);
        }
        let message = ScanResponse {
            batches,
            gaps: self.gap.lock().unwrap().iter().cloned().collect(),
            caught_up: true,
            cursor: "end".into(),
            ..Default::default()
        };
        Ok(Response::new(Box::pin(stream::iter([Ok(message)]))))
    }

    async fn append(&self, _: Request<AppendRequest>) -> Answer<AppendResponse> {
        unforeseen()
    }

    type AppendSessionStream = Answers<AppendSessionResponse>;

    async fn append_session(
        &self,
        _: Request<Streaming<AppendSessionRequest>>,
    ) -> Answer<Self::AppendSessionStream> {
        unforeseen()
    }

    async fn sync(&self, _: Request<SyncRequest>) -> Answer<SyncResponse> {
        Ok(Response::new(SyncResponse {
            durable_position: Some(42),
        }))
    }

    /// Of every epoch but the first, which is the current one, 100 positions survived.
    async fn get_tail(&self, request: Request<GetTailRequest>) -> Answer<GetTailResponse> {
        let epoch = request.into_inner().recovery_epoch;
        Ok(Response::new(GetTailResponse {
            survived_position: epoch.filter(|epoch| *epoch != 1).map(|_| 100),
            ..Default::default()
        }))
    }

    async fn trim(&self, request: Request<TrimRequest>) -> Answer<TrimResponse> {
        let request = request.into_inner();
        let logs = self.logs.lock().unwrap();
        let Some(records) = logs.get(&request.log) else {
            return Err(refusal(Code::NotFound, "LOG_NOT_FOUND", "no such log"));
        };
        if request.before_lsn > records.len() as u64 {
            return Err(refusal(Code::OutOfRange, "BEYOND_TAIL", "beyond the tail"));
        }
        Ok(Response::new(TrimResponse {
            first_lsn: Some(request.before_lsn),
        }))
    }

    async fn fence(&self, _: Request<FenceRequest>) -> Answer<FenceResponse> {
        unforeseen()
    }
}

#[tonic::async_trait]
impl LogService for Memory {
    /// Pages of two, so that there are several; the token is the last name.
    async fn list_logs(&self, request: Request<ListLogsRequest>) -> Answer<ListLogsResponse> {
        let request = request.into_inner();
        let logs = self.logs.lock().unwrap();
        let after = |name: &&String| {
            name.starts_with(&request.prefix) && name.as_str() > request.page_token.as_str()
        };
        let names: Vec<&String> = logs.keys().filter(after).collect();
        let page: Vec<Log> = names
            .iter()
            .take(2.min(request.page_size as usize))
            .map(|name| Log {
                name: name.to_string(),
                ..Default::default()
            })
            .collect();
        let more = names.len() > page.len();
        let last = page.last().map(|log| log.name.clone()).unwrap_or_default();
        Ok(Response::new(ListLogsResponse {
            logs: page,
            next_page_token: if more { last } else { String::new() },
        }))
    }

    async fn create_log(&self, _: Request<CreateLogRequest>) -> Answer<CreateLogResponse> {
        unforeseen()
    }

    async fn get_log(&self, _: Request<GetLogRequest>) -> Answer<GetLogResponse> {
        unforeseen()
    }

    async fn update_log(&self, _: Request<UpdateLogRequest>) -> Answer<UpdateLogResponse> {
        unforeseen()
    }

    async fn delete_log(&self, _: Request<DeleteLogRequest>) -> Answer<DeleteLogResponse> {
        unforeseen()
    }
}

#[tonic::async_trait]
impl OpsService for Memory {
    async fn get_server_info(
        &self,
        _: Request<GetServerInfoRequest>,
    ) -> Answer<GetServerInfoResponse> {
        Ok(Response::new(GetServerInfoResponse {
            version: "9.9.9".into(),
            default_sync_mode: SyncMode::Batch.into(),
            ..Default::default()
        }))
    }

    /// Three segments, one a page; the token is the next one's number.
    async fn list_segments(
        &self,
        request: Request<ListSegmentsRequest>,
    ) -> Answer<ListSegmentsResponse> {
        let id = request.into_inner().page_token.parse().unwrap_or(0);
        Ok(Response::new(ListSegmentsResponse {
            segments: vec![Segment {
                segment_id: id,
                file_bytes: 1024,
                ..Default::default()
            }],
            next_page_token: if id < 2 {
                (id + 1).to_string()
            } else {
                String::new()
            },
        }))
    }

    type VerifyStream = Answers<VerifyResponse>;

    async fn verify(&self, _: Request<VerifyRequest>) -> Answer<Self::VerifyStream> {
        unforeseen()
    }

    type BackupStream = Answers<BackupResponse>;

    async fn backup(&self, _: Request<BackupRequest>) -> Answer<Self::BackupStream> {
        unforeseen()
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Answer<DrainResponse> {
        unforeseen()
    }
}
