//! Engines with deliberate mistakes, for testing the tests: at least one layer of tests must catch each
//! mistake. Otherwise the tests prove nothing.
//!
//! Only in the engine's own tests, and with the feature `known-bad`, which no released build has. The environment variable
//! `WALD_KNOWN_BAD` names the mistake; without it the engine is correct. In other builds this
//! module does nothing.

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(any(test, feature = "known-bad")),
    allow(dead_code, reason = "never made")
)]
pub(crate) enum Mistake {
    /// Flushes of files do nothing.
    NoFlush,
    /// A failed flush counts as successful.
    FlushResultIgnored,
    /// Flushes of directories do nothing.
    NoDirectoryFlush,
    /// All segments have the same salt.
    NoSalt,
    /// A frame need not follow from the one before it.
    NoChain,
    /// The journal ends at the first bad bytes, even if later bytes were proven durable.
    TruncateOnAnyError,
    /// Requests that wait for a flush are answered when the flush begins.
    AckBeforeFlush,
    /// Requests that wait for the replica are answered when they are durable.
    AckBeforeReplica,
    /// The replica gets bytes that are only written.
    ShipFromWritten,
    /// The replica misses a group, when several groups are shipped at once.
    SkipRow,
    /// A checkpoint forgets the producers.
    ProducersNotInCheckpoint,
    /// Only the last good frame decides up to where the journal was proven durable.
    LastGoodFrame,
    /// The sorter keeps no free space and writes runs that do not fit.
    SorterIgnoresSpace,
    /// A read that meets an unreadable sector fails.
    UnreadableEndsRead,
    /// A start leaves the files of an interrupted sorter.
    LeftoversStay,
    /// The sorter leaves the indexes of the files that it replaced.
    SortedIndexesStay,
    /// Idle producers never expire.
    ProducersNeverExpire,
    /// While any damage is known, no checkpoint is written and nothing is sorted.
    DamageStopsCheckpoints,
    /// A log whose tail cannot be proven takes appends.
    UnprovenForgotten,
    /// A body is decrypted whatever its tag says.
    TagNotChecked,
}

#[cfg(not(any(test, feature = "known-bad")))]
pub(crate) const fn makes(_mistake: Mistake) -> bool {
    false
}

#[cfg(any(test, feature = "known-bad"))]
pub(crate) use chosen::{makes, on};

#[cfg(any(test, feature = "known-bad"))]
mod chosen {
    use std::io;
    use std::ops::Range;
    use std::sync::{Arc, OnceLock};

    use bytes::Bytes;

    use super::Mistake;
    use crate::disk::{Disk, DiskFile, DiskLock, DiskMap, FileIdentity, FileSystem, Unreadable};

    /// Each mistake, by its name in `WALD_KNOWN_BAD`.
    const NAMES: [(&str, Mistake); 20] = [
        ("no_flush", Mistake::NoFlush),
        ("flush_result_ignored", Mistake::FlushResultIgnored),
        ("no_directory_flush", Mistake::NoDirectoryFlush),
        ("no_salt", Mistake::NoSalt),
        ("no_chain", Mistake::NoChain),
        ("truncate_on_any_error", Mistake::TruncateOnAnyError),
        ("ack_before_flush", Mistake::AckBeforeFlush),
        ("ack_before_replica", Mistake::AckBeforeReplica),
        ("ship_from_written", Mistake::ShipFromWritten),
        ("skip_row", Mistake::SkipRow),
        (
            "producers_not_in_checkpoint",
            Mistake::ProducersNotInCheckpoint,
        ),
        ("last_good_frame", Mistake::LastGoodFrame),
        ("sorter_ignores_space", Mistake::SorterIgnoresSpace),
        ("unreadable_ends_read", Mistake::UnreadableEndsRead),
        ("leftovers_stay", Mistake::LeftoversStay),
        ("sorted_indexes_stay", Mistake::SortedIndexesStay),
        ("producers_never_expire", Mistake::ProducersNeverExpire),
        ("damage_stops_checkpoints", Mistake::DamageStopsCheckpoints),
        ("unproven_forgotten", Mistake::UnprovenForgotten),
        ("tag_not_checked", Mistake::TagNotChecked),
    ];

    /// Whether this mistake must be made.
    pub(crate) fn makes(mistake: Mistake) -> bool {
        static CHOSEN: OnceLock<Option<Mistake>> = OnceLock::new();
        let chosen = CHOSEN.get_or_init(|| {
            let name = std::env::var("WALD_KNOWN_BAD").ok()?;
            let known = NAMES.iter().find(|(known, _)| *known == name);
            let names = NAMES.map(|(name, _)| name).join(", ");
            let (_, mistake) =
                known.unwrap_or_else(|| panic!("WALD_KNOWN_BAD={name}: not one of {names}"));
            // Not a warning: tests of the daemon count a warning as a fault found.
            tracing::info!(mistake = name, "this engine is wrong on purpose");
            Some(*mistake)
        });
        *chosen == Some(mistake)
    }

    /// The disk, without the flushes that the mistake omits.
    pub(crate) fn on(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
        if makes(Mistake::NoFlush) || makes(Mistake::NoDirectoryFlush) {
            return Arc::new(Unflushed(disk));
        }
        disk
    }

    struct Unflushed(Arc<dyn Disk>);

    struct UnflushedFile(Arc<dyn DiskFile>);

    fn unflushed(file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(UnflushedFile(file))
    }

    impl Disk for Unflushed {
        fn location(&self) -> String {
            self.0.location()
        }

        fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
            self.0.lock(path, holder)
        }

        fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
            self.0.lock_shared(path)
        }

        fn create_directory(&self, path: &str) -> io::Result<()> {
            self.0.create_directory(path)
        }

        fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
            self.0.visit(directory, each)
        }

        fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
            self.0.create(path).map(unflushed)
        }

        fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
            self.0.open(path).map(unflushed)
        }

        fn read_direct(&self, path: &str, from: u64, bytes: u64) -> io::Result<Option<Bytes>> {
            self.0.read_direct(path, from, bytes)
        }

        fn unreadable(&self) -> &Unreadable {
            self.0.unreadable()
        }

        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }

        fn remove(&self, path: &str) -> io::Result<()> {
            self.0.remove(path)
        }

        fn sync_directory(&self, directory: &str) -> io::Result<()> {
            if makes(Mistake::NoDirectoryFlush) {
                return Ok(());
            }
            self.0.sync_directory(directory)
        }

        fn draw(&self, bytes: &mut [u8]) -> io::Result<()> {
            self.0.draw(bytes)
        }

        fn free_bytes(&self) -> io::Result<Option<u64>> {
            self.0.free_bytes()
        }

        fn identity(&self, path: &str) -> io::Result<FileIdentity> {
            self.0.identity(path)
        }

        fn file_system(&self) -> FileSystem {
            self.0.file_system()
        }
    }

    impl DiskFile for UnflushedFile {
        fn identity(&self) -> io::Result<FileIdentity> {
            self.0.identity()
        }

        fn size(&self) -> io::Result<u64> {
            self.0.size()
        }

        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            self.0.read_at(buffer, offset)
        }

        fn note_unreadable(&self, bytes: Range<u64>) {
            self.0.note_unreadable(bytes);
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
            self.0.write_at(bytes, offset)
        }

        fn set_size(&self, bytes: u64) -> io::Result<()> {
            self.0.set_size(bytes)
        }

        fn map(&self) -> io::Result<Option<Box<dyn DiskMap>>> {
            self.0.map()
        }

        fn sync(&self) -> io::Result<()> {
            if makes(Mistake::NoFlush) {
                return Ok(());
            }
            self.0.sync()
        }
    }
}
