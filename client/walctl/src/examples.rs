//! An example at the end of every `--help`.

use clap::{Command, CommandFactory as _};

use crate::args::Args;

/// Examples of each command that does something, in the order of `walctl --help`. `cargo test` parses each of them.
const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "append",
        &[
            "walctl append greetings --text hello",
            "walctl append flights --format json-array flights.json",
            "walctl append orders --producer till-1 orders.jsonl",
        ],
    ),
    (
        "batch",
        &["walctl batch --expect shop/orders=12 both.jsonl"],
    ),
    (
        "read",
        &[
            "walctl read orders --from 100 --max 20",
            "walctl read orders --last 5 --output json",
        ],
    ),
    (
        "scan",
        &[
            "walctl scan orders --from 10m",
            "walctl scan --prefix shop/ --output jsonl",
            "walctl scan orders --from 100 --until 200 --output raw",
        ],
    ),
    (
        "tail",
        &[
            "walctl tail orders",
            "walctl tail -n 100 orders --output json",
            "walctl tail --prefix shop/",
        ],
    ),
    (
        "logs",
        &[
            "walctl logs",
            "walctl logs 'shop/*/orders'",
            "walctl logs --limit 0 --output raw",
        ],
    ),
    (
        "log create",
        &["walctl log create orders --sync-mode strict --max-age 7d"],
    ),
    ("log get", &["walctl log get orders"]),
    (
        "log update",
        &["walctl log update orders --max-bytes 10GiB"],
    ),
    ("log delete", &["walctl log delete orders"]),
    (
        "apply",
        &[
            "walctl apply -f logs.yaml --dry-run",
            "walctl apply -f logs.yaml --prune shop/",
        ],
    ),
    ("trim", &["walctl trim orders --before 1000"]),
    ("fence", &["walctl fence orders"]),
    (
        "cursor list",
        &["walctl cursor list orders", "walctl cursor list 'shop/*'"],
    ),
    ("cursor get", &["walctl cursor get orders billing"]),
    (
        "cursor set",
        &["walctl cursor set orders billing 13 --expected-lsn 12"],
    ),
    ("cursor delete", &["walctl cursor delete orders billing"]),
    ("producer list", &["walctl producer list orders"]),
    ("producer forget", &["walctl producer forget orders till-1"]),
    ("state show", &["walctl state show orders.state"]),
    (
        "state settle",
        &[
            "walctl state settle orders.state",
            "walctl state settle orders.state --drop 1",
            "walctl state settle orders.state --in-log 2",
        ],
    ),
    ("sync", &["walctl sync orders"]),
    ("status", &["walctl status --segments"]),
    ("version", &["walctl version"]),
    (
        "top",
        &[
            "walctl top",
            "walctl top 'shop/*' --sort stored",
            "walctl top --count 10 --output json",
        ],
    ),
    (
        "support-bundle",
        &[
            "walctl support-bundle wald.json",
            "curl -s http://127.0.0.1:6926/metrics | walctl support-bundle wald.json --metrics -",
        ],
    ),
    ("whoami", &["walctl whoami"]),
    ("cluster status", &["walctl cluster status"]),
    ("cluster hand-over", &["walctl cluster hand-over"]),
    (
        "context add",
        &["walctl context add shop --endpoint https://wald.internal:6925 --token-file shop.token"],
    ),
    ("context use", &["walctl context use shop"]),
    ("context list", &["walctl context list"]),
    ("context show", &["walctl context show shop"]),
    ("context remove", &["walctl context remove shop"]),
    ("verify", &["walctl verify --max-bytes-per-second 50MB"]),
    ("health", &["walctl health"]),
    ("backup", &["walctl backup /backups/wald --keep 14"]),
    ("backup list", &["walctl backup list /backups/wald"]),
    (
        "backup prune",
        &["walctl backup prune /backups/wald --keep 14"],
    ),
    ("completion", &["source <(walctl completion bash)"]),
    ("man", &["walctl man log create | man -l -"]),
];

/// The command line, with the examples.
pub(crate) fn command() -> Command {
    let mut command = Args::command();
    for (path, lines) in EXAMPLES {
        let path: Vec<&str> = path.split(' ').collect();
        command = with_examples(command, &path, lines);
    }
    command
}

fn with_examples(command: Command, path: &[&str], lines: &[&str]) -> Command {
    if let [first, rest @ ..] = path {
        return command.mut_subcommand(first, |inner| with_examples(inner, rest, lines));
    }
    let help = command.get_after_long_help().or(command.get_after_help());
    let before = help.map_or_else(String::new, |help| format!("{help}\n\n"));
    let lines: String = lines.iter().map(|line| format!("\n  {line}")).collect();
    command.after_long_help(format!("{before}Examples:{lines}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths of all commands that do something.
    fn leaves(command: &Command, path: &str, found: &mut Vec<String>) {
        for inner in command.get_subcommands() {
            let path = format!("{path} {}", inner.get_name());
            let path = path.trim_start();
            if !inner.is_subcommand_required_set() {
                found.push(path.to_owned());
            }
            leaves(inner, path, found);
        }
    }

    #[test]
    fn every_command_has_examples_that_it_takes() {
        let (mut all, command) = (Vec::new(), Args::command());
        leaves(&command, "", &mut all);
        let mut shown: Vec<_> = EXAMPLES
            .iter()
            .map(|(path, _)| (*path).to_owned())
            .collect();
        all.sort();
        shown.sort();
        assert_eq!(all, shown);
        for (path, lines) in EXAMPLES {
            for line in *lines {
                let own = &line[line.find("walctl").unwrap()..];
                let own = own.split([')', '|']).next().unwrap();
                let words = own.split_whitespace().map(|word| word.trim_matches('\''));
                let parsed = command.clone().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
                assert!(
                    own.starts_with(&format!("walctl {path}")),
                    "{line} of {path}"
                );
            }
        }
    }
}
