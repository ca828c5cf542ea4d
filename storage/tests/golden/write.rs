//! Writes the golden directories of the current version. Run it once for each version that changes the format
//! or needs one more case; existing directories are never written again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use wald_storage::{
    Administer as _, Append as _, Batch, Compression, CursorCommit, Durability, Guard, Header,
    LocalEngine, LogConfig, LogConfigChange, LogName, LogRecords, LogTarget, Lsn, Name,
    Operate as _, ReadLogs as _, Record, Retention, StorageConfig, SyncMode, Timestamp, block_on,
};

use super::{config, observe, open, open_as, open_with, sent};

const LIFE: usize = 8192;

/// A store that is being written.
struct Store {
    directory: TempDir,
    engine: Arc<LocalEngine>,
    /// Producers, as `store` cannot observe them: log, id, epoch, next sequence, newest lsn.
    producers: Vec<(String, String, u64, u64, u64)>,
}

fn name(log: &str) -> LogName {
    LogName::new(log).unwrap()
}

fn target(log: &str) -> LogTarget {
    LogTarget {
        name: name(log),
        log_id: None,
    }
}

fn records(log: &str, words: &[String], epoch: Option<u64>) -> LogRecords {
    LogRecords {
        log: name(log),
        records: words
            .iter()
            .map(|words| Record {
                data: words.clone().into(),
                ..Record::default()
            })
            .collect(),
        guard: Guard {
            writer_epoch: epoch,
            ..Guard::default()
        },
        producer: None,
    }
}

impl Store {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let engine = open(directory.path()).0;
        Self {
            directory,
            engine,
            producers: Vec::new(),
        }
    }

    /// Starts again without a shutdown, with this pause between two passes of retention.
    fn again(self, retention: Duration) -> Self {
        drop(self.engine);
        Self {
            engine: open_with(self.directory.path(), retention).0,
            ..self
        }
    }

    /// Starts again without a shutdown, with the sorter.
    fn sorting(self) -> Self {
        drop(self.engine);
        let config = StorageConfig {
            retention_interval: Duration::from_millis(1),
            sorter_enabled: true,
            sorter_step_bytes: 600 << 10,
            ..config()
        };
        Self {
            engine: open_as(self.directory.path(), config).0,
            ..self
        }
    }

    /// Fills segments, sorts them, and stops sorting.
    fn sorted(self, epochs: [Option<u64>; 3]) -> Self {
        let store = self.sorting();
        store.fill(60, epochs);
        let done = || {
            let told = store.engine.statistics();
            told.sorted_runs > 0 && told.unsorted_bytes < 256 << 10
        };
        while !done() {
            std::thread::yield_now();
        }
        store.again(Duration::from_secs(3600))
    }

    fn submit(&self, batch: Batch) {
        self.engine
            .submit(None, batch, Some(Durability::Durable))
            .wait()
            .unwrap();
    }

    /// Batches of some KiB for several logs, so that segments fill.
    fn fill(&self, batches: usize, epochs: [Option<u64>; 3]) {
        for number in 0..batches {
            let log = ["orders", "orders/é", "payments"][number % 3];
            let words: Vec<String> = (0..=number % 4)
                .map(|index| format!("{log} {number} {index} ").repeat(60))
                .collect();
            self.submit(Batch::from(vec![records(log, &words, epochs[number % 3])]));
        }
    }

    /// Uses every feature of a log.
    fn act(&mut self) {
        let engine = Arc::clone(&self.engine);
        let settings = |sync_mode, compression| LogConfig {
            sync_mode,
            compression,
            max_record_bytes: None,
            retention: None,
        };
        let create = |log: &str, config| block_on(engine.create_log(name(log), config)).unwrap();
        create("packed", settings(None, Some(Compression::Lz4)));
        create(
            "modes/async",
            settings(Some(SyncMode::Async), Some(Compression::None)),
        );
        create("modes/manual", settings(Some(SyncMode::Manual), None));
        create("empty", LogConfig::default());
        create("gone", LogConfig::default());
        create("again", LogConfig::default());
        let words = vec!["the same words again and again, ".repeat(200); 3];
        for log in ["packed", "gone", "again", "modes/manual"] {
            self.submit(Batch::from(vec![records(log, &words, None)]));
        }
        for sequence in 0..20 {
            for (log, producer, epoch) in [("payments", "p-1", 1), ("payments", "p-2", 3)] {
                let answer = engine.submit(None, sent(log, producer, epoch, sequence), None);
                let lsn = answer.wait().unwrap().appends[0].first_lsn.get();
                self.producers
                    .retain(|known| (&*known.0, &*known.1) != (log, producer));
                let known = (log.into(), producer.into(), epoch, sequence + 1, lsn);
                self.producers.push(known);
            }
        }
        // A record with headers, a time and a checksum, and a batch over logs with a cursor.
        let checked = Record {
            data: "checked".into(),
            timestamp: Some(Timestamp::from_micros(1_000_000)),
            crc32c: Some(crc(b"checked")),
            ..Record::default()
        };
        let header = |value: &[u8]| Header {
            key: "content-type".to_owned(),
            value: value.to_vec().into(),
        };
        let typed = Record {
            headers: vec![header(b"application/json"), header(&[0, 255])],
            ..Record::default()
        };
        let mut special = records("orders", &[], None);
        special.records = vec![checked, typed].into();
        let cursor = |log: &str, cursor: &str, lsn| CursorCommit {
            log: name(log),
            cursor: Name::new(cursor).unwrap(),
            lsn: Lsn::new(lsn),
            expected_lsn: None,
            log_id: None,
        };
        let mut batch = Batch::from(vec![special, records("packed", &words, None)]);
        batch.cursors.push(cursor("payments", "billing", 5));
        self.submit(batch);
        block_on(engine.commit_cursor(cursor("orders", "billing", 1))).unwrap();
        block_on(engine.commit_cursor(cursor("orders", "audit", 2))).unwrap();
        block_on(engine.delete_cursor(target("orders"), Name::new("audit").unwrap())).unwrap();
        block_on(engine.trim(target("orders"), Lsn::new(4))).unwrap();
        block_on(engine.fence(target("payments"), Some(7))).unwrap();
        block_on(engine.update_log(
            name("empty"),
            LogConfigChange {
                sync_mode: Some(Some(SyncMode::Batch)),
                compression: Some(None),
                max_record_bytes: Some(Some(1000)),
                retention: None,
            },
        ))
        .unwrap();
        block_on(engine.delete_log(target("gone"))).unwrap();
        block_on(engine.delete_log(target("again"))).unwrap();
        create("again", LogConfig::default());
        self.submit(Batch::from(vec![records("again", &words[..1], None)]));
    }

    /// Ends the run cleanly.
    fn end(&self) {
        block_on(self.engine.drain()).unwrap();
    }

    /// A copy of the directory as a kill leaves it now.
    fn killed(&self) -> TempDir {
        let copy = tempfile::tempdir().unwrap();
        // Every segment but the last has its index.
        while files(self.directory.path(), "index").len() + 1 < self.used().len() {
            std::thread::yield_now();
        }
        copy_all(self.directory.path(), copy.path());
        copy
    }

    fn used(&self) -> Vec<PathBuf> {
        used(self.directory.path())
    }
}

fn crc(bytes: &[u8]) -> u32 {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(crc).unwrap()
}

fn files(directory: &Path, of: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory.join(of)).unwrap();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end != "new"))
        .collect();
    found.sort();
    found
}

/// The segments that hold frames.
fn used(directory: &Path) -> Vec<PathBuf> {
    let mut found = files(directory, "journal");
    found.retain(|path| {
        fs::read(path).unwrap()[LIFE..]
            .iter()
            .any(|byte| *byte != 0)
    });
    found
}

fn copy_all(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            fs::create_dir(&target).unwrap();
            copy_all(&entry.path(), &target);
        } else if !entry.file_name().to_str().unwrap().ends_with(".new") {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

/// Offsets of the frames of a segment that hold records.
fn batches(path: &Path) -> Vec<usize> {
    let bytes = fs::read(path).unwrap();
    let number = |at: usize, length: usize| {
        let mut number = [0; 8];
        number[..length].copy_from_slice(&bytes[at..at + length]);
        usize::try_from(u64::from_le_bytes(number)).unwrap()
    };
    let (mut at, mut found) = (LIFE, Vec::new());
    while at + 64 < bytes.len() && bytes[at + 6] == 1 {
        if bytes[at + 7] == 1 {
            found.push(at);
        }
        at += number(at + 4, 2) * 8 + number(at + 8, 4).next_multiple_of(8);
    }
    found
}

/// Keeps a directory, and the content that a start on it finds.
fn keep(into: &Path, name: &str, directory: &Path, store: &Store) {
    let archive = into.join(format!("{name}.tar.gz"));
    if archive.exists() {
        return;
    }
    // LOCK names its holder, and the holder names the machine.
    fs::write(directory.join("LOCK"), "").unwrap();
    let done = Command::new("tar")
        .args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0"])
        .args(["--numeric-owner", "-I", "gzip -n9", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(directory)
        .arg(".")
        .status()
        .unwrap();
    assert!(done.success());
    let copy = tempfile::tempdir().unwrap();
    copy_all(directory, copy.path());
    let (engine, report) = open(copy.path());
    let mut logs = observe::store(&engine);
    for (log, told) in logs.as_object_mut().unwrap() {
        let known = store.producers.iter().filter(|known| known.0 == *log);
        let known: Vec<Value> = known
            .map(|(_, id, epoch, next, lsn)| {
                json!({"id": id, "epoch": epoch, "next_sequence": next, "newest_lsn": lsn})
            })
            .collect();
        told["producers"] = known.into();
    }
    let told = json!({"clean": report.clean, "torn": report.torn_bytes > 0, "logs": logs});
    let text = serde_json::to_string_pretty(&told).unwrap();
    fs::write(into.join(format!("{name}.json")), text + "\n").unwrap();
}

pub(crate) fn all(into: &Path) {
    fs::create_dir_all(into).unwrap();
    let none = [None; 3];

    let mut store = Store::new();
    store.fill(60, none);
    keep(into, "killed", store.killed().path(), &store);
    store.act();
    let epochs = [None, None, Some(7)];
    store.fill(30, epochs);
    keep(into, "everything-killed", store.killed().path(), &store);
    let killed = store.killed();
    store.end();
    keep(into, "everything-clean", store.directory.path(), &store);

    // A second run after the kill, of another epoch.
    let mut second = Store {
        engine: open(killed.path()).0,
        directory: killed,
        producers: store.producers.clone(),
    };
    second.fill(20, epochs);
    let again = sent("orders", "p-3", 1, 0);
    let lsn = second
        .engine
        .submit(None, again, None)
        .wait()
        .unwrap()
        .appends[0]
        .first_lsn;
    second
        .producers
        .push(("orders".into(), "p-3".into(), 1, 1, lsn.get()));
    second.end();
    keep(into, "second-run", second.directory.path(), &second);

    retained(into);
    damaged(into);
    sorted(into);
    keyed(into);
    forgotten(into);
}

/// Producers over some segments, whose indexes store changes, and one that was forgotten.
fn forgotten(into: &Path) {
    let mut store = Store::new();
    let submit = |store: &Store, producer: &str, epoch: u64, sequences: std::ops::Range<u64>| {
        for sequence in sequences {
            let batch = sent("devices", producer, epoch, sequence);
            store.engine.submit(None, batch, None).wait().unwrap();
        }
    };
    submit(&store, "gone", 3, 0..4);
    submit(&store, "stays", 0, 0..30);
    store.fill(60, [None; 3]);
    let gone = wald_storage::Name::new("gone").unwrap();
    block_on(store.engine.forget_producer(target("devices"), gone)).unwrap();
    submit(&store, "stays", 0, 30..40);
    store.fill(60, [None; 3]);
    submit(&store, "late", 1, 0..1);
    for (producer, epoch, next, lsn) in [("stays", 0, 40, 86), ("late", 1, 1, 88)] {
        let known = ("devices".into(), producer.into(), epoch, next, lsn);
        store.producers.push(known);
    }
    keep(into, "forgotten-killed", store.killed().path(), &store);
    store.end();
    keep(into, "forgotten-clean", store.directory.path(), &store);
}

/// Batches of producers, whose digests depend on the store's key.
fn keyed(into: &Path) {
    let mut store = Store::new();
    store.fill(20, [None; 3]);
    store.act();
    keep(into, "keyed-killed", store.killed().path(), &store);
    store.end();
    keep(into, "keyed-clean", store.directory.path(), &store);
}

/// Runs of one step and of several, with every feature of a log, and with trimmed, expired and deleted logs.
/// Unsorted segments follow them.
fn sorted(into: &Path) {
    let mut store = Store::new();
    let bounded = LogConfig {
        retention: Some(Box::new(Retention {
            max_records: Some(40),
            ..Retention::default()
        })),
        ..LogConfig::default()
    };
    block_on(store.engine.create_log(name("orders/é"), bounded)).unwrap();
    store.fill(60, [None; 3]);
    store.act();
    let epochs = [None, None, Some(7)];
    store.fill(30, epochs);
    store = store.sorted(epochs);
    // A trim and a deletion reach into runs, too.
    block_on(store.engine.trim(target("orders"), Lsn::new(20))).unwrap();
    block_on(store.engine.delete_log(target("modes/manual"))).unwrap();
    for _ in 0..4 {
        store = store.sorted(epochs);
    }
    store.fill(20, epochs);
    let late = LogConfig::default();
    block_on(store.engine.create_log(name("late"), late)).unwrap();
    block_on(store.engine.trim(target("payments"), Lsn::new(70))).unwrap();
    // The copy is as a kill leaves it, with all threads ended.
    store = store.again(Duration::from_secs(3600));
    let killed = tempfile::tempdir().unwrap();
    copy_all(store.directory.path(), killed.path());
    keep(into, "sorted-killed", killed.path(), &store);
    store.end();
    keep(into, "sorted-clean", store.directory.path(), &store);
}

/// Trimmed and expired records, and bounds of every kind.
fn retained(into: &Path) {
    let store = Store::new();
    let age = Duration::from_secs(3600);
    for (log, retention) in [
        (
            "orders",
            Retention {
                max_records: Some(20),
                ..Retention::default()
            },
        ),
        (
            "orders/é",
            Retention {
                max_bytes: Some(30_000),
                ..Retention::default()
            },
        ),
        (
            "payments",
            Retention {
                max_age: Some(age),
                respect_cursors: true,
                ..Retention::default()
            },
        ),
        ("nothing", Retention::default()),
    ] {
        let config = LogConfig {
            retention: Some(Box::new(retention)),
            ..LogConfig::default()
        };
        block_on(store.engine.create_log(name(log), config)).unwrap();
    }
    store.fill(30, [None; 3]);
    block_on(store.engine.trim(target("orders"), Lsn::new(3))).unwrap();
    let mut store = store.again(Duration::from_millis(1));
    store.fill(60, [None; 3]);
    let stat = |log: &str| {
        let stat = block_on(store.engine.stat(target(log), None, None));
        stat.unwrap().info
    };
    let by_records = || stat("orders").first_lsn.advance(20) >= stat("orders").tail_lsn;
    while !by_records() || stat("orders/é").first_lsn == Lsn::ZERO {
        std::thread::yield_now();
    }
    // No thread writes while the directory is copied.
    store = store.again(Duration::from_secs(3600));
    store.fill(2, [None; 3]);
    keep(into, "retention-killed", store.killed().path(), &store);
    store.end();
    keep(into, "retention-clean", store.directory.path(), &store);
}

/// A torn tail, and damage of every kind.
fn damaged(into: &Path) {
    let store = Store::new();
    store.fill(70, [None; 3]);
    let before = store.killed();
    let words = ["one of three".to_owned()];
    store.submit(Batch::from(
        ["orders", "payments", "new"]
            .map(|log| records(log, &words, None))
            .to_vec(),
    ));
    let torn = store.killed();
    let last = used(torn.path()).pop().unwrap();
    // The last frame of the newest batch did not reach the device.
    let newest = *batches(&last).last().unwrap();
    assert!(newest > *batches(&used(before.path()).pop().unwrap()).last().unwrap());
    let mut bytes = fs::read(&last).unwrap();
    bytes[newest..].fill(0);
    fs::write(&last, bytes).unwrap();
    keep(into, "torn", torn.path(), &store);

    let harmed = |harm: &dyn Fn(&[PathBuf], &Path)| {
        let copy = tempfile::tempdir().unwrap();
        copy_all(before.path(), copy.path());
        harm(&used(copy.path()), copy.path());
        copy
    };
    // Damages bodies, headers, a link, 512 bytes. Some segments keep their index, some do not.
    let bytes = harmed(&|segments, directory| {
        for (number, segment) in segments.iter().enumerate() {
            let batches = batches(segment);
            flip(segment, batches[1] + 100);
            flip(segment, batches[3] + 40);
            if number == 1 {
                flip(segment, LIFE + 20);
            }
            if number == 2 {
                let mut bytes = fs::read(segment).unwrap();
                bytes[batches[4] + 8..][..512].fill(0);
                fs::write(segment, bytes).unwrap();
                flip(segment, 3);
            }
        }
        fs::remove_file(&files(directory, "index")[0]).unwrap();
    });
    keep(into, "damaged", bytes.path(), &store);
    let middle = harmed(&|segments, _| fs::remove_file(&segments[1]).unwrap());
    keep(into, "lost-middle", middle.path(), &store);
    let end = harmed(&|segments, _| fs::remove_file(segments.last().unwrap()).unwrap());
    keep(into, "lost-end", end.path(), &store);
    let life = harmed(&|segments, _| {
        flip(&segments[2], 30);
        flip(&segments[2], 4096 + 30);
    });
    keep(into, "lost-life-blocks", life.path(), &store);
}
