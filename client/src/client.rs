//! The connection, and the one place where calls are repeated.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response, Status};
use tonic_health::pb::health_client::HealthClient;
use wald_proto::v1::Reason;
use wald_proto::v1::cursor_service_client::CursorServiceClient;
use wald_proto::v1::log_service_client::LogServiceClient;
use wald_proto::v1::ops_service_client::OpsServiceClient;
use wald_proto::v1::wal_service_client::WalServiceClient;

use crate::connect::{LastTlsProblem, ServerConnector};
use crate::dialer::Dialer;
use crate::endpoint;
use crate::error::{Error, ErrorKind, Outcome, not_connected};
use crate::retry::{Repeat, RetryPolicy};
use crate::tls::{TlsFailure, TlsOptions, TlsProblem, TlsSettings};
use crate::token::{
    CallChannel, CallHeaders, CallerStep, HiddenToken, TokenOption, TokenSource, is_loopback,
};

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
    channel: CallChannel,
    token: Option<Arc<TokenSource>>,
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
    token: Option<TokenOption>,
    allow_insecure_token: bool,
    step: Option<CallerStep>,
}

/// The connection of a client, not made yet or lazily.
struct ServerTransport {
    endpoint: Endpoint,
    connector: ServerConnector,
    last_failure: Arc<LastTlsProblem>,
    token: Option<Arc<TokenSource>>,
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

    /// The token that every call carries.
    pub fn token(mut self, token: impl AsRef<str>) -> Self {
        self.token = Some(TokenOption::fixed(token.as_ref()));
        self
    }

    /// File with the token that every call carries; white space around the token does not count.
    /// The client reads the file again at most once a second, and once when the server refuses the
    /// token. Then it repeats a call if the file has another token.
    pub fn token_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.token = Some(TokenOption::File(path.into()));
        self
    }

    /// Lets the token cross a connection without TLS to another machine, where anybody in between
    /// can take it. Default: without TLS only to loopback.
    pub fn allow_insecure_token(mut self) -> Self {
        self.allow_insecure_token = true;
        self
    }

    /// Runs before each call, as an interceptor of tonic: adds metadata, such as that of tracing,
    /// or refuses the call.
    pub fn interceptor(
        mut self,
        step: impl Fn(Request<()>) -> Result<Request<()>, Status> + Send + Sync + 'static,
    ) -> Self {
        self.step = Some(CallerStep(Arc::new(step)));
        self
    }

    /// Settings from the environment. An empty variable counts as absent.
    ///
    /// - `WALD_ENDPOINT`: default [`DEFAULT_ENDPOINT`](crate::DEFAULT_ENDPOINT).
    /// - `WALD_TLS_CA`, `WALD_TLS_CERT` and `WALD_TLS_KEY`, `WALD_TLS_SERVER_NAME`: as in [`TlsOptions`].
    /// - `WALD_TOKEN_FILE`, or else `WALD_TOKEN`: as [`token_file`](Self::token_file),
    ///   [`token`](Self::token).
    ///
    /// # Errors
    /// [`ErrorKind::Tls`] if only one of `WALD_TLS_CERT` and `WALD_TLS_KEY` is there.
    pub fn from_env() -> Result<Self, Error> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name| set(name).map(|value| value.to_string_lossy().into_owned());
        let endpoint =
            text("WALD_ENDPOINT").unwrap_or_else(|| endpoint::DEFAULT_ENDPOINT.to_owned());
        let mut tls = None::<TlsOptions>;
        if let Some(ca) = set("WALD_TLS_CA") {
            tls = Some(tls.unwrap_or_default().ca_file(ca));
        }
        match (set("WALD_TLS_CERT"), set("WALD_TLS_KEY")) {
            (None, None) => {}
            (Some(certificate), Some(key)) => {
                tls = Some(tls.unwrap_or_default().identity_files(certificate, key));
            }
            _ => {
                let detail = "WALD_TLS_CERT and WALD_TLS_KEY need each other";
                let problem = TlsProblem::new(TlsFailure::Settings, detail);
                return Err(Error::of_tls(problem, &endpoint));
            }
        }
        if let Some(name) = text("WALD_TLS_SERVER_NAME") {
            tls = Some(tls.unwrap_or_default().server_name(name));
        }
        let mut builder = Client::builder(endpoint);
        builder.tls = tls;
        builder.token = match (set("WALD_TOKEN_FILE"), text("WALD_TOKEN")) {
            (Some(path), _) => Some(TokenOption::File(path.into())),
            (None, token) => token.as_deref().map(TokenOption::fixed),
        };
        Ok(builder)
    }

    /// A client over a channel of the caller's own, such as one with a proxy or other middleware. The
    /// settings of connections and of TLS do not count then; the endpoint only names the server in errors.
    ///
    /// # Errors
    /// [`ErrorKind::Token`]: whether the channel is encrypted is not known, so that a token also
    /// needs [`allow_insecure_token`](Self::allow_insecure_token).
    pub fn over(self, channel: Channel) -> Result<Client, Error> {
        if self.token.is_some() && !self.allow_insecure_token {
            let detail = "whether a channel of one's own is encrypted is not known: allow_insecure_token says \
                          that the token may go over it"
                .to_owned();
            return Err(Error::new(ErrorKind::Token { detail }));
        }
        let token = self.token.as_ref().map(TokenSource::new).transpose()?;
        Ok(self.client(channel, Arc::default(), token.map(Arc::new)))
    }

    fn client(
        self,
        channel: Channel,
        last_failure: Arc<LastTlsProblem>,
        token: Option<Arc<TokenSource>>,
    ) -> Client {
        let headers = CallHeaders {
            token: token.clone(),
            step: self.step.clone(),
        };
        Client {
            channel: CallChannel::new(channel, headers),
            token,
            last_failure,
            settings: Arc::new(self),
        }
    }

    /// Connects now. A server that requires a client certificate refuses a wrong one at the first
    /// call, because TLS 1.3 ends the client's handshake before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Token`], [`ErrorKind::Connect`].
    pub async fn connect(mut self) -> Result<Client, Error> {
        let transport = self.transport()?;
        let channel = transport
            .endpoint
            .connect_with_connector(transport.connector)
            .await
            .map_err(|error| Error::new(not_connected(&error, &self.endpoint)))?;
        Ok(self.client(channel, transport.last_failure, transport.token))
    }

    /// Connects with the first call. Must be called within a tokio runtime. Files of TLS and of the token
    /// are read now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Token`].
    pub fn connect_lazy(mut self) -> Result<Client, Error> {
        let transport = self.transport()?;
        let channel = transport
            .endpoint
            .connect_with_connector_lazy(transport.connector);
        Ok(self.client(channel, transport.last_failure, transport.token))
    }

    /// These settings for connections without a client on top. Files of TLS and of the token are read
    /// now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Token`].
    pub fn dialer(mut self) -> Result<Dialer, Error> {
        let transport = self.transport()?;
        Ok(Dialer {
            endpoint: self.endpoint,
            address: transport.endpoint.uri().clone(),
            connector: transport.connector,
            token: transport.token,
        })
    }

    fn transport(&mut self) -> Result<ServerTransport, Error> {
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
        let token = self.token.as_ref().map(TokenSource::new).transpose()?;
        if token.is_some()
            && !complete.tls
            && !self.allow_insecure_token
            && !is_loopback(&complete.host)
        {
            let detail = format!(
                "a token must not cross plaintext to {}: use https://, or allow_insecure_token",
                self.endpoint
            );
            return Err(Error::new(ErrorKind::Token { detail }));
        }
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
        Ok(ServerTransport {
            endpoint,
            connector,
            last_failure,
            token: token.map(Arc::new),
        })
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
            token: None,
            allow_insecure_token: false,
            step: None,
        }
    }

    /// Connects to the server that the environment names, with the settings of
    /// [`ClientBuilder::from_env`].
    ///
    /// # Errors
    /// As [`ClientBuilder::connect`].
    pub async fn from_env() -> Result<Self, Error> {
        ClientBuilder::from_env()?.connect().await
    }

    /// The endpoint of the server, with scheme and port.
    pub fn endpoint(&self) -> &str {
        &self.settings.endpoint
    }

    pub(crate) fn wal(&self) -> WalServiceClient<CallChannel> {
        WalServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER_BYTES)
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

    /// A request that carries the token, and the token.
    pub(crate) fn request<Q>(&self, message: Q) -> (Request<Q>, Option<HiddenToken>) {
        let mut request = Request::new(message);
        let used = self
            .token
            .as_ref()
            .map(|token| token.put_into(&mut request));
        (request, used)
    }

    /// Whether to send a request again after this error. A server that refused the token applied
    /// nothing: the request is sent again once there is another token. `waits`: producers and
    /// followers also wait until an expired one is replaced in its file.
    pub(crate) fn allows(
        &self,
        repeat: Repeat,
        error: &Error,
        used: Option<&HiddenToken>,
        waits: bool,
    ) -> bool {
        let expired = match error.reason() {
            Some(Reason::CredentialExpired) => true,
            Some(Reason::BadCredential) => false,
            _ => return repeat.allows(error),
        };
        match (&self.token, used) {
            (Some(token), Some(used)) => {
                token.changed(used) || (waits && expired && token.follows_a_file())
            }
            _ => false,
        }
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
            let (mut attempt, used) = self.request(request.clone());
            // The server must not write a request that no caller waits for any more.
            attempt.set_timeout(deadline.saturating_duration_since(Instant::now()));
            let error = match tokio::time::timeout_at(deadline, send(attempt)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => self.error(&status, timeout),
                Err(_) => self.timed_out(timeout),
            };
            failures += 1;
            let pause = self.settings.retry.pause(failures, &error);
            let last = !self.allows(repeat, &error, used.as_ref(), false)
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
