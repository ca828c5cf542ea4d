//! The file TERM of the data directory: the term that this directory has claimed last, and the store that it is of. It is
//! durable before the claim, so that a later start recognises its own claim.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use wald_storage::{TERM, TERM_NEW};

/// The term of this store; `None` if there is none.
pub(super) fn kept(directory: &Path, store_id: u128) -> Option<u64> {
    let text = fs::read_to_string(directory.join(TERM)).ok()?;
    let (id, term) = text.trim_end().split_once(' ')?;
    let id = u128::from_str_radix(id, 16).ok()?;
    term.parse().ok().filter(|_| id == store_id)
}

/// Replaces the term, durably.
///
/// # Errors
/// If the file system fails.
pub(super) fn keep(directory: &Path, store_id: u128, term: u64) -> io::Result<()> {
    let new = directory.join(TERM_NEW);
    let mut file = File::create(&new)?;
    file.write_all(format!("{store_id:032x} {term}\n").as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, directory.join(TERM))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_is_of_one_store_and_a_torn_one_counts_as_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(kept(path, 7), None);
        keep(path, 7, 41).unwrap();
        keep(path, 7, 42).unwrap();
        assert_eq!((kept(path, 7), kept(path, 8)), (Some(42), None));
        for name in fs::read_dir(path).unwrap() {
            let name = name.unwrap().file_name();
            assert!(wald_storage::is_own_name(name.to_str().unwrap()));
        }
        fs::write(path.join(TERM), "7").unwrap();
        assert_eq!(kept(path, 7), None);
    }
}
