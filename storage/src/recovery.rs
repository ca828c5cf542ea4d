//! Opening a store: what the segments say, where the journal ends, where it goes on.
//!
//! Nothing is ever written into an old tail. A start finds out where it ends, then
//! begins a new segment at a position beyond any the old one can have given out, whose
//! link says so. Until that link is flushed the directory means what it meant before,
//! so a crash at any step of a start leads to the same result.

mod drafts;
mod walk;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use self::drafts::Drafts;
use self::walk::{Bytes, Item, Walked};
use crate::clock::Clock;
use crate::config::{OnDamage, StorageConfig};
use crate::directory::{LastBegun, Store};
use crate::disk::{Disk, DiskFile, is_out_of_space};
use crate::error::OpenError;
use crate::ids::{LogId, Lsn, Position, RecoveryEpoch, SegmentId};
use crate::journal::body::{Closing, Link, Seal};
use crate::journal::committer::{Committer, Resume, Settings};
use crate::journal::frame::{self, Header, Kind};
use crate::journal::pool::Pool;
use crate::journal::segment::{self, BadLife, Hole, Life, Segment, journal_path};
use crate::journal::{Journal, LIFE_BYTES, largest_unit};
use crate::local::Logs;
use crate::metrics::{ChecksumSite, Observer};
use crate::quarantine::{self, Damage, Damages};
use crate::record::{Gap, GapReason};

/// No segment is larger: offsets in one are kept in 32 bits.
const LARGEST_SEGMENT: u64 = 1 << 32;

/// What a start found.
#[derive(Debug, Clone)]
pub struct RecoveryReport {
    /// Unclean starts so far, this one included.
    pub recovery_epoch: RecoveryEpoch,
    /// Whether the run before had shut down cleanly.
    pub clean: bool,
    /// Whether the store was made just now.
    pub created: bool,
    /// Logs that exist.
    pub logs: u64,
    /// Records found good.
    pub records: u64,
    /// Segments that hold frames.
    pub segments: u64,
    /// Where the journal ended.
    pub end: Position,
    /// How long it took.
    pub duration: Duration,
    /// Bytes cut off the tail because they were never proven flushed.
    pub torn_bytes: u64,
    /// Records that were durable once and are not readable now.
    pub damage: Vec<Gap>,
    /// Whatever else people should know, in sentences.
    pub findings: Vec<String>,
}

/// A segment file with frames in it. Its bytes are loaded when it is walked: one
/// segment at a time is in memory.
struct Used {
    life: Life,
    path: String,
    base: Position,
    /// Its link, if that is good, or as much as the next group tells of it.
    link: Option<Link>,
}

/// The last segment, when all is read.
struct Tail {
    id: SegmentId,
    /// The segment before it.
    before: Option<SegmentId>,
    path: String,
    base: Position,
    end: Position,
    chain: u32,
    debris: Vec<u8>,
    /// Its bytes, where the device cannot be read around the cache: they are written to
    /// a new file then, since nothing else makes sure that the device has them.
    copy: Option<Vec<u8>>,
}

/// What the files say.
pub(crate) struct Recovered {
    store: Store,
    clean: bool,
    epoch: RecoveryEpoch,
    next_log_counter: u64,
    drafts: Drafts,
    segments: BTreeMap<Position, Arc<Segment>>,
    tail: Option<Tail>,
    history: Vec<(RecoveryEpoch, Position)>,
    /// Files in `journal/` without frames, to be used again.
    unused: Vec<SegmentId>,
    /// Files in `journal/` that hold something which cannot be used.
    unreadable: Vec<SegmentId>,
    /// Files in `pool/`.
    free: Vec<SegmentId>,
    next_id: SegmentId,
    /// The highest epoch that any log id tells of.
    highest_epoch: RecoveryEpoch,
    /// What the start before says it began.
    last_begun: Option<LastBegun>,
    /// Starts that may have raised the epoch without a trace that is left.
    lost_starts: u64,
    /// Beyond any position given out so far.
    next_base: Position,
    findings: Vec<String>,
}

/// The engine's parts, ready to serve.
pub(crate) struct Begun {
    pub(crate) journal: Arc<Journal>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) damages: Damages,
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) committer: Committer,
    pub(crate) quarantine_bytes: u64,
    pub(crate) report: RecoveryReport,
}

/// Reads the store. Changes nothing.
pub(crate) fn recover(
    disk: &Arc<dyn Disk>,
    store: Store,
    config: &StorageConfig,
    observer: &dyn Observer,
) -> Result<Recovered, OpenError> {
    let mut recovered = Recovered {
        store,
        clean: false,
        epoch: RecoveryEpoch::FIRST,
        next_log_counter: 1,
        drafts: Drafts::default(),
        segments: BTreeMap::new(),
        tail: None,
        history: Vec::new(),
        unused: Vec::new(),
        unreadable: Vec::new(),
        free: Vec::new(),
        next_id: SegmentId::FIRST,
        highest_epoch: RecoveryEpoch::FIRST,
        last_begun: None,
        lost_starts: 0,
        next_base: Position::ZERO,
        findings: Vec::new(),
    };
    let mut used = recovered.sort_files(disk)?;
    recovered.drop_unwritten(&**disk, &mut used)?;
    recovered.last_begun = LastBegun::read(&**disk).map_err(OpenError::io("reading BEGUN"))?;
    recovered.read(&**disk, &used, observer)?;
    if recovered.is_damaged() && config.on_damage == OnDamage::Refuse {
        return Err(OpenError::Damaged(recovered.findings.join("; ")));
    }
    Ok(recovered)
}

impl Recovered {
    /// Tells files with frames from files without.
    fn sort_files(&mut self, disk: &Arc<dyn Disk>) -> Result<Vec<Used>, OpenError> {
        let list = |directory: &str| {
            disk.list(directory)
                .map_err(OpenError::io(format!("listing {directory}")))
        };
        for name in list("pool")? {
            match segment::id_of(&name) {
                Some(id) => self.note_pool_file(id),
                None => self
                    .findings
                    .push(format!("pool/{name} is not one of Wald's files")),
            }
        }
        let mut used = Vec::new();
        for name in list("journal")? {
            let Some(id) = segment::id_of(&name) else {
                self.findings
                    .push(format!("journal/{name} is not one of Wald's files"));
                continue;
            };
            self.next_id = self.next_id.max(id.next());
            if let Some(segment) = self.sort_file(disk, id)? {
                used.push(segment);
            }
        }
        used.sort_by_key(|segment| segment.life.id);
        used.dedup_by(|second, first| {
            let twice = second.life.id == first.life.id;
            if twice {
                self.findings
                    .push(format!("segment {} is there twice", first.life.id));
            }
            twice
        });
        Ok(used)
    }

    fn note_pool_file(&mut self, id: SegmentId) {
        self.next_id = self.next_id.max(id.next());
        self.free.push(id);
    }

    fn sort_file(
        &mut self,
        disk: &Arc<dyn Disk>,
        id: SegmentId,
    ) -> Result<Option<Used>, OpenError> {
        let path = journal_path(id);
        let fail = || OpenError::io(format!("reading {path}"));
        let file = disk.open(&path).map_err(fail())?;
        let head = read_some(&*file, 0, LIFE_BYTES).map_err(fail())?;
        let life = match Life::decode(&head) {
            Ok(life) if life.store_id == self.store.id => life,
            Ok(life) => {
                let what = format!(
                    "belongs to store {:032x}, not to this one; it is not used",
                    life.store_id
                );
                self.unreadable(id, &what);
                return Ok(None);
            }
            Err(BadLife::TooNew(found)) => {
                return Err(OpenError::Version {
                    found,
                    supported: 1,
                });
            }
            Err(BadLife::Damaged) => {
                self.lost_life(id, &*file).map_err(fail())?;
                return Ok(None);
            }
        };
        if life.id != id {
            // What the file says of itself is checksummed; its name is not.
            self.findings.push(format!(
                "{path} holds segment {}; it is used as that",
                life.id
            ));
            self.next_id = self.next_id.max(life.id.next());
        }
        match frames(&life, &*file).map_err(fail())? {
            None if life.id != id => Ok(None),
            Some((base, link)) => Ok(Some(Used {
                life,
                path,
                base,
                link,
            })),
            None => {
                self.unused.push(id);
                Ok(None)
            }
        }
    }

    /// Without a life block nothing in the file can be verified.
    fn lost_life(&mut self, id: SegmentId, file: &dyn DiskFile) -> std::io::Result<()> {
        let bytes = read_some(file, 0, file.size()?)?;
        let frames = bytes
            .get(usize::try_from(LIFE_BYTES).unwrap_or(0)..)
            .unwrap_or(&[]);
        if frames.iter().all(|byte| *byte == 0) {
            self.unused.push(id);
        } else {
            self.unreadable(id, "has no good life block; it is not used");
        }
        Ok(())
    }

    /// A file that holds something, but nothing that can be used.
    fn unreadable(&mut self, id: SegmentId, what: &str) {
        self.findings.push(format!("{} {what}", journal_path(id)));
        self.unreadable.push(id);
    }

    /// A last segment whose first frame never became whole holds nothing: the journal
    /// had not rolled.
    fn drop_unwritten(&mut self, disk: &dyn Disk, used: &mut Vec<Used>) -> Result<(), OpenError> {
        while let Some(last) = used.last() {
            let (bytes, _) = last.load_tail(disk)?;
            let walked = last.as_bytes(&bytes).walk_last();
            if walked.end > last.base.advance(LIFE_BYTES) {
                return Ok(());
            }
            if last.path == journal_path(last.life.id) {
                self.unused.push(last.life.id);
            }
            used.pop();
        }
        Ok(())
    }

    /// Walks all segments in order and applies what they say.
    fn read(
        &mut self,
        disk: &dyn Disk,
        used: &[Used],
        observer: &dyn Observer,
    ) -> Result<(), OpenError> {
        for (index, segment) in used.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| &used[before]);
            self.follow_link(segment, before);
            let successor = used.get(index + 1);
            let link = successor
                .and_then(|next| next.link.as_ref())
                .filter(|link| link.predecessor == Some(segment.life.id));
            let is_last = successor.is_none();
            let (bytes, cached) = if is_last {
                segment.load_tail(disk)?
            } else {
                (segment.load(disk)?, false)
            };
            let walked = match link {
                Some(link) => segment.as_bytes(&bytes).walk_finished(link.predecessor_end),
                None => segment.as_bytes(&bytes).walk_last(),
            };
            let closings = link.and_then(|link| link.closings.as_deref());
            let holes = self.apply_segment(segment.as_bytes(&bytes), &walked, observer);
            self.explain(segment.life.id, &holes, closings);
            if link.is_none() && !is_last && !walked.is_sealed() && walked.torn > 0 {
                // Its successor does not tell where it ended.
                self.drafts.mark_uncertain(walked.end);
                self.findings.push(format!(
                    "where segment {} ended is not known",
                    segment.life.id
                ));
            }
            self.enter(segment, &bytes, &walked, is_last);
            if let Some(tail) = self.tail.as_mut().filter(|_| cached) {
                tail.copy = Some(bytes);
            }
        }
        let limit = used
            .last()
            .map_or(Position::ZERO, |last| last.base.advance(last.life.size));
        self.look_behind(used.last().map(|last| last.life.id), limit);
        // One segment more may have given out positions and left nothing; none is larger.
        let nothing_given_out = self.clean || (used.is_empty() && self.last_begun.is_none());
        let beyond = if nothing_given_out {
            0
        } else {
            LARGEST_SEGMENT
        };
        self.next_base = limit.max(self.begun_base()).advance(beyond);
        Ok(())
    }

    /// Files behind the last good segment that cannot be used may have held the newest
    /// records of any log.
    fn look_behind(&mut self, last: Option<SegmentId>, limit: Position) {
        let behind = self
            .unreadable
            .iter()
            .filter(|id| last.is_none_or(|last| **id > last));
        let count = behind.count() as u64;
        if count > 0 {
            self.drafts.mark_uncertain(limit);
            self.lost_starts += count;
            self.clean = false;
        }
        let Some(begun) = self.last_begun else { return };
        self.highest_epoch = self.highest_epoch.max(begun.epoch);
        if last.is_none_or(|last| last < begun.segment) {
            self.drafts.mark_uncertain(limit);
            self.findings.push(format!(
                "segment {}, which the last start began, is missing; records in it and after it are gone",
                begun.segment
            ));
            self.clean = false;
        }
    }

    /// Positions that the last start gave out begin here.
    fn begun_base(&self) -> Position {
        self.last_begun.map_or(Position::ZERO, |begun| begun.base)
    }

    /// Holes that no directory explains are explained by how the segment was left, or
    /// not at all.
    fn explain(&mut self, segment: SegmentId, holes: &[Hole], closings: Option<&[Closing]>) {
        let Some(first) = holes.first() else { return };
        match closings {
            Some(closings) => self.drafts.reconcile(segment, closings, first.from),
            None => {
                self.drafts.mark_uncertain(first.from);
                self.findings.push(format!(
                    "damage at position {} of segment {segment} cannot be attributed to logs",
                    first.from
                ));
            }
        }
    }

    /// What a segment's link says about what came before it.
    fn follow_link(&mut self, segment: &Used, before: Option<&Used>) {
        let Some(link) = &segment.link else {
            self.findings.push(format!(
                "the link of segment {} is damaged",
                segment.life.id
            ));
            // It may have been the first of a new epoch.
            self.lost_starts += 1;
            return;
        };
        if link.recovery_epoch > self.epoch {
            self.history.push((self.epoch, link.predecessor_end));
            self.epoch = link.recovery_epoch;
            self.next_log_counter = 1;
        }
        self.next_log_counter = self.next_log_counter.max(link.next_log_counter);
        let before = before.map(|before| before.life.id);
        let Some(missing) = link.predecessor.filter(|id| Some(*id) != before) else {
            return;
        };
        self.findings.push(format!(
            "segment {missing} is missing or unreadable, before segment {}",
            segment.life.id
        ));
        let at = link.predecessor_end;
        match &link.closings {
            Some(closings) => self.drafts.reconcile(missing, closings, at),
            None => self.drafts.mark_uncertain(at),
        }
        if link.second != before {
            // More than one is missing, and the link tells of one only.
            self.drafts.mark_uncertain(at);
        }
    }

    /// Applies one walked segment. Returns the holes that no directory explains.
    fn apply_segment(
        &mut self,
        bytes: Bytes<'_>,
        walked: &Walked,
        observer: &dyn Observer,
    ) -> Vec<Hole> {
        let id = bytes.life.id;
        let mut holes: Vec<Hole> = Vec::new();
        let mut last_hole = self
            .segments
            .values()
            .next_back()
            .map_or(Position::ZERO, |before| {
                before.end.read().unwrap_or(before.base)
            });
        for item in &walked.items {
            let (header, body_good) = match *item {
                Item::Frame { header, body_good } => (header, body_good),
                Item::Hole { from, to } => {
                    observer.checksum_failure(ChecksumSite::Recovery);
                    holes.push(Hole { from, to });
                    last_hole = from;
                    continue;
                }
            };
            let body = bytes.body(&header);
            if !body_good {
                observer.checksum_failure(ChecksumSite::Recovery);
            }
            self.count_log_id(header.log_id, header.kind);
            if header.kind != Kind::Link {
                self.highest_epoch = self.highest_epoch.max(header.log_id.epoch());
            }
            self.drafts.apply(id, &header, body, last_hole);
            self.apply_directory(bytes, &header, &mut holes);
        }
        holes
    }

    fn count_log_id(&mut self, id: LogId, kind: Kind) {
        if kind == Kind::Created
            && let Some(counter) = id.counter_in(self.epoch)
        {
            self.next_log_counter = self.next_log_counter.max(counter + 1);
        }
    }

    /// A directory explains the damaged frames of the group before it.
    fn apply_directory(&mut self, bytes: Bytes<'_>, header: &Header, holes: &mut Vec<Hole>) {
        let Some(directory) = frame::directory_of(bytes.frame(header), header) else {
            return;
        };
        let mut position = directory.start;
        for entry in &directory.entries {
            let Some(end) = position
                .get()
                .checked_add(entry.frame_len)
                .map(Position::new)
            else {
                return;
            };
            let in_hole = holes
                .iter()
                .any(|hole| hole.from < end && position < hole.to);
            let bad_body = entry.kind == Kind::Created
                && bytes
                    .header(position)
                    .is_some_and(|header| bytes.body(&header).is_none());
            if in_hole || bad_body {
                self.count_log_id(entry.log_id, entry.kind);
                self.drafts.apply_entry(bytes.life.id, position, entry);
            }
            position = end;
        }
        *holes = subtract(holes, directory.start, position);
    }

    /// Enters a segment among those that are served.
    fn enter(&mut self, used: &Used, bytes: &[u8], walked: &Walked, is_last: bool) {
        let segment =
            Segment::finished(used.life, used.base, used.path.clone(), bytes.len() as u64);
        *segment.end.write() = Some(walked.end);
        for item in &walked.items {
            match *item {
                Item::Hole { from, to } => segment.add_hole(Hole { from, to }),
                Item::Frame {
                    header,
                    body_good: false,
                } if header.kind == Kind::Batch => {
                    segment.add_hole(Hole {
                        from: header.position,
                        to: header.end(),
                    });
                }
                Item::Frame { .. } => {}
            }
        }
        self.segments.insert(used.base, Arc::new(segment));
        if !is_last {
            return;
        }
        let seal = walked.items.last().and_then(|item| match item {
            Item::Frame { header, .. } if header.kind == Kind::Seal => {
                Seal::decode(used.as_bytes(bytes).body(header)?)
            }
            _ => None,
        });
        self.clean = seal.is_some_and(|seal| seal.clean);
        if let Some(seal) = seal {
            self.next_log_counter = self.next_log_counter.max(seal.next_log_counter);
        }
        if (bytes.len() as u64) < used.life.size {
            self.findings.push(format!(
                "segment {} has {} bytes instead of {}; records there, if any, are gone",
                used.life.id,
                bytes.len(),
                used.life.size
            ));
        }
        let end = usize::try_from(walked.end.since(used.base)).unwrap_or(usize::MAX);
        let torn = usize::try_from(walked.torn).unwrap_or(0);
        let debris = bytes.get(end..end + torn).unwrap_or(&[]).to_vec();
        let id = used.life.id;
        let (base, end, chain) = (used.base, walked.end, walked.chain);
        let before = used.link.as_ref().and_then(|link| link.predecessor);
        let (path, copy) = (used.path.clone(), None);
        self.tail = Some(Tail {
            id,
            before,
            path,
            base,
            end,
            chain,
            debris,
            copy,
        });
    }

    fn is_damaged(&self) -> bool {
        !self.findings.is_empty() || self.segments.values().any(|s| !s.holes.read().is_empty())
    }

    /// Begins the run: a new segment, its link, everything flushed.
    pub(crate) fn begin(
        mut self,
        disk: &Arc<dyn Disk>,
        config: &StorageConfig,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn Observer>,
    ) -> Result<Begun, OpenError> {
        let fail = || OpenError::io("beginning the journal");
        let torn_bytes = self.save_tail(disk)?;
        let quarantine_bytes = quarantine::bytes(&**disk).map_err(fail())?;
        self.clean &= self.lost_starts == 0 && self.highest_epoch <= self.epoch;
        if !self.clean && !self.store.created {
            let end = self.tail.as_ref().map_or(Position::ZERO, |tail| tail.end);
            let ended = self.epoch.max(self.highest_epoch).plus(self.lost_starts);
            self.history.push((ended, end));
            self.epoch = ended.next();
            self.next_log_counter = 1;
        }
        let pool = Arc::new(Pool::new(
            Arc::clone(disk),
            Arc::clone(&clock),
            self.store.id,
            config.segment_bytes,
            config.pool_segments,
            self.next_id,
            std::mem::take(&mut self.free),
        ));
        pool.recycle(&self.unused).map_err(fail())?;
        let ready = pool.take().map_err(fail())?;
        let file = Arc::clone(&ready.file);
        let segment = Arc::new(Segment::begun(ready.life, self.next_base, ready.file));
        let link = self.link(ready.life.size);
        let end = self.tail.as_ref().map_or(Position::ZERO, |tail| tail.end);
        let mut report = self.report(end, torn_bytes);
        let arrival = self.drafts.arrival;
        let finished = self.drafts.finish(&mut report.findings);
        report.damage = finished.damages.iter().map(gap_of).collect();
        let logs = Arc::new(finished.logs);
        report.logs = logs.len() as u64;
        let mut segments = self.segments;
        segments.insert(segment.base, Arc::clone(&segment));
        let (base, segment_id) = (segment.base, segment.life.id);
        let journal = Arc::new(Journal::new(
            clock,
            observer,
            self.epoch,
            segments,
            Arc::clone(&segment),
            base,
        ));
        let resume = Resume {
            segment,
            file,
            link,
            next_log_counter: self.next_log_counter,
            arrival,
        };
        let mut committer = Committer::new(
            Arc::clone(&journal),
            Arc::clone(&logs),
            Arc::clone(&pool),
            Settings {
                auto_create: config.auto_create,
                largest_unit: largest_unit(config.segment_bytes),
                sync_mode: config.sync_mode,
                buffer_bytes: config.buffer_bytes,
                uncertain: finished.uncertain,
            },
            resume,
        );
        committer.begin();
        if let Some(error) = journal.failure() {
            return Err(fail()(std::io::Error::new(error.kind(), error.to_string())));
        }
        LastBegun {
            epoch: self.epoch,
            segment: segment_id,
            base,
        }
        .write(&**disk)
        .map_err(fail())?;
        if let Some(tail) = &self.tail {
            let bytes = give_back(&**disk, tail).map_err(fail())?;
            if let Some(old) = journal.segment_at(tail.base) {
                old.cut(bytes);
            }
        }
        let damages = Damages::new(finished.damages);
        let history = self.history;
        Ok(Begun {
            journal,
            logs,
            damages,
            history,
            pool,
            committer,
            quarantine_bytes,
            report,
        })
    }

    /// Makes durable what was found in the old tail, and keeps what was cut off it. A
    /// clean seal is flushed too: it may be in the cache only.
    fn save_tail(&mut self, disk: &Arc<dyn Disk>) -> Result<u64, OpenError> {
        let Some(tail) = self.tail.as_mut() else {
            return Ok(0);
        };
        if let Some(bytes) = tail.copy.take() {
            rewrite(&**disk, tail.id, &tail.path, &bytes)
                .map_err(OpenError::io("writing the old tail anew"))?;
        }
        let file = disk
            .open(&tail.path)
            .map_err(OpenError::io("opening the old tail"))?;
        file.sync()
            .map_err(OpenError::io("flushing the old tail"))?;
        if tail.debris.is_empty() {
            return Ok(0);
        }
        let kept =
            quarantine::keep_debris(&**disk, tail.id, tail.end.since(tail.base), &tail.debris);
        match kept {
            Ok(_) => {}
            // Starting matters more than keeping what was never promised.
            Err(error) if is_out_of_space(&error) => {
                self.findings
                    .push("no space to keep what was cut off the tail".to_owned());
            }
            Err(error) => return Err(OpenError::io("keeping what was cut off the tail")(error)),
        }
        Ok(tail.debris.len() as u64)
    }

    fn link(&self, segment_bytes: u64) -> Link {
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
        }
    }

    fn report(&self, end: Position, torn_bytes: u64) -> RecoveryReport {
        RecoveryReport {
            recovery_epoch: self.epoch,
            clean: self.clean,
            created: self.store.created,
            logs: 0,
            records: self.drafts.records,
            segments: self.segments.len() as u64,
            end,
            duration: Duration::ZERO,
            torn_bytes,
            damage: Vec::new(),
            findings: self.findings.clone(),
        }
    }
}

impl Used {
    fn as_bytes<'a>(&'a self, bytes: &'a [u8]) -> Bytes<'a> {
        Bytes {
            life: &self.life,
            base: self.base,
            bytes,
        }
    }

    fn load(&self, disk: &dyn Disk) -> Result<Vec<u8>, OpenError> {
        let fail = || OpenError::io(format!("reading {}", self.path));
        let file = disk.open(&self.path).map_err(fail())?;
        let size = file.size().map_err(fail())?;
        read_some(&*file, 0, size).map_err(fail())
    }

    /// Loads the segment whose end may never have been flushed: from the device, since
    /// the cache is not to be believed after a flush that failed. The second value tells
    /// whether the cache had to be believed all the same.
    fn load_tail(&self, disk: &dyn Disk) -> Result<(Vec<u8>, bool), OpenError> {
        let found = disk
            .read_from_device(&self.path, self.life.size)
            .map_err(OpenError::io(format!(
                "reading {} from the device",
                self.path
            )))?;
        match found {
            Some(bytes) => Ok((bytes, false)),
            None => Ok((self.load(disk)?, true)),
        }
    }
}

fn read_some(file: &dyn DiskFile, from: u64, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut found = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
    let length = file.read_full_at(&mut found, from)?;
    found.truncate(length);
    Ok(found)
}

/// Whether a segment has frames, and if so its base and its link. A link that is
/// damaged is told in part by the directory of its group.
fn frames(life: &Life, file: &dyn DiskFile) -> std::io::Result<Option<(Position, Option<Link>)>> {
    let head = read_some(file, LIFE_BYTES, frame::HEADER_BYTES as u64)?;
    if let Some(header) =
        frame::decode_header(&head, life.salt).filter(|header| header.kind == Kind::Link)
        && let Some(base) = header.position.get().checked_sub(LIFE_BYTES)
    {
        let frame = read_some(file, LIFE_BYTES, header.frame_len())?;
        let link = frame::verified_body(&frame, &header)
            .and_then(Link::decode)
            .or_else(|| Some(partial_link(header.log_id, header.first_lsn, header.count)));
        return Ok(Some((Position::new(base), link)));
    }
    let bytes = read_some(file, 0, file.size()?)?;
    Ok(any_frame(life, &bytes))
}

/// Looks for any frame of this life: it tells the base, its position less its offset.
fn any_frame(life: &Life, bytes: &[u8]) -> Option<(Position, Option<Link>)> {
    let first = usize::try_from(LIFE_BYTES).ok()?;
    for (index, page) in bytes.get(first..)?.chunks(4096).enumerate() {
        if page.iter().all(|byte| *byte == 0) {
            continue;
        }
        for step in (0..page.len()).step_by(8) {
            let offset = first + index * 4096 + step;
            let rest = &bytes[offset..];
            // Bases are sums of sizes: a cheap look before a checksum is computed.
            let claimed = frame::claimed_position(rest);
            if claimed.is_none_or(|claimed| claimed.wrapping_sub(offset as u64) % 4096 != 0) {
                continue;
            }
            let Some(header) = frame::decode_header(rest, life.salt) else {
                continue;
            };
            let Some(base) = header.position.get().checked_sub(offset as u64) else {
                continue;
            };
            let base = Position::new(base);
            return Some((
                base,
                link_from_directory(&Bytes { life, base, bytes }, header),
            ));
        }
    }
    None
}

fn link_from_directory(bytes: &Bytes<'_>, mut header: Header) -> Option<Link> {
    loop {
        if let Some(directory) = frame::directory_of(bytes.frame(&header), &header) {
            let entry = directory
                .entries
                .first()
                .filter(|entry| entry.kind == Kind::Link)?;
            return Some(partial_link(entry.log_id, entry.first_lsn, entry.count));
        }
        header = bytes.resynchronise(header.position.advance(8))?;
    }
}

fn partial_link(before: LogId, end: Lsn, epoch: u32) -> Link {
    Link {
        predecessor: (before.get() != 0).then(|| SegmentId::new(before.get())),
        second: None,
        predecessor_end: Position::new(end.get()),
        predecessor_chain: 0,
        recovery_epoch: RecoveryEpoch::new(u64::from(epoch)),
        next_log_counter: 0,
        closings: None,
    }
}

/// What is left of the holes when a stretch of them is explained.
fn subtract(holes: &[Hole], from: Position, to: Position) -> Vec<Hole> {
    let mut rest = Vec::new();
    for hole in holes {
        if hole.from < from.min(hole.to) {
            rest.push(Hole {
                from: hole.from,
                to: hole.to.min(from),
            });
        }
        if hole.to > to.max(hole.from) {
            rest.push(Hole {
                from: hole.from.max(to),
                to: hole.to,
            });
        }
    }
    rest
}

/// Writes a segment anew, byte for byte, over its old name.
fn rewrite(disk: &dyn Disk, id: SegmentId, path: &str, bytes: &[u8]) -> std::io::Result<()> {
    let new = segment::pool_path(id);
    if disk
        .list("pool")?
        .iter()
        .any(|name| new.ends_with(name.as_str()))
    {
        disk.remove(&new)?;
    }
    let file = disk.create(&new)?;
    file.write_all_at(bytes, 0)?;
    file.sync()?;
    disk.rename(&new, path)?;
    disk.sync_directory("journal")?;
    disk.sync_directory("pool")
}

/// Gives the unused end of the old tail back to the file system. Returns its size then.
fn give_back(disk: &dyn Disk, tail: &Tail) -> std::io::Result<u64> {
    let file = disk.open(&tail.path)?;
    let (used, size) = (
        tail.end.since(tail.base).next_multiple_of(4096),
        file.size()?,
    );
    if used < size {
        file.set_size(used)?;
    }
    Ok(used.min(size))
}

fn gap_of(damage: &Damage) -> Gap {
    Gap {
        log: damage.log.as_ref().map(|log| log.name.clone()),
        from: Some(damage.from),
        to: Some(damage.to),
        reason: GapReason::Quarantined,
    }
}
