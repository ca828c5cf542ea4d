//! Buffers that frames are read into. Those of some size are used again: a new one is
//! filled with zeros, by the system or here, which costs as much as reading into it.

use std::sync::Arc;

use bytes::Bytes;

use crate::sync::Mutex;

/// From this size on they are worth keeping; below, the allocator is quicker.
const SMALLEST: usize = 16 << 10;
/// No more is asked of one that is kept, and no more than so many are: some 4 MiB, twice that
/// where they grew, since a vector at least doubles.
const LARGEST: usize = 512 << 10;
const MOST: usize = 8;

/// Buffers that nobody uses.
#[derive(Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

/// One that is used; gives it back when it is dropped.
struct Used {
    bytes: Vec<u8>,
    /// What of it was asked for.
    length: usize,
    home: Arc<Buffers>,
}

impl AsRef<[u8]> for Used {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let mut free = self.home.0.lock();
        if free.len() < MOST {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Buffers {
    /// The bytes that `fill` writes into a buffer of that size; it says how many.
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
        let bytes = self.0.lock().pop().unwrap_or_default();
        let home = Arc::clone(self);
        let mut used = Used {
            bytes,
            length,
            home,
        };
        if used.bytes.len() < length {
            used.bytes.resize(length, 0);
        }
        used.length = fill(&mut used.bytes[..length])?.min(length);
        Ok(Bytes::from_owner(used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_when_nobody_has_it_and_shows_what_was_filled_only() {
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
        // A part of it is in use.
        let second = fill(2, 20_000, 20_000);
        assert_ne!(second.as_ptr(), at);
        assert_eq!(slice, [1; 100][..]);
        drop(slice);
        let third = fill(3, 30_000, 10);
        assert_eq!((third.as_ptr(), &third[..]), (at, &[3; 10][..]));
        drop((second, third));
        let failed = buffers.filled(30_000, |_| Err("no"));
        assert_eq!(failed, Err("no"));
        assert_eq!(buffers.0.lock().len(), 2);
        for length in [SMALLEST - 1, LARGEST + 1] {
            assert_eq!(fill(4, length, length), vec![4; length]);
            assert_eq!(buffers.0.lock().len(), 2);
        }
        let many: Vec<_> = (0..2 * MOST).map(|_| fill(5, SMALLEST, 1)).collect();
        drop(many);
        assert_eq!(buffers.0.lock().len(), MOST);
    }
}
