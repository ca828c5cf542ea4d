//! The journal's files from outside, just well enough to see a roll happen: frames are
//! followed by their lengths and their chain, as `storage/FORMAT.md` lays them out. And the
//! sorted runs, to see that there are any.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const FIRST_FRAME: u64 = 8192;
const SEAL: u8 = 11;
/// Where the salt is in a life block, which is there twice.
const SALTS: [u64; 2] = [40, 4096 + 40];

/// One place in the journal, up to which its frames were followed.
pub(crate) struct Journal {
    directory: PathBuf,
    path: PathBuf,
    file: File,
    offset: u64,
    chain: [u8; 4],
    last_kind: u8,
}

/// Segment files that hold frames, oldest first.
fn begun(directory: &Path) -> Vec<(PathBuf, File)> {
    let mut files: Vec<(PathBuf, File)> = std::fs::read_dir(directory)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            match File::open(&path) {
                Ok(file) => Some((path, file)),
                // The sorter removes segments beside a load.
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => panic!("{}: {error}", path.display()),
            }
        })
        .filter(|(_, file)| frame_at(file, FIRST_FRAME, [0; 4]).is_some())
        .collect();
    files.sort_by(|(one, _), (other, _)| one.cmp(other));
    files
}

/// How many segments hold frames.
pub(crate) fn segments(data_dir: &Path) -> usize {
    begun(&data_dir.join("journal")).len()
}

/// Whether a roll was underway: the last segment with frames is sealed.
pub(crate) fn ends_with_seal(data_dir: &Path) -> bool {
    let directory = data_dir.join("journal");
    let begun = directory.is_dir() && !begun(&directory).is_empty();
    begun && Journal::open(data_dir).last_kind == SEAL
}

/// How many sorted runs there are.
pub(crate) fn runs(data_dir: &Path) -> usize {
    let names = sorted(data_dir).into_iter();
    names.filter(|name| name.ends_with(".seg")).count()
}

fn sorted(data_dir: &Path) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(data_dir.join("sorted")) else {
        return BTreeSet::new();
    };
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    entries
        .map(|entry| name(entry).into_string().unwrap())
        .collect()
}

/// Watches until the sorter has begun to write a run.
pub(crate) fn wait_for_sorting(data_dir: &Path) {
    let started = Instant::now();
    let known = sorted(data_dir);
    while sorted(data_dir).is_subset(&known) {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "nothing is sorted in a minute of load"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Whether a frame is of the life that its file has, and not of an earlier one.
fn is_of_this_life(file: &File, header: &[u8; 64], offset: u64) -> bool {
    let length = u64::from(u16::from_le_bytes([header[4], header[5]])) * 8;
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    if bytes.len() < header.len() || file.read_exact_at(&mut bytes, offset).is_err() {
        return false;
    }
    let mut salt = [0; 8];
    SALTS.into_iter().any(|at| {
        let mut crc = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        file.read_exact_at(&mut salt, at).unwrap();
        crc.update(&salt);
        crc.update(&bytes[4..]);
        crc.finalize().to_le_bytes()[..4] == header[..4]
    })
}

/// Length, kind and checksum of the frame at an offset, if there is one that follows the
/// frame with this checksum.
fn frame_at(file: &File, offset: u64, chain: [u8; 4]) -> Option<(u64, u8, [u8; 4])> {
    let mut header = [0; 64];
    let mut again = [0; 64];
    file.read_exact_at(&mut header, offset).ok()?;
    file.read_exact_at(&mut again, offset).ok()?;
    let whole = header == again
        && header[60..64] == chain
        && header[7] != 0
        && is_of_this_life(file, &header, offset);
    let header_len = u64::from(u16::from_le_bytes([header[4], header[5]])) * 8;
    let body = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    let len = header_len + u64::from(body).next_multiple_of(8);
    let crc = [header[0], header[1], header[2], header[3]];
    (whole && header_len >= 64).then_some((len, header[7], crc))
}

impl Journal {
    /// The journal of a data directory, at its end.
    pub(crate) fn open(data_dir: &Path) -> Self {
        let directory = data_dir.join("journal");
        let (path, file) = begun(&directory).pop().unwrap();
        let mut journal = Self {
            directory,
            path,
            file,
            offset: FIRST_FRAME,
            chain: [0; 4],
            last_kind: 0,
        };
        journal.follow();
        journal
    }

    /// Goes on to the last frame of the segment.
    fn follow(&mut self) {
        while let Some((len, kind, crc)) = frame_at(&self.file, self.offset, self.chain) {
            self.offset += len;
            self.chain = crc;
            self.last_kind = kind;
        }
    }

    /// Watches until a segment is sealed and the next one is not begun.
    pub(crate) fn wait_for_seal(&mut self) {
        let started = Instant::now();
        // Whatever was written before now is passed over.
        *self = Self::open(self.directory.parent().unwrap());
        while self.last_kind != SEAL {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "no roll in a minute of load"
            );
            self.follow();
            let newest = |directory| begun(directory).pop().map(|(path, _)| path);
            if self.last_kind == SEAL && newest(&self.directory).as_ref() != Some(&self.path) {
                *self = Self::open(self.directory.parent().unwrap());
            }
        }
    }
}
