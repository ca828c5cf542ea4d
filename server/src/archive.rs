//! `wald archive`: lists, verifies and restores the records that retention moved to an archive.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use indicatif::{HumanBytes, HumanCount};
use jiff::Timestamp;
use serde_json::{Value, json};
use wald_storage::{
    ArchiveFile, ArchiveFilter, ArchiveFinding, ArchiveListing, ArchiveRestored, ArchivedLog, Disk,
    LogId, LogName, RealDisk, list_archive, restore_archive,
};

use crate::backups::{self, bar};
use crate::config::Config;
use crate::host;
use crate::offline::{DATA_LOSS, FAILED, escaped, json_line, say, written};
use crate::serve::Exit;

pub(crate) fn command() -> Command {
    Command::new("archive")
        .about("List, verify or restore records that retention moved to an archive")
        .subcommand_required(true)
        .subcommand(
            with_filter(Command::new("list"))
                .about("List the files of an archive, their contents and their damage")
                .long_about(
                    "Lists the files of an archive (archive_dir) and their contents by log: records, \
                     bytes, arrival of the first and of the last batch. Changes nothing, and may \
                     run while a daemon writes there.\n\n\
                     Exit codes: 0 no damage, 1 the archive could not be read, 2 usage, 5 damage \
                     was found.",
                )
                .arg(
                    Arg::new("verify")
                        .long("verify")
                        .action(ArgAction::SetTrue)
                        .help("Read every file, and compare it with its checksums"),
                ),
        )
        .subcommand(
            with_filter(Command::new("restore"))
                .about("Make a store of the records in an archive, in an empty directory")
                .long_about(
                    "Makes a store of the records in an archive, in an empty directory. Serve it with a \
                     wald of its own. It has the records that retention moved, with their lsns, \
                     arrivals and batches. Readers get a gap for other records (TRIMMED or \
                     EXPIRED). A log ends with its newest archived record. It keeps its settings \
                     and writer epoch, but no retention, which would drop everything again. If two \
                     logs had one name, the newer one is restored; --log-id selects the other.\n\n\
                     The archive does not change. An interrupted restore leaves no store that a \
                     start would accept.\n\n\
                     Exit codes: 0 ok, 1 failed, 2 usage, 3 no such records, 4 a daemon has the \
                     directory, 5 damage in the archive: everything else was restored.",
                )
                .arg(
                    Arg::new("to")
                        .long("to")
                        .value_name("DATA_DIR")
                        .required(true)
                        .help("The directory of the new store")
                        .value_parser(value_parser!(PathBuf)),
                ),
        )
}

fn with_filter(command: Command) -> Command {
    command
        .arg(
            Arg::new("archive")
                .long("archive")
                .value_name("DIR")
                .help("The archive [default: the configured archive_dir]")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(
            Arg::new("log")
                .long("log")
                .value_name("NAME")
                .help("Only logs of this name")
                .value_parser(|text: &str| LogName::new(text)),
        )
        .arg(
            Arg::new("prefix")
                .long("prefix")
                .value_name("PREFIX")
                .conflicts_with("log")
                .help("Only logs whose names begin with this prefix"),
        )
        .arg(
            Arg::new("log-id")
                .long("log-id")
                .value_name("ID")
                .help("Only the log with this id")
                .value_parser(value_parser!(u64)),
        )
        .arg(
            Arg::new("store")
                .long("store")
                .value_name("ID")
                .help("Only files of this store; `wald archive list` shows the id")
                .value_parser(store_id),
        )
        .arg(backups::json_argument())
}

/// Reads a store's id, with or without hyphens.
fn store_id(text: &str) -> Result<u128, String> {
    let digits = text.replace('-', "");
    u128::from_str_radix(&digits, 16)
        .ok()
        .filter(|_| digits.len() == 32)
        .ok_or_else(|| "expected 32 hexadecimal digits".to_owned())
}

/// Runs the command. Returns the exit code.
pub(crate) fn run(config: &Config, matches: &ArgMatches) -> Result<u8, Exit> {
    let Some((name, matches)) = matches.subcommand() else {
        return Err(Exit::new(backups::USAGE, "list or restore?"));
    };
    let configured =
        || Some(PathBuf::from(&config.archive_dir)).filter(|_| !config.archive_dir.is_empty());
    let archive = matches.get_one::<PathBuf>("archive").cloned();
    let archive = archive.or_else(configured).ok_or_else(|| {
        Exit::new(
            backups::USAGE,
            "name the archive with --archive: no archive_dir is configured",
        )
    })?;
    let disk: Arc<dyn Disk> = RealDisk::open_read_only(&archive).map_err(|error| {
        let text = error.to_string().replace("data directory", "archive");
        Exit::new(FAILED, text)
    })?;
    let filter = ArchiveFilter {
        store: matches.get_one::<u128>("store").copied(),
        log: matches.get_one::<LogName>("log").cloned(),
        prefix: matches
            .get_one::<String>("prefix")
            .cloned()
            .unwrap_or_default(),
        log_id: matches.get_one::<u64>("log-id").copied().map(LogId::new),
    };
    let json = backups::wants_json(matches);
    match name {
        "restore" => {
            let target = matches
                .get_one::<PathBuf>("to")
                .ok_or_else(|| Exit::new(backups::USAGE, "name the new directory with --to"))?;
            host::check_owner(config, target)?;
            restore(config, &disk, target, &filter, json)
        }
        _ => list(&archive, &disk, &filter, matches.get_flag("verify"), json),
    }
}

fn list(
    archive: &Path,
    disk: &Arc<dyn Disk>,
    filter: &ArchiveFilter,
    verify: bool,
    json: bool,
) -> Result<u8, Exit> {
    let total: u64 = std::fs::read_dir(archive)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some(entry.metadata().ok()?.len()))
        .sum();
    let bar = bar(if verify { total } else { 0 });
    bar.set_message("verifying");
    let listing = list_archive(&**disk, filter, verify, &mut |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let listing = listing
        .map_err(|error| Exit::new(FAILED, format!("reading {}: {error}", archive.display())))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match json {
        true => json_line(&mut out, &document(&listing)),
        false => text(&mut out, &listing, verify),
    };
    written(printed.and_then(|()| out.flush()))?;
    Ok(match listing.findings.is_empty() {
        true => 0,
        false => DATA_LOSS,
    })
}

pub(crate) fn time(time: wald_storage::Timestamp) -> String {
    Timestamp::from_microsecond(time.micros())
        .map_or_else(|_| time.micros().to_string(), |t| t.to_string())
}

fn name(log: Option<&LogName>, id: LogId) -> String {
    match log {
        Some(name) => escaped(name.as_str()),
        None => format!("log id {id}, whose name is lost"),
    }
}

fn text(out: &mut impl Write, listing: &ArchiveListing, verified: bool) -> io::Result<()> {
    for file in &listing.files {
        let (first, last) = file.segments;
        let pending = match file.pending {
            true => "; pending: its store may have all of it",
            false => "",
        };
        writeln!(
            out,
            "{}  {}, segments {first} to {last}{pending}",
            file.path,
            HumanBytes(file.bytes)
        )?;
        for log in &file.logs {
            // People count inclusively: show the last lsn, not the one after it.
            writeln!(
                out,
                "  {}  lsn {} to {}, {} records, {}, {} to {}",
                name(log.name.as_ref(), log.log_id),
                log.lsns.start,
                log.lsns.end.get().saturating_sub(1),
                HumanCount(log.records),
                HumanBytes(log.bytes),
                time(log.arrivals.0),
                time(log.arrivals.1),
            )?;
        }
    }
    for path in &listing.unfinished {
        writeln!(
            out,
            "note    {path}: being written, or cut off; its store has all of it"
        )?;
    }
    for path in &listing.strangers {
        writeln!(out, "note    {}: not a file of an archive", escaped(path))?;
    }
    for finding in &listing.findings {
        writeln!(out, "DAMAGE  {}", line(finding))?;
    }
    let logs = || listing.files.iter().flat_map(|file| &file.logs);
    let mut ids: Vec<_> = listing
        .files
        .iter()
        .flat_map(|file| file.logs.iter().map(|log| (file.store_id, log.log_id)))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    writeln!(
        out,
        "{} files, {}, {} records of {} logs: {}",
        HumanCount(listing.files.len() as u64),
        HumanBytes(listing.files.iter().map(|file| file.bytes).sum()),
        HumanCount(logs().map(|log| log.records).sum()),
        HumanCount(ids.len() as u64),
        match (listing.findings.is_empty(), verified) {
            (false, _) => "something is damaged",
            (true, true) => "nothing is wrong",
            (true, false) => "not verified (--verify)",
        }
    )
}

fn line(finding: &ArchiveFinding) -> String {
    let mut line = match finding.detail.starts_with(&finding.path) {
        true => String::new(),
        false => format!("{}: ", finding.path),
    };
    if let Some(id) = finding.log_id {
        line.push_str(&format!("{}, ", name(finding.log.as_ref(), id)));
    }
    if let Some(lsns) = &finding.lsns {
        let last = lsns.end.get().saturating_sub(1);
        line.push_str(&format!("lsn {} to {last}: ", lsns.start));
    }
    line.push_str(&escaped(&finding.detail));
    line
}

fn finding_value(finding: &ArchiveFinding) -> Value {
    json!({
        "file": finding.path,
        "log": finding.log.as_ref().map(LogName::as_str),
        "log_id": finding.log_id.map(LogId::get),
        "from_lsn": finding.lsns.as_ref().map(|lsns| lsns.start.get()),
        "to_lsn": finding.lsns.as_ref().map(|lsns| lsns.end.get()),
        "detail": finding.detail,
    })
}

fn log_value(log: &ArchivedLog) -> Value {
    json!({
        "log": log.name.as_ref().map(LogName::as_str),
        "log_id": log.log_id.get(),
        "from_lsn": log.lsns.start.get(),
        "to_lsn": log.lsns.end.get(),
        "records": log.records,
        "bytes": log.bytes,
        "first_arrival": time(log.arrivals.0),
        "last_arrival": time(log.arrivals.1),
        "retention": log.retention.map(|retention| json!({
            "max_age_seconds": retention.max_age.map(|age| age.as_secs_f64()),
            "max_bytes": retention.max_bytes,
            "max_records": retention.max_records,
        })),
    })
}

fn file_value(file: &ArchiveFile) -> Value {
    json!({
        "file": file.path,
        "bytes": file.bytes,
        "store_id": format!("{:032x}", file.store_id),
        "run": file.run.to_string(),
        "first_segment": file.segments.0.to_string(),
        "last_segment": file.segments.1.to_string(),
        "from_position": file.positions.start.get(),
        "to_position": file.positions.end.get(),
        "pending": file.pending,
        "logs": file.logs.iter().map(log_value).collect::<Vec<_>>(),
    })
}

fn document(listing: &ArchiveListing) -> Value {
    json!({
        "files": listing.files.iter().map(file_value).collect::<Vec<_>>(),
        "findings": listing.findings.iter().map(finding_value).collect::<Vec<_>>(),
        "unfinished": listing.unfinished,
        "strangers": listing.strangers,
    })
}

fn restore(
    config: &Config,
    archive: &Arc<dyn Disk>,
    target: &Path,
    filter: &ArchiveFilter,
    json: bool,
) -> Result<u8, Exit> {
    let storage = config.storage_without_replica();
    let is_new = !target.exists();
    let disk: Arc<dyn Disk> =
        RealDisk::open(target).map_err(|error| backups::open_failed(&error))?;
    let bar = bar(0);
    bar.set_message("restoring");
    let restored = restore_archive(archive, &disk, filter, &storage, &mut |bytes| {
        bar.inc_length(bytes);
        bar.inc(bytes);
    });
    bar.finish_and_clear();
    let restored = restored.map_err(|error| {
        if is_new {
            // Removes only a directory that nothing was written to.
            let _ = std::fs::remove_dir(target);
        }
        backups::failed(&error)
    })?;
    tell(&restored, target, json)?;
    Ok(
        match restored.findings.is_empty() && restored.report.findings.is_empty() {
            true => 0,
            false => DATA_LOSS,
        },
    )
}

fn tell(restored: &ArchiveRestored, target: &Path, json: bool) -> Result<(), Exit> {
    for finding in &restored.findings {
        say(&line(finding));
    }
    for finding in &restored.report.findings {
        say(&finding.to_string());
    }
    for skipped in &restored.skipped {
        say(&format!(
            "{} (id {}) is not restored, since a later log has that name; --log-id {} restores \
             it to a directory of its own",
            name(skipped.name.as_ref(), skipped.log_id),
            skipped.log_id,
            skipped.log_id,
        ));
    }
    let report = &restored.report;
    let told = match json {
        true => json!({
            "data_dir": target.display().to_string(),
            "store_id": format!("{:032x}", restored.store_id),
            "files": restored.files,
            "logs": report.logs,
            "records": report.records,
            "bytes": restored.bytes,
            "duplicates": restored.duplicates,
            "skipped": restored.skipped.iter().map(|skipped| json!({
                "log": skipped.name.as_ref().map(LogName::as_str),
                "log_id": skipped.log_id.get(),
            })).collect::<Vec<_>>(),
            "findings": restored.findings.iter().map(finding_value).collect::<Vec<_>>(),
        })
        .to_string(),
        false => format!(
            "restored {} records of {} logs, {}, from {} files; {} is ready to be served, as store \
             {:032x}",
            HumanCount(report.records),
            HumanCount(report.logs),
            HumanBytes(restored.bytes),
            HumanCount(restored.files),
            target.display(),
            restored.store_id,
        ),
    };
    let mut out = io::stdout().lock();
    written(writeln!(out, "{told}").and_then(|()| out.flush()))
}
