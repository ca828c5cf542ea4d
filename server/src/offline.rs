//! Commands that work on a data directory while nobody serves it.
//!
//! All but `wald repair --accept-loss`, `wald delete-logs --yes` and `wald reset-clock --yes` change nothing and write nothing, so that they also
//! run as another user and on a read-only mount. Data goes to stdout, all else to stderr; exit codes are walctl's.

mod clock;
mod delete;
mod dump;
mod repair;
mod verify;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Command, ValueEnum, value_parser};
use wald_storage::{Disk, Gap, Offline, OpenError, RealDisk};
pub(crate) use wald_text::shown::escaped;
use wald_text::shown::escaped_json;

use crate::audit::OfflineAudit;
use crate::config::Config;
use crate::host;
use crate::serve::Exit;

/// It could not be done.
pub(crate) const FAILED: u8 = 1;
/// A running daemon has the directory.
pub(crate) const IN_USE: u8 = 4;
/// Something is damaged or lost.
pub(crate) const DATA_LOSS: u8 = 5;

/// Maximum number of lines of one kind that people get.
const MOST_LINES: usize = 16;

/// Splits a list into the part that people see line by line, and the rest, which gets one line.
pub(crate) fn few<T>(all: &[T]) -> (&[T], &[T]) {
    all.split_at(all.len().min(MOST_LINES))
}

/// Totals of gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gaps {
    pub(crate) ranges: usize,
    pub(crate) records: u64,
    pub(crate) logs: usize,
}

impl Gaps {
    pub(crate) fn of<'a>(gaps: impl Iterator<Item = &'a Gap> + Clone) -> Self {
        let records = gaps
            .clone()
            .filter_map(|gap| Some(gap.to?.since(gap.from?)));
        let logs: BTreeSet<_> = gaps.clone().filter_map(|gap| gap.log.as_ref()).collect();
        Self {
            ranges: gaps.count(),
            records: records.sum(),
            logs: logs.len(),
        }
    }
}

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OfflineOutput {
    /// For people.
    Text,
    /// One JSON document.
    Json,
    /// JSON, one value per line.
    Jsonl,
}

/// The commands of this module.
pub(crate) fn commands() -> Vec<Command> {
    vec![
        verify::command(),
        dump::command(),
        repair::command(),
        delete::command(),
        clock::command(),
    ]
}

/// Runs the command, if it is one of these.
pub(crate) fn run(
    name: &str,
    matches: &ArgMatches,
    configured: impl FnOnce() -> Result<Config, Exit>,
) -> Option<Result<u8, Exit>> {
    if !commands().iter().any(|command| command.get_name() == name) {
        return None;
    }
    let run = || {
        let config = configured()?;
        let given = matches.get_one::<PathBuf>("directory");
        let directory = given.unwrap_or(&config.data_dir);
        if !changes(name, matches) {
            return run_one(name, directory, matches, &config);
        }
        host::check_owner(&config, directory)?;
        let mut audit = OfflineAudit::open(&config)?;
        let result = run_one(name, directory, matches, &config);
        let outcome = result.as_ref().map(|_| ());
        let outcome = outcome.map_err(|exit| &exit.message as &dyn std::fmt::Display);
        audit.ran(&command_line(name, matches), directory, &who(), outcome)?;
        result
    };
    Some(run())
}

/// Runs one command.
fn run_one(
    name: &str,
    directory: &Path,
    matches: &ArgMatches,
    config: &Config,
) -> Result<u8, Exit> {
    match name {
        "repair" => repair::run(directory, matches, &config.storage_without_replica()),
        "delete-logs" => delete::run(directory, matches, config),
        "reset-clock" => clock::run(directory, matches, &config.storage_without_replica()),
        "dump" => dump::run(directory, matches, config),
        _ => verify::run(directory, matches, config),
    }
}

/// A command that changes the store, as the audit log has it.
fn command_line(name: &str, matches: &ArgMatches) -> String {
    match name {
        "repair" => "repair --accept-loss".to_owned(),
        "delete-logs" => {
            let prefix = matches.get_one::<String>("prefix");
            format!(
                "delete-logs --prefix {:?} --yes",
                prefix.map_or("", String::as_str)
            )
        }
        name => format!("{name} --yes"),
    }
}

/// The user that runs this, as far as the system knows.
pub(crate) fn who() -> String {
    let name = ["SUDO_USER", "USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
    name.unwrap_or_else(|| "an unnamed user".to_owned())
}

/// Whether the command changes the store.
fn changes(name: &str, matches: &ArgMatches) -> bool {
    match name {
        "repair" => matches.get_flag("accept-loss"),
        "delete-logs" | "reset-clock" => is_confirmed(matches),
        _ => false,
    }
}

/// Whether `--yes` was given.
fn is_confirmed(matches: &ArgMatches) -> bool {
    matches.get_flag("yes")
}

/// `--yes`, without which a command only shows its effect.
fn yes_argument(help: &'static str) -> Arg {
    Arg::new("yes")
        .long("yes")
        .help(help)
        .action(ArgAction::SetTrue)
}

/// The directory, where it is not the configured one.
fn directory_argument() -> Arg {
    Arg::new("directory")
        .value_name("DIR")
        .help("The data directory [default: the configured one]")
        .value_parser(value_parser!(PathBuf))
}

fn output_argument() -> Arg {
    Arg::new("output")
        .long("output")
        .short('o')
        .value_name("FORM")
        .help("Form of the output")
        .default_value("text")
        .value_parser(value_parser!(OfflineOutput))
}

fn output_of(matches: &ArgMatches) -> OfflineOutput {
    let given = matches.get_one::<OfflineOutput>("output");
    given.copied().unwrap_or(OfflineOutput::Text)
}

/// Reads a store that no daemon serves with `look`. Then opens the directory for writing, if `look`
/// finds something to change and the operator gave `--yes`.
fn look_then_open<T>(
    directory: &Path,
    matches: &ArgMatches,
    look: impl FnOnce(&Arc<dyn Disk>) -> Result<(T, bool), OpenError>,
) -> Result<(T, Option<Arc<dyn Disk>>), Exit> {
    exists(directory)?;
    let disk: Arc<dyn Disk> = RealDisk::open_read_only(directory).map_err(not_opened)?;
    let (found, is_needed) = look(&disk).map_err(not_opened)?;
    drop(disk);
    if !is_needed || !is_confirmed(matches) {
        return Ok((found, None));
    }
    let disk = RealDisk::open(directory).map_err(not_opened)?;
    Ok((found, Some(disk)))
}

/// The exit of a command whose store does not open.
fn not_opened(error: OpenError) -> Exit {
    match error {
        OpenError::Locked { .. } => Exit::new(IN_USE, error.to_string()),
        other => failed(&other),
    }
}

/// Fails if there is no such directory.
fn exists(directory: &Path) -> Result<(), Exit> {
    let missing = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    if std::fs::metadata(directory).is_err_and(missing) {
        return Err(Exit::new(
            FAILED,
            format!(
                "there is no data directory {}; name it on the command line, or with --data-dir",
                directory.display()
            ),
        ));
    }
    Ok(())
}

/// Opens an offline directory.
fn open(directory: &Path, instead: &str) -> Result<Offline, Exit> {
    exists(directory)?;
    let disk = RealDisk::open_read_only(directory).map_err(|error| failed(&error))?;
    Offline::open(disk).map_err(|error| match error {
        OpenError::Locked { directory, holder } => Exit::new(
            IN_USE,
            format!(
                "the data directory {} is in use by {holder}; {instead}",
                directory.display()
            ),
        ),
        other => failed(&other),
    })
}

fn failed(error: &impl std::fmt::Display) -> Exit {
    Exit::new(FAILED, error.to_string())
}

/// Says something on stderr, on one line and without characters that people do not see. Where nobody reads it, it changes
/// no result; `eprintln` would panic.
pub(crate) fn say(text: &str) {
    let _unread = writeln!(io::stderr(), "wald: {}", escaped(text));
}

/// Writes to stdout. A reader that closed the pipe has seen enough, so that is no error.
pub(crate) fn written(result: io::Result<()>) -> Result<(), Exit> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Exit::new(
            FAILED,
            format!("writing to the standard output: {error}"),
        )),
        _ => Ok(()),
    }
}

/// Prints a JSON value; on a terminal without characters that people do not see.
pub(crate) fn put_json(out: &mut impl Write, value: &serde_json::Value) -> io::Result<()> {
    if io::stdout().is_terminal() {
        return write!(out, "{}", escaped_json(&value.to_string()));
    }
    serde_json::to_writer(&mut *out, value)?;
    Ok(())
}

/// Prints a JSON value on a line of its own.
pub(crate) fn json_line(out: &mut impl Write, value: &serde_json::Value) -> io::Result<()> {
    put_json(out, value)?;
    out.write_all(b"\n")
}
