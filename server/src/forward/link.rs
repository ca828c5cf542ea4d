//! Connections of one event loop to the owner of the store.
//!
//! A link is made by the first call that needs it. It ends when the owner has another term or this node becomes the
//! owner, when the owner does not answer a ping, and when it was idle for a minute.

use std::future::{Future, pending};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

use super::Forwarder;
use super::stream::ForwardedPiece;
use crate::serve::StoreOwner;

/// Bytes of an answer that the owner may send ahead of its client.
pub(super) const STREAM_WINDOW: u32 = 64 << 10;
/// Maximum number of calls on one link. Their windows together are the window of the link: slow clients do not stop the
/// answers of others.
const LINK_CALLS: u16 = 128;
/// Maximum number of links. An owner may take fewer calls on each.
const MOST_LINKS: usize = crate::plan::LINKS_OF_LOOP;
const LINK_WINDOW: u32 = STREAM_WINDOW * LINK_CALLS as u32;
/// Maximum size of the head and of the trailers of an answer, bytes.
const MOST_HEAD: u32 = 64 << 10;
/// Maximum bytes of one call that wait for the socket of a link.
const QUEUE_BYTES: usize = 64 << 10;
/// Maximum time to make a link.
const CONNECT: Duration = Duration::from_secs(2);
/// Time after which a link without calls ends, and the pause between two looks for it.
const IDLE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_secs(10);

/// Longest pause between two pings, and longest wait for an answer. A network that swallows packets holds calls up for so long;
/// their clients may have another way to the owner.
const PING_PAUSE: Duration = Duration::from_secs(2);
const PONG_TIME: Duration = Duration::from_secs(5);

/// A byte stream to the owner.
trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

type LinkConnection = Connection<Box<dyn Socket>, ForwardedPiece>;

/// A connection to the owner.
pub(super) struct OwnerLink {
    owner: StoreOwner,
    requests: SendRequest<ForwardedPiece>,
    calls: AtomicUsize,
    used: Mutex<Instant>,
}

impl OwnerLink {
    /// Counts one more call, if the link has room for it.
    fn enter(self: &Arc<Self>) -> Option<OpenOwnerLink> {
        let most = self
            .requests
            .current_max_send_streams()
            .clamp(1, LINK_CALLS.into());
        let before = self.calls.fetch_add(1, Ordering::Relaxed);
        let open = OpenOwnerLink(Arc::clone(self));
        (before < most).then_some(open)
    }

    fn is_idle(&self) -> bool {
        self.calls.load(Ordering::Relaxed) == 0 && self.used.lock().elapsed() >= IDLE
    }
}

/// A link with one call on it.
pub(super) struct OpenOwnerLink(Arc<OwnerLink>);

impl OpenOwnerLink {
    pub(super) fn requests(&self) -> SendRequest<ForwardedPiece> {
        self.0.requests.clone()
    }
}

impl Drop for OpenOwnerLink {
    fn drop(&mut self) {
        *self.0.used.lock() = Instant::now();
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A link that is being made; `None` if the owner is out of reach. All calls that need it wait together.
type Dialing = Shared<BoxFuture<'static, Option<Arc<OwnerLink>>>>;

#[derive(Default)]
struct Links {
    open: Vec<Arc<OwnerLink>>,
    dialing: Option<(StoreOwner, Dialing)>,
}

/// The links of one event loop.
pub(crate) struct ForwardPool {
    pub(super) forwarder: Arc<Forwarder>,
    links: Mutex<Links>,
}

impl ForwardPool {
    pub(super) fn new(forwarder: &Arc<Forwarder>) -> Arc<Self> {
        Arc::new(Self {
            forwarder: Arc::clone(forwarder),
            links: Mutex::default(),
        })
    }

    /// A link to the owner with a place for a call. `None` if the owner is out of reach, or if all links are full.
    pub(super) async fn link(self: &Arc<Self>, owner: &StoreOwner) -> Option<OpenOwnerLink> {
        loop {
            let dialing = {
                let mut links = self.links.lock();
                if let Some(open) = links.enter(owner) {
                    return Some(open);
                }
                if links.open.len() >= MOST_LINKS {
                    return None;
                }
                match &links.dialing {
                    Some((to, dialing)) if to.is_same(owner) => dialing.clone(),
                    _ => {
                        let dialing = self.dial(owner);
                        links.dialing = Some((owner.clone(), dialing.clone()));
                        dialing
                    }
                }
            };
            if let Some(open) = dialing.await?.enter() {
                return Some(open);
            }
        }
    }

    /// Takes a link out, which ends with its last call.
    pub(super) fn remove(&self, link: &OpenOwnerLink) {
        self.remove_link(&Arc::downgrade(&link.0));
    }

    fn remove_link(&self, link: &Weak<OwnerLink>) {
        let links = &mut self.links.lock().open;
        links.retain(|other| !Weak::ptr_eq(&Arc::downgrade(other), link));
    }

    /// Makes a link, in a task of its own: a call that is given up does not stop it.
    fn dial(self: &Arc<Self>, owner: &StoreOwner) -> Dialing {
        let (pool, owner) = (Arc::clone(self), owner.clone());
        let task = tokio::spawn(async move {
            let made = timeout(CONNECT, pool.connect(&owner)).await;
            let made = made.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            let mut links = pool.links.lock();
            if (links.dialing.as_ref()).is_some_and(|(to, _)| to.is_same(&owner)) {
                links.dialing = None;
            }
            match made {
                Ok((requests, connection, pings)) => {
                    let link = Arc::new(OwnerLink {
                        owner: owner.clone(),
                        requests,
                        calls: AtomicUsize::new(0),
                        used: Mutex::new(Instant::now()),
                    });
                    links.open.push(Arc::clone(&link));
                    let (pool, weak) = (Arc::downgrade(&pool), Arc::downgrade(&link));
                    tokio::spawn(drive(connection, pings, owner, pool, weak));
                    Some(link)
                }
                Err(why) => {
                    tracing::warn!(
                        owner = owner.endpoint,
                        why,
                        "cannot connect to the owner of the store; clients are sent there themselves"
                    );
                    None
                }
            }
        });
        task.map(|made| made.ok().flatten()).boxed().shared()
    }

    async fn connect(
        &self,
        owner: &StoreOwner,
    ) -> Result<
        (
            SendRequest<ForwardedPiece>,
            LinkConnection,
            Option<PingPong>,
        ),
        String,
    > {
        let (host, port) = owner
            .endpoint
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)))
            .ok_or("the address is not HOST:PORT")?;
        // An IPv6 address has brackets beside a port alone.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let socket = TcpStream::connect((host, port)).await;
        let socket = socket.map_err(|error| error.to_string())?;
        socket
            .set_nodelay(true)
            .map_err(|error| error.to_string())?;
        let socket: Box<dyn Socket> = match self.forwarder.tls.clone() {
            None => Box::new(socket),
            Some(tls) => {
                let terms = tokio::task::spawn_blocking(move || tls.terms()).await;
                let terms = terms.map_err(|error| error.to_string())??;
                let name = ServerName::try_from(host.to_owned());
                let name = name.map_err(|error| error.to_string())?;
                let stream = TlsConnector::from(Arc::new(terms)).connect(name, socket);
                Box::new(stream.await.map_err(|error| format!("TLS: {error}"))?)
            }
        };
        let handshake = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(LINK_WINDOW)
            .initial_max_send_streams(LINK_CALLS.into())
            .max_header_list_size(MOST_HEAD)
            .max_send_buffer_size(QUEUE_BYTES)
            .enable_push(false)
            // The windows bound the bytes of an answer.
            .data_frame_budget(usize::MAX)
            .handshake::<_, ForwardedPiece>(socket);
        let (requests, mut connection) = handshake.await.map_err(|error| error.to_string())?;
        // An owner that refuses the certificate of this node, or wants TLS, shows it only now. No call was sent yet, so its
        // client learns for certain that nothing was applied.
        let mut pings = connection.ping_pong();
        if let Some(pings) = &mut pings {
            let ponged = pings.ping(Ping::opaque());
            let end = tokio::select! {
                ended = &mut connection => Some(ended.err()),
                ponged = ponged => ponged.err().map(Some),
            };
            if let Some(error) = end {
                let error = error.map_or("it closed the connection".to_owned(), |error| {
                    error.to_string()
                });
                return Err(match self.forwarder.tls {
                    Some(_) => error,
                    None => format!("it does not answer in plaintext: {error}"),
                });
            }
        }
        Ok((requests, connection, pings))
    }
}

impl Links {
    /// A place on a link to the owner. Links to earlier owners go.
    fn enter(&mut self, owner: &StoreOwner) -> Option<OpenOwnerLink> {
        self.open.retain(|link| link.owner.is_same(owner));
        self.open.iter().find_map(OwnerLink::enter)
    }
}

/// Moves the bytes of a link until it ends.
async fn drive(
    connection: LinkConnection,
    pings: Option<PingPong>,
    owner: StoreOwner,
    pool: Weak<ForwardPool>,
    link: Weak<OwnerLink>,
) {
    let Some(forwarder) = pool.upgrade().map(|pool| Arc::clone(&pool.forwarder)) else {
        return;
    };
    let mut connection = pin!(connection);
    let mut silent = pin!(silence(&forwarder, pings));
    let mut moved = pin!(superseded(&forwarder, &owner));
    let mut looks = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(error, owner = owner.endpoint, "a connection to the owner ended");
                }
                break;
            }
            () = &mut silent => {
                tracing::warn!(owner = owner.endpoint, "the owner of the store answers no ping; its calls end");
                break;
            }
            () = &mut moved => break,
            _ = looks.tick() => {
                let is_idle = link.upgrade().is_some_and(|link| link.is_idle());
                if is_idle && let Some(pool) = pool.upgrade() {
                    // Without a handle the connection closes in order.
                    pool.remove_link(&link);
                }
            }
        }
    }
    if let Some(pool) = pool.upgrade() {
        pool.remove_link(&link);
    }
}

/// Resolves when another node owns the store, or this one.
async fn superseded(forwarder: &Forwarder, owner: &StoreOwner) {
    let mut seen = forwarder.node.owner.clone();
    let is_other = |seen: &StoreOwner| {
        seen.term != owner.term || !(seen.endpoint.is_empty() || seen.endpoint == owner.endpoint)
    };
    // Fails once this node is no stand-by any more.
    let _ = seen
        .wait_for(|seen| seen.as_ref().is_none_or(is_other))
        .await;
}

/// Resolves when the owner has not answered a ping in time.
fn silence(
    forwarder: &Forwarder,
    pings: Option<PingPong>,
) -> impl Future<Output = ()> + Send + use<> {
    let (interval, limit) = (forwarder.keepalive_interval, forwarder.keepalive_timeout);
    async move {
        let (Some(interval), Some(mut pings)) = (interval, pings) else {
            return pending().await;
        };
        let (interval, limit) = (interval.min(PING_PAUSE), limit.min(PONG_TIME));
        loop {
            tokio::time::sleep(interval).await;
            match timeout(limit, pings.ping(Ping::opaque())).await {
                Ok(Ok(_)) => {}
                Err(_) => return,
                // The connection has ended, and says so itself.
                Ok(Err(_)) => return pending().await,
            }
        }
    }
}

/// Bytes without room of their own.
pub(super) fn nothing() -> ForwardedPiece {
    ForwardedPiece::new(Bytes::new(), None)
}
