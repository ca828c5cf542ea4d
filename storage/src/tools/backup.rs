//! Backups: finished files at one position, with their digests; and stores made of them.
//!
//! ```text
//!  leave the segment ─▶ index it, checkpoint ─▶ digest each file ─▶ manifest ─▶ content
//!  (a roll: commits     (if that is due)        (frames verified    (known files are
//!   go on in the next)                           on the way)         only named)
//! ```
//!
//! Finished segments never change. A backup therefore needs no copy and delays no other work: it reads the
//! files in place. While it lists files, no file is removed. From then on it holds the files it listed, and
//! every other file is removed as usual. A backup stores the frames of a segment; the zeros behind them are no
//! content.
//!
//! Once the manifest is made, a backup holds the files whose content it still has to send. It releases each file when
//! its content was sent. A backup without a reader for [`UNREAD`] ends, and holds nothing from then on.
//!
//! A [`BackupView`] shows a manifest and its content as the directory that it was, cut at a position on
//! request. A store is opened, verified and restored through it.
//!
//! [`UNREAD`]: crate::disk::held_files::UNREAD

mod copy;
mod frames;
mod kept;
mod replica;
mod restore;
mod take;
mod view;

pub use self::copy::CopyTail;
pub use self::kept::{KeptContent, SetAside, open_kept, remove_kept_content, set_aside};
pub use self::replica::{ReplicaCheck, ReplicaContent, RestoredAs, clear_unfinished_take_over};
pub use self::restore::{Restored, refuse_if_locked, refuse_if_used};
pub(crate) use self::restore::{
    begin as begin_restore, finish as finish_restore, flush_names, refuse_target, write,
};
pub(crate) use self::take::{begin, begin_finished};
pub use self::view::{BackupCheck, BackupView, content_path};

/// Bytes read in one step.
const STEP: usize = 512 << 10;
