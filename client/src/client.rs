//! The connection, and the one place where calls are repeated.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};
use wald_proto::v1::Reason;

use crate::dialer::Dialer;
use crate::endpoint;
use crate::error::{Error, ErrorKind, Outcome};
use crate::nodes::{ClientNode, ClientNodes, NextNode};
use crate::retry::{FailedAttempts, Repeat, RetryPolicy, after};
use crate::sent::SendGate;
use crate::tls::{TlsFailure, TlsOptions, TlsProblem, TlsSettings};
use crate::token::{AUTHORIZATION, CallHeaders, CallerStep, TokenHeader, TokenOption, TokenSource};
use crate::transport::NodeTransport;

/// Deadline of calls that name none.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// One attempt of a unary call.
pub(crate) struct CallAttempt<Q> {
    pub(crate) message: Q,
    pub(crate) token: Option<TokenHeader>,
    pub(crate) gate: SendGate,
    deadline: Instant,
}

impl<Q> CallAttempt<Q> {
    /// As a call of its own.
    pub(crate) fn into_request(self) -> Request<Q> {
        let mut request = with_token(self.message, self.token);
        // The server must not write a request that no caller waits for any more.
        request.set_timeout(self.deadline.saturating_duration_since(Instant::now()));
        request.extensions_mut().insert(self.gate);
        request
    }
}

fn with_token<Q>(message: Q, token: Option<TokenHeader>) -> Request<Q> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert(AUTHORIZATION, token);
    }
    request
}

/// A client of one Wald server, or of several that share a store. Cheap to clone; clones share
/// one connection, which is made again when it breaks.
///
/// **The client repeats automatically**, within [`RetryPolicy`] and the deadline of the call:
/// reads, after any passing failure; appends, when the server or the transport reports that
/// nothing was applied; appends with an expected lsn (or producer), also when the connection
/// broke underway, because they cannot be applied twice. A plain append whose connection broke
/// is *not* repeated: its [`Error::outcome`] is unknown.
///
/// **Several servers.** An endpoint may name several servers with commas, such as
/// `https://a,https://b`. One of them owns the store. The client talks to one server at a time,
/// and goes on to another one before it repeats a call:
///
/// - MOVED with an `owner`: to the owner, in the list or not, at once;
/// - MOVED without one, no connection, UNAVAILABLE from in between, STARTING, DRAINING, BUCKET_DOWN:
///   to the next server of the list, after the usual pause.
///
/// If a server answers for the owner, the client calls the owner itself as soon as it can reach it.
///
/// The client uses TLS with an owner as with every server: its certificate must name its host,
/// unless [`TlsOptions::server_name`] gives another name. Token and client certificate go to the
/// owner, too.
#[derive(Debug, Clone)]
pub struct Client {
    nodes: Arc<ClientNodes>,
    token: Option<Arc<TokenSource>>,
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
    share_appends: bool,
}

impl ClientBuilder {
    /// The endpoint, instead of the one given before.
    pub fn endpoint(mut self, endpoint: impl Into<String>) -> Self {
        self.endpoint = endpoint.into();
        self
    }

    /// Time to make a connection to one server. Default: 5 s.
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

    /// Whether the appends of this client share a stream for each server. Default: true, which costs client and server
    /// much less than a call for each append, if several are made at the same time. Turn it off for a proxy that does
    /// not pass streams on. Appends of more than 64 KiB are always calls of their own, as are all appends of a client
    /// with an [`interceptor`](Self::interceptor) or [`over`](Self::over) a channel of the caller's own.
    pub fn share_appends(mut self, share: bool) -> Self {
        self.share_appends = share;
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
    /// - `WALD_ENDPOINT`: one server, or several with commas. Default:
    ///   [`DEFAULT_ENDPOINT`](crate::DEFAULT_ENDPOINT).
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
    /// The client never leaves the channel: it repeats a call after MOVED there, after the usual pause.
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
        let headers = self.headers()?;
        let token = headers.token.clone();
        let node = ClientNode::new(
            self.endpoint.clone(),
            channel,
            headers,
            Arc::default(),
            false,
        );
        Ok(self.client(ClientNodes::only(Arc::new(node)), token))
    }

    fn client(self, nodes: ClientNodes, token: Option<Arc<TokenSource>>) -> Client {
        Client {
            nodes: Arc::new(nodes),
            token,
            settings: Arc::new(self),
        }
    }

    /// Connects now: to the first server of a list that accepts a connection. A server that requires a
    /// client certificate refuses a wrong one at the first call, because TLS 1.3 ends the client's
    /// handshake before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Token`], [`ErrorKind::Connect`].
    /// Without a connection to any server of a list: the failure of the last one.
    pub async fn connect(self) -> Result<Client, Error> {
        let (endpoints, transport) = self.transport()?;
        let token = transport.headers.token.clone();
        let mut nodes = ClientNodes::new(&endpoints, transport)?;
        nodes.connect().await?;
        Ok(self.client(nodes, token))
    }

    /// Connects with the first call. Must be called within a tokio runtime. Files of TLS and of the token
    /// are read now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Token`].
    pub fn connect_lazy(self) -> Result<Client, Error> {
        let (endpoints, transport) = self.transport()?;
        let token = transport.headers.token.clone();
        Ok(self.client(ClientNodes::new(&endpoints, transport)?, token))
    }

    /// These settings for connections to one server without a client on top. Files of TLS and of the
    /// token are read now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], also for several servers, [`ErrorKind::Tls`],
    /// [`ErrorKind::Token`].
    pub fn dialer(self) -> Result<Dialer, Error> {
        let (endpoints, transport) = self.transport()?;
        let [endpoint] = endpoints.as_slice() else {
            return Err(self.invalid(": bare connections go to one server"));
        };
        let server = transport.server(endpoint)?;
        Ok(Dialer {
            address: server.endpoint.uri().clone(),
            endpoint: server.text,
            connector: server.connector,
            token: transport.headers.token,
        })
    }

    fn invalid(&self, why: &'static str) -> Error {
        Error::new(ErrorKind::InvalidEndpoint {
            endpoint: self.endpoint.clone(),
            why,
        })
    }

    fn headers(&self) -> Result<CallHeaders, Error> {
        let token = self.token.as_ref().map(TokenSource::new).transpose()?;
        Ok(CallHeaders {
            token: token.map(Arc::new),
            step: self.step.clone(),
        })
    }

    /// The endpoints of the servers, at least one, and the settings to reach them.
    fn transport(&self) -> Result<(Vec<String>, NodeTransport), Error> {
        let endpoints = endpoint::complete_endpoints(&self.endpoint)?;
        // All have one scheme.
        let secure = endpoints.iter().all(|text| text.starts_with("https://"));
        let tls = match (secure, &self.tls) {
            (false, None) => None,
            (false, Some(_)) => {
                let why = ": with settings of TLS it must begin with https://";
                return Err(self.invalid(why));
            }
            (true, options) => {
                let files = TlsSettings::new(options.clone().unwrap_or_default());
                let files = files.map_err(|problem| Error::of_tls(problem, &self.endpoint))?;
                Some(Arc::new(files))
            }
        };
        let transport = NodeTransport {
            tls,
            headers: self.headers()?,
            allow_insecure_token: self.allow_insecure_token,
            connect_timeout: self.connect_timeout,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            shares_appends: self.share_appends,
        };
        Ok((endpoints, transport))
    }
}

impl Client {
    /// Connects to a server, such as [`DEFAULT_ENDPOINT`](crate::DEFAULT_ENDPOINT) or
    /// `localhost`, with default settings. The port is 6925 unless the endpoint names another.
    /// Several servers that share a store have commas between them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidEndpoint`], [`ErrorKind::Tls`], [`ErrorKind::Connect`].
    pub async fn connect(endpoint: impl Into<String>) -> Result<Self, Error> {
        Self::builder(endpoint).connect().await
    }

    /// Settings for connections to a server, or to several with commas between them.
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
            share_appends: true,
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

    /// The endpoint of the current server, with scheme and port.
    pub fn endpoint(&self) -> String {
        self.node().endpoint().to_owned()
    }

    /// The last failure of TLS with the current server, unless it has answered since. Calls repeat such
    /// failures silently within their deadline.
    pub fn tls_failure(&self) -> Option<Error> {
        self.node().tls_failure()
    }

    /// The current server. Each attempt takes it once.
    pub(crate) fn node(&self) -> Arc<ClientNode> {
        self.nodes.current()
    }

    /// This client for calls that mean one server, not the store: it stays at the current one.
    pub(crate) fn pinned(&self) -> Self {
        Self {
            nodes: Arc::new(ClientNodes::only(self.node())),
            ..self.clone()
        }
    }

    /// Takes note of an answer of a server, and maybe goes on to the owner that it came from.
    pub(crate) fn approach(&self, node: &Arc<ClientNode>, headers: &MetadataMap) {
        self.nodes.approach(node, headers);
    }

    /// Takes note of an attempt that failed, and maybe goes on to another server.
    pub(crate) fn leave(&self, node: &Arc<ClientNode>, error: &Error) -> NextNode {
        self.nodes.leave(node, error)
    }

    /// Takes note of an attempt that failed. Returns the pause before the next one.
    pub(crate) fn pause_after(
        &self,
        node: &Arc<ClientNode>,
        error: &Error,
        failures: &mut FailedAttempts,
    ) -> Duration {
        let next = self.leave(node, error);
        failures.pause(&self.settings.retry, error, next)
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

    /// The token of the next attempt, read again if its file is due.
    pub(crate) fn token_header(&self) -> Option<TokenHeader> {
        self.token.as_ref().map(|token| token.header())
    }

    /// A request of a stream that carries the token, and the token.
    pub(crate) fn request<Q>(&self, message: Q) -> (Request<Q>, Option<TokenHeader>) {
        let token = self.token_header();
        (with_token(message, token.clone()), token)
    }

    /// Whether to send a request again after this error. A server that refused the token applied
    /// nothing: the request is sent again once there is another token. `waits`: producers and
    /// followers also wait until an expired one is replaced in its file.
    pub(crate) fn allows(
        &self,
        repeat: Repeat,
        error: &Error,
        used: Option<&TokenHeader>,
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
        F: Fn(&Arc<ClientNode>, CallAttempt<Q>) -> S,
        S: Future<Output = Result<Response<A>, Status>>,
    {
        let deadline = after(Instant::now(), timeout);
        let mut failures = FailedAttempts::default();
        let mut unknown = false;
        loop {
            let node = self.node();
            let used = self.token_header();
            let gate = SendGate::default();
            let attempt = CallAttempt {
                message: request.clone(),
                token: used.clone(),
                gate: gate.clone(),
                deadline,
            };
            let mut error = match tokio::time::timeout_at(deadline, send(&node, attempt)).await {
                Ok(Ok(answer)) => {
                    self.approach(&node, answer.metadata());
                    return Ok(answer.into_inner());
                }
                Ok(Err(status)) => node.error(&status, timeout),
                Err(_) => node.timed_out(timeout),
            };
            if gate.shut() {
                error = error.of_unsent();
            }
            let pause = self.pause_after(&node, &error, &mut failures);
            let last = !self.allows(repeat, &error, used.as_ref(), false)
                || failures.count >= self.settings.retry.max_attempts
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

    /// Opens a stream of answers that writes nothing and is never repeated. As long as no server has
    /// opened it, each server of the list is asked once, and an owner that one of them names.
    pub(crate) async fn open<A, F, S>(&self, send: F) -> Result<(Arc<ClientNode>, A), Error>
    where
        F: Fn(Arc<ClientNode>) -> S,
        S: Future<Output = Result<Response<A>, Error>>,
    {
        let mut failures = FailedAttempts::default();
        loop {
            let node = self.node();
            let error = match send(Arc::clone(&node)).await {
                Ok(answer) => return Ok((node, answer.into_inner())),
                Err(error) => error,
            };
            let pause = self.pause_after(&node, &error, &mut failures);
            let asked = failures.count as usize;
            let last = asked > self.nodes.count()
                || failures.count >= self.settings.retry.max_attempts
                || Arc::ptr_eq(&node, &self.node());
            if last {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
    }
}
