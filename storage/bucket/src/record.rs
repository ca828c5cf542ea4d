//! Small objects in JSON that several nodes change: created once, then swapped. Each write has a nonce, so that a writer
//! recognises its own write after an unclear answer.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::bucket::{Bucket, Put, Tag, WriteCondition};
use crate::error::{BucketError, BucketErrorKind};

/// Maximum bytes of a record.
pub const LARGEST_RECORD: u64 = 64 << 10;

/// A record in the version that was read or written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketRecord<T> {
    /// The content.
    pub value: T,
    tag: Tag,
}

#[derive(Serialize, Deserialize)]
struct Stored<T> {
    nonce: String,
    value: T,
}

impl<T: Serialize + DeserializeOwned> BucketRecord<T> {
    /// Reads a record; `None` if it does not exist.
    ///
    /// # Errors
    /// `Damaged` if the object is none; others if the store fails.
    pub async fn read(bucket: &Bucket, path: &str) -> Result<Option<Self>, BucketError> {
        let Some((bytes, tag)) = bucket.read(path, LARGEST_RECORD).await? else {
            return Ok(None);
        };
        let stored: Stored<T> = serde_json::from_slice(&bytes).map_err(|error| {
            let what = format!("{path} is no record of this version: {error}");
            BucketError::new(BucketErrorKind::Damaged, bucket.place(), what)
        })?;
        let value = stored.value;
        Ok(Some(Self { value, tag }))
    }

    /// Creates a record; `None` if another writer has created it.
    ///
    /// # Errors
    /// If the store fails. Then the record may or may not exist.
    pub async fn create(
        bucket: &Bucket,
        path: &str,
        value: T,
    ) -> Result<Option<Self>, BucketError> {
        Self::write(bucket, path, value, WriteCondition::Absent).await
    }

    /// Replaces this version of the record; `None` if another writer has changed it.
    ///
    /// # Errors
    /// If the store fails. Then the record may or may not be replaced.
    pub async fn swap(
        &self,
        bucket: &Bucket,
        path: &str,
        value: T,
    ) -> Result<Option<Self>, BucketError> {
        Self::write(bucket, path, value, WriteCondition::Is(&self.tag)).await
    }

    /// Changes a record as often as it takes, until it is another writer's or is gone.
    ///
    /// # Errors
    /// As [`BucketRecord::read`] and [`BucketRecord::swap`].
    pub(crate) async fn change(
        bucket: &Bucket,
        path: &str,
        is_own: impl Fn(&T) -> bool,
        change: impl Fn(&mut T),
    ) -> Result<(), BucketError>
    where
        T: Clone,
    {
        while let Some(found) = Self::read(bucket, path)
            .await?
            .filter(|it| is_own(&it.value))
        {
            let mut next = found.value.clone();
            change(&mut next);
            if found.swap(bucket, path, next).await?.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// Whether both are one version.
    pub fn is_same_version(&self, other: &Self) -> bool {
        self.tag == other.tag
    }

    async fn write(
        bucket: &Bucket,
        path: &str,
        value: T,
        condition: WriteCondition<'_>,
    ) -> Result<Option<Self>, BucketError> {
        let refused =
            |what: String| BucketError::new(BucketErrorKind::Settings, bucket.place(), what);
        let nonce = random(bucket.place())?;
        let stored = Stored { nonce, value };
        let bytes = serde_json::to_vec(&stored).map_err(|error| refused(error.to_string()))?;
        if bytes.len() as u64 > LARGEST_RECORD {
            return Err(refused(format!(
                "the record {path} would have {} bytes",
                bytes.len()
            )));
        }
        let value = stored.value;
        Ok(match bucket.put_if(path, bytes.into(), condition).await? {
            Put::Done(tag) => Some(Self { value, tag }),
            Put::Lost => None,
        })
    }
}

/// 128 random bits in hexadecimal digits.
pub(crate) fn random(place: &str) -> Result<String, BucketError> {
    let mut drawn = [0; 16];
    getrandom::fill(&mut drawn).map_err(|error| {
        let what = format!("the system has no random bytes: {error}");
        BucketError::new(BucketErrorKind::Unavailable, place, what)
    })?;
    Ok(format!("{:032x}", u128::from_le_bytes(drawn)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, faulty};

    #[tokio::test]
    async fn one_writer_creates_and_one_swaps() {
        let (bucket, faults, _) = faulty();
        assert_eq!(
            BucketRecord::<u64>::read(&bucket, "owner").await.unwrap(),
            None
        );
        let first = BucketRecord::create(&bucket, "owner", 7_u64)
            .await
            .unwrap()
            .unwrap();
        // The same content from another writer is not this writer's record.
        assert_eq!(
            BucketRecord::create(&bucket, "owner", 7_u64).await.unwrap(),
            None
        );
        faults.next_puts([StoreFault::AnswerLost]);
        let second = first.swap(&bucket, "owner", 8).await.unwrap().unwrap();
        assert_eq!(first.swap(&bucket, "owner", 8).await.unwrap(), None);
        let read = BucketRecord::<u64>::read(&bucket, "owner")
            .await
            .unwrap()
            .unwrap();
        assert!(read.value == 8 && read.is_same_version(&second) && !read.is_same_version(&first));
    }

    #[tokio::test]
    async fn an_object_that_is_no_record_is_damage() {
        let (bucket, _, _) = faulty();
        bucket.put("owner", "{\"nonce\":1}".into()).await.unwrap();
        let error = BucketRecord::<u64>::read(&bucket, "owner")
            .await
            .unwrap_err();
        assert_eq!(error.kind(), BucketErrorKind::Damaged);
        let large = "x".repeat(usize::try_from(LARGEST_RECORD).unwrap());
        assert!(BucketRecord::create(&bucket, "large", large).await.is_err());
    }
}
