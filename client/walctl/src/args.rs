//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use clap_complete::{ArgValueCompleter, Shell};
use wald_client::proto::{Compression, SyncMode};
use wald_client::{Durability, Visibility};
use wald_connection::ConnectionArgs;

use crate::complete;
use crate::input::InputFormat;
use crate::output::Output;
use crate::parse::{self, Moment, ScanBegin};

const EXIT_CODES: &str = "\
Exit codes: 0 ok, 1 failed, 2 usage, 3 not found or nothing there, 4 unavailable, \
5 data loss, 6 denied, 78 unusable settings of a bucket or unsuitable bucket, 130 interrupted.";

/// Append to the logs of a Wald server, and read them back.
#[derive(Debug, Parser)]
#[command(name = "walctl", version = wald_text::VERSION, after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Global {
    /// Maximum time for one call, such as 5s [default: 10s]. Until then walctl repeats
    /// connection attempts, and every request that is safe to repeat
    #[arg(long, global = true, value_name = "SPAN", value_parser = wald_text::units::span, help_heading = wald_connection::HEADING)]
    pub(crate) timeout: Option<Duration>,
    /// Form of the output on stdout
    #[arg(long, short = 'o', global = true, value_enum, default_value_t = Output::Text)]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Append records from a file or stdin, in order.
    Append(AppendArgs),
    /// Append records to several logs, all or nothing.
    Batch(BatchArgs),
    /// Read a page of a log.
    Read(ReadArgs),
    /// Read a range of a log, of all logs with a prefix, or of everything.
    Scan(ScanArgs),
    /// Print the last records of a log, and records that are appended later
    Tail(TailArgs),
    /// List logs.
    Logs(LogsArgs),
    /// Create, show, change or delete a log.
    #[command(subcommand)]
    Log(LogCommand),
    /// Make and change logs until they are as a file says. A second run changes nothing
    Apply(ApplyArgs),
    /// Forget the records of a log below an lsn, for ever. Asks first on a terminal. A server
    /// that sorts (`sorter_enabled`) gives their space back to the disk.
    Trim(TrimArgs),
    /// Shut out the older writers of a log: raise its writer epoch.
    Fence(FenceArgs),
    /// List, show, move or delete the cursors of a log: positions of its consumers
    #[command(subcommand)]
    Cursor(CursorCommand),
    /// List or forget the producers of a log: its exactly-once writers
    #[command(subcommand)]
    Producer(ProducerCommand),
    /// Show the state file of a durable producer or follower, or decide what became of its batches
    #[command(subcommand)]
    State(StateCommand),
    /// Wait until everything accepted before is flushed.
    Sync(SyncArgs),
    /// Show the server's identity, readiness, flush promises and journal; exits with 4 if not
    /// ready
    Status(StatusArgs),
    /// Show who the server takes this caller for: principal, tenant, rights, and the expiry of the
    /// credential
    Whoami,
    /// Show the nodes of a store in a bucket, or hand the store to another node
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Name the settings of servers: add, use, list, show or remove contexts
    #[command(subcommand)]
    Context(ContextCommand),
    /// Have the server check everything that it stores, while it serves: every checksum, chain,
    /// index and digest. The server quarantines damage at once; the exit code is 5 if there is
    /// any
    Verify(VerifyArgs),
    /// Ask whether the server is ready; exits with 4 if not.
    Health(HealthArgs),
    /// Print the versions of walctl and of the server
    Version,
    /// Show the busiest logs, again every 2 seconds, until Ctrl-C
    Top(TopArgs),
    /// Write a document for a person who helps from afar: versions, status, settings, logs and cursors. It has no records
    /// and no secrets
    SupportBundle(BundleArgs),
    /// Save the store to a directory of backups or to a bucket, or look after the backups there.
    Backup(BackupArgs),
    /// Print the script with which a shell completes commands, options and names of logs.
    Completion {
        /// The shell.
        shell: Shell,
    },
    /// Print the man page of walctl, or of one of its commands (`walctl man log create`).
    Man {
        /// The command [default: walctl as a whole].
        command: Vec<String>,
    },
}

const APPEND_HELP: &str = "\
Records are appended in the order of the input, in batches as large as the server takes, one \
after the other. stderr gets the number of records; with --output json or jsonl stdout gets an \
object with log, first_lsn and next_lsn for each log. Without a file, records are read from \
stdin, on a terminal one a line until Ctrl-D.

A batch is sent when the next record does not fit into it, or when the input ends. Time does not \
count: records of a slow pipe, such as `tail -f FILE | walctl append LOG`, wait in walctl. At most \
as many wait as one request may have, 1,000 or 4 MiB by default (the server's max_batch_records \
and max_batch_bytes). They are lost if walctl is killed or gets Ctrl-C. To append each record at \
once, run `walctl append LOG --text TEXT` for it, or use an append session of a client.

--format json and delimited take the output of `walctl scan --output json` and `--output delimited`, \
with headers and times. Each record goes to the log that it names, or all go to LOG:

  walctl scan --all --output delimited | walctl --endpoint OTHER append --format delimited

--producer ID makes a load safe to run again from the start: the server recognises batches that it \
has. Run it with the same input, format and options. The last 1,024 batches are compared (the \
server's producer_window); older ones are skipped. An input that ends before the first batch that the \
server compares fails: nothing shows that its records are there.";

const BATCH_HELP: &str = "\
Input: one JSON object per line, {\"log\": ...} with one of \"text\": \"...\", \"data\": \"base64\" and \
\"value\": any JSON; with \"headers\": [{\"key\": ..., and \"value\" or \"data\": ...}] and \"time\" if \
wanted. `walctl scan --output json` prints such lines.

A log that was fenced cannot be written with it: it names no writer epoch.";

const SCAN_HELP: &str = "\
--output jsonl prints each payload on a line of its own: JSON as it was appended, other text as a \
JSON string, other bytes as {\"data\": \"base64\"}. --output json prints each record on a line of \
its own, an object with log, lsn, time, headers, and one of value (JSON), text and data (base64). \
--output delimited prints length-delimited wald.v1.RecordBatch messages. --output raw prints \
payloads, each followed by a newline. `walctl append --format json` and `--format delimited` take \
records back with headers and times.

On a terminal, control characters and invisible ones are escaped in every form.

Missing records are named on stderr; if they are damaged or lost, the exit code is 5.";

#[derive(Debug, ClapArgs)]
#[command(after_long_help = APPEND_HELP, override_usage = "walctl append [OPTIONS] <LOG> [FILE]\n       \
    walctl append [OPTIONS] --log-from-field <FIELD> [FILE]")]
pub(crate) struct AppendArgs {
    /// The log, and the file to read; without a file, or with `-`, stdin. The log is left
    /// out with --log-from-field.
    #[arg(value_name = "LOG|FILE", num_args = 0..=2, add = ArgValueCompleter::new(complete::logs))]
    pub(crate) places: Vec<String>,
    /// Format of the input, which separates its records [default: by the file's extension, else
    /// lines]
    #[arg(long, value_enum)]
    pub(crate) format: Option<InputFormat>,
    /// Each record is a JSON object; its field FIELD names its log. Logs that were fenced
    /// cannot be written so: there is no writer epoch for each.
    #[arg(long, value_name = "FIELD")]
    pub(crate) log_from_field: Option<String>,
    /// Prefix for the names of logs that come from the records
    #[arg(
        long,
        value_name = "PREFIX",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) log_prefix: String,
    /// Text of a record, instead of a file; may be given several times
    #[arg(long, value_name = "TEXT", conflicts_with = "format")]
    pub(crate) text: Vec<String>,
    /// Header for every record; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse::header)]
    pub(crate) header: Vec<(String, String)>,
    /// Time of records without their own: RFC 3339, or a span before now (10m). The times of a log
    /// never go back: an earlier time than its newest is stored as the newest, with a warning
    /// [default: the server's clock]
    #[arg(long, value_name = "TIME", value_parser = parse::moment)]
    pub(crate) time: Option<Moment>,
    /// Name of a producer: the load continues after a lost connection, and can be run again
    /// from the start without duplicates
    #[arg(long, value_name = "ID", conflicts_with = "expected_lsn")]
    pub(crate) producer: Option<String>,
    /// Incarnation of the producer; a higher one shuts out lower ones and recognises none of
    /// their batches
    #[arg(long, value_name = "EPOCH", default_value_t = 0, requires = "producer", value_parser = parse::count::<u64>)]
    pub(crate) producer_epoch: u64,
    /// Durability to reach before the next batch is sent [default: set by the log's sync mode]
    #[arg(long, value_enum)]
    pub(crate) durability: Option<DurabilityArg>,
    /// The first record must get this lsn, each next one the next: nobody else may append
    /// meanwhile. Makes batches safe to repeat after a lost connection.
    #[arg(long, value_name = "LSN", conflicts_with = "log_from_field", value_parser = parse::lsn)]
    pub(crate) expected_lsn: Option<u64>,
    /// The writer epoch that `walctl fence` gave you; needed once the log was fenced.
    #[arg(long, value_name = "EPOCH", conflicts_with = "log_from_field", value_parser = parse::count::<u64>)]
    pub(crate) writer_epoch: Option<u64>,
}

#[derive(Debug, ClapArgs)]
#[command(after_long_help = BATCH_HELP)]
pub(crate) struct BatchArgs {
    /// The file to read; without one, or with `-`, stdin.
    pub(crate) file: Option<PathBuf>,
    /// The log's next lsn must be this. May be given for logs that are not written, too.
    #[arg(long, value_name = "LOG=LSN", value_parser = parse::log_and_lsn)]
    pub(crate) expect: Vec<(String, u64)>,
    /// Durability that the records must reach before the answer
    #[arg(long, value_enum)]
    pub(crate) durability: Option<DurabilityArg>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "Exits with 3 if there is nothing to read.")]
pub(crate) struct ReadArgs {
    /// The log.
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: String,
    /// Begin at this lsn [default: the first record kept].
    #[arg(long, value_name = "LSN", group = "start", value_parser = parse::lsn)]
    pub(crate) from: Option<u64>,
    /// Begin at the first record of this time or later: RFC 3339, or so long ago (10m).
    #[arg(long, value_name = "TIME", value_parser = parse::moment, group = "start")]
    pub(crate) time: Option<Moment>,
    /// Begin this number of records before the tail
    #[arg(long, value_name = "N", group = "start", value_parser = parse::count::<u64>)]
    pub(crate) last: Option<u64>,
    /// Maximum number of records
    #[arg(long, alias = "limit", value_name = "N", default_value_t = 100,
        value_parser = parse::count::<u32>)]
    pub(crate) max: u32,
    /// Maximum wait for a first record if there is none, such as 5s
    #[arg(long, value_name = "SPAN", value_parser = wald_text::units::span)]
    pub(crate) wait: Option<Duration>,
    /// Which records to see [default: those that the log's sync mode acks].
    #[arg(long, value_enum)]
    pub(crate) visibility: Option<VisibilityArg>,
    /// Any node of the store may answer from its copy, usually a second old; implies --visibility replicated
    #[arg(long)]
    pub(crate) any_node: bool,
    /// Give a terminal raw bytes as they are, with --output raw or delimited
    #[arg(long)]
    pub(crate) unescaped: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_long_help = SCAN_HELP, group(clap::ArgGroup::new("selector").required(true)))]
pub(crate) struct ScanArgs {
    /// The log.
    #[arg(group = "selector", add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: Option<String>,
    /// All logs whose names start with this.
    #[arg(long, group = "selector")]
    pub(crate) prefix: Option<String>,
    /// All logs.
    #[arg(long, group = "selector")]
    pub(crate) all: bool,
    /// Begin at this lsn (one log only), or at this time: RFC 3339, or so long ago (10m).
    #[arg(long, value_name = "LSN|TIME", value_parser = parse::place)]
    pub(crate) from: Option<ScanBegin>,
    /// End before this lsn; one log only.
    #[arg(long, value_name = "LSN", value_parser = parse::lsn)]
    pub(crate) until: Option<u64>,
    /// Maximum number of records
    #[arg(long, alias = "max", value_name = "N", value_parser = parse::count::<u64>)]
    pub(crate) limit: Option<u64>,
    /// Continue with records that are appended later; reconnects automatically
    #[arg(long, short = 'f')]
    pub(crate) follow: bool,
    /// Which records to see [default: those that the log's sync mode acks; of several logs, those that the server's acks].
    #[arg(long, value_enum)]
    pub(crate) visibility: Option<VisibilityArg>,
    /// Any node of the store may answer from its copy, usually a second old; implies --visibility replicated
    #[arg(long)]
    pub(crate) any_node: bool,
    /// Give a terminal raw bytes as they are, with --output raw or delimited
    #[arg(long)]
    pub(crate) unescaped: bool,
}

#[derive(Debug, ClapArgs)]
#[command(group(clap::ArgGroup::new("selector").required(true)))]
pub(crate) struct TailArgs {
    /// The log; if there is none yet, waits for it.
    #[arg(group = "selector", add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: Option<String>,
    /// All logs whose names start with this, also those that are made later; from now on
    #[arg(long, group = "selector")]
    pub(crate) prefix: Option<String>,
    /// All logs, from now on
    #[arg(long, group = "selector")]
    pub(crate) all: bool,
    /// Begin this number of records before the tail; one log only [default: 10]
    #[arg(short = 'n', long, value_name = "N", conflicts_with_all = ["prefix", "all"], value_parser = parse::count::<u64>)]
    pub(crate) last: Option<u64>,
    /// Most records to print [default: no bound]
    #[arg(long, alias = "max", value_name = "N", value_parser = parse::count::<u64>)]
    pub(crate) limit: Option<u64>,
    /// Go on with records that are appended later; this is what tail does, with or without it
    #[arg(long = "follow", short = 'f', hide = true)]
    pub(crate) _follow: bool,
    /// Which records to see [default: those that the log's sync mode acks].
    #[arg(long, value_enum)]
    pub(crate) visibility: Option<VisibilityArg>,
    /// Any node of the store may answer from its copy, usually a second old; implies --visibility replicated
    #[arg(long)]
    pub(crate) any_node: bool,
    /// Give a terminal raw bytes as they are, with --output raw or delimited
    #[arg(long)]
    pub(crate) unescaped: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct LogsArgs {
    /// Only logs whose names match this, as a shell matches: *, ? and [abc]. Quote it. * matches slashes, too
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) pattern: Option<String>,
    /// Only logs whose names start with this.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        conflicts_with = "pattern"
    )]
    pub(crate) prefix: String,
    /// Maximum number of logs (0 = all)
    #[arg(long, alias = "max", value_name = "N", default_value_t = 100,
        value_parser = parse::count::<u32>)]
    pub(crate) limit: u32,
    /// Continue where an earlier list ended
    #[arg(long, value_name = "TOKEN")]
    pub(crate) page_token: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LogCommand {
    /// Make a log.
    Create(ConfigureArgs),
    /// Show a log.
    Get {
        /// The log.
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
    },
    /// Change the given settings of a log, leave the rest
    Update(ConfigureArgs),
    /// Delete a log with all its records. Asks first on a terminal. A server that sorts
    /// (`sorter_enabled`) gives their space back to the disk.
    Delete {
        /// The log.
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
        /// Only if the log has this number.
        #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
        /// Destroy the keys of the log, too: then its records cannot be read from any backup. Needs a server
        /// with encryption_scope = log
        #[arg(long)]
        shred: bool,
        /// Do not ask
        #[arg(long, short = 'y')]
        yes: bool,
    },
}

#[derive(Debug, ClapArgs)]
pub(crate) struct ConfigureArgs {
    /// The log.
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: String,
    /// Durability of appends that name none [default: the server's]
    #[arg(long, value_enum)]
    pub(crate) sync_mode: Option<SyncModeArg>,
    /// Drop batches that arrived longer ago than this, such as 7d (0 = no limit). Any bound set
    /// here replaces all server defaults
    #[arg(long, value_name = "SPAN", value_parser = wald_text::units::span)]
    pub(crate) max_age: Option<Duration>,
    /// Drop the oldest batches beyond the newest that take this size, such as 10GiB (0 = no
    /// limit)
    #[arg(long, value_name = "SIZE", value_parser = wald_text::units::size)]
    pub(crate) max_bytes: Option<u64>,
    /// Drop the oldest records beyond this number (0 = no limit)
    #[arg(long, value_name = "N", value_parser = parse::count::<u64>)]
    pub(crate) max_records: Option<u64>,
    /// Keep records at or above the lowest cursor, whatever the bounds say. A log without any
    /// cursor keeps everything
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) respect_cursors: Option<bool>,
    /// Use the server's default retention
    #[arg(long, conflicts_with_all = ["max_age", "max_bytes", "max_records", "respect_cursors"])]
    pub(crate) default_retention: bool,
    /// Compression of batches on disk
    #[arg(long, value_enum)]
    pub(crate) compression: Option<CompressionArg>,
    /// Largest record, such as 64KiB (0 = the server's limit)
    #[arg(long, value_name = "SIZE", value_parser = parse::record_size)]
    pub(crate) max_record_bytes: Option<u32>,
}

const APPLY_HELP: &str = "\
The file is YAML, or JSON:

  logs:
    - name: orders
      sync_mode: batch
      retention: { max_age: 30d, max_bytes: 10GiB }
    - name: audit
      compression: lz4
      max_record_bytes: 64KiB

Settings have the names and units of `walctl log create`. A setting that the file leaves out is the server's default, also if \
the log had another value before. Logs that the file does not name stay as they are, except with --prune.

Example: walctl apply -f logs.yaml --dry-run";

#[derive(Debug, ClapArgs)]
#[command(after_help = APPLY_HELP)]
pub(crate) struct ApplyArgs {
    /// The file; - is stdin.
    #[arg(long, short = 'f', value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Show the steps and do none of them. The limits of the server are not checked
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Delete the logs whose names begin with PREFIX and that the file does not name, with all records. Asks first on a
    /// terminal. A file from stdin needs --yes
    #[arg(long, value_name = "PREFIX", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) prune: Option<String>,
    /// Do not ask
    #[arg(long, short = 'y', requires = "prune")]
    pub(crate) yes: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct TrimArgs {
    /// The log.
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: String,
    /// Forget every record below this lsn; at most the log's next.
    #[arg(long, value_name = "LSN", value_parser = parse::lsn)]
    pub(crate) before: u64,
    /// Only if the log has this number.
    #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
    pub(crate) log_id: Option<u64>,
    /// Do not ask
    #[arg(long, short = 'y')]
    pub(crate) yes: bool,
}

const FENCE_HELP: &str = "\
Prints the tail that no older writer can pass, and the writer epoch. From then on an append must \
name the epoch (`walctl append --writer-epoch`).";

#[derive(Debug, ClapArgs)]
#[command(after_help = FENCE_HELP)]
pub(crate) struct FenceArgs {
    /// The log.
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: String,
    /// The new epoch; must exceed the current one [default: the current one and 1].
    #[arg(long, value_name = "EPOCH", value_parser = parse::count::<u64>)]
    pub(crate) writer_epoch: Option<u64>,
    /// Only if the log has this number.
    #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
    pub(crate) log_id: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CursorCommand {
    /// List the cursors of a log, or of all logs, with their lag
    List {
        /// The log, or a pattern of logs as in `walctl logs` [default: all logs]
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: Option<String>,
        /// Only logs whose names start with this
        #[arg(
            long,
            conflicts_with = "log",
            default_value = "",
            hide_default_value = true
        )]
        prefix: String,
        /// Only if the log has this number.
        #[arg(long, value_name = "ID", requires = "log", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
    },
    /// Show a cursor.
    Get {
        /// The log.
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
        /// The cursor.
        cursor: String,
        /// Only if the log has this number.
        #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
    },
    /// Move a cursor, or make it.
    Set(CursorSetArgs),
    /// Forget a cursor.
    Delete {
        /// The log.
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
        /// The cursor.
        cursor: String,
        /// Only if the log has this number.
        #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProducerCommand {
    /// List the producers of a log by id
    List {
        /// The log
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
        /// Number that the log must have
        #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
    },
    /// Forget a producer, which makes room for another one; its epoch is over. A durable producer of a client
    /// goes on in a new epoch if nothing is in doubt
    Forget {
        /// The log
        #[arg(add = ArgValueCompleter::new(complete::logs))]
        log: String,
        /// Id of the producer
        id: String,
        /// Number that the log must have
        #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
        log_id: Option<u64>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum StateCommand {
    /// Print a state: producer, position and batches in doubt, or cursor and effects. Its program may run
    Show {
        /// The file
        file: PathBuf,
    },
    /// Decide what became of the batches in doubt, so that the next start of the producer goes on
    Settle(SettleArgs),
}

const SETTLE_HELP: &str = "\
A durable producer keeps each batch until its ack has come. Two things keep it from going on: the \
server refuses the first batch for good (a record that is too large), or the server has forgotten \
the producer (idle for longer than producer_max_idle) while batches were in doubt.

If the server knows the producer, it says which batches are in the log; --drop N removes the next N, \
and they are never appended. If it has forgotten the producer, --in-log N says how many batches are \
in the log, from the first one on. The rest is sent by the next start, in a new epoch.

The program must not run: the command takes the lock of the state.";

#[derive(Debug, ClapArgs)]
#[command(after_long_help = SETTLE_HELP)]
pub(crate) struct SettleArgs {
    /// The file
    pub(crate) file: PathBuf,
    /// Number of batches that are in the log, from the first one on; only if the server has forgotten
    /// the producer
    #[arg(long, value_name = "N", value_parser = parse::count::<u64>)]
    pub(crate) in_log: Option<u64>,
    /// Number of batches to remove behind those in the log; they are never appended
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true, value_parser = parse::count::<u64>)]
    pub(crate) drop: u64,
    /// Do not ask
    #[arg(long, short = 'y')]
    pub(crate) yes: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct CursorSetArgs {
    /// The log.
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: String,
    /// The cursor.
    pub(crate) cursor: String,
    /// The next lsn to read; at most the log's next.
    #[arg(value_parser = parse::lsn)]
    pub(crate) lsn: u64,
    /// Only if the cursor stands here; 0 also if there is none yet.
    #[arg(long, value_name = "LSN", value_parser = parse::lsn)]
    pub(crate) expected_lsn: Option<u64>,
    /// Only if the log has this number.
    #[arg(long, value_name = "ID", value_parser = parse::count::<u64>)]
    pub(crate) log_id: Option<u64>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct StatusArgs {
    /// List the segments of the journal too; JSON always has them.
    #[arg(long)]
    pub(crate) segments: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct VerifyArgs {
    /// Only this segment, by its number as its file has it (16 hexadecimal digits).
    #[arg(long, value_parser = parse::hexadecimal)]
    pub(crate) segment: Option<u64>,
    /// Most bytes that the server reads in a second, such as 50MB (0 = no bound)
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = wald_text::units::size)]
    pub(crate) max_bytes_per_second: u64,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct SyncArgs {
    /// The log whose records matter [default: all].
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) log: Option<String>,
    /// To the operating system only, not to the device.
    #[arg(long)]
    pub(crate) os: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct TopArgs {
    /// Only logs whose names match this, as in `walctl logs`
    #[arg(add = ArgValueCompleter::new(complete::logs))]
    pub(crate) pattern: Option<String>,
    /// Time between two looks
    #[arg(long, short = 'i', value_name = "SPAN", default_value = "2s", value_parser = wald_text::units::span)]
    pub(crate) interval: Duration,
    /// Number of looks [default: no bound]
    #[arg(long, value_name = "N", value_parser = parse::one_or_more)]
    pub(crate) count: Option<u64>,
    /// Most logs to show [default: as many as the terminal has lines, else 20]; JSON has all
    #[arg(long, value_name = "N", value_parser = parse::count::<usize>)]
    pub(crate) lines: Option<usize>,
    /// Order of the logs
    #[arg(long, value_enum, default_value_t = TopOrder::Rate)]
    pub(crate) sort: TopOrder,
}

/// Order of the logs in `walctl top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopOrder {
    /// Most records in a second first
    Rate,
    /// Most stored bytes first
    Stored,
    /// Most records that are not flushed first
    Unflushed,
    /// By name
    Name,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct BundleArgs {
    /// The file, which must not be there yet; - is stdout
    pub(crate) file: PathBuf,
    /// File with a scrape of the server's /metrics to put in; - is stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Put numbers in place of the names of logs, cursors and callers. Metrics and messages stay as they are
    #[arg(long)]
    pub(crate) without_names: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show the owner, the stand-bys and the other nodes; exits with 4 if no node owns the store.
    Status,
    /// End the owner as SIGTERM does: it hands the store to the first stand-by. Any node names the owner, which must
    /// be in reach. Its service manager starts it again, as a stand-by.
    HandOver,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct HealthArgs {
    /// The service to ask for, such as wald.v1.WalService [default: the server as a whole].
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) service: String,
}

const BACKUP_HELP: &str = "\
DIR holds any number of backups of one store. They share their common files, and only new files \
are sent. `wald verify DIR` checks a backup, `wald restore DIR` makes a store of it. DIR may be a \
bucket; walctl first tests that it has atomic conditional writes (exit code 78 if not). A damaged \
store is saved with its damage, which is named on stderr; the exit code is then 5, and --keep \
removes nothing.";

#[derive(Debug, ClapArgs)]
#[command(after_long_help = BACKUP_HELP, args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true)]
pub(crate) struct BackupArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BackupCommand>,
    /// The directory, which is made if it is not there, or a bucket: s3://BUCKET/PREFIX,
    /// gs://BUCKET/PREFIX or az://CONTAINER/PREFIX
    #[arg(required = true)]
    pub(crate) dir: Option<PathBuf>,
    /// Number of backups to keep, this one included; older ones are removed afterwards
    #[arg(long, value_name = "N", value_parser = parse::one_or_more)]
    pub(crate) keep: Option<u64>,
    /// Most bytes that the server reads in a second, such as 50MB [default: no bound]
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "0",
        hide_default_value = true,
        value_parser = wald_text::units::size
    )]
    pub(crate) max_bytes_per_second: u64,
    #[command(flatten)]
    pub(crate) bucket: BucketArgs,
}

// A doc comment here would replace the description of the command in its help.
#[derive(Debug, ClapArgs)]
#[cfg_attr(
    not(feature = "object"),
    allow(
        dead_code,
        reason = "a build without buckets refuses the URL, not the options"
    )
)]
pub(crate) struct BucketArgs {
    /// Base URL of the object store [default: AWS_ENDPOINT_URL and the like, or the provider's]
    #[arg(long, global = true, env = "WALD_BUCKET_ENDPOINT", value_name = "URL")]
    pub(crate) bucket_endpoint: Option<String>,
    /// Region of the bucket, for S3 [default: AWS_REGION, or us-east-1]
    #[arg(long, global = true, env = "WALD_BUCKET_REGION", value_name = "NAME")]
    pub(crate) bucket_region: Option<String>,
    /// File with the credentials of the bucket [default: the environment's, or the identity of
    /// this machine or pod]
    #[arg(
        long,
        global = true,
        env = "WALD_BUCKET_CREDENTIALS_FILE",
        value_name = "FILE"
    )]
    pub(crate) bucket_credentials_file: Option<PathBuf>,
    /// Let records cross the network to the bucket without TLS
    #[arg(long, global = true, env = "WALD_BUCKET_INSECURE")]
    pub(crate) bucket_insecure: bool,
}

#[cfg(feature = "object")]
impl BucketArgs {
    /// The settings of the client. An empty value counts as none.
    pub(crate) fn settings(&self) -> wald_bucket::BucketSettings {
        let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        let file = self.bucket_credentials_file.clone();
        wald_bucket::BucketSettings {
            endpoint: given(&self.bucket_endpoint),
            region: given(&self.bucket_region),
            credentials_file: file.filter(|path| !path.as_os_str().is_empty()),
            insecure: self.bucket_insecure,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// List the backups of a directory or a bucket, the oldest first.
    List {
        /// The directory or the URL.
        dir: PathBuf,
    },
    /// Remove all but the newest backups, and the data that only the others use
    Prune {
        /// The directory or the URL.
        dir: PathBuf,
        /// Number of backups to keep
        #[arg(long, value_name = "N", value_parser = parse::one_or_more)]
        keep: u64,
    },
}

const CONTEXT_HELP: &str = "\
The file is ~/.config/wald/config.toml, or wald/config.toml in XDG_CONFIG_HOME. It has paths of \
files, never a token or key, and its owner alone may read it (mode 0600).

Each value comes from the first of these: option, variable, context, default. The current context \
counts only for commands without --endpoint and WALD_ENDPOINT; these never read the file. Nothing \
of a context is used for another server than its own.";

#[derive(Debug, Subcommand)]
#[command(after_long_help = CONTEXT_HELP)]
pub(crate) enum ContextCommand {
    /// Keep the endpoint and the files of the options and variables under a name. The first
    /// context becomes the current one
    Add {
        /// Name of the context: letters, digits, dots, dashes and underscores
        name: String,
        /// Replace a context of this name
        #[arg(long)]
        replace: bool,
    },
    /// Make a context the current one
    Use {
        /// The context
        #[arg(add = ArgValueCompleter::new(complete::contexts))]
        name: String,
    },
    /// List the contexts; an asterisk marks the current one
    List,
    /// Show the settings that commands use here, and the source of each
    Show {
        /// The context [default: that of --context, WALD_CONTEXT, or the current one]
        #[arg(add = ArgValueCompleter::new(complete::contexts))]
        name: Option<String>,
    },
    /// Remove a context; the files that it names stay
    Remove {
        /// The context
        #[arg(add = ArgValueCompleter::new(complete::contexts))]
        name: String,
    },
}

/// A type for a flag: its values, and their names in the contract.
macro_rules! values {
    ($(#[$doc:meta])* $name:ident for $target:ty {
        $($(#[$value_doc:meta])* $value:ident),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
        pub(crate) enum $name { $($(#[$value_doc])* $value),* }

        impl From<$name> for $target {
            fn from(value: $name) -> Self {
                match value { $($name::$value => Self::$value),* }
            }
        }
    };
}

values!(
    /// Safety of records.
    DurabilityArg for Durability {
        /// In the daemon's memory.
        Accepted,
        /// In the operating system: survives a kill, not a power cut.
        Written,
        /// Flushed to the device.
        Durable,
        /// Also in the bucket of the replica: survives the loss of the machine.
        Replicated,
    }
);
values!(
    /// Which records a reader sees.
    VisibilityArg for Visibility { Replicated, Durable, Written, Accepted }
);
values!(
    /// Durability of an append that names none
    SyncModeArg for SyncMode {
        /// Flushed: a power cut takes nothing.
        Strict,
        /// Batches flushed, single appends written.
        Batch,
        /// Written, and flushed within the server's sync interval.
        Interval,
        /// Written, and flushed when the kernel likes.
        Async,
        /// In the daemon's memory until the next sync: a crash takes it.
        Manual,
        /// In the bucket of the replica: the loss of the machine takes nothing.
        Replicated,
    }
);
values!(
    /// Compression of batches on disk.
    CompressionArg for Compression {
        /// Not at all.
        None,
        /// Fast.
        Lz4,
        /// Smaller; refused by servers built without it.
        Zstd,
    }
);

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn scan_needs_exactly_one_selector() {
        let parse = |line: &str| Args::try_parse_from(line.split(' '));
        assert!(parse("walctl scan flights --output jsonl").is_ok());
        assert!(parse("walctl scan --prefix airport/ --follow").is_ok());
        assert!(parse("walctl scan").is_err());
        assert!(parse("walctl scan flights --all").is_err());
        assert!(parse("walctl tail").is_err());
        assert!(parse("walctl tail -n 3 flights").is_ok());
        assert!(parse("walctl tail -n 3 --prefix flights").is_err());
    }
}
