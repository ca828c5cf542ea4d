//! `walctl append`: from a file to logs, in order.
//!
//! ```text
//!   reader thread                                   runtime
//!   file ─▶ entries ─▶ packs ══▶ a few packs ══▶ one request underway ─▶ ack ─▶ next
//! ```
//!
//! One request underway at a time: that alone keeps the order of the input without conditions,
//! however many others append. Reading and packing continue meanwhile.
//!
//! With a producer, the packs of each log are its batches 0, 1, 2, ... The same input makes the same
//! packs, so a load that is run again sends the same batches, and the server answers repeats.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::mpsc;
use tonic::Code;
use wald_client::proto::ServerLimits;
use wald_client::{BatchAck, Client, Condition, Durability, Error, Lsn, Outcome, Reason};

use crate::args::AppendArgs;
use crate::exit::{self, Asked, ExitKind, Usage};
use crate::input::{self, InputCommand, InputFormat, InputRecord};
use crate::output::{Out, Output, say};
use crate::pack::{Pack, Packer, RequestLimits, Route};
use crate::parse::Moment;
use crate::progress::{AppendProgress, counted};
use crate::times::Times;

/// Packs read ahead; each is up to 4 MiB.
const PACKS_AHEAD: usize = 4;

/// Time for one request of a producer unless --timeout says otherwise: a server that restarts is
/// waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// The source, the format and the destination of the records.
struct AppendPlan {
    /// None is stdin.
    file: Option<String>,
    format: InputFormat,
    route: Route,
}

/// A pack, and the bytes of the input that had been read when it was full.
type InputPack = Result<(Pack, u64)>;

pub(crate) async fn run(
    client: &Client,
    args: AppendArgs,
    timeout: Option<Duration>,
    output: Output,
) -> Result<ExitKind> {
    let plan = plan(&args)?;
    let (input, size) = match args.text.is_empty() {
        true => open(plan.file.as_deref())?,
        // Read by nobody: the records are given.
        false => (Box::new(io::empty()) as Box<dyn Read + Send>, None),
    };
    let limits = limits(client).await.context("nothing was appended")?;
    let from_terminal = plan.file.is_none() && args.text.is_empty() && io::stdin().is_terminal();
    if from_terminal {
        say("reading records from the terminal, one a line; Ctrl-D ends");
        hint(&args);
    }
    let format = plan.format;
    let given = RecordFlags {
        format,
        texts: args.text.clone(),
        headers: args.header.clone(),
        timestamp_us: args.time.map_or(0, |Moment(micros)| micros),
    };
    let mut packs = read_ahead(input, given, Packer::new(limits, plan.route));
    let mut progress = AppendProgress::begin(size);
    let mut times = Times::default();
    let ended = tokio::select! {
        ended = load(client, &args, timeout, &mut packs, (&mut progress, &mut times)) => {
            ended.map(|()| ExitKind::Ok)
        }
        _ = tokio::signal::ctrl_c() => Ok(ExitKind::Interrupted),
    };
    let is_other = ended.as_ref().is_err_and(|error| error.is::<OtherInput>());
    if is_other {
        progress.doubt();
    }
    progress.end(matches!(ended, Ok(ExitKind::Ok)));
    if matches!(ended, Ok(ExitKind::Ok)) && progress.is_empty() && !from_terminal {
        hint(&args);
    }
    report(&progress, output)?;
    if matches!(ended, Ok(ExitKind::Ok)) {
        times.warn(client).await;
    }
    let exit = match ended {
        Ok(ExitKind::Interrupted) => {
            say(match args.producer {
                Some(_) => "interrupted; the same command with the same input continues",
                None => "interrupted; the request underway may have been appended, too",
            });
            ExitKind::Interrupted
        }
        Ok(exit) => return Ok(exit),
        Err(error) => exit::report(&error, Asked::of_append(&args)),
    };
    if !is_other && let Some(text) = go_on(args.producer.is_some(), format, progress.done()) {
        say(&text);
    }
    Ok(exit)
}

/// How to append the rest of an input whose first records are appended: the whole input would
/// append them twice.
fn go_on(has_producer: bool, format: InputFormat, records: u64) -> Option<String> {
    if records == 0 {
        return None;
    }
    let appended = match records {
        1 => "the first record of the input is appended".to_owned(),
        many => format!("the first {} of the input are appended", counted(many)),
    };
    Some(match has_producer {
        true => format!("{appended}; the same command with the same input skips them"),
        false => {
            let rest = match format {
                InputFormat::Lines => format!(", with `tail -n +{}`,", records.saturating_add(1)),
                _ => String::new(),
            };
            format!(
                "{appended}; give only the rest{rest} to the next run. A load with --producer ID can be \
                 run again from the start"
            )
        }
    })
}

/// A file's name where the log's belongs is an easy mistake, and would wait for stdin.
fn hint(args: &AppendArgs) {
    if let ([only], None) = (args.places.as_slice(), &args.log_from_field)
        && Path::new(only).is_file()
    {
        say(&format!(
            "{only} is a file; did you forget the log? walctl append LOG {only}"
        ));
    }
}

/// Reads the positional arguments, which mean different things with --log-from-field and in
/// formats whose records name their logs.
fn plan(args: &AppendArgs) -> Result<AppendPlan> {
    let usage = |text: &str| anyhow::Error::from(Usage(text.to_owned()));
    let mut places = args.places.iter().cloned();
    let names_logs = args.format.is_some_and(InputFormat::names_logs);
    let prefix = args.log_prefix.clone();
    let route = match (&args.log_from_field, places.len()) {
        (Some(field), _) => Route::Field {
            field: field.clone(),
            prefix,
        },
        (None, 0) if names_logs => Route::Own { prefix },
        (None, 1) if names_logs && Path::new(&args.places[0]).is_file() => {
            return Err(usage(&format!(
                "{0} is a file, and the log comes first: walctl append LOG {0}; for the logs that its \
                 records name: walctl append --format ... < {0}",
                args.places[0]
            )));
        }
        (None, _) => {
            let log = places.next();
            let log = log.ok_or_else(|| {
                usage(
                    "the name of the log is missing: write walctl append LOG [FILE], or \
                     --log-from-field FIELD if each record names its log",
                )
            })?;
            if !prefix.is_empty() {
                return Err(usage(
                    "--log-prefix is for --log-from-field and for records that name their logs; write \
                     the whole name of the log",
                ));
            }
            Route::Log(log)
        }
    };
    let many = !matches!(route, Route::Log(_));
    if many && (args.expected_lsn.is_some() || args.writer_epoch.is_some()) {
        return Err(usage(
            "--expected-lsn and --writer-epoch are of one log; name it: walctl append LOG",
        ));
    }
    let file = places.next().filter(|file| file != "-");
    if places.next().is_some() {
        return Err(usage("with --log-from-field, name only the file"));
    }
    if let (Some(file), false) = (&file, args.text.is_empty()) {
        return Err(usage(&format!(
            "--text gives the records, and so does {file}; leave one of them out"
        )));
    }
    let by_name = || {
        file.as_deref()
            .map_or(InputFormat::Lines, |file| InputFormat::of(Path::new(file)))
    };
    let format = args.format.unwrap_or_else(by_name);
    Ok(AppendPlan {
        file,
        format,
        route,
    })
}

/// Opens the input; with its size, if it is a file.
fn open(file: Option<&str>) -> Result<(Box<dyn Read + Send>, Option<u64>)> {
    let Some(path) = file else {
        return Ok((Box::new(io::stdin()), None));
    };
    let file = File::open(path).with_context(|| format!("cannot open {path:?}"))?;
    let meta = file.metadata().ok();
    if meta.as_ref().is_some_and(std::fs::Metadata::is_dir) {
        return Err(Usage(format!("{path:?} is a directory; name a file")).into());
    }
    let size = meta.filter(std::fs::Metadata::is_file);
    Ok((Box::new(file), size.map(|meta| meta.len())))
}

/// The limits in force; the contract's defaults if this caller may append, but not ask.
async fn limits(client: &Client) -> Result<RequestLimits> {
    let limits = match client.server_info().await {
        Ok(info) => info.limits.unwrap_or_default(),
        Err(error) if matches!(error.code(), Code::PermissionDenied | Code::Unimplemented) => {
            ServerLimits::default()
        }
        Err(error) => return Err(error.into()),
    };
    Ok(RequestLimits::of(&limits))
}

/// Flags that apply to every record.
struct RecordFlags {
    format: InputFormat,
    /// The records themselves; none: they are read.
    texts: Vec<String>,
    /// Headers for each record, after its own.
    headers: Vec<(String, String)>,
    /// The time of records that have none of their own; 0: the server's.
    timestamp_us: i64,
}

impl RecordFlags {
    fn complete(&self, mut entry: InputRecord) -> InputRecord {
        for (key, value) in &self.headers {
            entry.headers.push(wald_client::Header {
                key: key.clone(),
                value: value.clone().into(),
            });
        }
        if entry.timestamp_us == 0 {
            entry.timestamp_us = self.timestamp_us;
        }
        entry
    }
}

/// Reads and packs on a thread of its own: reading blocks.
fn read_ahead(
    input: Box<dyn Read + Send>,
    given: RecordFlags,
    mut packer: Packer,
) -> mpsc::Receiver<InputPack> {
    let (sender, receiver) = mpsc::channel(PACKS_AHEAD);
    let most = packer.most_record_bytes();
    let consumed = Arc::new(AtomicU64::new(0));
    std::thread::spawn(move || {
        let counted = CountedInput {
            input,
            count: consumed.clone(),
        };
        let send = |pack| {
            let item = (pack, consumed.load(Ordering::Relaxed));
            sender
                .blocking_send(Ok(item))
                .context("nobody takes the records")
        };
        let mut push = |entry| packer.push(given.complete(entry))?.map_or(Ok(()), send);
        let read = match given.texts.is_empty() {
            true => input::records(
                BufReader::with_capacity(1 << 16, counted),
                (InputCommand::Append, given.format),
                most,
                &mut push,
            ),
            false => {
                let mut texts = given.texts.iter().cloned();
                texts.try_for_each(|text| push(InputRecord::plain(text)))
            }
        };
        // Records before an error are in order and count.
        let rest = packer.finish().map_or(Ok(()), send);
        if let Err(error) = read.and(rest) {
            // Fails if the load has ended, and then nobody needs to know.
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

/// Counts the bytes that are read, for the progress bar.
struct CountedInput {
    input: Box<dyn Read + Send>,
    count: Arc<AtomicU64>,
}

impl Read for CountedInput {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

async fn load(
    client: &Client,
    args: &AppendArgs,
    timeout: Option<Duration>,
    packs: &mut mpsc::Receiver<InputPack>,
    (progress, times): (&mut AppendProgress, &mut Times),
) -> Result<()> {
    let durability = args
        .durability
        .map_or(Durability::Unspecified, Durability::from);
    let mut expected = args.expected_lsn.map(Lsn::new);
    let mut sequences = Sequences::default();
    while let Some(item) = packs.recv().await {
        let (pack, consumed) = item?;
        let (records, bytes) = (pack.records, pack.bytes);
        let mut batch = client.append_batch().durability(durability);
        if args.producer.is_some() {
            batch = batch.timeout(timeout.unwrap_or(PATIENCE));
        }
        let mut is_old = false;
        let mut given = Vec::with_capacity(pack.logs.len());
        for (log, entries) in pack.logs {
            given.push(entries.first().map_or(0, |entry| entry.timestamp_us));
            let mut condition = Condition::new();
            if let Some(lsn) = expected {
                condition = condition.expected_lsn(lsn);
            }
            if let Some(epoch) = args.writer_epoch {
                condition = condition.writer_epoch(epoch);
            }
            if let Some(id) = &args.producer {
                let (sequence, old) = sequences.next(&log);
                is_old |= old;
                condition = condition.producer(id, args.producer_epoch, sequence);
            }
            batch = batch.log_if(
                log,
                condition,
                entries.into_iter().map(InputRecord::into_record),
            );
        }
        // All parts of a batch are there, or none.
        let appended = match is_old {
            true => Ok(None),
            false => batch.await.map(Some),
        };
        match appended {
            Ok(Some(ack)) if is_repeat(&ack) => progress.known(records, consumed),
            Ok(Some(ack)) => {
                progress.acked(records, bytes, consumed, &ack);
                for (append, given) in ack.appends.iter().zip(given) {
                    times.note(append, given);
                }
            }
            Ok(None) => progress.known(records, consumed),
            Err(error) if sequences.is_too_old(&error) => progress.known(records, consumed),
            Err(error) => return Err(failed(error, args, records, progress)),
        }
        expected = expected.map(|lsn| lsn.advance(records));
    }
    sequences.check_repetition()
}

fn is_repeat(ack: &BatchAck) -> bool {
    ack.appends.iter().any(|append| append.deduplicated)
}

/// The sequences of a producer's batches, by log.
#[derive(Default)]
struct Sequences {
    next: HashMap<String, u64>,
    /// The oldest sequence that the server can compare. Every batch before it was appended, since
    /// sequences have no gaps. The producer may have appended it from other input.
    oldest: HashMap<String, u64>,
}

impl Sequences {
    /// The sequence of the next batch of a log, and whether it is known to be there.
    fn next(&mut self, log: &str) -> (u64, bool) {
        let next = match self.next.get_mut(log) {
            Some(next) => next,
            None => self.next.entry(log.to_owned()).or_default(),
        };
        let sequence = *next;
        *next += 1;
        let oldest = self.oldest.get(log).copied().unwrap_or_default();
        (sequence, sequence < oldest)
    }

    /// Whether the server refused a batch because it is older than those that it can compare.
    fn is_too_old(&mut self, error: &Error) -> bool {
        if error.reason() != Some(Reason::ProducerExpired) {
            return false;
        }
        let (Some(log), Some(oldest)) = (error.fact("log"), error.fact_number("oldest")) else {
            return false;
        };
        self.oldest.insert(log.to_owned(), oldest);
        true
    }

    /// Makes sure that batches were skipped only of an input that the producer has appended before: its repetition reaches a
    /// batch that the server compares, in each log.
    ///
    /// # Errors
    /// [`OtherInput`] if an input ends before that.
    fn check_repetition(&self) -> Result<()> {
        for (log, oldest) in &self.oldest {
            let batches = self.next.get(log).copied().unwrap_or_default();
            if batches <= *oldest {
                return Err(OtherInput {
                    log: log.clone(),
                    batches,
                    oldest: *oldest,
                }
                .into());
            }
        }
        Ok(())
    }
}

/// The input ends before the first batch that the server can compare: its records may be others than those that the
/// producer appended.
#[derive(Debug, thiserror::Error)]
#[error(
    "{log} has more of this producer than the {batches} batches of this input, and the server remembers only the batches \
     from {oldest} on, so nothing shows that these records are in the log; use another --producer for other input, or give \
     the whole input as packed before"
)]
struct OtherInput {
    log: String,
    batches: u64,
    oldest: u64,
}

/// Says of the failed request which records are in doubt.
fn failed(
    error: Error,
    args: &AppendArgs,
    records: u64,
    progress: &AppendProgress,
) -> anyhow::Error {
    if args.producer.is_some() || error.outcome() == Outcome::NotApplied {
        return error.into();
    }
    let after = match progress.records {
        0 => "",
        _ => " after these",
    };
    anyhow::Error::from(error).context(format!(
        "{}{after} may or may not be appended",
        counted(records)
    ))
}

/// Prints the appended records, for scripts.
fn report(progress: &AppendProgress, output: Output) -> Result<()> {
    let mut out = Out::new(output);
    if matches!(output, Output::Json | Output::Jsonl) {
        for (log, (first_lsn, next_lsn)) in &progress.logs {
            out.json(&serde_json::json!({
                "log": log, "first_lsn": first_lsn, "next_lsn": next_lsn,
            }))?;
        }
    }
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    fn planned(line: &str) -> Result<AppendPlan> {
        let Command::Append(args) = Args::try_parse_from(line.split(' '))?.command else {
            panic!("an append");
        };
        plan(&args)
    }

    #[test]
    fn load_that_stopped_says_how_to_append_the_rest() {
        let said = |has_producer, format, records| go_on(has_producer, format, records);
        assert_eq!(said(false, InputFormat::Lines, 0), None);
        let lines = said(false, InputFormat::Lines, 157_000).unwrap();
        assert!(
            lines.starts_with("the first 157,000 records of the input are appended; give only")
        );
        assert!(lines.contains("`tail -n +157001`"), "{lines}");
        assert!(
            !said(false, InputFormat::Json, 1)
                .unwrap()
                .contains("tail -n")
        );
        assert!(
            said(true, InputFormat::Lines, 1)
                .unwrap()
                .contains("the same command")
        );
    }

    #[test]
    fn log_comes_first_and_the_file_says_its_format() {
        let planned = planned("walctl append flights data/flights.jsonl").unwrap();
        assert!(matches!(planned.route, Route::Log(log) if log == "flights"));
        assert_eq!(planned.file.as_deref(), Some("data/flights.jsonl"));
        assert_eq!(planned.format, InputFormat::Jsonl);
    }

    #[test]
    fn routed_append_names_only_the_file() {
        let line = "walctl append --log-from-field origin --log-prefix airport/ f.json";
        let routed = planned(line).unwrap();
        assert_eq!(routed.file.as_deref(), Some("f.json"));
        assert_eq!(routed.format, InputFormat::JsonArray);
        assert!(planned(&format!("{line} another")).is_err());
    }

    #[test]
    fn records_that_name_their_logs_need_no_log() {
        let own = planned("walctl append --format delimited").unwrap();
        assert!(matches!(own.route, Route::Own { .. }));
        let one = planned("walctl append copy --format json").unwrap();
        assert!(matches!(one.route, Route::Log(log) if log == "copy"));
        assert!(planned("walctl append --format delimited --expected-lsn 0").is_err());
        assert!(planned("walctl append orders --log-prefix a/").is_err());
    }

    #[test]
    fn extension_is_read_without_regard_to_case() {
        let upper = planned("walctl append orders data/UPPER.JSON").unwrap();
        assert_eq!(upper.format, InputFormat::JsonArray);
    }

    #[test]
    fn batches_before_the_oldest_known_one_are_there() {
        let mut sequences = Sequences::default();
        assert_eq!(sequences.next("a"), (0, false));
        sequences.oldest.insert("a".into(), 3);
        assert_eq!(sequences.next("a"), (1, true));
        assert_eq!(sequences.next("a"), (2, true));
        assert_eq!(sequences.next("a"), (3, false));
        assert_eq!(sequences.next("b"), (0, false));
    }

    #[test]
    fn repetition_reaches_a_batch_that_the_server_compares() {
        let mut sequences = Sequences::default();
        sequences.oldest.insert("a".into(), 2);
        for (_sequence, proven) in [(0, false), (1, false), (2, true)] {
            sequences.next("a");
            assert_eq!(sequences.check_repetition().is_ok(), proven);
        }
    }

    #[test]
    fn append_without_a_log_is_refused() {
        assert!(planned("walctl append").err().unwrap().is::<Usage>());
    }

    #[test]
    fn records_before_an_error_in_the_input_are_delivered() {
        let limits = RequestLimits {
            records: 10,
            bytes: 1_000,
            record_bytes: 100,
        };
        let packer = Packer::new(limits, Route::Log("log".into()));
        let given = RecordFlags {
            format: InputFormat::JsonArray,
            texts: Vec::new(),
            headers: vec![("k".into(), "v".into())],
            timestamp_us: 7,
        };
        let mut packs = read_ahead(Box::new(&b"[1, 2, oops"[..]), given, packer);
        let (pack, consumed) = packs.blocking_recv().unwrap().unwrap();
        assert_eq!((pack.records, consumed), (2, 11));
        let first = &pack.logs[0].1[0];
        assert_eq!((first.headers.len(), first.timestamp_us), (1, 7));
        assert!(packs.blocking_recv().unwrap().is_err());
        assert!(packs.blocking_recv().is_none());
    }
}
