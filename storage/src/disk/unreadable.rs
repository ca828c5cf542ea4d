//! Stretches of files that the device cannot read.
//!
//! A bad sector fails every read that covers it (EIO). The two readers below continue past such a
//! stretch: they read again in pieces of [`PIECE_BYTES`], and put [`UNREADABLE`] where a piece fails
//! again. No checksum of the format matches these bytes, so every caller treats the stretch as damage
//! and continues after it. No caller needs its own error path.
//!
//! ```text
//!  a read of 1 MiB:  |------------------ EIO ------------------|
//!  in pieces:        |ok|EIO|ok|--ok--|-------- ok ------------|
//!  the caller gets:  |  |EEE|                                  |   and the range is recorded
//! ```

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use bytes::Bytes;
use parking_lot::Mutex;

use super::{Disk, DiskFile};
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;

/// Size of one piece in bytes: a page of the cache, and enough for every block device in use.
pub(crate) const PIECE_BYTES: u64 = 4096;

/// Replaces each byte that cannot be read. Zeros would look like space that was never written.
pub(crate) const UNREADABLE: u8 = 0xE5;

/// Whether each of these bytes replaces one that the device could not read.
pub(crate) fn are_unreadable(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| *byte == UNREADABLE)
}

/// Maximum number of stretches that a disk remembers, and one more for each file. Beyond it, a new
/// stretch is joined with the nearest one of its file. The range then covers readable bytes too.
const MOST: usize = 1024;

/// Whether an error says that the device has lost the bytes. Linux reports a medium error as EIO or
/// ENODATA, and a failed integrity check as EILSEQ. A bad checksum of the file system is EIO, EBADMSG
/// or EUCLEAN. A path or a server that does not respond (ETIMEDOUT, ENOLINK) is no such error.
pub(crate) fn is_unreadable(error: &io::Error) -> bool {
    use rustix::io::Errno;
    const NUMBERS: [Errno; 6] = [
        Errno::IO,
        Errno::NODATA,
        Errno::ILSEQ,
        Errno::BADMSG,
        Errno::UCLEAN,
        Errno::REMOTEIO,
    ];
    let number = error.raw_os_error();
    number.is_some()
        && NUMBERS
            .map(|errno| Some(errno.raw_os_error()))
            .contains(&number)
}

/// The stretches that a disk could not read, by file. A stretch is forgotten when its file is
/// removed or renamed.
#[derive(Debug, Default)]
pub struct Unreadable(Mutex<BTreeMap<String, Vec<Range<u64>>>>);

impl Unreadable {
    /// Records a stretch of a file. Logs it unless it is known.
    pub(super) fn note(&self, path: &str, bytes: Range<u64>) {
        let mut files = self.0.lock();
        let held = files.values().map(Vec::len).sum::<usize>();
        let known = files.get(path).map_or(&[][..], Vec::as_slice);
        if known
            .iter()
            .any(|other| other.start <= bytes.start && bytes.end <= other.end)
        {
            return;
        }
        let stretches = files.entry(path.to_owned()).or_default();
        let mut from = stretches.partition_point(|other| other.end < bytes.start);
        let mut to = stretches.partition_point(|other| other.start <= bytes.end);
        if from == to && held >= MOST && !stretches.is_empty() {
            // A caller must learn of every bad byte: each unread stretch stays in a range.
            let gap_before = |at: usize| bytes.start - stretches[at].end;
            let gap_after = |at: usize| stretches[at].start - bytes.end;
            let is_before = match from {
                0 => false,
                at if at == stretches.len() => true,
                at => gap_before(at - 1) <= gap_after(at),
            };
            match is_before {
                true => from -= 1,
                false => to += 1,
            }
        }
        let joined = stretches[from..to].iter().fold(bytes.clone(), |all, one| {
            all.start.min(one.start)..all.end.max(one.end)
        });
        stretches.splice(from..to, [joined]);
        drop(files);
        tracing::error!(
            file = path,
            from = bytes.start,
            to = bytes.end,
            "the device cannot read a stretch of a file; its bytes count as damaged"
        );
    }

    /// Forgets the stretches of a file.
    pub(super) fn forget(&self, path: &str) {
        self.0.lock().remove(path);
    }

    /// The stretches of a file, in order. Beyond `MOST` stretches they cover readable bytes too.
    pub fn of(&self, path: &str) -> Vec<Range<u64>> {
        self.0.lock().get(path).cloned().unwrap_or_default()
    }

    /// All stretches, by file: at most 1,024, and one more for each file. Beyond 1,024 they cover readable
    /// bytes too.
    pub fn all(&self) -> Vec<(String, Range<u64>)> {
        let files = self.0.lock();
        let each = files.iter().flat_map(|(path, stretches)| {
            let of = move |bytes: &Range<u64>| (path.clone(), bytes.clone());
            stretches.iter().map(of)
        });
        each.collect()
    }
}

/// Reads as much of `buffer` as the file has from `from` on. Passes unreadable stretches.
pub(super) fn read_file<F: DiskFile + ?Sized>(
    file: &F,
    buffer: &mut [u8],
    from: u64,
) -> io::Result<usize> {
    let size = || file.size();
    let read = |buffer: &mut [u8], at: u64| file.read_at(buffer, at);
    read_around(buffer, from, size, read, |bytes| {
        file.note_unreadable(bytes)
    })
}

/// Reads up to `bytes` of a file around the page cache. Passes unreadable stretches.
pub(super) fn read_device<D: Disk + ?Sized>(
    disk: &D,
    path: &str,
    from: u64,
    bytes: u64,
) -> io::Result<Option<Bytes>> {
    match disk.read_direct(path, from, bytes) {
        Err(error) if is_unreadable(&error) && !known_bad::makes(Mistake::UnreadableEndsRead) => {}
        read => return read,
    }
    let size = disk.open(path)?.size()?;
    let length = usize::try_from(bytes.min(size.saturating_sub(from))).map_err(io::Error::other)?;
    let mut buffer = vec![0; length];
    let mut not_here = false;
    let read = |buffer: &mut [u8], at: u64| {
        let Some(found) = disk.read_direct(path, at, buffer.len() as u64)? else {
            not_here = true;
            return Ok(0);
        };
        let length = found.len().min(buffer.len());
        buffer[..length].copy_from_slice(&found[..length]);
        Ok(length)
    };
    let note = |bytes| disk.unreadable().note(path, bytes);
    let filled = read_around(&mut buffer, from, || Ok(size), read, note)?;
    buffer.truncate(filled);
    Ok((!not_here).then(|| buffer.into()))
}

/// Fills `buffer` with the bytes from `from` on, by `read`. Returns the number of bytes, which is
/// lower only at the end of the file.
fn read_around(
    buffer: &mut [u8],
    from: u64,
    size: impl Fn() -> io::Result<u64>,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    note: impl Fn(Range<u64>),
) -> io::Result<usize> {
    let (mut filled, mut length) = (0, buffer.len());
    // Bytes of the next attempt. `None`: all missing bytes.
    let mut piece: Option<usize> = None;
    let mut bad: Option<Range<u64>> = None;
    // End of the file, once it is known.
    let mut end = 0;
    while filled < length {
        let at = from + filled as u64;
        let to_boundary = PIECE_BYTES - at % PIECE_BYTES;
        let to_boundary = usize::try_from(to_boundary).map_err(io::Error::other)?;
        let tried = match piece {
            None => length - filled,
            Some(piece) => to_boundary.max(piece).min(length - filled),
        };
        match read(&mut buffer[filled..filled + tried], at) {
            Ok(0) => break,
            Ok(found) => {
                if let Some(bytes) = bad.take() {
                    note(bytes);
                }
                filled += found;
                // After a bad stretch the pieces grow again.
                piece = piece.map(|_| tried.saturating_mul(2));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error)
                if is_unreadable(&error) && !known_bad::makes(Mistake::UnreadableEndsRead) =>
            {
                if piece.is_none() {
                    // No byte beyond the end of the file may be invented.
                    end = size()?;
                    let rest = end.saturating_sub(from);
                    length = length.min(usize::try_from(rest).unwrap_or(usize::MAX));
                }
                if piece.is_some() && tried <= to_boundary {
                    buffer[filled..filled + tried].fill(UNREADABLE);
                    let start = bad.map_or(at - at % PIECE_BYTES, |bytes| bytes.start);
                    bad = Some(start..(at + to_boundary as u64).min(end));
                    filled += tried;
                }
                piece = Some(0);
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(bytes) = bad {
        note(bytes);
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    fn disk_with(bytes: &[u8]) -> SimDisk {
        let disk = SimDisk::new();
        disk.replace("journal/x", bytes.to_vec());
        disk
    }

    #[test]
    fn a_read_passes_every_unreadable_stretch_and_records_its_range() {
        // The size is no multiple of a piece.
        let bytes: Vec<u8> = (0..300_001_u32).map(|n| n.to_le_bytes()[0] | 1).collect();
        let stretches = [0..1, 9000..9001, 40_960..53_248, 299_999..300_001];
        let whole = [0..4096, 8192..12_288, 40_960..53_248, 299_008..300_001];
        for from in [0, 1, 4095, 4096, 9000, 45_000, 299_500, 300_001, 400_000] {
            for length in [1, 100, 4096, 50_000, 400_000] {
                let disk = disk_with(&bytes);
                for bad in &stretches {
                    disk.set_unreadable("journal/x", bad.clone());
                }
                let mut expected = bytes.clone();
                for bad in &whole {
                    expected[bad.clone()].fill(UNREADABLE);
                }
                let start = from.min(bytes.len());
                let expected = &expected[start..(from + length).min(bytes.len()).max(start)];
                let mut buffer = vec![0; length];
                let file = disk.open("journal/x").unwrap();
                let read = file.read_full_at(&mut buffer, from as u64).unwrap();
                assert!(buffer[..read] == *expected, "{length} bytes from {from}");
                let direct = disk.read_range_from_device("journal/x", from as u64, length as u64);
                let direct = direct.unwrap().unwrap();
                assert!(direct == expected, "{length} bytes from {from}, direct");
                for (path, found) in disk.unreadable().all() {
                    let found =
                        usize::try_from(found.start).unwrap()..usize::try_from(found.end).unwrap();
                    assert_eq!(path, "journal/x");
                    assert!(
                        whole
                            .iter()
                            .any(|bad| bad.start <= found.start && found.end <= bad.end)
                    );
                }
                if (from, length) == (0, 400_000) {
                    let found: Vec<_> = disk.unreadable().of("journal/x");
                    let whole: Vec<_> = whole
                        .iter()
                        .map(|bad| bad.start as u64..bad.end as u64)
                        .collect();
                    assert_eq!(found, whole);
                }
            }
        }
    }

    #[test]
    fn a_passing_error_of_a_read_changes_nothing() {
        let disk = disk_with(&[7; 100_000]);
        let reads = |call: &crate::disk::DiskCall<'_>| {
            matches!(
                call.kind,
                crate::disk::CallKind::Read | crate::disk::CallKind::ReadFromDevice
            )
        };
        let file = disk.open("journal/x").unwrap();
        let mut buffer = vec![0; 100_000];
        disk.fail_call(reads, 1, rustix::io::Errno::IO.raw_os_error());
        assert_eq!(file.read_full_at(&mut buffer, 0).unwrap(), 100_000);
        assert_eq!(buffer, [7; 100_000]);
        disk.fail_call(reads, 1, rustix::io::Errno::NODATA.raw_os_error());
        let direct = disk
            .read_range_from_device("journal/x", 0, 100_000)
            .unwrap();
        assert_eq!(direct.unwrap(), buffer);
        assert_eq!(disk.unreadable().all(), []);
        // A server that does not respond has lost no bytes.
        disk.fail_call(reads, 1, rustix::io::Errno::TIMEDOUT.raw_os_error());
        assert!(file.read_full_at(&mut buffer, 0).is_err());
    }

    #[test]
    fn a_disk_remembers_a_bounded_number_of_unreadable_stretches() {
        let unreadable = Unreadable::default();
        let stretch = |at: u64| at * 8192..at * 8192 + 4096;
        for at in 0..2 * MOST as u64 {
            unreadable.note("x", stretch(at));
        }
        let of_x = unreadable.of("x");
        assert_eq!(of_x.len(), MOST);
        for at in 0..2 * MOST as u64 {
            let covers =
                |bytes: &Range<u64>| bytes.start <= at * 8192 && stretch(at).end <= bytes.end;
            assert!(of_x.iter().any(covers), "stretch {at} is remembered");
        }
        // Each other file has room for one range.
        for at in [50, 9, 100] {
            unreadable.note("y", stretch(at));
        }
        let joined = stretch(9).start..stretch(100).end;
        assert_eq!(unreadable.of("y"), std::slice::from_ref(&joined));
        // A stretch that joins two others needs no more room.
        unreadable.note("x", 4096..8192);
        assert_eq!(unreadable.of("x")[0], 0..12_288);
        assert_eq!(unreadable.all().len(), MOST);
        unreadable.forget("x");
        unreadable.forget("y");
        assert_eq!(unreadable.all(), []);
        // A new stretch is joined with the nearest one, before or behind.
        for at in 0..MOST as u64 {
            unreadable.note("z", at * 100_000..at * 100_000 + 4096);
        }
        unreadable.note("z", 8192..12_288);
        unreadable.note("z", 290_816..294_912);
        let of_z = unreadable.of("z");
        assert_eq!(of_z[0], 0..12_288);
        assert_eq!(of_z[3], 290_816..304_096);
        assert_eq!(of_z.len(), MOST);
    }
}
