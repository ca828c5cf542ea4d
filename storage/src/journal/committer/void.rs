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

use super::{Committer, Pending};
use crate::api::error::{AppendError, FreeSpace};
use crate::base::ids::Position;
use crate::disk::is_out_of_space;
use crate::journal::Reply;
use crate::logs::producers::{Before as ProducerBefore, BeforeForgotten};
use crate::logs::quotas::Load;
use crate::logs::{Buffered, Log, LogState, Standing};

/// Changes of the current group, and the state before them.
#[derive(Default)]
pub(super) struct Undo {
    chain: u32,
    frames: u64,
    records: u64,
    /// Number of logs that the segment had touched.
    touched: usize,
    logs: Vec<(Arc<Log>, Standing)>,
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

impl Committer {
    /// Notes the state at the start of a group.
    pub(super) fn note_start(&mut self) {
        self.undo = Undo {
            chain: self.chain,
            frames: self.frames,
            records: self.records,
            touched: self.touched.len(),
            ..Undo::default()
        };
    }

    /// Whether the current group also concerns this log.
    pub(super) fn is_in_group(&self, log: &Log) -> bool {
        log.state.read().last_end > self.position(0)
    }

    /// Makes the group void, after `written` bytes of it were written. If that fails, the journal has
    /// failed: it is unknown which frames a start would find.
    pub(super) fn void(&mut self, written: usize, error: &io::Error) {
        if !self.without_space {
            tracing::warn!(%error, "no space to write to the journal; appends are refused");
        }
        self.without_space = true;
        self.buffer.clear();
        if written > 0 {
            match self.zero(written) {
                Ok(()) => self.journal.flush_again(),
                Err(error) => {
                    let action = format!("taking a group back in {}", self.segment.path());
                    self.journal.fail(action, &error);
                }
            }
        }
        if self.journal.failure().is_none() {
            self.roll_back();
        }
    }

    /// Zeroes the written bytes of the group. On copy-on-write file systems that takes space: the pool
    /// gives up segments for it, and records are refused until its reserve is complete again.
    fn zero(&mut self, written: usize) -> io::Result<()> {
        let zeros = vec![0; written];
        loop {
            match self.file.write_all_at(&zeros, self.offset) {
                Err(error) if is_out_of_space(&error) && self.pool.give_up()? => {
                    self.on_reserve = true;
                }
                zeroed => return zeroed,
            }
        }
    }

    /// Restores the state before the group.
    fn roll_back(&mut self) {
        let start = self.position(0);
        let undo = std::mem::take(&mut self.undo);
        self.chain = undo.chain;
        self.frames = undo.frames;
        self.records = undo.records;
        self.touched.truncate(undo.touched);
        self.readers.clear();
        self.group_records = 0;
        self.group_scheduled = false;
        self.journal.forget_trims(start);
        for (log, change) in undo.producers.into_iter().rev() {
            let mut state = log.state.write();
            let Some(extras) = &mut state.extras else {
                continue;
            };
            let (gone, there) = (extras.producers.gone(), extras.producers.len());
            match change {
                Change::Remembered(before) => {
                    if let Some(id) = before.added() {
                        self.logs.take(Load::producer(id));
                    }
                    extras.producers.take_back(before);
                }
                Change::Forgotten(before) => {
                    before
                        .ids()
                        .for_each(|id| self.logs.add(Load::producer(id)));
                    extras.producers.take_back_forgotten(before);
                }
            }
            self.logs.take(Load::gone(gone));
            self.logs.add(Load::gone(extras.producers.gone()));
            self.logs.change_producers(there, extras.producers.len());
        }
        // First, so that no concurrent reader takes the records for written.
        for (log, buffered) in undo.taken {
            self.put_back(log, buffered);
        }
        for (log, standing) in undo.logs {
            let mut state = log.state.write();
            let before = state.cursor_load();
            state.roll_back(start, standing);
            let after = state.cursor_load();
            drop(state);
            if before != after {
                self.logs.take(before);
                self.logs.add(after);
            }
        }
        // A log may have its old bounds back.
        self.journal.note_retention();
        for log in &undo.created {
            self.logs.remove(log);
        }
        for pending in &mut self.pending {
            if pending.rests_beyond(start) {
                pending.refuse(start, self.buffered.is_empty());
            }
        }
        // A segment always begins with its link, so the next group must write it.
        if let Some(link) = self.link.take() {
            self.begin_with(link);
        }
    }
}

impl Pending {
    /// Whether the outcome depends on frames beyond `start`.
    fn rests_beyond(&self, start: Position) -> bool {
        !self.buffered && self.need.is_none_or(|need| need > start)
    }

    /// Refuses the request. Nothing of it was done. `nothing_left`: no record is in memory only.
    fn refuse(&mut self, start: Position, nothing_left: bool) {
        if let Some(session) = &self.session {
            session.end_in_turn();
        }
        self.need = Some(Position::ZERO);
        match &mut self.reply {
            // Everything before the barrier that was not refused is written.
            Reply::Sync(_, result) if nothing_left => {
                self.need = Some(start);
                *result = Ok(());
            }
            reply => reply.refuse(AppendError::DiskFull(FreeSpace::default())),
        }
    }
}
