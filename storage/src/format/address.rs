//! Addresses: places in sorted runs, beyond all positions of the journal.
//!
//! A place therefore shows whether it is in a run.

use crate::base::bounds::ADDRESSES;
use crate::base::ids::{Position, SegmentId};

/// Number of addresses of a run.
pub(crate) const SPAN: u64 = 1 << 32;

/// Address of the first byte of a run.
pub(crate) fn base_of(id: SegmentId) -> Position {
    // Ids are below 2^31 (`bounds::unused`), so that no address wraps.
    Position::new(ADDRESSES + id.get() % (ADDRESSES / SPAN) * SPAN)
}

/// Whether a position is an address in a run.
pub(crate) fn is_address(position: Position) -> bool {
    position.get() >= ADDRESSES
}

/// A stretch of a segment that was durable once and does not verify now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hole {
    pub(crate) from: Position,
    pub(crate) to: Position,
}
