//! The pool: segment files made ready before they are needed.
//!
//! A ready segment lies in `journal/` under its id, filled with zeros once (allocation
//! alone would cost a second device flush per commit), its life block and its name
//! flushed. So a roll is a write like any other. Files that are no longer needed come
//! back through [`Pool::recycle`] and get a new life with a new salt.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::segment::{Life, journal_path, pool_path};
use crate::clock::Clock;
use crate::disk::{Disk, DiskFile, is_out_of_space};
use crate::ids::SegmentId;

const CHUNK: usize = 1 << 20;

/// How long a failed preparation is not tried again.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// A segment without frames.
pub(crate) struct ReadySegment {
    pub(crate) life: Life,
    pub(crate) file: Arc<dyn DiskFile>,
}

pub(crate) struct Pool {
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
    store_id: u128,
    segment_bytes: u64,
    target: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    ready: VecDeque<ReadySegment>,
    /// Ids of files in `pool/` that wait for a new life.
    free: Vec<SegmentId>,
    next_id: SegmentId,
    preparing: bool,
    failed: Option<(Instant, io::ErrorKind, String)>,
    stopped: bool,
}

impl Pool {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        store_id: u128,
        segment_bytes: u64,
        target: usize,
        next_id: SegmentId,
        free: Vec<SegmentId>,
    ) -> Self {
        Self {
            disk,
            clock,
            store_id,
            segment_bytes,
            target,
            state: Mutex::new(State {
                ready: VecDeque::new(),
                free,
                next_id,
                preparing: false,
                failed: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Takes a ready segment; makes one, or waits for the one being made, if there is
    /// none.
    ///
    /// # Errors
    /// Out of space: nothing is lost, try again later. Anything else: the journal
    /// must fail, since a flush may be among what failed.
    pub(crate) fn take(&self) -> io::Result<ReadySegment> {
        let mut state = self.state.lock();
        loop {
            if let Some(ready) = state.ready.pop_front() {
                self.changed.notify_all();
                return Ok(ready);
            }
            if state.preparing {
                self.changed.wait(&mut state);
                continue;
            }
            if let Some((at, kind, text)) = &state.failed
                && self.clock.monotonic().duration_since(*at) < RETRY_AFTER
            {
                return Err(io::Error::new(*kind, text.clone()));
            }
            state = self.prepare(state)?;
        }
    }

    /// Makes one segment ready. Gives up the lock while it works.
    fn prepare<'a>(
        &'a self,
        mut state: parking_lot::MutexGuard<'a, State>,
    ) -> io::Result<parking_lot::MutexGuard<'a, State>> {
        state.preparing = true;
        let id = state.next_id;
        let free = state.free.pop();
        drop(state);
        let result = self.make(id, free);
        let mut state = self.state.lock();
        state.preparing = false;
        self.changed.notify_all();
        state.next_id = id.next();
        match result {
            Ok(ready) => {
                state.failed = None;
                state.ready.push_back(ready);
                Ok(state)
            }
            Err(error) => {
                // The file, if there is one, can still have a life.
                state.free.extend(free);
                let at = self.clock.monotonic();
                state.failed = Some((at, error.kind(), error.to_string()));
                Err(error)
            }
        }
    }

    fn make(&self, id: SegmentId, free: Option<SegmentId>) -> io::Result<ReadySegment> {
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(io::Error::other)?;
        let salt = u64::from_le_bytes(salt);
        let life = Life {
            id,
            size: self.segment_bytes,
            salt,
            store_id: self.store_id,
        };
        let (path, file) = match self.reusable(free)? {
            Some(found) => found,
            None => self.create(id)?,
        };
        let written = file
            .write_all_at(&life.encode(), 0)
            .and_then(|()| file.sync());
        if let Err(error) = written {
            if is_out_of_space(&error) && free.is_none() {
                self.disk.remove(&path)?;
            }
            return Err(error);
        }
        self.disk.rename(&path, &journal_path(id))?;
        self.disk.sync_directory("journal")?;
        self.disk.sync_directory("pool")?;
        Ok(ReadySegment { life, file })
    }

    /// A recycled file of the right size. Its stale bytes stay: no frame of an earlier
    /// life passes the new salt.
    fn reusable(&self, free: Option<SegmentId>) -> io::Result<Option<(String, Arc<dyn DiskFile>)>> {
        let Some(free) = free else { return Ok(None) };
        let path = pool_path(free);
        let file = match self.disk.open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if file.size()? == self.segment_bytes {
            return Ok(Some((path, file)));
        }
        self.disk.remove(&path)?;
        Ok(None)
    }

    fn create(&self, id: SegmentId) -> io::Result<(String, Arc<dyn DiskFile>)> {
        let path = pool_path(id);
        let file = self.disk.create(&path)?;
        let zeros = vec![0; CHUNK];
        let mut offset = 0;
        while offset < self.segment_bytes {
            let rest = usize::try_from(self.segment_bytes - offset).unwrap_or(CHUNK);
            let chunk = &zeros[..rest.min(CHUNK)];
            if let Err(error) = file.write_all_at(chunk, offset) {
                if is_out_of_space(&error) {
                    self.disk.remove(&path)?;
                }
                return Err(error);
            }
            offset += chunk.len() as u64;
        }
        Ok((path, file))
    }

    /// Takes segment files of the journal that hold nothing, for a new life. Their old
    /// names are gone durably before the first of them gets it: a file must not come
    /// back under its old name with a new life inside.
    pub(crate) fn recycle(&self, ids: &[SegmentId]) -> io::Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        for id in ids {
            self.disk.rename(&journal_path(*id), &pool_path(*id))?;
        }
        self.disk.sync_directory("pool")?;
        self.disk.sync_directory("journal")?;
        self.state.lock().free.extend(ids);
        Ok(())
    }

    /// Body of the pool's thread: keeps the pool filled until stopped. Waits for space
    /// if there is none.
    ///
    /// # Errors
    /// Anything but a lack of space: the journal must fail.
    pub(crate) fn keep_filled(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while !state.stopped {
            if state.preparing || state.ready.len() >= self.target {
                self.changed.wait(&mut state);
                continue;
            }
            state = match self.prepare(state) {
                Ok(state) => state,
                Err(error) if is_out_of_space(&error) => {
                    tracing::warn!(%error, "no space for another segment; trying again");
                    let mut state = self.state.lock();
                    self.changed.wait_for(&mut state, RETRY_AFTER * 4);
                    state
                }
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Ready segments, and files waiting for a new life.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.ready.len() as u64, state.free.len() as u64)
    }
}
