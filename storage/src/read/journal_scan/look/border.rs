//! Finds out whether a frame begins at a position.
//!
//! A client chooses the position in its cursor. Bytes that do not verify there prove no damage: they may lie inside a
//! good frame. The frames before them decide:
//!
//! ```text
//!   known border ──▶ frame ──▶ frame ──▶ ... ──▶ ends at the position: a frame begins there
//!                                          └───▶ ends beyond it: no frame begins there
//! ```
//!
//! Rule: nothing counts as damaged before a walk from a known border reached it.
//!
//! A walk notes a border each 256 KiB in the segment, and the next walk begins there. Cost: the first walk over a part
//! of a segment reads it, in passes that end when the client leaves. Every later walk reads at most two pieces.

use super::{JournalReadStep, LOOK_BYTES, PIECE_BYTES};
use crate::api::error::ReadError;
use crate::base::ids::Position;
use crate::format::address::Hole;
use crate::format::frame;
use crate::format::frame::{FrameHeader, MAX_HEADER_BYTES};
use crate::journal::segment::Segment;
use crate::read::reach::Reach;

/// How a position lies among the frames of its segment.
enum WalkEnd {
    /// A frame begins there.
    Border,
    /// A good frame covers it, and begins before it.
    Inside,
    /// A frame begins at this lower position and does not verify, not even when read again from the device. Its end
    /// is unknown.
    Damaged(Position),
    /// Not known yet. The next pass continues.
    Unknown,
}

impl JournalReadStep {
    /// Whether a frame begins at `position` of a segment, whose bytes may be read up to `stop`. `false` if the scan
    /// must look at its place again: other bytes were found damaged, its place was sorted, or more is to be read.
    ///
    /// # Errors
    /// `BadCursor` if no frame begins there: a client made the position up. Nothing counts as damaged then.
    pub(super) fn is_border(
        &mut self,
        segment: &Segment,
        position: Position,
        stop: Position,
    ) -> Result<bool, ReadError> {
        let standing = self.standing(segment, position, stop)?;
        if segment.is_retired() {
            return Ok(false);
        }
        match standing {
            WalkEnd::Border => Ok(true),
            WalkEnd::Inside => Err(ReadError::BadCursor("no record begins at its place")),
            WalkEnd::Damaged(from) => {
                self.lose_frame(segment, from, stop)?;
                Ok(false)
            }
            WalkEnd::Unknown => Ok(false),
        }
    }

    /// How `position` lies among the frames of a segment, whose bytes may be read up to `stop`. A call that
    /// notes borders ends after [`LOOK_BYTES`], give or take a piece.
    fn standing(
        &mut self,
        segment: &Segment,
        position: Position,
        stop: Position,
    ) -> Result<WalkEnd, ReadError> {
        if !segment.offset(position).is_multiple_of(8) {
            return Ok(WalkEnd::Inside);
        }
        let mut holes = segment.holes.read().clone();
        holes.retain(|hole| hole.from < position);
        let mut at = segment.border_before(position);
        let mut noted = false;
        while at < position {
            if let Some(hole) = holes.iter().find(|hole| is_in(hole, at)) {
                at = hole.to;
                if at > position {
                    // It was found just now. The next step passes it.
                    return Ok(WalkEnd::Unknown);
                }
                continue;
            }
            if noted && self.looked >= LOOK_BYTES {
                return Ok(WalkEnd::Unknown);
            }
            let reached = self.walk(segment, at, (position, stop), &holes)?;
            if reached == at {
                return Ok(WalkEnd::Damaged(at));
            }
            at = reached;
            // Positions that are not flushed can be used again after a failed write.
            if at <= position && at <= self.store.journal.durable() {
                noted |= segment.note_border(at);
            }
        }
        Ok(match at == position {
            true => WalkEnd::Border,
            false => WalkEnd::Inside,
        })
    }

    /// The end of the last good frame in the piece that begins at `at`, a known border. Returns `at` if the frame
    /// there does not verify.
    fn walk(
        &mut self,
        segment: &Segment,
        at: Position,
        (position, stop): (Position, Position),
        holes: &[Hole],
    ) -> Result<Position, ReadError> {
        let rest = stop.since(at);
        let bytes = self
            .store
            .bytes(segment, at, PIECE_BYTES.min(rest), Reach::Disk)?;
        self.looked += bytes.len() as u64;
        let mut reached = at;
        while reached < position && !holes.iter().any(|hole| is_in(hole, reached)) {
            let from = usize::try_from(reached.since(at)).unwrap_or(usize::MAX);
            let header = header_at(segment, bytes.get(from..).unwrap_or(&[]), reached);
            match header {
                Some(header) => reached = header.end(),
                None => break,
            }
        }
        if reached > at {
            return Ok(reached);
        }
        let again = self
            .store
            .bytes_again(segment, at, (MAX_HEADER_BYTES as u64).min(rest))?;
        self.looked += again.len() as u64;
        Ok(header_at(segment, &again, at).map_or(at, |header| header.end()))
    }
}

/// The header of the frame at `position`, whose bytes begin `bytes`, if it verifies.
pub(super) fn header_at(
    segment: &Segment,
    bytes: &[u8],
    position: Position,
) -> Option<FrameHeader> {
    frame::decode_header(bytes, segment.life.salt).filter(|header| header.position == position)
}

fn is_in(hole: &Hole, position: Position) -> bool {
    hole.from <= position && position < hole.to
}
