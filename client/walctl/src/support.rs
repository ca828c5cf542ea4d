//! `walctl support-bundle`: everything that a person who helps from afar wants to see, in one document.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value, json};
use wald_client::Client;

use crate::args::BundleArgs;
use crate::exit::ExitKind;
use crate::input::apart;
use crate::output::{Out, Output, note};
use crate::{cluster, cursors, logs, status};

/// Maximum bytes of the metrics that are taken.
const MOST_METRICS: u64 = 64 << 20;

pub(crate) async fn run(client: &Client, args: BundleArgs) -> Result<ExitKind> {
    // First: files that cannot be used are no fault of the server.
    let metrics = match args.metrics.clone() {
        Some(path) => Some(apart(move || read_metrics(&path)).await?),
        None => None,
    };
    let to_stdout = args.file.to_str() == Some("-");
    let file = (!to_stdout).then(|| BundleFile::create(&args.file));
    let file = file.transpose();
    let file = file.with_context(|| args.file.display().to_string())?;
    // At once: a server that gives no answer takes the timeout once.
    let (status, nodes, logs, cursors) = tokio::join!(
        status::whole(client),
        cluster::nodes(client),
        logs::all(client),
        cursors::all(client)
    );
    let parts = [
        ("status", status),
        ("nodes", nodes),
        ("logs", logs),
        ("cursors", cursors),
    ];
    let asked = parts.len();
    let mut bundle = Map::new();
    bundle.insert("walctl".into(), wald_text::VERSION.into());
    let made = jiff::Timestamp::now();
    bundle.insert("made".into(), format!("{made:.0}").into());
    bundle.insert("endpoint".into(), client.endpoint().into());
    let mut failed = Vec::new();
    for (name, part) in parts {
        let value = part.unwrap_or_else(|error| {
            failed.push(name);
            json!({ "error": format!("{error:#}") })
        });
        bundle.insert(name.to_owned(), value);
    }
    bundle.insert("metrics".into(), metrics.into());
    let mut bundle = Value::Object(bundle);
    if args.without_names {
        NumberedNames::default().hide(&mut bundle);
    }
    write(file, &bundle).with_context(|| args.file.display().to_string())?;
    note(&match failed.as_slice() {
        [] => "look through it before you send it; it has no records and no secrets".to_owned(),
        failed => format!(
            "without {}: the document has the error of each",
            failed.join(", ")
        ),
    });
    Ok(match failed.len() == asked {
        true => ExitKind::Unavailable,
        false => ExitKind::Ok,
    })
}

/// The text of a scrape, from a file or stdin.
fn read_metrics(path: &Path) -> Result<String> {
    let mut text = String::new();
    let mut read = |input: &mut dyn Read| input.take(MOST_METRICS + 1).read_to_string(&mut text);
    let bytes = match path.to_str() {
        Some("-") => read(&mut io::stdin()),
        _ => fs::File::open(path).and_then(|mut file| read(&mut file)),
    };
    let bytes = bytes.with_context(|| path.display().to_string())?;
    if bytes as u64 > MOST_METRICS {
        bail!("{}: a scrape has at most 64 MiB", path.display());
    }
    Ok(text)
}

/// A new file, which is removed unless all of it is written: the next run could not use its name.
struct BundleFile {
    file: fs::File,
    path: PathBuf,
    is_whole: bool,
}

impl BundleFile {
    /// Makes a file that only its owner can read, and never takes another one's place.
    fn create(path: &Path) -> io::Result<Self> {
        let mut options = fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.write(true).create_new(true).open(path)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            is_whole: false,
        })
    }
}

impl Drop for BundleFile {
    fn drop(&mut self) {
        if !self.is_whole {
            // If it stays, the next run says so.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Writes to the file, or to stdout.
fn write(file: Option<BundleFile>, bundle: &Value) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(bundle)?;
    text.push(b'\n');
    match file {
        Some(mut new) => {
            new.file.write_all(&text)?;
            new.is_whole = true;
        }
        None => {
            let mut out = Out::new(Output::Raw);
            out.bytes(&text)?;
            out.flush()?;
        }
    }
    Ok(())
}

/// Numbers in place of the names of logs, cursors and callers.
#[derive(Default)]
struct NumberedNames(HashMap<String, String>);

/// Members that have names which users chose.
const NAMES: [&str; 5] = ["log", "name", "cursor", "principal", "tenant"];

impl NumberedNames {
    fn hide(&mut self, value: &mut Value) {
        match value {
            Value::Array(all) => all.iter_mut().for_each(|one| self.hide(one)),
            Value::Object(members) => {
                for (member, value) in members {
                    match value {
                        Value::String(name) if NAMES.contains(&member.as_str()) => {
                            *name = self.number(member, name);
                        }
                        value => self.hide(value),
                    }
                }
            }
            _ => {}
        }
    }

    /// A name has one number wherever it stands.
    fn number(&mut self, kind: &str, name: &str) -> String {
        // A list of logs calls their names so.
        let kind = if kind == "name" { "log" } else { kind };
        let next = self.0.len() + 1;
        let number = self.0.entry(format!("{kind} {name}"));
        number.or_insert_with(|| format!("{kind}-{next}")).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_gets_one_number_wherever_it_stands() {
        let mut bundle = json!({
            "logs": [{ "name": "a", "log_id": 7 }, { "name": "b" }],
            "cursors": [{ "log": "a", "cursor": "a" }],
            "status": { "principal": "mary", "version": "1" },
        });
        NumberedNames::default().hide(&mut bundle);
        let log = bundle["logs"][0]["name"].clone();
        assert_eq!(bundle["cursors"][0]["log"], log);
        assert_ne!(bundle["logs"][1]["name"], log);
        assert_ne!(bundle["cursors"][0]["cursor"], log);
        assert_eq!(bundle["logs"][0]["log_id"], 7);
        assert_eq!(bundle["status"]["version"], "1");
        assert!(!bundle.to_string().contains("mary"));
    }
}
