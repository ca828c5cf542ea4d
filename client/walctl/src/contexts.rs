//! `walctl context`: names for the settings of servers.

use anyhow::Result;
use clap::ArgMatches;
use serde_json::{Map, Value, json};
use wald_connection::{ConnectionArgs, ConnectionChoice, ContextFile, add, remove, select};

use crate::args::ContextCommand;
use crate::exit::{ExitKind, Usage};
use crate::output::{Out, Output, note};
use crate::table::Table;

pub(crate) fn run(
    command: ContextCommand,
    mut connection: ConnectionArgs,
    matches: &ArgMatches,
    output: Output,
) -> Result<ExitKind> {
    let path = ContextFile::path()?;
    match command {
        ContextCommand::Add { name, replace } => {
            let (settings, context) = ConnectionChoice::to_keep(&connection, matches)?;
            // Reads the files, so that a context works when it is added.
            settings.builder()?.connect_lazy()?;
            let is_current = add(&path, &name, &context, replace)?;
            note(&match is_current {
                true => format!(
                    "context {name} is kept in {} and is the current one",
                    path.display()
                ),
                false => format!("context {name} is kept in {}", path.display()),
            });
        }
        ContextCommand::Use { name } => {
            select(&path, &name)?;
            note(&format!("context {name} is the current one"));
        }
        ContextCommand::List => list(&ContextFile::read(&path)?, output)?,
        ContextCommand::Show { name } => {
            if let Some(name) = name {
                if connection.context.is_some_and(|other| other != name) {
                    let text = "the argument and --context or WALD_CONTEXT name different contexts";
                    return Err(Usage(text.to_owned()).into());
                }
                connection.context = Some(name);
            }
            show(&ConnectionChoice::new(&connection, matches)?, output)?;
        }
        ContextCommand::Remove { name } => {
            let was_current = remove(&path, &name)?;
            note(&match was_current {
                true => format!("context {name} is removed, and there is no current one now"),
                false => format!("context {name} is removed"),
            });
        }
    }
    Ok(ExitKind::Ok)
}

fn list(file: &ContextFile, output: Output) -> Result<()> {
    let mut out = Out::new(output);
    let is_current = |name: &String| file.current.as_ref() == Some(name);
    match output {
        Output::Text | Output::Raw | Output::Delimited => {
            let mut table = Table::new();
            for (name, context) in &file.contexts {
                let mark = if is_current(name) { "*" } else { "" };
                table.row([mark.to_owned(), name.clone(), context.endpoint.clone()]);
            }
            if !file.contexts.is_empty() {
                out.line(&table.text())?;
            }
        }
        Output::Json | Output::Jsonl => {
            let contexts = file.contexts.iter().map(|(name, context)| {
                json!({ "name": name, "endpoint": context.endpoint, "current": is_current(name) })
            });
            out.json(&Value::Array(contexts.collect()))?;
        }
    }
    Ok(out.flush()?)
}

fn show(settings: &ConnectionChoice, output: Output) -> Result<()> {
    let mut out = Out::new(output);
    match output {
        Output::Text | Output::Raw | Output::Delimited => {
            let mut table = Table::new();
            for (name, value, source) in settings.rows() {
                table.row([name.to_owned(), value, source]);
            }
            out.line(&table.text())?;
        }
        Output::Json | Output::Jsonl => {
            let rows = settings.rows().into_iter();
            let shown = rows.map(|(name, value, source)| {
                let source = (!source.is_empty()).then_some(source);
                (name.to_owned(), json!({ "value": value, "from": source }))
            });
            out.json(&Value::Object(shown.collect::<Map<_, _>>()))?;
        }
    }
    Ok(out.flush()?)
}
