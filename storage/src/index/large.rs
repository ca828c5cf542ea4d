//! Finding single logs in an index file that is too large for memory.
//!
//! The index of a segment or run with hundreds of thousands of logs takes tens of megabytes. Reading
//! all of it for each log would take hours for a million logs. The file is read completely once, to
//! verify it. The first log and a checksum of each 4 KiB block stay in memory. A search then reads the
//! few blocks that it needs, and accepts a block only if its checksum still matches.

use std::io;

use super::sealed::{ENTRY, HEADER, IndexHead, ROW, Row, SealedIndex, index_path, row};
use crate::base::crc::crc32c;
use crate::base::ids::{LogId, SegmentId};
use crate::base::sync::atomic::{AtomicBool, Ordering};
use crate::base::wire::u64_at;
use crate::disk::{Disk, DiskFile};
use crate::format::frame::RunningCrc;

/// Unit of reading and verification, in bytes. No row crosses a boundary.
pub(super) const BLOCK: usize = 4096;
const _: () = assert!(BLOCK.is_multiple_of(ROW) && HEADER.is_multiple_of(ROW));
/// Bytes read at a time while the whole file is read.
const PIECE: usize = 1 << 20;

/// An index file that was good when it was read.
pub(crate) struct LargeIndex {
    head: IndexHead,
    /// Bytes of the file, without the checksum at its end.
    length: usize,
    /// The first log in each block that holds rows.
    first: Vec<LogId>,
    /// The checksum of each block.
    checks: Vec<u32>,
    /// Whether the file failed to read since then, or has changed.
    distrusted: AtomicBool,
}

impl LargeIndex {
    /// Reads all of a file; `None` if it is damaged, or of another version.
    pub(crate) fn read(file: &dyn DiskFile) -> io::Result<Option<Self>> {
        let size = usize::try_from(file.size()?).map_err(io::Error::other)?;
        let Some(length) = size.checked_sub(4) else {
            return Ok(None);
        };
        let mut index: Option<Self> = None;
        let mut whole = RunningCrc::default();
        let mut piece = vec![0; PIECE.min(length)];
        for from in (0..length).step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(length - from)];
            if file.read_full_at(piece, from as u64)? < piece.len() {
                return Ok(None);
            }
            whole.feed(piece);
            if index.is_none() {
                index = IndexHead::decode(piece)
                    .filter(|head| head.images() <= length)
                    .map(|head| Self {
                        head,
                        length,
                        first: Vec::with_capacity(head.entries().div_ceil(BLOCK)),
                        checks: Vec::with_capacity(length.div_ceil(BLOCK)),
                        distrusted: AtomicBool::new(false),
                    });
            }
            let Some(index) = &mut index else {
                return Ok(None);
            };
            for (number, block) in piece.chunks(BLOCK).enumerate() {
                let at = (from + number * BLOCK).max(HEADER);
                if at < index.head.entries() {
                    let first = u64_at(block, at % BLOCK);
                    index.first.push(LogId::new(first));
                }
                index.checks.push(crc32c(block));
            }
        }
        let mut told = [0; 4];
        let there = file.read_full_at(&mut told, length as u64)? == told.len();
        Ok(index.filter(|_| there && whole.value().to_le_bytes() == told))
    }

    /// Numbers of the rows in the block that may hold the row of a log: the first, and the one after
    /// the last.
    pub(super) fn rows_near(&self, log: LogId) -> (usize, usize) {
        let behind = self.first.partition_point(|first| *first <= log);
        let row = |block: usize| ((block * BLOCK).max(HEADER) - HEADER) / ROW;
        let rows = (self.head.entries() - HEADER) / ROW;
        match behind.checked_sub(1) {
            Some(block) => (row(block), row(block + 1).min(rows)),
            None => (0, 0),
        }
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> usize {
        self.length + 4
    }

    /// The segment or run of the index.
    pub(super) fn segment(&self) -> SegmentId {
        self.head.segment()
    }

    /// Makes the next use read and verify the whole file again.
    pub(super) fn distrust(&self) {
        self.distrusted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_trusted(&self) -> bool {
        !self.distrusted.load(Ordering::Relaxed)
    }

    /// Memory of this summary, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.first.len() * size_of::<LogId>()
            + self.checks.len() * size_of::<u32>()
    }

    /// The header of the file.
    pub(crate) fn head(&self) -> &IndexHead {
        &self.head
    }

    /// Finds the row of a log. Returns it with an index of this log alone.
    ///
    /// # Errors
    /// If the file cannot be read, or has changed (`InvalidData`).
    pub(crate) fn find(
        &self,
        disk: &dyn Disk,
        segment: SegmentId,
        log: LogId,
    ) -> io::Result<Option<(SealedIndex, Row)>> {
        let Some(block) = self
            .first
            .partition_point(|first| *first <= log)
            .checked_sub(1)
        else {
            return Ok(None);
        };
        let file = disk.open(&index_path(segment))?;
        let from = (block * BLOCK).max(HEADER);
        let to = ((block + 1) * BLOCK).min(self.head.entries());
        let rows = self.part(&*file, from, to - from)?;
        let at = rows
            .chunks_exact(ROW)
            .position(|row| LogId::new(u64_at(row, 0)) == log);
        let Some(raw) = at.map(|at| &rows[at * ROW..(at + 1) * ROW]) else {
            return Ok(None);
        };
        let found = row(raw);
        let (entries, image) = (found.entries_at(), found.image_at());
        let entries = self.part(
            &*file,
            self.head.entries() + entries.start * ENTRY,
            entries.len() * ENTRY,
        )?;
        let image = self.part(&*file, self.head.images() + image.start, image.len())?;
        Ok(Some(SealedIndex::of_one(&self.head, raw, &entries, &image)))
    }

    /// Reads bytes of the file, and verifies all blocks that contain them.
    pub(super) fn part(
        &self,
        file: &dyn DiskFile,
        from: usize,
        length: usize,
    ) -> io::Result<Vec<u8>> {
        let changed = || io::Error::from(io::ErrorKind::InvalidData);
        let end = from
            .checked_add(length)
            .filter(|end| *end <= self.length)
            .ok_or_else(changed)?;
        if length == 0 {
            return Ok(Vec::new());
        }
        let first = from / BLOCK;
        let start = first * BLOCK;
        let mut bytes = vec![0; end.next_multiple_of(BLOCK).min(self.length) - start];
        let there = file.read_full_at(&mut bytes, start as u64)? == bytes.len();
        let same = std::iter::zip(bytes.chunks(BLOCK), &self.checks[first..])
            .all(|(block, check)| crc32c(block) == *check);
        if !there || !same {
            return Err(changed());
        }
        bytes.truncate(end - start);
        bytes.drain(..from - start);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::ids::{Lsn, Position};
    use crate::disk::SimDisk;
    use crate::format::active::Place;
    use crate::format::chain::Below;
    use crate::format::life::Life;
    use crate::index::NewRow;
    use crate::logs::image::Image;

    const ID: SegmentId = SegmentId::new(3);

    /// Every third log has frames. Every tenth of these has many.
    fn index(logs: u64) -> SealedIndex {
        let life = Life {
            id: ID,
            size: 64 << 20,
            salt: 9,
            store_id: 1,
        };
        let base = Position::new(1 << 33);
        let rows: Vec<NewRow> = (1..=logs)
            .map(|number| {
                let mut bytes = Vec::new();
                crate::base::wire::put_uint(&mut bytes, 1, number * 3);
                crate::base::wire::put_uint(&mut bytes, 3, 100 + number);
                crate::base::wire::put_uint(&mut bytes, 10, number * 7);
                let places = if number % 10 == 0 { 600 } else { number % 3 };
                let places = (0..places).map(|index| Place {
                    position: base.advance(8192 + number * 64 + index * 1024),
                    first_lsn: Lsn::new(100 + index),
                    count: 1,
                    frame_len: 64,
                });
                NewRow {
                    image: Image::decode(&bytes).unwrap(),
                    places: places.collect(),
                    below: (number % 2 == 0).then_some(Below {
                        newer: Position::new(8),
                        older: Position::ZERO,
                    }),
                }
            })
            .collect();
        SealedIndex::build(&life, base, base.advance(60_000), 77, rows.into_iter())
    }

    fn written(index: &SealedIndex) -> SimDisk {
        let disk = SimDisk::new();
        disk.create_directory("index").unwrap();
        let file = disk.create(&index_path(ID)).unwrap();
        file.write_all_at(index.bytes(), 0).unwrap();
        disk
    }

    fn read(disk: &SimDisk) -> Option<LargeIndex> {
        LargeIndex::read(&*disk.open(&index_path(ID)).unwrap()).unwrap()
    }

    #[test]
    fn a_large_index_finds_the_same_logs_as_the_whole_index() {
        for logs in [1, 62, 63, 64, 65, 127, 128, 5000] {
            let whole = index(logs);
            let disk = written(&whole);
            let large = read(&disk).unwrap();
            for id in 0..logs * 3 + 5 {
                let log = LogId::new(id);
                let found = large.find(&disk, ID, log).unwrap();
                assert_eq!(found.is_some(), whole.row(log).is_some(), "{id} of {logs}");
                let (Some((one, row)), Some(expected)) = (found, whole.row(log)) else {
                    continue;
                };
                assert_eq!((row.log_id, row.below), (log, expected.below));
                assert_eq!(row.next_lsn, expected.next_lsn);
                assert_eq!(one.image(&row), whole.image(&expected));
                assert_eq!(one.stored_bytes(&row), whole.stored_bytes(&expected));
                let places = |index: &SealedIndex, row| {
                    let entries = index.entries(row);
                    entries.from(0).collect::<Vec<_>>()
                };
                assert_eq!(places(&one, &row), places(&whole, &expected));
            }
        }
    }

    #[test]
    fn changed_bytes_of_an_index_file_are_never_returned() {
        let whole = index(200);
        let length = whole.bytes().len();
        for at in (0..length).step_by(997).chain([length - 1]) {
            let disk = written(&whole);
            let large = read(&disk).unwrap();
            let byte = whole.bytes()[at] ^ 16;
            let file = disk.open(&index_path(ID)).unwrap();
            file.write_all_at(&[byte], at as u64).unwrap();
            assert!(read(&disk).is_none(), "byte {at}");
            for id in [3, 60, 300, 600] {
                let log = LogId::new(id);
                let Ok(found) = large.find(&disk, ID, log) else {
                    continue;
                };
                let (one, row) = found.unwrap();
                let expected = whole.row(log).unwrap();
                assert_eq!(one.image(&row), whole.image(&expected), "byte {at}");
                let same = one
                    .entries(&row)
                    .from(0)
                    .eq(whole.entries(&expected).from(0));
                assert!(same, "byte {at}");
            }
        }
        let disk = written(&whole);
        let large = read(&disk).unwrap();
        let file = disk.open(&index_path(ID)).unwrap();
        file.set_size(length as u64 / 2).unwrap();
        assert!(read(&disk).is_none());
        assert!(large.find(&disk, ID, LogId::new(600)).is_err());
    }

    fn paged(disk: &SimDisk) -> SealedIndex {
        let large = Arc::new(read(disk).unwrap());
        SealedIndex::paged(large, Arc::new(disk.clone()), Arc::default())
    }

    #[test]
    fn an_index_read_by_windows_holds_the_same_as_the_whole_one() {
        for logs in [0, 1, 62, 63, 64, 127, 5000] {
            let whole = index(logs);
            let paged = paged(&written(&whole));
            assert_eq!(paged.len(), whole.len());
            assert_eq!(paged.file_bytes(), whole.bytes().len() as u64);
            // From front to back, and then in any order.
            let there_and_back = (0..whole.len()).chain((0..whole.len()).rev().step_by(37));
            for number in there_and_back {
                let (row, expected) = (paged.row_at(number), whole.row_at(number));
                assert_eq!(row.log_id, expected.log_id);
                assert_eq!(paged.image(&row), whole.image(&expected));
                let places = |index: &SealedIndex, row| {
                    let entries = index.entries(row);
                    entries.from(0).collect::<Vec<_>>()
                };
                assert_eq!(places(&paged, &row), places(&whole, &expected));
            }
            for id in 0..logs * 3 + 5 {
                let found = paged.row(LogId::new(id)).map(|row| row.next_lsn);
                let expected = whole.row(LogId::new(id)).map(|row| row.next_lsn);
                assert_eq!(found, expected, "{id} of {logs}");
            }
            paged.check_reads().unwrap();
        }
    }

    #[test]
    fn an_index_read_by_windows_reports_that_its_file_changed() {
        let whole = index(2000);
        let disk = written(&whole);
        let paged = paged(&disk);
        let at = whole.bytes().len() / 2;
        let byte = whole.bytes()[at] ^ 16;
        let file = disk.open(&index_path(ID)).unwrap();
        file.write_all_at(&[byte], at as u64).unwrap();
        for row in paged.rows() {
            let (expected, image) = (whole.row(row.log_id), paged.image(&row));
            let entries = paged.entries(&row);
            if let (Some(expected), Some(image)) = (expected, image) {
                assert_eq!(Some(image), whole.image(&expected));
                let same = entries.from(0).eq(whole.entries(&expected).from(0));
                assert!(same || entries.len() == 0);
            }
        }
        let error = paged.check_reads().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
