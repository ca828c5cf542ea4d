//! The test that a store keeps the metadata of objects. A bucket without them passes the probe of conditions, and works
//! until the first answer is lost.

use object_store::path::Path;
use object_store::{
    Attribute, Attributes, GetOptions, ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions,
};

use super::error::{TailError, TailErrorKind};
use crate::bucket::Bucket;
use crate::error::store_words;
use crate::record::random;

/// Writes an object with metadata, reads them, and removes the object: 3 requests.
///
/// # Errors
/// `Refused` if the store does not keep the metadata. `Unreachable` if it fails.
pub async fn probe_metadata(bucket: &Bucket) -> Result<(), TailError> {
    let place = bucket.place();
    let fails = |error: &dyn std::fmt::Display| {
        let what = format!("cannot probe the metadata of objects: {error}");
        TailError::new(TailErrorKind::Unreachable, place, what)
    };
    let failed = |error: object_store::Error| fails(&store_words(&error));
    let id = random(place).map_err(|error| fails(&error))?;
    let path = Path::from(format!("probe/{id}"));
    let name = Attribute::Metadata("waldprobe".into());
    let options = PutOptions {
        mode: PutMode::Create,
        attributes: Attributes::from_iter([(name.clone(), id.clone())]),
        ..PutOptions::default()
    };
    let store = bucket.store();
    let put = store.put_opts(&path, id.clone().into(), options).await;
    put.map_err(failed)?;
    let options = GetOptions {
        head: true,
        ..GetOptions::default()
    };
    let found = store.get_opts(&path, options).await;
    store.delete(&path).await.map_err(failed)?;
    let kept = found.map_err(failed)?;
    if kept.attributes.get(&name).is_some_and(|kept| **kept == *id) {
        return Ok(());
    }
    let what = "the store does not keep the metadata of objects, so that an owner cannot recognise its own writes after \
                a lost answer; use another store";
    Err(TailError::new(TailErrorKind::Refused, place, what))
}
