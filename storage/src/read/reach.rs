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
    /// To what is shared from memory: never waits, so that event loops may do it.
    Memory,
    /// To short pieces of segment files that the system has in memory, too: never waits for the
    /// device, so that event loops may do it.
    Cached,
    /// To segment files too, on a thread that may wait for the disk.
    Disk,
}

/// What is read in one go where nothing may take long: a fraction of a flush.
const SHORT_BYTES: u64 = 64 << 10;

impl Store {
    /// Up to `length` bytes of a segment from a position on: from memory if the group
    /// that begins there or before is still shared, and then no more than of this group;
    /// otherwise from the file.
    ///
    /// The caller verifies what comes from memory like what comes from a file. That
    /// costs some 20 ns for a small frame, and keeps the rule simple: no byte leaves
    /// unverified.
    ///
    /// # Errors
    /// If the file gives none, or if they are not in memory and no file may be asked.
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
            // Whatever else is wrong, who may wait is told.
            (None, Reach::Cached) => match length {
                ..=SHORT_BYTES => self.open_segments.read_cached(segment, from, length),
                _ => Err(far()),
            },
            (None, Reach::Disk) => self.bytes_of_file(segment, from, length),
        }
    }

    /// The same from the file; none if that is gone.
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

    /// Reads the same again, from the device. Every caller does so before it counts records as lost: the
    /// memory of the first read may be wrong.
    ///
    /// # Errors
    /// If the file gives none.
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

    /// Whether the file of a segment is gone, as if it had been cut to nothing, and not the
    /// whole directory with it, which may come back.
    pub(crate) fn is_gone(&self, segment: &Segment, error: &io::Error) -> bool {
        let newest = self.journal.segments.read().values().next_back().cloned();
        let newest = newest.filter(|newest| newest.life.id != segment.life.id);
        error.kind() == io::ErrorKind::NotFound
            && newest.is_some_and(|newest| self.disk.open(&newest.path()).is_ok())
    }
}

/// What a read ends with that would have to go further than it may. Regular files never
/// fail so.
pub(super) fn far() -> io::Error {
    io::ErrorKind::WouldBlock.into()
}

pub(super) fn is_far(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// What a lookup ends with that came upon a segment which was sorted meanwhile: the next one
/// finds the run. Files never fail so: they are read again then.
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

/// Reads here and now if nothing further away than `near` is asked for, which saves two wake-ups
/// of threads; otherwise on a reader thread.
pub(crate) async fn near_or_far<T: Send + 'static>(
    workers: &Workers,
    near: Reach,
    read: impl Fn(Reach) -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    match read(near) {
        Err(ReadError::Io(error)) if is_far(&error) => workers.run(move || read(Reach::Disk)).await,
        done => done,
    }
}
