//! Trims by retention: like any other, but that the log must still stand as retention saw
//! it. It looks without holding anybody up, so that much may have happened since.

use std::sync::Arc;

use super::{About, Committer, NO_LOG, Placed, refused};
use crate::error::{AppendError, SyncError};
use crate::ids::Lsn;
use crate::journal::body::Marker;
use crate::journal::frame::{DirectoryBuilder, HEADER_BYTES, Kind};
use crate::journal::pool::Use;
use crate::local::{Log, TrimBy};
use crate::record::LogConfig;

/// Records below `before` go past a bound of their log.
pub(crate) struct Expiry {
    pub(crate) log: Arc<Log>,
    pub(crate) before: Lsn,
    /// The settings whose bound that is.
    pub(crate) config: Arc<LogConfig>,
    /// Whether nothing at or beyond its lowest cursor may go.
    pub(crate) respect_cursors: bool,
}

impl Committer {
    /// Makes all of these trims, or none if there is no room.
    pub(super) fn expire(&mut self, expiries: &[Expiry]) -> Placed<Vec<Option<Lsn>>, AppendError> {
        self.finish_open();
        let frames = expiries.len() * HEADER_BYTES;
        let directory = expiries.len() * DirectoryBuilder::entry_len(None);
        if let Err(error) = self.secure(frames, directory, Use::Expiry) {
            return refused(error);
        }
        let placed = expiries.iter().map(|expiry| self.expire_one(expiry));
        let placed = placed.collect();
        (None, Ok(placed))
    }

    /// The first record kept before; `None` if there is nothing to do any more.
    fn expire_one(&mut self, expiry: &Expiry) -> Option<Lsn> {
        let Expiry { log, before, .. } = expiry;
        // It may be gone, or never have come into being.
        let there = self.logs.by_id(log.id);
        there.filter(|there| Arc::ptr_eq(there, log))?;
        let first = {
            let state = log.state.read();
            let stands = !state.deleted
                && *before <= state.journaled_next()
                && state.config == expiry.config
                && (!expiry.respect_cursors || Some(*before) <= state.lowest_cursor());
            let first = state.coming_first();
            (stands && *before > first).then_some(first)?
        };
        let about = About {
            count: TrimBy::Retention.number(),
            ..About::act(Kind::Trim, *before)
        };
        let header = self.push_frame(about, log.id, None, |_| {});
        let start = self.position(0);
        {
            let mut state = log.state.write();
            self.undo.note(start, log, &state);
            state.add_trim(header.end(), *before, TrimBy::Retention);
        }
        self.touch(log);
        self.journal.trimming(header.end(), Arc::clone(log));
        Some(first)
    }

    /// Tells what the expiry clock shows, for the start after an end that tells nothing.
    pub(super) fn tell_clock(&mut self) -> Placed<(), SyncError> {
        self.finish_open();
        let frame = HEADER_BYTES + Marker::MAX_LEN.next_multiple_of(8);
        let directory = DirectoryBuilder::entry_len(None);
        if let Err(error) = self.secure(frame, directory, Use::Growth) {
            return refused(error);
        }
        let marker = Marker {
            expiry: Some(self.expiry),
        };
        self.push_frame(About::act(Kind::Marker, Lsn::ZERO), NO_LOG, None, |out| {
            marker.put(out);
        });
        (None, Ok(()))
    }
}
