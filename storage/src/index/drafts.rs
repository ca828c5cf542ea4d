//! The logs while they are being recovered. Frames, directories and closing states are applied in journal
//! order. If damage took a fact from one source, another provides it.

mod learn;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use indexmap::IndexMap;
use indexmap::map::Entry;

use crate::api::record::{LogConfig, Producer};
use crate::base::ids::{LogId, LogIdHash, LogName, Lsn, Position, SegmentId, Timestamp};
use crate::base::threads;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::active::Place;
use crate::format::body;
use crate::format::body::{AcceptedLosses, Closing, Created, CursorBody, TrimBody};
use crate::format::digest::Digest;
use crate::format::frame::{DirectoryEntry, FrameHeader, FrameKind};
use crate::format::life::Life;
use crate::format::sealed;
use crate::index::{NewRow, Row, SealedIndex};
use crate::logs::damages::Damage;
use crate::logs::extras::Mark;
use crate::logs::image::Image;
use crate::logs::producers::{Forgotten, Remembered};
use crate::logs::{FirstKept, Log, LogState, Logs, Lost, TrimBy, without};

/// Number of logs from which on a second thread is worthwhile.
const MANY: usize = 20_000;

/// A trim as its frame, or the directory behind it, describes it.
struct AppliedTrim {
    first: Lsn,
    by: TrimBy,
    /// Bytes of the log's frames before the one that holds `first`; 0 if they are not known.
    bytes: u64,
}

/// A log that is being recovered. It is created in its final place, so that a million of them are in memory only once.
struct Draft {
    log: Arc<Log>,
    /// Whether the name of the log is known.
    named: bool,
    /// Up to here the tail is proven by records. A trim or settings prove nothing: a start that did not know
    /// the tail may have let them through.
    proven: Position,
}

impl Draft {
    /// A log without any known facts.
    fn of(id: LogId) -> Self {
        let zero = Timestamp::default();
        let config = LogConfig::default();
        Self {
            log: Arc::new(Log::new(id, unnamed(), config, zero, Position::ZERO)),
            named: false,
            proven: Position::ZERO,
        }
    }

    /// A log with the state of its image.
    fn of_image(mut image: Image) -> Self {
        let (id, name) = (image.id, image.name.take());
        let named = name.is_some();
        let name = name.unwrap_or_else(unnamed);
        let mut state = LogState::of_image(image);
        let (next, first) = (state.next, state.coming_first());
        if next < first {
            // An earlier version did not count a trim as proof of the records before it.
            state.add_damage(Lost {
                from: next,
                to: first,
                position: state.last_end,
                accepted: false,
            });
            state.next = first;
        }
        Self {
            log: Arc::new(Log::recovered(id, name, state)),
            named,
            proven: Position::ZERO,
        }
    }

    /// Takes facts that the image lacks from the earlier draft.
    fn follow(&mut self, mut before: Self, window: u64) {
        if !self.named && before.named {
            self.set_name(before.log.name.clone());
        }
        self.proven = self.proven.max(before.proven);
        self.state().follow(before.state(), window);
    }

    fn log(&mut self) -> &mut Log {
        Arc::get_mut(&mut self.log).expect("nobody else has a log that is not finished")
    }

    fn state(&mut self) -> &mut LogState {
        self.log().state.get_mut()
    }

    /// The name of the log, if it is known.
    fn name(&self) -> Option<&LogName> {
        self.named.then_some(&self.log.name)
    }

    fn set_name(&mut self, name: LogName) {
        self.log().name = name;
        self.named = true;
    }
}

/// Makes `count` logs, or none if one cannot be made. Of many logs the second half is made at the same time as
/// the first.
fn in_halves(
    count: usize,
    make: impl Fn(usize) -> Option<Draft> + Sync,
) -> Option<[Vec<Draft>; 2]> {
    let some = |numbers: Range<usize>| numbers.map(&make).collect::<Option<Vec<Draft>>>();
    let (first, second) = if count < MANY {
        (some(0..count), Some(Vec::new()))
    } else {
        threads::both(|| some(0..count / 2), || some(count / 2..count))
    };
    Some([first?, second?])
}

/// Placeholder for an unknown name.
fn unnamed() -> LogName {
    static UNNAMED: LazyLock<LogName> =
        LazyLock::new(|| LogName::new("unnamed").expect("a plain name is valid"));
    UNNAMED.clone()
}

/// One frame, as far as it could be read.
pub(crate) struct FoundFrame<'a> {
    pub(crate) header: &'a FrameHeader,
    /// `None` if it is damaged.
    pub(crate) body: Option<&'a [u8]>,
    /// The producer of the batch, and the digest of the batch.
    pub(crate) producer: Option<(Producer, Digest)>,
    /// Position of the first frame of its atomic unit.
    pub(crate) unit: Position,
}

/// The logs that are being recovered.
#[derive(Default)]
pub(crate) struct Drafts {
    /// In the order of their first frames, which is also the order in memory.
    logs: IndexMap<LogId, Draft, LogIdHash>,
    /// The segment being applied, and the logs that it touches.
    segment: Option<SegmentId>,
    touched: Vec<LogId>,
    pub(crate) arrival: Timestamp,
    /// The highest number of a key of any body that was read; 0 without one.
    pub(crate) newest_key: u64,
    /// Number of batches of each producer that are remembered.
    producer_window: u64,
    /// Damage from here on that is not attributed to a log: every log without a later frame may have lost its
    /// newest records.
    uncertain: Option<Position>,
    /// Positions of such damage.
    unattributed: Vec<Position>,
    /// Positions of damage that took no records.
    harmless: Vec<Position>,
    /// Accepted losses.
    accepted: Vec<AcceptedLosses>,
    /// Changes whose frames are damaged, in sentences. An index or a checkpoint may have them.
    lost_facts: Vec<String>,
    pub(crate) findings: Vec<String>,
}

/// Result of the drafts.
pub(crate) struct Finished {
    pub(crate) logs: Logs,
    pub(crate) damages: Vec<Damage>,
    /// Records that can be read.
    pub(crate) records: u64,
    /// Whether logs may have existed that left no trace.
    pub(crate) uncertain: bool,
    pub(crate) accepted: Vec<AcceptedLosses>,
    /// Logs without a name.
    pub(crate) unnamed: Vec<UnnamedLog>,
}

impl Drafts {
    /// Makes empty drafts. `producer_window`: number of batches of each producer to remember.
    pub(crate) fn new(producer_window: u64) -> Self {
        Self {
            producer_window,
            ..Self::default()
        }
    }

    pub(crate) fn producer_window(&self) -> u64 {
        self.producer_window
    }

    fn draft(&mut self, id: LogId) -> &mut Draft {
        self.logs.entry(id).or_insert_with(|| Draft::of(id))
    }

    /// The draft of a log that a segment touches.
    fn touch(&mut self, id: LogId, segment: SegmentId) -> &mut Draft {
        if self.segment.replace(segment) != Some(segment) {
            self.touched.clear();
        }
        let draft = self.logs.entry(id).or_insert_with(|| Draft::of(id));
        let state = draft.state();
        if state.touched_in != segment.into() {
            state.touched_in = segment.into();
            self.touched.push(id);
        }
        draft
    }

    /// Notes a hole in the journal that nothing after it attributes.
    pub(crate) fn mark_uncertain(&mut self, position: Position) {
        self.unattributed.push(position);
        self.uncertain = Some(self.uncertain.map_or(position, |p| p.max(position)));
    }

    /// Accepts these losses. Logs in doubt continue from the records that were found.
    pub(crate) fn accept(&mut self, accepted: AcceptedLosses) {
        self.accepted_before(vec![accepted]);
        self.count_doubts();
    }

    fn count_doubts(&mut self) {
        let doubts = self.unattributed.iter();
        let new = doubts.filter(|at| !self.is_accepted(**at, at.advance(1)));
        self.uncertain = new.max().copied();
    }

    /// Notes losses that were accepted before this checkpoint.
    pub(crate) fn accepted_before(&mut self, accepted: Vec<AcceptedLosses>) {
        for accepted in accepted {
            if !self.accepted.contains(&accepted) {
                self.accepted.push(accepted);
            }
        }
    }

    /// All losses that are not accepted yet, without the ranges of bytes.
    pub(crate) fn to_accept(&self) -> AcceptedLosses {
        let doubts = self.unattributed.iter().chain(&self.harmless);
        let mut lost = Vec::new();
        for (id, draft) in &self.logs {
            let state = draft.log.state.read();
            let new = state.damage.iter();
            let new = new.filter(|lost| !self.is_accepted_loss(*id, lost));
            lost.extend(new.map(|lost| (*id, lost.from, lost.to)));
        }
        lost.extend(self.newly_nameless().map(|id| (id, Lsn::ZERO, Lsn::ZERO)));
        AcceptedLosses {
            places: doubts.map(|at| (*at, at.advance(1))).collect(),
            lost,
            ..AcceptedLosses::default()
        }
    }

    /// Whether records are lost that are still missed and not accepted, or may be.
    pub(crate) fn misses_records(&self) -> bool {
        let mut drafts = self.logs.iter();
        self.is_uncertain()
            || drafts.any(|(id, draft)| {
                let state = draft.log.state.read();
                let missed = |lost: &Lost| state.misses(lost) && !self.is_accepted_loss(*id, lost);
                state.damage.iter().any(missed)
            })
    }

    /// Whether known records are lost and still missed, accepted or not.
    pub(crate) fn misses_known_records(&self) -> bool {
        self.logs.values().any(|draft| {
            let state = draft.log.state.read();
            state.damage.iter().any(|lost| state.misses(lost))
        })
    }

    /// Whether any of these records of a log is lost and still missed.
    pub(crate) fn misses(&self, log: LogId, from: Lsn, to: Lsn) -> bool {
        self.logs.get(&log).is_some_and(|draft| {
            let state = draft.log.state.read();
            let from = from.max(state.coming_first());
            let damage = state.damage_from(from);
            let is_kept = !state.deleted && from < to;
            is_kept && damage.is_some_and(|(lost, _)| lost < to)
        })
    }

    /// Positions of damage whose records no reader misses: they are trimmed, or their log is deleted.
    pub(crate) fn forgotten(&self) -> BTreeSet<Position> {
        let mut forgotten = BTreeSet::new();
        let mut missed = BTreeSet::new();
        for draft in self.logs.values() {
            let state = draft.log.state.read();
            for lost in &state.damage {
                match state.misses(lost) {
                    true => missed.insert(lost.position),
                    false => forgotten.insert(lost.position),
                };
            }
        }
        forgotten.retain(|position| !missed.contains(position));
        forgotten
    }

    pub(crate) fn is_accepted(&self, from: Position, to: Position) -> bool {
        self.accepted
            .iter()
            .any(|accepted| accepted.covers(from, to))
    }

    /// Whether a loss is accepted. Acceptances may name the same records in other parts.
    fn is_accepted_loss(&self, log: LogId, lost: &Lost) -> bool {
        let later = self.accepted.iter().filter(|a| lost.position < a.before);
        let mut rest = vec![*lost];
        for accepted in later {
            if accepted.all {
                return true;
            }
            for (_, from, to) in accepted.lost.iter().filter(|(of, ..)| *of == log) {
                rest = without(&rest, *from, *to);
            }
        }
        lost.accepted || rest.is_empty()
    }

    /// Records of a log that damage took between these positions.
    pub(crate) fn lost_between(&self, log: LogId, from: Position, to: Position) -> Vec<Lost> {
        let draft = self.logs.get(&log);
        draft.map_or_else(Vec::new, |draft| {
            draft.log.state.read().lost_between(from, to)
        })
    }

    /// Whether damage between these positions is not attributed to logs.
    pub(crate) fn has_doubt(&self, from: Position, to: Position) -> bool {
        let mut within = self
            .unattributed
            .iter()
            .filter(|at| from <= **at && **at < to);
        within.any(|at| !self.is_accepted(*at, at.advance(1)))
    }

    /// Former positions of records that damage took.
    pub(crate) fn lost_at(&self) -> BTreeSet<Position> {
        let mut found = BTreeSet::new();
        for draft in self.logs.values() {
            let state = draft.log.state.read();
            if !state.deleted {
                found.extend(state.damage.iter().map(|lost| lost.position));
            }
        }
        found
    }

    pub(crate) fn is_uncertain(&self) -> bool {
        self.uncertain.is_some()
    }

    /// Notes that records of a log are missing up to `to`, as far as this was not known. The place of the last one is
    /// known, and proves the tail up to there.
    pub(crate) fn lose(&mut self, position: Position, id: LogId, from: Lsn, to: Lsn) {
        if from < to {
            let draft = self.draft(id);
            draft.proven = draft.proven.max(position);
        }
        self.miss(position, id, from, to);
    }

    /// Notes that records of a log are missing up to `to`. More may be missing: this proves no tail.
    fn miss(&mut self, position: Position, id: LogId, from: Lsn, to: Lsn) {
        if from >= to {
            return;
        }
        let state = self.draft(id).state();
        state.add_damage(Lost {
            from,
            to,
            position,
            accepted: false,
        });
        state.next = state.next.max(to);
        state.last_end = state.last_end.max(position);
    }

    /// Applies one frame. `hole` is the position that explains a jump of lsns: the last hole before the frame,
    /// or the end of the segment before. A trim or a cursor also proves that the records before it existed:
    /// their lsns must not be given out again.
    pub(crate) fn apply(&mut self, segment: SegmentId, found: &FoundFrame<'_>, hole: Position) {
        let (header, body) = (found.header, found.body);
        self.arrival = self.arrival.max(header.arrival);
        match header.kind {
            FrameKind::Batch => self.apply_batch(segment, found, hole),
            FrameKind::Created => self.apply_created(segment, header, body),
            FrameKind::Configured => self.apply_configured(segment, header, body),
            FrameKind::Deleted => self.apply_deleted(segment, header.log_id, header.end()),
            FrameKind::Link
            | FrameKind::Marker
            | FrameKind::Seal
            | FrameKind::Run
            | FrameKind::Images
            | FrameKind::Pack
            | FrameKind::Order => {}
            FrameKind::Trim => {
                let trim = AppliedTrim {
                    first: header.first_lsn,
                    by: TrimBy::of(header.count),
                    // Without its body, the bytes before stay as they were until the next trim.
                    bytes: body.and_then(TrimBody::decode).unwrap_or_default().bytes,
                };
                self.lose_before(hole, header.log_id, header.first_lsn);
                self.apply_trim(segment, header.log_id, trim, header.end());
            }
            FrameKind::Fence => {
                self.apply_fence(segment, header.log_id, header.first_lsn.get(), header.end());
            }
            FrameKind::Cursor => {
                // No cursor was ever moved beyond the tail.
                self.lose_before(hole, header.log_id, header.first_lsn);
                self.apply_cursor(segment, header, body);
            }
            FrameKind::Forgotten => self.apply_forgotten(segment, header, body),
        }
    }

    fn apply_batch(&mut self, segment: SegmentId, found: &FoundFrame<'_>, hole: Position) {
        let (header, body) = (found.header, found.body);
        let Some(next) = header.next_lsn() else {
            return;
        };
        // Most frames need one lookup in the table: there may be hundreds of thousands.
        let state = self.touch(header.log_id, segment).state();
        let mut expected = state.next;
        if header.first_lsn < expected && state.give_again(header.first_lsn) {
            expected = header.first_lsn;
        }
        if header.first_lsn < expected {
            self.findings.push(format!(
                "the frame at position {} repeats lsn {} of log {}; it is ignored",
                header.position, header.first_lsn, header.log_id
            ));
            return;
        }
        let key = body.map_or(0, |body| sealed::key_of(header.codec(), body));
        self.newest_key = self.newest_key.max(key);
        let times = body.and_then(|body| {
            sealed::stored_times(header.codec(), body, header.count, header.arrival)
        });
        if let Some((producer, digest)) = &found.producer {
            // The batch was applied, whether its records can be read or not.
            let batch = Remembered {
                digest: *digest,
                first_lsn: header.first_lsn,
                count: header.count,
                arrival: header.arrival,
                timestamp: times.map_or(header.arrival, |(first, _)| first),
                position: found.unit,
            };
            let window = self.producer_window;
            let draft = self.draft(header.log_id);
            let extras = draft.state().extras.get_or_insert_default();
            extras.producers.remember(producer, batch, window);
        }
        let Some((_, last)) = times else {
            self.lose(hole, header.log_id, expected, header.first_lsn);
            self.lose(header.position, header.log_id, header.first_lsn, next);
            let draft = self.draft(header.log_id);
            draft.proven = header.end();
            draft.state().last_end = header.end();
            return;
        };
        if header.first_lsn > expected {
            self.lose(hole, header.log_id, expected, header.first_lsn);
        }
        let draft = self.draft(header.log_id);
        draft.proven = header.end();
        let state = draft.state();
        state.last_time = state.last_time.max(last);
        let frame_len = u32::try_from(header.frame_len()).unwrap_or(u32::MAX);
        let (position, first_lsn) = (header.position, header.first_lsn);
        state.set_newest(
            Place {
                position,
                first_lsn,
                count: header.count,
                frame_len,
            },
            false,
        );
    }

    fn apply_created(&mut self, segment: SegmentId, header: &FrameHeader, body: Option<&[u8]>) {
        let created = body.and_then(Created::decode);
        let draft = self.touch(header.log_id, segment);
        draft.proven = header.end();
        let state = draft.state();
        state.created_end = header.end();
        state.last_end = state.last_end.max(header.end());
        state.created_in = segment.into();
        state.create_time = header.arrival;
        state.update_time = header.arrival;
        if let Some(created) = created {
            state.config = created.config.shared();
            state.create_time = created.create_time;
            state.update_time = created.create_time;
            if let Ok(name) = LogName::new(&created.name) {
                draft.set_name(name);
            }
        }
    }

    fn apply_configured(&mut self, segment: SegmentId, header: &FrameHeader, body: Option<&[u8]>) {
        match body.and_then(body::config) {
            Some(config) => {
                let state = self.touch(header.log_id, segment).state();
                state.config = config.shared();
                state.update_time = header.arrival;
                state.last_end = header.end();
            }
            None => self.lost_settings(header.log_id),
        }
    }

    fn lost_settings(&mut self, id: LogId) {
        self.lost_facts.push(format!(
            "a change of settings of log {id} is damaged; older ones apply"
        ));
    }

    fn apply_trim(&mut self, segment: SegmentId, id: LogId, trim: AppliedTrim, end: Position) {
        let state = self.touch(id, segment).state();
        state.last_end = state.last_end.max(end);
        let (end, kept) = (state.last_end, state.coming_kept());
        if trim.first > kept.first {
            state.add_kept(end, kept.trim(trim.first, trim.by, trim.bytes));
        }
    }

    /// Applies the combined result of all trims so far.
    fn apply_kept(&mut self, segment: SegmentId, id: LogId, kept: FirstKept, end: Position) {
        let state = self.touch(id, segment).state();
        state.last_end = state.last_end.max(end);
        let end = state.last_end;
        if kept.first > state.coming_first() {
            state.add_kept(end, kept);
        }
    }

    fn apply_fence(&mut self, segment: SegmentId, id: LogId, epoch: u64, end: Position) {
        let state = self.touch(id, segment).state();
        if epoch > state.writer_epoch() {
            // Everything that was found is on the device before the first request.
            state.add_fence(end, epoch, end);
        }
    }

    fn apply_cursor(&mut self, segment: SegmentId, header: &FrameHeader, body: Option<&[u8]>) {
        let Some(cursor) = body.and_then(CursorBody::decode) else {
            self.lost_cursor(header.log_id);
            return;
        };
        let mark = Mark {
            lsn: header.first_lsn,
            time: header.arrival,
        };
        let state = self.touch(header.log_id, segment).state();
        state.last_end = state.last_end.max(header.end());
        let extras = state.extras.get_or_insert_default();
        let mark = (!cursor.deleted).then_some(mark);
        extras.move_cursor(header.end(), &cursor.name, mark, header.end());
    }

    /// Applies a `Forgotten` frame. If it is damaged, its producers stay known, and repeats are recognised.
    fn apply_forgotten(&mut self, segment: SegmentId, header: &FrameHeader, body: Option<&[u8]>) {
        let Some(forgotten) = body.and_then(Forgotten::decode) else {
            return;
        };
        let state = self.touch(header.log_id, segment).state();
        state.last_end = state.last_end.max(header.end());
        let extras = state.extras.get_or_insert_default();
        extras.producers.forget(&forgotten, header.position);
    }

    fn lost_cursor(&mut self, id: LogId) {
        self.lost_facts.push(format!(
            "a move of a cursor of log {id} is damaged; the cursor stands where it was before"
        ));
    }

    fn apply_deleted(&mut self, segment: SegmentId, id: LogId, end: Position) {
        let state = self.touch(id, segment).state();
        state.deleted = true;
        state.stored_bytes = 0;
        state.extras = None;
        state.last_end = state.last_end.max(end);
    }

    /// Applies the entry of a directory for a damaged frame.
    pub(crate) fn apply_entry(
        &mut self,
        segment: SegmentId,
        position: Position,
        entry: &DirectoryEntry,
    ) {
        let id = entry.log_id;
        match entry.kind {
            FrameKind::Batch => {
                let to = entry.first_lsn.checked_advance(u64::from(entry.count));
                // Records between belong to other groups in the same hole, and are missing too.
                let seen = self.draft(id).state().next;
                self.lose(position, id, seen, entry.first_lsn);
                self.lose(position, id, entry.first_lsn, to.unwrap_or(entry.first_lsn));
                self.touch(id, segment);
            }
            FrameKind::Created => {
                let draft = self.touch(id, segment);
                draft.state().created_in = segment.into();
                let name = entry.name.as_deref().filter(|_| !draft.named);
                if let Some(Ok(name)) = name.map(LogName::new) {
                    draft.set_name(name);
                }
            }
            FrameKind::Deleted => self.apply_deleted(segment, id, position),
            FrameKind::Configured => self.lost_settings(id),
            FrameKind::Trim => {
                let trim = AppliedTrim {
                    first: entry.first_lsn,
                    by: TrimBy::of(entry.count),
                    bytes: 0,
                };
                self.lose_before(position, id, entry.first_lsn);
                self.apply_trim(segment, id, trim, position);
            }
            FrameKind::Fence => self.apply_fence(segment, id, entry.first_lsn.get(), position),
            FrameKind::Cursor => {
                self.lose_before(position, id, entry.first_lsn);
                self.lost_cursor(id);
            }
            FrameKind::Forgotten
            | FrameKind::Link
            | FrameKind::Marker
            | FrameKind::Seal
            | FrameKind::Run
            | FrameKind::Images
            | FrameKind::Pack
            | FrameKind::Order => {}
        }
    }

    /// Applies the closing states of a segment, which its successor records. Unseen records count as missing, at
    /// `position`.
    pub(crate) fn reconcile(
        &mut self,
        segment: SegmentId,
        closings: &[Closing],
        position: Position,
    ) {
        for closing in closings {
            let seen = self.touch(closing.log_id, segment).state().next;
            if closing.deleted {
                self.apply_deleted(segment, closing.log_id, position);
            } else {
                let next = closing.next_lsn.max(closing.first_lsn);
                self.lose(position, closing.log_id, seen, next);
                let kept = FirstKept {
                    first: closing.first_lsn,
                    expired: closing.expired,
                    bytes: 0,
                };
                self.apply_kept(segment, closing.log_id, kept, position);
                self.apply_fence(segment, closing.log_id, closing.writer_epoch, position);
            }
            let draft = self.draft(closing.log_id);
            if !draft.named {
                draft.state().created_in = closing.name.as_ref().map(|_| segment).into();
                if let Some(Ok(name)) = closing.name.as_deref().map(LogName::new) {
                    draft.set_name(name);
                }
            }
        }
    }

    /// Current states of the logs of `segment`, for the link of its successor.
    pub(crate) fn closings(&self, segment: SegmentId) -> Vec<Closing> {
        let closing = |draft: &Draft| {
            let state = draft.log.state.read();
            let name = draft.name().filter(|_| state.created_in == segment.into());
            (state.touched_in == segment.into()).then(|| Closing {
                log_id: draft.log.id,
                next_lsn: state.next,
                name: name.map(|name| name.as_str().to_owned()),
                deleted: state.deleted,
                // A deleted log has no first lsn, and a run may record a different one than a frame.
                first_lsn: match state.deleted {
                    true => Lsn::ZERO,
                    false => state.coming_first(),
                },
                expired: match state.deleted {
                    true => 0,
                    false => state.coming_kept().expired,
                },
                writer_epoch: state.writer_epoch(),
            })
        };
        let mut closings: Vec<Closing> = self.logs.values().filter_map(closing).collect();
        closings.sort_unstable_by_key(|closing| closing.log_id);
        closings
    }

    /// Applies the logs of a checkpoint, if all images can be read.
    pub(crate) fn apply_images(&mut self, images: &[&[u8]]) -> bool {
        let new = in_halves(images.len(), |at| {
            Image::decode(images[at]).map(Draft::of_image)
        });
        self.put_all(new)
    }

    /// Enters all these drafts. Returns `false` if they could not be made (`None`).
    fn put_all(&mut self, new: Option<[Vec<Draft>; 2]>) -> bool {
        let Some(halves) = new else {
            return false;
        };
        self.logs.reserve(halves.iter().map(Vec::len).sum());
        for draft in halves.into_iter().flatten() {
            self.put(draft);
        }
        true
    }

    /// Applies the state of a log at the end of a sorted run, which ended at `end`.
    pub(crate) fn apply_sorted(&mut self, image: Image, end: Position) {
        let mut draft = Draft::of_image(image);
        draft.proven = end;
        self.put(draft);
    }

    /// Notes that a later segment has a record of a log with the lsn `from`.
    pub(crate) fn give_again(&mut self, id: LogId, from: Lsn) {
        let state = self.draft(id).state();
        if from < state.next {
            state.give_again(from);
        }
    }

    /// Notes that records below `next` are missing if no file described them. Trims and cursors show this. They may
    /// stand anywhere below the tail, so they do not prove it.
    pub(crate) fn lose_before(&mut self, position: Position, id: LogId, next: Lsn) {
        let known = self.logs.get(&id);
        let seen = known.map_or(Lsn::ZERO, |draft| draft.log.state.read().next);
        self.miss(position, id, seen, next);
    }

    /// Notes damage that took no records.
    pub(crate) fn mark_damaged(&mut self, position: Position) {
        self.harmless.push(position);
    }

    /// Enters the draft from an image.
    fn put(&mut self, draft: Draft) {
        match self.logs.entry(draft.log.id) {
            Entry::Vacant(entry) => {
                entry.insert(draft);
            }
            Entry::Occupied(mut entry) => {
                let before = std::mem::replace(entry.get_mut(), draft);
                let draft = entry.get_mut();
                draft.follow(before, self.producer_window);
            }
        }
    }

    /// Applies the index of a segment in place of its frames, if it continues the logs. The index of a segment
    /// behind a lost one, or a segment that was indexed differently, does not continue them.
    pub(crate) fn apply_index(&mut self, index: &SealedIndex) -> bool {
        let new = in_halves(index.len(), |at| self.next_draft(index, &index.row_at(at)));
        self.put_all(new)
    }

    /// The draft of a log from an index, if it continues the log.
    fn next_draft(&self, index: &SealedIndex, row: &Row) -> Option<Draft> {
        let mut image = index.image(row).filter(|image| image.id == row.log_id)?;
        let mut next = Lsn::ZERO;
        if let Some(before) = self.logs.get(&row.log_id) {
            let state = before.log.state.read();
            next = state.next;
            image.chain = state.chain.clone();
        }
        // Damage may have taken the first records of the log in this segment.
        let mut reaches = next;
        for lost in &image.lost {
            if lost.from <= reaches {
                reaches = reaches.max(lost.to);
            }
        }
        let goes_on = row.first_lsn == next || (next < row.first_lsn && row.first_lsn <= reaches);
        if !goes_on || row.below != image.chain.below_next() {
            return None;
        }
        image.chain.push(index.base);
        let entries = index.entries(row);
        let newest = entries.len().checked_sub(1).and_then(|at| entries.get(at));
        let told = newest.map_or(image.created_end, |place| place.end());
        let mut draft = Draft::of_image(image);
        draft.proven = told;
        Some(draft)
    }

    /// Builds the index of the segment whose frames were just applied. From then on the index has their places.
    pub(crate) fn seal(
        &mut self,
        life: &Life,
        base: Position,
        end: Position,
        chain: u32,
    ) -> SealedIndex {
        let limit = base.advance(life.size);
        if self.segment.replace(life.id) != Some(life.id) {
            self.touched.clear();
        }
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        let rows = touched.into_iter().map(|id| {
            let draft = self.draft(id);
            let name = draft.name().cloned();
            let state = draft.state();
            let mut image = state.image(id, name);
            image.keep_changes(base);
            let row = NewRow {
                image,
                places: state.places.within(base, limit).to_vec(),
                below: state.chain.below_next(),
            };
            state.seal(base, limit);
            row
        });
        SealedIndex::build(life, base, end, chain, rows)
    }

    /// Makes the logs to be served, after all files were applied. Runs end at `sorted_end`.
    pub(crate) fn finish(mut self, sorted_end: Position, findings: &mut Vec<String>) -> Finished {
        self.name_accepted();
        let unnamed = self.unnamed();
        let mut records = 0;
        let mut damages = Vec::new();
        let mut logs = Vec::with_capacity(self.logs.len());
        for (id, mut draft) in std::mem::take(&mut self.logs) {
            let mut lost = std::mem::take(&mut draft.state().damage);
            for lost in &mut lost {
                lost.accepted = self.is_accepted_loss(id, lost);
            }
            if !draft.named {
                if draft.state().deleted {
                    lost.clear();
                }
                damages.extend(lost.iter().map(|lost| Damage {
                    from: lost.from,
                    to: lost.to,
                    accepted: lost.accepted,
                    ..Damage::of_nobody(lost.position, false)
                }));
                continue;
            }
            let proven = draft.proven;
            let state = draft.state();
            if !state.deleted {
                state.damage = lost;
            }
            let forgets = known_bad::makes(Mistake::UnprovenForgotten);
            let is_doubtful = |uncertain| proven <= uncertain && !forgets;
            state.unproven |= self.uncertain.is_some_and(is_doubtful);
            // Everything found is on the device by now.
            state.apply_trims(Position::new(u64::MAX));
            state.settle_extras();
            // Readers learn from runs why trimmed records are gone.
            let kept = state.coming_first();
            state.forget_damage(|lost| lost.position < sorted_end && lost.to <= kept);
            if !state.deleted {
                records = u64::saturating_add(records, state.records());
            }
            if !state.damage.is_empty() {
                let state = draft.log.state.read();
                let of_log = |lost| Damage::of(Arc::clone(&draft.log), lost);
                damages.extend(state.damage.iter().map(of_log));
            }
            logs.push(draft.log);
        }
        findings.extend(unnamed.iter().map(|log| {
            format!(
                "the name of log {} is lost, so that its {} records ({} bytes) cannot be reached",
                log.log_id, log.records, log.bytes
            )
        }));
        let logs = Logs::of(logs);
        let nobody = |position: &Position, harmless| Damage {
            accepted: self.is_accepted(*position, position.advance(1)),
            ..Damage::of_nobody(*position, harmless)
        };
        damages.extend(self.unattributed.iter().map(|at| nobody(at, false)));
        damages.extend(self.harmless.iter().map(|at| nobody(at, true)));
        damages.sort_by_key(|damage| {
            let log = damage.log.as_ref().map(|log| log.id);
            (damage.position, log, damage.from)
        });
        findings.append(&mut self.findings);
        Finished {
            logs,
            damages,
            records,
            // A new log could get the name of a log whose name is lost.
            uncertain: self.uncertain.is_some() || !unnamed.is_empty(),
            accepted: self.accepted,
            unnamed,
        }
    }
}

/// A log whose name is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnnamedLog {
    /// Id of the log.
    pub log_id: LogId,
    /// Number of its records that can be read.
    pub records: u64,
    /// Size of the frames that hold these records, in bytes.
    pub bytes: u64,
    /// Name of the log once the loss is accepted, if the log ever had a record.
    pub name: LogName,
}
