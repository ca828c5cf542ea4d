//! Copies of a store that another node writes: readers see all replicated records, in each state of the copy.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::backups::Shelf;
use super::*;
use crate::api::engine::{BackupManifest, ReadLogs as _};
use crate::api::error::RestoreError;
use crate::api::replica::ReplicaBounds;
use crate::api::ticket::block_on;
use crate::base::ids::{Position, RecoveryEpoch};
use crate::disk::Disk as _;
use crate::engine::copy::{CopyReader, StoreCopy};
use crate::tools::backup::{BackupView, CopyTail};

fn config() -> StorageConfig {
    StorageConfig {
        replica: Some(ReplicaBounds { max_lag: 1 << 24 }),
        sorter_step_bytes: 1,
        ..small_config()
    }
}

/// A node that copies the store of a fixture.
struct StandBy {
    disk: SimDisk,
    clock: Arc<TestClock>,
    tail: CopyTail,
    reader: Arc<CopyReader>,
    manifest: Option<Arc<BackupManifest>>,
    position: Position,
}

impl StandBy {
    fn of(owner: &Fixture) -> Self {
        let disk = SimDisk::new();
        let clock = Arc::clone(&owner.clock);
        let tail = CopyTail::new(Arc::new(disk.clone()), owner.core.store_id).unwrap();
        let seconds = Duration::from_secs(10);
        let reader = CopyReader::new(1, seconds, Arc::clone(&clock) as _).unwrap();
        Self {
            disk,
            clock,
            tail,
            reader,
            manifest: None,
            position: Position::ZERO,
        }
    }

    /// Takes the newest files, if there are any, and the parts behind. Shows them.
    fn follow(&mut self, owner: &Fixture, shelf: Option<&Shelf>) {
        let mut files = None;
        if let Some(shelf) = shelf {
            let (manifest, _) = shelf.save(owner, || ()).unwrap();
            owner.ship();
            let view = shelf.view(&manifest, None).unwrap();
            view.keep(&self.tail, &mut |_| true).unwrap();
            if self.tail.end() == Position::ZERO {
                self.position = manifest.position;
            }
            self.manifest = Some(manifest);
            files = Some(view);
        }
        while let Some(part) = owner
            .core
            .read_part(self.position, 3000, Reach::Disk)
            .unwrap()
        {
            self.position = part.end;
            self.tail.add(&part, files.as_deref()).unwrap();
        }
        self.show();
        if let (Some(files), Some(manifest)) = (files, &self.manifest) {
            files.forget_others(&self.disk).unwrap();
            self.tail.forget_below(manifest.position).unwrap();
            owner.core.journal.release(manifest.position);
        }
    }

    fn show(&self) {
        let manifest = self.manifest.as_deref();
        let disk = Arc::new(self.disk.clone());
        let view = BackupView::of_copy(disk, manifest, &self.tail, &config()).unwrap();
        let copy = StoreCopy::open(view, config(), Arc::clone(&self.clock) as _).unwrap();
        self.reader.show(copy);
    }

    /// Each record of a log, with its lsn.
    fn records(&self, log: &str) -> Result<Vec<(u64, Vec<u8>)>, ReadError> {
        let mut found = Vec::new();
        let mut start = ReadStart::First;
        loop {
            let page = block_on(self.reader.read(read_request(log, start)))?;
            for batch in &page.batches {
                let lsns = batch.first_lsn.get()..;
                found.extend(lsns.zip(payloads(batch)));
            }
            if page.next_lsn >= page.tail_lsn {
                assert_eq!(page.replicated_lsn, Some(page.tail_lsn));
                return Ok(found);
            }
            start = ReadStart::Lsn(page.next_lsn);
        }
    }
}

/// The records of a log at the owner.
fn at_owner(owner: &Fixture, log: &str) -> Result<Vec<(u64, Vec<u8>)>, ReadError> {
    let mut found = Vec::new();
    let mut start = ReadStart::First;
    loop {
        let page = owner.read_from(log, start)?;
        for batch in &page.batches {
            let lsns = batch.first_lsn.get()..;
            found.extend(lsns.zip(payloads(batch)));
        }
        if page.next_lsn >= page.tail_lsn {
            return Ok(found);
        }
        start = ReadStart::Lsn(page.next_lsn);
    }
}

/// The answer of a request that is settled.
fn settled_now<T>(awaited: &mut (impl Future<Output = T> + Unpin)) -> T {
    let mut context = Context::from_waker(Waker::noop());
    match Pin::new(awaited).poll(&mut context) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("it is settled"),
    }
}

/// Chunks of a scan until it has reached the end once more.
fn taken(scan: &mut Box<dyn Scan>) -> Vec<ScanChunk> {
    let mut chunks = Vec::new();
    loop {
        let chunk = block_on(scan.next()).unwrap().unwrap();
        let is_end = chunk.caught_up;
        chunks.push(chunk);
        if is_end {
            return chunks;
        }
    }
}

fn scan_request(selector: Selector, start: ScanStart, follow: bool) -> ScanRequest {
    ScanRequest {
        selector,
        start,
        until_lsn: None,
        max_records: 0,
        follow,
        visibility: None,
        chunk_bytes: 4 << 10,
    }
}

#[test]
fn a_copy_has_the_records_of_its_owner_after_any_work() {
    let (mut sorted, mut later_epochs) = (0, 0);
    for seed in 0..6 {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let mut owner = Fixture::with(SimDisk::new(), config());
        owner.append("all", b"first").unwrap();
        owner.ship();
        let shelf = Shelf::default();
        let mut copy = StandBy::of(&owner);
        copy.follow(&owner, None);
        let whole = scan_request(one("all"), ScanStart::First, true);
        let mut follower = block_on(copy.reader.scan(whole)).unwrap();
        let mut followed = Vec::new();
        for round in 0..40_u32 {
            for _ in 0..random.random_range(1..8) {
                let data = vec![u8::try_from(round).unwrap(); random.random_range(1..9_000)];
                match random.random_range(0..9) {
                    0 if owner.core.logs.by_name("b").is_some() => {
                        let page = owner.read_from("b", ReadStart::First).unwrap();
                        let half = page.first_lsn.get().midpoint(page.tail_lsn.get());
                        let mut trims = owner.core.trim_in_turn(target("b"), Lsn::new(half));
                        owner.core.turn();
                        owner.ship();
                        settled_now(&mut trims).unwrap();
                    }
                    1 if owner.core.logs.by_name("c").is_some() => {
                        let mut deletes = owner.core.delete_in_turn(target("c"));
                        owner.core.turn();
                        owner.ship();
                        settled_now(&mut deletes).unwrap();
                    }
                    2 => {
                        let both = batch(&[("all", &[&data]), ("b", &[&data, b"two"])]);
                        owner.append_batch(both).unwrap();
                    }
                    3 if round % 5 == 4 => {
                        // The owner ends, and another begins with everything that is replicated.
                        owner.ship();
                        owner = match random.random_bool(0.5) {
                            true => owner.restart(),
                            false => owner.restart_cleanly(),
                        };
                        owner.ship();
                    }
                    log => {
                        owner.append(["all", "b", "c"][log % 3], &data).unwrap();
                    }
                }
            }
            owner.ship();
            while owner.core.sort_in_turn().unwrap() {
                sorted += 1;
            }
            let has_files = random.random_range(0..3) == 0;
            copy.follow(&owner, has_files.then_some(&shelf));
            assert_eq!(
                copy.reader.epoch().unwrap(),
                owner.core.journal.recovery_epoch
            );
            for log in ["all", "b", "c"] {
                let (here, there) = (copy.records(log), at_owner(&owner, log));
                match (here, there) {
                    (Ok(here), Ok(there)) => assert_eq!(here, there, "{log}"),
                    (Err(_), Err(_)) => {}
                    (here, there) => panic!("{log}: {here:?} here, {there:?} there"),
                }
                let mine = block_on(copy.reader.stat(target(log), None, None));
                let theirs = owner.core.stat(&target(log), None, None);
                let mine = mine.map(|stat| stat.info).ok();
                let theirs = theirs.map(|stat| stat.info).ok();
                assert_eq!(mine, theirs);
            }
            let there = at_owner(&owner, "all").unwrap();
            while followed.len() < there.len() {
                for chunk in taken(&mut follower) {
                    assert_eq!(chunk.gaps, []);
                    for batch in &chunk.batches {
                        let lsns = batch.first_lsn.get()..;
                        followed.extend(lsns.zip(payloads(batch)));
                    }
                }
            }
            assert_eq!(followed, there);
        }
        let first = RecoveryEpoch::first_of(owner.core.store_id);
        later_epochs += u32::from(copy.reader.epoch().unwrap() > first);
    }
    assert!(
        sorted > 20 && later_epochs > 2,
        "{sorted} steps of the sorter, {later_epochs} stores with later epochs"
    );
}

/// An owner with some segments, and a copy with files and a tail.
fn two() -> (Fixture, Shelf, StandBy) {
    let owner = Fixture::with(SimDisk::new(), config());
    for number in 0..40_u8 {
        let data = vec![number; 5_000];
        owner
            .append(["a", "b"][usize::from(number % 2)], &data)
            .unwrap();
    }
    owner.ship();
    let (shelf, mut copy) = (Shelf::default(), StandBy::of(&owner));
    copy.follow(&owner, None);
    copy.follow(&owner, Some(&shelf));
    owner.append("a", b"newest").unwrap();
    owner.ship();
    copy.follow(&owner, None);
    (owner, shelf, copy)
}

#[test]
fn a_cursor_of_a_copy_goes_on_at_the_owner_and_the_other_way_round() {
    let (owner, _, copy) = two();
    for selector in [one("a"), Selector::All] {
        let begin = || scan_request(selector.clone(), ScanStart::First, false);
        let mut here = block_on(copy.reader.scan(begin())).unwrap();
        let mut there = owner.begin(begin()).unwrap();
        loop {
            let mine = block_on(here.next()).unwrap();
            let theirs = next_chunk(&mut there).unwrap().unwrap();
            assert_eq!(mine, theirs);
            let Some(chunk) = mine else { break };
            let resumes = scan_request(selector.clone(), ScanStart::Cursor(chunk.cursor), false);
            let mut swapped = block_on(copy.reader.scan(resumes.clone())).unwrap();
            let mut owners = owner.begin(resumes).unwrap();
            let next = block_on(swapped.next()).unwrap();
            assert_eq!(next, next_chunk(&mut owners).unwrap().unwrap());
        }
    }
}

#[test]
fn a_scan_goes_on_in_the_newer_copy_when_its_files_are_gone() {
    let (owner, shelf, mut copy) = two();
    let whole = scan_request(one("a"), ScanStart::First, false);
    let mut scan = block_on(copy.reader.scan(whole)).unwrap();
    let mut found = Vec::new();
    let mut rounds = 0;
    while let Some(chunk) = block_on(scan.next()).unwrap() {
        assert_eq!(chunk.gaps, []);
        let batches = chunk.batches.iter();
        found.extend(batches.flat_map(|batch| batch.first_lsn.get()..batch.next_lsn().get()));
        if rounds < 5 {
            // Runs replace the files that this scan reads.
            while owner.core.sort_in_turn().unwrap() {}
            for _ in 0..15 {
                owner.append("a", &[7; 5_000]).unwrap();
            }
            owner.ship();
            let kept = copy.disk.list("standby").unwrap();
            copy.follow(&owner, Some(&shelf));
            assert_ne!(copy.disk.list("standby").unwrap(), kept);
            rounds += 1;
        }
    }
    // The tail of the moment at which it began.
    assert_eq!(found, (0..21).collect::<Vec<u64>>());
    assert_eq!(rounds, 5);
}

#[test]
fn a_reader_without_a_new_copy_is_refused() {
    let (owner, shelf, mut copy) = two();
    assert_eq!(copy.records("a").unwrap().len(), 21);
    let mut lower = read_request("a", ReadStart::First);
    lower.visibility = Some(Visibility::Durable);
    let refused = block_on(copy.reader.read(lower)).unwrap_err();
    assert!(matches!(
        refused,
        ReadError::NotSupported(Visibility::Durable)
    ));
    // Nobody knows whether there is anything newer.
    owner.clock.advance(11_000_000);
    let refused = copy.records("a").unwrap_err();
    assert!(matches!(refused, ReadError::LeaseLost));
    copy.reader.note_newest();
    assert_eq!(copy.records("a").unwrap().len(), 21);
    let follows = scan_request(one("a"), ScanStart::TailOffset(0), true);
    let mut scan = block_on(copy.reader.scan(follows)).unwrap();
    assert!(block_on(scan.next()).unwrap().unwrap().caught_up);
    copy.reader.hide();
    let ended = block_on(scan.next()).unwrap_err();
    assert!(matches!(ended, ReadError::LeaseLost));
    let refused = copy.records("a").unwrap_err();
    assert!(matches!(refused, ReadError::LeaseLost));
    copy.follow(&owner, Some(&shelf));
    assert_eq!(copy.records("a").unwrap().len(), 21);
}

#[test]
fn a_tail_with_a_missing_part_is_refused() {
    let (owner, _, mut copy) = two();
    for _ in 0..2 {
        owner.append("a", &[1; 3_000]).unwrap();
    }
    let first = owner.core.read_part(copy.position, 1, Reach::Disk);
    let skipped = first.unwrap().unwrap().end;
    let part = owner
        .core
        .read_part(skipped, 1, Reach::Disk)
        .unwrap()
        .unwrap();
    let refused = copy.tail.add(&part, None).unwrap_err();
    assert!(matches!(refused, RestoreError::Damaged { .. }), "{refused}");
}
