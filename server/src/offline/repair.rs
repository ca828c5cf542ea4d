//! `wald repair`: reports the losses of a store, and accepts them if the operator asks for it.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command};
use jiff::Timestamp;
use serde_json::json;
use wald_storage::{
    Disk, Loss, RealDisk, RecoveryReport, StorageConfig, SystemClock, records_in_words,
};

use super::{DATA_LOSS, Gaps, OfflineOutput, exists, few, not_opened, output_of, who, written};
use crate::serve::Exit;

pub(super) fn command() -> Command {
    Command::new("repair")
        .about("Report the losses of an offline store, or accept them with --accept-loss")
        .long_about(
            "Reports the records that an offline store has lost to damage, and the logs that refuse \
             appends because of it: if the newest records of a log may be gone, an append could \
             get the lsn of a lost record.\n\n\
             With --accept-loss that loss is final: every log takes appends again, behind the \
             records that were found. Nothing is removed, the recovery epoch rises, and the file \
             REPAIRS records the time, the user and the losses. Readers still get a gap for \
             missing records. If the newest records of a log are gone, the log continues behind \
             the last one found: lsns of lost records are given out again, and cursors beyond are \
             gone. A log whose name is lost gets the name unnamed/ID. Before that, check whether a \
             backup has the segment: restore it elsewhere (`wald restore`), and replace the damaged \
             file in journal/ with the one from there.\n\n\
             Exit codes: 0 nothing is lost, or it was accepted, 1 failed, 2 usage, 4 a daemon has \
             the directory, 5 something is lost and was not accepted.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(
            Arg::new("accept-loss")
                .long("accept-loss")
                .help("Accept the loss for good: continue without the lost records")
                .action(ArgAction::SetTrue),
        )
}

pub(super) fn run(
    directory: &Path,
    matches: &ArgMatches,
    config: &StorageConfig,
) -> Result<u8, Exit> {
    exists(directory)?;
    let accepts = matches.get_flag("accept-loss");
    let disk = if accepts && directory.is_dir() {
        RealDisk::open(directory)
    } else {
        RealDisk::open_read_only(directory)
    };
    let disk: Arc<dyn Disk> = disk.map_err(not_opened)?;
    let (loss, done) = if accepts {
        let by = format!("at {}, by {}", Timestamp::now(), who());
        wald_storage::accept_loss(&disk, config, Arc::new(SystemClock), &by).map_err(not_opened)?
    } else {
        (
            wald_storage::examine(&disk, config).map_err(not_opened)?,
            None,
        )
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        OfflineOutput::Text => text(&mut out, &loss, done.as_ref()),
        OfflineOutput::Json | OfflineOutput::Jsonl => {
            super::json_line(&mut out, &document(&loss, done.as_ref()))
        }
    };
    written(printed.and_then(|()| out.flush()))?;
    Ok(if loss.is_empty() || done.is_some() {
        0
    } else {
        DATA_LOSS
    })
}

/// The way to all lines of a kind.
const ALL: &str = "`wald repair --output json` lists all";

fn text(out: &mut impl Write, loss: &Loss, done: Option<&RecoveryReport>) -> io::Result<()> {
    if loss.is_empty() {
        return writeln!(out, "nothing is lost, or all of it was accepted before");
    }
    let (shown, rest) = few(&loss.gaps);
    for gap in shown {
        match (&gap.log, gap.from, gap.to) {
            (Some(log), Some(from), Some(to)) => {
                let records = records_in_words(from, to);
                writeln!(out, "lost: log {:?}, {records}", log.as_str())?;
            }
            _ => writeln!(out, "lost: records that nothing attributes to a log")?,
        }
    }
    if !rest.is_empty() {
        let Gaps {
            ranges,
            records,
            logs,
        } = Gaps::of(rest.iter());
        writeln!(
            out,
            "lost: {ranges} more ranges with {records} records of {logs} logs; {ALL}"
        )?;
    }
    let (shown, rest) = few(&loss.unproven);
    for log in shown {
        let log = log.as_str();
        writeln!(
            out,
            "in doubt: log {log:?}: newer records than those found may be lost"
        )?;
    }
    if !rest.is_empty() {
        writeln!(out, "in doubt: {} more logs; {ALL}", rest.len())?;
    }
    let (shown, rest) = few(&loss.unnamed);
    for log in shown {
        writeln!(
            out,
            "unnamed: the name of log {} is lost; its {} records ({} bytes) are in log {:?} once the loss is accepted",
            log.log_id,
            log.records,
            log.bytes,
            log.name.as_str()
        )?;
    }
    if !rest.is_empty() {
        let records: u64 = rest.iter().map(|log| log.records).sum();
        let logs = rest.len();
        writeln!(
            out,
            "unnamed: {logs} more logs with {records} records; {ALL}"
        )?;
    }
    if loss.unknown_logs {
        writeln!(out, "in doubt: whole logs may be lost, with their names")?;
    }
    let (shown, rest) = few(&loss.findings);
    for finding in shown {
        writeln!(out, "found: {finding}")?;
    }
    if !rest.is_empty() {
        writeln!(out, "found: {} more; {ALL}", rest.len())?;
    }
    if loss.format {
        writeln!(
            out,
            "found: FORMAT is gone or damaged; the segments identify the store"
        )?;
    }
    match done {
        Some(report) => writeln!(
            out,
            "accepted: every log continues with the records found; recovery epoch {}; recorded in REPAIRS",
            report.recovery_epoch
        ),
        None => writeln!(
            out,
            "nothing was changed; with a backup that has the segment, nothing need be lost: restore it \
             elsewhere (`wald restore`), and put its file in place of the damaged one in journal/. To \
             go on without the lost records: `wald repair --accept-loss`"
        ),
    }
}

fn document(loss: &Loss, done: Option<&RecoveryReport>) -> serde_json::Value {
    let gaps: Vec<_> = loss
        .gaps
        .iter()
        .map(|gap| {
            json!({
                "log": gap.log.as_ref().map(|log| log.as_str()),
                "from_lsn": gap.from.map(|lsn| lsn.get()),
                "to_lsn": gap.to.map(|lsn| lsn.get()),
            })
        })
        .collect();
    let unnamed: Vec<_> = loss
        .unnamed
        .iter()
        .map(|log| {
            json!({
                "log_id": log.log_id.get(),
                "new_name": log.name.as_str(),
                "records": log.records,
                "bytes": log.bytes,
            })
        })
        .collect();
    let unproven: Vec<_> = loss.unproven.iter().map(|log| log.as_str()).collect();
    json!({
        "lost": gaps,
        "in_doubt": unproven,
        "unnamed": unnamed,
        "unknown_logs": loss.unknown_logs,
        "findings": loss.findings,
        "format_gone": loss.format,
        "accepted": done.is_some(),
        "recovery_epoch": done.map(|report| report.recovery_epoch.get()),
    })
}

#[cfg(test)]
mod tests {
    use wald_storage::{Gap, GapReason, LogId, LogName, Lsn, UnnamedLog};

    use super::*;

    /// Loss of 1,000 ranges with 3 records each, of 100 logs.
    fn large() -> Loss {
        let name = |number: u64| LogName::new(&format!("log/{number}")).unwrap();
        let gap = |number: u64| Gap {
            log: Some(name(number % 100)),
            from: Some(Lsn::new(10 * number)),
            to: Some(Lsn::new(10 * number + 3)),
            reason: GapReason::Quarantined,
        };
        Loss {
            gaps: (0..1000).map(gap).collect(),
            unproven: (0..40).map(name).collect(),
            unnamed: (0..40)
                .map(|number| UnnamedLog {
                    log_id: LogId::new(number),
                    name: name(number),
                    records: 2,
                    bytes: 5,
                })
                .collect(),
            findings: vec!["a segment is gone".to_owned(); 60],
            ..Loss::default()
        }
    }

    #[test]
    fn large_loss_takes_few_lines_of_text_and_is_whole_as_json() {
        let mut out = Vec::new();
        text(&mut out, &large(), None).unwrap();
        let said = String::from_utf8(out).unwrap();
        for (kind, last) in [
            (
                "lost: ",
                "lost: 984 more ranges with 2952 records of 100 logs; ",
            ),
            ("in doubt: ", "in doubt: 24 more logs; "),
            ("unnamed: ", "unnamed: 24 more logs with 48 records; "),
            ("found: ", "found: 44 more; "),
        ] {
            let lines: Vec<&str> = said.lines().filter(|line| line.starts_with(kind)).collect();
            assert_eq!(lines.len(), 17, "{said}");
            assert_eq!(lines[16], format!("{last}{ALL}"));
        }
        let document = document(&large(), None);
        assert_eq!(document["lost"].as_array().unwrap().len(), 1000);
        assert_eq!(document["findings"].as_array().unwrap().len(), 60);
    }
}
