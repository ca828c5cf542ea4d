//! A server in memory: enough of the contract for a command line to be tried on.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails where it stands"
)]
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{HashMap, VecDeque};
use std::future::{Future as _, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;

use futures_core::Stream;
use futures_util::stream;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, broadcast, mpsc};
use tonic::service::InterceptorLayer;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt};
use wald_client::proto::cursor_service_server::{CursorService, CursorServiceServer};
use wald_client::proto::log_service_server::{LogService, LogServiceServer};
use wald_client::proto::ops_service_server::{OpsService, OpsServiceServer};
use wald_client::proto::scan_request::{Selector, Start};
use wald_client::proto::wal_service_server::{WalService, WalServiceServer};
use wald_client::proto::*;

use self::state::State;
pub(crate) use self::state::{StoredProducer, refuse};

mod state;

/// The outcome of one request on a session.
pub(crate) enum Fault {
    /// It is applied and acked.
    None,
    /// It is applied; its ack is never sent, nor any after it.
    Withhold,
    /// Its connection is cut before it is applied.
    Cut,
    /// It fails, as does its session unless its requests are independent.
    Fail(Status),
    /// It is not read: its session ends with this.
    End(Status),
    /// It waits for this, and is applied and acked then.
    Wait(Arc<Notify>),
}

/// All logs; a record's time is its lsn.
pub(crate) struct Memory {
    /// For sessions, which outlive the call that opens them.
    this: Weak<Self>,
    pub(crate) state: Arc<Mutex<State>>,
    /// Sizes of the requests seen.
    pub(crate) requests: Mutex<Vec<usize>>,
    /// The gap that every scan begins with.
    pub(crate) gap: Mutex<Option<Gap>>,
    /// The outcomes of the next requests on sessions.
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    /// Manifests of the next backups; none has a file.
    pub(crate) backups: Mutex<VecDeque<bytes::Bytes>>,
    /// Sessions opened so far.
    pub(crate) sessions: AtomicUsize,
    /// Sessions of independent requests whose clients have not half-closed.
    open: AtomicUsize,
    /// Whether sessions stay open after their clients have half-closed.
    pub(crate) lingers: AtomicBool,
    /// The token that calls must carry, and the reason of a refusal; none: any call is taken.
    pub(crate) door: Mutex<Option<(&'static str, &'static str)>>,
    /// The owner of the state, to which every new call is referred; none: this server.
    pub(crate) owner: Mutex<Option<String>>,
    /// The endpoint of the owner that answers append, scan and session through this server; none: it answers itself.
    pub(crate) speaks_for: Mutex<Option<String>>,
    /// Text in front of the names of the caller.
    pub(crate) caller_prefix: Mutex<String>,
    /// The tokens of the calls so far.
    pub(crate) tokens: Mutex<Vec<String>>,
    /// Calls of GetTail so far.
    pub(crate) tail_calls: AtomicUsize,
    /// Deleted logs whose keys are still there, by name and number.
    pub(crate) unerased: Mutex<Vec<(String, u64)>>,
    /// Cuts every connection through the proxy.
    cut: broadcast::Sender<()>,
}

fn token_of<T>(request: &Request<T>) -> String {
    let header = request.metadata().get("authorization");
    header.map_or(String::new(), |header| header.to_str().unwrap().to_owned())
}

/// A refusal of a token. One that has expired is SAFE.
pub(crate) fn refused_token(reason: &str) -> Status {
    let retry = match reason {
        "CREDENTIAL_EXPIRED" => "SAFE",
        _ => "NEVER",
    };
    refuse(
        Code::Unauthenticated,
        reason,
        &[("retry", retry.to_owned())],
    )
}

/// The answer of a server that does not own its state. `owner`: an endpoint, or empty.
pub(crate) fn moved(owner: &str) -> Status {
    let facts = [
        ("owner", owner.replace("http://", "")),
        ("term", "2".to_owned()),
        ("retry", "SAFE".to_owned()),
    ];
    refuse(Code::Unavailable, "MOVED", &facts)
}

type Answer<T> = Result<Response<T>, Status>;
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Memory {
    /// Starts the server; returns it with its endpoint.
    pub(crate) async fn start() -> (Arc<Self>, String) {
        Self::start_with(Arc::default()).await
    }

    /// Starts another server with the same state.
    pub(crate) async fn start_beside(&self) -> (Arc<Self>, String) {
        Self::start_with(Arc::clone(&self.state)).await
    }

    async fn start_with(state: Arc<Mutex<State>>) -> (Arc<Self>, String) {
        let memory = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            state,
            owner: Mutex::default(),
            speaks_for: Mutex::default(),
            requests: Mutex::default(),
            gap: Mutex::default(),
            faults: Mutex::default(),
            caller_prefix: Mutex::default(),
            backups: Mutex::default(),
            sessions: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            lingers: AtomicBool::new(false),
            door: Mutex::default(),
            tokens: Mutex::default(),
            tail_calls: AtomicUsize::new(0),
            unerased: Mutex::default(),
            cut: broadcast::channel(8).0,
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        // Without it each answer's trailers wait 40 ms for the client's delayed ack.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let (health, health_service) = tonic_health::server::health_reporter();
        health
            .set_service_status("", tonic_health::ServingStatus::Serving)
            .await;
        let limit = 8 << 20;
        let door = memory.clone();
        let server = tonic::transport::Server::builder()
            .layer(InterceptorLayer::new(move |request| door.check(request)))
            .add_service(
                WalServiceServer::from_arc(memory.clone()).max_decoding_message_size(limit),
            )
            .add_service(LogServiceServer::from_arc(memory.clone()))
            .add_service(CursorServiceServer::from_arc(memory.clone()))
            .add_service(OpsServiceServer::from_arc(memory.clone()))
            .add_service(health_service);
        tokio::spawn(server.serve_with_incoming(incoming));
        (memory, endpoint)
    }

    /// Starts the server behind a proxy, which cuts connections as the faults say; returns
    /// it with the proxy's endpoint.
    pub(crate) async fn start_behind_proxy() -> (Arc<Self>, String) {
        let (memory, behind) = Self::start().await;
        let behind = behind.replace("http://", "");
        let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", proxy.local_addr().unwrap());
        let cut = memory.cut.clone();
        tokio::spawn(async move {
            while let Ok((mut near, _)) = proxy.accept().await {
                let mut cut = cut.subscribe();
                let behind = behind.clone();
                tokio::spawn(async move {
                    let mut far = TcpStream::connect(behind).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        _ = cut.recv() => {}
                    }
                });
            }
        });
        (memory, endpoint)
    }

    /// Whether this server owns its state, and a call carries the right token.
    fn check(&self, request: Request<()>) -> Result<Request<()>, Status> {
        let given = token_of(&request);
        self.tokens.lock().unwrap().push(given.clone());
        self.admit(&given)?;
        Ok(request)
    }

    fn admit(&self, given: &str) -> Result<(), Status> {
        if let Some(owner) = &*self.owner.lock().unwrap() {
            return Err(moved(owner));
        }
        match *self.door.lock().unwrap() {
            Some((token, reason)) if given != format!("Bearer {token}") => {
                Err(refused_token(reason))
            }
            _ => Ok(()),
        }
    }

    /// Cuts all connections through the proxy.
    pub(crate) fn cut(&self) {
        self.cut.send(()).unwrap();
    }

    /// Sets the outcomes of the next requests on sessions.
    pub(crate) fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().extend(faults);
    }

    /// Sessions of independent requests whose clients have not half-closed.
    pub(crate) fn open_sessions(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// The number of calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.tokens.lock().unwrap().len()
    }

    /// The payloads in a log.
    pub(crate) fn payloads(&self, log: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let payload = |record: &Record| match record.payload.clone().unwrap() {
            record::Payload::Data(data) => String::from_utf8(data.to_vec()).unwrap(),
            record::Payload::Text(text) => text,
        };
        state.logs[log].records.iter().map(payload).collect()
    }

    fn batches(&self, matches: impl Fn(&str) -> bool) -> Vec<RecordBatch> {
        let state = self.state.lock().unwrap();
        let batch = |(name, log): (&String, &state::StoredLog)| RecordBatch {
            log: name.clone(),
            first_lsn: Some(0),
            records: log.records.clone(),
            timestamp_us: 1_000_000,
            log_id: log.log_id,
        };
        let logs = state.logs.iter();
        logs.filter(|(log, _)| matches(log)).map(batch).collect()
    }

    /// An answer, perhaps as the owner gives it through this server.
    fn answer<T>(&self, message: T) -> Answer<T> {
        let mut response = Response::new(message);
        if let Some(owner) = &*self.speaks_for.lock().unwrap() {
            let address = owner.replace("http://", "").parse().unwrap();
            response.metadata_mut().insert("wald-owner", address);
        }
        Ok(response)
    }

    fn apply(&self, request: AppendBatchRequest) -> Result<AppendBatchResponse, Status> {
        let size = request.batches.iter().map(|b| b.records.len()).sum();
        let answer = self.state.lock().unwrap().append(request)?;
        self.requests.lock().unwrap().push(size);
        Ok(answer)
    }

    /// A session of independent requests. Each is answered for itself, by the fault that it meets.
    fn independent(
        self: Arc<Self>,
        token: String,
        first: Option<AppendSessionRequest>,
        mut requests: Streaming<AppendSessionRequest>,
    ) -> Answers<AppendSessionResponse> {
        self.open.fetch_add(1, Ordering::Relaxed);
        let (answers, mut given) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut next = first;
            while let Some(request) = next {
                let (memory, answers) = (Arc::clone(&self), answers.clone());
                let token = token.clone();
                let fault = self.faults.lock().unwrap().pop_front();
                let serve = async move {
                    let Some(answer) = memory.independent_step(fault, &token, request).await else {
                        return std::future::pending().await;
                    };
                    let ends = answer.is_err();
                    let _closed = answers.send(answer);
                    ends
                };
                // Requests are applied in their order, unless they wait.
                let mut serve = Box::pin(serve);
                let polled = poll_fn(|context| Poll::Ready(serve.as_mut().poll(context)));
                match polled.await {
                    Poll::Ready(true) => break,
                    Poll::Ready(false) => {}
                    Poll::Pending => {
                        tokio::spawn(serve);
                    }
                }
                next = requests.message().await.unwrap_or_default();
            }
            self.open.fetch_sub(1, Ordering::Relaxed);
        });
        Box::pin(stream::poll_fn(move |context| given.poll_recv(context)))
    }

    /// None: it is never answered. An error ends the session.
    async fn independent_step(
        &self,
        fault: Option<Fault>,
        token: &str,
        request: AppendSessionRequest,
    ) -> Option<Result<AppendSessionResponse, Status>> {
        let request_id = request.request_id;
        if let Err(refused) = self.admit(token) {
            return Some(Err(refused));
        }
        let apply = || async {
            match (request.append, request.batch) {
                (Some(append), _) => {
                    let acked = self.append(Request::new(append)).await?.into_inner();
                    Ok(AppendSessionResponse {
                        append_ack: Some(acked),
                        ..Default::default()
                    })
                }
                (None, batch) => Ok(AppendSessionResponse {
                    ack: Some(self.apply(batch.unwrap_or_default())?),
                    ..Default::default()
                }),
            }
        };
        let answer: Result<AppendSessionResponse, Status> = match fault.unwrap_or(Fault::None) {
            Fault::None => apply().await,
            Fault::Withhold => {
                let _applied = apply().await;
                return None;
            }
            Fault::Cut => {
                self.cut.send(()).unwrap();
                return None;
            }
            Fault::Fail(status) => Err(status),
            Fault::End(status) => return Some(Err(status)),
            Fault::Wait(until) => {
                until.notified().await;
                apply().await
            }
        };
        Some(Ok(AppendSessionResponse {
            request_id,
            ..answer.unwrap_or_else(|status| AppendSessionResponse {
                error: status.details().to_owned().into(),
                ..Default::default()
            })
        }))
    }

    /// Answers one request of a session; none if nothing will ever be answered.
    async fn session_step(
        &self,
        withheld: &mut bool,
        request: AppendSessionRequest,
    ) -> Option<Result<AppendSessionResponse, Status>> {
        let request_id = request.request_id;
        let fault = self.faults.lock().unwrap().pop_front();
        let applied = match fault.unwrap_or(Fault::None) {
            Fault::None => self.apply(request.batch.unwrap_or_default()),
            Fault::Withhold => {
                *withheld = true;
                self.apply(request.batch.unwrap_or_default())
            }
            Fault::Cut => {
                self.cut.send(()).unwrap();
                return None;
            }
            Fault::Fail(status) | Fault::End(status) => Err(status),
            Fault::Wait(until) => {
                until.notified().await;
                self.apply(request.batch.unwrap_or_default())
            }
        };
        Some(match applied {
            Ok(ack) => Ok(AppendSessionResponse {
                request_id,
                ack: Some(ack),
                ..AppendSessionResponse::default()
            }),
            Err(status) => Err(with_request_id(&status, request_id)),
        })
    }
}

/// The status with the request's number among its facts.
fn with_request_id(status: &Status, request_id: u64) -> Status {
    let mut details = status.get_error_details();
    if let Some(info) = details.error_info() {
        let mut info = info.clone();
        let id = request_id.to_string();
        info.metadata.insert("request_id".into(), id);
        details.set_error_info(info.reason, info.domain, info.metadata);
    }
    Status::with_error_details(status.code(), status.message(), details)
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
        Ok(Response::new(self.apply(request.into_inner())?))
    }

    async fn read(&self, request: Request<ReadRequest>) -> Answer<ReadResponse> {
        let request = request.into_inner();
        let name = request.log;
        let mut batches = self.batches(|log| log == name);
        let Some(mut batch) = batches.pop() else {
            let facts = HashMap::from([("log".to_owned(), name.clone())]);
            let details = ErrorDetails::with_error_info("LOG_NOT_FOUND", "wald.dev", facts);
            let message = format!("no log {name}");
            return Err(Status::with_error_details(Code::NotFound, message, details));
        };
        let tail = Some(batch.records.len() as u64);
        let from = match request.start {
            Some(read_request::Start::Lsn(lsn)) => lsn,
            _ => 0,
        };
        let kept = usize::try_from(from).unwrap().min(batch.records.len());
        batch.records.drain(..kept);
        batch.first_lsn = Some(from);
        batch.records.truncate(match request.max_records {
            0 => 100,
            // More do not fit an answer.
            count => count.min(1_500) as usize,
        });
        let next = Some(from + batch.records.len() as u64);
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
        self.answer(Box::pin(stream::iter([Ok(message)])))
    }

    async fn append(&self, request: Request<AppendRequest>) -> Answer<AppendResponse> {
        let request = request.into_inner();
        let answer = self.apply(AppendBatchRequest {
            batches: vec![LogBatch {
                log: request.log,
                records: request.record.into_iter().collect(),
                condition: request.condition,
            }],
            ..Default::default()
        })?;
        self.answer(AppendResponse {
            lsn: answer.appends[0].first_lsn,
            deduplicated: answer.appends[0].deduplicated,
            log_id: answer.appends[0].log_id,
            durability: answer.durability,
            ..Default::default()
        })
    }

    type AppendSessionStream = Answers<AppendSessionResponse>;

    async fn append_session(
        &self,
        requests: Request<Streaming<AppendSessionRequest>>,
    ) -> Answer<Self::AppendSessionStream> {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let memory = self.this.upgrade().unwrap();
        let token = token_of(&requests);
        let mut requests = requests.into_inner();
        let first = requests.message().await?;
        if first.as_ref().is_some_and(|first| first.independent) {
            return self.answer(memory.independent(token, first, requests));
        }
        // The memory, the requests, whether acks are withheld; none after a failure.
        let begun = Some((memory, first, requests, false));
        let answers = stream::unfold(begun, |session| async move {
            let (memory, mut first, mut requests, mut withheld) = session?;
            loop {
                let request = match first.take() {
                    Some(first) => Some(first),
                    None => requests.message().await.ok()?,
                };
                if request.is_none() && memory.lingers.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                let request = request?;
                match memory.session_step(&mut withheld, request).await {
                    Some(Ok(_)) if withheld => {}
                    Some(Ok(ack)) => {
                        return Some((Ok(ack), Some((memory, None, requests, withheld))));
                    }
                    Some(Err(status)) => return Some((Err(status), None)),
                    None => std::future::pending().await,
                }
            }
        });
        self.answer(Box::pin(answers))
    }

    async fn sync(&self, _: Request<SyncRequest>) -> Answer<SyncResponse> {
        Ok(Response::new(SyncResponse {
            durable_position: Some(42),
        }))
    }

    /// In every epoch but the first, which is the current one, 100 positions survived.
    async fn get_tail(&self, request: Request<GetTailRequest>) -> Answer<GetTailResponse> {
        self.tail_calls.fetch_add(1, Ordering::Relaxed);
        let request = request.into_inner();
        let epoch = request.recovery_epoch;
        let mut state = self.state.lock().unwrap();
        let tail = match (state.existing(&request.log, request.log_id), epoch) {
            (Ok(log), _) => log.records.len() as u64,
            (Err(_), Some(_)) => 0,
            (Err(status), None) => return Err(status),
        };
        Ok(Response::new(GetTailResponse {
            first_lsn: Some(0),
            tail_lsn: Some(tail),
            survived_position: epoch.filter(|epoch| *epoch != 1).map(|_| 100),
            ..Default::default()
        }))
    }

    async fn trim(&self, request: Request<TrimRequest>) -> Answer<TrimResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        if request.before_lsn > log.records.len() as u64 {
            return Err(refuse(Code::OutOfRange, "BEYOND_TAIL", &[]));
        }
        Ok(Response::new(TrimResponse {
            first_lsn: Some(request.before_lsn),
        }))
    }

    async fn fence(&self, request: Request<FenceRequest>) -> Answer<FenceResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.log(&request.log);
        let epoch = request.writer_epoch.unwrap_or(log.writer_epoch + 1);
        if epoch <= log.writer_epoch {
            let facts = [
                ("writer_epoch", log.writer_epoch.to_string()),
                ("given_writer_epoch", epoch.to_string()),
            ];
            return Err(refuse(Code::FailedPrecondition, "FENCED", &facts));
        }
        log.writer_epoch = epoch;
        Ok(Response::new(FenceResponse {
            tail_lsn: Some(log.records.len() as u64),
            writer_epoch: Some(epoch),
            log_id: log.log_id,
        }))
    }
}

fn cursor(log: &str, name: &str, lsn: u64, log_id: u64) -> Cursor {
    Cursor {
        log: log.to_owned(),
        name: name.to_owned(),
        lsn: Some(lsn),
        log_id,
        update_time: None,
    }
}

#[tonic::async_trait]
impl CursorService for Memory {
    async fn commit_cursor(
        &self,
        request: Request<CommitCursorRequest>,
    ) -> Answer<CommitCursorResponse> {
        let commit = request.into_inner().commit.unwrap();
        let mut state = self.state.lock().unwrap();
        state.check_cursor(&commit)?;
        let log = state.log(&commit.log);
        log.cursors.insert(commit.cursor.clone(), commit.lsn);
        let moved = cursor(&commit.log, &commit.cursor, commit.lsn, log.log_id);
        Ok(Response::new(CommitCursorResponse {
            cursor: Some(moved),
        }))
    }

    async fn get_cursor(&self, request: Request<GetCursorRequest>) -> Answer<GetCursorResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        let Some(lsn) = log.cursors.get(&request.cursor) else {
            return Err(refuse(Code::NotFound, "CURSOR_NOT_FOUND", &[]));
        };
        let found = cursor(&request.log, &request.cursor, *lsn, log.log_id);
        Ok(Response::new(GetCursorResponse {
            cursor: Some(found),
        }))
    }

    /// Pages of two, so that there are several; the token is the last name.
    async fn list_cursors(
        &self,
        request: Request<ListCursorsRequest>,
    ) -> Answer<ListCursorsResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        let later = |name: &&String| **name > request.page_token;
        let names: Vec<&String> = log.cursors.keys().filter(later).collect();
        let page: Vec<Cursor> = names
            .iter()
            .take(2)
            .map(|name| cursor(&request.log, name, log.cursors[*name], log.log_id))
            .collect();
        let last = page.last().map(|last| last.name.clone());
        let next_page_token = last.filter(|_| names.len() > 2).unwrap_or_default();
        Ok(Response::new(ListCursorsResponse {
            cursors: page,
            next_page_token,
        }))
    }

    async fn delete_cursor(
        &self,
        request: Request<DeleteCursorRequest>,
    ) -> Answer<DeleteCursorResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        match log.cursors.remove(&request.cursor) {
            Some(_) => Ok(Response::new(DeleteCursorResponse {})),
            None => Err(refuse(Code::NotFound, "CURSOR_NOT_FOUND", &[])),
        }
    }
}

#[tonic::async_trait]
impl LogService for Memory {
    /// Pages of two, so that there are several; the token is the last name.
    async fn list_logs(&self, request: Request<ListLogsRequest>) -> Answer<ListLogsResponse> {
        let request = request.into_inner();
        let state = self.state.lock().unwrap();
        let after = |name: &&String| {
            name.starts_with(&request.prefix) && name.as_str() > request.page_token.as_str()
        };
        let names: Vec<&String> = state.logs.keys().filter(after).collect();
        let page: Vec<Log> = names
            .iter()
            .take(2.min(request.page_size as usize))
            .map(|name| Log {
                name: name.to_string(),
                log_id: state.logs[*name].log_id,
                first_lsn: Some(0),
                tail_lsn: Some(state.logs[*name].records.len() as u64),
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

    async fn create_log(&self, request: Request<CreateLogRequest>) -> Answer<CreateLogResponse> {
        let CreateLogRequest { log: name, config } = request.into_inner();
        if name.starts_with('$') {
            return Err(refuse(Code::InvalidArgument, "INVALID_LOG_NAME", &[]));
        }
        let mut state = self.state.lock().unwrap();
        if state.logs.contains_key(&name) {
            return Err(refuse(Code::AlreadyExists, "LOG_EXISTS", &[]));
        }
        let log = state.log(&name);
        log.config = config.unwrap_or_default();
        let log_id = log.log_id;
        Ok(Response::new(CreateLogResponse {
            log: Some(Log {
                name,
                log_id,
                ..Default::default()
            }),
        }))
    }

    async fn get_log(&self, request: Request<GetLogRequest>) -> Answer<GetLogResponse> {
        let name = request.into_inner().log;
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&name, None)?;
        let (log_id, tail) = (log.log_id, log.records.len() as u64);
        let first_producer_epoch = log.first_producer_epoch;
        Ok(Response::new(GetLogResponse {
            log: Some(Log {
                name,
                log_id,
                config: Some(log.config),
                first_producer_epoch,
                first_lsn: Some(0),
                tail_lsn: Some(tail),
                ..Default::default()
            }),
        }))
    }

    /// Takes the configuration as a whole: callers here name every setting.
    async fn update_log(&self, request: Request<UpdateLogRequest>) -> Answer<UpdateLogResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, None)?;
        log.config = request.config.unwrap_or_default();
        Ok(Response::new(UpdateLogResponse {
            log: Some(Log {
                name: request.log,
                log_id: log.log_id,
                config: Some(log.config),
                ..Default::default()
            }),
        }))
    }

    async fn delete_log(&self, request: Request<DeleteLogRequest>) -> Answer<DeleteLogResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let found = state.existing(&request.log, request.log_id);
        let missing = match found.map(drop) {
            Ok(()) => {
                state.logs.remove(&request.log);
                return Ok(Response::new(DeleteLogResponse {}));
            }
            Err(missing) => missing,
        };
        let mut unerased = self.unerased.lock().unwrap();
        let is_meant = |(name, id): &(String, u64)| {
            *name == request.log && request.log_id.is_none_or(|wanted| wanted == *id)
        };
        match unerased.iter().position(is_meant).filter(|_| request.shred) {
            Some(at) => {
                unerased.remove(at);
                Ok(Response::new(DeleteLogResponse {}))
            }
            None => Err(missing),
        }
    }

    async fn list_producers(
        &self,
        request: Request<ListProducersRequest>,
    ) -> Answer<ListProducersResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        let later = |(id, _): &(&String, &StoredProducer)| **id > request.page_token;
        let found: Vec<_> = log.producers.iter().filter(later).collect();
        let producers = found.iter().take(2).map(|(id, producer)| LogProducer {
            id: (*id).clone(),
            epoch: Some(producer.epoch),
            next_sequence: Some(producer.batches.len() as u64),
            last_append_time: Some(prost_types::Timestamp {
                seconds: 86_400,
                nanos: 999_000_000,
            }),
        });
        let producers: Vec<_> = producers.collect();
        let last = producers.last().map(|last| last.id.clone());
        let next_page_token = last.filter(|_| found.len() > 2).unwrap_or_default();
        Ok(Response::new(ListProducersResponse {
            producers,
            next_page_token,
        }))
    }

    async fn forget_producer(
        &self,
        request: Request<ForgetProducerRequest>,
    ) -> Answer<ForgetProducerResponse> {
        let request = request.into_inner();
        let mut state = self.state.lock().unwrap();
        let log = state.existing(&request.log, request.log_id)?;
        let id = request.producer_id;
        if id.is_empty() || id.len() > 255 || id.contains(char::is_control) {
            return Err(refuse(Code::InvalidArgument, "INVALID_PRODUCER", &[]));
        }
        match log.producers.remove(&id) {
            Some(producer) => {
                log.gone.insert(id, producer.epoch);
                Ok(Response::new(ForgetProducerResponse {}))
            }
            None => Err(refuse(Code::NotFound, "PRODUCER_NOT_FOUND", &[])),
        }
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
            limits: Some(ServerLimits {
                max_record_bytes: 5 << 20,
                max_request_bytes: 6 << 20,
                ..Default::default()
            }),
            default_sync_mode: SyncMode::Batch.into(),
            ..Default::default()
        }))
    }

    async fn get_caller(&self, _: Request<GetCallerRequest>) -> Answer<GetCallerResponse> {
        let prefix = self.caller_prefix.lock().unwrap().clone();
        let named = |name: &str| format!("{prefix}{name}");
        Ok(Response::new(GetCallerResponse {
            principal: named("writer"),
            tenant: named("payments"),
            credential: CredentialKind::Token.into(),
            token_id: named("k7Qp2mXa"),
            expire_time: Some(prost_types::Timestamp {
                seconds: 1_800_000_000,
                nanos: 0,
            }),
            grants: vec![
                Grant {
                    rights: vec![named("append"), "create".into()],
                    logs: Some(grant::Logs::Prefix(named("payments/billing/"))),
                },
                Grant {
                    rights: vec!["ops".into()],
                    logs: None,
                },
            ],
            limits: Some(TenantLimits {
                append_bytes_per_second: 20 << 20,
                connections: 200,
                ..Default::default()
            }),
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
        let Some(file) = self.backups.lock().unwrap().pop_front() else {
            return unforeseen();
        };
        let part = Some(backup_response::Part::ManifestFile(file));
        let parts = stream::iter([Ok(BackupResponse { part })]);
        Ok(Response::new(Box::pin(parts)))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Answer<DrainResponse> {
        unforeseen()
    }
}
