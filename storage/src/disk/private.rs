//! Files and directories that only the owner of a store can read.
//!
//! Directories are created with mode 0700 and files with 0600, whatever the umask is. A umask can only
//! remove bits, so the mode is set again if bits are missing. An existing file or directory keeps its
//! mode: an operator may have opened it on purpose.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, chmodat, fchmod};

/// Mode of every new directory.
pub(super) const DIRECTORY: u32 = 0o700;
/// Mode of every new file.
pub(super) const FILE: u32 = 0o600;
/// Permission bits of a mode. Other bits, such as the set-group-id bit of a directory, come from the
/// parent directory.
const RIGHTS: u32 = 0o777;

/// Files of a store or an archive that lie directly in its directory.
const FILES: [&str; 11] = [
    "LOCK",
    "FORMAT",
    "FORMAT.new",
    "BEGUN",
    "BEGUN.new",
    "REPAIRS",
    "REPAIRS.new",
    "BACKUP",
    "BACKUP.new",
    "RESTORING",
    "flush-probe",
];
/// Directories of a store, and of a directory of backups.
const DIRECTORIES: [&str; 8] = [
    "journal",
    "index",
    "sorted",
    "checkpoint",
    "pool",
    "quarantine",
    "backups",
    "files",
];
/// Suffixes of other file names. The part before consists of hexadecimal digits and hyphens.
const SUFFIXES: [&str; 9] = [
    ".seg", ".idx", ".ckp", ".old", ".torn", ".new", ".pending", ".lock", "",
];

/// Something else in the place of a file or a directory of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WrongKind {
    NotAFile,
    NotADirectory,
}

impl WrongKind {
    /// Whether an entry that is no regular file has the place of a file or a directory of the store.
    pub(super) fn of(directory: &str, name: &str, found: FileType) -> Option<Self> {
        let stem_of = |suffix: &&str| {
            let stem = name.strip_suffix(suffix)?.trim_end_matches(".idx");
            let stem = stem.trim_end_matches(".ckp").trim_end_matches(".old");
            let digits = |c: char| c.is_ascii_hexdigit() || c == '-';
            (stem.len() >= 16 && stem.chars().all(digits)).then_some(())
        };
        if name.ends_with(".manifest") || SUFFIXES.iter().find_map(stem_of).is_some() {
            return Some(Self::NotAFile);
        }
        if !directory.is_empty() {
            return None;
        }
        if FILES.contains(&name) {
            return Some(Self::NotAFile);
        }
        let wrong = DIRECTORIES.contains(&name) && found != FileType::Directory;
        wrong.then_some(Self::NotADirectory)
    }

    /// The error, which names the path, the kind of file, and the remedy.
    pub(super) fn error(self, path: &Path, found: Option<FileType>) -> io::Error {
        let found = match found {
            Some(FileType::Symlink) => "a symbolic link",
            Some(FileType::Directory) => "a directory",
            Some(FileType::Fifo) => "a named pipe",
            Some(FileType::Socket) => "a socket",
            Some(FileType::CharacterDevice) => "a character device",
            Some(FileType::BlockDevice) => "a block device",
            Some(FileType::RegularFile) => "a regular file",
            _ => "of an unknown kind",
        };
        let wanted = match self {
            Self::NotAFile => "a regular file",
            Self::NotADirectory => "a directory",
        };
        io::Error::other(format!(
            "{} is {found}, and Wald uses only {wanted} there; move it away, and put back the \
             {} that belongs there if there was one",
            path.display(),
            match self {
                Self::NotAFile => "file",
                Self::NotADirectory => "directory",
            }
        ))
    }
}

/// Sets the mode of a file that was just created, if the umask or a default access list gave it another
/// mode.
pub(super) fn close_file(file: &File, found: &Metadata) -> io::Result<()> {
    match found.mode() & RIGHTS == FILE {
        true => Ok(()),
        false => Ok(fchmod(file, Mode::from_raw_mode(FILE))?),
    }
}

/// Sets the mode of a directory that was just created. The set-group-id bit inherited from its parent
/// directory stays.
pub(super) fn close_directory(parent: impl AsFd, name: &str) -> io::Result<()> {
    let found = rustix::fs::statat(parent.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mode = found.st_mode & 0o7777;
    if mode & RIGHTS == DIRECTORY {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(mode & !RIGHTS | DIRECTORY);
    Ok(chmodat(parent, name, mode, AtFlags::empty())?)
}

/// Creates a directory and its missing parents, each with mode 0700 whatever the umask is. An existing
/// directory keeps its mode.
///
/// # Errors
/// If a directory cannot be created, or if a path in its place is no directory.
pub fn make_directories(path: &Path) -> io::Result<()> {
    let missing: Vec<PathBuf> = path
        .ancestors()
        .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
        .map(Path::to_owned)
        .collect();
    for path in missing.iter().rev() {
        match std::fs::DirBuilder::new().mode(DIRECTORY).create(path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => continue,
            Err(error) => return Err(error),
        }
        let mode = std::fs::symlink_metadata(path)?.permissions().mode() & 0o7777;
        if mode & RIGHTS != DIRECTORY {
            let mode = std::fs::Permissions::from_mode(mode & !RIGHTS | DIRECTORY);
            std::fs::set_permissions(path, mode)?;
        }
    }
    Ok(())
}

/// Owner of a data directory, as seen by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// The user of this process, or the directory does not exist yet.
    Own,
    /// The user with this number. Another user runs this process.
    Other(u32),
    /// The user with this number, and this process runs as root. The owner cannot read files that root
    /// creates there.
    OtherThanRoot(u32),
}

/// Returns the owner of a data directory.
///
/// # Errors
/// If the file system does not report the owner.
pub fn owner(directory: &Path) -> io::Result<Owner> {
    let found = match std::fs::metadata(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Owner::Own),
        found => found?,
    };
    let user = rustix::process::geteuid();
    Ok(match found.uid() {
        owner if owner == user.as_raw() => Owner::Own,
        owner if user.is_root() => Owner::OtherThanRoot(owner),
        owner => Owner::Other(owner),
    })
}

/// Rights of users other than the owner on a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strangers {
    /// Mode bits of the directory (permissions, set-id and sticky), without the kind of file.
    pub mode: u32,
    /// Whether the group has rights.
    pub group: bool,
    /// Whether all other users have rights.
    pub others: bool,
}

/// Returns the rights of users other than the owner on a directory; `None` if they have no rights.
///
/// # Errors
/// If the file system does not report the mode.
pub fn strangers(directory: &Path) -> io::Result<Option<Strangers>> {
    let mode = std::fs::metadata(directory)?.mode() & 0o7777;
    let (group, others) = (mode & 0o070 != 0, mode & 0o007 != 0);
    Ok((group || others).then_some(Strangers {
        mode,
        group,
        others,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_names_are_not_taken_for_names_of_the_store() {
        let of = |directory, name| WrongKind::of(directory, name, FileType::Symlink);
        let seg = "0000000000000001.seg";
        assert_eq!(of("journal", seg), Some(WrongKind::NotAFile));
        assert_eq!(
            of("index", "0000000000000001.idx.new"),
            Some(WrongKind::NotAFile)
        );
        assert_eq!(of("", "BEGUN.new"), Some(WrongKind::NotAFile));
        assert_eq!(of("", "journal"), Some(WrongKind::NotADirectory));
        assert_eq!(WrongKind::of("", "journal", FileType::Directory), None);
        assert_eq!(of("", "lost+found"), None);
        assert_eq!(of("", "notes.new"), None);
        assert_eq!(of("journal", "FORMAT"), None);
        let content = "0123456789abcdef0123456789abcdef";
        assert_eq!(of("files", content), Some(WrongKind::NotAFile));
    }

    #[test]
    fn directories_are_made_for_their_owner_only() {
        let scratch = tempfile::tempdir().unwrap();
        let (open, made) = (scratch.path().join("open"), scratch.path().join("open/a/b"));
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o755)).unwrap();
        make_directories(&made).unwrap();
        make_directories(&made).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&open), 0o755, "it was there");
        assert_eq!(mode(made.parent().unwrap()), 0o700);
        assert_eq!(mode(&made), 0o700);
        assert_eq!(strangers(&made).unwrap(), None);
        assert!(strangers(&open).unwrap().unwrap().others);
        assert_eq!(owner(&made).unwrap(), Owner::Own);
    }
}
