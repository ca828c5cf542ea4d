//! The machine around the store: other users' rights, and links, pipes, directories and devices in the place
//! of the store's files. `.ci/run host/host` tries the same on the released binary, under every umask.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test, helpers included"
)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wald_storage::{
    Append as _, AppendError, Batch, Disk, Durability, Guard, LocalEngine, LogName, LogRecords,
    NoObserver, Offline, OpenError, Operate as _, RealDisk, Record, StorageConfig, SystemClock,
    accept_loss, block_on,
};

fn config() -> StorageConfig {
    StorageConfig {
        segment_bytes: 64 << 10,
        ..StorageConfig::default()
    }
}

fn open(directory: &Path) -> Result<Arc<LocalEngine>, OpenError> {
    let disk = RealDisk::open(directory)?;
    let clock = Arc::new(SystemClock);
    let (engine, _) = LocalEngine::open(disk, config(), clock, Arc::new(NoObserver))?;
    Ok(engine)
}

/// One record of 8,000 bytes for a log.
fn small(log: &str) -> Batch {
    let record = Record {
        data: vec![7; 8000].into(),
        ..Record::default()
    };
    Batch::from(vec![LogRecords {
        log: LogName::new(log).unwrap(),
        records: vec![record].into(),
        guard: Guard::default(),
        producer: None,
    }])
}

/// A store with a few segments, closed.
fn store(directory: &Path) {
    let engine = open(directory).unwrap();
    for _ in 0..20 {
        let batch = small("a");
        block_on(engine.submit(None, batch, Some(Durability::Durable))).unwrap();
    }
    block_on(engine.drain()).unwrap();
}

/// Everything below a directory, itself included.
fn all(directory: &Path) -> Vec<PathBuf> {
    let mut found = vec![directory.to_owned()];
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(all(&path)),
            false => found.push(path),
        }
    }
    found
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let place = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &place),
            false => drop(fs::copy(&path, &place).unwrap()),
        }
    }
}

#[test]
fn store_is_for_its_owner_only() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("new/data");
    store(&data);
    for path in all(&scratch.path().join("new")) {
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let right = if path.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode, right, "{}", path.display());
    }
    // Rights that somebody granted later stay.
    for path in [&data, &data.join("FORMAT")] {
        let mode = fs::metadata(path).unwrap().permissions().mode() | 0o055;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    block_on(open(&data).unwrap().drain()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&data), mode(&data.join("FORMAT"))), (0o755, 0o655));
}

/// Kinds of entries that may take the place of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Odd {
    Link,
    Dangling,
    Pipe,
    Directory,
    Device,
    File,
}

impl Odd {
    fn word(self) -> &'static str {
        match self {
            Self::Link | Self::Dangling => "a symbolic link",
            Self::Pipe => "a named pipe",
            Self::Directory => "a directory",
            Self::Device => "a character device",
            Self::File => "a regular file",
        }
    }

    /// Puts one there. Returns false if this user cannot.
    fn put(self, path: &Path, target: &Path) -> bool {
        use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
        let node = |kind, device| mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), device);
        match self {
            Self::Link => symlink(target, path).unwrap(),
            Self::Dangling => symlink(target.join("nothing"), path).unwrap(),
            Self::Pipe => node(FileType::Fifo, 0).unwrap(),
            Self::Directory => fs::create_dir(path).unwrap(),
            Self::Device => return node(FileType::CharacterDevice, makedev(1, 3)).is_ok(),
            Self::File => fs::write(path, "").unwrap(),
        }
        true
    }
}

#[test]
fn odd_files_are_named_and_never_followed() {
    let scratch = tempfile::tempdir().unwrap();
    let good = scratch.path().join("good");
    store(&good);
    let first = fs::read_dir(good.join("journal")).unwrap().next();
    let segment = first.unwrap().unwrap().file_name();
    let segment = format!("journal/{}", segment.to_string_lossy());
    let files = [
        "LOCK",
        "FORMAT",
        "FORMAT.new",
        "BEGUN",
        "BEGUN.new",
        "REPAIRS",
        "REPAIRS.new",
        "RESTORING",
        "flush-probe",
        &segment,
        "index/0000000000000001.idx",
        "index/0000000000000001.idx.new",
        "checkpoint/0000000000000001.ckp",
        "sorted/0000000000000001.seg",
        "sorted/0000000000000001.new",
        "pool/0000000000000001.seg",
        "quarantine/0000000000000001-00002000.torn",
    ];
    let directories = [
        "journal",
        "index",
        "sorted",
        "checkpoint",
        "pool",
        "quarantine",
    ];
    let kinds = [
        Odd::Link,
        Odd::Dangling,
        Odd::Pipe,
        Odd::Directory,
        Odd::Device,
    ];
    let mut cases: Vec<(&str, Odd)> = Vec::new();
    for path in files {
        cases.extend(kinds.iter().map(|odd| (path, *odd)));
    }
    for path in directories {
        let kinds = [Odd::Link, Odd::Dangling, Odd::Pipe, Odd::Device, Odd::File];
        cases.extend(kinds.iter().map(|odd| (path, *odd)));
    }
    let target = scratch.path().join("target");
    for (number, (path, odd)) in cases.into_iter().enumerate() {
        let data = scratch.path().join(number.to_string());
        copy(&good, &data);
        let place = data.join(path);
        // The link leads to a file or directory that would work if it were followed.
        let (file, directory) = (target.join("file"), target.join("directory"));
        let _gone = fs::remove_dir_all(&target);
        fs::create_dir(&target).unwrap();
        let is_directory = place.is_dir();
        match is_directory {
            true => fs::rename(&place, &directory).unwrap(),
            false if place.exists() => fs::rename(&place, &file).unwrap(),
            false => fs::write(&file, "precious").unwrap(),
        }
        let leads = if is_directory { &directory } else { &file };
        let before = listed(&target);
        if !odd.put(&place, leads) {
            continue;
        }
        let what = format!("{} is {}", place.canonicalized(), odd.word());
        let told = |action: &str, error: Option<String>| {
            let error = error.unwrap_or_else(|| panic!("{action}: {odd:?} at {path} is taken"));
            assert!(
                error.contains(&what),
                "{action}: {error} does not say {what}"
            );
        };
        told("start", open(&data).err().map(|error| error.to_string()));
        let disk = RealDisk::open_read_only(&data).unwrap();
        let looked = Offline::open(disk).and_then(|offline| {
            offline
                .verify(&wald_storage::Control::default(), &mut |_| {})
                .map(drop)
        });
        told("verify", looked.err().map(|error| error.to_string()));
        let disk: Arc<dyn Disk> = RealDisk::open(&data).unwrap();
        let repaired = accept_loss(&disk, &config(), Arc::new(SystemClock), "by a test");
        told("repair", repaired.err().map(|error| error.to_string()));
        assert_eq!(listed(&target), before, "{odd:?} at {path}");
        fs::remove_dir_all(&data).unwrap();
    }
}

trait Canonicalized {
    /// The path without links above it.
    fn canonicalized(&self) -> String;
}

impl Canonicalized for Path {
    fn canonicalized(&self) -> String {
        let parent = self.parent().unwrap().canonicalize().unwrap();
        parent.join(self.file_name().unwrap()).display().to_string()
    }
}

/// Paths and bytes of the files below a directory.
fn listed(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let files = all(directory).into_iter().filter(|path| path.is_file());
    let mut listed: Vec<_> = files
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    listed.sort();
    listed
}

#[test]
fn data_directory_itself_may_be_a_link() {
    let scratch = tempfile::tempdir().unwrap();
    let (real, link) = (scratch.path().join("real"), scratch.path().join("link"));
    store(&real);
    symlink(&real, &link).unwrap();
    block_on(open(&link).unwrap().drain()).unwrap();
}

/// Waits until the idle journal has failed. Returns the reason that appends then get. Panics after 20
/// seconds.
fn failure(engine: &LocalEngine) -> String {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !engine.statistics().journal_failed {
        assert!(Instant::now() < deadline, "nothing was noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
    let answer = engine.submit(None, small("a"), Some(Durability::Durable));
    match block_on(answer) {
        Err(AppendError::JournalFailed(error)) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("an append is still acknowledged"),
    }
}

#[test]
fn deleted_data_directory_fails_the_journal() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    let engine = open(&data).unwrap();
    block_on(engine.submit(None, small("a"), Some(Durability::Durable))).unwrap();
    // A thread of the engine may make a file meanwhile.
    let deadline = Instant::now() + Duration::from_secs(20);
    while data.exists() {
        let removed = fs::remove_dir_all(&data);
        assert!(Instant::now() < deadline, "{removed:?}");
    }
    let reason = failure(&engine);
    // The thread that makes segments may notice it first.
    let first = reason.starts_with("making a segment ready: No such file");
    let found = format!("LOCK is missing in {}", data.display());
    assert!(first || reason.contains(&found), "{reason}");
    assert!(engine.statistics().journal_failed);
    assert!(!data.exists(), "a deleted directory is not made again");
    drop(engine);
    assert!(!data.exists(), "a deleted directory is not made again");
}

#[test]
fn data_directory_replaced_by_another_store_fails_the_journal() {
    let scratch = tempfile::tempdir().unwrap();
    let (data, fresh) = (scratch.path().join("data"), scratch.path().join("fresh"));
    store(&fresh);
    let other = listed(&fresh);
    let engine = open(&data).unwrap();
    block_on(engine.submit(None, small("a"), Some(Durability::Durable))).unwrap();
    let moved = scratch.path().join("moved");
    fs::rename(&data, &moved).unwrap();
    fs::rename(&fresh, &data).unwrap();
    let reason = failure(&engine);
    assert!(
        reason.contains("LOCK is another file than the one in use"),
        "{reason}"
    );
    drop(engine);
    let bytes = |files: Vec<(PathBuf, Vec<u8>)>| -> Vec<_> {
        let contents = files.into_iter().map(|(path, bytes)| {
            let name = path.file_name().unwrap().to_owned();
            (name, bytes)
        });
        contents.collect()
    };
    assert_eq!(bytes(listed(&data)), bytes(other), "the other store stays");
    // Both stores can still be served.
    for directory in [&data, &moved] {
        block_on(open(directory).unwrap().drain()).unwrap();
    }
}

#[test]
fn data_directory_replaced_by_an_empty_one_fails_the_journal() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    let engine = open(&data).unwrap();
    fs::rename(&data, scratch.path().join("moved")).unwrap();
    fs::create_dir(&data).unwrap();
    let reason = failure(&engine);
    assert!(reason.contains("LOCK is missing"), "{reason}");
    drop(engine);
    assert_eq!(listed(&data), Vec::new());
}

#[test]
fn directory_without_a_store_is_refused_when_none_may_be_made() {
    let scratch = tempfile::tempdir().unwrap();
    let data = scratch.path().join("data");
    let existing_only = StorageConfig {
        create_store: false,
        ..config()
    };
    let reopen = || {
        let disk = RealDisk::open(&data)?;
        let clock = Arc::new(SystemClock);
        LocalEngine::open(disk, existing_only.clone(), clock, Arc::new(NoObserver))
    };
    let refused = reopen().map(drop).unwrap_err();
    assert!(matches!(refused, OpenError::NoStore { .. }), "{refused}");
    assert!(refused.to_string().contains("create_store"), "{refused}");
    store(&data);
    block_on(reopen().unwrap().0.drain()).unwrap();
}
