//! `walctl apply`: logs as a file says.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::de::{Deserializer, Error as _, Visitor};
use serde::{Deserialize, Serialize};
use wald_client::proto::{Compression, Log, LogConfig, Retention, SyncMode};
use wald_client::{Client, Reason};
use wald_text::units;

use crate::args::{ApplyArgs, CompressionArg, SyncModeArg};
use crate::exit::{ExitKind, Interruption, Usage};
use crate::input::apart;
use crate::logs::{SETTINGS, setting_words};
use crate::names::NamePattern;
use crate::output::{Out, Output, confirmed, say};
use crate::parse;

/// Names that a question shows.
const SHOWN_NAMES: usize = 5;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LogFile {
    logs: Vec<DeclaredLog>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeclaredLog {
    name: String,
    #[serde(default, deserialize_with = "sync_mode")]
    sync_mode: SyncMode,
    #[serde(default, deserialize_with = "compression")]
    compression: Compression,
    #[serde(default, deserialize_with = "record_size")]
    max_record_bytes: u32,
    retention: Option<DeclaredRetention>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeclaredRetention {
    #[serde(default, deserialize_with = "span")]
    max_age: Duration,
    #[serde(default, deserialize_with = "size")]
    max_bytes: u64,
    #[serde(default)]
    max_records: u64,
    #[serde(default)]
    respect_cursors: bool,
}

/// A number, or a text with a unit.
struct Quantity(String);

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, or a text with a unit")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Quantity, E> {
                Ok(Quantity(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Quantity, E> {
                Ok(Quantity(number.to_string()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Quantity, E> {
                Ok(Quantity(text.to_owned()))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

fn quantity<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    parse(&Quantity::deserialize(deserializer)?.0).map_err(D::Error::custom)
}

fn span<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    quantity(deserializer, units::span)
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    quantity(deserializer, units::size)
}

fn record_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    quantity(deserializer, parse::record_size)
}

fn sync_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SyncMode, D::Error> {
    variant::<D, SyncModeArg>(deserializer).map(SyncMode::from)
}

fn compression<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Compression, D::Error> {
    variant::<D, CompressionArg>(deserializer).map(Compression::from)
}

/// A word of the command line.
fn variant<'de, D: Deserializer<'de>, A: ValueEnum>(deserializer: D) -> Result<A, D::Error> {
    let text = String::deserialize(deserializer)?;
    A::from_str(&text, false).map_err(|_| {
        let values = A::value_variants().iter();
        let names =
            values.filter_map(|value| Some(value.to_possible_value()?.get_name().to_owned()));
        let names = names.collect::<Vec<_>>().join(", ");
        D::Error::custom(format!("{text:?} is none of {names}"))
    })
}

impl DeclaredLog {
    fn config(&self) -> LogConfig {
        let mut config = LogConfig {
            max_record_bytes: self.max_record_bytes,
            retention: self.retention.as_ref().map(|bounds| Retention {
                max_age: (!bounds.max_age.is_zero())
                    .then(|| bounds.max_age.try_into().ok())
                    .flatten(),
                max_bytes: bounds.max_bytes,
                max_records: bounds.max_records,
                respect_cursors: bounds.respect_cursors,
            }),
            ..LogConfig::default()
        };
        config.set_sync_mode(self.sync_mode);
        config.set_compression(self.compression);
        config
    }
}

/// The step that a log needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum ApplyStep {
    Created,
    Changed,
    Unchanged,
    Deleted,
}

/// A setting that differs.
#[derive(Debug, Serialize)]
struct Difference {
    setting: &'static str,
    before: String,
    after: String,
}

/// A log and its step. Nothing was done if `dry_run`.
#[derive(Debug, Serialize)]
struct Applied {
    log: String,
    step: ApplyStep,
    changes: Vec<Difference>,
    dry_run: bool,
}

impl Applied {
    fn text(&self) -> String {
        let (done, would) = match self.step {
            ApplyStep::Created => ("created", "would create"),
            ApplyStep::Changed => ("changed", "would change"),
            ApplyStep::Unchanged => ("unchanged", "unchanged"),
            ApplyStep::Deleted => ("deleted", "would delete"),
        };
        let step = if self.dry_run { would } else { done };
        let changes = self
            .changes
            .iter()
            .map(|change| format!("{}: {} -> {}", change.setting, change.before, change.after));
        match self.changes.is_empty() {
            true => format!("{step} {}", self.log),
            false => format!(
                "{step} {}: {}",
                self.log,
                changes.collect::<Vec<_>>().join("; ")
            ),
        }
    }
}

pub(crate) async fn run(client: &Client, args: ApplyArgs, output: Output) -> Result<ExitKind> {
    if args.file.as_os_str() == "-" && args.prune.is_some() && !args.yes && !args.dry_run {
        // Nobody can be asked: stdin is the file.
        let text =
            "--prune asks before it deletes, and stdin is the file: add --yes, or name a file";
        return Err(Usage(text.to_owned()).into());
    }
    let path = args.file.clone();
    let file = apart(move || read(&path)).await?;
    let mut applied = Vec::new();
    let result = tokio::select! {
        // First: nothing is underway while its question waits.
        biased;
        result = carry_out(client, &args, &file, &mut applied) => result,
        _ = tokio::signal::ctrl_c() => Err(Interruption::UNDERWAY.into()),
    };
    // Also before an error, and on Ctrl-C: these steps are done.
    let mut out = Out::new(output);
    match output {
        Output::Json => out.json(&applied)?,
        Output::Jsonl => applied.iter().try_for_each(|each| out.json(each))?,
        Output::Text => (applied.iter()).try_for_each(|each| out.line(&each.text()))?,
        Output::Raw | Output::Delimited => {
            (applied.iter()).try_for_each(|each| out.line(&each.log))?
        }
    }
    out.flush()?;
    result
}

fn read(path: &Path) -> Result<LogFile> {
    let mut text = String::new();
    let shown = path.display();
    if path.as_os_str() == "-" {
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read stdin")?;
    } else {
        text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    }
    let options = serde_saphyr::options! { with_snippet: false };
    let file: LogFile = serde_saphyr::from_str_with_options(&text, options)
        .map_err(|error| Usage(format!("{shown}: {error}")))?;
    let mut names = BTreeSet::new();
    for log in &file.logs {
        if !names.insert(&log.name) {
            return Err(Usage(format!("{shown}: {} stands there twice", log.name)).into());
        }
    }
    Ok(file)
}

async fn carry_out(
    client: &Client,
    args: &ApplyArgs,
    file: &LogFile,
    applied: &mut Vec<Applied>,
) -> Result<ExitKind> {
    for declared in &file.logs {
        let done = set(client, declared, args.dry_run).await;
        applied.push(done.with_context(|| declared.name.clone())?);
    }
    let Some(prefix) = &args.prune else {
        return Ok(ExitKind::Ok);
    };
    let declared: BTreeSet<&str> = file.logs.iter().map(|log| log.name.as_str()).collect();
    let mut others = NamePattern::with_prefix(prefix).all(client).await?;
    others.retain(|log| !declared.contains(log.name.as_str()));
    if others.is_empty() {
        return Ok(ExitKind::Ok);
    }
    if !args.dry_run && !confirmed(&question(&others), args.yes).await? {
        say("nothing was deleted");
        return Ok(ExitKind::Failed);
    }
    for log in others {
        if !args.dry_run {
            // The log that was asked about, not a later one of its name.
            let deleted = client.delete_log(log.name.as_str(), Some(log.log_id)).await;
            deleted.with_context(|| log.name.clone())?;
        }
        applied.push(Applied {
            log: log.name,
            step: ApplyStep::Deleted,
            changes: Vec::new(),
            dry_run: args.dry_run,
        });
    }
    Ok(ExitKind::Ok)
}

/// Makes or changes one log.
async fn set(client: &Client, declared: &DeclaredLog, dry_run: bool) -> Result<Applied> {
    let (name, config) = (declared.name.as_str(), declared.config());
    let (step, changes) = match client.get_log(name).await {
        Ok(there) => {
            let changes = differences(&there.config.unwrap_or_default(), &config);
            if !changes.is_empty() && !dry_run {
                // A setting that the file leaves out goes back to the server's default.
                client.update_log(name, config, SETTINGS).await?;
            }
            let step = match changes.is_empty() {
                true => ApplyStep::Unchanged,
                false => ApplyStep::Changed,
            };
            (step, changes)
        }
        Err(error) if error.reason() == Some(Reason::LogNotFound) => {
            if !dry_run {
                client.create_log(name, config).await?;
            }
            (ApplyStep::Created, Vec::new())
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Applied {
        log: name.to_owned(),
        step,
        changes,
        dry_run,
    })
}

fn differences(before: &LogConfig, after: &LogConfig) -> Vec<Difference> {
    let same = [
        before.sync_mode == after.sync_mode,
        before.retention == after.retention,
        before.compression == after.compression,
        before.max_record_bytes == after.max_record_bytes,
    ];
    let pairs = setting_words(before).into_iter().zip(setting_words(after));
    let rows = SETTINGS.into_iter().zip(same).zip(pairs);
    rows.filter(|((_, same), _)| !same)
        .map(|((setting, _), (before, after))| Difference {
            setting,
            before,
            after,
        })
        .collect()
}

/// Names the logs that `--prune` deletes.
fn question(logs: &[Log]) -> String {
    let names: Vec<_> = (logs.iter().take(SHOWN_NAMES))
        .map(|log| log.name.as_str())
        .collect();
    let more = match logs.len().saturating_sub(SHOWN_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "delete {} with all records, for ever: {}{more}?",
        if logs.len() == 1 {
            "1 log".to_owned()
        } else {
            format!("{} logs", logs.len())
        },
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<LogFile> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("logs.yaml");
        std::fs::write(&path, text)?;
        read(&path)
    }

    #[test]
    fn file_has_the_units_and_words_of_the_command_line() {
        let text = "
logs:
  - name: orders
    sync_mode: batch
    compression: lz4
    max_record_bytes: 64KiB
    retention: { max_age: 30d, max_bytes: 10GiB, max_records: 5, respect_cursors: true }
  - name: audit
";
        let file = parsed(text).unwrap();
        let config = file.logs[0].config();
        assert_eq!(config.sync_mode(), SyncMode::Batch);
        assert_eq!(config.compression(), Compression::Lz4);
        assert_eq!(config.max_record_bytes, 65_536);
        let bounds = config.retention.unwrap();
        assert_eq!(bounds.max_age.unwrap().seconds, 30 * 86_400);
        assert_eq!(
            (bounds.max_bytes, bounds.max_records, bounds.respect_cursors),
            (10 << 30, 5, true)
        );
        assert_eq!(file.logs[1].config(), LogConfig::default());
        // JSON is YAML, too; a number counts bytes.
        let json = r#"{"logs": [{"name": "a", "max_record_bytes": 100, "retention": {}}]}"#;
        let config = parsed(json).unwrap().logs[0].config();
        assert_eq!(config.max_record_bytes, 100);
        assert_eq!(config.retention, Some(Retention::default()));
    }

    #[test]
    fn file_with_a_mistake_is_refused_with_its_place() {
        for (text, said) in [
            ("logs:\n  - name: a\n    sync_mod: batch\n", "sync_mod"),
            (
                "logs:\n  - name: a\n    sync_mode: fast\n",
                "\"fast\" is none of strict, batch, interval, async, manual, replicated",
            ),
            (
                "logs:\n  - name: a\n    retention: { max_age: 30 }\n",
                "expected a span",
            ),
            ("logs:\n  - sync_mode: batch\n", "name"),
            ("logs:\n  - name: a\n  - name: a\n", "a stands there twice"),
            ("logs: 5\n", "line 1"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.is::<Usage>(), "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }

    #[test]
    fn question_names_a_few_logs() {
        let logs: Vec<Log> = (0..7)
            .map(|number| Log {
                name: format!("l{number}"),
                ..Log::default()
            })
            .collect();
        assert_eq!(
            question(&logs),
            "delete 7 logs with all records, for ever: l0, l1, l2, l3, l4 and 2 more?"
        );
        assert_eq!(
            question(&logs[..1]),
            "delete 1 log with all records, for ever: l0?"
        );
    }
}
