//! The files of a replica: content by digest, manifests, and the removal of old ones.
//!
//! ```text
//! shards/0/content/<term>/<digest>    by the owner of this term
//! shards/0/manifests/<term>-<n>       created if absent, after its content
//! row of the tail                     names the newest manifest; only then it counts
//! ```
//!
//! An owner counts only on content of the newest manifest, which no earlier owner removes, and on content of its own term,
//! in which no other owner removes anything. So a removal that arrives late hurts nobody.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use wald_storage::{Backup, BackupManifest, BackupPart, ContentDigest, Position};

use super::error::ShipError;
use super::{DOWN_AFTER, ManifestFormat, Ship, ShipEvent};
use crate::bucket::{Bucket, Put, WriteCondition};
use crate::error::{BucketError, BucketErrorKind};
use crate::known_bad;
use crate::known_bad::ShipMistake;
use crate::tail::{ReplicaTail, TailError, TailErrorKind};
use crate::upload::{Upload, Uploads};

/// Directory of content, with a directory for each term.
pub(super) const CONTENT: &str = "shards/0/content";
/// Directory of manifests.
pub(super) const MANIFESTS: &str = "shards/0/manifests";
/// Maximum bytes of a manifest. A file takes about 80 of them, so this is 800,000 files; one list may have a million objects.
/// Logs are in files: their number does not count.
pub(super) const LARGEST_MANIFEST: u64 = 64 << 20;
/// Number of sealed segments that are uploaded without a pause.
const MANY_SEALED: u64 = 4;
/// Pause between two manifests if fewer segments wait.
const MANIFEST_PAUSE: Duration = Duration::from_secs(60);
/// Pause between two looks at the number of sealed segments.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Pause after a failure.
const FAILED_PAUSE: Duration = Duration::from_secs(10);
/// Pause between two removals of old objects without a new manifest.
const TIDY_PAUSE: Duration = Duration::from_secs(600);
/// Maximum number of objects that one pass removes.
const REMOVED_AT_ONCE: usize = 1000;

/// The manifest that counts.
struct NewestManifest {
    name: String,
    manifest: Arc<BackupManifest>,
    digests: HashSet<ContentDigest>,
}

impl NewestManifest {
    fn new(name: String, manifest: Arc<BackupManifest>) -> Self {
        Self {
            name,
            digests: manifest.files.iter().map(|file| file.digest).collect(),
            manifest,
        }
    }
}

/// The files of a replica, as its owner knows them.
pub(super) struct ReplicaFiles {
    bucket: Bucket,
    pub(super) format: Arc<dyn ManifestFormat>,
    term: u64,
    /// Number of the next manifest in this term.
    next: u64,
    newest: Option<NewestManifest>,
    /// Whether the log has an error about the damage in the newest manifest.
    is_reported: bool,
    /// Content by term and digest, and since when no manifest that counted has named it, at the earliest.
    content: BTreeMap<(u64, ContentDigest), Instant>,
    /// Manifests that do not count, and since when.
    old: Vec<(String, Instant)>,
}

pub(super) fn content_path(term: u64, digest: ContentDigest) -> String {
    format!("{CONTENT}/{term}/{digest}")
}

/// Term and digest of a name in the directory of content.
pub(super) fn content_of(name: &str) -> Option<(u64, ContentDigest)> {
    let (term, digest) = name.split_once('/')?;
    let term = term.parse().ok()?;
    Some((term, ContentDigest::from_name(digest)?))
}

impl ReplicaFiles {
    /// Reads the newest manifest and the names of all content.
    pub(super) async fn open(
        bucket: &Bucket,
        tail: &ReplicaTail,
        format: Arc<dyn ManifestFormat>,
    ) -> Result<Self, ShipError> {
        let newest = async {
            let Some(row) = tail.manifest().await? else {
                return Ok::<_, ShipError>(None);
            };
            let manifest = read_manifest(bucket, &row.name, &*format).await?;
            Ok(Some(NewestManifest::new(row.name, Arc::new(manifest))))
        };
        // Clients wait for the answers.
        let (newest, content, manifests) =
            tokio::join!(newest, bucket.list_below(CONTENT), bucket.list(MANIFESTS));
        let (newest, content, manifests) = (newest?, content?.into_iter(), manifests?.into_iter());
        let now = Instant::now();
        let content = content.filter_map(|file| Some((content_of(&file.name)?, now)));
        let counts = newest.as_ref().map(|newest| newest.name.as_str());
        let old = manifests.map(|file| (file.name, now));
        Ok(Self {
            bucket: bucket.clone(),
            format,
            term: tail.term(),
            next: 1,
            content: content.collect(),
            old: old
                .filter(|(name, _)| Some(name.as_str()) != counts)
                .collect(),
            newest,
            is_reported: false,
        })
    }

    /// Files hold the journal below this position; `None` before the first manifest.
    pub(super) fn position(&self) -> Option<Position> {
        self.newest.as_ref().map(|newest| newest.manifest.position)
    }

    /// Whether the newest manifest names no damage.
    fn is_whole(&self) -> bool {
        let newest = self.newest.as_ref();
        newest.is_none_or(|newest| newest.manifest.damage.is_empty())
    }

    /// Uploads files while segments wait for it. Returns when the tail stores nothing any more.
    pub(super) async fn run(&mut self, ship: &Ship, tail: &ReplicaTail) -> TailError {
        let (mut named, mut tidied) = (None::<Instant>, Instant::now());
        loop {
            let waiting = ship.source.progress().unreleased;
            let paused = named.is_some_and(|named| named.elapsed() < MANIFEST_PAUSE);
            let mut done = Ok(());
            if waiting >= MANY_SEALED || (waiting > 0 && !paused) {
                done = self.upload(ship, tail).await;
                named = Some(Instant::now());
            } else if tidied.elapsed() < TIDY_PAUSE {
                sleep(LOOK_PAUSE).await;
                continue;
            }
            // Older content may be the only good copy of a file that the newest manifest names as damaged.
            if done.is_ok() && self.is_whole() {
                done = self.tidy(ship.settings.keep).await;
            }
            match done {
                Ok(()) => tidied = Instant::now(),
                Err(ShipError::Tail(error)) if ends(&error) => return error,
                Err(error) => {
                    ship.observer.event(&ShipEvent::Failed(&error));
                    sleep(FAILED_PAUSE).await;
                }
            }
        }
    }

    /// Uploads the finished files, and makes them count.
    async fn upload(&mut self, ship: &Ship, tail: &ReplicaTail) -> Result<(), ShipError> {
        if known_bad::makes(ShipMistake::DrainBeforeUpload) {
            ship.drain(tail, ship.source.progress().durable);
        }
        if known_bad::makes(ShipMistake::ManifestBeforeContent) {
            self.name_first(ship, tail).await?;
        }
        // An upload that fails is repeated, so it leaves no segment: each would be another file, and nearly empty.
        let (manifest, sent_bytes) = self.send(ship).await?;
        // A run may rest on a trim that the tail does not have yet.
        let durable = ship.source.progress().durable;
        if !known_bad::makes(ShipMistake::ManifestBeforeTrims) {
            ship.reach(durable).await;
        }
        self.name(ship, tail, manifest, sent_bytes).await
    }

    /// Makes a manifest count without its content: a mistake ([`ShipMistake::ManifestBeforeContent`]).
    async fn name_first(&mut self, ship: &Ship, tail: &ReplicaTail) -> Result<(), ShipError> {
        let mut backup = self.begin(ship).await?;
        while let Some(part) = backup.next().await? {
            if let BackupPart::Manifest(manifest) = part {
                drop(backup);
                return self.name(ship, tail, manifest, 0).await;
            }
        }
        Ok(())
    }

    /// Digests of content that is in the bucket, and stays there.
    fn known(&self) -> HashSet<ContentDigest> {
        let is_named = |digest: &ContentDigest| {
            let newest = self.newest.as_ref();
            newest.is_some_and(|newest| newest.digests.contains(digest))
        };
        let content = self.content.keys();
        let stays = content.filter(|(term, digest)| *term == self.term || is_named(digest));
        stays.map(|(_, digest)| *digest).collect()
    }

    /// Begins a backup of the finished files.
    async fn begin(&self, ship: &Ship) -> Result<Box<dyn Backup>, ShipError> {
        let newest = self.newest.as_ref();
        let earlier = newest.map(|newest| Arc::clone(&newest.manifest));
        Ok(ship.source.files(self.known(), earlier).await?)
    }

    /// Sends the content of the finished files that the bucket lacks. Returns their manifest and the number of bytes sent.
    /// After a failure, the next attempt sends only the files that have not arrived.
    pub(super) async fn send(
        &mut self,
        ship: &Ship,
    ) -> Result<(Arc<BackupManifest>, u64), ShipError> {
        let backup = self.begin(ship).await?;
        let mut uploads = Uploads::new(self.bucket.clone());
        let mut current = None;
        let sent = self.send_files(ship, backup, &mut uploads, &mut current);
        let sent = sent.await;
        if let Some((_, unfinished)) = current {
            uploads.cancel(unfinished).await;
        }
        let finished = uploads.finish().await;
        let unnamed = Instant::now();
        for digest in uploads.take_whole() {
            let digest = ContentDigest::Blake3(digest);
            self.content.insert((self.term, digest), unnamed);
        }
        let sent = sent?;
        finished?;
        Ok(sent)
    }

    /// Hands the content over to `uploads`. `current` is the index of the file under way, and its upload.
    async fn send_files(
        &self,
        ship: &Ship,
        mut backup: Box<dyn Backup>,
        uploads: &mut Uploads,
        current: &mut Option<(usize, Upload)>,
    ) -> Result<(Arc<BackupManifest>, u64), ShipError> {
        let mut manifest: Option<Arc<BackupManifest>> = None;
        let mut sent_bytes = 0;
        while let Some(part) = backup.next().await? {
            match part {
                BackupPart::Read(_) => {}
                BackupPart::Manifest(read) => manifest = Some(read),
                BackupPart::Chunk { file, data, .. } => {
                    // The bytes are read: their keys are in the ring.
                    if let Some(keys) = &ship.keys {
                        keys.store().await?;
                    }
                    let begun = current.take_if(|(at, _)| *at == file);
                    let mut upload = match begun {
                        Some((_, upload)) => upload,
                        None => {
                            if let Some((_, before)) = current.take() {
                                uploads.end(before).await?;
                            }
                            let files = manifest.as_ref().map(|read| &read.files);
                            let entry = files.and_then(|files| files.get(file));
                            let entry =
                                entry.ok_or_else(|| self.malformed("names no such file"))?;
                            let ContentDigest::Blake3(digest) = entry.digest else {
                                return Err(self.malformed("names new content by an old digest"));
                            };
                            let path = content_path(self.term, entry.digest);
                            uploads.begin(path, entry.bytes, digest)
                        }
                    };
                    uploads.push(&mut upload, &data).await?;
                    sent_bytes += data.len() as u64;
                    *current = Some((file, upload));
                }
            }
        }
        if let Some((_, last)) = current.take() {
            uploads.end(last).await?;
        }
        let manifest = manifest.ok_or_else(|| self.malformed("did not come"))?;
        Ok((manifest, sent_bytes))
    }

    /// Creates the manifest and makes it count. Then rows that it covers may leave the tail, and segments may be sorted.
    pub(super) async fn name(
        &mut self,
        ship: &Ship,
        tail: &ReplicaTail,
        manifest: Arc<BackupManifest>,
        sent_bytes: u64,
    ) -> Result<(), ShipError> {
        let bytes = bytes::Bytes::from(self.format.encode(&manifest));
        if bytes.len() as u64 > LARGEST_MANIFEST {
            let (files, size) = (manifest.files.len(), bytes.len());
            return Err(ShipError::Manifest {
                place: self.bucket.place().to_owned(),
                name: format!("{}-{}", self.term, self.next),
                what: format!(
                    "it names {files} files and would have {size} bytes, above {LARGEST_MANIFEST}; raise sorter_step_bytes, \
                     so that the store has fewer files"
                ),
            });
        }
        let name = loop {
            let name = format!("{}-{}", self.term, self.next);
            self.next += 1;
            let path = format!("{MANIFESTS}/{name}");
            // It may be created even if this fails, and is removed as an old one then.
            self.old.push((name.clone(), Instant::now()));
            let created = self
                .bucket
                .put_if(&path, bytes.clone(), WriteCondition::Absent);
            if let Put::Done(_) = created.await? {
                break name;
            }
        };
        let position = manifest.position;
        let row = (name.as_str(), position.get());
        let names = || tail.put_manifest(row.0, row.1);
        ship.store(DOWN_AFTER, names).await?;
        ship.is_up();
        let now = Instant::now();
        self.old.retain(|(old, _)| *old != name);
        let newest = NewestManifest::new(name, Arc::clone(&manifest));
        if let Some(before) = self.newest.replace(newest) {
            for ((_, digest), unnamed) in &mut self.content {
                if before.digests.contains(digest) {
                    *unnamed = now;
                }
            }
            self.old.push((before.name, now));
        }
        ship.drain(tail, position);
        ship.source.release(position);
        ship.observer.event(&ShipEvent::Named {
            files: manifest.files.len() as u64,
            sent_bytes,
            position,
            tail_rows: ship.shipped.borrow().rows(),
        });
        let is_whole = self.is_whole();
        let was_reported = std::mem::replace(&mut self.is_reported, !is_whole);
        if !is_whole && !was_reported {
            ship.observer.event(&ShipEvent::Damaged {
                places: manifest.damage.len() as u64,
            });
        }
        Ok(())
    }

    /// Removes old manifests, and then the content that no remaining one names. Content of later terms stays.
    async fn tidy(&mut self, keep: Duration) -> Result<(), ShipError> {
        let is_old = |since: &Instant| since.elapsed() >= keep;
        let old = self.old.iter().filter(|(_, since)| is_old(since));
        let names: HashSet<String> = old.take(REMOVED_AT_ONCE).map(|old| old.0.clone()).collect();
        let paths = names.iter().map(|name| format!("{MANIFESTS}/{name}"));
        self.remove(paths.collect()).await?;
        self.old.retain(|(name, _)| !names.contains(name));
        let is_named = |digest: &ContentDigest| {
            let newest = self.newest.as_ref();
            newest.is_none_or(|newest| newest.digests.contains(digest))
        };
        let content = self.content.iter();
        let unused = content.filter(|((term, digest), unnamed)| {
            let is_named = is_named(digest) && !known_bad::makes(ShipMistake::NamedContentRemoved);
            *term <= self.term && !is_named && is_old(unnamed)
        });
        let unused: Vec<_> = unused.map(|(key, _)| *key).take(REMOVED_AT_ONCE).collect();
        let paths = unused
            .iter()
            .map(|&(term, digest)| content_path(term, digest));
        self.remove(paths.collect()).await?;
        for key in unused {
            self.content.remove(&key);
        }
        Ok(())
    }

    async fn remove(&self, paths: Vec<String>) -> Result<(), BucketError> {
        match paths.is_empty() {
            true => Ok(()),
            false => self.bucket.remove(&paths).await,
        }
    }

    pub(super) fn malformed(&self, what: &str) -> ShipError {
        let what = format!("the manifest of the store's files {what}");
        BucketError::new(BucketErrorKind::Damaged, self.bucket.place(), what).into()
    }
}

impl Ship {
    /// Lets the rows leave that files hold.
    pub(super) fn drain(&self, tail: &ReplicaTail, position: Position) {
        let mut whole = None;
        self.shipped.send_if_modified(|shipped| {
            whole = shipped.take_whole_below(position);
            false
        });
        if let Some(segment) = whole {
            tail.drain(segment.get());
        }
    }
}

/// Whether the tail stores nothing any more.
fn ends(error: &TailError) -> bool {
    matches!(error.kind(), TailErrorKind::Fenced | TailErrorKind::Stopped)
}

pub(super) async fn read_manifest(
    bucket: &Bucket,
    name: &str,
    format: &dyn ManifestFormat,
) -> Result<BackupManifest, ShipError> {
    let path = format!("{MANIFESTS}/{name}");
    let read = bucket.read(&path, LARGEST_MANIFEST).await;
    let decoded = match read {
        Ok(Some((bytes, _))) => format.decode(&bytes),
        Ok(None) => Err("it is missing".to_owned()),
        // It is too large, or has another size than announced.
        Err(error) if error.kind() == BucketErrorKind::Damaged => Err(error.to_string()),
        Err(error) => return Err(error.into()),
    };
    decoded.map_err(|what| ShipError::Manifest {
        place: bucket.place().to_owned(),
        name: name.to_owned(),
        what,
    })
}
