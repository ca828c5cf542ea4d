//! Places of one log's frames in segments without an index, in memory. Found by binary search.

use thin_vec::ThinVec;

use crate::base::ids::{Lsn, Position};

/// Place of one frame of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) position: Position,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    /// Length of the whole frame, in bytes.
    pub(crate) frame_len: u32,
}

impl Place {
    pub(crate) fn end(&self) -> Position {
        self.position.advance(u64::from(self.frame_len))
    }

    pub(crate) fn next_lsn(&self) -> Lsn {
        self.first_lsn.advance(u64::from(self.count))
    }
}

/// The places of one log, in order of both lsn and position. An empty list, as of an idle log, takes
/// one word.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places(ThinVec<Place>);

impl Places {
    /// Adds the newest frame.
    pub(crate) fn push(&mut self, place: Place) {
        debug_assert!(self.0.last().is_none_or(|last| {
            last.next_lsn() <= place.first_lsn && last.end() <= place.position
        }));
        if self.0.is_empty() {
            // Most logs of a million have one frame.
            self.0.reserve_exact(1);
        }
        self.0.push(place);
    }

    /// Removes the newest frame.
    pub(crate) fn pop(&mut self) -> Option<Place> {
        self.0.pop()
    }

    /// Index of the first frame that holds `lsn` or a later lsn.
    pub(crate) fn index_of(&self, lsn: Lsn) -> usize {
        self.0.partition_point(|place| place.next_lsn() <= lsn)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Place> {
        self.0.get(index)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn from(&self, index: usize) -> &[Place] {
        self.0.get(index..).unwrap_or(&[])
    }

    /// The first frame that does not lie completely below `position`.
    pub(crate) fn first_beyond(&self, position: Position) -> Option<&Place> {
        self.0
            .get(self.0.partition_point(|place| place.end() <= position))
    }

    /// Drops frames before a position, which an index lists from now on.
    pub(crate) fn drop_before(&mut self, position: Position) {
        let count = self.0.partition_point(|place| place.position < position);
        if count == self.0.len() {
            // An idle log keeps no memory.
            self.0 = ThinVec::new();
        } else {
            self.0.drain(..count);
        }
    }

    /// Drops frames that begin at or beyond `position`. Returns their bytes.
    pub(crate) fn cut(&mut self, position: Position) -> u64 {
        let first = self.0.partition_point(|place| place.position < position);
        self.0
            .drain(first..)
            .map(|place| u64::from(place.frame_len))
            .sum()
    }

    /// Removes a frame that was found damaged.
    pub(crate) fn remove(&mut self, position: Position) {
        self.0.retain(|place| place.position != position);
    }

    /// Frames that overlap the range from `from` to `to`.
    pub(crate) fn within(&self, from: Position, to: Position) -> &[Place] {
        let first = self.0.partition_point(|place| place.end() <= from);
        let last = self.0.partition_point(|place| place.position < to);
        self.0.get(first..last).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Places {
        let mut places = Places::default();
        for (position, first, count) in [(100, 0, 5), (300, 5, 1), (500, 9, 3)] {
            places.push(Place {
                position: Position::new(position),
                first_lsn: Lsn::new(first),
                count,
                frame_len: 80,
            });
        }
        places
    }

    #[test]
    fn lookup_finds_the_frame_that_holds_the_lsn_or_the_next_one() {
        let places = places();
        let found: Vec<_> = (0..13).map(|lsn| places.index_of(Lsn::new(lsn))).collect();
        assert_eq!(found, [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3]);
    }

    #[test]
    fn the_first_frame_beyond_a_position_is_the_first_not_wholly_below() {
        let places = places();
        let first = |p| {
            places
                .first_beyond(Position::new(p))
                .map(|p| p.position.get())
        };
        assert_eq!(first(0), Some(100));
        assert_eq!(first(179), Some(100));
        assert_eq!(first(180), Some(300));
        assert_eq!(first(580), None);
    }
}
