//! Signed replicas, and replicas of older versions.

use wald_proto::backup;
use wald_proto::v1::BackupManifest;
use wald_storage::ContentDigest;
use xxhash_rust::xxh3::xxh3_128;

use super::*;

/// Makes a key: the path of its file, and its digits.
fn key(directory: &Path, name: &str) -> (String, String) {
    let path = directory.join(name).to_str().unwrap().to_owned();
    let made = ends(wald().args(["backup-key", "new", &path]));
    let said = String::from_utf8(made.stderr).unwrap();
    let digits = said.trim().strip_prefix("wald: public key ").unwrap();
    (path, digits.to_owned())
}

fn newest_manifest(store: &Store) -> String {
    let number = |name: &String| {
        let (term, number) = name.strip_prefix(MANIFESTS)?.split_once('-')?;
        Some((term.parse::<u64>().ok()?, number.parse::<u64>().ok()?))
    };
    let names = store.names(MANIFESTS).into_iter();
    names.max_by_key(number).unwrap()
}

#[tokio::test]
async fn signed_files_of_a_replica_are_restored_alone_and_others_refused() {
    let store = Store::start();
    let one = private_directory();
    let keys = private_directory();
    let (path, own) = key(keys.path(), "own");
    let (_, other) = key(keys.path(), "other");
    let signs = [&SMALL[..], &["--backup-signing-key-file", &path]].concat();
    // Rows are all that a new bucket has.
    let node = start(&store, one.path(), "one", &signs);
    let mut wal = node.wal().await;
    replicated(&mut wal, "0 first").await.unwrap();
    let (code, _, log) = command(&store, &["verify", "--trust", &own]);
    assert_eq!(code, Some(5), "{log}");
    assert!(log.contains("only rows, which no key signs"), "{log}");
    fill(&mut wal, 1, FILES_ONCE).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    fill(&mut wal, 1 + FILES_ONCE, 5).await;
    node.signal(Signal::KILL);
    node.ended().await;

    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(
        out.contains(&format!("signed by {own}, not trusted")),
        "{out}"
    );
    let (code, out, log) = command(&store, &["verify", "--trust", &own]);
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(
        out.contains("were not read, because no key signs them"),
        "{out}"
    );
    let untrusted = format!("signed by {own}, which is not trusted");
    let copy = private_directory();
    let target = copy.path().join("new");
    let data_dir = ["--data-dir", target.to_str().unwrap()];
    for words in [&["verify"][..], &[&["restore"][..], &data_dir].concat()] {
        let words = [words, &["--trust", &other]].concat();
        let (code, _, log) = command(&store, &words);
        assert_eq!(code, Some(5), "{log}");
        assert!(log.contains(&untrusted), "{log}");
    }
    let name = newest_manifest(&store);
    let manifest = backup::decode(&store.content(&name)).unwrap().manifest;
    let end = manifest.position.unwrap();
    let beyond = (end + 1).to_string();
    let words = [
        &["restore", "--trust", &own, "--at-position", &beyond][..],
        &data_dir,
    ]
    .concat();
    let (code, _, log) = command(&store, &words);
    assert_eq!(code, Some(2), "{log}");
    assert!(
        log.contains("in the rows behind them, which no key signs"),
        "{log}"
    );
    let words = [&["restore", "--trust", &own][..], &data_dir].concat();
    let (code, out, log) = command(&store, &words);
    assert_eq!(code, Some(0), "{out} {log}");
    assert!(out.contains(&format!("at position {end}:")), "{out}");
    let copied = Daemon::start_in(&target, &[]);
    let found = filled(&mut copied.wal().await).await;
    let all = numbered(FILES_ONCE + 6);
    assert!(!found.is_empty() && found.len() < all.len(), "{found:?}");
    assert_eq!(found, all[..found.len()]);

    // A node that takes the store over asks for the same signature.
    let two = private_directory();
    let taken = [&SMALL[..], &["--take-over"]].concat();
    let wrong = [&taken[..], &["--backup-trust", &other]].concat();
    let (code, log) = refused(&store, two.path(), "two", &wrong);
    assert_eq!(code, Some(65), "{log}");
    assert!(log.contains(&untrusted), "{log}");
    // Somebody who can write the bucket changes the manifest, and makes its checksum right.
    let good = store.content(&name);
    let signature = backup::decode(&good).unwrap().signature.unwrap();
    let mut changed = manifest.clone();
    changed.recovery_epoch += 1;
    store.add(
        &name,
        backup::seal(backup::encode(&changed), Some(&signature)),
    );
    let trusts = [&taken[..], &["--backup-trust", &own]].concat();
    let (code, log) = refused(&store, two.path(), "two", &trusts);
    assert_eq!(code, Some(65), "{log}");
    assert!(log.contains("the manifest was changed"), "{log}");
    store.add(&name, good);
    let next = start(&store, two.path(), "two", &trusts);
    assert_eq!(filled(&mut next.wal().await).await, all);
}

/// The bytes of a manifest file of version 1.
fn version_1(manifest: &BackupManifest) -> Vec<u8> {
    use prost::Message as _;
    let mut bytes = b"WALDBKP\0\x01\0\0\0".to_vec();
    bytes.extend_from_slice(&manifest.encode_to_vec());
    backup::seal(bytes, None)
}

/// Makes the bucket one that a version before BLAKE3 would have written.
fn as_older_version(store: &Store) {
    let name = newest_manifest(store);
    let mut manifest = backup::decode(&store.content(&name)).unwrap().manifest;
    for listed in listed(store) {
        let content = store.content(&listed);
        let digest = ContentDigest::of(&content).to_bytes();
        let old = ContentDigest::Xxh3(xxh3_128(&content));
        let named = manifest
            .files
            .iter_mut()
            .filter(|file| file.digest == digest);
        named.for_each(|file| file.digest = old.to_bytes().into());
        let (directory, _) = listed.rsplit_once('/').unwrap();
        store.add(&format!("{directory}/{old}"), content);
        store.change(&listed, |_| None);
    }
    store.add(&name, version_1(&manifest));
    store.change("wald/orders/cluster", |record| {
        let record = String::from_utf8(record).unwrap();
        assert!(record.contains("\"blake3\""), "{record}");
        Some(record.replace("\"blake3\"", "\"xxh3-128\"").into_bytes())
    });
}

#[tokio::test]
async fn replica_of_an_older_version_is_read_taken_over_and_goes_on() {
    let store = Store::start();
    let (one, two) = (private_directory(), private_directory());
    let node = start(&store, one.path(), "one", &SMALL);
    let mut wal = node.wal().await;
    fill(&mut wal, 0, FILES_ONCE).await;
    until_store("a manifest", || !store.names(MANIFESTS).is_empty()).await;
    fill(&mut wal, FILES_ONCE, 5).await;
    node.signal(Signal::KILL);
    node.ended().await;
    as_older_version(&store);

    let (code, out, log) = command(&store, &["verify"]);
    assert_eq!(code, Some(0), "{out} {log}");
    let copy = private_directory();
    let target = copy.path().to_str().unwrap();
    let (code, out, log) = command(&store, &["restore", "--data-dir", target]);
    assert_eq!(code, Some(0), "{out} {log}");
    let copied = Daemon::start_in(copy.path(), &[]);
    assert_eq!(
        filled(&mut copied.wal().await).await,
        numbered(FILES_ONCE + 5)
    );

    // The owner goes on, and its next manifest names all content again.
    let old = newest_manifest(&store);
    let node = start(&store, one.path(), "one", &SMALL);
    fill(&mut node.wal().await, FILES_ONCE + 5, 60).await;
    until_store("a newer manifest", || newest_manifest(&store) != old).await;
    node.signal(Signal::KILL);
    node.ended().await;
    let names = listed(&store);
    assert!(
        names
            .iter()
            .all(|name| name.rsplit('/').next().unwrap().len() == 64)
    );
    let next = start(
        &store,
        two.path(),
        "two",
        &[&SMALL[..], &["--take-over"]].concat(),
    );
    assert_eq!(
        filled(&mut next.wal().await).await,
        numbered(FILES_ONCE + 65)
    );
}
