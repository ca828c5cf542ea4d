//! Fences: after the frame of a fence, a log takes no records of an older writer.
//!
//! Only the committer assigns lsns, one request after another. Every append before the fence is
//! therefore below the fence's tail. Every later append is checked against the new epoch, no matter
//! when it was sent.

use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, FrameFields, Placed, refused};
use crate::api::engine::{Fenced, LogTarget};
use crate::api::error::MAX_EPOCH_RISE;
use crate::api::error::{AppendError, FenceError, TargetError};
use crate::api::record::LogConfig;
use crate::base::ids::{Lsn, Position};
use crate::format::body::Created;
use crate::format::frame::{CONTINUES, DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::logs::Log;
use crate::logs::conditions::Creation;

impl<T: SegmentTail> Committer<T> {
    pub(super) fn fence(
        &mut self,
        target: &LogTarget,
        epoch: Option<u64>,
    ) -> Placed<Fenced, FenceError> {
        let log = self.logs.by_name(target.name.as_str());
        self.finish_open();
        if let Some(expected) = target.log_id
            && log.as_ref().map(|log| log.id) != Some(expected)
        {
            let error = TargetError::Replaced {
                log: target.name.clone(),
                expected,
                actual: log.as_ref().map(|log| log.id),
            };
            let reveals = log.map_or(Position::ZERO, |log| log.state.read().created_end);
            return (Some(reveals), Err(error.into()));
        }
        match log {
            Some(log) => self.fence_log(&log, epoch),
            None => self.fence_new(target, epoch),
        }
    }

    fn fence_log(&mut self, log: &Arc<Log>, epoch: Option<u64>) -> Placed<Fenced, FenceError> {
        let (current, unproven, tail, last_end) = {
            let state = log.state.read();
            let epoch = state.writer_epoch();
            (epoch, state.unproven, state.next, state.last_end)
        };
        if unproven {
            let error = AppendError::TailUnproven {
                log: log.name.clone(),
                from: tail,
            };
            return (Some(last_end), Err(error.into()));
        }
        let given = epoch.unwrap_or(current.saturating_add(1));
        if given <= current {
            let error = FenceError::Fenced {
                log: log.name.clone(),
                given,
                current,
            };
            return (Some(last_end), Err(error));
        }
        if given - current > MAX_EPOCH_RISE {
            let error = AppendError::EpochJump {
                log: log.name.clone(),
                producer: None,
                given,
                current,
            };
            return (Some(last_end), Err(error.into()));
        }
        let directory = DirectoryBuilder::entry_len(None);
        let room = self
            .write_buffered(log)
            .and_then(|()| self.secure(HEADER_BYTES, directory, Use::Reserve));
        if let Err(error) = room {
            return refused(error);
        }
        self.finish_open();
        (None, Ok(self.push_fence(log, given)))
    }

    /// Fences a log that does not exist, by creating the log.
    fn fence_new(&mut self, target: &LogTarget, epoch: Option<u64>) -> Placed<Fenced, FenceError> {
        let log = target.name.clone();
        let given = epoch.unwrap_or(1);
        let error = match self.creation() {
            Creation::ByAppend if given == 0 => FenceError::Fenced {
                log,
                given,
                current: 0,
            },
            Creation::ByAppend if given > MAX_EPOCH_RISE => {
                let current = 0;
                let producer = None;
                FenceError::Append(AppendError::EpochJump {
                    log,
                    producer,
                    given,
                    current,
                })
            }
            Creation::ByAppend => {
                let name = target.name.as_str();
                let created = HEADER_BYTES + Created::max_len(name).next_multiple_of(8);
                let directory =
                    DirectoryBuilder::entry_len(Some(name)) + DirectoryBuilder::entry_len(None);
                let room = self.secure(created + HEADER_BYTES, directory, Use::Growth);
                let full = |()| self.no_room_for_log(&log).map_or(Ok(()), Err);
                let keys = |()| self.secure_keys(&[name]);
                match room.and_then(full).and_then(keys) {
                    Ok(()) => {
                        self.finish_open();
                        let log = self.push_created(&log, LogConfig::default(), CONTINUES);
                        return (None, Ok(self.push_fence(&log, given)));
                    }
                    Err(error) => FenceError::Append(error),
                }
            }
            Creation::ByRequest => FenceError::Append(AppendError::LogNotFound { log }),
            Creation::Unproven => FenceError::Append(AppendError::TailUnproven {
                log,
                from: Lsn::ZERO,
            }),
        };
        (Some(Position::ZERO), Err(error))
    }

    fn push_fence(&mut self, log: &Arc<Log>, epoch: u64) -> Fenced {
        // The header, and so the directory of the next group, has the complete fence.
        let about = FrameFields::act(FrameKind::Fence, Lsn::new(epoch));
        let frame = self.push_frame(about, log.id, None, |_| {});
        let start = self.tail.start();
        let tail_lsn = {
            let mut state = log.state.write();
            self.group.undo.note(start, log, &state);
            state.add_fence(frame.end, epoch, self.journal.settled());
            state.next
        };
        self.touch(log);
        Fenced {
            log_id: log.id,
            tail_lsn,
            writer_epoch: epoch,
        }
    }
}
