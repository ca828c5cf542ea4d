//! A shelf of backups: content by its digest, one manifest for each backup. It lies in a directory or in a bucket.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::{Result, bail};
use bytes::Bytes;
use wald_client::proto::BackupManifest;
use wald_proto::backup::{
    self, DIGEST_BYTES, MANIFEST_SUFFIX, ManifestFile, ManifestSignature, OLD_DIGEST_BYTES,
};

use super::directory::BackupDirectory;
use super::place::BackupPlace;
use crate::args::BucketArgs;
use crate::exit::Usage;
use crate::output::say;

/// A backup that is there.
pub(crate) struct KeptBackup {
    pub(crate) id: String,
    pub(crate) manifest: BackupManifest,
    /// The public key whose signature it has, as digits. The signature was not verified.
    pub(crate) signed_by: Option<String>,
}

impl KeptBackup {
    fn new(id: &str, file: ManifestFile<'_>) -> Self {
        let key = |signature: ManifestSignature| hex(&signature.public_key);
        Self {
            id: id.to_owned(),
            signed_by: file.signature.map(key),
            manifest: file.manifest,
        }
    }

    /// Microseconds since the Unix epoch.
    pub(crate) fn create_time(&self) -> i64 {
        let time = self.manifest.create_time.as_ref();
        time.map_or(0, |time| {
            time.seconds
                .saturating_mul(1_000_000)
                .saturating_add(i64::from(time.nanos / 1000))
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        let files = self.manifest.files.iter();
        files.fold(0, |sum, file| sum.saturating_add(file.file_bytes))
    }

    /// The key that sorts the backups of a directory, as in `wald`: positions that the store
    /// reports come first, since its clock may have gone back.
    fn order(&self) -> (u64, u64, i64, &str) {
        let manifest = &self.manifest;
        let position = manifest.position.unwrap_or(0);
        let time = self.create_time();
        (manifest.recovery_epoch, position, time, &self.id)
    }
}

/// The backups that are there.
pub(crate) struct FoundBackups {
    /// The oldest first.
    pub(crate) kept: Vec<KeptBackup>,
    /// Manifests that cannot be read, each as a sentence that names the remedy.
    pub(crate) bad: Vec<String>,
}

impl FoundBackups {
    /// Reports on stderr the manifests that cannot be read.
    pub(crate) fn warn(self) -> Self {
        for bad in &self.bad {
            say(&format!("warning: {bad}"));
        }
        self
    }
}

/// A shelf, with its content when it was opened.
pub(crate) struct Shelf {
    place: Box<dyn BackupPlace>,
    content: BTreeMap<Bytes, u64>,
    /// The file that arrives: its expected and its received bytes.
    receiving: (u64, u64),
    #[cfg(feature = "object")]
    tally: std::sync::Arc<wald_bucket::Tally>,
}

impl Shelf {
    /// Opens it to look at it.
    pub(crate) async fn look(place: &Path, bucket: &BucketArgs) -> Result<Self> {
        Self::new(place, bucket, false).await
    }

    /// Opens it for changes, and creates it if it does not exist.
    pub(crate) async fn open(place: &Path, bucket: &BucketArgs) -> Result<Self> {
        Self::new(place, bucket, true).await
    }

    async fn new(place: &Path, bucket: &BucketArgs, writes: bool) -> Result<Self> {
        #[cfg(feature = "object")]
        let tally = std::sync::Arc::default();
        let url = place.to_str().filter(|place| wald_bucket::is_url(place));
        let place: Box<dyn BackupPlace> = match url {
            #[cfg(feature = "object")]
            Some(url) => {
                use super::bucket::InBucket;
                let url = url
                    .parse()
                    .map_err(|bad: wald_bucket::BadUrl| Usage(bad.to_string()))?;
                let settings = bucket.settings();
                match writes {
                    true => Box::new(InBucket::open(&url, &settings, &tally).await?),
                    false => Box::new(InBucket::look(&url, &settings, &tally)?),
                }
            }
            #[cfg(not(feature = "object"))]
            Some(url) => {
                let _ = bucket;
                return Err(Usage(format!("{url}: {}", wald_bucket::NOT_BUILT)).into());
            }
            None if writes => Box::new(BackupDirectory::open(place)?),
            None => Box::new(BackupDirectory::look(place)?),
        };
        // A list needs no content.
        let content = match writes {
            true => place.content().await?,
            false => BTreeMap::new(),
        };
        Ok(Self {
            place,
            content,
            receiving: (0, 0),
            #[cfg(feature = "object")]
            tally,
        })
    }

    /// Text for messages: a path or a URL.
    pub(crate) fn name(&self) -> String {
        self.place.name()
    }

    /// Requests and bytes of this run to a bucket; `None` without a bucket.
    pub(crate) fn requests(&self) -> Option<serde_json::Value> {
        #[cfg(feature = "object")]
        {
            use wald_bucket::Direction;
            let all = self.tally.requests();
            let by_name = all.iter().map(|(op, result, count)| {
                serde_json::json!({"op": op.name(), "result": result, "count": count})
            });
            (!all.is_empty()).then(|| {
                serde_json::json!({
                    "requests": by_name.collect::<Vec<_>>(),
                    "sent_bytes": self.tally.bytes(Direction::Sent),
                    "received_bytes": self.tally.bytes(Direction::Received),
                })
            })
        }
        #[cfg(not(feature = "object"))]
        None
    }

    /// Digests of the content that is there. Digests of older versions are left out: two contents can have one.
    pub(crate) fn known(&self) -> Vec<Bytes> {
        let digests = self.content.keys();
        let new = digests.filter(|digest| digest.len() == DIGEST_BYTES);
        new.cloned().collect()
    }

    /// Bytes of the content with a digest, if it is there.
    pub(crate) fn content_bytes(&self, digest: &Bytes) -> Option<u64> {
        self.content.get(digest).copied()
    }

    /// Content that is known to be bad is not counted on again.
    pub(crate) async fn forget(&self, digest: &Bytes) -> Result<()> {
        self.place
            .remove_content(std::slice::from_ref(digest))
            .await
    }

    /// Begins a file.
    pub(crate) async fn begin(&mut self, digest: &Bytes, bytes: u64) -> Result<()> {
        self.receiving = (bytes, 0);
        self.place.begin(digest.clone(), bytes).await
    }

    /// Takes the next piece of the file.
    pub(crate) async fn take(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let (bytes, received) = self.receiving;
        if offset != received || data.len() as u64 > bytes - received {
            bail!("the server sends content that its manifest does not have");
        }
        self.receiving.1 += data.len() as u64;
        self.place.write(data).await
    }

    /// All of the file is there.
    pub(crate) async fn end(&mut self) -> Result<()> {
        self.place.end().await
    }

    /// All content of the manifest is there: from now on it is a backup. `bytes`: the manifest file, as the server
    /// sent it.
    pub(crate) async fn keep(&mut self, bytes: Bytes) -> Result<KeptBackup> {
        self.place.settle().await?;
        let mut kept = KeptBackup::new("", backup::decode(&bytes)?);
        let position = kept.manifest.position.unwrap_or(0);
        kept.id = format!("{}-{position}", compact_time(kept.create_time()));
        self.place
            .create_manifest(&format!("{}{MANIFEST_SUFFIX}", kept.id), bytes.to_vec())
            .await?;
        Ok(kept)
    }

    /// The backups there are.
    pub(crate) async fn kept(&self) -> Result<FoundBackups> {
        let (mut kept, mut bad) = (Vec::new(), Vec::new());
        for name in self.place.manifests().await? {
            let Some(id) = name.strip_suffix(MANIFEST_SUFFIX) else {
                continue;
            };
            let read = self.place.read_manifest(&name).await?;
            let decoded = read.and_then(|bytes| {
                let file = backup::decode(&bytes).map_err(|bad| bad.to_string())?;
                Ok(KeptBackup::new(id, file))
            });
            match decoded {
                Ok(found) => kept.push(found),
                Err(what) => bad.push(format!(
                    "{}: {what}; it is passed over, and no content is removed as long as it is \
                     there: remove it if that backup is not needed",
                    self.place.manifest_name(&name)
                )),
            }
        }
        kept.sort_by(|a, b| a.order().cmp(&b.order()));
        Ok(FoundBackups { kept, bad })
    }

    /// Removes all but the newest backups, but never the one that was just taken. Then removes
    /// the content that no remaining backup has, unless a manifest cannot be read, which may
    /// name it. Returns the removed backups, and the number of removed bytes.
    pub(crate) async fn prune(&self, keep: u64, taken: Option<&str>) -> Result<(Vec<String>, u64)> {
        let FoundBackups { kept, bad } = self.kept().await?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        let mut excess = kept.len().saturating_sub(keep);
        let (removed, kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| {
            let goes = excess > 0 && taken != Some(kept.id.as_str());
            excess -= usize::from(goes);
            goes
        });
        let names = removed
            .iter()
            .map(|kept| format!("{}{MANIFEST_SUFFIX}", kept.id));
        // No manifest may come back that names the files that are removed next.
        self.place
            .remove_manifests(&names.collect::<Vec<_>>())
            .await?;
        let used: HashSet<&Bytes> = kept
            .iter()
            .flat_map(|kept| kept.manifest.files.iter().map(|file| &file.digest))
            .collect();
        let mut freed = 0;
        if bad.is_empty() {
            let mut unused = self.place.content().await?;
            unused.retain(|digest, _| !used.contains(digest));
            freed = unused.values().sum();
            let unused: Vec<Bytes> = unused.into_keys().collect();
            self.place.remove_content(&unused).await?;
        }
        Ok((removed.into_iter().map(|kept| kept.id).collect(), freed))
    }

    /// Lets the next writer in.
    pub(crate) async fn close(self) -> Result<()> {
        self.place.close().await
    }
}

/// The name of content with a digest.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The digest that a name of content stands for.
pub(crate) fn digest_of(name: &str) -> Option<Bytes> {
    let lower = |c: &u8| c.is_ascii_digit() || (b'a'..=b'f').contains(c);
    let is_length = [DIGEST_BYTES, OLD_DIGEST_BYTES].contains(&(name.len() / 2));
    if !is_length || !name.len().is_multiple_of(2) || !name.bytes().all(|c| lower(&c)) {
        return None;
    }
    let pairs = name.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.map(byte).collect()
}

/// A time that sorts as a name: 20261122T003012.000000Z.
fn compact_time(micros: i64) -> String {
    crate::output::rfc3339(micros).replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_digests_or_of_nothing() {
        for digest in [&[0xab; DIGEST_BYTES][..], &0x00ff_u128.to_be_bytes()] {
            let name = hex(digest);
            assert_eq!(digest_of(&name).unwrap(), digest);
            assert!(digest_of(&name.to_uppercase()).is_none());
            assert!(digest_of(&name[1..]).is_none());
            assert!(digest_of(&name[2..]).is_none());
            assert!(digest_of(&format!("+{}", &name[1..])).is_none());
        }
    }

    #[test]
    fn ids_sort_by_time() {
        assert_eq!(compact_time(1_500_000), "19700101T000001.500000Z");
    }
}
