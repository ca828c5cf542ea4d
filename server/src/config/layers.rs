//! Sources of the values, their order, and the problems found in them.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use super::otel::OtelValue;
use super::{Config, SETTINGS, heading};

/// The flag of a setting, without the dashes.
pub(crate) fn flag_name(setting: &str) -> String {
    setting.replace('_', "-")
}

/// The environment variable of a setting.
pub(crate) fn env_name(setting: &str) -> String {
    format!("WALD_{}", setting.to_uppercase())
}

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// No source set it.
    Default,
    /// The configuration file.
    File(PathBuf),
    /// The environment.
    Env,
    /// This variable of OpenTelemetry.
    Otel(&'static str),
    /// The command line.
    Flag,
}

/// Everything that is wrong with a configuration, one sentence each.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ConfigProblem(pub(crate) Vec<String>);

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for ConfigProblem {}

/// The texts given in each source, before they are checked.
#[derive(Debug, Default)]
pub(crate) struct Layers {
    /// Values of flags, by setting.
    pub(crate) flags: HashMap<&'static str, String>,
    /// Values of environment variables, by setting.
    pub(crate) env: HashMap<&'static str, String>,
    /// Values of OpenTelemetry's variables, by setting.
    pub(crate) otel: HashMap<&'static str, OtelValue>,
    /// The file's path and text.
    pub(crate) file: Option<(PathBuf, String)>,
}

/// A setting in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SettingInForce {
    /// The setting.
    pub(crate) name: &'static str,
    /// Its value as Wald writes it.
    pub(crate) value: String,
    /// Source of the value.
    pub(crate) origin: Origin,
}

/// A configuration that can be used.
#[derive(Debug)]
pub(crate) struct Effective {
    /// The parsed settings.
    pub(crate) config: Config,
    /// The values for people, in the order of the table.
    pub(crate) entries: Vec<SettingInForce>,
}

/// Names of settings that have changed since the start, and need another start. The log filter needs none.
pub(crate) fn changed(started: &[SettingInForce], now: &[SettingInForce]) -> String {
    let pairs = started.iter().zip(now);
    let differs = |pair: &(&SettingInForce, &SettingInForce)| pair.0.value != pair.1.value;
    let names = pairs.filter(differs).map(|(setting, _)| setting.name);
    names
        .filter(|name| *name != "log_filter")
        .collect::<Vec<_>>()
        .join(", ")
}

impl Layers {
    /// Picks each setting's value and checks all of them.
    ///
    /// # Errors
    /// Names every unknown key with the nearest known one, and every value that cannot be.
    pub(crate) fn resolve(&self) -> Result<Effective, ConfigProblem> {
        let mut problems = Vec::new();
        let file = match &self.file {
            Some((path, text)) => read_file_keys(path, text, &mut problems),
            None => HashMap::new(),
        };
        // With an endpoint of Wald's own, variables that a platform sets change nothing of its export.
        let own = "otlp_endpoint";
        let has_own =
            self.flags.contains_key(own) || self.env.contains_key(own) || file.contains_key(own);
        let otel = (!has_own).then_some(&self.otel);
        let pick = |name: &'static str| -> (String, Origin) {
            if let Some(value) = self.flags.get(name) {
                return (value.clone(), Origin::Flag);
            }
            if let Some(value) = self.env.get(name) {
                return (value.clone(), Origin::Env);
            }
            if let (Some(value), Some((path, _))) = (file.get(name), &self.file) {
                return (value.clone(), Origin::File(path.clone()));
            }
            if let Some((variable, value)) = otel.and_then(|otel| otel.get(name)) {
                return (value.clone(), Origin::Otel(variable));
            }
            let default = SETTINGS
                .iter()
                .find(|setting| setting.name == name)
                .map_or_else(String::new, |setting| setting.default.clone());
            (default, Origin::Default)
        };
        let problem = |name: &'static str, why: &str| {
            let (value, origin) = pick(name);
            format!("{name} is {value:?} ({}): {why}", describe(name, &origin))
        };
        let mut parsed = Config::parse(
            |name| pick(name).0,
            |name, why| problems.push(problem(name, &why)),
        );
        if let Some(config) = &mut parsed {
            let is_given = |name: &str| {
                let known = SETTINGS.iter().find(|setting| setting.name == name);
                known.is_some_and(|setting| pick(setting.name).1 != Origin::Default)
            };
            config.follow(is_given);
            if let Err(wrong) = config.check() {
                problems.push(problem(wrong.setting, &wrong.why));
            }
        }
        match parsed {
            Some(config) if problems.is_empty() => Ok(Effective {
                entries: SETTINGS
                    .iter()
                    .zip(config.shown())
                    .map(|(setting, value)| SettingInForce {
                        name: setting.name,
                        value,
                        origin: pick(setting.name).1,
                    })
                    .collect(),
                config,
            }),
            _ => Err(ConfigProblem(problems)),
        }
    }
}

impl Effective {
    /// The settings in force as a file that sets them, each with its origin.
    pub(crate) fn show(&self) -> String {
        let lines: Vec<(String, String)> = self
            .entries
            .iter()
            .map(|entry| {
                (
                    format!("{} = {}", entry.name, toml_value(&entry.value)),
                    describe(entry.name, &entry.origin),
                )
            })
            .collect();
        let width = lines.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
        let mut out = String::new();
        for (left, origin) in lines {
            let _ = writeln!(out, "{left:width$}  # {origin}");
        }
        out
    }
}

/// Every setting with its documentation and default, as a file.
pub(crate) fn reference() -> String {
    let mut out = String::from(
        "# Every setting of wald with its default. A flag (--segment-bytes) wins over the\n\
         # environment (WALD_SEGMENT_BYTES), that over the file (--config), that over this.\n",
    );
    for setting in SETTINGS.iter() {
        if let Some(heading) = heading(setting.name) {
            let _ = write!(out, "\n# ---- {heading} ----\n");
        }
        out.push('\n');
        for line in setting.doc.lines() {
            let _ = writeln!(out, "#{line}");
        }
        let _ = writeln!(out, "# {} = {}", setting.name, toml_value(&setting.default));
    }
    out
}

fn toml_value(text: &str) -> String {
    if text.parse::<bool>().is_ok() || text.parse::<u64>().is_ok() {
        return text.to_owned();
    }
    let mut quoted = String::from('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(control));
            }
            plain => quoted.push(plain),
        }
    }
    quoted.push('"');
    quoted
}

fn describe(name: &str, origin: &Origin) -> String {
    match origin {
        Origin::Default => "default".to_owned(),
        Origin::File(path) => format!("file {}", path.display()),
        Origin::Env => format!("environment {}", env_name(name)),
        Origin::Otel(variable) => format!("environment {variable}"),
        Origin::Flag => format!("flag --{}", flag_name(name)),
    }
}

fn read_file_keys(
    path: &Path,
    text: &str,
    problems: &mut Vec<String>,
) -> HashMap<&'static str, String> {
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => {
            problems.push(format!("{}: {error}", path.display()));
            return HashMap::new();
        }
    };
    let mut values = HashMap::new();
    for (key, value) in flat(&table) {
        let Some(setting) = SETTINGS.iter().find(|setting| setting.name == key) else {
            problems.push(format!(
                "{}: there is no setting {key:?}{}",
                path.display(),
                nearest(&key).map_or_else(String::new, |name| format!("; did you mean {name:?}?"))
            ));
            continue;
        };
        let before = match value {
            toml::Value::String(text) => values.insert(setting.name, text.clone()),
            toml::Value::Integer(number) => values.insert(setting.name, number.to_string()),
            toml::Value::Boolean(truth) => values.insert(setting.name, truth.to_string()),
            other => {
                problems.push(format!(
                    "{}: {key} is a {}; expected a text, a number, true or false",
                    path.display(),
                    other.type_str()
                ));
                None
            }
        };
        if before.is_some() {
            problems.push(format!("{}: {key} is given twice", path.display()));
        }
    }
    values
}

/// Prefixes the keys of a table in a file with the table's name: `endpoint` in `[otlp]` is
/// `otlp_endpoint`.
fn flat(table: &toml::Table) -> Vec<(String, &toml::Value)> {
    let mut flat_values = Vec::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => flat_values.extend(
                flat(inner)
                    .into_iter()
                    .map(|(rest, value)| (format!("{key}_{rest}"), value)),
            ),
            single => flat_values.push((key.clone(), single)),
        }
    }
    flat_values
}

/// The known key that `key` was probably meant to be.
pub(crate) fn nearest(key: &str) -> Option<&'static str> {
    let key = key.to_lowercase().replace('-', "_");
    let typo = |name: &&str| strsim::osa_distance(&key, name) <= 2;
    // `listen` in a table [server] is no `server_listen`: tables are part of the name.
    let in_table = |name: &&str| {
        let table = key.strip_suffix(*name);
        table.is_some_and(|table| table.ends_with('_'))
    };
    let mut names = SETTINGS.iter().map(|setting| setting.name);
    if names.clone().find(typo).is_none()
        && let Some(name) = names
            .by_ref()
            .filter(in_table)
            .max_by_key(|name| name.len())
    {
        return Some(name);
    }
    SETTINGS
        .iter()
        .map(|setting| (strsim::jaro_winkler(&key, setting.name), setting.name))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, name)| name)
}

/// Variables of the environment that are probably misspelt settings, each with the likely
/// setting. Other `WALD_...` variables are ignored (Kubernetes sets WALD_PORT for a service
/// called wald).
pub(crate) fn misspelt(variables: impl Iterator<Item = String>) -> Vec<String> {
    let known: Vec<String> = SETTINGS
        .iter()
        .map(|setting| env_name(setting.name))
        .chain(["WALD_CONFIG".to_owned(), "WALD_ENDPOINT".to_owned()])
        .collect();
    variables
        .filter(|name| name.starts_with("WALD_") && !known.contains(name))
        .filter_map(|name| {
            let (distance, meant) = known
                .iter()
                .map(|known| (strsim::osa_distance(&name, known), known))
                .min()?;
            (distance <= 2).then(|| {
                format!("there is no setting for the variable {name}; did you mean {meant}?")
            })
        })
        .collect()
}
