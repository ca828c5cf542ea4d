//! The numbers that Wald counts with. Each has its own type, so that an lsn is never taken for a position and
//! a position never for a file offset.

use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Number of one record in one log: 0 for the first record ever appended, then
/// up by one with no gaps, also across trims and restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lsn(u64);

impl Lsn {
    /// The lsn of a log's first record.
    pub const ZERO: Self = Self(0);

    /// An lsn that came from a client or from disk.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The lsn `count` records later.
    ///
    /// # Panics
    /// If it would pass `u64::MAX`; at a billion appends a second a log gets there
    /// in 584 years, so this is a bug and not an operating condition. Numbers read
    /// from disk go through [`Lsn::checked_advance`].
    pub fn advance(self, count: u64) -> Self {
        self.checked_advance(count).expect("lsn overflow")
    }

    /// The lsn `count` records later, or `None` past `u64::MAX`.
    pub fn checked_advance(self, count: u64) -> Option<Self> {
        self.0.checked_add(count).map(Self)
    }

    /// Number of records from `earlier` (inclusive) to `self` (exclusive); 0 if `earlier` is not earlier.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The records from `first` to before `end` as messages name them: with the last one, not with
/// the one after it. Example: `records 20000 to 20999`.
pub fn records_in_words(first: Lsn, end: Lsn) -> String {
    match end.get().saturating_sub(1) {
        last if last <= first.get() => format!("record {first}"),
        last => format!("records {first} to {last}"),
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A place in the journal, in bytes. It strictly increases over everything ever committed and is never
/// assigned twice, not even after a crash took a frame back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position(u64);

impl Position {
    /// Before everything.
    pub const ZERO: Self = Self(0);

    /// A position that came from a client or from disk.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The position `bytes` further on.
    ///
    /// # Panics
    /// Past `u64::MAX`, which 10 GB/s reach after 58 years.
    pub fn advance(self, bytes: u64) -> Self {
        Self(self.0.checked_add(bytes).expect("position overflow"))
    }

    /// Bytes from `earlier` to `self`; 0 if `earlier` is not earlier.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identity of a log, unique for ever: a re-created log of the same name has another id.
///
/// Consists of the recovery epoch in which it was assigned and a counter. So an id that a crash took back
/// (its log was never durable) is not assigned again either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId(u64);

impl LogId {
    const COUNTER_BITS: u32 = 40;

    /// An id that came from a client or from disk.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The id number `counter` of a recovery epoch. The first epoch's ids are small.
    ///
    /// # Panics
    /// After 2^40 logs created without an unclean start, or 2^24 unclean starts.
    pub fn compose(epoch: RecoveryEpoch, counter: u64) -> Self {
        assert!(counter < 1 << Self::COUNTER_BITS, "log id counter overflow");
        let epoch = epoch.get() - RecoveryEpoch::FIRST.get();
        assert!(
            epoch < 1 << (64 - Self::COUNTER_BITS),
            "recovery epoch overflow"
        );
        Self((epoch << Self::COUNTER_BITS) | counter)
    }

    /// The counter of the first id that a store assigns in an epoch: from 1 to 2^39, derived from
    /// the store's random id. Two stores in the same epoch share an id with a chance of about
    /// 2^-38 per log. At least 2^39 ids remain in each epoch.
    pub(crate) fn first_counter(store_id: u128, epoch: RecoveryEpoch) -> u64 {
        let drawn = xxh3_64_with_seed(&store_id.to_le_bytes(), epoch.get());
        1 + (drawn >> (64 - Self::COUNTER_BITS + 1))
    }

    /// The counter part of an id of `epoch`, or `None` if it is of another epoch.
    pub fn counter_in(self, epoch: RecoveryEpoch) -> Option<u64> {
        let own = self.0 >> Self::COUNTER_BITS;
        (own == epoch.get() - RecoveryEpoch::FIRST.get())
            .then_some(self.0 & ((1 << Self::COUNTER_BITS) - 1))
    }

    /// The recovery epoch in which it was assigned.
    pub fn epoch(self) -> RecoveryEpoch {
        RecoveryEpoch((self.0 >> Self::COUNTER_BITS) + RecoveryEpoch::FIRST.get())
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Hash for tables of log ids. The engine assigns ids one after the other, so no client can choose them to
/// collide. Consecutive ids also lie next to each other in a table.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LogIdHash(u64);

impl BuildHasher for LogIdHash {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        Self::default()
    }
}

impl Hasher for LogIdHash {
    fn write_u64(&mut self, id: u64) {
        // Tables find a place by the low bits and compare the highest bits there. Counters begin again in
        // each epoch: without the epoch in the low bits, too, the ids of many epochs would all want the same
        // few places.
        let place = id.wrapping_add((id >> 40).wrapping_mul(0x9E37_79B9));
        self.0 = place ^ id.wrapping_mul(0x9E37_79B9_7F4A_7C15) & 0xFFFF << 48;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("an id is one number");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl fmt::Display for LogId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number that rises by one with each unclean start of a store, from the store's own first number. Raised
/// durably before serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecoveryEpoch(u64);

impl RecoveryEpoch {
    /// The lowest epoch. Stores made by earlier versions begin here.
    pub const FIRST: Self = Self(1);

    /// Number of epochs that a new store may begin in. Log ids carry the epoch above 40 bits of
    /// counter: they stay below 2^53, which JSON numbers keep exactly, for 4,096 unclean starts
    /// and more.
    const BEGINNINGS: u64 = 1 << 12;

    /// The epoch that a new store begins in: from 2 to 4,097, derived from the store's random id.
    /// Another store began in the same epoch with a chance of 1 in 4,096. Their log ids differ
    /// even then.
    pub(crate) fn first_of(store_id: u128) -> Self {
        let drawn = xxh3_64_with_seed(&store_id.to_le_bytes(), 0);
        Self(2 + drawn % Self::BEGINNINGS)
    }

    /// An epoch that came from a client or from disk; 0 counts as 1.
    pub const fn new(value: u64) -> Self {
        Self(if value == 0 { 1 } else { value })
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The epoch after `starts` more unclean starts.
    pub(crate) fn plus(self, starts: u64) -> Self {
        Self(self.0 + starts)
    }

    /// The epoch before.
    pub(crate) fn before(self) -> Self {
        Self::new(self.0 - 1)
    }

    /// The epoch of the next unclean start.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for RecoveryEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of one segment file, up by one from 1, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(u64);

impl SegmentId {
    /// The first segment of a store.
    pub const FIRST: Self = Self(1);

    /// An id read from a file name or a life block.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The plain number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The id of the following segment.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A segment or none, in one word: ids begin with 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SegmentOrNone(u64);

impl SegmentOrNone {
    /// The segment, if there is one.
    pub(crate) fn get(self) -> Option<SegmentId> {
        Some(SegmentId(self.0)).filter(|id| id.0 != 0)
    }
}

impl From<Option<SegmentId>> for SegmentOrNone {
    fn from(id: Option<SegmentId>) -> Self {
        Self(id.map_or(0, SegmentId::get))
    }
}

impl From<SegmentId> for SegmentOrNone {
    fn from(id: SegmentId) -> Self {
        Self(id.get())
    }
}

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Microseconds since the Unix epoch, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// A time in microseconds since the Unix epoch.
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    pub const fn micros(self) -> i64 {
        self.0
    }

    /// The time `micros` later, clamped to the range of the type.
    pub const fn saturating_add_micros(self, micros: i64) -> Self {
        Self(self.0.saturating_add(micros))
    }
}

/// Maximum length of a log name, in bytes of UTF-8.
pub const MAX_LOG_NAME_BYTES: usize = 255;

/// The text of a name, and its form in messages.
macro_rules! text_of_name {
    ($name:ident) => {
        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        /// As text in quotes, the form in messages.
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

/// The name of a log: 1 to 255 bytes of UTF-8 without control characters, not
/// starting with `$` (reserved). Names are compared byte by byte: nothing is folded,
/// trimmed or replaced, so two names that differ are two logs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogName(Arc<str>);

impl LogName {
    /// Checks a name.
    ///
    /// # Errors
    /// Says which rule the name breaks.
    pub fn new(name: &str) -> Result<Self, InvalidLogName> {
        check_name(name)?;
        if name.starts_with('$') {
            return Err(InvalidLogName::Reserved);
        }
        Ok(Self(name.into()))
    }
}

text_of_name!(LogName);

/// A name that a client gives to something inside a log: 1 to 255 bytes of UTF-8 without
/// control characters, compared byte by byte.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Checks a name.
    ///
    /// # Errors
    /// Says which rule the name breaks.
    pub fn new(name: &str) -> Result<Self, InvalidName> {
        check_name(name)?;
        Ok(Self(name.into()))
    }
}

text_of_name!(Name);

/// The rules for all names.
fn check_name(name: &str) -> Result<(), InvalidName> {
    if name.is_empty() {
        return Err(InvalidName::Empty);
    }
    if name.len() > MAX_LOG_NAME_BYTES {
        return Err(InvalidName::TooLong { bytes: name.len() });
    }
    // Fast path for most names, since a start checks the names of all logs.
    if name.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return Ok(());
    }
    match name.chars().find(|c| c.is_control()) {
        Some(character) => Err(InvalidName::ControlCharacter { character }),
        None => Ok(()),
    }
}

/// Rule that the name of a producer or a cursor breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// No name was given.
    #[error("the name is empty; give 1 to 255 bytes of UTF-8")]
    Empty,
    /// Longer than 255 bytes.
    #[error("the name has {bytes} bytes; at most 255 are allowed")]
    TooLong {
        /// Bytes of the name given.
        bytes: usize,
    },
    /// Contains a control character.
    #[error("the name contains the control character U+{:04X}", u32::from(*character))]
    ControlCharacter {
        /// The first such character.
        character: char,
    },
}

impl From<InvalidName> for InvalidLogName {
    fn from(error: InvalidName) -> Self {
        match error {
            InvalidName::Empty => Self::Empty,
            InvalidName::TooLong { bytes } => Self::TooLong { bytes },
            InvalidName::ControlCharacter { character } => Self::ControlCharacter { character },
        }
    }
}

/// Rule that a log name breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLogName {
    /// No name was given.
    #[error("the log name is empty; give 1 to 255 bytes of UTF-8")]
    Empty,
    /// Longer than 255 bytes.
    #[error("the log name has {bytes} bytes; at most 255 are allowed")]
    TooLong {
        /// Bytes of the name given.
        bytes: usize,
    },
    /// Contains a control character.
    #[error("the log name contains the control character U+{:04X}", u32::from(*character))]
    ControlCharacter {
        /// The first such character.
        character: char,
    },
    /// Starts with `$`.
    #[error("log names starting with '$' are reserved")]
    Reserved,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_of_records_is_named_with_its_last_lsn() {
        let words = |first, end| records_in_words(Lsn::new(first), Lsn::new(end));
        assert_eq!(words(20_000, 21_000), "records 20000 to 20999");
        assert_eq!(words(7, 8), "record 7");
        let error = crate::ReadError::Quarantined {
            log: LogName::new("a").unwrap(),
            from: Lsn::new(3),
            to: Some(Lsn::new(7)),
        };
        assert_eq!(error.to_string(), "damage in log \"a\": records 3 to 6");
    }

    #[test]
    fn log_name_accepts_255_bytes_and_not_256() {
        assert!(LogName::new(&"n".repeat(255)).is_ok());
        assert_eq!(
            LogName::new(&"n".repeat(256)),
            Err(InvalidLogName::TooLong { bytes: 256 })
        );
    }

    #[test]
    fn log_name_refuses_control_characters_and_the_reserved_prefix() {
        assert!(matches!(
            LogName::new("a\u{7f}b"),
            Err(InvalidLogName::ControlCharacter {
                character: '\u{7f}'
            })
        ));
        assert_eq!(LogName::new("$x"), Err(InvalidLogName::Reserved));
        assert!(LogName::new("x$").is_ok());
    }

    #[test]
    fn log_ids_of_many_epochs_do_not_crowd_in_tables() {
        let mut places = vec![0u32; 1 << 17];
        let mut epoch = RecoveryEpoch::FIRST;
        for _ in 0..1000 {
            for counter in 1..=100 {
                let hash = LogIdHash::default().hash_one(LogId::compose(epoch, counter));
                places[usize::try_from(hash % (1 << 17)).unwrap()] += 1;
            }
            epoch = epoch.next();
        }
        let most = places.iter().max().unwrap();
        assert!(*most <= 16, "{most} of 100,000 ids want one place");
    }

    #[test]
    fn stores_begin_in_epochs_and_with_ids_of_their_own() {
        let mut ids = std::collections::HashSet::new();
        let mut epochs = std::collections::HashSet::new();
        for store in 0..1000_u128 {
            let epoch = RecoveryEpoch::first_of(store);
            assert!((2..2 + (1 << 12)).contains(&epoch.get()));
            epochs.insert(epoch);
            for epoch in [epoch, epoch.next(), RecoveryEpoch::FIRST] {
                let counter = LogId::first_counter(store, epoch);
                assert!((1..=1 << 39).contains(&counter));
                let id = LogId::compose(epoch, counter);
                assert!(id.get() < 1 << 53, "a JSON number keeps {id} exactly");
                assert!(ids.insert(id));
            }
        }
        // 1,000 draws from 4,096 numbers give about 887 different ones.
        let different = epochs.len();
        assert!((800..950).contains(&different), "{different} of 1000");
    }

    #[test]
    fn log_ids_of_different_epochs_never_meet() {
        let first = LogId::compose(RecoveryEpoch::FIRST, 7);
        let second = LogId::compose(RecoveryEpoch::FIRST.next(), 7);
        assert_eq!(first.get(), 7);
        assert_ne!(first, second);
        assert_eq!(second.counter_in(RecoveryEpoch::FIRST.next()), Some(7));
        assert_eq!(second.counter_in(RecoveryEpoch::FIRST), None);
    }
}
