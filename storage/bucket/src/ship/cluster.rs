//! The record that says which store a bucket belongs to. Created once, never changed.

use serde::{Deserialize, Serialize};

use super::error::ShipError;
use crate::bucket::Bucket;
use crate::error::{BucketError, BucketErrorKind};
use crate::record::BucketRecord;

/// Path of the record.
const CLUSTER: &str = "cluster";
/// The only known version of the names and bytes below the prefix.
const FORMAT: u32 = 1;
/// The digest that names content in a new bucket. Older versions refuse such a bucket.
const HASH: &str = "blake3";
/// The digest in the record of an older version. The record stays: each manifest has a version, by which older versions
/// refuse the newer ones.
const OLD_HASH: &str = "xxh3-128";
/// Number of journals.
const SHARDS: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ClusterRecord {
    format: u32,
    /// 32 hexadecimal digits.
    store_id: String,
    hash: String,
    shards: u32,
}

/// The id of the store whose replica is in the bucket; `None` if there is no replica.
///
/// # Errors
/// `Damaged` if the record is of a version that this one does not know; others if the bucket fails.
pub(super) async fn store_id(bucket: &Bucket) -> Result<Option<u128>, BucketError> {
    let Some(found) = BucketRecord::<ClusterRecord>::read(bucket, CLUSTER).await? else {
        return Ok(None);
    };
    let record = found.value;
    let id = u128::from_str_radix(&record.store_id, 16).ok();
    let knows_hash = [HASH, OLD_HASH].contains(&record.hash.as_str());
    let known = record.format == FORMAT && knows_hash && record.shards == SHARDS;
    match id.filter(|_| known) {
        Some(id) => Ok(Some(id)),
        None => {
            let what = format!(
                "{CLUSTER} has format {}, hash {:?}, {} shards, store id {:?}; this version knows format {FORMAT}, {HASH} and \
                 {OLD_HASH}, {SHARDS} shard",
                record.format, record.hash, record.shards, record.store_id
            );
            Err(BucketError::new(
                BucketErrorKind::Damaged,
                bucket.place(),
                what,
            ))
        }
    }
}

/// Makes the bucket the one of this store, or makes sure that it is.
///
/// # Errors
/// `OtherStore` if it belongs to another store; others as [`store_id`].
pub(super) async fn claim(bucket: &Bucket, id: u128) -> Result<(), ShipError> {
    let mut found = store_id(bucket).await?;
    if found.is_none() {
        let record = ClusterRecord {
            format: FORMAT,
            store_id: format!("{id:032x}"),
            hash: HASH.to_owned(),
            shards: SHARDS,
        };
        found = match BucketRecord::create(bucket, CLUSTER, record).await? {
            Some(_) => Some(id),
            None => store_id(bucket).await?,
        };
    }
    match found {
        Some(found) if found == id => Ok(()),
        found => Err(ShipError::OtherStore {
            place: bucket.place().to_owned(),
            found: found.unwrap_or_default(),
            own: id,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::faulty;

    #[tokio::test]
    async fn records_of_both_digests_are_known_and_others_refused() {
        for (hash, is_known) in [(HASH, true), (OLD_HASH, true), ("sha1", false)] {
            let (bucket, ..) = faulty();
            let record = ClusterRecord {
                format: FORMAT,
                store_id: format!("{:032x}", 7),
                hash: hash.to_owned(),
                shards: SHARDS,
            };
            let made = BucketRecord::create(&bucket, CLUSTER, record).await;
            assert!(made.unwrap().is_some());
            let found = store_id(&bucket).await;
            match is_known {
                true => assert_eq!(found.unwrap(), Some(7)),
                false => {
                    let refused = found.unwrap_err().to_string();
                    assert!(refused.contains("\"sha1\""), "{refused}");
                }
            }
        }
        // A new bucket refuses older versions.
        let (bucket, ..) = faulty();
        claim(&bucket, 7).await.unwrap();
        let record = BucketRecord::<ClusterRecord>::read(&bucket, CLUSTER).await;
        assert_eq!(record.unwrap().unwrap().value.hash, "blake3");
        claim(&bucket, 7).await.unwrap();
        assert!(matches!(
            claim(&bucket, 8).await,
            Err(ShipError::OtherStore { .. })
        ));
    }
}
