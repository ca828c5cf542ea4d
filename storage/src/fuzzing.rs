//! Functions for the fuzz targets of `storage/fuzz`: all code that reads bytes of a data directory or cursors of
//! clients, with conditions that must hold for any bytes. The functions make checksums valid, or no mutation would
//! pass them; each target describes its method.
//!
//! Every function takes an input as the fuzzer mutates it, and panics if a condition does not hold.

mod backup;
mod cursor;
mod frames;
mod recovery;
mod tables;

use arbitrary::Unstructured;

pub use backup::{backup, backup_seeds};
pub use cursor::{cursor, cursor_seeds};
pub use frames::{body, frame};
pub use recovery::{recovery, recovery_seeds};
pub use tables::{checkpoint, index, table_seeds};

/// Takes one number off the front of an input; 0 if the input has ended.
fn number<T: for<'a> arbitrary::Arbitrary<'a> + Default>(input: &mut Unstructured<'_>) -> T {
    input.arbitrary().unwrap_or_default()
}
