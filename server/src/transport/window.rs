//! Bytes that clients may send before the server takes them in.
//!
//! A connection begins with the smallest window of HTTP/2, 64 KiB. A connection that uses its
//! window up gets a larger one, as far as all windows together leave room. This bounds the
//! bytes on the whole server that clients have sent and no call has taken.
//!
//! HTTP/2 cannot take a window back: a window shrinks only by bytes that the client sends, and an idle
//! client sends none. So an idle connection with a larger window is asked to leave when another connection
//! needs room. Its client makes a new connection with its next call. A connection with an open call keeps
//! its window, because only the end of that call could free it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use h2::server::Connection;

use super::conn::Conn;
use super::peer::{AnswerPiece, Peer};

/// The least window of a connection, and its first: HTTP/2 allows no other.
pub(crate) const LEAST_WINDOW: u32 = 65_535;

/// Sum of all windows beyond the least ones, in bytes.
pub(crate) const ALL_WINDOWS_BYTES: u64 = 64 << 20;

/// Windows of all connections.
#[derive(Debug, Clone)]
pub(super) struct AllWindows {
    granted: Arc<AtomicU64>,
    /// The largest window of one connection.
    largest: u32,
}

impl AllWindows {
    pub(super) fn new(largest: u32) -> Self {
        Self {
            granted: Arc::default(),
            largest,
        }
    }

    pub(super) fn begin(&self) -> Windows {
        Windows {
            all: self.clone(),
            window: LEAST_WINDOW,
            grown_at: 0,
        }
    }
}

/// The window of one connection.
pub(super) struct Windows {
    all: AllWindows,
    window: u32,
    /// Bytes that had come when the window grew last.
    grown_at: u64,
}

impl Windows {
    /// Enlarges the window of a connection that has used it up.
    pub(super) fn grow(&mut self, connection: &mut Connection<Conn, AnswerPiece>, peer: &Peer) {
        if let Some(window) = self.next(peer) {
            connection.set_target_window_size(window);
        }
    }

    /// The larger window of a connection that has used its window up, if there is room. If not, makes room
    /// for the next try.
    fn next(&mut self, peer: &Peer) -> Option<u32> {
        let arrived = peer.useful_so_far();
        if self.window >= self.all.largest || arrived < self.grown_at + u64::from(self.window) {
            return None;
        }
        self.grown_at = arrived;
        let window = self.window.saturating_mul(2).min(self.all.largest);
        if self.take(window) {
            peer.set_window(window);
            return Some(window);
        }
        peer.make_room_for_windows();
        None
    }

    /// Takes so large a window, if that leaves as much to others.
    fn take(&mut self, window: u32) -> bool {
        let (own, more) = (self.window - LEAST_WINDOW, window - self.window);
        let granted = self.all.granted.fetch_add(more.into(), Ordering::Relaxed);
        let left = ALL_WINDOWS_BYTES.saturating_sub(granted);
        let allowed = u64::from(own) + 2 * u64::from(more) <= left;
        if allowed {
            self.window = window;
        } else {
            self.all.granted.fetch_sub(more.into(), Ordering::Relaxed);
        }
        allowed
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        let own = u64::from(self.window - LEAST_WINDOW);
        self.all.granted.fetch_sub(own, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::super::peer::{Connections, IDLE};
    use super::*;

    /// Uses the window of a connection up until it does not grow any more.
    fn use_up(windows: &mut Windows, peer: &Peer) -> u32 {
        loop {
            peer.received(windows.window as usize);
            peer.useful(windows.window.into());
            if windows.next(peer).is_none() {
                return windows.window;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_gives_its_window_back_to_one_that_needs_it() {
        let all = AllWindows::new(8 << 20);
        let connections = Arc::new(Connections::default());
        let mut early: Vec<_> = (0..16)
            .map(|_| (connections.enter(), all.begin()))
            .collect();
        let mut calls = Vec::new();
        for ((peer, _open), windows) in &mut early {
            calls.push(peer.begin_call());
            use_up(windows, peer);
        }
        let (late, _open) = connections.enter();
        let _call = late.begin_call();
        let mut windows = all.begin();
        // All others have calls, and keep their windows.
        assert!(use_up(&mut windows, &late) < 1 << 20);
        let asked = |early: &[((Peer, _), _)]| -> Vec<usize> {
            let peers = early.iter().enumerate();
            let asked = peers.filter(|(_, ((peer, _), _))| peer.is_asked_to_leave());
            asked.map(|(number, _)| number).collect()
        };
        assert_eq!(asked(&early), [0; 0]);
        drop(calls);
        // All others have just ended their calls.
        advance(IDLE / 2).await;
        use_up(&mut windows, &late);
        assert_eq!(asked(&early), [0; 0]);
        advance(IDLE / 2).await;
        use_up(&mut windows, &late);
        // One at a time: it takes a moment to leave.
        use_up(&mut windows, &late);
        assert_eq!(asked(&early), [0]);
        early.remove(0);
        assert!(use_up(&mut windows, &late) > 2 << 20);
    }

    #[test]
    fn windows_together_stay_within_their_bound() {
        let all = AllWindows::new(8 << 20);
        let mut windows: Vec<_> = (0..1000).map(|_| all.begin()).collect();
        for window in &mut windows {
            while window.window < all.largest
                && window.take(window.window.saturating_mul(2).min(all.largest))
            {}
        }
        assert_eq!(windows[0].window, 8 << 20);
        let sum: u64 = (windows.iter())
            .map(|window| u64::from(window.window - LEAST_WINDOW))
            .sum();
        assert!(sum <= ALL_WINDOWS_BYTES, "{sum}");
        assert_eq!(sum, all.granted.load(Ordering::Relaxed));
        drop(windows);
        assert_eq!(all.granted.load(Ordering::Relaxed), 0);
    }
}
