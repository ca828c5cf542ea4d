//! Where bytes come from: memory if they are new, segment files otherwise.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::api::error::ReadError;
use crate::base::ids::Position;
use crate::base::threads::Workers;
use crate::disk::read_again;
use crate::journal::segment::Segment;
use crate::read::store::Store;

/// How far a read may go for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Only to groups shared in memory. Never waits, so event loops may use it.
    Memory,
    /// Also to short pieces of segment files that the system has in memory. Never waits for the device, so event
    /// loops may use it.
    Cached,
    /// Also to all other bytes of segment files, on a thread that may wait for the disk.
    Disk,
}

/// Maximum bytes of one read with [`Reach::Cached`]: it takes a fraction of a flush.
const SHORT_BYTES: u64 = 64 << 10;

impl Store {
    /// Up to `length` bytes of a segment from a position on. They come from memory if the group that begins there or
    /// before is still shared, and then end with this group. Otherwise they come from the file.
    ///
    /// The caller verifies bytes from memory like bytes from a file. That costs some 20 ns for a small frame, and
    /// keeps the rule simple: no byte leaves unverified.
    ///
    /// # Errors
    /// If the file cannot be read, or if the bytes lie beyond `reach`.
    pub(crate) fn bytes(
        &self,
        segment: &Segment,
        from: Position,
        length: u64,
        reach: Reach,
    ) -> io::Result<Bytes> {
        match (self.journal.recent.at(from, length), reach) {
            (Some(bytes), _) => Ok(bytes),
            (None, Reach::Memory) => Err(far()),
            // Other errors count as "not in memory" here: the read on a reader thread reports them.
            (None, Reach::Cached) => match length {
                ..=SHORT_BYTES => self.open_segments.read_cached(segment, from, length),
                _ => Err(far()),
            },
            (None, Reach::Disk) => self.bytes_of_file(segment, from, length),
        }
    }

    /// Bytes of the file of a segment; empty if the file is gone.
    pub(super) fn bytes_of_file(
        &self,
        segment: &Segment,
        from: Position,
        length: u64,
    ) -> io::Result<Bytes> {
        match self.open_segments.read(segment, from, length) {
            Err(error) if self.is_gone(segment, &error) => Ok(Bytes::new()),
            read => read,
        }
    }

    /// Reads bytes of a segment again, from the device; empty if the file is gone. Every caller does so before it
    /// counts records as lost: the memory of the first read may be wrong.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn bytes_again(
        &self,
        segment: &Segment,
        from: Position,
        length: u64,
    ) -> io::Result<Bytes> {
        match read_again(&*self.disk, &segment.path(), segment.offset(from), length) {
            Err(error) if self.is_gone(segment, &error) => Ok(Bytes::new()),
            read => read,
        }
    }

    /// Whether the file of a segment is gone, which counts like a file cut to nothing. `false` if the whole directory
    /// is gone: it may come back.
    pub(crate) fn is_gone(&self, segment: &Segment, error: &io::Error) -> bool {
        let newest = self.journal.segments.read().values().next_back().cloned();
        let newest = newest.filter(|newest| newest.life.id != segment.life.id);
        error.kind() == io::ErrorKind::NotFound
            && newest.is_some_and(|newest| self.disk.open(&newest.path()).is_ok())
    }
}

/// The error of a read that would have to go further than it may. Regular files never return it.
pub(crate) fn far() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

pub(super) fn is_far(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// The error of a lookup that met a segment which was sorted meanwhile: the next lookup finds the run. Files never
/// return it: their interrupted reads are repeated.
pub(super) fn retired() -> io::Error {
    io::ErrorKind::Interrupted.into()
}

pub(crate) fn is_retired(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Interrupted
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// Reads on the calling thread if nothing lies beyond `near`, which saves two wake-ups of threads. Otherwise reads on
/// a reader thread, unless the caller goes away before one is free.
pub(crate) async fn near_or_far<T: Send + 'static>(
    workers: &Workers,
    near: Reach,
    read: impl Fn(Reach) -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    match read(near) {
        Err(ReadError::Io(error)) if is_far(&error) => {
            workers.run_if_awaited(move || read(Reach::Disk)).await
        }
        done => done,
    }
}
