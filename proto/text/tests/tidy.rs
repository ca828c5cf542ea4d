//! The gate of the project's prose: every comment, document and help text is read and judged.
//!
//! Comments that use a clause with `what` as a noun are hard to read. The test counts that word
//! in each folder and compares the rate with the folder's limit in [`FOLDERS`]. It counts
//! other faults, too: banned words, doc comments that open with a word that needs a
//! neighbour, questions as metric texts, public numbers without a unit, long test names.
//! A second test compares the names of all types: each must mean one thing. Another one finds files that
//! do not belong at the top of the repository.
//!
//! A limit may only fall. The target of each folder is 3 per 1,000 words and no other fault.
//! `TIDY=server/src cargo test -p wald-text --test tidy` prints every finding of a folder.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Limits of one folder.
struct Folder {
    /// Path from the root of the project. Empty: every file that no other folder has.
    path: &'static str,
    /// Maximum matches of `what` in 10,000 words.
    rate: u64,
    /// Maximum number of other faults.
    faults: u64,
}

const fn folder(path: &'static str, rate: u64, faults: u64) -> Folder {
    Folder { path, rate, faults }
}

/// The limits in force. Lower them when a folder gets better; never raise them.
const FOLDERS: &[Folder] = &[
    folder("", 30, 0),
    folder(".ci", 30, 0),
    folder("client", 30, 0),
    folder("client/bench", 30, 0),
    folder("client/conformance", 30, 0),
    folder("client/connection", 30, 0),
    folder("client/examples", 30, 0),
    folder("client/go", 30, 0),
    folder("client/python", 30, 0),
    folder("client/src", 30, 0),
    folder("client/tests", 30, 0),
    folder("client/typescript", 30, 0),
    folder("client/walctl", 30, 0),
    folder("deploy", 30, 0),
    folder("docs", 30, 0),
    folder("grafana", 30, 0),
    folder("proto", 30, 0),
    folder("server", 30, 0),
    folder("server/src", 30, 0),
    folder("server/tests", 30, 0),
    folder("storage", 30, 0),
    folder("storage/bucket", 30, 0),
    folder("storage/src", 30, 0),
    folder("storage/tests", 30, 0),
];

/// Rate at or below which a folder needs no further work, in matches per 10,000 words.
const TARGET: u64 = 30;

/// Words that one must not use, each with a word for use instead.
const BANNED: &[(&str, &str)] = &[
    ("manieth", "the number of"),
    ("likewise", "repeat the noun"),
    ("anew", "again"),
    ("whoever", "a client, a caller"),
    ("lest", "so that ... not"),
    ("told", "reported, described"),
    ("so many", "at most n"),
    ("of which", "whose, or a new sentence"),
    ("those of", "repeat the noun"),
    ("all the same", "still"),
];

/// Beginnings that need a neighbour to make sense.
const OPENINGS: &[&str] = &["likewise", "the same", "of", "so"];

/// Longest name of a test in characters.
const LONGEST_NAME: usize = 70;

/// Words of a name or comment that give a number its unit.
const UNITS: &[&str] = &[
    "bit",
    "bits",
    "byte",
    "bytes",
    "checksum",
    "count",
    "day",
    "days",
    "epoch",
    "hour",
    "hours",
    "id",
    "index",
    "kib",
    "length",
    "lsn",
    "mib",
    "micros",
    "microseconds",
    "millis",
    "milliseconds",
    "minute",
    "minutes",
    "ms",
    "nanos",
    "nanoseconds",
    "number",
    "offset",
    "percent",
    "permille",
    "port",
    "position",
    "ratio",
    "second",
    "seconds",
    "sequence",
    "share",
    "times",
    "us",
    "version",
];

/// Types of the contract. The client has them and, without depending on it, the engine or the server.
const CONTRACT: &[&str] = &[
    "Append",
    "Batch",
    "CursorCommit",
    "Durability",
    "FailedCheck",
    "Fenced",
    "Gap",
    "Lsn",
    "NamedCursor",
    "Outcome",
    "Page",
    "Producer",
    "Record",
    "Retry",
    "Scan",
    "Selector",
];

/// Names with two definitions of one meaning, each with the reason.
const DEFINED_TWICE: &[&str] = &[
    // The table `engine_settings!` names the type of a number of bytes. The engine reads it as `u64`. The server reads
    // the same table, and its type also parses and prints.
    "Size",
    // Builds without object stores have empty types in their place.
    "CallRoute",
    "ForwardPool",
    "Forwarder",
    "ReplicaStart",
    "ReplicaWatch",
    "RunningReplica",
];

/// A word of a text, in lower case.
#[derive(Debug, PartialEq)]
struct Word {
    line: usize,
    text: String,
    /// Nothing but blanks is between the word before and this one.
    joined: bool,
    /// A question mark follows directly.
    asked: bool,
}

/// A run of comment lines, a paragraph, or a string that users see.
#[derive(Debug, Default)]
struct Block {
    lines: Vec<(usize, String)>,
    /// The tools of its language show the block without its neighbours.
    doc: bool,
    metric: bool,
}

/// Findings of one folder.
#[derive(Default)]
struct Tally {
    words: u64,
    whats: u64,
    faults: u64,
    found: Vec<String>,
}

impl Tally {
    /// Matches in 10,000 words.
    fn rate(&self) -> u64 {
        (10_000 * self.whats).checked_div(self.words).unwrap_or(0)
    }

    fn fault(&mut self, file: &str, line: usize, text: &str) {
        self.faults += 1;
        self.found.push(format!("{file}:{line}: {text}"));
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Paths of the project's files. Without git every file counts that no build has made.
fn files() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(root())
        .output();
    if let Ok(listed) = listed
        && listed.status.success()
    {
        let text = String::from_utf8(listed.stdout).unwrap();
        let files: Vec<String> = text.split_terminator('\0').map(str::to_owned).collect();
        if files.iter().any(|file| file == "Cargo.toml") {
            return files;
        }
    }
    let mut found = Vec::new();
    walk(&root(), "", &mut found);
    found.sort();
    found
}

fn walk(directory: &Path, prefix: &str, found: &mut Vec<String>) {
    const MADE: &[&str] = &["target", "node_modules", "dist", "build", "__pycache__"];
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && (name == ".ci" || !name.starts_with('.')) && !MADE.contains(&&*name) {
            walk(&entry.path(), &format!("{prefix}{name}/"), found);
        } else if kind.is_file() {
            found.push(format!("{prefix}{name}"));
        }
    }
}

/// The folder whose limit holds for a file. Rust tests of a crate are a folder of their own.
fn folder_of(file: &str) -> usize {
    let mut parts = file.split('/');
    let top = parts.next().unwrap_or_default();
    let test = |part: &str| matches!(part, "tests" | "tests.rs" | "benches" | "fuzz");
    let tests = format!("{top}/tests/");
    let file = match file.ends_with(".rs") && parts.any(test) {
        true => &tests,
        false => file,
    };
    let inside = |path: &str| path.is_empty() || file.starts_with(&format!("{path}/"));
    let fitting = (0..FOLDERS.len()).filter(|at| inside(FOLDERS[*at].path));
    fitting.max_by_key(|at| FOLDERS[*at].path.len()).unwrap()
}

fn extension(file: &str) -> &str {
    file.rsplit_once('.').map_or("", |(_, extension)| extension)
}

/// The comments of a file, or all text of a document.
fn blocks(file: &str, text: &str) -> Vec<Block> {
    let extension = extension(file);
    let mut found: Vec<Block> = Vec::new();
    let mut open: Option<Block> = None;
    // The end of a comment that began on an earlier line.
    let mut until: Option<&str> = None;
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim();
        let mut doc = true;
        let comment = match (until, extension) {
            (Some(end), _) => {
                let inside = content.split(end).next().unwrap_or_default();
                until = until.filter(|_| !content.contains(end));
                Some(inside.trim_start_matches('*'))
            }
            (None, "md") => Some(content).filter(|content| !content.is_empty()),
            (None, "rs" | "go" | "proto" | "ts") if content.starts_with("//") => {
                let text = content.trim_start_matches('/').trim_start_matches('!');
                doc = extension != "rs" || content.starts_with("///") || content.starts_with("//!");
                Some(text)
            }
            (None, "ts") if content.starts_with("/*") => {
                until = Some("*/").filter(|end| !content.contains(end));
                let text = content.split("*/").next().unwrap_or_default();
                Some(text.trim_start_matches(['/', '*']))
            }
            (None, "py") if content.starts_with("\"\"\"") => {
                let text = &content[3..];
                until = Some("\"\"\"").filter(|end| !text.contains(end));
                text.split("\"\"\"").next()
            }
            (None, "py" | "toml" | "yaml" | "sh") if content.starts_with('#') => {
                doc = false;
                Some(content.trim_start_matches('#'))
            }
            _ => None,
        };
        match comment {
            Some(comment) => {
                let block = open.get_or_insert_with(|| Block {
                    doc,
                    ..Block::default()
                });
                block.lines.push((line, comment.to_owned()));
            }
            None => found.extend(open.take().map(|block| Block {
                // A row of the table of metrics: its text is above its name.
                metric: file.contains("/metrics") && content.contains("= \"wald_"),
                ..block
            })),
        }
    }
    found.extend(open);
    if extension == "md" {
        found.iter_mut().for_each(|block| block.doc = false);
    }
    if extension == "rs" {
        found.extend(strings(file, text));
    }
    found
}

/// The string literal that begins at `at`, and the place after it.
fn literal(text: &str, at: usize) -> Option<(String, usize)> {
    let mut value = String::new();
    let mut rest = text.get(at..)?.strip_prefix('"')?.char_indices();
    while let Some((offset, next)) = rest.next() {
        match next {
            '"' => return Some((value, at + offset + 2)),
            '\\' => match rest.next()?.1 {
                'n' | '\n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

/// Strings of a Rust file that users see: help of commands, errors, texts of metrics.
fn strings(file: &str, text: &str) -> Vec<Block> {
    const BEFORE: &[&str] = &[
        "#[error(",
        ".about(",
        ".long_about(",
        ".help(",
        ".long_help(",
        ".after_help(",
        "_HELP: &str =",
    ];
    let mut found = Vec::new();
    let mut take = |at: usize, metric: bool| {
        let begin = at + text[at..].len() - text[at..].trim_start_matches([' ', '\n', ',']).len();
        if let Some((value, _)) = literal(text, begin) {
            let line = text[..begin].matches('\n').count() + 1;
            let lines = (line..).zip(value.lines().map(str::to_owned)).collect();
            found.push(Block {
                lines,
                doc: true,
                metric,
            });
        }
    };
    for before in BEFORE {
        for (at, _) in text.match_indices(before) {
            take(at + before.len(), false);
        }
    }
    if file.contains("/metrics") && !file.contains("test") {
        for prefix in ["\"wald_", "\"grpc_", "\"process_"] {
            for (at, _) in text.match_indices(prefix) {
                if let Some((name, end)) = literal(text, at)
                    && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                {
                    take(end, true);
                }
            }
        }
    }
    found
}

/// The words of a block, without code.
fn words(block: &Block) -> Vec<Word> {
    let mut found: Vec<Word> = Vec::new();
    let (mut fenced, mut code, mut joined) = (false, false, true);
    for (line, text) in &block.lines {
        if text.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        let mut word = String::new();
        for next in text.chars().chain([' ']) {
            if next == '`' {
                code = !code;
            }
            if !code && next != '`' && (next.is_alphanumeric() || next == '_') {
                word.extend(next.to_lowercase());
                continue;
            }
            if !word.is_empty() {
                let text = std::mem::take(&mut word);
                let asked = next == '?';
                found.push(Word {
                    line: *line,
                    text,
                    joined,
                    asked,
                });
                joined = true;
            }
            joined &= next.is_whitespace();
        }
    }
    found
}

/// Whether `phrase` stands at the place `at`.
fn stands(words: &[Word], at: usize, phrase: &str) -> bool {
    let mut parts = phrase.split(' ').enumerate();
    parts.all(|(offset, part)| {
        let word = words.get(at + offset);
        word.is_some_and(|word| word.text == part && (offset == 0 || word.joined))
    })
}

fn judge(file: &str, block: &Block, tally: &mut Tally) {
    let words = words(block);
    tally.words += words.len() as u64;
    let alone = block.doc && words.first().is_some_and(|word| word.joined);
    let opening = OPENINGS
        .iter()
        .find(|opening| alone && stands(&words, 0, opening));
    if let Some(opening) = opening {
        tally.fault(file, words[0].line, &format!("opens with {opening:?}"));
    }
    for (at, word) in words.iter().enumerate() {
        if word.text == "what" && !word.asked {
            tally.whats += 1;
            tally.found.push(format!("{file}:{}: \"what\"", word.line));
        }
        for (banned, instead) in BANNED {
            if stands(&words, at, banned) {
                let text = format!("{banned:?} is banned; write: {instead}");
                tally.fault(file, word.line, &text);
            }
        }
    }
    for (line, text) in block.lines.iter().filter(|_| block.metric) {
        if text.contains('?') {
            tally.fault(file, *line, "a metric's text asks a question");
        }
    }
}

/// Judges the names of functions and, outside tests, of public numbers.
fn judge_code(file: &str, text: &str, test: bool, tally: &mut Tally) {
    let mut comment = String::new();
    let lines: Vec<&str> = text.lines().collect();
    let mut variants = false;
    for (at, content) in lines.iter().enumerate() {
        variants &= !content.starts_with('}');
        variants |= content.starts_with("pub enum ");
        let (line, content) = (at + 1, content.trim());
        let after = ["fn ", "def ", "func "].iter().find_map(|before| {
            let (start, rest) = content.split_once(before)?;
            let plain = start
                .chars()
                .all(|c| c.is_ascii_lowercase() || " ()".contains(c));
            plain.then_some(rest)
        });
        let quoted = content
            .strip_prefix("test(\"")
            .and_then(|rest| rest.split('"').next());
        let name = after.and_then(|rest| rest.split(['(', '<']).next());
        let name = name.or(quoted.filter(|_| extension(file) == "ts"));
        if let Some(name) = name.filter(|name| name.len() > LONGEST_NAME) {
            tally.fault(
                file,
                line,
                &format!("{name}: more than {LONGEST_NAME} characters"),
            );
        }
        if extension(file) != "rs" || test {
            continue;
        }
        for name in public_numbers(&lines[at..], variants) {
            let all = format!("{name} {comment}").to_lowercase();
            let known = |word: &str| UNITS.contains(&word);
            let name = name.to_lowercase();
            if !name.split('_').any(|part| part.ends_with('s'))
                && !all.split(|c: char| !c.is_alphanumeric()).any(known)
            {
                tally.fault(
                    file,
                    line,
                    &format!("{name}: a public number without a unit"),
                );
            }
        }
        match content.strip_prefix("///") {
            Some(more) => comment = format!("{comment} {more}"),
            None if content.starts_with("#[") => {}
            None => comment.clear(),
        }
    }
}

/// The names of the public numbers that the first line declares: a constant, a field, a parameter
/// or a function by its result.
fn public_numbers(lines: &[&str], variants: bool) -> Vec<String> {
    let plain = |name: &str| name.chars().all(|c| c.is_alphanumeric() || c == '_');
    let number = |declared: &str| {
        let (name, kind) = declared.trim().split_once(": ")?;
        (plain(name) && is_number(kind)).then(|| name.to_owned())
    };
    let line = lines[0].trim();
    let declared = line.strip_prefix("pub const ");
    let Some(declared) = declared.or_else(|| line.strip_prefix("pub ")) else {
        let field = line.strip_suffix(',').filter(|_| variants);
        return field.and_then(number).into_iter().collect();
    };
    let function = declared.split_once("fn ").filter(|(before, _)| {
        let mut words = before.split_whitespace();
        words.all(|word| matches!(word, "async" | "unsafe"))
    });
    let Some((_, function)) = function else {
        return number(declared.split([',', '=', ';']).next().unwrap_or_default())
            .into_iter()
            .collect();
    };
    let name = function.split(['(', '<']).next().unwrap_or_default();
    let mut head = String::new();
    for (at, line) in lines.iter().enumerate() {
        let from = if at == 0 { function } else { line.trim() };
        head = head + from.split('{').next().unwrap_or_default() + " ";
        if line.contains('{') || line.ends_with(';') {
            break;
        }
    }
    let (parameters, result) = head.split_once("->").unwrap_or((&head, ""));
    let parameters = parameters.split(['(', ',', ')']).filter_map(number);
    let result = is_number(result.trim()).then(|| name.to_owned());
    parameters.chain(result).collect()
}

fn is_number(kind: &str) -> bool {
    const NUMBERS: &[&str] = &[
        "u8", "u16", "u32", "u64", "u128", "usize", "i32", "i64", "f64",
    ];
    let kind = kind.trim();
    let inner = kind
        .strip_prefix("Option<")
        .and_then(|kind| kind.strip_suffix('>'));
    NUMBERS.contains(&inner.unwrap_or(kind))
}

/// The name of the type that a line of Rust defines. Aliases inside of traits define none.
fn defined_type(line: &str) -> Option<&str> {
    let content = match line.trim_start().strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line.trim_start(),
    };
    let content = content.strip_prefix("unsafe ").unwrap_or(content);
    let (kind, rest) = content.split_once(' ')?;
    let name = rest
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()?;
    let defines = match kind {
        "struct" | "enum" | "trait" | "union" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    (defines && name.starts_with(|c: char| c.is_ascii_uppercase())).then_some(name)
}

/// Types that a file of Rust defines outside of tests, each with its line.
fn defined_types(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut lines = (1..).zip(text.lines()).peekable();
    while let Some((line, content)) = lines.next() {
        let next = lines.peek().map_or("", |(_, next)| *next);
        if content == "#[cfg(test)]" && next.starts_with("mod ") && next.ends_with('{') {
            break;
        }
        found.extend(defined_type(content).map(|name| (line, name)));
    }
    found
}

/// Entries at the top of the repository.
const TOP: &[&str] = &[
    ".ci",
    ".dockerignore",
    ".gitignore",
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "HACKING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "client",
    "clippy.toml",
    "deploy",
    "docs",
    "grafana",
    "proto",
    "server",
    "storage",
];

#[test]
fn top_of_the_repository_has_no_stray_file() {
    let is_known = |file: &String| {
        let entry = file.split('/').next().unwrap();
        TOP.contains(&entry)
    };
    let strays: Vec<_> = files().into_iter().filter(|file| !is_known(file)).collect();
    assert!(strays.is_empty(), "move or delete {strays:?}");
}

#[test]
fn type_names_are_defined_once() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files().iter().filter(|file| extension(file) == "rs") {
        let test = [
            "tests", "tests.rs", "benches", "fuzz", "fuzzing", "examples",
        ];
        let Ok(text) = fs::read_to_string(root().join(file)) else {
            continue;
        };
        if !file.split('/').skip(1).any(|part| test.contains(&part)) {
            for (line, name) in defined_types(&text) {
                let place = format!("{file}:{line}");
                places.entry(name.to_owned()).or_default().push(place);
            }
        }
    }
    assert!(places.len() > 500, "the workspace has its types");
    let in_client = |place: &&String| place.starts_with("client/src/");
    places.retain(|name, places| {
        let clients = places.iter().filter(in_client).count();
        let contract = CONTRACT.contains(&&**name) && clients == 1 && places.len() == 2;
        places.len() > 1 && !contract && !DEFINED_TWICE.contains(&&**name)
    });
    assert!(
        places.is_empty(),
        "type names that mean two things: {places:#?}"
    );
}

/// Functions of a file that users call, that return a future of a result, and that document no errors. The lint
/// `missing_errors_doc` sees results only, not futures of them.
fn futures_without_errors(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut found, mut documented, mut in_trait) = (Vec::new(), false, false);
    for (at, line) in lines.iter().enumerate() {
        let content = line.trim();
        match content {
            "#[cfg(test)]" => break,
            _ if content.starts_with("///") => documented |= content == "/// # Errors",
            _ if content.starts_with("#[") => {}
            _ => {
                in_trait = (in_trait || line.starts_with("pub trait ")) && *line != "}";
                let is_public = in_trait && content.starts_with("fn ")
                    || content.starts_with("pub fn ")
                    || content.starts_with("pub async fn ");
                let ends = |line: &&&str| line.ends_with(['{', ';']);
                let length = lines[at..].iter().take_while(|line| !ends(line)).count();
                let head = lines[at..].iter().take(length + 1).map(|line| line.trim());
                let head = head.collect::<Vec<_>>().join(" ");
                let returned = head.split_once("-> ").map_or("", |(_, returned)| returned);
                let waits = returned.starts_with("BoxFuture") || content.contains("async fn");
                if is_public && waits && returned.contains("Result<") && !documented {
                    found.push((at + 1, head));
                }
                documented = false;
            }
        }
    }
    found
}

#[test]
fn futures_of_results_document_their_errors() {
    let mut found = Vec::new();
    for file in files() {
        if file.starts_with("storage/src/api/") || file.starts_with("client/src/") {
            let text = fs::read_to_string(root().join(&file)).unwrap_or_default();
            let missing = futures_without_errors(&text);
            found.extend(
                missing
                    .into_iter()
                    .map(|(line, head)| format!("{file}:{line}: {head}")),
            );
        }
    }
    assert!(found.is_empty(), "without `# Errors`: {found:#?}");
    let undocumented = "pub trait A {\n    /// Reads.\n    fn a(\n        &self,\n    ) -> BoxFuture<'_, Result<(), E>>;\n}\n";
    assert_eq!(futures_without_errors(undocumented).len(), 1);
}

#[test]
fn prose_of_each_folder_is_within_its_limits() {
    let mut tallies: BTreeMap<usize, Tally> = BTreeMap::new();
    for file in files() {
        let kinds = ["rs", "go", "proto", "py", "ts", "md", "toml", "yaml", "sh"];
        if !kinds.contains(&extension(&file)) {
            continue;
        }
        // A file that was deleted and not committed is still listed.
        let Ok(text) = fs::read_to_string(root().join(&file)) else {
            continue;
        };
        let at = folder_of(&file);
        let tally = tallies.entry(at).or_default();
        for block in blocks(&file, &text) {
            judge(&file, &block, tally);
        }
        judge_code(&file, &text, FOLDERS[at].path.ends_with("/tests"), tally);
    }
    let wanted = std::env::var("TIDY").ok();
    let (mut report, mut failed) = (String::new(), false);
    for (at, tally) in &tallies {
        let Folder { path, rate, faults } = &FOLDERS[*at];
        let found = tally.rate();
        let above = found > *rate || tally.faults > *faults;
        let below = found + 10 < *rate && *rate > TARGET || tally.faults < *faults;
        if above || wanted.as_deref() == Some(path) {
            tally
                .found
                .iter()
                .for_each(|line| report += &format!("{line}\n"));
        }
        if above || below || wanted.is_some() {
            report += &format!(
                "{path:?}: {}.{} \"what\" per 1,000 of {} words (limit {}.{}), {} other faults \
                 (limit {faults}){}\n",
                found / 10,
                found % 10,
                tally.words,
                rate / 10,
                rate % 10,
                tally.faults,
                match (above, below) {
                    (true, _) => ": REWRITE these sentences",
                    (false, true) => ": lower the limit in proto/text/tests/tidy.rs",
                    (false, false) => "",
                },
            );
        }
        failed |= above;
    }
    // Past the test harness, which hides the output of a test that passes.
    std::io::stderr().write_all(report.as_bytes()).unwrap();
    assert!(
        !failed,
        "the prose of a folder is above its limit:\n{report}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(file: &str, text: &str) -> Tally {
        let mut tally = Tally::default();
        for block in blocks(file, text) {
            judge(file, &block, &mut tally);
        }
        judge_code(file, text, false, &mut tally);
        tally
    }

    #[test]
    fn comments_of_each_language_are_read() {
        for (file, text) in [
            ("a.rs", "/// Holds what is\n/// known.\nlet what = 1;"),
            ("a.proto", "// Holds what is known.\nint32 what = 1;"),
            ("a.go", "\t// Holds what is known.\n\twhat()"),
            ("a.ts", "/**\n * Holds what\n * is known.\n */\nwhat();"),
            (
                "a.py",
                "\"\"\"Holds\n    what is known.\n    \"\"\"\nwhat()",
            ),
            ("a.py", "# Holds what is known.\nwhat()"),
            ("a.md", "Holds what is known."),
        ] {
            let tally = judged(file, text);
            assert_eq!(
                (tally.whats, tally.words, tally.faults),
                (1, 4, 0),
                "{file}"
            );
            assert!(tally.found[0].starts_with(file), "{:?}", tally.found);
        }
    }

    #[test]
    fn questions_and_code_do_not_count() {
        let text =
            "/// So what? `what` and `x\n/// what`\n///\n/// ```\n/// what\n/// ```\nfn a() {}";
        let tally = judged("a.rs", text);
        assert_eq!((tally.whats, tally.words), (0, 3));
        assert_eq!(tally.faults, 1, "it opens with \"so\"");
    }

    #[test]
    fn banned_words_are_found_across_lines_and_not_across_sentences() {
        assert_eq!(judged("a.rs", "// takes so\n// many").faults, 1);
        assert_eq!(judged("a.rs", "// takes those. Of both").faults, 0);
        assert_eq!(judged("a.rs", "// the how-manieth, told anew").faults, 3);
    }

    #[test]
    fn strings_that_users_see_are_read() {
        for text in [
            "#[error(\"what was told\")]",
            "x.about(\n    \"what was told\")",
            "const A_HELP: &str = \"\\\n    what was told\";",
        ] {
            let tally = judged("a.rs", text);
            assert_eq!((tally.whats, tally.faults), (1, 1), "{text}");
        }
        let metric = "make.gauge(\n\"wald_a\",\n\"How many?\",\n)";
        assert_eq!(judged("server/src/metrics.rs", metric).faults, 1);
    }

    #[test]
    fn types_are_found_outside_of_tests() {
        let text = "pub struct A;\npub(crate) enum B {}\n    type Item = u8;\ntype C<T> = T;\n\
                    pub(super) unsafe trait D {}\n// struct E\n    union F {}\n\
                    #[cfg(test)]\nmod tests {\nstruct G;\n}";
        let names: Vec<&str> = defined_types(text).iter().map(|(_, name)| *name).collect();
        assert_eq!(names, ["A", "B", "C", "D", "F"]);
    }

    #[test]
    fn long_names_and_numbers_without_unit_are_found() {
        let long = "a".repeat(LONGEST_NAME + 1);
        assert_eq!(judged("a.rs", &format!("async fn {long}() {{")).faults, 1);
        assert_eq!(judged("a.rs", &format!("fn {}() {{", &long[1..])).faults, 0);
        assert_eq!(judged("a.rs", "/// The size.\npub size: u64,").faults, 1);
        assert_eq!(
            judged("a.rs", "/// The size in bytes.\npub size: u64,").faults,
            0
        );
        assert_eq!(
            judged("a.rs", "/// Kept.\npub records: Option<u64>,").faults,
            0
        );
        for (text, faults) in [
            ("pub const SIZE: u64 = 1;", 1),
            (
                "pub enum A {\n    B {\n        /// Kept.\n        size: u64,\n    },\n}",
                1,
            ),
            ("enum A {\n    B {\n        size: u64,\n    },\n}", 0),
            ("/// Kept.\npub fn size(&self) -> Option<u64> {", 1),
            (
                "/// Kept.\npub async fn grow(\n    &self,\n    by: u32,\n) -> bool {",
                1,
            ),
            ("/// Kept bytes.\npub const fn size(by: u32) -> u64 {", 0),
        ] {
            assert_eq!(judged("a.rs", text).faults, faults, "{text}");
        }
    }
}
