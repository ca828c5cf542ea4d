//! The servers of a client, and the current one, which the next attempt goes to.
//!
//! ```text
//!   list:  a ──▶ b ──▶ c        no connection, MOVED without an owner, ...: the next one
//!          ▲───────────┘        MOVED with an owner: the owner, in the list or not
//! ```
//!
//! Only one server of several that share a store owns it. The others answer MOVED, or forward a call
//! and name the owner in the answer ([`ClientNodes::approach`]). An attempt takes the current server
//! and names it when it ends: an attempt that is late moves nothing.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use wald_proto::v1::cursor_service_client::CursorServiceClient;
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;
use wald_proto::v1::{self, Reason};

use crate::client::CallAttempt;
use crate::connect::LastTlsProblem;
use crate::error::{Error, ErrorKind};
use crate::sent::GatedChannel;
use crate::shared::{AppendContent, NoAnswer, SharedAppends};
use crate::token::{CallChannel, CallHeaders};
use crate::transport::NodeTransport;

/// Answers stay below 1 MiB unless one record alone is larger; the server's limit on
/// records can be raised, so leave room.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The owner of the store, in the headers of an answer that came through another server.
pub(crate) const OWNER_HEADER: &str = "wald-owner";
/// Time between two attempts to reach such an owner, if the first one fails.
const APPROACH_PAUSE: Duration = Duration::from_secs(60);

/// One server, with its channel. Errors name it.
pub(crate) struct ClientNode {
    endpoint: String,
    channel: CallChannel,
    last_failure: Arc<LastTlsProblem>,
    /// Absent if each append is a call of its own.
    shared: Option<SharedAppends>,
}

impl fmt::Debug for ClientNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.endpoint)
    }
}

impl ClientNode {
    pub(crate) fn new(
        endpoint: String,
        channel: Channel,
        headers: CallHeaders,
        last_failure: Arc<LastTlsProblem>,
        shares_appends: bool,
    ) -> Self {
        let channel = CallChannel::new(GatedChannel(channel), headers);
        let shared = || SharedAppends::new(wal(&channel), HealthClient::new(channel.clone()));
        Self {
            endpoint,
            shared: shares_appends.then(shared),
            channel,
            last_failure,
        }
    }

    /// One attempt of an append: on the stream that appends share, or as a call of its own.
    pub(crate) async fn append(
        self: Arc<Self>,
        mut attempt: CallAttempt<Arc<AppendContent>>,
    ) -> Result<Response<v1::AppendSessionResponse>, Status> {
        if let Some(shared) = &self.shared
            && !attempt.message.is_large()
        {
            attempt = match shared.send(attempt).await {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::Failed(status)) => return Err(status),
                Err(NoAnswer::Unary(attempt)) => attempt,
            };
        }
        // Boxed: it is large, and nearly all appends go by the stream.
        Box::pin(self.append_alone(attempt)).await
    }

    async fn append_alone(
        &self,
        attempt: CallAttempt<Arc<AppendContent>>,
    ) -> Result<Response<v1::AppendSessionResponse>, Status> {
        let request = attempt.into_request();
        let (head, extensions, content) = request.into_parts();
        let request = Request::from_parts(head, extensions, ());
        Ok(match Arc::unwrap_or_clone(content) {
            AppendContent::Record(append) => {
                let answer = self.wal().append(request.map(|()| append)).await?;
                answer.map(|ack| v1::AppendSessionResponse {
                    append_ack: Some(ack),
                    ..Default::default()
                })
            }
            AppendContent::Batch(batch) => {
                let answer = self.wal().append_batch(request.map(|()| batch)).await?;
                answer.map(|ack| v1::AppendSessionResponse {
                    ack: Some(ack),
                    ..Default::default()
                })
            }
        })
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) fn wal(&self) -> WalServiceClient<CallChannel> {
        wal(&self.channel)
    }

    pub(crate) fn log_service(&self) -> LogServiceClient<CallChannel> {
        LogServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn cursor_service(&self) -> CursorServiceClient<CallChannel> {
        CursorServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn ops(&self) -> OpsServiceClient<CallChannel> {
        OpsServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn health_service(&self) -> HealthClient<CallChannel> {
        HealthClient::new(self.channel.clone())
    }

    pub(crate) fn error(&self, status: &Status, deadline: Duration) -> Error {
        let error = Error::from_status(status, &self.endpoint, deadline);
        let problem = match error.kind() {
            // The server refused the connection before its first byte of HTTP/2: it saw no call.
            ErrorKind::ConnectionLost(text) => self.last_failure.with_text(text),
            ErrorKind::NotSent(_) => self.last_failure.recent(),
            _ => None,
        };
        match problem {
            Some(problem) => Error::of_tls(problem, &self.endpoint),
            None => error,
        }
    }

    /// Whether this server answers within `timeout` that it serves.
    async fn serves(&self, timeout: Duration) -> bool {
        let mut health = self.health_service();
        let check = health.check(HealthCheckRequest::default());
        let answer = tokio::time::timeout(timeout, check).await;
        answer.is_ok_and(|answer| {
            answer.is_ok_and(|answer| answer.get_ref().status() == ServingStatus::Serving)
        })
    }

    pub(crate) fn timed_out(&self, after: Duration) -> Error {
        Error::new(ErrorKind::Timeout {
            endpoint: self.endpoint.clone(),
            after,
        })
    }

    pub(crate) fn tls_failure(&self) -> Option<Error> {
        let problem = self.last_failure.get()?;
        Some(Error::of_tls(problem, &self.endpoint))
    }
}

fn wal(channel: &CallChannel) -> WalServiceClient<CallChannel> {
    WalServiceClient::new(channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
}

/// The server of the next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextNode {
    /// The one that failed.
    Same,
    /// Another one, which may do no better.
    Other,
    /// The owner of the store, as the one that failed names it.
    Owner,
}

/// The servers of a client. It keeps a channel for each server of the list, and one for an owner
/// outside of the list while that is the current server.
pub(crate) struct ClientNodes {
    listed: Vec<Arc<ClientNode>>,
    current: Mutex<Arc<ClientNode>>,
    /// Time from which on an owner may be approached.
    next_approach: Mutex<Instant>,
    /// None: the only server is never left.
    transport: Option<NodeTransport>,
}

impl fmt::Debug for ClientNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientNodes")
            .field("listed", &self.listed)
            .field("current", &self.current())
            .finish_non_exhaustive()
    }
}

impl ClientNodes {
    /// One server that is never left, such as that of a caller's own channel.
    pub(crate) fn only(node: Arc<ClientNode>) -> Self {
        Self {
            listed: Vec::new(),
            current: Mutex::new(node),
            next_approach: Mutex::new(Instant::now()),
            transport: None,
        }
    }

    /// The servers at these endpoints, not connected yet. The first one is current.
    ///
    /// # Errors
    /// As [`NodeTransport::lazy`].
    pub(crate) fn new(endpoints: &[String], transport: NodeTransport) -> Result<Self, Error> {
        let listed = endpoints
            .iter()
            .map(|endpoint| transport.lazy(endpoint).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let none = || {
            let (endpoint, why) = (String::new(), "");
            Error::new(ErrorKind::InvalidEndpoint { endpoint, why })
        };
        let first = listed.first().ok_or_else(none)?;
        Ok(Self {
            current: Mutex::new(Arc::clone(first)),
            next_approach: Mutex::new(Instant::now()),
            listed,
            transport: Some(transport),
        })
    }

    /// Connects to the first server of the list that accepts a connection, which becomes current.
    ///
    /// # Errors
    /// The failure of the last server.
    pub(crate) async fn connect(&mut self) -> Result<(), Error> {
        let Some(transport) = &self.transport else {
            return Ok(());
        };
        let mut connected = Ok(());
        for node in &mut self.listed {
            match transport.connect(&node.endpoint).await {
                Ok(open) => {
                    *node = Arc::new(open);
                    self.current = Mutex::new(Arc::clone(node));
                    return Ok(());
                }
                Err(error) => connected = Err(error),
            }
        }
        connected
    }

    /// Number of servers in the list, at least 1.
    pub(crate) fn count(&self) -> usize {
        self.listed.len().max(1)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<ClientNode>> {
        lock(&self.current)
    }

    pub(crate) fn current(&self) -> Arc<ClientNode> {
        Arc::clone(&self.lock())
    }

    /// Takes note of an attempt that failed: a server that cannot serve now is left, unless another
    /// attempt has left it since.
    pub(crate) fn leave(&self, failed: &Arc<ClientNode>, error: &Error) -> NextNode {
        let Some(transport) = self.transport.as_ref().filter(|_| cannot_serve(error)) else {
            return NextNode::Same;
        };
        let owner = error.fact("owner").filter(|owner| !owner.is_empty());
        let mut current = self.lock();
        if !Arc::ptr_eq(&current, failed) {
            return match owner {
                Some(_) => NextNode::Owner,
                None => NextNode::Other,
            };
        }
        let owner = owner.and_then(|owner| self.owner(transport, owner, failed));
        let next = match owner {
            Some(owner) => {
                *current = owner;
                return NextNode::Owner;
            }
            None => self.after(failed),
        };
        match Arc::ptr_eq(&next, failed) {
            true => NextNode::Same,
            false => {
                *current = next;
                NextNode::Other
            }
        }
    }

    /// Takes note of an answer of `through`. If it came from an owner that `through` only forwards
    /// to, later attempts go to the owner itself, once that one has answered. Until then they stay:
    /// the owner may be out of this client's reach, behind a balancer or a tunnel.
    pub(crate) fn approach(self: &Arc<Self>, through: &Arc<ClientNode>, headers: &MetadataMap) {
        let (Some(address), Some(transport)) = (headers.get(OWNER_HEADER), &self.transport) else {
            return;
        };
        let now = Instant::now();
        {
            let mut next = lock(&self.next_approach);
            if now < *next || !Arc::ptr_eq(&self.lock(), through) {
                return;
            }
            *next = now + APPROACH_PAUSE;
        }
        let address = address.to_str().unwrap_or_default();
        let Some(owner) = self.owner(transport, address, through) else {
            return;
        };
        let (nodes, through) = (Arc::clone(self), Arc::clone(through));
        let timeout = transport.connect_timeout;
        tokio::spawn(async move {
            if owner.serves(timeout).await {
                *lock(&nodes.next_approach) = now;
                let mut current = nodes.lock();
                if Arc::ptr_eq(&current, &through) {
                    *current = owner;
                }
            }
        });
    }

    /// The server at an address that `failed` names as the owner. None if that is `failed` itself,
    /// or a server that these settings do not fit.
    fn owner(
        &self,
        transport: &NodeTransport,
        address: &str,
        failed: &ClientNode,
    ) -> Option<Arc<ClientNode>> {
        let endpoint = transport.endpoint_of(address)?;
        let is_at = |node: &ClientNode| node.endpoint.eq_ignore_ascii_case(&endpoint);
        if is_at(failed) {
            return None;
        }
        match self.listed.iter().find(|node| is_at(node)) {
            Some(listed) => Some(Arc::clone(listed)),
            None => transport.lazy(&endpoint).ok().map(Arc::new),
        }
    }

    /// The next server of the list, in a ring. After an owner outside of the list: the first one.
    fn after(&self, failed: &Arc<ClientNode>) -> Arc<ClientNode> {
        let place = self
            .listed
            .iter()
            .position(|node| Arc::ptr_eq(node, failed));
        let next = place.map_or(0, |place| (place + 1) % self.listed.len());
        Arc::clone(self.listed.get(next).unwrap_or(failed))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether another server may do better: this one starts, stops, does not own the store, has lost
/// its bucket and perhaps the store with it, or there is no connection to it.
fn cannot_serve(error: &Error) -> bool {
    match error.reason() {
        Some(Reason::Moved | Reason::Starting | Reason::Draining | Reason::BucketDown) => true,
        Some(_) => false,
        None => error.code() == Code::Unavailable,
    }
}
