//! The journal: one write path for all logs.

/// Smallest segment file.
pub const MIN_SEGMENT_BYTES: u64 = 64 << 10;

/// Bytes at the start of every segment that hold the two copies of its life block.
pub(crate) const LIFE_BYTES: u64 = 8 << 10;

/// The most one atomic unit may take in a segment of `segment_bytes`: half of what it
/// has for frames, so that a unit, the link before it and the seal behind it always
/// fit a fresh segment.
pub(crate) fn largest_unit(segment_bytes: u64) -> u64 {
    (segment_bytes - LIFE_BYTES) / 2
}
