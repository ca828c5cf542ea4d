//! Settings: one table for names, documentation and defaults, from which come the
//! flags, the environment variables, the keys of the file, `wald config show` and
//! `wald config reference`.
//!
//! ```text
//! flag --segment-bytes  >  WALD_SEGMENT_BYTES  >  segment_bytes in --config FILE  >  default
//! ```
//!
//! Every value is text until it is parsed by the type of its setting, whichever way it
//! came, so that a size is written the same in all of them.

mod layers;
mod value;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wald_storage::{ConfigError, Retention, StorageConfig};

pub(crate) use layers::{
    ConfigProblem, Effective, Layers, env_name, flag_name, misspelt, reference,
};
pub(crate) use value::{
    ConsoleMode, DamagePolicy, FlushFailurePolicy, LogFormat, LogPattern, LogPatterns,
    ReadStrategy, Size, SyncMode, Value,
};

/// Largest batch: clients take messages of 64 MiB, and a message has names and places, too.
const LARGEST_BATCH_BYTES: u64 = 63 << 20;

/// Minimum places of the port: they leave room for probes next to a console.
pub(crate) const LEAST_HTTP_CONNECTIONS: usize = 8;

/// One row of the table of settings.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Its key in a file; flag and variable are derived from it.
    pub(crate) name: &'static str,
    /// Its effect, its bounds and their consequences.
    pub(crate) doc: &'static str,
    /// The default, as one would write it.
    pub(crate) default: &'static str,
    /// Whether it may be given as a flag without a value.
    pub(crate) switch: bool,
}

macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:literal; )+) => {
        /// Every setting, parsed and checked.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub(crate) struct Config {
            $( $(#[doc = $doc])+ pub(crate) $name: $type, )+
        }

        /// The table: everything that can be set.
        pub(crate) const SETTINGS: &[Setting] = &[
            $( Setting {
                name: stringify!($name),
                doc: concat!($($doc, "\n"),+),
                default: $default,
                switch: <$type as Value>::SWITCH,
            }, )+
        ];

        impl Config {
            /// Parses the text found for each setting; collects every problem, so that
            /// a user mends a file once. Gives back the values as Wald writes them.
            fn parse(
                mut text_of: impl FnMut(&'static str) -> String,
                mut problem: impl FnMut(&'static str, String),
            ) -> Option<Self> {
                $( let $name = match <$type as Value>::parse(&text_of(stringify!($name))) {
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

settings! {
    /// Address and port of the gRPC service. Port 0 takes a free one, which the start
    /// line prints; an address left out (":6925") is 127.0.0.1.
    listen: SocketAddr = "127.0.0.1:6925";
    /// Address and port of /metrics, /livez, /readyz and the web console.
    http_listen: SocketAddr = "127.0.0.1:6926";
    /// Whether the HTTP port serves the web console, which shows records to every caller that
    /// reaches it and changes nothing. auto: only if http_listen is a loopback address. on:
    /// always; something else must protect the port. off: never.
    console: ConsoleMode = "auto";
    /// Names of this machine, separated by commas, under which browsers may open the console
    /// and scrapers may read /metrics. A name that begins with a dot covers every name that
    /// ends with it. localhost and plain addresses always pass; for /metrics, names without a
    /// dot pass too. Other names are refused, because a stranger's page can have its own name
    /// resolved to this machine (DNS rebinding).
    console_hosts: String = "";
    /// Maximum connections of the HTTP port. At least 8. When all are taken, the connection
    /// that has been idle for the longest time ends, so that probes always get in.
    http_max_connections: usize = "256";
    /// Maximum time for the head of an HTTP request, from the accept or from its first byte
    /// (> 0). The connection ends after it.
    http_head_timeout: Duration = "10s";
    /// Maximum time between two HTTP requests on one connection (> 0). The connection ends
    /// after it.
    http_idle_timeout: Duration = "1m";
    /// Permits gRPC without TLS on an address that other machines can reach. Every client that
    /// reaches the port can then read and append everything.
    insecure_listen: bool = "false";
    /// Directory that holds the store. Created if it is missing, and locked while in use.
    data_dir: PathBuf = "./wald-data";
    /// Permits root to serve, repair or restore to a directory of another user. The new files
    /// belong to root, so a daemon of that user cannot open the store afterwards.
    allow_foreign_owner: bool = "false";
    /// Whether a data directory without a store gets a new store. false: the start is refused
    /// (exit code 65), because the volume may not be mounted. Set false after the first start.
    create_store: bool = "true";
    /// Durability of an append that names none, in logs without a mode of their own. strict:
    /// acknowledged after a flush, so a power cut loses nothing. batch: after a flush for
    /// AppendBatch, after a write for Append. interval: after a write, flushed within
    /// sync_interval. async: after a write, flushed when the kernel chooses. manual: once in
    /// memory, so a crash of the process loses every append since the last Sync.
    sync_mode: SyncMode = "strict";
    /// Maximum time that written data stays unflushed if no caller asks for a flush, in all
    /// modes but async and manual. Bounds the loss of a power cut.
    sync_interval: Duration = "100ms";
    /// Maximum unflushed bytes before a flush is forced, in all modes but async and manual. At
    /// least 1.
    sync_bytes: Size = "16MiB";
    /// Maximum bytes that all logs in mode manual hold in memory together. When they are full,
    /// all of them are written.
    buffer_bytes: Size = "8MiB";
    /// Idle time after which the journal writes a marker, which proves that its newest records
    /// are durable.
    marker_delay: Duration = "50ms";
    /// Size of every new segment file: a multiple of 4KiB, at least 64KiB. An empty store takes
    /// 1 + pool_segments + reserve_segments of them.
    segment_bytes: Size = "16MiB";
    /// Number of segments kept ready for the next roll. At least 1. Each takes segment_bytes.
    pool_segments: usize = "2";
    /// Number of further segments kept ready, which records never use. At least 1. On a full
    /// disk, trims and deletions continue in them, and a restart begins in one.
    reserve_segments: usize = "2";
    /// Maximum size of a record, data and headers together. At most max_batch_bytes, which
    /// lowers the default.
    max_record_bytes: Size = "1MiB";
    /// Maximum size of a request over all its logs, in encoded bytes. At most 63MiB, and at
    /// most the room in half a segment, which lowers the default. The transport accepts twice
    /// this size, so that the server can answer a larger request with REQUEST_TOO_LARGE and its
    /// size.
    max_batch_bytes: Size = "4MiB";
    /// Maximum number of records in one request, over all its logs.
    max_batch_records: u32 = "1000";
    /// Maximum bytes of appends in flight. New appends beyond it are answered BUSY. Bounds
    /// memory, and the wait for an ack. One connection may use as much as is still free for
    /// others, so at most half if it is alone: no connection can keep the others out.
    max_inflight_bytes: Size = "32MiB";
    /// Maximum bytes of requests of one append session that are read and not acked. Further
    /// requests wait in HTTP/2 windows and at the client. One request is always read, whatever
    /// its size. The bytes that max_inflight_bytes leaves to the connection are a second bound.
    session_window_bytes: Size = "4MiB";
    /// Number of newest batches of each producer whose repeats get the original answer. At
    /// least 1. Repeats of older batches are refused. Memory: about 16 bytes each.
    producer_window: u64 = "1024";
    /// Time after which an idle producer is forgotten (0 = never). A log then refuses the
    /// producer's epoch (PRODUCER_EXPIRED), so that no late retry is appended twice. The producer
    /// may begin again with the next epoch.
    producer_max_idle: Duration = "168h";
    /// Maximum number of producers of one log; at least 1. New ones beyond that are answered
    /// QUOTA. Idle ones are forgotten after producer_max_idle.
    max_producers_per_log: u64 = "10000";
    /// Maximum number of cursors of one log; at least 1. New ones beyond that are answered
    /// QUOTA.
    max_cursors_per_log: u64 = "10000";
    /// Maximum number of logs in the store; at least 1. New ones beyond that are answered
    /// QUOTA. A deleted log no longer counts, but at most 1/4 of this number and 1,024 more
    /// deleted logs may wait for the sorter. Memory: about 350 bytes a log, and its name.
    max_logs: u64 = "1000000";
    /// Maximum number of producers of all logs; at least 1. New ones beyond that are answered
    /// QUOTA. A producer that appends to two logs counts twice. Memory: about 450 bytes a
    /// producer, its id, and 40 bytes for each batch that producer_window remembers.
    max_producers: u64 = "100000";
    /// Maximum number of cursors of all logs; at least 1. New ones beyond that are answered
    /// QUOTA. Memory: about 350 bytes a cursor, and its name.
    max_cursors: u64 = "100000";
    /// Maximum size of the names of all logs, producers and cursors; at least 1. A request that
    /// needs a new name beyond it is answered QUOTA.
    max_name_bytes: Size = "64MiB";
    /// Whether names of new logs, producers and cursors may have characters that people do not
    /// see: zero-width ones, bidirectional controls, blanks other than the plain space. false: such
    /// a name is refused (INVALID_LOG_NAME). Existing names stay usable.
    allow_invisible_names: bool = "false";
    /// Maximum time by which a record's own timestamp may be ahead of the server's clock.
    max_timestamp_ahead: Duration = "1m";
    /// Whether the first append to an unknown name creates the log.
    auto_create: bool = "true";
    /// Reaction of a start to damage that it finds. quarantine: names the damaged records and serves
    /// everything else; refuse: does not start (exit code 65). A start finds missing
    /// and shortened files, and damaged frames that no index covers: mostly the newest. It does not read
    /// older records. Run `wald verify` before the start to check all of them.
    on_damage: DamagePolicy = "quarantine";
    /// Reaction to a failed flush or write of the journal. exit: answer the requests in flight
    /// and exit with code 70; a supervisor restarts the daemon, and recovery decides which
    /// records survived. read_only: stay up, report not ready, and serve reads.
    on_flush_failure: FlushFailurePolicy = "exit";
    /// Method of reading finished segments. pread: positional reads. mmap: memory maps. A read
    /// from a map first brings its pages in, so that an unreadable sector is an error. Only a
    /// device that fails between these two steps ends the process (SIGBUS).
    read_strategy: ReadStrategy = "pread";
    /// Maximum number of finished segments that are open, scans included; at least 1. Lowered at
    /// start, to 16 at least, where the limit of open files has no room for them.
    max_open_segments: usize = "256";
    /// Number of threads for reads that may wait for the disk. At least 1.
    reader_threads: usize = "4";
    /// Maximum bytes of sealed segments that scrubbing reads in a second (0 = no scrubbing). It
    /// finds data that the device has lost while a backup still has it. The default is little
    /// for any device and covers 337 GiB a day. Appends go first.
    scrub_bytes_per_second: Size = "4MiB";
    /// Minimum time from the beginning of one scrubbing pass to the beginning of the next. The
    /// first pass begins with the start.
    scrub_interval: Duration = "24h";
    /// Default maximum age (0 = no limit). Logs without their own retention drop batches that
    /// arrived longer ago. The age follows a clock that adopts jumps of the system's clock
    /// slowly: back after 10 minutes, ahead at most twice as fast as time passes.
    retention_max_age: Duration = "0s";
    /// Default maximum size in segments (0 = no limit). Logs without their own retention drop
    /// older batches once the newest ones reach it, so up to one batch more is kept.
    retention_max_bytes: Size = "0B";
    /// Default maximum number of records (0 = no limit). Logs without their own retention drop
    /// the oldest records beyond it.
    retention_max_records: u64 = "0";
    /// Maximum size of the records of one log that only its cursors keep from retention (0 = no
    /// bound). Beyond it the oldest are dropped, although a cursor has not passed them: its consumer
    /// gets a gap (EXPIRED). Concerns logs with respect_cursors.
    cursor_hold_bytes: Size = "0B";
    /// Logs whose cursors have the metric wald_cursor_lag_records, separated by commas (empty =
    /// none). A name that ends with an asterisk covers every name that begins with the rest. At
    /// most 1,000 cursors are shown, the first by name. Names of logs and cursors become
    /// labels.
    cursor_lag_logs: LogPatterns = "";
    /// Pause between two retention passes (> 0). Records may outlive their bound by this long.
    retention_interval: Duration = "10s";
    /// Whether sealed segments are sorted by log. Only sorting gives the space of trimmed and
    /// deleted records back. Versions that do not know sorting refuse a store that was sorted
    /// once.
    sorter_enabled: bool = "true";
    /// Maximum disk space that sorting takes beyond 1.3 times the kept records: for segments
    /// that wait, and for a new run while the files it replaces still exist. Less than 4 segments
    /// counts as 4 segments.
    sorter_step_bytes: Size = "512MiB";
    /// Maximum bytes that the sorter reads and writes in a second (0 = no bound). Appends go
    /// first.
    sorter_bytes_per_second: Size = "0B";
    /// Directory, outside of data_dir, to which the sorter moves expired records before it
    /// drops them (empty = none). `wald archive` lists and restores them. The directory must
    /// exist. Records that a client trims or deletes are never kept.
    archive_dir: String = "";
    /// Number of event loops that serve gRPC (0 = one for every core). Each is a thread with
    /// its own share of the connections.
    worker_threads: usize = "0";
    /// Maximum number of gRPC connections (0 = no bound). One more takes the place of a connection
    /// without calls, and waits while all have calls. Lowered at start where open files or
    /// memory_limit have no room for them.
    max_connections: usize = "10000";
    /// Maximum memory that the bounds of this file may add up to (0 = the cgroup's limit, or
    /// half of RAM if there is none). A start lowers max_calls and max_connections until they
    /// fit. If that is not enough, the start is refused where this is set, and warns where it
    /// is not.
    memory_limit: Size = "0B";
    /// Maximum number of gRPC connections that have sent no request yet (> 0). One more closes
    /// the oldest of them.
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
    /// Whether to answer reflection (grpcurl without proto files).
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
    /// "info,wald=debug". SIGHUP reads it again.
    log_filter: String = "info";
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
    /// Retention of logs that have none of their own.
    pub(crate) fn retention(&self) -> Retention {
        let bound = |number: u64| (number != 0).then_some(number);
        Retention {
            max_age: Some(self.retention_max_age).filter(|age| !age.is_zero()),
            max_bytes: bound(self.retention_max_bytes.0),
            max_records: bound(self.retention_max_records),
            respect_cursors: false,
        }
    }

    /// The engine's share of the settings.
    pub(crate) fn storage(&self) -> Result<StorageConfig, Wrong> {
        let narrow = |name: &'static str, size: Size| {
            u32::try_from(size.0).map_err(|_| Wrong::new(name, "the most is 3GiB"))
        };
        Ok(StorageConfig {
            segment_bytes: self.segment_bytes.0,
            pool_segments: self.pool_segments,
            reserve_segments: self.reserve_segments,
            sync_mode: self.sync_mode.into(),
            sync_interval: self.sync_interval,
            sync_bytes: self.sync_bytes.0,
            buffer_bytes: self.buffer_bytes.0,
            marker_delay: self.marker_delay,
            max_inflight_bytes: self.max_inflight_bytes.0,
            max_record_bytes: narrow("max_record_bytes", self.max_record_bytes)?,
            max_batch_bytes: narrow("max_batch_bytes", self.max_batch_bytes)?,
            max_batch_records: self.max_batch_records,
            max_future: self.max_timestamp_ahead,
            producer_window: self.producer_window,
            producer_max_idle: self.producer_max_idle,
            max_producers_per_log: self.max_producers_per_log,
            max_cursors_per_log: self.max_cursors_per_log,
            max_logs: self.max_logs,
            max_producers: self.max_producers,
            max_cursors: self.max_cursors,
            max_name_bytes: self.max_name_bytes.0,
            allow_invisible_names: self.allow_invisible_names,
            auto_create: self.auto_create,
            create_store: self.create_store,
            on_damage: self.on_damage.into(),
            read_strategy: self.read_strategy.into(),
            max_open_segments: self.max_open_segments,
            reader_threads: self.reader_threads,
            scrub_bytes_per_second: self.scrub_bytes_per_second.0,
            scrub_interval: self.scrub_interval,
            retention: self.retention(),
            cursor_hold_bytes: self.cursor_hold_bytes.0,
            retention_interval: self.retention_interval,
            sorter_enabled: self.sorter_enabled,
            sorter_step_bytes: self.sorter_step_bytes.0,
            sorter_bytes_per_second: self.sorter_bytes_per_second.0,
        })
    }

    /// Lowers defaults to the values that they depend on. `is_given` reports whether the
    /// operator has set a setting.
    fn follow(&mut self, is_given: impl Fn(&str) -> bool) {
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
        let storage = self.storage().ok()?;
        storage.check().ok().map(|()| storage.largest_batch())
    }

    /// Rules that take more than one setting, or more than a type.
    fn check(&self) -> Result<(), Wrong> {
        self.storage()?.check().map_err(|error| match error {
            ConfigError::Zero(name) => Wrong::new(name, "it must be at least 1"),
            ConfigError::SegmentTooSmall(_) => Wrong::new("segment_bytes", "the least is 64KiB"),
            ConfigError::SegmentTooLarge(_) => {
                Wrong::new("segment_bytes", "the most is just below 4GiB")
            }
            ConfigError::SegmentUnaligned(_) => {
                Wrong::new("segment_bytes", "it must be a multiple of 4096")
            }
        })?;
        self.check_sizes()?;
        if !self.listen.ip().is_loopback() && !self.insecure_listen {
            return Err(Wrong::new(
                "listen",
                "every client that reaches that port could read and append everything, because the \
                 service speaks plaintext; listen on 127.0.0.1, or say --insecure-listen if something else \
                 protects the port",
            ));
        }
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
            ("sync_interval", self.sync_interval.is_zero()),
            ("sync_bytes", self.sync_bytes.0 == 0),
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
            SyncMode::Strict => None,
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
        match self.console {
            ConsoleMode::Auto => self.http_listen.ip().is_loopback(),
            ConsoleMode::On => true,
            ConsoleMode::Off => false,
        }
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
        None => tracing_subscriber::EnvFilter::try_new(text).map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests;
