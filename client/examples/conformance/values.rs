//! Values of the case file: references are filled in, results compared.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

/// Targets of references.
pub(crate) struct Scope<'a> {
    /// Prefix of the names of this case's logs.
    pub(crate) logs: &'a str,
    /// Results that were kept, by name.
    pub(crate) kept: &'a HashMap<String, Value>,
    /// The count of the innermost `repeat` or `each`.
    pub(crate) count: Option<u64>,
}

impl Scope<'_> {
    /// The value with its references filled in, its sums added up and its lists written out.
    pub(crate) fn resolve(&self, value: &Value) -> Result<Value> {
        Ok(match value {
            Value::String(text) => self.text(text)?,
            Value::Array(list) => {
                let resolved: Result<_> = list.iter().map(|value| self.resolve(value)).collect();
                Value::Array(resolved?)
            }
            Value::Object(members) => match only(members, "add") {
                Some(summands) => self.sum(summands)?,
                None if members.len() == 2 && members.contains_key("each") => self.list(members)?,
                None => {
                    let resolve =
                        |(name, value): (&String, &Value)| Ok((name.clone(), self.resolve(value)?));
                    let resolved: Result<_> = members.iter().map(resolve).collect();
                    Value::Object(resolved?)
                }
            },
            other => other.clone(),
        })
    }

    fn sum(&self, summands: &Value) -> Result<Value> {
        let mut sum = 0;
        for summand in summands.as_array().context("`add` takes a list")? {
            let summand = self.resolve(summand)?;
            sum += summand.as_u64().context("`add` takes numbers")?;
        }
        Ok(json!(sum))
    }

    /// The list in which `each` stands `times` times.
    fn list(&self, members: &Map<String, Value>) -> Result<Value> {
        let times = members.get("times").and_then(Value::as_u64);
        let turn = |count| {
            let count = Some(count);
            Scope { count, ..*self }.resolve(&members["each"])
        };
        let list: Result<_> = (0..times.context("`each` needs `times`")?)
            .map(turn)
            .collect();
        Ok(Value::Array(list?))
    }

    fn text(&self, text: &str) -> Result<Value> {
        let mut filled = String::new();
        let mut rest = text;
        while let Some((before, reference)) = rest.split_once("${") {
            let (name, after) = reference.split_once('}').context("`${` without `}`")?;
            let value = self.refer(name)?;
            if before.is_empty() && after.is_empty() && filled.is_empty() {
                return Ok(value);
            }
            filled.push_str(before);
            match value {
                Value::String(text) => filled.push_str(&text),
                other => filled.push_str(&other.to_string()),
            }
            rest = after;
        }
        Ok(Value::String(filled + rest))
    }

    fn refer(&self, name: &str) -> Result<Value> {
        if let Some(log) = name.strip_prefix("log:") {
            return Ok(Value::String(format!("{}{log}", self.logs)));
        }
        if name == "i" {
            return Ok(json!(self.count.context("`${i}` outside of a repeat")?));
        }
        let mut path = name.split('.');
        let first = path.next().unwrap_or_default();
        let mut value = self
            .kept
            .get(first)
            .with_context(|| format!("nothing is kept as {first}"))?;
        for member in path {
            let found = match value {
                Value::Array(list) => list.get(member.parse::<usize>()?),
                other => other.get(member),
            };
            value = found.with_context(|| format!("{name}: there is no {member}"))?;
        }
        Ok(value.clone())
    }
}

/// The member, if it is the only one.
fn only<'a>(members: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    members.get(name).filter(|_| members.len() == 1)
}

/// Compares the actual value with the expected one; the error names the place of the
/// difference.
pub(crate) fn compare(expected: &Value, came: &Value, place: &str) -> Result<()> {
    match expected {
        Value::String(any) if any == "*" => ensure!(!came.is_null(), "{place} is missing"),
        Value::Object(members) => return compare_members(members, came, place),
        Value::Array(list) => {
            let others = came.as_array();
            let others =
                others.with_context(|| format!("{place}: expected a list, came {came}"))?;
            ensure!(
                list.len() == others.len(),
                "{place}: expected {} items, came {}: {}",
                list.len(),
                others.len(),
                shortened(came),
            );
            for (index, (expected, came)) in list.iter().zip(others).enumerate() {
                compare(expected, came, &format!("{place}.{index}"))?;
            }
        }
        // Facts are compared as strings.
        Value::Number(expected) if place.contains(".facts.") && came.is_string() => {
            let expected = expected.to_string();
            ensure!(
                came == &expected,
                "{place}: expected {expected}, came {came}"
            );
        }
        expected => ensure!(
            expected == came,
            "{place}: expected {}, came {}",
            shortened(expected),
            shortened(came)
        ),
    }
    Ok(())
}

fn compare_members(members: &Map<String, Value>, came: &Value, place: &str) -> Result<()> {
    let number = || {
        let number = came.as_u64();
        number.with_context(|| format!("{place}: expected a number, came {came}"))
    };
    if let Some(bound) = only(members, "at_least").and_then(Value::as_u64) {
        ensure!(number()? >= bound, "{place}: {came} is less than {bound}");
        return Ok(());
    }
    if let Some(bound) = only(members, "below").and_then(Value::as_u64) {
        ensure!(number()? < bound, "{place}: {came} is not below {bound}");
        return Ok(());
    }
    if let Some(length) = only(members, "length").and_then(Value::as_u64) {
        let came = came.as_array().map(|list| list.len() as u64);
        ensure!(
            came == Some(length),
            "{place}: expected {length} items, came {came:?}"
        );
        return Ok(());
    }
    if !came.is_object() {
        bail!("{place}: expected members, came {}", shortened(came));
    }
    for (name, expected) in members {
        compare(expected, &came[name], &format!("{place}.{name}"))?;
    }
    Ok(())
}

/// The value as text, short enough to be read.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(300) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
