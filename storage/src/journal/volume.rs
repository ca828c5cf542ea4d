//! The space that a store has, and the part of it that stays free for sorting.
//!
//! A run is written before the files that it replaces are removed. The free part is therefore enough to write any run
//! again, unless the run takes too large a part of the volume.

use crate::disk::Disk;
use crate::journal::run::Run;

/// Maximum part of the volume for one run (1/10).
pub(crate) const RUN_PART: u64 = 10;

/// Sorting keeps at most this part of the volume free (1/6). For a run of one segment it keeps less (1/12), so
/// that a small volume has room for segments.
pub(crate) const RESERVE_PART: u64 = 6;

pub(crate) const RESERVE_PART_OF_SEGMENT: u64 = 12;

/// A run takes 1/32 more than its records and images, and these bytes.
pub(crate) const OVERHEAD_PART: u64 = 32;

pub(crate) const OVERHEAD_BYTES: u64 = 32 << 10;

/// Small segments are sorted together up to these bytes: a run of one would take more than it gives.
pub(crate) const SMALL: u64 = 1 << 20;

/// Bytes of a run of one segment, or of some small ones, and of its index.
pub(crate) fn run_of_segment(segment_bytes: u64) -> u64 {
    let bytes = segment_bytes.max(SMALL);
    bytes_of_run(bytes, bytes / 10)
}

/// Upper bound on the bytes of a new run and its index. `records` and `images` are the bytes of kept
/// records, and of descriptions of logs, in the files it is made of.
pub(crate) fn bytes_of_run(records: u64, images: u64) -> u64 {
    // The index repeats the images.
    records + 2 * images + records / OVERHEAD_PART + OVERHEAD_BYTES
}

/// The space that the store has, or could have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Volume {
    /// Bytes of the store's files and free bytes. `None` if the file system does not report them.
    bytes: Option<u64>,
}

impl Volume {
    /// `files` are the bytes of journal and pool.
    pub(crate) fn of<'a>(disk: &dyn Disk, files: u64, runs: impl Iterator<Item = &'a Run>) -> Self {
        let runs: u64 = runs.map(|run| run.segment.file_bytes()).sum();
        let free = disk.free_bytes().ok().flatten();
        Self {
            bytes: free.map(|free| free + files + runs),
        }
    }

    /// Free bytes that sorting needs at any time: enough to write any run again, and to make a run
    /// of a segment.
    pub(crate) fn sorting_reserve<'a>(
        self,
        segment_bytes: u64,
        runs: impl Iterator<Item = &'a Run>,
    ) -> u64 {
        let again = runs.map(|run| bytes_of_run(run.head.pack_bytes, run.image_bytes()));
        let part = |part| self.bytes.map_or(u64::MAX, |bytes| bytes / part);
        let of_segment = run_of_segment(segment_bytes).min(part(RESERVE_PART_OF_SEGMENT));
        let again = again.max().unwrap_or(0);
        again.max(of_segment).min(part(RESERVE_PART))
    }

    /// Bytes of a run at most, so that this much can be kept free.
    pub(crate) fn largest_run(self, segment_bytes: u64) -> u64 {
        let part = self.bytes.map_or(u64::MAX, |bytes| bytes / RUN_PART);
        part.max(segment_bytes)
    }
}
