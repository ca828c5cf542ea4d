//! Forged manifests, as a process that writes to a directory of backups could make them.

use std::sync::{Arc, LazyLock};

use arbitrary::Unstructured;

use super::number;
use super::recovery::{append, batch, config, open, store};
use crate::api::content::ContentDigest;
use crate::api::engine::{BackupDamage, BackupFile, BackupManifest};
use crate::base::ids::{Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::disk::directory;
use crate::disk::{Disk, SimDisk};
use crate::tools::backup::{BackupView, content_path};

/// A backup of the store of [`super::recovery`]: its content and its manifest.
fn saved() -> &'static (SimDisk, BackupManifest) {
    static SAVED: LazyLock<(SimDisk, BackupManifest)> = LazyLock::new(|| {
        let store = store();
        let content = SimDisk::new();
        let kept = |path: &&str| !path.ends_with("BEGUN") && !path.ends_with("REPAIRS");
        let paths = store.files.iter().map(|file| file.path.as_str());
        let mut files = Vec::new();
        for path in paths.filter(kept).chain(["FORMAT"]) {
            let bytes = store.disk.contents(path).expect("it is there");
            let digest = ContentDigest::of(&bytes);
            files.push(BackupFile {
                path: path.to_owned(),
                bytes: bytes.len() as u64,
                digest,
                known: true,
            });
            content.replace(&content_path(digest), bytes);
        }
        let manifest = BackupManifest {
            store_id: directory::read_format(&store.disk).expect("it is whole"),
            recovery_epoch: RecoveryEpoch::new(4),
            position: Position::new(1 << 40),
            created: Timestamp::from_micros(1_700_000_000_000_000),
            files,
            damage: Vec::new(),
            signed_by: None,
        };
        (content, manifest)
    });
    &SAVED
}

/// Changes one field of the manifest.
fn edit(manifest: &mut BackupManifest, input: &mut Unstructured<'_>) {
    let (what, which, value): (u8, u8, u64) = (number(input), number(input), number(input));
    match what % 8 {
        0 => manifest.recovery_epoch = RecoveryEpoch::new(value),
        1 => manifest.position = Position::new(value),
        2 => manifest.damage.push(BackupDamage {
            segment: Some(SegmentId::new(value)),
            from: Position::new(value),
            to: None,
            records: None,
        }),
        _ if manifest.files.is_empty() => {}
        what => {
            let which = usize::from(which) % manifest.files.len();
            let file = &mut manifest.files[which];
            match what {
                3 => file.bytes = value,
                4 => file.digest = ContentDigest::Xxh3(u128::from(value)),
                5 => drop(manifest.files.remove(which)),
                more => {
                    let length = usize::from(number::<u8>(input) % 48).min(input.len());
                    let path = input.bytes(length).unwrap_or_default();
                    let path = String::from_utf8_lossy(path).into_owned();
                    let mut copy = file.clone();
                    match more {
                        6 => file.path = path,
                        _ => {
                            copy.path = path;
                            manifest.files.push(copy);
                        }
                    }
                }
            }
        }
    }
}

/// Fuzzes a manifest: edits of a valid one, and the position of the view. The manifest is refused, or its store
/// is restored, read and appended to.
pub fn backup(data: &[u8]) {
    let (content, manifest) = saved();
    let mut manifest = manifest.clone();
    let mut input = Unstructured::new(data);
    let at: u64 = number(&mut input);
    for _ in 0..16 {
        if input.is_empty() {
            break;
        }
        edit(&mut manifest, &mut input);
    }
    let at = (at != 0).then(|| Position::new(at));
    let Ok(view) = BackupView::open(Arc::new(content.copy()), &manifest, at) else {
        return;
    };
    let view = Arc::new(view);
    let paths_are_ours = manifest.files.iter().all(|file| {
        let parts: Vec<&str> = file.path.split('/').collect();
        parts.len() <= 2 && parts.iter().all(|part| !part.is_empty() && *part != "..")
    });
    assert!(paths_are_ours, "{:?}", manifest.files);
    let _read = view.bytes();
    let _checked = view.verify(&config(), &mut |_| {});
    let target = SimDisk::new();
    let disk: Arc<dyn Disk> = Arc::new(target.clone());
    if view.restore(&disk, &config(), &mut |_| {}).is_ok()
        && let Ok(core) = open(&target)
    {
        // A log of a store with losses may refuse.
        let _appended = append(&core, batch("a", &[b"AFTER".to_vec()], None));
    }
}

/// Inputs of [`backup`]: each number beyond its bounds, and paths to other places.
pub fn backup_seeds() -> Vec<(String, Vec<u8>)> {
    let change = |what: u8, which: u8, value: u64, path: &[u8]| {
        let mut seed = vec![0; 8];
        seed.extend_from_slice(&[what, which]);
        seed.extend_from_slice(&value.to_le_bytes());
        if what >= 6 {
            seed.push(u8::try_from(path.len()).unwrap_or(0));
        }
        seed.extend_from_slice(path);
        seed
    };
    let mut seeds = vec![("nothing".to_owned(), Vec::new())];
    for what in 0..5 {
        for (number, value) in [u64::MAX, 1 << 63, 1 << 62, 1 << 24, (1 << 23) - 1]
            .into_iter()
            .enumerate()
        {
            seeds.push((
                format!("number-{what}-{number}"),
                change(what, 1, value, b""),
            ));
        }
    }
    let paths: [&[u8]; 9] = [
        b"../../evil",
        b"/etc/evil",
        b"journal/../../evil",
        b"journal/0000000000000001.seg/..",
        b"index/..",
        b"journal/000000000000000A.seg",
        b"sorted/0000000000000001.seg\0",
        b"journal/ffffffffffffffff.seg",
        b"index/ffffffffffffffff.idx",
    ];
    for (number, path) in paths.into_iter().enumerate() {
        for what in [6, 7] {
            seeds.push((format!("path-{what}-{number}"), change(what, 1, 0, path)));
        }
    }
    for which in 0..8 {
        seeds.push((format!("without-{which}"), change(5, which, 0, b"")));
    }
    seeds
}
