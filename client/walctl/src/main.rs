//! `walctl`: Wald from the command line. Data on stdout, all else on stderr.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod append;
mod apply;
mod args;
mod backup;
mod batch;
mod cluster;
mod complete;
mod contexts;
mod cursors;
mod examples;
mod exit;
mod input;
mod logs;
mod names;
mod output;
mod pack;
mod pages;
mod parse;
mod producers;
mod progress;
mod scan;
mod state;
mod status;
mod support;
mod table;
mod times;
mod tips;
mod top;
mod verify;
mod version;
mod whoami;

use std::io;
use std::time::Duration;

use anyhow::Result;
use clap::{ArgMatches, FromArgMatches};
use tokio::net::TcpStream;
use wald_client::{Client, DEFAULT_TIMEOUT, Health, RetryPolicy, SyncTarget};
use wald_connection::ConnectionChoice;

use crate::args::{
    Args, ClusterCommand, Command, CursorCommand, FenceArgs, Global, HealthArgs, LogCommand,
    ProducerCommand, StateCommand, SyncArgs, TrimArgs,
};
use crate::exit::{Asked, ExitKind, Interruption, Usage};
use crate::output::{Out, Output, confirmed, say};

/// Time before walctl reports that it cannot connect.
const SILENCE: Duration = Duration::from_secs(1);

fn main() {
    complete::answer();
    let parsed = examples::command().try_get_matches().and_then(|matches| {
        let args = Args::from_arg_matches(&matches)?;
        Ok((args, matches))
    });
    let (args, matches) = parsed.unwrap_or_else(|error| {
        if let Some(tip) = tips::of(&error) {
            say(&tip);
            std::process::exit(ExitKind::Usage as i32);
        }
        error.exit()
    });
    let asked = Asked::of(&args.command);
    let exit = match run(args, &matches) {
        Ok(exit) => exit,
        Err(error) => exit::report(&error, asked),
    };
    // Not by return: a reader thread may still wait for a stdin that never ends.
    std::process::exit(exit as i32);
}

#[tokio::main]
async fn run(args: Args, matches: &ArgMatches) -> Result<ExitKind> {
    let has_records = matches!(
        args.command,
        Command::Read(_) | Command::Scan(_) | Command::Tail(_)
    );
    if args.global.output == Output::Delimited && !has_records {
        return Err(Usage(
            "--output delimited is for records: read, scan and tail; try --output json".into(),
        )
        .into());
    }
    let Global {
        timeout,
        output,
        connection,
    } = args.global;
    // These commands need no server.
    match args.command {
        Command::Completion { shell } => return complete::script(shell),
        Command::Man { command } => return pages::man(&command),
        Command::Context(command) => return contexts::run(command, connection, matches, output),
        Command::State(StateCommand::Show { file }) => return state::show(&file, output),
        _ => {}
    }
    let settings = ConnectionChoice::new(&connection, matches)?;
    if let Some(remark) = settings.remark() {
        say(&remark);
    }
    let servers = settings.servers();
    let local = matches!(&args.command, Command::Backup(backup) if backup.command.is_some());
    // These commands need their answer at once; for the others --timeout is the bound.
    let asks = matches!(
        args.command,
        Command::Health(_) | Command::Status(_) | Command::Version
    );
    let mut builder = settings.builder()?.retry(RetryPolicy {
        max_attempts: match (asks, servers) {
            (false, _) => u32::MAX,
            (true, 1) => 1,
            // Each of them, and an owner outside of the list.
            (true, servers) => servers + 1,
        },
        max_pause: Duration::from_millis(500),
        ..RetryPolicy::default()
    });
    if let Some(timeout) = timeout {
        builder = builder.timeout(timeout);
    }
    if timeout.is_some() || servers > 1 {
        // A server that swallows packets leaves time for the others.
        let share = timeout.unwrap_or(DEFAULT_TIMEOUT) / servers;
        builder = builder.connect_timeout(share);
    }
    let client = builder.connect_lazy()?;
    // A list of backups calls no server.
    if !asks && !local {
        tokio::spawn(report_refusal(client.clone(), servers));
    }
    // An append says how far it came, so it minds interruptions itself.
    if let Command::Append(append) = args.command {
        return append::run(&client, append, timeout, output).await;
    }
    let changes = changes(&args.command);
    tokio::select! {
        // First: some commands have more to say about an interruption.
        biased;
        done = other(&client, args.command, &settings, output) => done,
        _ = tokio::signal::ctrl_c() => match changes {
            true => Err(Interruption::UNDERWAY.into()),
            false => Ok(ExitKind::Interrupted),
        },
    }
}

/// Whether a command has the server change something.
fn changes(command: &Command) -> bool {
    match command {
        Command::Log(command) => !matches!(command, LogCommand::Get { .. }),
        Command::Cursor(command) => {
            matches!(
                command,
                CursorCommand::Set(_) | CursorCommand::Delete { .. }
            )
        }
        Command::Producer(command) => matches!(command, ProducerCommand::Forget { .. }),
        Command::Cluster(command) => matches!(command, ClusterCommand::HandOver),
        Command::Batch(_) | Command::Trim(_) | Command::Fence(_) => true,
        _ => false,
    }
}

/// Reports on stderr that nothing listens at the current server, or that TLS fails. The client repeats its attempts
/// silently, so a user who forgot to start the server would wait for `--timeout` without a word. With several servers
/// it looks as often as there are servers, because the client may just have gone on to the next one.
async fn report_refusal(client: Client, servers: u32) {
    for _ in 0..servers {
        tokio::time::sleep(SILENCE).await;
        if let Some(failure) = client.tls_failure() {
            say(&format!("{failure}; trying again until --timeout"));
            return;
        }
        let endpoint = client.endpoint();
        let address = endpoint
            .split_once("://")
            .map_or("", |(_, address)| address);
        if let Err(error) = TcpStream::connect(address).await
            && error.kind() == io::ErrorKind::ConnectionRefused
        {
            say(&format!(
                "nothing listens at {endpoint}; trying again until --timeout"
            ));
            return;
        }
    }
}

async fn other(
    client: &Client,
    command: Command,
    settings: &ConnectionChoice,
    output: Output,
) -> Result<ExitKind> {
    match command {
        Command::Batch(args) => batch::run(client, args, output).await,
        Command::Read(args) => scan::read(client, args, output).await,
        Command::Scan(args) => scan::scan(client, args, output).await,
        Command::Tail(args) => scan::tail(client, args, output).await,
        Command::Logs(args) => logs::list(client, args, output).await,
        Command::Log(command) => logs::log(client, command, output).await,
        Command::Apply(args) => apply::run(client, args, output).await,
        Command::Trim(args) => trim(client, args, output).await,
        Command::Fence(args) => fence(client, args, output).await,
        Command::Cursor(command) => cursors::cursor(client, command, output).await,
        Command::Producer(command) => producers::producer(client, command, output).await,
        Command::State(StateCommand::Settle(args)) => state::settle(client, args).await,
        Command::Sync(args) => sync(client, args, output).await,
        Command::Status(args) => status::run(client, args, output).await,
        Command::Cluster(command) => cluster::run(client, command, settings, output).await,
        Command::Whoami => whoami::run(client, settings, output).await,
        Command::Verify(args) => verify::run(client, args, output).await,
        Command::Health(args) => health(client, args, output).await,
        Command::Version => version::run(client, output).await,
        Command::Top(args) => top::run(client, args, output).await,
        Command::SupportBundle(args) => support::run(client, args).await,
        Command::Backup(args) => backup::run(client, args, output).await,
        Command::Append(_)
        | Command::Completion { .. }
        | Command::Man { .. }
        | Command::Context(_)
        | Command::State(StateCommand::Show { .. }) => unreachable!("handled before"),
    }
}

async fn trim(client: &Client, args: TrimArgs, output: Output) -> Result<ExitKind> {
    let question = format!(
        "forget the records of {} below lsn {}, for ever?",
        args.log, args.before
    );
    if !confirmed(&question, args.yes).await? {
        say("nothing was trimmed");
        return Ok(ExitKind::Failed);
    }
    let first = client
        .trim(args.log.as_str(), args.before.into(), args.log_id)
        .await?;
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => {
            out.json(&serde_json::json!({ "log": args.log, "first_lsn": first.get() }))?;
        }
        Output::Text | Output::Raw | Output::Delimited => {
            out.line(&format!("first lsn {first}"))?
        }
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

async fn fence(client: &Client, args: FenceArgs, output: Output) -> Result<ExitKind> {
    let fenced = client
        .fence(args.log.as_str(), args.writer_epoch, args.log_id)
        .await?;
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => out.json(&serde_json::json!({
            "log": args.log,
            "tail_lsn": fenced.tail_lsn.get(),
            "writer_epoch": fenced.writer_epoch,
            "log_id": fenced.log_id,
        }))?,
        Output::Text | Output::Raw | Output::Delimited => out.line(&format!(
            "next lsn {}, writer epoch {}",
            fenced.tail_lsn, fenced.writer_epoch
        ))?,
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

async fn sync(client: &Client, args: SyncArgs, output: Output) -> Result<ExitKind> {
    let target = if args.os {
        SyncTarget::Os
    } else {
        SyncTarget::Device
    };
    let position = client.sync(target, args.log).await?;
    let mut out = Out::new(output);
    match (output, position) {
        (Output::Json | Output::Jsonl, position) => {
            out.json(&serde_json::json!({ "durable_position": position }))?;
        }
        (_, Some(position)) => out.line(&format!("durable position {position}"))?,
        (_, None) => out.line("synced")?,
    }
    out.flush()?;
    Ok(ExitKind::Ok)
}

async fn health(client: &Client, args: HealthArgs, output: Output) -> Result<ExitKind> {
    let health = client.health(args.service).await?;
    let (status, exit) = match health {
        Health::Serving => ("SERVING", ExitKind::Ok),
        Health::NotServing => ("NOT_SERVING", ExitKind::Unavailable),
        Health::Unknown => ("UNKNOWN", ExitKind::Unavailable),
    };
    let mut out = Out::new(output);
    match output {
        Output::Json | Output::Jsonl => out.json(&serde_json::json!({ "status": status }))?,
        Output::Text | Output::Raw | Output::Delimited => out.line(status)?,
    }
    out.flush()?;
    Ok(exit)
}
