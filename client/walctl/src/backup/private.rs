//! Files and directories that only their owner can use, and never a link to something else.
//!
//! Backups hold every record of a store. Directories get mode 0700 and files 0600, whatever the
//! umask is. A umask only removes bits, so the mode is set once more where it did. Existing
//! files keep their mode.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::OFlags;

const DIRECTORY: u32 = 0o700;
const FILE: u32 = 0o600;
const RIGHTS: u32 = 0o777;

/// Makes a directory and those above it that are missing.
///
/// # Errors
/// If one cannot be made.
pub(super) fn make_directories(path: &Path) -> io::Result<()> {
    let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(missing).collect();
    for path in missing.into_iter().rev() {
        match DirBuilder::new().mode(DIRECTORY).create(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => continue,
            Err(error) => return Err(error),
        }
        let mode = fs::symlink_metadata(path)?.permissions().mode() & 0o7777;
        if mode & RIGHTS != DIRECTORY {
            fs::set_permissions(path, Permissions::from_mode(mode & !RIGHTS | DIRECTORY))?;
        }
    }
    Ok(())
}

/// Makes a part of the directory of backups, which must be a directory and no link.
///
/// # Errors
/// If it cannot be made, or something else has its place.
pub(super) fn make_part(path: &Path) -> io::Result<()> {
    check_part(path)?;
    make_directories(path)
}

/// Makes sure that a part of the directory of backups is a directory and no link, if it is there.
///
/// # Errors
/// If something else has its place.
pub(super) fn check_part(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.is_dir() => Err(odd(path, "a directory")),
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a file that is not there.
///
/// # Errors
/// If something has its name.
pub(super) fn create(path: &Path) -> io::Result<File> {
    let file = options()
        .write(true)
        .create_new(true)
        .mode(FILE)
        .open(path)?;
    if file.metadata()?.permissions().mode() & RIGHTS != FILE {
        file.set_permissions(Permissions::from_mode(FILE))?;
    }
    Ok(file)
}

/// Opens a file to lock it; makes it if it is not there.
///
/// # Errors
/// If it is no regular file.
pub(super) fn open_lock(path: &Path) -> io::Result<File> {
    match create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => open(path, true),
        made => made,
    }
}

/// Opens a file to read it.
///
/// # Errors
/// If it is no regular file.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    open(path, false)
}

/// Bytes of a regular file; `None` if there is no such file.
///
/// # Errors
/// If it is no regular file.
pub(super) fn size(path: &Path) -> io::Result<Option<u64>> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() => Ok(Some(found.len())),
        Ok(_) => Err(odd(path, "a regular file")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// No link is followed, and no pipe is waited for.
fn options() -> OpenOptions {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.custom_flags(i32::try_from(flags.bits()).unwrap_or(0));
    options
}

fn open(path: &Path, write: bool) -> io::Result<File> {
    if size(path)?.is_none() {
        return Err(ErrorKind::NotFound.into());
    }
    let file = options().read(true).write(write).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(odd(path, "a regular file")),
    }
}

/// The error for something in the place of a file or a directory.
fn odd(path: &Path, wanted: &str) -> io::Error {
    let found = match fs::symlink_metadata(path).map(|found| found.file_type()) {
        Ok(kind) if kind.is_symlink() => "a symbolic link",
        Ok(kind) if kind.is_dir() => "a directory",
        Ok(kind) if kind.is_fifo() => "a named pipe",
        Ok(kind) if kind.is_socket() => "a socket",
        Ok(kind) if kind.is_char_device() || kind.is_block_device() => "a device",
        Ok(kind) if kind.is_file() => "a regular file",
        _ => "something else",
    };
    io::Error::other(format!(
        "{} is {found}, and walctl uses only {wanted} there; move it away",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & RIGHTS
    }

    #[test]
    fn what_is_made_is_for_its_owner_only() {
        let scratch = tempfile::tempdir().unwrap();
        let part = scratch.path().join("a/b");
        make_part(&part).unwrap();
        assert_eq!(
            (mode(&part), mode(&scratch.path().join("a"))),
            (DIRECTORY, DIRECTORY)
        );
        let file = part.join("x");
        create(&file).unwrap();
        assert_eq!(mode(&file), FILE);
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        open_lock(&file).unwrap();
        assert_eq!(mode(&file), 0o644, "it was there");
    }

    #[test]
    fn links_and_pipes_are_named_and_left_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let (target, link) = (scratch.path().join("target"), scratch.path().join("link"));
        fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert_eq!(create(&link).unwrap_err().kind(), ErrorKind::AlreadyExists);
        let what = format!("{} is a symbolic link", link.display());
        for refused in [
            open_lock(&link).err(),
            open_to_read(&link).err(),
            size(&link).err(),
        ] {
            assert!(refused.unwrap().to_string().starts_with(&what));
        }
        assert!(make_part(&link).unwrap_err().to_string().starts_with(&what));
        assert_eq!(fs::read(&target).unwrap(), b"precious");
        let pipe = scratch.path().join("pipe");
        let owner = rustix::fs::Mode::from_raw_mode(FILE);
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, owner, 0).unwrap();
        let refused = open_to_read(&pipe).unwrap_err().to_string();
        assert!(refused.contains("is a named pipe"), "{refused}");
    }
}
