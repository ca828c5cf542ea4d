//! The newest groups as they were written. All readers near the tail share one copy in memory.
//!
//! ```text
//!    oldest                                    newest
//! +--------+-------+-----------+-- ... --+-------+--------+
//! | group  | group | group     |         | group | group  |  ◀── pushed when written
//! +--------+-------+-----------+-- ... --+-------+--------+
//!  ▼ dropped when there is more than RECENT_BYTES
//! ```
//!
//! A group enters after the operating system has taken it and before it is published. A group whose
//! write failed never enters. As for every other byte, published positions decide whether a reader may
//! see a group. Positions are never reused, so a position identifies a group, also across segments.
//!
//! This memory is only a cache: a reader that finds nothing here reads the segment.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use crate::base::ids::Position;
use crate::base::sync::RwLock;

/// Maximum memory of the groups with their overhead, in bytes. At 100 MB/s it reaches back about 80 ms,
/// which is more than a follower that keeps up needs. The page cache has older bytes. Dropped groups
/// that readers still hold are not counted: a message that waits to be sent, or is kept for others,
/// holds its groups.
pub(crate) const RECENT_BYTES: usize = 8 << 20;

/// Groups up to this size are copied into a shared allocation of `SHARED_BYTES`. One allocation for
/// each would take many times the group's size: a lone append is a few hundred bytes, and its buffer
/// has room for a block.
const SMALL_BYTES: usize = 16 << 10;
const SHARED_BYTES: usize = 4 * SMALL_BYTES;

/// Approximate memory of a group in addition to its bytes.
const GROUP_OVERHEAD: usize = size_of::<RecentGroup>() + 32;

struct RecentGroup {
    start: Position,
    bytes: Bytes,
}

impl RecentGroup {
    fn cost(&self) -> usize {
        self.bytes.len() + GROUP_OVERHEAD
    }
}

/// The newest groups, in order.
#[derive(Default)]
pub(crate) struct Recent(RwLock<Groups>);

#[derive(Default)]
struct Groups {
    queue: VecDeque<RecentGroup>,
    cost: usize,
}

impl Recent {
    /// Adds the group that begins at `start`, which is beyond all groups before.
    pub(super) fn push(&self, start: Position, bytes: Bytes) {
        let group = RecentGroup { start, bytes };
        let mut groups = self.0.write();
        debug_assert!(groups.queue.back().is_none_or(|last| last.start < start));
        groups.cost += group.cost();
        groups.queue.push_back(group);
        while groups.cost > RECENT_BYTES
            && let Some(oldest) = groups.queue.pop_front()
        {
            groups.cost -= oldest.cost();
        }
    }

    /// Up to `length` bytes from `from` on, all from one group and not copied. `None` if the first byte
    /// is not here.
    pub(crate) fn at(&self, from: Position, length: u64) -> Option<Bytes> {
        let groups = self.0.read();
        let after = groups.queue.partition_point(|group| group.start <= from);
        let group = groups.queue.get(after.checked_sub(1)?)?;
        let skip = usize::try_from(from.since(group.start)).ok()?;
        let rest = group
            .bytes
            .len()
            .checked_sub(skip)
            .filter(|rest| *rest > 0)?;
        let take = usize::try_from(length).map_or(rest, |length| length.min(rest));
        Some(group.bytes.slice(skip..skip + take))
    }

    /// Removes all groups.
    pub(crate) fn clear(&self) {
        *self.0.write() = Groups::default();
    }
}

/// Turns the buffers in which groups are encoded into the bytes that [`Recent`] keeps.
#[derive(Default)]
pub(super) struct Keeper(BytesMut);

impl Keeper {
    /// Takes the group out of `buffer`. The buffer is empty afterwards, with room for the next group.
    pub(super) fn take(&mut self, buffer: &mut Vec<u8>, slack: usize) -> Bytes {
        if buffer.len() > SMALL_BYTES {
            // The next group probably has about this size. This group is kept without its slack.
            let next = Vec::with_capacity(buffer.len() + slack);
            let mut group = std::mem::replace(buffer, next);
            group.shrink_to_fit();
            return group.into();
        }
        if self.0.capacity() < buffer.len() {
            self.0 = BytesMut::with_capacity(SHARED_BYTES);
        }
        self.0.extend_from_slice(buffer);
        buffer.clear();
        self.0.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(recent: &Recent, from: u64, length: u64) -> Option<Vec<u8>> {
        recent
            .at(Position::new(from), length)
            .map(|bytes| bytes.to_vec())
    }

    #[test]
    fn a_read_returns_bytes_of_one_group_from_its_position() {
        let recent = Recent::default();
        assert_eq!(at(&recent, 0, 1), None);
        recent.push(Position::new(100), Bytes::from_static(b"abcdefgh"));
        recent.push(Position::new(108), Bytes::from_static(b"ijklmnop"));
        // The journal has rolled.
        recent.push(Position::new(500), Bytes::from_static(b"qrstuvwx"));
        assert_eq!(at(&recent, 99, 100), None);
        assert_eq!(at(&recent, 100, 8).unwrap(), b"abcdefgh");
        assert_eq!(at(&recent, 102, 3).unwrap(), b"cde");
        assert_eq!(at(&recent, 106, u64::MAX).unwrap(), b"gh");
        assert_eq!(at(&recent, 108, 100).unwrap(), b"ijklmnop");
        assert_eq!(at(&recent, 116, 1), None);
        assert_eq!(at(&recent, 499, 1), None);
        assert_eq!(at(&recent, 507, 9).unwrap(), b"x");
        assert_eq!(at(&recent, 508, 1), None);
        recent.clear();
        assert_eq!(at(&recent, 507, 1), None);
    }

    #[test]
    fn readers_share_the_bytes_that_were_written() {
        let recent = Recent::default();
        let group = Bytes::from(vec![7; 64]);
        recent.push(Position::new(8192), group.clone());
        for from in [0usize, 8, 56] {
            let slice = recent.at(Position::new(8192 + from as u64), 8).unwrap();
            assert_eq!(slice.as_ptr() as usize, group.as_ptr() as usize + from);
        }
    }

    #[test]
    fn small_groups_lie_together_and_large_ones_are_not_copied() {
        let mut keeper = Keeper::default();
        let mut buffer = Vec::new();
        let mut kept = Vec::new();
        for n in 0..=u8::MAX {
            buffer.resize(1000, n);
            kept.push(keeper.take(&mut buffer, 0));
            assert!(buffer.is_empty());
        }
        for (group, n) in kept.iter().zip(0..=u8::MAX) {
            assert_eq!(*group, vec![n; 1000]);
        }
        let follows = |pair: &&[Bytes]| pair[0].as_ptr_range().end == pair[1].as_ptr();
        let together = kept.windows(2).filter(follows).count();
        assert_eq!(together, 255 - 256 / (SHARED_BYTES / 1000));

        let mut large = vec![7; SMALL_BYTES + 1];
        let before = large.as_ptr();
        let group = keeper.take(&mut large, 100);
        assert_eq!(group, vec![7; SMALL_BYTES + 1]);
        assert_eq!(group.as_ptr(), before);
        assert!(large.is_empty() && large.capacity() >= SMALL_BYTES + 100);
    }

    #[test]
    fn the_oldest_groups_are_dropped_beyond_the_bound() {
        for size in [8, 1000, RECENT_BYTES / 3, RECENT_BYTES] {
            let recent = Recent::default();
            let pushed = 2 * RECENT_BYTES / size + 2;
            let positions: Vec<u64> = (0..pushed).map(|n| (n * size) as u64).collect();
            for position in &positions {
                recent.push(Position::new(*position), vec![0; size].into());
            }
            let kept = |position: &&u64| recent.at(Position::new(**position), 1).is_some();
            let count = positions.iter().filter(kept).count();
            assert_eq!(count, RECENT_BYTES / (size + GROUP_OVERHEAD), "{size}");
            // The newest groups stay, without a hole.
            assert!(
                positions.iter().rev().take(count).all(|p| kept(&p)),
                "{size}"
            );
        }
    }
}
