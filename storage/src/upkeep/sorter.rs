//! Sorted runs: files that replace sealed journal segments. In a run the records of one log lie together, in
//! the order of their lsns. Trimmed and deleted records are gone.
//!
//! ```text
//! 0        8 KiB                                                                  size - 8
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! | life   | pack |         | images |         | order |         | run | marker | run | offset |
//! | blocks |      |         |        |         |       |         |     |        |     | of run |
//! +--------+------+-- ... --+--------+-- ... --+-------+-- ... --+-----+--------+-----+--------+
//! ```
//!
//! - A **pack** holds records of one log. Its *pieces* were frames of the journal. Their bodies are copied as
//!   they were stored. Its header describes each piece.
//! - **Images** describe the state of each log that the segments touched, at their end.
//! - **Order** gives the commit order of the pieces, for readers of many logs.
//! - **Run**, the last frame, names the segments that the run replaces. The eight bytes behind it give its
//!   offset. The frame is there twice, eight KiB apart: one good copy is enough.
//!
//! Runs follow each other without a gap from the beginning of the journal. A run is complete: it was flushed
//! before it got its name. Its frames lie at *addresses* beyond all positions, so that a place shows whether it
//! is in a run. Readers know a piece by its position in the journal, which the pack records.

mod build;
mod choose;
mod room;
mod sort;
mod write;

#[cfg(test)]
pub(crate) use self::choose::{Activity, RunSources};
pub(crate) use self::sort::Sorter;
#[cfg(test)]
pub(crate) use self::sort::Turns;
pub(crate) use self::write::{RunWriter, draw_salt};
