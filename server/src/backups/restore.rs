//! `wald restore`: a store made of a backup, as of any position; and the same as a drill.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use indicatif::{HumanBytes, HumanCount};
use serde_json::json;
#[cfg(feature = "object")]
use wald_storage::RestoredAs;
use wald_storage::{
    BackupManifest, Disk, Gap, GapReason, LocalEngine, NoObserver, Position, ReadLogs as _,
    RealDisk, Restored, ScanRequest, ScanStart, Selector, StorageConfig, SystemClock, Visibility,
    block_on,
};

use super::keys::{TrustedKeys, signature, signed_in_words};
use super::{
    BackupShelf, DATA_LOSS, FAILED, StoredBackup, backup_argument, bar, choose, failed,
    json_argument, open_failed, print, tell_damage, trust_argument, unusable, view, wants_json,
    with_trust,
};
use crate::config::Config;
use crate::encryption;
use crate::encryption::RingFile;
use crate::host;
use crate::offline::say;
#[cfg(feature = "object")]
use crate::replica::fetch::{Fetch, FetchError};
use crate::serve::Exit;

/// Bytes that a drill reads in one step.
const CHUNK_BYTES: u32 = 1 << 20;

pub(crate) fn command() -> Command {
    Command::new("restore")
        .about("Make a store of a backup or a replica, in the empty directory of --data-dir")
        .long_about(
            "Makes a store of a backup, in the empty directory that --data-dir names. A bucket with the replica of a store \
             gives a copy of that store as of its newest replicated position, unless --backup names a backup. If its owner \
             removes objects during the copy, the copy begins again, 8 times at most. Every file is \
             compared with its digest. An interrupted restore leaves no \
             store that a start would accept.\n\n\
             With --at-position the store has its state at that position: every append that ended \
             at or below it, whole, and none later. `walctl sync` prints such a position. The \
             position of an append is its beginning, so to include it, name a later one. Records that the store \
             had dropped by the time of the backup, after a trim, a deletion or by retention, do not come back, also if \
             they were there at that position: the command says so where that can be. A replica has \
             the positions of the last replica_keep; the error for another one names the range.\n\n\
             The restored store continues with a higher recovery epoch, at positions that the old \
             one has not given out.\n\n\
             Exit codes: 0 ok, 1 failed, 2 usage, 3 no such backup, 4 a daemon has the directory, \
             5 the backup is damaged, or holds damage that the store had.",
        )
        .arg(
            Arg::new("backups")
                .value_name("BACKUPS")
                .required(true)
                .help("Directory or bucket (s3://, gs://, az://) of backups, or bucket of a replica")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(backup_argument())
        .arg(trust_argument())
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
        .arg(
            Arg::new("key-ring")
                .long("key-ring")
                .value_name("FILE")
                .help("Put this copy of the key ring (`wald key export`) into the restored directory, if its records are encrypted. A replica has one in its bucket; this one goes before it")
                .value_parser(value_parser!(PathBuf)),
        )
        .arg(json_argument())
}

/// Restores. Returns the exit code.
pub(crate) fn restore(config: &Config, matches: &ArgMatches) -> Result<u8, Exit> {
    let place = matches
        .get_one::<PathBuf>("backups")
        .ok_or_else(|| Exit::new(super::USAGE, "name the directory or bucket of backups"))?;
    let config = &with_trust(config, matches)?;
    let at = matches.get_one::<u64>("at-position");
    let at = at.map(|at| Position::new(*at));
    #[cfg(feature = "object")]
    if let Some(replica) = replica(config, matches, place, at)? {
        return restore_of(config, matches, replica);
    }
    let id = matches.get_one::<String>("backup");
    let shelf = BackupShelf::open(place, config)?;
    let kept = choose(&shelf, id.map_or("latest", String::as_str))?;
    let source = RestoreSource::Backup { shelf, kept, at };
    restore_of(config, matches, source)
}

/// The replica in a bucket, if it has one and the operator names no backup.
#[cfg(feature = "object")]
fn replica(
    config: &Config,
    matches: &ArgMatches,
    place: &Path,
    at: Option<Position>,
) -> Result<Option<RestoreSource>, Exit> {
    if super::names_backup(matches) {
        return Ok(None);
    }
    let Some(remote) = super::replica_at(place, config)? else {
        return Ok(None);
    };
    let fetch = Fetch::begin(&remote, config, at).map_err(|error| unfetched(&error))?;
    Ok(Some(RestoreSource::Replica {
        place: remote.bucket.place().to_owned(),
        fetch: Box::new(fetch),
    }))
}

#[cfg(feature = "object")]
pub(super) fn unfetched(error: &FetchError) -> Exit {
    let code = match error {
        FetchError::Restore(error) => return failed(error),
        FetchError::Open(error) => return open_failed(error),
        FetchError::Empty { .. } => super::NOT_FOUND,
        FetchError::Outside { .. } | FetchError::InRows { .. } => super::USAGE,
        error if error.is_damage() => DATA_LOSS,
        FetchError::Ship(_) | FetchError::OnlyRows { .. } => FAILED,
    };
    Exit::new(code, error.to_string())
}

fn restore_of(config: &Config, matches: &ArgMatches, source: RestoreSource) -> Result<u8, Exit> {
    let mut work = RestoreWork {
        source,
        storage: config.storage_without_replica(),
        json: wants_json(matches),
        trusted: TrustedKeys::of(config).map_err(|fault| unusable(&fault))?,
        config,
        key_ring: match matches.get_one::<PathBuf>("key-ring") {
            // Before anything is restored.
            Some(path) => Some((path, encryption::commands::copy_for_restore(config, path)?)),
            None => None,
        },
    };
    let manifest = work.source.manifest();
    let was_sound = manifest.is_none_or(|manifest| manifest.damage.is_empty());
    if let Some(manifest) = manifest {
        tell_damage(manifest);
    }
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
    Ok(match sound && was_sound {
        true => 0,
        false => DATA_LOSS,
    })
}

/// The content of the new store.
enum RestoreSource {
    /// A backup, as of a position.
    Backup {
        shelf: BackupShelf,
        kept: StoredBackup,
        at: Option<Position>,
    },
    /// The replica in a bucket.
    #[cfg(feature = "object")]
    Replica { place: String, fetch: Box<Fetch> },
}

impl RestoreSource {
    /// The list of its files; `None` if a replica has none yet.
    fn manifest(&self) -> Option<&BackupManifest> {
        match self {
            Self::Backup { kept, .. } => Some(&kept.manifest),
            #[cfg(feature = "object")]
            Self::Replica { fetch, .. } => fetch.manifest(),
        }
    }

    /// Id of the backup, and place of the replica.
    fn names(&self) -> (Option<&str>, Option<&str>) {
        match self {
            Self::Backup { kept, .. } => (Some(&kept.id), None),
            #[cfg(feature = "object")]
            Self::Replica { place, .. } => (None, Some(place)),
        }
    }

    /// Whether the store may lack records that it had at the position of the restore. Later trims, deletions and retention
    /// are cut off, but a sorted run lacks the records that these had dropped by the time it was made.
    fn may_lack_records(&self, restored: &Restored) -> bool {
        self.manifest().is_some_and(|manifest| {
            let mut files = manifest.files.iter();
            restored.position < manifest.position
                && files.any(|file| file.path.starts_with("sorted/"))
        })
    }

    /// Makes the store.
    fn restore(&mut self, target: &Path, storage: &StorageConfig) -> Result<Restored, Exit> {
        match self {
            Self::Backup { shelf, kept, at } => {
                let view = view(shelf, kept, *at)?;
                let disk: Arc<dyn Disk> =
                    RealDisk::open(target).map_err(|error| open_failed(&error))?;
                let bar = bar(view.bytes());
                bar.set_message("restoring");
                let restored = view.restore(&disk, storage, &mut |bytes| bar.inc(bytes));
                bar.finish_and_clear();
                restored.map_err(|error| failed(&error))
            }
            #[cfg(feature = "object")]
            Self::Replica { fetch, .. } => {
                let bar = bar(fetch.bytes());
                bar.set_message("restoring");
                let progress = &mut |bytes| bar.inc(bytes);
                let repeats = &mut |error: &FetchError| {
                    bar.reset();
                    say(&format!(
                        "the owner of the store has gone on, so the copy begins again: {error}"
                    ));
                };
                let nothing = &mut |_: &dyn Disk| Ok(());
                let restored = fetch.restore(target, RestoredAs::Copy, nothing, progress, repeats);
                bar.finish_and_clear();
                restored.map_err(|error| unfetched(&error))
            }
        }
    }
}

/// A restore or drill to do.
struct RestoreWork<'a> {
    source: RestoreSource,
    storage: StorageConfig,
    json: bool,
    trusted: TrustedKeys,
    config: &'a Config,
    /// The copy of the key ring that the store gets.
    key_ring: Option<(&'a PathBuf, RingFile)>,
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
    fn restore(&mut self, target: &Path) -> Result<Restored, Exit> {
        let restored = self.source.restore(target, &self.storage)?;
        if let Some((path, ring)) = &self.key_ring {
            let disk = RealDisk::open(target).map_err(|error| open_failed(&error))?;
            encryption::commands::import(&*disk, path, ring.clone(), None, false)?;
            return Ok(restored);
        }
        #[cfg(feature = "object")]
        if let RestoreSource::Replica { fetch, .. } = &self.source
            && let Some(ring) = fetch.key_ring().map_err(|error| unfetched(&error))?
        {
            let disk = RealDisk::open(target).map_err(|error| open_failed(&error))?;
            let put = encryption::shared::put(&*disk, &ring, false);
            put.map_err(|error| Exit::new(FAILED, format!("writing the key ring: {error}")))?;
        }
        Ok(restored)
    }

    /// Restores to a temporary directory, and reads everything.
    fn drill(&mut self, place: &Path) -> Result<bool, Exit> {
        let scratch = tempfile::Builder::new()
            .prefix("wald-drill-")
            .tempdir_in(place)
            .map_err(|error| Exit::new(FAILED, format!("{}: {error}", place.display())))?;
        let restored = self.restore(scratch.path())?;
        let read = self.read_all(scratch.path(), &restored.report.accepted)?;
        self.tell(&restored, scratch.path(), Some(&read))?;
        let sound = read.missing == 0 && read.records == restored.report.records;
        if !sound {
            say(&format!(
                "of {} records {} were read, {} places are damaged",
                restored.report.records, read.records, read.missing
            ));
        }
        Ok(sound)
    }

    /// Opens the store as a start does, and reads every record of every log. Meanwhile nothing expires and nothing is sorted
    /// ([`Config::storage_without_replica`]), so that the backup and the store have the same records. Gaps
    /// whose loss was accepted before the backup are as they should be.
    fn read_all(&self, target: &Path, accepted: &[Gap]) -> Result<DrillResult, Exit> {
        let disk = RealDisk::open(target).map_err(|error| open_failed(&error))?;
        let keys =
            encryption::start_offline(self.config, &(Arc::clone(&disk) as _), Box::new(|_| None))?;
        let storage = StorageConfig {
            cipher: keys.as_ref().map(encryption::cipher),
            ..self.storage.clone()
        };
        let (engine, _) =
            LocalEngine::open(disk, storage, Arc::new(SystemClock), Arc::new(NoObserver))
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
        let (backup, replica) = self.source.names();
        let may_lack_records = self.source.may_lack_records(restored);
        if may_lack_records {
            say(&format!(
                "records that were trimmed, deleted or expired between position {} and the time of the backup may be \
                 missing: the store had been sorted",
                restored.position
            ));
        }
        for finding in &report.findings {
            say(&finding.to_string());
        }
        let line = match self.json {
            true => json!({
                "backup": backup,
                "replica": replica,
                "position": restored.position.get(),
                "recovery_epoch": report.recovery_epoch.get(),
                "logs": report.logs,
                "records": report.records,
                "files": restored.files,
                "bytes": restored.bytes,
                "data_dir": read.is_none().then(|| target.display().to_string()),
                "may_lack_records": may_lack_records,
                "read_records": read.map(|read| read.records),
                "signature": self.source.manifest().map(|manifest| signature(manifest, &self.trusted)),
            })
            .to_string(),
            false => format!(
                "{} {} {} at position {}: {} records of {} logs, {}; the next start is recovery \
                 epoch {}{}{}",
                match read {
                    None => "restored",
                    Some(_) => "drill of",
                },
                if backup.is_some() {
                    "backup"
                } else {
                    "replica"
                },
                backup.or(replica).unwrap_or_default(),
                restored.position,
                HumanCount(report.records),
                HumanCount(report.logs),
                HumanBytes(restored.bytes),
                report.recovery_epoch,
                match read {
                    None => format!("; {} is ready to be served", target.display()),
                    Some(read) => format!("; {} records were read back", HumanCount(read.records)),
                },
                (self.source.manifest())
                    .map_or_else(String::new, |manifest| signed_in_words(manifest, &self.trusted)),
            ),
        };
        print(&line)
    }
}
