//! Manifests of a replica have the bytes of manifests of backups.

use wald_bucket::ManifestFormat;
use wald_proto::backup;
use wald_storage::BackupManifest;

use crate::convert;

/// The encoding of `wald_proto::backup`.
pub(crate) struct ProtoManifests;

impl ManifestFormat for ProtoManifests {
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8> {
        backup::encode(&convert::proto_manifest(manifest))
    }

    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String> {
        let manifest = backup::decode(bytes).map_err(|bad| bad.to_string())?;
        backup::check(&manifest)?;
        let kept = convert::kept_manifest(&manifest);
        kept.ok_or_else(|| "it is not one of a store".to_owned())
    }
}
