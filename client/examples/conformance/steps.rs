//! Carrying out the steps of one case.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use wald_client::{Client, Condition, Error, LogAck, Pending, Producer};

use crate::actions::{failure, list, log_ack, number, optional, records, simple, text};
use crate::consume;
use crate::control;
use crate::follow::{self, Following};
use crate::values::{Scope, compare};

/// One case underway.
#[derive(Clone)]
pub(crate) struct Case(Arc<Inner>);

struct Inner {
    client: Client,
    control: String,
    logs: String,
    kept: Mutex<HashMap<String, Value>>,
    producers: Mutex<HashMap<String, Arc<Producer>>>,
    followers: Mutex<HashMap<String, Following>>,
    jobs: Mutex<HashMap<String, Job>>,
    /// The step that began last, for the error of a case that takes too long.
    last: Mutex<String>,
}

/// Steps in the background.
struct Job(JoinHandle<Result<()>>);

impl Drop for Job {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The names that the harness gives to every case.
fn given() -> HashMap<String, Value> {
    let names = [
        "server",
        "plain_server",
        "expired_server",
        "other_ca",
        "other_cert",
        "other_key",
    ];
    let value = |name: &str| std::env::var(format!("WALD_CASE_{}", name.to_uppercase())).ok();
    let given = names
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), json!(value(name)?))));
    given.collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Case {
    pub(crate) fn new(name: &str, client: Client, control: &str) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let run = since.unwrap_or_default().as_nanos();
        Self(Arc::new(Inner {
            client,
            control: control.to_owned(),
            logs: format!("conformance/{name}/{run}/"),
            kept: Mutex::new(given()),
            producers: Mutex::default(),
            followers: Mutex::default(),
            jobs: Mutex::default(),
            last: Mutex::default(),
        }))
    }

    /// The step that began last.
    pub(crate) fn last(&self) -> String {
        lock(&self.0.last).clone()
    }

    /// Carries out the steps, one after the other. `count` is the value of `${i}`.
    pub(crate) fn run<'a>(
        &'a self,
        steps: &'a [Value],
        count: Option<u64>,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>> {
        Box::pin(async move {
            for (number, step) in steps.iter().enumerate() {
                let action = text(step, "do")?;
                let name = format!("step {number} ({action})");
                lock(&self.0.last).clone_from(&name);
                self.step(action, step, count).await.context(name)?;
            }
            Ok(())
        })
    }

    async fn step(&self, action: &str, step: &Value, count: Option<u64>) -> Result<()> {
        match action {
            "repeat" => {
                for count in 0..number(step, "times")? {
                    let steps = self.run(list(step, "steps"), Some(count));
                    steps.await.with_context(|| format!("time {count}"))?;
                }
                return Ok(());
            }
            "background" => {
                let (case, steps) = (self.clone(), list(step, "steps").to_vec());
                let job = tokio::spawn(async move { case.run(&steps, count).await });
                let name = text(step, "as")?.to_owned();
                lock(&self.0.jobs).insert(name, Job(job));
                return Ok(());
            }
            _ => {}
        }
        let step = Scope {
            logs: &self.0.logs,
            kept: &lock(&self.0.kept),
            count,
        }
        .resolve(step)?;
        let began = Instant::now();
        let came = self.act(action, &step).await;
        if let Some(most) = optional(&step, "within_ms")? {
            let took = began.elapsed();
            let in_time = took <= Duration::from_millis(most);
            ensure!(in_time, "took {took:?}, at most {most} ms are allowed");
        }
        if !step["fails"].is_null() {
            return fails(&step["fails"], came);
        }
        let came = came?;
        if !step["expect"].is_null() {
            compare(&step["expect"], &came, "result")?;
        }
        if let Some(name) = step["as"].as_str() {
            lock(&self.0.kept).insert(name.to_owned(), came);
        }
        Ok(())
    }

    async fn act(&self, action: &str, arguments: &Value) -> Result<Value> {
        let client = &self.0.client;
        match action {
            "scan" => follow::scan(client, arguments).await,
            "consume" => consume::consume(client, arguments).await,
            "follow" => {
                let following = Following::open(client, arguments)?;
                let name = text(arguments, "as")?.to_owned();
                lock(&self.0.followers).insert(name, following);
                Ok(json!({}))
            }
            "followed" => {
                let name = text(arguments, "follower")?;
                let seen = lock(&self.0.followers).get(name).map(Following::seen);
                let seen = seen.with_context(|| format!("no follower {name}"))?;
                follow::followed(seen, arguments).await
            }
            "unfollow" => {
                let name = text(arguments, "follower")?;
                let closed = lock(&self.0.followers).remove(name);
                closed.with_context(|| format!("no follower {name}"))?;
                Ok(json!({}))
            }
            "producer" => {
                let mut producer = client.producer(text(arguments, "log")?);
                if let Some(id) = arguments["id"].as_str() {
                    producer = producer.id(id, optional(arguments, "epoch")?.unwrap_or(0));
                }
                if let Some(log_id) = optional(arguments, "log_id")? {
                    producer = producer.log_id(log_id);
                }
                let producer = Arc::new(producer.open().await?);
                let name = text(arguments, "as")?.to_owned();
                lock(&self.0.producers).insert(name, producer);
                Ok(json!({}))
            }
            "close_producer" => {
                let name = text(arguments, "producer")?;
                let closed = lock(&self.0.producers).remove(name);
                let closed = closed.and_then(Arc::into_inner);
                let closed = closed.with_context(|| format!("no idle producer {name}"))?;
                closed.close().await?;
                Ok(json!({}))
            }
            "produce" => self.produce(arguments).await,
            "produce_many" => self.produce_many(arguments).await,
            "join" => {
                let name = text(arguments, "job")?;
                let job = lock(&self.0.jobs).remove(name);
                let mut job = job.with_context(|| format!("no job {name}"))?;
                (&mut job.0).await?.with_context(|| format!("job {name}"))?;
                Ok(json!({}))
            }
            "control" => {
                let mut body = arguments.clone();
                if let Some(members) = body.as_object_mut() {
                    members.retain(|name, _| name != "do" && name != "action");
                }
                let action = text(arguments, "action")?;
                control::request(&self.0.control, action, &body).await?;
                Ok(json!({}))
            }
            other => simple(client, other, arguments).await,
        }
    }

    fn producer(&self, arguments: &Value) -> Result<Arc<Producer>> {
        let name = text(arguments, "producer")?;
        let producer = lock(&self.0.producers).get(name).cloned();
        producer.with_context(|| format!("no producer {name}"))
    }

    async fn produce(&self, arguments: &Value) -> Result<Value> {
        let mut condition = Condition::new();
        if let Some(epoch) = optional(arguments, "writer_epoch")? {
            condition = condition.writer_epoch(epoch);
        }
        if let Some(lsn) = optional(arguments, "expected_lsn")? {
            condition = condition.expected_lsn(lsn);
        }
        let records = records(list(arguments, "records"))?;
        let producer = self.producer(arguments)?;
        let ack = producer.append_batch_if(condition, records).await?.await?;
        Ok(log_ack(&ack))
    }

    async fn produce_many(&self, arguments: &Value) -> Result<Value> {
        let producer = self.producer(arguments)?;
        let prefix = text(arguments, "prefix")?;
        let most = usize::try_from(number(arguments, "in_flight")?)?;
        let mut in_flight: VecDeque<Pending<LogAck>> = VecDeque::new();
        let mut lsns = Vec::new();
        for number in 0..number(arguments, "count")? {
            if in_flight.len() >= most
                && let Some(oldest) = in_flight.pop_front()
            {
                lsns.push(oldest.await?.first_lsn);
            }
            let record = format!("{prefix}{number}");
            in_flight.push_back(producer.append_batch([record]).await?);
        }
        for ack in in_flight {
            lsns.push(ack.await?.first_lsn);
        }
        Ok(json!({
            "acked": lsns.len(),
            "lsns_ascend": lsns.is_sorted_by(|one, next| one < next),
        }))
    }
}

/// Whether the step failed as it had to.
fn fails(expected: &Value, came: Result<Value>) -> Result<()> {
    let error = match came {
        Ok(came) => bail!("had to fail, and came to {came}"),
        Err(error) => error,
    };
    let Some(error) = error.downcast_ref::<Error>() else {
        return Err(anyhow!("failed outside of the client: {error:#}"));
    };
    compare(expected, &failure(error), "error")
}
