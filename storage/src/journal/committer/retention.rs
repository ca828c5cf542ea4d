//! Trims by retention. Retention chooses records without blocking other requests, so the log may change
//! meanwhile. A trim therefore applies only if its conditions still hold.

use std::sync::Arc;

use super::admin::TRIM_BYTES;
use super::tail::SegmentTail;
use super::{Committer, FrameFields, NO_LOG, Placed, refused};
use crate::api::error::{AppendError, SyncError};
use crate::api::record::LogConfig;
use crate::base::ids::Lsn;
use crate::format::body::Marker;
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::logs::{Log, TrimBy};

/// Records below `before` exceed a bound of their log.
pub(crate) struct Expiry {
    pub(crate) log: Arc<Log>,
    pub(crate) before: Lsn,
    /// Bytes of the log's frames before the one that holds `before`, if they are known.
    pub(crate) bytes: Option<u64>,
    /// The settings that contain the bound.
    pub(crate) config: Arc<LogConfig>,
    /// Whether records at or beyond the log's lowest cursor must stay.
    pub(crate) respect_cursors: bool,
}

impl<T: SegmentTail> Committer<T> {
    /// Places all of these trims, or none if there is no room.
    pub(super) fn expire(&mut self, expiries: &[Expiry]) -> Placed<Vec<Option<Lsn>>, AppendError> {
        self.finish_open();
        let frames = expiries.len() * TRIM_BYTES;
        let directory = expiries.len() * DirectoryBuilder::entry_len(None);
        if let Err(error) = self.secure(frames, directory, Use::Expiry) {
            return refused(error);
        }
        let placed = expiries.iter().map(|expiry| self.expire_one(expiry));
        let placed = placed.collect();
        (None, Ok(placed))
    }

    /// Returns the first record kept before the trim; `None` if there is nothing left to do.
    fn expire_one(&mut self, expiry: &Expiry) -> Option<Lsn> {
        let Expiry { log, before, .. } = expiry;
        // The log may be deleted, or its creation was taken back.
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
        self.push_trim(log, (*before, TrimBy::Retention), expiry.bytes);
        Some(first)
    }

    /// Writes the time of the expiry clock, for a start after an unclean end.
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
        self.push_frame(
            FrameFields::act(FrameKind::Marker, Lsn::ZERO),
            NO_LOG,
            None,
            |out| {
                marker.put(out);
            },
        );
        (None, Ok(()))
    }
}
