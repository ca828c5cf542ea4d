//! The destination of the lines: a file that only its owner can read, or stderr.

use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::config::Config;
use crate::logging;

/// Mode of the file, whatever the umask and an earlier mode.
const MODE: u32 = 0o600;

/// Values of the setting `audit_log` that are no path.
const OFF: [&str; 2] = ["", "off"];
const STDERR: &str = "stderr";

/// Takes lines.
pub(super) enum AuditOutput {
    Stderr,
    File {
        path: PathBuf,
        /// `None`: it is opened before the next line.
        file: Option<File>,
    },
}

impl AuditOutput {
    /// The destination that the setting names, with its file open. `None`: the audit log is off.
    ///
    /// # Errors
    /// A sentence, if the file cannot be opened or lies in the data directory.
    pub(super) fn open(config: &Config) -> Result<Option<Self>, String> {
        let named = config.audit_log.as_str();
        if OFF.contains(&named) {
            return Ok(None);
        }
        if named == STDERR {
            return Ok(Some(Self::Stderr));
        }
        let path = PathBuf::from(named);
        let wrong = |why: &str| format!("audit_log: {}: {why}", path.display());
        if is_inside(&path, &config.data_dir) {
            return Err(wrong(
                "it is in the data directory; choose a file outside of it",
            ));
        }
        let file = open(&path).map_err(|error| wrong(&format!("cannot be opened: {error}")))?;
        Ok(Some(Self::File {
            path,
            file: Some(file),
        }))
    }

    /// Closes the file. The next line goes to the file that has the name then.
    pub(super) fn close(&mut self) {
        if let Self::File { file, .. } = self {
            *file = None;
        }
    }

    /// Writes whole lines. Without lines, only opens the file.
    ///
    /// # Errors
    /// If not all of them were written. The file has none of them then.
    pub(super) fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        match self {
            Self::Stderr => {
                let mut stderr = io::stderr();
                (lines.split_inclusive(|byte| *byte == b'\n'))
                    .try_for_each(|line| logging::write_whole(&mut stderr, line))
            }
            Self::File { path, file } => {
                let mut opened = match file.take() {
                    Some(opened) => opened,
                    None => open(path)?,
                };
                append(&mut opened, lines)?;
                *file = Some(opened);
                Ok(())
            }
        }
    }

    /// The name of the destination, for the log.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Stderr => STDERR.to_owned(),
            Self::File { path, .. } => path.display().to_string(),
        }
    }
}

/// Whether the file would be one of the data directory's: a start takes an unknown file there for a sign that the
/// directory is no store.
fn is_inside(path: &Path, directory: &Path) -> bool {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new(".")).canonicalize();
    let directory = directory.canonicalize();
    matches!((parent, directory), (Ok(parent), Ok(directory)) if parent.starts_with(&directory))
}

/// Opens the file to append, or creates it. A link in its place is not followed: someone may have put it there to have
/// lines written to another file.
fn open(path: &Path) -> io::Result<File> {
    // Without NONBLOCK the open of a FIFO would wait for its reader.
    let flags = OFlags::WRONLY
        | OFlags::CREATE
        | OFlags::APPEND
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::from_raw_mode(MODE));
    let file = File::from(opened.map_err(|error| match error {
        rustix::io::Errno::LOOP => io::Error::other("it is a symbolic link"),
        other => other.into(),
    })?);
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if about.permissions().mode() & 0o7777 != MODE {
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    Ok(file)
}

/// Appends all bytes, or none: half a line would make the next one unreadable too.
fn append(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let mut written = 0;
    while written < bytes.len() {
        let error = match file.write(&bytes[written..]) {
            Ok(0) => io::ErrorKind::WriteZero.into(),
            Ok(more) => {
                written += more;
                continue;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => error,
        };
        let length = file.metadata()?.len();
        file.set_len(length.saturating_sub(written as u64))?;
        return Err(error);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn file_is_closed_to_others_even_if_it_was_open_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.log");
        append(&mut open(&path).unwrap(), b"one\n").unwrap();
        assert_eq!(mode(&path), 0o600);
        std::fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        append(&mut open(&path).unwrap(), b"two\n").unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
    }

    #[test]
    fn link_directory_and_fifo_are_refused_and_their_targets_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("target"), "kept").unwrap();
        std::os::unix::fs::symlink(at("target"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("dangling")).unwrap();
        std::fs::create_dir(at("directory")).unwrap();
        let made = std::process::Command::new("mkfifo")
            .arg(at("fifo"))
            .status();
        assert!(made.unwrap().success());
        for name in ["link", "dangling", "directory", "fifo"] {
            assert!(open(&at(name)).is_err(), "{name}");
        }
        assert_eq!(std::fs::read(at("target")).unwrap(), b"kept");
        assert!(!at("nowhere").exists());
        // A link to its directory is followed: an operator has made that.
        std::os::unix::fs::symlink(directory.path(), at("to-directory")).unwrap();
        assert!(open(&at("to-directory/audit.log")).is_ok());
    }

    #[test]
    fn file_in_the_data_directory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        std::fs::create_dir(&data).unwrap();
        assert!(is_inside(&data.join("audit.log"), &data));
        assert!(is_inside(&data.join("../data/audit.log"), &data));
        assert!(!is_inside(&directory.path().join("audit.log"), &data));
        assert!(!is_inside(&directory.path().join("missing/a"), &data));
    }
}
