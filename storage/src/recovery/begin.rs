//! Begins serving: makes the old tail safe, begins a new segment, and flushes its link.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::history::add_end;
use super::{Begun, OldTail, Recovered, RecoveryReport};
use crate::api::cipher::LogsExist;
use crate::api::config::StorageConfig;
use crate::api::error::OpenError;
use crate::base::bounds::largest_unit;
use crate::base::clock::Clock;
use crate::base::ids::{LogId, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::metrics::Observer;
use crate::disk::directory::LastBegun;
use crate::disk::held_files::Backups;
use crate::disk::{Disk, is_out_of_space};
use crate::format::body::Link;
use crate::format::digest::Secret;
use crate::format::life;
use crate::index::checkpoint;
use crate::index::queue::{IndexQueue, Newest};
use crate::index::{index_id, index_path, unfinished_path};
use crate::journal::Journal;
use crate::journal::committer::{Committer, CommitterSettings, FileTail, Resume};
use crate::journal::expiry::Clocks;
use crate::journal::pool::{Pool, Use};
use crate::journal::run;
use crate::journal::segment::Segment;
use crate::journal::volume::Volume;
use crate::logs::damages;
use crate::logs::damages::Damages;

const DAY_MICROS: i64 = 24 * 3600 * 1_000_000;

impl Recovered {
    /// Begins a new segment with its link, and flushes everything.
    pub(crate) fn begin(
        mut self,
        disk: &Arc<dyn Disk>,
        config: &StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<Begun, OpenError> {
        let fail = || OpenError::io("beginning the journal");
        let started = clock.monotonic();
        let unnamed = self.unnamed_indexes.ids().iter().copied().collect();
        let mut spare = Spare::of(&**disk, self.segments.values(), unnamed);
        let torn_bytes = self.save_tail(disk, &mut spare)?;
        self.clear_sorting(&**disk)
            .map_err(OpenError::io("removing what is sorted"))?;
        let end = self.tail.as_ref().map_or(Position::ZERO, |tail| tail.end);
        self.enter_epoch(end);
        // The new segment holds the key, so the key is durable before any digest.
        let secret = self.secret(&**disk).map_err(fail())?;
        let pool = Arc::new(Pool::new(
            Arc::clone(disk),
            Arc::clone(&clock),
            (self.store.id, secret),
            config.segment_bytes,
            (config.pool_segments, config.reserve_segments),
            self.next_id,
            std::mem::take(&mut self.free),
        ));
        if config.cipher.is_some() || self.has_encrypted() {
            pool.mark_encrypted();
        }
        if config.sorter_enabled || !self.runs.found.is_empty() {
            pool.mark();
        }
        let files = self.segments.values().map(|segment| segment.file_bytes());
        let waiting = self.unused.len() as u64 * config.segment_bytes;
        let runs = self.runs.found.iter().map(|found| &*found.run);
        let volume = Volume::of(&**disk, files.sum::<u64>() + waiting, runs.clone());
        pool.keep_for_sorting(volume.sorting_reserve(config.segment_bytes, runs));
        // If this start is cut off and the file is missing, the next start would count the segment as lost.
        let mut expected: Vec<SegmentId> = self
            .unused
            .extract_if(.., |id| Some(*id) == self.expected)
            .collect();
        match pool.recycle(&self.unused) {
            // The files stay in the journal, where the next start finds them.
            Err(error) if is_out_of_space(&error) => {}
            recycled => recycled.map_err(fail())?,
        }
        // Where writes copy, a pool file may have no room for its new life. Giving it up frees its space.
        let take = || loop {
            match pool.take(Use::Start) {
                Err(error) if is_out_of_space(&error) && pool.give_up()? => {}
                taken => return taken,
            }
        };
        let ready = match take() {
            Err(error) if is_out_of_space(&error) && !expected.is_empty() => {
                pool.recycle(&std::mem::take(&mut expected))
                    .map_err(fail())?;
                take()
            }
            taken => taken,
        };
        let ready = match ready {
            Err(error) => spare.make_room(take, error),
            taken => taken,
        };
        let ready = ready.map_err(fail())?;
        let file = Arc::clone(&ready.file);
        let segment = Arc::new(Segment::begun(ready.life, self.next_base, ready.file));
        let link = self.link(ready.life.size);
        let mut held_back = self.files_in_the_way();
        let mut report = self.report(end, torn_bytes);
        let arrival = self.drafts.arrival;
        let now = clock.now();
        let shows = self.expiry_at_start(now);
        let sorted_end = self.runs.end();
        let finished = self.drafts.finish(sorted_end, &mut report.findings);
        report.tell_damages(&finished.damages);
        if finished.uncertain {
            held_back.push(
                "records are missing, and nothing tells whose they were; stop the daemon and run `wald repair --accept-loss`"
                    .to_owned(),
            );
        }
        let logs = Arc::new(finished.logs);
        if let Some(cipher) = &config.cipher {
            let known = logs.all();
            let names: Vec<_> = known
                .iter()
                .map(|log| (log.id, log.name.as_str()))
                .collect();
            cipher
                .prepare(&names, LogsExist::Already)
                .map_err(OpenError::io("making keys for the logs"))?;
        }
        report.logs = logs.len() as u64;
        report.records = finished.records;
        let mut segments = self.segments;
        segments.insert(segment.base, Arc::clone(&segment));
        let (base, segment_id) = (segment.base, segment.life.id);
        let clocks = Clocks::new(shows, now, clock.monotonic());
        let jumps = clocks.jumps();
        let journal = Journal::new(
            clock,
            observer,
            self.epoch,
            segments,
            Arc::clone(&segment),
            base,
            clocks,
        );
        let journal = Arc::new(journal.with_replica(config.replica));
        if jumps.last != 0 {
            journal.log_jump(jumps.last, started);
        }
        let days_ahead = shows.micros().saturating_sub(now.micros()) / DAY_MICROS;
        if days_ahead > 0 {
            tracing::warn!(
                days_ahead,
                "the clock of retention is ahead of the system's clock: records get times ahead of it and do not expire meanwhile; it follows after 10 minutes if the system's clock shows 2026 or later; `wald reset-clock --yes` resets it at once"
            );
        }
        let runs = self.runs.found.into_iter().map(|found| found.run);
        journal.enter_runs(runs.collect());
        let resume = Resume {
            tail: FileTail::new(Arc::clone(&pool), segment, file, config.cipher.clone()),
            link,
            next_log_counter: self.next_log_counter,
            arrival,
        };
        let lists_losses = self.progress.covered.is_some() || finished.damages.is_empty();
        // A checkpoint need not wait until the journal leaves a segment, which a full disk may prevent.
        let tail = self.tail.as_ref().filter(|tail| tail.path.is_some());
        self.progress.newest = tail.map(|tail| Newest {
            id: tail.id,
            before: tail.before,
            end: tail.end,
            chain: tail.chain,
            next_log_counter: self.next_log_counter,
            arrival,
            expiry: shows,
        });
        let indexing = Arc::new(IndexQueue::new(self.progress, config.replica.is_some()));
        let mut committer = Committer::new(
            Arc::clone(&journal),
            Arc::clone(&logs),
            Arc::clone(&indexing) as _,
            CommitterSettings {
                auto_create: config.auto_create,
                largest_unit: largest_unit(config.segment_bytes),
                sync_mode: config.sync_mode,
                buffer_bytes: config.buffer_bytes,
                producer_window: config.producer_window,
                max_producers: config.max_producers_per_log,
                max_cursors: config.max_cursors_per_log,
                bounds: config.bounds(),
                uncertain: finished.uncertain,
                cipher: config.cipher.clone(),
            },
            resume,
        );
        let begun = match committer.begin() {
            Err(error) => spare.make_room(|| committer.begin(), error),
            begun => begun,
        };
        if let Err(error) = begun {
            // The next start finds more room.
            if is_out_of_space(&error) {
                spare.give_up_all();
            }
            return Err(fail()(error));
        }
        logs.forget_deleted(journal.sorted_end());
        match pool.recycle(&expected) {
            Err(error) if is_out_of_space(&error) => {}
            recycled => recycled.map_err(fail())?,
        }
        // This comes first: on a full disk the following steps may need the space.
        if let Some(tail) = &self.tail
            && let Some(path) = &tail.path
        {
            match give_back(&**disk, tail, path) {
                // A file system that copies on write may need space for this change.
                Err(error) if is_out_of_space(&error) => {}
                Err(error) => return Err(fail()(error)),
                Ok(bytes) => {
                    if let Some(old) = journal.segment_at(tail.base) {
                        old.cut(bytes);
                    }
                }
            }
        }
        let begun = LastBegun {
            epoch: self.epoch,
            segment: segment_id,
            base,
        };
        let written = match begun.write(&**disk) {
            Err(error) => spare.make_room(|| begun.write(&**disk), error),
            written => written,
        };
        written.map_err(fail())?;
        if lists_losses || set_checkpoints_aside(disk, &indexing) {
            // No promise depends on an index.
            if let Err(error) = self.unnamed_indexes.name() {
                tracing::warn!(%error, "indexes that this start wrote cannot be named; the next start writes them again");
            }
        }
        let quarantine_bytes = damages::bytes(&**disk).map_err(fail())?;
        report.times.begin = journal.clock.monotonic().duration_since(started);
        let damages = Damages::new(finished.damages, finished.accepted);
        let history = self.history;
        Ok(Begun {
            journal,
            logs,
            damages,
            history,
            pool,
            indexes: self.indexes,
            indexing,
            committer,
            quarantine_bytes,
            left: self.left,
            held_back,
            secret,
            report,
        })
    }

    /// Files that stop checkpoints and the sorter. Both could drop the only trace of a loss that later starts have.
    fn files_in_the_way(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (id, _) in &self.runs.bad {
            found.push(format!(
                "{} cannot be used; put it back from a copy, or stop the daemon and run `wald repair --accept-loss`",
                run::path(*id)
            ));
        }
        for segment in self
            .segments
            .values()
            .filter(|segment| segment.is_misnamed())
        {
            found.push(format!(
                "{} holds segment {}; stop the daemon and rename the file to {}",
                segment.path(),
                segment.life.id,
                life::journal_path(segment.life.id)
            ));
        }
        found
    }

    /// The key of the store's digests. A store without one gets a new key: a new store, or one of an older version.
    fn secret(&mut self, disk: &dyn Disk) -> std::io::Result<Secret> {
        let segments = self.segments.values();
        match self.key.secret(disk, segments, self.store.id)? {
            Some(secret) => Ok(secret),
            None => Secret::draw(disk),
        }
    }

    /// The time from which the expiry clock continues. If no version with that clock wrote the store, it is the
    /// newest arrival time, unless that lies in the future.
    fn expiry_at_start(&self, now: Timestamp) -> Timestamp {
        let newest = self.drafts.arrival;
        let nothing_arrived = newest == Timestamp::default();
        let first = if nothing_arrived {
            now
        } else {
            newest.min(now)
        };
        self.expiry.unwrap_or(first)
    }

    /// After an unclean end the epoch rises above all known epochs.
    pub(super) fn enter_epoch(&mut self, end: Position) {
        self.clean &= self.lost_starts == 0 && self.highest_epoch <= self.epoch;
        let first = RecoveryEpoch::first_of(self.store.id);
        if self.store.created {
            // Records of lower epochs belong to other stores.
            add_end(&mut self.history, first.before(), Position::ZERO);
            self.epoch = first;
        } else if !self.clean {
            let mut ended = self.epoch.max(self.highest_epoch).plus(self.lost_starts);
            if self.last.is_none() && self.last_begun.is_none() && self.checkpointed.is_none() {
                // The start that made the store was cut off, or all of its files are lost.
                ended = ended.max(first);
            }
            add_end(&mut self.history, ended, end);
            self.epoch = ended.next();
        } else {
            return;
        }
        self.next_log_counter = LogId::first_counter(self.store.id, self.epoch);
    }

    /// Makes the content of the old tail durable, and keeps the bytes that were cut off. A clean seal is
    /// flushed, too: it may be only in the cache.
    fn save_tail(&mut self, disk: &Arc<dyn Disk>, spare: &mut Spare<'_>) -> Result<u64, OpenError> {
        let Some(tail) = self.tail.as_mut() else {
            return Ok(0);
        };
        let Some(path) = &tail.path else {
            // A run is on the device.
            return Ok(0);
        };
        let file = disk
            .open(path)
            .map_err(OpenError::io("opening the old tail"))?;
        if let Some((offset, bytes)) = tail.copy.take() {
            // The write is in place: these sectors keep the bytes that every reader has seen. A power cut in
            // the middle therefore changes nothing, and a full disk has room.
            let write = || file.write_all_at(&bytes, offset);
            let written = match write() {
                Err(error) => spare.make_room(write, error),
                written => written,
            };
            written.map_err(OpenError::io("writing the old tail again"))?;
        }
        file.sync()
            .map_err(OpenError::io("flushing the old tail"))?;
        if tail.debris.is_empty() {
            return Ok(0);
        }
        let kept = damages::keep_debris(&**disk, tail.id, tail.end.since(tail.base), &tail.debris);
        match kept {
            Ok(_) => {}
            // Starting matters more than keeping bytes that were never acknowledged.
            Err(error) if is_out_of_space(&error) => {
                self.notes
                    .push("no space to keep what was cut off the tail".to_owned());
            }
            Err(error) => return Err(OpenError::io("keeping what was cut off the tail")(error)),
        }
        Ok(tail.torn)
    }

    pub(super) fn link(&mut self, segment_bytes: u64) -> Link {
        let tail = self.tail.as_ref();
        let closings = tail
            .filter(|_| !self.drafts.is_uncertain())
            .and_then(|tail| {
                let closings = self.drafts.closings(tail.id);
                let bytes: usize = closings
                    .iter()
                    .map(|c| 32 + c.name.as_ref().map_or(0, String::len))
                    .sum();
                (bytes as u64 <= segment_bytes / 8).then_some(closings)
            });
        Link {
            predecessor: tail.map(|tail| tail.id),
            second: tail.and_then(|tail| tail.before),
            predecessor_end: tail.map_or(Position::ZERO, |tail| tail.end),
            predecessor_chain: tail.map_or(0, |tail| tail.chain),
            recovery_epoch: self.epoch,
            next_log_counter: self.next_log_counter,
            closings: if tail.is_some() {
                closings
            } else {
                Some(Vec::new())
            },
            lost_before: self.lost_before,
            accepted: self.accepting.take().map(|a| a.within(segment_bytes / 8)),
            // The committer replaces it with the time of its clock.
            expiry: self.expiry,
        }
    }

    pub(super) fn report(&self, end: Position, torn_bytes: u64) -> RecoveryReport {
        RecoveryReport {
            recovery_epoch: self.epoch,
            clean: self.clean,
            created: self.store.created,
            logs: 0,
            records: 0,
            segments: self.segments.len() as u64,
            end,
            duration: Duration::ZERO,
            times: self.times,
            torn_bytes,
            damage: Vec::new(),
            accepted: Vec::new(),
            findings: self.findings.iter().chain(&self.notes).cloned().collect(),
        }
    }
}

/// Files that the store can do without. A start on a full disk removes them one after the other, rather than refuse
/// to serve. Each start needs a file and some space, and on some file systems a new file needs more than its size.
struct Spare<'a> {
    disk: &'a dyn Disk,
    /// Segments whose index may be removed, the newest first.
    indexed: Vec<SegmentId>,
    /// Segments whose index this start wrote.
    unnamed: Vec<SegmentId>,
    /// Paths, removed from the end; listed before the first removal.
    paths: Option<Vec<String>>,
    /// Number of files to remove next.
    step: usize,
}

impl<'a> Spare<'a> {
    fn of<'s>(
        disk: &'a dyn Disk,
        segments: impl DoubleEndedIterator<Item = &'s Arc<Segment>>,
        unnamed: Vec<SegmentId>,
    ) -> Self {
        let indexed = segments
            .rev()
            // The index of a damaged segment may have facts that the segment lacks.
            .filter(|segment| segment.holes.read().is_empty())
            .map(|segment| segment.life.id)
            .collect();
        Self {
            disk,
            indexed,
            unnamed,
            paths: None,
            step: 1,
        }
    }

    fn list(&self) -> std::io::Result<Vec<String>> {
        let indexes: HashSet<SegmentId> = self
            .disk
            .list("index")?
            .iter()
            .filter_map(|name| index_id(name))
            .collect();
        let indexed = self.indexed.iter().filter(|id| indexes.contains(id));
        let unnamed = self.unnamed.iter().map(|id| unfinished_path(*id));
        let mut paths: Vec<String> = unnamed.collect();
        paths.extend(indexed.map(|id| index_path(*id)));
        // This start may have begun with the newest checkpoint.
        let checkpoints = checkpoint::list(self.disk)?;
        let older = checkpoints.iter().rev().skip(1);
        paths.extend(older.map(|id| checkpoint::path(*id)));
        paths.extend(damages::debris_paths(self.disk)?.into_iter().rev());
        Ok(paths)
    }

    /// After a lack of space, repeats `work` until it succeeds, or no file is left to remove.
    ///
    /// # Errors
    /// Any other error is returned unchanged.
    fn make_room<T>(
        &mut self,
        mut work: impl FnMut() -> std::io::Result<T>,
        error: std::io::Error,
    ) -> std::io::Result<T> {
        if !is_out_of_space(&error) {
            return Err(error);
        }
        let mut paths = match self.paths.take() {
            Some(paths) => paths,
            None => self.list()?,
        };
        let mut result = Err(error);
        while matches!(&result, Err(error) if is_out_of_space(error)) && !paths.is_empty() {
            let rest = paths.len().saturating_sub(self.step);
            let given_up = paths.split_off(rest);
            self.step *= 2;
            for path in &given_up {
                self.disk.remove(path)?;
            }
            for directory in ["quarantine", "checkpoint", "index"] {
                self.disk.sync_directory(directory)?;
            }
            tracing::warn!(
                files = given_up.len(),
                "the disk is full: gave up files that nothing rests on, to be able to start"
            );
            result = work();
        }
        self.paths = Some(paths);
        result
    }

    /// Removes all remaining files, as far as possible.
    fn give_up_all(&mut self) {
        let paths = self.paths.take().map_or_else(|| self.list(), Ok);
        for path in paths.unwrap_or_default() {
            let _gone = self.disk.remove(&path);
        }
        self.paths = Some(Vec::new());
    }
}

/// Sets checkpoints aside after a start that found damage and did not begin with one. They may not list the
/// lost records, and a later start could begin with one when all indexes are there again. Returns whether all
/// are set aside.
fn set_checkpoints_aside(disk: &Arc<dyn Disk>, indexing: &IndexQueue) -> bool {
    // No backup of a closed store runs.
    let backups = Backups::new(Arc::clone(disk));
    if let Err(error) = checkpoint::set_aside(&**disk, &backups) {
        tracing::warn!(%error, "checkpoints that do not list all lost records cannot be set aside; the next start reads the same segments again");
        // No start begins with a checkpoint while an index is missing.
        let mut progress = indexing.hold();
        progress.unwritten.clear();
        progress.damaged.clear();
        return false;
    }
    true
}

/// Gives the unused end of the old tail back to the file system. Returns the new size.
fn give_back(disk: &dyn Disk, tail: &OldTail, path: &str) -> std::io::Result<u64> {
    let file = disk.open(path)?;
    let (used, size) = (
        tail.end.since(tail.base).next_multiple_of(4096),
        file.size()?,
    );
    if used < size {
        file.set_size(used)?;
    }
    Ok(used.min(size))
}
