//! `wald reset-clock`: sets the clock of retention to the system's clock.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::json;
use wald_storage::{Clock as _, Disk, OpenError, RealDisk, StorageConfig, SystemClock, Timestamp};

use super::{IN_USE, Output, failed, output_of, written};
use crate::serve::Exit;

pub(super) fn command() -> Command {
    Command::new("reset-clock")
        .about("Show the clock of retention by age, or set it to the system's clock")
        .long_about(
            "Shows how far the clock of retention by age is ahead of the system's clock, or behind it, in a store \
             that no daemon serves. With --yes the command sets it to the system's clock. Do that when a wrong \
             clock was ahead for days, and the system's clock is right now: records do not expire until the clock \
             of retention has gone back, and new records get times ahead of the system's clock.\n\n\
             A daemon does this automatically after 10 minutes, if the system's clock shows 2026 or later. Stored \
             times of records stay as they are, and times within one log never go back.\n\n\
             Exit codes: 0 done, 1 failed, 2 usage, 4 a daemon has the directory.",
        )
        .arg(super::directory_argument())
        .arg(super::output_argument())
        .arg(
            Arg::new("yes")
                .long("yes")
                .help("Set the clock; without it nothing is changed")
                .action(ArgAction::SetTrue),
        )
}

/// Whether the command changes the store.
pub(super) fn changes(matches: &ArgMatches) -> bool {
    matches.get_flag("yes")
}

pub(super) fn run(
    directory: &Path,
    matches: &ArgMatches,
    config: &StorageConfig,
) -> Result<u8, Exit> {
    let fail = |error: OpenError| match error {
        OpenError::Locked { .. } => Exit::new(IN_USE, error.to_string()),
        other => failed(&other),
    };
    let disk: Arc<dyn Disk> = RealDisk::open_read_only(directory).map_err(fail)?;
    let shown = wald_storage::expiry_clock(&disk, config).map_err(fail)?;
    drop(disk);
    let now = SystemClock.now();
    if changes(matches) {
        let disk: Arc<dyn Disk> = RealDisk::open(directory).map_err(fail)?;
        wald_storage::reset_expiry_clock(&disk, config, Arc::new(SystemClock)).map_err(fail)?;
    }
    let ahead = shown.map(|shown| shown.micros().saturating_sub(now.micros()) / 1_000_000);
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        Output::Text => text(&mut out, (shown, ahead), changes(matches)),
        Output::Json | Output::Jsonl => {
            let document = json!({
                "clock": shown.map(Timestamp::micros),
                "seconds_ahead": ahead,
                "reset": changes(matches),
            });
            super::json_line(&mut out, &document)
        }
    };
    written(printed.and_then(|()| out.flush()))?;
    Ok(0)
}

fn text(
    out: &mut impl Write,
    (shown, ahead): (Option<Timestamp>, Option<i64>),
    reset: bool,
) -> io::Result<()> {
    match (shown, ahead) {
        (Some(shown), Some(ahead)) => {
            let time = jiff::Timestamp::from_microsecond(shown.micros());
            let time = time.map_or_else(|_| shown.micros().to_string(), |time| time.to_string());
            let (seconds, side) = (
                ahead.unsigned_abs(),
                if ahead > 0 { "ahead of" } else { "behind" },
            );
            writeln!(
                out,
                "the clock of retention showed {time}, {} days and {} seconds {side} the system's clock",
                seconds / 86_400,
                seconds % 86_400,
            )?;
        }
        _ => writeln!(out, "the store has no clock of retention yet")?,
    }
    match reset {
        true => writeln!(out, "it was set to the system's clock"),
        false => writeln!(
            out,
            "nothing was changed; set it to the system's clock with --yes"
        ),
    }
}
