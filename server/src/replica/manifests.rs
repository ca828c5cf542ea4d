//! Manifests of a replica have the bytes of manifests of backups.

use std::sync::Arc;

use wald_bucket::ManifestFormat;
use wald_storage::BackupManifest;

use crate::backups::keys::{SigningKey, TrustedKeys, manifest_file, read_manifest};

/// The encoding of `wald_proto::backup`.
#[derive(Default)]
pub(crate) struct ProtoManifests {
    /// Signs new manifests.
    pub(crate) signing_key: Option<Arc<SigningKey>>,
    /// The keys that must have signed a manifest, if there are any.
    pub(crate) trusted: TrustedKeys,
}

impl ManifestFormat for ProtoManifests {
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8> {
        manifest_file(manifest, self.signing_key.as_deref())
    }

    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String> {
        let manifest = read_manifest(bytes)?;
        self.trusted.admit(&manifest)?;
        Ok(manifest)
    }
}
