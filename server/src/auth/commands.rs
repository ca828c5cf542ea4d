//! `wald token`: makes, lists and removes the tokens of `auth_file`, and checks the file. No RPC does this: who may
//! write the file decides about credentials.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::json;
use toml_edit::{Array, DocumentMut, Item};
use wald_storage::{Clock as _, SystemClock, Timestamp};
use wald_text::units;

use super::file::{TokenEntry, show_time};
use super::source;
use super::token::{NewToken, TokenId};
use crate::config::Config;
use crate::offline::say;
use crate::serve::Exit;

/// Longest life of a token.
const LONGEST: Duration = Duration::from_secs(10 * 366 * 24 * 3600);
/// Mode of a file with a token in it.
const SECRET_MODE: u32 = 0o600;

/// The command.
pub(crate) fn command() -> Command {
    let expires = Arg::new("expires")
        .long("expires")
        .value_name("TIME")
        .default_value("90d")
        .help("Time after which the token expires")
        .value_parser(units::span);
    Command::new("token")
        .about("Make, list and revoke the tokens in auth_file, and check the file")
        .long_about(
            "Manages the tokens of principals in the file that the setting auth_file names. A running daemon reads the \
             file again within 10 s. The file has only digests of tokens: a token is shown once, when it is made.\n\n\
             To rotate a token: create a second one, give it to the clients, then revoke the first. Each principal has \
             at most two.",
        )
        .subcommand_required(true)
        .subcommand(
            Command::new("create")
                .about("Make a token for a principal, and print it once")
                .long_about(
                    "Draws a token with 256 random bits, adds its digest to the principal in auth_file, and prints the \
                     token. Without auth_file, the line for the file goes to stderr, for a file that is kept elsewhere.",
                )
                .arg(
                    Arg::new("principal")
                        .long("principal")
                        .value_name("NAME")
                        .required(true)
                        .help("Name of the principal in auth_file"),
                )
                .arg(expires)
                .arg(
                    Arg::new("to")
                        .long("to")
                        .value_name("FILE")
                        .help("Write the token to this new file (mode 0600), not to stdout")
                        .value_parser(value_parser!(PathBuf)),
                ),
        )
        .subcommand(
            Command::new("list")
                .about("List the tokens with their principals and expiries")
                .arg(
                    Arg::new("output")
                        .long("output")
                        .value_name("FORM")
                        .default_value("text")
                        .help("text, or json: one line for each token")
                        .value_parser(["text", "json"]),
                ),
        )
        .subcommand(
            Command::new("revoke")
                .about("Remove a token")
                .arg(Arg::new("id").value_name("ID").required(true).help(
                    "Id of the token, as `wald token list` shows it",
                )),
        )
        .subcommand(
            Command::new("check")
                .about("Check the file as a daemon would; exits with 0 or 78")
                .long_about(
                    "Checks auth_file, and the files of issuers of JWTs that it names: jwks_file, jwks_ca and \
                     jwks_token_file. Exits with 0, or with 78 and the first fault.",
                )
                .arg(
                    Arg::new("skip-named-files")
                        .long("skip-named-files")
                        .action(ArgAction::SetTrue)
                        .help("Do not read the files that it names: they are on another machine only"),
                )
                .arg(
                    Arg::new("file")
                        .value_name("FILE")
                        .help("The file [default: the configured auth_file]")
                        .value_parser(value_parser!(PathBuf)),
                ),
        )
}

/// Runs the command.
///
/// # Errors
/// With the exit code and a sentence.
pub(crate) fn run(config: &Config, matches: &ArgMatches) -> Result<(), Exit> {
    let configured = (!config.auth_file.is_empty()).then(|| PathBuf::from(&config.auth_file));
    let needed = || {
        configured.clone().ok_or_else(|| {
            wrong("auth_file is not set; name the file with --auth-file FILE".to_owned())
        })
    };
    match matches.subcommand() {
        Some(("create", matches)) => create(configured.as_deref(), matches),
        Some(("list", matches)) => list(&EditedFile::read(&needed()?)?, matches),
        Some(("revoke", matches)) => revoke(EditedFile::read(&needed()?)?, matches),
        Some(("check", matches)) => {
            let given = matches.get_one::<PathBuf>("file").cloned();
            let path = match given {
                Some(path) => path,
                None => needed()?,
            };
            check(&path, matches.get_flag("skip-named-files"))
        }
        _ => Ok(()),
    }
}

fn wrong(why: String) -> Exit {
    Exit::new(Exit::CONFIG, why)
}

fn failed(path: &Path, error: &io::Error) -> Exit {
    Exit::new(Exit::IO, format!("{}: {error}", path.display()))
}

/// The file as people wrote it: comments and order stay.
struct EditedFile {
    /// Behind all links, so that the file is replaced and not a link to it.
    path: PathBuf,
    document: DocumentMut,
    /// Its directory, locked: commands that run at the same time change the file one after the other.
    _lock: fs::File,
}

/// One token of the file.
struct ListedToken {
    principal: String,
    entry: TokenEntry,
}

impl EditedFile {
    /// Reads and checks the file.
    fn read(path: &Path) -> Result<Self, Exit> {
        let real = fs::canonicalize(path).map_err(|error| failed(path, &error))?;
        let parent = parent(&real);
        let lock = fs::File::open(parent).map_err(|error| failed(parent, &error))?;
        lock.lock().map_err(|error| failed(parent, &error))?;
        let contents = source::read(path).map_err(|fault| wrong(fault.to_string()))?;
        source::check(path, &contents).map_err(|fault| wrong(fault.to_string()))?;
        let text = String::from_utf8_lossy(&contents);
        let document = text.parse::<DocumentMut>().map_err(|error| {
            let why = error.message().lines().next().unwrap_or_default();
            wrong(format!("auth_file: {}: {why}", path.display()))
        })?;
        Ok(Self {
            path: real,
            document,
            _lock: lock,
        })
    }

    fn principals(&self) -> impl Iterator<Item = (&str, &dyn toml_edit::TableLike)> {
        let all = self.document.get("principal").and_then(Item::as_table_like);
        let all = all.into_iter().flat_map(|all| all.iter());
        all.filter_map(|(name, item)| Some((name, item.as_table_like()?)))
    }

    /// All tokens, in the order of the file. The file was checked, so every entry can be read.
    fn tokens(&self) -> Vec<ListedToken> {
        let of = |name: &str, table: &dyn toml_edit::TableLike| -> Vec<ListedToken> {
            let array = table.get("token").and_then(Item::as_array);
            let entries = array.into_iter().flat_map(Array::iter);
            entries
                .filter_map(|value| {
                    Some(ListedToken {
                        principal: name.to_owned(),
                        entry: TokenEntry::parse(value.as_str()?).ok()?,
                    })
                })
                .collect()
        };
        self.principals()
            .flat_map(|(name, table)| of(name, table))
            .collect()
    }

    /// The array `token` of a principal.
    fn token_array(&mut self, principal: &str) -> Option<&mut Array> {
        let all = self.document.get_mut("principal")?.as_table_like_mut()?;
        let table = all.get_mut(principal)?.as_table_like_mut()?;
        let item = table
            .entry("token")
            .or_insert(Item::Value(Array::new().into()));
        item.as_array_mut()
    }

    /// Replaces the file by the changed one, after a check of it. The daemon sees the old file or the new one.
    fn write(&self) -> Result<(), Exit> {
        let text = self.document.to_string();
        source::check(&self.path, text.as_bytes()).map_err(|fault| wrong(fault.to_string()))?;
        let about = fs::metadata(&self.path).map_err(|error| failed(&self.path, &error))?;
        replace(&self.path, text.as_bytes(), &about).map_err(|error| failed(&self.path, &error))
    }
}

/// Replaces a file as a whole. The new one has the owner and the mode of the earlier one.
fn replace(path: &Path, bytes: &[u8], earlier: &fs::Metadata) -> io::Result<()> {
    let parent = parent(path);
    let mut new = tempfile::Builder::new()
        .prefix(".wald-token")
        .tempfile_in(parent)?;
    new.write_all(bytes)?;
    let (user, group) = (Some(earlier.uid()), Some(earlier.gid()));
    std::os::unix::fs::fchown(new.as_file(), user, group)?;
    new.as_file().set_permissions(earlier.permissions())?;
    new.as_file().sync_all()?;
    new.persist(path).map_err(|error| error.error)?;
    fs::File::open(parent)?.sync_all()
}

/// The directory of a file.
fn parent(path: &Path) -> &Path {
    let parent = path.parent();
    let parent = parent.filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn create(path: Option<&Path>, matches: &ArgMatches) -> Result<(), Exit> {
    let text = |name: &str| matches.get_one::<String>(name).map_or("", String::as_str);
    let principal = text("principal");
    let life = matches
        .get_one::<Duration>("expires")
        .copied()
        .unwrap_or_default();
    if life.is_zero() || life > LONGEST {
        return Err(wrong(
            "--expires: expected a time above 0 and up to 10 years, such as 90d".to_owned(),
        ));
    }
    let now = SystemClock.now().micros();
    let life = i64::try_from(life.as_micros()).unwrap_or(i64::MAX);
    let token = NewToken::draw().map_err(|error| Exit::new(Exit::SYSTEM, error.to_string()))?;
    let entry = TokenEntry {
        id: token.id,
        digest: token.digest,
        // To the second, as the file has it.
        expires: Timestamp::from_micros((now + life).div_euclid(1_000_000) * 1_000_000),
    };
    let line = format!("{}\n", token.text);
    let to = matches.get_one::<PathBuf>("to");
    if let Some(to) = to {
        // Before the digest is added, so that a failure leaves nothing to revoke.
        write_new_secret(to, line.as_bytes())?;
    }
    let added = match path {
        Some(path) => EditedFile::read(path).and_then(|file| add(file, principal, &entry)),
        None => {
            say(&format!(
                "auth_file is not set; add this entry to token of [principal.{principal}]: {:?}",
                entry.show()
            ));
            Ok(())
        }
    };
    if let (Err(_), Some(to)) = (&added, to) {
        // The daemon does not know this token. If the file stays, the user has the error.
        let _ = fs::remove_file(to);
    }
    added?;
    say(&format!(
        "token {} of principal {principal} expires at {}",
        entry.id,
        show_time(entry.expires)
    ));
    match to {
        Some(_) => Ok(()),
        None => print_secret(line.as_bytes()).map_err(|why| undelivered(why, path, entry.id)),
    }
}

/// Takes a token that nobody has out of the file again: its principal may have two.
fn undelivered(why: Exit, path: Option<&Path>, id: TokenId) -> Exit {
    let Some(path) = path else {
        return why;
    };
    let message = &why.message;
    let removed = EditedFile::read(path).and_then(|file| remove(file, id));
    let text = match removed {
        Ok(_) => format!("{message}; token {id} was not delivered, and is revoked"),
        Err(kept) => format!(
            "{message}; token {id} was not delivered, and is still in the file ({}): `wald token revoke {id}` removes it",
            kept.message
        ),
    };
    Exit::new(why.code, text)
}

/// Writes a secret to the standard output. A closed pipe is an error, because nobody else has the secret.
///
/// # Errors
/// If not all of it could be written.
pub(crate) fn print_secret(bytes: &[u8]) -> Result<(), Exit> {
    let mut out = io::stdout().lock();
    let written = out.write_all(bytes).and_then(|()| out.flush());
    written.map_err(|error| Exit::new(Exit::IO, format!("writing to the standard output: {error}")))
}

/// Writes a file with a secret (mode 0600) that does not exist yet: an existing one may hold the only copy of a secret.
///
/// # Errors
/// If the file exists, or if the file system fails. No part of the secret stays then.
pub(crate) fn write_new_secret(path: &Path, bytes: &[u8]) -> Result<(), Exit> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(SECRET_MODE);
    let mut file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => wrong(format!(
            "{}: the file exists, perhaps with the only copy of a secret; choose another name",
            path.display()
        )),
        _ => failed(path, &error),
    })?;
    let written = file.write_all(bytes).and_then(|()| {
        file.sync_all()?;
        fs::File::open(parent(path))?.sync_all()
    });
    written.map_err(|error| {
        // A part of a secret is of no use. If it stays, the user has the error.
        let _ = fs::remove_file(path);
        failed(path, &error)
    })
}

fn add(mut file: EditedFile, principal: &str, entry: &TokenEntry) -> Result<(), Exit> {
    let known: Vec<&str> = file.principals().map(|(name, _)| name).collect();
    if !known.contains(&principal) {
        return Err(wrong(format!(
            "{}: there is no principal {principal:?}; the file has {}",
            file.path.display(),
            match known.is_empty() {
                true => "none".to_owned(),
                false => known.join(", "),
            }
        )));
    }
    match file.token_array(principal) {
        Some(array) => array.push(entry.show()),
        None => return Err(wrong(format!("principal {principal}: token is no array"))),
    }
    file.write()
}

fn list(file: &EditedFile, matches: &ArgMatches) -> Result<(), Exit> {
    let now = SystemClock.now();
    let is_json = matches
        .get_one::<String>("output")
        .is_some_and(|form| form == "json");
    let mut out = String::new();
    for token in file.tokens() {
        let (id, principal) = (token.entry.id, &token.principal);
        let expires = show_time(token.entry.expires);
        let is_expired = token.entry.expires <= now;
        out += &match is_json {
            true => format!(
                "{}\n",
                json!({
                    "id": id.as_str(),
                    "principal": principal,
                    "expires": expires,
                    "expired": is_expired,
                })
            ),
            false => {
                let verb = if is_expired { "expired" } else { "expires" };
                format!("{id}  {principal:<32}  {verb} {expires}\n")
            }
        };
    }
    crate::print(out.as_bytes())
}

fn revoke(file: EditedFile, matches: &ArgMatches) -> Result<(), Exit> {
    let given = matches.get_one::<String>("id").map_or("", String::as_str);
    let id = TokenId::parse(given).ok_or_else(|| {
        wrong("ID: an id has 8 letters or digits; `wald token list` shows the ids".to_owned())
    })?;
    let principal = remove(file, id)?;
    say(&format!("token {id} of principal {principal} is revoked"));
    Ok(())
}

/// Removes a token. Returns the name of its principal.
fn remove(mut file: EditedFile, id: TokenId) -> Result<String, Exit> {
    let found = file.tokens().into_iter().find(|token| token.entry.id == id);
    let Some(found) = found else {
        return Err(wrong(format!(
            "{}: no token has the id {id}",
            file.path.display()
        )));
    };
    if let Some(array) = file.token_array(&found.principal) {
        array.retain(|value| {
            let entry = value.as_str().and_then(|text| TokenEntry::parse(text).ok());
            entry.is_none_or(|entry| entry.id != id)
        });
    }
    file.write()?;
    Ok(found.principal)
}

fn check(path: &Path, skips_named_files: bool) -> Result<(), Exit> {
    let contents = source::read(path).map_err(|fault| wrong(fault.to_string()))?;
    let checked = match skips_named_files {
        true => source::check(path, &contents),
        false => source::check_all(path, &contents),
    };
    let warnings = checked.map_err(|fault| wrong(fault.to_string()))?;
    for warning in warnings {
        say(&format!("warning: {warning}"));
    }
    Ok(())
}
