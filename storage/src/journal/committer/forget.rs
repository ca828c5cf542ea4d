//! Forgetting producers: by request, and after too long an idle time.
//!
//! A frame lists the producers and their epochs. A late retry of one of their batches is refused from
//! then on, because the log remembers a hash of each id. When a log or the store remembers too many
//! hashes, one number replaces the hashes of that log: the first epoch of unknown producers.

use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, FrameFields, Placed, refused};
use crate::api::engine::LogTarget;
use crate::api::error::{AdminError, AppendError};
use crate::base::ids::{Name, Position, Timestamp};
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::logs::Log;
use crate::logs::producers::{Forgotten, MAX_GONE};
use crate::logs::quotas::LogUsage;

/// Maximum length of the ids in one frame, in bytes: a small segment has room for them.
const FRAME_BYTES: usize = 4 << 10;

/// Maximum number of forgotten producers of all logs whose hashes are remembered. Beyond it, a log that
/// forgets producers keeps no hashes.
pub(crate) const MAX_GONE_OF_ALL: u64 = 1 << 20;

/// Producers of a log that have been idle too long.
pub(crate) struct Idle {
    pub(crate) log: Arc<Log>,
    /// Each producer with its epoch and the arrival time of its newest batch.
    pub(crate) producers: Vec<(Name, u64, Timestamp)>,
}

impl<T: SegmentTail> Committer<T> {
    pub(super) fn forget_producer(
        &mut self,
        target: &LogTarget,
        producer: &Name,
    ) -> Placed<(), AdminError> {
        self.finish_open();
        let log = self.logs.by_name(target.name.as_str());
        let Some(log) = log else {
            return (Some(Position::ZERO), Err(target.not_found().into()));
        };
        if let Err(error) = target.check(log.id) {
            let reveals = log.state.read().created_end;
            return (Some(reveals), Err(error.into()));
        }
        let (known, last_end) = {
            let state = log.state.read();
            let extras = state.extras.as_deref();
            let known = extras.and_then(|extras| extras.producers.newest_of(producer));
            (known, state.last_end)
        };
        let Some((epoch, _)) = known else {
            let error = AdminError::ProducerNotFound {
                log: target.name.clone(),
                producer: producer.clone(),
            };
            return (Some(last_end), Err(error));
        };
        match self.push_forgotten(&log, vec![(producer.clone(), epoch)], Use::Reserve) {
            Ok(()) => (None, Ok(())),
            Err(error) => refused(error),
        }
    }

    /// Forgets the listed producers that are still idle.
    pub(super) fn forget_idle(&mut self, idle: &[Idle]) -> Placed<(), AdminError> {
        self.finish_open();
        for Idle { log, producers } in idle {
            // The log may be gone, or its creation was taken back.
            let there = self.logs.by_id(log.id);
            if !there.is_some_and(|there| Arc::ptr_eq(&there, log)) {
                continue;
            }
            let (mut over, mut bytes) = (Vec::new(), 0);
            for (id, epoch, arrival) in producers {
                if !is_idle(log, id, (*epoch, *arrival)) {
                    continue;
                }
                let more = Forgotten::bytes_of(id);
                if bytes + more > FRAME_BYTES {
                    let full = std::mem::take(&mut over);
                    if let Err(error) = self.push_forgotten(log, full, Use::Expiry) {
                        return refused(error);
                    }
                    bytes = 0;
                }
                over.push((id.clone(), *epoch));
                bytes += more;
            }
            if !over.is_empty()
                && let Err(error) = self.push_forgotten(log, over, Use::Expiry)
            {
                return refused(error);
            }
        }
        (None, Ok(()))
    }

    /// Writes the frame that forgets producers of an existing log.
    fn push_forgotten(
        &mut self,
        log: &Arc<Log>,
        producers: Vec<(Name, u64)>,
        purpose: Use,
    ) -> Result<(), AppendError> {
        let ids = producers.iter().map(|(id, _)| Forgotten::bytes_of(id));
        let body = ids.sum::<usize>() + Forgotten::REST_BYTES;
        let size = HEADER_BYTES + body.next_multiple_of(8);
        self.secure(size, DirectoryBuilder::entry_len(None), purpose)?;
        self.finish_open();
        // Before the state: others lock the tables of logs first.
        let gone = self.logs.holdings().gone;
        let (next, first_epoch) = {
            let state = log.state.read();
            let extras = state.extras.as_deref();
            let first_epoch = extras.map_or(0, |extras| {
                let more = producers.len() as u64;
                let many = extras.producers.gone() + more > MAX_GONE;
                match many || gone + more > MAX_GONE_OF_ALL {
                    true => extras.producers.epoch_beyond(&producers),
                    false => 0,
                }
            });
            (state.next, first_epoch)
        };
        let forgotten = Forgotten {
            producers,
            first_epoch,
        };
        let about = FrameFields::act(FrameKind::Forgotten, next);
        let frame = self.push_frame(about, log.id, None, |out| forgotten.put(out));
        let start = self.tail.start();
        let (before, quota) = {
            let mut state = log.state.write();
            self.group.undo.note(start, log, &state);
            state.last_end = frame.end;
            let quota = state.quota;
            let extras = state.extras.get_or_insert_default();
            let producers = extras.change_producers(frame.start);
            self.logs.take(None, LogUsage::gone(producers.gone()));
            let there = producers.len();
            let before = producers.forget(&forgotten, frame.start);
            self.logs.add(None, LogUsage::gone(producers.gone()));
            self.logs.change_producers(there, producers.len());
            (before, quota)
        };
        before
            .ids()
            .for_each(|id| self.logs.take(quota, LogUsage::producer(id)));
        self.group.undo.note_forgotten(log, before);
        self.touch(log);
        Ok(())
    }
}

/// Whether a producer has appended nothing since it was found idle.
fn is_idle(log: &Log, id: &Name, found: (u64, Timestamp)) -> bool {
    let state = log.state.read();
    let extras = state.extras.as_deref();
    extras.and_then(|extras| extras.producers.newest_of(id)) == Some(found)
}
