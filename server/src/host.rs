//! The machine around the store: the owner of the data directory, other users who can open it,
//! and the destination of a core dump.

use std::path::Path;

use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
use wald_storage::Owner;

use crate::config::{Config, Size};
use crate::serve::Exit;

/// Refuses to create files as root in a directory of another user, who could not read them.
///
/// # Errors
/// If the directory is such a one and the setting does not allow it.
pub(crate) fn check_owner(config: &Config, directory: &Path) -> Result<(), Exit> {
    match wald_storage::owner(directory) {
        Ok(Owner::OtherThanRoot(user)) if !config.allow_foreign_owner => Err(Exit::new(
            Exit::CONFIG,
            format!(
                "{} belongs to user {user}, and this process is root: the files it makes there \
                 would be root's; run it as that user (sudo -u '#{user}' wald ...), or pass \
                 --allow-foreign-owner",
                directory.display()
            ),
        )),
        // Whatever else is wrong with the directory, opening it reports it.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Minimum bytes of a store in addition to its segments.
const BESIDE_SEGMENTS: u64 = 1 << 20;

/// Refuses a volume on which the first segments would not fit: the one that is written, the next one,
/// and the reserve. For a new store (`is_new`) the free space counts, because without it no append
/// would ever succeed.
///
/// # Errors
/// With the least size and the settings to change.
pub(crate) fn check_volume(config: &Config, directory: &Path, is_new: bool) -> Result<(), Exit> {
    // The directory may still be made. Where nothing can be looked at, opening it reports why.
    let there = directory.ancestors().find(|path| path.exists());
    let Some(Ok(volume)) = there.map(rustix::fs::statvfs) else {
        return Ok(());
    };
    let size = volume.f_blocks.saturating_mul(volume.f_frsize);
    let free = volume.f_bavail.saturating_mul(volume.f_frsize);
    match lacks_space(config, size, is_new.then_some(free)) {
        None => Ok(()),
        Some(what) => Err(Exit::new(
            Exit::CONFIG,
            format!("the volume of {} has {what}", directory.display()),
        )),
    }
}

/// Refuses a volume on which a store that is fetched from a bucket would not fit. `bytes`: of its files.
///
/// # Errors
/// With both sizes.
#[cfg(feature = "object")]
pub(crate) fn check_fetch(config: &Config, directory: &Path, bytes: u64) -> Result<(), Exit> {
    // Opening the directory reports any other problem.
    let Ok(volume) = rustix::fs::statvfs(directory) else {
        return Ok(());
    };
    let free = volume.f_bavail.saturating_mul(volume.f_frsize);
    // Some file systems do not report their size.
    match volume.f_blocks > 0 && lacks_fetch_space(config, free, bytes) {
        false => Ok(()),
        true => Err(Exit::new(
            Exit::CONFIG,
            format!(
                "the volume of {} has {} free, and the store in the bucket needs {}; free space on the volume, or use \
                 another one; the owner of the store goes on",
                directory.display(),
                whole_mib(free),
                whole_mib(bytes.saturating_add(config.segment_bytes.0)),
            ),
        )),
    }
}

/// Whether a fetched store does not fit: its files, and one segment of the journal behind them.
#[cfg(feature = "object")]
fn lacks_fetch_space(config: &Config, free: u64, bytes: u64) -> bool {
    free < bytes.saturating_add(config.segment_bytes.0)
}

/// Whole MiB of a size, because an exact number of bytes is hard to read.
fn whole_mib(bytes: u64) -> Size {
    Size(bytes & !((1 << 20) - 1))
}

/// Why a volume of `size` bytes is too small, or its free bytes too few for a new store.
fn lacks_space(config: &Config, size: u64, free: Option<u64>) -> Option<String> {
    let segments = config.reserve_segments as u64 + 2;
    let least = segments.saturating_mul(config.segment_bytes.0) + BESIDE_SEGMENTS;
    // Some file systems do not report their size.
    if size == 0 {
        return None;
    }
    let needed = format!(
        "Wald needs {} at least: {segments} segments of {}",
        Size(least),
        config.segment_bytes
    );
    if size < least {
        return Some(format!(
            "{}, and {needed}; use a larger volume, or lower segment_bytes or reserve_segments",
            Size(size)
        ));
    }
    let free = free.filter(|free| *free < least)?;
    let free = whole_mib(free);
    Some(format!(
        "{free} free, and a new store cannot take appends there: {needed}; free space on the \
         volume, use another one, or lower segment_bytes or reserve_segments"
    ))
}

/// Refuses a data directory of this user that every user can open, if principals have rights: a file has none of them.
/// The directory of another owner only gets the warning, because this process cannot close it.
///
/// # Errors
/// If the directory is such a one and there is an `auth_file`.
pub(crate) fn check_strangers(config: &Config, directory: &Path) -> Result<(), Exit> {
    let is_own = matches!(wald_storage::owner(directory), Ok(Owner::Own));
    match wald_storage::strangers(directory) {
        Ok(Some(strangers)) if strangers.others && is_own && !config.auth_file.is_empty() => {
            let (path, mode) = (directory.display(), strangers.mode);
            Err(Exit::new(
                Exit::CONFIG,
                format!(
                    "{path} is open to every user of this machine (mode {mode:04o}), and the rights of auth_file do \
                     not protect its files; close it with: chmod 700 {path}"
                ),
            ))
        }
        // Whatever else is wrong with the directory, opening it reports it.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Warns if users other than the owner can open the data directory. Its mode stays: an operator
/// may have chosen it, and a volume may need it.
pub(crate) fn warn_of_strangers(directory: &Path) {
    let Ok(Some(strangers)) = wald_storage::strangers(directory) else {
        return;
    };
    let own = matches!(wald_storage::owner(directory), Ok(Owner::Own));
    if !own && !strangers.others {
        // A volume for a group: Kubernetes mounts them so for `fsGroup`.
        return;
    }
    let who = match strangers.others {
        true => "every user of this machine",
        false => "its group",
    };
    let path = directory.display();
    let remedy = match own {
        true => format!("close it with: chmod 700 {path}"),
        false => format!("let its owner close it with: chmod o-rwx {path}"),
    };
    tracing::warn!(
        data_dir = %path,
        mode = format!("{:04o}", strangers.mode),
        "the data directory is open to {who}; {remedy}"
    );
}

/// Lets no crash write memory to a file: it holds records, and core files lie anywhere.
pub(crate) fn write_no_core() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(
            %error,
            "core files cannot be switched off, so a crash may write records to one; set LimitCORE=0 or ulimit -c 0"
        );
    }
}

/// Lets no other process of this user read the memory, and no crash write it anywhere. Each function that reads or draws a
/// private key calls it first.
pub(crate) fn hide_memory() {
    write_no_core();
    let hidden = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = hidden {
        tracing::warn!(%error, "the memory of this process cannot be hidden from other processes of its user");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layers;

    const MIB: u64 = 1 << 20;

    #[test]
    fn free_space_counts_for_a_new_store_and_size_for_every_one() {
        let config = Layers::default().resolve().unwrap().config;
        for free in [6, 20, 37, 64] {
            let why = lacks_space(&config, 100 * MIB, Some(free * MIB)).unwrap();
            assert!(why.starts_with(&format!("{free}MiB free")), "{why}");
            assert!(why.contains("Wald needs 65MiB at least"), "{why}");
            assert!(
                why.contains("lower segment_bytes or reserve_segments"),
                "{why}"
            );
        }
        assert_eq!(lacks_space(&config, 100 * MIB, Some(65 * MIB)), None);
        // A store that is there goes on with the space that it has.
        assert_eq!(lacks_space(&config, 100 * MIB, None), None);
        let why = lacks_space(&config, 48 * MIB, None).unwrap();
        assert!(
            why.starts_with("48MiB, and Wald needs 65MiB at least"),
            "{why}"
        );
        assert_eq!(lacks_space(&config, 0, Some(0)), None);
    }

    #[cfg(feature = "object")]
    #[test]
    fn fetched_store_needs_its_files_and_a_segment() {
        let config = Layers::default().resolve().unwrap().config;
        let segment = config.segment_bytes.0;
        assert!(lacks_fetch_space(
            &config,
            100 * MIB + segment - 1,
            100 * MIB
        ));
        assert!(!lacks_fetch_space(&config, 100 * MIB + segment, 100 * MIB));
        assert!(lacks_fetch_space(&config, u64::MAX - 1, u64::MAX));
    }
}
