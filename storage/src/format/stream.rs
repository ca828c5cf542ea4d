//! The bytes of one segment file, read once from front to back.

use bytes::Bytes;

use super::walk::SegmentSource;
use crate::api::pace::Stop;
use crate::base::bounds::LIFE_BYTES;

/// Bytes read at a time.
pub(crate) const STEP_BYTES: u64 = 1 << 20;

/// Returns the bytes of a file from an offset on; fewer only where it ends.
pub(crate) type ReadBytes<'a> = dyn FnMut(u64, u64) -> Result<Bytes, Stop> + 'a;

/// The part of a file that a walk reaches. At most one step or one frame is in memory.
pub(crate) struct Stream<'a, 'b> {
    read: &'a mut ReadBytes<'b>,
    start: u64,
    bytes: Vec<u8>,
    /// Nothing is read at or beyond this offset.
    limit: u64,
}

impl<'a, 'b> Stream<'a, 'b> {
    /// The bytes up to the offset `limit`.
    pub(crate) fn new(limit: u64, read: &'a mut ReadBytes<'b>) -> Self {
        Self {
            read,
            start: LIFE_BYTES,
            bytes: Vec::new(),
            limit,
        }
    }
}

impl SegmentSource for Stream<'_, '_> {
    type Error = Stop;

    fn look<R>(
        &mut self,
        offset: u64,
        length: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Stop> {
        let wanted = offset.saturating_add(length as u64).min(self.limit);
        while self.start + (self.bytes.len() as u64) < wanted {
            let done = offset.saturating_sub(self.start);
            let done = usize::try_from(done).unwrap_or(usize::MAX);
            if done >= self.bytes.len() {
                self.start = offset;
                self.bytes.clear();
            } else {
                self.bytes.drain(..done);
                self.start += done as u64;
            }
            let from = self.start + self.bytes.len() as u64;
            let step = STEP_BYTES.min(self.limit - from);
            let read = (self.read)(from, step)?;
            self.bytes.extend_from_slice(&read);
            if (read.len() as u64) < step {
                self.limit = from + read.len() as u64;
                break;
            }
        }
        let from = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let bytes = self.bytes.get(from..).unwrap_or(&[]);
        Ok(look(&bytes[..length.min(bytes.len())]))
    }
}
