//! `walctl completion` and `walctl man`: made from the command line itself.

use anyhow::Result;
use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::args::Args;
use crate::exit::{ExitKind, Usage};
use crate::output::{Out, Output};

pub(crate) fn completion(shell: Shell) -> Result<ExitKind> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "walctl", &mut text);
    print(&text)
}

/// The page of walctl, or of one of its commands.
pub(crate) fn man(path: &[String]) -> Result<ExitKind> {
    let mut text = Vec::new();
    // Pages are named as their files: walctl-append.1.
    let title = [&["walctl".to_owned()], path].concat().join("-");
    clap_mangen::Man::new(command(path)?)
        .title(title)
        .source(concat!("walctl ", env!("CARGO_PKG_VERSION")))
        .render(&mut text)?;
    print(&text)
}

fn command(path: &[String]) -> Result<Command> {
    let mut command = Args::command();
    command.build();
    for step in path {
        command = command
            .find_subcommand(step)
            .ok_or_else(|| Usage(format!("there is no command {:?}", path.join(" "))))?
            .clone();
    }
    Ok(command)
}

fn print(text: &[u8]) -> Result<ExitKind> {
    let mut out = Out::new(Output::Raw);
    out.bytes(text)?;
    out.flush()?;
    Ok(ExitKind::Ok)
}
