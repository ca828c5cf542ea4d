//! `walctl append`: from a file to logs, in order.
//!
//! ```text
//!   reader thread                                   runtime
//!   file ─▶ records ─▶ packs ══▶ a few packs ══▶ one request underway ─▶ ack ─▶ next
//! ```
//!
//! One request underway at a time: that alone keeps the order of the input without
//! conditions, whoever else appends. Reading and packing go on meanwhile.

use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use tokio::sync::mpsc;
use tonic::Code;
use wald_client::proto::ServerLimits;
use wald_client::{Client, Condition, Durability, Lsn, Outcome};

use crate::args::AppendArgs;
use crate::exit::{Exit, Usage};
use crate::input::{self, Format};
use crate::output::{Out, Output};
use crate::pack::{Limits, Pack, Packer, Route};
use crate::progress::{Progress, counted};

/// Packs read ahead; each is up to 4 MiB.
const PACKS_AHEAD: usize = 4;

/// What is read, how, and where it goes.
struct Plan {
    /// None is stdin.
    file: Option<String>,
    format: Format,
    route: Route,
}

/// A pack, and how much of the input had been read when it was full.
type Item = Result<(Pack, u64)>;

pub(crate) async fn run(client: &Client, args: AppendArgs, output: Output) -> Result<Exit> {
    let plan = plan(&args)?;
    let (input, size) = open(plan.file.as_deref())?;
    let limits = limits(client).await?;
    if plan.file.is_none() && io::stdin().is_terminal() {
        eprintln!("walctl: reading records from the terminal, one a line; Ctrl-D ends");
        hint(&args);
    }
    let mut packs = read_ahead(input, plan.format, Packer::new(limits, plan.route));
    let mut progress = Progress::begin(size);
    let ended = tokio::select! {
        ended = load(client, &args, &mut packs, &mut progress) => ended.map(|()| Exit::Ok),
        _ = tokio::signal::ctrl_c() => Ok(Exit::Interrupted),
    };
    progress.end(matches!(ended, Ok(Exit::Ok)));
    if matches!(ended, Ok(Exit::Ok)) && progress.records == 0 && !io::stdin().is_terminal() {
        hint(&args);
    }
    report(&progress, output)?;
    if let Ok(Exit::Interrupted) = ended {
        eprintln!("walctl: interrupted; the request underway may have been appended, too");
    }
    ended
}

/// A file's name where the log's belongs is an easy mistake, and would wait for stdin.
fn hint(args: &AppendArgs) {
    if let ([only], None) = (args.places.as_slice(), &args.log_from_field)
        && Path::new(only).is_file()
    {
        eprintln!("walctl: {only} is a file; did you forget the log? walctl append LOG {only}");
    }
}

/// Reads the positional arguments, which mean different things with --log-from-field.
fn plan(args: &AppendArgs) -> Result<Plan> {
    let mut places = args.places.iter().cloned();
    let route = match &args.log_from_field {
        Some(field) => Route::Field {
            field: field.clone(),
            prefix: args.log_prefix.clone(),
        },
        None => Route::Log(places.next().ok_or_else(|| Usage("which log?".into()))?),
    };
    let file = places.next().filter(|file| file != "-");
    if places.next().is_some() {
        return Err(Usage("with --log-from-field, name only the file".into()).into());
    }
    let by_name = || {
        file.as_deref()
            .map_or(Format::Lines, |file| Format::of(Path::new(file)))
    };
    let format = args.format.unwrap_or_else(by_name);
    Ok(Plan {
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
    let file = File::open(path).with_context(|| format!("cannot open {path}"))?;
    let size = file
        .metadata()
        .ok()
        .filter(|meta| meta.is_file())
        .map(|meta| meta.len());
    Ok((Box::new(file), size))
}

/// The limits in force; the contract's defaults if this caller may append, but not ask.
async fn limits(client: &Client) -> Result<Limits> {
    let limits = match client.server_info().await {
        Ok(info) => info.limits.unwrap_or_default(),
        Err(error) if matches!(error.code(), Code::PermissionDenied | Code::Unimplemented) => {
            ServerLimits::default()
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Limits::of(&limits))
}

/// Reads and packs on a thread of its own: reading blocks.
fn read_ahead(
    input: Box<dyn Read + Send>,
    format: Format,
    mut packer: Packer,
) -> mpsc::Receiver<Item> {
    let (sender, receiver) = mpsc::channel(PACKS_AHEAD);
    let consumed = Arc::new(AtomicU64::new(0));
    std::thread::spawn(move || {
        let counted = Counted {
            input,
            count: consumed.clone(),
        };
        let mut input = BufReader::with_capacity(1 << 16, counted);
        let send = |pack| {
            let item = (pack, consumed.load(Ordering::Relaxed));
            sender
                .blocking_send(Ok(item))
                .context("nobody takes the records")
        };
        let read = input::records(&mut input, format, &mut |record| {
            packer.push(record)?.map_or(Ok(()), send)
        });
        // What came before an error is in order and counts.
        let rest = packer.finish().map_or(Ok(()), send);
        if let Err(error) = read.and(rest) {
            // Fails if the load has ended, and then nobody needs to know.
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

/// Counts what is read, for the progress bar.
struct Counted {
    input: Box<dyn Read + Send>,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

async fn load(
    client: &Client,
    args: &AppendArgs,
    packs: &mut mpsc::Receiver<Item>,
    progress: &mut Progress,
) -> Result<()> {
    let durability = args
        .durability
        .map_or(Durability::Unspecified, Durability::from);
    let mut expected = args.expected_lsn.map(Lsn::new);
    while let Some(item) = packs.recv().await {
        let (pack, consumed) = item?;
        let (records, bytes) = (pack.records, pack.bytes);
        let mut batch = client.append_batch().durability(durability);
        for (log, records) in pack.logs {
            let mut condition = Condition::new();
            if let Some(lsn) = expected {
                condition = condition.expected_lsn(lsn);
            }
            if let Some(epoch) = args.writer_epoch {
                condition = condition.writer_epoch(epoch);
            }
            batch = batch.log_if(log, condition, records);
        }
        let ack = batch.await.map_err(|error| match error.outcome() {
            Outcome::NotApplied => anyhow::Error::from(error),
            Outcome::Unknown => {
                let after = if progress.records == 0 {
                    ""
                } else {
                    " after these"
                };
                anyhow::Error::from(error).context(format!(
                    "{}{after} may or may not be appended",
                    counted(records)
                ))
            }
        })?;
        expected = expected.map(|lsn| lsn.advance(records));
        progress.acked(records, bytes, consumed, &ack);
    }
    Ok(())
}

/// What was appended, for scripts.
fn report(progress: &Progress, output: Output) -> Result<()> {
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

    fn planned(line: &str) -> Result<Plan> {
        let Command::Append(args) = Args::try_parse_from(line.split(' '))?.command else {
            panic!("an append");
        };
        plan(&args)
    }

    #[test]
    fn log_comes_first_and_the_file_says_its_format() {
        let planned = planned("walctl append flights data/flights.jsonl").unwrap();
        assert!(matches!(planned.route, Route::Log(log) if log == "flights"));
        assert_eq!(planned.file.as_deref(), Some("data/flights.jsonl"));
        assert_eq!(planned.format, Format::Jsonl);
    }

    #[test]
    fn routed_append_names_only_the_file() {
        let line = "walctl append --log-from-field origin --log-prefix airport/ f.json";
        let routed = planned(line).unwrap();
        assert_eq!(routed.file.as_deref(), Some("f.json"));
        assert_eq!(routed.format, Format::JsonArray);
        assert!(planned(&format!("{line} another")).is_err());
    }

    #[test]
    fn append_without_a_log_is_refused() {
        assert!(planned("walctl append").err().unwrap().is::<Usage>());
    }

    #[test]
    fn records_before_an_error_in_the_input_are_delivered() {
        let limits = Limits {
            records: 10,
            bytes: 1_000,
            record_bytes: 100,
        };
        let packer = Packer::new(limits, Route::Log("log".into()));
        let mut packs = read_ahead(Box::new(&b"[1, 2, oops"[..]), Format::JsonArray, packer);
        let (pack, consumed) = packs.blocking_recv().unwrap().unwrap();
        assert_eq!((pack.records, consumed), (2, 11));
        assert!(packs.blocking_recv().unwrap().is_err());
        assert!(packs.blocking_recv().is_none());
    }
}
