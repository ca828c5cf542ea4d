//! Files and directories that only the owner of a store can read.
//!
//! Directories are made with mode 0700 and files with 0600, whatever the umask is. A umask can
//! only take bits away, so the mode is set once more where it took one. An existing file or directory
//! keeps its mode: an operator may have opened it on purpose.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, chmodat, fchmod};

/// Mode of every directory that is made.
pub(super) const DIRECTORY: u32 = 0o700;
/// Mode of every file that is made.
pub(super) const FILE: u32 = 0o600;
/// Bits of a mode that say who may do what. Others, such as the set-group-id bit of a
/// directory, are the parent directory's.
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
/// What names of other files end in. Before that they have hexadecimal digits and hyphens.
const SUFFIXES: [&str; 9] = [
    ".seg", ".idx", ".ckp", ".old", ".torn", ".new", ".pending", ".lock", "",
];

/// Something in the place of a file or a directory of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Odd {
    NotAFile,
    NotADirectory,
}

impl Odd {
    /// Whether an entry that is no regular file is in the place of one of the store's, or of
    /// one of its directories.
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

/// Gives a file that was just made its mode, if the umask or a default access list left it
/// another one.
pub(super) fn close_file(file: &File, found: &Metadata) -> io::Result<()> {
    match found.mode() & RIGHTS == FILE {
        true => Ok(()),
        false => Ok(fchmod(file, Mode::from_raw_mode(FILE))?),
    }
}

/// Gives a directory that was just made its mode. The set-group-id bit that it has from its
/// parent directory stays.
pub(super) fn close_directory(parent: impl AsFd, name: &str) -> io::Result<()> {
    let found = rustix::fs::statat(parent.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mode = found.st_mode & 0o7777;
    if mode & RIGHTS == DIRECTORY {
        return Ok(());
    }
    let mode = Mode::from_raw_mode(mode & !RIGHTS | DIRECTORY);
    Ok(chmodat(parent, name, mode, AtFlags::empty())?)
}

/// Makes a directory and those above it that are missing, each with mode 0700 whatever the
/// umask is. A directory that is there keeps its mode.
///
/// # Errors
/// If one cannot be made, or something else has its place.
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

/// To whom a data directory belongs, as seen by this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// To the user of this process, or there is no such directory yet.
    Own,
    /// To the user with this number, and this process is another one's.
    Other(u32),
    /// The same, and this process is root: what it makes there is root's, and the owner cannot
    /// read it.
    OtherThanRoot(u32),
}

/// To whom a data directory belongs.
///
/// # Errors
/// If the file system does not say.
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

/// What users other than the owner may do with a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strangers {
    /// The directory's mode, without the kind of file.
    pub mode: u32,
    /// Whether the group has rights.
    pub group: bool,
    /// Whether everybody has rights.
    pub others: bool,
}

/// What users other than the owner may do with a directory; `None` = nothing.
///
/// # Errors
/// If the file system does not say.
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
    fn names_of_the_store_are_told_from_names_of_others() {
        let of = |directory, name| Odd::of(directory, name, FileType::Symlink);
        let seg = "0000000000000001.seg";
        assert_eq!(of("journal", seg), Some(Odd::NotAFile));
        assert_eq!(of("index", "0000000000000001.idx.new"), Some(Odd::NotAFile));
        assert_eq!(of("", "BEGUN.new"), Some(Odd::NotAFile));
        assert_eq!(of("", "journal"), Some(Odd::NotADirectory));
        assert_eq!(Odd::of("", "journal", FileType::Directory), None);
        assert_eq!(of("", "lost+found"), None);
        assert_eq!(of("", "notes.new"), None);
        assert_eq!(of("journal", "FORMAT"), None);
        let content = "0123456789abcdef0123456789abcdef";
        assert_eq!(of("files", content), Some(Odd::NotAFile));
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
