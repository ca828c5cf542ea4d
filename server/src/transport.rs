//! gRPC over TCP: one acceptor, several event loops, and the transport's settings that
//! hyper and tonic leave open.
//!
//! ```text
//! acceptor ── socket ──▶ event loop 1 (thread, current-thread runtime, tonic)
//!    │ one permit each ─▶ event loop 2
//!    ▼ no permit: waits   ...           each connection stays on its loop
//! ```
//!
//! Event loops of one thread each, instead of one pool that steals work, halve the CPU
//! of a unary call (performance.md): a request, its engine ticket and its answer wake
//! the thread that has them in its cache.

mod conn;

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_stream::{StreamExt as _, wrappers::UnboundedReceiverStream};
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::admission::AdmissionLayer;
use crate::config::Config;
use crate::drain::{Phase, bound, draining};
use crate::metrics::CallLayer;
use crate::wakes;
use conn::Conn;
pub(crate) use conn::Peer;

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
        routes: &Routes,
        layers: &(CallLayer, AdmissionLayer),
        config: &Config,
        phase: &watch::Receiver<Phase>,
    ) -> io::Result<Self> {
        let (running, ended) = mpsc::channel(1);
        let mut loops = Vec::new();
        for index in 0..config.workers() {
            let (sockets, accepted) = mpsc::unbounded_channel();
            let connections = Arc::new(AtomicUsize::new(0));
            let server = serve(
                routes.clone(),
                layers.clone(),
                config,
                accepted,
                phase.clone(),
            );
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
            loops.push(EventLoop {
                sockets,
                connections,
            });
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

/// What one event loop runs, until draining begins and its connections are closed.
fn serve(
    routes: Routes,
    (calls, admission): (CallLayer, AdmissionLayer),
    config: &Config,
    accepted: mpsc::UnboundedReceiver<Accepted>,
    mut phase: watch::Receiver<Phase>,
) -> impl Future<Output = ()> + Send + 'static {
    let server = server(config)
        .layer(calls)
        .layer(admission)
        .add_routes(routes);
    let lifetime = bound(config.max_connection_age)
        .zip(bound(config.max_connection_age_grace))
        .map(|(age, grace)| age.saturating_add(grace));
    async move {
        let incoming = UnboundedReceiverStream::new(accepted).map(move |a| Conn::new(a, lifetime));
        let served = server
            .serve_with_incoming_shutdown(incoming, async move { draining(&mut phase).await })
            .await;
        if let Err(error) = served {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "an event loop ended"
            );
        }
    }
}

fn server(config: &Config) -> Server {
    let window = |bytes: u64| u32::try_from(bytes).ok();
    let mut server = Server::builder()
        .max_concurrent_streams(config.max_concurrent_streams)
        .http2_max_local_error_reset_streams(Some(config.max_local_resets))
        .http2_max_header_list_size(window(config.max_header_bytes.0))
        .initial_stream_window_size(window(config.stream_window_bytes.0))
        .initial_connection_window_size(window(config.connection_window_bytes.0))
        .http2_keepalive_interval(bound(config.keepalive_interval))
        .http2_keepalive_timeout(Some(config.keepalive_timeout));
    // tonic's own grace replaces the GOAWAY instead of following it; the connection
    // closes itself after the grace instead.
    if let Some(age) = bound(config.max_connection_age) {
        server = server.max_connection_age(age);
    }
    server
}
