//! The file with the contexts, `~/.config/wald/config.toml`.
//!
//! Its owner alone may read and write it. It has paths of credentials, and a changed endpoint or CA would send them to
//! another server.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ConnectionFault;

/// Maximum size of the file, bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Settings of one server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    /// Address of the server, or of several with commas.
    pub endpoint: String,
    /// File with the CAs to trust.
    pub tls_ca: Option<PathBuf>,
    /// File with the certificate of the client.
    pub tls_cert: Option<PathBuf>,
    /// File with the key of the certificate.
    pub tls_key: Option<PathBuf>,
    /// Name that the server's certificate must have.
    pub tls_server_name: Option<String>,
    /// File with the token.
    pub token_file: Option<PathBuf>,
}

/// Contents of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextFile {
    /// Name of the context in use.
    pub current: Option<String>,
    /// Contexts by name.
    #[serde(default, rename = "context")]
    pub contexts: BTreeMap<String, Context>,
}

impl ContextFile {
    /// Path of the file: below `XDG_CONFIG_HOME`, or else below `.config` of the home directory.
    ///
    /// # Errors
    /// If there is no home directory.
    pub fn path() -> Result<PathBuf, ConnectionFault> {
        // The specification of XDG ignores relative paths.
        let named = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
        let base = match named.filter(|path| path.is_absolute()) {
            Some(path) => path,
            None => std::env::home_dir()
                .filter(|home| home.is_absolute())
                .map(|home| home.join(".config"))
                .ok_or_else(|| {
                    ConnectionFault::new("contexts need a directory: set HOME or XDG_CONFIG_HOME")
                })?,
        };
        Ok(base.join("wald/config.toml"))
    }

    /// Reads the file; without one there are no contexts.
    ///
    /// # Errors
    /// If others can read or write the file, or it has a fault. The sentence has the path, and the line of a fault.
    pub fn read(path: &Path) -> Result<Self, ConnectionFault> {
        match text(path)? {
            Some(text) => Self::parse(&text, path),
            None => Ok(Self::default()),
        }
    }

    /// A context by name.
    ///
    /// # Errors
    /// If there is none.
    pub fn context(&self, name: &str, path: &Path) -> Result<&Context, ConnectionFault> {
        self.contexts.get(name).ok_or_else(|| {
            ConnectionFault::new(format!(
                "{} has no context {name:?}; `walctl context list` shows the contexts",
                path.display()
            ))
        })
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConnectionFault> {
        let mut file: Self = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..start]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count()
                + 1;
            let message = error.message().lines().next().unwrap_or_default();
            ConnectionFault::new(format!("{}, line {line}: {message}", path.display()))
        })?;
        let directory = path.parent().unwrap_or(Path::new(""));
        for (name, context) in &mut file.contexts {
            if context.tls_cert.is_some() != context.tls_key.is_some() {
                return Err(ConnectionFault::new(format!(
                    "{}, context {name:?}: tls_cert and tls_key need each other",
                    path.display()
                )));
            }
            for given in [
                &mut context.tls_ca,
                &mut context.tls_cert,
                &mut context.tls_key,
                &mut context.token_file,
            ] {
                // An absolute path replaces the directory.
                *given = given.take().map(|given| directory.join(given));
            }
        }
        Ok(file)
    }
}

/// The text of the file; `None` without a file.
pub(crate) fn text(path: &Path) -> Result<Option<String>, ConnectionFault> {
    let fault = |text: &str| ConnectionFault::new(format!("{} {text}", path.display()));
    let failed = |error| ConnectionFault::new(format!("cannot read {}: {error}", path.display()));
    match fs::metadata(path) {
        // A process without access to its home directory has no contexts.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(failed(error)),
        // Opening a pipe would wait for its writer.
        Ok(found) if !found.is_file() => return Err(fault("is not a file")),
        Ok(_) => {}
    }
    let mut file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if let Some(why) = exposed(&found, 0o077) {
        return Err(fault(&format!("{why}; `chmod 600` makes it yours alone")));
    }
    if let Some(directory) = path.parent() {
        let found = fs::metadata(directory).map_err(failed)?;
        if let Some(why) = exposed(&found, 0o022) {
            return Err(ConnectionFault::new(format!(
                "{} {why}; `chmod 700` makes it yours alone",
                directory.display()
            )));
        }
    }
    let mut text = String::new();
    let read = (&mut file)
        .take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text);
    read.map_err(failed)?;
    match text.len() as u64 > MAX_FILE_BYTES {
        true => Err(fault("is larger than 1 MiB")),
        false => Ok(Some(text)),
    }
}

/// The reason not to trust a file or directory whose mode has one of the `bits`.
fn exposed(found: &Metadata, bits: u32) -> Option<String> {
    let mode = found.permissions().mode() & 0o777;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user && found.uid() != 0 {
        return Some(format!("belongs to another user ({})", found.uid()));
    }
    let deed = match mode & bits {
        0 => return None,
        open if open & 0o022 != 0 => "change",
        _ => "read",
    };
    Some(format!(
        "is open to others, who could {deed} it (mode {mode:04o})"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        (directory, path)
    }

    #[test]
    fn file_open_to_others_is_refused_with_its_mode() {
        for (mode, deed) in [
            (0o640, "read"),
            (0o604, "read"),
            (0o620, "change"),
            (0o602, "change"),
        ] {
            let (_directory, path) = written("", mode);
            let error = ContextFile::read(&path).unwrap_err().to_string();
            assert!(
                error.contains(deed)
                    && error.contains(&format!("{mode:04o}"))
                    && error.contains("chmod 600"),
                "{error}"
            );
        }
        let (directory, path) = written("", 0o600);
        assert_eq!(ContextFile::read(&path).unwrap(), ContextFile::default());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let error = ContextFile::read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 700"), "{error}");
    }

    #[test]
    fn fault_is_named_with_path_and_line() {
        for (text, words) in [
            (
                "[context.a]\nendpoint = \"x\"\ntoken = \"k\"\n",
                "line 3: unknown field `token`",
            ),
            ("[context.a]\n\nendpoint = 5\n", "line 3: "),
            ("current = \"a\"\n[context.a\n", "line 2: "),
            (
                "[context.a]\ntls_ca = \"x\"\n",
                "line 1: missing field `endpoint`",
            ),
            (
                "[context.a]\nendpoint = \"x\"\ntls_cert = \"c\"\n",
                "\"a\": tls_cert and tls_key",
            ),
        ] {
            let (_directory, path) = written(text, 0o600);
            let error = ContextFile::read(&path).unwrap_err().to_string();
            let place = path.display().to_string();
            assert!(
                error.starts_with(&place) && error.contains(words),
                "{error}"
            );
        }
    }

    #[test]
    fn relative_path_counts_from_the_directory_of_the_file() {
        let (directory, path) = written(
            "[context.a]\nendpoint = \"x\"\ntls_ca = \"ca.pem\"\n",
            0o600,
        );
        let file = ContextFile::read(&path).unwrap();
        let ca = file.context("a", &path).unwrap().tls_ca.clone();
        assert_eq!(ca, Some(directory.path().join("ca.pem")));
    }
}
