//! The data directory itself: its lock, its FORMAT file, and the durability that it provides.

use std::io;

use crate::api::error::OpenError;
use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::disk::{Disk, DiskLock, is_out_of_space};

/// The directories of a store.
pub(crate) const DIRECTORIES: [&str; 6] = [
    "journal",
    "index",
    "sorted",
    "checkpoint",
    "pool",
    "quarantine",
];
pub(crate) const FORMAT: &str = "FORMAT";
const FORMAT_NEW: &str = "FORMAT.new";
/// Exists until a restore is finished.
pub(crate) const RESTORING: &str = "RESTORING";
pub(crate) const LOCK: &str = "LOCK";
/// Content of a replica that a stand-by has already, by digest.
pub(crate) const KEPT: &str = "standby";
/// Stores that are no longer the newest ones, by the term in which they were.
pub(crate) const DIVERGED: &str = "diverged";
/// The term in the bucket that a daemon with a replica has claimed last.
pub(crate) const TERM: &str = "TERM";
const TERM_NEW: &str = "TERM.new";
/// Directory of the key ring. It is in no backup.
pub const KEYS: &str = "keys";
/// Names the newest key ring of the store.
pub const ENCRYPTED: &str = "ENCRYPTED";
/// [`ENCRYPTED`] while it is written.
pub const ENCRYPTED_NEW: &str = "ENCRYPTED.new";
/// Version 2 states the largest body, if it exceeds the limit of earlier versions.
const VERSION: u32 = 2;

/// Contents of FORMAT.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreIdentity {
    pub(crate) id: u128,
    /// Whether this start created the store.
    pub(crate) created: bool,
}

/// Makes the error for an action on a file of the store, or on the data directory itself (an empty
/// name). It names the path, and the remedy if a permission is missing.
fn at(disk: &dyn Disk, action: &str, name: &str) -> impl FnOnce(io::Error) -> OpenError {
    let slash = if name.is_empty() { "" } else { "/" };
    let action = format!("{action} {}{slash}{name}", disk.location());
    move |source| {
        let remedy = match source.kind() {
            io::ErrorKind::PermissionDenied => " (only the user who owns the store may do this)",
            _ => "",
        };
        OpenError::io(format!("{action}{remedy}"))(source)
    }
}

/// Locks the directory for this process.
pub(crate) fn lock(disk: &dyn Disk) -> Result<Box<dyn DiskLock>, OpenError> {
    let holder = format!(
        "process {} (wald {})",
        std::process::id(),
        env!("CARGO_PKG_VERSION")
    );
    disk.lock(LOCK, &holder)
        .map_err(at(disk, "locking", LOCK))?
        .map_err(|holder| OpenError::Locked {
            directory: disk.location().into(),
            holder,
        })
}

/// Checks that no restore was interrupted. Returns the names of the files in the directory.
///
/// # Errors
/// If a restore into the directory was interrupted.
pub(crate) fn check_restored(disk: &dyn Disk) -> Result<Vec<String>, OpenError> {
    let names = disk.list("").map_err(at(disk, "listing", ""))?;
    if names.iter().any(|name| name == RESTORING) {
        return Err(OpenError::NotAStore {
            what: format!(
                "a restore into {} was not finished; empty the directory and restore again",
                disk.location()
            ),
        });
    }
    // Only files may have the names of files, even in directories that a start does not need.
    for directory in DIRECTORIES {
        visit(disk, directory, &mut |_| {}).map_err(at(disk, "listing", directory))?;
    }
    Ok(names)
}

/// Locks the directory, then reads FORMAT, or creates a new store if that is allowed.
pub(crate) fn open(
    disk: &dyn Disk,
    may_create: bool,
) -> Result<(Box<dyn DiskLock>, StoreIdentity), OpenError> {
    let lock = lock(disk)?;
    let names = check_restored(disk)?;
    let store = if names.iter().any(|name| name == FORMAT) {
        StoreIdentity {
            id: read_format(disk)?,
            created: false,
        }
    } else if let Some(file) = file_of_records(disk)? {
        return Err(OpenError::NotAStore {
            what: format!(
                "{} has files of records ({file}) but no FORMAT file; `wald repair --accept-loss` writes it again from their contents",
                disk.location()
            ),
        });
    } else if !may_create {
        return Err(OpenError::NoStore {
            directory: disk.location().into(),
        });
    } else {
        StoreIdentity {
            id: create(disk)?,
            created: true,
        }
    };
    Ok((lock, store))
}

/// Creates missing directories. Called after the store was read, so that a refused store stays
/// unchanged.
pub(crate) fn complete(disk: &dyn Disk) -> Result<(), OpenError> {
    for directory in DIRECTORIES {
        disk.create_directory(directory)
            .map_err(OpenError::io(format!("making the directory {directory}")))?;
    }
    match disk.sync_directory("") {
        // Without space no directory was created, so no name needs this flush.
        Err(error) if is_out_of_space(&error) => Ok(()),
        flushed => flushed.map_err(OpenError::io("flushing the data directory")),
    }
}

/// The files in a directory of the store; none if the directory does not exist.
pub(crate) fn list(disk: &dyn Disk, directory: &str) -> std::io::Result<Vec<String>> {
    match disk.list(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        result => result,
    }
}

/// Calls `each` with the names of the files in a directory of the store.
pub(crate) fn visit(
    disk: &dyn Disk,
    directory: &str,
    each: &mut dyn FnMut(&str),
) -> std::io::Result<()> {
    match disk.visit(directory, each) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Contents of FORMAT, read without changing anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FormatFile {
    Good(u128),
    Missing,
    Damaged,
}

/// Reads FORMAT.
///
/// # Errors
/// If FORMAT cannot be read, or is of a newer version.
pub(crate) fn look(disk: &dyn Disk) -> Result<FormatFile, OpenError> {
    let names = disk.list("").map_err(at(disk, "listing", ""))?;
    if !names.iter().any(|name| name == FORMAT) {
        return Ok(FormatFile::Missing);
    }
    match read_format(disk) {
        Ok(id) => Ok(FormatFile::Good(id)),
        Err(OpenError::NotAStore { .. }) => Ok(FormatFile::Damaged),
        Err(error) => Err(error),
    }
}

/// Ensures that no process serves the directory while the returned lock is held. Writes nothing.
///
/// # Errors
/// If a process holds the directory.
pub(crate) fn lock_shared(disk: &dyn Disk) -> Result<Option<Box<dyn DiskLock>>, OpenError> {
    disk.lock_shared(LOCK)
        .map_err(at(disk, "looking at the lock", LOCK))?
        .map_err(|holder| OpenError::Locked {
            directory: disk.location().into(),
            holder,
        })
}

/// Whether a name directly in the data directory belongs to a store.
pub(crate) fn owns(name: &str) -> bool {
    [FORMAT, BEGUN, LOCK, REPAIRS, BACKUP, TERM, ENCRYPTED].contains(&name)
}

/// Whether a name belongs to a file that an interrupted start leaves behind.
pub(crate) fn leaves_behind(name: &str) -> bool {
    [
        FORMAT_NEW,
        BEGUN_NEW,
        REPAIRS_NEW,
        BACKUP_NEW,
        PROBE,
        TERM_NEW,
        ENCRYPTED_NEW,
    ]
    .contains(&name)
}

/// Whether a name directly in the data directory is one of Wald's: of a store, of an interrupted start,
/// or of a restore.
pub fn is_own_name(name: &str) -> bool {
    let others = [RESTORING, KEPT, DIVERGED, KEYS];
    owns(name) || leaves_behind(name) || others.contains(&name) || DIRECTORIES.contains(&name)
}

/// Returns the first file of records in a data directory, if there is one. Such a file without FORMAT
/// shows that a store lost FORMAT.
fn file_of_records(disk: &dyn Disk) -> Result<Option<String>, OpenError> {
    for directory in ["journal", "sorted"] {
        let names = list(disk, directory).map_err(OpenError::io(format!("listing {directory}")))?;
        if let Some(name) = names.first() {
            return Ok(Some(format!("{directory}/{name}")));
        }
    }
    Ok(None)
}

/// Encodes FORMAT. States the largest body only if it exceeds the limit for all stores.
pub(crate) fn encode_format(id: u128, largest_body: u32) -> String {
    let text = match largest_body <= bounds::LARGEST_BODY {
        true => format!("wald store\nversion 1\nid {id:032x}\n"),
        false => format!("wald store\nversion 2\nid {id:032x}\nlargest_body {largest_body}\n"),
    };
    let crc = crc32c(text.as_bytes());
    format!("{text}crc {crc:08x}\n")
}

/// Reads the store's id. From then on this process decompresses bodies up to the store's limit.
pub(crate) fn read_format(disk: &dyn Disk) -> Result<u128, OpenError> {
    let (id, largest_body) = read_identity(disk)?;
    bounds::allow_body(largest_body);
    Ok(id)
}

/// Ensures that FORMAT allows bodies of `largest_body` bytes, before one is written.
pub(crate) fn allow(disk: &dyn Disk, largest_body: u32) -> Result<(), OpenError> {
    let (id, allowed) = read_identity(disk)?;
    bounds::allow_body(largest_body);
    match largest_body <= allowed {
        true => Ok(()),
        false => write_format(disk, id, largest_body),
    }
}

fn read_identity(disk: &dyn Disk) -> Result<(u128, u32), OpenError> {
    let text = read_text(disk, FORMAT).map_err(OpenError::io("reading FORMAT"))?;
    let version = field(&text, "version").and_then(|v| v.parse::<u32>().ok());
    if let Some(found) = version.filter(|found| *found > VERSION) {
        return Err(OpenError::Version {
            found,
            supported: VERSION,
        });
    }
    let id = field(&text, "id").and_then(|id| u128::from_str_radix(id, 16).ok());
    let largest = match field(&text, "largest_body") {
        Some(bytes) => bytes.parse().ok(),
        None => Some(bounds::LARGEST_BODY),
    };
    match (id, largest) {
        (Some(id), Some(largest)) if encode_format(id, largest) == text => Ok((id, largest)),
        _ => Err(OpenError::NotAStore {
            what: format!(
                "{}/FORMAT is not one of Wald's, or damaged; `wald repair --accept-loss` writes it anew from what the segments say",
                disk.location()
            ),
        }),
    }
}

/// Writes a new FORMAT.
pub(crate) fn write_format(disk: &dyn Disk, id: u128, largest_body: u32) -> Result<(), OpenError> {
    let text = encode_format(id, largest_body);
    replace(disk, FORMAT, FORMAT_NEW, text.as_bytes()).map_err(OpenError::io("writing FORMAT"))
}

fn create(disk: &dyn Disk) -> Result<u128, OpenError> {
    let mut id = [0; 16];
    disk.draw(&mut id)
        .map_err(OpenError::io("drawing a store id"))?;
    let id = u128::from_le_bytes(id);
    write_format(disk, id, bounds::LARGEST_BODY)?;
    Ok(id)
}

/// Accepted losses with time and person, for people to read.
pub(crate) const REPAIRS: &str = "REPAIRS";
pub(crate) const REPAIRS_NEW: &str = "REPAIRS.new";

pub(crate) const BEGUN: &str = "BEGUN";
const BEGUN_NEW: &str = "BEGUN.new";

/// The last segment begun, and its epoch. The file lies next to the journal, so that a loss of the
/// journal's end is noticed, and no epoch is reused even then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LastBegun {
    pub(crate) epoch: RecoveryEpoch,
    pub(crate) segment: SegmentId,
    pub(crate) base: Position,
}

/// State of BEGUN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReadBegun {
    Good(LastBegun),
    Missing,
    /// BEGUN is incomplete, and counts as missing.
    Damaged,
    /// BEGUN is complete, but forged: no store reaches its numbers. Not used. Holds the reason.
    Beyond(String),
}

impl ReadBegun {
    /// The contents, if they can be used.
    pub(crate) fn good(&self) -> Option<LastBegun> {
        match self {
            Self::Good(begun) => Some(*begun),
            Self::Missing | Self::Damaged | Self::Beyond(_) => None,
        }
    }
}

impl LastBegun {
    /// Why no start can continue after this one; `None` if a start can.
    pub(crate) fn leaves_no_room(&self) -> Option<String> {
        let last_epoch = bounds::EPOCHS - 1;
        let last_base = bounds::POSITIONS - bounds::POSITIONS_LEFT - bounds::LARGEST_SEGMENT;
        if self.epoch.get() >= last_epoch {
            return Some(format!("{BEGUN}: epoch {} is the last one", self.epoch));
        }
        (self.base.get() > last_base)
            .then(|| format!("{BEGUN}: base {} is the last one", self.base))
    }

    pub(crate) fn encode(&self) -> String {
        let (epoch, segment, base) = (self.epoch, self.segment, self.base);
        let text = format!("wald begun\nepoch {epoch}\nsegment {segment}\nbase {base}\n");
        let crc = crc32c(text.as_bytes());
        format!("{text}crc {crc:08x}\n")
    }

    /// Reads BEGUN.
    pub(crate) fn read(disk: &dyn Disk) -> std::io::Result<ReadBegun> {
        if !disk.list("")?.iter().any(|name| name == BEGUN) {
            return Ok(ReadBegun::Missing);
        }
        let text = read_text(disk, BEGUN)?;
        let parse = || {
            Some((
                field(&text, "epoch")?.parse().ok()?,
                u64::from_str_radix(field(&text, "segment")?, 16).ok()?,
                field(&text, "base")?.parse().ok()?,
            ))
        };
        let Some((epoch, segment, base)) = parse() else {
            return Ok(ReadBegun::Damaged);
        };
        let told = Self {
            epoch: RecoveryEpoch::new(epoch),
            segment: SegmentId::new(segment),
            base: Position::new(base),
        };
        if told.encode() != text {
            return Ok(ReadBegun::Damaged);
        }
        let beyond = |what: &str, number: &dyn std::fmt::Display, most: u64| {
            ReadBegun::Beyond(format!("{BEGUN}: {what} {number} is above {most}"))
        };
        if bounds::epoch(epoch).is_none() {
            return Ok(beyond("epoch", &epoch, bounds::EPOCHS - 1));
        }
        if bounds::segment(segment).is_none() {
            return Ok(beyond("segment", &segment, bounds::SEGMENTS - 1));
        }
        let most = bounds::POSITIONS - bounds::POSITIONS_LEFT;
        if base > most {
            return Ok(beyond("base", &base, most));
        }
        Ok(ReadBegun::Good(told))
    }

    /// Replaces BEGUN durably.
    pub(crate) fn write(&self, disk: &dyn Disk) -> std::io::Result<()> {
        let text = self.encode();
        match replace(disk, BEGUN, BEGUN_NEW, text.as_bytes()) {
            Err(full) if is_out_of_space(&full) => match overwrite(disk, BEGUN, &text) {
                // A new store has no BEGUN yet, and the lack of space is the error to report.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(full),
                result => result,
            },
            result => result,
        }
    }
}

/// Time at which the last complete backup ended. Used for metrics only.
const BACKUP: &str = "BACKUP";
const BACKUP_NEW: &str = "BACKUP.new";

fn encode_backup(time: Timestamp) -> String {
    let text = format!("wald backed up\ntime {}\n", time.micros());
    let crc = crc32c(text.as_bytes());
    format!("{text}crc {crc:08x}\n")
}

/// Returns the time in BACKUP; `None` if the file is missing or incomplete.
pub(crate) fn last_backup(disk: &dyn Disk) -> Option<Timestamp> {
    if !disk.list("").ok()?.iter().any(|name| name == BACKUP) {
        return None;
    }
    let text = read_text(disk, BACKUP).ok()?;
    let time = Timestamp::from_micros(field(&text, "time")?.parse().ok()?);
    (encode_backup(time) == text).then_some(time)
}

/// Replaces BACKUP, durably.
pub(crate) fn write_last_backup(disk: &dyn Disk, time: Timestamp) -> std::io::Result<()> {
    replace(disk, BACKUP, BACKUP_NEW, encode_backup(time).as_bytes())
}

/// The term that a data directory has claimed last in the bucket of its replica. The file TERM is durable before the
/// claim, so that a later start recognises its own claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptTerm {
    /// Number that identifies the store.
    pub store_id: u128,
    /// Number of the term.
    pub term: u64,
}

impl KeptTerm {
    fn encode(&self) -> String {
        let (store, term) = (self.store_id, self.term);
        let text = format!("wald term\nstore {store:032x}\nterm {term}\n");
        let crc = crc32c(text.as_bytes());
        format!("{text}crc {crc:08x}\n")
    }

    /// Reads TERM; `None` if the directory has none.
    ///
    /// # Errors
    /// `InvalidData` if the file is damaged; others of the file system.
    pub fn read(disk: &dyn Disk) -> io::Result<Option<Self>> {
        let names = match disk.list("") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            names => names?,
        };
        if !names.iter().any(|name| name == TERM) {
            return Ok(None);
        }
        let text = read_text(disk, TERM)?;
        let parse = || {
            Some(Self {
                store_id: u128::from_str_radix(field(&text, "store")?, 16).ok()?,
                term: field(&text, "term")?.parse().ok()?,
            })
        };
        match parse() {
            Some(kept) if kept.encode() == text => Ok(Some(kept)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the file is damaged",
            )),
        }
    }

    /// Replaces TERM, durably. After an error a read finds the old or the new term.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn write(&self, disk: &dyn Disk) -> io::Result<()> {
        replace(disk, TERM, TERM_NEW, self.encode().as_bytes())
    }
}

fn read_text(disk: &dyn Disk, path: &str) -> std::io::Result<String> {
    let mut bytes = vec![0; 4096];
    let length = disk.open(path)?.read_full_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
}

/// Replaces a small text file: a reader finds the old or the new text, complete.
pub(crate) fn replace(disk: &dyn Disk, path: &str, new: &str, text: &[u8]) -> std::io::Result<()> {
    if disk.list("")?.iter().any(|name| name == new) {
        disk.remove(new)?;
    }
    let file = disk.create(new)?;
    file.write_all_at(text, 0)?;
    file.sync()?;
    disk.rename(new, path)?;
    disk.sync_directory("")
}

/// Overwrites a small text file in place, for a disk without a block for a new one. If this is
/// interrupted, the checksum fails and the file counts as missing.
fn overwrite(disk: &dyn Disk, path: &str, text: &str) -> std::io::Result<()> {
    let file = disk.open(path)?;
    file.write_all_at(text.as_bytes(), 0)?;
    file.set_size(text.len() as u64)?;
    file.sync()
}

/// The probe of flushes of an earlier version.
const PROBE: &str = "flush-probe";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn missing_right_is_reported_with_the_path_and_the_owner() {
        let denied = |name| {
            let error = io::ErrorKind::PermissionDenied.into();
            at(&SimDisk::new(), "locking", name)(error).to_string()
        };
        assert!(denied(LOCK).starts_with("locking memory/LOCK (only the user who owns"));
        assert!(denied("").starts_with("locking memory (only"));
        assert!(denied("").contains("permission denied"));
        let broken = at(&SimDisk::new(), "locking", LOCK)(io::ErrorKind::TimedOut.into());
        assert!(broken.to_string().starts_with("locking memory/LOCK: "));
    }

    const STORE: u128 = 7;

    fn kept(term: u64) -> KeptTerm {
        KeptTerm {
            store_id: STORE,
            term,
        }
    }

    /// Each call of a write is failed, and the power is cut in it and behind it.
    #[test]
    fn term_is_the_old_or_the_new_one_after_each_failure_and_power_cut() {
        let (mut fails, mut cuts, mut flushed) = (0, 0, 0);
        for call in 1..20 {
            let disk = SimDisk::seeded(call);
            kept(41).write(&disk).unwrap();
            disk.fail_call(|_| true, call, 5);
            let written = kept(42).write(&disk);
            let is_done = written.is_ok();
            fails += u64::from(!is_done);
            let found = KeptTerm::read(&disk);
            disk.forget_faults();
            disk.crash(call);
            let after = KeptTerm::read(&disk).unwrap().unwrap();
            assert!(
                [kept(41), kept(42)].contains(&after),
                "call {call}: {found:?}"
            );
            assert!(!is_done || after == kept(42), "call {call}");
            // The next start writes it again.
            kept(43).write(&disk).unwrap();
            assert_eq!(KeptTerm::read(&disk).unwrap(), Some(kept(43)));
        }
        for call in 1..20 {
            for seed in 0..8 {
                let disk = SimDisk::seeded(seed);
                kept(41).write(&disk).unwrap();
                disk.crash_after(call);
                let is_done = kept(42).write(&disk).is_ok();
                cuts += u64::from(!is_done);
                disk.crash(seed);
                let after = KeptTerm::read(&disk).unwrap().unwrap();
                assert!(
                    [kept(41), kept(42)].contains(&after),
                    "call {call}, seed {seed}"
                );
                assert!(!is_done || after == kept(42), "call {call}, seed {seed}");
                flushed += u64::from(is_done);
            }
        }
        assert!(
            fails >= 5 && cuts >= 8 * 4 && flushed > 0,
            "{fails} {cuts} {flushed}"
        );
    }

    #[test]
    fn damaged_or_unreadable_term_is_an_error_and_stays() {
        let disk = SimDisk::new();
        assert_eq!(KeptTerm::read(&disk).unwrap(), None);
        kept(41).write(&disk).unwrap();
        let good = disk.contents(TERM).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            disk.replace(TERM, bad.clone());
            let error = KeptTerm::read(&disk).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}");
            disk.replace(TERM, good[..at].to_vec());
            KeptTerm::read(&disk).unwrap_err();
            assert_eq!(disk.contents(TERM).unwrap(), good[..at]);
        }
        disk.replace(TERM, good);
        disk.fail_call(|call| call.path == TERM, 1, 5);
        assert_eq!(KeptTerm::read(&disk).unwrap_err().raw_os_error(), Some(5));
        assert_eq!(KeptTerm::read(&disk).unwrap(), Some(kept(41)));
    }
}
