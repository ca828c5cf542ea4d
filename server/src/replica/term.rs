//! The term that the data directory has claimed last, in its file TERM. It is durable before the claim, so that a later start
//! recognises its own claim.

use std::io;
use std::path::Path;

use wald_storage::{KeptTerm, RealDisk};

use crate::serve::Exit;

/// The term that the directory has claimed last of this store; `None` if it has claimed none. A file of another store counts
/// as none: the start then compares the directory with the bucket.
///
/// # Errors
/// If the file is damaged or cannot be read. Nothing was changed.
pub(super) fn kept(directory: &Path, store_id: u128) -> Result<Option<u64>, Exit> {
    let disk = RealDisk::open(directory).map_err(|error| unusable(directory, &error))?;
    match KeptTerm::read(&*disk) {
        Ok(kept) => Ok(kept
            .filter(|kept| kept.store_id == store_id)
            .map(|kept| kept.term)),
        Err(error) => Err(unusable(directory, &error)),
    }
}

fn unusable(directory: &Path, why: &dyn std::fmt::Display) -> Exit {
    let text = format!(
        "cannot read {}/TERM: {why}; it has the term that this directory has claimed last in the bucket; nothing was changed: \
         let the daemon read the file, or move it away and start with --take-over, which compares the directory with the \
         bucket before it claims the store",
        directory.display()
    );
    Exit::new(Exit::IO, text)
}

/// Replaces the term, durably.
///
/// # Errors
/// If the file system fails. The term before stays.
pub(super) fn keep(directory: &Path, store_id: u128, term: u64) -> io::Result<()> {
    let disk = RealDisk::open(directory).map_err(io::Error::other)?;
    KeptTerm { store_id, term }.write(&*disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn term_is_of_one_store_and_a_damaged_one_names_path_and_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let read = |store_id| kept(path, store_id).ok().unwrap();
        assert_eq!(read(7), None);
        keep(path, 7, 41).unwrap();
        keep(path, 7, 42).unwrap();
        assert_eq!((read(7), read(8)), (Some(42), None));
        for name in std::fs::read_dir(path).unwrap() {
            let name = name.unwrap().file_name();
            assert!(wald_storage::is_own_name(name.to_str().unwrap()));
        }
        let file = path.join("TERM");
        std::fs::write(&file, "7").unwrap();
        let refused = kept(path, 7).unwrap_err();
        assert_eq!(refused.code, Exit::IO);
        for part in [file.to_str().unwrap(), "the file is damaged", "--take-over"] {
            assert!(refused.message.contains(part), "{}", refused.message);
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"7");
    }
}
