//! `wald dump`: prints the contents of an offline data directory, frame by frame.

use std::io::{self, BufWriter, StdoutLock, Write};
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use wald_storage::{
    Disk, DumpFilter, Dumped, DumpedBody, DumpedFrame, DumpedLog, DumpedRecord, Enough, LogName,
    Lsn, RealDisk, Timestamp,
};

use super::{
    FAILED, OfflineOutput, escaped, failed, json_line, open, output_of, put_json, say, written,
};
use crate::config::Config;
use crate::encryption;
use crate::serve::Exit;

/// Maximum number of characters of a payload that are shown.
const SHOWN: usize = 120;
/// Maximum number of records of a frame that are shown.
const RECORDS: usize = 5;

pub(super) fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("LSN")
            .help(help)
            .value_parser(value_parser!(u64))
    };
    let switch = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .help(help)
            .action(ArgAction::SetTrue)
    };
    Command::new("dump")
        .about("Print the contents of an offline data directory")
        .long_about(
            "Prints the frames of an offline data directory in order, with all fields of their \
             headers. Records are shortened in text, and whole in JSON (text if they are UTF-8, \
             else data in base64). Encrypted records are shown with the wrapping key of \
             encryption_key_file or encryption_key_command and the key ring in the directory. \
             Names ranges that do not verify. Changes nothing.\n\n\
             Exit codes: 0 ok, 1 it could not be read, or nothing of the log is there, 2 usage, 4 a daemon has the directory.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(
            Arg::new("segment")
                .long("segment")
                .value_name("ID")
                .help("Only this segment or sorted run: the hexadecimal number in its file name")
                .value_parser(|text: &str| {
                    u64::from_str_radix(text, 16)
                        .map_err(|_| "expected up to 16 hexadecimal digits")
                }),
        )
        .arg(
            Arg::new("log")
                .long("log")
                .value_name("NAME")
                .help("Only frames of this log")
                .value_parser(|text: &str| LogName::new(text)),
        )
        .arg(number(
            "from-lsn",
            "Only batches with a record from this lsn on",
        ))
        .arg(number(
            "to-lsn",
            "Only batches with a record below this lsn",
        ))
        .arg(switch(
            "index",
            "The indexes of segments instead of the frames",
        ))
        .arg(switch(
            "checkpoint",
            "The checkpoints instead of the frames",
        ))
}

pub(super) fn run(directory: &Path, matches: &ArgMatches, config: &Config) -> Result<u8, Exit> {
    let mut offline = open(directory, "stop it first; `walctl read` shows records")?;
    let disk: Arc<dyn Disk> =
        RealDisk::open_read_only(directory).map_err(|error| failed(&error))?;
    match encryption::to_read(config, &disk) {
        Ok(None) => {}
        Ok(Some(keys)) => offline = offline.with_keys(keys),
        // A damaged ring is a reason to look at the frames.
        Err(why) => say(&format!("{why}; encrypted records are not shown")),
    }
    let lsn = |name: &str| matches.get_one::<u64>(name).copied().map(Lsn::new);
    let filter = DumpFilter {
        segment: matches.get_one::<u64>("segment").copied(),
        log: matches.get_one::<LogName>("log").cloned(),
        from_lsn: lsn("from-lsn"),
        to_lsn: lsn("to-lsn"),
    };
    let mut printer = Printer {
        out: BufWriter::new(io::stdout().lock()),
        form: output_of(matches),
        printed: 0,
        found: false,
        result: Ok(()),
    };
    let mut take = |piece: Dumped| printer.take(&piece);
    let log = filter.log.clone();
    let read = if matches.get_flag("index") {
        offline.dump_indexes(&filter, &mut take)
    } else if matches.get_flag("checkpoint") {
        offline.dump_checkpoints(&filter, &mut take)
    } else {
        offline.dump_frames(&filter, &mut take)
    };
    let found = printer.found;
    written(printer.end())?;
    read.map_err(|error| failed(&error))?;
    match log {
        Some(log) if !found => Err(Exit::new(
            FAILED,
            format!(
                "nothing of log {log:?} is here that fits; `wald dump` without --log shows all"
            ),
        )),
        _ => Ok(0),
    }
}

struct Printer<'a> {
    out: BufWriter<StdoutLock<'a>>,
    form: OfflineOutput,
    printed: u64,
    /// Whether something of a log was printed, and not only the places where it could be.
    found: bool,
    result: io::Result<()>,
}

impl Printer<'_> {
    fn take(&mut self, piece: &Dumped) -> Result<(), Enough> {
        self.result = self.print(piece);
        self.printed += 1;
        self.found |= matches!(piece, Dumped::Frame(_) | Dumped::Row(_) | Dumped::Log(_));
        self.result.as_ref().map_err(|_| Enough).copied()
    }

    fn print(&mut self, piece: &Dumped) -> io::Result<()> {
        match self.form {
            OfflineOutput::Text => text(&mut self.out, piece),
            OfflineOutput::Jsonl => json_line(&mut self.out, &value(piece)),
            OfflineOutput::Json => {
                self.out
                    .write_all(if self.printed == 0 { b"[\n" } else { b",\n" })?;
                put_json(&mut self.out, &value(piece))
            }
        }
    }

    fn end(mut self) -> io::Result<()> {
        self.result?;
        if self.form == OfflineOutput::Json {
            let open: &[u8] = if self.printed == 0 { b"[" } else { b"" };
            self.out.write_all(open)?;
            self.out.write_all(b"\n]\n")?;
        }
        self.out.flush()
    }
}

fn time(time: Timestamp) -> String {
    match jiff::Timestamp::from_microsecond(time.micros()) {
        Ok(time) => format!("{time:.6}"),
        Err(_) => format!("{}us", time.micros()),
    }
}

/// A payload for people: its text, or its bytes in hexadecimal; the beginning of it.
fn shortened(data: &[u8]) -> String {
    let shown = match std::str::from_utf8(data) {
        Ok(text) => escaped(&text.chars().take(SHOWN).collect::<String>()),
        Err(_) => {
            let bytes = data.iter().take(SHOWN / 2);
            let hex: String = bytes.map(|byte| format!("{byte:02x}")).collect();
            format!("0x{hex}")
        }
    };
    let cut = match std::str::from_utf8(data) {
        Ok(text) => text.chars().nth(SHOWN).is_some(),
        Err(_) => data.len() > SHOWN / 2,
    };
    match cut {
        true => format!("{shown}… ({} bytes)", data.len()),
        false => shown,
    }
}

fn text(out: &mut impl Write, piece: &Dumped) -> io::Result<()> {
    match piece {
        Dumped::Segment(segment) if let Some(run) = segment.sorted => writeln!(
            out,
            "sorted run {:016x}  {}  segments {:016x} to {:016x}, positions {} to {}, size {}, salt {:016x}",
            segment.id,
            segment.file,
            run.first,
            run.last,
            run.base,
            run.end,
            segment.size,
            segment.salt
        ),
        Dumped::Segment(segment) => writeln!(
            out,
            "segment {:016x}  {}  positions {} to {}, size {}, salt {:016x}",
            segment.id, segment.file, segment.base, segment.end, segment.size, segment.salt
        ),
        Dumped::Frame(frame) => frame_text(out, frame),
        Dumped::Damaged { segment, from, to } => writeln!(
            out,
            "  DAMAGED  positions {from} to {to} of segment {segment:016x} do not verify"
        ),
        Dumped::Row(row) => {
            let entries: Vec<String> = row
                .entries
                .iter()
                .map(|(offset, lsn, count, bytes)| format!("{lsn}+{count}@{offset}:{bytes}"))
                .collect();
            let log = log_text(&row.log);
            writeln!(
                out,
                "segment {:016x}  {log}  [{}]",
                row.segment,
                entries.join(" ")
            )
        }
        Dumped::Checkpoint(checkpoint) => writeln!(
            out,
            "{}  up to segment {:016x}, {} segments, recovery epoch {}, next log counter {}{}",
            checkpoint.file,
            checkpoint.last_segment,
            checkpoint.segments,
            checkpoint.recovery_epoch,
            checkpoint.next_log_counter,
            if checkpoint.clean { ", clean end" } else { "" }
        ),
        Dumped::Log(log) => writeln!(out, "  {}", log_text(log)),
    }
}

fn log_text(log: &DumpedLog) -> String {
    let name = log.log.as_ref().map_or("(name lost)", |log| log.as_str());
    format!(
        "log {name:?} ({}), lsn {} to {}, {} bytes, newest {}{}",
        log.log_id,
        log.first_lsn,
        log.next_lsn,
        log.stored_bytes,
        time(log.newest),
        if log.deleted { ", deleted" } else { "" }
    )
}

fn frame_text(out: &mut impl Write, frame: &DumpedFrame) -> io::Result<()> {
    let mut line = format!("  {:<10} {}", frame.kind, frame.position);
    if frame.log_id.get() != 0 && frame.kind != "link" {
        match &frame.log {
            Some(log) => line.push_str(&format!("  log {:?} ({})", log.as_str(), frame.log_id)),
            None => line.push_str(&format!("  log ({})", frame.log_id)),
        }
    }
    match frame.kind {
        "batch" => {
            let last = frame.first_lsn.get() + u64::from(frame.count).saturating_sub(1);
            line.push_str(&format!("  lsn {} to {last}", frame.first_lsn));
        }
        "trim" => {
            let by = if frame.count == 0 {
                ""
            } else {
                " by retention"
            };
            line.push_str(&format!("  first kept {}{by}", frame.first_lsn));
        }
        "fence" => line.push_str(&format!("  writer epoch {}", frame.first_lsn)),
        "cursor" => line.push_str(&format!("  next to read {}", frame.first_lsn)),
        _ => {}
    }
    line.push_str(&format!(
        "  {}  header {} body {}",
        time(frame.arrival),
        frame.header_bytes,
        frame.body_bytes
    ));
    if frame.codec != 0 {
        line.push_str(&format!("  codec {}", frame.codec));
    }
    if frame.continues {
        line.push_str("  continues");
    }
    line.push_str(&format!(
        "  durable {}  chain {:08x}  crc {:08x}",
        frame.durable_mark, frame.chain, frame.crc
    ));
    writeln!(out, "{line}")?;
    if let Some((producer, digest)) = &frame.producer {
        writeln!(
            out,
            "      producer {:?} epoch {} sequence {} digest {digest}",
            producer.id.as_str(),
            producer.epoch,
            producer.sequence
        )?;
    }
    if let Some((start, entries)) = &frame.directory {
        writeln!(
            out,
            "      directory of {} frames from {start}",
            entries.len()
        )?;
    }
    match &frame.body {
        DumpedBody::Empty => Ok(()),
        DumpedBody::Damaged => writeln!(out, "      DAMAGED  the body does not verify"),
        DumpedBody::Encrypted(keys) => {
            let keys: Vec<String> = keys.iter().map(u64::to_string).collect();
            writeln!(out, "      encrypted, key {}", keys.join(", "))
        }
        DumpedBody::Records(records) => {
            for record in records.iter().take(RECORDS) {
                let headers = match record.record.headers.len() {
                    0 => String::new(),
                    count => format!("  {count} headers"),
                };
                writeln!(
                    out,
                    "      {}  {}  {}{headers}",
                    record.lsn,
                    time(record.time),
                    shortened(&record.record.data)
                )?;
            }
            match records.len().saturating_sub(RECORDS) {
                0 => Ok(()),
                more => writeln!(out, "      … {more} more"),
            }
        }
        DumpedBody::Created { name, .. } => writeln!(out, "      name {name:?}"),
        DumpedBody::Configured(config) => writeln!(out, "      {config:?}"),
        DumpedBody::Cursor { name, deleted } => writeln!(
            out,
            "      cursor {name:?}{}",
            if *deleted { ", forgotten" } else { "" }
        ),
        DumpedBody::Forgotten {
            producers,
            first_epoch,
        } => {
            for (id, epoch) in producers {
                writeln!(
                    out,
                    "      producer {id:?}, epoch {epoch} and lower ones are over"
                )?;
            }
            match first_epoch {
                0 => Ok(()),
                first => writeln!(out, "      unknown producers begin with epoch {first}"),
            }
        }
        DumpedBody::Link {
            predecessor,
            predecessor_end,
            recovery_epoch,
            closings,
            ..
        } => {
            let before = predecessor.map_or("none".to_owned(), |id| format!("{id:016x}"));
            let logs = closings
                .as_ref()
                .map_or("too many".to_owned(), |c| c.len().to_string());
            writeln!(
                out,
                "      after segment {before}, which ends at {predecessor_end}; recovery epoch {recovery_epoch}; {logs} logs listed"
            )
        }
        DumpedBody::Seal {
            frames,
            records,
            digest,
            clean,
        } => writeln!(
            out,
            "      {frames} frames, {records} records, digest {digest:032x}{}",
            if *clean { ", clean end" } else { "" }
        ),
    }
}

fn value(piece: &Dumped) -> Value {
    match piece {
        Dumped::Segment(segment) => json!({ "segment": {
            "id": format!("{:016x}", segment.id),
            "file": segment.file,
            "base_position": segment.base.get(),
            "end_position": segment.end.get(),
            "sorted": segment.sorted.map(|run| json!({
                "first_segment": format!("{:016x}", run.first),
                "last_segment": format!("{:016x}", run.last),
                "base_position": run.base.get(),
                "end_position": run.end.get(),
            })),
            "size": segment.size,
            "salt": format!("{:016x}", segment.salt),
        }}),
        Dumped::Frame(frame) => json!({ "frame": frame_value(frame) }),
        Dumped::Damaged { segment, from, to } => json!({ "damaged": {
            "segment": format!("{segment:016x}"),
            "from_position": from.get(),
            "to_position": to.get(),
        }}),
        Dumped::Row(row) => {
            let entry = |&(offset, lsn, count, bytes): &(u64, Lsn, u32, u32)| json!({ "offset": offset, "first_lsn": lsn.get(), "count": count, "bytes": bytes });
            let mut row_value = log_value(&row.log);
            row_value["segment"] = json!(format!("{:016x}", row.segment));
            row_value["entries"] = row.entries.iter().map(entry).collect();
            json!({ "row": row_value })
        }
        Dumped::Checkpoint(checkpoint) => json!({ "checkpoint": {
            "file": checkpoint.file,
            "last_segment": format!("{:016x}", checkpoint.last_segment),
            "recovery_epoch": checkpoint.recovery_epoch,
            "next_log_counter": checkpoint.next_log_counter,
            "clean": checkpoint.clean,
            "segments": checkpoint.segments,
        }}),
        Dumped::Log(log) => json!({ "log": log_value(log) }),
    }
}

fn log_value(log: &DumpedLog) -> Value {
    json!({
        "log_id": log.log_id.get(),
        "log": log.log.as_ref().map(LogName::as_str),
        "first_lsn": log.first_lsn.get(),
        "next_lsn": log.next_lsn.get(),
        "stored_bytes": log.stored_bytes,
        "deleted": log.deleted,
        "newest_time": time(log.newest),
    })
}

fn frame_value(frame: &DumpedFrame) -> Value {
    let mut value = json!({
        "segment": format!("{:016x}", frame.segment),
        "position": frame.position.get(),
        "offset": frame.offset,
        "kind": frame.kind,
        "codec": frame.codec,
        "continues": frame.continues,
        "header_bytes": frame.header_bytes,
        "body_bytes": frame.body_bytes,
        "body_crc": format!("{:08x}", frame.body_crc),
        "count": frame.count,
        "log_id": frame.log_id.get(),
        "log": frame.log.as_ref().map(LogName::as_str),
        "first_lsn": frame.first_lsn.get(),
        "arrival": time(frame.arrival),
        "durable_mark": frame.durable_mark.get(),
        "chain": format!("{:08x}", frame.chain),
        "crc": format!("{:08x}", frame.crc),
    });
    if let Some((producer, digest)) = &frame.producer {
        value["producer"] = json!({
            "id": producer.id.as_str(),
            "epoch": producer.epoch,
            "sequence": producer.sequence,
            "digest": digest.to_string(),
        });
    }
    if let Some((start, entries)) = &frame.directory {
        let entries: Vec<Value> = entries
            .iter()
            .map(|entry| {
                json!({
                    "kind": entry.kind,
                    "frame_bytes": entry.frame_bytes,
                    "log_id": entry.log_id.get(),
                    "first_lsn": entry.first_lsn.get(),
                    "count": entry.count,
                    "name": entry.name,
                })
            })
            .collect();
        value["directory"] = json!({ "start": start.get(), "entries": entries });
    }
    body_value(&mut value, &frame.body);
    value
}

fn body_value(value: &mut Value, body: &DumpedBody) {
    match body {
        DumpedBody::Empty => {}
        DumpedBody::Damaged => value["body_damaged"] = json!(true),
        DumpedBody::Encrypted(keys) => value["encrypted_with_keys"] = json!(keys),
        DumpedBody::Records(records) => {
            value["records"] = records.iter().map(record_value).collect();
        }
        DumpedBody::Created {
            name,
            config,
            time: created,
        } => {
            value["name"] = json!(name);
            value["config"] = json!(format!("{config:?}"));
            value["create_time"] = json!(time(*created));
        }
        DumpedBody::Configured(config) => value["config"] = json!(format!("{config:?}")),
        DumpedBody::Cursor { name, deleted } => {
            value["cursor"] = json!(name);
            value["forgotten"] = json!(deleted);
        }
        DumpedBody::Forgotten {
            producers,
            first_epoch,
        } => {
            let each = producers.iter();
            let each = each.map(|(id, epoch)| json!({ "id": id, "epoch": epoch }));
            value["producers"] = each.collect();
            value["first_epoch"] = json!(first_epoch);
        }
        DumpedBody::Link {
            predecessor,
            predecessor_end,
            predecessor_chain,
            recovery_epoch,
            next_log_counter,
            closings,
        } => {
            value["link"] = json!({
                "predecessor": predecessor.map(|id| format!("{id:016x}")),
                "predecessor_end": predecessor_end.get(),
                "predecessor_chain": format!("{predecessor_chain:08x}"),
                "recovery_epoch": recovery_epoch,
                "next_log_counter": next_log_counter,
                "closings": closings.as_ref().map(|closings| {
                    let each = closings.iter();
                    each.map(|(id, next)| json!({ "log_id": id.get(), "next_lsn": next.get() }))
                        .collect::<Vec<_>>()
                }),
            });
        }
        DumpedBody::Seal {
            frames,
            records,
            digest,
            clean,
        } => {
            value["seal"] = json!({
                "frames": frames,
                "records": records,
                "digest": format!("{digest:032x}"),
                "clean": clean,
            });
        }
    }
}

fn record_value(record: &DumpedRecord) -> Value {
    let content = |value: &mut Value, key: &str, data: &[u8]| match std::str::from_utf8(data) {
        Ok(text) => value[key] = json!(text),
        Err(_) => value["data"] = json!(STANDARD.encode(data)),
    };
    let mut value = json!({ "lsn": record.lsn.get(), "time": time(record.time) });
    content(&mut value, "text", &record.record.data);
    if let Some(crc) = record.record.crc32c {
        value["crc32c"] = json!(format!("{crc:08x}"));
    }
    let headers: Vec<Value> = record
        .record
        .headers
        .iter()
        .map(|header| {
            let mut value = json!({ "key": header.key });
            content(&mut value, "value", &header.value);
            value
        })
        .collect();
    if !headers.is_empty() {
        value["headers"] = Value::Array(headers);
    }
    value
}
