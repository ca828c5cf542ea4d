//! Files of other programs in the data directory, and a torn tail that finds no space in quarantine: both are
//! reported, and all work goes on.

use super::*;
use crate::api::config::OnDamage;
use crate::disk::Disk;

/// Files as NFS, macOS and rsync leave them.
const STRANGERS: [&str; 6] = [
    "journal/.nfs000000001234",
    "journal/._0000000000000001.seg",
    "pool/.0000000000000002.seg.Xy12Ab",
    "sorted/.DS_Store",
    "index/.nfs000000001235",
    "checkpoint/.DS_Store",
];

fn strict_config() -> StorageConfig {
    StorageConfig {
        on_damage: OnDamage::Refuse,
        ..super::sorting::config()
    }
}

/// Checks that a sound store does all its work: it sorts, gives space back, and keeps checkpoints.
fn goes_on(fixture: &Fixture, what: &str) {
    let newest = || {
        let mut names = fixture.disk.list("checkpoint").unwrap();
        names.retain(|name| name.ends_with(".ckp"));
        names.sort_unstable();
        names.pop()
    };
    let before = newest();
    // The pool tries again some time after a full disk.
    fixture.clock.advance(1_000_000);
    fixture.fill_logs(7, 6);
    assert!(fixture.sort() > 0, "{what}: it sorts");
    let runs = fixture.disk.list("sorted").unwrap().len();
    for log in ["a", "b/1", "b/2", "c"] {
        let tail = fixture.read_from(log, ReadStart::First).unwrap().tail_lsn;
        fixture.trim_to(log, tail.get());
    }
    fixture.fill_logs(8, 6);
    assert!(fixture.sort() > 0, "{what}: {runs} runs are sorted again");
    assert_ne!(newest(), before, "{what}: a checkpoint is written");
}

#[test]
fn files_of_others_are_reported_and_stop_nothing() {
    let first = Fixture::with(SimDisk::new(), strict_config());
    first.fill_logs(1, 4);
    first.sort();
    for path in STRANGERS {
        first.disk.create(path).unwrap();
    }
    let mut fixture = first.restart();
    for what in ["after a kill", "after a shutdown"] {
        let found = fixture.report.findings.join(" ");
        for path in &STRANGERS[..4] {
            assert!(found.contains(path), "{what}: {found}");
        }
        assert_eq!(fixture.report.damage, [], "{what}");
        goes_on(&fixture, what);
        fixture = fixture.restart_cleanly();
    }
    for path in STRANGERS {
        assert!(fixture.disk.open(path).is_ok(), "{path} is left alone");
    }
}

#[test]
fn torn_tail_stops_nothing_whether_it_is_kept_or_not() {
    for full in [false, true] {
        let what = format!("full: {full}");
        let fixture = Fixture::with(SimDisk::new(), strict_config());
        fixture.fill_logs(1, 4);
        let segment = fixture.core.journal.current();
        let end = fixture.core.journal.durable().since(segment.base);
        let at = usize::try_from(end).unwrap().next_multiple_of(4096) + 4096;
        let mut bytes = fixture.disk.contents(&segment.path()).unwrap();
        // These bytes look like a write that never was acknowledged.
        bytes[at..at + 100].fill(0x55);
        let size = bytes.len();
        bytes[size - 4096..].fill(0);
        fixture.disk.replace(&segment.path(), bytes);
        fixture.disk.set_full(full);
        let fixture = fixture.restart();
        fixture.disk.set_full(false);
        assert!(fixture.report.torn_bytes > 0, "{what}");
        let kept = fixture.disk.list("quarantine").unwrap().len();
        assert_eq!(kept, usize::from(!full), "{what}");
        assert_eq!(fixture.report.findings.len(), usize::from(full), "{what}");
        goes_on(&fixture, &what);
        assert_eq!(fixture.restart().report.damage, [], "{what}");
    }
}
