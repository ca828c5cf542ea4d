//! State that a program keeps over its restarts.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind as IoErrorKind, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use wald_proto::codec::{Decode, Encode};

use crate::error::{Error, ErrorKind};

/// The place of the state of one producer or one follower: a file ([`FileState`]), or a row in the
/// database of the program.
///
/// The calls come one after the other, on threads that may block. The bytes are a message of the contract
/// ([`ProducerState`](crate::proto::ProducerState), [`FollowerState`](crate::proto::FollowerState)).
pub trait State: Send + 'static {
    /// The state that was kept last; `None` if none was.
    ///
    /// # Errors
    /// If it cannot be read.
    fn load(&mut self) -> io::Result<Option<Vec<u8>>>;

    /// Keeps this state instead of the one before: all of it or nothing, over a crash of the machine, too, once
    /// this has returned.
    ///
    /// # Errors
    /// If it cannot be kept.
    fn save(&mut self, state: &[u8]) -> io::Result<()>;
}

/// Links that are followed, as the kernel does it; it refuses a path with more.
const LINKS: usize = 40;

/// State in a file, which only its owner can read.
///
/// Each save writes a new file beside it, flushes it, and renames it. A producer or follower holds a lock on a third
/// file, `PATH.lock`, from its start until it is dropped: a second one is refused, in this process and in others. If the
/// path is a symbolic link, PATH is the file that the link names, and the link stays.
#[derive(Debug)]
pub struct FileState {
    path: PathBuf,
    /// Held once the state was loaded.
    lock: Option<File>,
}

impl FileState {
    /// State in the file of this path. Its directory must exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            lock: None,
        }
    }

    /// A file next to that of the state.
    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(suffix);
        PathBuf::from(name)
    }

    fn take_lock(&mut self) -> io::Result<()> {
        if self.lock.is_some() {
            return Ok(());
        }
        // Otherwise a save would replace the link, and users of different names would have different locks.
        self.path = behind_links(std::mem::take(&mut self.path));
        let path = self.beside(".lock");
        let file = own_file().open(path)?;
        match file.try_lock() {
            Ok(()) => {
                self.lock = Some(file);
                Ok(())
            }
            Err(TryLockError::WouldBlock) => Err(io::Error::new(
                IoErrorKind::ResourceBusy,
                "another producer or follower uses it",
            )),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// The error, with the path.
    fn at(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
    }

    fn replace(&self, state: &[u8]) -> io::Result<()> {
        let new = self.beside(".new");
        let mut file = own_file().truncate(true).open(&new)?;
        file.write_all(state)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        #[cfg(unix)]
        {
            let parent = self.path.parent().filter(|parent| parent.as_os_str() != "");
            File::open(parent.unwrap_or(".".as_ref()))?.sync_all()?;
        }
        Ok(())
    }
}

/// The path that a symbolic link names, which need not exist; the path itself, if it is no link. The names beside it are the
/// same through all links to its directory.
fn behind_links(mut path: PathBuf) -> PathBuf {
    for _ in 0..LINKS {
        let Ok(target) = fs::read_link(&path) else {
            break;
        };
        path.pop();
        path.push(target);
    }
    path
}

/// Makes or opens a file that only its owner can read.
fn own_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

impl State for FileState {
    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.take_lock().map_err(|error| self.at(&error))?;
        match fs::read(&self.path) {
            Ok(state) => Ok(Some(state)),
            Err(error) if error.kind() == IoErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.at(&error)),
        }
    }

    fn save(&mut self, state: &[u8]) -> io::Result<()> {
        self.replace(state).map_err(|error| self.at(&error))
    }
}

/// A state that is loaded and saved off the event loop.
pub(crate) struct KeptState {
    state: Arc<Mutex<Saves>>,
    /// Number of the next save.
    next: u64,
}

/// A state, and its newest save.
struct Saves {
    state: Box<dyn State>,
    newest: u64,
}

impl KeptState {
    pub(crate) fn new(state: impl State) -> Self {
        let saves = Saves {
            state: Box::new(state),
            newest: 0,
        };
        Self {
            state: Arc::new(Mutex::new(saves)),
            next: 1,
        }
    }

    /// The message that was kept last.
    ///
    /// # Errors
    /// [`ErrorKind::State`].
    pub(crate) async fn load<M: Decode>(&self) -> Result<Option<M>, Error> {
        let Some(bytes) = self.work(|saves| saves.state.load()).await? else {
            return Ok(None);
        };
        let message = M::take(Bytes::from(bytes));
        message.map(Some).map_err(|why| {
            failed(format!(
                "it is not the state of a producer or follower: {}",
                why.message()
            ))
        })
    }

    /// Saves a message. A save whose caller was cancelled may begin after a later one; it does nothing then.
    ///
    /// # Errors
    /// [`ErrorKind::State`].
    pub(crate) async fn save(&mut self, message: &impl Encode) -> Result<(), Error> {
        let mut bytes = Vec::with_capacity(message.length());
        message.put(&mut bytes);
        let number = self.next;
        self.next += 1;
        self.work(move |saves| {
            if number < saves.newest {
                return Ok(());
            }
            saves.newest = number;
            saves.state.save(&bytes)
        })
        .await
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Saves) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let state = Arc::clone(&self.state);
        let done = tokio::task::spawn_blocking(move || {
            work(&mut state.lock().unwrap_or_else(PoisonError::into_inner))
        });
        match done.await {
            Ok(done) => done.map_err(|error| failed(error.to_string())),
            Err(panicked) => Err(failed(panicked.to_string())),
        }
    }
}

/// The error of a state.
pub(crate) fn failed(detail: String) -> Error {
    Error::new(ErrorKind::State { detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts its saves. The first one takes as long as the test wants.
    struct Slow(
        std::sync::mpsc::Receiver<()>,
        std::sync::mpsc::Sender<Vec<u8>>,
    );

    impl State for Slow {
        fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
            Ok(None)
        }

        fn save(&mut self, state: &[u8]) -> io::Result<()> {
            self.0.recv().unwrap();
            self.1.send(state.to_vec()).unwrap();
            Ok(())
        }
    }

    #[tokio::test]
    async fn save_that_was_given_up_never_replaces_a_later_one() {
        use futures_util::FutureExt as _;
        let (go, gate) = std::sync::mpsc::channel();
        let (saved, seen) = std::sync::mpsc::channel();
        let mut state = KeptState::new(Slow(gate, saved));
        let of = |sequence| wald_proto::v1::ProducerState {
            sequence,
            ..Default::default()
        };
        for sequence in 1..20 {
            assert!(state.save(&of(sequence)).now_or_never().is_none());
        }
        for _ in 0..20 {
            go.send(()).unwrap();
        }
        state.save(&of(20)).await.unwrap();
        drop(state);
        let saved: Vec<_> = seen.into_iter().collect();
        let numbers = saved.iter().map(|bytes| {
            let state = wald_proto::v1::ProducerState::take(&bytes[..]);
            state.unwrap().sequence
        });
        let numbers: Vec<_> = numbers.collect();
        assert!(
            numbers.is_sorted() && numbers.last() == Some(&20),
            "{numbers:?}"
        );
    }

    #[test]
    fn file_has_the_last_state_and_belongs_to_its_owner_alone() {
        let directory = std::env::temp_dir().join(format!("wald-state-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let path = directory.join("producer.state");
        let mut state = FileState::new(&path);
        assert!(state.load().unwrap().is_none());
        for text in ["first", "second, longer", "3"] {
            state.save(text.as_bytes()).unwrap();
            assert_eq!(state.load().unwrap().unwrap(), text.as_bytes());
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(
                fs::metadata(&path).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
        // The state and its lock.
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
        let refused = FileState::new(&path).load().unwrap_err();
        assert!(
            refused
                .to_string()
                .contains("another producer or follower uses it"),
            "{refused}"
        );
        drop(state);
        let mut state = FileState::new(&path);
        assert_eq!(state.load().unwrap().unwrap(), b"3");
        fs::remove_dir_all(&directory).unwrap();
        let refused = state.save(b"x").unwrap_err();
        assert!(refused.to_string().contains("producer.state"), "{refused}");
    }

    #[cfg(unix)]
    #[test]
    fn link_stays_and_its_target_has_the_state_and_the_lock() {
        let directory = format!("wald-linked-state-{}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        fs::create_dir(&directory).unwrap();
        let path = |name| directory.join(name);
        let (target, link) = (path("target"), path("link"));
        std::os::unix::fs::symlink("middle", &link).unwrap();
        std::os::unix::fs::symlink(&target, path("middle")).unwrap();
        // Once without a target, once with one.
        for text in ["1", "2"] {
            let mut state = FileState::new(&link);
            state.load().unwrap();
            state.save(text.as_bytes()).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(fs::read_to_string(&target).unwrap(), text);
            let refused = FileState::new(&target).load().unwrap_err();
            assert_eq!(refused.kind(), IoErrorKind::ResourceBusy);
        }
        fs::remove_dir_all(&directory).unwrap();
    }
}
