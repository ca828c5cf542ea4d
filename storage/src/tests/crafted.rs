//! Numbers that no store reaches, in files with valid checksums. A start, `verify` and `repair` name or
//! refuse them, and never panic, overflow, or size memory by them. The fuzz targets have the same files as
//! seeds (`fuzzing::crafted_seeds`).

use super::*;
use crate::api::config::OnDamage;
use crate::api::content::ContentDigest;
use crate::api::engine::{BackupFile, BackupManifest};
use crate::api::error::RestoreError;
use crate::api::finding::Finding;
use crate::api::pace::Control;
use crate::api::record::Compression;
use crate::base::bounds;
use crate::base::crc;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId};
use crate::disk::Disk;
use crate::disk::directory;
use crate::disk::directory::LastBegun;
use crate::engine::repair::accept_loss;
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::Life;
use crate::format::sealed;
use crate::format::sealed::BodyPlace;
use crate::tools::backup::{BackupView, content_path};
use crate::tools::verify::Offline;

const FIRST_FRAME: usize = 8192;

/// A change of one number or more.
type Edit<'a, T> = &'a dyn Fn(&mut T);

fn store() -> Fixture {
    let fixture = Fixture::new();
    for log in ["a", "b", "a"] {
        fixture.append(log, b"something").unwrap();
    }
    fixture
}

fn begun(epoch: u64, segment: u64, base: u64) -> Vec<u8> {
    let begun = LastBegun {
        epoch: RecoveryEpoch::new(epoch),
        segment: SegmentId::new(segment),
        base: Position::new(base),
    };
    begun.encode().into_bytes()
}

fn verified(disk: &SimDisk) -> Result<Vec<Finding>, OpenError> {
    let disk: Arc<dyn Disk> = Arc::new(disk.copy());
    let report = Offline::open(disk)?.verify(&Control::default(), &mut |_| {})?;
    Ok(report.findings)
}

fn repaired(disk: &SimDisk, config: &StorageConfig) -> Result<SimDisk, OpenError> {
    let disk = disk.copy();
    let shared: Arc<dyn Disk> = Arc::new(disk.clone());
    accept_loss(&shared, config, TestClock::new(), "by a test")?;
    Ok(disk)
}

/// All files but LOCK, which names its last holder.
fn files(disk: &SimDisk) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for directory in std::iter::once("").chain(directory::DIRECTORIES) {
        for name in directory::list(disk, directory).unwrap() {
            let path = match directory {
                "" if name == "LOCK" => continue,
                "" => name,
                _ => format!("{directory}/{name}"),
            };
            let bytes = disk.contents(&path).unwrap();
            found.push((path, bytes));
        }
    }
    found.sort();
    found
}

#[test]
fn begun_beyond_its_bounds_is_named_and_not_used() {
    let fixture = store();
    let next = fixture.report.recovery_epoch.next();
    let cases = [
        (
            begun(u64::MAX, 1, 0),
            "epoch 18446744073709551615 is above 8388607",
        ),
        (begun(1 << 24, 1, 0), "epoch 16777216 is above 8388607"),
        (begun(1 << 23, 1, 0), "epoch 8388608 is above 8388607"),
        (
            begun(1, u64::MAX, 0),
            "segment 18446744073709551615 is above 2146435071",
        ),
        (
            begun(1, 1, u64::MAX),
            "base 18446744073709551615 is above 4607182418800017408",
        ),
        (
            begun(1, 1, u64::MAX - 4096),
            "base 18446744073709547519 is above",
        ),
        (begun(1, 1, 1 << 63), "base 9223372036854775808 is above"),
        (begun(1, 1, 1 << 62), "base 4611686018427387904 is above"),
    ];
    for (text, what) in cases {
        let what = format!("BEGUN: {what}");
        let disk = fixture.disk.copy();
        disk.replace("BEGUN", text);
        let findings = verified(&disk).unwrap();
        let of_begun = |found: &&Finding| found.file.as_deref() == Some("BEGUN");
        let found: Vec<_> = findings.iter().filter(of_begun).collect();
        assert!(
            found.len() == 1 && found[0].detail.contains(&what),
            "{findings:?}"
        );

        let refusing = StorageConfig {
            on_damage: OnDamage::Refuse,
            ..small_config()
        };
        let refused = open(&disk.copy(), &refusing, &TestClock::new())
            .err()
            .unwrap();
        assert!(refused.to_string().contains(&what), "{refused}");

        let repaired = repaired(&disk, &small_config()).unwrap();
        assert!(
            !verified(&repaired)
                .unwrap()
                .iter()
                .any(|f| f.detail.contains("BEGUN"))
        );

        let started = Fixture::on(disk);
        assert!(
            started
                .report
                .findings
                .iter()
                .any(|found| found.contains(&what))
        );
        assert_eq!(started.report.recovery_epoch, next);
        started.append("a", b"more").unwrap();
        assert_eq!(started.restart().contents("a").len(), 3);
    }
}

#[test]
fn store_that_cannot_go_on_is_refused_and_left_as_it_was() {
    let disk = store().disk.copy();
    disk.replace("BEGUN", begun(bounds::EPOCHS - 1, 1, 0));
    let named = |disk: &SimDisk, what: &str| {
        let findings = verified(disk).unwrap();
        assert!(
            findings.iter().any(|f| f.detail.contains(what)),
            "{findings:?}"
        );
    };
    named(
        &disk,
        "BEGUN: epoch 8388607 is the last one, so a start refuses",
    );
    let before = files(&disk);
    for refused in [
        open(&disk, &small_config(), &TestClock::new()).err(),
        repaired(&disk, &small_config()).err(),
    ] {
        let refused = refused.expect("it is refused").to_string();
        let what = "recovery epoch 8388607, of 8388607 at most";
        assert!(
            refused.contains(what) && refused.contains("restore a backup"),
            "{refused}"
        );
    }
    assert_eq!(files(&disk), before);
    let last = bounds::POSITIONS - bounds::POSITIONS_LEFT;
    disk.replace("BEGUN", begun(1, 1, last));
    named(&disk, "is the last one, so a start refuses");
    assert!(open(&disk, &small_config(), &TestClock::new()).is_err());
}

/// Edits frames of all segments, each by its number, header and body together. Afterwards all checksums and
/// the chain are valid.
fn forge(disk: &SimDisk, edit: &dyn Fn(usize, FrameKind, &mut Vec<u8>)) {
    for name in disk.list("journal").unwrap() {
        forge_segment(disk, &format!("journal/{name}"), edit);
    }
}

fn forge_segment(disk: &SimDisk, path: &str, edit: &dyn Fn(usize, FrameKind, &mut Vec<u8>)) {
    let mut bytes = disk.contents(path).unwrap();
    let salt = Life::decode(&bytes).unwrap().salt;
    let mut frames = Vec::new();
    let mut at = FIRST_FRAME;
    while let Some(header) = frame::decode_header(&bytes[at..], salt) {
        let end = at + usize::try_from(header.frame_len()).unwrap();
        frames.push((header, bytes[at..end].to_vec()));
        at = end;
    }
    bytes[FIRST_FRAME..at].fill(0);
    let (mut at, mut chain) = (FIRST_FRAME, 0u32);
    for (number, (header, mut new)) in frames.into_iter().enumerate() {
        new.truncate(header.header_len as usize + header.body_len as usize);
        edit(number, header.kind, &mut new);
        let head = header.header_len as usize;
        let body_len = u32::try_from(new.len() - head).unwrap();
        new[8..12].copy_from_slice(&body_len.to_le_bytes());
        let body_crc = crc::crc32c(&new[head..]);
        new[12..16].copy_from_slice(&body_crc.to_le_bytes());
        new[60..64].copy_from_slice(&chain.to_le_bytes());
        chain = frame::salted_crc32c(salt, &new[4..head]);
        new[..4].copy_from_slice(&chain.to_le_bytes());
        bytes[at..at + new.len()].copy_from_slice(&new);
        at += new.len().next_multiple_of(8);
    }
    disk.replace(path, bytes);
}

/// Whether a reader reaches the end of a log with three records within 20 pages.
fn ends(core: &Arc<Core>, log: &str) -> bool {
    let mut next = Lsn::ZERO;
    for _ in 0..20 {
        let request = read_request(log, ReadStart::Lsn(next));
        match read::page(&core.store, &request, Reach::Disk) {
            Ok(page) if page.next_lsn < page.tail_lsn => next = page.next_lsn,
            Err(ReadError::Quarantined { to: Some(to), .. }) => next = to,
            Ok(_) | Err(_) => return true,
        }
    }
    false
}

/// Checks that the rest of the store is served, or refused with a known error.
fn survives(disk: &SimDisk, what: &str) {
    let findings = verified(disk);
    let refused = |error: OpenError| match error {
        OpenError::NotAStore { .. } | OpenError::TooNew { .. } | OpenError::Damaged(_) => {}
        error => panic!("{what}: {error}"),
    };
    let named = findings.map(|findings| !findings.is_empty());
    if let Err(error) = repaired(disk, &small_config()) {
        refused(error);
    }
    match open(&disk.copy(), &small_config(), &TestClock::new()) {
        Err(error) => refused(error),
        Ok((core, report)) => {
            let told =
                report.torn_bytes > 0 || !report.findings.is_empty() || !report.damage.is_empty();
            assert!(told || named.unwrap(), "{what}: nobody names it");
            for log in ["a", "b", "new"] {
                let batch = batch(&[(log, &[b"more"])]);
                let mut ticket = core.enqueue(batch, Durability::Durable);
                core.turn();
                let _refused = settled(&mut ticket).expect("settled");
                assert!(ends(&core, log), "{what}: {log} has no end");
            }
            core.close().unwrap();
        }
    }
}

#[test]
fn forged_headers_are_damage() {
    let fixture = store();
    let fields = [(16, 4), (24, 8), (32, 8), (40, 8)];
    for number in 0..6 {
        for (field, bytes) in fields {
            for value in [u64::MAX, u64::MAX - 4095, 1 << 63, 1 << 62, 1 << 31] {
                let disk = fixture.disk.copy();
                forge(&disk, &|frame, _, new| {
                    if frame == number {
                        new[field..field + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
                    }
                });
                if files(&disk) != files(&fixture.disk) {
                    survives(&disk, &format!("frame {number}, byte {field}: {value:x}"));
                }
            }
        }
    }
}

#[test]
fn forged_links_are_damage() {
    use crate::format::body::Link;
    let fixture = store().restart();
    let edits: [(&str, Edit<'_, Link>); 9] = [
        ("end within all bounds", &|link| {
            link.predecessor_end = Position::new(1 << 61);
        }),
        ("epoch", &|link| {
            link.recovery_epoch = RecoveryEpoch::new(u64::MAX)
        }),
        ("epoch 2^24", &|link| {
            link.recovery_epoch = RecoveryEpoch::new(1 << 24)
        }),
        ("counter", &|link| link.next_log_counter = u64::MAX),
        ("counter 2^40", &|link| {
            link.next_log_counter = (1 << 40) - 1
        }),
        ("end", &|link| {
            link.predecessor_end = Position::new(u64::MAX)
        }),
        ("predecessor", &|link| {
            link.predecessor = Some(SegmentId::new(u64::MAX))
        }),
        ("second", &|link| {
            link.second = Some(SegmentId::new(u64::MAX))
        }),
        ("lost", &|link| {
            link.lost_before = Some(Position::new(u64::MAX))
        }),
    ];
    for (what, edit) in edits {
        let disk = fixture.disk.copy();
        forge(&disk, &|_, kind, new| {
            if kind == FrameKind::Link {
                let head = usize::from(u16::from_le_bytes([new[4], new[5]])) * 8;
                let mut link = Link::decode(&new[head..]).unwrap();
                edit(&mut link);
                new.truncate(head);
                new.extend(link.encode());
            }
        });
        survives(&disk, what);
    }
}

#[test]
fn frame_that_claims_too_much_is_damage() {
    let config = StorageConfig {
        segment_bytes: 2 << 20,
        ..small_config()
    };
    let fixture = Fixture::with(SimDisk::new(), config);
    let created = fixture.core.create_in_turn(
        LogName::new("packed").unwrap(),
        LogConfig {
            compression: Some(Compression::Lz4),
            ..LogConfig::default()
        },
    );
    fixture.core.turn();
    drop(created);
    fixture.append("packed", &[1; 700_000]).unwrap();
    fixture.append("other", b"good").unwrap();
    // Some 340 KiB that decompress to 80 MiB, as lz4 makes them.
    let body = vec![0; 80 << 20];
    let mut stored = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
    stored.extend(lz4_flex::block::compress(&body));
    drop(body);
    let disk = fixture.disk.copy();
    forge(&disk, &|_, kind, new| {
        let head = usize::from(u16::from_le_bytes([new[4], new[5]])) * 8;
        let codec = new[20] & 7;
        if kind == FrameKind::Batch && codec & 3 == 1 {
            new.truncate(head);
            new.extend_from_slice(&stored);
            if let Some(cipher) = &fixture.config.cipher {
                let bound = BodyPlace {
                    log: fixture.core.logs.by_name("packed").unwrap().id,
                    first_lsn: Lsn::ZERO,
                    count: 1,
                    codec,
                };
                let key = cipher.newest(bound.log).unwrap();
                let times = (Timestamp::from_micros(1), Timestamp::from_micros(1));
                sealed::seal(new, head, &*key, &bound, 80 << 20, times);
            }
        }
    });
    // The frame is longer than before, so later frames are not at the position that they name.
    let findings = verified(&disk).unwrap();
    let claims = "claims 83886080 bytes decompressed, and no body of this store is larger than";
    assert!(
        findings.iter().any(|found| found.detail.contains(claims)),
        "{findings:?}"
    );
    let fixture = Fixture::with(disk, fixture.config.clone());
    assert!(
        fixture.report.damage.iter().any(|gap| gap.log.is_some()),
        "{:?}",
        fixture.report
    );
    assert!(matches!(
        fixture.read("packed", 0),
        Err(ReadError::Quarantined { .. })
    ));
}

#[test]
fn format_tells_bodies_that_are_larger_than_those_of_any_store() {
    let fixture = store();
    let text = || String::from_utf8(fixture.disk.contents("FORMAT").unwrap()).unwrap();
    assert!(text().contains("version 1\n") && !text().contains("largest_body"));
    let disk: Arc<dyn Disk> = Arc::new(fixture.disk.clone());
    directory::allow(&*disk, 4 << 20).unwrap();
    assert!(
        text().contains("version 1\n"),
        "versions before this one read it"
    );
    let id = directory::read_format(&*disk).unwrap();
    let larger = bounds::LARGEST_BODY + 4096;
    directory::allow(&*disk, larger).unwrap();
    assert!(text().contains("version 2\n"), "{}", text());
    assert!(
        text().contains(&format!("largest_body {larger}\n")),
        "{}",
        text()
    );
    directory::allow(&*disk, larger - 1).unwrap();
    assert!(
        text().contains(&format!("largest_body {larger}\n")),
        "it only grows"
    );
    assert_eq!(directory::read_format(&*disk).unwrap(), id);
    assert!(bounds::allowed_body() >= larger);
    assert!(
        verified(&fixture.disk)
            .unwrap()
            .iter()
            .all(|f| f.file.as_deref() != Some("FORMAT"))
    );
    assert_eq!(fixture.restart().contents("a").len(), 2);
}

/// A backup of a store, as a manifest and its content.
fn backup(fixture: &Fixture) -> (SimDisk, BackupManifest) {
    let content = SimDisk::new();
    let mut files = Vec::new();
    let journal = fixture.disk.list("journal").unwrap();
    let mut paths: Vec<_> = journal
        .iter()
        .map(|name| format!("journal/{name}"))
        .collect();
    paths.push("FORMAT".to_owned());
    for path in paths {
        let bytes = fixture.disk.contents(&path).unwrap();
        if path != "FORMAT" && bytes[FIRST_FRAME..].iter().all(|byte| *byte == 0) {
            continue;
        }
        let digest = ContentDigest::of(&bytes);
        files.push(BackupFile {
            path,
            bytes: bytes.len() as u64,
            digest,
            known: true,
        });
        content.replace(&content_path(digest), bytes);
    }
    let manifest = BackupManifest {
        store_id: fixture.core.store_id,
        recovery_epoch: RecoveryEpoch::new(1),
        position: fixture.core.journal.written(),
        created: Timestamp::default(),
        files,
        damage: Vec::new(),
        signed_by: None,
    };
    (content, manifest)
}

#[test]
fn made_up_manifests_are_refused_with_what_is_wrong() {
    let fixture = store();
    let (content, manifest) = backup(&fixture);
    let open = |manifest: &BackupManifest| {
        BackupView::open(Arc::new(content.clone()), manifest, None).map(drop)
    };
    open(&manifest).unwrap();
    let edits: [(&str, Edit<'_, BackupManifest>); 8] = [
        ("recovery epoch 18446744073709551615, above", &|m| {
            m.recovery_epoch = RecoveryEpoch::new(u64::MAX);
        }),
        ("recovery epoch 16777216, above", &|m| {
            m.recovery_epoch = RecoveryEpoch::new(1 << 24)
        }),
        ("recovery epoch 8388607, above", &|m| {
            m.recovery_epoch = RecoveryEpoch::new((1 << 23) - 1)
        }),
        ("position 18446744073709551615, above", &|m| {
            m.position = Position::new(u64::MAX)
        }),
        ("position 9223372036854775808, above", &|m| {
            m.position = Position::new(1 << 63)
        }),
        ("of 9223372036854775808 bytes is none", &|m| {
            m.files[0].bytes = 1 << 63
        }),
        ("it has no FORMAT", &|m| m.files.clear()),
        ("\"../../evil\"", &|m| {
            m.files[0].path = "../../evil".to_owned()
        }),
    ];
    for (what, edit) in edits {
        let mut bad = manifest.clone();
        edit(&mut bad);
        match open(&bad) {
            Err(RestoreError::Manifest(told)) => assert!(told.contains(what), "{told}"),
            other => panic!("{what}: {other:?}"),
        }
    }
    // 200,000 indexes of one content.
    let mut many = manifest.clone();
    for number in 0..200_000u64 {
        many.files.push(BackupFile {
            path: format!("index/{:016x}.idx", number + 100),
            ..manifest.files[0].clone()
        });
    }
    let told = open(&many).unwrap_err().to_string();
    assert!(
        told.contains("index/0000000000000064.idx") && told.contains("same content"),
        "{told}"
    );
}
