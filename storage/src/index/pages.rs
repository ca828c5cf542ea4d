//! Windows of an index file. A caller that passes through all its logs, in the order of their ids,
//! reads each of the three parts from front to back. One window in each part is enough.
//!
//! A step of the sorter reads the indexes of all its sources and of all earlier runs at the same time.
//! A long history has many runs. Open files and memory are therefore bounded for all indexes
//! together: a file is open only while one of its windows is read, and windows shrink as more indexes
//! are read.

use std::fmt;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::large::{BLOCK, LargeIndex};
use super::sealed::index_path;
use crate::base::ids::LogId;
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicUsize, Ordering};
use crate::disk::{Disk, is_out_of_descriptors};

/// Maximum and minimum size of a window, in bytes.
const WINDOW: usize = 64 << 10;
const LEAST_WINDOW: usize = BLOCK;

/// Approximate maximum of all windows together, in bytes, unless all have the minimum size.
const ALL_WINDOWS: usize = 32 << 20;

/// Number of indexes that are read by windows.
#[derive(Debug, Default)]
pub(super) struct Readers(AtomicUsize);

impl Readers {
    /// Size of one window of one index, in bytes.
    fn window(&self) -> usize {
        let windows = self.0.load(Ordering::Relaxed).max(1) * PARTS;
        let whole_blocks = ALL_WINDOWS / windows / BLOCK * BLOCK;
        whole_blocks.clamp(LEAST_WINDOW, WINDOW)
    }
}

const PARTS: usize = 3;

/// The parts of an index file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Rows,
    Entries,
    Images,
}

#[derive(Default)]
struct IndexWindow {
    start: usize,
    bytes: Bytes,
}

#[derive(Default)]
struct PagesState {
    windows: [IndexWindow; PARTS],
    /// The first error.
    failed: Option<io::Error>,
}

/// An index file with some windows in memory. Each window is verified when it is read.
pub(super) struct Pages {
    large: Arc<LargeIndex>,
    disk: Arc<dyn Disk>,
    readers: Arc<Readers>,
    state: Mutex<PagesState>,
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.readers.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").finish_non_exhaustive()
    }
}

impl Pages {
    pub(super) fn new(large: Arc<LargeIndex>, disk: Arc<dyn Disk>, readers: Arc<Readers>) -> Self {
        readers.0.fetch_add(1, Ordering::Relaxed);
        Self {
            large,
            disk,
            readers,
            state: Mutex::default(),
        }
    }

    /// Size of the file in bytes.
    pub(super) fn file_bytes(&self) -> u64 {
        self.large.file_bytes() as u64
    }

    /// Numbers of the rows that may include the row of a log: the first, and the one after the last.
    pub(super) fn rows_near(&self, log: LogId) -> (usize, usize) {
        self.large.rows_near(log)
    }

    /// Returns bytes of the file that lie in this part. `None` if they cannot be read; [`Pages::check`]
    /// reports the error.
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
        // Windows begin at a block, because verification needs whole blocks.
        let start = from - from % BLOCK;
        let rest = (self.large.file_bytes() - 4).saturating_sub(start);
        let wanted = (from - start).saturating_add(length);
        let window = self.readers.window().min(rest);
        // The old window is freed first, so that it and the new one never use memory together.
        state.windows[part as usize] = IndexWindow::default();
        let file = self.disk.open(&index_path(self.large.segment()));
        let read = file.and_then(|file| self.large.part(&*file, start, wanted.max(window)));
        match read {
            Ok(bytes) => {
                let bytes = Bytes::from(bytes);
                let found = bytes.slice(from - start..wanted);
                state.windows[part as usize] = IndexWindow { start, bytes };
                Some(found)
            }
            Err(error) => {
                if !is_out_of_descriptors(&error) {
                    self.large.distrust();
                }
                state.failed.get_or_insert(error);
                None
            }
        }
    }

    /// Reports the first error.
    pub(super) fn check(&self) -> io::Result<()> {
        match &self.state.lock().failed {
            // Callers recognise a lack of descriptors by its number.
            Some(error) => Err(match error.raw_os_error() {
                Some(number) => io::Error::from_raw_os_error(number),
                None => io::Error::new(error.kind(), error.to_string()),
            }),
            None => Ok(()),
        }
    }
}
