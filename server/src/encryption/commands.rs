//! `wald key`: makes wrapping keys, and shows, copies, puts back and rotates the key ring of a store.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use wald_storage::{Disk, KEYS, Offline, OpenError, Position, RealDisk};

use super::file::{self, RingFile};
use super::kek::new_text;
use super::ring::AT_NEXT_START;
use super::{KeyRing, kek};
use crate::audit::OfflineAudit;
use crate::auth::{print_secret, write_new_secret};
use crate::config::Config;
use crate::host;
use crate::serve::Exit;

/// Owners of a replica that the store may have had after an older copy of its ring was made: each gives numbers with a tag of
/// its own.
const OWNERS_LOST: u64 = 1 << 16;

/// Asks a running daemon for a rotation. It removes the file when the new key is in force.
pub(super) const ASK: &str = "keys/rotate";

/// The remedy for a missing wrapping key.
const NO_WRAPPING_KEY: &str = "set encryption_key_file or encryption_key_command";

/// Longest time that a daemon takes for a rotation.
const MOST_WAIT: Duration = Duration::from_secs(60);

/// Pause between two looks at the answer of the daemon.
const LOOK: Duration = Duration::from_millis(50);

/// The command.
pub(crate) fn command() -> Command {
    let to = |help: &'static str| {
        Arg::new("to")
            .long("to")
            .value_name("FILE")
            .help(help)
            .value_parser(value_parser!(PathBuf))
    };
    Command::new("key")
        .about("Make keys for encryption, and copy, show and rotate the key ring of a store")
        .long_about(
            "Records are encrypted with data keys. The data keys lie in the key ring of the store (keys/ring), wrapped with the \
             key of encryption_key_file. Without both of them nobody reads a record, you included: keep a copy of the key \
             apart from the store, and a copy of the key ring (`wald key export`) apart from the backups. The bucket of a replica \
             has the key ring, too. These commands work on the data directory; its next start writes their changes to the bucket.",
        )
        .subcommand_required(true)
        .subcommand(
            Command::new("new")
                .about("Make a wrapping key, and print it once")
                .long_about(
                    "Draws a key with 256 random bits for encryption_key_file. To rotate the wrapping key, add the new one as the \
                     last line of the file: a daemon that runs reads it within 10 s and wraps all data keys with it. Once its log \
                     says so, remove the earlier line.",
                )
                .arg(to("Write the key to this new file (mode 0600), not to stdout")),
        )
        .subcommand(
            Command::new("show").about("Show the data keys of the store: numbers, owners, wrapping keys; no secret"),
        )
        .subcommand(
            Command::new("rotate")
                .about("Make new data keys: new records have them at once, the sorter gives them to earlier ones")
                .long_about(
                    "Makes a new data key for each that the store has. A running daemon does it within some seconds; without one \
                     the command does it itself. The metric wald_encryption_unrenewed_bytes tells how much is left for the \
                     sorter. With a replica a running daemon also waits until the bucket has the new keys.",
                ),
        )
        .subcommand(
            Command::new("export")
                .about("Print a copy of the key ring: useless without the wrapping key")
                .arg(to("Write the copy to this new file (mode 0600), not to stdout")),
        )
        .subcommand(
            Command::new("import")
                .about("Put a copy of the key ring back, while no daemon runs")
                .arg(
                    Arg::new("file")
                        .value_name("FILE")
                        .required(true)
                        .help("The copy that `wald key export` made")
                        .value_parser(value_parser!(PathBuf)),
                )
                .arg(
                    Arg::new("older")
                        .long("older")
                        .action(ArgAction::SetTrue)
                        .help("Take a copy although the store has had a newer key ring: records under newer keys are lost, and keys that were destroyed come back. With a replica it also replaces the bucket's"),
                ),
        )
}

/// Runs the command.
///
/// # Errors
/// With the exit code and a sentence.
pub(crate) fn run(config: &Config, matches: &ArgMatches) -> Result<(), Exit> {
    match matches.subcommand() {
        Some(("new", matches)) => give(matches, &new_text_line()),
        Some(("show", _)) => show(config),
        Some(("rotate", _)) => changed(config, "key rotate", rotate),
        Some(("export", matches)) => give(matches, &found(&*disk(config)?)?.encode()),
        Some(("import", matches)) => {
            let path: Option<&PathBuf> = matches.get_one("file");
            let path = path.map_or(Path::new(""), |path| path);
            let older = matches.get_flag("older");
            changed(config, "key import", |config| {
                let keks = kek::Keks::of(config).map_err(wrong)?.ok_or_else(|| {
                    wrong(format!(
                        "{NO_WRAPPING_KEY}: the keys of the copy are checked with it"
                    ))
                })?;
                let copy = read_copy(path, Some(&keks))?;
                import(&*locked(config)?.0, path, copy, Some(&keks), older)?;
                Ok(String::new())
            })
        }
        _ => Ok(()),
    }
}

fn wrong(why: impl Into<String>) -> Exit {
    Exit::new(Exit::CONFIG, why)
}

fn failed(action: &str) -> impl FnOnce(io::Error) -> Exit {
    move |error| Exit::new(Exit::IO, format!("{action}: {error}"))
}

fn opening(error: &OpenError) -> Exit {
    Exit::new(Exit::IO, error.to_string())
}

fn disk(config: &Config) -> Result<Arc<dyn Disk>, Exit> {
    let disk = RealDisk::open_read_only(&config.data_dir).map_err(|error| opening(&error))?;
    Ok(disk)
}

/// The disk, and the locks that keep daemons and other commands away.
fn locked(config: &Config) -> Result<(Arc<dyn Disk>, Offline, fs::File), Exit> {
    let disk: Arc<dyn Disk> = RealDisk::open(&config.data_dir).map_err(|error| opening(&error))?;
    let offline = Offline::open(Arc::clone(&disk)).map_err(|error| opening(&error))?;
    Ok((disk, offline, turn(config)?))
}

/// Waits for other commands that change the ring, which share the lock of the store: two rings of one generation would be
/// no ring.
fn turn(config: &Config) -> Result<fs::File, Exit> {
    let directory = fs::File::open(&config.data_dir).map_err(failed("opening the directory"))?;
    // Some network file systems lock no directories. There the operator takes care.
    let _ = directory.lock();
    Ok(directory)
}

/// Runs a change, and records it. Then prints the text that `run` returns: a stdout that takes none hides no change from
/// the audit log.
fn changed(
    config: &Config,
    command: &str,
    run: impl FnOnce(&Config) -> Result<String, Exit>,
) -> Result<(), Exit> {
    host::check_owner(config, &config.data_dir)?;
    let mut audit = OfflineAudit::open(config)?;
    let result = run(config);
    let outcome = result.as_ref().map(|_| ());
    let outcome = outcome.map_err(|exit| &exit.message as &dyn std::fmt::Display);
    let who = crate::offline::who();
    audit.ran(command, &config.data_dir, &who, outcome)?;
    crate::print(result?.as_bytes())
}

fn new_text_line() -> zeroize::Zeroizing<String> {
    let mut text = new_text();
    text.push('\n');
    text
}

/// Writes a text to the file that was named, or to the standard output.
fn give(matches: &ArgMatches, text: &str) -> Result<(), Exit> {
    match matches.get_one::<PathBuf>("to") {
        Some(path) => write_new_secret(path, text.as_bytes()),
        None => print_secret(text.as_bytes()),
    }
}

fn found(disk: &dyn Disk) -> Result<RingFile, Exit> {
    match file::find(disk).map_err(wrong)? {
        Some(found) => Ok(found.ring),
        None => Err(wrong(format!(
            "{} has no key ring: its store is not encrypted",
            disk.location()
        ))),
    }
}

fn show(config: &Config) -> Result<(), Exit> {
    let ring = found(&*disk(config)?)?;
    let mut out = format!("key ring {}, generation {}\n", ring.id, ring.generation);
    for (number, key) in &ring.keys {
        let is_new = if *number < ring.renewed.0 {
            ""
        } else {
            ", new"
        };
        let owner = crate::offline::escaped(&key.owner.to_string());
        out += &format!(
            "key {number}: {owner}, wrapped with {}{is_new}\n",
            key.wrapped.kek.0
        );
    }
    crate::print(out.as_bytes())
}

fn rotate(config: &Config) -> Result<String, Exit> {
    let keks = kek::Keks::of(config).map_err(wrong)?.ok_or_else(|| {
        wrong(format!(
            "the store is not to be encrypted: {NO_WRAPPING_KEY}"
        ))
    })?;
    let disk: Arc<dyn Disk> = RealDisk::open(&config.data_dir).map_err(|error| opening(&error))?;
    found(&*disk)?;
    let _offline = match Offline::open(Arc::clone(&disk)) {
        Ok(offline) => offline,
        Err(OpenError::Locked { .. }) => return ask(&*disk),
        Err(error) => return Err(opening(&error)),
    };
    let _turn = turn(config)?;
    let none = Box::new(|_: &str| None);
    let ring = KeyRing::new(disk, config.encryption_scope, keks, none);
    ring.read().map_err(wrong)?;
    ring.rotate(|| AT_NEXT_START)
        .map_err(failed("writing the key ring"))?;
    Ok(format!(
        "new records will have new keys; the sorter gives them to earlier ones once the daemon runs{}\n",
        match config.has_replica() {
            true => ", and its start writes them to the bucket",
            false => "",
        }
    ))
}

/// Lets the daemon rotate, and waits for it.
fn ask(disk: &dyn Disk) -> Result<String, Exit> {
    let asks = || match disk.create(ASK) {
        // An earlier command still waits: one rotation is enough for both.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed("asking the daemon for a rotation")(error))
        }
        _ => Ok(()),
    };
    let first_new = || found(disk).map(|ring| ring.renewed.0);
    let before = first_new()?;
    asks()?;
    let until = Instant::now() + MOST_WAIT;
    while Instant::now() < until {
        let names = disk
            .list(KEYS)
            .map_err(failed("looking for the answer of the daemon"))?;
        if !names.iter().any(|name| ASK.ends_with(name.as_str())) {
            if first_new()? > before {
                let text = "new records have new keys; the sorter gives them to earlier ones\n";
                return Ok(text.to_owned());
            }
            // Another command has asked before, and has given up.
            asks()?;
        }
        std::thread::sleep(LOOK);
    }
    let _ = disk.remove(ASK);
    Err(Exit::new(
        Exit::UNAVAILABLE,
        format!(
            "the daemon did not rotate within {} s; look at its log",
            MOST_WAIT.as_secs()
        ),
    ))
}

/// Reads a copy that `wald key export` made. With `keks` all of its keys must open.
///
/// # Errors
/// If it cannot be read, or is damaged, or a key does not open.
fn read_copy(path: &Path, keks: Option<&kek::Keks>) -> Result<RingFile, Exit> {
    let at = |why: String| wrong(format!("{}: {why}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| at(error.to_string()))?;
    let ring = RingFile::decode(&bytes).map_err(|why| at(format!("the key ring {why}")))?;
    if let Some(keks) = keks {
        keks.wrap_anew(&ring, |_, _, _| ()).map_err(at)?;
    }
    Ok(ring)
}

/// A copy of the key ring for a directory that is restored next. Its keys are checked if the settings name a wrapping
/// key: a restore alone needs none.
///
/// # Errors
/// If it cannot be read, or is damaged, or a key does not open.
pub(crate) fn copy_for_restore(config: &Config, path: &Path) -> Result<RingFile, Exit> {
    let keks = kek::Keks::of(config).map_err(wrong)?;
    read_copy(path, keks.as_ref())
}

/// Puts a copy of the ring, which was read from `path`, into a store that nobody serves. The ring of the directory counts, also
/// without `ENCRYPTED`: unless `older` is set, its keys stay that the copy never had.
///
/// # Errors
/// If the copy is of another store, or older than the store, or if one of those keys does not open.
pub(crate) fn import(
    disk: &dyn Disk,
    path: &Path,
    copy: RingFile,
    keks: Option<&kek::Keks>,
    older: bool,
) -> Result<(), Exit> {
    let at = |why: String| wrong(format!("{}: {why}", path.display()));
    let note = file::noted(disk).map_err(wrong)?;
    let mut there = file::readable(disk).map_err(failed("reading the key ring"))?;
    let place = disk.location();
    match &note {
        Some((id, _)) if *id != copy.id => {
            return Err(at("it is the key ring of another store".to_owned()));
        }
        // The note proves that such rings do not belong here.
        Some(_) => there.retain(|found| found.id == copy.id),
        None if there.iter().any(|found| found.id != copy.id) => {
            return Err(at(format!(
                "it is the key ring of another store than {place}/keys/ring; if the ring in the directory is the wrong one, move {place}/keys away first"
            )));
        }
        None => {}
    }
    let noted = note.as_ref().map_or(0, |(_, generation)| *generation);
    let current = there.iter().max_by_key(|found| found.generation);
    let newest = noted.max(current.map_or(0, |current| current.generation));
    let mut ring = copy.clone();
    if older {
        for found in &there {
            ring.note_numbers(found);
        }
    } else if copy.generation >= newest {
        for found in &there {
            ring.add_unknown(found);
        }
    } else {
        // Both went on since the directory was restored with an older copy: generations do not compare then.
        let has_gone_on = |current: &&RingFile| {
            let mut numbers = copy.keys.keys();
            current.generation == newest && numbers.any(|number| !current.has_made(*number))
        };
        let Some(current) = current.filter(has_gone_on) else {
            return Err(at(format!(
                "it has generation {}, and the store has had {newest}: records under newer keys would be lost; with --older it is still taken",
                copy.generation
            )));
        };
        ring = current.clone();
        ring.add_unknown(&copy);
    }
    if let Some(keks) = keks.filter(|_| ring.keys != copy.keys) {
        let opened = keks.wrap_anew(&ring, |_, _, _| ());
        opened.map_err(|why| {
            at(format!(
                "the ring of the directory has keys that the copy never had: {why}; with --older the copy is taken without them"
            ))
        })?;
    }
    let exhausted = |why: String| at(format!("the key ring {why}"));
    if older {
        ring.pass_over(owners_lost()).map_err(exhausted)?;
        // The scope may have been another one since the copy was made.
        ring.uncover();
        ring.replaces = true;
    } else if note.is_none() {
        ring.skip_numbers(owners_lost()).map_err(exhausted)?;
    }
    ring.generation = ring.generation.max(newest) + 1;
    file::write(disk, &ring).map_err(failed("writing the key ring"))
}

/// A number of owners that is enough for every owner whom a copy did not see. It is random: a second import of one copy gives
/// other numbers than the first one.
fn owners_lost() -> u64 {
    let mut drawn = [0; 8];
    kek::fill(&mut drawn);
    OWNERS_LOST + u64::from_le_bytes(drawn) % OWNERS_LOST
}

/// Whether somebody asks for a rotation.
pub(crate) fn is_asked(disk: &dyn Disk) -> bool {
    disk.open(ASK).is_ok()
}

/// Answers that the new keys are in force.
///
/// # Errors
/// If the file cannot be removed.
pub(crate) fn answered(disk: &dyn Disk) -> io::Result<()> {
    disk.remove(ASK)
}

/// A position beyond all records of a store that is served.
pub(crate) fn end_of(segments: &[wald_storage::SegmentInfo]) -> Position {
    let ends = segments.iter().filter(|segment| segment.sorted.is_none());
    let ends = ends.map(|segment| {
        segment
            .end
            .max(Position::new(segment.base.get() + segment.bytes))
    });
    ends.max().unwrap_or(Position::ZERO)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use wald_storage::{BodyCipher as _, LogId, LogsExist};

    use super::*;
    use crate::encryption::file::COUNTER_BITS;

    #[test]
    fn rotation_counts_once_the_ring_has_new_keys() {
        let keks = kek::Keks::parse("keys".to_owned(), "7".repeat(64).as_bytes()).unwrap();
        let disk = wald_storage::SimDisk::new();
        let scope = crate::config::EncryptionScope::Store;
        let ring = KeyRing::new(Arc::new(disk.clone()), scope, keks, Box::new(|_| None));
        ring.begin(Position::ZERO).unwrap();
        let before = found(&disk).unwrap();
        let (asked, waits) = (disk.clone(), AtomicBool::new(true));
        std::thread::scope(|scope| {
            let daemon = scope.spawn(|| {
                let until_asked = || {
                    while !is_asked(&asked) && waits.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                };
                // An earlier command gives up, and then the daemon rotates.
                until_asked();
                asked.remove(ASK).unwrap();
                until_asked();
                ring.rotate(|| Position::ZERO).unwrap();
                answered(&asked)
            });
            let done = ask(&disk);
            waits.store(false, Ordering::Relaxed);
            done.unwrap();
            assert!(found(&disk).unwrap().renewed.0 > before.renewed.0);
            daemon.join().unwrap().unwrap();
        });
    }

    #[test]
    fn copy_whose_keys_do_not_open_is_refused() {
        let keks =
            |digit: &str| kek::Keks::parse("keys".to_owned(), digit.repeat(64).as_bytes()).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(wald_storage::SimDisk::new());
        let scope = crate::config::EncryptionScope::Store;
        let ring = KeyRing::new(Arc::clone(&disk), scope, keks("7"), Box::new(|_| None));
        ring.begin(Position::ZERO).unwrap();
        let whole = found(&*disk).unwrap();
        let mut changed = whole.clone();
        let key = changed.keys.values_mut().next().unwrap();
        Arc::make_mut(key).wrapped.bytes[20] ^= 1;
        let mut moved = whole.clone();
        let (number, key) = moved.keys.pop_first().unwrap();
        moved.keys.insert(
            number,
            Arc::new(file::RingKey {
                owner: file::KeyOwner::Tenant("a".to_owned()),
                ..(*key).clone()
            }),
        );
        for (ring, keks, said) in [
            (&whole, keks("7"), None),
            (&whole, keks("8"), Some("which keys does not have")),
            (
                &changed,
                keks("7"),
                Some("was changed after it was wrapped"),
            ),
            (&moved, keks("7"), Some("was changed after it was wrapped")),
        ] {
            let copy = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(copy.path(), ring.encode()).unwrap();
            match (read_copy(copy.path(), Some(&keks)), said) {
                (Ok(read), None) => assert_eq!(read, *ring),
                (Err(exit), Some(said)) => assert!(exit.message.contains(said), "{}", exit.message),
                (read, said) => panic!("{said:?}: {read:?}"),
            }
        }
    }

    #[test]
    fn import_compares_a_copy_with_the_ring_even_without_a_note() {
        let none = || Box::new(|_: &str| None);
        let keks = || kek::Keks::parse("keys".to_owned(), "7".repeat(64).as_bytes()).unwrap();
        let scope = crate::config::EncryptionScope::Log;
        let store = || {
            let disk = wald_storage::SimDisk::new();
            let ring = KeyRing::new(Arc::new(disk.clone()), scope, keks(), none());
            ring.begin(Position::ZERO).unwrap();
            (disk, ring)
        };
        let (disk, ring) = store();
        let make = |id: u64| {
            let log = [(LogId::new(id), "a")];
            ring.prepare(&log, LogsExist::Next).unwrap();
            found(&disk).unwrap()
        };
        let (yesterday, today) = (make(1), make(1000));
        let foreign = found(&store().0).unwrap();
        let copies = || ["keys/ring", "keys/ring-2", "ENCRYPTED"].map(|path| disk.contents(path));
        let import = |copy: &RingFile, older| {
            import(&disk, Path::new("copy"), copy.clone(), Some(&keks()), older)
        };
        disk.remove("ENCRYPTED").unwrap();
        let before = copies();
        for (copy, older, said) in [
            (&foreign, false, "move"),
            (&foreign, true, "move"),
            (&yesterday, false, "older"),
        ] {
            let refused = import(copy, older).unwrap_err();
            assert!(refused.message.contains(said), "{}", refused.message);
            assert!(copies() == before);
        }
        // The ring itself may be put back. Later keys get numbers that no ring of the store has.
        import(&today, false).unwrap();
        let now = found(&disk).unwrap();
        assert_eq!(now.keys, today.keys);
        assert!(now.highest > today.highest + (OWNERS_LOST << COUNTER_BITS) - 1);
        assert!(!now.has_made(today.highest + 1));
        let has_erasable_logs = |ring: &RingFile| ring.keys.values().any(|key| key.covers_all);
        assert!(has_erasable_logs(&now));
        // Since yesterday the scope may have been another one.
        import(&yesterday, true).unwrap();
        assert!(!has_erasable_logs(&found(&disk).unwrap()));
    }

    #[test]
    fn older_ring_in_a_restored_directory_gives_no_number_twice() {
        let keks = || kek::Keks::parse("keys".to_owned(), "7".repeat(64).as_bytes()).unwrap();
        let scope = crate::config::EncryptionScope::Log;
        let opened = |disk: &Arc<dyn Disk>| {
            let none = Box::new(|_: &str| None);
            let ring = KeyRing::new(Arc::clone(disk), scope, keks(), none);
            ring.load().unwrap();
            ring.begin(Position::ZERO).unwrap();
            ring
        };
        let make = |disk: &Arc<dyn Disk>, id: u64, exist| {
            let ring = opened(disk);
            ring.prepare(&[(LogId::new(id), "a")], exist).unwrap();
            ring.newest(LogId::new(id)).unwrap().number()
        };
        let empty = || Arc::new(wald_storage::SimDisk::new()) as Arc<dyn Disk>;
        let old = empty();
        make(&old, 1, LogsExist::Next);
        let export = found(&*old).unwrap();
        let lost = make(&old, 1000, LogsExist::Next);
        let newest = found(&*old).unwrap();
        assert!(newest.has_made(lost) && !export.has_made(lost));
        // The directory has no note. The log is there, and its key is not.
        let restored = empty();
        let copy = |ring: &RingFile, older| {
            import(
                &*restored,
                Path::new("copy"),
                ring.clone(),
                Some(&keks()),
                older,
            )
        };
        copy(&export, false).unwrap();
        assert!(!opened(&restored).has_made(lost));
        let mut given = vec![make(&restored, 1000, LogsExist::Already)];
        assert!(!newest.has_made(given[0]));
        // The newest ring gives the lost key back, and the key of now stays.
        assert!(newest.generation < found(&*restored).unwrap().generation);
        copy(&newest, false).unwrap();
        let both = opened(&restored);
        assert!(both.by_number(lost).is_some() && both.by_number(given[0]).is_some());
        // An older copy that is put back twice gives other numbers each time.
        for _ in 0..2 {
            copy(&export, true).unwrap();
            let number = make(&restored, 1000, LogsExist::Already);
            assert!(!given.contains(&number));
            given.push(number);
        }
    }
}
