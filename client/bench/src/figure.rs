//! Results of a load, and of several rounds of it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::{Percentiles, WindowCounts};
use crate::server::ServerUse;
use crate::spec::Spec;

/// One load, with all that it must be published with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) load: Spec,
    pub(crate) seconds: f64,
    /// Calls, or messages of sessions, that were answered.
    pub(crate) acks: u64,
    pub(crate) records: u64,
    pub(crate) bytes: u64,
    pub(crate) acks_per_second: f64,
    pub(crate) records_per_second: f64,
    pub(crate) bytes_per_second: f64,
    /// From when a call was due (open loop) or sent (closed) to its answer; of a scan, the
    /// whole of it. Absent: nothing ended in time.
    pub(crate) latency_us: Option<Percentiles>,
    /// From sending an append to a follower having the record.
    pub(crate) delivery_us: Option<Percentiles>,
    /// Open loop: delay of the calls after they were due.
    pub(crate) send_lag_us: Option<Percentiles>,
    /// Records acked in all, warm-up and late answers too.
    pub(crate) records_in_all: u64,
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Figure {
    pub(crate) fn new(
        load: &Spec,
        time: Duration,
        counted: &WindowCounts,
        delivered: Option<&WindowCounts>,
    ) -> Self {
        let seconds = time.as_secs_f64();
        let rate = |number: u64| match seconds > 0.0 {
            true => number as f64 / seconds,
            false => 0.0,
        };
        Self {
            load: load.clone(),
            seconds,
            acks: counted.calls,
            records: counted.records,
            bytes: counted.bytes,
            acks_per_second: rate(counted.calls),
            records_per_second: rate(counted.records),
            bytes_per_second: rate(counted.bytes),
            latency_us: Percentiles::of(&counted.times),
            delivery_us: delivered.and_then(|seen| Percentiles::of(&seen.times)),
            send_lag_us: Percentiles::of(&counted.lags),
            records_in_all: 0,
            errors: BTreeMap::new(),
        }
    }

    /// The number that compares loads of one kind: records per second. With one record in each
    /// call that is acks per second.
    pub(crate) fn rate(&self) -> f64 {
        self.records_per_second
    }
}

/// Loads that ran at the same time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) figures: Vec<Figure>,
    pub(crate) client_cpu_seconds: f64,
    /// Absent: there were no metrics to ask.
    pub(crate) server: Option<ServerUse>,
    /// The server's processor time for a million records of all loads together.
    pub(crate) server_cpu_seconds_per_million_records: Option<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) series: Vec<Second>,
}

impl Measurement {
    /// The only load's figure, or the first.
    pub(crate) fn first(&self) -> &Figure {
        &self.figures[0]
    }
}

/// One second of a long load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Second {
    /// Since the begin of the window.
    pub(crate) at: f64,
    pub(crate) acks_per_second: f64,
    pub(crate) records_per_second: f64,
    pub(crate) p50_us: Option<f64>,
    pub(crate) p999_us: Option<f64>,
    pub(crate) rss_bytes: Option<f64>,
    pub(crate) descriptors: Option<f64>,
}

/// The median, and its rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rounds {
    pub(crate) median: Measurement,
    pub(crate) rounds: Vec<Measurement>,
}

impl Rounds {
    pub(crate) fn new(rounds: Vec<Measurement>) -> Result<Self> {
        Ok(Self {
            median: median_of(&rounds)?,
            rounds,
        })
    }
}

/// Ratio of rounds of one load to the interleaved rounds of another: the median of the
/// quotients.
pub(crate) fn ratio(of: &Rounds, to: &Rounds, figure: impl Fn(&Figure) -> f64) -> Option<f64> {
    let quotients = of.rounds.iter().zip(&to.rounds).filter_map(|(of, to)| {
        let base = figure(to.first());
        (base > 0.0).then(|| figure(of.first()) / base)
    });
    median(quotients.collect())
}

/// The middle one; of an even number, the lower of both.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    values.get(middle).copied()
}

/// The median of all rounds, number by number. Text, lists of other lengths and values that
/// some round lacks come from the first round.
fn median_of<T: Serialize + DeserializeOwned>(rounds: &[T]) -> Result<T> {
    let rounds: Vec<Value> = rounds
        .iter()
        .map(serde_json::to_value)
        .collect::<Result<_, _>>()?;
    Ok(serde_json::from_value(merged(
        &rounds.iter().collect::<Vec<_>>(),
    ))?)
}

fn merged(rounds: &[&Value]) -> Value {
    let Some(first) = rounds.first() else {
        return Value::Null;
    };
    match first {
        Value::Number(_) => {
            let mut numbers: Vec<&Value> = rounds
                .iter()
                .copied()
                .filter(|value| value.is_number())
                .collect();
            let number = |value: &&Value| value.as_f64().unwrap_or(0.0);
            numbers.sort_by(|left, right| number(left).total_cmp(&number(right)));
            numbers[(numbers.len() - 1) / 2].clone()
        }
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                let values: Vec<&Value> = rounds
                    .iter()
                    .map(|round| round.get(key).unwrap_or(value))
                    .collect();
                (key.clone(), merged(&values))
            })
            .collect(),
        Value::Array(items) if all_have(rounds, items.len()) => (0..items.len())
            .map(|index| {
                let values: Vec<&Value> = rounds.iter().map(|round| &round[index]).collect();
                merged(&values)
            })
            .collect(),
        other => (*other).clone(),
    }
}

fn all_have(rounds: &[&Value], length: usize) -> bool {
    rounds
        .iter()
        .all(|round| round.as_array().is_some_and(|items| items.len() == length))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn median_is_the_middle_and_the_lower_of_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.0));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn rounds_merge_number_by_number() {
        let rounds = [
            json!({"a": 1, "b": {"c": 9.5, "d": "x"}, "e": [5, 6], "f": null}),
            json!({"a": 3, "b": {"c": 7.5, "d": "y"}, "e": [1, 2], "f": 1}),
            json!({"a": 2, "b": {"c": 8.5, "d": "z"}, "e": [3, 4], "f": 2}),
        ];
        let merged: Value = median_of(&rounds).unwrap();
        let expected = json!({"a": 2, "b": {"c": 8.5, "d": "x"}, "e": [3, 4], "f": null});
        assert_eq!(merged, expected);
    }
}
