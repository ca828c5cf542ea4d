//! `wald verify`: checks everything in a store, and reports exactly the faults that it finds.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal as _, Write};
use std::path::Path;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use serde_json::json;
use wald_storage::{Control, Finding, FindingKind, OfflineReport, Severity};

use super::{DATA_LOSS, OfflineOutput, failed, few, open, output_of, written};
use crate::backups;
use crate::config::{Config, SettingValue as _, Size};
use crate::serve::Exit;

pub(super) fn command() -> Command {
    Command::new("verify")
        .about("Check every checksum, chain, index and digest of an offline data directory")
        .long_about(
            "Checks an offline data directory: life blocks, frames, chains, atomic units, \
             directories, seals, indexes, checkpoints, and missing or foreign files. Changes \
             nothing. For a running daemon use `walctl verify`. In a directory or bucket of \
             `walctl backup` the command checks one backup, without restoring it. In a bucket with the replica of a store \
             it checks that: the files of the newest manifest, and the rows behind them.\n\n\
             Exit codes: 0 all is well, 1 it could not be checked, 2 usage, 4 a daemon has the \
             directory, 5 something is damaged or lost.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(backups::backup_argument())
        .arg(backups::trust_argument())
        .arg(
            Arg::new("max-bytes-per-second")
                .long("max-bytes-per-second")
                .value_name("SIZE")
                .help(
                    "Maximum bytes to read in a second, such as 64MiB (0 = no bound); not for backups and replicas",
                )
                .default_value("0")
                .value_parser(|text: &str| Size::parse(text)),
        )
}

pub(super) fn run(directory: &Path, matches: &ArgMatches, config: &Config) -> Result<u8, Exit> {
    if backups::is_place_of_backups(directory) {
        if matches.value_source("max-bytes-per-second") == Some(ValueSource::CommandLine) {
            let text = "--max-bytes-per-second is for a data directory: backups and replicas are read without a bound";
            return Err(Exit::new(backups::USAGE, text));
        }
        let config = &backups::with_trust(config, matches)?;
        let id = matches.get_one::<String>("backup");
        let json = output_of(matches) != OfflineOutput::Text;
        #[cfg(feature = "object")]
        if !backups::names_backup(matches)
            && let Some(code) = backups::verify_replica(directory, config, json)?
        {
            return Ok(code);
        }
        return backups::verify(directory, config, id.map_or("latest", String::as_str), json);
    }
    if matches.contains_id("trust") {
        let text =
            "--trust is for backups and replicas: a store in a data directory has no signature";
        return Err(Exit::new(backups::USAGE, text));
    }
    if backups::names_backup(matches) {
        let text = format!(
            "--backup is for backups, and {} is no directory or bucket of them",
            directory.display()
        );
        return Err(Exit::new(backups::USAGE, text));
    }
    let offline = open(
        directory,
        "`walctl verify` checks the store of a running daemon",
    )?;
    let rate = matches.get_one::<Size>("max-bytes-per-second");
    let control = Control::new(rate.map_or(0, |rate| rate.0));
    let bar = bar();
    let mut tell = |progress: &wald_storage::VerifyProgress| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.checked_bytes);
    };
    let report = offline.verify(&control, &mut tell);
    bar.finish_and_clear();
    let report = report.map_err(|error| failed(&error))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        OfflineOutput::Text => text(&mut out, &report),
        OfflineOutput::Json => super::json_line(&mut out, &document(&report)),
        OfflineOutput::Jsonl => lines(&mut out, &report),
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
    shown(out, &report.findings)?;
    let (kept, rest) = few(&report.quarantine);
    for (path, bytes) in kept {
        writeln!(
            out,
            "note    {path}: {} cut off a torn tail by an earlier start; kept to be looked at",
            HumanBytes(*bytes)
        )?;
    }
    if !rest.is_empty() {
        let bytes = rest.iter().map(|(_, bytes)| bytes).sum();
        writeln!(
            out,
            "note    {} more files with {} cut off torn tails; {ALL}",
            rest.len(),
            HumanBytes(bytes)
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

/// The way to all findings.
const ALL: &str = "`wald verify --output json` lists all";

/// The first findings of each kind, in their order, and totals of the others.
fn shown(out: &mut impl Write, findings: &[Finding]) -> io::Result<()> {
    let mut kinds: Vec<((Severity, FindingKind), Vec<&Finding>)> = Vec::new();
    for finding in findings {
        let kind = (finding.severity, finding.kind);
        let at = kinds.iter().position(|(known, _)| *known == kind);
        let at = at.unwrap_or_else(|| {
            kinds.push((kind, Vec::new()));
            kinds.len() - 1
        });
        let of_kind = &mut kinds[at].1;
        of_kind.push(finding);
        if of_kind.len() <= few(of_kind).0.len() {
            writeln!(out, "{}", line(finding))?;
            writeln!(out, "        {}", finding.advice)?;
        }
    }
    for ((severity, of), found) in kinds {
        let (_, rest) = few(&found);
        if rest.is_empty() {
            continue;
        }
        let records = rest.iter().filter_map(|finding| finding.lsns);
        let records: u64 = records.map(|(from, to)| to.since(from)).sum();
        let logs: BTreeSet<_> = rest.iter().filter_map(|finding| finding.log_id).collect();
        writeln!(
            out,
            "{:<8}{} more of kind {} ({records} records of {} logs); {ALL}",
            word(severity),
            rest.len(),
            kind(of),
            logs.len()
        )?;
    }
    Ok(())
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
        // People count inclusively: show the last lsn, not the one after it.
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

#[cfg(test)]
mod tests {
    use wald_storage::{LogId, Lsn, Position};

    use super::*;

    #[test]
    fn many_findings_of_a_kind_take_few_lines_and_others_stay_visible() {
        let finding = |severity, kind, number: u64| Finding {
            kind,
            severity,
            file: Some("journal/0000000000000002.seg".to_owned()),
            segment: Some(2),
            positions: Some((Position::new(number), Position::new(number + 1))),
            log: None,
            log_id: Some(LogId::new(number % 7)),
            lsns: Some((Lsn::new(number), Lsn::new(number + 2))),
            detail: "gone".to_owned(),
            advice: "restore a backup",
        };
        let missing = (0..3000).map(|n| finding(Severity::Loss, FindingKind::Missing, n));
        let mut findings: Vec<Finding> = missing.collect();
        findings.push(finding(Severity::Loss, FindingKind::Checksum, 5000));
        findings.push(finding(Severity::Damage, FindingKind::Missing, 6000));
        let mut out = Vec::new();
        shown(&mut out, &findings).unwrap();
        let said = String::from_utf8(out).unwrap();
        // Each has a line of advice.
        assert_eq!(said.lines().count(), 2 * (16 + 2) + 1, "{said}");
        for lsn in ["5000", "6000"] {
            assert!(said.contains(&format!("lsn {lsn} to")), "{said}");
        }
        let last = said.lines().last().unwrap();
        let rest = "LOSS    2984 more of kind missing (5968 records of 7 logs); ";
        assert_eq!(last, format!("{rest}{ALL}"));
    }
}
