//! The bytes of one segment file, read in windows.
//!
//! ```text
//!  file   |-----------[ older window ]--[ newest window ]------------------------|
//!                                         ^ piece: a part of one window, shared
//! ```
//!
//! A segment may have 4 GiB, and most of it may be zeros or a hole of a sparse file. A start must not need
//! memory for all of that. Files of up to [`WHOLE`] bytes are read at once. Of a larger file two windows of
//! [`WINDOW`] bytes are in memory. A window is larger if a frame is longer.
//!
//! A walk cannot fail. An error of the disk is kept instead, the bytes behind it count as missing,
//! and [`Content::check`] reports the error after the walk.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::disk::{Disk, DiskFile, PIECE_BYTES, are_unreadable, read_some};

/// Files of up to this size are read at once, bytes. Small in tests, so that they walk windows of small segments.
const WHOLE: u64 = if cfg!(test) { 32 << 10 } else { 16 << 20 };
/// Size of a window of a larger file, bytes.
const WINDOW: u64 = if cfg!(test) { 8 << 10 } else { 4 << 20 };
/// Windows begin at multiples of this, bytes.
const ALIGN: u64 = 4096;

/// Source of the bytes.
enum ContentSource<'d> {
    Opened(Arc<dyn DiskFile>),
    Borrowed(&'d dyn DiskFile),
    /// Reads around the page cache where that is possible.
    Device {
        disk: &'d dyn Disk,
        path: String,
        file: Arc<dyn DiskFile>,
    },
    #[cfg(test)]
    Memory,
}

/// A stretch of the file that is in memory.
#[derive(Clone, Default)]
struct FileWindow {
    offset: u64,
    bytes: bytes::Bytes,
}

impl FileWindow {
    /// Whether the window holds all of `length` bytes from `offset` on.
    fn holds(&self, offset: u64, length: usize) -> bool {
        let bytes = self.bytes.len() as u64;
        let from = offset.wrapping_sub(self.offset);
        from <= bytes && length as u64 <= bytes - from
    }

    /// The part of the window that has bytes of the `length` bytes from `offset` on.
    fn within(&self, offset: u64, length: usize) -> (usize, usize) {
        let bytes = self.bytes.len();
        let from = usize::try_from(offset.wrapping_sub(self.offset)).unwrap_or(usize::MAX);
        let from = from.min(bytes);
        (from, from.saturating_add(length).min(bytes))
    }
}

/// The bytes of one segment file.
pub(crate) struct Content<'d> {
    source: ContentSource<'d>,
    size: u64,
    /// The newest window is first.
    windows: RefCell<[FileWindow; 2]>,
    /// Whether bytes came from the page cache although they should not.
    cached: Cell<bool>,
    failed: RefCell<Option<io::Error>>,
}

impl<'d> Content<'d> {
    fn new(source: ContentSource<'d>, size: u64) -> Self {
        Self {
            source,
            size,
            windows: RefCell::default(),
            cached: Cell::new(false),
            failed: RefCell::default(),
        }
    }

    /// Makes the content of a whole file.
    pub(crate) fn open(disk: &dyn Disk, path: &str) -> io::Result<Self> {
        let file = disk.open(path)?;
        let size = file.size()?;
        Ok(Self::new(ContentSource::Opened(file), size))
    }

    /// Makes the content of the first `most` bytes of a file.
    pub(crate) fn of_file(file: &'d dyn DiskFile, most: u64) -> io::Result<Self> {
        let size = file.size()?.min(most);
        Ok(Self::new(ContentSource::Borrowed(file), size))
    }

    /// Makes the content of the first `most` bytes of a file, read around the page cache.
    pub(crate) fn from_device(disk: &'d dyn Disk, path: &str, most: u64) -> io::Result<Self> {
        let file = disk.open(path)?;
        let size = file.size()?.min(most);
        let path = path.to_owned();
        Ok(Self::new(ContentSource::Device { disk, path, file }, size))
    }

    #[cfg(test)]
    pub(crate) fn of_bytes(bytes: impl Into<bytes::Bytes>) -> Self {
        let window = FileWindow {
            offset: 0,
            bytes: bytes.into(),
        };
        let content = Self::new(ContentSource::Memory, window.bytes.len() as u64);
        *content.windows.borrow_mut() = [window.clone(), window];
        content
    }

    /// Size of the file, or the limit that was given.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether bytes that should come from the device came from the page cache.
    pub(crate) fn is_cached(&self) -> bool {
        self.cached.get()
    }

    /// Reports an error of the disk since the last call.
    ///
    /// # Errors
    /// If a read has failed. Results of earlier calls must not be used then.
    pub(crate) fn check(&self) -> io::Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Returns `length` bytes from `offset` on; fewer where the file ends. The piece shares the memory
    /// of its window.
    pub(crate) fn piece(&self, offset: u64, length: usize) -> bytes::Bytes {
        let window = self.windows_at(offset, length);
        let bytes = &window[0].bytes;
        let (from, to) = window[0].within(offset, length);
        bytes.slice(from..to)
    }

    /// Calls `look` with `length` bytes from `offset` on; fewer where the file ends. Unlike [`Content::piece`]
    /// this counts no reference: a walk reads each frame several times.
    pub(crate) fn look<R>(&self, offset: u64, length: usize, look: impl FnOnce(&[u8]) -> R) -> R {
        let window = self.windows_at(offset, length);
        let (from, to) = window[0].within(offset, length);
        look(&window[0].bytes[from..to])
    }

    /// The windows. The first holds `length` bytes from `offset` on, or fewer where the file ends.
    fn windows_at(&self, offset: u64, length: usize) -> RefMut<'_, [FileWindow; 2]> {
        let mut windows = self.windows.borrow_mut();
        if windows[0].holds(offset, length) {
            return windows;
        }
        let left = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let length = length.min(left);
        if length == 0 || windows[0].holds(offset, length) {
            return windows;
        }
        windows.swap(0, 1);
        if windows[0].holds(offset, length) {
            return windows;
        }
        // The old window goes first: its memory is not needed together with the new one.
        windows[0] = FileWindow::default();
        match self.window(offset, length as u64) {
            Ok(window) => windows[0] = window,
            Err(error) => {
                self.failed.borrow_mut().get_or_insert(error);
            }
        }
        windows
    }

    /// The bytes from the first to the last of `length` bytes from `offset` on that the device could not read.
    /// `None` if it could read all of them. Known only for a file that is read around the page cache.
    pub(crate) fn unreadable(&self, offset: u64, length: u64) -> Option<Range<u64>> {
        let ContentSource::Device { disk, path, .. } = &self.source else {
            return None;
        };
        let to = offset.saturating_add(length);
        // A later read may have succeeded, and a stretch may cover readable bytes too.
        let is_bad = |piece: &Range<u64>| {
            let length = usize::try_from(piece.end - piece.start).unwrap_or(usize::MAX);
            are_unreadable(&self.piece(piece.start, length))
        };
        let touches = |stretch: &Range<u64>| stretch.start < to && offset < stretch.end;
        let stretches = disk.unreadable().of(path).into_iter().filter(touches);
        let pieces = stretches.flat_map(|stretch| {
            let (from, to) = (stretch.start.max(offset), stretch.end.min(to));
            let first = from / PIECE_BYTES * PIECE_BYTES;
            let starts = (first..to).step_by(usize::try_from(PIECE_BYTES).unwrap_or(usize::MAX));
            starts.map(move |start| start.max(from)..(start + PIECE_BYTES).min(to))
        });
        let bad = pieces.filter(is_bad);
        bad.reduce(|first, last| first.start..last.end)
    }

    /// Reads a window that holds `length` bytes from `offset` on.
    fn window(&self, offset: u64, length: u64) -> io::Result<FileWindow> {
        let (from, to) = match self.size <= WHOLE {
            true => (0, self.size),
            false => {
                let from = offset / ALIGN * ALIGN;
                (from, (offset + length).max(from + WINDOW).min(self.size))
            }
        };
        let bytes = match &self.source {
            ContentSource::Opened(file) => read_some(&**file, from, to - from)?.into(),
            ContentSource::Borrowed(file) => read_some(*file, from, to - from)?.into(),
            ContentSource::Device { disk, path, file } => {
                match disk.read_range_from_device(path, from, to - from)? {
                    Some(bytes) => bytes,
                    None => {
                        self.cached.set(true);
                        read_some(&**file, from, to - from)?.into()
                    }
                }
            }
            #[cfg(test)]
            ContentSource::Memory => bytes::Bytes::new(),
        };
        Ok(FileWindow {
            offset: from,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{CallKind, DiskCall, SimDisk};

    /// Longest read of a file so far by the test below, bytes.
    static LONGEST: crate::base::sync::atomic::AtomicU64 =
        crate::base::sync::atomic::AtomicU64::new(0);

    fn note_read(call: &DiskCall<'_>) -> bool {
        if call.kind == CallKind::Read {
            LONGEST.fetch_max(call.length, crate::base::sync::atomic::Ordering::SeqCst);
        }
        false
    }

    #[test]
    fn pieces_of_a_large_file_are_right_and_no_read_is_longer_than_a_window() {
        let disk = SimDisk::new();
        let size = WHOLE + 3 * WINDOW + 1000;
        let bytes: Vec<u8> = (0..size).map(|at| (at / 7 % 251) as u8).collect();
        disk.replace("x", bytes.clone());
        disk.fail_call(note_read, u64::MAX, 0);
        let content = Content::open(&disk, "x").unwrap();
        let mut at = 5_u64;
        for turn in 0_u64..3000 {
            let length = usize::try_from(turn * 7919 % (WINDOW / 4)).unwrap();
            let from = usize::try_from(at).unwrap();
            let expected = &bytes[from..(from + length).min(bytes.len())];
            assert_eq!(content.piece(at, length), expected, "{length} at {at}");
            // Back by a small step, ahead by a larger one.
            at = match turn % 3 {
                0 => at.saturating_sub(WINDOW / 2),
                _ => (at + WINDOW * 3 / 4) % size,
            };
        }
        let longest = LONGEST.load(crate::base::sync::atomic::Ordering::SeqCst);
        assert!((1..=WINDOW).contains(&longest), "{longest}");
        // A piece longer than a window, and one behind the end.
        let long = usize::try_from(2 * WINDOW).unwrap();
        assert_eq!(content.piece(100, long), bytes[100..100 + long]);
        assert!(content.piece(size, 1).is_empty());
        content.check().unwrap();
    }

    #[test]
    fn content_knows_each_unreadable_page_of_a_file_with_thousands() {
        let (disk, pages) = (SimDisk::new(), 2600_u64);
        disk.replace("x", vec![7; usize::try_from(pages * PIECE_BYTES).unwrap()]);
        // Every second page, and none of the last 100.
        let is_bad = |page: u64| page.is_multiple_of(2) && page < pages - 100;
        for page in (0..pages).filter(|page| is_bad(*page)) {
            let at = usize::try_from(page * PIECE_BYTES).unwrap();
            disk.set_unreadable("x", at + 512..at + 1024);
        }
        let content = Content::from_device(&disk, "x", u64::MAX).unwrap();
        for page in 0..pages {
            let bytes = page * PIECE_BYTES + 10..page * PIECE_BYTES + 900;
            let found = {
                content.piece(bytes.start, 890);
                content.unreadable(bytes.start, 890)
            };
            assert_eq!(found, is_bad(page).then_some(bytes), "page {page}");
        }
        content.check().unwrap();
    }

    #[test]
    fn failed_read_is_reported_after_the_walk() {
        let disk = SimDisk::new();
        disk.replace("x", vec![7; 10_000]);
        let content = Content::open(&disk, "x").unwrap();
        disk.fail_call(|call| call.kind == CallKind::Read, 1, 24);
        assert!(content.piece(0, 100).is_empty());
        let failed = content.check().unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(24));
        assert_eq!(content.piece(0, 100), [7; 100][..]);
        content.check().unwrap();
    }
}
