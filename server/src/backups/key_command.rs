//! `wald backup-key`: makes the key that signs manifests of backups and replicas, and prints its public key.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};

use super::keys::SigningKey;
use crate::auth::write_new_secret;
use crate::offline::say;
use crate::serve::Exit;

pub(crate) fn command() -> Command {
    let file = |help| {
        Arg::new("file")
            .value_name("FILE")
            .required(true)
            .help(help)
            .value_parser(value_parser!(PathBuf))
    };
    Command::new("backup-key")
        .about("Make the key that signs backups, and print its public key")
        .long_about(
            "Makes and shows the keys (Ed25519) of signed backups. The setting backup_signing_key_file names the private \
             key of a daemon: it signs the manifests of its backups and of its replica. `--trust` of `wald verify` and \
             `wald restore` takes the public key. Keep a copy of it where nobody who can write backups can change it.",
        )
        .subcommand_required(true)
        .subcommand(
            Command::new("new")
                .about("Make a private key in a new file (mode 0600), and print its public key")
                .arg(file("The new file")),
        )
        .subcommand(
            Command::new("public")
                .about("Print the public key of a private key, in PEM; its digits go to stderr")
                .arg(file("File with the private key")),
        )
}

/// Runs the command.
///
/// # Errors
/// With the exit code and a sentence.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Exit> {
    let Some((name, matches)) = matches.subcommand() else {
        return Ok(());
    };
    let Some(path) = matches.get_one::<PathBuf>("file") else {
        return Ok(());
    };
    let key = match name {
        "new" => {
            let drawn = SigningKey::draw();
            let (key, text) = drawn
                .map_err(|error| Exit::new(Exit::SYSTEM, format!("drawing a key: {error}")))?;
            write_new_secret(path, text.as_bytes())?;
            key
        }
        _ => SigningKey::read(path).map_err(|fault| super::unusable(&fault))?,
    };
    let public = key.public();
    say(&format!("public key {public}"));
    crate::print(public.pem().as_bytes())
}
