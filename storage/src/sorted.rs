//! Sorted runs: files that took the place of sealed journal segments. In a run the records
//! of one log lie together, in the order of their lsns, and what was trimmed or deleted is
//! gone.
//!
//! ```text
//! 0        8 KiB                                                                  size - 8
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! | life   | pack |         | images |         | order |         | run | marker | run | offset |
//! | blocks |      |         |        |         |       |         |     |        |     | of run |
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! ```
//!
//! - A **pack** has records of one log: what were frames of the journal are its *pieces*,
//!   their bodies copied as they were stored. Its header tells each of them.
//! - **Images** tell how every log that the segments touched stood at their end.
//! - **Order** tells in which order the pieces were committed, for readers of many logs.
//! - **Run**, the last frame, says which segments it stands for. The eight bytes behind it
//!   say where it is. It is there twice, eight KiB apart: one good copy is enough.
//!
//! Runs follow each other without a gap from the beginning of the journal on. A run is whole:
//! it was flushed before it got its name. Its frames lie at *addresses* beyond all positions,
//! so that a place says by itself where it is; where a piece was in the journal, its
//! position, is told by the pack and is what readers know.

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

/// A run has so many addresses.
const SPAN: u64 = 1 << 32;

/// A sorted run, as it is served.
pub(crate) struct Run {
    /// Its file, as if it were a segment of the journal.
    pub(crate) segment: Arc<Segment>,
    pub(crate) head: Head,
    /// Bytes that were dead when it was made, and lie with live ones in what is never cut. 0 if it
    /// was made by an earlier process, which did not tell.
    pub(crate) straddling: u64,
}

impl Run {
    pub(crate) fn id(&self) -> SegmentId {
        self.segment.life.id
    }

    /// Bytes of what it says of its logs; its index takes about as much.
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

/// Name of a run.
pub(crate) fn path(id: SegmentId) -> String {
    format!("sorted/{id}.seg")
}

/// Name of a run that is being written.
pub(crate) fn new_path(id: SegmentId) -> String {
    format!("sorted/{id}.new")
}

/// The id in the name of a run that was being written.
pub(crate) fn new_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".new")
}
