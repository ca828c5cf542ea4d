//! A value that changes with the journal: the value on the device, and its changes in frames on their way
//! there. A reader of durable state never sees a change that a power cut could take back.

use crate::base::ids::Position;

/// A value and the changes that are on their way to the device, in journal order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Versions<T> {
    settled: T,
    /// End of the frame that changed the value, and the new value.
    coming: Vec<(Position, T)>,
}

impl<T: Clone> Versions<T> {
    /// A value whose changes are all on the device.
    pub(crate) fn settled(value: T) -> Self {
        Self {
            settled: value,
            coming: Vec::new(),
        }
    }

    /// The value with all changes so far.
    pub(crate) fn newest(&self) -> &T {
        self.coming.last().map_or(&self.settled, |(_, value)| value)
    }

    /// The value for a reader to whom everything below `published` is visible.
    pub(crate) fn at(&self, published: Position) -> &T {
        let visible = self.coming.iter().rev().find(|(end, _)| *end <= published);
        visible.map_or(&self.settled, |(_, value)| value)
    }

    /// Changes the value in the frame that ends at `end`. Changes below `durable` become final.
    pub(crate) fn push(&mut self, end: Position, value: T, durable: Position) {
        self.settle(durable);
        self.coming.push((end, value));
    }

    /// Forgets all values older than the value that is on the device.
    pub(crate) fn settle(&mut self, durable: Position) {
        let through = self.coming.partition_point(|(end, _)| *end <= durable);
        if let Some((_, value)) = self.coming.drain(..through).next_back() {
            self.settled = value;
        }
    }

    /// Number of changes on their way.
    #[cfg(test)]
    pub(crate) fn coming(&self) -> usize {
        self.coming.len()
    }

    /// Takes back changes from `start` on.
    pub(crate) fn cut(&mut self, start: Position) {
        self.coming.retain(|(end, _)| *end <= start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reader_sees_its_published_value_and_a_cut_drops_the_rest() {
        let at = Position::new;
        let mut epoch = Versions::settled(0);
        epoch.push(at(10), 1, at(0));
        epoch.push(at(20), 2, at(0));
        assert_eq!(
            (*epoch.at(at(9)), *epoch.at(at(10)), *epoch.newest()),
            (0, 1, 2)
        );
        epoch.push(at(30), 3, at(10));
        assert_eq!(
            (*epoch.at(at(10)), *epoch.at(at(29)), *epoch.newest()),
            (1, 2, 3)
        );
        epoch.cut(at(20));
        assert_eq!(*epoch.newest(), 2);
        epoch.cut(at(5));
        assert_eq!(*epoch.newest(), 1);
    }
}
