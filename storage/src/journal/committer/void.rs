//! Taking back a group for which there was no space.
//!
//! Space is secured before anything changes, so this serves file systems that may lack space even for
//! allocated files (copy on write, thin volumes, quotas). The written part of the group is zeroed and
//! the zeros are flushed, so that no start finds it. Then logs and committer return to their state
//! before the group, and requests that depend on the group are refused. The next group is checked
//! against that state, and takes the same place.
//!
//! Only state that the committer alone changes is restored: flushes and readers continue meanwhile.

use std::io;
use std::sync::Arc;

use super::Committer;
use super::tail::SegmentTail;
use crate::base::ids::Position;
use crate::logs::producers::{BeforeForgotten, ProducerUndo as ProducerBefore};
use crate::logs::quotas::LogUsage;
use crate::logs::{Buffered, Log, LogState, Logs, SavedLog};

/// Changes of the current group, and the state before them.
#[derive(Default)]
pub(super) struct Undo {
    /// Number of records that the segment had.
    records: u64,
    /// Number of logs that the segment had touched.
    touched: usize,
    logs: Vec<(Arc<Log>, SavedLog)>,
    created: Vec<Arc<Log>>,
    /// Changes of producers, in order.
    producers: Vec<(Arc<Log>, Change)>,
    /// Records in memory only that the group took.
    taken: Vec<(Arc<Log>, Box<Buffered>)>,
}

/// One change of producers, with the state that undoes it.
enum Change {
    Remembered(ProducerBefore),
    Forgotten(BeforeForgotten),
}

impl Undo {
    /// Notes a log's state before the group that begins at `start` changes the log for the first time.
    pub(super) fn note(&mut self, start: Position, log: &Arc<Log>, state: &LogState) {
        // Every change of the group to a log ends beyond the group's start.
        if state.last_end <= start {
            self.logs.push((Arc::clone(log), state.standing()));
        }
    }

    pub(super) fn note_created(&mut self, log: &Arc<Log>) {
        self.created.push(Arc::clone(log));
    }

    /// Whether the group creates a log.
    pub(super) fn creates(&self) -> bool {
        !self.created.is_empty()
    }

    pub(super) fn note_remembered(&mut self, log: &Arc<Log>, before: ProducerBefore) {
        let change = Change::Remembered(before);
        self.producers.push((Arc::clone(log), change));
    }

    pub(super) fn note_forgotten(&mut self, log: &Arc<Log>, before: BeforeForgotten) {
        let change = Change::Forgotten(before);
        self.producers.push((Arc::clone(log), change));
    }

    pub(super) fn note_taken(&mut self, log: &Arc<Log>, buffered: Box<Buffered>) {
        self.taken.push((Arc::clone(log), buffered));
    }
}

impl<T: SegmentTail> Committer<T> {
    /// Notes the state at the start of a group.
    pub(super) fn note_start(&mut self) {
        self.group.undo = Undo {
            records: self.entered.records,
            touched: self.entered.touched.len(),
            ..Undo::default()
        };
    }

    /// Whether the current group also concerns this log.
    pub(super) fn is_in_group(&self, log: &Log) -> bool {
        log.state.read().last_end > self.tail.start()
    }

    /// Makes the group void, after `written` bytes of it were written. If that fails, the journal has
    /// failed: it is unknown which frames a start would find.
    pub(super) fn void(&mut self, written: usize, error: &io::Error) {
        if !self.without_space {
            tracing::warn!(%error, "no space to write to the journal; appends are refused");
        }
        self.without_space = true;
        match self.tail.take_back(written) {
            Ok(gave_up) => {
                // Records are refused until the reserve of the pool is complete again.
                self.entered.on_reserve |= gave_up;
                if written > 0 {
                    self.journal.flush_again();
                }
            }
            Err(error) => {
                let path = self.tail.segment().path();
                self.journal
                    .fail(format!("taking a group back in {path}"), &error);
            }
        }
        if self.journal.failure().is_none() {
            self.roll_back();
        }
    }

    /// Restores the state before the group.
    fn roll_back(&mut self) {
        let start = self.tail.start();
        let undo = std::mem::take(&mut self.group.undo);
        self.entered.records = undo.records;
        self.entered.touched.truncate(undo.touched);
        self.group.readers.clear();
        self.group.records = 0;
        self.group.scheduled = false;
        self.journal.forget_trims(start);
        for (log, change) in undo.producers.into_iter().rev() {
            let mut state = log.state.write();
            let quota = state.quota;
            let Some(extras) = &mut state.extras else {
                continue;
            };
            let (gone, there) = (extras.producers.gone(), extras.producers.len());
            match change {
                Change::Remembered(before) => {
                    if let Some(id) = before.added() {
                        self.logs.take(quota, LogUsage::producer(id));
                    }
                    extras.producers.take_back(before);
                }
                Change::Forgotten(before) => {
                    before
                        .ids()
                        .for_each(|id| self.logs.add(quota, LogUsage::producer(id)));
                    extras.producers.take_back_forgotten(before);
                }
            }
            self.logs.take(None, LogUsage::gone(gone));
            self.logs.add(None, LogUsage::gone(extras.producers.gone()));
            self.logs.change_producers(there, extras.producers.len());
        }
        // First, so that no concurrent reader takes the records for written.
        for (log, buffered) in undo.taken {
            let bytes = Logs::bytes_now(&log.state.read());
            self.memory.put_back(Arc::clone(&log), buffered);
            self.logs.count_bytes(bytes, &log.state.read());
        }
        for (log, standing) in undo.logs {
            let mut state = log.state.write();
            let (before, bytes) = (state.cursor_load(), Logs::bytes_now(&state));
            state.roll_back(start, standing);
            self.logs.count_bytes(bytes, &state);
            let (after, quota) = (state.cursor_load(), state.quota);
            drop(state);
            if before != after {
                self.logs.take(quota, before);
                self.logs.add(quota, after);
            }
        }
        // A log may have its old bounds back.
        self.journal.note_retention();
        for log in &undo.created {
            self.logs.remove(log);
        }
        for pending in &mut self.group.pending {
            if pending.rests_beyond(start) {
                pending.refuse(start, self.memory.is_empty());
            }
        }
        // A segment always begins with its link, so the next group must write it.
        if let Some(link) = self.entered.link.take() {
            self.begin_with(link);
        }
    }
}
