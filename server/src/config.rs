//! Settings: one table for names, documentation and defaults, from which come the
//! flags, the environment variables, the keys of the file, `wald config show` and
//! `wald config reference`. The engine's rows stand in `wald_storage::engine_settings`.
//!
//! ```text
//! flag --segment-bytes  >  WALD_SEGMENT_BYTES  >  segment_bytes in --config FILE  >  default
//! ```
//!
//! Every value is text until it is parsed by the type of its setting, whichever way it
//! came, so that a size is written the same in all of them.

mod layers;
mod otel;
mod value;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use wald_storage::{ConfigError, OnDamage, ReadStrategy, ReplicaBounds, StorageConfig, SyncMode};

pub(crate) use layers::{
    ConfigProblem, Effective, Layers, changed, env_name, flag_name, misspelt, reference,
};
pub(crate) use otel::{OtelSettings, read as otel};
pub(crate) use value::{
    AuditFailurePolicy, AuditScope, BucketGap, ClientAuth, EncryptionScope, Exposure,
    FlushFailurePolicy, LogFormat, LogPattern, LogPatterns, SettingValue, Size, TlsVersion,
};

/// Largest batch: clients take messages of 64 MiB, and a message has names and places, too.
const LARGEST_BATCH_BYTES: u64 = 63 << 20;

/// Least lag of a replica: some writes of the journal.
const LEAST_REPLICA_LAG: u64 = 1 << 20;
/// Bounds of `lease_ttl`: several requests must end within a third of it, and nobody waits for longer.
const LEAST_LEASE_TTL: Duration = Duration::from_secs(2);
const MOST_LEASE_TTL: Duration = Duration::from_secs(600);

/// Maximum characters of the name of a node, as of a host.
const LONGEST_NODE: usize = 253;
/// Maximum length of the name of a node among others, in bytes: lists of the bucket leave longer names out.
const LONGEST_LISTED_NODE: usize = 100;

/// Whether a node may have the name, or the empty name that stands for a default.
pub(crate) fn is_node_name(name: &str) -> bool {
    name.len() <= LONGEST_NODE && name.chars().all(|character| character.is_ascii_graphic())
}

/// Minimum places of the port: they leave room for probes next to a console.
pub(crate) const LEAST_HTTP_CONNECTIONS: usize = 8;

/// Cipher suites that `tls_cipher_suites` may list, by their names at IANA. The names of TLS 1.2 have the key exchange.
pub(crate) const CIPHER_SUITES: [&str; 9] = [
    "TLS_AES_256_GCM_SHA384",
    "TLS_AES_128_GCM_SHA256",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
];

/// One row of the table of settings.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Its key in a file; flag and variable are derived from it.
    pub(crate) name: &'static str,
    /// Its effect, its bounds and their consequences.
    pub(crate) doc: &'static str,
    /// The default, as one would write it.
    pub(crate) default: String,
    /// Whether it may be given as a flag without a value.
    pub(crate) switch: bool,
}

macro_rules! config {
    ($( $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr; )+) => {
        /// Every setting, parsed and checked.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) struct Config {
            $( $(#[doc = $doc])+ pub(crate) $name: $type, )+
        }

        /// The table: everything that can be set.
        pub(crate) static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![
            $( Setting {
                name: stringify!($name),
                doc: concat!($($doc, "\n"),+),
                default: $default,
                switch: <$type as SettingValue>::SWITCH,
            }, )+
        ]);

        impl Config {
            /// Parses the text found for each setting; collects every problem, so that
            /// a user mends a file once. Gives back the values as Wald writes them.
            fn parse(
                mut text_of: impl FnMut(&'static str) -> String,
                mut problem: impl FnMut(&'static str, String),
            ) -> Option<Self> {
                $( let $name = match <$type as SettingValue>::parse(&text_of(stringify!($name))) {
                    Ok(value) => Some(value),
                    Err(why) => {
                        problem(stringify!($name), why);
                        None
                    }
                }; )+
                Some(Self { $( $name: $name?, )+ })
            }

            /// Each value as Wald writes it, in the order of the table.
            fn shown(&self) -> Vec<String> {
                vec![ $( self.$name.show(), )+ ]
            }
        }
    };
}

/// Joins the server's rows, whose defaults are text, and the engine's rows, whose
/// defaults are values.
macro_rules! settings {
    (
        { $( $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:literal; )+ }
        { $( $(#[doc = $doc2:literal])+ $name2:ident: $type2:ty = $default2:literal; )+ }
        $( $(#[doc = $engine_doc:literal])+ $engine:ident: $engine_type:ty
            = $engine_default:expr $(, != $refused:expr)?; )+
    ) => {
        config! {
            $( $(#[doc = $doc])+ $name: $type = $default.to_owned(); )+
            $( $(#[doc = $engine_doc])+ $engine: $engine_type
                = <$engine_type>::from(StorageConfig::default().$engine).show(); )+
            $( $(#[doc = $doc2])+ $name2: $type2 = $default2.to_owned(); )+
        }

        impl Config {
            /// The engine's share of the settings.
            pub(crate) fn storage(&self) -> StorageConfig {
                StorageConfig {
                    $( $engine: self.$engine.into(), )+
                    replica: self.replica_bounds(),
                    cipher: None,
                }
            }
        }
    };
}

/// Headings of the settings in `wald --help` and in the reference: the first setting of each, and its text.
const HEADINGS: [(&str, &str); 13] = [
    ("listen", "Addresses and the HTTP port"),
    ("tls_cert", "TLS"),
    ("auth_file", "Access and audit"),
    ("encryption_key_file", "Encryption"),
    ("data_dir", "Store"),
    ("sync_mode", "Durability and the journal"),
    ("max_record_bytes", "Bounds of requests and of the store"),
    ("on_damage", "Reading and scrubbing"),
    ("retention_max_age", "Retention, sorting and the archive"),
    ("backup_signing_key_file", "Signatures of backups"),
    ("bucket_endpoint", "Bucket, replica and nodes"),
    ("worker_threads", "Threads, connections and calls"),
    ("drain_delay", "End, log, metrics and traces"),
];

/// The heading that begins with this setting.
pub(crate) fn heading(setting: &str) -> Option<&'static str> {
    let found = HEADINGS.iter().find(|(first, _)| *first == setting)?;
    Some(found.1)
}

// Addresses, limits of connections, the life cycle and the log are the server's. The settings
// of the engine come between its first and its second group.
wald_storage::engine_settings! { settings
    {
        /// Address and port of the gRPC service. Port 0 takes a free one, which the start
        /// line prints; an address left out (":6925") is 127.0.0.1.
        listen: SocketAddr = "127.0.0.1:6925";
        /// Address and port of /metrics, /livez, /readyz, the web console and the HTTP API.
        http_listen: SocketAddr = "127.0.0.1:6926";
        /// Whether the HTTP port serves the web console, which shows records and changes nothing. auto:
        /// only if http_listen is a loopback address, and auth_file is set or tls_client_auth is not
        /// require (this port never requires a certificate). on: always; without auth_file it then
        /// needs insecure_listen where auto would be off; with auth_file, an address that other
        /// machines can reach needs http_tls or insecure_tokens. off: never. With auth_file a caller
        /// needs the right console, and sees only logs on which it has the rights read and list.
        console: Exposure = "auto";
        /// Names of this machine, separated by commas, under which browsers may open the console,
        /// scrapers may read /metrics, and clients may call the HTTP API. A name that begins with a dot
        /// covers every name that ends with it. localhost and plain addresses always pass; for
        /// /metrics and the API, names without a dot pass too. Other names are refused, because a
        /// stranger's page can have its own name resolved to this machine (DNS rebinding). With
        /// auth_file the API takes every name.
        console_hosts: String = "";
        /// Whether the HTTP port serves the HTTP API: appends, reads and the logs as JSON under /v1,
        /// with the rights and limits of gRPC. auto: only if http_listen is a loopback address, and
        /// auth_file is set or tls_client_auth is not require (this port never requires a
        /// certificate). on: always; without auth_file it then needs insecure_listen where auto would
        /// be off; with auth_file, an address that other machines can reach needs http_tls or
        /// insecure_tokens. off: never.
        http_api: Exposure = "auto";
        /// Origins of pages that may call the HTTP API from a browser, such as https://app.example,
        /// separated by commas (CORS). Requests of pages from other origins are refused, because a
        /// stranger's page could reach a daemon on the machine of its visitor.
        http_api_origins: String = "";
        /// Maximum connections of the HTTP port. At least 8. When all are taken, the connection
        /// that has been idle for the longest time ends, so that probes always get in. The HTTP API
        /// may have requests at work on three eighths of them, followers of logs included.
        http_max_connections: usize = "256";
        /// Maximum time for the head of an HTTP request, from the accept or from its first byte
        /// (> 0). The connection ends after it.
        http_head_timeout: Duration = "10s";
        /// Maximum time between two HTTP requests on one connection (> 0). The connection ends
        /// after it.
        http_idle_timeout: Duration = "1m";
        /// File with the server's certificate in PEM, followed by its issuers (empty = no TLS). A
        /// client that does not offer h2 by ALPN is refused. This file and the other files of TLS are
        /// read again every 10 s and on SIGHUP. A file with a fault is refused, and the earlier files
        /// stay in force.
        tls_cert: String = "";
        /// File with the private key of tls_cert in PEM, not encrypted. Refused if every user of the
        /// machine can read it.
        tls_key: String = "";
        /// Whether clients send certificates. off: none is requested. optional: a certificate is
        /// verified if the client sends one. require: the handshake fails without a valid one. The
        /// HTTP port treats require as optional, because probes send no certificate.
        tls_client_auth: ClientAuth = "off";
        /// File with the certificates of the CAs of clients in PEM. Required by tls_client_auth. A
        /// client certificate needs a subjectAltName. Its key usage, if present, must include
        /// digitalSignature.
        tls_client_ca: String = "";
        /// File with certificate revocation lists of these CAs in PEM (empty = none). They cover the
        /// certificates of clients, not of issuers. A certificate whose issuer has no list is
        /// accepted. After a new list, open connections of a revoked certificate end within 1 s.
        tls_client_crl: String = "";
        /// Oldest accepted version of TLS: 1.2 or 1.3.
        tls_min_version: TlsVersion = "1.2";
        /// Accepted cipher suites, separated by commas (empty = all: three of TLS 1.3, and six of TLS
        /// 1.2 with ECDHE and AEAD). The client's order counts.
        tls_cipher_suites: String = "";
        /// Whether the HTTP port also speaks TLS, with the same files. Probes and scrapers must then
        /// use https.
        http_tls: bool = "false";
        /// File with principals, their credentials and their rights in TOML (empty = every caller may do
        /// everything). Refused if every user of the machine can read it. It is read again every 10 s
        /// and on SIGHUP. A file with a fault is refused, and the earlier one stays in force. `wald
        /// token` manages its tokens and checks it.
        auth_file: String = "";
        /// Whether /metrics needs no credential although there is an auth_file.
        metrics_open: bool = "false";
        /// Permits tokens on an address that other machines can reach without TLS. Everyone who sees the
        /// traffic can use each token. Needed with auth_file on such an address if its port has no TLS.
        insecure_tokens: bool = "false";
        /// Destination of the audit log: a file, stderr, or off (the same as empty). It has one line of
        /// JSON for each change other than appends, each refused call, each server operation, each reload
        /// of files, the start and the stop. A new file has the mode 0600, and so has an existing one
        /// after the start. SIGHUP opens the file again. A symbolic link and a file in data_dir are
        /// refused. Payloads and secrets never appear.
        audit_log: String = "";
        /// Calls that the audit log records. changes: changes other than appends and cursors, and server
        /// operations. all: every call, reads and appends included; sessions, scans and other streams get
        /// a line at their begin and at their end.
        audit: AuditScope = "changes";
        /// Reaction to an audit log that cannot be written. continue: calls are served; lines wait until 4 MiB
        /// wait, then the newest are lost. refuse: changes other than appends, and server operations, are
        /// refused with AUDIT_FAILED until a write succeeds.
        audit_on_failure: AuditFailurePolicy = "continue";
        /// Permits gRPC without TLS, or with TLS but without identities (neither auth_file nor
        /// required client certificates), on an address that other machines can reach. Without auth_file every
        /// client that reaches the port can then read and append everything.
        insecure_listen: bool = "false";
        /// File with the keys that wrap the keys of the records (empty = no encryption, unless
        /// encryption_key_command is set). Each line has a key of 32 bytes, as 64 hexadecimal digits or in
        /// base64. The last one wraps; the earlier ones only unwrap. Refused if every user of
        /// the machine can read it. `wald key new` makes a key. Once a store is encrypted, each start
        /// needs the key. A changed file is read within 10 s and on SIGHUP, and its last key then wraps all
        /// keys of records.
        encryption_key_file: String = "";
        /// Command that prints the content of encryption_key_file, such as a client of a key management
        /// service. Its parts are separated by spaces; no shell reads it. It has 10 s and 64 KiB. It runs
        /// at each start.
        encryption_key_command: String = "";
        /// Logs that share a key. store: all of them. tenant: the logs of a tenant of auth_file. log: none,
        /// so that DeleteLog with shred destroys the records of one log in all backups. Each log then
        /// takes 250 bytes of the key ring. A change concerns new records.
        encryption_scope: EncryptionScope = "store";
        /// Directory that holds the store. Created if it is missing, and locked while in use.
        data_dir: PathBuf = "./wald-data";
        /// Permits root to serve, repair or restore to a directory of another user. The new files
        /// belong to root, so a daemon of that user cannot open the store afterwards.
        allow_foreign_owner: bool = "false";
        /// Reaction to a failed flush or write of the journal. exit: answer the requests in flight
        /// and exit with code 70; a supervisor restarts the daemon, and recovery decides which
        /// records survived. read_only: stay up, report not ready, and serve reads.
        on_flush_failure: FlushFailurePolicy = "exit";
    }
    {
        /// Directory, outside of data_dir, to which the sorter moves expired records before it
        /// drops them (empty = none). `wald archive` lists and restores them. The directory must
        /// exist. Records that a client trims or deletes are never kept.
        archive_dir: String = "";
        /// File with the private key that signs the manifests of backups and of the replica: Ed25519 in PEM
        /// (PKCS#8), as `wald backup-key new` or `openssl genpkey -algorithm ed25519` makes it (empty =
        /// they are not signed). Refused if every user of the machine can read it. Read at the start.
        backup_signing_key_file: String = "";
        /// Public keys, separated by commas: files in PEM, or their 64 digits. `wald verify` and `wald
        /// restore` refuse a backup without the signature of one of them, and a stand-by takes over only
        /// files whose manifest has it (empty = signatures are shown and not required). The rows of a
        /// replica after its files are never signed. Read at the start.
        backup_trust: String = "";
        /// Base URL of the object store for bucket_url, and for `wald verify` and `wald restore` with
        /// s3://, gs:// or az:// (empty = AWS_ENDPOINT_URL and the like, or the provider's own).
        bucket_endpoint: String = "";
        /// Region of the bucket (empty = AWS_REGION, or us-east-1). Only s3:// has regions.
        bucket_region: String = "";
        /// File with the credentials of the bucket: lines NAME = VALUE with the names of the
        /// environment, or the JSON key of a Google service account (empty = the environment, or the
        /// identity of this machine or pod). Read again on SIGHUP, and when the store refuses the
        /// credentials, at most once in 5 s.
        bucket_credentials_file: String = "";
        /// Whether records may cross the network to the bucket without TLS.
        bucket_insecure: bool = "false";
        /// Bucket of the replica: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX (empty =
        /// no replica). The daemon ships its journal and its files there. An append with REPLICATED is
        /// acknowledged once the bucket has it. A prefix holds one store, and one daemon at a time owns
        /// it. Needs a wald that is built with the feature object.
        bucket_url: String = "";
        /// Minimum time between the starts of two writes of the journal to the bucket while appends keep
        /// coming. Bounds the requests and so their price: 50ms allows 20 a second. auto: the median
        /// duration of the newest writes.
        bucket_gap: BucketGap = "50ms";
        /// Maximum time that durable records wait before the daemon ships them, if no append waits for
        /// REPLICATED (> 0). The loss of the machine takes acknowledged records of this time, and of the
        /// write that follows.
        replica_interval: Duration = "1s";
        /// Maximum bytes of the journal that are durable and not in the bucket: from 1MiB to 1GiB. Beyond
        /// it appends and changes of cursors are answered BUSY, and retention pauses. The loss of the machine
        /// takes at most this much.
        replica_max_lag: Size = "64MiB";
        /// Minimum time for which the bucket keeps files that newer ones have replaced (> 0), for
        /// restores that still read them.
        replica_keep: Duration = "24h";
        /// Name of this node in the bucket (empty = the host name): 1 to 253 printable characters, and
        /// with stand_by at most 100 without a slash. A restart needs the same name. No two nodes may share one.
        node_id: String = "";
        /// HOST:PORT at which clients reach this node (empty = the address of listen; if that is
        /// unspecified, node_id with its port). The answer MOVED and messages of other nodes name it.
        advertise: String = "";
        /// Be one of several nodes of the store in bucket_url: while another node owns the store, this one is
        /// a stand-by, and takes the store over when the owner ends or dies. All nodes need it. Without it, a start
        /// next to an owner is refused.
        stand_by: bool = "false";
        /// File with the certificates of the CAs of the other nodes in PEM (empty = the CAs of the system). A
        /// stand-by with TLS forwards calls over TLS, and the certificate of the owner must have the host of
        /// the owner's address. The stand-by presents tls_cert if the owner asks for a certificate.
        peer_ca: String = "";
        /// Time without a sign of life after which the other nodes count a node as dead: from 2s to 10min. The
        /// same for all nodes. A shorter one makes a take-over faster, and costs more requests: an owner sends
        /// about 8 in this time. A stand-by also reads the owner's record at least twice a second.
        lease_ttl: Duration = "10s";
        /// Number of event loops that serve gRPC (0 = one for every core). Each is a thread with
        /// its own share of the connections.
        worker_threads: usize = "0";
        /// Maximum number of gRPC connections (0 = no bound). One more takes the place of a connection
        /// without calls, and waits while all have calls. Lowered at start where open files or
        /// memory_limit have no room for them.
        max_connections: usize = "10000";
        /// Maximum memory that the bounds of this file may add up to (0 = the cgroup's limit, or
        /// half of RAM if there is none). A start lowers max_calls, max_connections and
        /// http_max_connections until they fit. If that is not enough, the start is refused where this is
        /// set, and warns where it is not.
        memory_limit: Size = "0B";
        /// Maximum number of gRPC connections that have sent no request yet (> 0). One more closes
        /// the oldest of them. With TLS a connection has 1 s before it gives way, and a client that
        /// waits for the server's part of the handshake does not count.
        max_silent_connections: usize = "512";
        /// Maximum time from the connection of a gRPC client to its first whole request head (> 0).
        /// The connection is closed after it.
        handshake_timeout: Duration = "10s";
        /// Maximum time in which a client must take at least one byte of an answer that waits for
        /// it (> 0). The call is reset after it. Followers that have seen everything and idle
        /// sessions wait for the server, not for the client: they may stay for ever.
        stream_progress_timeout: Duration = "30s";
        /// Maximum number of open calls on all connections (> 0), followers and sessions among them. Further
        /// calls are refused with BUSY. One connection has at most as many as are free for others. A call
        /// takes up to 8 KiB of memory. Lowered at start where memory_limit has no room for them.
        max_calls: usize = "65536";
        /// Maximum number of concurrent calls on one connection. Further calls wait at the client.
        max_concurrent_streams: u32 = "256";
        /// Maximum number of streams that the server resets on one connection before it ends the
        /// connection. Bounds the cost of a misbehaving client.
        max_local_resets: usize = "1024";
        /// Maximum size of the header list of one call.
        max_header_bytes: Size = "16KiB";
        /// HTTP/2 flow-control window of one call: the bytes that a client may send ahead.
        stream_window_bytes: Size = "1MiB";
        /// Maximum HTTP/2 flow-control window of one connection. Each begins with 64 KiB and grows
        /// with use; all together stay below 64 MiB beyond that.
        connection_window_bytes: Size = "8MiB";
        /// Maximum bytes of requests of one append session that are read and not acked. Further
        /// requests wait in HTTP/2 windows and at the client. One request is always read, whatever
        /// its size. The bytes that max_inflight_bytes leaves to the connection are a second bound.
        session_window_bytes: Size = "4MiB";
        /// Idle time after which the server checks by HTTP/2 ping and TCP keepalive that the client
        /// is alive (0 = never).
        keepalive_interval: Duration = "20s";
        /// Maximum time for the answer to a keepalive ping. The connection is closed after it.
        keepalive_timeout: Duration = "20s";
        /// Age at which the server asks a client to reconnect (0 = never), by GOAWAY. Calls on the
        /// old connection continue. Load thereby spreads to servers that were added later.
        max_connection_age: Duration = "0s";
        /// Maximum time that calls may continue after max_connection_age (0 = no limit).
        max_connection_age_grace: Duration = "0s";
        /// Maximum time of one unary call, whatever deadline the client sets (0 = no limit).
        request_timeout: Duration = "5m";
        /// Silence after which a scan sends a message without records.
        heartbeat_interval: Duration = "15s";
        /// Whether to answer reflection (grpcurl without proto files). With auth_file it is off unless
        /// it is set, and then principals alone may ask.
        reflection: bool = "true";
        /// Whether to serve wald.echo.v1.EchoService, which answers at once and stores nothing: the
        /// transport's ceiling on this machine, for walbench --echo. It has no limits: for
        /// measurements only, never where others reach the port.
        echo: bool = "false";
        /// Time after SIGTERM in which the server still accepts calls while health reports
        /// NOT_SERVING, so that load balancers notice first.
        drain_delay: Duration = "0s";
        /// Maximum time for accepted calls to finish after drain_delay. The process exits after it.
        shutdown_timeout: Duration = "30s";
        /// Form of the log on stderr. auto: text on a terminal, otherwise json.
        log_format: LogFormat = "auto";
        /// Level of the log (error, warn, info, debug, trace), or directives such as
        /// "info,wald=debug". SlateDB, which stores the replica, logs warnings only, unless a directive
        /// names slatedb. SIGHUP reads it again.
        log_filter: String = "info";
        /// Logs whose cursors have the metric wald_cursor_lag_records, separated by commas (empty =
        /// none). A name that ends with an asterisk covers every name that begins with the rest. At
        /// most 1,000 cursors are shown, the first by name. Names of logs and cursors become
        /// labels.
        cursor_lag_logs: LogPatterns = "";
        /// Collector that receives traces by OTLP over gRPC, such as http://127.0.0.1:4317 (empty =
        /// no traces). Needs a wald that is built with the feature otlp. In a file this may also be
        /// endpoint in the table [otlp], as with every otlp_ setting.
        otlp_endpoint: String = "";
        /// Name of this service in traces.
        otlp_service_name: String = "wald";
        /// Percentage of calls to sample when the caller sent no trace context. At most 100. Each
        /// traced call costs some microseconds: lower it under load.
        otlp_sample_percent: u32 = "100";
        /// Maximum time that the collector may take for one batch of spans.
        otlp_timeout: Duration = "10s";
    }
}

/// A setting whose value cannot be used, and why.
#[derive(Debug)]
pub(crate) struct Wrong {
    setting: &'static str,
    why: String,
}

impl Wrong {
    fn new(setting: &'static str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { setting, why }
    }
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.setting, self.why)
    }
}

impl Config {
    /// The bounds of the replica, if there is one.
    fn replica_bounds(&self) -> Option<ReplicaBounds> {
        let max_lag = self.replica_max_lag.0;
        self.has_replica().then_some(ReplicaBounds { max_lag })
    }

    /// Whether the store has a replica in a bucket.
    pub(crate) fn has_replica(&self) -> bool {
        !self.bucket_url.is_empty()
    }

    /// The engine's share of the settings, for a command that opens a store and ships nothing. Such an engine has no
    /// archive either, so nothing expires and nothing is sorted: the sorter would drop records that belong there.
    pub(crate) fn storage_without_replica(&self) -> StorageConfig {
        let mut storage = self.storage();
        storage.replica = None;
        storage.sorter_enabled = false;
        storage.retention_interval = Duration::MAX;
        if storage.sync_mode == SyncMode::Replicated {
            storage.sync_mode = SyncMode::Strict;
        }
        storage
    }

    /// The client of the bucket.
    #[cfg(feature = "object")]
    pub(crate) fn bucket_settings(&self) -> wald_bucket::BucketSettings {
        let given = |value: &String| Some(value.clone()).filter(|value| !value.is_empty());
        wald_bucket::BucketSettings {
            endpoint: given(&self.bucket_endpoint),
            region: given(&self.bucket_region),
            credentials_file: given(&self.bucket_credentials_file).map(Into::into),
            insecure: self.bucket_insecure,
        }
    }

    /// Lowers defaults to the values that they depend on. `is_given` reports whether the
    /// operator has set a setting.
    fn follow(&mut self, is_given: impl Fn(&str) -> bool) {
        // A port that asks for credentials describes itself to nobody, unless its operator wants that.
        if self.has_auth() && !is_given("reflection") {
            self.reflection = false;
        }
        let Some(fits) = self.largest_batch() else {
            return;
        };
        if !is_given("max_batch_bytes") {
            self.max_batch_bytes.0 = self.max_batch_bytes.0.min(fits);
        }
        if !is_given("max_record_bytes") {
            self.max_record_bytes.0 = self.max_record_bytes.0.min(self.max_batch_bytes.0);
        }
    }

    /// The largest batch that a segment has room for, bytes; `None` if there can be no such segments.
    fn largest_batch(&self) -> Option<u64> {
        let storage = self.storage();
        storage.check().ok().map(|()| storage.largest_batch())
    }

    /// Rules that take more than one setting, or more than a type.
    fn check(&self) -> Result<(), Wrong> {
        self.storage().check().map_err(|error| match error {
            ConfigError::Zero(name) => Wrong::new(name, "it must be more than 0"),
            ConfigError::SegmentTooSmall(_) => Wrong::new("segment_bytes", "the least is 64KiB"),
            ConfigError::SegmentTooLarge(_) => Wrong::new("segment_bytes", "the most is 3GiB"),
            ConfigError::SegmentUnaligned(_) => {
                Wrong::new("segment_bytes", "it must be a multiple of 4096")
            }
            ConfigError::NoReplica => Wrong::new(
                "sync_mode",
                "replicated needs a replica; set bucket_url, or choose strict",
            ),
            ConfigError::ReplicaLag(_) => Wrong::new("replica_max_lag", "the most is 1GiB"),
        })?;
        self.check_sizes()?;
        self.check_tls()?;
        self.check_auth()?;
        self.check_encryption()?;
        self.check_trust()?;
        for (name, size) in [
            ("max_header_bytes", self.max_header_bytes),
            ("stream_window_bytes", self.stream_window_bytes),
            ("connection_window_bytes", self.connection_window_bytes),
        ] {
            // HTTP/2 keeps windows in 31 bits; below 1 KiB no call gets through.
            if size.0 < 1 << 10 || size.0 > (1 << 31) - 1 {
                return Err(Wrong::new(name, "it must be from 1KiB to just below 2GiB"));
            }
        }
        if !self.archive_dir.is_empty() && !self.sorter_enabled {
            return Err(Wrong::new(
                "archive_dir",
                "nothing is dropped, and so nothing archived, without sorter_enabled",
            ));
        }
        if Path::new(&self.archive_dir).starts_with(&self.data_dir) {
            return Err(Wrong::new(
                "archive_dir",
                "it must be outside of data_dir: a loss of one must not take the other",
            ));
        }
        let (grpc, http) = (self.listen, self.http_listen);
        let meet =
            grpc.ip() == http.ip() || grpc.ip().is_unspecified() || http.ip().is_unspecified();
        if meet && grpc.port() == http.port() && grpc.port() != 0 {
            return Err(Wrong::new(
                "http_listen",
                format!("it must have another port than listen, which is {grpc}"),
            ));
        }
        self.check_bucket()?;
        self.check_replica()?;
        self.check_traces()?;
        if self.http_max_connections < LEAST_HTTP_CONNECTIONS {
            return Err(Wrong::new(
                "http_max_connections",
                format!("it must be at least {LEAST_HTTP_CONNECTIONS}"),
            ));
        }
        for (name, zero) in [
            ("max_calls", self.max_calls == 0),
            ("max_concurrent_streams", self.max_concurrent_streams == 0),
            ("heartbeat_interval", self.heartbeat_interval.is_zero()),
            ("keepalive_timeout", self.keepalive_timeout.is_zero()),
            ("handshake_timeout", self.handshake_timeout.is_zero()),
            (
                "stream_progress_timeout",
                self.stream_progress_timeout.is_zero(),
            ),
            ("max_silent_connections", self.max_silent_connections == 0),
            ("http_head_timeout", self.http_head_timeout.is_zero()),
            ("http_idle_timeout", self.http_idle_timeout.is_zero()),
        ] {
            if zero {
                return Err(Wrong::new(name, "it must be more than 0"));
            }
        }
        log_filter(&self.log_filter)
            .map(|_| ())
            .map_err(|why| Wrong::new("log_filter", why))
    }

    /// Describes the acknowledged data that a power cut or a crash can take by default; `None`
    /// in the mode that loses nothing.
    pub(crate) fn can_be_lost(&self) -> Option<String> {
        let interval = self.sync_interval.show();
        match self.sync_mode {
            SyncMode::Strict | SyncMode::Replicated => None,
            SyncMode::Batch => Some(format!(
                "a power cut can take single appends of the last {interval} and one flush; \
                 batches are flushed before their ack"
            )),
            SyncMode::Interval => Some(format!(
                "a power cut can take appends that were acked within the last {interval} and one flush"
            )),
            SyncMode::Async => Some(
                "a power cut can take everything acked that the kernel has not written back; \
                 wald_durable_lag_bytes shows the amount"
                    .to_owned(),
            ),
            SyncMode::Manual => Some(format!(
                "a crash of the process or a power cut can take everything acked since the last \
                 Sync; of that at most {} are in memory only",
                self.buffer_bytes
            )),
        }
    }

    /// Sizes that contradict each other are not lowered in silence.
    fn check_sizes(&self) -> Result<(), Wrong> {
        let (batch, record) = (self.max_batch_bytes, self.max_record_bytes);
        if batch.0 > LARGEST_BATCH_BYTES {
            let most = Size(LARGEST_BATCH_BYTES);
            return Err(Wrong::new(
                "max_batch_bytes",
                format!(
                    "the most is {most}: clients take messages of 64MiB, and could not read it back"
                ),
            ));
        }
        if let Some(fits) = self.largest_batch().filter(|fits| batch.0 > *fits) {
            return Err(Wrong::new(
                "max_batch_bytes",
                format!(
                    "half of a segment must have room for it, and with segment_bytes {} that is {fits} bytes; \
                     lower it, or raise segment_bytes",
                    self.segment_bytes
                ),
            ));
        }
        if record.0 > batch.0 {
            return Err(Wrong::new(
                "max_record_bytes",
                format!("it must not be above max_batch_bytes, which is {batch}"),
            ));
        }
        Ok(())
    }

    /// Rules of TLS, and of the address that clients reach. A start checks the files.
    fn check_tls(&self) -> Result<(), Wrong> {
        let has_tls = self.has_tls();
        if has_tls == self.tls_key.is_empty() {
            let missing = if has_tls { "tls_key" } else { "tls_cert" };
            return Err(Wrong::new(missing, "TLS needs both tls_cert and tls_key"));
        }
        let has_client_auth = self.tls_client_auth != ClientAuth::Off;
        for (name, given) in [
            ("tls_client_auth", has_client_auth),
            ("tls_client_ca", !self.tls_client_ca.is_empty()),
            ("tls_client_crl", !self.tls_client_crl.is_empty()),
            ("tls_cipher_suites", !self.tls_cipher_suites.is_empty()),
            ("http_tls", self.http_tls),
        ] {
            if given && !has_tls {
                return Err(Wrong::new(name, "it needs tls_cert and tls_key"));
            }
        }
        if has_client_auth && self.tls_client_ca.is_empty() {
            return Err(Wrong::new(
                "tls_client_auth",
                "it needs tls_client_ca, the CAs of the clients",
            ));
        }
        for (name, path) in [
            ("tls_client_ca", &self.tls_client_ca),
            ("tls_client_crl", &self.tls_client_crl),
        ] {
            if !has_client_auth && !path.is_empty() {
                return Err(Wrong::new(
                    name,
                    "it has no effect while tls_client_auth is off; set optional or require",
                ));
            }
        }
        self.check_cipher_suites()?;
        self.check_origins()
    }

    /// Rules for the keys of records.
    fn check_encryption(&self) -> Result<(), Wrong> {
        let (file, command) = (&self.encryption_key_file, &self.encryption_key_command);
        if !file.is_empty() && !command.is_empty() {
            return Err(Wrong::new(
                "encryption_key_command",
                "encryption_key_file is set, too; the keys come from one of both",
            ));
        }
        if file.is_empty() && command.is_empty() {
            return match self.encryption_scope {
                EncryptionScope::Store => Ok(()),
                _ => Err(Wrong::new(
                    "encryption_scope",
                    "it has no effect without encryption_key_file or encryption_key_command",
                )),
            };
        }
        if self.encryption_scope == EncryptionScope::Tenant && !self.has_auth() {
            return Err(Wrong::new(
                "encryption_scope",
                "tenants are in auth_file, which is not set",
            ));
        }
        Ok(())
    }

    /// An empty name among the trusted keys is a mistake, and must not mean that every backup is trusted.
    fn check_trust(&self) -> Result<(), Wrong> {
        let mut names = self.backup_trust.split(',');
        if !self.backup_trust.is_empty() && names.any(|name| name.trim().is_empty()) {
            return Err(Wrong::new(
                "backup_trust",
                "one of its keys is empty; separate the keys by single commas, or leave the setting out to trust every backup",
            ));
        }
        Ok(())
    }

    /// Rules for identities, and for ports that other machines can reach.
    fn check_auth(&self) -> Result<(), Wrong> {
        let (has_tls, has_auth) = (self.has_tls(), self.has_auth());
        for (name, given) in [
            ("metrics_open", self.metrics_open),
            ("insecure_tokens", self.insecure_tokens),
        ] {
            if given && !has_auth {
                return Err(Wrong::new(name, "it has no effect without auth_file"));
            }
        }
        if has_auth && self.echo {
            return Err(Wrong::new(
                "echo",
                "the echo service has no limits and asks for no credential; it cannot be served with auth_file",
            ));
        }
        if !self.listen.ip().is_loopback() {
            if !self.insecure_listen && !has_tls {
                return Err(Wrong::new(
                    "listen",
                    "the service speaks plaintext, and other machines can reach that port; listen on \
                     127.0.0.1, set tls_cert and tls_key, or say --insecure-listen if something else \
                     protects the port",
                ));
            }
            let knows_clients = has_auth || self.tls_client_auth == ClientAuth::Require;
            if !knows_clients && !self.insecure_listen {
                return Err(Wrong::new(
                    "listen",
                    "every client that reaches that port could read and append everything; set auth_file, \
                     or tls_client_auth to require, or say --insecure-listen if something else protects \
                     the port",
                ));
            }
            if has_auth && !has_tls && !self.insecure_tokens {
                return Err(Wrong::new(
                    "insecure_listen",
                    "tokens would cross the network in plaintext; set tls_cert and tls_key, or say \
                     --insecure-tokens as well",
                ));
            }
        }
        let parts = [("console", self.console), ("http_api", self.http_api)];
        let exposed = parts.iter().find(|(_, part)| *part == Exposure::On);
        let Some((setting, _)) = exposed.filter(|_| !self.http_is_private()) else {
            return Ok(());
        };
        let why = match has_auth {
            true if self.http_tls || self.insecure_tokens => return Ok(()),
            true => {
                "tokens and logins would cross the network in plaintext; set http_tls, or say \
                 --insecure-tokens"
            }
            false if self.insecure_listen => return Ok(()),
            false if self.http_listen.ip().is_loopback() => {
                "tls_client_auth is require, and the HTTP port requires no certificate: every program of \
                 this machine could use it without one; set auth_file, or say --insecure-listen if \
                 something else protects the port"
            }
            false => {
                "everyone who reaches that port could read every record; set http_tls and auth_file, or \
                 say --insecure-listen if something else protects the port"
            }
        };
        Err(Wrong::new(setting, why))
    }

    fn check_cipher_suites(&self) -> Result<(), Wrong> {
        let wrong = |why: String| Err(Wrong::new("tls_cipher_suites", why));
        if self.tls_cipher_suites.is_empty() {
            return Ok(());
        }
        let mut is_usable = false;
        for name in self.tls_cipher_suites.split(',').map(str::trim) {
            if !CIPHER_SUITES.contains(&name) {
                let known = CIPHER_SUITES.join(", ");
                return wrong(format!("{name:?} is not one of {known}"));
            }
            let is_tls12 = name.starts_with("TLS_ECDHE_");
            is_usable |= !is_tls12 || self.tls_min_version == TlsVersion::Tls12;
        }
        match is_usable {
            true => Ok(()),
            false => wrong("none is of TLS 1.3, which tls_min_version requires".to_owned()),
        }
    }

    /// Whether callers need a credential.
    pub(crate) fn has_auth(&self) -> bool {
        !self.auth_file.is_empty()
    }

    /// Whether callers of the HTTP port on other machines send their tokens in plaintext.
    pub(crate) fn sends_tokens_in_plaintext(&self) -> bool {
        self.has_auth() && !self.http_tls && !self.http_listen.ip().is_loopback()
    }

    /// Whether gRPC is served over TLS.
    pub(crate) fn has_tls(&self) -> bool {
        !self.tls_cert.is_empty()
    }

    /// A warning if clients on other machines can use the gRPC port without a credential.
    pub(crate) fn exposed(&self) -> Option<&'static str> {
        let knows_clients = self.has_auth() || self.tls_client_auth == ClientAuth::Require;
        if self.listen.ip().is_loopback() || (knows_clients && self.has_tls()) {
            return None;
        }
        Some(match self.has_tls() {
            true => {
                "clients on other machines need no certificate, and can read and append everything"
            }
            false => "plaintext on an address that other machines can reach",
        })
    }

    fn check_bucket(&self) -> Result<(), Wrong> {
        let endpoint = &self.bucket_endpoint;
        match endpoint.is_empty() || endpoint.starts_with("https://") {
            true => Ok(()),
            false if !endpoint.starts_with("http://") => Err(Wrong::new(
                "bucket_endpoint",
                "expected a URL that begins with https://",
            )),
            false if self.bucket_insecure => Ok(()),
            false => Err(Wrong::new(
                "bucket_endpoint",
                "records would cross the network in plaintext; use https://, or give your consent \
                 with --bucket-insecure",
            )),
        }
    }

    /// Rules of the replica.
    fn check_replica(&self) -> Result<(), Wrong> {
        if self.has_replica() && !cfg!(feature = "object") {
            return Err(Wrong::new("bucket_url", wald_bucket::NOT_BUILT));
        }
        if self.has_replica()
            && let Err(bad) = self.bucket_url.parse::<wald_bucket::BucketUrl>()
        {
            return Err(Wrong::new("bucket_url", bad.to_string()));
        }
        if self.replica_max_lag.0 < LEAST_REPLICA_LAG {
            return Err(Wrong::new("replica_max_lag", "the least is 1MiB"));
        }
        for (name, span) in [
            ("replica_interval", self.replica_interval),
            ("replica_keep", self.replica_keep),
        ] {
            if span.is_zero() {
                return Err(Wrong::new(name, "it must be more than 0"));
            }
        }
        if !(LEAST_LEASE_TTL..=MOST_LEASE_TTL).contains(&self.lease_ttl) {
            return Err(Wrong::new("lease_ttl", "expected 2s to 10min"));
        }
        if self.stand_by && !self.has_replica() {
            let needed = "it needs bucket_url, the bucket that the nodes share";
            return Err(Wrong::new("stand_by", needed));
        }
        let connects_by_tls = self.stand_by && self.has_tls();
        if !connects_by_tls && !self.peer_ca.is_empty() {
            let needed = "it has no effect without stand_by, tls_cert and tls_key";
            return Err(Wrong::new("peer_ca", needed));
        }
        if !is_node_name(&self.node_id) {
            return Err(Wrong::new(
                "node_id",
                "expected at most 253 printable characters of ASCII, without blanks",
            ));
        }
        let is_listed = self.node_id.len() <= LONGEST_LISTED_NODE && !self.node_id.contains('/');
        if self.stand_by && !is_listed {
            return Err(Wrong::new(
                "node_id",
                "with stand_by, expected at most 100 characters without a slash; the other nodes would not see this one",
            ));
        }
        let has_port = |text: &str| {
            let parts = text.rsplit_once(':');
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        let is_address = |text: &str| is_node_name(text) && has_port(text);
        if !(self.advertise.is_empty() || is_address(&self.advertise)) {
            return Err(Wrong::new("advertise", "expected HOST:PORT"));
        }
        Ok(())
    }

    fn check_traces(&self) -> Result<(), Wrong> {
        let endpoint = &self.otlp_endpoint;
        if !endpoint.is_empty() && !cfg!(feature = "otlp") {
            return Err(Wrong::new(
                "otlp_endpoint",
                "this wald cannot send traces; build it with --features otlp",
            ));
        }
        if !endpoint.is_empty() && !endpoint.starts_with("http://") {
            return Err(Wrong::new(
                "otlp_endpoint",
                "expected http://HOST:PORT (a collector on this machine; spans are sent in \
                 plaintext)",
            ));
        }
        if self.otlp_sample_percent > 100 {
            return Err(Wrong::new("otlp_sample_percent", "it must be at most 100"));
        }
        Ok(())
    }

    /// Whether the HTTP port has the web console.
    pub(crate) fn has_console(&self) -> bool {
        self.serves(self.console)
    }

    /// Whether the HTTP port has the HTTP API.
    pub(crate) fn has_http_api(&self) -> bool {
        self.serves(self.http_api)
    }

    fn serves(&self, part: Exposure) -> bool {
        match part {
            Exposure::Auto => self.http_is_private(),
            Exposure::On => true,
            Exposure::Off => false,
        }
    }

    /// Whether only callers that gRPC admits, too, reach the HTTP port.
    fn http_is_private(&self) -> bool {
        // The HTTP port never requires a certificate, because probes have none.
        let admits_strangers = self.tls_client_auth == ClientAuth::Require && !self.has_auth();
        self.http_listen.ip().is_loopback() && !admits_strangers
    }

    /// The origins of pages that may call the HTTP API.
    pub(crate) fn http_api_origins(&self) -> impl Iterator<Item = &str> {
        let origins = self.http_api_origins.split(',').map(str::trim);
        origins.filter(|origin| !origin.is_empty())
    }

    fn check_origins(&self) -> Result<(), Wrong> {
        for origin in self.http_api_origins() {
            let uri = origin.parse::<http::Uri>().ok();
            let is_default = |uri: &http::Uri| {
                let port = uri.port_u16();
                matches!(
                    (uri.scheme_str(), port),
                    (Some("http"), Some(80)) | (Some("https"), Some(443))
                )
            };
            let is_origin = uri.is_some_and(|uri| {
                uri.scheme_str()
                    .is_some_and(|scheme| scheme == "http" || scheme == "https")
                    && uri
                        .authority()
                        .is_some_and(|host| !host.as_str().contains('@'))
                    && uri.path_and_query().is_none_or(|path| path == "/")
                    && !origin.ends_with('/')
                    // Browsers send neither.
                    && !is_default(&uri)
                    && !origin.contains(char::is_uppercase)
            });
            if !is_origin {
                let why = format!(
                    "{origin:?} is no origin as browsers send it; give scheme, host and port alone, in lower case and without \
                     the default port, such as https://app.example"
                );
                return Err(Wrong::new("http_api_origins", why));
            }
        }
        Ok(())
    }

    /// The event loops to start.
    pub(crate) fn workers(&self) -> usize {
        match self.worker_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            given => given,
        }
    }
}

/// Reads the setting `log_filter`.
///
/// # Errors
/// If it cannot be read. A word that is no level is refused, too. It would be read as a target: that target would be
/// logged whole, and all others not at all.
pub(crate) fn log_filter(text: &str) -> Result<tracing_subscriber::EnvFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
    let words = text.split(',').map(str::trim);
    // A directive with a bracket or `=` is left to the filter.
    let mut bare =
        words.filter(|word| !word.is_empty() && !word.contains(['=', '[', ']', '{', '}']));
    match bare.find(|word| !is_level(word)) {
        Some(word) => Err(format!(
            "{word:?} is no level; expected off, error, warn, info, debug, trace or TARGET=LEVEL, with commas between"
        )),
        None => {
            let filter = tracing_subscriber::EnvFilter::try_new(text);
            filter
                .map(|filter| without_chatter(filter, text))
                .map_err(|error| error.to_string())
        }
    }
}

/// Leaves out the lines that SlateDB writes for each open and each merge, unless the operator names it.
fn without_chatter(
    filter: tracing_subscriber::EnvFilter,
    text: &str,
) -> tracing_subscriber::EnvFilter {
    let shows_warnings = filter
        .max_level_hint()
        .is_none_or(|most| most >= tracing_subscriber::filter::LevelFilter::WARN);
    match "slatedb=warn".parse() {
        Ok(quiet) if shows_warnings && !text.contains("slatedb") => filter.add_directive(quiet),
        _ => filter,
    }
}

#[cfg(test)]
mod tests;
