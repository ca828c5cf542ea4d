//! Tips for words that clap does not know, where its own tip would lead astray.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Commands of the server's binary, which work on its files.
const OF_THE_SERVER: [&str; 6] = ["archive", "config", "dump", "repair", "restore", "serve"];

/// The tip for an error of the command line; `None` = clap's own message is good.
pub(crate) fn of(error: &clap::Error) -> Option<String> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = word(ContextKind::InvalidSubcommand)?;
            if word == "bench" {
                return Some("bench is not a command of walctl; the benchmark is a program of its own: see `walbench --help`".into());
            }
            OF_THE_SERVER.contains(&word).then(|| {
                format!(
                    "{word} is a command of the server's program, on its machine: see `wald {word} --help`"
                )
            })
        }
        ErrorKind::UnknownArgument => {
            let word = word(ContextKind::InvalidArg)?;
            let count = word.strip_prefix('-')?;
            let is_count = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
            is_count.then(|| {
                format!(
                    "there is no option {word}; for the last {count} records write `walctl tail -n \
                     {count} LOG` or `walctl read --last {count} LOG`; see --help"
                )
            })
        }
        _ => None,
    }
}
