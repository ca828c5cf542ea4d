//! A server that does as a test tells it, behind a proxy that can cut its connections.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_core::Stream;
use futures_util::{StreamExt, stream};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, broadcast, mpsc, watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt};
use wald_client::proto::scan_request::Start;
use wald_client::proto::wal_service_server::{WalService, WalServiceServer};
use wald_client::proto::*;
use wald_client::{Client, RetryPolicy};

/// The outcome of one append.
pub(crate) enum Step {
    /// It is answered with this lsn.
    Ack(u64),
    /// It fails.
    Fail(Status),
    /// The connection is cut before the answer.
    Cut,
    /// It fails once the test lets it.
    Late(Arc<Notify>, Status),
}

/// Script and observations of the server.
pub(crate) struct Fake {
    /// For sessions, which outlive the call that opens them.
    this: Weak<Self>,
    pub(crate) appends: Mutex<VecDeque<Step>>,
    pub(crate) append_requests: Mutex<Vec<AppendRequest>>,
    pub(crate) scan_requests: Mutex<Vec<ScanRequest>>,
    /// Number of records in the log that scans read; a record's payload is its lsn.
    pub(crate) records: Mutex<u64>,
    /// Bytes of padding behind each payload.
    pub(crate) padding: Mutex<usize>,
    /// Each scan connection is cut after this number of messages, while it is positive.
    pub(crate) messages_per_connection: usize,
    /// The end of the next scan, after a heartbeat without a cursor.
    pub(crate) early_end: Mutex<Option<Status>>,
    /// The end of a scan instead of a cut connection.
    pub(crate) scan_end: Mutex<Option<Status>>,
    /// The lsn after the last record that the test has taken from a scan.
    pub(crate) taken: watch::Sender<u64>,
    cut: broadcast::Sender<()>,
}

impl Fake {
    /// Starts the server; returns it with a client of it.
    pub(crate) async fn start(records: u64, messages_per_connection: usize) -> (Arc<Self>, Client) {
        let (fake, endpoint) = Self::serve(records, messages_per_connection).await;
        let client = Client::builder(endpoint)
            .timeout(Duration::from_secs(5))
            .retry(RetryPolicy {
                max_attempts: 5,
                first_pause: Duration::from_millis(1),
                ..RetryPolicy::default()
            })
            .connect()
            .await
            .unwrap();
        (fake, client)
    }

    /// Starts the server; returns it with its endpoint.
    pub(crate) async fn serve(records: u64, messages_per_connection: usize) -> (Arc<Self>, String) {
        let (cut, _) = broadcast::channel(8);
        let fake = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            appends: Mutex::default(),
            append_requests: Mutex::default(),
            scan_requests: Mutex::default(),
            records: Mutex::new(records),
            padding: Mutex::default(),
            messages_per_connection,
            early_end: Mutex::default(),
            scan_end: Mutex::default(),
            taken: watch::Sender::new(0),
            cut: cut.clone(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let behind = listener.local_addr().unwrap();
        let service = WalServiceServer::from_arc(fake.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", proxy.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut near, _)) = proxy.accept().await {
                let mut cut = cut.subscribe();
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(behind).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = cut.recv() => {}
                    }
                });
            }
        });
        (fake, endpoint)
    }

    pub(crate) fn script(&self, steps: impl IntoIterator<Item = Step>) {
        self.appends.lock().unwrap().extend(steps);
    }

    pub(crate) fn attempts(&self) -> usize {
        self.append_requests.lock().unwrap().len()
    }
}

/// A status in a message. Its details are the whole.
pub(crate) fn encoded(status: &Status) -> Vec<u8> {
    if !status.details().is_empty() {
        return status.details().to_owned();
    }
    let bare = tonic_types::pb::Status {
        code: status.code().into(),
        message: status.message().to_owned(),
        details: Vec::new(),
    };
    prost::Message::encode_to_vec(&bare)
}

/// An error as Wald answers it.
pub(crate) fn refusal(code: Code, reason: &str, facts: &[(&str, &str)]) -> Status {
    let facts: HashMap<String, String> = facts
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let details = ErrorDetails::with_error_info(reason, "wald.dev", facts);
    Status::with_error_details(code, "refused by the test", details)
}

pub(crate) fn message(from: u64, to: u64, tail: u64, padding: usize) -> ScanResponse {
    let record = |lsn: u64| Record {
        payload: Some(record::Payload::Data(
            format!("{lsn}{}", " ".repeat(padding)).into(),
        )),
        ..Default::default()
    };
    ScanResponse {
        batches: vec![RecordBatch {
            log: "log".into(),
            first_lsn: Some(from),
            records: (from..to).map(record).collect(),
            timestamp_us: 1,
            log_id: 1,
        }],
        cursor: to.to_string().into(),
        caught_up: to == tail,
        ..Default::default()
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WalService for Fake {
    async fn append(
        &self,
        request: Request<AppendRequest>,
    ) -> Result<Response<AppendResponse>, Status> {
        self.append_requests
            .lock()
            .unwrap()
            .push(request.into_inner());
        let step = self.appends.lock().unwrap().pop_front();
        match step.expect("an append that the test did not foresee") {
            Step::Ack(lsn) => Ok(Response::new(AppendResponse {
                lsn: Some(lsn),
                ..Default::default()
            })),
            Step::Fail(status) => Err(status),
            Step::Cut => {
                self.cut.send(()).unwrap();
                std::future::pending().await
            }
            Step::Late(until, status) => {
                until.notified().await;
                Err(status)
            }
        }
    }

    type ScanStream = Answers<ScanResponse>;

    async fn scan(
        &self,
        request: Request<ScanRequest>,
    ) -> Result<Response<Self::ScanStream>, Status> {
        let request = request.into_inner();
        let tail = *self.records.lock().unwrap();
        let from = match &request.start {
            None => 0,
            Some(Start::Lsn(lsn)) => *lsn,
            Some(Start::TailOffset(offset)) => tail - offset,
            Some(Start::Cursor(cursor)) => std::str::from_utf8(cursor).unwrap().parse().unwrap(),
            Some(start) => panic!("a start that the test did not foresee: {start:?}"),
        };
        let until = match request.max_records {
            0 => tail,
            count => tail.min(from + count),
        };
        let follow = request.follow && request.max_records == 0;
        let scans = {
            let mut scans = self.scan_requests.lock().unwrap();
            scans.push(request);
            scans.len()
        };
        if let Some(status) = self.early_end.lock().unwrap().take() {
            let heartbeat = ScanResponse::default();
            return Ok(Response::new(Box::pin(stream::iter([
                Ok(heartbeat),
                Err(status),
            ]))));
        }
        let padding = *self.padding.lock().unwrap();
        let mut messages = Vec::new();
        let mut next = from;
        while next < until {
            let to = until.min(next + 1 + next % 3);
            messages.push(message(next, to, tail, padding));
            next = to;
        }
        let cut_after = self.messages_per_connection;
        let cut_short = cut_after > 0 && messages.len() > cut_after;
        if cut_short {
            messages.truncate(cut_after);
        }
        let cut = self.cut.clone();
        let scan_end = self.scan_end.lock().unwrap().clone();
        let mut taken = self.taken.subscribe();
        let lsn = |cursor: &[u8]| std::str::from_utf8(cursor).unwrap().parse().unwrap();
        let sent: u64 = messages.last().map_or(from, |last| lsn(&last.cursor));
        let end = stream::once(async move {
            if let (true, Some(status)) = (cut_short, scan_end) {
                return Some(Err(status));
            }
            if cut_short {
                // Every second cut comes after the last message has arrived, the others at once.
                if scans.is_multiple_of(2) {
                    let arrival = taken.wait_for(|taken| *taken >= sent);
                    let arrival = tokio::time::timeout(Duration::from_secs(10), arrival);
                    arrival
                        .await
                        .expect("the test takes what it is sent")
                        .unwrap();
                }
                cut.send(()).unwrap();
            } else if !follow {
                return None;
            }
            std::future::pending().await
        })
        .filter_map(|end| async move { end });
        Ok(Response::new(Box::pin(
            stream::iter(messages).map(Ok).chain(end),
        )))
    }

    async fn get_tail(
        &self,
        _: Request<GetTailRequest>,
    ) -> Result<Response<GetTailResponse>, Status> {
        let tail = *self.records.lock().unwrap();
        Ok(Response::new(GetTailResponse {
            first_lsn: Some(0),
            tail_lsn: Some(tail),
            ..Default::default()
        }))
    }

    async fn append_batch(
        &self,
        _: Request<AppendBatchRequest>,
    ) -> Result<Response<AppendBatchResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    type AppendSessionStream = Answers<AppendSessionResponse>;

    async fn append_session(
        &self,
        requests: Request<Streaming<AppendSessionRequest>>,
    ) -> Result<Response<Self::AppendSessionStream>, Status> {
        let (fake, mut requests) = (self.this.upgrade().unwrap(), requests.into_inner());
        let (answers, mut given) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok(Some(request)) = requests.message().await {
                let (fake, answers) = (Arc::clone(&fake), answers.clone());
                tokio::spawn(async move {
                    assert!(request.independent, "only appends are made in these tests");
                    let append = Request::new(request.append.unwrap_or_default());
                    let mut answer = AppendSessionResponse {
                        request_id: request.request_id,
                        ..Default::default()
                    };
                    match fake.append(append).await {
                        Ok(acked) => answer.append_ack = Some(acked.into_inner()),
                        Err(status) => answer.error = encoded(&status).into(),
                    }
                    let _closed = answers.send(Ok(answer));
                });
            }
        });
        let given = stream::poll_fn(move |context| given.poll_recv(context));
        Ok(Response::new(Box::pin(given)))
    }

    async fn read(&self, _: Request<ReadRequest>) -> Result<Response<ReadResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn sync(&self, _: Request<SyncRequest>) -> Result<Response<SyncResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn trim(&self, _: Request<TrimRequest>) -> Result<Response<TrimResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }

    async fn fence(&self, _: Request<FenceRequest>) -> Result<Response<FenceResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}
