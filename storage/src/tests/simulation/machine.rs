//! The machine is lost with its disk: a bucket in memory keeps the shipped parts.
//!
//! The bucket takes its time, loses answers and is down at times. The machine goes at any point: inside a call to its
//! disk, before and after each step of the shipper. A new machine then continues from the bucket.

use super::*;
use crate::api::engine::BackupManifest;
use crate::api::error::RestoreError;
use crate::api::record::SyncMode;
use crate::api::replica::{JournalPart, MOST_UNRELEASED, ReplicaBounds, Unreplicated};
use crate::base::ids::RecoveryEpoch;
use crate::disk::Disk;
use crate::tests::backups::Shelf;
use crate::tools::backup::{ReplicaContent, RestoredAs};

/// A bucket in memory, and its shipper.
#[derive(Default)]
pub(crate) struct Bucket {
    store_id: u128,
    /// Parts of the journal that no file of the manifest holds, by position.
    rows: BTreeMap<Position, JournalPart>,
    files: Shelf,
    manifest: Option<Arc<BackupManifest>>,
    /// Where the shipper continues.
    shipped: Position,
}

impl Bucket {
    /// Stores a part. A part that is stored again, because its answer was lost, may have another length.
    fn put(&mut self, part: &JournalPart) {
        let before = self.rows.insert(part.position, part.clone());
        let shared = before.map(|before| before.bytes.iter().zip(&part.bytes).all(|(a, b)| a == b));
        assert!(shared != Some(false), "rows are never changed");
    }

    /// End of the journal in the bucket.
    pub(crate) fn end(&self) -> Position {
        let files = self.manifest.as_ref().map(|manifest| manifest.position);
        let row = self.rows.values().next_back().map(|row| row.end);
        row.max(files).unwrap_or(Position::ZERO)
    }

    /// A machine that continues from the bucket.
    pub(crate) fn restore(
        &self,
        disk: &SimDisk,
        config: &StorageConfig,
        restored_as: RestoredAs,
    ) -> Result<Position, RestoreError> {
        let manifest = self.manifest.as_ref();
        let files = manifest.map(|manifest| self.files.view(manifest, None).unwrap());
        let content = ReplicaContent {
            store_id: self.store_id,
            files: files.as_deref(),
            parts: &mut self.rows.values().cloned().map(Ok),
            until: None,
        };
        let target: Arc<dyn Disk> = Arc::new(disk.clone());
        let restored = content.restore(&target, config, restored_as, &mut |_| {})?;
        let report = &restored.report;
        assert_eq!(report.damage, [], "a replica has no damage: {report:?}");
        Ok(restored.position)
    }
}

/// Outcome of one step of the shipper.
enum Step {
    Shipped,
    /// Nothing is left.
    Done,
    /// The machine is gone.
    Gone,
}

impl Run {
    /// A run with a replica, whose machine may be lost.
    pub(crate) fn replicated(seed: u64) -> Self {
        let mut run = Self::new(seed, Faults::default());
        let modes = [SyncMode::Strict, SyncMode::Replicated, SyncMode::Interval];
        run.config.sync_mode = modes[run.random.random_range(0..3)];
        run.config.replica = Some(ReplicaBounds { max_lag: 1 << 20 });
        run.bucket = Some(Bucket::default());
        run
    }

    fn of_100(&mut self, chance: u32) -> bool {
        self.random.random_range(0..100) < chance
    }

    /// Ships one part, and publishes it unless something happens.
    fn ship_part(&mut self, core: &Arc<Core>, chance: u32) -> Step {
        let most = self.random.random_range(1..60_000);
        let Some(mut bucket) = self.bucket.take() else {
            return Step::Done;
        };
        bucket.store_id = core.store_id;
        let step = match core.read_part(bucket.shipped, most, Reach::Disk) {
            Ok(None) => Step::Done,
            Ok(Some(part)) => {
                assert!(part.position >= bucket.shipped && part.end > part.position);
                if self.of_100(chance) {
                    Step::Gone
                } else {
                    bucket.put(&part);
                    self.counts.parts += 1;
                    // A lost answer: the part is stored, and the shipper stores it again.
                    if !self.of_100(10) {
                        bucket.shipped = part.end;
                        if self.of_100(chance) {
                            self.bucket = Some(bucket);
                            return Step::Gone;
                        }
                        core.publish_replicated(part.end);
                    }
                    Step::Shipped
                }
            }
            Err(error) => {
                assert!(self.disk.is_crashed(), "{error}");
                core.journal.fail("reading for the replica", &error);
                Step::Done
            }
        };
        self.bucket = Some(bucket);
        step
    }

    /// Ships the durable bytes of a start, before the engine serves. Returns whether the machine is still there.
    pub(super) fn ship_the_start(&mut self, core: &Arc<Core>) -> bool {
        loop {
            match self.ship_part(core, 3) {
                Step::Shipped => {}
                Step::Gone => return false,
                Step::Done => break,
            }
        }
        let manifest = self
            .bucket
            .as_ref()
            .and_then(|bucket| bucket.manifest.clone());
        if let Some(manifest) = manifest {
            core.journal.release(manifest.position);
        }
        true
    }

    /// Ships after a turn: everything that a request waits for, or less if the bucket is down.
    pub(super) fn ship(&mut self, core: &Arc<Core>) {
        if self.bucket.is_none() {
            return;
        }
        // Often nothing is shipped that no request waits for.
        let mut after: u32 = self.random.random_range(0..20);
        if self.of_100(50) {
            after = 0;
        }
        loop {
            let waiting = core.journal.replica_progress().waiting;
            if waiting == 0 && (after == 0 || core.journal.failure().is_some()) {
                break;
            }
            after = after.saturating_sub(1);
            if self.of_100(3) {
                core.journal.stop_replication(Unreplicated::BucketDown);
                core.journal.resume_replication();
                assert_eq!(core.journal.replica_progress().waiting, 0);
                break;
            }
            match self.ship_part(core, 1) {
                Step::Shipped => {}
                Step::Done => {
                    let progress = core.journal.replica_progress();
                    assert_eq!(progress.waiting, 0, "all that is durable is shipped");
                    break;
                }
                Step::Gone => {
                    // Nobody gets an answer any more.
                    core.journal
                        .fail("the machine is gone", &std::io::ErrorKind::Other.into());
                    self.lost_machine = true;
                    return;
                }
            }
        }
        if core.journal.failure().is_none() {
            self.upload(core);
            self.read_replicated(core);
        }
    }

    /// Puts files into the bucket and drains the rows that they hold. The machine may go between any two steps.
    fn upload(&mut self, core: &Arc<Core>) {
        let many = core.journal.replica_progress().unreleased > MOST_UNRELEASED / 2;
        if !many && !self.of_100(4) {
            return;
        }
        let Some(bucket) = self.bucket.take() else {
            return;
        };
        let saved = bucket.files.save_of(core, || {});
        let durable = core.journal.durable();
        self.bucket = Some(bucket);
        let Ok((manifest, _)) = saved else {
            assert!(self.disk.is_crashed() || core.journal.failure().is_some());
            return;
        };
        // A run may rest on a trim that the rows lack.
        while core.journal.replica_progress().replicated < durable {
            match self.ship_part(core, 0) {
                Step::Shipped => {}
                Step::Done | Step::Gone => return,
            }
        }
        if self.of_100(20) {
            // The machine goes, or the shipper begins again, before the row that names the manifest.
            return;
        }
        self.counts.uploads += 1;
        let drains = !self.of_100(20);
        let Some(bucket) = &mut self.bucket else {
            return;
        };
        let end = manifest.position;
        bucket.manifest = Some(manifest);
        if drains {
            // On a full disk the last segment may be in the files as far as it was then.
            let last = core.journal.segment_at(end);
            let rest = last.filter(|last| *last.end.read() != Some(end));
            let rest = rest.map(|segment| segment.life.id);
            bucket
                .rows
                .retain(|position, row| *position >= end || Some(row.segment) == rest);
            core.journal.release(end);
        }
    }

    /// Records that a reader of replicated records has seen must survive the machine.
    fn read_replicated(&mut self, core: &Arc<Core>) {
        let log = requests::LOGS[self.random.random_range(0..requests::LOGS.len())];
        let mut request = read_request(log, ReadStart::First);
        request.visibility = Some(Visibility::Replicated);
        let page = match page_either_way(core, &request) {
            Ok(page) => page,
            Err(ReadError::Target(_)) => return,
            Err(_) if self.disk.is_crashed() => return,
            Err(error) => panic!("{log}: {error}"),
        };
        assert_eq!(page.replicated_lsn, Some(page.tail_lsn));
        assert!(page.tail_lsn <= page.durable_lsn && page.first_lsn <= page.tail_lsn);
        self.counts.shown += 1;
        let level = Durability::Replicated;
        self.ledger.revealed(log, page.tail_lsn.get(), level);
    }

    /// Whether the machine goes with the process.
    pub(super) fn loses_machine(&mut self) -> bool {
        self.bucket.is_some() && (self.lost_machine || self.of_100(40))
    }

    /// The machine is gone with its disk. Another one continues from the bucket.
    pub(super) fn lose_machine(&mut self) {
        let Some(bucket) = &mut self.bucket else {
            return;
        };
        self.counts.machines += 1;
        let end = bucket.end();
        self.disk = SimDisk::seeded(self.random.random());
        if end > Position::ZERO {
            let restored = bucket.restore(&self.disk, &self.config, RestoredAs::Store);
            assert_eq!(restored.unwrap(), end, "the end of the rows");
        }
        bucket.shipped = end;
        self.lost_machine = true;
    }

    /// Checks after the loss of a machine that each append of the last epoch is there or named as lost.
    pub(super) fn check_named_losses(&mut self, core: &Arc<Core>, found: &Logs, epoch: u64) {
        if !self.lost_machine || epoch == 0 {
            return;
        }
        let survived = core.survived(RecoveryEpoch::new(epoch));
        // Without an end the epoch goes on, and nothing of it is lost: its clean end was replicated.
        let lost_at = survived.unwrap_or(core.journal.durable());
        let ended = self.lost_at.filter(|_| survived.is_some());
        assert!(
            ended.is_none_or(|end| end == lost_at),
            "{ended:?} is not {lost_at}"
        );
        for (position, log, id, lsns) in &self.acks {
            let there = found.get(*log).filter(|state| state.id == Some(*id));
            match (*position < lost_at, there) {
                (true, Some(state)) => assert!(
                    state.next() >= lsns.end,
                    "{log} {lsns:?} at {position} is not there, and not named as lost"
                ),
                (false, Some(state)) => {
                    self.counts.named_lost += 1;
                    assert!(
                        state.next() <= lsns.start,
                        "{log} {lsns:?} at {position} is there, and named as lost"
                    );
                }
                // Its log was deleted, or its creation is lost.
                (survived, None) => self.counts.named_lost += u64::from(!survived),
            }
        }
    }
}
