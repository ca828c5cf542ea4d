//! The key of producers' digests: where it is stored, when it is drawn, and how it survives crashes and
//! damage.

use std::collections::BTreeSet;

use super::exactly_once::of;
use super::*;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::SegmentId;
use crate::disk::Disk;
use crate::format::digest::Secret;
use crate::format::life::{DigestKey, Life, journal_path};

const KEY: usize = 68;
const COPY: usize = 4096;

fn of_one(sequence: u64) -> Batch {
    of(&["a"], &sequence.to_le_bytes(), 1, sequence)
}

impl Fixture {
    fn secret(&self) -> Secret {
        self.core.secret
    }

    /// Whether the batch of this sequence is recognised as a repeat.
    fn recognises(&self, sequence: u64) -> bool {
        match self.append_batch(of_one(sequence)) {
            Ok(appended) => appended.appends[0].deduplicated,
            Err(AppendError::ProducerConflict { .. }) => false,
            Err(other) => panic!("{other}"),
        }
    }
}

/// The segment files in order, each with its copy of the key.
fn keys(disk: &SimDisk) -> Vec<(String, DigestKey)> {
    let names: BTreeSet<String> = disk.list("journal").unwrap().into_iter().collect();
    let key = |name: String| {
        let path = format!("journal/{name}");
        let bytes = disk.contents(&path).unwrap();
        let store_id = Life::decode(&bytes).map_or(0, |life| life.store_id);
        (path, Life::key(&bytes, store_id))
    };
    names.into_iter().map(key).collect()
}

#[test]
fn two_stores_have_two_keys_and_two_digests_of_one_batch() {
    let (one, other) = (Fixture::new(), Fixture::new());
    assert_ne!(one.secret(), other.secret());
    let records = &of_one(7).logs[0].records;
    let [first, second] = [&one, &other].map(|f| f.secret().digest(records));
    assert_ne!(first, second);
}

#[test]
fn every_segment_has_the_key_and_every_start_goes_on_with_it() {
    let mut f = Fixture::new();
    let secret = f.secret();
    assert!(f.append_batch(of_one(0)).is_ok());
    for sequence in 1..4 {
        for _ in 0..20 {
            f.core.pool_in_turn().unwrap();
            f.append("filler", &[5; 9000]).unwrap();
        }
        f = match sequence % 2 {
            0 => f.restart(),
            _ => f.restart_cleanly(),
        };
        assert_eq!(f.secret(), secret);
        let keys = keys(&f.disk);
        assert!(keys.len() > 2);
        for (path, key) in keys {
            assert_eq!(key, DigestKey::Good(secret), "{path}");
        }
        assert!((0..sequence).all(|sequence| f.recognises(sequence)));
        f.append_batch(of_one(sequence)).unwrap();
    }
    assert!(!f.disk.list("checkpoint").unwrap().is_empty());
}

#[test]
fn a_first_start_cut_off_anywhere_leaves_no_digest_without_its_key() {
    let mut cut_after_append = 0;
    for seed in 0..8 {
        for cut in 1.. {
            let disk = SimDisk::seeded(1 + seed);
            let clock = TestClock::new();
            let config = small_config();
            disk.crash_after(cut);
            let mut acked = 0;
            if let Ok((core, report)) = open(&disk, &config, &clock) {
                let f = Fixture {
                    disk: disk.clone(),
                    clock: Arc::clone(&clock),
                    config: config.clone(),
                    core,
                    report,
                };
                while acked < 6 && f.append_batch(of_one(acked)).is_ok() {
                    acked += 1;
                    // Another segment with the key.
                    let _full = f.append("filler", &[5; 20_000]);
                    let _made = f.core.pool_in_turn();
                }
            }
            let cut_off = disk.is_crashed();
            disk.crash(seed);
            // Twice, since the second start may be cut off, too.
            disk.crash_after(1 + cut % 40);
            drop(open(&disk, &config, &clock));
            disk.crash(seed + cut);
            let f = Fixture::with(disk, config);
            let log = f.core.logs.by_name("a");
            let there = log.map_or(0, |log| log.state.read().next.get());
            assert!(there >= acked, "cut at {cut}, seed {seed}");
            for sequence in 0..there {
                assert!(f.recognises(sequence), "cut at {cut}, seed {seed}");
            }
            cut_after_append += u64::from(acked > 0);
            if !cut_off {
                break;
            }
        }
    }
    assert!(cut_after_append > 100, "{cut_after_append}");
}

/// A store with batches 0 to 3 below a checkpoint, and more segments behind it.
fn store() -> (SimDisk, Secret) {
    let mut f = Fixture::new();
    for sequence in 0..4 {
        f.append_batch(of_one(sequence)).unwrap();
    }
    while f.disk.list("checkpoint").unwrap().is_empty() {
        f.core.pool_in_turn().unwrap();
        f.append("filler", &[5; 9000]).unwrap();
    }
    f = f.restart_cleanly();
    f.append("a-later", b"x").unwrap();
    let secret = f.secret();
    (f.disk, secret)
}

#[test]
fn a_damaged_key_falls_back_to_the_other_copy_and_then_to_other_segments() {
    let (disk, secret) = store();
    let paths: Vec<String> = keys(&disk).into_iter().map(|(path, _)| path).collect();
    // Damages one copy in every segment.
    let halved = disk.copy();
    for (number, path) in paths.iter().enumerate() {
        flip(&halved, path, KEY + number % 36 + COPY * (number % 2));
    }
    assert_eq!(Fixture::on(halved).secret(), secret);
    // Damages both copies in all segments but one, also if a checkpoint covers that one.
    for whole in &paths {
        let disk = disk.copy();
        for path in paths.iter().filter(|path| *path != whole) {
            flip(&disk, path, KEY + 3);
            flip(&disk, path, COPY + KEY + 34);
        }
        let f = Fixture::on(disk);
        assert_eq!(f.secret(), secret, "only {whole} is whole");
        assert_eq!(f.report.damage, [], "no record is lost by this");
        assert!((0..4).all(|sequence| f.recognises(sequence)));
    }
}

#[test]
fn without_any_key_a_new_one_is_drawn_and_old_repeats_are_conflicts() {
    let (disk, secret) = store();
    for (path, _) in keys(&disk) {
        flip(&disk, &path, KEY + 3);
        flip(&disk, &path, COPY + KEY + 34);
    }
    let f = Fixture::on(disk);
    let drawn = f.secret();
    assert_ne!(drawn, secret);
    assert_eq!(f.report.damage, []);
    assert!((0..4).all(|sequence| !f.recognises(sequence)));
    f.append_batch(of_one(4)).unwrap();
    let f = f.restart();
    assert_eq!(f.secret(), drawn);
    assert!(f.recognises(4) && !f.recognises(3));
}

#[test]
fn a_key_of_another_store_is_not_taken() {
    let (disk, secret) = store();
    let stranger = Fixture::new();
    let newest = SegmentId::new(1 << 40);
    let of_stranger = keys(&stranger.disk)[0].0.clone();
    let bytes = stranger.disk.contents(&of_stranger).unwrap();
    disk.replace(&journal_path(newest), bytes);
    assert_eq!(Fixture::on(disk).secret(), secret);
}

#[test]
fn runs_indexes_and_checkpoints_do_not_have_the_key() {
    let config = StorageConfig {
        sorter_enabled: true,
        sorter_step_bytes: 1 << 20,
        ..small_config()
    };
    let f = Fixture::with(SimDisk::new(), config);
    for sequence in 0..3 {
        f.append_batch(of_one(sequence)).unwrap();
        f.fill_logs(sequence + 1, 3);
    }
    f.core.close().unwrap();
    let f = f.restart();
    f.sort();
    let key = f.secret().to_bytes();
    let mut files = 0;
    for directory in ["sorted", "index", "checkpoint", "quarantine", ""] {
        for name in f.disk.list(directory).unwrap() {
            let path = match directory {
                "" => name,
                directory => format!("{directory}/{name}"),
            };
            let Some(bytes) = f.disk.contents(&path) else {
                continue;
            };
            files += 1;
            let found = bytes.windows(8).any(|part| part == &key[..8]);
            assert!(!found, "{path}");
        }
    }
    assert!(f.runs() > 0 && files > 4, "{files} files");
    let f = f.restart();
    assert!((0..3).all(|sequence| f.recognises(sequence)));
    let life = usize::try_from(LIFE_BYTES).unwrap();
    let run = f.core.journal.runs()[0].segment.path();
    let head = f.disk.contents(&run).unwrap()[..life].to_vec();
    assert_eq!(Life::key(&head, f.core.store_id), DigestKey::None);
}
