//! One simulated file: its bytes in the page cache, and its bytes on the device.

use std::io;
use std::ops::Range;

const SECTOR: usize = 512;
/// Unit in which the page cache reads from the device, in bytes.
const PAGE: usize = 4096;

#[derive(Clone, Default)]
pub(super) struct Inode {
    /// Bytes that reads return: the page cache.
    pub(super) bytes: Vec<u8>,
    /// Bytes that a power cut leaves.
    pub(super) device: Vec<u8>,
    dirty: Sectors,
    /// Writes since the last flush: offset, length.
    pub(super) unflushed: Vec<(usize, usize)>,
    /// Current name of the file, or its last one.
    pub(super) path: String,
    /// Bytes that the device cannot read.
    pub(super) unreadable: Vec<Range<usize>>,
}

fn unreadable() -> io::Error {
    rustix::io::Errno::IO.into()
}

/// A set of sectors.
#[derive(Clone, Default)]
struct Sectors(Vec<u64>);

impl Sectors {
    fn set(&mut self, from: usize, to: usize, dirty: bool) {
        if from >= to {
            return;
        }
        let (first, last) = (from / SECTOR, (to - 1) / SECTOR);
        if self.0.len() <= last / 64 {
            self.0.resize(last / 64 + 1, 0);
        }
        for sector in first..=last {
            let bit = 1 << (sector % 64);
            match dirty {
                true => self.0[sector / 64] |= bit,
                false => self.0[sector / 64] &= !bit,
            }
        }
    }

    /// Empties the set. Passes each sector in it to `sector`, in order.
    fn take(&mut self, mut sector: impl FnMut(usize)) {
        for (index, word) in self.0.iter_mut().enumerate() {
            let mut bits = std::mem::take(word);
            while bits != 0 {
                sector(index * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

/// The range of a sector's bytes, cut at `size`.
fn range(sector: usize, size: usize) -> std::ops::Range<usize> {
    let from = (sector * SECTOR).min(size);
    from..(from + SECTOR).min(size)
}

impl Inode {
    /// Reads bytes from `offset` on, through the cache. Returns their number.
    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let offset = usize::try_from(offset)
            .map_err(io::Error::other)?
            .min(self.bytes.len());
        let mut count = buffer.len().min(self.bytes.len() - offset);
        let first_bad = self
            .pages(offset..offset + count)
            .map(|page| page.start)
            .min();
        if let Some(bad) = first_bad {
            // The read returns the pages before the bad one.
            count = match bad.checked_sub(offset) {
                None | Some(0) => return Err(unreadable()),
                Some(before) => before,
            };
        }
        buffer[..count].copy_from_slice(&self.bytes[offset..offset + count]);
        Ok(count)
    }

    /// The unreadable pages that a range touches.
    fn pages(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let whole = |bad: &Range<usize>| bad.start / PAGE * PAGE..bad.end.next_multiple_of(PAGE);
        let touched = move |bad: &Range<usize>| bad.start < range.end && range.start < bad.end;
        self.unreadable.iter().map(whole).filter(touched)
    }

    /// # Errors
    /// If the device cannot read all of a range.
    pub(super) fn check_readable(&self, range: Range<usize>) -> io::Result<()> {
        match self.pages(range).next() {
            Some(_) => Err(unreadable()),
            None => Ok(()),
        }
    }

    /// Prepares a write. Pages that the write covers completely become readable.
    ///
    /// # Errors
    /// If the write covers a part of an unreadable page, whose rest cannot be read.
    pub(super) fn check_writable(&mut self, range: Range<usize>) -> io::Result<()> {
        if self.unreadable.is_empty() {
            return Ok(());
        }
        let end = self.bytes.len().next_multiple_of(PAGE);
        let first = range.start.next_multiple_of(PAGE);
        let last = match range.end >= self.bytes.len() {
            true => end,
            false => range.end / PAGE * PAGE,
        };
        let parts = [range.start..first, last..range.end];
        let partial = parts.into_iter().filter(|part| part.start < part.end);
        if partial
            .into_iter()
            .any(|part| self.pages(part).next().is_some())
        {
            return Err(unreadable());
        }
        let bad = std::mem::take(&mut self.unreadable);
        for bad in bad {
            let around = [bad.start..bad.end.min(first), bad.start.max(last)..bad.end];
            self.unreadable
                .extend(around.into_iter().filter(|rest| rest.start < rest.end));
        }
        Ok(())
    }

    /// A file that is completely on the device.
    pub(super) fn settled(bytes: Vec<u8>, path: &str) -> Self {
        Self {
            device: bytes.clone(),
            bytes,
            path: path.to_owned(),
            ..Self::default()
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: usize) {
        let end = offset + bytes.len();
        if self.bytes.len() < end {
            self.resize(end);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
        self.dirty.set(offset, end, true);
        self.unflushed.push((offset, bytes.len()));
    }

    pub(super) fn resize(&mut self, size: usize) {
        let before = self.bytes.len();
        self.bytes.resize(size, 0);
        self.dirty.set(before, size, true);
    }

    /// Writes everything to the device.
    pub(super) fn sync(&mut self) {
        let Self { bytes, device, .. } = self;
        device.resize(bytes.len(), 0);
        self.dirty.take(|sector| {
            let range = range(sector, bytes.len());
            device[range.clone()].copy_from_slice(&bytes[range]);
        });
        self.unflushed.clear();
    }

    /// Fails a flush: dirty sectors are marked clean, and the cache still returns them. `reaches`
    /// decides for each sector whether the device has it nevertheless.
    pub(super) fn fail_sync(&mut self, mut reaches: impl FnMut() -> bool) {
        let Self { bytes, device, .. } = self;
        self.dirty.take(|sector| {
            let range = range(sector, bytes.len().min(device.len()));
            if reaches() {
                device[range.clone()].copy_from_slice(&bytes[range]);
            }
        });
        self.unflushed.clear();
    }

    /// Marks a write as written, although it never reaches the device. Returns the offset and the bytes
    /// of its sectors.
    pub(super) fn lose(&mut self, offset: usize, length: usize) -> (usize, Vec<u8>) {
        let from = offset / SECTOR * SECTOR;
        let to = (offset + length)
            .next_multiple_of(SECTOR)
            .min(self.bytes.len());
        self.dirty.set(from, to, false);
        (from, self.bytes[from..to].to_vec())
    }

    /// Puts bytes meant for another place on the device. The cache is not changed.
    pub(super) fn hit(&mut self, offset: usize, bytes: &[u8]) {
        let end = (offset + bytes.len()).min(self.device.len());
        if offset < end {
            self.device[offset..end].copy_from_slice(&bytes[..end - offset]);
        }
    }

    /// The bytes on the device after the dirty sectors were written back, as Linux does first.
    pub(super) fn written_back(&self) -> Vec<u8> {
        let mut found = self.device.clone();
        found.resize(self.bytes.len(), 0);
        self.dirty.clone().take(|sector| {
            let range = range(sector, found.len());
            found[range.clone()].copy_from_slice(&self.bytes[range]);
        });
        found
    }

    /// Cuts the power. `survives` decides for each unflushed sector.
    pub(super) fn crash(&mut self, keep_size: bool, mut survives: impl FnMut() -> bool) {
        let Self { bytes, device, .. } = self;
        if keep_size {
            device.resize(bytes.len(), 0);
        }
        self.dirty.take(|sector| {
            let range = range(sector, bytes.len().min(device.len()));
            if survives() {
                device[range.clone()].copy_from_slice(&bytes[range]);
            }
        });
        bytes.clone_from(device);
        self.unflushed.clear();
    }
}
