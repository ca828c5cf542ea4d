//! The objects of the write-ahead log that no file of the database covers yet.
//!
//! The owner keeps each object for a minute or two after its rows are in a file, so a busy log has thousands of them. Only
//! those behind the replayed ones are listed here: about 256 at most, and a few after a planned end.

use std::sync::Arc;

use futures_util::TryStreamExt as _;
use object_store::path::Path;
use object_store::{Error, ObjectStore};

use super::DATABASE;

/// Path of the object with this number. Paths sort by number.
pub(super) fn path(number: u64) -> Path {
    Path::from(format!("{DATABASE}/wal/{number:020}.sst"))
}

/// Number of the object at this path; `None` if the path is not one of the log.
pub(super) fn number(location: &Path) -> Option<u64> {
    let mut parts = location.parts().rev();
    let name = parts.next()?;
    let number = name.as_ref().strip_suffix(".sst")?.parse().ok()?;
    (parts.next()?.as_ref() == "wal").then_some(number)
}

/// Numbers of the objects above `replayed`, in order.
///
/// # Errors
/// If the store fails.
pub(super) async fn numbers_after(
    store: &Arc<dyn ObjectStore>,
    replayed: u64,
) -> Result<Vec<u64>, Error> {
    let directory = Path::from(format!("{DATABASE}/wal"));
    let objects = store.list_with_offset(Some(&directory), &path(replayed));
    let numbers = objects.try_filter_map(|object| async move { Ok(number(&object.location)) });
    let mut numbers: Vec<u64> = numbers.try_collect().await?;
    // A store may ignore the offset.
    numbers.retain(|number| *number > replayed);
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt as _;
    use object_store::memory::InMemory;

    use super::*;

    #[tokio::test]
    async fn only_objects_behind_the_replayed_ones_are_listed() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let other = Path::from(format!("{DATABASE}/wal/x.sst"));
        for path in [9, 10, 11, 100, 1_000].map(path).iter().chain([&other]) {
            store.put(path, "x".into()).await.unwrap();
        }
        assert_eq!(number(&path(u64::MAX)), Some(u64::MAX));
        assert_eq!(number(&Path::from("db/compacted/7.sst")), None);
        let found = numbers_after(&store, 10).await.unwrap();
        assert_eq!(found, [11, 100, 1_000]);
        assert!(numbers_after(&store, 1_000).await.unwrap().is_empty());
    }
}
