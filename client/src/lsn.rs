//! The number of a record in its log.

use std::fmt;

/// Number of one record in one log: 0 for the first record ever appended, then up by one
/// with no gaps, also across trims and restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(u64);

impl Lsn {
    /// The lsn with this number.
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number, as the contract carries it.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The lsn after this one.
    pub fn next(self) -> Self {
        self.advance(1)
    }

    /// The lsn `count` records later.
    ///
    /// # Panics
    /// If the lsn would pass `u64::MAX`; at a billion appends a second a log gets there
    /// in 584 years, so this is a bug and not an operating condition.
    pub fn advance(self, count: u64) -> Self {
        Self(self.0.checked_add(count).expect("lsn overflow"))
    }
}

impl From<u64> for Lsn {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
