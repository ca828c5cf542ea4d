//! Stores that this directory had before another node served the store. They may have the only copy of DURABLE records, so
//! only a person removes them.

use std::io;
use std::path::Path;

/// Directory of them, with a directory for each term.
const DIVERGED: &str = "diverged";

/// Number of the stores, and their bytes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Diverged {
    stores: u64,
    bytes: u64,
}

/// Reports their number and bytes, if there are any: nothing else shows that they fill the volume.
pub(super) fn report(directory: &Path) {
    let aside = directory.join(DIVERGED);
    match measure(&aside) {
        Ok(Diverged { stores: 0, .. }) => {}
        Ok(Diverged { stores, bytes }) => tracing::warn!(
            directory = %aside.display(),
            stores,
            bytes,
            "earlier stores of this directory take space, and nothing removes them: they may have records that no other node \
             has; read their segments with `wald dump`, and remove the directories that nobody needs"
        ),
        Err(error) => {
            tracing::warn!(%error, directory = %aside.display(), "cannot measure earlier stores")
        }
    }
}

fn measure(aside: &Path) -> io::Result<Diverged> {
    let mut found = Diverged::default();
    let stores = match std::fs::read_dir(aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        stores => stores?,
    };
    for store in stores {
        let store = store?;
        if store.file_type()?.is_dir() {
            found.stores += 1;
            found.bytes += bytes_in(&store.path())?;
        }
    }
    Ok(found)
}

/// Bytes of the files in a store and its directories, which have none themselves. Links are not followed.
fn bytes_in(store: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(store)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            for file in std::fs::read_dir(entry.path())? {
                bytes += file?.metadata()?.len();
            }
        } else {
            bytes += entry.metadata()?.len();
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_all_stores_count() {
        let directory = tempfile::tempdir().unwrap();
        let aside = directory.path().join(DIVERGED);
        assert_eq!(measure(&aside).unwrap(), Diverged::default());
        for (term, bytes) in [("3", 10), ("7", 100)] {
            let journal = aside.join(term).join("journal");
            std::fs::create_dir_all(&journal).unwrap();
            std::fs::write(aside.join(term).join("FORMAT"), "x").unwrap();
            std::fs::write(journal.join("1.seg"), vec![0; bytes]).unwrap();
        }
        let (stores, bytes) = (2, 112);
        assert_eq!(measure(&aside).unwrap(), Diverged { stores, bytes });
    }
}
