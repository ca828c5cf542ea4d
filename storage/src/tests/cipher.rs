//! The keys of the engine's tests: in memory, and with the cipher of the server.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, OnceLock};

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, Nonce, UnboundKey};
use parking_lot::Mutex;

use crate::api::cipher::{BodyCipher, BodyKey, Cipher, LogsExist, NONCE_BYTES, TAG_BYTES};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, Lsn, Position};
use crate::format::compress;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use crate::format::life::Life;
use crate::format::pack;
use crate::format::sealed::{BodyPlace, SEALED, SEALED_BYTES, SealedBody};
use crate::index::run_file;

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

/// Offsets at which records with this data lie in a segment or a run, encrypted or not. A changed byte there changes the
/// record. Compressed bodies are left out.
pub(super) fn places_of(file: &[u8], data: &[u8]) -> Vec<usize> {
    let within = |(at, bytes): (usize, &[u8])| {
        let parts = bytes.windows(data.len()).enumerate();
        let found = parts.filter(|(_, part)| *part == data);
        found.map(|(offset, _)| at + offset).collect::<Vec<_>>()
    };
    let opened = opened_in(file);
    let opened = opened.iter().filter(|body| !body.was_compressed);
    let opened = opened.map(|body| (body.at, &body.plain[..]));
    std::iter::once((0, file))
        .chain(opened)
        .flat_map(within)
        .collect()
}

/// An encrypted body of a file that opens with the keys of [`of_environment`].
pub(super) struct OpenedBody {
    /// Offset of its encrypted bytes in the file.
    at: usize,
    was_compressed: bool,
    pub(super) plain: Vec<u8>,
}

/// The encrypted bodies of a segment or a run that open; none without encryption.
pub(super) fn opened_in(file: &[u8]) -> Vec<OpenedBody> {
    let mut found = Vec::new();
    let (Some(cipher), Ok(life)) = (of_environment(), Life::decode(file)) else {
        return found;
    };
    let mut at = usize::try_from(LIFE_BYTES).unwrap();
    while at + HEADER_BYTES <= file.len() {
        let header = frame::decode_header(&file[at..], life.salt);
        let end = header.map(|header| at + usize::try_from(header.frame_len()).unwrap());
        let (Some(header), Some(end)) = (header, end.filter(|end| *end <= file.len())) else {
            at += 8;
            continue;
        };
        for (offset, bound, stored) in bodies_of(&header, &file[at..end]) {
            let sealed = SealedBody::parse(stored).filter(|_| bound.codec & SEALED != 0);
            let opened = sealed.and_then(|sealed| sealed.open(Some(&*cipher), &bound).ok());
            let codec = bound.codec & !SEALED;
            let plain = opened.and_then(|opened| {
                compress::decompress(codec, &opened).map(|plain| plain.into_owned())
            });
            found.extend(plain.map(|plain| OpenedBody {
                at: at + offset + SEALED_BYTES - TAG_BYTES,
                was_compressed: codec != compress::PLAIN,
                plain,
            }));
        }
        at = end;
    }
    found
}

/// The good stored bodies with records in a frame: offset in the frame, place, bytes.
fn bodies_of<'f>(header: &FrameHeader, frame: &'f [u8]) -> Vec<(usize, BodyPlace, &'f [u8])> {
    let place = |first_lsn: Lsn, count: u32, codec: u8| BodyPlace {
        log: header.log_id,
        first_lsn,
        count,
        codec,
    };
    let at = header.header_len as usize;
    match header.kind {
        FrameKind::Batch => {
            let stored = frame::verified_body(frame, header);
            let place = place(header.first_lsn, header.count, header.codec());
            stored
                .map(|stored| (at, place, stored))
                .into_iter()
                .collect()
        }
        FrameKind::Pack => {
            let pieces = pack::pieces(frame, header).unwrap_or_default();
            let stored = pieces.iter().filter_map(|piece| {
                let place = place(piece.first_lsn, piece.count, piece.codec);
                let stored = run_file::stored(frame, at, piece)?;
                Some((at + piece.offset as usize, place, stored))
            });
            stored.collect()
        }
        _ => Vec::new(),
    }
}

/// One key in memory.
pub(super) struct TestKey {
    number: u64,
    key: LessSafeKey,
    nonces: Mutex<Vec<[u8; NONCE_BYTES]>>,
    /// Whether nonces count instead of being drawn, so that equal work leaves equal bytes.
    counts: bool,
}

impl TestKey {
    fn new(number: u64, counts: bool) -> Self {
        // The same number gives the same key in each process, so that directories can be opened again.
        let bytes = [u8::try_from(number % 251).unwrap(); 32];
        let key = UnboundKey::new(&AES_256_GCM_SIV, &bytes).unwrap();
        Self {
            number,
            key: LessSafeKey::new(key),
            nonces: Mutex::default(),
            counts,
        }
    }
}

impl BodyKey for TestKey {
    fn number(&self) -> u64 {
        self.number
    }

    fn seal(&self, bound: &[u8], body: &mut [u8]) -> ([u8; NONCE_BYTES], [u8; TAG_BYTES]) {
        let mut nonce = [0; NONCE_BYTES];
        let mut nonces = self.nonces.lock();
        match self.counts {
            true => {
                let count = u64::try_from(nonces.len()).unwrap();
                nonce[..8].copy_from_slice(&count.to_le_bytes());
            }
            false => aws_lc_rs::rand::fill(&mut nonce).unwrap(),
        }
        nonces.push(nonce);
        drop(nonces);
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
    counts: bool,
    /// The logs for which keys were prepared since the start, if only they have one.
    prepared: Option<Mutex<HashSet<LogId>>>,
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

    /// Keys whose nonces count.
    pub(super) fn counting() -> Cipher {
        Cipher(Arc::new(Self {
            counts: true,
            ..Self::default()
        }))
    }

    /// Keys that a log has only if they were prepared for it, as keys of single logs are.
    pub(super) fn prepared() -> Cipher {
        Cipher(Arc::new(Self {
            prepared: Some(Mutex::default()),
            ..Self::default()
        }))
    }

    /// Makes a new key for all new bodies.
    pub(super) fn rotate(&self, at: Position) {
        let mut highest = self.highest.lock();
        *highest += 1;
        self.keys
            .lock()
            .insert(*highest, Arc::new(TestKey::new(*highest, self.counts)));
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
    fn newest(&self, log: LogId) -> Option<Arc<dyn BodyKey>> {
        if let Some(prepared) = &self.prepared
            && !prepared.lock().contains(&log)
        {
            return None;
        }
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
        if let Some(prepared) = &self.prepared {
            prepared.lock().clear();
        }
        Ok(())
    }

    fn prepare(&self, logs: &[(LogId, &str)], _exist: LogsExist) -> io::Result<()> {
        if let Some(prepared) = &self.prepared {
            prepared.lock().extend(logs.iter().map(|(id, _)| *id));
        }
        Ok(())
    }

    fn renewed(&self) -> (u64, Position) {
        *self.renewed.lock()
    }
}
