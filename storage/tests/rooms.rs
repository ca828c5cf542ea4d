//! The floors of the engine: a room is a top-level module, and imports itself and the rooms below it.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test of the sources, and a failure here fails the test"
)]

use std::fs;
use std::path::{Path, PathBuf};

/// The rooms, lowest first.
const ROOMS: [&str; 12] = [
    "base", "api", "disk", "format", "logs", "journal", "index", "recovery", "read", "upkeep",
    "tools", "engine",
];

/// Modules that belong to no room: the list of exports, and tests.
const EXEMPT: [&str; 3] = ["lib", "tests", "fuzzing"];

fn floor(room: &str) -> Option<usize> {
    ROOMS.iter().position(|name| *name == room)
}

/// All source files, by their path below `src`.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// The code of a file without comments and without its tests.
fn code(text: &str) -> String {
    let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

/// The rooms that a file names: the first part of each path that begins with `crate::`.
fn named(code: &str) -> impl Iterator<Item = &str> {
    code.split("crate::")
        .skip(1)
        .flat_map(|path| {
            let group = path
                .strip_prefix('{')
                .and_then(|rest| rest.split('}').next());
            group.unwrap_or(path).split(',').take(match group {
                Some(_) => usize::MAX,
                None => 1,
            })
        })
        .map(|path| {
            let path = path.trim_start();
            let end = path.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
            &path[..end.unwrap_or(path.len())]
        })
}

#[test]
fn rooms_import_only_rooms_below() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 100, "{} files", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let path = file.strip_prefix(&root).unwrap().with_extension("");
        let room = path.iter().next().unwrap().to_str().unwrap();
        if EXEMPT.contains(&room) {
            continue;
        }
        let Some(own) = floor(room) else {
            wrong.push(format!("{} is in no room", path.display()));
            continue;
        };
        let text = code(&fs::read_to_string(&file).unwrap());
        for other in named(&text) {
            if floor(other).is_some_and(|other| other > own) {
                wrong.push(format!("{} imports {other}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
