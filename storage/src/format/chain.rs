//! The sealed segments that hold records of one log. The form takes a few bytes per log, and finds one
//! of n segments in O(log n) reads.
//!
//! A skew-binary list (Myers, "An applicative random-access stack", 1983). The log keeps the roots of
//! complete binary trees, at most about 2 log n. The nodes are rows in the segments' index files. Each
//! row points to the roots that it was put on. Memory does not grow with history, and no index
//! file is ever changed.

use smallvec::SmallVec;

use crate::base::ids::Position;

/// A row in the index of one segment, with its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentNode {
    /// Base of the segment.
    pub(crate) base: Position,
    /// Number of rows in its tree, itself included: 2^k - 1.
    pub(crate) size: u32,
}

/// Maximum depth of a tree: rows are counted in 32 bits.
const DEEPEST: u32 = 64;

/// The two trees below a row: the newer and the older half. A row has both or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Below {
    pub(crate) newer: Position,
    pub(crate) older: Position,
}

/// The rows of one log, the newest last. Most logs of a million lie in one segment and need no
/// allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Chain(SmallVec<[SegmentNode; 1]>);

impl Chain {
    /// Adds a root that was read. Callers add the oldest first.
    pub(crate) fn put_root(&mut self, root: SegmentNode) {
        self.0.push(root);
    }

    pub(crate) fn roots(&self) -> &[SegmentNode] {
        &self.0
    }

    /// Base of the newest segment in the chain.
    pub(crate) fn newest(&self) -> Option<Position> {
        self.0.last().map(|node| node.base)
    }

    /// The trees that the next row will have below it.
    pub(crate) fn below_next(&self) -> Option<Below> {
        match self.0.as_slice() {
            [.., older, newer] if older.size == newer.size => Some(Below {
                newer: newer.base,
                older: older.base,
            }),
            _ => None,
        }
    }

    /// Adds the next segment.
    pub(crate) fn push(&mut self, base: Position) {
        let mut size = 1;
        if self.below_next().is_some()
            && let (Some(newer), Some(older)) = (self.0.pop(), self.0.pop())
        {
            size += newer.size + older.size;
        }
        self.0.push(SegmentNode { base, size });
    }

    /// Returns the oldest row for which `holds`, which must be false for all rows up to some row and
    /// true for all after it. `fetch` returns a row and the trees below it.
    pub(crate) fn oldest<R, E>(
        &self,
        mut fetch: impl FnMut(Position) -> Result<(R, Option<Below>), E>,
        holds: impl Fn(&R) -> bool,
    ) -> Result<Option<R>, E> {
        let mut found = None;
        for root in self.0.iter().rev() {
            let row = fetch(root.base)?;
            if !holds(&row.0) {
                break;
            }
            found = Some(row);
        }
        let Some((mut row, mut below)) = found else {
            return Ok(None);
        };
        // Each step halves a tree. Forged rows may form a circle.
        for _ in 0..DEEPEST {
            let Some(Below { newer, older }) = below else {
                break;
            };
            let half = fetch(older)?;
            if holds(&half.0) {
                (row, below) = half;
                continue;
            }
            let half = fetch(newer)?;
            if !holds(&half.0) {
                break;
            }
            (row, below) = half;
        }
        Ok(Some(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn every_row_is_found_in_few_reads_from_few_roots() {
        let mut chain = Chain::default();
        let mut rows: HashMap<Position, Option<Below>> = HashMap::new();
        for count in 1..=3000u64 {
            let base = Position::new(count * 10);
            rows.insert(base, chain.below_next());
            chain.push(base);
            assert!(chain.roots().len() <= 2 * (64 - count.leading_zeros() as usize));
            assert_eq!(chain.newest(), Some(base));
            if count % 97 != 0 && count > 70 {
                continue;
            }
            for wanted in 0..=count + 1 {
                let mut looks = 0;
                let found = chain.oldest(
                    |base| {
                        looks += 1;
                        Ok::<_, ()>((base, rows[&base]))
                    },
                    |base| base.get() >= wanted * 10,
                );
                let expected = (wanted <= count).then(|| Position::new(wanted.max(1) * 10));
                assert_eq!(found, Ok(expected), "{wanted} of {count}");
                assert!(
                    looks <= 4 * (64 - count.leading_zeros()) + 2,
                    "{looks} looks"
                );
            }
        }
    }
}
