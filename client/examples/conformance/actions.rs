//! Actions of steps that need nothing but the client.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use wald_client::proto::LogConfig;
use wald_client::{
    AppendBatch, BatchAck, Check, Client, Condition, CursorCommit, DEFAULT_BATCHES_IN_FLIGHT,
    DEFAULT_BYTES_IN_FLIGHT, DEFAULT_LINGER, DEFAULT_RETRY_FOR, DEFAULT_TIMEOUT, Durability, Error,
    ErrorKind, LogAck, Lsn, NamedCursor, Outcome, Reason, Record, Retry, RetryPolicy, StoredRecord,
    SyncTarget, TlsOptions, Visibility,
};

const TAIL_WITHIN: Duration = Duration::from_secs(20);
const TAIL_POLL: Duration = Duration::from_millis(10);

/// A member that is text.
pub(crate) fn text<'a>(arguments: &'a Value, name: &str) -> Result<&'a str> {
    let text = arguments[name].as_str();
    text.with_context(|| format!("`{name}` is not text"))
}

/// A member that is a number, if it is there.
pub(crate) fn optional(arguments: &Value, name: &str) -> Result<Option<u64>> {
    match &arguments[name] {
        Value::Null => Ok(None),
        value => {
            let number = value.as_u64();
            Ok(Some(
                number.with_context(|| format!("`{name}` is not a number"))?,
            ))
        }
    }
}

/// A member that is a number.
pub(crate) fn number(arguments: &Value, name: &str) -> Result<u64> {
    optional(arguments, name)?.with_context(|| format!("no `{name}`"))
}

/// A member that is a list; absent: an empty one.
pub(crate) fn list<'a>(arguments: &'a Value, name: &str) -> &'a [Value] {
    arguments[name].as_array().map_or(&[], Vec::as_slice)
}

/// Carries out a step that needs nothing but the client.
pub(crate) async fn simple(client: &Client, action: &str, arguments: &Value) -> Result<Value> {
    let log = || text(arguments, "log");
    let log_id = optional(arguments, "log_id")?;
    Ok(match action {
        "append" => append(client, arguments).await?,
        "connect" => connect(arguments).await?,
        "append_batch" => batch_ack(batch(client, arguments)?.await?),
        "session" => session(client, arguments).await?,
        "read" => read(client, arguments).await?,
        "tail" => tail(client, arguments).await?,
        "wait_tail" => wait_tail(client, arguments).await?,
        "fence" => {
            let epoch = optional(arguments, "writer_epoch")?;
            let fenced = client.fence(log()?, epoch, log_id).await?;
            json!({
                "tail_lsn": fenced.tail_lsn.get(),
                "writer_epoch": fenced.writer_epoch,
                "log_id": fenced.log_id,
            })
        }
        "trim" => {
            let before = Lsn::new(number(arguments, "before_lsn")?);
            json!({ "first_lsn": client.trim(log()?, before, log_id).await?.get() })
        }
        "sync" => {
            let log = arguments["log"].as_str().map(str::to_owned);
            client.sync(SyncTarget::Device, log).await?;
            json!({})
        }
        "create_log" => {
            let created = client.create_log(log()?, LogConfig::default()).await?;
            json!({ "log_id": created.log_id })
        }
        "update_log" => {
            let most = u32::try_from(number(arguments, "max_record_bytes")?)?;
            let config = LogConfig {
                max_record_bytes: most,
                ..LogConfig::default()
            };
            let log = client
                .update_log(log()?, config, ["max_record_bytes"])
                .await?;
            json!({ "max_record_bytes": log.config.unwrap_or_default().max_record_bytes })
        }
        "get_log" => {
            let log = client.get_log(log()?).await?;
            json!({
                "log_id": log.log_id,
                "max_record_bytes": log.config.unwrap_or_default().max_record_bytes,
            })
        }
        "list_producers" => producers(client, log()?, log_id, arguments).await?,
        "forget_producer" => {
            client
                .forget_producer(log()?, text(arguments, "id")?, log_id)
                .await?;
            json!({})
        }
        "defaults" => json!({
            "batches_in_flight": DEFAULT_BATCHES_IN_FLIGHT,
            "bytes_in_flight": DEFAULT_BYTES_IN_FLIGHT,
            "linger_ms": DEFAULT_LINGER.as_millis(),
            "attempts": RetryPolicy::default().max_attempts,
            "timeout_ms": DEFAULT_TIMEOUT.as_millis(),
            "retry_for_ms": DEFAULT_RETRY_FOR.as_millis(),
        }),
        "delete_log" => {
            client.delete_log(log()?, log_id).await?;
            json!({})
        }
        "commit_cursor" => named_cursor(&client.commit_cursor(commit(arguments)?).await?),
        "get_cursor" => {
            let cursor = text(arguments, "cursor")?;
            named_cursor(&client.get_cursor(log()?, cursor, log_id).await?)
        }
        "delete_cursor" => {
            let cursor = text(arguments, "cursor")?;
            client.delete_cursor(log()?, cursor, log_id).await?;
            json!({})
        }
        "list_cursors" => cursors(client, log()?).await?,
        other => bail!("this runner cannot `{other}`"),
    })
}

fn durability(arguments: &Value) -> Result<Durability> {
    match &arguments["durability"] {
        Value::Null => Ok(Durability::Unspecified),
        name => {
            let name = name.as_str().unwrap_or_default();
            let durability = Durability::from_str_name(&format!("DURABILITY_{name}"));
            durability.with_context(|| format!("there is no durability `{name}`"))
        }
    }
}

fn durability_name(durability: Durability) -> &'static str {
    let name = durability.as_str_name();
    name.strip_prefix("DURABILITY_").unwrap_or(name)
}

fn condition(condition: &Value) -> Result<Condition> {
    let mut built = Condition::new();
    if let Some(lsn) = optional(condition, "expected_lsn")? {
        built = built.expected_lsn(lsn);
    }
    if condition["must_exist"] == json!(true) {
        built = built.must_exist();
    }
    if condition["must_not_exist"] == json!(true) {
        built = built.must_not_exist();
    }
    if let Some(epoch) = optional(condition, "writer_epoch")? {
        built = built.writer_epoch(epoch);
    }
    if let Some(log_id) = optional(condition, "log_id")? {
        built = built.log_id(log_id);
    }
    let producer = &condition["producer"];
    if producer.is_object() {
        let (epoch, sequence) = (number(producer, "epoch")?, number(producer, "sequence")?);
        built = built.producer(text(producer, "id")?, epoch, sequence);
    }
    Ok(built)
}

/// Records as the case file writes them.
pub(crate) fn records(list: &[Value]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for written in list {
        match optional(written, "repeat")? {
            None => records.push(record(written)?),
            Some(count) => {
                let bytes = usize::try_from(number(written, "bytes")?)?;
                records.extend((0..count).map(|number| padded(number, bytes)));
            }
        }
    }
    Ok(records)
}

/// A record of this size: a number, then dots.
fn padded(number: u64, bytes: usize) -> Record {
    let mut data = number.to_string().into_bytes();
    data.resize(bytes, b'.');
    Record::new(data)
}

fn record(written: &Value) -> Result<Record> {
    if let Some(data) = written.as_str() {
        return Ok(Record::from(data.to_owned()));
    }
    let mut record = Record::from(text(written, "data")?.to_owned());
    for header in list(written, "headers") {
        let part = |place: usize| header[place].as_str().context("a header of two texts");
        record = record.header(part(0)?, part(1)?.to_owned());
    }
    if let Some(time) = written["timestamp_us"].as_i64() {
        record = record.timestamp_us(time);
    }
    if let Some(checksum) = optional(written, "crc32c")? {
        record = record.crc32c(checksum.try_into()?);
    }
    Ok(record)
}

/// A record that was read.
pub(crate) fn stored(record: StoredRecord) -> Value {
    let headers = record.headers.into_iter();
    json!({
        "lsn": record.lsn.get(),
        "data": String::from_utf8_lossy(&record.data),
        "headers": headers
            .map(|header| json!([header.key, String::from_utf8_lossy(&header.value)]))
            .collect::<Vec<_>>(),
        "timestamp_us": record.timestamp_us,
    })
}

async fn append(client: &Client, arguments: &Value) -> Result<Value> {
    let ack = client
        .append(text(arguments, "log")?, record(&arguments["record"])?)
        .condition(condition(&arguments["condition"])?)
        .durability(durability(arguments)?)
        .await?;
    Ok(json!({
        "lsn": ack.lsn.get(),
        "deduplicated": ack.deduplicated,
        "durability": durability_name(ack.durability),
        "durable_lsn": ack.durable_lsn.map(Lsn::get),
        "replicated_lsn": ack.replicated_lsn.map(Lsn::get),
        "log_id": ack.log_id,
    }))
}

fn batch(client: &Client, arguments: &Value) -> Result<AppendBatch> {
    let mut batch = client.append_batch().durability(durability(arguments)?);
    for part in list(arguments, "batches") {
        let records = records(list(part, "records"))?;
        batch = batch.log_if(text(part, "log")?, condition(&part["condition"])?, records);
    }
    for written in list(arguments, "checks") {
        let mut check = Check::new(text(written, "log")?);
        if let Some(lsn) = optional(written, "expected_lsn")? {
            check = check.expected_lsn(lsn);
        }
        if written["must_exist"] == json!(true) {
            check = check.must_exist();
        }
        if written["must_not_exist"] == json!(true) {
            check = check.must_not_exist();
        }
        if let Some(log_id) = optional(written, "log_id")? {
            check = check.log_id(log_id);
        }
        batch = batch.check(check);
    }
    for written in list(arguments, "cursors") {
        batch = batch.cursor(commit(written)?);
    }
    Ok(batch)
}

/// The result of one log's batch.
pub(crate) fn log_ack(ack: &LogAck) -> Value {
    json!({
        "log": ack.log,
        "first_lsn": ack.first_lsn.get(),
        "next_lsn": ack.next_lsn.get(),
        "deduplicated": ack.deduplicated,
        "log_id": ack.log_id,
    })
}

fn batch_ack(ack: BatchAck) -> Value {
    json!({
        "appends": ack.appends.iter().map(log_ack).collect::<Vec<_>>(),
        "durability": durability_name(ack.durability),
    })
}

async fn session(client: &Client, arguments: &Value) -> Result<Value> {
    let appender = client.appender().open();
    let mut pending = Vec::new();
    for request in list(arguments, "requests") {
        match appender.append_batch(batch(client, request)?).await {
            Ok(ack) => pending.push(ack),
            // It has failed already, which the acks tell.
            Err(_) => break,
        }
    }
    let closed = appender.close().await;
    let mut acks = Vec::new();
    for ack in pending {
        if let Ok(ack) = ack.await {
            acks.push(batch_ack(ack));
        }
    }
    let mut result = json!({ "acks": acks });
    if let Err(error) = closed {
        result["error"] = failure(&error);
        result["error"]["request"] = json!(error.fact_number("request_id"));
    }
    Ok(result)
}

async fn read(client: &Client, arguments: &Value) -> Result<Value> {
    let mut read = client.read(text(arguments, "log")?);
    if let Some(lsn) = optional(arguments, "lsn")? {
        read = read.from_lsn(lsn);
    }
    if let Some(time) = optional(arguments, "timestamp_us")? {
        read = read.from_timestamp_us(time.try_into()?);
    }
    if let Some(count) = optional(arguments, "tail_offset")? {
        read = read.last(count);
    }
    if let Some(count) = optional(arguments, "max_records")? {
        read = read.max_records(count.try_into()?);
    }
    if let Some(wait) = optional(arguments, "wait_ms")? {
        read = read.wait(Duration::from_millis(wait));
    }
    if let Some(log_id) = optional(arguments, "log_id")? {
        read = read.log_id(log_id);
    }
    let page = read.await?;
    Ok(json!({
        "records": page.records.into_iter().map(stored).collect::<Vec<_>>(),
        "next_lsn": page.next_lsn.get(),
        "tail_lsn": page.tail_lsn.get(),
        "first_lsn": page.first_lsn.map(Lsn::get),
        "durable_lsn": page.durable_lsn.map(Lsn::get),
        "replicated_lsn": page.replicated_lsn.map(Lsn::get),
    }))
}

async fn tail(client: &Client, arguments: &Value) -> Result<Value> {
    let log_id = optional(arguments, "log_id")?;
    let log = text(arguments, "log")?;
    let tail = client
        .get_tail(log, Visibility::Unspecified, log_id)
        .await?;
    Ok(json!({
        "first_lsn": tail.first_lsn.get(),
        "tail_lsn": tail.tail_lsn.get(),
        "durable_lsn": tail.durable_lsn.map(Lsn::get),
        "replicated_lsn": tail.replicated_lsn.map(Lsn::get),
        "writer_epoch": tail.writer_epoch,
        "log_id": tail.log_id,
    }))
}

async fn wait_tail(client: &Client, arguments: &Value) -> Result<Value> {
    let wanted = number(arguments, "at_least")?;
    let until = Instant::now() + TAIL_WITHIN;
    loop {
        let came = match tail(client, arguments).await {
            Ok(tail) if tail["tail_lsn"].as_u64() >= Some(wanted) => return Ok(tail),
            Ok(tail) => tail.to_string(),
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            bail!("no tail of {wanted} within {TAIL_WITHIN:?}: {came}");
        }
        sleep(TAIL_POLL).await;
    }
}

fn commit(written: &Value) -> Result<CursorCommit> {
    let (log, cursor) = (text(written, "log")?, text(written, "cursor")?);
    let mut commit = CursorCommit::new(log, cursor, number(written, "lsn")?);
    if let Some(lsn) = optional(written, "expected_lsn")? {
        commit = commit.expected_lsn(lsn);
    }
    if let Some(log_id) = optional(written, "log_id")? {
        commit = commit.log_id(log_id);
    }
    Ok(commit)
}

fn named_cursor(cursor: &NamedCursor) -> Value {
    json!({ "cursor": cursor.name, "lsn": cursor.lsn.get(), "log_id": cursor.log_id })
}

async fn cursors(client: &Client, log: &str) -> Result<Value> {
    let mut cursors = Vec::new();
    let mut token = None;
    loop {
        let page = client.list_cursors(log, 0, token, None).await?;
        cursors.extend(page.cursors.iter().map(named_cursor));
        token = page.next_page_token;
        if token.is_none() {
            return Ok(json!({ "cursors": cursors }));
        }
    }
}

async fn producers(
    client: &Client,
    log: &str,
    log_id: Option<u64>,
    arguments: &Value,
) -> Result<Value> {
    let page_size = optional(arguments, "page_size")?.unwrap_or(0);
    let mut producers = Vec::new();
    let mut token = None;
    loop {
        let page = client
            .list_producers(log, page_size.try_into()?, token, log_id)
            .await?;
        producers.extend(page.producers.iter().map(|producer| {
            json!({
                "id": producer.id,
                "epoch": producer.epoch,
                "next_sequence": producer.next_sequence,
            })
        }));
        token = page.next_page_token;
        if token.is_none() {
            return Ok(json!({ "producers": producers }));
        }
    }
}

/// A name such as `NotFound` as the contract spells it: `NOT_FOUND`.
fn spelled(name: &impl std::fmt::Debug) -> String {
    let mut spelled = String::new();
    for (place, letter) in format!("{name:?}").char_indices() {
        if place > 0 && letter.is_uppercase() {
            spelled.push('_');
        }
        spelled.push(letter.to_ascii_uppercase());
    }
    spelled
}

/// Makes another client, and asks for the tail of a log.
async fn connect(arguments: &Value) -> Result<Value> {
    let endpoint = text(arguments, "endpoint")?;
    let file = |name: &str, variable: &str| match arguments[name].as_str() {
        Some(path) => path.to_owned(),
        None => std::env::var(variable).unwrap_or_default(),
    };
    let mut builder = Client::builder(endpoint).timeout(Duration::from_millis(1_900));
    if endpoint.starts_with("https://") {
        let mut tls = TlsOptions::new().ca_file(file("ca", "WALD_TLS_CA"));
        let (cert, key) = (file("cert", "WALD_TLS_CERT"), file("key", "WALD_TLS_KEY"));
        if !cert.is_empty() {
            tls = tls.identity_files(cert, key);
        }
        if let Some(name) = arguments["server_name"].as_str() {
            tls = tls.server_name(name);
        }
        builder = builder.tls(tls);
    }
    if let Some(token) = arguments["token"].as_str() {
        builder = builder.token(token);
    }
    let client = builder.connect_lazy()?;
    let log = "conformance/none";
    match client.get_tail(log, Visibility::Unspecified, None).await {
        Err(error) if error.reason() != Some(Reason::LogNotFound) => Err(error.into()),
        _ => Ok(json!({ "connected": true })),
    }
}

/// An error, as `fails` compares it.
pub(crate) fn failure(error: &Error) -> Value {
    let problem = match error.kind() {
        ErrorKind::Token { .. } => "TOKEN".to_owned(),
        ErrorKind::Tls { failure, .. } => spelled(failure),
        _ => String::new(),
    };
    let facts = error.facts().into_iter().flatten();
    let checks = error.failed_checks().iter();
    json!({
        // As tonic has it, but spelled as the contract does.
        "code": spelled(&error.code()),
        "problem": problem,
        "reason": error.reason_text().unwrap_or_default(),
        "outcome": match error.outcome() {
            Outcome::NotApplied => "NOT_APPLIED",
            Outcome::Unknown => "UNKNOWN",
        },
        "retry": match error.retry() {
            Retry::Safe => "SAFE",
            Retry::SafeWithCondition => "SAFE_WITH_CONDITION",
            Retry::Never => "NEVER",
        },
        "facts": facts.map(|(name, fact)| (name.clone(), json!(fact))).collect::<serde_json::Map<_, _>>(),
        "failed": checks
            .map(|check| json!({
                "reason": check.reason,
                "log": check.log,
                "description": check.description,
            }))
            .collect::<Vec<_>>(),
    })
}
