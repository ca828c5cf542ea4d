//! Files of settings: certificates, keys, tokens.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// A sentence with the path.
pub(crate) fn read_small(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let failed = |error| format!("cannot read {}: {error}", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    (file.take(most + 1).read_to_end(&mut bytes)).map_err(failed)?;
    match bytes.len() as u64 > most {
        true => Err(format!(
            "{} is larger than {} KiB",
            path.display(),
            most >> 10
        )),
        false => Ok(bytes),
    }
}
