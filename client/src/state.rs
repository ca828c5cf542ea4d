//! State that a program keeps over its restarts.

use std::fs::{self, File, OpenOptions};
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

/// State in a file, which only its owner can read. One process may use it at a time.
///
/// Each save writes a new file beside it, flushes it, and renames it.
#[derive(Debug, Clone)]
pub struct FileState {
    path: PathBuf,
}

impl FileState {
    /// State in the file of this path. Its directory must exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The error, with the path.
    fn at(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("{}: {error}", self.path.display()))
    }

    fn replace(&self, state: &[u8]) -> io::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&new)?;
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

impl State for FileState {
    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
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
#[derive(Clone)]
pub(crate) struct KeptState(Arc<Mutex<dyn State>>);

impl KeptState {
    pub(crate) fn new(state: impl State) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    /// The message that was kept last.
    ///
    /// # Errors
    /// [`ErrorKind::State`].
    pub(crate) async fn load<M: Decode>(&self) -> Result<Option<M>, Error> {
        let Some(bytes) = self.work(|state| state.load()).await? else {
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

    /// # Errors
    /// [`ErrorKind::State`].
    pub(crate) async fn save(&self, message: &impl Encode) -> Result<(), Error> {
        let mut bytes = Vec::with_capacity(message.length());
        message.put(&mut bytes);
        self.work(move |state| state.save(&bytes)).await
    }

    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut dyn State) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let state = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || {
            work(&mut *state.lock().unwrap_or_else(PoisonError::into_inner))
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
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        fs::remove_dir_all(&directory).unwrap();
        let refused = state.save(b"x").unwrap_err();
        assert!(refused.to_string().contains("producer.state"), "{refused}");
    }
}
