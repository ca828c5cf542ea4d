//! The interface to the keys that encrypt the bodies of batches.
//!
//! The engine asks for the key of a log, or for a key by its number. It neither makes nor stores keys.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

use crate::base::ids::{LogId, Position};

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 12;

/// Bytes of a tag, which proves that a body was not changed.
pub const TAG_BYTES: usize = 16;

/// One data key.
pub trait BodyKey: Send + Sync {
    /// The number of the key. A store gives it to one key only. At least 1.
    fn number(&self) -> u64;

    /// Encrypts a body in place, with a random nonce that is drawn for this call alone. `bound` is not encrypted:
    /// the body opens only together with the same bytes.
    fn seal(&self, bound: &[u8], body: &mut [u8]) -> ([u8; NONCE_BYTES], [u8; TAG_BYTES]);

    /// Decrypts a body in place; its tag stands behind it. false: the body, `bound`, `nonce` or the tag were changed,
    /// or the key is another one. The bytes of `body` then have no meaning.
    fn open(&self, nonce: &[u8; NONCE_BYTES], bound: &[u8], body: &mut [u8]) -> bool;
}

/// Whether logs exist already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogsExist {
    /// Their records may be plain, or under another key.
    Already,
    /// They are created next, without a record.
    Next,
}

/// The data keys of a store.
pub trait BodyCipher: fmt::Debug + Send + Sync {
    /// The key that encrypts new bodies of a log. `None` if [`BodyCipher::prepare`] was not called for it, or if its
    /// key was destroyed. A key that was prepared must stay until the log is durably deleted, because the engine cannot write
    /// records without it.
    fn newest(&self, log: LogId) -> Option<Arc<dyn BodyKey>>;

    /// The key with this number; `None` if there is none, or none any more.
    fn by_number(&self, number: u64) -> Option<Arc<dyn BodyKey>>;

    /// The highest number that a key ever had; 0 before the first key was made.
    fn highest(&self) -> u64;

    /// Whether a key of these has, or had, this number. Keys of another store never had it.
    fn has_made(&self, number: u64) -> bool;

    /// Reads the keys. The engine calls this when it has locked the store, before it writes anything.
    ///
    /// # Errors
    /// In a sentence, if they cannot be read, or are older than the store.
    fn load(&self) -> Result<(), String>;

    /// Makes the first keys, if there are none, and makes them durable. The journal continues at `end`. The engine
    /// calls this before it writes anything.
    ///
    /// # Errors
    /// If they cannot be made durable.
    fn begin(&self, end: Position) -> io::Result<()>;

    /// Makes sure that [`BodyCipher::newest`] has a durable key for each of these logs. They exist already, or
    /// are created next.
    ///
    /// # Errors
    /// If a key cannot be made durable.
    fn prepare(&self, logs: &[(LogId, &str)], exist: LogsExist) -> io::Result<()>;

    /// The lowest number of a key that counts as new, and the position from which on the journal has only bodies of
    /// such keys. Older bodies wait for the sorter.
    fn renewed(&self) -> (u64, Position);
}

/// Why records cannot be read although their bytes are as they were written. The error of a read has it as its source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Unopened {
    /// The number of the key.
    pub key: u64,
    /// The records, and the remedy, in words.
    pub text: String,
}

/// The keys of a store, as a setting of the engine.
#[derive(Debug, Clone)]
pub struct Cipher(pub Arc<dyn BodyCipher>);

impl Deref for Cipher {
    type Target = dyn BodyCipher;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

/// Two ciphers are the same if they are one object.
impl PartialEq for Cipher {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cipher {}
