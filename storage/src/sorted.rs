//! Sorted runs: files that replace sealed journal segments. In a run the records of one log lie together, in
//! the order of their lsns. Trimmed and deleted records are gone.
//!
//! ```text
//! 0        8 KiB                                                                  size - 8
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! | life   | pack |         | images |         | order |         | run | marker | run | offset |
//! | blocks |      |         |        |         |       |         |     |        |     | of run |
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! ```
//!
//! - A **pack** holds records of one log. Its *pieces* were frames of the journal. Their bodies are copied as
//!   they were stored. Its header describes each piece.
//! - **Images** describe the state of each log that the segments touched, at their end.
//! - **Order** gives the commit order of the pieces, for readers of many logs.
//! - **Run**, the last frame, names the segments that the run replaces. The eight bytes behind it give its
//!   offset. The frame is there twice, eight KiB apart: one good copy is enough.
//!
//! Runs follow each other without a gap from the beginning of the journal. A run is complete: it was flushed
//! before it got its name. Its frames lie at *addresses* beyond all positions, so that a place shows whether it
//! is in a run. Readers know a piece by its position in the journal, which the pack records.

mod build;
mod choose;
mod head;
mod open;
mod pack;
mod room;
mod sort;
mod write;

use std::sync::Arc;

#[cfg(test)]
pub(crate) use self::choose::{Load, Of};
pub(crate) use self::head::Head;
pub(crate) use self::open::{
    BadRun, LostInRun, Opened, PACK_HEADER_BYTES, Walked, holes_of, index_of, list, open,
    open_archived, some, stored, walk, walk_with,
};
pub(crate) use self::pack::{Archived, Entry, Images, Piece, entries, pieces, put_images};
pub(crate) use self::room::Volume;
pub(crate) use self::sort::Sorter;
#[cfg(test)]
pub(crate) use self::sort::Turns;
pub(crate) use self::write::{Writer, draw_salt};
use crate::bounds::{self, ADDRESSES};
use crate::ids::{Position, SegmentId};
use crate::journal::segment::Segment;

/// Number of addresses of a run.
const SPAN: u64 = 1 << 32;

/// A sorted run, as it is served.
pub(crate) struct Run {
    /// Its file, as if it were a segment of the journal.
    pub(crate) segment: Arc<Segment>,
    pub(crate) head: Head,
    /// Bytes that were dead when the run was made, and share a piece with live ones: a piece is never cut. 0 if
    /// an earlier process made the run.
    pub(crate) straddling: u64,
}

impl Run {
    pub(crate) fn id(&self) -> SegmentId {
        self.segment.life.id
    }

    /// Bytes that describe the logs of the run. Its index takes about as much.
    fn image_bytes(&self) -> u64 {
        self.segment.life.size.saturating_sub(self.head.pack_bytes)
    }
}

/// Address of the first byte of a run.
pub(crate) fn base_of(id: SegmentId) -> Position {
    // Ids are below 2^31 (`bounds::unused`), so that no address wraps.
    Position::new(ADDRESSES + id.get() % (ADDRESSES / SPAN) * SPAN)
}

/// Whether a position is an address in a run.
pub(crate) fn is_address(position: Position) -> bool {
    position.get() >= ADDRESSES
}

/// Path of a run.
pub(crate) fn path(id: SegmentId) -> String {
    format!("sorted/{id}.seg")
}

/// Path of a run that is being written.
pub(crate) fn new_path(id: SegmentId) -> String {
    format!("sorted/{id}.new")
}

/// The id in the name of a run that was being written.
pub(crate) fn new_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".new")
}
