//! The Wald daemon: `wald` serves, `wald config` shows and checks settings, `wald verify`
//! inspects an offline data directory.

// `println` and `eprintln` panic where nobody reads.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod admission;
mod answers;
mod archive;
mod audit;
mod auth;
mod backups;
#[cfg(feature = "object")]
mod bucket;
mod config;
mod console;
mod convert;
mod drain;
mod encryption;
mod ephemeral;
#[cfg_attr(not(feature = "object"), path = "forward/none.rs")]
mod forward;
mod gateway;
mod grpc;
mod host;
mod http;
#[cfg(any(test, feature = "object", feature = "known-bad"))]
mod known_bad;
mod linger;
mod logging;
mod methods;
mod metrics;
mod offline;
mod plan;
mod reload;
#[cfg_attr(not(feature = "object"), path = "replica/none.rs")]
mod replica;
mod rpc;
mod serve;
mod shortage;
mod status;
mod tls;
mod trace;
mod transport;
mod wakes;

use std::collections::HashMap;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr as _;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use clap_complete::Shell;
use wald_bucket::TakeOver;

use config::{
    ConfigProblem, Effective, Layers, LogFormat, SETTINGS, SettingValue as _, env_name, flag_name,
    heading,
};
use ephemeral::Ephemeral;
use serve::Exit;

/// Static builds would otherwise have musl's allocator, which is slow with many threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    wald_storage::keep_little_free_memory();
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => match misplaced(&error) {
            Some(tip) => {
                offline::say(&tip);
                return ExitCode::from(2);
            }
            None => error.exit(),
        },
    };
    let mut source = ConfigSource::new(&matches);
    let of_serve = [
        ("take-over", matches.contains_id("take-over")),
        ("ephemeral", matches.get_flag("ephemeral")),
    ];
    if !matches!(matches.subcommand_name(), None | Some("serve"))
        && let Some((option, _)) = of_serve.into_iter().find(|(_, is_given)| *is_given)
    {
        offline::say(&format!("--{option} is an option of `wald serve`"));
        return ExitCode::from(2);
    }
    if let Some((name, matches)) = matches.subcommand() {
        let configured = || Ok(source.effective()?.config);
        if let Some(result) = offline::run(name, matches, configured) {
            return ExitCode::from(result.unwrap_or_else(|exit| failed(&exit)));
        }
    }
    let result = match matches.subcommand() {
        Some(("config", matches)) => configure(&source, matches).map_err(|exit| failed(&exit)),
        Some(("completion", matches)) => completion(matches).map_err(|exit| failed(&exit)),
        Some(("restore", matches)) => restore(&source, matches),
        Some(("archive", matches)) => archived(&source, matches),
        Some(("backup-key", matches)) => {
            backups::run_key_command(matches).map_err(|exit| failed(&exit))
        }
        Some(("token", matches)) => (source.effective())
            .and_then(|effective| auth::run(&effective.config, matches))
            .map_err(|exit| failed(&exit)),
        Some(("key", matches)) => (source.effective())
            .and_then(|effective| encryption::commands::run(&effective.config, matches))
            .map_err(|exit| failed(&exit)),
        Some(("man", _)) => man().map_err(|exit| failed(&exit)),
        _ => serve(&mut source, takes_over(&matches), is_ephemeral(&matches)).map_err(|exit| {
            tell(&source, &exit);
            match exit.again {
                true => begin_again(),
                false => exit.code,
            }
        }),
    };
    // The process ends without waiting for the thread that writes the log.
    logging::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(code) => ExitCode::from(code),
    }
}

/// Replaces the process by a new one with the same settings, so that nothing of the old one stays. Returns only if the
/// system refuses it.
fn begin_again() -> u8 {
    logging::flush();
    // An owner that the operator called gone was another one than today's.
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "wald".into());
    let arguments = arguments.filter(|argument| {
        let is_take_over = argument
            .to_str()
            .is_some_and(|text| text.starts_with("--take-over"));
        !is_take_over
    });
    let mut command = std::process::Command::new("/proc/self/exe");
    let error = command.arg0(name).args(arguments).exec();
    logging::print(&format!("wald: cannot begin again: {error}"));
    Exit::SYSTEM
}

fn restore(source: &ConfigSource, matches: &ArgMatches) -> Result<(), u8> {
    let code = source
        .effective()
        .and_then(|effective| backups::restore(&effective.config, matches))
        .map_err(|exit| failed(&exit))?;
    if code == 0 { Ok(()) } else { Err(code) }
}

fn archived(source: &ConfigSource, matches: &ArgMatches) -> Result<(), u8> {
    let code = source
        .effective()
        .and_then(|effective| archive::run(&effective.config, matches))
        .map_err(|exit| failed(&exit))?;
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Reports on stderr why a command other than `serve` failed.
fn failed(exit: &Exit) -> u8 {
    for line in exit.message.lines() {
        offline::say(line);
    }
    exit.code
}

/// Reports why the daemon ends, in the form of its log.
fn tell(source: &ConfigSource, exit: &Exit) {
    if !tracing::enabled!(tracing::Level::ERROR) {
        // It ends before there is a log. If there is one that shows no errors, this fails.
        let _ = logging::start(source.json(), "error", None);
    }
    for line in exit.message.lines() {
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!(code = exit.code, "{line}");
        } else {
            logging::print(&format!("wald: {line}"));
        }
    }
}

/// Commands of `walctl` that `wald` does not have.
const OF_WALCTL: [&str; 23] = [
    "append",
    "apply",
    "backup",
    "batch",
    "cluster",
    "context",
    "cursor",
    "fence",
    "health",
    "log",
    "logs",
    "producer",
    "read",
    "scan",
    "state",
    "status",
    "support-bundle",
    "sync",
    "tail",
    "top",
    "trim",
    "version",
    "whoami",
];

/// The remedy for a word that clap takes for a command: a value of the setting before it, a command
/// of another program, or a data directory.
fn misplaced(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return None;
    };
    if let "true" | "false" | "yes" | "no" | "on" | "off" = word.as_str() {
        return Some(format!(
            "{word:?} is no command; a value of a switch stands behind an equals sign, such as \
             --reflection={word}"
        ));
    }
    if word == "bench" {
        return Some("bench is no command of wald; see `walbench --help`".to_owned());
    }
    if OF_WALCTL.contains(&word.as_str()) {
        return Some(format!(
            "{word} is a command of walctl, which talks to a running daemon: see `walctl {word} --help`"
        ));
    }
    let is_path = word.contains('/') || std::path::Path::new(word).exists();
    is_path.then(|| {
        format!(
            "{word:?} is no command; to serve a directory, write --data-dir {word}; to look at it, \
             `wald verify {word}`"
        )
    })
}

fn command() -> Command {
    let mut command = Command::new("wald")
        .version(wald_text::VERSION)
        .about("Write-ahead logs as a service: appends that are on the device when acked.")
        .after_help(
            "Every setting is a flag (--segment-bytes), also of each command, a variable (WALD_SEGMENT_BYTES) and a key of \
             the file given with --config (segment_bytes); flags win over variables, variables over \
             the file. `wald --help` describes them all.",
        )
        .arg(
            Arg::new("config")
                .long("config")
                .env("WALD_CONFIG")
                .value_name("FILE")
                .help("TOML file with settings")
                .value_parser(value_parser!(PathBuf))
                .global(true),
        )
        .arg(take_over_argument())
        .arg(ephemeral_argument())
        .subcommand(
            Command::new("serve")
                .about("Run the daemon (default without a command)")
                .arg(take_over_argument())
                .arg(ephemeral_argument()),
        )
        .subcommands(offline::commands())
        .subcommand(
            Command::new("config")
                .about("Show or check the configuration")
                .subcommand_required(true)
                .subcommand(
                    Command::new("show").about("Print every setting in force and its origin"),
                )
                .subcommand(
                    Command::new("check")
                        .about("Check the settings, without the limits of the host; exits with 0 or 78"),
                )
                .subcommand(
                    Command::new("reference").about("Print every setting with its documentation"),
                ),
        )
        .subcommand(
            Command::new("completion")
                .about("Print the completions for a shell, to be saved in its directory of completions")
                .arg(
                    Arg::new("shell")
                        .required(true)
                        .help("The shell")
                        .value_parser(value_parser!(Shell)),
                ),
        )
        .subcommand(backups::restore_command())
        .subcommand(backups::key_command())
        .subcommand(archive::command())
        .subcommand(auth::command())
        .subcommand(encryption::commands::command())
        .subcommand(Command::new("man").about("Print the man page, with every setting"));
    let mut shown_under = None;
    for setting in SETTINGS.iter() {
        shown_under = heading(setting.name).or(shown_under);
        let doc: Vec<&str> = setting.doc.lines().map(str::trim).collect();
        let mut arg = Arg::new(setting.name)
            // clap keeps names for ever; there are a few dozen, made once.
            .long(&*flag_name(setting.name).leak())
            .env(&*env_name(setting.name).leak())
            .value_name("VALUE")
            .help(format!("{} [default: {}]", doc.join(" "), setting.default))
            .hide_short_help(true)
            .hide_env(true)
            .help_heading(shown_under)
            .action(ArgAction::Set)
            .global(true);
        if setting.switch {
            arg = arg
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true");
        }
        // The help of another command shows its own options, and settings for which it has no argument.
        command = command.mut_subcommands(|subcommand| match subcommand.get_name() {
            "serve" => subcommand,
            name => {
                let is_read = reads(name, setting.name);
                let heading = is_read.then_some("Settings");
                subcommand.arg(
                    arg.clone()
                        .help_heading(heading)
                        .hide_short_help(!is_read)
                        .hide(!is_read),
                )
            }
        });
        command = command.arg(arg);
    }
    command
}

/// Whether the help of a command shows a setting. Each command takes every setting, for the sake of scripts; most read the
/// directory from an argument.
fn reads(command: &str, setting: &str) -> bool {
    const BACKUPS: [&str; 5] = [
        "backup_trust",
        "bucket_endpoint",
        "bucket_region",
        "bucket_credentials_file",
        "bucket_insecure",
    ];
    match command {
        "token" => setting == "auth_file",
        "restore" => {
            ["data_dir", "allow_foreign_owner"].contains(&setting) || BACKUPS.contains(&setting)
        }
        "verify" => BACKUPS.contains(&setting),
        "dump" => ["encryption_key_file", "encryption_key_command"].contains(&setting),
        _ => false,
    }
}

fn take_over_argument() -> Arg {
    Arg::new("take-over")
        .long("take-over")
        .value_name("TERM")
        .num_args(0..=1)
        .require_equals(true)
        .default_missing_value("any")
        .value_parser(TakeOver::from_str)
        .help("Own the store in bucket_url although its record names another node")
        .long_help(
            "Own the store in bucket_url although its record names another node. That node stores nothing there any more, \
             and ends. An empty data directory fetches the store from the bucket first. Records that were not REPLICATED \
             are lost then: use it only if the other node is gone for good. With a TERM, which the refused start names, \
             it takes the store from the owner of that term alone, and has no effect once this node owns the store. A \
             command that a service manager starts again needs a TERM.",
        )
}

fn ephemeral_argument() -> Arg {
    Arg::new("ephemeral")
        .long("ephemeral")
        .action(ArgAction::SetTrue)
        .help("Serve a new store for a test: temporary directory, free ports, and an end with the parent process")
        .long_help(
            "Serve a new store for a test. The store is in a temporary directory (TMPDIR), which goes when the daemon ends; \
             kill -9 and a second signal leave it. Both ports are free ones of 127.0.0.1, unless --listen or --http-listen names others. \
             Once the daemon serves, it prints one line to the standard output: grpc=HOST:PORT http=HOST:PORT. The daemon \
             ends when the process that started it ends. All other settings are as usual.",
        )
}

fn is_ephemeral(matches: &ArgMatches) -> bool {
    let of_serve = matches.subcommand_matches("serve");
    let is_given = |matches: &ArgMatches| matches.get_flag("ephemeral");
    of_serve.is_some_and(is_given) || is_given(matches)
}

/// The owner of the store that is gone, if the operator says so.
fn takes_over(matches: &ArgMatches) -> Option<TakeOver> {
    let of_serve = matches.subcommand_matches("serve");
    let named = |matches: &ArgMatches| matches.get_one("take-over").copied();
    of_serve.and_then(named).or_else(|| named(matches))
}

/// Source of this process's configuration; read again on SIGHUP.
struct ConfigSource {
    flags: HashMap<&'static str, String>,
    env: HashMap<&'static str, String>,
    file: Option<PathBuf>,
}

impl ConfigSource {
    fn new(matches: &ArgMatches) -> Self {
        // Global arguments are in the innermost matches, wherever they were given.
        let mut innermost = matches;
        while let Some((_, inner)) = innermost.subcommand() {
            innermost = inner;
        }
        let mut source = Self {
            flags: HashMap::new(),
            env: HashMap::new(),
            file: innermost.get_one::<PathBuf>("config").cloned(),
        };
        for setting in SETTINGS.iter() {
            let Some(value) = innermost.get_one::<String>(setting.name) else {
                continue;
            };
            match innermost.value_source(setting.name) {
                Some(ValueSource::EnvVariable) => source.env.insert(setting.name, value.clone()),
                _ => source.flags.insert(setting.name, value.clone()),
            };
        }
        source
    }

    fn resolve(&self) -> Result<Effective, ConfigProblem> {
        let file = match &self.file {
            None => None,
            Some(path) => match std::fs::read_to_string(path) {
                Ok(text) => Some((path.clone(), text)),
                Err(error) => {
                    return Err(ConfigProblem(vec![format!(
                        "{}: {error}; --config names a TOML file, such as `wald config reference` prints",
                        path.display()
                    )]));
                }
            },
        };
        Layers {
            flags: self.flags.clone(),
            env: self.env.clone(),
            otel: otel().values,
            file,
        }
        .resolve()
    }

    /// Whether the log is JSON, also if the configuration as a whole is not usable.
    fn json(&self) -> bool {
        let name = "log_format";
        let resolved = self.resolve().map(|effective| effective.config.log_format);
        let said = || self.flags.get(name).or_else(|| self.env.get(name));
        json(resolved.unwrap_or_else(|_| {
            said()
                .and_then(|text| LogFormat::parse(text).ok())
                .unwrap_or(LogFormat::Auto)
        }))
    }

    fn effective(&self) -> Result<Effective, Exit> {
        self.resolve()
            .map_err(|problem| Exit::new(Exit::CONFIG, problem.to_string()))
    }
}

/// Whether a log of this form is JSON.
fn json(format: LogFormat) -> bool {
    match format {
        LogFormat::Auto => !std::io::stderr().is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    }
}

/// Problems of the environment, not of the settings.
fn warnings() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut warnings = config::misspelt(names);
    warnings.extend(otel().warnings);
    warnings
}

/// Settings from the variables of OpenTelemetry.
fn otel() -> config::OtelSettings {
    config::otel(|name| std::env::var(name).ok())
}

fn configure(source: &ConfigSource, matches: &ArgMatches) -> Result<(), Exit> {
    if matches.subcommand_name() != Some("reference") {
        for warning in warnings() {
            offline::say(&format!("warning: {warning}"));
        }
    }
    let text = match matches.subcommand_name() {
        Some("reference") => config::reference(),
        Some("check") => {
            plan::check(&source.effective()?.config)?;
            String::new()
        }
        _ => source.effective()?.show(),
    };
    print(text.as_bytes())
}

fn completion(matches: &ArgMatches) -> Result<(), Exit> {
    let mut text = Vec::new();
    if let Some(shell) = matches.get_one::<Shell>("shell") {
        clap_complete::generate(*shell, &mut command(), "wald", &mut text);
    }
    print(&text)
}

fn man() -> Result<(), Exit> {
    let mut text = Vec::new();
    // The man page leaves out the texts that the short help hides.
    let command = command().mut_args(|arg| arg.hide_short_help(false));
    clap_mangen::Man::new(command)
        .render(&mut text)
        .map_err(|error| Exit::new(Exit::IO, error.to_string()))?;
    print(&text)
}

fn print(text: &[u8]) -> Result<(), Exit> {
    let mut stdout = std::io::stdout();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        // A reader that closed the pipe has read enough.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Exit::new(
            Exit::IO,
            format!("writing to the standard output: {error}"),
        )),
        _ => Ok(()),
    }
}

fn serve(
    source: &mut ConfigSource,
    take_over: Option<TakeOver>,
    is_ephemeral: bool,
) -> Result<(), Exit> {
    let ephemeral = is_ephemeral
        .then(|| Ephemeral::begin(&mut source.flags))
        .transpose()?;
    let Effective {
        mut config,
        entries: started,
    } = source.effective()?;
    if is_ephemeral {
        Ephemeral::check(&config)?;
    }
    if take_over.is_some() && !config.has_replica() {
        let text = "--take-over needs bucket_url, the bucket of the replica to take over";
        return Err(Exit::new(Exit::CONFIG, text));
    }
    // Before anything is opened: descriptors that are open already count as inherited.
    let host = plan::Host::prepare();
    let json = json(config.log_format);
    #[cfg(feature = "otlp")]
    let exporter = trace::Exporter::start(&config).map_err(|why| Exit::new(Exit::CONFIG, why))?;
    #[cfg(feature = "otlp")]
    let traces = exporter.as_ref().map(trace::Exporter::layer);
    #[cfg(not(feature = "otlp"))]
    let traces = None;
    let log = logging::start(json, &config.log_filter, traces)
        .map_err(|why| Exit::new(Exit::CONFIG, format!("log_filter: {why}")))?;
    for warning in warnings() {
        tracing::warn!("{warning}");
    }
    let limits = plan::make(&mut config, &host)?;
    let reload = || match source.resolve() {
        Ok(effective) => {
            log.set_filter(&effective.config.log_filter);
            let settings = config::changed(&started, &effective.entries);
            if !settings.is_empty() {
                tracing::warn!(%settings, "changed settings come into force at the next start");
            }
        }
        Err(problem) => tracing::error!(%problem, "the configuration is not usable; unchanged"),
    };
    host::write_no_core();
    // Hints would disturb a program that reads the ports.
    let is_read = ephemeral.is_some() && !std::io::stdout().is_terminal();
    let result = serve::run(
        &config,
        take_over,
        &limits,
        &reload,
        ephemeral,
        !json && !is_read,
    );
    #[cfg(feature = "otlp")]
    if let Some(exporter) = exporter {
        exporter.finish();
    }
    result
}
