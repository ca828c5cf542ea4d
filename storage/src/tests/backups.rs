//! Backups of a running store, and stores made of them, at any position.

use std::collections::{BTreeMap, HashSet};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::exactly_once::of;
use super::*;
use crate::api::content::ContentDigest;
use crate::api::engine::{Backup, BackupFile, BackupManifest, BackupPart};
use crate::api::error::{BackupError, RestoreError};
use crate::api::finding::Severity;
use crate::api::pace::Control;
use crate::api::record::{GapReason, LogConfig};
use crate::api::replica::JournalPart;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId};
use crate::disk::Disk;
use crate::disk::directory::KeptTerm;
use crate::disk::held_files;
use crate::engine::repair::accept_loss;
use crate::format::life::journal_path;
use crate::tools::backup;
use crate::tools::backup::{
    BackupView, CopyTail, ReplicaContent, RestoredAs, content_path, refuse_if_used,
};
use crate::tools::verify::Offline;

/// State of a store: for each log its first kept lsn and its records.
type Standing = BTreeMap<String, (u64, Vec<Vec<u8>>)>;

fn standing(core: &Arc<Core>) -> Standing {
    let logs = core.list_logs("", None, usize::MAX);
    logs.into_iter()
        .map(|info| {
            let name = info.name.as_str().to_owned();
            let first = info.first_lsn;
            let mut found = Vec::new();
            let mut next = first;
            while next < info.tail_lsn {
                let request = read_request(&name, ReadStart::Lsn(next));
                let page = read::page(&core.store, &request, Reach::Disk).unwrap();
                for batch in &page.batches {
                    assert_eq!(batch.first_lsn, next, "lsns are dense");
                    next = batch.next_lsn();
                    found.extend(payloads(batch));
                }
            }
            (name, (first.get(), found))
        })
        .collect()
}

fn poll<T>(future: &mut Pin<Box<impl Future<Output = T> + ?Sized>>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match future.as_mut().poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn begin(fixture: &Fixture, known: HashSet<ContentDigest>) -> Result<Box<dyn Backup>, BackupError> {
    begin_of(&fixture.core, known)
}

fn begin_of(
    core: &Arc<Core>,
    known: HashSet<ContentDigest>,
) -> Result<Box<dyn Backup>, BackupError> {
    let workers = Arc::default();
    let mut beginning = Box::pin(backup::begin(
        &core.store,
        &core.inbox,
        &core.indexer,
        &workers,
        known,
    ));
    for _ in 0..4 {
        if let Some(begun) = poll(&mut beginning) {
            return begun;
        }
        core.turn();
    }
    panic!("a backup begins within a few turns");
}

fn next(backup: &mut dyn Backup) -> Result<Option<BackupPart>, BackupError> {
    poll(&mut backup.next()).expect("there is no thread to wait for")
}

/// Keeps backups as a client does: content by its digest.
#[derive(Clone)]
pub(super) struct Shelf(SimDisk);

impl Default for Shelf {
    fn default() -> Self {
        let disk = SimDisk::default();
        disk.create_directory("files").unwrap();
        Self(disk)
    }
}

impl Shelf {
    fn known(&self) -> HashSet<ContentDigest> {
        let names = self.0.list("files").unwrap();
        let digests = names
            .iter()
            .map(|name| ContentDigest::from_name(name).unwrap());
        digests.collect()
    }

    /// Takes a backup, and calls `between` before each step. Returns the number of bytes sent, too.
    pub(super) fn save(
        &self,
        fixture: &Fixture,
        between: impl FnMut(),
    ) -> Result<(Arc<BackupManifest>, u64), BackupError> {
        self.save_of(&fixture.core, between)
    }

    /// As [`Shelf::save`].
    pub(super) fn save_of(
        &self,
        core: &Arc<Core>,
        mut between: impl FnMut(),
    ) -> Result<(Arc<BackupManifest>, u64), BackupError> {
        let mut backup = begin_of(core, self.known())?;
        let mut manifest: Option<Arc<BackupManifest>> = None;
        let mut sent = 0;
        let mut content: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        loop {
            between();
            match next(&mut *backup)? {
                None => break,
                Some(BackupPart::Read(bytes)) => assert!(bytes > 0 && manifest.is_none()),
                Some(BackupPart::Manifest(told)) => assert!(manifest.replace(told).is_none()),
                Some(BackupPart::Chunk { file, offset, data }) => {
                    sent += data.len() as u64;
                    let content = content.entry(file).or_default();
                    assert_eq!(content.len() as u64, offset);
                    content.extend_from_slice(&data);
                }
            }
        }
        let manifest = manifest.unwrap();
        for (index, file) in manifest.files.iter().enumerate() {
            let content = content.remove(&index);
            assert_eq!(content.is_none(), file.known, "{}", file.path);
            if let Some(content) = content {
                assert_eq!(content.len() as u64, file.bytes);
                self.0.replace(&content_path(file.digest), content);
            }
        }
        Ok((manifest, sent))
    }

    pub(super) fn view(
        &self,
        manifest: &BackupManifest,
        at: Option<Position>,
    ) -> Result<Arc<BackupView>, RestoreError> {
        BackupView::open(Arc::new(self.0.clone()), manifest, at).map(Arc::new)
    }

    pub(super) fn restore(&self, manifest: &BackupManifest, at: Option<Position>) -> SimDisk {
        let target = SimDisk::new();
        self.restore_to(manifest, at, &target).unwrap();
        target
    }

    fn restore_to(
        &self,
        manifest: &BackupManifest,
        at: Option<Position>,
        target: &SimDisk,
    ) -> Result<backup::Restored, RestoreError> {
        let disk: Arc<dyn Disk> = Arc::new(target.clone());
        self.view(manifest, at)?
            .restore(&disk, &small_config(), &mut |_| {})
    }
}

/// A store with some segments, and its state at the end position of each unit.
fn busy_store(seed: u64) -> (Fixture, Vec<(Position, Standing)>) {
    let mut fixture = Fixture::new();
    let mut random = StdRng::seed_from_u64(seed);
    let mut stood = Vec::new();
    for round in 0..90u32 {
        let data = vec![u8::try_from(round).unwrap(); random.random_range(1..6_000)];
        match random.random_range(0..12) {
            0 if fixture.core.logs.by_name("b").is_some() => {
                let tail = standing(&fixture.core)["b"].1.len() as u64;
                let first = standing(&fixture.core)["b"].0;
                let before = Lsn::new(first + tail / 2);
                let mut trimmed = Box::pin(fixture.core.trim_in_turn(target("b"), before));
                fixture.core.turn();
                poll(&mut trimmed).unwrap().unwrap();
            }
            1 if fixture.core.logs.by_name("c").is_some() => {
                let mut gone = Box::pin(fixture.core.delete_in_turn(target("c")));
                fixture.core.turn();
                poll(&mut gone).unwrap().unwrap();
            }
            2 => {
                fixture
                    .append_batch(batch(&[("a", &[&data]), ("b", &[&data, b"two"])]))
                    .unwrap();
            }
            3 if round % 2 == 0 => {
                let name = LogName::new(&format!("made/{round}")).unwrap();
                let mut made = Box::pin(fixture.core.create_in_turn(name, LogConfig::default()));
                fixture.core.turn();
                poll(&mut made).unwrap().unwrap();
            }
            4 if round > 30 => {
                fixture = match random.random_bool(0.5) {
                    true => fixture.restart(),
                    false => fixture.restart_cleanly(),
                };
                continue;
            }
            log => {
                let log = ["a", "b", "c"][log % 3];
                fixture.append(log, &data).unwrap();
            }
        }
        fixture.clock.advance(1000);
        let position = fixture.core.journal.durable();
        // A trim that removes nothing writes no frame.
        stood.retain(|(before, _)| *before < position);
        stood.push((position, standing(&fixture.core)));
    }
    (fixture, stood)
}

fn reopened(disk: SimDisk) -> Fixture {
    let fixture = Fixture::on(disk);
    assert_eq!(fixture.report.findings, Vec::<String>::new());
    assert_eq!(fixture.report.damage, []);
    assert_eq!(fixture.report.torn_bytes, 0);
    fixture
}

#[test]
fn a_restored_store_holds_all_records_and_goes_on_beyond_the_old_one() {
    let (fixture, stood) = busy_store(1);
    let shelf = Shelf::default();
    let (manifest, sent) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(manifest.damage, []);
    assert_eq!(
        sent,
        manifest.files.iter().map(|file| file.bytes).sum::<u64>()
    );
    let at_backup = stood.last().unwrap().1.clone();
    for _ in 0..20 {
        fixture.append("a", &[7; 4000]).unwrap();
    }
    let beyond = fixture.core.journal.durable();

    let disk = SimDisk::new();
    let restored = shelf.restore_to(&manifest, None, &disk).unwrap();
    assert_eq!(restored.position, manifest.position);
    assert_eq!(restored.report.logs, at_backup.len() as u64);
    let records = at_backup.values().map(|(_, records)| records.len() as u64);
    assert_eq!(restored.report.records, records.sum::<u64>());
    let after = reopened(disk);
    assert_eq!(standing(&after.core), at_backup);
    assert!(after.report.recovery_epoch > fixture.report.recovery_epoch);
    assert_eq!(after.report.recovery_epoch, restored.report.recovery_epoch);
    let position = after.append("a", b"on").unwrap().position.unwrap();
    assert!(position > beyond.advance(1 << 40));

    // The restored store works like any other: a backup of it shares content with the first one.
    let (again, sent_again) = shelf.save(&after, || {}).unwrap();
    assert_eq!(again.store_id, manifest.store_id);
    assert!(sent_again < sent / 4, "{sent_again} of {sent}");
    let twice = reopened(shelf.restore(&again, None));
    assert_eq!(standing(&twice.core), standing(&after.core));
}

#[test]
fn a_restored_store_recognises_repeats_from_before_the_backup() {
    let mut fixture = Fixture::new();
    let mut ends = Vec::new();
    let by = |sequence: u64| of(&["a"], &sequence.to_le_bytes(), 1, sequence);
    for sequence in 0..12 {
        let appended = fixture.append_batch(by(sequence)).unwrap();
        ends.push(appended.position.unwrap());
        fixture.append("filler", &[5; 20_000]).unwrap();
        if sequence == 5 {
            fixture = fixture.restart();
        }
    }
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let mut restores = vec![(None, 12)];
    restores.extend(
        ends.iter()
            .enumerate()
            .map(|(n, end)| (Some(*end), n as u64)),
    );
    for (at, there) in restores {
        let restored = reopened(shelf.restore(&manifest, at));
        for sequence in 0..there {
            let again = restored.append_batch(by(sequence)).unwrap();
            assert!(again.appends[0].deduplicated, "{sequence}, at {at:?}");
        }
    }
}

#[test]
fn stores_made_of_one_backup_go_on_at_places_of_their_own() {
    let (fixture, _) = busy_store(8);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let (mut epochs, mut positions) = (HashSet::new(), HashSet::new());
    for _ in 0..8 {
        let restored = reopened(shelf.restore(&manifest, None));
        let ahead = restored.report.recovery_epoch.get() - manifest.recovery_epoch.get();
        assert!((1 << 10..1 << 11).contains(&ahead), "{ahead} epochs");
        let on = restored.append("new", b"on").unwrap().position.unwrap();
        let leap = on.since(manifest.position);
        assert!((1 << 50..(1 << 51) + (1 << 33)).contains(&leap), "{leap}");
        epochs.insert(ahead);
        positions.insert(on);
    }
    assert_eq!(positions.len(), 8);
    assert!(epochs.len() > 1, "eight times the same epoch");
}

#[test]
fn a_store_is_restored_as_it_stood_at_any_position() {
    for seed in 0..4 {
        let (fixture, stood) = busy_store(100 + seed);
        let shelf = Shelf::default();
        let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
        let segments = fixture.core.journal.segments.read().len();
        assert!(segments > 3, "{segments}");
        let mut before = None;
        for (position, standing_then) in stood {
            let restored = reopened(shelf.restore(&manifest, Some(position)));
            assert_eq!(
                standing(&restored.core),
                standing_then,
                "at {position}, seed {seed}"
            );
            // A position between two ends restores the lower one.
            if let Some(before) = before {
                let between = Position::new(position.get() - 1);
                let restored = reopened(shelf.restore(&manifest, Some(between)));
                assert_eq!(
                    standing(&restored.core),
                    before,
                    "below {position}, seed {seed}"
                );
            }
            before = Some(standing_then);
        }
    }
}

/// All shipped parts of a store, one group in each.
fn groups_of(fixture: &Fixture) -> Vec<JournalPart> {
    let (mut from, mut parts) = (Position::ZERO, Vec::new());
    while let Some(part) = fixture.core.read_part(from, 1, Reach::Disk).unwrap() {
        from = part.end;
        parts.push(part);
    }
    parts
}

/// A store made of a replica: of these files, and these parts of the journal, as of a position.
fn restored_replica(
    store_id: u128,
    files: Option<&BackupView>,
    parts: &[JournalPart],
    until: Position,
) -> Result<SimDisk, RestoreError> {
    let disk = SimDisk::new();
    let target: Arc<dyn Disk> = Arc::new(disk.clone());
    let content = ReplicaContent {
        store_id,
        files,
        parts: &mut parts.iter().cloned().map(Ok),
        until: Some(until),
    };
    match content.restore(&target, &small_config(), RestoredAs::Copy, &mut |_| {}) {
        Ok(_) => Ok(disk),
        Err(error) => {
            // Nothing is in the way of the next attempt.
            refuse_if_used(&disk).unwrap();
            Err(error)
        }
    }
}

#[test]
fn a_replica_is_restored_as_it_stood_at_any_position_of_its_rows() {
    let mut inner = 0;
    for seed in 0..4 {
        let (fixture, stood) = busy_store(200 + seed);
        let (shelf, id) = (Shelf::default(), fixture.core.store_id);
        let groups = groups_of(&fixture);
        // Files hold a part of the journal, and rows the rest.
        let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
        let middle = stood[stood.len() / 2].0;
        let half = shelf.view(&manifest, Some(middle)).unwrap();
        let mut before = None;
        for (position, standing_then) in stood {
            let between = Position::new(position.get() - 1);
            for (at, expected) in [(position, Some(&standing_then)), (between, before.as_ref())] {
                let Some(expected) = expected else { continue };
                for files in [None, Some(&*half).filter(|_| at >= middle)] {
                    let disk = restored_replica(id, files, &groups, at).unwrap();
                    let restored = reopened(disk);
                    assert_eq!(standing(&restored.core), *expected, "at {at}, seed {seed}");
                }
            }
            inner += usize::from(!groups.iter().any(|group| group.end == position));
            before = Some(standing_then);
        }
        let end = groups.last().unwrap().end;
        for (at, reached) in [(end, true), (end.advance(1), false)] {
            let restored = restored_replica(id, None, &groups, at);
            match restored {
                Ok(_) => assert!(reached),
                Err(RestoreError::Beyond { end: told, .. }) => assert!(!reached && told == end),
                Err(error) => panic!("{error}"),
            }
        }
        let early = restored_replica(id, None, &groups, Position::new(8));
        let Err(RestoreError::Before { first, .. }) = early else {
            panic!("it begins later");
        };
        restored_replica(id, None, &groups, first).unwrap();
        let below = Position::new(first.get() - 1);
        restored_replica(id, None, &groups, below).err().unwrap();
    }
    println!("{inner} positions inside of a group");
}

/// Writer epoch of the log "a"; 0 = it was never fenced.
fn epoch_of(fixture: &Fixture) -> u64 {
    let log = fixture.core.logs.by_name("a").unwrap();
    log.state.read().writer_epoch()
}

#[test]
fn a_replica_as_of_a_position_has_the_producers_and_fences_of_then() {
    let fixture = Fixture::new();
    let by = |sequence: u64, epoch: u64| {
        let mut batch = of(&["a"], &sequence.to_le_bytes(), 1, sequence);
        batch.logs[0].guard.writer_epoch = Some(epoch);
        batch
    };
    let mut ends = Vec::new();
    for sequence in 0..12 {
        fixture.append_batch(by(sequence, sequence)).unwrap();
        ends.push(fixture.core.journal.durable());
        let mut fenced = Box::pin(fixture.core.fence(target("a"), None));
        fixture.core.turn();
        poll(&mut fenced).unwrap().unwrap();
        fixture.append("filler", &[5; 20_000]).unwrap();
    }
    let groups = groups_of(&fixture);
    for (done, end) in (0..).zip(ends) {
        let disk = restored_replica(fixture.core.store_id, None, &groups, end).unwrap();
        let restored = reopened(disk);
        assert_eq!(epoch_of(&restored), done, "at {end}");
        for sequence in 0..=done {
            let again = restored.append_batch(by(sequence, sequence)).unwrap();
            assert!(again.appends[0].deduplicated, "{sequence} at {end}");
        }
        let next = restored.append_batch(by(done + 1, done)).unwrap();
        assert!(!next.appends[0].deduplicated, "at {end}");
        assert_eq!(next.appends[0].first_lsn, Lsn::new(done + 1));
    }
}

#[test]
fn a_restored_store_knows_how_much_of_older_epochs_survived() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    let first = fixture.report.recovery_epoch;
    let fixture = fixture.restart();
    let cut = fixture.append("a", b"2").unwrap().position.unwrap();
    let lost = fixture.append("a", b"3").unwrap().position.unwrap();
    let second = fixture.report.recovery_epoch;
    assert!(second > first);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    // The old store goes on, and has another unclean start.
    let fixture = fixture.restart();
    let third = fixture.report.recovery_epoch;
    let mut restored = reopened(shelf.restore(&manifest, Some(lost)));
    for _ in 0..2 {
        assert!(restored.report.recovery_epoch > third);
        for (epoch, survived, gone) in [(first, Position::ZERO, cut), (second, cut, lost)] {
            let end = restored.core.survived(epoch).unwrap();
            assert!(end > survived && end <= gone, "epoch {epoch}: {end}");
        }
        let of_third = restored.core.survived(RecoveryEpoch::new(third.get()));
        assert!(of_third.is_some_and(|end| end <= lost));
        restored = restored.restart();
    }
}

#[test]
fn appends_go_on_while_a_backup_runs_and_are_not_in_it() {
    let (fixture, stood) = busy_store(2);
    let shelf = Shelf::default();
    let mut more = 0u32;
    let (manifest, _) = shelf
        .save(&fixture, || {
            more += 1;
            fixture.append("a", &[9; 5000]).unwrap();
        })
        .unwrap();
    assert!(more > 20);
    let restored = reopened(shelf.restore(&manifest, None));
    assert_eq!(standing(&restored.core), stood.last().unwrap().1);
}

#[test]
fn an_idle_store_is_not_made_to_roll_by_backups() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    let shelf = Shelf::default();
    let (first, _) = shelf.save(&fixture, || {}).unwrap();
    let segments = fixture.core.journal.segments.read().len();
    let (second, sent) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(first.position, second.position);
    assert_eq!(sent, 0);
    assert_eq!(fixture.core.journal.segments.read().len(), segments);
}

#[test]
fn a_store_without_records_can_be_saved_and_restored() {
    let fixture = Fixture::new();
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let restored = reopened(shelf.restore(&manifest, None));
    assert_eq!(standing(&restored.core), Standing::new());
}

#[test]
fn a_store_on_a_full_disk_can_be_saved() {
    let fixture = Fixture::new();
    for _ in 0..40 {
        fixture.append("a", &[1; 4000]).unwrap();
    }
    fixture.core.pool_in_turn().unwrap();
    fixture.disk.set_full(true);
    while fixture.append("a", &[2; 4000]).is_ok() {}
    let expected = standing(&fixture.core);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let restored = reopened(shelf.restore(&manifest, None));
    assert_eq!(standing(&restored.core), expected);
}

#[test]
fn backups_hold_the_files_they_listed_and_no_others() {
    let (fixture, _) = busy_store(3);
    let backups = &fixture.core.held_files;
    let index = format!("index/{}", fixture.disk.list("index").unwrap()[0]);
    let is_there = || fixture.disk.contents(&index).is_some();
    let mut first = begin(&fixture, HashSet::new()).unwrap();
    let mut second = begin(&fixture, HashSet::new()).unwrap();
    assert!(backups.remove(&index).unwrap());
    while next(&mut *first).unwrap().is_some() {}
    drop(first);
    assert!(is_there(), "the second backup holds the file");
    while next(&mut *second).unwrap().is_some() {}
    drop(second);
    assert!(!is_there(), "no backup holds the file");
    // A client that leaves in the middle holds nothing.
    let mut running = begin(&fixture, HashSet::new()).unwrap();
    assert!(next(&mut *running).unwrap().is_some());
    // A file that was written after the list was made is removed at once.
    let new = format!("{index}.new");
    crate::disk::replace_file(&fixture.disk, &format!("{new}.new"), &new, &[b"later"]).unwrap();
    assert!(!backups.remove(&new).unwrap());
    assert!(fixture.disk.contents(&new).is_none());
    let whole = |path: &str| vec![path.to_owned()];
    let journal = format!("journal/{}", fixture.disk.list("journal").unwrap()[0]);
    assert!(!backups.unless_held(&whole(&journal), || Ok(())).unwrap());
    assert!(backups.unless_held(&whole(&new), || Ok(())).unwrap());
    drop(running);
    assert!(backups.unless_held(&whole(&journal), || Ok(())).unwrap());
}

#[test]
fn backup_that_nobody_reads_ends_and_holds_nothing() {
    let (fixture, _) = busy_store(3);
    let backups = &fixture.core.held_files;
    let limit = i64::try_from(held_files::UNREAD.as_micros()).unwrap();
    let segment = format!("journal/{}", fixture.disk.list("journal").unwrap()[0]);
    let is_there = || fixture.disk.contents(&segment).is_some();
    let mut unread = begin(&fixture, HashSet::new()).unwrap();
    assert!(next(&mut *unread).unwrap().is_some());
    assert!(backups.remove(&segment).unwrap());
    // A part is read in time, so the backup goes on.
    fixture.clock.advance(limit - 1);
    backups.end_unread(fixture.core.journal.clock.monotonic());
    assert!(next(&mut *unread).unwrap().is_some());
    fixture.clock.advance(limit - 1);
    backups.end_unread(fixture.core.journal.clock.monotonic());
    assert!(is_there());
    fixture.clock.advance(1);
    backups.end_unread(fixture.core.journal.clock.monotonic());
    assert!(!is_there());
    let ended = next(&mut *unread);
    assert!(
        matches!(ended, Err(BackupError::Unread { .. })),
        "{ended:?}"
    );
    // An unread backup also ends without `end_unread`, and makes room for another.
    let mut unread: Vec<_> = (0..crate::disk::held_files::AT_A_TIME)
        .map(|_| begin(&fixture, HashSet::new()).unwrap())
        .collect();
    fixture.clock.advance(limit);
    assert!(begin(&fixture, HashSet::new()).is_ok());
    for unread in &mut unread {
        assert!(matches!(
            next(&mut **unread),
            Err(BackupError::Unread { .. })
        ));
    }
}

#[test]
fn backup_holds_only_the_files_that_it_still_sends() {
    let (fixture, _) = busy_store(3);
    let backups = &fixture.core.held_files;
    let held = |path: &str| !backups.unless_held(&[path.to_owned()], || Ok(())).unwrap();
    let mut first = begin(&fixture, HashSet::new()).unwrap();
    let manifest = loop {
        if let BackupPart::Manifest(manifest) = next(&mut *first).unwrap().unwrap() {
            break manifest;
        }
    };
    assert!(manifest.files.iter().all(|file| held(&file.path)));
    let mut sending = 0;
    while let Some(part) = next(&mut *first).unwrap() {
        let BackupPart::Chunk { file, .. } = part else {
            panic!("content follows the manifest");
        };
        sending = file;
        for (at, file) in manifest.files.iter().enumerate() {
            assert_eq!(held(&file.path), at >= sending, "{} of {at}", file.path);
        }
    }
    assert!(sending + 1 == manifest.files.len() && sending > 2);
    // Content that the client has is not held.
    let known = manifest.files.iter().map(|file| file.digest).collect();
    let mut second = begin(&fixture, known).unwrap();
    loop {
        if let BackupPart::Manifest(again) = next(&mut *second).unwrap().unwrap() {
            for file in &again.files {
                assert_eq!(held(&file.path), !file.known, "{}", file.path);
            }
            break;
        }
    }
}

#[test]
fn digests_of_files_that_are_gone_are_forgotten() {
    let config = StorageConfig {
        sorter_enabled: true,
        sorter_step_bytes: 1,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let shelf = Shelf::default();
    for number in 0..8u8 {
        for _ in 0..200 {
            fixture.append("a", &[number; 1000]).unwrap();
        }
        fixture.trim_to("a", u64::from(number) * 200);
        fixture.sort();
        let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
        let known = fixture.core.held_files.known_digests();
        assert!(known > 0 && known <= manifest.files.len(), "{known}");
    }
}

#[test]
fn few_backups_run_at_a_time() {
    let (fixture, _) = busy_store(3);
    let begin = || begin(&fixture, HashSet::new());
    let running: Vec<_> = (0..crate::disk::held_files::AT_A_TIME)
        .map(|_| begin().unwrap())
        .collect();
    assert!(
        matches!(begin(), Err(BackupError::Busy { running }) if running == held_files::AT_A_TIME)
    );
    // A replica has a place of its own, and leaves no segment.
    let core = &fixture.core;
    let current = core.journal.current().life.id;
    let files = |known| {
        let (store, indexer, workers) = (&core.store, &core.indexer, Arc::default());
        let mut begun =
            Box::pin(
                async move { backup::begin_finished(store, indexer, &workers, known, None).await },
            );
        poll(&mut begun).unwrap().unwrap()
    };
    let mut files = files(HashSet::new());
    let manifest = loop {
        match next(&mut *files).unwrap().unwrap() {
            BackupPart::Manifest(manifest) => break manifest,
            BackupPart::Read(_) => {}
            BackupPart::Chunk { .. } => panic!("the manifest comes first"),
        }
    };
    assert!(manifest.position > Position::ZERO);
    assert_eq!(core.journal.current().life.id, current);
    assert!(begin().is_err());
    drop(running);
    assert!(begin().is_ok());
    // An upload of the replica is no backup: operators rely on the age of the last one.
    while next(&mut *files).unwrap().is_some() {}
    assert_eq!(core.statistics().last_backup, None);
}

#[test]
fn damage_is_saved_as_it_is_and_reported() {
    let fixture = Fixture::new();
    for _ in 0..60 {
        fixture.append("a", &[4; 4000]).unwrap();
    }
    let segments: Vec<SegmentId> = {
        let segments = fixture.core.journal.segments.read();
        segments.values().map(|segment| segment.life.id).collect()
    };
    let damaged = segments[1];
    let path = format!("journal/{damaged}.seg");
    let mut bytes = fixture.disk.contents(&path).unwrap();
    bytes[20_000] ^= 1;
    fixture.disk.replace(&path, bytes);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    assert!(!manifest.damage.is_empty());
    assert!(
        manifest
            .damage
            .iter()
            .all(|damage| damage.segment == Some(damaged))
    );
    let view = shelf.view(&manifest, None).unwrap();
    let check = view.verify(&small_config(), &mut |_| {}).unwrap();
    assert_eq!(check.bad_files, [], "it is what was saved");
    // A start does not read a segment with an index, so a read finds the damage.
    let restored = Fixture::on(shelf.restore(&manifest, None));
    let found = standing_over_gaps(&restored);
    assert_eq!(
        found,
        (59, 1),
        "the damaged record is named, the others are served"
    );
}

/// A store of 60 records, saved to the shelf, and its second segment.
fn saved_store(shelf: &Shelf) -> (Fixture, SegmentId, Arc<BackupManifest>) {
    let fixture = Fixture::new();
    for _ in 0..60 {
        fixture.append("a", &[4; 4000]).unwrap();
    }
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let second = fixture
        .core
        .journal
        .segments
        .read()
        .values()
        .nth(1)
        .unwrap()
        .life
        .id;
    (fixture, second, manifest)
}

#[test]
fn a_rotten_segment_that_no_earlier_backup_holds_is_saved_as_it_is() {
    let (fixture, rotten, _) = saved_store(&Shelf::default());
    flip(&fixture.disk, &format!("journal/{rotten}.seg"), 20_000);
    let other = Shelf::default();
    let (manifest, _) = other.save(&fixture, || {}).unwrap();
    assert!(manifest.damage.iter().any(|d| d.segment == Some(rotten)));
    let view = other.view(&manifest, None).unwrap();
    let check = view.verify(&small_config(), &mut |_| {}).unwrap();
    assert_eq!(check.bad_files, []);
    let restored = Fixture::on(other.restore(&manifest, None));
    assert_eq!(standing_over_gaps(&restored), (59, 1));
}

#[test]
fn a_segment_that_rotted_after_it_was_saved_is_whole_in_later_backups() {
    let shelf = Shelf::default();
    let (fixture, rotten, _) = saved_store(&shelf);
    // After this restart no record is in memory.
    let fixture = fixture.restart_cleanly();
    shelf.save(&fixture, || {}).unwrap();
    flip(&fixture.disk, &format!("journal/{rotten}.seg"), 20_000);
    assert_eq!(standing_over_gaps(&fixture), (59, 1), "a reader finds it");
    fixture.append("a", b"new").unwrap();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(manifest.damage, [], "nothing is damaged in the backup");
    let restored = reopened(shelf.restore(&manifest, None));
    assert_eq!(standing_over_gaps(&restored), (61, 0));
    let (elsewhere, _) = Shelf::default().save(&fixture, || {}).unwrap();
    assert!(!elsewhere.damage.is_empty());
}

#[test]
fn an_accepted_loss_is_no_damage_of_a_backup() {
    let (fixture, rotten, _) = saved_store(&Shelf::default());
    let (sim, clock) = (fixture.disk.clone(), Arc::clone(&fixture.clock));
    flip(&sim, &format!("journal/{rotten}.seg"), 20_000);
    drop(fixture);
    let disk: Arc<dyn Disk> = Arc::new(sim.clone());
    accept_loss(&disk, &small_config(), clock, "by a test").unwrap();
    let fixture = Fixture::on(sim.clone());
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(manifest.damage, []);
    let target = SimDisk::new();
    let restored = shelf.restore_to(&manifest, None, &target).unwrap();
    assert_eq!(restored.report.damage, []);
    assert_eq!(standing_over_gaps(&Fixture::on(target)), (59, 1));
    // Later damage counts as new.
    flip(&sim, &format!("journal/{rotten}.seg"), 40_000);
    let (manifest, _) = Shelf::default().save(&fixture, || {}).unwrap();
    assert!(!manifest.damage.is_empty());
}

#[test]
fn content_that_was_removed_is_sent_again() {
    let shelf = Shelf::default();
    let (fixture, _, manifest) = saved_store(&shelf);
    let file = manifest.files.iter().max_by_key(|file| file.bytes).unwrap();
    let path = content_path(file.digest);
    flip(&shelf.0, &path, 20_000);
    let check = |manifest: &BackupManifest| {
        let view = shelf.view(manifest, None).unwrap();
        view.verify(&small_config(), &mut |_| {}).unwrap().bad_files
    };
    let (counted_on, sent) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(sent, 0);
    let bad = check(&counted_on);
    assert_eq!(bad.len(), 1);
    assert!(bad[0].1.contains(&path), "{bad:?}");
    shelf.0.remove(&path).unwrap();
    let (again, sent) = shelf.save(&fixture, || {}).unwrap();
    assert_eq!(sent, file.bytes);
    for manifest in [&manifest, &counted_on, &again] {
        assert_eq!(check(manifest), []);
    }
}

#[test]
fn a_restored_store_knows_that_the_newest_segment_was_lost() {
    let fixture = Fixture::new();
    for _ in 0..60 {
        fixture.append("a", &[4; 4000]).unwrap();
    }
    let shelf = Shelf::default();
    let mut newest = None;
    let (manifest, _) = shelf
        .save(&fixture, || {
            if newest.is_none() {
                // Only the segment that takes appends follows it.
                let segments = fixture.core.journal.segments.read();
                let id = segments.values().nth_back(1).unwrap().life.id;
                fixture.disk.remove(&format!("journal/{id}.seg")).unwrap();
                newest = Some(id);
            }
        })
        .unwrap();
    let newest = newest.unwrap();
    assert!(manifest.damage.iter().any(|d| d.segment == Some(newest)));
    // A checkpoint would name the lost segment, too.
    let mut manifest = BackupManifest::clone(&manifest);
    manifest
        .files
        .retain(|file| !file.path.starts_with("checkpoint/"));
    let disk = shelf.restore(&manifest, None);
    let verified = Offline::open(Arc::new(disk.copy())).unwrap();
    let verified = verified.verify(&Control::new(0), &mut |_| {}).unwrap();
    assert_eq!(verified.severity(), Some(Severity::Loss));
    let restored = Fixture::on(disk);
    let told = restored.report.findings.join(" ");
    assert!(told.contains(&format!("{newest}")), "{told}");
}

/// Records served and records named as lost, over all logs.
fn standing_over_gaps(fixture: &Fixture) -> (u64, u64) {
    let mut scan = fixture.scan(Selector::All, ScanStart::First, false);
    let (mut served, mut lost) = (0, 0);
    while let Some(chunk) = next_chunk(&mut scan).unwrap().unwrap() {
        served += chunk
            .batches
            .iter()
            .map(|b| u64::from(b.count))
            .sum::<u64>();
        let quarantined = |gap: &&crate::api::record::Gap| gap.reason == GapReason::Quarantined;
        for gap in chunk.gaps.iter().filter(quarantined) {
            lost += gap.to.unwrap().since(gap.from.unwrap());
        }
    }
    (served, lost)
}

#[test]
fn a_flipped_byte_in_a_backup_is_found_by_verify_and_refused_by_restore() {
    let (fixture, _) = busy_store(5);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    for file in &manifest.files {
        let path = content_path(file.digest);
        let good = shelf.0.contents(&path).unwrap();
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            shelf.0.replace(&path, bad);
            let view = shelf.view(&manifest, None).unwrap();
            let check = view.verify(&small_config(), &mut |_| {}).unwrap();
            assert_eq!(check.bad_files.len(), 1);
            assert_eq!(check.bad_files[0].0, file.path);
            let target = SimDisk::new();
            let refused = shelf.restore_to(&manifest, None, &target);
            assert!(
                matches!(refused, Err(RestoreError::Damaged { path, .. }) if path == file.path)
            );
            let opened = open(&target, &small_config(), &TestClock::new());
            assert!(matches!(opened, Err(OpenError::NotAStore { .. })));
        }
        shelf.0.replace(&path, good[..good.len() - 1].to_vec());
        let view = shelf.view(&manifest, None).unwrap();
        let check = view.verify(&small_config(), &mut |_| {}).unwrap();
        assert_eq!(check.bad_files.len(), 1);
        shelf.0.replace(&path, good);
    }
    let view = shelf.view(&manifest, None).unwrap();
    let check = view.verify(&small_config(), &mut |_| {}).unwrap();
    assert_eq!(check.bad_files, []);
    assert_eq!(
        check.report.unwrap().logs,
        standing(&fixture.core).len() as u64
    );
}

#[test]
fn a_restore_at_a_position_refuses_damage_at_or_below_it() {
    let (fixture, stood) = busy_store(5);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let life = usize::try_from(LIFE_BYTES).unwrap();
    let mut positions: Vec<Position> = stood.iter().map(|(position, _)| *position).collect();
    positions.push(manifest.position);
    // Ends of units differ from positions in a gap between segments.
    positions.extend(positions.clone().iter().map(|position| position.advance(1)));
    positions.retain(|position| *position <= manifest.position);
    let mut good = Vec::new();
    for at in &positions {
        good.push(shelf.view(&manifest, Some(*at)).unwrap());
    }
    let (mut refused, mut spared) = (0, 0);
    for file in &manifest.files {
        if !file.path.starts_with("journal/") {
            continue;
        }
        let path = content_path(file.digest);
        let content = shelf.0.contents(&path).unwrap();
        let mut headless = content.clone();
        headless[..life].fill(0);
        let short = content[..content.len() - 1].to_vec();
        for bad in [None, Some(short), Some(headless)] {
            match bad {
                Some(bad) => shelf.0.replace(&path, bad),
                None => shelf.0.remove(&path).unwrap(),
            }
            for (at, good) in positions.iter().zip(&good) {
                let target = SimDisk::new();
                match shelf.restore_to(&manifest, Some(*at), &target) {
                    Err(RestoreError::Damaged { path, .. }) => {
                        assert_eq!(path, file.path, "at {at}");
                        refused += 1;
                    }
                    Ok(restored) => {
                        assert_eq!(restored.position, good.position(), "{} at {at}", file.path);
                        let shown = good.list("journal").unwrap();
                        let is_needed = shown.iter().any(|name| file.path.ends_with(name));
                        assert!(!is_needed, "{} at {at}", file.path);
                        spared += 1;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            shelf.0.replace(&path, content.clone());
        }
    }
    assert!(
        refused > 50 && spared > 50,
        "{refused} refused, {spared} spared"
    );
}

#[test]
fn a_restore_that_is_cut_off_anywhere_is_no_store() {
    let fixture = Fixture::new();
    for _ in 0..20 {
        fixture.append("a", &[1; 4000]).unwrap();
    }
    let expected = standing(&fixture.core);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let (mut refused, mut whole) = (0, 0);
    for calls in 1.. {
        let target = SimDisk::new();
        target.crash_after(calls);
        let done = shelf.restore_to(&manifest, None, &target).is_ok();
        let crashed = target.is_crashed();
        target.crash(calls);
        match open(&target, &small_config(), &TestClock::new()) {
            Err(OpenError::NotAStore { .. }) => {
                refused += 1;
                // Verification and acceptance of losses refuse it, too.
                let before = target.fingerprint();
                let disk: Arc<dyn Disk> = Arc::new(target.clone());
                let clock = TestClock::new();
                let accepted =
                    crate::engine::repair::accept_loss(&disk, &small_config(), clock, "by a test");
                assert!(matches!(accepted, Err(OpenError::NotAStore { .. })));
                assert_eq!(target.fingerprint(), before);
            }
            Ok((core, report)) if report.created => {
                assert!(!done && standing(&core).is_empty(), "nothing was begun yet");
            }
            Ok((core, _)) => {
                whole += 1;
                assert_eq!(standing(&core), expected, "cut off at call {calls}");
            }
            Err(error) => panic!("{error}"),
        }
        if !crashed {
            assert!(done);
            break;
        }
    }
    assert!(
        refused > 20 && whole > 0,
        "{refused} refused, {whole} whole"
    );
}

#[test]
fn nothing_durable_is_lost_when_the_power_goes_during_a_backup() {
    let mut cut = 0;
    for calls in 1..80 {
        let fixture = Fixture::new();
        for _ in 0..20 {
            fixture.append("a", &[1; 3000]).unwrap();
        }
        let expected = standing(&fixture.core);
        fixture.disk.crash_after(calls);
        let saved = Shelf::default().save(&fixture, || {});
        if !fixture.disk.is_crashed() {
            assert!(saved.is_ok());
            break;
        }
        cut += 1;
        fixture.disk.crash(calls);
        let fixture = fixture.restart();
        assert_eq!(fixture.report.damage, []);
        assert_eq!(standing(&fixture.core), expected);
        let shelf = Shelf::default();
        let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
        let restored = reopened(shelf.restore(&manifest, None));
        assert_eq!(standing(&restored.core), expected);
    }
    assert!(cut > 5, "{cut}");
}

#[test]
fn positions_outside_of_a_backup_and_directories_in_use_are_refused() {
    let (fixture, _) = busy_store(6);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let beyond = Some(manifest.position.advance(1));
    assert!(matches!(
        shelf.view(&manifest, beyond),
        Err(RestoreError::Beyond { .. })
    ));
    let Err(RestoreError::Before { first, .. }) = shelf.view(&manifest, Some(Position::new(8)))
    else {
        panic!("it begins later");
    };
    shelf.view(&manifest, Some(first)).unwrap();
    let below = Position::new(first.get() - 1);
    assert!(matches!(
        shelf.view(&manifest, Some(below)),
        Err(RestoreError::Before { .. })
    ));
    let used = shelf.restore(&manifest, None);
    let again = shelf.restore_to(&manifest, None, &used);
    assert!(matches!(again, Err(RestoreError::NotEmpty { .. })));
}

#[test]
fn a_manifest_with_paths_of_its_own_is_refused() {
    let (fixture, _) = busy_store(7);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    for path in [
        "../journal/0000000000000001.seg",
        "journal/../../x.seg",
        "/etc/passwd",
        "journal/000000000000000A.seg",
        "journal/1.seg",
        "LOCK",
        "BEGUN",
        "RESTORING",
        "pool/0000000000000001.seg",
        "",
        "FORMAT",
    ] {
        let mut manifest = BackupManifest::clone(&manifest);
        let mut file = manifest.files[1].clone();
        file.path = path.to_owned();
        manifest.files.push(file);
        let opened = shelf.view(&manifest, None);
        assert!(matches!(opened, Err(RestoreError::Manifest(_))), "{path:?}");
    }
    let mut large = BackupManifest::clone(&manifest);
    large.files[1].bytes = u64::MAX;
    assert!(matches!(
        shelf.view(&large, None),
        Err(RestoreError::Manifest(_))
    ));
}

#[test]
fn a_backup_of_a_sorted_store_is_whole_while_the_sorter_works() {
    let config = StorageConfig {
        sorter_enabled: true,
        sorter_step_bytes: 1,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    for round in 0..400u32 {
        for log in ["a", "b", "c"] {
            let data = vec![u8::try_from(round % 251).unwrap(); 700];
            fixture.append(log, &data).unwrap();
        }
        if round == 200 {
            for _ in 0..3 {
                fixture.core.sort_in_turn().unwrap();
            }
        }
    }
    let mut trimmed = Box::pin(fixture.core.trim_in_turn(target("b"), Lsn::new(90)));
    fixture.core.turn();
    poll(&mut trimmed).unwrap().unwrap();
    fixture.core.sort_in_turn().unwrap();
    let runs = fixture.core.journal.runs().len();
    assert!(runs > 0);
    let expected = standing(&fixture.core);
    let shelf = Shelf::default();
    let (mut rounds, mut sorted) = (0, 0);
    let (manifest, _) = shelf
        .save(&fixture, || {
            rounds += 1;
            if rounds % 3 == 0 {
                sorted += u64::from(fixture.core.sort_in_turn().unwrap());
            }
        })
        .unwrap();
    assert!(sorted > 0, "something was sorted while it ran");
    assert_eq!(manifest.damage, []);
    // The files that only the backup held are gone by now.
    super::simulation::assert_no_leftovers(&fixture.disk, &fixture.core);
    assert_eq!(standing(&fixture.core), expected);
    let restored = reopened(shelf.restore(&manifest, None));
    assert_eq!(standing(&restored.core), expected);
    let offline = Offline::open(Arc::new(shelf.restore(&manifest, None))).unwrap();
    let report = offline.verify(&Control::new(0), &mut |_| {}).unwrap();
    assert_eq!(report.findings, []);
    // A position behind the runs is restored. One in a run is refused, with the first possible position.
    let first = fixture.core.journal.sorted_end();
    let (manifest, _) = shelf.save(&fixture, || {}).unwrap();
    let before = Position::new(first.get() - 4096);
    let reachable = match shelf.view(&manifest, Some(before)) {
        Err(RestoreError::Before { first: at, .. }) => at,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("what was there is not known any more"),
    };
    assert!(reachable > first);
    let at = reachable.advance(manifest.position.since(reachable) / 2);
    let early = reopened(shelf.restore(&manifest, Some(at)));
    let kept = standing(&early.core);
    for (log, (first, records)) in &expected {
        let (kept_first, kept) = &kept[log];
        assert_eq!(first, kept_first);
        assert!(
            kept.len() <= records.len() && records.starts_with(kept),
            "{log}"
        );
    }
    assert!(kept["a"].1.len() < expected["a"].1.len());
}

#[test]
fn time_of_the_last_whole_backup_survives_a_restart() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    assert_eq!(fixture.core.statistics().last_backup, None);
    // A backup that is cut off does not count.
    let mut cut = begin(&fixture, HashSet::new()).unwrap();
    next(&mut *cut).unwrap();
    drop(cut);
    assert_eq!(fixture.core.statistics().last_backup, None);
    Shelf::default().save(&fixture, || {}).unwrap();
    let ended = fixture.core.statistics().last_backup;
    assert!(ended.is_some());
    let fixture = fixture.restart();
    assert_eq!(fixture.core.statistics().last_backup, ended);
    // A damaged file gives no time, and stops nothing.
    let text = fixture.disk.contents("BACKUP").unwrap();
    for bytes in [&text[..text.len() / 2], b"", b"\xff"] {
        fixture.disk.replace("BACKUP", bytes.to_vec());
        let again = Fixture::on(fixture.disk.copy());
        assert_eq!(again.core.statistics().last_backup, None);
    }
}

/// A disk whose content nobody reads.
fn unreadable(shelf: &Shelf) -> Shelf {
    let empty = Shelf::default();
    for name in shelf.0.list("files").unwrap() {
        let path = format!("files/{name}");
        let size = shelf.0.open(&path).unwrap().size().unwrap();
        empty
            .0
            .replace(&path, vec![0; usize::try_from(size).unwrap()]);
    }
    empty
}

#[test]
fn content_that_is_kept_is_moved_to_its_place_and_not_read_again() {
    let (fixture, _) = busy_store(7);
    let before = standing(&fixture.core);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let view = shelf.view(&manifest, None).unwrap();
    let target = SimDisk::new();
    // Content of an earlier manifest, and a copy that was cut off.
    target.create_directory("standby").unwrap();
    target.replace("standby/00000000000000000000000000000007", vec![1]);
    let first = manifest.files.first().unwrap();
    target.replace(&format!("standby/{}.new", first.digest), vec![1]);
    let mut pieces = 0;
    let mut half = |_| {
        pieces += 1;
        pieces <= 4
    };
    let copy = CopyTail::new(Arc::new(target.clone()), manifest.store_id).unwrap();
    let some = view.keep(&copy, &mut half).unwrap();
    assert!((1..4).contains(&some.fetched), "the caller stopped it");
    let total: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    let missing = view.missing_bytes(&target).unwrap();
    assert_eq!(missing, total - some.bytes);
    let rest = view.keep(&copy, &mut |_| true).unwrap();
    assert_eq!(rest.fetched + some.fetched, manifest.files.len() as u64);
    assert_eq!(view.keep(&copy, &mut |_| true).unwrap().fetched, 0);
    assert_eq!(view.missing_bytes(&target).unwrap(), 0);
    view.forget_others(&target).unwrap();
    drop(copy);
    assert_eq!(target.list("standby").unwrap().len(), manifest.files.len());
    assert_eq!(rest.bytes, total);
    // The bucket would give zeros now.
    refuse_if_used(&target).unwrap();
    take_over(&unreadable(&shelf), &manifest, &target).unwrap();
    assert_eq!(target.list("standby").unwrap(), Vec::<String>::new());
    let restored = Fixture::with(target, small_config());
    assert_eq!(standing(&restored.core), before);
}

/// Takes the files of a replica over, without rows.
fn take_over(
    shelf: &Shelf,
    manifest: &BackupManifest,
    target: &SimDisk,
) -> Result<backup::Restored, RestoreError> {
    let view = shelf.view(manifest, None)?;
    let content = ReplicaContent {
        store_id: manifest.store_id,
        files: Some(&view),
        parts: &mut std::iter::empty(),
        until: None,
    };
    let disk: Arc<dyn Disk> = Arc::new(target.clone());
    content.restore(&disk, &small_config(), RestoredAs::Store, &mut |_| {})
}

#[test]
fn restore_reads_no_content_that_a_stand_by_kept() {
    let (fixture, _) = busy_store(11);
    let before = standing(&fixture.core);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let view = shelf.view(&manifest, None).unwrap();
    for restored_as in [None, Some(RestoredAs::Copy)] {
        let target = SimDisk::new();
        let copy = CopyTail::new(Arc::new(target.clone()), manifest.store_id).unwrap();
        view.keep(&copy, &mut |_| true).unwrap();
        drop(copy);
        // It was changed since it was kept, and has its size.
        for name in target.list("standby").unwrap() {
            let path = format!("standby/{name}");
            let mut content = target.contents(&path).unwrap();
            let middle = content.len() / 2;
            content[middle] ^= 1;
            target.replace(&path, content);
        }
        let disk: Arc<dyn Disk> = Arc::new(target.clone());
        let restored = match restored_as {
            None => view.restore(&disk, &small_config(), &mut |_| {}),
            Some(restored_as) => ReplicaContent {
                store_id: manifest.store_id,
                files: Some(&view),
                parts: &mut std::iter::empty(),
                until: None,
            }
            .restore(&disk, &small_config(), restored_as, &mut |_| {}),
        };
        assert_eq!(restored.unwrap().report.damage, []);
        for file in &manifest.files {
            let content = target.contents(&file.path).unwrap();
            let bytes = usize::try_from(file.bytes).unwrap();
            assert!(
                ContentDigest::of(&content[..bytes]) == file.digest,
                "{}",
                file.path
            );
        }
        assert_eq!(standing(&reopened(target).core), before);
    }
}

#[test]
fn rows_in_place_of_a_signed_segment_must_have_its_bytes() {
    let fixture = Fixture::new();
    for number in 0..50_u8 {
        fixture.append("early", &[number; 2000]).unwrap();
    }
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let mut manifest = BackupManifest::clone(&manifest);
    manifest.signed_by = Some([7; 32]);
    // The rows have the last segment, and the next ones.
    for number in 0..60_u8 {
        fixture.append("late", &[number; 1500]).unwrap();
    }
    let after = standing(&fixture.core);
    let view = shelf.view(&manifest, None).unwrap();
    let groups = groups_of(&fixture);
    let files = manifest.files.iter().map(|file| &file.path);
    let last = files.filter(|path| path.starts_with("journal/")).max();
    let in_last = |part: &JournalPart| Some(&journal_path(part.segment)) == last;
    let end = groups.iter().rposition(in_last).unwrap();
    for (forged, is_taken) in [(None, true), (Some(end), false)] {
        let mut parts = groups.clone();
        if let Some(forged) = forged {
            let mut bytes = parts[forged].bytes.to_vec();
            *bytes.last_mut().unwrap() ^= 1;
            parts[forged].bytes = bytes.into();
        }
        let target = SimDisk::new();
        let disk: Arc<dyn Disk> = Arc::new(target.clone());
        let content = ReplicaContent {
            store_id: manifest.store_id,
            files: Some(&view),
            parts: &mut parts.iter().cloned().map(Ok),
            until: None,
        };
        let taken = content.restore(&disk, &small_config(), RestoredAs::Store, &mut |_| {});
        match taken {
            Ok(_) => assert!(is_taken, "{forged:?}"),
            Err(RestoreError::Damaged { what, .. }) => {
                assert!(!is_taken && what.contains("signed"), "{forged:?}: {what}");
            }
            Err(error) => panic!("{error}"),
        }
        if forged.is_none() {
            assert_eq!(standing(&reopened(target).core), after);
        }
        // A stand-by shows no such rows, either.
        let copied = SimDisk::new();
        let mut copy = CopyTail::new(Arc::new(copied), manifest.store_id).unwrap();
        let added = parts
            .iter()
            .try_for_each(|part| copy.add(part, Some(&view)));
        assert_eq!(added.is_ok(), is_taken, "{forged:?}");
    }
}

#[test]
fn an_old_store_is_set_aside_after_any_cut_and_its_files_are_used_again() {
    let (fixture, _) = busy_store(8);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let before = standing(&fixture.core);
    // The old owner goes on, and nobody has these records.
    for number in 0..50_u8 {
        fixture.append("late", &[number; 900]).unwrap();
    }
    drop(fixture.core.close());
    let term = KeptTerm {
        store_id: manifest.store_id,
        term: 3,
    };
    term.write(&fixture.disk).unwrap();
    // Its frames may have keys that no other node has.
    let keys: Arc<dyn Disk> = Arc::new(fixture.disk.clone());
    keys.create_directory("keys").unwrap();
    keys.sync_directory("").unwrap();
    for name in ["keys/ring", "keys/ring-2"] {
        let file = keys.create(name).unwrap();
        file.write_all_at(b"a ring", 0).unwrap();
        file.sync().unwrap();
    }
    keys.sync_directory("keys").unwrap();
    let mut cuts = 0;
    for nth in 1.. {
        let disk = fixture.disk.copy();
        disk.crash_after(nth);
        let done = backup::set_aside(&disk, Some(&manifest), 3);
        let is_cut = disk.is_crashed();
        if is_cut {
            cuts += 1;
            disk.crash(nth);
            let left = KeptTerm::read(&disk).unwrap();
            if left.is_some() {
                backup::set_aside(&disk, Some(&manifest), 3).unwrap();
            }
        } else {
            disk.crash_after(1 << 40);
            let done = done.unwrap();
            assert!(done.kept > 2 && done.moved > 2, "{done:?}");
        }
        assert_eq!(KeptTerm::read(&disk).unwrap(), None);
        refuse_if_used(&disk).unwrap();
        let kept = disk.list("standby").unwrap().len();
        let view = shelf.view(&manifest, None).unwrap();
        let copy = CopyTail::new(Arc::new(disk.clone()), manifest.store_id).unwrap();
        let fetched = view.keep(&copy, &mut |_| true).unwrap().fetched;
        drop(copy);
        assert_eq!(kept as u64 + fetched, manifest.files.len() as u64);
        assert!(kept > 2, "cut in call {nth}: {kept} files are kept");
        let next = unreadable(&shelf);
        take_over(&next, &manifest, &disk).unwrap();
        let restored = Fixture::with(disk.clone(), small_config());
        assert_eq!(standing(&restored.core), before, "cut in call {nth}");
        let aside = disk.list("diverged/3").unwrap();
        assert!(aside.iter().any(|name| name == "FORMAT"));
        let mut aside = disk.list("diverged/3/keys").unwrap();
        aside.sort_unstable();
        assert_eq!(aside, ["ring", "ring-2"], "cut in call {nth}");
        assert!(disk.list("keys").unwrap().is_empty());
        if !is_cut {
            break;
        }
    }
    assert!(cuts > 20, "{cuts}");
}

#[test]
fn records_that_only_the_old_owner_has_stay_in_the_file_that_is_set_aside() {
    let (fixture, _) = busy_store(9);
    let (manifest, _) = Shelf::default().save(&fixture, || ()).unwrap();
    let mut manifest = (*manifest).clone();
    // The next owner has got a part of this segment.
    let is_segment = |file: &&mut BackupFile| file.path.starts_with("journal/");
    let shorter = manifest.files.iter_mut().rfind(is_segment).unwrap();
    let whole = fixture.disk.contents(&shorter.path).unwrap();
    shorter.bytes -= 200;
    let part = &whole[..usize::try_from(shorter.bytes).unwrap()];
    shorter.digest = ContentDigest::of(part);
    let (path, digest) = (shorter.path.clone(), shorter.digest);
    drop(fixture.core.close());
    let disk = fixture.disk.copy();
    backup::set_aside(&disk, Some(&manifest), 3).unwrap();
    let aside = disk.contents(&format!("diverged/3/{path}"));
    assert_eq!(aside.as_deref(), Some(&whole[..]));
    assert_eq!(disk.contents(&format!("standby/{digest}")), None);
}

#[test]
fn content_of_a_take_over_that_failed_is_kept_for_the_next_one() {
    let (fixture, _) = busy_store(10);
    let before = standing(&fixture.core);
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let target = SimDisk::new();
    let view = shelf.view(&manifest, None).unwrap();
    let copy = CopyTail::new(Arc::new(target.clone()), manifest.store_id).unwrap();
    view.keep(&copy, &mut |_| true).unwrap();
    drop(copy);
    let kept = || target.list("standby").unwrap().len();
    let all = kept();
    // This one comes last. It was not kept yet, and the bucket gives other bytes for it.
    let others = manifest.files.iter().filter(|file| file.path.contains('/'));
    let missing = others.max_by_key(|file| file.path.clone()).unwrap();
    let path = format!("standby/{}", missing.digest);
    target.remove(&path).unwrap();
    for _ in 0..2 {
        let failed = take_over(&unreadable(&shelf), &manifest, &target).unwrap_err();
        assert!(matches!(failed, RestoreError::Damaged { .. }), "{failed}");
        assert_eq!(kept(), all - 1);
        refuse_if_used(&target).unwrap();
    }
    // The bucket need give this one alone.
    let rest = unreadable(&shelf);
    let content = content_path(missing.digest);
    rest.0
        .replace(&content, shelf.0.contents(&content).unwrap());
    take_over(&rest, &manifest, &target).unwrap();
    let taken = Fixture::with(target, small_config());
    assert_eq!(standing(&taken.core), before);
}

#[test]
fn take_over_that_is_cut_off_leaves_no_key_behind() {
    let fixture = Fixture::new();
    fixture.append("a", b"1").unwrap();
    let shelf = Shelf::default();
    let (manifest, _) = shelf.save(&fixture, || ()).unwrap();
    let view = shelf.view(&manifest, None).unwrap();
    let mut put = |disk: &dyn Disk| {
        disk.create_directory("keys")?;
        disk.sync_directory("")?;
        let file = disk.create("keys/ring")?;
        file.write_all_at(b"a ring", 0)?;
        file.sync()?;
        disk.sync_directory("keys")
    };
    let (mut cuts, mut cleared) = (0, 0);
    for nth in 1.. {
        let target = SimDisk::new();
        target.crash_after(nth);
        let disk: Arc<dyn Disk> = Arc::new(target.clone());
        let content = ReplicaContent {
            store_id: manifest.store_id,
            files: Some(&view),
            parts: &mut std::iter::empty(),
            until: None,
        };
        let (config, taken_as) = (small_config(), RestoredAs::Store);
        let done = content.restore_with(&mut put, &disk, &config, taken_as, &mut |_| {});
        let is_cut = target.is_crashed();
        if is_cut {
            cuts += 1;
            target.crash(nth);
        }
        cleared += usize::from(backup::clear_unfinished_take_over(&target).unwrap());
        let is_store = target.contents("FORMAT").is_some();
        let has_keys = target.contents("keys/ring").is_some();
        assert_eq!(is_store, has_keys, "cut in call {nth}");
        if !is_cut {
            done.unwrap();
            assert!(has_keys);
            break;
        }
    }
    assert!(cuts > 20 && cleared > 10, "{cuts} cuts, {cleared} cleared");
}

/// Two contents with one XXH3-128: two words of a stripe change places in the accumulators (`../attacks/coll.py`).
fn collision() -> [Vec<u8>; 2] {
    // The first half of the words of XXH3's secret that belong to the stripes 2 and 9.
    let secret: [(usize, [u8; 4]); 2] =
        [(2, [0xde, 0xd4, 0x6d, 0xe9]), (9, [0x88, 0xd0, 0x65, 0x8b])];
    let words: [u32; 2] = [0x4141_4141, 0x4242_4242];
    [[0, 1], [1, 0]].map(|order| {
        let mut content = b"the same otherwise: ".repeat(60);
        content.truncate(1024);
        for ((stripe, secret), word) in secret.into_iter().zip(order) {
            let at = 64 * stripe;
            content[at..at + 4].copy_from_slice(&secret);
            content[at + 4..at + 8].copy_from_slice(&words[word].to_le_bytes());
        }
        content
    })
}

#[test]
fn two_contents_with_one_xxh3_are_kept_apart_and_come_back() {
    let [one, other] = collision();
    assert_ne!(one, other);
    let old = xxhash_rust::xxh3::xxh3_128(&one);
    assert_eq!(old, xxhash_rust::xxh3::xxh3_128(&other));

    let shelf = Shelf::default();
    let (_, _, manifest) = saved_store(&shelf);
    let paths = ["index/00000000000000f1.idx", "index/00000000000000f2.idx"];
    let with = |digests: [ContentDigest; 2]| {
        let mut manifest = BackupManifest::clone(&manifest);
        for (path, digest) in paths.into_iter().zip(digests) {
            manifest.files.push(BackupFile {
                path: path.to_owned(),
                bytes: 1024,
                digest,
                known: false,
            });
        }
        manifest
    };
    let contents = [&one, &other];
    let digests = contents.map(|content| ContentDigest::of(content));
    for (content, digest) in contents.into_iter().zip(digests) {
        shelf.0.replace(&content_path(digest), content.clone());
    }
    let restored = shelf.restore(&with(digests), None);
    for (content, path) in contents.into_iter().zip(paths) {
        assert_eq!(restored.contents(path).as_ref(), Some(content), "{path}");
    }
    // Each is refused in the place of the other, which XXH3 does not do.
    shelf.0.replace(&content_path(digests[0]), other.clone());
    let refused = shelf.restore_to(&with(digests), None, &SimDisk::new());
    let Err(RestoreError::Damaged { path, what }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(path, paths[0]);
    assert!(what.ends_with("does not match its digest"), "{what}");
    // An old manifest cannot have both.
    let old = ContentDigest::Xxh3(old);
    shelf.0.replace(&content_path(old), other);
    let refused = shelf.view(&with([old, old]), None).err();
    assert!(
        matches!(refused, Some(RestoreError::Manifest(_))),
        "{refused:?}"
    );
}

/// The manifest as a version without BLAKE3 wrote it, with its content under the names of then.
fn as_older_version(shelf: &Shelf, manifest: &BackupManifest) -> BackupManifest {
    let mut older = manifest.clone();
    for file in &mut older.files {
        let content = shelf.0.contents(&content_path(file.digest)).unwrap();
        file.digest = ContentDigest::Xxh3(xxhash_rust::xxh3::xxh3_128(&content));
        shelf.0.replace(&content_path(file.digest), content);
    }
    older
}

#[test]
fn content_of_older_manifests_is_verified_and_not_counted_on() {
    let shelf = Shelf::default();
    let (fixture, _, manifest) = saved_store(&shelf);
    let older_shelf = Shelf::default();
    for name in shelf.0.list("files").unwrap() {
        let path = format!("files/{name}");
        older_shelf
            .0
            .replace(&path, shelf.0.contents(&path).unwrap());
    }
    let older = as_older_version(&older_shelf, &manifest);
    for file in &manifest.files {
        older_shelf.0.remove(&content_path(file.digest)).unwrap();
    }
    let position = older.position;
    let restored = Fixture::with(older_shelf.restore(&older, None), small_config());
    assert_eq!(standing(&restored.core), standing(&fixture.core));
    // The next backup receives everything once, because two contents can have one old digest, and then little.
    let (next, sent) = older_shelf.save(&fixture, || {}).unwrap();
    let bytes: u64 = next.files.iter().map(|file| file.bytes).sum();
    assert_eq!(sent, bytes);
    assert!(next.position >= position);
    let (_, sent) = older_shelf.save(&fixture, || {}).unwrap();
    assert!(sent < bytes, "{sent} of {bytes}");
    older_shelf.restore(&next, None);
    // Damage in old content is found.
    let largest = older.files.iter().max_by_key(|file| file.bytes).unwrap();
    let path = content_path(largest.digest);
    let mut bad = older_shelf.0.contents(&path).unwrap();
    bad[9000] ^= 1;
    older_shelf.0.replace(&path, bad);
    let refused = older_shelf.restore_to(&older, None, &SimDisk::new());
    assert!(
        matches!(refused, Err(RestoreError::Damaged { .. })),
        "{refused:?}"
    );
}
