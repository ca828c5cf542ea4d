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
use crate::directory::Store;
use crate::disk::{Disk, DiskFile};
use crate::error::OpenError;
use crate::ids::{LogId, Lsn, Position, RecoveryEpoch, SegmentId};
use crate::journal::body::{Link, Seal};
use crate::journal::committer::{Committer, Resume, Settings};
use crate::journal::frame::{self, Header, Kind};
use crate::journal::pool::Pool;
use crate::journal::segment::{self, BadLife, Hole, Life, Segment, journal_path};
use crate::journal::{Journal, LIFE_BYTES, largest_unit};
use crate::local::Logs;
use crate::metrics::{ChecksumSite, Observer};
use crate::quarantine::{self, Damage, Damages};
use crate::record::{Gap, GapReason};

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

/// A segment file with frames in it.
struct Used {
    life: Life,
    file: Arc<dyn DiskFile>,
    bytes: Vec<u8>,
    base: Position,
    /// Its link, if that is good, or as much as the next group tells of it.
    link: Option<Link>,
}

/// The last segment, when all is read.
struct Tail {
    id: SegmentId,
    /// The segment before it.
    before: Option<SegmentId>,
    file: Arc<dyn DiskFile>,
    base: Position,
    end: Position,
    chain: u32,
    debris: Vec<u8>,
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
    /// Files in `pool/`.
    free: Vec<SegmentId>,
    next_id: SegmentId,
    /// Sizes of files that may have given out positions and hold nothing.
    unused_bytes: u64,
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
        free: Vec::new(),
        next_id: SegmentId::FIRST,
        unused_bytes: 0,
        next_base: Position::ZERO,
        findings: Vec::new(),
    };
    let mut used = recovered.sort_files(disk)?;
    recovered.drop_unwritten(&mut used);
    recovered.read(&used, observer);
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
        let size = usize::try_from(file.size().map_err(fail())?).unwrap_or(usize::MAX);
        let mut bytes = vec![0; size];
        let length = file.read_full_at(&mut bytes, 0).map_err(fail())?;
        bytes.truncate(length);
        let life = match Life::decode(&bytes) {
            Ok(life) if life.store_id == self.store.id => life,
            Ok(life) => {
                self.findings.push(format!(
                    "{path} belongs to store {:032x}, not to this one; it is not used",
                    life.store_id
                ));
                return Ok(None);
            }
            Err(BadLife::TooNew(found)) => {
                return Err(OpenError::Version {
                    found,
                    supported: 1,
                });
            }
            Err(BadLife::Damaged) => {
                self.lost_life(id, &bytes);
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
        match frames(&life, &bytes) {
            None if life.id != id => Ok(None),
            Some((base, link)) => Ok(Some(Used {
                life,
                file,
                bytes,
                base,
                link,
            })),
            None => {
                self.unused.push(id);
                self.unused_bytes += life.size;
                Ok(None)
            }
        }
    }

    /// Without a life block nothing in the file can be verified.
    fn lost_life(&mut self, id: SegmentId, bytes: &[u8]) {
        let frames = bytes
            .get(usize::try_from(LIFE_BYTES).unwrap_or(0)..)
            .unwrap_or(&[]);
        self.unused_bytes += bytes.len() as u64;
        if frames.iter().all(|byte| *byte == 0) {
            self.unused.push(id);
        } else {
            let path = journal_path(id);
            self.findings
                .push(format!("{path} has no good life block; it is not used"));
        }
    }

    /// A last segment whose first frame never became whole holds nothing: the journal
    /// had not rolled.
    fn drop_unwritten(&mut self, used: &mut Vec<Used>) {
        while let Some(last) = used.last() {
            let walked = last.as_bytes().walk_last();
            if walked.end > last.base.advance(LIFE_BYTES) {
                return;
            }
            self.unused_bytes += last.life.size;
            self.unused.push(last.life.id);
            used.pop();
        }
    }

    /// Walks all segments in order and applies what they say.
    fn read(&mut self, used: &[Used], observer: &dyn Observer) {
        for (index, segment) in used.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| &used[before]);
            self.follow_link(segment, before);
            let successor = used.get(index + 1);
            let told = successor.and_then(|next| {
                let link = next.link.as_ref()?;
                (link.predecessor == Some(segment.life.id)).then_some(link.predecessor_end)
            });
            let walked = match told {
                Some(end) => segment.as_bytes().walk_finished(end),
                None => segment.as_bytes().walk_last(),
            };
            let closings = successor.and_then(|next| {
                let link = next.link.as_ref()?;
                if link.predecessor == Some(segment.life.id) {
                    link.closings.as_deref()
                } else {
                    None
                }
            });
            let holes = self.apply_segment(segment, &walked, observer);
            if let (Some(first), Some(closings)) = (holes.first(), closings) {
                self.drafts.reconcile(segment.life.id, closings, first.from);
            } else if let Some(first) = holes.first() {
                self.drafts.mark_uncertain(first.from);
                self.findings.push(format!(
                    "damage at position {} of segment {} cannot be attributed to logs",
                    first.from, segment.life.id
                ));
            }
            self.enter(segment, &walked, told.is_none() && successor.is_none());
        }
        let limit = used
            .last()
            .map_or(Position::ZERO, |last| last.base.advance(last.life.size));
        self.next_base = limit.advance(self.unused_bytes);
    }

    /// What a segment's link says about what came before it.
    fn follow_link(&mut self, segment: &Used, before: Option<&Used>) {
        let Some(link) = &segment.link else {
            self.findings.push(format!(
                "the link of segment {} is damaged",
                segment.life.id
            ));
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
        segment: &Used,
        walked: &Walked,
        observer: &dyn Observer,
    ) -> Vec<Hole> {
        let bytes = segment.as_bytes();
        let id = segment.life.id;
        let mut holes: Vec<Hole> = Vec::new();
        let mut last_hole = None;
        for item in &walked.items {
            let (header, body_good) = match *item {
                Item::Frame { header, body_good } => (header, body_good),
                Item::Hole { from, to } => {
                    observer.checksum_failure(ChecksumSite::Recovery);
                    holes.push(Hole { from, to });
                    last_hole = Some(from);
                    continue;
                }
            };
            let body = bytes.body(&header);
            if !body_good {
                observer.checksum_failure(ChecksumSite::Recovery);
            }
            self.count_log_id(header.log_id, header.kind);
            self.drafts.apply(id, &header, body, last_hole);
            self.apply_directory(segment, &header, &mut holes);
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
    fn apply_directory(&mut self, segment: &Used, header: &Header, holes: &mut Vec<Hole>) {
        let bytes = segment.as_bytes();
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
                self.drafts.apply_entry(segment.life.id, position, entry);
            }
            position = end;
        }
        *holes = subtract(holes, directory.start, position);
    }

    /// Enters a segment among those that are served.
    fn enter(&mut self, used: &Used, walked: &Walked, is_last: bool) {
        let segment = Segment::new(used.life, used.base, Arc::clone(&used.file));
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
                Seal::decode(used.as_bytes().body(header)?)
            }
            _ => None,
        });
        self.clean = seal.is_some_and(|seal| seal.clean);
        if let Some(seal) = seal {
            self.next_log_counter = self.next_log_counter.max(seal.next_log_counter);
        }
        if (used.bytes.len() as u64) < used.life.size {
            self.findings.push(format!(
                "segment {} has {} bytes instead of {}; records there, if any, are gone",
                used.life.id,
                used.bytes.len(),
                used.life.size
            ));
        }
        let end = usize::try_from(walked.end.since(used.base)).unwrap_or(usize::MAX);
        let torn = usize::try_from(walked.torn).unwrap_or(0);
        let debris = used.bytes.get(end..end + torn).unwrap_or(&[]).to_vec();
        let (id, file) = (used.life.id, Arc::clone(&used.file));
        let (base, end, chain) = (used.base, walked.end, walked.chain);
        let before = used.link.as_ref().and_then(|link| link.predecessor);
        self.tail = Some(Tail {
            id,
            before,
            file,
            base,
            end,
            chain,
            debris,
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
        if !self.clean && self.tail.is_some() {
            let end = self.tail.as_ref().map_or(Position::ZERO, |tail| tail.end);
            self.history.push((self.epoch, end));
            self.epoch = self.epoch.next();
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
        let segment = Arc::new(Segment::new(ready.life, self.next_base, ready.file));
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
        let base = segment.base;
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
            },
            resume,
        );
        committer.begin();
        if let Some(error) = journal.failure() {
            return Err(fail()(std::io::Error::new(error.kind(), error.to_string())));
        }
        give_back(self.tail.as_ref()).map_err(fail())?;
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

    /// Makes durable what was found in the old tail, and keeps what was cut off it.
    fn save_tail(&self, disk: &Arc<dyn Disk>) -> Result<u64, OpenError> {
        let Some(tail) = self.tail.as_ref().filter(|_| !self.clean) else {
            return Ok(0);
        };
        tail.file
            .sync()
            .map_err(OpenError::io("flushing the old tail"))?;
        if tail.debris.is_empty() {
            return Ok(0);
        }
        quarantine::keep_debris(&**disk, tail.id, tail.end.since(tail.base), &tail.debris)
            .map_err(OpenError::io("keeping what was cut off the tail"))?;
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
    fn as_bytes(&self) -> Bytes<'_> {
        Bytes {
            life: &self.life,
            base: self.base,
            bytes: &self.bytes,
        }
    }
}

/// Whether a segment has frames, and if so its base and its link. A link that is
/// damaged is told in part by the directory of its group.
fn frames(life: &Life, bytes: &[u8]) -> Option<(Position, Option<Link>)> {
    let first = usize::try_from(LIFE_BYTES).ok()?;
    let header = bytes
        .get(first..)
        .and_then(|bytes| frame::decode_header(bytes, life.salt));
    if let Some(header) = header.filter(|header| header.kind == Kind::Link) {
        let base = Position::new(header.position.get().checked_sub(LIFE_BYTES)?);
        let body = Bytes { life, base, bytes }.body(&header);
        let link = body
            .and_then(Link::decode)
            .or_else(|| Some(partial_link(header.log_id, header.first_lsn, header.count)));
        return Some((base, link));
    }
    // Any frame of this life tells the base: its position less its offset.
    for offset in (first..bytes.len()).step_by(8) {
        let rest = &bytes[offset..];
        if rest.len() < frame::HEADER_BYTES || rest[6] == 0 {
            continue;
        }
        let Some(header) = frame::decode_header(rest, life.salt) else {
            continue;
        };
        let base = Position::new(header.position.get().checked_sub(offset as u64)?);
        return Some((
            base,
            link_from_directory(&Bytes { life, base, bytes }, header),
        ));
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

/// Gives the unused end of the old tail back to the file system.
fn give_back(tail: Option<&Tail>) -> std::io::Result<()> {
    let Some(tail) = tail else { return Ok(()) };
    let used = tail.end.since(tail.base).next_multiple_of(4096);
    if used < tail.file.size()? {
        tail.file.set_size(used)?;
    }
    Ok(())
}

fn gap_of(damage: &Damage) -> Gap {
    Gap {
        log: damage.log.as_ref().map(|log| log.name.clone()),
        from: Some(damage.from),
        to: Some(damage.to),
        reason: GapReason::Quarantined,
    }
}
