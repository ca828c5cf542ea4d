//! The daemon from start to end: open the store, serve, leave.
//!
//! The main thread's runtime runs the life cycle and the acceptor; gRPC has event loops of
//! its own (`transport.rs`), and so has the HTTP port (`http.rs`). The store is opened by a
//! thread of its own, so that health answers while a long recovery runs.

mod open;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use wald_bucket::TakeOver;
use wald_proto::echo::echo_service_server::EchoServiceServer;
use wald_proto::v1;
use wald_storage::{Clock, CopyReader, Gap, LogEngine, RecoveryReport, SystemClock};

use crate::admission::Admission;
use crate::audit::AuditLog;
use crate::auth::{self, AuthSources, Authority, Engine};
use crate::backups::keys::SigningKey;
use crate::backups::unusable;
use crate::config::{ClientAuth, Config, FlushFailurePolicy, SettingValue};
use crate::convert::{self, ServerLimits};
use crate::drain::{Phase, Request, Signals, bound};
use crate::encryption;
use crate::ephemeral::{self, Ephemeral};
use crate::forward::Forwarder;
use crate::logging;
use crate::metrics::Metrics;
use crate::offline::{Gaps, few};
use crate::plan::HostLimits;
use crate::reload::{Reload, ReloadThread, Reloader};
use crate::replica::{ReplicaWatch, RunningReplica};
use crate::rpc::{DrainOrder, Echo, Node, OpenStore, Services, WalCalls};
use crate::tls::{self, TlsSource};
use crate::transport::{Calls, HttpUrl, Listener, Routes, Transport};
use crate::{host, http};
use open::OpenedStore;
#[cfg(feature = "object")]
pub(crate) use open::no_store;

/// The reason of an unplanned end of the process: its exit code, from sysexits.h, and a
/// sentence for the operator.
#[derive(Debug)]
pub(crate) struct Exit {
    pub(crate) code: u8,
    pub(crate) message: String,
    /// Whether the process begins again: another node owns the store now, and this one becomes a stand-by.
    pub(crate) again: bool,
}

impl Exit {
    /// A second signal, or accepted requests did not finish in time.
    const CUT_SHORT: u8 = 1;
    /// The data directory has contents that this version must not touch.
    pub(crate) const BAD_DATA: u8 = 65;
    /// A port is taken, or the bucket gives no answer.
    pub(crate) const UNAVAILABLE: u8 = 69;
    /// The journal failed: the next start recovers.
    const JOURNAL_FAILED: u8 = 70;
    /// The system refused something.
    pub(crate) const SYSTEM: u8 = 71;
    /// The file system said no.
    pub(crate) const IO: u8 = 74;
    /// Another process has the data directory; later it may not.
    const LOCKED: u8 = 75;
    /// A setting is wrong, or another node owns the store.
    pub(crate) const CONFIG: u8 = 78;

    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            again: false,
        }
    }

    /// The process begins again, if `again`.
    #[cfg(feature = "object")]
    pub(crate) fn or_again(self, again: bool) -> Self {
        Self { again, ..self }
    }
}

/// The node that owns the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreOwner {
    /// Its address for clients; empty if no node owns the store at the moment.
    pub(crate) endpoint: String,
    /// Number of its term.
    pub(crate) term: u64,
    /// Whether this node keeps a copy of the store, and follows it.
    pub(crate) is_followed: bool,
}

impl StoreOwner {
    /// Whether calls can go on to it from a node that follows it.
    fn takes_calls(&self) -> bool {
        self.is_followed && !self.endpoint.is_empty()
    }

    /// Whether it is the same node in the same term.
    #[cfg(feature = "object")]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.term, &self.endpoint) == (other.term, &other.endpoint)
    }
}

/// The facts of a start that the replica depends on.
#[cfg_attr(
    not(feature = "object"),
    allow(dead_code, reason = "builds without object stores have no replica")
)]
pub(crate) struct StartFacts {
    /// The data directory has no store yet.
    pub(crate) is_new: bool,
    /// Address of the gRPC service.
    pub(crate) address: SocketAddr,
    /// The owner of the store that is gone, if the operator says so.
    pub(crate) take_over: Option<TakeOver>,
    /// Takes the description of the replica, as soon as its bucket is known.
    pub(crate) replica: Arc<OnceLock<ReplicaWatch>>,
    /// Takes the reader of the copy, if this node becomes a stand-by.
    pub(crate) copies: Arc<OnceLock<Arc<CopyReader>>>,
    /// Takes the owner while this node is a stand-by.
    pub(crate) owner: watch::Sender<Option<StoreOwner>>,
    /// Whether the process must end. A stand-by leaves the nodes then.
    pub(crate) stop: watch::Receiver<bool>,
}

/// Pause before the process begins again: a fault that comes back at once must not fill the log.
const AGAIN_PAUSE: Duration = Duration::from_secs(1);

/// Maximum time for a stand-by to leave the other nodes.
const LEAVE_TIME: Duration = Duration::from_secs(3);

/// Pause between two returns of free memory to the system.
const GIVE_BACK_EVERY: Duration = Duration::from_secs(60);

/// Names of the health services: the whole server, readiness, and being alive at all.
const READINESS: [&str; 2] = ["", "wald.v1.WalService"];
const LIVENESS: &str = "liveness";

/// Runs the daemon until it must stop. `take_over`: the owner of the store in the bucket that is gone. `reload` is called
/// on SIGHUP. An `ephemeral` daemon prints its ports, and its directory is removed at the end. `try_line` prints a command to
/// try it out.
///
/// # Errors
/// With the exit code and why.
pub(crate) fn run(
    config: &Config,
    take_over: Option<TakeOver>,
    limits: &HostLimits,
    reload: &dyn Fn(),
    ephemeral: Option<Ephemeral>,
    try_line: bool,
) -> Result<(), Exit> {
    let system = |error: std::io::Error| Exit::new(Exit::SYSTEM, format!("cannot start: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system)?;
    let result = runtime.block_on(async {
        let mut signals = Signals::new().map_err(system)?;
        let directory = ephemeral.map(Ephemeral::end_with_parent).transpose()?;
        let start_lines = StartLines {
            hints: try_line,
            ports: directory.is_some(),
        };
        let server = Server::start(config, take_over)?;
        let audit = server.audit.clone();
        let mut result =
            Box::pin(server.live(config, limits, &mut signals, reload, start_lines)).await;
        if let Err(exit) = &mut result
            && exit.again
        {
            tokio::select! {
                () = tokio::time::sleep(AGAIN_PAUSE) => {}
                () = signals.stop() => exit.again = false,
            }
        }
        if let Some(audit) = audit {
            let ended = match &result {
                Ok(()) => Ok(()),
                Err(exit) => Err(&exit.message as &dyn std::fmt::Display),
            };
            audit.event("stop", json!({}), ended);
            audit.finish();
        }
        result
    });
    // Not waiting for tasks: all that matters has ended, or was given up on.
    runtime.shutdown_background();
    result
}

/// Lines beside the log once the daemon serves.
#[derive(Debug, Clone, Copy)]
struct StartLines {
    /// For people: a command to try it out, and the address of the console.
    hints: bool,
    /// For the program that started this one: the ports, on the standard output.
    ports: bool,
}

/// The daemon with its ports bound.
struct Server {
    node: Arc<Node>,
    phase: watch::Sender<Phase>,
    health: HealthReporter,
    opening: open::Opening,
    /// Ends a stand-by.
    stop: watch::Sender<bool>,
    listener: Listener,
    http: std::net::TcpListener,
    tls: Option<Reloader<TlsSource>>,
    authority: Authority,
    auth: Option<AuthSources>,
    /// `None`: there is no audit log.
    audit: Option<Arc<AuditLog>>,
}

/// The reason why serving ended.
enum StopReason {
    /// Calls are still accepted for this time.
    Asked(Duration),
    JournalFailed,
    /// Another node owns the store.
    Moved(Exit),
}

impl Server {
    fn start(config: &Config, take_over: Option<TakeOver>) -> Result<Self, Exit> {
        let metrics = Metrics::new().map_err(|error| {
            Exit::new(
                Exit::SYSTEM,
                format!("metrics cannot be registered: {error}"),
            )
        })?;
        let metrics = Arc::new(metrics);
        let wrong = |why| Exit::new(Exit::CONFIG, why);
        let mut tls = tls::start(config, &metrics).map_err(wrong)?;
        let (authority, mut auth) = auth::start(config, &metrics).map_err(wrong)?;
        host::check_owner(config, &config.data_dir)?;
        host::check_strangers(config, &config.data_dir)?;
        if config.has_replica() {
            open::clear_unfinished(&config.data_dir)?;
        }
        let existing = open::look(
            &config.data_dir,
            config.create_store || config.has_replica(),
        )?;
        host::check_volume(config, &config.data_dir, !existing)?;
        let ports = bind(config);
        if !existing && let Err(exit) = ports {
            // Nothing is made that would not be used.
            return Err(exit);
        }
        // Before the store is made: an audit log that cannot be opened refuses the start.
        let audit = AuditLog::start(config, &metrics)?;
        // Without ports the daemon only finds out who has the directory, and takes no store from anybody.
        let (owner, owner_seen) = watch::channel(None);
        let replica = Arc::new(OnceLock::new());
        let copies = Arc::new(OnceLock::new());
        let (stop, stopped) = watch::channel(false);
        let facts = ports.as_ref().ok().map(|(listener, _)| StartFacts {
            is_new: !existing,
            address: listener.address(),
            take_over,
            replica: Arc::clone(&replica),
            copies: Arc::clone(&copies),
            owner,
            stop: stopped,
        });
        let signing_key = SigningKey::of(config).map_err(|fault| unusable(&fault))?;
        if let Some(key) = &signing_key {
            tracing::info!(key = %key.public(), "manifests of backups and of the replica are signed");
        }
        let opening = open::start(config, Arc::clone(&metrics), facts, authority.tenants())?;
        let (listener, http) = match ports {
            Ok(ports) => ports,
            // A second daemon usually finds the ports taken as well as the directory; the owner
            // of the directory is the more useful message.
            Err(exit) => return Err(opening.give_up().unwrap_or(exit)),
        };
        // From here on each end has its line, too.
        if let Some(audit) = &audit {
            audit.event("start", started(config), Ok(()));
            if let Some(tls) = &mut tls {
                tls.record(audit);
            }
            if let Some(auth) = &mut auth {
                auth.record(audit);
            }
        }
        let (phase, receiver) = watch::channel(Phase::Starting);
        let node = Arc::new(Node {
            store: OnceLock::new(),
            owner: owner_seen,
            copies,
            replica,
            metrics,
            phase: receiver,
            heartbeat_interval: config.heartbeat_interval,
            sync_mode: config.sync_mode,
            has_replica: config.has_replica(),
            sync_interval: config.sync_interval,
            retention: config.storage().retention(),
            limits: ServerLimits {
                max_timestamp_ahead: config.max_timestamp_ahead,
                producer_window: config.producer_window,
                max_producers_per_log: config.max_producers_per_log,
                max_cursors_per_log: config.max_cursors_per_log,
                session_window_bytes: config.session_window_bytes.0,
                producer_max_idle: config.producer_max_idle,
            },
            engine_limits: config.storage().limits(),
            drain: watch::Sender::new(None),
            auto_create: config.auto_create,
            protection: convert::protection(config),
            cursor_lag_logs: config.cursor_lag_logs.clone(),
            start_time: SystemClock.now(),
            signing_key,
        });
        Ok(Self {
            node,
            phase,
            health: HealthReporter::new(),
            opening,
            stop,
            listener,
            http,
            tls,
            authority,
            auth,
            audit,
        })
    }

    async fn live(
        self,
        config: &Config,
        limits: &HostLimits,
        signals: &mut Signals,
        reload: &dyn Fn(),
        start_lines: StartLines,
    ) -> Result<(), Exit> {
        let Self {
            node,
            phase,
            health,
            opening,
            stop,
            listener,
            http,
            tls,
            authority,
            mut auth,
            audit,
        } = self;
        let mut life = ServerLife { phase, health };
        life.enter(Phase::Starting).await;
        life.health
            .set_service_status(LIVENESS, ServingStatus::Serving)
            .await;
        if let Some(auth) = &mut auth {
            // The store opens in the meantime. Without the keys, the first calls with JWTs would be refused for good.
            auth.fetch_keys().await;
        }
        let addresses = (listener.address(), http.local_addr().ok());
        let calls = Arc::new(Calls {
            counter: node.metrics.call_counter(bound(config.request_timeout)),
            authority: authority.clone(),
            audit: audit.clone(),
            admission: Admission::new(
                config.max_inflight_bytes.0,
                config.session_window_bytes.0,
                largest_message(config),
                node.phase.clone(),
            ),
            routes: routes(&node, &life.health, config),
            forward: Forwarder::new(&node, config)?,
            http: addresses.1.map(|address| HttpUrl {
                address,
                has_tls: config.http_tls,
            }),
        });
        let port = node.metrics.ports.grpc.clone();
        let mut transport =
            Transport::start(listener, &calls, config, &node.phase, port, tls.as_ref()).map_err(
                |error| Exit::new(Exit::SYSTEM, format!("cannot start event loops: {error}")),
            )?;
        let (admission, connections) = (
            Arc::clone(&calls.admission),
            Arc::clone(transport.connections()),
        );
        node.metrics.watch_memory(move || {
            let (appends, requests) = admission.admitted_bytes();
            let (answers, queued) = (connections.answer_bytes(), connections.queued_bytes());
            [appends, requests, answers, queued]
        });
        let audited = audit.as_ref();
        let (tls_files, grpc) = (tls.as_ref(), addresses.0);
        let side = transport.side_port(&calls);
        let _http = http::start(
            http,
            &node,
            config,
            grpc,
            tls_files,
            (&authority, audited),
            side,
        )
        .map_err(|error| Exit::new(Exit::SYSTEM, format!("cannot start the HTTP port: {error}")))?;

        let tls = tls.map(|files| Box::new(files) as Box<dyn Reload>);
        let mut files: Vec<_> = tls.into_iter().collect();
        let key_requests = auth.map(|auth| {
            let (auth_files, key_urls, key_requests) = auth.into_parts();
            files.extend(auth_files);
            tokio::spawn(key_urls.run());
            key_requests
        });
        let no_thread = |error: std::io::Error| {
            let sentence = format!("cannot start the thread that reads files again: {error}");
            Exit::new(Exit::SYSTEM, sentence)
        };
        let thread = (!files.is_empty()).then(|| ReloadThread::start(files));
        let thread = thread.transpose().map_err(no_thread)?;
        // The keys of records are there once the store is open.
        let key_thread: OnceLock<ReloadThread> = OnceLock::new();
        let reload = || {
            reload();
            for thread in thread.iter().chain(key_thread.get()) {
                thread.reload();
            }
            if let Some(keys) = &key_requests {
                keys.at_once();
            }
            if let Some(audit) = &audit {
                audit.reopen();
            }
        };

        let mut opening = std::pin::pin!(opening.opened());
        let ends = async {
            // A stand-by stays here for all of its life, and its files change, too.
            let stops = async {
                while signals.next().await == Request::Reload {
                    reload();
                }
            };
            tokio::select! {
                () = stops => {}
                _ = drain_order(&node) => {}
            }
        };
        let mut opened = tokio::select! {
            opened = &mut opening => opened?,
            () = ends => {
                // Nothing was accepted yet, and the next start goes on wherever recovery or a take-over ends.
                stop.send_replace(true);
                let phase = *node.phase.borrow();
                if matches!(phase, Phase::StandBy | Phase::Forwarding) {
                    let leaves = timeout(LEAVE_TIME, &mut opening);
                    let ends = life.leave_standing_by(config, &mut transport);
                    tokio::select! {
                        _ = async { tokio::join!(leaves, ends) } => {}
                        () = signals.stop() => {}
                    }
                }
                return Ok(());
            }
            never = life.stand_by(node.owner.clone(), addresses) => match never {},
        };
        let (engine, mut replica) = (Arc::clone(&opened.engine), opened.replica.take());
        let wrong = |error: wald_storage::QuotaError| Exit::new(Exit::CONFIG, error.to_string());
        auth::keep_quotas(&authority, &engine)
            .await
            .map_err(wrong)?;
        node.metrics.recovered(&opened.report);
        let _ = node.store.set(OpenStore {
            engine: Engine::new(Arc::clone(&engine)),
            epoch: opened.report.recovery_epoch,
            report: opened.report.clone(),
            keys: opened.keys.clone(),
        });
        if let Some(keys) = &opened.keys {
            tokio::spawn(encryption::keep_up(
                Arc::clone(keys),
                Arc::clone(&engine),
                audit.clone(),
                std::mem::take(&mut opened.shredded),
            ));
            let file = encryption::key_file(config, keys, &node.metrics.reloads, audit.as_ref())?;
            if let Some(file) = file {
                let thread = ReloadThread::start(vec![file]).map_err(no_thread)?;
                // The store opens once.
                let _ = key_thread.set(thread);
            }
        }
        life.enter(Phase::Serving).await;
        announce(config, &opened, addresses, start_lines);
        limits.tell(config);

        let end = life
            .serve(&node, config, &*engine, &mut replica, signals, &reload)
            .await;
        let store = (&*engine, replica);
        life.leave(config, end, store, &mut transport, signals)
            .await
    }
}

/// The facts of a start, for the audit log.
fn started(config: &Config) -> Value {
    json!({
        "version": wald_text::VERSION,
        "pid": std::process::id(),
        "listen": config.listen.to_string(),
        "data_dir": config.data_dir.display().to_string(),
        "has_tls": config.has_tls(),
        "has_auth": config.has_auth(),
        "audit": config.audit.show(),
        "audit_on_failure": config.audit_on_failure.show(),
    })
}

fn bind(config: &Config) -> Result<(Listener, std::net::TcpListener), Exit> {
    let taken = |what: &str, address: SocketAddr, error: std::io::Error| {
        Exit::new(
            Exit::UNAVAILABLE,
            format!("cannot listen on {address}: {error}; choose another with --{what}"),
        )
    };
    let listener = Listener::bind(config).map_err(|e| taken("listen", config.listen, e))?;
    let http =
        http::bind(config.http_listen).map_err(|e| taken("http-listen", config.http_listen, e))?;
    Ok((listener, http))
}

/// Maximum bytes of a message that is still decoded: twice the limit of a request, so that a
/// larger request gets REQUEST_TOO_LARGE with its size, and room for names and conditions.
fn largest_message(config: &Config) -> u64 {
    let limits = config.storage().limits();
    u64::from(limits.max_batch_bytes) * 2 + (64 << 10)
}

fn routes(node: &Arc<Node>, health: &HealthReporter, config: &Config) -> Routes {
    let services = || Services(Arc::clone(node));
    let decode = usize::try_from(largest_message(config)).unwrap_or(usize::MAX);
    let health = tonic_health::server::HealthService::from_health_reporter(health.clone());
    let mut routes = Routes::default();
    routes.add(WalCalls(Arc::clone(node)));
    routes.add_generated(v1::log_service_server::LogServiceServer::new(services()));
    routes.add_generated(v1::cursor_service_server::CursorServiceServer::new(
        services(),
    ));
    routes.add_generated(v1::ops_service_server::OpsServiceServer::new(services()));
    routes.add_generated(tonic_health::pb::health_server::HealthServer::new(health));
    if config.echo {
        let echo = EchoServiceServer::new(Echo::new(node.phase.clone()));
        routes.add_generated(echo.max_decoding_message_size(decode));
    }
    if config.reflection {
        let has_echo = config.echo;
        let builder = move || {
            let described = tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(wald_proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                // Without it grpcurl prints error details as base64.
                .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET);
            match has_echo {
                true => described
                    .register_encoded_file_descriptor_set(wald_proto::ECHO_FILE_DESCRIPTOR_SET),
                false => described,
            }
        };
        // The build has made the descriptors.
        let broken = |error| tonic::Status::internal(format!("reflection: {error}"));
        routes.add_late(move || builder().build_v1().map_err(broken));
        routes.add_late(move || builder().build_v1alpha().map_err(broken));
    }
    routes
}

/// State that changes while the server lives, and its listeners.
struct ServerLife {
    phase: watch::Sender<Phase>,
    health: HealthReporter,
}

impl ServerLife {
    async fn enter(&self, phase: Phase) {
        let status = match phase.not_ready() {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        for service in READINESS {
            self.health.set_service_status(service, status).await;
        }
        self.phase.send_replace(phase);
    }

    /// Shows that this node is a stand-by as soon as it is one, and whether it can forward calls.
    async fn stand_by(
        &self,
        mut owner: watch::Receiver<Option<StoreOwner>>,
        (grpc, http): (SocketAddr, Option<SocketAddr>),
    ) -> Infallible {
        let mut shown = Phase::Starting;
        loop {
            let now = owner.borrow_and_update().clone();
            if let Some(now) = now {
                let next = match now.takes_calls() {
                    true => Phase::Forwarding,
                    false => Phase::StandBy,
                };
                if next != shown {
                    self.enter(next).await;
                }
                if shown == Phase::Starting {
                    tracing::info!(
                        version = wald_text::VERSION,
                        grpc = %grpc,
                        http = %http.map(|http| http.to_string()).unwrap_or_default(),
                        owner = now.endpoint,
                        term = now.term,
                        "wald is standing by"
                    );
                }
                shown = next;
            }
            // The sender goes once the node is no stand-by any more.
            if owner.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// The way out of a stand-by: calls that go on to the owner may finish.
    async fn leave_standing_by(&mut self, config: &Config, transport: &mut Transport) {
        self.enter(Phase::Leaving).await;
        tracing::info!(drain_delay = ?config.drain_delay, "stopping: not ready any more");
        tokio::time::sleep(config.drain_delay).await;
        self.enter(Phase::Draining).await;
        for service in READINESS.into_iter().chain([LIVENESS]) {
            self.health.clear_service_status(service).await;
        }
        if timeout(config.shutdown_timeout, transport.ended())
            .await
            .is_err()
        {
            tracing::warn!("some calls did not end within shutdown_timeout: they are cut off");
        }
    }

    /// Serves until someone or something ends it.
    async fn serve(
        &self,
        node: &Node,
        config: &Config,
        engine: &dyn LogEngine,
        replica: &mut Option<RunningReplica>,
        signals: &mut Signals,
        reload: &dyn Fn(),
    ) -> StopReason {
        let mut failed = engine.failed();
        let mut read_only = false;
        let mut tidy_up = tokio::time::interval(GIVE_BACK_EVERY);
        // The first one comes at once; the engine has done so after its start.
        tidy_up.reset();
        loop {
            tokio::select! {
                _ = tidy_up.tick() => {
                    tokio::task::spawn_blocking(wald_storage::give_back_memory);
                }
                request = signals.next() => match request {
                    Request::Stop => return StopReason::Asked(config.drain_delay),
                    Request::Reload => {
                        reload();
                        if let Some(replica) = replica {
                            replica.reload();
                        }
                    }
                },
                order = drain_order(node) => {
                    return StopReason::Asked(order.delay.unwrap_or(config.drain_delay));
                }
                exit = moved(replica) => return StopReason::Moved(exit),
                _ = &mut failed, if !read_only => match config.on_flush_failure {
                    FlushFailurePolicy::Exit => return StopReason::JournalFailed,
                    FlushFailurePolicy::ReadOnly => {
                        read_only = true;
                        self.enter(Phase::ReadOnly).await;
                        tracing::error!("read only because the journal failed; restart to recover");
                    }
                },
            }
        }
    }

    /// The way out; a signal cuts it short anywhere.
    async fn leave(
        mut self,
        config: &Config,
        end: StopReason,
        store: (&dyn LogEngine, Option<RunningReplica>),
        transport: &mut Transport,
        signals: &mut Signals,
    ) -> Result<(), Exit> {
        let cut_short = match &end {
            StopReason::Asked(_) => Exit::new(
                Exit::CUT_SHORT,
                "a second signal: exiting at once, the next start recovers",
            ),
            // The sender may not know it yet.
            StopReason::JournalFailed => Exit::new(
                Exit::JOURNAL_FAILED,
                "the journal failed, and a signal: exiting at once, the next start recovers",
            ),
            StopReason::Moved(exit) => Exit::new(exit.code, exit.message.clone()),
        };
        tokio::select! {
            result = self.finish(config, end, store, transport) => result,
            () = signals.stop() => Err(cut_short),
        }
    }

    async fn finish(
        &mut self,
        config: &Config,
        mut end: StopReason,
        (engine, mut replica): (&dyn LogEngine, Option<RunningReplica>),
        transport: &mut Transport,
    ) -> Result<(), Exit> {
        self.enter(Phase::Leaving).await;
        if let StopReason::Asked(delay) = end {
            tracing::info!(drain_delay = ?delay, "stopping: not ready any more");
            match &mut replica {
                None => tokio::time::sleep(delay).await,
                Some(replica) => {
                    if let Err(moved) = replica.announce_end(delay).await {
                        end = StopReason::Moved(moved);
                    }
                }
            }
        }
        self.enter(Phase::Draining).await;
        // Ends the streams of health watchers, which would keep their connections open.
        for service in READINESS.into_iter().chain([LIVENESS]) {
            self.health.clear_service_status(service).await;
        }
        let now = Instant::now();
        let until = now + config.shutdown_timeout;
        // A fifth of the time is the engine's, to flush and mark the end as clean.
        let connections_until = now + config.shutdown_timeout * 4 / 5;
        if timeout_at(connections_until, transport.ended())
            .await
            .is_err()
        {
            let connections = transport.connections();
            tracing::warn!(
                connections = connections.number(),
                calls = connections.calls(),
                "some connections did not close within shutdown_timeout: they are cut off with the \
                 calls that run on them"
            );
        }
        match end {
            StopReason::JournalFailed => Err(Exit::new(
                Exit::JOURNAL_FAILED,
                "the journal failed; exiting (on_flush_failure = exit): a restart recovers the records in the data directory",
            )),
            StopReason::Moved(exit) => Err(exit),
            StopReason::Asked(_) => {
                let drained = match timeout_at(until, engine.drain()).await {
                    Ok(Ok(())) => {
                        tracing::info!("stopped: everything accepted is on the device");
                        Ok(())
                    }
                    Ok(Err(error)) => Err(Exit::new(Exit::JOURNAL_FAILED, error.to_string())),
                    Err(_) => Err(Exit::new(
                        Exit::CUT_SHORT,
                        "the engine did not finish within shutdown_timeout; the next start recovers",
                    )),
                };
                // The journal also refuses to flush when another node owns the store. The replica names that node.
                match replica {
                    None => drained,
                    Some(replica) => replica.finish(until).await.and(drained),
                }
            }
        }
    }
}

/// Resolves when an operator has ordered the end.
async fn drain_order(node: &Node) -> DrainOrder {
    let mut orders = node.drain.subscribe();
    let order = orders.wait_for(Option::is_some).await;
    match order.ok().and_then(|order| *order) {
        Some(order) => order,
        None => std::future::pending().await,
    }
}

/// Resolves when another node owns the store. Never does without a replica.
async fn moved(replica: &mut Option<RunningReplica>) -> Exit {
    match replica {
        Some(replica) => replica.moved().await,
        None => std::future::pending().await,
    }
}

/// The result of the start, in a word or two.
pub(crate) fn recovery_result(report: &RecoveryReport) -> &'static str {
    if report.created {
        "new store"
    } else if report.clean {
        "clean"
    } else {
        "recovered after an unclean end"
    }
}

/// The start line, the findings of the start, and a command to try it.
fn announce(
    config: &Config,
    opened: &OpenedStore,
    (grpc, http): (SocketAddr, Option<SocketAddr>),
    start_lines: StartLines,
) {
    let report = &opened.report;
    host::warn_of_strangers(&config.data_dir);
    let recovery = recovery_result(report);
    tracing::info!(
        version = wald_text::VERSION,
        data_dir = %config.data_dir.display(),
        sync_mode = config.sync_mode.show(),
        grpc = %grpc,
        http = %http.map(|http| http.to_string()).unwrap_or_default(),
        recovery,
        recovery_epoch = report.recovery_epoch.get(),
        logs = report.logs,
        records = report.records,
        recovery_ms = millis(report.duration),
        "wald is serving"
    );
    if start_lines.ports {
        ephemeral::print_ports(grpc, http);
    }
    if start_lines.hints {
        let security = match (config.has_tls(), config.tls_client_auth) {
            (false, _) => "-plaintext",
            (true, ClientAuth::Require) => "-cacert CA.pem -cert CLIENT.pem -key CLIENT.key",
            (true, _) => "-cacert CA.pem",
        };
        logging::print(&format!(
            "try: grpcurl {security} -d '{{\"log\":\"greetings\",\"record\":{{\"text\":\"hello\"}}}}' \
             {grpc} wald.v1.WalService/Append"
        ));
        if let Some(http) = http.filter(|_| config.has_console()) {
            let url = HttpUrl {
                address: http,
                has_tls: config.http_tls,
            };
            logging::print(&format!("console: {url}/console/"));
        }
    }
    if report.torn_bytes > 0 {
        tracing::info!(
            bytes = report.torn_bytes,
            "cut off a torn tail: nothing proves that it had been flushed"
        );
    }
    if report.damage.iter().any(|gap| gap.log.is_none()) {
        tracing::error!(
            "records are lost, and whose is not known: logs without newer records take no \
             appends, and no log is created; `wald repair` tells more and, with --accept-loss, ends it"
        );
    }
    // The places are among the findings.
    let damaged: Vec<&Gap> = report
        .damage
        .iter()
        .filter(|gap| gap.log.is_some())
        .collect();
    let (shown, rest) = few(&damaged);
    for gap in shown {
        tracing::error!(
            log = gap.log.as_ref().map(|log| log.as_str()),
            from_lsn = gap.from.map(|lsn| lsn.get()),
            to_lsn = gap.to.map(|lsn| lsn.get()),
            "records are damaged; everything else is served"
        );
    }
    if !rest.is_empty() {
        let rest = Gaps::of(rest.iter().copied());
        tracing::error!(
            ranges = rest.ranges,
            records = rest.records,
            logs = rest.logs,
            "more records are damaged; `wald repair --output json` lists all of them while the daemon is stopped"
        );
    }
    if !report.accepted.is_empty() {
        tracing::info!(
            ranges = report.accepted.len(),
            "the loss of records was accepted earlier; they stay named to readers"
        );
    }
    let (shown, rest) = few(&report.findings);
    for finding in shown {
        tracing::warn!(finding = finding.as_str(), "found while opening the store");
    }
    if !rest.is_empty() {
        tracing::warn!(
            findings = rest.len(),
            "more was found while opening the store; `wald repair --output json` lists all of it while the daemon is stopped"
        );
    }
    if let Some(warning) = config.can_be_lost() {
        let sync_mode = config.sync_mode.show();
        tracing::warn!(
            sync_mode,
            warning,
            "acks are weaker than durable by default"
        );
    }
    for caveat in opened.engine.durability_truth().caveats {
        tracing::warn!(caveat, "durability is limited here");
    }
    if config.echo {
        tracing::warn!(%grpc, "the echo service is on: for measurements only, it has no limits");
    }
    if let Some(warning) = config.exposed() {
        tracing::warn!(%grpc, "{warning}");
    }
    if config.sends_tokens_in_plaintext() && !config.metrics_open {
        tracing::warn!(
            http = %config.http_listen,
            "scrapers on other machines send their token to /metrics in plaintext; set http_tls, or metrics_open"
        );
    }
    let shows_all = config.has_console() && !config.has_auth();
    if let Some(http) = http.filter(|http| shows_all && !http.ip().is_loopback()) {
        tracing::warn!(%http, "the console shows every record on an address that other machines can reach");
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
