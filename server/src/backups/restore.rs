//! `wald restore`: a store made of a backup, as of any position; and the same as a drill.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use indicatif::{HumanBytes, HumanCount};
use serde_json::json;
use wald_storage::{
    Disk, Gap, GapReason, LocalEngine, NoObserver, Position, ReadLogs as _, RealDisk, Restored,
    ScanRequest, ScanStart, Selector, StorageConfig, SystemClock, Visibility, block_on,
};

use super::{
    BackupShelf, DATA_LOSS, FAILED, StoredBackup, backup_argument, bar, choose, failed,
    json_argument, open_failed, print, tell_damage, view, wants_json,
};
use crate::config::Config;
use crate::host;
use crate::offline::escaped;
use crate::serve::Exit;

/// Bytes that a drill reads in one step.
const CHUNK_BYTES: u32 = 1 << 20;

pub(crate) fn command() -> Command {
    Command::new("restore")
        .about("Make a store of a backup, in the empty directory that --data-dir names")
        .long_about(
            "Makes a store of a backup, in the empty directory that --data-dir names. Every file is \
             compared with its digest. An interrupted restore leaves no \
             store that a start would accept.\n\n\
             With --at-position the store has its state at that position: every append that ended \
             at or below it, whole, and none later. `walctl sync` prints such a position. The \
             position of an append is its beginning, so to include it, name a later one.\n\n\
             The restored store continues with a higher recovery epoch, at positions that the old \
             one has not given out.\n\n\
             Exit codes: 0 ok, 1 failed, 2 usage, 3 no such backup, 4 a daemon has the directory, \
             5 the backup is damaged, or holds damage that the store had.",
        )
        .arg(
            Arg::new("backups")
                .value_name("BACKUPS")
                .required(true)
                .help("The directory or bucket (s3://, gs://, az://) that `walctl backup` writes to")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(backup_argument())
        .arg(
            Arg::new("at-position")
                .long("at-position")
                .value_name("POSITION")
                .help("Restore only units that end at or below this position [default: everything]")
                .value_parser(value_parser!(u64)),
        )
        .arg(
            Arg::new("drill")
                .long("drill")
                .action(ArgAction::SetTrue)
                .help(
                    "Restore to a temporary directory, open it, read every record, and report the result",
                ),
        )
        .arg(
            Arg::new("drill-in")
                .long("drill-in")
                .value_name("DIR")
                .requires("drill")
                .help("Parent of the temporary directory of a drill [default: the system's]")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(json_argument())
}

/// Restores. Returns the exit code.
pub(crate) fn restore(config: &Config, matches: &ArgMatches) -> Result<u8, Exit> {
    let storage = config.storage();
    let place = matches
        .get_one::<PathBuf>("backups")
        .ok_or_else(|| Exit::new(super::USAGE, "name the directory or bucket of backups"))?;
    let id = matches.get_one::<String>("backup");
    let shelf = BackupShelf::open(place, config)?;
    let kept = choose(&shelf, id.map_or("latest", String::as_str))?;
    let at = matches.get_one::<u64>("at-position");
    let at = at.map(|at| Position::new(*at));
    let work = RestoreWork {
        shelf: &shelf,
        kept: &kept,
        at,
        storage,
        json: wants_json(matches),
    };
    tell_damage(&kept.manifest);
    let sound = match matches.get_flag("drill") {
        true => {
            let place = matches.get_one::<PathBuf>("drill-in");
            let place = place.cloned().unwrap_or_else(std::env::temp_dir);
            work.drill(&place)?
        }
        false => {
            host::check_owner(config, &config.data_dir)?;
            let restored = work.restore(&config.data_dir)?;
            work.tell(&restored, &config.data_dir, None)?;
            restored.report.damage.is_empty() && restored.report.findings.is_empty()
        }
    };
    Ok(match sound && kept.manifest.damage.is_empty() {
        true => 0,
        false => DATA_LOSS,
    })
}

/// A restore or drill to do.
struct RestoreWork<'a> {
    shelf: &'a BackupShelf,
    kept: &'a StoredBackup,
    at: Option<Position>,
    storage: StorageConfig,
    json: bool,
}

/// The result of a drill.
struct DrillResult {
    records: u64,
    missing: u64,
}

fn covers(whole: &Gap, part: &Gap) -> bool {
    whole.log == part.log && whole.from <= part.from && part.to <= whole.to
}

impl RestoreWork<'_> {
    fn restore(&self, target: &Path) -> Result<Restored, Exit> {
        let view = view(self.shelf, self.kept, self.at)?;
        let disk: Arc<dyn Disk> = RealDisk::open(target).map_err(|error| open_failed(&error))?;
        let bar = bar(view.bytes());
        bar.set_message("restoring");
        let restored = view.restore(&disk, &self.storage, &mut |bytes| bar.inc(bytes));
        bar.finish_and_clear();
        restored.map_err(|error| failed(&error))
    }

    /// Restores to a temporary directory, and reads everything.
    fn drill(&self, place: &Path) -> Result<bool, Exit> {
        let scratch = tempfile::Builder::new()
            .prefix("wald-drill-")
            .tempdir_in(place)
            .map_err(|error| Exit::new(FAILED, format!("{}: {error}", place.display())))?;
        let restored = self.restore(scratch.path())?;
        let read = self.read_all(scratch.path(), &restored.report.accepted)?;
        self.tell(&restored, scratch.path(), Some(&read))?;
        let sound = read.missing == 0 && read.records == restored.report.records;
        if !sound {
            eprintln!(
                "wald: of {} records {} were read, {} places are damaged",
                restored.report.records, read.records, read.missing
            );
        }
        Ok(sound)
    }

    /// Opens the store as a start does, and reads every record of every log.
    /// Gaps whose loss was accepted before the backup are as they should be.
    fn read_all(&self, target: &Path, accepted: &[Gap]) -> Result<DrillResult, Exit> {
        let disk = RealDisk::open(target).map_err(|error| open_failed(&error))?;
        let (engine, _) = LocalEngine::open(
            disk,
            self.storage.clone(),
            Arc::new(SystemClock),
            Arc::new(NoObserver),
        )
        .map_err(|error| open_failed(&error))?;
        let unreadable =
            |error| Exit::new(DATA_LOSS, format!("reading the restored store: {error}"));
        let scan = engine.scan(ScanRequest {
            selector: Selector::All,
            start: ScanStart::First,
            until_lsn: None,
            max_records: 0,
            follow: false,
            visibility: Some(Visibility::Durable),
            chunk_bytes: CHUNK_BYTES,
        });
        let mut scan = block_on(scan).map_err(unreadable)?;
        let mut read = DrillResult {
            records: 0,
            missing: 0,
        };
        while let Some(chunk) = block_on(scan.next()).map_err(unreadable)? {
            for batch in &chunk.batches {
                read.records += u64::from(batch.count);
            }
            read.missing += chunk
                .gaps
                .iter()
                .filter(|gap| gap.reason == GapReason::Quarantined)
                .filter(|gap| !accepted.iter().any(|whole| covers(whole, gap)))
                .count() as u64;
        }
        Ok(read)
    }

    fn tell(
        &self,
        restored: &Restored,
        target: &Path,
        read: Option<&DrillResult>,
    ) -> Result<(), Exit> {
        let report = &restored.report;
        for finding in &report.findings {
            eprintln!("wald: {}", escaped(&finding.to_string()));
        }
        let line = match self.json {
            true => json!({
                "backup": self.kept.id,
                "position": restored.position.get(),
                "recovery_epoch": report.recovery_epoch.get(),
                "logs": report.logs,
                "records": report.records,
                "files": restored.files,
                "bytes": restored.bytes,
                "data_dir": read.is_none().then(|| target.display().to_string()),
                "read_records": read.map(|read| read.records),
            })
            .to_string(),
            false => format!(
                "{} backup {} at position {}: {} records of {} logs, {}; the next start is recovery \
                 epoch {}{}",
                match read {
                    None => "restored",
                    Some(_) => "drill of",
                },
                self.kept.id,
                restored.position,
                HumanCount(report.records),
                HumanCount(report.logs),
                HumanBytes(restored.bytes),
                report.recovery_epoch,
                match read {
                    None => format!("; {} is ready to be served", target.display()),
                    Some(read) => format!("; {} records were read back", HumanCount(read.records)),
                },
            ),
        };
        print(&line)
    }
}
