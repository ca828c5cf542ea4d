//! Opening the store, on a thread of its own.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::oneshot;
use wald_storage::{
    Disk, LocalEngine, LogEngine, LogId, LogName, LogTarget, OpenError, ReadError, RealDisk,
    RecoveryReport, RestoreError, SystemClock, block_on,
};

use super::{Exit, StartFacts};
use crate::config::Config;
use crate::encryption;
use crate::encryption::{KeyRing, TenantOf};
use crate::metrics::Metrics;
use crate::replica::{ReplicaStart, RunningReplica};

/// A directory that file systems make.
const LOST_AND_FOUND: &str = "lost+found";

/// Makes a directory a store.
const STORE_MARK: &str = "FORMAT";

/// Directories with the records of a store.
const OF_RECORDS: [&str; 2] = ["journal", "sorted"];

/// Whether the directory has a store already, or records of one that lost FORMAT, as far as can be
/// seen without the lock.
///
/// # Errors
/// If a store cannot or should not be made here: a mistyped `--data-dir` must not put one
/// among other files, and without `may_create` there must be one.
pub(super) fn look(directory: &Path, may_create: bool) -> Result<bool, Exit> {
    let existing = look_around(directory)?;
    match existing || may_create {
        true => Ok(existing),
        false => Err(no_store(directory)),
    }
}

/// Empties a directory whose take-over was cut off: the bucket has its files.
///
/// # Errors
/// If another process uses the directory, or if the file system fails.
pub(super) fn clear_unfinished(directory: &Path) -> Result<(), Exit> {
    if !directory.is_dir() {
        return Ok(());
    }
    let disk = RealDisk::open(directory).map_err(|error| exit(&error))?;
    let cleared = wald_storage::clear_unfinished_take_over(&*disk);
    let cleared = cleared.map_err(|error| match error {
        RestoreError::Open(error) => exit(&error),
        error => Exit::new(Exit::IO, error.to_string()),
    })?;
    if cleared {
        tracing::info!(
            directory = %directory.display(),
            "the files of a take-over that was cut off are removed"
        );
    }
    Ok(())
}

/// The end of a start whose directory must have a store and has none.
pub(crate) fn no_store(directory: &Path) -> Exit {
    let directory = directory.to_owned();
    exit(&OpenError::NoStore { directory })
}

fn look_around(directory: &Path) -> Result<bool, Exit> {
    // A path that cannot be examined is not reported as a file.
    if std::fs::metadata(directory).is_ok_and(|found| !found.is_dir()) {
        return Err(Exit::new(
            Exit::IO,
            format!(
                "the data directory {} is a file; name a directory with --data-dir",
                directory.display()
            ),
        ));
    }
    // Opening it reports any other problem.
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Ok(false);
    };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    // Opening the store reports that FORMAT is missing.
    let has_files = |name: &str| {
        std::fs::read_dir(directory.join(name)).is_ok_and(|mut entries| entries.next().is_some())
    };
    if names.iter().any(|name| name == STORE_MARK) || OF_RECORDS.into_iter().any(has_files) {
        return Ok(true);
    }
    match names
        .iter()
        .find(|name| !wald_storage::is_own_name(name) && *name != LOST_AND_FOUND)
    {
        None => Ok(false),
        Some(other) => Err(Exit::new(
            Exit::BAD_DATA,
            format!(
                "the data directory {} has no store, but other files ({other:?}); choose an empty \
                 or a new one with --data-dir",
                directory.display()
            ),
        )),
    }
}

/// A store that is open.
pub(super) struct OpenedStore {
    pub(super) engine: Arc<dyn LogEngine>,
    pub(super) report: RecoveryReport,
    /// Ships the journal already.
    pub(super) replica: Option<RunningReplica>,
    /// The keys of its records. `None`: they are plain.
    pub(super) keys: Option<Arc<KeyRing>>,
    /// Logs that an earlier process deleted, and whose keys this start destroyed.
    pub(super) shredded: Vec<(LogId, String)>,
}

/// A store that is being opened.
pub(super) struct Opening(oneshot::Receiver<Result<OpenedStore, Exit>>);

/// Begins to open the store that the configuration names. Without `facts` it does not become the owner of a replica.
///
/// # Errors
/// If no thread can be made.
pub(super) fn start(
    config: &Config,
    metrics: Arc<Metrics>,
    facts: Option<StartFacts>,
    tenants: TenantOf,
) -> Result<Opening, Exit> {
    let config = config.clone();
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("wald-open".to_owned())
        .spawn(move || {
            // No task waits any more if the process is ending.
            let opened = open(&config, metrics, facts, tenants);
            let _ = sender.send(opened);
        })
        .map_err(|error| Exit::new(Exit::SYSTEM, format!("cannot start a thread: {error}")))?;
    Ok(Opening(receiver))
}

fn open(
    config: &Config,
    metrics: Arc<Metrics>,
    facts: Option<StartFacts>,
    tenants: TenantOf,
) -> Result<OpenedStore, Exit> {
    let opened = || RealDisk::open(&config.data_dir).map_err(|error| exit(&error));
    let keys = encryption::ring(config, || Ok(opened()? as _), tenants)?;
    let replica = match &facts {
        Some(facts) => ReplicaStart::prepare(config, &metrics, facts, keys.as_ref())?,
        None => None,
    };
    let disk = opened()?;
    encryption::check(&*disk, keys.as_deref())?;
    let (engine, report) =
        open_engine(config, disk, keys.as_ref(), metrics).map_err(|error| exit(&error))?;
    let replica = replica.map(|replica| replica.begin(&engine)).transpose()?;
    let shredded = match &keys {
        Some(keys) => end_shredding(keys, &*engine)?,
        None => Vec::new(),
    };
    Ok(OpenedStore {
        engine,
        report,
        replica,
        keys,
        shredded,
    })
}

/// Destroys the keys of logs that an earlier process deleted, if it ended before it did so. Returns these logs.
fn end_shredding(keys: &KeyRing, engine: &dyn LogEngine) -> Result<Vec<(LogId, String)>, Exit> {
    // The name of a log may be lost with other records, until they come back or an operator accepts their loss.
    let knows_all_logs = engine.statistics().held_back.is_empty();
    let find = |id: LogId, name: LogName| {
        let log_id = Some(id);
        block_on(engine.stat(LogTarget { name, log_id }, None, None))
    };
    let exists = |id: LogId, log: &str| {
        match find(id, LogName::new(log).ok()?) {
            Ok(_) => Some(true),
            Err(ReadError::Target(_)) if knows_all_logs => {
                // A repair gives such a name to a log that has lost its own.
                let renamed = LogName::new(&format!("unnamed/{id}")).ok()?;
                Some(find(id, renamed).is_ok())
            }
            // A deletion that nothing proves destroys no key.
            Err(error) => {
                tracing::warn!(log, log_id = %id, %error, "the next start decides about the keys of this log");
                None
            }
        }
    };
    let ended = keys.end_shredding(exists);
    let ended =
        ended.map_err(|error| Exit::new(Exit::IO, format!("writing the key ring: {error}")))?;
    for (log_id, log) in &ended {
        tracing::warn!(log, %log_id, "the keys of this deleted log are destroyed now: the last process ended before it did so");
    }
    Ok(ended)
}

fn open_engine(
    config: &Config,
    disk: Arc<RealDisk>,
    keys: Option<&Arc<KeyRing>>,
    metrics: Arc<Metrics>,
) -> Result<(Arc<LocalEngine>, RecoveryReport), OpenError> {
    let archive = match &*config.archive_dir {
        "" => None,
        archive => Some(open_archive(&config.data_dir, Path::new(archive))?),
    };
    let clock = Arc::new(SystemClock);
    let mut storage = config.storage();
    storage.cipher = keys.map(encryption::cipher);
    LocalEngine::open_with_archive(disk, archive, storage, clock, metrics)
}

/// Opens the archive. It is not made: where a mount is missing it would fill another device.
fn open_archive(directory: &Path, archive: &Path) -> Result<Arc<dyn Disk>, OpenError> {
    let wrong = |what: &str| OpenError::Io {
        action: format!("opening archive_dir {}", archive.display()),
        source: std::io::Error::new(std::io::ErrorKind::InvalidInput, what),
    };
    if !archive.is_dir() {
        return Err(wrong("there is no such directory; make it, or mount it"));
    }
    if let (Ok(store), Ok(archive)) = (directory.canonicalize(), archive.canonicalize())
        && archive.starts_with(&store)
    {
        return Err(wrong("it is in the data directory; choose one outside"));
    }
    let disk = RealDisk::open(archive)?;
    Ok(disk)
}

impl Opening {
    /// Waits for the store.
    ///
    /// # Errors
    /// With the exit code of the failure.
    pub(super) async fn opened(self) -> Result<OpenedStore, Exit> {
        match self.0.await {
            Ok(opened) => opened,
            Err(_) => Err(Exit::new(Exit::SYSTEM, "opening the store panicked")),
        }
    }

    /// Waits for the store only to close it again; says why it could not be opened, if so.
    pub(super) fn give_up(self) -> Option<Exit> {
        match block_on(self.opened()) {
            Ok(opened) => {
                let drained = block_on(opened.engine.drain());
                drained
                    .err()
                    .map(|error| Exit::new(Exit::IO, error.to_string()))
            }
            Err(exit) => Some(exit),
        }
    }
}

fn exit(error: &OpenError) -> Exit {
    let code = match error {
        OpenError::Config(_) | OpenError::Keys(_) => Exit::CONFIG,
        OpenError::Locked { .. } => Exit::LOCKED,
        OpenError::NotAStore { .. }
        | OpenError::NoStore { .. }
        | OpenError::Version { .. }
        | OpenError::TooNew { .. }
        | OpenError::Damaged(_) => Exit::BAD_DATA,
        OpenError::UnreadEnd { .. } | OpenError::Io { .. } => Exit::IO,
    };
    Exit::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::io;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use wald_storage::{LogConfig, NoObserver, StorageConfig};

    use super::*;
    use crate::config::{EncryptionScope, Layers, Size};

    #[test]
    fn store_is_made_only_where_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(look(&path.join("new"), true).ok(), Some(false));
        let missing = look(&path.join("new"), false).unwrap_err();
        assert_eq!(missing.code, Exit::BAD_DATA);
        assert!(missing.message.contains("create_store is false"));
        assert!(!path.join("new").exists());
        for own in ["lost+found", "journal"] {
            std::fs::create_dir(path.join(own)).unwrap();
        }
        std::fs::write(path.join("LOCK"), "").unwrap();
        assert_eq!(look(path, true).ok(), Some(false));
        std::fs::write(path.join("thesis.tex"), "").unwrap();
        let refused = look(path, true).unwrap_err();
        assert_eq!(refused.code, Exit::BAD_DATA);
        assert!(refused.message.contains("thesis.tex"));
        let file = look(&path.join("thesis.tex"), true).unwrap_err();
        assert!(
            file.message
                .ends_with("is a file; name a directory with --data-dir")
        );
        // A store stays one, whatever else lies there.
        std::fs::write(path.join("FORMAT"), "").unwrap();
        assert_eq!(look(path, true).ok(), Some(true));
        assert_eq!(look(path, false).ok(), Some(true));
    }

    #[test]
    fn store_without_format_is_no_other_directory_whatever_lies_there() {
        for other in [
            "BACKUP",
            "REPAIRS",
            "flush-probe",
            "BEGUN.new",
            "thesis.tex",
        ] {
            for records in OF_RECORDS {
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path();
                std::fs::create_dir(path.join(records)).unwrap();
                std::fs::write(path.join(other), "").unwrap();
                // Without records it is a store that was not made yet, or files of others.
                assert_eq!(look(path, true).is_ok(), other != "thesis.tex", "{other}");
                let file = path.join(records).join("0000000000000001.seg");
                std::fs::write(file, "").unwrap();
                for may_create in [true, false] {
                    assert_eq!(look(path, may_create).ok(), Some(true), "{other}");
                    let disk = RealDisk::open(path).unwrap();
                    let config = StorageConfig {
                        create_store: may_create,
                        ..StorageConfig::default()
                    };
                    let clock = Arc::new(SystemClock);
                    let opened = LocalEngine::open(disk, config, clock, Arc::new(NoObserver));
                    let error = opened.map(drop).unwrap_err();
                    let said = exit(&error).message;
                    assert!(
                        said.contains("no FORMAT file; `wald repair"),
                        "{other}: {said}"
                    );
                }
            }
        }
    }

    #[test]
    fn keys_of_a_log_whose_deletion_nothing_proves_stay() {
        let (directory, secrets) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = secrets.path().join("key");
        std::fs::write(&key, "7".repeat(64)).unwrap();
        std::fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
        let mut config = Layers::default().resolve().unwrap().config;
        config.encryption_key_file = key.display().to_string();
        config.encryption_scope = EncryptionScope::Log;
        config.segment_bytes = Size(1 << 20);
        (config.max_batch_bytes, config.max_record_bytes) = (Size(16 << 10), Size(16 << 10));
        let open = |directory: &Path| {
            let disk = RealDisk::open(directory).unwrap();
            let none = Box::new(|_: &str| None);
            let keys = encryption::ring(&config, || Ok(Arc::clone(&disk) as _), none);
            let keys = keys.unwrap();
            let metrics = Arc::new(Metrics::new().unwrap());
            let (engine, _) = open_engine(&config, disk, keys.as_ref(), metrics).unwrap();
            (engine as Arc<dyn LogEngine>, keys.unwrap())
        };
        let create = |engine: &dyn LogEngine, name: &str| {
            let made = engine.create_log(LogName::new(name).unwrap(), LogConfig::default());
            block_on(made).unwrap().log_id
        };
        let (engine, _) = open(directory.path());
        create(&*engine, "kept");
        block_on(engine.drain()).unwrap();
        drop(engine);
        let (engine, keys) = open(directory.path());
        let id = create(&*engine, "gone");
        let _noted = keys.shred(id, "gone").unwrap();
        // The process is killed before it deletes the log.
        let killed = tempfile::tempdir().unwrap();
        let copy = |path: &str| {
            let (from, to) = (directory.path().join(path), killed.path().join(path));
            std::fs::create_dir_all(&to).unwrap();
            for entry in std::fs::read_dir(from).unwrap() {
                let entry = entry.unwrap();
                if entry.path().is_file() {
                    std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
                }
            }
        };
        for path in ["", "journal", "index", "checkpoint", "sorted", "keys"] {
            copy(path);
        }
        // The segment with the creation of the log is lost.
        let segments = std::fs::read_dir(killed.path().join("journal")).unwrap();
        let segments = segments.map(|entry| entry.unwrap().path());
        let has_creation = |path: &PathBuf| {
            let bytes = std::fs::read(path).unwrap();
            bytes.windows(4).any(|part| part == b"gone")
        };
        let lost: Vec<PathBuf> = segments.filter(has_creation).collect();
        assert!(!lost.is_empty());
        for path in lost {
            std::fs::remove_file(path).unwrap();
        }
        let (engine, keys) = open(killed.path());
        assert!(!engine.statistics().held_back.is_empty());
        let before = keys.len();
        assert_eq!(end_shredding(&keys, &*engine).unwrap(), []);
        assert_eq!((keys.len(), keys.unended("gone", None).len()), (before, 1));
    }

    #[test]
    fn archive_is_a_directory_outside_of_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let (store, archive) = (directory.path().join("a"), directory.path().join("ab"));
        std::fs::create_dir(&store).unwrap();
        let refused = |path: &Path| open_archive(&store, path).err().map(|e| e.to_string());
        let missing = refused(&archive).unwrap();
        assert!(missing.contains("no such directory"), "{missing}");
        std::fs::create_dir(&archive).unwrap();
        assert_eq!(refused(&archive), None);
        std::fs::create_dir(store.join("sorted")).unwrap();
        for inside in [store.clone(), store.join("sorted"), archive.join("../a")] {
            let inside = refused(&inside).unwrap();
            assert!(inside.contains("in the data directory"), "{inside}");
        }
    }

    #[test]
    fn what_stops_a_start_has_its_exit_code_and_one_line() {
        let cases = [
            (
                OpenError::Locked {
                    directory: PathBuf::from("d"),
                    holder: "process 7".to_owned(),
                },
                75,
            ),
            (
                OpenError::NotAStore {
                    what: "a cat".to_owned(),
                },
                65,
            ),
            (
                OpenError::NoStore {
                    directory: PathBuf::from("d"),
                },
                65,
            ),
            (
                OpenError::Version {
                    found: 9,
                    supported: 1,
                },
                65,
            ),
            (
                OpenError::TooNew {
                    what: "a bit".to_owned(),
                },
                65,
            ),
            (OpenError::Damaged("lsn 7".to_owned()), 65),
            (OpenError::Keys("no key".to_owned()), 78),
            (
                OpenError::UnreadEnd {
                    file: "journal/1.seg".to_owned(),
                    from: 8192,
                    to: 12_288,
                },
                74,
            ),
            (
                OpenError::Io {
                    action: "making d".to_owned(),
                    source: io::Error::other("no"),
                },
                74,
            ),
        ];
        for (error, code) in cases {
            let exit = exit(&error);
            assert_eq!(exit.code, code);
            assert!(!exit.message.is_empty() && !exit.message.contains('\n'));
        }
    }
}
