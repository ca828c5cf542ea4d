//! gRPC over TCP: one acceptor, several event loops, hyper's HTTP/2 on each connection, and
//! tonic's services behind it.
//!
//! ```text
//! acceptor ── socket ──▶ event loop 1 (thread, current-thread runtime)
//!    │ one permit each ─▶ event loop 2
//!    ▼ no permit: waits   ...           each connection stays on its loop
//! ```
//!
//! Event loops of one thread each, instead of one pool that steals work, halve the CPU
//! of a unary call (performance.md): a request, its engine ticket and its answer wake
//! the thread that has them in its cache.
//!
//! hyper calls the services itself ([`routes`]): tonic's own server has a router and layers
//! between, which cost as much as an eighth of an append, and its ways to end a connection
//! are not ours.

mod conn;
mod routes;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tonic::transport::server::TcpIncoming;

use crate::config::Config;
use crate::drain::{Phase, bound, draining};
use crate::wakes;
use conn::Conn;
pub(crate) use conn::Peer;
use routes::ConnectionCalls;
pub(crate) use routes::{Calls, HttpAnswer, HttpResult, Routes, Serve};

/// After a failed accept (usually: out of file descriptors) trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A socket that was accepted, on its way to its event loop.
struct Accepted {
    socket: std::net::TcpStream,
    permit: Option<OwnedSemaphorePermit>,
    load: Load,
}

/// Counts the connections of one event loop, as long as it lives.
struct Load(Arc<AtomicUsize>);

impl Load {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One event loop, seen by the acceptor.
struct EventLoop {
    sockets: mpsc::UnboundedSender<Accepted>,
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

    /// Where it listens, with the port that was given for port 0.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Event loops at work. Dropping it stops nothing.
pub(crate) struct Transport {
    /// Closed when the last event loop has ended.
    ended: mpsc::Receiver<()>,
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
    ) -> io::Result<Self> {
        let (running, ended) = mpsc::channel(1);
        let mut loops = Vec::new();
        for index in 0..config.workers() {
            let (event_loop, server) = event_loop(calls, config, phase);
            let running = running.clone();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            std::thread::Builder::new()
                .name(format!("wald-grpc-{index}"))
                .spawn(move || {
                    runtime.spawn(wakes::deliver());
                    runtime.block_on(server);
                    drop(running);
                })?;
            loops.push(event_loop);
        }
        let permits = match config.max_connections {
            0 => None,
            most => Some(Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)))),
        };
        tokio::spawn(accept(listener.incoming, loops, permits, phase.clone()));
        Ok(Self { ended })
    }

    /// Resolves when every connection is closed, after draining began.
    pub(crate) async fn ended(&mut self) {
        while self.ended.recv().await.is_some() {}
    }
}

/// An event loop, and what its thread runs.
fn event_loop(
    calls: &Arc<Calls>,
    config: &Config,
    phase: &watch::Receiver<Phase>,
) -> (EventLoop, impl Future<Output = ()> + Send + 'static) {
    let (sockets, accepted) = mpsc::unbounded_channel();
    let server = serve(
        accepted,
        Settings::new(config),
        Arc::clone(calls),
        phase.clone(),
    );
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
) {
    let (event_loop, server) = event_loop(calls, config, phase);
    tokio::spawn(server);
    let loops = vec![event_loop];
    tokio::spawn(accept(listener.incoming, loops, None, phase.clone()));
}

/// Hands sockets to the event loop with the fewest, until draining begins: then the port
/// is given back and the event loops get no more.
async fn accept(
    mut incoming: TcpIncoming,
    loops: Vec<EventLoop>,
    permits: Option<Arc<Semaphore>>,
    mut phase: watch::Receiver<Phase>,
) {
    let accept_all = async {
        loop {
            let permit = match &permits {
                // The semaphore is never closed.
                Some(permits) => Arc::clone(permits).acquire_owned().await.ok(),
                None => None,
            };
            match incoming.next().await {
                Some(Ok(socket)) => hand_over(socket, permit, &loops),
                Some(Err(error)) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "accepting a connection failed"
                    );
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                None => return,
            }
        }
    };
    tokio::select! {
        () = accept_all => {}
        () = draining(&mut phase) => {}
    }
}

fn hand_over(
    socket: tokio::net::TcpStream,
    permit: Option<OwnedSemaphorePermit>,
    loops: &[EventLoop],
) {
    // Deregisters the socket here, so that it can register with the loop that serves it.
    let Ok(socket) = socket.into_std() else {
        return;
    };
    let freest = loops
        .iter()
        .min_by_key(|event_loop| event_loop.connections.load(Ordering::Relaxed));
    if let Some(event_loop) = freest {
        let load = Load::new(&event_loop.connections);
        // Fails only if the loop has ended: then the socket is closed, which is right.
        let _ = event_loop.sockets.send(Accepted {
            socket,
            permit,
            load,
        });
    }
}

/// How connections are served.
#[derive(Clone)]
struct Settings {
    http2: http2::Builder<TokioExecutor>,
    /// After so long a connection is told to end, and after the grace it is ended.
    age: Option<Duration>,
    grace: Option<Duration>,
}

impl Settings {
    fn new(config: &Config) -> Self {
        let window = |bytes: u64| u32::try_from(bytes).ok();
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            // No client of gRPC reads it.
            .auto_date_header(false)
            .max_concurrent_streams(config.max_concurrent_streams)
            .max_local_error_reset_streams(config.max_local_resets)
            .initial_stream_window_size(window(config.stream_window_bytes.0))
            .initial_connection_window_size(window(config.connection_window_bytes.0))
            .keep_alive_interval(bound(config.keepalive_interval))
            .keep_alive_timeout(config.keepalive_timeout);
        if let Some(bytes) = window(config.max_header_bytes.0) {
            http2.max_header_list_size(bytes);
        }
        Self {
            http2,
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

/// What one event loop runs, until draining begins and its connections are closed.
async fn serve(
    mut accepted: mpsc::UnboundedReceiver<Accepted>,
    settings: Settings,
    calls: Arc<Calls>,
    mut phase: watch::Receiver<Phase>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = draining(&mut phase) => break,
            Some(socket) = accepted.recv() => match Conn::new(socket, settings.lifetime()) {
                Ok(conn) => {
                    let (settings, calls) = (settings.clone(), Arc::clone(&calls));
                    connections.spawn(serve_connection(conn, settings, calls, phase.clone()));
                }
                Err(error) => tracing::debug!(%error, "a connection was lost as it was accepted"),
            },
            Some(_) = connections.join_next() => {}
        }
    }
    while connections.join_next().await.is_some() {}
}

/// Serves one connection until it is closed. When draining begins, or it is of age, its client
/// is told to make no more calls (GOAWAY), and it is closed when those it has made are answered.
async fn serve_connection(
    conn: Conn,
    settings: Settings,
    calls: Arc<Calls>,
    mut phase: watch::Receiver<Phase>,
) {
    let peer = conn.peer();
    let service = ConnectionCalls { calls, peer };
    let mut connection = pin!(settings.http2.serve_connection(TokioIo::new(conn), service));
    let time_to_end = async {
        let aged = async {
            match settings.age {
                Some(age) => tokio::time::sleep(age).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = draining(&mut phase) => {}
            () = aged => {}
        }
    };
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = time_to_end => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(
            error = &error as &dyn std::error::Error,
            "a connection ended"
        );
    }
}
