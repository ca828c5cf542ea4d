//! At most 10 lines a second about refusals of one caller, and a count of the others: nobody fills the disk with
//! refusals, and a flood does not hide the lines of other callers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Lines about one caller in any second.
const LINES: usize = 10;

/// The time of these lines, and the pause between two counts.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Maximum number of principals that are remembered. Further ones share the lines of one caller.
const MOST: usize = 1024;

/// Maximum number of addresses that are remembered. Strangers can have many: together they get at most 170 lines a second.
const MOST_ADDRESSES: usize = 16;

/// The address, or the network of an IPv6 address: its owner has all addresses of it.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        address => address,
    }
}

/// Counts the refusals of each caller.
#[derive(Default)]
pub(super) struct RefusalLimits {
    seen: Mutex<Seen>,
    /// Whether there are refusals that no line has reported.
    has_counts: AtomicBool,
}

/// A caller as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RefusedCaller<'a> {
    Principal(&'a str),
    Address(IpAddr),
    Unknown,
}

/// The answer about one refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It gets a line.
    Line,
    /// It is counted. It is the first since the last report: `true`.
    Counted(bool),
}

/// Refusals that got no line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Count {
    /// Empty if it is not known.
    pub(super) principal: String,
    pub(super) address: Option<IpAddr>,
    pub(super) outcome: &'static str,
    pub(super) refusals: u64,
}

#[derive(Default)]
struct Seen {
    principals: HashMap<String, Slot>,
    addresses: HashMap<IpAddr, Slot>,
    others: Slot,
    tidied: Option<Instant>,
}

/// Refusals of one caller.
#[derive(Debug, Default)]
struct Slot {
    /// Times of the last lines, in a ring.
    lines: [Option<Instant>; LINES],
    next: usize,
    counted: u64,
    /// Outcome of the last refusal that was counted.
    outcome: &'static str,
}

impl Slot {
    fn may_write(&mut self, outcome: &'static str, now: Instant) -> bool {
        let oldest = &mut self.lines[self.next];
        if oldest.is_some_and(|oldest| now.saturating_duration_since(oldest) < PAUSE) {
            self.counted += 1;
            self.outcome = outcome;
            return false;
        }
        *oldest = Some(now);
        self.next = (self.next + 1) % LINES;
        true
    }

    fn is_idle(&self, now: Instant) -> bool {
        let newest = self.lines.iter().flatten().max();
        self.counted == 0
            && newest.is_none_or(|newest| now.saturating_duration_since(*newest) >= PAUSE)
    }

    fn take(&mut self) -> Option<(&'static str, u64)> {
        let refusals = std::mem::take(&mut self.counted);
        (refusals > 0).then_some((self.outcome, refusals))
    }
}

impl Seen {
    fn slot(&mut self, caller: RefusedCaller<'_>, now: Instant) -> &mut Slot {
        let is_full = match caller {
            RefusedCaller::Principal(name) => {
                !self.principals.contains_key(name) && self.principals.len() >= MOST
            }
            RefusedCaller::Address(address) => {
                !self.addresses.contains_key(&address) && self.addresses.len() >= MOST_ADDRESSES
            }
            RefusedCaller::Unknown => true,
        };
        if is_full {
            let is_due = |at: Instant| now.saturating_duration_since(at) >= PAUSE;
            if self.tidied.is_none_or(is_due) {
                self.tidied = Some(now);
                self.principals.retain(|_, slot| !slot.is_idle(now));
                self.addresses.retain(|_, slot| !slot.is_idle(now));
            }
        }
        match caller {
            RefusedCaller::Principal(name) if self.principals.contains_key(name) => {
                self.principals.get_mut(name).unwrap_or(&mut self.others)
            }
            RefusedCaller::Principal(name) if self.principals.len() < MOST => {
                self.principals.entry(name.to_owned()).or_default()
            }
            RefusedCaller::Address(address)
                if self.addresses.contains_key(&address)
                    || self.addresses.len() < MOST_ADDRESSES =>
            {
                self.addresses.entry(address).or_default()
            }
            _ => &mut self.others,
        }
    }
}

impl RefusalLimits {
    /// Whether a refusal of the caller gets a line.
    pub(super) fn judge(
        &self,
        caller: RefusedCaller<'_>,
        outcome: &'static str,
        now: Instant,
    ) -> Verdict {
        let mut seen = self.seen.lock();
        match seen.slot(caller, now).may_write(outcome, now) {
            true => Verdict::Line,
            false => Verdict::Counted(!self.has_counts.swap(true, Ordering::Relaxed)),
        }
    }

    /// Whether there are refusals that no line has reported.
    pub(super) fn has_counts(&self) -> bool {
        self.has_counts.load(Ordering::Relaxed)
    }

    /// Takes the counts, to be reported.
    pub(super) fn take(&self) -> Vec<Count> {
        let mut seen = self.seen.lock();
        self.has_counts.store(false, Ordering::Relaxed);
        let mut counts = Vec::new();
        for (name, slot) in &mut seen.principals {
            if let Some((outcome, refusals)) = slot.take() {
                counts.push(Count {
                    principal: name.clone(),
                    address: None,
                    outcome,
                    refusals,
                });
            }
        }
        for (address, slot) in &mut seen.addresses {
            if let Some((outcome, refusals)) = slot.take() {
                counts.push(Count {
                    principal: String::new(),
                    address: Some(*address),
                    outcome,
                    refusals,
                });
            }
        }
        if let Some((outcome, refusals)) = seen.others.take() {
            counts.push(Count {
                principal: String::new(),
                address: None,
                outcome,
                refusals,
            });
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const A: RefusedCaller<'_> = RefusedCaller::Principal("a");

    #[test]
    fn caller_gets_ten_lines_in_any_second_and_a_count_of_the_rest() {
        let callers = RefusalLimits::default();
        let begin = Instant::now();
        let mut lines: Vec<u64> = Vec::new();
        let mut counted = 0;
        for millis in 0..3000 {
            let now = begin + Duration::from_millis(millis);
            match callers.judge(A, "denied", now) {
                Verdict::Line => lines.push(millis),
                Verdict::Counted(first) => {
                    assert_eq!(first, counted == 0);
                    counted += 1;
                }
            }
        }
        assert_eq!((lines.len(), counted), (30, 2970));
        for ten in lines.windows(LINES + 1) {
            assert!(ten[LINES] - ten[0] >= 1000, "{ten:?}");
        }
        let counts = callers.take();
        assert_eq!(counts.len(), 1);
        assert_eq!(counts[0].principal, "a");
        assert_eq!((counts[0].outcome, counts[0].refusals), ("denied", 2970));
        assert!(callers.take().is_empty() && !callers.has_counts());
    }

    #[test]
    fn callers_do_not_share_their_lines() {
        let callers = RefusalLimits::default();
        let now = Instant::now();
        let address = RefusedCaller::Address(Ipv4Addr::LOCALHOST.into());
        for _ in 0..100 {
            callers.judge(A, "denied", now);
        }
        for caller in [RefusedCaller::Principal("b"), address] {
            assert_eq!(callers.judge(caller, "denied", now), Verdict::Line);
        }
    }

    #[test]
    fn number_of_remembered_callers_is_bounded() {
        let callers = RefusalLimits::default();
        let now = Instant::now();
        let at = |number: u32| RefusedCaller::Address(Ipv4Addr::from(number).into());
        let most = u32::try_from(MOST_ADDRESSES).unwrap();
        let lines = (0..4 * most)
            .filter(|number| callers.judge(at(*number), "unauthenticated", now) == Verdict::Line)
            .count();
        assert_eq!(lines, MOST_ADDRESSES + LINES);
        assert_eq!(callers.seen.lock().addresses.len(), MOST_ADDRESSES);
        let refusals: u64 = callers.take().iter().map(|count| count.refusals).sum();
        assert_eq!(refusals, u64::from(3 * most) - LINES as u64);
        // RefusalLimits that were quiet for a second make room.
        let later = now + PAUSE;
        let verdict = callers.judge(at(u32::MAX), "unauthenticated", later);
        assert_eq!(verdict, Verdict::Line);
        assert_eq!(callers.seen.lock().addresses.len(), 1);
    }

    #[test]
    fn addresses_of_one_network_share_their_lines() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), of("2001:db8:1:2::1"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
