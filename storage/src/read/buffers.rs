//! Buffers that frames are read into. Buffers of 16 KiB to 512 KiB are used again: a new buffer is filled with zeros,
//! by the system or here, which costs as much as reading into it.

use std::sync::Arc;

use bytes::Bytes;

use crate::base::sync::Mutex;

/// Smallest size of a kept buffer, in bytes. For smaller ones the allocator is quicker.
const SMALLEST: usize = 16 << 10;
/// Largest size of a kept buffer, in bytes. At most [`MOST`] buffers of each size are kept: 8 MiB at most.
const LARGEST: usize = 512 << 10;
const MOST: usize = 8;

const SIZES: usize = (LARGEST / SMALLEST).ilog2() as usize + 1;

/// Unused buffers by size, the last one returned at the end. Sizes are powers of two, so the holder of any part of a
/// buffer keeps less than twice the requested bytes in memory.
#[derive(Default)]
pub(super) struct Buffers([Mutex<Vec<Box<[u8]>>>; SIZES]);

/// A buffer in use. Dropping it returns the buffer.
struct UsedBuffer {
    bytes: Box<[u8]>,
    /// Number of bytes that the holder sees.
    length: usize,
    home: Arc<Buffers>,
}

impl AsRef<[u8]> for UsedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for UsedBuffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut free = self.home.of(bytes.len()).lock();
        if free.len() < MOST {
            free.push(bytes);
        }
    }
}

impl Buffers {
    /// The bytes that `fill` writes into a buffer of `length` bytes; `fill` returns their number.
    pub(super) fn filled<E>(
        self: &Arc<Self>,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Bytes, E> {
        if !(SMALLEST..=LARGEST).contains(&length) {
            let mut bytes = vec![0; length];
            let filled = fill(&mut bytes)?;
            bytes.truncate(filled);
            return Ok(bytes.into());
        }
        let size = length.next_power_of_two();
        let kept = self.of(size).lock().pop();
        let mut used = UsedBuffer {
            bytes: kept.unwrap_or_else(|| vec![0; size].into()),
            length,
            home: Arc::clone(self),
        };
        used.length = fill(&mut used.bytes[..length])?.min(length);
        Ok(Bytes::from_owner(used))
    }

    /// The unused buffers of one size, a power of two.
    fn of(&self, size: usize) -> &Mutex<Vec<Box<[u8]>>> {
        &self.0[(size / SMALLEST).ilog2() as usize]
    }

    #[cfg(test)]
    fn kept(&self) -> Vec<usize> {
        let of = |free: &Mutex<Vec<Box<[u8]>>>| -> Vec<_> {
            free.lock().iter().map(|one| one.len()).collect()
        };
        self.0.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_reused_and_shows_only_the_bytes_filled() {
        let buffers = Arc::new(Buffers::default());
        let fill = |byte: u8, length: usize, filled: usize| {
            let fill = |buffer: &mut [u8]| {
                assert_eq!(buffer.len(), length);
                buffer[..filled].fill(byte);
                Ok::<_, ()>(filled)
            };
            buffers.filled(length, fill).unwrap()
        };
        let first = fill(1, 40_000, 40_000);
        let slice = first.slice(100..200);
        let at = first.as_ptr();
        drop(first);
        // A slice of the first buffer is in use.
        let second = fill(2, 20_000, 20_000);
        assert_ne!(second.as_ptr(), at);
        assert_eq!(slice, [1; 100][..]);
        drop(slice);
        let third = fill(3, 50_000, 10);
        assert_eq!((third.as_ptr(), &third[..]), (at, &[3; 10][..]));
        drop((second, third));
        let failed = buffers.filled(30_000, |_| Err("no"));
        assert_eq!(failed, Err("no"));
        assert_eq!(buffers.kept().len(), 2);
        for length in [SMALLEST - 1, LARGEST + 1] {
            assert_eq!(fill(4, length, length), vec![4; length]);
            assert_eq!(buffers.kept().len(), 2);
        }
        // The holder of any part of a buffer keeps less than twice the requested bytes.
        assert_eq!(buffers.kept(), [32_768, 65_536]);
        for size in [SMALLEST, LARGEST] {
            let many: Vec<_> = (0..2 * MOST).map(|_| fill(5, size, 1)).collect();
            drop(many);
        }
        let most = [&[SMALLEST; MOST][..], &[32_768, 65_536], &[LARGEST; MOST]];
        assert_eq!(buffers.kept(), most.concat());
    }
}
