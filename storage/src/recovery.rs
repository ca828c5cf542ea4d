//! Opens a store: reads its segments, finds the end of the journal, and chooses where it continues.
//!
//! Nothing is ever written into an old tail. A start finds its end. Then it begins a new segment, at a position
//! beyond all positions that the old tail can have given out. The link of the new segment records the end.
//! Until that link is flushed, the directory keeps its earlier meaning. Therefore a crash at any step of a
//! start leads to the same result.

mod begin;
mod files;
mod history;
mod key;
mod known;
mod runs;
mod shown;
mod survey;
mod witness;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::files::base_of;
use self::files::{LoadedTail, UsedSegment};
pub(crate) use self::history::bound_ends;
use self::history::{EpochEnd, add_end};
use self::key::FoundKey;
use self::known::UnnamedIndexes;
pub(crate) use self::known::{Around, damage_in, index_anew, last_whole_unit};
pub(crate) use self::runs::FoundRun;
use self::runs::Runs;
pub(crate) use self::survey::{Account, Survey, Surveyed, account, survey};
use self::witness::Witness;
use crate::api::cipher::Cipher;
use crate::api::config::{OnDamage, StorageConfig};
use crate::api::error::OpenError;
use crate::api::record::Gap;
use crate::api::record::LogInfo;
use crate::base::bounds;
pub(crate) use crate::base::bounds::LARGEST_SEGMENT;
use crate::base::bounds::LIFE_BYTES;
use crate::base::clock::{Clock, SystemClock};
use crate::base::ids::{LogId, LogName, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::metrics::{ChecksumSite, NoObserver, Observer};
use crate::disk::Disk;
use crate::disk::directory;
use crate::disk::directory::{LastBegun, ReadBegun, StoreIdentity};
use crate::format::address::Hole;
use crate::format::address::is_address;
use crate::format::body::{AcceptedLosses, Closing, Marker};
use crate::format::content::Content;
use crate::format::digest::Secret;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::life::{ENCRYPTED, Life};
use crate::format::sealed;
use crate::format::walk;
use crate::format::walk::{Bytes, Event, Walk, WalkItem, Walked};
use crate::index::drafts::UnnamedLog;
use crate::index::drafts::{Drafts, FoundFrame};
use crate::index::queue::{IndexProgress, IndexQueue};
use crate::index::{Indexes, base_of_index, index_id, old_id};
use crate::journal::Journal;
use crate::journal::committer::Committer;
use crate::journal::pool::Pool;
use crate::journal::segment::Segment;
use crate::logs::Logs;
use crate::logs::damages::{DEBRIS_BYTES, Damage, Damages};

/// Files of segments have whole pages, bytes.
const PAGE_BYTES: u64 = 4096;

/// Time that each phase of a start took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoveryTimes {
    /// Reading the newest checkpoint.
    pub checkpoint: Duration,
    /// Reading indexes and segments since.
    pub segments: Duration,
    /// Making the old tail safe and beginning a new segment.
    pub begin: Duration,
}

/// Result of a start.
#[derive(Debug, Clone)]
pub struct RecoveryReport {
    /// Unclean starts so far, this one included.
    pub recovery_epoch: RecoveryEpoch,
    /// Whether the previous process shut down cleanly.
    pub clean: bool,
    /// Whether this start made the store.
    pub created: bool,
    /// Logs that exist.
    pub logs: u64,
    /// Records that can be read.
    pub records: u64,
    /// Segments that hold frames.
    pub segments: u64,
    /// End of the journal.
    pub end: Position,
    /// Duration of the whole start.
    pub duration: Duration,
    /// The main parts of that duration.
    pub times: RecoveryTimes,
    /// Bytes cut off the tail because they were never proven flushed.
    pub torn_bytes: u64,
    /// Records that were once durable and cannot be read now, without accepted losses.
    pub damage: Vec<Gap>,
    /// Records that were once durable and cannot be read now, and whose loss was accepted.
    pub accepted: Vec<Gap>,
    /// Other facts that an operator must know, in sentences.
    pub findings: Vec<String>,
}

impl RecoveryReport {
    /// Names the damage whose records are still missed.
    fn tell_damages(&mut self, damages: &[Damage]) {
        let missed = damages
            .iter()
            .filter(|damage| damage.missed_from().is_some());
        let (accepted, damage): (Vec<_>, Vec<_>) = missed.partition(|damage| damage.accepted);
        self.damage = damage.into_iter().map(Damage::gap).collect();
        self.accepted = accepted.into_iter().map(Damage::gap).collect();
    }
}

/// The last segment, after all segments are read.
struct OldTail {
    id: SegmentId,
    /// The segment before it.
    before: Option<SegmentId>,
    /// Its file; none if it is sorted.
    path: Option<String>,
    base: Position,
    end: Position,
    chain: u32,
    /// Bytes that were cut off it.
    torn: u64,
    /// The first cut bytes, as far as they are kept.
    debris: bytes::Bytes,
    /// Bytes of the segment that are not proven flushed, and their offset, if the device cannot be read around
    /// the cache. They are written again, since nothing else makes sure that the device has them.
    copy: Option<(u64, bytes::Bytes)>,
}

/// State of the store as its files describe it.
pub(crate) struct Recovered {
    store: StoreIdentity,
    clean: bool,
    epoch: RecoveryEpoch,
    next_log_counter: u64,
    /// Last known time of the expiry clock; `None` if no version with that clock wrote the store.
    expiry: Option<Timestamp>,
    drafts: Drafts,
    segments: BTreeMap<Position, Arc<Segment>>,
    /// The runs that replace earlier segments.
    runs: Runs,
    indexes: Indexes,
    progress: IndexProgress,
    /// Bytes of the indexes in `progress.unwritten`.
    unwritten_bytes: u64,
    unnamed_indexes: UnnamedIndexes,
    /// The segment read last, and the one before it.
    last: Option<SegmentId>,
    before: Option<SegmentId>,
    tail: Option<OldTail>,
    history: Vec<EpochEnd>,
    /// Files in `journal/` without frames, to be used again.
    unused: Vec<SegmentId>,
    /// Files in `journal/` with content that cannot be used.
    unreadable: Vec<SegmentId>,
    /// Files without frames whose first frame the device could not read: offsets.
    unread_first: Vec<(SegmentId, Range<u64>)>,
    /// Bytes at the end of the journal that the device could not read: the file, offsets. The newest
    /// records may be there.
    unread_end: Option<(String, Range<u64>)>,
    /// The key of digests, as far as segments were read.
    key: FoundKey,
    /// Files in `pool/`.
    free: Vec<SegmentId>,
    /// Files that the start could not remove.
    left: Vec<String>,
    next_id: SegmentId,
    /// The highest epoch in any log id.
    highest_epoch: RecoveryEpoch,
    /// The segment that the start before began.
    last_begun: Option<LastBegun>,
    /// The newest segment that a checkpoint lists, and a position beyond the segment.
    checkpointed: Option<(SegmentId, Position)>,
    /// The successor that the last segment names, or the last segment itself if it was not read. The file is
    /// kept until a new segment has begun.
    expected: Option<SegmentId>,
    /// Segments before this position are lost and left no other trace. The next link records this for later starts.
    lost_before: Option<Position>,
    /// Number of starts that may have raised the epoch without leaving a trace.
    lost_starts: u64,
    /// Beyond any position given out so far.
    next_base: Position,
    times: RecoveryTimes,
    /// A checkpoint that the start does not begin with. It may have facts that the frames lack.
    witness: Option<Witness>,
    /// Whether damage may have taken facts that a checkpoint has.
    lacks_facts: bool,
    /// Damage that cannot be attributed to logs so far, in sentences. A checkpoint may end the doubt.
    doubts: Vec<String>,
    /// Damage, in sentences.
    findings: Vec<String>,
    /// Facts that are not damage: unknown files, and a torn tail that found no space in quarantine.
    notes: Vec<String>,
    /// Findings before the last time that losses were accepted.
    accepted: Vec<String>,
    /// Losses that this start accepts.
    accepting: Option<AcceptedLosses>,
    trust: Trust,
    /// Whether a life block says that bodies may be encrypted.
    encrypted: bool,
    /// The store will not be served: all segments are read, and none of their indexes is kept.
    only_looks: bool,
    /// Nothing may be written: all indexes of this start stay in memory.
    only_shows: bool,
}

/// The engine's parts, ready to serve.
pub(crate) struct Begun {
    pub(crate) journal: Arc<Journal>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) damages: Damages,
    pub(crate) history: Vec<EpochEnd>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) indexes: Indexes,
    pub(crate) indexing: Arc<IndexQueue>,
    pub(crate) committer: Committer,
    pub(crate) quarantine_bytes: u64,
    /// Files that the start could not remove.
    pub(crate) left: Vec<String>,
    /// Reasons why no checkpoint is written and nothing sorted, in sentences. Empty if both continue.
    pub(crate) held_back: Vec<String>,
    /// The key of digests.
    pub(crate) secret: Secret,
    pub(crate) report: RecoveryReport,
}

/// Purpose for which a store is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The store will be served. Nothing is changed, except for unfinished files in `index/`. If the start fails,
    /// they are removed.
    Serve,
    /// Readers will see the store. Nothing is changed.
    Show,
    /// Nothing is changed.
    Look,
}

/// Reads the store.
pub(crate) fn recover(
    disk: &Arc<dyn Disk>,
    store: StoreIdentity,
    config: &StorageConfig,
    (clock, observer): (&dyn Clock, &dyn Observer),
    purpose: Purpose,
) -> Result<Recovered, OpenError> {
    let new = || Recovered {
        only_looks: purpose == Purpose::Look,
        only_shows: purpose == Purpose::Show,
        ..Recovered::new(disk, store, config.producer_window)
    };
    let recovered = match new().read_store(&**disk, (clock, observer), Trust::Checkpoint)? {
        Some(recovered) => recovered,
        // Files are not where the checkpoint lists them: the start reads the segments themselves.
        None => new().read_wholly(&**disk, (clock, observer), Trust::Indexes)?,
    };
    if let Some((file, bytes)) = &recovered.unread_end {
        return Err(OpenError::UnreadEnd {
            file: file.clone(),
            from: bytes.start,
            to: bytes.end,
        });
    }
    if config.on_damage == OnDamage::Refuse && recovered.is_damaged() {
        return Err(OpenError::Damaged(recovered.what_is_damaged()));
    }
    recovered.check_room()?;
    Ok(recovered)
}

/// Reads a store like a start, and reports the findings. Changes nothing.
pub(crate) fn inspect(
    disk: &Arc<dyn Disk>,
    config: &StorageConfig,
) -> Result<RecoveryReport, OpenError> {
    let store = StoreIdentity {
        id: directory::read_format(&**disk)?,
        created: false,
    };
    let mut recovered = look(disk, store, config)?;
    let end = recovered
        .tail
        .as_ref()
        .map_or(Position::ZERO, |tail| tail.end);
    let torn = recovered.tail.as_ref().map_or(0, |tail| tail.torn);
    recovered.enter_epoch(end);
    let mut report = recovered.report(end, torn);
    let sorted_end = recovered.runs.end();
    let finished = recovered.drafts.finish(sorted_end, &mut report.findings);
    report.tell_damages(&finished.damages);
    report.logs = finished.logs.len() as u64;
    report.records = finished.records;
    Ok(report)
}

/// Reads the store and changes nothing.
pub(crate) fn look(
    disk: &Arc<dyn Disk>,
    store: StoreIdentity,
    config: &StorageConfig,
) -> Result<Recovered, OpenError> {
    let seams: (&dyn Clock, &dyn Observer) = (&SystemClock, &NoObserver);
    recover(disk, store, config, seams, Purpose::Look)
}

/// Reads every frame of the store and ignores indexes and checkpoints.
pub(crate) fn recover_from_frames(
    disk: &Arc<dyn Disk>,
    store: StoreIdentity,
    config: &StorageConfig,
    (clock, observer): (&dyn Clock, &dyn Observer),
    purpose: Purpose,
) -> Result<Recovered, OpenError> {
    let new = Recovered {
        only_looks: purpose == Purpose::Look,
        ..Recovered::new(disk, store, config.producer_window)
    };
    new.read_wholly(&**disk, (clock, observer), Trust::Frames)
}

/// Files that a start believes without reading the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Trust {
    Frames,
    Indexes,
    Checkpoint,
}

impl Recovered {
    fn new(disk: &Arc<dyn Disk>, store: StoreIdentity, producer_window: u64) -> Self {
        Self {
            store,
            clean: false,
            epoch: RecoveryEpoch::FIRST,
            next_log_counter: 1,
            expiry: None,
            drafts: Drafts::new(producer_window),
            segments: BTreeMap::new(),
            runs: Runs::default(),
            indexes: Indexes::new(Arc::clone(disk)),
            progress: IndexProgress::default(),
            unwritten_bytes: 0,
            unnamed_indexes: UnnamedIndexes::new(disk),
            last: None,
            before: None,
            tail: None,
            history: Vec::new(),
            unused: Vec::new(),
            unreadable: Vec::new(),
            unread_first: Vec::new(),
            unread_end: None,
            key: FoundKey::default(),
            free: Vec::new(),
            left: Vec::new(),
            next_id: SegmentId::FIRST,
            highest_epoch: RecoveryEpoch::FIRST,
            last_begun: None,
            checkpointed: None,
            expected: None,
            lost_before: None,
            lost_starts: 0,
            next_base: Position::ZERO,
            times: RecoveryTimes::default(),
            witness: None,
            lacks_facts: false,
            doubts: Vec::new(),
            findings: Vec::new(),
            notes: Vec::new(),
            accepted: Vec::new(),
            accepting: None,
            trust: Trust::Frames,
            encrypted: false,
            only_looks: false,
            only_shows: false,
        }
    }

    /// Reads the store without a checkpoint.
    fn read_wholly(
        self,
        disk: &dyn Disk,
        seams: (&dyn Clock, &dyn Observer),
        trust: Trust,
    ) -> Result<Self, OpenError> {
        self.read_store(disk, seams, trust)?
            .ok_or_else(|| OpenError::io("reading the store")(std::io::ErrorKind::Other.into()))
    }

    /// Reads the store, from the newest checkpoint if that is trusted. `None` if there is one that does not
    /// match the files.
    fn read_store(
        mut self,
        disk: &dyn Disk,
        (clock, observer): (&dyn Clock, &dyn Observer),
        trust: Trust,
    ) -> Result<Option<Self>, OpenError> {
        self.trust = trust;
        let started = clock.monotonic();
        let mut ids = self.list_files(disk)?;
        self.list_runs(disk, &mut ids)?;
        let begun = LastBegun::read(disk).map_err(OpenError::io("reading BEGUN"))?;
        self.last_begun = begun.good();
        if let ReadBegun::Beyond(what) = begun {
            self.findings.push(format!("{what}; it is not used"));
        }
        self.read_checkpoint(disk, &ids, trust == Trust::Checkpoint)?;
        self.check_life(disk)?;
        self.apply_runs(disk)?;
        let begun = clock.monotonic();
        self.times.checkpoint = begun.duration_since(started);
        // Both are in order, and there may be many.
        let mut covered = self.segments.values().map(|s| s.life.id).peekable();
        ids.retain(|id| {
            while covered.next_if(|covered| covered < id).is_some() {}
            covered.peek() != Some(id)
        });
        let mut used = self.sort_files(disk, &ids)?;
        let last = self.last;
        if used
            .first()
            .is_some_and(|first| Some(first.life.id) <= last)
        {
            return Ok(None);
        }
        let tail = self.drop_unwritten(disk, &mut used)?;
        let tail = self.look_behind_seal(disk, &mut used, tail)?;
        self.look_for_unread_end(&used, tail.as_ref());
        self.read(disk, &used, tail, observer)?;
        if let Some((file, bytes)) = &self.unread_end {
            self.findings.push(format!(
                "the device cannot read bytes {} to {} of {file}, where the journal ends; acknowledged records there, if any, are lost",
                bytes.start, bytes.end
            ));
        }
        self.look_for_strays(disk)?;
        self.read_key(disk)?;
        self.times.segments = clock.monotonic().duration_since(begun);
        Ok(Some(self))
    }

    /// Finds the key of digests. Reports a missing key of a store that had begun before.
    fn read_key(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        // A store that was restored from an archive has runs, but no segment with a key yet.
        let restored =
            !self.runs.found.is_empty() && self.segments.is_empty() && self.unreadable.is_empty();
        let begun = self.last_begun.is_some() || self.checkpointed.is_some();
        let begun = (begun || self.last.is_some()) && !restored;
        let segments = self.segments.values();
        self.key
            .secret(disk, segments, self.store.id)
            .map_err(OpenError::io("reading the key of digests"))?;
        if begun && self.key.is_lost() {
            self.findings.push(
                "no segment has a good key of digests, so a new one is drawn: batches of producers \
                 from before, sent again, are refused as PRODUCER_CONFLICT"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// Checks that the store can continue: the next start must be able to read the files of this one.
    ///
    /// # Errors
    /// If no positions or no epochs are left.
    pub(crate) fn check_room(&self) -> Result<(), OpenError> {
        let most = bounds::POSITIONS - bounds::POSITIONS_LEFT;
        let starts = self.lost_starts.saturating_add(1);
        let epoch = self.epoch.max(self.highest_epoch).get();
        let what = if self.next_base.get() > most {
            format!("would go on at position {}, above {most}", self.next_base)
        } else if epoch.saturating_add(starts) >= bounds::EPOCHS {
            format!(
                "is in recovery epoch {epoch}, of {} at most",
                bounds::EPOCHS - 1
            )
        } else {
            return Ok(());
        };
        Err(OpenError::NotAStore {
            what: format!(
                "the store {what}: no store gets so far, so its files were altered; restore a \
                 backup, or serve it with an older version and append its records to a new store"
            ),
        })
    }

    /// Numbers of keys that encrypt bodies: the lowest and the highest of each run, and the highest of the frames that
    /// were read.
    fn named_keys(&self) -> impl Iterator<Item = u64> {
        let runs = self.runs.found.iter();
        let of_runs = runs.flat_map(|found| [found.run.head.oldest_key, found.run.head.newest_key]);
        of_runs
            .chain([self.drafts.newest_key])
            .filter(|number| *number > 0)
    }

    /// Whether bodies may be encrypted.
    fn has_encrypted(&self) -> bool {
        self.encrypted || self.named_keys().next().is_some()
    }

    /// The highest key of an encrypted body in the newest segment that has one. A start after a clean end reads no body, and
    /// runs name only the keys of older records. This reads one segment with records, and later ones that have none.
    fn key_in_segments(&self, disk: &dyn Disk) -> Option<u64> {
        self.segments.values().rev().find_map(|segment| {
            let end = (*segment.end.read())?;
            let content = Content::open(disk, &segment.path()).ok()?;
            let head = content.piece(0, usize::try_from(LIFE_BYTES).ok()?);
            if Life::features(&head) & ENCRYPTED == 0 {
                return None;
            }
            let mut walk = Walk::new(&content, &segment.life, segment.base, end);
            let mut found = 0;
            let see = |event: Event<'_>, found: &mut u64| {
                if let Event::Frame { header, body, .. } = event
                    && header.kind == FrameKind::Batch
                {
                    let key = body.map_or(0, |body| sealed::key_of(header.codec(), body));
                    *found = key.max(*found);
                }
            };
            while matches!(walk.next(end, |event| see(event, &mut found)), Ok(true)) {}
            // A segment that the device cannot read names no key. Another one does.
            (found > 0 && content.check().is_ok()).then_some(found)
        })
    }

    /// Checks that the keys of the store are at hand.
    ///
    /// # Errors
    /// If the store has encrypted bodies, and there are no keys, or those are older or of another store.
    pub(crate) fn check_keys(
        &self,
        disk: &dyn Disk,
        cipher: Option<&Cipher>,
    ) -> Result<(), OpenError> {
        let encrypted = self.has_encrypted();
        let unknown = |cipher: &Cipher| {
            // The newest of the frames that were read is the newest of all.
            let found = match self.drafts.newest_key {
                0 => self.key_in_segments(disk),
                _ => None,
            };
            self.named_keys()
                .chain(found)
                .find(|key| !cipher.has_made(*key))
        };
        let wrong = match cipher {
            _ if !encrypted => return Ok(()),
            None => "the records of the store are encrypted, and there is no key: set encryption_key_file or encryption_key_command".to_owned(),
            Some(cipher) if cipher.highest() == 0 => "the records of the store are encrypted, and the data directory has no key ring: put a copy back as keys/ring (`wald restore --key-ring` does so)".to_owned(),
            Some(cipher) => match unknown(cipher) {
                None => return Ok(()),
                Some(key) => format!(
                    "records of the store are encrypted with key {key}, which the key ring never had: it is older than the store, or the ring of another store; put back the newest copy of the key ring"
                ),
            },
        };
        Err(OpenError::Keys(wrong))
    }

    /// The position at which the journal goes on.
    pub(crate) fn next_base(&self) -> Position {
        self.next_base
    }

    /// Applies all segments in order, by their indexes or by their frames.
    fn read(
        &mut self,
        disk: &dyn Disk,
        used: &[UsedSegment],
        mut tail: Option<LoadedTail<'_>>,
        observer: &dyn Observer,
    ) -> Result<(), OpenError> {
        // A link records the acceptance of damage in segments before it.
        let links = used.iter().filter_map(|segment| segment.link.as_ref());
        let accepted: Vec<AcceptedLosses> =
            links.filter_map(|link| link.accepted.clone()).collect();
        for (index, segment) in used.iter().enumerate() {
            self.ask_checkpoint(disk, Some(segment.life.id));
            self.follow_link(disk, segment)?;
            self.before = self.last.replace(segment.life.id);
            let successor = used.get(index + 1);
            let link = successor
                .and_then(|next| next.link.as_ref())
                .filter(|link| link.predecessor == Some(segment.life.id));
            let is_last = successor.is_none();
            if let Some(link) = link
                && self.trust >= Trust::Indexes
                && self.enter_by_index(disk, segment, link)?
            {
                continue;
            }
            let checkpointed = self.checkpointed_end(segment).filter(|_| !is_last);
            let (bytes, walked) = match (tail.take_if(|_| is_last), link) {
                (Some(tail), _) => (tail.content, tail.walked),
                (None, link) => {
                    let walk = |bytes: &Content<'_>| match (link, checkpointed) {
                        (Some(link), _) => segment.as_bytes(bytes).walk_before(link),
                        (None, Some(end)) => segment.as_bytes(bytes).walk_finished(end),
                        (None, None) => segment.as_bytes(bytes).walk_last(),
                    };
                    let bytes = segment.content(disk)?;
                    let walked = walk(&bytes);
                    if walked.holes().is_empty() {
                        (bytes, walked)
                    } else {
                        // The memory of that read may be wrong.
                        segment.check(&bytes)?;
                        let bytes = segment.device_content(disk)?;
                        let walked = walk(&bytes);
                        (bytes, walked)
                    }
                }
            };
            if let Some((at, newer)) = segment.as_bytes(&bytes).newer(&walked) {
                return Err(newer.refused(&segment.path, at.since(segment.base)));
            }
            let walked = walked.without_accepted(segment.base, &accepted);
            let index = self.index_with_facts(disk, segment, link, &walked)?;
            let before = index.as_ref().map(|index| self.drafts.before(index));
            let holes = self.apply_segment(segment.as_bytes(&bytes), &walked, observer);
            if let (Some(index), Some(before)) = (&index, before) {
                self.drafts.learn_index(index, &walked.holes(), before);
            } else {
                let closings = link.and_then(|link| link.closings.as_deref());
                self.explain(segment.life.id, &holes, closings, &accepted);
            }
            // If no file records the end of a segment, bytes behind it may have been frames. A file that ends within
            // a page was cut.
            let is_cut = walked.is_used_behind || !bytes.size().is_multiple_of(PAGE_BYTES);
            let is_ended = link.is_some() || checkpointed.is_some() || walked.is_sealed();
            if !is_last && !is_ended && is_cut {
                self.drafts.mark_uncertain(walked.end);
                self.findings.push(format!(
                    "where segment {} ended is not known",
                    segment.life.id
                ));
            }
            self.enter(segment, &bytes, &walked, is_last);
            if let Some(tail) = self.tail.as_mut().filter(|_| is_last && bytes.is_cached()) {
                let proven = walked.proven().max(segment.base.advance(LIFE_BYTES));
                let [from, to] = [proven, walked.end].map(|at| at.since(segment.base));
                let length = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
                tail.copy = Some((from.min(to), bytes.piece(from, length)));
            }
            segment.check(&bytes)?;
        }
        self.ask_checkpoint(disk, None);
        self.look_for_names(disk)?;
        self.findings.append(&mut self.doubts);
        self.drafts.report_lost_facts();
        if used.is_empty() && !self.clean {
            self.expected = self.successor_of_last(disk)?;
        }
        let limit = used
            .last()
            .map_or(self.next_base, |last| last.base.advance(last.life.size));
        self.look_behind(self.last, limit);
        // One more segment may have given out positions and left no trace. No segment is larger.
        let nothing_given_out = self.clean || (self.last.is_none() && self.last_begun.is_none());
        let beyond = if nothing_given_out {
            0
        } else {
            LARGEST_SEGMENT
        };
        let told = self.checkpointed.map_or(Position::ZERO, |(_, limit)| limit);
        self.next_base = limit.max(self.begun_base()).max(told).advance(beyond);
        Ok(())
    }

    /// The successor that the seal of the last segment names. A checkpoint spared the start from reading that segment.
    fn successor_of_last(&self, disk: &dyn Disk) -> Result<Option<SegmentId>, OpenError> {
        let segment = self.segments.values().next_back();
        let (Some(segment), Some(tail)) = (segment, &self.tail) else {
            return Ok(None);
        };
        let Some(path) = tail.path.clone() else {
            return Ok(None);
        };
        let used = UsedSegment {
            life: segment.life,
            path,
            base: tail.base,
            link: None,
        };
        let bytes = used.content(disk)?;
        let walked = used.as_bytes(&bytes).walk_finished(tail.end);
        let seal = used.as_bytes(&bytes).seal(&walked);
        used.check(&bytes)?;
        Ok(seal.and_then(|seal| seal.successor))
    }

    /// Notes unusable files behind the last good segment: they may have held the newest records of any log.
    fn look_behind(&mut self, last: Option<SegmentId>, limit: Position) {
        // A missing file may come back, so no new one gets its number.
        let begun = self.last_begun.map(|begun| begun.segment);
        for named in begun.into_iter().chain(self.expected) {
            self.next_id = self.next_id.max(named.next());
        }
        let behind = self
            .unreadable
            .iter()
            .filter(|id| last.is_none_or(|last| **id > last));
        let count = behind.count() as u64;
        if count > 0 {
            self.lose_behind(limit);
            self.lost_starts += count;
        }
        let told = self.checkpointed.map(|(segment, _)| segment);
        if let Some(segment) = told.filter(|told| last.is_none_or(|last| last < *told)) {
            self.lose_behind(limit);
            self.findings.push(format!(
                "segment {segment}, which a checkpoint tells of, is missing; records in it are gone"
            ));
        }
        if let (Some(gone), Some(last)) = (self.missing_successor(limit), last) {
            self.lose_behind(limit);
            self.findings.push(format!(
                "segment {gone}, which segment {last} says comes next, is missing; records in it and after it are gone"
            ));
        }
        let Some(begun) = self.last_begun else { return };
        self.highest_epoch = self.highest_epoch.max(begun.epoch);
        if last.is_none_or(|last| last < begun.segment) {
            self.lose_behind(limit);
            self.findings.push(format!(
                "segment {}, which the last start began, is missing; records in it and after it are gone",
                begun.segment
            ));
        }
    }

    /// The segment that the seal of the last one names, if its file is missing.
    fn missing_successor(&self, limit: Position) -> Option<SegmentId> {
        // After a restore, the last segment names a successor that the backup did not have. A copy gets it later.
        let restored = self.begun_base() > limit || self.only_shows;
        let there = |id: &SegmentId| self.unused.contains(id) || self.unreadable.contains(id);
        self.expected.filter(|id| !restored && !there(id))
    }

    /// Notes that records behind the last good segment are lost. The files do not show this to later starts:
    /// the next link records it.
    fn lose_behind(&mut self, limit: Position) {
        // A link cannot record position 0.
        let limit = limit.max(Position::new(1));
        if self.lost_before.replace(limit).is_none() {
            self.drafts.mark_uncertain(limit);
        }
        self.clean = false;
    }

    /// First position that the last start gave out.
    fn begun_base(&self) -> Position {
        self.last_begun.map_or(Position::ZERO, |begun| begun.base)
    }

    /// Explains holes that no directory explains: by the closing state of the segment, or not at all. If nothing
    /// explained them when their loss was accepted, the logs went on without that state.
    fn explain(
        &mut self,
        segment: SegmentId,
        holes: &[Hole],
        closings: Option<&[Closing]>,
        accepted: &[AcceptedLosses],
    ) {
        let Some(first) = holes.first() else { return };
        let went_on = accepted.iter().any(|a| a.lists_doubt(first.from));
        if let Some(closings) = closings.filter(|_| !went_on) {
            self.drafts.reconcile(segment, closings, first.from);
            return;
        }
        for hole in holes {
            self.drafts.mark_uncertain(hole.from);
            self.doubts.push(format!(
                "damage at position {} of segment {segment} cannot be attributed to logs",
                hole.from
            ));
        }
    }

    /// Last known time of the clock of retention.
    pub(crate) fn expiry(&self) -> Option<Timestamp> {
        self.expiry
    }

    /// Sets the clock of retention.
    pub(crate) fn set_expiry(&mut self, time: Timestamp) {
        self.expiry = Some(time);
    }

    /// Accepts all losses so far. The next link will record this.
    pub(crate) fn accept_loss(&mut self) {
        let mut accepted = self.drafts.to_accept();
        accepted.before = self.next_base;
        for hole in self.new_holes() {
            accepted.places.push((hole.from, hole.to));
        }
        accepted.places.extend(self.damaged_runs());
        self.accept(&accepted);
        // Doubt held back the indexes of some segments.
        let held_back = self.segments.values().filter(|s| !s.is_misnamed());
        let held_back = held_back.filter_map(|segment| self.indexes.made(segment.life.id));
        self.progress.unwritten.extend(held_back);
        self.accepting = Some(accepted);
        self.lost_before = None;
        self.clean = false;
    }

    /// Bytes that do not verify, without bytes whose loss was accepted, and without bytes whose records are all
    /// trimmed.
    fn new_holes(&self) -> Vec<Hole> {
        let forgotten = self.drafts.forgotten();
        let mut holes = Vec::new();
        for segment in self.segments.values() {
            let new = |hole: &&Hole| {
                let is_forgotten = forgotten.range(hole.from..hole.to).next().is_some();
                !is_forgotten && !self.drafts.is_accepted(hole.from, hole.to)
            };
            holes.extend(segment.holes.read().iter().filter(new).copied());
        }
        holes
    }

    /// Journal ranges covered by damaged runs whose loss has not been accepted.
    fn damaged_runs(&self) -> Vec<(Position, Position)> {
        let runs = self.runs.found.iter().map(|found| &found.run);
        let bad = runs.filter(|run| !run.segment.holes.read().is_empty());
        let all = bad.map(|run| (run.head.first_base.advance(LIFE_BYTES), run.head.end));
        all.filter(|(from, to)| !self.drafts.is_accepted(*from, *to))
            .collect()
    }

    /// Losses that are not accepted yet.
    pub(crate) fn loss(self) -> Loss {
        let mut findings = self.findings;
        let finished = self.drafts.finish(self.runs.end(), &mut findings);
        let new = finished.damages.iter();
        let new = new.filter(|damage| !damage.accepted && damage.missed_from().is_some());
        let logs = finished.logs.all();
        let mut unproven: Vec<LogName> = logs
            .iter()
            .filter(|log| log.state.read().unproven)
            .map(|log| log.name.clone())
            .collect();
        unproven.sort_unstable();
        Loss {
            gaps: new.map(Damage::gap).collect(),
            unproven,
            unnamed: finished.unnamed,
            unknown_logs: finished.uncertain,
            findings,
            format: false,
        }
    }

    /// The logs whose names begin with `prefix`, by name.
    pub(crate) fn logs(mut self, prefix: &str) -> Vec<LogInfo> {
        const END: Position = Position::new(u64::MAX);
        let finished = self.drafts.finish(self.runs.end(), &mut self.findings);
        let mut logs: Vec<_> = (finished.logs.all().iter())
            .filter(|log| log.name.as_str().starts_with(prefix) && !log.state.read().deleted)
            .map(|log| {
                let tail = log.state.read().tail(END);
                log.info(tail, END, END)
            })
            .collect();
        logs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        logs
    }

    fn accept(&mut self, accepted: &AcceptedLosses) {
        self.drafts.report_lost_facts();
        self.accepted.append(&mut self.findings);
        self.accepted.append(&mut self.doubts);
        self.accepted.append(&mut self.drafts.findings);
        self.drafts.accept(accepted.clone());
    }

    /// Applies the facts that the link of a segment records of earlier segments.
    fn follow_link(&mut self, disk: &dyn Disk, segment: &UsedSegment) -> Result<(), OpenError> {
        self.follow_back(disk, segment)?;
        let accepted = segment
            .link
            .as_ref()
            .and_then(|link| link.accepted.as_ref());
        if let Some(accepted) = accepted {
            self.accept(accepted);
        }
        Ok(())
    }

    fn follow_back(&mut self, disk: &dyn Disk, segment: &UsedSegment) -> Result<(), OpenError> {
        let Some(link) = &segment.link else {
            self.findings.push(format!(
                "the link of segment {} is damaged",
                segment.life.id
            ));
            // The segment may have been the first of a new epoch.
            self.lost_starts += 1;
            if let Some(missing) = self.trace_between(disk, segment.life.id)? {
                self.drafts.mark_uncertain(segment.base);
                self.findings.push(format!(
                    "segment {missing} is missing or unreadable, before segment {}",
                    segment.life.id
                ));
            }
            return Ok(());
        };
        // The newest link counts: the clock may have gone back.
        self.expiry = link.expiry.or(self.expiry);
        if let Some(position) = link.lost_before {
            self.drafts.mark_uncertain(position);
            self.findings.push(format!(
                "segments were missing before segment {}; which records are gone is not known",
                segment.life.id
            ));
        }
        if link.recovery_epoch > self.epoch {
            // Epochs that left nothing ended there, too.
            let ended = RecoveryEpoch::new(link.recovery_epoch.get() - 1);
            add_end(&mut self.history, ended, link.predecessor_end);
            self.epoch = link.recovery_epoch;
            self.next_log_counter = 1;
        }
        self.next_log_counter = self.next_log_counter.max(link.next_log_counter);
        let before = self.last;
        let Some(missing) = link.predecessor.filter(|id| Some(*id) != before) else {
            return Ok(());
        };
        if let Some(back) = before.filter(|_| self.segments.values().any(|s| s.life.id == missing))
        {
            // The start that wrote the link had not found the segment. Its content is used as it is.
            self.findings.push(format!(
                "segment {back}, which was missing when segment {} began, is there again",
                segment.life.id
            ));
            return Ok(());
        }
        self.findings.push(format!(
            "segment {missing} is missing or unreadable, before segment {}",
            segment.life.id
        ));
        let at = link.predecessor_end;
        match (self.index_of_missing(disk, missing, link)?, &link.closings) {
            (Some(index), _) => {
                let (from, to) = (index.base, index.end);
                let before = self.drafts.before(&index);
                self.drafts
                    .learn_index(&index, &[Hole { from, to }], before);
            }
            (None, Some(closings)) => self.drafts.reconcile(missing, closings, at),
            (None, None) => self.drafts.mark_uncertain(at),
        }
        if link.second != before {
            // More than one segment is missing, and the link describes only one.
            self.drafts.mark_uncertain(at);
        }
        Ok(())
    }

    /// A segment between the last one and `next` that only an unreadable file or an index shows. Runs take
    /// their numbers from the same counter, and the sorter writes the index of a run before the run gets its
    /// name. An index of a run therefore shows no segment.
    fn trace_between(
        &self,
        disk: &dyn Disk,
        next: SegmentId,
    ) -> Result<Option<SegmentId>, OpenError> {
        let fail = || OpenError::io("listing indexes");
        let is_between = |id: &SegmentId| Some(*id) > self.last && *id < next;
        if let Some(found) = self.unreadable.iter().copied().find(is_between) {
            return Ok(Some(found));
        }
        let mut found = Vec::new();
        directory::visit(disk, "index", &mut |name| {
            let id = index_id(name).or_else(|| old_id(name));
            found.extend(
                id.filter(is_between)
                    .map(|id| (id, format!("index/{name}"))),
            );
        })
        .map_err(fail())?;
        for (id, path) in found {
            let is_of_run = base_of_index(disk, &path)
                .map_err(fail())?
                .map_or_else(|| self.runs.has_file(id), is_address);
            if !is_of_run {
                return Ok(Some(id));
            }
        }
        Ok(None)
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
            .map_or(bytes.base, |before| {
                before.end.read().unwrap_or(before.base)
            });
        // Beginning of the current atomic unit.
        let mut unit = None;
        for item in &walked.items {
            let (header, body_good) = match *item {
                WalkItem::Frame { header, body_good } => (header, body_good),
                WalkItem::Hole { from, to } => {
                    unit = None;
                    observer.checksum_failure(ChecksumSite::Recovery);
                    holes.push(Hole { from, to });
                    last_hole = from;
                    continue;
                }
            };
            let frame = bytes.walked(&header, body_good);
            let body = walk::body_of(&frame, &header, body_good);
            if !body_good {
                observer.checksum_failure(ChecksumSite::Recovery);
            }
            if header.kind == FrameKind::Marker {
                let marker = body.and_then(Marker::decode).unwrap_or_default();
                self.expiry = marker.expiry.or(self.expiry);
            }
            self.count_log_id(header.log_id, header.kind);
            if header.kind != FrameKind::Link {
                self.highest_epoch = self.highest_epoch.max(header.log_id.epoch());
            }
            let found = FoundFrame {
                header: &header,
                body,
                producer: frame::producer_of(&frame, &header),
                unit: *unit.get_or_insert(header.position),
            };
            if !header.continues() {
                unit = None;
            }
            self.drafts.apply(id, &found, last_hole);
            self.apply_directory(bytes, (&header, &frame[..]), &mut holes);
        }
        holes
    }

    fn count_log_id(&mut self, id: LogId, kind: FrameKind) {
        if kind == FrameKind::Created
            && let Some(counter) = id.counter_in(self.epoch)
        {
            self.next_log_counter = self.next_log_counter.max(counter + 1);
        }
    }

    /// Uses a directory to explain the damaged frames of the group before it.
    fn apply_directory(
        &mut self,
        bytes: Bytes<'_>,
        (header, frame): (&FrameHeader, &[u8]),
        holes: &mut Vec<Hole>,
    ) {
        let Some(directory) = frame::directory_of(frame, header) else {
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
            let bad_body = entry.kind == FrameKind::Created
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

    /// Adds a segment to the served segments.
    fn enter(&mut self, used: &UsedSegment, bytes: &Content<'_>, walked: &Walked, is_last: bool) {
        let segment = Segment::finished(used.life, used.base, used.misnamed(), bytes.size());
        *segment.end.write() = Some(walked.end);
        for item in &walked.items {
            match *item {
                WalkItem::Hole { from, to } => segment.add_hole(Hole { from, to }),
                WalkItem::Frame {
                    header,
                    body_good: false,
                } if header.kind == FrameKind::Batch => {
                    segment.add_hole(Hole {
                        from: header.position,
                        to: header.end(),
                    });
                }
                WalkItem::Frame { .. } => {}
            }
        }
        self.seal(used, &segment, walked, bytes.size());
        self.segments.insert(used.base, Arc::new(segment));
        if !is_last {
            return;
        }
        let seal = used.as_bytes(bytes).seal(walked);
        self.clean = seal.as_ref().is_some_and(|seal| seal.clean);
        if let Some(seal) = seal {
            self.next_log_counter = self.next_log_counter.max(seal.next_log_counter);
            self.expected = seal.successor;
            self.expiry = seal.expiry.or(self.expiry);
        }
        if bytes.size() < used.life.size {
            self.findings.push(format!(
                "segment {} has {} bytes instead of {}; records there, if any, are gone",
                used.life.id,
                bytes.size(),
                used.life.size
            ));
        }
        let kept = usize::try_from(walked.torn).unwrap_or(DEBRIS_BYTES);
        let kept = kept.min(DEBRIS_BYTES);
        // A copy: a part would keep the whole window in memory.
        let debris = bytes.piece(walked.end.since(used.base), kept);
        let debris = bytes::Bytes::copy_from_slice(&debris);
        let id = used.life.id;
        let (base, end, chain) = (used.base, walked.end, walked.chain);
        let before = used.link.as_ref().and_then(|link| link.predecessor);
        let (path, copy) = (Some(used.path.clone()), None);
        self.tail = Some(OldTail {
            id,
            before,
            path,
            base,
            end,
            chain,
            torn: walked.torn,
            debris,
            copy,
        });
    }

    /// Describes the damage: the findings, and the ranges of bytes that do not verify.
    fn what_is_damaged(&self) -> String {
        let mut found = self.findings.clone();
        for hole in self.new_holes() {
            found.push(format!(
                "positions {} to {} do not match their checksums",
                hole.from, hole.to
            ));
        }
        for (from, to) in self.damaged_runs() {
            found.push(format!(
                "the sorted run of positions {from} to {to} does not match its checksums"
            ));
        }
        if found.is_empty() {
            found.push("records were lost, and nobody has accepted that".to_owned());
        }
        found.join("; ")
    }

    fn is_damaged(&self) -> bool {
        let holes = !self.new_holes().is_empty() || !self.damaged_runs().is_empty();
        holes || !self.findings.is_empty() || self.drafts.misses_records()
    }
}

/// The remaining holes after the range from `from` to `to` is explained.
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

/// Losses of a store that were not accepted yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loss {
    /// Records that were durable once and cannot be read. A gap without a log cannot be attributed to
    /// one.
    pub gaps: Vec<Gap>,
    /// Logs that refuse appends, since records beyond those found may have existed.
    pub unproven: Vec<LogName>,
    /// Logs whose names are lost: their records are unreachable now.
    pub unnamed: Vec<UnnamedLog>,
    /// Whether damage may have removed every trace of some logs. No log is created then.
    pub unknown_logs: bool,
    /// Other findings, in sentences.
    pub findings: Vec<String>,
    /// Whether FORMAT is missing or damaged. The segments hold the store's id.
    pub format: bool,
}

impl Loss {
    /// Whether there is no loss to accept.
    pub fn is_empty(&self) -> bool {
        let Self {
            gaps,
            unproven,
            unnamed,
            unknown_logs,
            findings,
            format,
        } = self;
        let nothing = gaps.is_empty() && unproven.is_empty() && findings.is_empty();
        nothing && unnamed.is_empty() && !unknown_logs && !format
    }
}
