//! A sorted run as the journal serves it, and the paths of runs.
//!
//! The sorter writes runs, and `index::run_file` reads them as files.

use std::sync::Arc;

use crate::base::bounds;
use crate::base::ids::SegmentId;
use crate::format::run_head::RunHead;
use crate::journal::segment::Segment;

/// A sorted run that the journal serves.
pub(crate) struct Run {
    /// Its file, as if it were a segment of the journal.
    pub(crate) segment: Arc<Segment>,
    pub(crate) head: RunHead,
    /// Bytes that were dead when the run was made, and share a piece with live ones: a piece is never cut. 0 if
    /// an earlier process made the run.
    pub(crate) straddling: u64,
}

impl Run {
    pub(crate) fn id(&self) -> SegmentId {
        self.segment.life.id
    }

    /// Whether it has records under a key with a lower number than `floor`, or plain ones.
    pub(crate) fn has_keys_below(&self, floor: u64) -> bool {
        self.head.records > 0 && self.head.oldest_key < floor
    }

    /// Bytes that describe the logs of the run. Its index takes about as much.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.segment.life.size.saturating_sub(self.head.pack_bytes)
    }
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
