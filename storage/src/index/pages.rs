//! Windows of an index file. A caller that passes through all its logs, in the order of their ids,
//! reads each of the three parts from front to back: one window in each is enough.

use std::fmt;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::large::{BLOCK, LargeIndex};
use crate::disk::DiskFile;
use crate::ids::LogId;
use crate::sync::Mutex;

/// Bytes of a window.
const WINDOW: usize = 64 << 10;

/// The parts of an index file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Rows,
    Entries,
    Images,
}

#[derive(Default)]
struct Window {
    start: usize,
    bytes: Bytes,
}

#[derive(Default)]
struct State {
    windows: [Window; 3],
    /// The first error.
    failed: Option<io::Error>,
}

/// An index file with some windows in memory. Each window is verified when it is read.
pub(super) struct Pages {
    large: Arc<LargeIndex>,
    file: Arc<dyn DiskFile>,
    state: Mutex<State>,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

impl Pages {
    pub(super) fn new(large: Arc<LargeIndex>, file: Arc<dyn DiskFile>) -> Self {
        Self {
            large,
            file,
            state: Mutex::default(),
        }
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.large.file_bytes() as u64
    }

    /// Numbers of the rows among which that of a log is.
    pub(super) fn rows_near(&self, log: LogId) -> (usize, usize) {
        self.large.rows_near(log)
    }

    /// Bytes of the file, which lie in this part of it. `None` if they cannot be read, which
    /// [`Pages::check`] reports.
    pub(super) fn get(&self, part: Part, from: usize, length: usize) -> Option<Bytes> {
        if length == 0 {
            return Some(Bytes::new());
        }
        let mut state = self.state.lock();
        let window = &state.windows[part as usize];
        let at = from.checked_sub(window.start);
        if let Some(at) = at
            && let Some(end) = at.checked_add(length)
            && end <= window.bytes.len()
        {
            return Some(window.bytes.slice(at..end));
        }
        // From the beginning of a block: all of it is read to be verified.
        let start = from - from % BLOCK;
        let rest = (self.large.file_bytes() - 4).saturating_sub(start);
        let wanted = (from - start).saturating_add(length);
        let read = self
            .large
            .part(&*self.file, start, wanted.max(WINDOW.min(rest)));
        match read {
            Ok(bytes) => {
                let bytes = Bytes::from(bytes);
                let found = bytes.slice(from - start..wanted);
                state.windows[part as usize] = Window { start, bytes };
                Some(found)
            }
            Err(error) => {
                state.failed.get_or_insert(error);
                None
            }
        }
    }

    /// Reports the first error.
    pub(super) fn check(&self) -> io::Result<()> {
        match &self.state.lock().failed {
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
            None => Ok(()),
        }
    }
}
