//! `wald reset-clock`: sets the clock of retention to the system's clock.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use clap::{ArgMatches, Command};
use serde_json::json;
use wald_storage::{Clock as _, Disk, StorageConfig, SystemClock, Timestamp};

use super::{OfflineOutput, look_then_open, not_opened, output_of, written, yes_argument};
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
        .arg(yes_argument(
            "Set the clock; without it nothing is changed",
        ))
}

pub(super) fn run(
    directory: &Path,
    matches: &ArgMatches,
    config: &StorageConfig,
) -> Result<u8, Exit> {
    let look = |disk: &Arc<dyn Disk>| Ok((wald_storage::expiry_clock(disk, config)?, true));
    let (shown, disk) = look_then_open(directory, matches, look)?;
    let now = SystemClock.now();
    if let Some(disk) = &disk {
        wald_storage::reset_expiry_clock(disk, config, Arc::new(SystemClock))
            .map_err(not_opened)?;
    }
    let ahead = shown.map(|shown| shown.micros().saturating_sub(now.micros()) / 1_000_000);
    let mut out = io::BufWriter::new(io::stdout().lock());
    let printed = match output_of(matches) {
        OfflineOutput::Text => text(&mut out, (shown, ahead), disk.is_some()),
        OfflineOutput::Json | OfflineOutput::Jsonl => {
            let document = json!({
                "clock": shown.map(Timestamp::micros),
                "seconds_ahead": ahead,
                "reset": disk.is_some(),
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
            let time = crate::archive::time(shown);
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
