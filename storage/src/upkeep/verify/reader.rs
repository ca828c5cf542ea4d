//! Reads files of a store for checks, and puts faults into words.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::api::finding::FindingKind;
use crate::api::finding::Severity;
use crate::api::finding::advice;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Lsn;
use crate::base::ids::Position;
use crate::disk::Disk;
use crate::disk::DiskFile;
use crate::disk::read_some;
use crate::upkeep::verify::segment::SegmentFault;

/// Reads a file in steps, from the device where that is possible.
pub(crate) struct StepReader<'a> {
    disk: &'a dyn Disk,
    path: String,
    file: Arc<dyn DiskFile>,
    from_device: bool,
}

impl<'a> StepReader<'a> {
    pub(crate) fn open(disk: &'a dyn Disk, path: &str) -> io::Result<Self> {
        Ok(Self {
            disk,
            path: path.to_owned(),
            file: disk.open(path)?,
            from_device: true,
        })
    }

    pub(crate) fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    pub(crate) fn read(&mut self, from: u64, bytes: u64) -> io::Result<Bytes> {
        if self.from_device {
            match self.disk.read_range_from_device(&self.path, from, bytes)? {
                Some(found) => return Ok(found),
                None => self.from_device = false,
            }
        }
        self.read_cached(from, bytes)
    }

    /// Reads bytes from the page cache, if it has them.
    pub(crate) fn read_cached(&self, from: u64, bytes: u64) -> io::Result<Bytes> {
        Ok(read_some(&*self.file, from, bytes)?.into())
    }
}

/// The remedy for a fault in a segment.
pub(crate) fn advice_for(fault: &SegmentFault, base: Position) -> &'static str {
    match (fault.severity, fault.kind) {
        (Severity::Loss, _) => advice::LOST,
        (_, FindingKind::Index) => advice::REMADE,
        (_, FindingKind::Checksum) if fault.to <= base.advance(LIFE_BYTES) => advice::COPY,
        _ => advice::TOLD,
    }
}

/// Merges ranges that touch.
pub(crate) fn merged(mut ranges: Vec<(Lsn, Lsn)>) -> Vec<(Lsn, Lsn)> {
    ranges.sort_unstable();
    let mut merged: Vec<(Lsn, Lsn)> = Vec::with_capacity(ranges.len());
    for (from, to) in ranges {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => merged.push((from, to)),
        }
    }
    merged
}
