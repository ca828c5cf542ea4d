//! Completion of words while somebody types: commands and options by the command line itself, names of logs and contexts
//! by the server and the file of contexts.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use anyhow::Result;
use clap::{CommandFactory as _, FromArgMatches as _};
use clap_complete::CompletionCandidate;
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};
use clap_complete::{CompleteEnv, Shell};
use wald_client::{Client, RetryPolicy};
use wald_connection::{ConnectionArgs, ConnectionChoice, ContextFile};

use crate::args::Args;
use crate::exit::ExitKind;
use crate::names::NamePattern;
use crate::output::{Out, Output};

/// Variable by which a shell asks for completions.
const VARIABLE: &str = "WALCTL_COMPLETE";
/// Maximum time for the names of logs: a person waits with a finger on the key.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of names that are offered.
const OFFERED: u32 = 200;

/// Answers a shell that asks for completions, and exits. Otherwise does nothing.
pub(crate) fn answer() {
    CompleteEnv::with_factory(Args::command)
        .var(VARIABLE)
        .complete();
}

/// `walctl completion`: the script by which a shell asks.
pub(crate) fn script(shell: Shell) -> Result<ExitKind> {
    let completer: &dyn EnvCompleter = match shell {
        Shell::Bash => &Bash,
        Shell::Elvish => &Elvish,
        Shell::Fish => &Fish,
        Shell::PowerShell => &Powershell,
        Shell::Zsh => &Zsh,
        _ => anyhow::bail!("there are no completions for {shell}"),
    };
    let mut text = Vec::new();
    completer.write_registration(VARIABLE, "walctl", "walctl", "walctl", &mut text)?;
    let mut out = Out::new(Output::Raw);
    out.bytes(&text)?;
    out.flush()?;
    Ok(ExitKind::Ok)
}

/// Names of logs that begin with the typed text. None if the server does not answer in time: a shell cannot show an error.
pub(crate) fn logs(typed: &OsStr) -> Vec<CompletionCandidate> {
    let typed = typed.to_str().unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let (Ok(runtime), Some(choice)) = (runtime, connection(std::env::args_os())) else {
        return Vec::new();
    };
    let found = runtime.block_on(async {
        let builder = choice.builder().ok()?.timeout(PATIENCE);
        let builder = builder.connect_timeout(PATIENCE).retry(RetryPolicy {
            max_attempts: 1,
            ..RetryPolicy::default()
        });
        let client: Client = builder.connect_lazy().ok()?;
        let names = NamePattern::with_prefix(typed);
        Some(names.list(&client, OFFERED, None).await.ok()?.logs)
    });
    let names = found.unwrap_or_default().into_iter().map(|log| log.name);
    offered(names)
}

/// Names of contexts that begin with the typed text.
pub(crate) fn contexts(typed: &OsStr) -> Vec<CompletionCandidate> {
    let typed = typed.to_str().unwrap_or_default();
    let file = ContextFile::path().and_then(|path| ContextFile::read(&path));
    let names = file.map(|file| file.contexts.into_keys().collect::<Vec<_>>());
    let names = names.unwrap_or_default().into_iter();
    offered(names.filter(|name| name.starts_with(typed)))
}

/// Names that mean nothing to a shell. Shells put candidates into the line as they are, and a name of somebody else may hold a
/// command.
fn offered(names: impl Iterator<Item = String>) -> Vec<CompletionCandidate> {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '/' | '-' | '+' | '@');
    let plain = names.filter(|name| !name.starts_with('-') && name.chars().all(is_plain));
    plain.map(CompletionCandidate::new).collect()
}

/// The connection that the line names so far. The shell passes the line behind `--`.
fn connection(words: impl Iterator<Item = OsString>) -> Option<ConnectionChoice> {
    let line = words.skip_while(|word| word != "--").skip(1);
    let matches = Args::command()
        .ignore_errors(true)
        .try_get_matches_from(line)
        .ok()?;
    let args = ConnectionArgs::from_arg_matches(&matches).ok()?;
    ConnectionChoice::new(&args, &matches).ok()
}
