//! Encrypted records: no plain byte on the disk, keys that are missing or older, rotation, forgery.

use std::collections::HashSet;
use std::sync::Arc;

use super::cipher::TestKeys;
use super::verifying::verify;
use super::*;
use crate::api::cipher::Cipher;
use crate::api::record::Compression;
use crate::base::crc::crc32c;
use crate::base::ids::Position;
use crate::disk::Disk;
use crate::format::frame;
use crate::format::sealed::SEALED_BYTES;
use crate::journal::run::Run;
use crate::tools::dump::{DumpFilter, Dumped, DumpedBody};
use crate::tools::verify::Offline;
use crate::upkeep::sorter::Turns;

/// A text that no other byte of a store has by chance.
const MARK: &[u8] = b"marked payload, for nobody else";

fn encrypted() -> (Arc<TestKeys>, StorageConfig) {
    let (keys, cipher) = TestKeys::cipher();
    let config = StorageConfig {
        cipher: Some(cipher),
        ..super::sorting::config()
    };
    (keys, config)
}

fn plain() -> StorageConfig {
    StorageConfig {
        cipher: None,
        ..super::sorting::config()
    }
}

/// Every file of a store.
fn files(disk: &SimDisk) -> Vec<String> {
    let mut paths = disk.list("").unwrap();
    for directory in [
        "journal",
        "index",
        "sorted",
        "checkpoint",
        "pool",
        "quarantine",
    ] {
        let names = disk.list(directory).unwrap_or_default();
        paths.extend(names.iter().map(|name| format!("{directory}/{name}")));
    }
    paths
}

/// The files that hold these bytes.
fn with(disk: &SimDisk, bytes: &[u8]) -> Vec<String> {
    let mut paths = files(disk);
    paths.retain(|path| {
        let content = disk.contents(path).unwrap_or_default();
        content.windows(bytes.len()).any(|part| part == bytes)
    });
    paths
}

/// Appends marked records to two logs, one of them compressed, until some segments are full.
fn fill(fixture: &Fixture, segments: usize) -> usize {
    let config = LogConfig {
        compression: Some(Compression::Lz4),
        ..LogConfig::default()
    };
    let log = LogName::new("packed").unwrap();
    drop(fixture.core.create_in_turn(log, config));
    fixture.core.turn();
    let begun = fixture.core.journal.current().base;
    let mut count = 0;
    while fixture.core.journal.current().base.since(begun) < (segments as u64) * (64 << 10) {
        let mut data = MARK.repeat(20);
        data.extend_from_slice(&u64::try_from(count).unwrap().to_le_bytes());
        fixture.append("packed", &data).unwrap();
        fixture.append("plain", &data[..MARK.len() + 8]).unwrap();
        fixture.clock.advance(1000);
        count += 1;
    }
    count
}

fn holds(fixture: &Fixture, count: usize) {
    for log in ["packed", "plain"] {
        let found = fixture.contents(log);
        assert_eq!(found.len(), count, "{log}");
        assert!(found.iter().all(|data| data.starts_with(MARK)));
    }
}

#[test]
fn no_plain_byte_reaches_the_disk_and_no_nonce_comes_twice() {
    let (keys, config) = encrypted();
    let mut fixture = Fixture::with(SimDisk::new(), config);
    let count = fill(&fixture, 12);
    holds(&fixture, count);
    fixture = fixture.restart();
    assert!(fixture.sort() > 0);
    holds(&fixture, count);
    fixture = fixture.restart_cleanly();
    holds(&fixture, count);
    assert_eq!(with(&fixture.disk, &MARK[..8]), Vec::<String>::new());
    assert_eq!(fixture.core.statistics().unrenewed_bytes, 0);
    let nonces = keys.nonces(1);
    let different: HashSet<_> = nonces.iter().collect();
    assert!(nonces.len() >= 2 * count && different.len() == nonces.len());
    drop(fixture.core);
    assert!(verify(&fixture.disk).findings.is_empty());
}

#[test]
fn start_without_the_keys_is_refused_and_changes_nothing() {
    let (keys, config) = encrypted();
    for sorted in [false, true] {
        let fixture = Fixture::with(SimDisk::new(), config.clone());
        fill(&fixture, 6);
        if sorted {
            fixture.sort();
        }
        let (disk, clock) = (fixture.disk.copy(), Arc::clone(&fixture.clock));
        drop(fixture);
        let before: Vec<_> = files(&disk)
            .iter()
            .map(|path| disk.contents(path))
            .collect();
        let (_, fresh) = TestKeys::cipher();
        for (cipher, said) in [(None, "there is no key"), (Some(fresh), "no key ring")] {
            let config = StorageConfig {
                cipher,
                ..super::sorting::config()
            };
            let error = open(&disk, &config, &clock).map(drop).unwrap_err();
            assert!(matches!(error, OpenError::Keys(_)), "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
        let after: Vec<_> = files(&disk)
            .iter()
            .map(|path| disk.contents(path))
            .collect();
        let lock = files(&disk).iter().position(|path| path == "LOCK");
        for (number, (before, after)) in std::iter::zip(&before, &after).enumerate() {
            assert!(before == after || Some(number) == lock);
        }
        // The right keys still open it.
        let again = open(&disk, &config, &clock).unwrap();
        drop(again);
    }
    drop(keys);
}

/// The error of a start with a ring that has only key 1.
fn refused_with_one_key(fixture: Fixture) -> OpenError {
    let (disk, clock) = (fixture.disk.copy(), Arc::clone(&fixture.clock));
    drop(fixture);
    let (keys, cipher) = TestKeys::cipher();
    keys.rotate(Position::ZERO);
    let config = StorageConfig {
        cipher: Some(cipher),
        ..super::sorting::config()
    };
    open(&disk, &config, &clock).map(drop).unwrap_err()
}

#[test]
fn key_ring_of_yesterday_is_refused() {
    let (keys, config) = encrypted();
    let fixture = Fixture::with(SimDisk::new(), config);
    fill(&fixture, 2);
    keys.rotate(fixture.core.journal.durable());
    fixture.append("plain", MARK).unwrap();
    let error = refused_with_one_key(fixture);
    assert!(
        error.to_string().contains("encrypted with key 2"),
        "{error}"
    );
}

#[test]
fn older_ring_is_refused_although_it_has_the_keys_of_all_runs() {
    let (keys, config) = encrypted();
    let fixture = Fixture::with(SimDisk::new(), config);
    fill(&fixture, 12);
    for _ in 0..20 {
        fixture.sort();
    }
    fixture.append("plain", MARK).unwrap();
    keys.rotate(fixture.core.journal.durable());
    // In the same segment as a record with the earlier key.
    fixture.append("plain", MARK).unwrap();
    fixture.core.close().unwrap();
    let error = refused_with_one_key(fixture);
    let said = error.to_string();
    assert!(said.contains("encrypted with key 2"), "{said}");
}

#[test]
fn foreign_ring_is_refused_by_a_clean_start_that_reads_no_record() {
    let (keys, config) = encrypted();
    keys.rotate(Position::ZERO);
    keys.rotate(Position::ZERO);
    let fixture = Fixture::with(SimDisk::new(), config);
    fill(&fixture, 2);
    // The newest segments have no records.
    let fixture = fixture.restart_cleanly().restart_cleanly();
    fixture.core.close().unwrap();
    let error = refused_with_one_key(fixture);
    assert!(matches!(error, OpenError::Keys(_)), "{error}");
    let said = error.to_string();
    assert!(said.contains("encrypted with key 2"), "{said}");
}

#[test]
fn plain_store_is_encrypted_by_the_sorter() {
    let mut fixture = Fixture::with(SimDisk::new(), plain());
    let count = fill(&fixture, 12);
    fixture.sort();
    let more = fill(&fixture, 3);
    assert!(!with(&fixture.disk, MARK).is_empty());
    let (keys, config) = encrypted();
    fixture.config = config;
    fixture = fixture.restart_cleanly();
    assert!(fixture.core.statistics().unrenewed_bytes > 0);
    let last = fill(&fixture, 3);
    for _ in 0..20 {
        fixture.sort();
    }
    assert_eq!(fixture.core.statistics().unrenewed_bytes, 0);
    holds(&fixture, count + more + last);
    // Nor do files that wait for a new life, or the unused ends of those that have one.
    assert_eq!(with(&fixture.disk, MARK), Vec::<String>::new());
    drop(keys);
}

#[test]
fn rotation_concerns_new_frames_at_once_and_old_ones_when_they_are_sorted() {
    let (keys, config) = encrypted();
    let mut fixture = Fixture::with(SimDisk::new(), config);
    let count = fill(&fixture, 12);
    fixture.sort();
    keys.rotate(fixture.core.journal.durable());
    assert!(fixture.core.statistics().unrenewed_bytes > 0);
    let more = fill(&fixture, 6);
    assert!(keys.nonces(2).len() >= more);
    for _ in 0..20 {
        fixture.sort();
    }
    assert_eq!(fixture.core.statistics().unrenewed_bytes, 0);
    // Nothing needs the old key any more.
    keys.destroy(1);
    fixture = fixture.restart_cleanly();
    holds(&fixture, count + more);
}

#[test]
fn rotation_reaches_the_runs_of_a_store_without_appends() {
    let (keys, config) = encrypted();
    let fixture = Fixture::with(SimDisk::new(), config);
    let count = fill(&fixture, 12);
    let mut turns = Turns::default();
    let mut rest = || {
        for _ in 0..20 {
            fixture.clock.advance(21_000_000);
            let turn = fixture.core.sorter.sort_turn(&mut turns, &mut |_| Ok(()));
            turn.unwrap();
        }
    };
    let is_old = |run: &Arc<Run>| run.has_keys_below(2);
    rest();
    assert!(fixture.core.journal.runs().iter().any(is_old));
    keys.rotate(fixture.core.journal.durable());
    rest();
    assert!(!fixture.core.journal.runs().iter().any(is_old));
    holds(&fixture, count);
}

#[test]
fn records_whose_key_is_gone_are_refused_by_name_and_count_as_no_damage() {
    let (keys, config) = encrypted();
    let fixture = Fixture::with(SimDisk::new(), config);
    fill(&fixture, 6);
    keys.rotate(fixture.core.journal.durable());
    fixture.append("other", MARK).unwrap();
    keys.destroy(1);
    let error = fixture.read("plain", 0).map(drop).unwrap_err();
    assert!(error.to_string().contains("key 1"), "{error}");
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    let error = next_chunk(&mut scan).unwrap().map(drop).unwrap_err();
    assert!(error.to_string().contains("key 1"), "{error}");
    assert_eq!(fixture.contents("other"), [MARK]);
    assert_eq!(fixture.core.statistics().quarantined_records, 0);
    // The sorter moves them as they are, and comes to an end.
    fixture.sort();
    assert!(fixture.read("plain", 0).is_err());
    let disk = fixture.disk.copy();
    drop(fixture);
    assert!(verify(&disk).findings.is_empty());
}

/// Changes the body of a frame and makes all checksums right again, as an attacker can.
fn forge(disk: &SimDisk, fixture: &Fixture, change: impl Fn(&mut [u8])) {
    let segment = fixture.core.journal.current();
    let path = segment.path();
    let mut bytes = disk.contents(&path).unwrap();
    let log = fixture.core.logs.by_name("a").unwrap();
    let place = *log.state.read().places.get(0).unwrap();
    let at = usize::try_from(segment.offset(place.position)).unwrap();
    let header = frame::decode_header(&bytes[at..], segment.life.salt).unwrap();
    let body = at + header.header_len as usize;
    change(&mut bytes[body..body + header.body_len as usize]);
    let crc = crc32c(&bytes[body..body + header.body_len as usize]);
    bytes[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
    let crc = frame::salted_crc32c(segment.life.salt, &bytes[at + 4..body]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    disk.replace(&path, bytes);
}

#[test]
fn forged_body_is_refused_whatever_its_checksums_say() {
    for change in [0, 9, 27, 30, 41, SEALED_BYTES + 3] {
        let (_keys, config) = encrypted();
        let fixture = Fixture::with(SimDisk::new(), config);
        fixture.append("a", MARK).unwrap();
        forge(&fixture.disk, &fixture, |body| body[change] ^= 1);
        fixture.core.journal.recent.clear();
        let error = fixture.read("a", 0).map(drop).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("changed on purpose") || said.contains("encrypted with key 0"),
            "{said}"
        );
    }
}

/// The records that a dump shows, and the keys that it names.
fn dumped(disk: &SimDisk, keys: Option<Cipher>) -> (Vec<Vec<u8>>, HashSet<u64>) {
    let mut offline = Offline::open(Arc::new(disk.copy())).unwrap();
    if let Some(keys) = keys {
        offline = offline.with_keys(keys);
    }
    let (mut shown, mut named) = (Vec::new(), HashSet::new());
    let dumped = offline.dump_frames(&DumpFilter::default(), &mut |dumped| {
        if let Dumped::Frame(frame) = dumped {
            match frame.body {
                DumpedBody::Encrypted(keys) => named.extend(keys),
                DumpedBody::Records(records) => {
                    shown.extend(records.iter().map(|shown| shown.record.data.to_vec()));
                }
                DumpedBody::Damaged => panic!("nothing is damaged"),
                _ => {}
            }
        }
        Ok(())
    });
    dumped.unwrap();
    (shown, named)
}

#[test]
fn dump_shows_records_with_their_keys_and_names_the_keys_without() {
    let (keys, config) = encrypted();
    let cipher = config.cipher.clone();
    let fixture = Fixture::with(SimDisk::new(), config);
    let count = fill(&fixture, 12);
    fixture.sort();
    keys.rotate(fixture.core.journal.durable());
    fixture.append("other", MARK).unwrap();
    let disk = fixture.disk.copy();
    drop(fixture);
    let (shown, named) = dumped(&disk, cipher.clone());
    assert_eq!((shown.len(), named.len()), (2 * count + 1, 0));
    assert!(shown.iter().all(|data| data.starts_with(MARK)));
    assert_eq!(dumped(&disk, None), (Vec::new(), HashSet::from([1, 2])));
    keys.destroy(1);
    assert_eq!(
        dumped(&disk, cipher),
        (vec![MARK.to_vec()], HashSet::from([1]))
    );
}
