//! The walk over the frames of one segment, also over damage.
//!
//! ```text
//!   Source: the bytes ──▶ Walk::next ──▶ Event: a frame or a hole, in order
//! ```
//!
//! Recovery, verification, backups, archives and dumps all use [`Walk`], so that they agree on frames and holes.
//! The successor of a finished segment records its end. The end of the last segment depends on D, the highest
//! position that any verified header says was flushed. Bad bytes below D are damage. Bad bytes at or beyond D are
//! a torn tail, and the bytes behind them prove nothing: a power cut may keep later sectors and lose earlier ones.

use std::convert::Infallible;
use std::ops::Range;

use super::content::Content;
use super::stream::{ReadBytes, Stream};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::base::zeros::{are_zeros, used_length};
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::body::{Link, Seal};
use crate::format::compress;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind, HEADER_BYTES, Newer};
use crate::format::life::Life;

/// Zeros are skipped in steps of about this, bytes.
const ZERO_PAGE: usize = 4096;
/// Size of the pieces in which headers are searched for, bytes.
const LOOK: usize = 64 << 10;
/// Size of the pieces in which bytes behind the end are checked.
const SWEEP: usize = 1 << 20;

/// The bytes of a segment file.
pub(crate) trait SegmentSource {
    /// Why bytes cannot be read now.
    type Error;

    /// Calls `look` with `length` bytes from `offset` on; fewer where the file ends.
    fn look<R>(
        &mut self,
        offset: u64,
        length: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Self::Error>;
}

impl SegmentSource for &Content<'_> {
    /// [`Content::check`] reports errors.
    type Error = Infallible;

    fn look<R>(
        &mut self,
        offset: u64,
        length: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Infallible> {
        Ok(Content::look(self, offset, length, look))
    }
}

/// The next frame or hole of a segment.
pub(crate) enum Event<'a> {
    /// A frame with a good header.
    Frame {
        header: &'a FrameHeader,
        /// Header and body, as far as the file has them.
        bytes: &'a [u8],
        /// Its body as stored, if it matches its checksum.
        body: Option<&'a [u8]>,
    },
    /// A range of positions that does not verify.
    Hole {
        from: Position,
        to: Position,
        /// A good header at its start that does not follow from the frame before.
        stranger: Option<FrameHeader>,
    },
}

/// Walks one segment.
pub(crate) struct Walk<S> {
    pub(crate) source: S,
    salt: u64,
    base: Position,
    /// Nothing is read at or beyond this position.
    limit: Position,
    /// Position of the next frame or hole.
    position: Position,
    /// Chain value the next header must carry; `None` after a hole.
    chain: Option<u32>,
}

impl<'a, 'b> Walk<Stream<'a, 'b>> {
    /// Walks the frames up to `end` through bytes that are read once.
    pub(crate) fn stream(
        life: &Life,
        base: Position,
        end: Position,
        read: &'a mut ReadBytes<'b>,
    ) -> Self {
        let limit = end.min(base.advance(life.size));
        let source = Stream::new(limit.since(base), read);
        Self::new(source, life, base, limit)
    }
}

impl<S: SegmentSource> Walk<S> {
    pub(crate) fn new(source: S, life: &Life, base: Position, limit: Position) -> Self {
        Self {
            source,
            salt: life.salt,
            base,
            limit,
            position: base.advance(LIFE_BYTES),
            chain: Some(0),
        }
    }

    /// Position of the next frame or hole.
    pub(crate) fn position(&self) -> Position {
        self.position
    }

    fn look<R>(
        &mut self,
        position: Position,
        length: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, S::Error> {
        self.source.look(position.since(self.base), length, look)
    }

    /// Calls `each` with the next frame or hole below `end`. All bad bytes below `end` are damage. Returns `false`
    /// if there is none.
    ///
    /// # Errors
    /// If bytes cannot be read now. A later call looks again.
    pub(crate) fn next(
        &mut self,
        end: Position,
        each: impl FnOnce(Event<'_>),
    ) -> Result<bool, S::Error> {
        if self.position >= end {
            return Ok(false);
        }
        let found = self.header(self.position)?;
        match found.filter(|header| header.end() <= end) {
            Some(header) if self.follows(&header) => self.take(&header, each)?,
            stranger => self.skip(end, stranger, each)?,
        }
        Ok(true)
    }

    /// Calls `each` with the next frame if its header is good, and returns whether it is.
    ///
    /// # Errors
    /// As [`Walk::next`].
    pub(crate) fn next_good(&mut self, each: impl FnOnce(Event<'_>)) -> Result<bool, S::Error> {
        let header = self.header(self.position)?;
        let Some(header) = header.filter(|header| self.follows(header)) else {
            return Ok(false);
        };
        self.take(&header, each)?;
        Ok(true)
    }

    /// Whether a header follows from the frame before.
    fn follows(&self, header: &FrameHeader) -> bool {
        let chain = self.chain.filter(|_| !known_bad::makes(Mistake::NoChain));
        chain.is_none_or(|chain| chain == header.chain)
    }

    fn take(&mut self, header: &FrameHeader, each: impl FnOnce(Event<'_>)) -> Result<(), S::Error> {
        let length = usize::try_from(header.frame_len()).unwrap_or(usize::MAX);
        self.look(header.position, length, |bytes| {
            each(Event::Frame {
                header,
                bytes,
                body: frame::verified_body(bytes, header),
            });
        })?;
        self.position = header.end();
        self.chain = Some(header.crc);
        Ok(())
    }

    /// Skips bad bytes up to the next frame, or to `end`.
    fn skip(
        &mut self,
        end: Position,
        stranger: Option<FrameHeader>,
        each: impl FnOnce(Event<'_>),
    ) -> Result<(), S::Error> {
        let from = self.position;
        let next = self.resynchronise(from.advance(8))?;
        let next = next.map(|header| header.position);
        let to = next.filter(|next| *next < end).unwrap_or(end);
        self.position = to;
        self.chain = None;
        each(Event::Hole { from, to, stranger });
        Ok(())
    }

    /// Calls `look` with the bytes of the header that a position claims to have, extensions included.
    fn claimed<R>(
        &mut self,
        position: Position,
        look: impl FnOnce(&[u8]) -> Option<R>,
    ) -> Result<Option<R>, S::Error> {
        let claims = |bytes: &[u8]| {
            let here = frame::claimed_position(bytes) == Some(position.get());
            here.then(|| claimed_header(bytes))
        };
        match self.look(position, HEADER_BYTES, claims)? {
            Some(length) => self.look(position, length, look),
            None => Ok(None),
        }
    }

    /// The verified header at `position`, if there is one.
    fn header(&mut self, position: Position) -> Result<Option<FrameHeader>, S::Error> {
        let salt = self.salt;
        self.claimed(position, |bytes| frame::decode_header(bytes, salt))
    }

    /// The next position at or after `from` where a header verifies.
    fn resynchronise(&mut self, from: Position) -> Result<Option<FrameHeader>, S::Error> {
        self.search(from, self.limit, Self::header)
    }

    /// The first thing that `test` finds at a place in a range that claims to have a header.
    fn search<R>(
        &mut self,
        mut from: Position,
        to: Position,
        mut test: impl FnMut(&mut Self, Position) -> Result<Option<R>, S::Error>,
    ) -> Result<Option<R>, S::Error> {
        while from < to {
            let look = |piece: &[u8]| (claim(piece, from), piece.len() < LOOK);
            match self.look(from, LOOK, look)? {
                (HeaderSearch::At(at), _) => {
                    let here = from.advance(at as u64);
                    if here >= to {
                        return Ok(None);
                    }
                    if let Some(found) = test(self, here)? {
                        return Ok(Some(found));
                    }
                    from = here.advance(8);
                }
                (HeaderSearch::NoneBefore(_), true) => return Ok(None),
                (HeaderSearch::NoneBefore(at), false) => from = from.advance(at as u64),
            }
        }
        Ok(None)
    }
}

/// Result of a search for a header in a piece of a file.
enum HeaderSearch {
    /// The bytes at this offset claim to be a header at their own position.
    At(usize),
    /// No bytes before this offset do.
    NoneBefore(usize),
}

/// Searches a piece of a file that begins at `from` for a header.
fn claim(piece: &[u8], from: Position) -> HeaderSearch {
    let mut at = 0;
    while let Some(claimed) = frame::claimed_position(&piece[at.min(piece.len())..]) {
        if claimed == from.advance(at as u64).get() {
            return HeaderSearch::At(at);
        }
        // A header may begin with zeros, but not with a page of them.
        let page = piece.get(at..at + ZERO_PAGE);
        at += match page.is_some_and(are_zeros) {
            true => ZERO_PAGE - HEADER_BYTES,
            false => 8,
        };
    }
    HeaderSearch::NoneBefore(at)
}

/// A frame or a hole, in the order of the walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WalkItem {
    Frame {
        header: FrameHeader,
        body_good: bool,
    },
    /// Bytes that do not verify, from, to.
    Hole { from: Position, to: Position },
}

impl From<Event<'_>> for WalkItem {
    fn from(event: Event<'_>) -> Self {
        match event {
            Event::Frame { header, body, .. } => Self::Frame {
                header: *header,
                body_good: body.is_some(),
            },
            Event::Hole { from, to, .. } => Self::Hole { from, to },
        }
    }
}

/// One segment, walked.
#[derive(Debug)]
pub(crate) struct Walked {
    pub(crate) items: Vec<WalkItem>,
    /// End of its frames.
    pub(crate) end: Position,
    /// Header checksum of the last frame.
    pub(crate) chain: u32,
    /// Number of cut bytes from `end` on: bytes that are not zeros of a fresh file.
    pub(crate) torn: u64,
    /// Whether bytes from `end` on are not zeros: torn, or of an earlier life of the file.
    pub(crate) is_used_behind: bool,
    /// Offsets of bytes that the device could not read and that end the walk. They may hold a frame
    /// that was flushed, so nothing may be cut off here.
    pub(crate) unread: Option<Range<u64>>,
}

impl Walked {
    fn new(first: Position) -> Self {
        Self {
            items: Vec::new(),
            end: first,
            chain: 0,
            torn: 0,
            is_used_behind: false,
            unread: None,
        }
    }

    /// Sets the end and the chain from the items.
    fn ended(mut self) -> Self {
        let frames = self.items.iter().rev().find_map(|item| match item {
            WalkItem::Frame { header, .. } => Some(header),
            WalkItem::Hole { .. } => None,
        });
        self.chain = frames.map_or(0, |header| header.crc);
        self.end = match self.items.last() {
            Some(WalkItem::Frame { header, .. }) => header.end(),
            Some(WalkItem::Hole { to, .. }) => *to,
            None => self.end,
        };
        self
    }

    /// Removes the frames of an atomic unit whose last frame is missing. Returns the header checksum of the frame
    /// before, if there were any.
    fn cut_open_unit(&mut self) -> Option<u32> {
        let mut chain = None;
        while let Some(WalkItem::Frame { header, .. }) = self.items.last()
            && header.continues()
        {
            chain = Some(header.chain);
            self.end = header.position;
            self.items.pop();
        }
        chain
    }

    /// The highest position that a frame of the walk says was flushed.
    pub(crate) fn proven(&self) -> Position {
        let mark = |item: &WalkItem| match item {
            WalkItem::Frame { header, .. } => Some(header.durable_mark),
            WalkItem::Hole { .. } => None,
        };
        let marks = self.items.iter().filter_map(mark);
        marks.max().unwrap_or(Position::ZERO)
    }

    /// Whether the walk ended at the segment's seal.
    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.items.last(), Some(WalkItem::Frame { header, .. }) if header.kind == FrameKind::Seal)
    }
}

/// One segment's bytes.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a> {
    pub(crate) life: &'a Life,
    pub(crate) base: Position,
    pub(crate) bytes: &'a Content<'a>,
}

/// Bytes of header and extensions that a possible header claims, at least the length of a header.
fn claimed_header(bytes: &[u8]) -> usize {
    let claimed = frame::claimed_header_len(bytes).unwrap_or(0);
    usize::try_from(claimed).map_or(HEADER_BYTES, |claimed| claimed.max(HEADER_BYTES))
}

/// Bytes of header and body of a frame.
fn frame_bytes(header: &FrameHeader) -> usize {
    (header.header_len as usize).saturating_add(header.body_len as usize)
}

/// The body of a frame that [`Bytes::walked`] returned, if it was good and all of it is there.
pub(crate) fn body_of<'b>(
    frame: &'b [u8],
    header: &FrameHeader,
    body_good: bool,
) -> Option<&'b [u8]> {
    let body = frame.get(header.header_len as usize..frame_bytes(header));
    body.filter(|_| body_good)
}

/// Facts about the bytes from a damaged place to the end of the file.
struct Rest {
    /// D, as far as headers there show: the highest position that any says was flushed.
    proven: Position,
    /// Position of the last header that verifies.
    last_header: Option<Position>,
    /// End of the last byte that is not zero.
    used: Position,
    /// Whether the end of the file is zeros.
    ends_with_zeros: bool,
}

impl<'a> Bytes<'a> {
    /// Returns `length` bytes from `position` on; fewer where the file ends.
    fn at(&self, position: Position, length: usize) -> bytes::Bytes {
        self.bytes.piece(position.since(self.base), length)
    }

    /// Calls `look` with `length` bytes from `position` on; fewer where the file ends.
    fn look<R>(&self, position: Position, length: usize, look: impl FnOnce(&[u8]) -> R) -> R {
        self.bytes.look(position.since(self.base), length, look)
    }

    fn limit(&self) -> Position {
        self.base.advance(self.bytes.size().min(self.life.size))
    }

    fn walk(&self) -> Walk<&'a Content<'a>> {
        Walk::new(self.bytes, self.life, self.base, self.limit())
    }

    /// The verified header at `position`, if there is one.
    pub(crate) fn header(&self, position: Position) -> Option<FrameHeader> {
        let Ok(header) = self.walk().header(position);
        header
    }

    /// The verified body of the frame.
    pub(crate) fn body(&self, header: &FrameHeader) -> Option<bytes::Bytes> {
        let frame = self.whole(header);
        frame::verified_body(&frame, header)?;
        Some(frame.slice(header.header_len as usize..))
    }

    /// Header and body of the frame, as far as the file has them.
    fn whole(&self, header: &FrameHeader) -> bytes::Bytes {
        self.at(header.position, frame_bytes(header))
    }

    /// The bytes of a frame that a walk found: all of it if its body is good, or else the header and its extensions.
    pub(crate) fn walked(&self, header: &FrameHeader, body_good: bool) -> bytes::Bytes {
        match body_good {
            true => self.whole(header),
            false => self.frame(header),
        }
    }

    /// The header of the frame and its extensions.
    pub(crate) fn frame(&self, header: &FrameHeader) -> bytes::Bytes {
        self.at(header.position, header.header_len as usize)
    }

    /// The seal, if the last frame is one.
    pub(crate) fn seal(&self, walked: &Walked) -> Option<Seal> {
        match walked.items.last()? {
            WalkItem::Frame { header, .. } if header.kind == FrameKind::Seal => {
                Seal::decode(&self.body(header)?)
            }
            _ => None,
        }
    }

    /// The next position at or after `from` where a header verifies.
    pub(crate) fn resynchronise(&self, from: Position) -> Option<FrameHeader> {
        let Ok(header) = self.walk().resynchronise(from);
        header
    }

    /// The first frame that a newer version wrote: its header verifies, but its kind or its compression is
    /// unknown. Such a frame is neither damaged nor torn, and nothing may be decided without knowing its meaning.
    pub(crate) fn newer(&self, walked: &Walked) -> Option<(Position, Newer)> {
        let unknown = |item: &WalkItem| match *item {
            WalkItem::Hole { from, to } => self.newer_header(from, to),
            WalkItem::Frame { header, body_good } => {
                let codec = header.codec();
                let known = header.kind != FrameKind::Batch || compress::is_known(codec);
                (body_good && !known).then_some((header.position, Newer::Codec(codec)))
            }
        };
        let behind = || {
            let to = if walked.torn > 0 {
                self.limit()
            } else {
                walked.end
            };
            self.newer_header(walked.end, to)
        };
        walked.items.iter().find_map(unknown).or_else(behind)
    }

    fn newer_header(&self, from: Position, to: Position) -> Option<(Position, Newer)> {
        // Behind its last byte there is nothing to read, even if a link claims a later end.
        let to = to.min(self.limit());
        let salt = self.life.salt;
        let Ok(found) = self.walk().search(from, to, |walk, at| {
            let Ok(newer) = walk.claimed(at, |bytes| frame::newer(bytes, salt));
            Ok(newer.map(|newer| (at, newer)))
        });
        found
    }

    /// Examines all bytes from `from` on.
    fn rest(&self, from: Position) -> Rest {
        let mut rest = Rest {
            proven: Position::ZERO,
            last_header: None,
            used: from,
            ends_with_zeros: true,
        };
        let blind = known_bad::makes(Mistake::LastGoodFrame)
            || known_bad::makes(Mistake::TruncateOnAnyError);
        let mut next = from;
        while let Some(header) = self.resynchronise(next) {
            if !blind {
                rest.proven = rest.proven.max(header.durable_mark);
            }
            rest.last_header = Some(header.position);
            next = header.position.advance(8);
        }
        let mut at = from;
        loop {
            let piece = self.at(at, SWEEP);
            let used = used_length(&piece);
            if used > 0 {
                rest.used = at.advance(used as u64);
            }
            at = at.advance(piece.len() as u64);
            if piece.len() < SWEEP {
                break;
            }
        }
        let last_page = at.get().saturating_sub(ZERO_PAGE as u64).max(from.get());
        rest.ends_with_zeros = rest.used.get() <= last_page;
        rest
    }

    /// Walks up to `end`, which a successor records. All bad bytes below are damage.
    pub(crate) fn walk_finished(&self, end: Position) -> Walked {
        // A forged link may claim an end far beyond the segment.
        let end = end.min(self.base.advance(self.life.size));
        let mut walk = self.walk();
        let mut walked = Walked::new(walk.position);
        loop {
            let Ok(more) = walk.next(end, |event| walked.items.push(event.into()));
            let is_hole = |item: &mut WalkItem| matches!(item, WalkItem::Hole { .. });
            let cut = known_bad::makes(Mistake::TruncateOnAnyError)
                && walked.items.pop_if(is_hole).is_some();
            if cut || !more {
                return walked.ended();
            }
        }
    }

    /// Walks a segment up to the end that the link of its successor records.
    pub(crate) fn walk_before(&self, link: &Link) -> Walked {
        let walked = self.walk_finished(link.predecessor_end);
        match link.predecessor_chain {
            // A damaged link does not record the chain.
            0 => walked,
            // The last frame of the segment may be damaged.
            chain => Walked { chain, ..walked },
        }
    }

    /// Walks the last segment. The journal ends at its seal, or at the first bytes that do not verify and were
    /// never proven flushed.
    pub(crate) fn walk_last(&self) -> Walked {
        let mut walk = self.walk();
        let mut walked = Walked::new(walk.position);
        // Computed at the first bad bytes. A frame proves nothing behind its own start, so earlier frames are
        // not needed.
        let mut rest: Option<Rest> = None;
        let mut durable = |from: Position| rest.get_or_insert_with(|| self.rest(from)).proven;
        loop {
            let (at, chain) = (walk.position, walk.chain);
            let mut found: Option<WalkItem> = None;
            let Ok(_) = walk.next_good(|event| found = Some(event.into()));
            match found {
                // A frame that was never proven must be whole to count.
                Some(WalkItem::Frame { header, body_good })
                    if body_good || header.end() <= durable(at) =>
                {
                    walked.items.push(WalkItem::Frame { header, body_good });
                    if header.kind == FrameKind::Seal {
                        return walked.ended();
                    }
                }
                _ => {
                    (walk.position, walk.chain) = (at, chain);
                    // The walk does not skip beyond D: bad bytes behind D are torn, even if good frames follow.
                    if at >= durable(at) {
                        break;
                    }
                    let end = durable(at).min(self.limit());
                    let Ok(()) = walk.skip(end, None, |event| walked.items.push(event.into()));
                }
            }
        }
        walked.unread = self.unread_frame(walk.position);
        let cut = walked.cut_open_unit();
        let mut walked = walked.ended();
        walked.chain = cut.unwrap_or(walked.chain);
        // A cut unit begins before the first bad bytes.
        let rest = rest.filter(|_| cut.is_none());
        let rest = rest.unwrap_or_else(|| self.rest(walked.end));
        walked.torn = self.debris(walked.end, &rest);
        walked.is_used_behind = rest.used > walked.end;
        walked
    }

    /// Offsets of the bytes of the frame at a position that the device could not read, if any.
    fn unread_frame(&self, position: Position) -> Option<Range<u64>> {
        if self.look(position, 8, are_zeros) {
            // The length of a header is not zero: none was written here.
            return None;
        }
        let claimed = |bytes: &[u8]| {
            let here = frame::claimed_position(bytes) == Some(position.get());
            here.then(|| claimed_header(bytes))
        };
        let length = match self.header(position) {
            Some(header) => frame_bytes(&header),
            None => (self.look(position, HEADER_BYTES, claimed)).unwrap_or(HEADER_BYTES),
        };
        (self.bytes).unreadable(position.since(self.base), length as u64)
    }

    /// Number of bytes from `end` on that are neither zeros nor clearly of an earlier life. `rest`: facts from
    /// `end` on, or from a place before it.
    fn debris(&self, end: Position, rest: &Rest) -> u64 {
        // In a recycled file all bytes behind the end are stale, unless a header claims exactly this position.
        let claimed = self.look(end, HEADER_BYTES, frame::claimed_position);
        let ours = claimed == Some(end.get()) || rest.last_header.is_some_and(|at| at >= end);
        // Whether the file was all zeros before this life, judged by its last bytes.
        let is_fresh = rest.ends_with_zeros || rest.used <= end;
        match ours || is_fresh {
            true => rest.used.get().saturating_sub(end.get()),
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ids::{LogId, Lsn, SegmentId, Timestamp};
    use crate::format::frame::{CONTINUES, FrameHead, begin, finish};

    const LIFE: Life = Life {
        id: SegmentId::FIRST,
        size: 64 << 10,
        salt: 7,
        store_id: 1,
    };

    /// Builds a segment of frames with these durable marks and flags. Returns their offsets, too.
    fn segment(frames: &[(u64, u8)]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = vec![0; usize::try_from(LIFE_BYTES).unwrap()];
        let (mut chain, mut places) = (0, Vec::new());
        for (lsn, (durable, flags)) in (0..).zip(frames) {
            let start = begin(&mut bytes, &[]);
            bytes.extend_from_slice(b"records!");
            let head = FrameHead {
                kind: FrameKind::Batch,
                flags: *flags,
                count: 1,
                position: Position::new(start as u64),
                log_id: LogId::new(1),
                first_lsn: Lsn::new(lsn),
                arrival: Timestamp::default(),
                durable_mark: Position::new(*durable),
                chain,
            };
            chain = finish(&mut bytes, start, HEADER_BYTES, LIFE.salt, &head).crc;
            places.push(start);
        }
        bytes.resize(usize::try_from(LIFE.size).unwrap(), 0);
        (bytes, places)
    }

    fn walk(bytes: &[u8]) -> Walked {
        let segment = Bytes {
            life: &LIFE,
            base: Position::ZERO,
            bytes: &Content::of_bytes(bytes.to_vec()),
        };
        segment.walk_last()
    }

    #[test]
    fn damage_right_before_a_torn_unit_does_not_save_the_rest_of_the_unit() {
        // Two frames that were flushed, then a unit of three that was not.
        let durable = LIFE_BYTES + 2 * 72;
        let first = LIFE_BYTES;
        let (mut bytes, places) = segment(&[
            (first, 0),
            (first + 72, 0),
            (durable, CONTINUES),
            (durable, CONTINUES),
            (durable, 0),
        ]);
        assert_eq!(walk(&bytes).items.len(), 5);
        bytes[places[1]] ^= 1;
        bytes[places[2]..places[3]].fill(0);
        let walked = walk(&bytes);
        assert_eq!(walked.end, Position::new(durable));
        assert_eq!(walked.items.len(), 2);
        let hole = WalkItem::Hole {
            from: Position::new(first + 72),
            to: Position::new(durable),
        };
        assert_eq!(walked.items[1], hole);
        assert!(walked.torn > 0);
    }
}
