//! `walctl man`: made from the command line itself.

use anyhow::Result;
use clap::Command;

use crate::examples;
use crate::exit::{ExitKind, Usage};
use crate::output::{Out, Output};

/// The page of walctl, or of one of its commands.
pub(crate) fn man(path: &[String]) -> Result<ExitKind> {
    let mut text = Vec::new();
    // Pages are named as their files: walctl-append.1.
    let title = [&["walctl".to_owned()], path].concat().join("-");
    clap_mangen::Man::new(command(path)?)
        .title(title)
        .source(concat!("walctl ", env!("CARGO_PKG_VERSION")))
        .render(&mut text)?;
    let mut out = Out::new(Output::Raw);
    out.bytes(&text)?;
    out.flush()?;
    Ok(ExitKind::Ok)
}

fn command(path: &[String]) -> Result<Command> {
    let mut command = examples::command();
    command.build();
    for step in path {
        command = command
            .find_subcommand(step)
            .ok_or_else(|| Usage(format!("there is no command {:?}", path.join(" "))))?
            .clone();
    }
    Ok(command)
}
