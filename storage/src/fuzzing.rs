//! What the fuzz targets of `storage/fuzz` call: everything that reads bytes of a data
//! directory, with what must hold for any bytes at all. Checksums are made to fit on the
//! way, or no mutation would get past them; each target says how.
//!
//! Every function takes an input as the fuzzer mutates it, and panics if something that
//! must hold does not.

mod backup;
mod frames;
mod recovery;
mod tables;

pub use backup::{backup, backup_seeds};
pub use frames::{body, frame};
pub use recovery::{recovery, recovery_seeds};
pub use tables::{checkpoint, index, table_seeds};

use arbitrary::Unstructured;

/// One number off the front of an input; 0 where it has ended.
fn number<T: for<'a> arbitrary::Arbitrary<'a> + Default>(input: &mut Unstructured<'_>) -> T {
    input.arbitrary().unwrap_or_default()
}
