//! The table of logs, and the state of each log.
//!
//! Only the committer changes a log. Readers look at it under a short lock. They find the visible records by
//! comparing positions with the journal's published positions. So a batch over several logs appears in all
//! of them at once.

pub(crate) mod conditions;
pub(crate) mod damages;
pub(crate) mod extras;
pub(crate) mod image;
pub(crate) mod producers;
pub(crate) mod quotas;
pub(crate) mod versions;

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::Bound;
use std::sync::Arc;

use thin_vec::ThinVec;

use crate::api::record::Visibility;
use crate::api::record::{Compression, GapReason, LogConfig, LogInfo};
use crate::api::watch::{Watch, Watched};
use crate::base::bounds;
use crate::base::ids::{LogId, LogIdHash, LogName, Lsn, Position, SegmentOrNone, Timestamp};
use crate::base::sync::{Mutex, RwLock};
use crate::base::threads;
use crate::base::wire;
use crate::format::active::{Place, Places};
use crate::format::chain::Chain;
use crate::format::frame::HEADER_BYTES;
use crate::logs::extras::{Extras, ExtrasImage, MissingRecords};
use crate::logs::image::Image;
use crate::logs::producers::Producers;
use crate::logs::quotas::tenants::{QuotaId, TenantQuotas};
use crate::logs::quotas::{Holdings, LogUsage};

/// First record that a log keeps, and why the records below are gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FirstKept {
    /// The first record kept.
    pub(crate) first: Lsn,
    /// Number of records directly below `first` that retention expired. Trims by clients removed everything
    /// below those.
    pub(crate) expired: u64,
    /// Bytes of the frames before the one that holds `first`: the part of the log's bytes that no kept record needs.
    /// Too few after a trim by a version that did not record them, and after damage: the next trim corrects that.
    pub(crate) bytes: u64,
}

impl FirstKept {
    /// The first record that no trim of a client removed.
    pub(crate) fn trimmed(self) -> Lsn {
        Lsn::new(self.first.get().saturating_sub(self.expired))
    }

    /// These bounds for a log whose next lsn was only `next`.
    pub(crate) fn up_to(self, next: Lsn) -> Self {
        let first = self.first.min(next);
        Self {
            first,
            expired: first.since(self.trimmed().min(next)),
            bytes: self.bytes,
        }
    }

    /// The bounds after a trim that keeps `first` and everything above, with at least `bytes` before it. A trim that
    /// is not above the current `first` changes nothing.
    pub(crate) fn trim(self, first: Lsn, by: TrimBy, bytes: u64) -> Self {
        let more = first.since(self.first);
        if more == 0 {
            return self;
        }
        let expired = match by {
            TrimBy::Somebody => 0,
            TrimBy::Retention => self.expired.saturating_add(more),
        };
        let bytes = bytes.max(self.bytes);
        Self {
            first,
            expired,
            bytes,
        }
    }
}

/// Records of one log that are lost to damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) from: Lsn,
    /// The lsn behind the last of them.
    pub(crate) to: Lsn,
    /// Their position in the journal, as far as it is known.
    pub(crate) position: Position,
    /// An operator has accepted the loss.
    pub(crate) accepted: bool,
}

/// The losses without the records from `from` up to `to`.
pub(crate) fn without(losses: &[Lost], from: Lsn, to: Lsn) -> Vec<Lost> {
    let rest = losses.iter().flat_map(|lost| {
        let parts = cut((lost.from, lost.to), (from, to));
        parts.map(|(from, to)| Lost { from, to, ..*lost })
    });
    rest.collect()
}

/// The parts of a range that lie outside of another: below it and above it, none of them empty.
pub(crate) fn cut(
    range: (Lsn, Lsn),
    without: (Lsn, Lsn),
) -> impl Iterator<Item = (Lsn, Lsn)> + use<> {
    let below = (range.0, range.1.min(without.0));
    let above = (range.0.max(without.1), range.1);
    [below, above].into_iter().filter(|(from, to)| from < to)
}

impl Lost {
    /// Appends the encoded loss to a message.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        for number in [
            self.from.get(),
            self.to.since(self.from),
            self.position.get(),
            u64::from(self.accepted),
        ] {
            wire::put_varint(out, number);
        }
    }

    /// Reads one encoded loss. `None` if it is malformed.
    pub(crate) fn decode(mut input: &[u8]) -> Option<Self> {
        let mut number = || wire::take_varint(&mut input);
        let from = bounds::lsn(number()?)?;
        let lost = Self {
            from,
            to: bounds::lsn(from.get().checked_add(number()?)?)?,
            position: bounds::position(number()?)?,
            accepted: number()? != 0,
        };
        (lost.from < lost.to).then_some(lost)
    }
}

/// Cause of a trim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TrimBy {
    Somebody,
    Retention,
}

impl TrimBy {
    /// The record count in the header of a trim, and in directories.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Somebody => 0,
            Self::Retention => 1,
        }
    }

    pub(crate) fn of(number: u32) -> Self {
        match number {
            0 => Self::Somebody,
            _ => Self::Retention,
        }
    }
}

/// One log. There may be a million logs, nearly all idle, so fields that few logs use lie behind a pointer.
pub(crate) struct Log {
    pub(crate) id: LogId,
    pub(crate) name: LogName,
    pub(crate) state: RwLock<LogState>,
    watch: Watch,
}

impl Watched for Log {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

/// The part of a log that changes.
#[derive(Debug, Clone)]
pub(crate) struct LogState {
    /// The lsn of the next record to be assigned.
    pub(crate) next: Lsn,
    /// Stored time of the newest record.
    pub(crate) last_time: Timestamp,
    /// End of the frame that created the log.
    pub(crate) created_end: Position,
    /// End of the newest frame about the log.
    pub(crate) last_end: Position,
    /// Places of its frames in segments that have no index yet.
    pub(crate) places: Places,
    /// Earlier segments, which have an index.
    pub(crate) chain: Chain,
    /// Where the log begins, by trims that are on the device.
    kept: FirstKept,
    /// Trims that are not on the device yet: end of the frame, where the log begins after it.
    trims: ThinVec<(Position, FirstKept)>,
    /// Records in memory only (sync mode `manual`).
    pub(crate) buffered: Option<Box<Buffered>>,
    pub(crate) config: Arc<LogConfig>,
    /// Writer epoch, producers, cursors.
    pub(crate) extras: Option<Box<Extras>>,
    pub(crate) create_time: Timestamp,
    pub(crate) update_time: Timestamp,
    /// Bytes of all frames with records that the log ever had, also of trimmed ones.
    pub(crate) stored_bytes: u64,
    /// Records that are lost to damage, in order and not overlapping. Trimmed ones stay until
    /// the sorter has passed them, so that readers of the journal learn why they are gone.
    pub(crate) damage: ThinVec<Lost>,
    /// Damage may have taken records at and beyond `next`.
    pub(crate) unproven: bool,
    pub(crate) deleted: bool,
    /// The quota of the tenant that the log belongs to.
    pub(crate) quota: Option<QuotaId>,
    /// No record expires by age before the expiry clock shows this, in seconds since the Unix epoch. 0: not
    /// looked up since the start, or since the settings changed.
    pub(crate) ages_at: u32,
    /// The segment that last counted this log among those it touches.
    pub(crate) touched_in: SegmentOrNone,
    /// The segment the log was created in.
    pub(crate) created_in: SegmentOrNone,
}

/// Records of one log that are accepted but not written.
#[derive(Debug, Clone)]
pub(crate) struct Buffered {
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    /// Arrival of the newest record; each record has a stored time of its own.
    pub(crate) arrival: Timestamp,
    /// Stored time of the record before `first_lsn`.
    pub(crate) time_before: Timestamp,
    pub(crate) body: Vec<u8>,
}

/// State of a log that only the committer changes, saved for a rollback.
#[derive(Debug)]
pub(crate) struct SavedLog {
    next: Lsn,
    last_time: Timestamp,
    last_end: Position,
    config: Arc<LogConfig>,
    update_time: Timestamp,
    touched_in: SegmentOrNone,
}

impl Buffered {
    /// Size of the frame that will hold the records, in bytes, before compression.
    fn frame_bytes(&self) -> u64 {
        ((HEADER_BYTES + self.body.len()) as u64).next_multiple_of(8)
    }
}

/// Frames that the committer visits to count the bytes before a trim.
const NEAR_PLACES: usize = 4096;

impl LogState {
    /// The state that [`LogState::roll_back`] needs.
    pub(crate) fn standing(&self) -> SavedLog {
        SavedLog {
            next: self.next,
            last_time: self.last_time,
            last_end: self.last_end,
            config: Arc::clone(&self.config),
            update_time: self.update_time,
            touched_in: self.touched_in,
        }
    }

    /// Takes back everything from `start` on, where the log had this state.
    pub(crate) fn roll_back(&mut self, start: Position, standing: SavedLog) {
        self.next = standing.next;
        self.last_time = standing.last_time;
        self.last_end = standing.last_end;
        if self.config != standing.config {
            self.ages_at = 0;
        }
        self.config = standing.config;
        self.update_time = standing.update_time;
        self.touched_in = standing.touched_in;
        self.trims.retain(|(end, _)| *end <= start);
        if let Some(extras) = &mut self.extras {
            extras.cut(start);
        }
        self.stored_bytes -= self.places.cut(start).min(self.stored_bytes);
    }

    /// The tail for a reader to whom everything below `published` is visible.
    pub(crate) fn tail(&self, published: Position) -> Lsn {
        let place = self
            .places
            .first_beyond(published)
            .filter(|_| self.last_end > published);
        match (place, &self.buffered) {
            (Some(place), _) => place.first_lsn,
            (None, Some(buffered)) => buffered.first_lsn,
            (None, None) => self.next,
        }
    }

    /// The tail with all records that have a place in the journal.
    pub(crate) fn journaled_next(&self) -> Lsn {
        self.buffered
            .as_ref()
            .map_or(self.next, |buffered| buffered.first_lsn)
    }

    /// The tail with records that are in memory only.
    pub(crate) fn accepted_tail(&self, written: Position) -> Lsn {
        if self.last_end <= written {
            self.next
        } else {
            self.tail(written)
        }
    }

    /// The first record kept, for a reader that sees everything below `durable`. All of that is on the device, so no
    /// power cut takes back a trim that shows.
    pub(crate) fn first(&self, durable: Position) -> Lsn {
        self.kept(durable).first
    }

    /// The first record kept, as for [`LogState::first`], and why the records below are gone.
    pub(crate) fn kept(&self, durable: Position) -> FirstKept {
        let visible = self.trims.iter().rev().find(|(end, _)| *end <= durable);
        visible.map_or(self.kept, |(_, kept)| *kept)
    }

    /// The first record kept once all trims so far are on the device.
    pub(crate) fn coming_first(&self) -> Lsn {
        self.coming_kept().first
    }

    pub(crate) fn coming_kept(&self) -> FirstKept {
        self.trims.last().map_or(self.kept, |(_, kept)| *kept)
    }

    /// The log begins at `kept` once the frame that ends at `end` is on the device.
    pub(crate) fn add_kept(&mut self, end: Position, kept: FirstKept) {
        let bytes = kept.bytes.max(self.coming_kept().bytes);
        self.last_end = end;
        self.trims.push((end, FirstKept { bytes, ..kept }));
    }

    /// Bytes that the kept records take: their whole frames, and the frame to come of records in memory only.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let written = self.stored_bytes.saturating_sub(self.coming_kept().bytes);
        self.buffered
            .as_ref()
            .map_or(written, |buffered| written + buffered.frame_bytes())
    }

    /// Bytes of the frames before the one that holds `lsn`, if at most [`NEAR_PLACES`] frames in memory follow.
    pub(crate) fn bytes_before(&self, lsn: Lsn) -> Option<u64> {
        let at = self.places.index_of(lsn);
        let behind = self.places.from(at);
        let known = at > 0 || behind.first().is_some_and(|place| place.first_lsn <= lsn);
        if !known && lsn < self.journaled_next() || behind.len() > NEAR_PLACES {
            return None;
        }
        let behind = behind.iter().map(|place| u64::from(place.frame_len));
        Some(self.stored_bytes.saturating_sub(behind.sum()))
    }

    /// Applies trims that are on the device. Places stay until they are indexed: an index describes
    /// everything that its segment holds, and so the fate of an older epoch.
    pub(crate) fn apply_trims(&mut self, durable: Position) {
        self.kept = self.kept(durable);
        self.trims.retain(|(end, _)| *end > durable);
    }

    /// The damaged range that holds `lsn`, or the first one after it.
    pub(crate) fn damage_from(&self, lsn: Lsn) -> Option<(Lsn, Lsn)> {
        let index = self.damage.partition_point(|lost| lost.to <= lsn);
        let mut lost = self.damage.get(index..)?.iter();
        let first = lost.next()?;
        let adjacent = lost.scan(first.to, |to, next| {
            (next.from == *to).then(|| {
                *to = next.to;
                *to
            })
        });
        Some((first.from, adjacent.last().unwrap_or(first.to)))
    }

    /// Whether damage took all records from `from` up to `to`.
    pub(crate) fn is_lost(&self, from: Lsn, to: Lsn) -> bool {
        let index = self.damage.partition_point(|lost| lost.to <= from);
        let mut reached = from;
        for lost in self.damage.iter().skip(index) {
            if reached >= to || lost.from > reached {
                break;
            }
            reached = lost.to;
        }
        reached >= to
    }

    /// Ranges that this store has never had, in order.
    pub(crate) fn missing(&self) -> &[MissingRecords] {
        self.extras.as_deref().map_or(&[], |extras| &extras.missing)
    }

    /// Why the record at `from`, which was not found in its place, cannot be read. Also returns the end of
    /// the range with this reason, at most `to`.
    pub(crate) fn gap_from(&self, from: Lsn, to: Lsn) -> (Lsn, GapReason) {
        match self.missing().iter().find(|missing| missing.to > from) {
            Some(missing) if missing.from <= from => (missing.to.min(to), missing.reason()),
            Some(missing) => (missing.from.min(to), GapReason::Quarantined),
            None => (to, GapReason::Quarantined),
        }
    }

    /// Notes that records are lost to damage. Records already known to be lost keep their known position.
    /// Returns the records that were not known to be lost.
    pub(crate) fn add_damage(&mut self, lost: Lost) -> Vec<Lost> {
        let mut from = lost.from;
        let mut at = self.damage.partition_point(|known| known.to <= from);
        let mut new = Vec::new();
        while from < lost.to {
            let next = self.damage.get(at).copied();
            let to = next.map_or(lost.to, |next| next.from.min(lost.to));
            if from < to {
                let part = Lost { from, to, ..lost };
                self.damage.insert(at, part);
                new.push(part);
                at += 1;
            }
            from = next.map_or(lost.to, |next| next.to);
            at += 1;
        }
        new
    }

    /// Records that counted as lost can be read again.
    pub(crate) fn find_again(&mut self, from: Lsn, to: Lsn) {
        self.damage = without(&self.damage, from, to).into();
    }

    /// Forgets the damage for which `gone` is true, because no reader can meet it any more.
    pub(crate) fn forget_damage(&mut self, gone: impl Fn(&Lost) -> bool) {
        self.damage.retain(|lost| !gone(lost));
    }

    /// Records lost to damage between these positions.
    pub(crate) fn lost_between(&self, from: Position, to: Position) -> Vec<Lost> {
        if self.deleted {
            return Vec::new();
        }
        let within = |lost: &&Lost| from <= lost.position && lost.position < to;
        self.damage.iter().filter(within).copied().collect()
    }

    /// Whether records lost to damage are still missed: they are neither trimmed nor deleted.
    pub(crate) fn misses(&self, lost: &Lost) -> bool {
        !self.deleted && lost.to > self.coming_first()
    }

    /// A record has the lsn `from` again, after the loss of all records from there on was accepted. Returns
    /// whether all of them were lost; then they count as lost no more.
    pub(crate) fn give_again(&mut self, from: Lsn) -> bool {
        if !self.is_lost(from, self.next) {
            return false;
        }
        self.damage.retain(|lost| lost.from < from);
        if let Some(last) = self.damage.last_mut() {
            last.to = last.to.min(from);
        }
        self.next = from;
        true
    }

    /// By these settings, no record expires before the expiry clock shows `ages_at`. Does nothing if the
    /// settings changed since it was computed.
    pub(crate) fn note_ages_at(&mut self, ages_at: u32, config: &Arc<LogConfig>) {
        if self.config == *config {
            self.ages_at = ages_at;
        }
    }

    /// Records kept, not known to be damaged, and not missing.
    pub(crate) fn records(&self) -> u64 {
        let kept = self.next.since(self.coming_first());
        let first = self.coming_first();
        let damaged = self.damage.iter().filter(|lost| lost.to > first);
        let damaged = damaged.map(|lost| lost.to.since(lost.from.max(first)));
        let missing = self.missing().iter();
        let missing = missing.map(|m| m.to.since(m.from.max(first)));
        damaged.chain(missing).fold(kept, u64::saturating_sub)
    }

    /// The log's cursors, as counted in the load of the whole store.
    pub(crate) fn cursor_load(&self) -> LogUsage {
        let extras = self.extras.as_deref();
        extras.map_or_else(LogUsage::default, Extras::cursor_load)
    }

    /// The writer epoch with every fence so far.
    pub(crate) fn writer_epoch(&self) -> u64 {
        let newest = |extras: &Extras| *extras.writer_epoch.newest();
        self.extras.as_deref().map_or(0, newest)
    }

    /// The lsn of the lowest cursor with every move so far; `None` without cursors.
    pub(crate) fn lowest_cursor(&self) -> Option<Lsn> {
        let cursors = self.extras.as_deref()?.cursors.values();
        cursors.filter_map(|mark| Some((*mark.newest())?.lsn)).min()
    }

    /// Notes a fence in the newest frame of the log.
    pub(crate) fn add_fence(&mut self, end: Position, epoch: u64, durable: Position) {
        self.last_end = self.last_end.max(end);
        let extras = self.extras.get_or_insert_default();
        extras.writer_epoch.push(end, epoch, durable);
    }

    /// Marks all changes so far as being on the device.
    pub(crate) fn settle_extras(&mut self) {
        if let Some(extras) = &mut self.extras {
            **extras = Extras::from(&ExtrasImage::from(&**extras));
        }
    }

    /// The state of the log without records that are in memory only.
    pub(crate) fn image(&self, id: LogId, name: Option<LogName>) -> Image {
        Image {
            id,
            name,
            next: self.journaled_next(),
            kept: self.coming_kept(),
            last_time: self
                .buffered
                .as_ref()
                .map_or(self.last_time, |buffered| buffered.time_before),
            created_end: self.created_end,
            last_end: self.last_end,
            create_time: self.create_time,
            update_time: self.update_time,
            stored_bytes: self.stored_bytes,
            deleted: self.deleted,
            config: Arc::clone(&self.config),
            touched_in: self.touched_in.get(),
            created_in: self.created_in.get(),
            chain: self.chain.clone(),
            extras: self
                .extras
                .as_deref()
                .map(|extras| Box::new(ExtrasImage::from(extras))),
            lost: match self.deleted {
                true => Vec::new(),
                false => self.damage.to_vec(),
            },
        }
    }

    /// A log in the state of its image.
    pub(crate) fn of_image(image: Image) -> Self {
        let extras = image.extras.as_deref();
        let mut state = Self {
            next: image.next,
            last_time: image.last_time,
            created_end: image.created_end,
            last_end: image.last_end,
            places: Places::default(),
            chain: image.chain,
            kept: image.kept,
            trims: ThinVec::new(),
            buffered: None,
            config: image.config,
            extras: extras.map(|extras| Box::new(Extras::from(extras))),
            create_time: image.create_time,
            update_time: image.update_time,
            stored_bytes: image.stored_bytes,
            damage: ThinVec::new(),
            unproven: false,
            deleted: image.deleted,
            quota: None,
            ages_at: 0,
            touched_in: image.touched_in.into(),
            created_in: image.created_in.into(),
        };
        for lost in image.lost {
            state.add_damage(lost);
        }
        state
    }

    /// Keeps from `before` everything that an image does not hold. An image holds changes of producers, with
    /// at most `window` batches for each.
    pub(crate) fn follow(&mut self, before: &mut Self, window: u64) {
        self.places = std::mem::take(&mut before.places);
        for lost in before.damage.drain(..) {
            self.add_damage(lost);
        }
        self.unproven = before.unproven;
        let producers = before
            .extras
            .as_deref_mut()
            .map(|extras| &mut extras.producers);
        let Some(producers) = producers.filter(|producers| !producers.is_empty()) else {
            return;
        };
        if self.deleted {
            return;
        }
        let mut producers = std::mem::take(producers);
        let extras = self.extras.get_or_insert_default();
        producers.apply(std::mem::take(&mut extras.producers), window);
        extras.producers = producers;
    }

    /// The segment at `base` has an index now, which covers everything before `limit`.
    pub(crate) fn seal(&mut self, base: Position, limit: Position) {
        self.places.drop_before(limit);
        self.chain.push(base);
    }

    /// The segment below `limit` has an index now, and `producers` is the state at its end.
    pub(crate) fn index_producers(&mut self, limit: Position, producers: Producers) {
        if let Some(extras) = &mut self.extras {
            extras.index_producers(limit, producers);
        }
    }

    /// How the log's frames are compressed.
    pub(crate) fn compression(&self) -> Compression {
        self.config.compression.unwrap_or(Compression::None)
    }

    /// Corrects the length of the newest frame to `frame_len` bytes.
    pub(crate) fn resize_newest(&mut self, frame_len: u32) {
        if let Some(place) = self.places.pop() {
            self.set_newest(Place { frame_len, ..place }, false);
            self.stored_bytes -= u64::from(place.frame_len);
        }
    }

    /// Enters the newest frame. `grows`: the frame replaces the newest one, which has grown.
    pub(crate) fn set_newest(&mut self, place: Place, grows: bool) {
        self.next = place.next_lsn();
        self.last_end = place.end();
        self.stored_bytes += u64::from(place.frame_len);
        if grows && let Some(before) = self.places.pop() {
            self.stored_bytes -= u64::from(before.frame_len);
        }
        self.places.push(place);
    }
}

impl Log {
    /// A log just created, at `created_end`.
    pub(crate) fn new(
        id: LogId,
        name: LogName,
        config: LogConfig,
        create_time: Timestamp,
        created_end: Position,
    ) -> Self {
        Self {
            id,
            name,
            state: RwLock::new(LogState {
                next: Lsn::ZERO,
                last_time: Timestamp::from_micros(i64::MIN),
                created_end,
                last_end: created_end,
                places: Places::default(),
                chain: Chain::default(),
                kept: FirstKept::default(),
                trims: ThinVec::new(),
                buffered: None,
                config: config.shared(),
                extras: None,
                create_time,
                update_time: create_time,
                stored_bytes: 0,
                damage: ThinVec::new(),
                unproven: false,
                deleted: false,
                quota: None,
                ages_at: 0,
                touched_in: SegmentOrNone::default(),
                created_in: SegmentOrNone::default(),
            }),
            watch: Watch::default(),
        }
    }

    /// A log as recovery found it.
    pub(crate) fn recovered(id: LogId, name: LogName, state: LogState) -> Self {
        Self {
            id,
            name,
            state: RwLock::new(state),
            watch: Watch::default(),
        }
    }

    /// The log for administration: tail and writer epoch as visible to a reader that sees everything below
    /// `published`. The caller adds the replicated lsn.
    pub(crate) fn info(&self, tail_lsn: Lsn, durable: Position, published: Position) -> LogInfo {
        let state = self.state.read();
        let seen = published.min(durable);
        let extras = state.extras.as_deref();
        let settings = extras.and_then(|extras| extras.settings_at(published));
        let (config, update_time) = match settings {
            Some((config, update_time)) => (config, *update_time),
            None => (&state.config, state.update_time),
        };
        LogInfo {
            name: self.name.clone(),
            log_id: self.id,
            config: Arc::clone(config),
            first_lsn: state.kept(seen).first,
            expired: state.kept(seen).expired,
            tail_lsn,
            durable_lsn: state.tail(durable),
            replicated_lsn: None,
            writer_epoch: state
                .extras
                .as_deref()
                .map_or(0, |extras| *extras.writer_epoch.at(published)),
            stored_bytes: state.kept_bytes(),
            create_time: state.create_time,
            update_time,
            first_producer_epoch: state
                .extras
                .as_deref()
                .map_or(0, |extras| extras.producers.first_epoch()),
        }
    }
}

/// All logs, by name and by id. Deleted logs keep their id here until all their frames are sorted away, so
/// that a reader who meets their frames can name the log.
#[derive(Default)]
pub(crate) struct Logs {
    tables: RwLock<Tables>,
    /// Producers and cursors of all logs. Only the committer changes it.
    load: Mutex<LogUsage>,
    /// Number of logs, by their number of producers. Only the committer changes it.
    crowds: Mutex<Crowds>,
    /// Quotas of tenants, and their use. Only the committer changes them.
    quotas: Mutex<TenantQuotas>,
}

/// Number of logs for each number of producers that a log has; logs without producers do not count.
#[derive(Debug, Default)]
struct Crowds(BTreeMap<u64, u64>);

impl Crowds {
    /// A log had `before` producers, and has `after`.
    fn change(&mut self, before: u64, after: u64) {
        if before == after {
            return;
        }
        if let Some(logs) = self.0.get_mut(&before) {
            *logs -= 1;
            if *logs == 0 {
                self.0.remove(&before);
            }
        }
        if after > 0 {
            *self.0.entry(after).or_default() += 1;
        }
    }

    /// Producers of the log that has the most.
    fn most(&self) -> u64 {
        self.0
            .last_key_value()
            .map_or(0, |(producers, _)| *producers)
    }
}

/// A log in a table by id. The id is not stored a second time next to it: a million entries take 16 MiB less.
struct ById(Arc<Log>);

impl Borrow<LogId> for ById {
    fn borrow(&self) -> &LogId {
        &self.0.id
    }
}

impl Hash for ById {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.0.id.hash(hasher);
    }
}

impl PartialEq for ById {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}

impl Eq for ById {}

#[derive(Default)]
struct Tables {
    names: BTreeMap<LogName, Arc<Log>>,
    ids: HashSet<ById, LogIdHash>,
    /// Deleted logs.
    gone: BTreeMap<LogId, Arc<Log>>,
    /// Bytes of the names of `names`, and of `gone`.
    name_bytes: u64,
    gone_bytes: u64,
}

fn name_bytes(log: &Log) -> u64 {
    log.name.as_str().len() as u64
}

/// Logs that a walk over all logs visits under one hold of the tables. No log can be created meanwhile.
const STEP: usize = 1024;

/// Number of logs from which a second thread pays.
const MANY: usize = 20_000;

/// A log with its sort key, gathered in the order of memory: usually the first bytes in which names differ,
/// the name, the log.
type KeyedLog = (u64, LogName, Arc<Log>);

/// Logs in the order of their names. Of two logs with one name, the newer one comes last.
fn in_order(logs: &[Arc<Log>]) -> Vec<KeyedLog> {
    fn bytes(log: &Arc<Log>) -> &[u8] {
        log.name.as_str().as_bytes()
    }
    let first = logs.first().map_or(&[][..], bytes);
    let alike = |log| std::iter::zip(first, bytes(log)).take_while(|(a, b)| a == b);
    let shared = logs.iter().map(|log| alike(log).count()).min().unwrap_or(0);
    let key = |log: &Arc<Log>| {
        let mut key = [0; 8];
        std::iter::zip(&mut key, &bytes(log)[shared..]).for_each(|(to, byte)| *to = *byte);
        u64::from_be_bytes(key)
    };
    let order = |(key, name, log): &KeyedLog, (other_key, other_name, other): &KeyedLog| {
        key.cmp(other_key)
            .then_with(|| name.cmp(other_name))
            .then_with(|| log.id.cmp(&other.id))
    };
    let sorted = |logs: &[Arc<Log>]| {
        let keyed = logs
            .iter()
            .map(|log| (key(log), log.name.clone(), Arc::clone(log)));
        let mut keyed: Vec<KeyedLog> = keyed.collect();
        keyed.sort_unstable_by(order);
        keyed
    };
    if logs.len() < MANY {
        return sorted(logs);
    }
    let (first, second) = logs.split_at(logs.len() / 2);
    let (mut first, second) = threads::both(|| sorted(first), || sorted(second));
    first.extend(second);
    // Merges the two halves, which are in order.
    first.sort_by(order);
    first
}

impl Tables {
    /// Frees the name of a log, if the name belongs to it.
    fn take_name(&mut self, log: &Log) {
        let named = self.names.get(&log.name);
        if named.is_some_and(|named| named.id == log.id) {
            self.names.remove(&log.name);
            self.name_bytes -= name_bytes(log).min(self.name_bytes);
        }
    }
}

impl Logs {
    /// Builds the table of all logs. Deleted logs have no names in it.
    pub(crate) fn of(logs: Vec<Arc<Log>>) -> Self {
        let (mut there, mut gone) = (Vec::with_capacity(logs.len()), BTreeMap::new());
        let (mut load, mut all_bytes, mut gone_bytes) = (LogUsage::default(), 0, 0);
        let mut crowds = Crowds::default();
        for log in &logs {
            let state = log.state.read();
            if state.deleted {
                gone.insert(log.id, Arc::clone(log));
                gone_bytes += name_bytes(log);
            } else {
                let own = LogUsage::of(state.extras.as_deref());
                load.add(own);
                crowds.change(0, own.producers);
                all_bytes += name_bytes(log);
                there.push(Arc::clone(log));
            }
        }
        let many = logs.len() >= MANY;
        let named = in_order(&there).into_iter();
        // Of two logs with one name, the last is kept.
        let names = || named.map(|(_, name, log)| (name, log)).collect();
        let ids = || logs.into_iter().map(ById).collect();
        let (names, ids) = match many {
            true => threads::both(names, ids),
            false => (names(), ids()),
        };
        let tables = Tables {
            names,
            ids,
            gone,
            name_bytes: all_bytes,
            gone_bytes,
        };
        Self {
            tables: RwLock::new(tables),
            load: Mutex::new(load),
            crowds: Mutex::new(crowds),
            quotas: Mutex::default(),
        }
    }

    /// Totals of all logs together.
    pub(crate) fn holdings(&self) -> Holdings {
        let load = *self.load.lock();
        let tables = self.tables.read();
        Holdings {
            logs: tables.names.len() as u64,
            deleted: tables.gone.len() as u64,
            producers: load.producers,
            producers_of_log: self.crowds.lock().most(),
            cursors: load.cursors,
            gone: load.gone,
            name_bytes: tables.name_bytes + load.name_bytes,
            deleted_name_bytes: tables.gone_bytes,
        }
    }

    /// Totals of all logs together, counted again.
    #[cfg(test)]
    pub(crate) fn recount(&self) -> Holdings {
        let mut found = Holdings::default();
        for log in self.all_known() {
            let state = log.state.read();
            if state.deleted {
                found.deleted += 1;
                found.deleted_name_bytes += name_bytes(&log);
                continue;
            }
            let load = LogUsage::of(state.extras.as_deref());
            found.logs += 1;
            found.producers += load.producers;
            found.producers_of_log = found.producers_of_log.max(load.producers);
            found.cursors += load.cursors;
            found.gone += load.gone;
            found.name_bytes += name_bytes(&log) + load.name_bytes;
        }
        found
    }

    /// A log of this quota has more than before.
    pub(crate) fn add(&self, quota: Option<QuotaId>, more: LogUsage) {
        self.load.lock().add(more);
        if let Some(quota) = quota {
            self.quotas.lock().add(quota, more.into());
        }
    }

    /// A log had `before` producers, and has `after`.
    pub(crate) fn change_producers(&self, before: u64, after: u64) {
        self.crowds.lock().change(before, after);
    }

    /// A log of this quota has less than before.
    pub(crate) fn take(&self, quota: Option<QuotaId>, less: LogUsage) {
        self.load.lock().take(less);
        if let Some(quota) = quota {
            self.quotas.lock().take(quota, less.into());
        }
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<Log>> {
        self.tables.read().names.get(name).cloned()
    }

    pub(crate) fn by_id(&self, id: LogId) -> Option<Arc<Log>> {
        self.tables
            .read()
            .ids
            .get(&id)
            .map(|log| Arc::clone(&log.0))
    }

    pub(crate) fn insert(&self, log: Arc<Log>) {
        let mut tables = self.tables.write();
        tables.name_bytes += name_bytes(&log);
        tables.ids.replace(ById(Arc::clone(&log)));
        tables.names.insert(log.name.clone(), log);
    }

    /// Removes a log whose creation was taken back.
    pub(crate) fn remove(&self, log: &Log) {
        let load = {
            let mut state = log.state.write();
            self.leave_quota(&mut state);
            LogUsage::of(state.extras.as_deref())
        };
        self.take(None, load);
        self.change_producers(load.producers, 0);
        let mut tables = self.tables.write();
        tables.take_name(log);
        tables.ids.remove(&log.id);
    }

    /// Takes the name from a deleted log; its identity stays known.
    pub(crate) fn remove_name(&self, log: &Arc<Log>) {
        let mut tables = self.tables.write();
        tables.take_name(log);
        if tables.gone.insert(log.id, Arc::clone(log)).is_none() {
            tables.gone_bytes += name_bytes(log);
        }
    }

    /// The oldest deleted log of this name that is not forgotten and for which `wanted` is true.
    pub(crate) fn deleted_by_name(
        &self,
        name: &LogName,
        wanted: impl Fn(&Log) -> bool,
    ) -> Option<Arc<Log>> {
        let mut after = Bound::Unbounded;
        loop {
            let tables = self.tables.read();
            let mut last = None;
            for (id, log) in tables.gone.range((after, Bound::Unbounded)).take(STEP) {
                if log.name == *name && wanted(log) {
                    return Some(Arc::clone(log));
                }
                last = Some(*id);
            }
            after = Bound::Excluded(last?);
        }
    }

    /// End of the newest frame of all deleted logs that are not forgotten.
    pub(crate) fn last_deletion(&self) -> Option<Position> {
        let tables = self.tables.read();
        let ends = tables.gone.values().map(|log| log.state.read().last_end);
        ends.max()
    }

    /// Forgets logs whose deletion lies below `end`, where everything is sorted: no frame is left that a
    /// reader could meet.
    pub(crate) fn forget_deleted(&self, end: Position) {
        let mut after = Bound::Unbounded;
        loop {
            let mut tables = self.tables.write();
            let rest = tables.gone.range((after, Bound::Unbounded)).take(STEP);
            let step: Vec<Arc<Log>> = rest.map(|(_, log)| Arc::clone(log)).collect();
            let Some(last) = step.last() else {
                return;
            };
            after = Bound::Excluded(last.id);
            for log in step {
                if log.state.read().last_end <= end {
                    if tables.gone.remove(&log.id).is_some() {
                        tables.gone_bytes -= name_bytes(&log).min(tables.gone_bytes);
                    }
                    tables.ids.remove(&log.id);
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.tables.read().names.len()
    }

    /// Visits at most `count` logs that have a name, from behind `after` on, and passes each to `wanted`.
    /// Returns the last name visited; `None` if none was left.
    pub(crate) fn look_over(
        &self,
        after: Option<&LogName>,
        count: usize,
        mut wanted: impl FnMut(&Arc<Log>),
    ) -> Option<LogName> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let tables = self.tables.read();
        let mut last = None;
        for (name, log) in tables
            .names
            .range::<LogName, _>((start, Bound::Unbounded))
            .take(count)
        {
            wanted(log);
            last = Some(name);
        }
        last.cloned()
    }

    /// At most `limit` and [`STEP`] logs whose names start with `prefix`, in name order, after `after`.
    fn step(&self, prefix: &str, after: Option<&str>, limit: usize) -> Vec<Arc<Log>> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.tables
            .read()
            .names
            .range::<str, _>((start, Bound::Unbounded))
            .take_while(|(name, _)| name.as_str().starts_with(prefix))
            .take(limit.min(STEP))
            .map(|(_, log)| Arc::clone(log))
            .collect()
    }

    /// Every log that has a name, by name. Gathered in steps: logs created or deleted meanwhile may or may
    /// not be in it.
    pub(crate) fn all(&self) -> Vec<Arc<Log>> {
        let mut logs: Vec<Arc<Log>> = Vec::with_capacity(self.len());
        loop {
            let step = self.step("", logs.last().map(|log| log.name.as_str()), STEP);
            if step.is_empty() {
                return logs;
            }
            logs.extend(step);
        }
    }

    /// Every log, also deleted ones, by id, which is mostly the order of memory. Gathered in steps as by
    /// [`Logs::all`].
    pub(crate) fn all_known(&self) -> Vec<Arc<Log>> {
        let mut logs = self.all();
        let named = logs.len();
        loop {
            let last = logs[named..].last();
            let after = last.map_or(Bound::Unbounded, |log| Bound::Excluded(log.id));
            let tables = self.tables.read();
            let rest = tables.gone.range((after, Bound::Unbounded));
            let step: Vec<_> = rest.take(STEP).map(|(_, log)| Arc::clone(log)).collect();
            drop(tables);
            if step.is_empty() {
                break;
            }
            logs.extend(step);
        }
        logs.sort_by_cached_key(|log| log.id);
        // A log deleted meanwhile was also met under its name.
        logs.dedup_by_key(|log| log.id);
        logs
    }

    /// At most `limit` logs whose names start with `prefix` and come after `after`, in name order, and for
    /// which `visible` is true.
    pub(crate) fn page(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        visible: impl Fn(&Log) -> bool,
    ) -> Vec<Arc<Log>> {
        let mut page = Vec::new();
        let mut step = self.step(prefix, after, limit);
        while let Some(last) = step.last().cloned() {
            let missing = limit - page.len();
            page.extend(step.into_iter().filter(|log| visible(log)).take(missing));
            if page.len() == limit {
                break;
            }
            // Few logs are not visible: those created since the last flush.
            step = self.step(prefix, Some(last.name.as_str()), limit);
        }
        page
    }
}

/// The tail of a log for a reader of this visibility to whom everything below `published` is visible.
pub(crate) fn tail_at(log: &Log, visibility: Visibility, published: Position) -> Lsn {
    let state = log.state.read();
    match visibility {
        Visibility::Accepted => state.accepted_tail(published),
        Visibility::Written | Visibility::Durable | Visibility::Replicated => state.tail(published),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_log_takes_few_bytes() {
        // A million logs must fit 512 MiB, with their names and the tables.
        assert!(size_of::<Log>() <= 232, "{} bytes", size_of::<Log>());
    }

    fn log(number: u64) -> Arc<Log> {
        let name = LogName::new(&format!("log/{number:05}")).unwrap();
        let (config, time) = (LogConfig::default(), Timestamp::default());
        let log = Log::new(LogId::new(number), name, config, time, Position::ZERO);
        Arc::new(log)
    }

    fn numbers(logs: &[Arc<Log>]) -> Vec<u64> {
        logs.iter().map(|log| log.id.get()).collect()
    }

    #[test]
    fn all_logs_are_gathered_in_steps_and_pages_hold_visible_logs() {
        let count = 3 * STEP as u64 + 7;
        let logs: Vec<_> = (1..=count).rev().map(log).collect();
        logs[0].state.write().deleted = true;
        let table = Logs::of(logs);
        assert_eq!(numbers(&table.all()), (1..count).collect::<Vec<_>>());
        table.remove_name(&table.by_id(LogId::new(5)).unwrap());
        table.remove_name(&table.by_id(LogId::new(4)).unwrap());
        assert_eq!(table.len() as u64, count - 3);
        let mut expected: Vec<u64> = (1..4).chain(6..count).collect();
        assert_eq!(numbers(&table.all()), expected);
        expected.extend([4, 5, count]);
        expected.sort_unstable();
        assert_eq!(numbers(&table.all_known()), expected);
        let few = table.page("log/", Some("log/00002"), 3, |log| log.id.get() % 1500 == 0);
        assert_eq!(numbers(&few), [1500, 3000]);
        let page = table.page("log/0300", None, 2, |log| log.id.get() > 3001);
        assert_eq!(numbers(&page), [3002, 3003]);
        assert_eq!(numbers(&table.page("log/1", None, 2, |_| true)), [0; 0]);
    }

    #[test]
    fn the_newer_of_two_logs_with_one_name_keeps_the_name() {
        let name = LogName::new("log").unwrap();
        let log = |number| {
            let (config, time) = (LogConfig::default(), Timestamp::default());
            Arc::new(Log::new(
                LogId::new(number),
                name.clone(),
                config,
                time,
                Position::ZERO,
            ))
        };
        let table = Logs::of(vec![log(7), log(9), log(8)]);
        assert_eq!(table.by_name("log").unwrap().id, LogId::new(9));
        assert_eq!(table.by_id(LogId::new(7)).unwrap().id, LogId::new(7));
    }
}
