//! gRPC over TCP: one acceptor, several event loops, HTTP/2 by h2 on each connection, and
//! tonic's services behind it.
//!
//! ```text
//! acceptor ── socket ──▶ event loop 1 (thread, current-thread runtime)
//!    │ one permit each ─▶ event loop 2
//!    ▼ no permit: an     ...           each connection stays on its loop
//!      idle connection
//!      gives way
//! ```
//!
//! Event loops of one thread each, instead of one pool that steals work, halve the CPU
//! of a unary call: a request, its engine ticket and its answer wake
//! the thread that has them in its cache.
//!
//! | file | purpose |
//! |---|---|
//! | `conn.rs`, `frames.rs` | the socket of a connection; its bytes that are data of calls |
//! | `http2.rs` | the connection: its calls, its life, its end |
//! | `call.rs`, `incoming.rs` | one call: its answer, its request |
//! | `peer.rs` | state that the calls of a connection share; all connections |
//! | `window.rs` | the bytes that clients may send ahead |
//! | `suspects.rs` | addresses whose connections break the rules |
//! | `patience.rs` | the time that a client is waited for |
//! | `routes.rs` | the service that answers a call |
//! | `side.rs` | calls that come over another port |

mod call;
mod conn;
mod frames;
mod http2;
mod incoming;
mod patience;
mod peer;
mod preface;
mod routes;
mod side;
mod suspects;
mod window;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_stream::StreamExt as _;
use tonic::transport::server::TcpIncoming;

use crate::auth::{ConnectionTenants, LastCaller};
use crate::config::Config;
use crate::drain::{Phase, bound, draining};
use crate::forward::Forwarder;
use crate::metrics::{CountedConnection, PortMetrics};
use crate::reload::Reloader;
use crate::tls::{TlsAcceptor, TlsPort, TlsSource};
use crate::wakes;
use conn::ConnectionGuard;
pub(crate) use incoming::Incoming;
#[cfg(test)]
pub(crate) use patience::AT_DRAIN;
pub(crate) use patience::{Hurry, Patience};
use peer::OpenConnection;
pub(crate) use peer::{
    ALL_FAREWELLS_BYTES, ALL_FREE_CALLS_BYTES, ALL_QUEUES_BYTES, Connections, FREE_CALL_BYTES,
    Peer, SHORT_QUEUE_BYTES,
};
use routes::ConnectionCalls;
pub(crate) use routes::{Calls, HttpAnswer, HttpResult, HttpUrl, Routes, Serve};
pub(crate) use side::{SideConnection, SidePort};
use window::AllWindows;
pub(crate) use window::{ALL_WINDOWS_BYTES, LEAST_WINDOW};

/// After a failed accept (usually: out of file descriptors) trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Pause before another connection is asked to give way, if the first one did not.
const ROOM_PAUSE: Duration = Duration::from_millis(100);

/// Time for which a connection with TLS may be silent although there are too many of those.
const TLS_GRACE: Duration = Duration::from_secs(1);

/// Time between two wake-ups of an event loop without work.
const TICK: Duration = Duration::from_secs(1);

/// A socket that was accepted, on its way to its event loop.
struct AcceptedSocket {
    socket: std::net::TcpStream,
    permit: Option<OwnedSemaphorePermit>,
    counted: CountedConnection,
    load: LoopLoad,
    peer: Peer,
    open: OpenConnection,
    at: Instant,
}

/// Counts the connections of one event loop, as long as it lives.
struct LoopLoad(Arc<AtomicUsize>);

impl LoopLoad {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for LoopLoad {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One event loop, seen by the acceptor.
struct EventLoop {
    sockets: mpsc::UnboundedSender<AcceptedSocket>,
    connections: Arc<AtomicUsize>,
}

/// The port, bound and not yet served.
pub(crate) struct Listener {
    incoming: TcpIncoming,
    address: SocketAddr,
}

impl Listener {
    /// Takes the port.
    ///
    /// # Errors
    /// If the system does not give it, usually because another process has it.
    pub(crate) fn bind(config: &Config) -> io::Result<Self> {
        let incoming = TcpIncoming::bind(config.listen)?
            // Without it an answer waits for the client's delayed ack: 23 to 47 ms.
            .with_nodelay(Some(true))
            .with_keepalive(bound(config.keepalive_interval));
        let address = incoming.local_addr()?;
        Ok(Self { incoming, address })
    }

    /// Address that it listens on, with the actual port for port 0.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Event loops at work. Dropping it stops nothing.
pub(crate) struct Transport {
    /// Closed when the last event loop has ended.
    ended: mpsc::Receiver<()>,
    running: mpsc::WeakSender<()>,
    connections: Arc<Connections>,
}

impl Transport {
    /// Starts the event loops and accepts connections until the phase is draining.
    ///
    /// # Errors
    /// If a thread or its event loop cannot be made.
    pub(crate) fn start(
        listener: Listener,
        calls: &Arc<Calls>,
        config: &Config,
        phase: &watch::Receiver<Phase>,
        port: PortMetrics,
        tls: Option<&Reloader<TlsSource>>,
    ) -> io::Result<Self> {
        let (running, ended) = mpsc::channel(1);
        let connections = Connections::new(config.max_silent_connections, config.max_calls);
        let grace = if tls.is_some() {
            TLS_GRACE
        } else {
            Duration::ZERO
        };
        let connections = Arc::new(connections.with_grace(grace));
        let settings = ConnectionSettings::new(config);
        let mut loops = Vec::new();
        for index in 0..config.workers() {
            let mut settings = settings.clone();
            settings.tls = tls.map(|tls| tls.acceptor(TlsPort::Grpc));
            let (event_loop, server) = event_loop(calls, settings, phase);
            let running = running.clone();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            std::thread::Builder::new()
                .name(format!("wald-grpc-{index}"))
                .spawn(move || {
                    runtime.spawn(wakes::run());
                    runtime.spawn(tick());
                    runtime.block_on(server);
                    drop(running);
                })?;
            loops.push(event_loop);
        }
        let permits = match config.max_connections {
            0 => None,
            most => Some(Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)))),
        };
        let acceptor = Acceptor {
            loops,
            permits,
            connections: Arc::clone(&connections),
            port,
        };
        tokio::spawn(acceptor.accept(listener.incoming, phase.clone()));
        Ok(Self {
            ended,
            running: running.downgrade(),
            connections,
        })
    }

    /// All connections.
    pub(crate) fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// The way into the services from another port. The transport does not end while a call of it is open.
    pub(crate) fn side_port(&self, calls: &Arc<Calls>) -> SidePort {
        SidePort::new(calls, &self.connections, self.running.clone())
    }

    /// Resolves when every connection is closed, after draining began.
    pub(crate) async fn ended(&mut self) {
        while self.ended.recv().await.is_some() {}
    }
}

/// Wakes its event loop every [`TICK`]. A timer that ends before every other timer of its loop makes tokio
/// write to an eventfd, and the loop's next wait then ends at once. Timers of calls last longer than a tick.
async fn tick() {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
    }
}

/// An event loop and its thread.
fn event_loop(
    calls: &Arc<Calls>,
    settings: ConnectionSettings,
    phase: &watch::Receiver<Phase>,
) -> (EventLoop, impl Future<Output = ()> + Send + 'static) {
    let (sockets, accepted) = mpsc::unbounded_channel();
    let server = serve(accepted, settings, Arc::clone(calls), phase.clone());
    let connections = Arc::new(AtomicUsize::new(0));
    let event_loop = EventLoop {
        sockets,
        connections,
    };
    (event_loop, server)
}

/// Serves on the event loop of a test.
#[cfg(test)]
pub(crate) fn serve_here(
    listener: Listener,
    calls: &Arc<Calls>,
    config: &Config,
    phase: &watch::Receiver<Phase>,
    port: PortMetrics,
) {
    let (event_loop, server) = event_loop(calls, ConnectionSettings::new(config), phase);
    tokio::spawn(server);
    let acceptor = Acceptor {
        loops: vec![event_loop],
        permits: None,
        connections: Arc::default(),
        port,
    };
    tokio::spawn(acceptor.accept(listener.incoming, phase.clone()));
}

/// Logs a failed accept and waits before the next one.
pub(crate) async fn pause_after_failed_accept(error: &std::io::Error, port: &PortMetrics) {
    tracing::warn!(
        error = error as &dyn std::error::Error,
        port = port.port(),
        "accepting connections failed; clients wait, open connections go on"
    );
    // Without a descriptor (EMFILE, ENFILE) or memory another accept would fail again. A client
    // that has gone takes nothing.
    if error.kind() != std::io::ErrorKind::ConnectionAborted {
        tokio::time::sleep(ACCEPT_PAUSE).await;
        port.waited(ACCEPT_PAUSE);
    }
}

/// Hands sockets to the event loop with the fewest, until draining begins: then the port
/// is given back and the event loops get no more.
struct Acceptor {
    loops: Vec<EventLoop>,
    /// One for each connection; `None` if their number has no bound.
    permits: Option<Arc<Semaphore>>,
    connections: Arc<Connections>,
    port: PortMetrics,
}

impl Acceptor {
    async fn accept(self, mut incoming: TcpIncoming, mut phase: watch::Receiver<Phase>) {
        let accept_all = async {
            loop {
                match incoming.next().await {
                    Some(Ok(socket)) => {
                        let permit = self.permit().await;
                        self.hand_over(socket, permit);
                    }
                    Some(Err(error)) => pause_after_failed_accept(&error, &self.port).await,
                    None => return,
                }
            }
        };
        tokio::select! {
            () = accept_all => {}
            () = draining(&mut phase) => {}
        }
        // No other comes after these.
        self.connections.ask_all_to_leave();
    }

    /// A permit for the socket that was accepted. If there is none, a connection without calls gives
    /// way; if all have calls, the socket waits.
    async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let permits = self.permits.as_ref()?;
        loop {
            if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
                return Some(permit);
            }
            self.connections.make_room();
            let begin = Instant::now();
            let freed = Arc::clone(permits).acquire_owned();
            let permit = tokio::time::timeout(ROOM_PAUSE, freed).await;
            self.port.waited(begin.elapsed());
            // The semaphore is never closed.
            if let Ok(Ok(permit)) = permit {
                return Some(permit);
            }
            tracing::warn!(
                "all of max_connections are taken, and each has calls; a new connection waits for one of \
                 them to end, and its client gets no answer"
            );
        }
    }

    fn hand_over(&self, socket: tokio::net::TcpStream, permit: Option<OwnedSemaphorePermit>) {
        // Deregisters the socket here, so that it can register with the loop that serves it.
        let Ok(socket) = socket.into_std() else {
            return;
        };
        let freest = (self.loops.iter())
            .min_by_key(|event_loop| event_loop.connections.load(Ordering::Relaxed));
        if let Some(event_loop) = freest {
            let (peer, open) = self.connections.enter();
            // Fails only if the loop has ended: then the socket is closed, which is right.
            let _ = event_loop.sockets.send(AcceptedSocket {
                socket,
                permit,
                counted: self.port.connected(),
                load: LoopLoad::new(&event_loop.connections),
                peer,
                open,
                at: Instant::now(),
            });
        }
    }
}

/// Terms on which connections are served.
#[derive(Clone)]
struct ConnectionSettings {
    /// `None`: plaintext.
    tls: Option<TlsAcceptor>,
    max_concurrent_streams: u32,
    max_local_resets: usize,
    max_header_bytes: u32,
    stream_window: u32,
    windows: AllWindows,
    /// Time from accepting a connection to its first whole request head.
    handshake_timeout: Duration,
    progress_timeout: Duration,
    keepalive_interval: Option<Duration>,
    keepalive_timeout: Duration,
    /// Age at which a client must leave. The connection is ended after the grace.
    age: Option<Duration>,
    grace: Option<Duration>,
}

impl ConnectionSettings {
    fn new(config: &Config) -> Self {
        // HTTP/2 has no larger window than this.
        let window = |bytes: u64| {
            u32::try_from(bytes)
                .unwrap_or(u32::MAX)
                .min(i32::MAX as u32)
        };
        let connection_window = window(config.connection_window_bytes.0);
        Self {
            tls: None,
            max_concurrent_streams: config.max_concurrent_streams,
            max_local_resets: config.max_local_resets,
            max_header_bytes: u32::try_from(config.max_header_bytes.0).unwrap_or(u32::MAX),
            stream_window: window(config.stream_window_bytes.0),
            windows: AllWindows::new(connection_window.max(LEAST_WINDOW)),
            handshake_timeout: config.handshake_timeout,
            progress_timeout: config.stream_progress_timeout,
            keepalive_interval: bound(config.keepalive_interval),
            keepalive_timeout: config.keepalive_timeout,
            age: bound(config.max_connection_age),
            grace: bound(config.max_connection_age_grace),
        }
    }

    fn lifetime(&self) -> Option<Duration> {
        self.age
            .zip(self.grace)
            .map(|(age, grace)| age.saturating_add(grace))
    }
}

/// The work of one event loop, until draining begins and its connections are closed.
async fn serve(
    mut accepted: mpsc::UnboundedReceiver<AcceptedSocket>,
    settings: ConnectionSettings,
    calls: Arc<Calls>,
    mut phase: watch::Receiver<Phase>,
) {
    let settings = Arc::new(settings);
    let forward = calls.forward.as_ref().map(Forwarder::pool);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = draining(&mut phase) => break,
            Some(socket) = accepted.recv() => {
                let at = socket.at;
                match ConnectionGuard::take(socket) {
                    Ok((socket, guard)) => {
                        let settings = Arc::clone(&settings);
                        let audit = calls.audit.as_ref();
                        let service = ConnectionCalls {
                            audited: audit.map(|audit| audit.peer(guard.client())),
                            calls: Arc::clone(&calls),
                            peer: guard.peer(),
                            names: None,
                            tenants: ConnectionTenants::default(),
                            last: LastCaller::default(),
                            forward: forward.clone(),
                        };
                        let phase = phase.clone();
                        connections.spawn(async move {
                            http2::serve(socket, guard, at, &settings, service, phase).await;
                        });
                    }
                    Err(error) => tracing::debug!(%error, "a connection was lost as it was accepted"),
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}
