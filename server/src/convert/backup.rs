//! Backups: manifests and content, both ways.

use bytes::Bytes;
use wald_proto::v1;
use wald_storage::{
    BackupDamage, BackupFile, BackupManifest, ContentDigest, LogName, Lsn, Position, RecoveryEpoch,
    Timestamp, records_in_words,
};

use super::{proto_timestamp, uuid};

/// The first part of a backup: the bytes of its manifest file.
pub(crate) fn backup_manifest(file: Vec<u8>) -> v1::BackupResponse {
    v1::BackupResponse {
        part: Some(v1::backup_response::Part::ManifestFile(file.into())),
    }
}

/// A manifest as the contract has it.
pub(crate) fn proto_manifest(manifest: &BackupManifest) -> v1::BackupManifest {
    let files = manifest.files.iter().map(|file| v1::BackupFile {
        path: file.path.clone(),
        file_bytes: file.bytes,
        digest: file.digest.to_bytes().into(),
        known: file.known,
    });
    v1::BackupManifest {
        store_id: uuid(manifest.store_id),
        recovery_epoch: manifest.recovery_epoch.get(),
        position: Some(manifest.position.get()),
        files: files.collect(),
        create_time: Some(proto_timestamp(manifest.created)),
        findings: manifest.damage.iter().map(finding).collect(),
    }
}

/// A piece of a file.
pub(crate) fn backup_chunk(file: usize, offset: u64, data: Bytes) -> v1::BackupResponse {
    let chunk = v1::BackupChunk {
        // A manifest with more files would not fit a message.
        file: u32::try_from(file).unwrap_or(u32::MAX),
        offset,
        data,
    };
    v1::BackupResponse {
        part: Some(v1::backup_response::Part::Chunk(chunk)),
    }
}

fn finding(damage: &BackupDamage) -> v1::Finding {
    let detail = match (&damage.records, damage.to) {
        (Some((log, from, to)), _) => {
            format!("damage in log {log:?}: {}", records_in_words(*from, *to))
        }
        (None, Some(to)) => format!(
            "positions {} to {to} do not match their checksums",
            damage.from
        ),
        (None, None) => format!("records at position {} are gone", damage.from),
    };
    v1::Finding {
        kind: v1::FindingKind::Checksum.into(),
        segment_id: damage.segment.map(|segment| segment.get()),
        from_position: Some(damage.from.get()),
        to_position: damage.to.map(Position::get),
        log: damage
            .records
            .as_ref()
            .map_or_else(String::new, |(log, ..)| log.as_str().to_owned()),
        from_lsn: damage.records.as_ref().map(|(_, from, _)| from.get()),
        to_lsn: damage.records.as_ref().map(|(.., to)| to.get()),
        detail,
        file: String::new(),
        severity: v1::FindingSeverity::Loss.into(),
        advice: "the backup holds these bytes as they are; an older backup may hold them whole"
            .to_owned(),
        log_id: 0,
    }
}

/// A manifest that was kept; `None` if it has values that no backup has.
pub(crate) fn kept_manifest(manifest: &v1::BackupManifest) -> Option<BackupManifest> {
    let created = manifest.create_time.as_ref();
    let created = created.map_or(0, |time| {
        time.seconds
            .saturating_mul(1_000_000)
            .saturating_add(i64::from(time.nanos / 1000))
    });
    let file = |file: &v1::BackupFile| {
        Some(BackupFile {
            path: file.path.clone(),
            bytes: file.file_bytes,
            digest: ContentDigest::from_bytes(&file.digest)?,
            known: true,
        })
    };
    let damage = |finding: &v1::Finding| {
        let records = match (finding.from_lsn, finding.to_lsn) {
            (Some(from), Some(to)) => {
                let log = LogName::new(&finding.log).ok()?;
                Some((log, Lsn::new(from), Lsn::new(to)))
            }
            _ => None,
        };
        Some(BackupDamage {
            segment: finding.segment_id.map(wald_storage::SegmentId::new),
            from: Position::new(finding.from_position?),
            to: finding.to_position.map(Position::new),
            records,
        })
    };
    Some(BackupManifest {
        store_id: u128::from_str_radix(&manifest.store_id.replace('-', ""), 16).ok()?,
        recovery_epoch: RecoveryEpoch::new(manifest.recovery_epoch),
        position: Position::new(manifest.position?),
        created: Timestamp::from_micros(created),
        files: manifest.files.iter().map(file).collect::<Option<_>>()?,
        damage: manifest.findings.iter().filter_map(damage).collect(),
        signed_by: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_of_a_backup_names_the_last_damaged_lsn() {
        let log = LogName::new("a").expect("a name");
        let found = finding(&BackupDamage {
            segment: None,
            from: Position::ZERO,
            to: None,
            records: Some((log, Lsn::new(20_000), Lsn::new(21_000))),
        });
        assert_eq!(found.detail, "damage in log \"a\": records 20000 to 20999");
        assert_eq!((found.from_lsn, found.to_lsn), (Some(20_000), Some(21_000)));
    }
}
