//! Followers of many logs. A write to one of their logs wakes them, and they learn its place in the
//! journal.
//!
//! A follower of `orders/` has nothing to do while clients append to other logs. Such appends neither
//! wake the follower nor are read by it later. Each followed prefix knows the *stretches* of the
//! journal that hold its logs, and a scan jumps from one stretch to the next.
//!
//! ```text
//!   known from ▼
//!  ........... |     ████ stretch ████          ███ stretch ███      ▏ announced
//!              at ──▶ jumps here ─────▶ reads ─▶ jumps here ─▶
//! ```
//!
//! All followers of one prefix share the known stretches. A group is announced before it is published,
//! so a reader that sees a published position knows all stretches below that position.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crate::api::record::Visibility;
use crate::api::watch::{Watch, Watched};
use crate::base::ids::Position;
use crate::base::sync::Mutex;
use crate::logs::Log;

/// Maximum number of known stretches of one prefix. A follower further behind also reads the bytes
/// between.
const MOST_STRETCHES: usize = 64;

/// A followed prefix.
pub(crate) struct Prefix {
    watch: Watch,
    known: Mutex<KnownStretches>,
}

struct KnownStretches {
    /// Stretches below this position are unknown.
    from: Position,
    /// Start and end of each stretch, in order, apart.
    stretches: VecDeque<(Position, Position)>,
}

impl Watched for Prefix {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

impl Prefix {
    fn add(&self, start: Position, end: Position) {
        let mut known = self.known.lock();
        match known.stretches.back_mut() {
            // The frames belong to another log of this group, or to the group directly after.
            Some(last) if last.1 >= start => last.1 = end,
            _ => known.stretches.push_back((start, end)),
        }
        if known.stretches.len() > MOST_STRETCHES
            && let Some((_, end)) = known.stretches.pop_front()
        {
            known.from = end;
        }
    }

    /// The first position from `at` on that may hold frames of this prefix. `published` if no position
    /// below it may.
    pub(crate) fn next(&self, at: Position, published: Position) -> Position {
        let known = self.known.lock();
        if at < known.from || at >= published {
            return at;
        }
        let behind = known.stretches.partition_point(|(_, end)| *end <= at);
        let start = known.stretches.get(behind).map(|(start, _)| *start);
        start.map_or(published, |start| start.clamp(at, published))
    }
}

/// All followed prefixes.
pub(crate) struct Prefixes(Mutex<PrefixTable>);

struct PrefixTable {
    prefixes: HashMap<Box<[u8]>, (Arc<Prefix>, usize)>,
    /// Number of prefixes of each length.
    lengths: BTreeMap<usize, usize>,
    /// End of the last group.
    announced: Position,
}

impl PrefixTable {
    /// The followed prefixes of a name.
    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Arc<Prefix>> {
        let name = name.as_bytes();
        self.lengths
            .keys()
            .map_while(|length| name.get(..*length))
            .filter_map(|prefix| self.prefixes.get(prefix))
            .map(|(prefix, _)| prefix)
    }
}

impl Prefixes {
    /// Without prefixes, for a journal that continues at `end`.
    pub(super) fn new(end: Position) -> Self {
        Self(Mutex::new(PrefixTable {
            prefixes: HashMap::new(),
            lengths: BTreeMap::new(),
            announced: end,
        }))
    }

    /// Notes that the stretch holds frames of these logs. Callers call this in order, and before the
    /// stretch is published.
    pub(super) fn announce(&self, start: Position, end: Position, logs: &[Arc<Log>]) {
        let mut table = self.0.lock();
        table.announced = end;
        if !table.prefixes.is_empty() {
            for log in logs {
                for prefix in table.of(log.name.as_str()) {
                    prefix.add(start, end);
                }
            }
        }
    }

    /// Wakes the followers of these logs to whom bytes were published.
    pub(super) fn wake_at(&self, visibility: Visibility, logs: &[Arc<Log>]) {
        let touched: Vec<Arc<Prefix>> = {
            let table = self.0.lock();
            if table.prefixes.is_empty() {
                return;
            }
            let of = |log: &'_ Arc<Log>| table.of(log.name.as_str()).cloned().collect::<Vec<_>>();
            logs.iter().flat_map(of).collect()
        };
        for prefix in touched {
            prefix.watch.wake_at(visibility);
        }
    }

    /// Follows a prefix until the returned value is dropped.
    pub(crate) fn follow(self: &Arc<Self>, prefix: &str) -> Followed {
        let mut table = self.0.lock();
        let from = table.announced;
        let key: Box<[u8]> = prefix.as_bytes().into();
        let followed = match table.prefixes.get_mut(&key) {
            Some((followed, followers)) => {
                *followers += 1;
                Arc::clone(followed)
            }
            None => {
                let followed = Arc::new(Prefix {
                    watch: Watch::default(),
                    known: Mutex::new(KnownStretches {
                        from,
                        stretches: VecDeque::new(),
                    }),
                });
                *table.lengths.entry(key.len()).or_default() += 1;
                table
                    .prefixes
                    .insert(key.clone(), (Arc::clone(&followed), 1));
                followed
            }
        };
        Followed {
            prefixes: Arc::clone(self),
            key,
            prefix: followed,
        }
    }
}

/// One follower of a prefix.
pub(crate) struct Followed {
    prefixes: Arc<Prefixes>,
    key: Box<[u8]>,
    pub(crate) prefix: Arc<Prefix>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        let mut table = self.prefixes.0.lock();
        let Some((_, followers)) = table.prefixes.get_mut(&self.key) else {
            return;
        };
        *followers -= 1;
        if *followers > 0 {
            return;
        }
        table.prefixes.remove(&self.key);
        if let Some(count) = table.lengths.get_mut(&self.key.len()) {
            *count -= 1;
            if *count == 0 {
                table.lengths.remove(&self.key.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::record::LogConfig;
    use crate::base::ids::{LogId, LogName, Timestamp};

    fn at(position: u64) -> Position {
        Position::new(position)
    }

    fn log(name: &str) -> Arc<Log> {
        Arc::new(Log::new(
            LogId::new(1),
            LogName::new(name).unwrap(),
            LogConfig::default(),
            Timestamp::from_micros(0),
            Position::ZERO,
        ))
    }

    #[test]
    fn a_follower_goes_from_one_stretch_of_its_logs_to_the_next() {
        let prefixes = Arc::new(Prefixes::new(at(100)));
        let orders = prefixes.follow("orders/");
        let all = prefixes.follow("");
        prefixes.announce(at(100), at(200), &[log("orders/1"), log("orders/2")]);
        prefixes.announce(at(200), at(300), &[log("orders"), log("x")]);
        prefixes.announce(at(300), at(400), &[log("x"), log("orders/1")]);
        prefixes.announce(at(400), at(500), &[log("orders/1")]);
        let late = prefixes.follow("orders/");
        let next = |of: &Followed, from, to| of.prefix.next(at(from), at(to)).get();
        assert_eq!(next(&orders, 100, 500), 100);
        assert_eq!(next(&orders, 150, 500), 150);
        assert_eq!(next(&orders, 200, 300), 300);
        assert_eq!(next(&orders, 200, 500), 300);
        assert_eq!(next(&orders, 499, 500), 499);
        assert_eq!(next(&orders, 500, 500), 500);
        prefixes.announce(at(500), at(600), &[log("y")]);
        assert_eq!(next(&orders, 500, 600), 600);
        assert_eq!(next(&all, 500, 600), 500);
        // Stretches before the first follower are unknown, so their bytes are read.
        assert_eq!(next(&orders, 99, 600), 99);
        assert_eq!(next(&late, 200, 500), 300, "followers share what is known");
        let new = prefixes.follow("x");
        assert_eq!(next(&new, 599, 600), 599);
        prefixes.announce(at(600), at(700), &[log("y")]);
        assert_eq!(next(&new, 600, 700), 700);
    }

    #[test]
    fn known_stretches_are_bounded_and_forgotten_ones_are_still_read() {
        let prefixes = Arc::new(Prefixes::new(Position::ZERO));
        let followed = prefixes.follow("a");
        let (mine, other) = (log("a"), log("b"));
        for n in 0..3 * MOST_STRETCHES as u64 {
            let touched = if n % 2 == 0 { &mine } else { &other };
            prefixes.announce(at(n * 10), at(n * 10 + 10), &[Arc::clone(touched)]);
        }
        let end = at(30 * MOST_STRETCHES as u64);
        let known = followed.prefix.known.lock().from;
        assert_eq!(followed.prefix.known.lock().stretches.len(), MOST_STRETCHES);
        assert!(known > Position::ZERO);
        for position in (0..end.get()).map(at) {
            let next = followed.prefix.next(position, end);
            let mine = |position: Position| (position.get() / 10).is_multiple_of(2);
            let expected = position < known || mine(position);
            assert_eq!(next == position, expected, "{position:?}");
            assert!(next == end || mine(next) || next == position);
        }
    }

    #[test]
    fn a_dropped_follower_leaves_nothing() {
        let prefixes = Arc::new(Prefixes::new(Position::ZERO));
        let first = prefixes.follow("a");
        let second = prefixes.follow("a");
        let other = prefixes.follow("b");
        drop(first);
        assert_eq!(prefixes.0.lock().prefixes.len(), 2);
        drop(second);
        assert_eq!(prefixes.0.lock().prefixes.len(), 1);
        drop(other);
        let table = prefixes.0.lock();
        assert!(table.prefixes.is_empty() && table.lengths.is_empty());
    }
}
