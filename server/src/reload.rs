//! Files that are read again while the daemon runs: the files of TLS, `auth_file`, keys of issuers of JWTs, and
//! `encryption_key_file`. Threads read them every 10 s and on SIGHUP. It compares contents, because Kubernetes changes the directory behind a link and keeps the times of
//! the files. New contents are checked before they come into force; after a fault the earlier ones stay.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::audit::AuditLog;
use crate::config::Size;
pub(crate) use crate::metrics::FileKind;
use crate::metrics::ReloadMetrics;

/// Pause between two reads of the files.
const EVERY: Duration = Duration::from_secs(10);

/// Pause before a second read after a fault: a writer may have replaced one file of two.
const SECOND_READ: Duration = Duration::from_millis(200);

/// Time for which changed contents must stay before they come into force: the file may be half written. After it the
/// connections of a refused client have [`crate::tls::REFUSED_GRACE`], together less than 1 second.
const UNCHANGED_FOR: Duration = Duration::from_millis(100);

/// Maximum number of reads of files that change all the time.
const MOST_READS: usize = 10;

/// The fault of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    setting: &'static str,
    path: PathBuf,
    why: String,
}

impl Fault {
    pub(crate) fn new(setting: &'static str, path: &Path, why: impl fmt::Display) -> Self {
        Self {
            setting,
            path: path.to_owned(),
            why: why.to_string(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.setting, self.path.display(), self.why)
    }
}

/// Access of every user of the machine to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Secrecy {
    /// Every user may read it, and not change it: keys and certificates decide whom the daemon trusts.
    Public,
    Secret,
}

/// Reads a file. The path may go through links: Kubernetes replaces files by changing a link to their directory.
///
/// # Errors
/// If it cannot be read, has more than `most` bytes, every user may change it, or it is secret and every user may read
/// it.
pub(crate) fn read_file(
    setting: &'static str,
    path: &Path,
    most: u64,
    secrecy: Secrecy,
) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    read_into(&mut bytes, setting, path, most, secrecy)?;
    Ok(bytes)
}

/// Reads a file with a private key, as [`read_file`] does. It leaves no copy of the file in memory.
///
/// # Errors
/// As [`read_file`] with [`Secrecy::Secret`].
pub(crate) fn read_key_file(
    setting: &'static str,
    path: &Path,
    most: u64,
) -> Result<Zeroizing<Vec<u8>>, Fault> {
    // A buffer that grows leaves its earlier bytes behind. One byte more shows that the file is too large.
    let room = usize::try_from(most + 1).unwrap_or(usize::MAX);
    let mut bytes = Zeroizing::new(Vec::with_capacity(room));
    read_into(&mut bytes, setting, path, most, Secrecy::Secret)?;
    Ok(bytes)
}

fn read_into(
    bytes: &mut Vec<u8>,
    setting: &'static str,
    path: &Path,
    most: u64,
    secrecy: Secrecy,
) -> Result<(), Fault> {
    let fault = |why: &dyn fmt::Display| Fault::new(setting, path, why);
    // Without NONBLOCK the open of a FIFO would wait for its writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| fault(&format!("cannot be opened: {error}")))?;
    let file = File::from(file);
    let about = file.metadata().map_err(|error| fault(&error))?;
    if !about.is_file() {
        return Err(fault(&"it is not a regular file"));
    }
    let mode = about.permissions().mode() & 0o7777;
    if secrecy == Secrecy::Secret && mode & 0o007 != 0 {
        return Err(fault(&format!(
            "every user of this machine can use it (mode {mode:04o}); run: chmod o-rwx {}",
            path.display()
        )));
    }
    // The group may: in Kubernetes it is that of the pod.
    if mode & 0o002 != 0 {
        return Err(fault(&format!(
            "every user of this machine can change it (mode {mode:04o}); run: chmod o-w {}",
            path.display()
        )));
    }
    (file.take(most + 1).read_to_end(bytes))
        .map_err(|error| fault(&format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > most {
        return Err(fault(&format!("the file is larger than {}", Size(most))));
    }
    Ok(())
}

/// SHA-256 of the contents of a file, for the audit log: it shows which file was in force, and not its secrets.
pub(crate) fn digest(contents: &[u8]) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, contents);
    let hex: String = (digest.as_ref().iter())
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

/// Files that belong together, and their effect.
pub(crate) trait ReloadedFiles: Send + 'static {
    /// Their name in metrics and in the log.
    const KIND: FileKind;
    /// Contents of all of them.
    type Contents: PartialEq + Send;

    /// Reads them.
    ///
    /// # Errors
    /// With the first file that cannot be read.
    fn read(&self) -> Result<Self::Contents, Fault>;

    /// Whether there are any.
    fn has_files(_contents: &Self::Contents) -> bool {
        true
    }

    /// The setting of each file, and the digest of its contents ([`digest`]).
    fn digests(&self, contents: &Self::Contents) -> Vec<(Cow<'static, str>, String)>;

    /// Checks the contents, and puts them in force. `in_force` has the earlier contents before, and all that are in force
    /// afterwards.
    ///
    /// # Errors
    /// With the first fault. The file with the fault has no effect then.
    fn put_in_force(
        &mut self,
        contents: Self::Contents,
        in_force: &mut Self::Contents,
    ) -> Result<(), Fault>;
}

/// Files that were read and passed their check.
pub(crate) struct Reloader<F: ReloadedFiles> {
    pub(crate) files: F,
    /// Contents in force.
    contents: F::Contents,
    metrics: ReloadMetrics,
    /// Fault of the last attempt, so that the log has each only once.
    fault: Option<Fault>,
    /// `None`: there is no audit log.
    pub(crate) audit: Option<Arc<AuditLog>>,
}

impl<F: ReloadedFiles> Reloader<F> {
    /// Begins with the files and contents that `begin` reads and checks.
    ///
    /// # Errors
    /// With the first fault.
    pub(crate) fn start(
        metrics: &ReloadMetrics,
        begin: impl FnMut() -> Result<(F, F::Contents), Fault>,
    ) -> Result<Self, Fault> {
        let (files, contents) = twice(begin)?;
        let reloader = Self {
            files,
            contents,
            metrics: metrics.clone(),
            fault: None,
            audit: None,
        };
        reloader.measure();
        Ok(reloader)
    }

    fn measure(&self) {
        match F::has_files(&self.contents) {
            true => self.metrics.reloaded(F::KIND, SystemTime::now()),
            false => self.metrics.absent(F::KIND),
        }
    }

    /// Records reloads from now on, and the files that are in force.
    pub(crate) fn record(&mut self, audit: &Arc<AuditLog>) {
        self.audit = Some(Arc::clone(audit));
        if F::has_files(&self.contents) {
            self.record_reload(Ok(()));
        }
    }

    fn record_reload(&self, result: Result<(), &dyn fmt::Display>) {
        let Some(audit) = &self.audit else {
            return;
        };
        // After a fault these are the files that stay in force.
        let digests = self.files.digests(&self.contents).into_iter();
        let digests: serde_json::Map<String, Value> = digests
            .map(|(setting, digest)| (setting.into_owned(), digest.into()))
            .collect();
        let details = json!({ "files": F::KIND.name(), "in_force": digests });
        audit.event("reload", details, result);
    }

    /// The contents if they have changed and stay so for a moment. A program that writes a file in place leaves it empty
    /// or cut off meanwhile, and a part of it may be a good file.
    fn read_changed(&self) -> Result<Option<F::Contents>, Fault> {
        let mut contents = self.files.read()?;
        for _ in 0..MOST_READS {
            if contents == self.contents {
                return Ok(None);
            }
            std::thread::sleep(UNCHANGED_FOR);
            let again = self.files.read()?;
            if again == contents {
                return Ok(Some(contents));
            }
            contents = again;
        }
        // The next look finds them.
        Ok(None)
    }

    /// Puts the files in force if they have changed. Returns whether they have.
    fn try_reload(&mut self) -> Result<bool, Fault> {
        let Some(contents) = self.read_changed()? else {
            return Ok(false);
        };
        let before = self.files.digests(&self.contents);
        let result = self.files.put_in_force(contents, &mut self.contents);
        // Files next to one with a fault may have come into force.
        if result.is_err() && self.files.digests(&self.contents) != before {
            self.report_in_force();
        }
        result.map(|()| true)
    }

    fn report_in_force(&self) {
        self.record_reload(Ok(()));
        tracing::info!("{}", F::KIND.in_force());
    }
}

/// Tries once more after a fault.
fn twice<T>(mut read: impl FnMut() -> Result<T, Fault>) -> Result<T, Fault> {
    read().or_else(|_| {
        std::thread::sleep(SECOND_READ);
        read()
    })
}

/// Files of any kind.
pub(crate) trait Reload: Send {
    /// Reads the files once.
    fn reload(&mut self);
}

impl<F: ReloadedFiles> Reload for Reloader<F> {
    fn reload(&mut self) {
        match twice(|| self.try_reload()) {
            Ok(changed) => {
                if changed || self.fault.is_some() {
                    self.report_in_force();
                }
                self.fault = None;
                self.measure();
            }
            Err(fault) => {
                self.metrics.failed(F::KIND);
                if self.fault.as_ref() != Some(&fault) {
                    self.record_reload(Err(&fault));
                    tracing::error!(%fault, "{}", F::KIND.unusable());
                    self.fault = Some(fault);
                }
            }
        }
    }
}

/// The thread at work. Dropping it ends the thread.
pub(crate) struct ReloadThread(Sender<()>);

impl ReloadThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system starts none.
    pub(crate) fn start(mut files: Vec<Box<dyn Reload>>) -> io::Result<Self> {
        let (requests, requested) = channel();
        std::thread::Builder::new()
            .name("wald-reload".to_owned())
            .spawn(move || {
                while let Ok(()) | Err(RecvTimeoutError::Timeout) = requested.recv_timeout(EVERY) {
                    files.iter_mut().for_each(|files| files.reload());
                }
            })?;
        Ok(Self(requests))
    }

    /// Reads the files now.
    pub(crate) fn reload(&self) {
        // The thread ends only after this value.
        let _ = self.0.send(());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A file with these contents, one after the other. The last one stays.
    struct WrittenInPlace {
        contents: RefCell<Vec<&'static str>>,
        in_force: Vec<&'static str>,
    }

    impl ReloadedFiles for WrittenInPlace {
        const KIND: FileKind = FileKind::Auth;
        type Contents = &'static str;

        fn read(&self) -> Result<&'static str, Fault> {
            let mut contents = self.contents.borrow_mut();
            Ok(match contents.len() {
                1 => contents[0],
                _ => contents.remove(0),
            })
        }

        fn digests(&self, _: &&'static str) -> Vec<(Cow<'static, str>, String)> {
            Vec::new()
        }

        fn put_in_force(
            &mut self,
            contents: &'static str,
            in_force: &mut &'static str,
        ) -> Result<(), Fault> {
            self.in_force.push(contents);
            *in_force = contents;
            Ok(())
        }
    }

    #[test]
    fn file_that_is_written_in_place_comes_into_force_whole() {
        let metrics = crate::metrics::Metrics::new().unwrap().reloads;
        for (reads, in_force) in [
            (vec!["", "a", "ab", "ab"], vec!["ab"]),
            (vec!["", "old"], vec![]),
            (vec!["", "ab", "old"], vec![]),
        ] {
            let begin = || {
                let files = WrittenInPlace {
                    contents: RefCell::new(reads.clone()),
                    in_force: Vec::new(),
                };
                Ok((files, "old"))
            };
            let mut reloader = Reloader::start(&metrics, begin).unwrap();
            reloader.reload();
            assert_eq!(reloader.files.in_force, in_force, "{reads:?}");
        }
    }

    #[test]
    fn buffer_of_a_key_file_never_moves() {
        let most = 64 << 10;
        let file = tempfile::NamedTempFile::new().unwrap();
        for size in [0, 1, 4095, 40_000, most] {
            std::fs::write(file.path(), vec![b'k'; size]).unwrap();
            let bytes = read_key_file("encryption_key_file", file.path(), most as u64).unwrap();
            assert_eq!(bytes.len(), size);
            assert_eq!(bytes.capacity(), most + 1, "{size} bytes");
        }
        std::fs::write(file.path(), vec![b'k'; most + 1]).unwrap();
        let fault = read_key_file("encryption_key_file", file.path(), most as u64).unwrap_err();
        assert!(fault.to_string().contains("larger than 64KiB"), "{fault}");
    }

    #[test]
    fn public_file_that_every_user_can_change_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |mode: u32| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(file.path(), permissions).unwrap();
            read_file("jwks_file", file.path(), 10, Secrecy::Public)
        };
        for mode in [0o444, 0o644, 0o664] {
            assert!(read(mode).is_ok(), "{mode:o}");
        }
        for mode in [0o646, 0o666] {
            let fault = read(mode).unwrap_err().to_string();
            assert!(
                fault.contains("every user of this machine can change it"),
                "{fault}"
            );
        }
    }
}
