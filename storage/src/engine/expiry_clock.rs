//! Resets the clock of retention in a store that nobody serves.
//!
//! The clock follows the system's clock back within 10 minutes of a run, if the system's clock shows
//! 2026 or later. A store whose first clock was years ahead stays there on a machine whose clock
//! shows less, or whose runs are shorter. A reset is a person's decision: the system's clock is
//! right now.

use std::sync::Arc;

use crate::api::config::StorageConfig;
use crate::api::error::OpenError;
use crate::base::clock::Clock;
use crate::base::ids::Timestamp;
use crate::base::metrics::NoObserver;
use crate::disk::Disk;
use crate::engine::{Core, Start};
use crate::recovery;
use crate::tools::verify::Offline;

/// Returns the time of the clock of retention: the last one that the store knows. `None` for a store of a
/// version without this clock. Changes nothing.
///
/// # Errors
/// If a process has the store, or it cannot be read.
pub fn expiry_clock(
    disk: &Arc<dyn Disk>,
    config: &StorageConfig,
) -> Result<Option<Timestamp>, OpenError> {
    let offline = Offline::open(Arc::clone(disk))?;
    Ok(recovery::look(disk, offline.store, config)?.expiry())
}

/// Sets the clock of retention to the time that `clock` shows, durably. Times of records that are
/// stored stay as they are.
///
/// # Errors
/// If a process has the store, or the store cannot be opened or closed.
pub fn reset_expiry_clock(
    disk: &Arc<dyn Disk>,
    config: &StorageConfig,
    clock: Arc<dyn Clock>,
) -> Result<(), OpenError> {
    let disks = (Arc::clone(disk), None);
    let observer = Arc::new(NoObserver);
    let (core, _) = Core::open_as(Start::ResetClock, disks, config.clone(), clock, observer)?;
    core.close_opened()
}
