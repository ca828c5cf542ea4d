//! The appends of a client to one server, which share a stream.
//!
//! ```text
//!  append() ──▶ unsent ──▶ (one AppendSession, independent requests) ──▶ server
//!     ▲                                                                     │
//!     └────────────── waiting, by request id ◀── reader ◀──────── answers ──┘
//! ```
//!
//! A call of its own for each append costs client and server more than the append. On the stream, appends that are made
//! at the same time leave in one write, and the server commits them together. A refused append is answered for
//! itself. Deadlines and repeats are as for unary calls: one request on the stream is one attempt.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::stream;
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::{StatusExt as _, pb};
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::client::CallAttempt;
use crate::error::DOMAIN;
use crate::nodes::{OWNER_HEADER, lock};
use crate::sent::SendGate;
use crate::token::{AUTHORIZATION, CallChannel, TokenHeader};

/// Largest request on a stream, in bytes. Larger ones are calls of their own: they would hold up small ones.
const MOST_BYTES: usize = 64 << 10;
/// Time without a request after which a stream is closed, at least; at most twice as long.
const IDLE: Duration = Duration::from_secs(1);
/// Time without streams after a message that ended one. A server of an earlier version takes no independent requests.
const UNARY_TIME: Duration = Duration::from_secs(60);
/// Time without any answer after which a stream takes no more requests, once a caller gives up: a proxy may have lost the
/// server behind it. Shorter deadlines say nothing about the stream.
const SILENCE: Duration = Duration::from_secs(5);
/// Pause between two calls that look whether a stream that does not open has a connection.
const LOOK: Duration = Duration::from_secs(1);

/// The stream of a client to one server, if one is open.
pub(crate) struct SharedAppends {
    current: Mutex<CurrentStream>,
    wal: WalServiceClient<CallChannel>,
    health: HealthClient<CallChannel>,
}

#[derive(Default)]
struct CurrentStream {
    stream: Option<Arc<AppendStream>>,
    /// Time until which appends are calls of their own.
    unary_until: Option<Instant>,
}

/// A request on the stream, without its number.
#[derive(Debug, Clone)]
pub(crate) enum AppendContent {
    Record(v1::AppendRequest),
    Batch(v1::AppendBatchRequest),
}

/// An attempt that the stream gave no answer to.
pub(crate) enum NoAnswer {
    /// The request must be a call of its own. It was not applied.
    Unary(CallAttempt<Arc<AppendContent>>),
    Failed(Status),
}

/// The request was never handed to the connection. The text is that of the failure.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NeverSent(String);

/// The server ended the stream and gave no reason.
#[derive(Debug, thiserror::Error)]
#[error("the server ended the stream of appends")]
struct EndedEarly;

impl AppendContent {
    /// Whether it is too large for a stream.
    pub(crate) fn is_large(&self) -> bool {
        let bytes = match self {
            Self::Record(append) => append.encoded_len(),
            Self::Batch(batch) => batch.encoded_len(),
        };
        bytes > MOST_BYTES
    }
}

impl SharedAppends {
    /// No stream yet. `wal` and `health` are of one server.
    pub(crate) fn new(
        wal: WalServiceClient<CallChannel>,
        health: HealthClient<CallChannel>,
    ) -> Self {
        Self {
            current: Mutex::default(),
            wal,
            health,
        }
    }

    /// Sends one attempt on the current stream, which is opened if there is none, and waits for its answer. Dropping
    /// the future forgets the request, which may still be applied.
    pub(crate) async fn send(
        &self,
        attempt: CallAttempt<Arc<AppendContent>>,
    ) -> Result<Response<v1::AppendSessionResponse>, NoAnswer> {
        let Some((stream, number, answer)) = self.submit(&attempt) else {
            return Err(NoAnswer::Unary(attempt));
        };
        let place = RequestPlace { stream, number };
        let ended = match answer.await {
            Ok(Ok(answer)) if answer.error.is_empty() => return Ok(place.stream.response(answer)),
            Ok(Ok(refused)) => return Err(NoAnswer::Failed(refusal(refused))),
            Ok(Err(ended)) => ended,
            Err(_) => StreamEnd::of(EndedEarly, true),
        };
        if ended.is_of_one_message() {
            self.lock().unary_until = Some(Instant::now() + UNARY_TIME);
            return Err(NoAnswer::Unary(attempt));
        }
        Err(NoAnswer::Failed(ended.into_status()))
    }

    fn lock(&self) -> MutexGuard<'_, CurrentStream> {
        lock(&self.current)
    }

    /// Puts a request on the stream. `None`: appends are calls of their own for now.
    fn submit(
        &self,
        attempt: &CallAttempt<Arc<AppendContent>>,
    ) -> Option<(Arc<AppendStream>, u64, AppendAnswer)> {
        let mut current = self.lock();
        if current
            .unary_until
            .is_some_and(|until| Instant::now() < until)
        {
            return None;
        }
        if let Some(stream) = &current.stream {
            // A stream has the token of its first request. Another token needs another stream.
            if stream.token == attempt.token
                && let Some((number, answer)) = stream.submit(&attempt.message, &attempt.gate)
            {
                return Some((Arc::clone(stream), number, answer));
            }
            stream.close();
        }
        let token = attempt.token.clone();
        let stream = AppendStream::open(self.wal.clone(), self.health.clone(), token);
        let submitted = stream.submit(&attempt.message, &attempt.gate);
        current.stream = Some(Arc::clone(&stream));
        submitted.map(|(number, answer)| (stream, number, answer))
    }
}

impl Drop for SharedAppends {
    fn drop(&mut self) {
        if let Some(stream) = self.lock().stream.take() {
            stream.close();
        }
    }
}

type AppendAnswer = oneshot::Receiver<Result<v1::AppendSessionResponse, StreamEnd>>;

/// The end of a stream, for one request that has no answer.
struct StreamEnd {
    status: Status,
    /// Whether the request was handed to the connection.
    sent: bool,
}

impl StreamEnd {
    fn of(error: impl std::error::Error + Send + Sync + 'static, sent: bool) -> Self {
        let mut status = Status::unavailable(error.to_string());
        status.set_source(Arc::new(error));
        Self { status, sent }
    }

    /// Whether one message ended the stream, perhaps another caller's: it cannot be read, or the server is older and ends
    /// a stream at the first refusal. The server answers all messages that it has read before, so this request was not
    /// applied. A proxy does not know that: only Wald's own word about the outcome counts.
    fn is_of_one_message(&self) -> bool {
        match self.status.code() {
            // The method was not even found.
            Code::Unimplemented => true,
            // The state of the server or the credential ended it.
            Code::Unavailable | Code::Unauthenticated | Code::ResourceExhausted => false,
            _ => {
                let info = self.status.get_details_error_info();
                info.filter(|info| info.domain == DOMAIN)
                    .and_then(|mut info| info.metadata.remove("outcome"))
                    .is_some_and(|outcome| outcome == "NOT_APPLIED")
            }
        }
    }

    /// The status of the request. One that names its outcome is right for each request without an answer: the server
    /// answers all that it has read.
    fn into_status(self) -> Status {
        if self.sent || !self.status.details().is_empty() {
            return self.status;
        }
        let mut text = self.status.message().to_owned();
        let mut source = std::error::Error::source(&self.status);
        while let Some(error) = source {
            // The connection was not made, and the error says so.
            if error.is::<tonic::ConnectError>() {
                return self.status;
            }
            text = error.to_string();
            source = error.source();
        }
        Self::of(NeverSent(text), false).status
    }
}

/// A request on a stream. Dropping it forgets the request.
struct RequestPlace {
    stream: Arc<AppendStream>,
    number: u64,
}

impl Drop for RequestPlace {
    fn drop(&mut self) {
        if self.stream.lock().forget(self.number) {
            self.stream.close();
        }
    }
}

/// One stream of independent appends.
struct AppendStream {
    token: Option<TokenHeader>,
    requests: Mutex<StreamRequests>,
}

#[derive(Default)]
struct StreamRequests {
    /// Numbers of requests that are not handed to the connection.
    unsent: VecDeque<u64>,
    /// Requests without an answer.
    waiting: HashMap<u64, WaitingRequest>,
    next: u64,
    /// Wakes the connection when there is something to send.
    writer: Option<Waker>,
    /// Whether it takes no more requests.
    closed: bool,
    /// Whether a request came since the last look.
    used: bool,
    /// Number of answers so far.
    answers: u64,
    /// The owner of the store, if the server only forwards to it.
    owner: Option<MetadataValue<Ascii>>,
}

struct WaitingRequest {
    /// Absent once it is handed to the connection.
    content: Option<Arc<AppendContent>>,
    gate: SendGate,
    answer: oneshot::Sender<Result<v1::AppendSessionResponse, StreamEnd>>,
    since: Instant,
    /// Number of answers of the stream before it.
    answers_before: u64,
}

impl WaitingRequest {
    /// The content, to be sent now. `None`: its caller has given up.
    fn take(&mut self) -> Option<Arc<AppendContent>> {
        self.content.take_if(|_| self.gate.pass())
    }
}

impl StreamRequests {
    /// Forgets a request that nobody waits for any more. Returns whether the stream has been silent since it came.
    fn forget(&mut self, number: u64) -> bool {
        let forgotten = self.waiting.remove(&number);
        forgotten.is_some_and(|request| {
            request.content.is_none()
                && request.answers_before == self.answers
                && request.since.elapsed() >= SILENCE
        })
    }
}

impl AppendStream {
    /// Opens a stream with the first request that it gets.
    fn open(
        mut wal: WalServiceClient<CallChannel>,
        health: HealthClient<CallChannel>,
        token: Option<TokenHeader>,
    ) -> Arc<Self> {
        let stream = Arc::new(Self {
            token,
            requests: Mutex::default(),
        });
        let outgoing = Arc::clone(&stream);
        let mut request = Request::new(stream::poll_fn(move |context| outgoing.poll_next(context)));
        if let Some(token) = &stream.token {
            request.metadata_mut().insert(AUTHORIZATION, token.clone());
        }
        let reader = Reader(Arc::clone(&stream));
        tokio::spawn(async move {
            let opening = wal.append_session(request);
            reader.run(looked_after(opening, health).await).await;
        });
        stream
    }

    fn lock(&self) -> MutexGuard<'_, StreamRequests> {
        lock(&self.requests)
    }

    /// Takes a request. `None`: the stream takes no more.
    fn submit(&self, content: &Arc<AppendContent>, gate: &SendGate) -> Option<(u64, AppendAnswer)> {
        let (answer, answered) = oneshot::channel();
        let (number, writer) = {
            let mut requests = self.lock();
            if requests.closed {
                return None;
            }
            let number = requests.next;
            requests.next += 1;
            requests.used = true;
            let waiting = WaitingRequest {
                content: Some(Arc::clone(content)),
                gate: gate.clone(),
                answer,
                since: Instant::now(),
                answers_before: requests.answers,
            };
            requests.waiting.insert(number, waiting);
            requests.unsent.push_back(number);
            (number, requests.writer.take())
        };
        if let Some(writer) = writer {
            writer.wake();
        }
        Some((number, answered))
    }

    /// The next message for the server.
    fn poll_next(&self, context: &Context<'_>) -> Poll<Option<v1::AppendSessionRequest>> {
        let mut requests = self.lock();
        while let Some(request_id) = requests.unsent.pop_front() {
            // A request that nobody waits for any more is not sent.
            let waiting = requests.waiting.get_mut(&request_id);
            let Some(content) = waiting.and_then(WaitingRequest::take) else {
                continue;
            };
            drop(requests);
            // The call keeps it for a repetition.
            let (append, batch) = match Arc::unwrap_or_clone(content) {
                AppendContent::Record(append) => (Some(append), None),
                AppendContent::Batch(batch) => (None, Some(batch)),
            };
            return Poll::Ready(Some(v1::AppendSessionRequest {
                request_id,
                batch,
                independent: true,
                append,
            }));
        }
        if requests.closed {
            return Poll::Ready(None);
        }
        requests.writer = Some(context.waker().clone());
        Poll::Pending
    }

    fn answered(&self, answer: v1::AppendSessionResponse) {
        let waiting = {
            let mut requests = self.lock();
            requests.answers += 1;
            requests.waiting.remove(&answer.request_id)
        };
        // A late answer has nobody that waits for it.
        if let Some(waiting) = waiting {
            let _ = waiting.answer.send(Ok(answer));
        }
    }

    /// An answer with the header of the stream that concerns it.
    fn response(&self, answer: v1::AppendSessionResponse) -> Response<v1::AppendSessionResponse> {
        let mut response = Response::new(answer);
        if let Some(owner) = &self.lock().owner {
            response.metadata_mut().insert(OWNER_HEADER, owner.clone());
        }
        response
    }

    /// Takes no more requests. Those that it has are sent and answered.
    fn close(&self) {
        let writer = {
            let mut requests = self.lock();
            requests.closed = true;
            requests.writer.take()
        };
        if let Some(writer) = writer {
            writer.wake();
        }
    }

    /// Closes the stream if no request came since the last look, and none waits for an answer. Returns whether it was
    /// closed before: then the server does not end it.
    fn close_if_idle(&self) -> bool {
        let (idle, closed) = {
            let mut requests = self.lock();
            let used = std::mem::take(&mut requests.used);
            (!used && requests.waiting.is_empty(), requests.closed)
        };
        if idle {
            self.close();
        }
        idle && closed
    }

    /// Fails the requests that have no answer.
    fn end(&self, status: &Status) {
        let (waiting, writer) = {
            let mut requests = self.lock();
            requests.closed = true;
            requests.unsent.clear();
            let waiting = std::mem::take(&mut requests.waiting);
            (waiting, requests.writer.take())
        };
        // The connection need not keep the stream for more requests.
        if let Some(writer) = writer {
            writer.wake();
        }
        for request in waiting.into_values() {
            let _ = request.answer.send(Err(StreamEnd {
                status: status.clone(),
                sent: request.content.is_none(),
            }));
        }
    }
}

/// Waits until a stream is open. A request that the transport takes at the moment when its connection ends can stay in the queue of that
/// connection, and only the next call finds that it has ended. So another call is made while the stream does not open.
pub(crate) async fn looked_after<T>(
    opening: impl Future<Output = T>,
    mut health: HealthClient<CallChannel>,
) -> T {
    let mut opening = pin!(opening);
    loop {
        if let Ok(opened) = timeout(LOOK, &mut opening).await {
            return opened;
        }
        tokio::select! {
            biased;
            opened = &mut opening => return opened,
            // Only the attempt matters.
            _ = timeout(LOOK, health.check(HealthCheckRequest::default())) => {}
        }
    }
}

/// Reads the answers. Its end, also with its runtime, is the end of the stream.
struct Reader(Arc<AppendStream>);

impl Reader {
    async fn run(self, opening: Result<Response<Streaming<v1::AppendSessionResponse>>, Status>) {
        let stream = &self.0;
        let mut answers = match opening {
            Ok(opened) => {
                stream.lock().owner = opened.metadata().get(OWNER_HEADER).cloned();
                opened.into_inner()
            }
            Err(status) => return stream.end(&status),
        };
        let mut look = interval(IDLE);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                answer = answers.message() => match answer {
                    Ok(Some(answer)) => stream.answered(answer),
                    Ok(None) => return,
                    Err(status) => return stream.end(&status),
                },
                _ = look.tick() => if stream.close_if_idle() {
                    return;
                },
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.end(&StreamEnd::of(EndedEarly, true).status);
    }
}

/// The status in an answer that is no ack.
fn refusal(answer: v1::AppendSessionResponse) -> Status {
    let pb::Status { code, message, .. } =
        pb::Status::decode(&answer.error[..]).unwrap_or_else(|error| pb::Status {
            code: Code::Internal.into(),
            message: format!("the status of a refused append cannot be read: {error}"),
            details: Vec::new(),
        });
    Status::with_details(Code::from_i32(code), message, answer.error)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tonic::transport::Endpoint;

    use super::*;
    use crate::sent::GatedChannel;
    use crate::token::CallHeaders;

    /// A stream, and a request on it that the connection has had for a time.
    fn stream_with_a_request(age: Duration) -> (Arc<AppendStream>, RequestPlace, AppendAnswer) {
        let stream = Arc::new(AppendStream {
            token: None,
            requests: Mutex::default(),
        });
        let content = Arc::new(AppendContent::Record(v1::AppendRequest::default()));
        let (number, answer) = stream.submit(&content, &SendGate::default()).unwrap();
        let sent = stream.poll_next(&Context::from_waker(Waker::noop()));
        assert!(matches!(sent, Poll::Ready(Some(_))));
        stream.lock().waiting.get_mut(&number).unwrap().since -= age;
        let place = RequestPlace {
            stream: Arc::clone(&stream),
            number,
        };
        (stream, place, answer)
    }

    #[test]
    fn stream_without_any_answer_takes_no_more_requests() {
        let (stream, place, _answer) = stream_with_a_request(SILENCE);
        drop(place);
        assert!(stream.lock().closed);
    }

    #[test]
    fn short_deadline_or_other_answers_leave_the_stream_open() {
        let (stream, place, _answer) = stream_with_a_request(SILENCE / 2);
        drop(place);
        assert!(!stream.lock().closed);
        let (stream, place, _answer) = stream_with_a_request(SILENCE);
        stream.answered(v1::AppendSessionResponse {
            request_id: 7,
            ..Default::default()
        });
        drop(place);
        assert!(!stream.lock().closed);
    }

    #[tokio::test]
    async fn stream_that_does_not_open_is_looked_after_by_another_call() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let channel = Endpoint::from_shared(address).unwrap().connect_lazy();
        let headers = CallHeaders {
            token: None,
            step: None,
        };
        let health = HealthClient::new(CallChannel::new(GatedChannel(channel), headers));
        // Only another call makes a connection.
        let opening = async { listener.accept().await.unwrap() };
        let opened = timeout(Duration::from_secs(20), looked_after(opening, health));
        opened.await.unwrap();
    }
}
