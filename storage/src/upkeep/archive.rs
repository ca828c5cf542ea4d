//! The archive: records that retention removed, kept in a directory outside of the store.
//!
//! ```text
//!  run is built ─▶ <name>.new, flushed ─▶ <name>.pending ─▶ run is published ─▶ <name>.seg
//!                  expired records                          they are dropped
//! ```
//!
//! The sorter drops expired records. With an archive it first writes them to a file there: batches as they were
//! stored, in the form of a sorted run. The file is `.pending` until it is certain that the run was published.
//! The sorter settles this before it continues. A run that replaces the same segments and is not older proves
//! the publication. Without such a run the store still has all the records, and the file is removed. Therefore
//! each record is in the store or in the archive, and after each step in exactly one of them.
//!
//! No store needs its archive: files there may be moved, copied, removed.

mod keep;

pub(crate) use self::keep::{Archive, Archiving, UnpublishedFile};
use crate::base::ids::SegmentId;

/// The name of a file of an archive. It identifies the records in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ArchiveName {
    pub(crate) store: u128,
    /// The first segment that its run replaced.
    pub(crate) first: SegmentId,
    /// The run that was made without these records.
    pub(crate) run: SegmentId,
    /// Random, so that no two files have one name, even of stores restored from one backup.
    pub(crate) salt: u64,
}

/// State of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileStage {
    New,
    Pending,
    Kept,
}

impl ArchiveName {
    pub(crate) fn path(&self, stage: FileStage) -> String {
        let Self {
            store,
            first,
            run,
            salt,
        } = self;
        let end = match stage {
            FileStage::New => "new",
            FileStage::Pending => "pending",
            FileStage::Kept => "seg",
        };
        format!("{store:032x}-{first}-{run}-{salt:016x}.{end}")
    }

    pub(crate) fn parse(path: &str) -> Option<(Self, FileStage)> {
        let (stem, end) = path.split_once('.')?;
        let stage = match end {
            "new" => FileStage::New,
            "pending" => FileStage::Pending,
            "seg" => FileStage::Kept,
            _ => return None,
        };
        let mut parts = stem.split('-');
        let store = u128::from_str_radix(parts.next()?, 16).ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let name = Self {
            store,
            first: SegmentId::new(number()?),
            run: SegmentId::new(number()?),
            salt: number()?,
        };
        (name.path(stage) == path).then_some((name, stage))
    }
}

/// The lock that lets one process at a time write the files of one store.
pub(crate) fn lock_path(store: u128) -> String {
    format!("{store:032x}.lock")
}

pub(crate) fn is_lock(path: &str) -> bool {
    let stem = path.strip_suffix(".lock");
    let id = stem.and_then(|stem| u128::from_str_radix(stem, 16).ok());
    id.is_some_and(|id| lock_path(id) == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_and_nothing_else_is_taken_for_one() {
        let name = ArchiveName {
            store: u128::MAX - 9,
            first: SegmentId::new(7),
            run: SegmentId::new(1 << 40),
            salt: 5,
        };
        for stage in [FileStage::New, FileStage::Pending, FileStage::Kept] {
            let path = name.path(stage);
            assert_eq!(ArchiveName::parse(&path), Some((name, stage)));
            for other in [
                format!("{path}.new"),
                format!("0{path}"),
                path.to_uppercase(),
                path.replacen('-', "-+", 1),
                path.replace('-', "_"),
            ] {
                assert_eq!(ArchiveName::parse(&other), None, "{other}");
            }
        }
        assert!(is_lock(&lock_path(9)));
        assert!(!is_lock("9.lock"));
    }
}
