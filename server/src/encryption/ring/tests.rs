//! The ring on a simulated disk, with its faults.

use std::collections::HashSet;

use rustix::io::Errno;
use wald_storage::{DiskCall, SimDisk};

use super::*;

const KEY: &str = "0707070707070707070707070707070707070707070707070707070707070707";
const OTHER: &str = "0909090909090909090909090909090909090909090909090909090909090909";

fn ring(disk: &SimDisk, scope: EncryptionScope, keys: &str) -> KeyRing {
    let keks = Keks::parse("keys".to_owned(), keys.as_bytes()).unwrap();
    let tenants = |name: &str| name.split_once('/').map(|(tenant, _)| tenant.to_owned());
    KeyRing::new(Arc::new(disk.clone()), scope, keks, Box::new(tenants))
}

fn opened(disk: &SimDisk, scope: EncryptionScope, keys: &str) -> KeyRing {
    let ring = ring(disk, scope, keys);
    ring.load().unwrap();
    ring.begin(Position::ZERO).unwrap();
    ring
}

fn sealed(ring: &KeyRing, log: LogId) -> (u64, Vec<u8>) {
    let key = ring.newest(log).unwrap();
    let mut body = b"some records".to_vec();
    let (nonce, tag) = key.seal(b"place", &mut body);
    (key.number(), [&nonce[..], &body, &tag].concat())
}

fn opens(ring: &KeyRing, (number, sealed): &(u64, Vec<u8>)) -> bool {
    let Some(key) = ring.by_number(*number) else {
        return false;
    };
    let (nonce, rest) = sealed.split_first_chunk().unwrap();
    let mut body = rest.to_vec();
    key.open(nonce, b"place", &mut body) && body.starts_with(b"some records")
}

#[test]
fn keys_survive_and_no_file_shows_them() {
    let disk = SimDisk::new();
    let log = LogId::new(5);
    let first = opened(&disk, EncryptionScope::Store, KEY);
    let body = sealed(&first, log);
    let again = opened(&disk, EncryptionScope::Store, KEY);
    assert!(opens(&again, &body));
    for key in again.state().keys.values() {
        for path in ["keys/ring", "keys/ring-2", "ENCRYPTED"] {
            let file = disk.contents(path).unwrap();
            let hex: String = key.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(
                !file.windows(8).any(|part| part == &key.bytes[..8]),
                "{path}"
            );
            assert!(
                !String::from_utf8_lossy(&file).contains(&hex[..16]),
                "{path}"
            );
        }
        // A part of the key in a frame is as bad.
        assert!(!body.1.windows(8).any(|part| part == &key.bytes[..8]));
    }
}

#[test]
fn numbers_of_two_rings_never_meet() {
    let rings =
        [SimDisk::new(), SimDisk::new()].map(|disk| opened(&disk, EncryptionScope::Store, KEY));
    let numbers = [0, 1].map(|at| sealed(&rings[at], LogId::new(1)).0);
    for (at, number) in numbers.into_iter().enumerate() {
        assert!(rings[at].has_made(number) && !rings[1 - at].has_made(number));
        assert!(!rings[at].has_made(number + 1) && !rings[at].has_made(number - 1));
        assert!(!rings[at].has_made(0) && !rings[at].has_made(1));
    }
}

#[test]
fn nonce_of_each_body_is_another_one() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Store, KEY);
    let nonces = (0..1000).map(|_| sealed(&ring, LogId::new(1)).1[..NONCE_BYTES].to_vec());
    assert_eq!(nonces.collect::<HashSet<_>>().len(), 1000);
}

#[test]
fn bodies_that_were_changed_do_not_open() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Store, KEY);
    let (number, body) = sealed(&ring, LogId::new(1));
    for at in 0..body.len() {
        let mut changed = body.clone();
        changed[at] ^= 1;
        assert!(!opens(&ring, &(number, changed)), "byte {at}");
    }
}

#[test]
fn ring_with_a_wrong_key_is_refused_and_stays() {
    let disk = SimDisk::new();
    opened(&disk, EncryptionScope::Store, KEY);
    let before = disk.contents("keys/ring");
    let error = ring(&disk, EncryptionScope::Store, OTHER)
        .load()
        .unwrap_err();
    assert!(
        error.contains("data key ") && error.contains("does not have"),
        "{error}"
    );
    assert_eq!(disk.contents("keys/ring"), before);
}

#[test]
fn newest_wrapping_key_wraps_all_data_keys_again() {
    let disk = SimDisk::new();
    let body = sealed(&opened(&disk, EncryptionScope::Store, KEY), LogId::new(1));
    let both = format!("{KEY}\n{OTHER}\n");
    assert!(opens(&opened(&disk, EncryptionScope::Store, &both), &body));
    // The old wrapping key is no longer needed, nor any use.
    assert!(opens(&opened(&disk, EncryptionScope::Store, OTHER), &body));
    assert!(ring(&disk, EncryptionScope::Store, KEY).load().is_err());
}

#[test]
fn wrapping_keys_change_while_the_ring_is_in_use() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    let log = LogId::new(1);
    ring.prepare(&[(log, "a")], LogsExist::Next).unwrap();
    let body = sealed(&ring, log);
    let keks = |text: &str| Keks::parse("keys".to_owned(), text.as_bytes()).unwrap();
    let before = disk.contents("keys/ring");
    // The earlier key would be lost.
    let error = ring.take(keks(OTHER)).unwrap_err().to_string();
    assert!(error.contains("does not have"), "{error}");
    assert_eq!(disk.contents("keys/ring"), before);
    ring.rotate(|| Position::ZERO).unwrap();
    let both = format!("{KEY}\n{OTHER}\n");
    disk.fail_call(|call| call.kind.changes(), 9, Errno::IO.raw_os_error());
    ring.take(keks(&both)).unwrap_err();
    disk.forget_faults();
    // Whatever reached the disk opens with both keys, and the next attempt ends the work.
    let copy = disk.copy();
    assert!(opens(&opened(&copy, EncryptionScope::Log, &both), &body));
    ring.take(keks(&both)).unwrap();
    let after = disk.contents("keys/ring");
    ring.take(keks(&both)).unwrap();
    assert_eq!(disk.contents("keys/ring"), after, "nothing is left to do");
    ring.take(keks(OTHER)).unwrap();
    // New data keys are wrapped with the new key.
    ring.rotate(|| Position::ZERO).unwrap();
    let late = sealed(&ring, log);
    let again = opened(&disk, EncryptionScope::Log, OTHER);
    assert!(opens(&again, &body) && opens(&again, &late));
}

#[test]
fn one_damaged_copy_is_written_again_and_two_are_refused() {
    for path in ["keys/ring", "keys/ring-2"] {
        for damage in [0, 40, usize::MAX] {
            let disk = SimDisk::new();
            let body = sealed(&opened(&disk, EncryptionScope::Store, KEY), LogId::new(1));
            let whole = disk.contents(path).unwrap();
            let mut bytes = whole.clone();
            match damage {
                0 => bytes.clear(),
                usize::MAX => bytes.truncate(whole.len() - 3),
                at => bytes[at] ^= 1,
            }
            disk.replace(path, bytes.clone());
            assert!(opens(&opened(&disk, EncryptionScope::Store, KEY), &body));
            assert_ne!(disk.contents(path).unwrap(), bytes);
            disk.replace("keys/ring", bytes.clone());
            disk.replace("keys/ring-2", bytes);
            let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
            assert!(error.contains("cannot be used"), "{error}");
        }
    }
}

#[test]
fn damaged_note_is_written_again_if_both_copies_are_one_ring() {
    let disk = SimDisk::new();
    let first = opened(&disk, EncryptionScope::Store, KEY);
    let body = sealed(&first, LogId::new(1));
    let yesterday = disk.contents("keys/ring").unwrap();
    first.rotate(|| Position::ZERO).unwrap();
    disk.replace("ENCRYPTED", b"key ring".to_vec());
    let again = opened(&disk, EncryptionScope::Store, KEY);
    assert!(opens(&again, &body));
    assert!(file::noted(&disk).unwrap().is_some());
    // Copies that differ do not prove that one of them is the newest ring.
    disk.replace("ENCRYPTED", b"key ring".to_vec());
    disk.replace("keys/ring", yesterday);
    let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
    assert!(error.contains("ENCRYPTED is damaged"), "{error}");
}

#[test]
fn rings_of_yesterday_and_of_other_stores_are_refused() {
    let disk = SimDisk::new();
    let first = opened(&disk, EncryptionScope::Store, KEY);
    let yesterday = disk.contents("keys/ring").unwrap();
    first.rotate(|| Position::ZERO).unwrap();
    let today = disk.contents("keys/ring").unwrap();
    let put = |bytes: &[u8]| {
        for path in ["keys/ring", "keys/ring-2"] {
            disk.replace(path, bytes.to_vec());
        }
    };
    put(&yesterday);
    let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
    assert!(error.contains("an older key ring"), "{error}");
    let other = SimDisk::new();
    opened(&other, EncryptionScope::Store, KEY);
    put(&other.contents("keys/ring").unwrap());
    let error = ring(&disk, EncryptionScope::Store, KEY).load().unwrap_err();
    assert!(error.contains("of another store"), "{error}");
    put(&today);
    ring(&disk, EncryptionScope::Store, KEY).load().unwrap();
    // A ring that is gone is no new store.
    let disk: Arc<dyn Disk> = Arc::new(disk);
    for path in ["keys/ring", "keys/ring-2"] {
        disk.remove(path).unwrap();
    }
    assert!(file::find(&*disk).is_err());
}

#[test]
fn rotation_gives_new_bodies_a_new_key_and_opens_old_ones() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Store, KEY);
    let old = sealed(&ring, LogId::new(1));
    ring.rotate(|| Position::new(1 << 20)).unwrap();
    ring.rotate(|| Position::new(2 << 20)).unwrap();
    let new = sealed(&ring, LogId::new(1));
    assert_eq!(new.0, old.0 + 2);
    assert_eq!(ring.renewed(), (new.0, Position::new(2 << 20)));
    let again = opened(&disk, EncryptionScope::Store, KEY);
    assert!(opens(&again, &old) && opens(&again, &new));
    assert_eq!(again.renewed(), ring.renewed());
}

#[test]
fn destroyed_keys_are_in_no_copy_and_open_nothing() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    let (one, two, old) = (LogId::new(1), LogId::new(2), LogId::new(1 << 41));
    ring.prepare(&[(one, "one"), (two, "two")], LogsExist::Next)
        .unwrap();
    ring.prepare(&[(old, "old")], LogsExist::Already).unwrap();
    ring.rotate(|| Position::ZERO).unwrap();
    let (of_one, of_two) = (sealed(&ring, one), sealed(&ring, two));
    assert!(ring.shred(old, "old").is_err());
    assert!(ring.shred(LogId::new(1 << 50), "none").is_err());
    let begun = ring.shred(one, "one").unwrap();
    ring.destroy(&begun).unwrap();
    assert!(!opens(&ring, &of_one) && opens(&ring, &of_two));
    assert!(ring.newest(one).is_none());
    let again = opened(&disk, EncryptionScope::Log, KEY);
    assert!(!opens(&again, &of_one) && opens(&again, &of_two));
    for path in ["keys/ring", "keys/ring-2"] {
        let text = String::from_utf8(disk.contents(path).unwrap()).unwrap();
        assert!(
            !text.contains("\"log 1\"") && text.contains("\"log 2\""),
            "{path}"
        );
    }
}

#[test]
fn keys_that_a_failing_disk_kept_are_destroyed_later() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    let log = LogId::new(1);
    ring.prepare(&[(log, "gone")], LogsExist::Next).unwrap();
    let body = sealed(&ring, log);
    let begun = ring.shred(log, "gone").unwrap();
    assert_eq!(ring.destroy_again().unwrap(), []);
    let fail = || disk.fail_call(|call| call.kind.changes(), 3, Errno::IO.raw_os_error());
    fail();
    ring.destroy(&begun).unwrap_err();
    fail();
    ring.destroy_again().unwrap_err();
    assert!(opens(&ring, &body));
    // Other changes go on meanwhile, and do not take the log for one that is there.
    disk.forget_faults();
    ring.rotate(|| Position::ZERO).unwrap();
    let destroyed = ring.destroy_again().unwrap();
    assert_eq!(destroyed, [(log, "gone".to_owned())]);
    assert_eq!(ring.destroy_again().unwrap(), []);
    assert!(!opens(&ring, &body) && ring.newest(log).is_none());
    for path in ["keys/ring", "keys/ring-2"] {
        let ring = RingFile::decode(&disk.contents(path).unwrap()).unwrap();
        assert!(ring.shredding.is_empty(), "{path}");
        let mut owners = ring.keys.values().map(|key| &key.owner);
        assert!(owners.all(|owner| *owner != KeyOwner::Log(log)), "{path}");
    }
}

#[test]
fn ring_without_a_key_of_the_store_gets_one_before_logs_need_it() {
    let disk = SimDisk::new();
    opened(&disk, EncryptionScope::Store, KEY);
    let bytes = disk.contents("keys/ring").unwrap();
    let mut file = RingFile::decode(&bytes).unwrap();
    file.keys.clear();
    file::write(&disk, &file).unwrap();
    let ring = opened(&disk, EncryptionScope::Store, KEY);
    let log = (LogId::new(1), "a");
    ring.prepare(&[log], LogsExist::Already).unwrap();
    let body = sealed(&ring, log.0);
    assert!(opens(&opened(&disk, EncryptionScope::Store, KEY), &body));
}

#[test]
fn log_that_lived_under_another_scope_is_not_shredded() {
    let (early, between, late) = (LogId::new(1), LogId::new(2), LogId::new(3));
    for other in [EncryptionScope::Store, EncryptionScope::Tenant] {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        ring.prepare(&[(early, "early")], LogsExist::Next).unwrap();
        let of_early = sealed(&ring, early);
        // Without a change of the scope a restart takes nothing away.
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        let begun = ring.shred(early, "early").unwrap();
        ring.keep(&begun).unwrap();
        let ring = opened(&disk, other, KEY);
        ring.prepare(&[(early, "early")], LogsExist::Already)
            .unwrap();
        ring.prepare(&[(between, "between")], LogsExist::Next)
            .unwrap();
        let of_between = sealed(&ring, between);
        assert!(matches!(
            ring.shred(early, "early"),
            Err(ShredError::NoOwnKey(_))
        ));
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        ring.prepare(
            &[(early, "early"), (between, "between")],
            LogsExist::Already,
        )
        .unwrap();
        for (id, name) in [(early, "early"), (between, "between")] {
            let refused = ring.shred(id, name);
            assert!(matches!(refused, Err(ShredError::NoOwnKey(_))), "{name}");
        }
        assert!(opens(&ring, &of_early) && opens(&ring, &of_between));
        // A log of today has a key of today, although one was made ahead for its number.
        ring.prepare(&[(late, "late")], LogsExist::Next).unwrap();
        let of_late = sealed(&ring, late);
        let begun = ring.shred(late, "late").unwrap();
        ring.destroy(&begun).unwrap();
        assert!(!opens(&ring, &of_late) && opens(&ring, &of_early));
    }
}

#[test]
fn interrupted_shredding_is_ended_by_the_next_start() {
    for deleted in [false, true] {
        let disk = SimDisk::new();
        let ring = opened(&disk, EncryptionScope::Log, KEY);
        let log = LogId::new(1);
        ring.prepare(&[(log, "one")], LogsExist::Next).unwrap();
        let body = sealed(&ring, log);
        let _begun = ring.shred(log, "one").unwrap();
        let again = opened(&disk, EncryptionScope::Log, KEY);
        assert!(again.end_shredding(|_, _| None).unwrap().is_empty());
        assert!(opens(&again, &body));
        let again = opened(&disk, EncryptionScope::Log, KEY);
        let ended = again.end_shredding(|_, _| Some(!deleted)).unwrap();
        assert_eq!(ended.len(), usize::from(deleted));
        assert_eq!(opens(&again, &body), !deleted);
        let last = opened(&disk, EncryptionScope::Log, KEY);
        assert!(
            last.end_shredding(|_, _| panic!("nothing is left"))
                .unwrap()
                .is_empty()
        );
    }
}

#[test]
fn keys_are_made_ahead_and_tenants_share_theirs() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    ring.prepare(&[(LogId::new(1), "a")], LogsExist::Next)
        .unwrap();
    let before = disk.contents("keys/ring");
    for id in 2..=KEYS_AHEAD {
        ring.prepare(&[(LogId::new(id), "b")], LogsExist::Next)
            .unwrap();
        assert!(ring.newest(LogId::new(id)).is_some());
    }
    assert_eq!(disk.contents("keys/ring"), before);
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Tenant, KEY);
    let logs = [(1, "pay/a"), (2, "pay/b"), (3, "shop/a"), (4, "alone")];
    for (id, name) in logs {
        ring.prepare(&[(LogId::new(id), name)], LogsExist::Next)
            .unwrap();
    }
    let numbers = logs.map(|(id, _)| ring.newest(LogId::new(id)).unwrap().number());
    assert_eq!(numbers[0], numbers[1]);
    assert_eq!(HashSet::from(numbers).len(), 3);
    assert!(ring.shred(LogId::new(1), "pay/a").is_err());
}

#[test]
fn failed_writes_leave_a_ring_that_opens_and_retries_add_no_keys() {
    let log = LogId::new(1);
    let changes = |call: &DiskCall<'_>| call.kind.changes();
    for first in 1..100 {
        for second in [None, Some(first), Some(3), Some(8)] {
            let disk = SimDisk::new();
            let ring = opened(&disk, EncryptionScope::Store, KEY);
            let mut bodies = vec![sealed(&ring, log)];
            let mut failures = 0;
            for nth in std::iter::once(first).chain(second) {
                disk.fail_call(changes, nth, Errno::IO.raw_os_error());
                failures += usize::from(ring.rotate(|| Position::new(4096)).is_err());
                bodies.push(sealed(&ring, log));
                disk.forget_faults();
                // The directory opens at any time.
                let copy = disk.copy();
                let again = opened(&copy, EncryptionScope::Store, KEY);
                assert!(
                    bodies.iter().all(|body| opens(&again, body)),
                    "call {first}"
                );
            }
            if failures == 0 {
                assert!(first > 20, "a rotation has more calls");
                return;
            }
            ring.rotate(|| Position::new(4096)).unwrap();
            bodies.push(sealed(&ring, log));
            let again = opened(&disk, EncryptionScope::Store, KEY);
            assert!(
                bodies.iter().all(|body| opens(&again, body)),
                "call {first}"
            );
            // The first key, and one for each rotation that was asked for and ended.
            let ended = 2 + second.map_or(0, |_| 2 - failures);
            assert!(again.len() <= ended, "call {first}: {} keys", again.len());
        }
    }
    panic!("a rotation takes fewer calls");
}

#[test]
fn crash_at_any_step_of_a_change_leaves_a_ring_with_all_used_keys() {
    for calls in 0..200 {
        let disk = SimDisk::seeded(calls);
        let ring = opened(&disk, EncryptionScope::Store, KEY);
        let old = sealed(&ring, LogId::new(1));
        disk.crash_after(calls + 1);
        let is_done = ring.rotate(|| Position::new(4096)).is_ok();
        let is_cut = disk.is_crashed();
        let new = sealed(&ring, LogId::new(1));
        disk.crash(calls);
        let again = opened(&disk, EncryptionScope::Store, KEY);
        assert!(opens(&again, &old), "call {calls}");
        assert!(opens(&again, &new), "call {calls}");
        assert!(is_done || is_cut);
        if !is_cut {
            return;
        }
    }
    panic!("a rotation takes fewer calls");
}

#[test]
fn offline_commands_keep_the_scope_and_the_word_of_each_log() {
    let disk = SimDisk::new();
    let log = LogId::new(1);
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    ring.prepare(&[(log, "a")], LogsExist::Next).unwrap();
    let own = sealed(&ring, log).0;
    let before = disk.contents("keys/ring");
    // The settings of the command lack encryption_scope.
    let offline = self::ring(&disk, EncryptionScope::Store, KEY).keeping_scope();
    offline.load().unwrap();
    offline.begin(Position::ZERO).unwrap();
    offline.prepare(&[(log, "a")], LogsExist::Already).unwrap();
    assert_eq!(sealed(&offline, log).0, own);
    assert_eq!(disk.contents("keys/ring"), before);
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    ring.keep(&ring.shred(log, "a").unwrap()).unwrap();
    // A store without a ring gets the scope of the settings.
    let disk = SimDisk::new();
    let offline = self::ring(&disk, EncryptionScope::Log, KEY).keeping_scope();
    offline.load().unwrap();
    offline.begin(Position::ZERO).unwrap();
    let file = RingFile::decode(&disk.contents("keys/ring").unwrap()).unwrap();
    assert_eq!(file.scope, EncryptionScope::Log);
}

#[test]
fn call_that_needs_no_key_does_not_wait_for_a_change_of_the_ring() {
    for scope in [
        EncryptionScope::Store,
        EncryptionScope::Tenant,
        EncryptionScope::Log,
    ] {
        let ring = Arc::new(opened(&SimDisk::new(), scope, KEY));
        let log = [(LogId::new(1), "pay/a")];
        ring.prepare(&log, LogsExist::Next).unwrap();
        let change = ring.change();
        let (done, waited) = std::sync::mpsc::channel();
        let preparing = std::thread::spawn({
            let ring = Arc::clone(&ring);
            move || {
                let prepared = ring.prepare(&log, LogsExist::Next);
                done.send(prepared.is_ok()).unwrap();
            }
        });
        let prepared = waited.recv_timeout(Duration::from_secs(10));
        drop(change);
        preparing.join().unwrap();
        assert_eq!(prepared, Ok(true), "{scope:?}");
    }
}

#[test]
fn ring_that_no_start_would_read_is_refused_when_it_is_written() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    let (mut last, mut before) = (0, Vec::new());
    let refused = (1..200).map(|group| group * KEYS_AHEAD).find_map(|id| {
        let log = LogId::new(id);
        before = disk.contents("keys/ring").unwrap();
        let prepared = ring.prepare(&[(log, "a")], LogsExist::Next);
        last = id;
        prepared.err()
    });
    let refused = refused.unwrap();
    // The engine answers the request as on a full disk, and goes on.
    assert_eq!(refused.kind(), io::ErrorKind::FileTooLarge);
    let refused = refused.to_string();
    assert!(refused.contains("new store"), "{refused}");
    assert!(before.len() > 1 << 19);
    // The ring before stays in force, here and on the disk.
    assert!(ring.newest(LogId::new(last)).is_none());
    assert!(ring.newest(LogId::new(KEYS_AHEAD)).is_some());
    assert!(disk.contents("keys/ring").unwrap() == before);
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    // Erasures note the names of their logs, and have room for some.
    assert!(before.len() < (1 << 20) - (10 << 10));
    let log = ring
        .shred(LogId::new(KEYS_AHEAD), &"n".repeat(200))
        .unwrap();
    ring.destroy(&log).unwrap();
    assert!(ring.newest(LogId::new(KEYS_AHEAD)).is_none());
}

#[test]
fn new_keys_walk_over_no_key_of_other_owners() {
    let disk = SimDisk::new();
    let ring = opened(&disk, EncryptionScope::Log, KEY);
    for id in (1..20).map(|group| group * KEYS_AHEAD) {
        ring.prepare(&[(LogId::new(id), "a")], LogsExist::Next)
            .unwrap();
    }
    assert_eq!(ring.state().walks, 0);
}
