//! The seam from the committer to the jobs: it hands over each segment that it has left.
//!
//! Before it begins a segment, the committer checks that the segment can be taken over later.

use std::sync::Arc;

use crate::api::error::HostShortage;
use crate::base::ids::{Position, SegmentId, Timestamp};
use crate::journal::segment::Segment;
use crate::logs::Log;
use crate::logs::image::Image;

/// A segment that the journal just left, with its state and the state of its logs at that time.
pub(crate) struct Sealed {
    pub(crate) segment: Arc<Segment>,
    pub(crate) end: Position,
    /// Header checksum of the segment's last frame.
    pub(crate) chain: u32,
    pub(crate) before: Option<SegmentId>,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
    pub(crate) expiry: Timestamp,
    /// Every log that the segment touches.
    pub(crate) logs: Vec<(Arc<Log>, Image)>,
}

/// Takes over the segments that the committer has left.
pub(crate) trait SealSink: Send + Sync {
    /// Checks that another segment of `segment_bytes` can be taken over later.
    ///
    /// # Errors
    /// If indexes cannot be written, and no more indexes fit into memory.
    fn has_room(&self, segment_bytes: u64) -> Result<(), HostShortage>;

    /// Takes over a sealed segment. Waits while too many segments have no index.
    fn take_over(&self, sealed: Sealed);
}
