//! The parts of the journal that the tail has.

use std::collections::BTreeMap;

use wald_storage::{Position, SegmentId};

/// The end of the shipped parts, and of each segment that the tail has.
#[derive(Debug, Default)]
pub(super) struct Shipped {
    /// The end of the last part: the next one is read from here.
    pub(super) end: Position,
    /// Everything below is unused if it is beyond `end`.
    empty: Position,
    /// Segments that were not drained, with their end and the number of their rows. As many as wait for their files, so
    /// a few more than 16.
    segments: BTreeMap<SegmentId, (Position, u64)>,
}

impl Shipped {
    /// A part was stored, as this number of rows.
    pub(super) fn note(&mut self, segment: SegmentId, end: Position, rows: u64) {
        let known = self.segments.entry(segment).or_default();
        *known = (end, known.1 + rows);
        self.end = end;
    }

    /// Number of rows that were not drained.
    pub(super) fn rows(&self) -> u64 {
        self.segments.values().map(|(_, rows)| rows).sum()
    }

    /// The files hold everything below.
    pub(super) fn skip_to(&mut self, position: Position) {
        self.end = self.end.max(position);
    }

    /// Nothing is behind the last part, up to this position.
    pub(super) fn empty_to(&mut self, position: Position) {
        self.empty = self.empty.max(position);
    }

    /// Everything durable below is shipped.
    pub(super) fn reached(&self) -> Position {
        self.end.max(self.empty)
    }

    /// Takes the last segment whose parts all lie below the position. The segment behind it has parts, so that nothing
    /// is added to it any more.
    pub(super) fn take_whole_below(&mut self, position: Position) -> Option<SegmentId> {
        let newest = *self.segments.keys().next_back()?;
        let whole = self.segments.iter().rev();
        let mut whole = whole.filter(|(segment, (end, _))| **segment < newest && *end <= position);
        let segment = *whole.next()?.0;
        self.segments.retain(|other, _| *other > segment);
        Some(segment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_whole_once_the_next_one_has_parts() {
        let at = Position::new;
        let mut shipped = Shipped::default();
        for (segment, end) in [(3, 10), (3, 20), (4, 40)] {
            shipped.note(SegmentId::new(segment), at(end), 1);
        }
        assert_eq!(shipped.rows(), 3);
        assert_eq!(shipped.take_whole_below(at(19)), None);
        assert_eq!(shipped.take_whole_below(at(99)), Some(SegmentId::new(3)));
        assert_eq!(shipped.take_whole_below(at(99)), None, "4 may grow");
        assert_eq!(shipped.rows(), 1);
        shipped.note(SegmentId::new(5), at(60), 2);
        shipped.note(SegmentId::new(6), at(80), 1);
        assert_eq!(shipped.take_whole_below(at(60)), Some(SegmentId::new(5)));
        assert_eq!(shipped.end, at(80));
        shipped.skip_to(at(70));
        shipped.empty_to(at(90));
        assert_eq!((shipped.end, shipped.reached()), (at(80), at(90)));
    }
}
