//! `walctl backup`: which backups stay, and which directories are refused.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use crate::memory::Memory;
use tokio::process::Command;
use wald_client::proto::{BackupFile, BackupManifest, Finding};
use wald_proto::backup;

struct Fixture {
    memory: Arc<Memory>,
    endpoint: String,
    scratch: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        let (memory, endpoint) = Memory::start().await;
        Self {
            memory,
            endpoint,
            scratch: tempfile::tempdir().unwrap(),
        }
    }

    fn shelf(&self) -> PathBuf {
        self.scratch.path().join("shelf")
    }

    async fn walctl(&self, before: &[&str], dir: &Path, after: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_walctl"));
        command.arg("backup").args(before).arg(dir).args(after);
        command.env("WALD_ENDPOINT", &self.endpoint);
        command.output().await.unwrap()
    }

    /// Takes a backup of a store that stands so.
    async fn save(&self, manifest: BackupManifest, options: &[&str]) -> Output {
        let file = backup::seal(backup::encode(&manifest), None);
        self.save_file(file, options).await
    }

    /// Takes a backup whose manifest file has these bytes.
    async fn save_file(&self, file: Vec<u8>, options: &[&str]) -> Output {
        self.memory.backups.lock().unwrap().push_back(file.into());
        self.walctl(&[], &self.shelf(), options).await
    }

    /// Positions of the backups there are, in the order of the list.
    async fn listed(&self) -> Vec<u64> {
        let listed = self
            .walctl(&["list"], &self.shelf(), &["--output", "json"])
            .await;
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        let positions = listed.as_array().unwrap().iter();
        positions.map(|b| b["position"].as_u64().unwrap()).collect()
    }
}

fn manifest(recovery_epoch: u64, position: u64, seconds: i64) -> BackupManifest {
    BackupManifest {
        store_id: "1".to_owned(),
        recovery_epoch,
        position: Some(position),
        create_time: Some(prost_types::Timestamp { seconds, nanos: 0 }),
        ..BackupManifest::default()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[tokio::test]
async fn the_newest_backups_stay_whatever_the_clock_says() {
    let fixture = Fixture::new().await;
    for (epoch, position, seconds) in [(1, 100, 5_000), (1, 200, 6_000), (2, 300, 10)] {
        let saved = manifest(epoch, position, seconds);
        let saved = fixture.save(saved, &["--keep", "2"]).await;
        assert_eq!(saved.status.code(), Some(0), "{saved:?}");
    }
    assert_eq!(fixture.listed().await, [200, 300]);
    // While the store does not change, the backup that was taken last stays, whatever its sort
    // order.
    let earlier = fixture.save(manifest(2, 300, 5), &["--keep", "1"]).await;
    assert_eq!(earlier.status.code(), Some(0), "{earlier:?}");
    let listed = fixture
        .walctl(&["list"], &fixture.shelf(), &["--output", "raw"])
        .await;
    assert_eq!(listed.stdout, b"19700101T000005.000000Z-300\n");
}

#[tokio::test]
async fn no_backup_goes_for_one_that_has_damage() {
    let fixture = Fixture::new().await;
    for position in [100, 200] {
        fixture.save(manifest(1, position, 1), &[]).await;
    }
    let mut damaged = manifest(1, 300, 1);
    damaged.findings.push(Finding {
        detail: "bytes do not match".to_owned(),
        ..Finding::default()
    });
    let saved = fixture.save(damaged, &["--keep", "1"]).await;
    assert_eq!(saved.status.code(), Some(5), "{saved:?}");
    assert!(
        said(&saved).contains("no older backup was removed"),
        "{saved:?}"
    );
    assert_eq!(fixture.listed().await, [100, 200, 300]);
    let whole = fixture.save(manifest(1, 400, 1), &["--keep", "2"]).await;
    assert_eq!(whole.status.code(), Some(0), "{whole:?}");
    assert_eq!(fixture.listed().await, [300, 400]);
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_is_named_and_stops_nothing() {
    let fixture = Fixture::new().await;
    for position in [100, 200] {
        fixture.save(manifest(1, position, 1), &[]).await;
    }
    let bad = fixture.shelf().join("backups/0.manifest");
    std::fs::write(&bad, b"").unwrap();
    let orphan = fixture.shelf().join("files").join("0".repeat(32));
    std::fs::write(&orphan, b"content").unwrap();
    let saved = fixture.save(manifest(1, 300, 1), &["--keep", "2"]).await;
    assert_eq!(saved.status.code(), Some(0), "{saved:?}");
    assert!(said(&saved).contains("0.manifest"), "{saved:?}");
    assert_eq!(fixture.listed().await, [200, 300]);
    assert!(orphan.exists(), "the bad one may have named it");
    let list = fixture.walctl(&["list"], &fixture.shelf(), &[]).await;
    assert_eq!(list.status.code(), Some(0), "{list:?}");
    assert!(said(&list).contains("0.manifest"), "{list:?}");
    std::fs::remove_file(&bad).unwrap();
    let pruned = fixture
        .walctl(&["prune"], &fixture.shelf(), &["--keep", "1"])
        .await;
    assert_eq!(pruned.status.code(), Some(0), "{pruned:?}");
    assert_eq!(fixture.listed().await, [300]);
    assert!(!orphan.exists());
    // Without any other backup, the unreadable ones are reported.
    for entry in std::fs::read_dir(fixture.shelf().join("backups")).unwrap() {
        std::fs::write(entry.unwrap().path(), b"").unwrap();
    }
    let list = fixture.walctl(&["list"], &fixture.shelf(), &[]).await;
    assert_eq!(list.status.code(), Some(5), "{list:?}");
}

#[tokio::test]
async fn directory_that_cannot_be_read_is_not_called_no_directory_of_backups() {
    let fixture = Fixture::new().await;
    std::fs::create_dir_all(fixture.shelf()).unwrap();
    let shelf = fixture.shelf();
    let listed = || fixture.walctl(&["list"], &shelf, &[]);
    assert!(said(&listed().await).contains("is no directory of backups"));
    // A link to itself: the system refuses the path, as it does where a right is missing.
    let manifests = fixture.shelf().join("backups");
    std::os::unix::fs::symlink(&manifests, &manifests).unwrap();
    let refused = said(&listed().await);
    let expected = format!("cannot read {}: ", manifests.display());
    assert!(refused.contains(&expected), "{refused}");
}

#[tokio::test]
async fn the_data_directory_of_a_store_is_none_for_backups() {
    let fixture = Fixture::new().await;
    for name in ["FORMAT", "journal"] {
        let store = fixture.scratch.path().join(name);
        std::fs::create_dir_all(store.join(name)).unwrap();
        let refused = fixture.walctl(&[], &store, &[]).await;
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(said(&refused).contains("a store's"), "{refused:?}");
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 1, "as it was");
    }
}

#[cfg(not(feature = "object"))]
#[tokio::test]
async fn a_url_is_refused_in_a_sentence_by_a_build_without_buckets() {
    let fixture = Fixture::new().await;
    let url = Path::new("s3://bucket/orders");
    for before in [&[][..], &["list"], &["prune", "--keep", "1"]] {
        let refused = fixture.walctl(before, url, &[]).await;
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
        assert!(said(&refused).contains("--features object"), "{refused:?}");
    }
}

/// Names of the content in a shelf.
fn content(shelf: &Path) -> Vec<String> {
    let names = std::fs::read_dir(shelf.join(backup::FILES)).unwrap();
    let mut names: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn file(path: &str, content: &[u8]) -> BackupFile {
    BackupFile {
        path: path.to_owned(),
        file_bytes: content.len() as u64,
        digest: blake3::hash(content).as_bytes().to_vec().into(),
        known: true,
    }
}

#[tokio::test]
async fn content_of_older_versions_is_named_again_once_and_takes_no_space() {
    use std::os::unix::fs::MetadataExt as _;
    let fixture = Fixture::new().await;
    let golden = "../../server/tests/golden/backups-1.tar.gz";
    let mut unpack = Command::new("tar");
    unpack
        .arg("-xzf")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(golden));
    unpack.arg("-C").arg(fixture.scratch.path()).arg("backups");
    assert!(unpack.status().await.unwrap().success());
    std::fs::rename(fixture.scratch.path().join("backups"), fixture.shelf()).unwrap();
    assert_eq!(fixture.listed().await, [8920, 74096]);
    let old = content(&fixture.shelf());
    let at = |name: &str| fixture.shelf().join(backup::FILES).join(name);

    // The server sends nothing: its manifest has only content that the directory had.
    let names = ["FORMAT", "journal/0000000000000001.seg"];
    let mut contents: Vec<Vec<u8>> = old
        .iter()
        .map(|name| std::fs::read(at(name)).unwrap())
        .collect();
    contents.sort_by_key(Vec::len);
    let (least, largest) = (&contents[0], contents.last().unwrap());
    let next = BackupManifest {
        store_id: "97a0f7b2-0000-0000-0000-000000000000".to_owned(),
        files: names
            .into_iter()
            .zip([least, largest])
            .map(|(path, content)| file(path, content))
            .collect(),
        ..manifest(u64::from(u16::MAX), 80_000, 9)
    };
    let refused = fixture.save(next.clone(), &[]).await;
    assert!(
        said(&refused).contains("has backups of store"),
        "{refused:?}"
    );
    let store_id = {
        let kept = std::fs::read_dir(fixture.shelf().join(backup::MANIFESTS)).unwrap();
        let bytes = std::fs::read(kept.map(|entry| entry.unwrap().path()).next().unwrap()).unwrap();
        backup::decode(&bytes).unwrap().manifest.store_id
    };
    let next = BackupManifest { store_id, ..next };
    let saved = fixture.save(next, &[]).await;
    assert_eq!(saved.status.code(), Some(0), "{saved:?}");
    assert_eq!(fixture.listed().await, [8920, 74096, 80_000]);
    for content in &contents {
        let new = at(blake3::hash(content).to_hex().as_str());
        assert_eq!(
            std::fs::metadata(&new).unwrap().nlink(),
            2,
            "{}",
            new.display()
        );
        assert_eq!(&std::fs::read(&new).unwrap(), content);
    }
    assert_eq!(content(&fixture.shelf()).len(), 2 * old.len());
    // Only the content of the new backup stays with it, by its new names.
    let pruned = fixture
        .walctl(&["prune"], &fixture.shelf(), &["--keep", "1"])
        .await;
    assert_eq!(pruned.status.code(), Some(0), "{pruned:?}");
    let left = content(&fixture.shelf());
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(left.iter().all(|name| name.len() == 64), "{left:?}");
}

#[tokio::test]
async fn a_manifest_is_kept_as_the_server_sent_it_with_its_signature() {
    let fixture = Fixture::new().await;
    let signature = backup::ManifestSignature {
        public_key: [0xab; backup::KEY_BYTES],
        signature: [7; backup::SIGNATURE_BYTES],
    };
    // A newer server may have fields that this walctl does not know.
    let mut bytes = backup::encode(&manifest(1, 100, 5));
    let unknown = [0x98, 0x7d, 1];
    let length = bytes.len() as u64 - 20 + unknown.len() as u64;
    bytes[12..20].copy_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&unknown);
    let file = backup::seal(bytes, Some(&signature));
    let saved = fixture.save_file(file.clone(), &[]).await;
    assert_eq!(saved.status.code(), Some(0), "{saved:?}");
    let told = String::from_utf8(saved.stdout).unwrap();
    let key = "ab".repeat(backup::KEY_BYTES);
    assert!(told.contains(&format!("signed by {key}")), "{told}");
    let kept = std::fs::read_dir(fixture.shelf().join(backup::MANIFESTS)).unwrap();
    let kept: Vec<_> = kept
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    assert_eq!(kept, [file]);
}
