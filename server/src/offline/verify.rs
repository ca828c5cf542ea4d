//! `wald verify`: checks all that is stored, and says exactly what is wrong.

use std::io::{self, IsTerminal as _, Write};
use std::path::Path;

use clap::{Arg, ArgMatches, Command};
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use serde_json::json;
use wald_storage::{Control, Finding, FindingKind, OfflineReport, Severity};

use super::{DATA_LOSS, Output, failed, open, output_of, written};
use crate::backups;
use crate::config::{Size, Value as _};
use crate::serve::Exit;

pub(super) fn command() -> Command {
    Command::new("verify")
        .about("Check a data directory that nobody serves: every checksum, chain, index, digest")
        .long_about(
            "Checks a data directory that nobody serves: life blocks, frames, chains, atomic \
             units, directories, seals, indexes, checkpoints, and what is missing or does not \
             belong there. Changes nothing. For a running daemon use `walctl verify`. Of a \
             directory that `walctl backup` writes to one backup is checked, without restoring it.\n\n\
             Exit codes: 0 all is well, 1 it could not be checked, 2 usage, 4 a daemon has the \
             directory, 5 something is damaged or lost.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(backups::backup_argument())
        .arg(
            Arg::new("max-bytes-per-second")
                .long("max-bytes-per-second")
                .value_name("SIZE")
                .help("Read at most so much in a second, as 64MiB; 0: no bound")
                .default_value("0")
                .value_parser(|text: &str| Size::parse(text)),
        )
}

pub(super) fn run(directory: &Path, matches: &ArgMatches) -> Result<u8, Exit> {
    if backups::is_directory_of_backups(directory) {
        let id = matches.get_one::<String>("backup");
        let json = output_of(matches) != Output::Text;
        return backups::verify(directory, id.map_or("latest", String::as_str), json);
    }
    let offline = open(
        directory,
        "`walctl verify` checks the store of a running daemon",
    )?;
    let rate = matches.get_one::<Size>("max-bytes-per-second");
    let control = Control::new(rate.map_or(0, |rate| rate.0));
    let bar = bar();
    let mut tell = |progress: &wald_storage::Progress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.checked_bytes);
    };
    let report = offline.verify(&control, &mut tell);
    bar.finish_and_clear();
    let report = report.map_err(|error| failed(&error))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        Output::Text => text(&mut out, &report),
        Output::Json => super::json_line(&mut out, &document(&report)),
        Output::Jsonl => lines(&mut out, &report),
    };
    written(printed.and_then(|()| out.flush()))?;
    Ok(match report.severity() {
        Some(Severity::Damage | Severity::Loss) => DATA_LOSS,
        Some(Severity::Note) | None => 0,
    })
}

fn bar() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(
        "verifying {wide_bar} {percent:>3}%  {binary_bytes}/{binary_total_bytes}  \
         {binary_bytes_per_sec}  {eta} left",
    );
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn text(out: &mut impl Write, report: &OfflineReport) -> io::Result<()> {
    for finding in &report.findings {
        writeln!(out, "{}", line(finding))?;
        writeln!(out, "        {}", finding.advice)?;
    }
    for (path, bytes) in &report.quarantine {
        writeln!(
            out,
            "note    {path}: {} cut off a torn tail by an earlier start; kept to be looked at",
            HumanBytes(*bytes)
        )?;
    }
    if report.torn_bytes > 0 {
        writeln!(
            out,
            "note    behind the end of the journal are {} that nothing proves to have been flushed; \
             the next start cuts them off",
            HumanBytes(report.torn_bytes)
        )?;
    }
    let count = |severity| {
        let found = report.findings.iter();
        found.filter(|f| f.severity == severity).count()
    };
    let (lost, damaged) = (count(Severity::Loss), count(Severity::Damage));
    let result = match (lost, damaged) {
        (0, 0) => "nothing is wrong".to_owned(),
        (0, damaged) => format!("{damaged} damaged, no record lost"),
        (lost, damaged) => format!("{lost} with records lost, {damaged} damaged"),
    };
    let store = report.store_id;
    writeln!(
        out,
        "store {store:032x}: {} segments, {} frames, {} records, {} checked: {result}",
        HumanCount(report.segments),
        HumanCount(report.frames),
        HumanCount(report.records),
        HumanBytes(report.checked_bytes),
    )
}

/// A finding on one line.
fn line(finding: &Finding) -> String {
    let mut line = format!("{:<8}", word(finding.severity));
    let mut place = Vec::new();
    if let Some(log) = &finding.log {
        place.push(format!("log {:?}", log.as_str()));
    } else if let Some(id) = finding.log_id {
        place.push(format!("log id {id}"));
    }
    if let Some((from, to)) = finding.lsns {
        // People count what is there: the last one, not the one after.
        let last = to.get().saturating_sub(1);
        place.push(match last == from.get() {
            true => format!("lsn {from}"),
            false => format!("lsn {from} to {last}"),
        });
    }
    if let Some(file) = &finding.file
        && !finding.detail.starts_with(file.as_str())
    {
        place.push(super::escaped(file));
    }
    if let Some((from, to)) = finding.positions {
        place.push(match from == to {
            true => format!("position {from}"),
            false => format!("positions {from} to {to}"),
        });
    }
    if !place.is_empty() {
        line.push_str(&place.join(", "));
        line.push_str(": ");
    }
    line.push_str(&super::escaped(&finding.detail));
    line
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::Note => "note",
        Severity::Damage => "damage",
        Severity::Loss => "LOSS",
    }
}

fn kind(kind: FindingKind) -> &'static str {
    match kind {
        FindingKind::Checksum => "checksum",
        FindingKind::Chain => "chain",
        FindingKind::Index => "index",
        FindingKind::Digest => "digest",
        FindingKind::Missing => "missing",
        FindingKind::Unowned => "unowned",
    }
}

fn value(finding: &Finding) -> serde_json::Value {
    json!({
        "kind": kind(finding.kind),
        "severity": word(finding.severity).to_lowercase(),
        "file": finding.file,
        "segment": finding.segment.map(|id| format!("{id:016x}")),
        "from_position": finding.positions.map(|(from, _)| from.get()),
        "to_position": finding.positions.map(|(_, to)| to.get()),
        "log": finding.log.as_ref().map(|log| log.as_str()),
        "log_id": finding.log_id.map(|id| id.get()),
        "from_lsn": finding.lsns.map(|(from, _)| from.get()),
        "to_lsn": finding.lsns.map(|(_, to)| to.get()),
        "detail": finding.detail,
        "advice": finding.advice,
    })
}

fn summary(report: &OfflineReport) -> serde_json::Value {
    let quarantine: Vec<_> = report
        .quarantine
        .iter()
        .map(|(file, bytes)| json!({ "file": file, "bytes": bytes }))
        .collect();
    json!({
        "store_id": format!("{:032x}", report.store_id),
        "segments": report.segments,
        "frames": report.frames,
        "records": report.records,
        "checked_bytes": report.checked_bytes,
        "torn_bytes": report.torn_bytes,
        "quarantine": quarantine,
        "severity": report.severity().map_or("none".to_owned(), |worst| word(worst).to_lowercase()),
    })
}

fn document(report: &OfflineReport) -> serde_json::Value {
    let mut document = summary(report);
    document["findings"] = report.findings.iter().map(value).collect();
    document
}

/// Each finding on a line, then the summary.
fn lines(out: &mut impl Write, report: &OfflineReport) -> io::Result<()> {
    for finding in &report.findings {
        super::json_line(out, &json!({ "finding": value(finding) }))?;
    }
    super::json_line(out, &json!({ "summary": summary(report) }))
}
