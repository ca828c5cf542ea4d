//! Keys of manifests: the key that signs the manifests of this daemon, and the keys whose signatures a command or a stand-by
//! trusts.
//!
//! A signature covers the bytes of a manifest, and these have the digests and sizes of all content, the id of the store, the
//! position and the time. It does not show that a manifest is the newest one.

use std::fmt;
use std::path::Path;

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use serde_json::{Value, json};
use wald_proto::backup::{self, KEY_BYTES, ManifestSignature};
use wald_storage::BackupManifest;
use zeroize::Zeroizing;

use crate::config::Config;
use crate::convert;
use crate::host::hide_memory;
use crate::reload::{Fault, Secrecy, read_file, read_key_file};

/// Maximum size of a file with a key, bytes.
const MOST_BYTES: u64 = 64 << 10;
/// Bytes of a public key before its 32 last ones, in the form SubjectPublicKeyInfo: the algorithm is Ed25519.
const PUBLIC_HEAD: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
/// The setting of the private key.
pub(super) const SIGNING_KEY: &str = "backup_signing_key_file";
/// The setting of the trusted keys.
const TRUST: &str = "backup_trust";

/// A public key of Ed25519. Its 64 hexadecimal digits are its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublicKey([u8; KEY_BYTES]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0.iter()).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl PublicKey {
    /// Reads the digits of a key.
    fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != 2 * KEY_BYTES || !text.bytes().all(is_digit) {
            return None;
        }
        let pairs = text.as_bytes().chunks(2);
        let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Option<Vec<u8>> = pairs.map(byte).collect();
        bytes?.try_into().ok().map(Self)
    }

    /// Reads a file with a key in PEM, as `openssl pkey -pubout` writes it.
    fn read(path: &Path) -> Result<Self, Fault> {
        let bytes = read_file(TRUST, path, MOST_BYTES, Secrecy::Public)?;
        let key = SubjectPublicKeyInfoDer::from_pem_slice(&bytes).ok();
        let key = key.and_then(|key| key.strip_prefix(&PUBLIC_HEAD)?.try_into().ok());
        let why = "expected a public key of Ed25519 in PEM, as `wald backup-key public` prints it";
        key.map(Self).ok_or_else(|| Fault::new(TRUST, path, why))
    }

    /// The key in PEM.
    pub(super) fn pem(&self) -> String {
        pem("PUBLIC KEY", &[&PUBLIC_HEAD[..], &self.0].concat())
    }
}

/// A key or a public key has no more than one line of base64.
fn pem(label: &str, der: &[u8]) -> String {
    let text = Zeroizing::new(STANDARD.encode(der));
    // In one allocation: a text that grows leaves its earlier bytes behind.
    let (begin, end) = ("-----BEGIN ", "\n-----END ");
    [begin, label, "-----\n", &text, end, label, "-----\n"].concat()
}

/// The private key that signs manifests.
pub(crate) struct SigningKey(Ed25519KeyPair);

impl SigningKey {
    /// Reads the key that the settings name; `None` without one.
    ///
    /// # Errors
    /// If the file cannot be read, every user can read it, or it has no private key of Ed25519 in PEM (PKCS#8).
    pub(crate) fn of(config: &Config) -> Result<Option<Self>, Fault> {
        let path = &config.backup_signing_key_file;
        (!path.is_empty())
            .then(|| Self::read(Path::new(path)))
            .transpose()
    }

    pub(super) fn read(path: &Path) -> Result<Self, Fault> {
        hide_memory();
        let bytes = read_key_file(SIGNING_KEY, path, MOST_BYTES)?;
        let key = PrivatePkcs8KeyDer::from_pem_slice(&bytes).ok();
        let pair = key.map(Zeroizing::new).and_then(|key| {
            Ed25519KeyPair::from_pkcs8_maybe_unchecked(key.secret_pkcs8_der()).ok()
        });
        let why =
            "expected a private key of Ed25519 in PEM (PKCS#8), as `wald backup-key new` makes it";
        pair.map(Self)
            .ok_or_else(|| Fault::new(SIGNING_KEY, path, why))
    }

    /// Draws a key. Returns it in PEM, too.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(super) fn draw() -> Result<(Self, Zeroizing<String>), aws_lc_rs::error::Unspecified> {
        hide_memory();
        let pair = Ed25519KeyPair::generate()?;
        let text = pem("PRIVATE KEY", pair.to_pkcs8v1()?.as_ref());
        Ok((Self(pair), Zeroizing::new(text)))
    }

    pub(crate) fn public(&self) -> PublicKey {
        let bytes = self.0.public_key().as_ref();
        // A public key of Ed25519 has 32 bytes.
        PublicKey(bytes.try_into().unwrap_or_default())
    }

    fn sign(&self, bytes: &[u8]) -> ManifestSignature {
        let signature = self.0.sign(bytes);
        let mut block = ManifestSignature {
            public_key: self.public().0,
            signature: [0; backup::SIGNATURE_BYTES],
        };
        block.signature.copy_from_slice(signature.as_ref());
        block
    }
}

/// The bytes of a manifest file, signed if there is a key.
pub(crate) fn manifest_file(manifest: &BackupManifest, key: Option<&SigningKey>) -> Vec<u8> {
    let bytes = backup::encode(&convert::proto_manifest(manifest));
    let signature = key.map(|key| key.sign(&bytes));
    backup::seal(bytes, signature.as_ref())
}

/// The keys whose signatures are trusted. Without any, every manifest is taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct TrustedKeys(Vec<PublicKey>);

impl TrustedKeys {
    /// Reads the keys that the settings name.
    ///
    /// # Errors
    /// If a name is empty, if a file cannot be read, or if it has no public key of Ed25519 in PEM.
    pub(crate) fn of(config: &Config) -> Result<Self, Fault> {
        if config.backup_trust.is_empty() {
            return Ok(Self::default());
        }
        let names = config.backup_trust.split(',').map(str::trim);
        let key = |name: &str| {
            PublicKey::parse(name).map_or_else(|| PublicKey::read(Path::new(name)), Ok)
        };
        Ok(Self(names.map(key).collect::<Result<_, _>>()?))
    }

    /// Whether a manifest needs the signature of one of these keys.
    pub(crate) fn asks(&self) -> bool {
        !self.0.is_empty()
    }

    /// Refuses a manifest that needs the signature of a trusted key and has none.
    ///
    /// # Errors
    /// With the reason.
    pub(crate) fn admit(&self, manifest: &BackupManifest) -> Result<(), String> {
        match manifest.signed_by.map(PublicKey) {
            _ if !self.asks() => Ok(()),
            Some(key) if self.0.contains(&key) => Ok(()),
            Some(key) => Err(format!(
                "the manifest is signed by {key}, which is not trusted"
            )),
            None => {
                Err("the manifest is not signed, and only a trusted key may sign it".to_owned())
            }
        }
    }
}

/// Reads a manifest file, and verifies its signature if it has one. [`TrustedKeys::admit`] decides whether the key is trusted.
///
/// # Errors
/// If it is damaged, if it is of a newer version, if no store has such files, or if its bytes are not those that were signed.
pub(crate) fn read_manifest(bytes: &[u8]) -> Result<BackupManifest, String> {
    let file = backup::decode(bytes).map_err(|bad| bad.to_string())?;
    file.check()
        .map_err(|what| format!("the manifest: {what}"))?;
    let manifest = convert::kept_manifest(&file.manifest);
    let mut manifest = manifest.ok_or("the manifest is not one of a backup")?;
    if let Some(block) = &file.signature {
        let key = UnparsedPublicKey::new(&ED25519, block.public_key);
        if key.verify(file.signed, &block.signature).is_err() {
            return Err(format!(
                "the manifest was changed: the signature by {} is of other bytes",
                PublicKey(block.public_key)
            ));
        }
        manifest.signed_by = Some(block.public_key);
    }
    Ok(manifest)
}

/// The signature of a manifest in words, behind a semicolon; nothing if it has none. A signature does not show that a manifest
/// is the newest one, or of the store that the operator means, so the words have its time and its store.
pub(crate) fn signed_in_words(manifest: &BackupManifest, trusted: &TrustedKeys) -> String {
    let Some(key) = manifest.signed_by.map(PublicKey) else {
        return String::new();
    };
    let is_trusted = match trusted.asks() {
        true => "trusted",
        false => "not trusted",
    };
    let time = convert::rfc3339(manifest.created);
    format!(
        "; signed by {key}, {is_trusted}, for position {} at {time} of store {}",
        manifest.position,
        convert::uuid(manifest.store_id)
    )
}

/// The signature of a manifest in JSON.
pub(crate) fn signature(manifest: &BackupManifest, trusted: &TrustedKeys) -> Value {
    let key = manifest.signed_by.map(PublicKey);
    json!({
        "key": key.map(|key| key.to_string()),
        "trusted": key.is_some() && trusted.asks(),
        "store_id": convert::uuid(manifest.store_id),
        "position": manifest.position.get(),
        "create_time": convert::rfc3339(manifest.created),
    })
}
