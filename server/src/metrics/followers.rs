//! Followers whose clients take nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time for which a message waits for its client before the follower is slow.
const SLOW: Duration = Duration::from_secs(10);

/// All followers, as far as their messages wait.
#[derive(Debug)]
pub(crate) struct FollowerWaits {
    begin: Instant,
    all: Mutex<Vec<Weak<AtomicU64>>>,
}

/// The last message of one follower.
#[derive(Debug)]
pub(crate) struct FollowerWait {
    begin: Instant,
    /// Milliseconds from `begin` to the moment at which the message was handed to the transport; 0: it was taken.
    handed: Arc<AtomicU64>,
}

impl Default for FollowerWaits {
    fn default() -> Self {
        Self {
            begin: Instant::now(),
            all: Mutex::default(),
        }
    }
}

impl FollowerWaits {
    /// Another follower, until the value is dropped.
    pub(crate) fn follow(&self) -> FollowerWait {
        let handed = Arc::new(AtomicU64::new(0));
        let mut all = self.all.lock();
        // Those that have ended take no more room than those that follow.
        if all.len() == all.capacity() {
            all.retain(|other| other.strong_count() > 0);
        }
        all.push(Arc::downgrade(&handed));
        FollowerWait {
            begin: self.begin,
            handed,
        }
    }

    /// Number of followers whose clients have taken nothing for [`SLOW`].
    pub(super) fn slow(&self) -> usize {
        let now = millis(self.begin.elapsed());
        let mut all = self.all.lock();
        all.retain(|other| other.strong_count() > 0);
        let handed = all.iter().filter_map(Weak::upgrade);
        let handed = handed.map(|handed| handed.load(Ordering::Relaxed));
        handed
            .filter(|handed| *handed > 0 && handed + millis(SLOW) <= now)
            .count()
    }
}

impl FollowerWait {
    /// A message was handed to the transport.
    pub(crate) fn handed(&self) {
        let now = millis(self.begin.elapsed()).max(1);
        self.handed.store(now, Ordering::Relaxed);
    }

    /// The transport asks for the next message.
    pub(crate) fn taken(&self) {
        self.handed.store(0, Ordering::Relaxed);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follower_is_slow_while_its_message_waits_for_long() {
        let begin = Instant::now().checked_sub(2 * SLOW).unwrap();
        let waits = FollowerWaits {
            begin,
            ..FollowerWaits::default()
        };
        let [stuck, quick, ended] = [(); 3].map(|()| waits.follow());
        for follower in [&stuck, &ended] {
            follower.handed.store(1, Ordering::Relaxed);
        }
        // Handed over just now.
        quick.handed();
        assert_eq!(waits.slow(), 2);
        drop(ended);
        assert_eq!(waits.slow(), 1);
        stuck.taken();
        assert_eq!(waits.slow(), 0);
        drop((stuck, quick));
        for _ in 0..100 {
            drop(waits.follow());
        }
        assert!(waits.all.lock().capacity() < 10);
    }
}
