//! The connection, and the one place where calls are repeated.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_client::HealthClient;
use wald_proto::v1::cursor_service_client::CursorServiceClient;
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::connect::{LastTlsProblem, ServerConnector};
use crate::endpoint;
use crate::error::{Error, ErrorKind, Outcome, not_connected};
use crate::retry::{Repeat, RetryPolicy};
use crate::tls::{TlsOptions, TlsSettings};

/// Deadline of calls that name none.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers stay below 1 MiB unless one record alone is larger; the server's limit on
/// records can be raised, so leave room.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// A client of one Wald server. Cheap to clone; clones share one connection, which is made
/// again when it breaks.
///
/// **The client repeats automatically**, within [`RetryPolicy`] and the deadline of the call:
/// reads, after any passing failure; appends, when the server or the transport reports that
/// nothing was applied; appends with an expected lsn (or producer), also when the connection
/// broke underway, because they cannot be applied twice. A plain append whose connection broke
/// is *not* repeated: its [`Error::outcome`] is unknown.
#[derive(Debug, Clone)]
pub struct Client {
    channel: Channel,
    last_failure: Arc<LastTlsProblem>,
    settings: Arc<ClientBuilder>,
}

/// Settings of a [`Client`].
#[derive(Debug, Clone)]
pub struct ClientBuilder {
    endpoint: String,
    connect_timeout: Duration,
    keepalive_interval: Duration,
    keepalive_timeout: Duration,
    timeout: Duration,
    silence_timeout: Duration,
    retry: RetryPolicy,
    tls: Option<TlsOptions>,
}

impl ClientBuilder {
    /// Time to make a connection. Default: 5 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Pings the server this often, also when idle, and gives the connection up if no
    /// answer comes within `timeout`. Default: 10 s, 5 s. Without it a client would never
    /// notice that the network is gone.
    pub fn keepalive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keepalive_interval = interval;
        self.keepalive_timeout = timeout;
        self
    }

    /// Deadline of calls that name none, over all their attempts. Default: 10 s. Scans
    /// have none.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Maximum silence of a scan before it counts as lost. Default: 60 s; the server sends a
    /// heartbeat after 15 s.
    pub fn silence_timeout(mut self, timeout: Duration) -> Self {
        self.silence_timeout = timeout;
        self
    }

    /// Policy for repeating calls.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Settings of TLS, for an endpoint that begins with `https://`. Default: the CAs of the
    /// system, and no certificate of the client.
    pub fn tls(mut self, options: TlsOptions) -> Self {
        self.tls = Some(options);
        self
    }

    /// Connects now. A server that requires a client certificate refuses a wrong one at the first
    /// call, because TLS 1.3 ends the client's handshake before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Connect`].
    pub async fn connect(mut self) -> Result<Client, Error> {
        let (endpoint, connector, last_failure) = self.transport()?;
        let channel = endpoint
            .connect_with_connector(connector)
            .await
            .map_err(|error| Error::new(not_connected(&error, &self.endpoint)))?;
        Ok(Client {
            channel,
            last_failure,
            settings: Arc::new(self),
        })
    }

    /// Connects with the first call. Must be called within a tokio runtime. Files of TLS are read
    /// now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`].
    pub fn connect_lazy(mut self) -> Result<Client, Error> {
        let (endpoint, connector, last_failure) = self.transport()?;
        Ok(Client {
            channel: endpoint.connect_with_connector_lazy(connector),
            last_failure,
            settings: Arc::new(self),
        })
    }

    fn transport(&mut self) -> Result<(Endpoint, ServerConnector, Arc<LastTlsProblem>), Error> {
        let complete = endpoint::complete(&self.endpoint).map_err(Error::new)?;
        self.endpoint = complete.text;
        let invalid = |why| {
            Error::new(ErrorKind::InvalidEndpoint {
                endpoint: self.endpoint.clone(),
                why,
            })
        };
        let files = match (complete.tls, &self.tls) {
            (false, None) => None,
            (false, Some(_)) => {
                return Err(invalid(
                    ": with settings of TLS it must begin with https://",
                ));
            }
            (true, options) => Some(
                TlsSettings::new(options.clone().unwrap_or_default(), &complete.host)
                    .map_err(|problem| Error::of_tls(problem, &self.endpoint))?,
            ),
        };
        let last_failure = Arc::new(LastTlsProblem::default());
        let connector =
            ServerConnector::new(files, self.connect_timeout, Arc::clone(&last_failure));
        let endpoint = Endpoint::from_shared(self.endpoint.clone()).map_err(|_| invalid(""))?;
        // tonic refuses https without its own TLS if another crate turns that on. The connector
        // ignores the scheme; calls carry the scheme of the origin.
        let origin = endpoint.uri().clone();
        let plain = format!(
            "http://{}",
            origin
                .authority()
                .map_or("", |authority| authority.as_str())
        );
        let endpoint = Endpoint::from_shared(plain).map_err(|_| invalid(""))?;
        let endpoint = endpoint
            .origin(origin)
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_timeout)
            .keep_alive_while_idle(true)
            // A scan's messages are up to 1 MiB: a few must be underway for full speed,
            // and one slow stream must not hold up the others of the connection.
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20)
            .user_agent(concat!("wald-client/", env!("CARGO_PKG_VERSION")))
            .map_err(|_| invalid(""))?;
        Ok((endpoint, connector, last_failure))
    }
}

impl Client {
    /// Connects to a server, such as [`DEFAULT_ENDPOINT`](crate::DEFAULT_ENDPOINT) or
    /// `localhost`, with default settings. The port is 6925 unless the endpoint names another.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Connect`].
    pub async fn connect(endpoint: impl Into<String>) -> Result<Self, Error> {
        Self::builder(endpoint).connect().await
    }

    /// Settings for a connection to a server.
    pub fn builder(endpoint: impl Into<String>) -> ClientBuilder {
        ClientBuilder {
            endpoint: endpoint.into(),
            connect_timeout: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
            timeout: DEFAULT_TIMEOUT,
            silence_timeout: Duration::from_secs(60),
            retry: RetryPolicy::default(),
            tls: None,
        }
    }

    /// The endpoint of the server, with scheme and port.
    pub fn endpoint(&self) -> &str {
        &self.settings.endpoint
    }

    pub(crate) fn wal(&self) -> WalServiceClient<Channel> {
        WalServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn log_service(&self) -> LogServiceClient<Channel> {
        LogServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn cursor_service(&self) -> CursorServiceClient<Channel> {
        CursorServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn ops(&self) -> OpsServiceClient<Channel> {
        OpsServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
    }

    pub(crate) fn health_service(&self) -> HealthClient<Channel> {
        HealthClient::new(self.channel.clone())
    }

    pub(crate) fn default_timeout(&self) -> Duration {
        self.settings.timeout
    }

    pub(crate) fn silence_timeout(&self) -> Duration {
        self.settings.silence_timeout
    }

    pub(crate) fn retry_policy(&self) -> &RetryPolicy {
        &self.settings.retry
    }

    pub(crate) fn error(&self, status: &Status, deadline: Duration) -> Error {
        let endpoint = &self.settings.endpoint;
        let error = Error::from_status(status, endpoint, deadline);
        let problem = match error.kind() {
            // The server refused the connection before its first byte of HTTP/2: it saw no call.
            ErrorKind::ConnectionLost(text) => self.last_failure.with_text(text),
            ErrorKind::NotSent(_) => self.last_failure.recent(),
            _ => None,
        };
        match problem {
            Some(problem) => Error::of_tls(problem, endpoint),
            None => error,
        }
    }

    /// The last failure of TLS, unless a server has answered since. Calls repeat such failures
    /// silently within their deadline.
    pub fn tls_failure(&self) -> Option<Error> {
        let problem = self.last_failure.get()?;
        Some(Error::of_tls(problem, &self.settings.endpoint))
    }

    pub(crate) fn timed_out(&self, after: Duration) -> Error {
        Error::new(ErrorKind::Timeout {
            endpoint: self.settings.endpoint.clone(),
            after,
        })
    }

    /// Makes a unary call, and repeats it as far as that is safe and `timeout` reaches.
    pub(crate) async fn call<Q, A, F, S>(
        &self,
        request: Q,
        repeat: Repeat,
        timeout: Duration,
        send: F,
    ) -> Result<A, Error>
    where
        Q: Clone,
        F: Fn(Request<Q>) -> S,
        S: Future<Output = Result<Response<A>, Status>>,
    {
        let deadline = Instant::now() + timeout;
        let mut failures = 0;
        let mut unknown = false;
        loop {
            let mut attempt = Request::new(request.clone());
            // The server must not write a request that no caller waits for any more.
            attempt.set_timeout(deadline.saturating_duration_since(Instant::now()));
            let error = match tokio::time::timeout_at(deadline, send(attempt)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => self.error(&status, timeout),
                Err(_) => self.timed_out(timeout),
            };
            failures += 1;
            let pause = self.settings.retry.pause(failures, &error);
            let last = !repeat.allows(&error)
                || failures >= self.settings.retry.max_attempts
                || Instant::now() + pause >= deadline;
            if last {
                return Err(match (repeat, unknown) {
                    (Repeat::Read, _) => error.of_read(),
                    (_, true) => error.after_unknown(),
                    (_, false) => error,
                });
            }
            unknown |= error.outcome() == Outcome::Unknown;
            tokio::time::sleep(pause).await;
        }
    }
}
