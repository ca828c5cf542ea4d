//! Checks one segment and its index: both life blocks, every frame and its chain, atomic units, the claims of
//! directories and of the seal, and lsns without gaps.

use std::collections::HashMap;

use xxhash_rust::xxh3::Xxh3;

use crate::api::codec;
use crate::api::finding::{FindingKind, Severity};
use crate::api::pace::Stop;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, Lsn, Position};
use crate::format::body;
use crate::format::body::{Created, CursorBody, Link, Seal, TrimBody};
use crate::format::compress;
use crate::format::frame;
use crate::format::frame::{Directory, FrameHeader, FrameKind};
use crate::format::life::{Life, bad_copies};
use crate::format::sealed::{SealedBody, is_sealed};
use crate::format::stream::ReadBytes;
use crate::format::walk::{Event, Walk};
use crate::index::SealedIndex;
use crate::logs::producers::Forgotten;

/// A segment to check, and the facts that other files record of it.
#[derive(Debug, Clone)]
pub(crate) struct SegmentTarget {
    pub(crate) life: Life,
    pub(crate) base: Position,
    /// End of its frames.
    pub(crate) end: Position,
    /// Bytes of its file.
    pub(crate) file_bytes: u64,
    /// Places whose loss was accepted. Records there have no effect, also if they verify again.
    pub(crate) accepted: Vec<(Position, Position)>,
}

/// A frame affected by a fault, and its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Touched {
    pub(crate) position: Position,
    pub(crate) kind: FrameKind,
    pub(crate) log_id: LogId,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
}

impl Touched {
    fn of(header: &FrameHeader) -> Self {
        Self {
            position: header.position,
            kind: header.kind,
            log_id: header.log_id,
            first_lsn: header.first_lsn,
            count: header.count,
        }
    }

    /// Its records, if it is a batch.
    pub(crate) fn lsns(&self) -> Option<(Lsn, Lsn)> {
        let next = self.first_lsn.checked_advance(u64::from(self.count))?;
        (self.kind == FrameKind::Batch).then_some((self.first_lsn, next))
    }
}

/// A fault in a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SegmentFault {
    pub(crate) kind: FindingKind,
    pub(crate) severity: Severity,
    pub(crate) from: Position,
    pub(crate) to: Position,
    pub(crate) detail: String,
    /// Affected frames, as far as the segment itself shows.
    pub(crate) touched: Vec<Touched>,
    /// Frames cannot be read here.
    pub(crate) is_hole: bool,
    /// The frame is good, and records before it are missing.
    pub(crate) is_gap: bool,
    /// All affected frames are in `touched`.
    pub(crate) explained: bool,
}

/// Result of the check of one segment.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    pub(crate) faults: Vec<SegmentFault>,
    /// Header checksum of the last frame; `None` if the segment ends with a hole.
    pub(crate) chain: Option<u32>,
    /// Its link, if that is good.
    pub(crate) link: Option<Link>,
    /// Next lsn of each log with records in the segment, before these records.
    pub(crate) before: HashMap<LogId, Lsn, foldhash::fast::RandomState>,
    /// Frames that verify, and records in them.
    pub(crate) frames: u64,
    pub(crate) records: u64,
}

impl SegmentFault {
    /// Whether its records cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.is_hole || self.severity == Severity::Loss && !self.is_gap
    }

    /// A fault of the frame at `position`, which is still readable.
    pub(crate) fn of_frame(
        kind: FindingKind,
        severity: Severity,
        position: Position,
        detail: String,
    ) -> Self {
        Self {
            kind,
            severity,
            from: position,
            to: position,
            detail,
            touched: Vec::new(),
            is_hole: false,
            is_gap: false,
            explained: true,
        }
    }
}

/// The next lsn of each log, in the order of the journal.
#[derive(Debug, Clone, Default)]
pub(crate) struct NextLsns {
    next: HashMap<LogId, Lsn, foldhash::fast::RandomState>,
    /// All segments from the first on were seen: a log without an entry here has no records.
    complete: bool,
    /// A part was damaged or missing: gaps may follow.
    damaged: bool,
}

impl NextLsns {
    /// Empty; `complete` = from now on every segment is checked.
    pub(crate) fn new(complete: bool) -> Self {
        Self {
            complete,
            ..Self::default()
        }
    }

    /// Notes that the following segments may have gaps.
    pub(crate) fn expect_gaps(&mut self) {
        self.damaged = true;
    }

    /// The next lsn of a log; `None` if it is unknown.
    pub(crate) fn of(&self, log: LogId) -> Option<Lsn> {
        let known = self.next.get(&log).copied();
        known.or_else(|| (self.complete && !self.damaged).then_some(Lsn::ZERO))
    }

    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Sets the next lsn of a log where a file records it.
    pub(crate) fn set(&mut self, log: LogId, next: Lsn) {
        self.next.insert(log, next);
    }
}

/// Checks one segment. `read` returns the bytes of its file.
pub(crate) fn check(
    target: &SegmentTarget,
    index: Option<&SealedIndex>,
    lsns: &mut NextLsns,
    read: &mut ReadBytes<'_>,
) -> Result<Checked, Stop> {
    let mut check = SegmentCheck::new(target, index, lsns);
    check.life_blocks(&read(0, LIFE_BYTES.min(target.file_bytes))?);
    let mut frames = Walk::stream(&target.life, target.base, target.end, read);
    while frames.next(target.end, |event| check.take(event))? {}
    Ok(check.end())
}

struct SegmentCheck<'a> {
    target: &'a SegmentTarget,
    index: Option<&'a SealedIndex>,
    lsns: &'a mut NextLsns,
    checked: Checked,
    /// Frames from the one that carried the last directory on, including that frame: the group that the next
    /// directory must list.
    group: Vec<ListedFrame>,
    digest: Xxh3,
    frames: u64,
    records: u64,
    /// Number of batches. The index has all readable batches.
    batches: usize,
    /// Number of batches that are unreadable or given up. The index has them until it is written again.
    bad_batches: usize,
    /// Whether the current atomic unit continues.
    open_unit: bool,
    sealed: bool,
    has_holes: bool,
}

/// A frame, as a directory lists it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ListedFrame {
    touched: Touched,
    frame_len: u64,
}

impl<'a> SegmentCheck<'a> {
    fn new(
        target: &'a SegmentTarget,
        index: Option<&'a SealedIndex>,
        lsns: &'a mut NextLsns,
    ) -> Self {
        Self {
            target,
            index,
            lsns,
            checked: Checked::default(),
            group: Vec::new(),
            digest: Xxh3::new(),
            frames: 0,
            records: 0,
            batches: 0,
            bad_batches: 0,
            open_unit: false,
            sealed: false,
            has_holes: false,
        }
    }

    fn fault(
        &mut self,
        kind: FindingKind,
        severity: Severity,
        (from, to): (Position, Position),
        detail: impl Into<String>,
    ) -> &mut SegmentFault {
        self.checked.faults.push(SegmentFault {
            kind,
            severity,
            from,
            to,
            detail: detail.into(),
            touched: Vec::new(),
            is_hole: false,
            is_gap: false,
            explained: true,
        });
        self.checked.faults.last_mut().expect("one was just put in")
    }

    fn life_blocks(&mut self, bytes: &[u8]) {
        let base = self.target.base;
        for (index, whole) in bad_copies(bytes, &self.target.life).into_iter().enumerate() {
            let Some(why) = whole else { continue };
            let from = base.advance(index as u64 * (LIFE_BYTES / 2));
            let which = ["first", "second"][index.min(1)];
            self.fault(
                FindingKind::Checksum,
                Severity::Damage,
                (from, from.advance(LIFE_BYTES / 2)),
                format!("the {which} of the two life blocks {why}; the other one serves"),
            );
        }
    }

    fn take(&mut self, event: Event<'_>) {
        match event {
            Event::Frame {
                header,
                bytes,
                body,
            } => self.frame(header, bytes, body),
            Event::Hole { from, to, stranger } => self.hole(from, to, stranger),
        }
    }

    fn hole(&mut self, from: Position, to: Position, stranger: Option<FrameHeader>) {
        let (kind, what) = match stranger {
            Some(header) => (
                FindingKind::Chain,
                format!(
                    "the frame at position {} does not follow from the one before it",
                    header.position
                ),
            ),
            None if to == self.target.end
                && from.since(self.target.base) >= self.target.file_bytes =>
            {
                (
                    FindingKind::Missing,
                    format!("the file ends at its byte {}", self.target.file_bytes),
                )
            }
            None => (
                FindingKind::Checksum,
                "the bytes here are no frame".to_owned(),
            ),
        };
        let fault = self.fault(kind, Severity::Loss, (from, to), what);
        fault.is_hole = true;
        fault.explained = false;
        self.has_holes = true;
        self.open_unit = false;
        self.group.clear();
        self.lsns.expect_gaps();
    }

    fn frame(&mut self, header: &FrameHeader, bytes: &[u8], body: Option<&[u8]>) {
        let at = (header.position, header.end());
        self.checked.chain = Some(header.crc);
        if self.sealed {
            self.fault(
                FindingKind::Chain,
                Severity::Damage,
                at,
                "a frame stands behind the seal",
            );
        }
        let first = header.position == self.target.base.advance(LIFE_BYTES);
        if first != (header.kind == FrameKind::Link) && !self.has_holes {
            let detail = match first {
                true => "the first frame of the segment is no link",
                false => "a link stands in the middle of the segment",
            };
            self.fault(FindingKind::Chain, Severity::Damage, at, detail);
        }
        let goes_on = !matches!(
            header.kind,
            FrameKind::Link | FrameKind::Marker | FrameKind::Seal
        );
        if self.open_unit && !goes_on {
            self.fault(
                FindingKind::Chain,
                Severity::Loss,
                at,
                "the atomic unit before this frame has no end",
            );
        }
        self.open_unit = header.continues();
        let readable = self.body(header, body);
        if let Some(directory) = frame::directory_of(bytes, header) {
            self.directory(&directory, header);
        }
        self.group.push(ListedFrame {
            touched: Touched::of(header),
            frame_len: header.frame_len(),
        });
        match header.kind {
            FrameKind::Seal => self.seal(header, body),
            FrameKind::Link => self.checked.link = body.and_then(Link::decode),
            FrameKind::Batch if self.is_given_up(at) => {
                // The index need not have it, and later frames may have its lsns.
                self.batches += 1;
                self.bad_batches += 1;
                self.lsns.expect_gaps();
            }
            FrameKind::Batch => self.batch(header, readable),
            _ => {}
        }
        self.digest.update(bytes);
        self.frames += 1;
        if header.kind == FrameKind::Batch {
            self.records += u64::from(header.count);
        }
    }

    /// Whether the loss of these bytes was accepted.
    fn is_given_up(&self, (from, to): (Position, Position)) -> bool {
        let mut accepted = self.target.accepted.iter();
        accepted.any(|place| place.0 <= from && to <= place.1)
    }

    /// Whether the body matches the header: complete, and readable as its kind.
    fn body(&mut self, header: &FrameHeader, body: Option<&[u8]>) -> bool {
        let readable = body.is_some_and(|body| match header.kind {
            // The tag of an encrypted body needs its key; the checksum does not.
            FrameKind::Batch if is_sealed(header.codec()) => {
                SealedBody::parse(body).is_some()
                    && compress::too_large(header.codec(), body).is_none()
            }
            FrameKind::Batch => compress::decompress(header.codec(), body)
                .is_some_and(|body| codec::ends(&body).count() as u64 == u64::from(header.count)),
            FrameKind::Created => Created::decode(body).is_some(),
            FrameKind::Configured => body::config(body).is_some(),
            FrameKind::Cursor => CursorBody::decode(body).is_some(),
            FrameKind::Forgotten => Forgotten::decode(body).is_some(),
            FrameKind::Link => Link::decode(body).is_some(),
            FrameKind::Seal => Seal::decode(body).is_some(),
            FrameKind::Trim => TrimBody::decode(body).is_some(),
            FrameKind::Deleted | FrameKind::Fence | FrameKind::Marker => true,
            // These kinds have no place in the journal.
            FrameKind::Run | FrameKind::Images | FrameKind::Pack | FrameKind::Order => false,
        });
        if readable {
            return true;
        }
        let whole = header.end().since(self.target.base) <= self.target.file_bytes;
        let too_large = body.filter(|_| header.kind == FrameKind::Batch);
        let too_large = too_large.and_then(|body| compress::too_large(header.codec(), body));
        let (kind, detail) = match (body, whole) {
            (Some(_), _) => (
                FindingKind::Checksum,
                match too_large {
                    Some(claim) => format!("the body of a frame (batch) {claim}"),
                    None => {
                        let kind = header.kind.word();
                        format!("the body of a frame ({kind}) cannot be read")
                    }
                },
            ),
            (None, true) => (
                FindingKind::Checksum,
                format!(
                    "the body of a frame ({}) does not match its checksum",
                    header.kind.word()
                ),
            ),
            (None, false) => (
                FindingKind::Missing,
                format!("the file ends at its byte {}", self.target.file_bytes),
            ),
        };
        let severity = match header.kind {
            FrameKind::Batch => Severity::Loss,
            _ => Severity::Damage,
        };
        let at = (header.position, header.end());
        let fault = self.fault(kind, severity, at, detail);
        fault.touched.push(Touched::of(header));
        if header.kind == FrameKind::Batch {
            self.lsns.expect_gaps();
        }
        false
    }

    /// Checks that a directory lists the group before it correctly. The directory also explains damaged frames
    /// of that group.
    fn directory(&mut self, directory: &Directory, header: &FrameHeader) {
        let mut position = directory.start;
        let mut told = Vec::with_capacity(directory.entries.len());
        for entry in &directory.entries {
            told.push(ListedFrame {
                touched: Touched {
                    position,
                    kind: entry.kind,
                    log_id: entry.log_id,
                    first_lsn: entry.first_lsn,
                    count: entry.count,
                },
                frame_len: entry.frame_len,
            });
            position = position.advance(entry.frame_len.min(self.target.life.size));
        }
        for fault in self.checked.faults.iter_mut().filter(|fault| fault.is_hole) {
            let hit = |told: &&ListedFrame| {
                let end = told.touched.position.advance(told.frame_len);
                fault.from < end && told.touched.position < fault.to
            };
            let mut hit: Vec<Touched> = told.iter().filter(hit).map(|t| t.touched).collect();
            fault.touched.append(&mut hit);
            fault.explained |= directory.start <= fault.from && fault.to <= position;
        }
        let group = std::mem::take(&mut self.group);
        let first = group.first().map(|told| told.touched.position);
        // Behind a hole the group is only partly known.
        let known = told
            .iter()
            .filter(|told| first.is_some_and(|first| told.touched.position >= first))
            .copied();
        let complete = !self.has_holes && first != Some(directory.start);
        if complete || position != header.position || !known.eq(group.iter().copied()) {
            self.fault(
                FindingKind::Chain,
                Severity::Damage,
                (header.position, header.end()),
                "the directory in this frame does not tell the frames before it as they are",
            );
        }
    }

    fn batch(&mut self, header: &FrameHeader, readable: bool) {
        let at = (header.position, header.end());
        self.batches += 1;
        self.bad_batches += usize::from(!readable);
        if let Some(next) = self.lsns.of(header.log_id) {
            self.checked.before.entry(header.log_id).or_insert(next);
        }
        if let (Some(expected), Some(next)) = (self.lsns.of(header.log_id), header.next_lsn()) {
            let log = header.log_id;
            if header.first_lsn < expected {
                let fault = self.fault(
                    FindingKind::Chain,
                    Severity::Damage,
                    at,
                    format!(
                        "the frame repeats lsn {} of log {log}; it is ignored",
                        header.first_lsn
                    ),
                );
                fault.touched.push(Touched::of(header));
            } else if header.first_lsn > expected && !self.lsns.is_damaged() {
                let fault = self.fault(
                    FindingKind::Missing,
                    Severity::Loss,
                    at,
                    format!(
                        "log {log} goes on at lsn {} here, and its next is {expected}",
                        header.first_lsn
                    ),
                );
                fault.is_gap = true;
                fault.touched.push(Touched {
                    first_lsn: expected,
                    count: u32::try_from(header.first_lsn.since(expected)).unwrap_or(u32::MAX),
                    ..Touched::of(header)
                });
            }
            self.lsns.set(log, next.max(expected));
        } else if let Some(next) = header.next_lsn() {
            self.lsns.set(header.log_id, next);
        }
        let Some(index) = self.index.filter(|_| readable) else {
            return;
        };
        let found = index.row(header.log_id).and_then(|row| {
            let entries = index.entries(&row);
            let at = entries.partition_point(|place| place.position < header.position);
            entries.get(at)
        });
        let same = found.is_some_and(|place| {
            place.position == header.position
                && place.first_lsn == header.first_lsn
                && place.count == header.count
                && u64::from(place.frame_len) == header.frame_len()
        });
        if !same {
            self.fault(
                FindingKind::Index,
                Severity::Damage,
                at,
                "the index of the segment does not tell of this frame as it is",
            );
        }
    }

    fn seal(&mut self, header: &FrameHeader, body: Option<&[u8]>) {
        self.sealed = true;
        let Some(seal) = body.and_then(Seal::decode) else {
            return;
        };
        // The digest of a damaged segment adds no fact.
        if self.checked.faults.iter().any(|fault| fault.is_hole) {
            return;
        }
        let at = (self.target.base.advance(LIFE_BYTES), header.position);
        if (seal.frames, seal.records) != (self.frames, self.records) {
            self.fault(
                FindingKind::Digest,
                Severity::Damage,
                at,
                format!(
                    "the seal tells of {} frames and {} records, and there are {} and {}",
                    seal.frames, seal.records, self.frames, self.records
                ),
            );
        }
        let bad_body =
            |fault: &SegmentFault| fault.kind == FindingKind::Checksum && fault.from >= at.0;
        if seal.digest != self.digest.digest128() && !self.checked.faults.iter().any(bad_body) {
            self.fault(
                FindingKind::Digest,
                Severity::Damage,
                at,
                "the bytes between frames are not what they were: the digest in the seal does not match, though every frame does",
            );
        }
    }

    fn end(mut self) -> Checked {
        (self.checked.frames, self.checked.records) = (self.frames, self.records);
        if self.open_unit {
            let end = self.target.end;
            self.fault(
                FindingKind::Chain,
                Severity::Loss,
                (end, end),
                "the last atomic unit of the segment has no end",
            );
        }
        let hole_at_end = |fault: &SegmentFault| fault.is_hole && fault.to == self.target.end;
        if self.checked.faults.iter().any(hole_at_end) {
            self.checked.chain = None;
        }
        // A hole is no loss if a directory lists all its frames, and none of them has records.
        for fault in &mut self.checked.faults {
            let records = |touched: &Touched| touched.kind == FrameKind::Batch;
            if fault.is_hole && fault.explained && !fault.touched.iter().any(records) {
                fault.severity = Severity::Damage;
            }
        }
        if !self.has_holes
            && let Some(index) = self.index
        {
            let entries: usize = index.rows().map(|row| index.entries(&row).len()).sum();
            if !(self.batches - self.bad_batches..=self.batches).contains(&entries) {
                let at = (self.target.base, self.target.end);
                let batches = self.batches;
                self.fault(
                    FindingKind::Index,
                    Severity::Damage,
                    at,
                    format!("the index tells of {entries} frames, and there are {batches}"),
                );
            }
        }
        self.checked
    }
}
