//! HTTP/2 on one connection: accepts its calls, keeps it alive, and ends it.
//!
//! h2 speaks the protocol. This module decides how long the server waits for a client, how many
//! bytes the client may have sent or left unread, and how many calls it may give up. hyper's
//! server leaves no choice there: it cannot reset a call whose client reads nothing, cuts
//! connections on which bytes move slowly, and ends connections whose calls are cancelled in a
//! burst.
//!
//! ```text
//! accepted ──▶ no request yet ──▶ serving ──▶ told to leave (GOAWAY) ──▶ closed
//!                │ handshake_timeout   │ silent: ping, then closed    │ idle for 2 s: closed
//! ```

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use h2::server::Connection;
use h2::{Ping, PingPong};
use http::Request;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};

use super::call::{self, Terms};
use super::conn::{Conn, ConnectionGuard};
use super::incoming::{Http2Body, Incoming};
use super::patience::AT_DRAIN;
use super::peer::{AnswerPiece, Peer, QUEUE_BYTES};
use super::preface::{self, Greeting};
use super::routes::ConnectionCalls;
use super::suspects::HOLD;
use super::window::Windows;
use super::{ConnectionSettings, draining};
use crate::drain::Phase;
use crate::tls::{ConnStream, REFUSED_GRACE};

/// Calls that a client may give up at once before its connection is slowed down.
const CANCELS_AT_ONCE: u64 = 10_000;

/// Calls that a client may give up in a second without being slowed down.
const CANCELS_PER_SECOND: u64 = 1_000;

/// Maximum number of requests that were cancelled before they were accepted. Reading stops
/// after 256 KiB, which hold fewer requests than this, and all are accepted then.
const CANCELLED_UNSEEN: usize = 10_000;

/// Calls reset by the server whose late data is ignored, and for how long.
const RESET_REMEMBERED: usize = 256;
const RESET_REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// Calls that one connection begins in a turn of the event loop before they are charged. Then they run, which charges
/// them.
const UNCHARGED_AT_ONCE: usize = 64;
/// Calls for which one check of a signature counts: it takes up to 0.1 ms.
const OF_SIGNATURE: usize = 16;

/// Serves a connection until it is closed. GOAWAY asks its client to make no more calls when
/// draining begins, when the connection reaches its age, or when a newer one takes its place.
pub(super) async fn serve(
    socket: TcpStream,
    guard: ConnectionGuard,
    accepted: Instant,
    settings: &ConnectionSettings,
    mut service: ConnectionCalls,
    phase: watch::Receiver<Phase>,
) {
    let peer = guard.peer();
    let http = service.calls.http;
    let address = guard.address();
    let handshake = async {
        if address.is_some_and(|address| peer.suspects().has(address)) {
            tokio::time::sleep(HOLD).await;
        }
        match preface::greet(&socket, http, settings.tls.is_some()).await {
            Ok(Greeting::Expected) => {}
            // The answer named the port that its client probably means, if that is known.
            Ok(Greeting::Answered) | Err(_) => return None,
        }
        let (stream, watch) = match &settings.tls {
            None => (ConnStream::Plain(socket), None),
            Some(tls) => tls.accept(socket, || peer.awaits_server()).await?,
        };
        let conn = Conn::new(stream, guard);
        let connection = builder(settings).handshake::<_, AnswerPiece>(conn).await;
        Some(connection.map(|connection| (connection, watch)))
    };
    // Boxed, because TLS makes it large, and the connection lives on without it.
    let mut handshake = Box::pin(handshake);
    let mut late = pin!(tokio::time::sleep_until(
        accepted + settings.handshake_timeout
    ));
    let mut leaving = phase.clone();
    let mut leave = pin!(draining(&mut leaving));
    let connection = poll_fn(|context| {
        if peer.poll_cut(context).is_ready()
            || late.as_mut().poll(context).is_ready()
            || leave.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(None);
        }
        handshake.as_mut().poll(context)
    });
    let (connection, watch) = match connection.await {
        Some(Ok(connection)) => connection,
        Some(Err(error)) => return ended(&error, address, &peer),
        // It has sent nothing that could be served.
        None => return,
    };
    service.names = watch.as_ref().map(|watch| Arc::new(watch.names()));
    let mut served = Serving::new(connection, accepted, settings, service, peer.clone(), phase);
    served.refused = watch.map(|watch| Box::pin(watch.refused()) as Refused);
    let mut served = pin!(served);
    if let Err(error) = poll_fn(|context| served.as_mut().get_mut().poll(context)).await {
        ended(&error, address, &peer);
    }
}

fn ended(error: &h2::Error, address: Option<IpAddr>, peer: &Peer) {
    // GOAWAY has informed the client that it broke a rule.
    if error.is_go_away()
        && error.is_library()
        && let Some(address) = address
    {
        peer.suspects().add(address);
    }
    tracing::debug!(
        error = error as &dyn std::error::Error,
        "a connection ended"
    );
}

fn builder(settings: &ConnectionSettings) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(settings.max_concurrent_streams)
        .initial_window_size(settings.stream_window)
        .max_header_list_size(settings.max_header_bytes)
        // One call may fill the queue of its connection. With a quarter of it a scan is 13 % slower.
        .max_send_buffer_size(QUEUE_BYTES)
        .max_local_error_reset_streams(Some(settings.max_local_resets))
        .max_concurrent_reset_streams(RESET_REMEMBERED)
        .reset_stream_duration(RESET_REMEMBERED_FOR)
        .max_pending_accept_reset_streams(CANCELLED_UNSEEN)
        // Small frames are put together where they arrive, and the windows bound the bytes that
        // no call has taken.
        .data_frame_budget(usize::MAX);
    builder
}

/// Resolves when the certificate of the client is refused, with the reason.
type Refused = Pin<Box<dyn Future<Output = rustls::Error> + Send>>;

/// The reason why the connection is over.
enum ConnectionEnd {
    /// It was closed in order.
    Closed,
    /// Its client is not waited for any longer.
    Dropped,
}

/// A connection whose preface has come.
struct Serving {
    connection: Connection<Conn, AnswerPiece>,
    service: ConnectionCalls,
    terms: Arc<Terms>,
    windows: Windows,
    life: TimeLimits,
    alive: Alive,
    cancels: Cancels,
    /// `None` without a certificate of the client.
    refused: Option<Refused>,
    timer: Pin<Box<Sleep>>,
}

impl Serving {
    fn new(
        mut connection: Connection<Conn, AnswerPiece>,
        accepted: Instant,
        settings: &ConnectionSettings,
        service: ConnectionCalls,
        peer: Peer,
        phase: watch::Receiver<Phase>,
    ) -> Self {
        let alive = Alive::new(connection.ping_pong(), settings, &peer);
        Self {
            windows: settings.windows.begin(),
            life: TimeLimits {
                first_request_by: Some(accepted + settings.handshake_timeout),
                leave_at: settings.age.map(|age| accepted + age),
                gone_at: settings.lifetime().map(|lifetime| accepted + lifetime),
                left: None,
            },
            alive,
            cancels: Cancels::new(&peer),
            refused: None,
            timer: Box::pin(sleep_until(accepted)),
            terms: Arc::new(Terms {
                peer,
                phase,
                progress_timeout: settings.progress_timeout,
            }),
            connection,
            service,
        }
    }

    /// Resolves when the connection is over.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            match self.poll_once(context) {
                Poll::Ready(Ok(Some(ConnectionEnd::Closed | ConnectionEnd::Dropped))) => {
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Ok(None)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn poll_once(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<ConnectionEnd>, h2::Error>> {
        if self.terms.peer.poll_cut(context).is_ready() {
            return Poll::Ready(Ok(Some(ConnectionEnd::Dropped)));
        }
        if self.life.left.is_none() && self.terms.peer.is_asked_to_leave() {
            self.leave();
        }
        if let Some(refused) = &mut self.refused
            && let Poll::Ready(why) = refused.as_mut().poll(context)
        {
            self.refused = None;
            tracing::info!(%why, "the certificate of a client is no longer accepted; its connection ends");
            let at = Instant::now() + REFUSED_GRACE;
            self.life.gone_at = Some(self.life.gone_at.map_or(at, |gone_at| gone_at.min(at)));
            if self.life.left.is_none() {
                self.leave();
            }
        }
        let held_until = self.cancels.held_until(&self.terms.peer);
        if held_until.is_none() {
            let mut uncharged = 0;
            while let Poll::Ready(accepted) = self.connection.poll_accept(context)? {
                let Some((request, respond)) = accepted else {
                    return Poll::Ready(Ok(Some(ConnectionEnd::Closed)));
                };
                uncharged += usize::from(self.begin_call(request, respond));
                uncharged += OF_SIGNATURE * usize::from(self.service.last.has_checked());
                if uncharged >= UNCHARGED_AT_ONCE {
                    context.waker().wake_by_ref();
                    break;
                }
            }
            self.windows.grow(&mut self.connection, &self.terms.peer);
        }
        let now = Instant::now();
        let silent_until = self.alive.look(now, &self.terms.peer, context)?;
        let Some(silent_until) = silent_until else {
            return Poll::Ready(Ok(Some(ConnectionEnd::Dropped)));
        };
        if self.life.is_over(now, &self.connection, &self.terms.peer) {
            return Poll::Ready(Ok(Some(ConnectionEnd::Dropped)));
        }
        if self.life.is_time_to_leave(now) {
            self.leave();
            // Once more, so that its client learns it now.
            return Poll::Ready(Ok(None));
        }
        let life_until = self.life.next(&self.connection, &self.terms.peer);
        let next = [held_until, silent_until, life_until];
        let Some(next) = next.into_iter().flatten().min() else {
            return Poll::Pending;
        };
        if self.timer.deadline() != next {
            self.timer.as_mut().reset(next);
        }
        match self.timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Ok(None)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Begins a call. Returns whether it runs before it is charged.
    fn begin_call(
        &mut self,
        request: Request<h2::RecvStream>,
        mut respond: h2::server::SendResponse<AnswerPiece>,
    ) -> bool {
        self.life.first_request_by = None;
        let open = self.terms.peer.begin_call();
        // A request that its client has cancelled already costs no call.
        let mut context = Context::from_waker(Waker::noop());
        if respond.poll_reset(&mut context).is_ready() {
            self.terms.peer.call_was_cancelled();
            return false;
        }
        let farewells = self.terms.peer.farewells();
        let request = request.map(|stream| Incoming::Http2(Http2Body::new(stream, farewells)));
        let mut call = self.service.call(request);
        if call.inner().is_refused() {
            // A task would hold it until its turn comes.
            if let Poll::Ready(Ok(answer)) = Pin::new(&mut call).poll(&mut context) {
                // Fails only on a stream that the client has reset.
                let _ = respond.send_response(answer.map(|_| ()), true);
            }
            return false;
        }
        let is_uncharged = call.inner().is_uncharged();
        let terms = Arc::clone(&self.terms);
        tokio::spawn(call::serve(call, respond, terms, open));
        is_uncharged
    }

    fn leave(&mut self) {
        self.life.left = Some(Instant::now());
        self.connection.graceful_shutdown();
    }
}

/// Time limits of the connection.
struct TimeLimits {
    /// Time by which the first request head must be whole; `None` once it is.
    first_request_by: Option<Instant>,
    /// Time at which its client must leave, because of the age of the connection.
    leave_at: Option<Instant>,
    /// Time at which it is dropped, whatever runs on it.
    gone_at: Option<Instant>,
    /// Time at which its client was asked to leave.
    left: Option<Instant>,
}

impl TimeLimits {
    fn is_time_to_leave(&self, now: Instant) -> bool {
        self.left.is_none() && self.leave_at.is_some_and(|at| now >= at)
    }

    fn is_over(
        &self,
        now: Instant,
        connection: &Connection<Conn, AnswerPiece>,
        peer: &Peer,
    ) -> bool {
        let passed = |at: Option<Instant>| at.is_some_and(|at| now >= at);
        passed(self.first_request_by)
            || passed(self.gone_at)
            || passed(self.idle_end(connection, peer))
    }

    /// Time at which the connection is dropped unless it has calls: its client may never confirm
    /// that it has seen the request to leave. Streams of health would never end.
    fn idle_end(&self, connection: &Connection<Conn, AnswerPiece>, peer: &Peer) -> Option<Instant> {
        let left = self.left?;
        let since = match connection.has_streams() {
            false => left,
            true => peer.only_free_calls_since()?.max(left),
        };
        Some(since + AT_DRAIN)
    }

    /// Time of the next check.
    fn next(&self, connection: &Connection<Conn, AnswerPiece>, peer: &Peer) -> Option<Instant> {
        let idle_end = self.idle_end(connection, peer);
        let leave_at = self.leave_at.filter(|_| self.left.is_none());
        let times = [self.first_request_by, leave_at, self.gone_at, idle_end];
        times.into_iter().flatten().min()
    }
}

/// Whether the client is still there: asked by a ping if nothing has moved for a while.
struct Alive {
    pings: Option<PingPong>,
    interval: Option<Duration>,
    timeout: Duration,
    /// Bytes that had moved at the last look, and when that was.
    moved: u64,
    moved_at: Instant,
    /// Time of the ping that has no answer yet.
    asked: Option<Instant>,
}

impl Alive {
    fn new(pings: Option<PingPong>, settings: &ConnectionSettings, peer: &Peer) -> Self {
        Self {
            pings,
            interval: settings.keepalive_interval,
            timeout: settings.keepalive_timeout,
            moved: peer.moved_so_far(),
            moved_at: Instant::now(),
            asked: None,
        }
    }

    /// Returns when to look again, or `None` if the client is gone. A connection on which bytes move,
    /// however slowly, is alive: the answer to a ping may be behind much that the client still reads.
    fn look(
        &mut self,
        now: Instant,
        peer: &Peer,
        context: &mut Context<'_>,
    ) -> Result<Option<Option<Instant>>, h2::Error> {
        let (Some(interval), Some(pings)) = (self.interval, &mut self.pings) else {
            return Ok(Some(None));
        };
        if self.asked.is_some() && pings.poll_pong(context)?.is_ready() {
            self.asked = None;
        }
        let moved = peer.moved_so_far();
        if moved != self.moved {
            self.moved = moved;
            self.moved_at = now;
        }
        let due = match self.asked {
            None => self.moved_at + interval,
            Some(asked) => asked.max(self.moved_at) + self.timeout,
        };
        if now < due {
            // Looked at more often than it is due: moved bytes wake nobody here.
            return Ok(Some(Some(due)));
        }
        if self.asked.is_some() {
            return Ok(None);
        }
        pings.send_ping(Ping::opaque())?;
        self.asked = Some(now);
        // Wakes the connection, which sends it.
        let _pending = pings.poll_pong(context)?;
        Ok(Some(Some(now + self.timeout)))
    }
}

/// Number of calls that the client gives up. A client that does so faster than any client must
/// is held back.
struct Cancels {
    seen: u64,
    /// Calls that may still be given up at once.
    left: u64,
    filled: Instant,
}

impl Cancels {
    fn new(peer: &Peer) -> Self {
        Self {
            seen: peer.cancelled_so_far(),
            left: CANCELS_AT_ONCE,
            filled: Instant::now(),
        }
    }

    /// Until when nothing more is read from the connection; `None` if nothing stands against it.
    fn held_until(&mut self, peer: &Peer) -> Option<Instant> {
        let seen = peer.cancelled_so_far();
        if seen == self.seen && self.left > 0 {
            return None;
        }
        let now = Instant::now();
        let passed = now.duration_since(self.filled).as_millis();
        let passed = u64::try_from(passed).unwrap_or(u64::MAX);
        let refill = passed.saturating_mul(CANCELS_PER_SECOND) / 1000;
        if refill > 0 {
            self.left = self.left.saturating_add(refill).min(CANCELS_AT_ONCE);
            self.filled = now;
        }
        self.left = self.left.saturating_sub(seen - self.seen);
        self.seen = seen;
        (self.left == 0).then(|| self.filled + Duration::from_millis(100))
    }
}
