//! The keys of the engine's tests: in memory, and with the cipher of the server.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock};

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};
use parking_lot::Mutex;

use crate::api::cipher::{BodyCipher, BodyKey, Cipher, LogsExist, NONCE_BYTES, TAG_BYTES};
use crate::base::ids::{LogId, Position};

/// Encryption in every test whose settings are small, if `WALD_TEST_ENCRYPTED` is set. All stores of the process have
/// the same keys: tests open copies and restored backups with settings of their own.
pub(super) fn of_environment() -> Option<Cipher> {
    static SHARED: OnceLock<Option<Cipher>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| {
        std::env::var_os("WALD_TEST_ENCRYPTED")?;
        let (keys, cipher) = TestKeys::cipher();
        keys.rotate(Position::ZERO);
        Some(cipher)
    });
    shared.clone()
}

/// One key in memory.
pub(super) struct TestKey {
    number: u64,
    key: LessSafeKey,
    nonces: Mutex<Vec<[u8; NONCE_BYTES]>>,
}

impl TestKey {
    pub(super) fn new(number: u64) -> Self {
        // The same number gives the same key in each process, so that directories can be opened again.
        let bytes = [u8::try_from(number % 251).unwrap(); 32];
        let key = UnboundKey::new(&AES_256_GCM_SIV, &bytes).unwrap();
        Self {
            number,
            key: LessSafeKey::new(key),
            nonces: Mutex::default(),
        }
    }
}

impl BodyKey for TestKey {
    fn number(&self) -> u64 {
        self.number
    }

    fn seal(&self, bound: &[u8], body: &mut [u8]) -> ([u8; NONCE_BYTES], [u8; TAG_BYTES]) {
        let mut nonce = [0; NONCE_BYTES];
        aws_lc_rs::rand::fill(&mut nonce).unwrap();
        self.nonces.lock().push(nonce);
        let sealing = Nonce::assume_unique_for_key(nonce);
        let tag = self
            .key
            .seal_in_place_separate_tag(sealing, Aad::from(bound), body);
        (nonce, tag.unwrap().as_ref().try_into().unwrap())
    }

    fn open(&self, nonce: &[u8; NONCE_BYTES], bound: &[u8], body: &mut [u8]) -> bool {
        let nonce = Nonce::assume_unique_for_key(*nonce);
        self.key
            .open_in_place(nonce, Aad::from(bound), body)
            .is_ok()
    }
}

/// The keys of a store. A test takes some away.
#[derive(Default)]
pub(super) struct TestKeys {
    keys: Mutex<BTreeMap<u64, Arc<TestKey>>>,
    /// The first key that counts as new, and the position of the journal then.
    renewed: Mutex<(u64, Position)>,
    highest: Mutex<u64>,
}

impl std::fmt::Debug for TestKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TestKeys")
    }
}

impl TestKeys {
    /// Keys of a store that has none yet.
    pub(super) fn cipher() -> (Arc<Self>, Cipher) {
        let keys = Arc::new(Self::default());
        (Arc::clone(&keys), Cipher(keys))
    }

    /// Makes a new key for all new bodies.
    pub(super) fn rotate(&self, at: Position) {
        let mut highest = self.highest.lock();
        *highest += 1;
        self.keys
            .lock()
            .insert(*highest, Arc::new(TestKey::new(*highest)));
        *self.renewed.lock() = (*highest, at);
    }

    pub(super) fn destroy(&self, number: u64) {
        self.keys.lock().remove(&number);
    }

    /// All nonces that were used with a key.
    pub(super) fn nonces(&self, number: u64) -> Vec<[u8; NONCE_BYTES]> {
        self.keys.lock()[&number].nonces.lock().clone()
    }
}

impl BodyCipher for TestKeys {
    fn newest(&self, _log: LogId) -> Option<Arc<dyn BodyKey>> {
        let keys = self.keys.lock();
        keys.values().next_back().map(|key| Arc::clone(key) as _)
    }

    fn by_number(&self, number: u64) -> Option<Arc<dyn BodyKey>> {
        self.keys
            .lock()
            .get(&number)
            .map(|key| Arc::clone(key) as _)
    }

    fn highest(&self) -> u64 {
        *self.highest.lock()
    }

    fn has_made(&self, number: u64) -> bool {
        (1..=self.highest()).contains(&number)
    }

    fn begin(&self, end: Position) -> io::Result<()> {
        if self.highest() == 0 {
            self.rotate(end);
        }
        Ok(())
    }

    fn load(&self) -> Result<(), String> {
        Ok(())
    }

    fn prepare(&self, _logs: &[(LogId, &str)], _exist: LogsExist) -> io::Result<()> {
        Ok(())
    }

    fn renewed(&self) -> (u64, Position) {
        *self.renewed.lock()
    }
}
