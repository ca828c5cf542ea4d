//! Backups in a bucket: the same names as in a directory, below a prefix.
//!
//! ```text
//! PREFIX/WRITER                   record of the one writer
//! PREFIX/backups/<id>.manifest    created only if absent, after all content
//! PREFIX/files/<64 hex>           content, by its digest
//! ```
//!
//! A run first probes the bucket, then becomes the writer. It checks before each manifest and each removal that it still is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use wald_bucket::{
    Bucket, BucketErrorKind, BucketSettings, BucketUrl, Hold, NEW_ENDPOINT_ROUNDS, Put, ROUNDS,
    Taken, Tally, Upload, Uploads, WriteCondition, probe,
};
use wald_proto::backup::{DIGEST_BYTES, FILES, LARGEST_MANIFEST, MANIFESTS};

use super::place::{BackupPlace, Doing, NO_MATCH};
use super::shelf::{digest_of, hex};
use crate::output::say;

/// Name of the record of the writer.
const WRITER: &str = "WRITER";
/// Time after which a silent writer counts as dead.
const WRITER_TTL: Duration = Duration::from_secs(30);

/// The bucket.
pub(crate) struct InBucket {
    bucket: Bucket,
    /// The right to write; `None` if it was opened to look at it.
    hold: Option<Hold>,
    uploads: Uploads,
    receiving: Option<Upload>,
}

impl InBucket {
    /// Opens it to look at it.
    pub(crate) fn look(
        url: &BucketUrl,
        settings: &BucketSettings,
        tally: &Arc<Tally>,
    ) -> Result<Self> {
        let bucket = Bucket::open(url, settings, Arc::clone(tally) as _)?;
        Ok(Self {
            uploads: Uploads::new(bucket.clone()),
            bucket,
            hold: None,
            receiving: None,
        })
    }

    /// Opens it for changes: tests the bucket, and becomes the writer.
    pub(crate) async fn open(
        url: &BucketUrl,
        settings: &BucketSettings,
        tally: &Arc<Tally>,
    ) -> Result<Self> {
        let mut opened = Self::look(url, settings, tally)?;
        let bucket = &opened.bucket;
        probe(bucket, ROUNDS).await?;
        if bucket.list(MANIFESTS).await?.is_empty() {
            probe(bucket, NEW_ENDPOINT_ROUNDS - ROUNDS).await?;
        }
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        let name = format!("walctl of process {} on {host}", std::process::id());
        let mut waits = |other: &str| {
            say(&format!(
                "{url}: {other} writes there or has died; waiting for up to {} seconds",
                WRITER_TTL.as_secs() * 7 / 6
            ));
        };
        opened.hold = match Hold::take(bucket, WRITER, &name, WRITER_TTL, &mut waits).await? {
            Taken::Mine(hold) => Some(hold),
            Taken::InUse(other) => bail!("{other} writes to {url}; wait for its end"),
        };
        Ok(opened)
    }

    /// The right to write.
    fn hold(&self) -> Result<&Hold> {
        let place = self.bucket.place();
        self.hold
            .as_ref()
            .with_context(|| format!("{place} was opened to look at it only"))
    }

    async fn remove(&self, paths: Vec<String>) -> Result<()> {
        Ok(self.hold()?.remove(&paths).await?)
    }
}

impl BackupPlace for InBucket {
    fn name(&self) -> String {
        self.bucket.place().to_owned()
    }

    fn manifest_name(&self, file: &str) -> String {
        format!("{}/{MANIFESTS}/{file}", self.bucket.place())
    }

    fn content(&self) -> Doing<'_, BTreeMap<Bytes, u64>> {
        Box::pin(async {
            let found = self.bucket.list(FILES).await?.into_iter();
            let content = found.filter_map(|file| Some((digest_of(&file.name)?, file.bytes)));
            Ok(content.collect())
        })
    }

    fn manifests(&self) -> Doing<'_, Vec<String>> {
        Box::pin(async {
            let found = self.bucket.list(MANIFESTS).await?;
            Ok(found.into_iter().map(|file| file.name).collect())
        })
    }

    fn read_manifest<'a>(&'a self, file: &'a str) -> Doing<'a, Result<Vec<u8>, String>> {
        Box::pin(async move {
            let path = format!("{MANIFESTS}/{file}");
            match self.bucket.read(&path, LARGEST_MANIFEST).await {
                Ok(Some((bytes, _))) => Ok(Ok(bytes.to_vec())),
                Ok(None) => Ok(Err("it was removed meanwhile".to_owned())),
                Err(error) if error.kind() == BucketErrorKind::Damaged => {
                    Ok(Err(error.to_string()))
                }
                Err(error) => Err(error.into()),
            }
        })
    }

    fn begin(&mut self, digest: Bytes, bytes: u64) -> Doing<'_, ()> {
        Box::pin(async move {
            let path = format!("{FILES}/{}", hex(&digest));
            let digest = <[u8; DIGEST_BYTES]>::try_from(&*digest);
            let digest = digest.with_context(|| format!("a digest has {DIGEST_BYTES} bytes"))?;
            self.receiving = Some(self.uploads.begin(path, bytes, digest));
            Ok(())
        })
    }

    fn write<'a>(&'a mut self, data: &'a [u8]) -> Doing<'a, ()> {
        Box::pin(async move {
            if let Some(file) = &mut self.receiving {
                self.uploads.push(file, data).await?;
            }
            Ok(())
        })
    }

    fn end(&mut self) -> Doing<'_, ()> {
        Box::pin(async {
            let Some(file) = self.receiving.take() else {
                return Ok(());
            };
            match self.uploads.end(file).await {
                Err(error) if error.kind() == BucketErrorKind::Damaged => bail!(NO_MATCH),
                ended => Ok(ended?),
            }
        })
    }

    fn settle(&mut self) -> Doing<'_, ()> {
        Box::pin(async { Ok(self.uploads.finish().await?) })
    }

    fn create_manifest<'a>(&'a mut self, file: &'a str, manifest: Vec<u8>) -> Doing<'a, ()> {
        Box::pin(async move {
            let path = format!("{MANIFESTS}/{file}");
            self.hold()?.check()?;
            let put = self
                .bucket
                .put_if(&path, manifest.into(), WriteCondition::Absent);
            if put.await? == Put::Lost {
                bail!(
                    "{} exists already; nothing was replaced",
                    self.manifest_name(file)
                );
            }
            // Another writer may have removed content while the request was on its way.
            if let Err(lost) = self.hold()?.check() {
                self.bucket.remove(&[path]).await?;
                return Err(lost.into());
            }
            Ok(())
        })
    }

    fn remove_manifests<'a>(&'a self, files: &'a [String]) -> Doing<'a, ()> {
        let paths = files.iter().map(|file| format!("{MANIFESTS}/{file}"));
        Box::pin(self.remove(paths.collect()))
    }

    fn remove_content<'a>(&'a self, digests: &'a [Bytes]) -> Doing<'a, ()> {
        let paths = digests
            .iter()
            .map(|digest| format!("{FILES}/{}", hex(digest)));
        Box::pin(self.remove(paths.collect()))
    }

    fn close(self: Box<Self>) -> Doing<'static, ()> {
        Box::pin(async {
            if let Some(hold) = self.hold {
                hold.release().await?;
            }
            Ok(())
        })
    }
}
