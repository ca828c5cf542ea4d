//! The root of a library that `server/fuzz` builds: the parts of the daemon that read untrusted
//! bytes, with their invariants for any input. No module of the daemon itself.

#![allow(
    dead_code,
    unused_imports,
    reason = "the daemon has more uses of these modules"
)]

mod config;
mod convert;
mod status;

use std::collections::HashMap;
use std::fmt::Debug;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use arbitrary::Unstructured;
use bytes::Bytes;
use prost::Message;
use status::Access;
use tonic::Status;
use wald_proto::codec::{Encode as _, Sent};
use wald_proto::v1;
use wald_storage::{
    Appended, Batch, Durability, LocalEngine, Append as _, ReadLogs as _, Administer as _, Operate as _, LogName, NoObserver, ReadRequest,
    ReadStart, SimDisk, StorageConfig, SystemClock, Visibility, block_on,
};

/// A configuration: settings by flag and by variable, then the text of a file. An accepted
/// configuration is shown as a file with the same settings, and a flag wins.
pub fn config(data: &[u8]) {
    use crate::config::{Layers, SETTINGS};
    let mut input = Unstructured::new(data);
    let mut layers = Layers::default();
    for flags in [true, false] {
        for _ in 0..input.arbitrary::<u8>().unwrap_or(0) % 4 {
            let which = usize::from(input.arbitrary::<u8>().unwrap_or(0)) % SETTINGS.len();
            let length = usize::from(input.arbitrary::<u8>().unwrap_or(0) % 24).min(input.len());
            let value = String::from_utf8_lossy(input.bytes(length).unwrap_or(&[])).into_owned();
            let layer = if flags {
                &mut layers.flags
            } else {
                &mut layers.env
            };
            layer.insert(SETTINGS[which].name, value);
        }
    }
    let text = String::from_utf8_lossy(input.take_rest()).into_owned();
    layers.file = Some((PathBuf::from("wald.toml"), text));
    match layers.resolve() {
        Ok(effective) => {
            let shown = Layers {
                file: Some((PathBuf::from("shown.toml"), effective.show())),
                ..Layers::default()
            };
            let again = shown.resolve().expect("what is shown can be used");
            assert_eq!(again.config, effective.config);
            for (entry, same) in effective.entries.iter().zip(&again.entries) {
                assert_eq!((entry.name, &entry.value), (same.name, &same.value));
            }
            let _storage = effective.config.storage();
        }
        Err(problem) => assert!(!problem.0.is_empty() && !problem.to_string().is_empty()),
    }
}

/// Number of requests that one engine takes before another is made: its memory is not under
/// test here.
const REQUESTS: u32 = 1000;

static ENGINE: Mutex<Option<(Arc<LocalEngine>, u32)>> = Mutex::new(None);

fn engine() -> Arc<LocalEngine> {
    let mut held = ENGINE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((engine, left)) = held.as_mut().filter(|(_, left)| *left > 0) {
        *left -= 1;
        return Arc::clone(engine);
    }
    let config = StorageConfig {
        segment_bytes: 1 << 20,
        reader_threads: 1,
        ..StorageConfig::default()
    };
    let disk = Arc::new(SimDisk::new());
    let opened = LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver));
    let (engine, _) = opened.expect("an empty disk can be opened");
    *held = Some((Arc::clone(&engine), REQUESTS));
    engine
}

/// A request: its first byte selects the kind, the rest is the message. It takes the way of a
/// call: through the conversion into the engine, and the answer back. It always ends, refused
/// or done. Appended records read back as sent, and answers are as large as allowed.
pub fn request(data: &[u8]) {
    let Some((&which, message)) = data.split_first() else {
        return;
    };
    let message = Bytes::copy_from_slice(message);
    // A message that does not decode, is refused or fails gets a status, which is made.
    let _answered = carry_out(which, message);
}

/// A manifest of a backup, and a manifest file without its checksum. Each is refused with a reason, or all of its values
/// are within the bounds of a store.
pub fn manifest(data: &[u8]) {
    let file = wald_proto::backup::seal(data.to_vec(), None);
    match crate::backups::keys::read_manifest(&file) {
        Ok(manifest) => assert_eq!(manifest.signed_by, None, "nobody can have signed it"),
        Err(what) => assert!(!what.is_empty()),
    }
    let Ok(manifest) = v1::BackupManifest::decode(data) else {
        return;
    };
    let file = wald_proto::backup::seal(wald_proto::backup::encode(&manifest), None);
    let read = wald_proto::backup::decode(&file).expect("a manifest reads back");
    assert_eq!(read.manifest, manifest);
    if let Err(what) = read.check() {
        return assert!(!what.is_empty());
    }
    let Some(kept) = crate::convert::kept_manifest(&manifest) else {
        return;
    };
    assert_eq!(kept.files.len(), manifest.files.len());
    assert!(kept.recovery_epoch.get() < wald_proto::backup::EPOCHS);
    assert!(kept.position.get() < wald_proto::backup::POSITIONS);
}

fn decoded<M: Message + Default>(message: Bytes) -> Result<M, Status> {
    M::decode(message).map_err(|error| Status::internal(error.to_string()))
}

/// The reader here must refuse every message that prost cannot read. The exception is groups in
/// groups, whose depth prost counts differently; no message here has any.
fn refuses(error: &Status, refused: bool) {
    assert!(refused || error.message().contains("recursion limit"));
}

/// The reader here and prost return the same message, or both refuse it.
fn same<T: PartialEq + Debug>(
    read: Result<T, Status>,
    as_prost_has_it: Result<T, Status>,
) -> Result<T, Status> {
    match (&read, &as_prost_has_it) {
        (Ok(read), Ok(expected)) => assert_eq!(read, expected),
        (Err(read), Err(expected)) => assert_eq!(read.code(), expected.code()),
        _ => panic!("{read:?}, and by prost {as_prost_has_it:?}"),
    }
    read
}

fn carry_out(which: u8, message: Bytes) -> Result<(), Status> {
    let engine = engine();
    let epoch = engine.profile().recovery_epoch;
    let limits = engine.profile().limits;
    match which % 13 {
        0 => {
            let sent = Sent::new(message.clone());
            let request = decoded::<v1::AppendRequest>(message)
                .inspect_err(|error| refuses(error, convert::append(&sent, &limits).is_err()))?;
            let (batch, durability) = convert::append(&sent, &limits)?;
            let record = request.record.unwrap_or_default();
            let logs = vec![(request.log, vec![record])];
            if let Some(appended) = submit(&engine, batch, durability, &logs)? {
                let answer = convert::append_response(&appended, epoch);
                assert_ne!(answer.durability, 0);
            }
        }
        1 => {
            let sent = Sent::new(message.clone());
            let request = decoded::<v1::AppendBatchRequest>(message)
                .inspect_err(|error| refuses(error, convert::append_batch(&sent, &limits).is_err()))?;
            let parts = request.batches.len();
            if let Some((names, appended)) = append_batch(&engine, &sent, request)? {
                let answer = convert::append_batch_response(&names, &appended, epoch);
                assert_eq!(answer.appends.len(), parts);
            }
        }
        2 => {
            let request: v1::ReadRequest = decoded(message)?;
            let (read, view, _wait) = convert::read(&request)?;
            let page = block_on(engine.read(read)).map_err(|error| status::read(&error))?;
            let answer = convert::read_response(&page, view, epoch)?;
            let records = answer.batch.as_ref().map_or(0, |batch| batch.records.len());
            let most = convert::MAX_RESPONSE_BYTES;
            assert!(answer.encoded_len() <= most || records == 1);
        }
        3 => {
            let request: v1::ScanRequest = decoded(message)?;
            let (scan, view) = convert::scan(request)?;
            let follows = scan.follow;
            let mut scan = block_on(engine.scan(scan)).map_err(|error| status::read(&error))?;
            for _ in 0..64 {
                let next = match follows {
                    // It may wait for ever.
                    true => pin!(scan.next()).poll(&mut Context::from_waker(Waker::noop())),
                    false => Poll::Ready(block_on(scan.next())),
                };
                let Poll::Ready(chunk) = next else { break };
                let Some(chunk) = chunk.map_err(|error| status::read(&error))? else {
                    break;
                };
                convert::scan_response(chunk, view, epoch)?;
            }
        }
        4 => {
            let request: v1::CreateLogRequest = decoded(message)?;
            let name = convert::log_name(format_args!("log"), &request.log, Access::Write)?;
            let config = convert::log_config(request.config, &limits)?;
            let made = block_on(engine.create_log(name.clone(), config.clone()));
            let info = made.map_err(|error| status::admin(&error))?;
            assert_eq!(*info.config, config);
            convert::log(&info);
            forget(&engine, name.as_str());
        }
        5 => {
            let request: v1::UpdateLogRequest = decoded(message)?;
            let name = convert::log_name(format_args!("log"), &request.log, Access::Write)?;
            let change = convert::log_config_change(&request, &limits)?;
            block_on(engine.update_log(name, change)).map_err(|error| status::admin(&error))?;
        }
        6 => {
            let request: v1::CommitCursorRequest = decoded(message)?;
            let commit = request.commit.unwrap_or_default();
            let commit = convert::cursor_commit(format_args!("commit"), commit)?;
            let done = block_on(engine.commit_cursor(commit));
            done.map_err(|error| status::cursor(&error, Access::Write))?;
        }
        7 => {
            let request: v1::ListLogsRequest = decoded(message)?;
            let size = convert::page_size(request.page_size);
            let after = convert::parse_page_token(&request.page_token)?;
            if let Some(after) = &after {
                let token = convert::page_token(after);
                assert_eq!(convert::parse_page_token(&token)?.as_ref(), Some(after));
            }
            let found = block_on(engine.list_logs(request.prefix, after, size));
            let found = found.map_err(|error| status::read(&error))?;
            assert!(found.len() <= size);
        }
        8 => {
            let request: v1::TrimRequest = decoded(message)?;
            let target = convert::target(&request.log, request.log_id, Access::Write)?;
            let before = wald_storage::Lsn::new(request.before_lsn);
            block_on(engine.trim(target, before)).map_err(|error| status::trim(&error))?;
        }
        9 => {
            let request: v1::SyncRequest = decoded(message)?;
            let target = convert::sync_target(request.target)?;
            let log = match request.log.as_str() {
                "" => None,
                name => Some(convert::log_name(format_args!("log"), name, Access::Write)?),
            };
            let done = block_on(engine.sync(target, log.as_ref()));
            done.map_err(|error| status::sync(&error))?;
        }
        10 => {
            let request: v1::ListProducersRequest = decoded(message)?;
            let target = convert::target(&request.log, request.log_id, Access::Read)?;
            let size = convert::page_size(request.page_size);
            let after = convert::parse_page_token(&request.page_token)?;
            with_producer(&engine, &request.log, "p", || {
                let found = block_on(engine.list_producers(target, after.clone(), size));
                let found = found.map_err(|error| status::read(&error))?;
                assert!(found.len() <= size);
                let after = after.unwrap_or_default();
                let ids = found.iter().map(|info| info.id.as_str());
                assert!(ids.clone().is_sorted() && ids.clone().all(|id| *id > *after));
                for info in &found {
                    assert_eq!(convert::log_producer(info).id, info.id.as_str());
                }
                Ok(())
            })?;
        }
        11 => {
            let request: v1::ForgetProducerRequest = decoded(message)?;
            let target = convert::target(&request.log, request.log_id, Access::Write)?;
            let id = convert::producer_id(&request.producer_id)?;
            with_producer(&engine, &request.log, id.as_str(), || {
                let once = || block_on(engine.forget_producer(target.clone(), id.clone()));
                once().map_err(|error| status::admin(&error))?;
                let again = once().expect_err("it is forgotten");
                assert_eq!(status::admin(&again).code(), tonic::Code::NotFound);
                Ok(())
            })?;
        }
        _ => {
            let sent = Sent::new(message.clone());
            let read = convert::SessionRequest::read(&sent);
            let request = decoded::<v1::AppendSessionRequest>(message).inspect_err(|error| {
                let batch = read.as_ref().map(|request| request.batch(&limits));
                refuses(error, !matches!(batch, Ok(Ok(_))));
            })?;
            let read = read.expect("prost reads it");
            let request_id = request.request_id;
            assert_eq!(
                (read.request_id, read.independent),
                (request_id, request.independent)
            );
            let batch = match read.content {
                convert::intake::SessionContent::Batch(batch) => batch,
                convert::intake::SessionContent::Append(bytes) => {
                    let append = v1::AppendRequest::decode(bytes).expect("prost read it before");
                    assert_eq!((Some(append), None), (request.append, request.batch));
                    return Ok(());
                }
                convert::intake::SessionContent::Both => {
                    assert!(request.append.is_some() && request.batch.is_some());
                    return Ok(());
                }
            };
            let parts = request.batch.unwrap_or_default();
            if let Some((names, appended)) = append_batch(&engine, &batch, parts)? {
                let expected = v1::AppendSessionResponse {
                    request_id,
                    ack: Some(convert::append_batch_response(&names, &appended, epoch)),
                    ..v1::AppendSessionResponse::default()
                };
                let mut ack = Vec::new();
                convert::SessionAck::new(request_id, &names, &appended, epoch).put(&mut ack);
                assert_eq!(
                    decoded::<v1::AppendSessionResponse>(ack.into())?,
                    expected
                );
            }
        }
    }
    Ok(())
}

/// Appends the batches in `sent`, which prost reads as `request`. Returns the logs and the
/// result.
fn append_batch(
    engine: &LocalEngine,
    sent: &Sent<v1::AppendBatchRequest>,
    request: v1::AppendBatchRequest,
) -> Result<Option<(Vec<LogName>, Appended)>, Status> {
    let limits = engine.profile().limits;
    let as_prost_has_it = convert::append_batch(&Sent::from(&request), &limits);
    let (batch, durability) = same(convert::append_batch(sent, &limits), as_prost_has_it)?;
    let names: Vec<_> = batch.logs.iter().map(|log| log.log.clone()).collect();
    let parts = request.batches.into_iter();
    let logs: Vec<_> = parts.map(|part| (part.log, part.records)).collect();
    let appended = submit(engine, batch, durability, &logs)?;
    Ok(appended.map(|appended| (names, appended)))
}

/// Appends, reads back, and forgets the logs, so that no input depends on another.
fn submit(
    engine: &LocalEngine,
    batch: Batch,
    durability: Option<Durability>,
    logs: &[(String, Vec<v1::Record>)],
) -> Result<Option<Appended>, Status> {
    let names: Vec<String> = batch
        .logs
        .iter()
        .map(|log| log.log.as_str().to_owned())
        .collect();
    let ticket = engine.submit(None, batch, durability);
    engine.write_gathered();
    let settled = ticket.wait();
    if let Ok(appended) = &settled {
        for (append, (log, records)) in appended.appends.iter().zip(logs) {
            let sent = records.len() as u64;
            assert_eq!(append.next_lsn.since(append.first_lsn), sent);
            reads_back(engine, log, append.first_lsn, records);
        }
    }
    names.iter().for_each(|name| forget(engine, name));
    settled.map(Some).map_err(|error| status::append(&error))
}

fn reads_back(engine: &LocalEngine, log: &str, from: wald_storage::Lsn, sent: &[v1::Record]) {
    let request = ReadRequest {
        log: convert::target(log, None, Access::Read).expect("it was appended to"),
        start: ReadStart::Lsn(from),
        max_records: 10_000,
        max_bytes: 16 << 20,
        visibility: Some(Visibility::Accepted),
    };
    if sent.is_empty() {
        return;
    }
    let page = block_on(engine.read(request)).expect("it was acked");
    let found: Vec<v1::Record> = page
        .batches
        .iter()
        .flat_map(|batch| convert::decode(batch).expect("it is whole"))
        .collect();
    assert!(found.len() >= sent.len().min(1000));
    for (sent, found) in sent.iter().zip(&found) {
        let bytes = |record: &v1::Record| match &record.payload {
            Some(v1::record::Payload::Data(data)) => data.clone(),
            Some(v1::record::Payload::Text(text)) => Bytes::from(text.clone()),
            None => Bytes::new(),
        };
        assert_eq!(bytes(sent), bytes(found));
        assert_eq!((&sent.headers, sent.crc32c), (&found.headers, found.crc32c));
    }
}

/// Runs `check` while the log has a producer of this id. No input depends on another: the log is
/// deleted afterwards.
fn with_producer(
    engine: &LocalEngine,
    log: &str,
    id: &str,
    check: impl FnOnce() -> Result<(), Status>,
) -> Result<(), Status> {
    let request = v1::AppendRequest {
        log: log.to_owned(),
        record: Some(v1::Record::default()),
        condition: Some(v1::AppendCondition {
            producer: Some(v1::Producer {
                id: id.to_owned(),
                ..v1::Producer::default()
            }),
            ..v1::AppendCondition::default()
        }),
        ..v1::AppendRequest::default()
    };
    let limits = engine.profile().limits;
    let (batch, durability) = convert::append(&Sent::from(&request), &limits)?;
    let ticket = engine.submit(None, batch, durability);
    engine.write_gathered();
    let appended = ticket.wait();
    let checked = appended
        .map_err(|error| status::append(&error))
        .and_then(|_| check());
    forget(engine, log);
    checked
}

fn forget(engine: &LocalEngine, log: &str) {
    if let Ok(target) = convert::target(log, None, Access::Write) {
        let _gone = block_on(engine.delete_log(target));
    }
}

/// A manifest as a store sends it, and some that are made up.
fn manifests() -> Vec<(String, v1::BackupManifest)> {
    let file = |path: &str, digest: u8| v1::BackupFile {
        path: path.to_owned(),
        file_bytes: 8192,
        digest: vec![digest; 32].into(),
        known: false,
    };
    let good = v1::BackupManifest {
        store_id: "7d7283cf-d9a8-6285-aac2-a7cc585ab500".to_owned(),
        recovery_epoch: 3,
        position: Some(1 << 40),
        files: vec![
            file("FORMAT", 1),
            file("journal/0000000000000001.seg", 2),
            file("index/0000000000000001.idx", 3),
        ],
        ..v1::BackupManifest::default()
    };
    let mut made = vec![("good".to_owned(), good.clone())];
    for (number, value) in [u64::MAX, 1 << 63, 1 << 62, 1 << 24].into_iter().enumerate() {
        let mut bad = good.clone();
        bad.recovery_epoch = value;
        made.push((format!("epoch-{number}"), bad));
        let mut bad = good.clone();
        bad.position = Some(value);
        made.push((format!("position-{number}"), bad));
        let mut bad = good.clone();
        bad.files[1].file_bytes = value;
        made.push((format!("bytes-{number}"), bad));
    }
    let paths = [
        "../../evil",
        "/etc/evil",
        "journal/../../evil",
        "journal/000000000000000A.seg",
        "sorted/0000000000000001.seg\0",
    ];
    for (number, path) in paths.into_iter().enumerate() {
        let mut bad = good.clone();
        bad.files[1].path = path.to_owned();
        made.push((format!("path-{number}"), bad));
    }
    let mut twice = good;
    twice.files[2].digest = twice.files[1].digest.clone();
    made.push(("same-content".to_owned(), twice));
    made
}

/// Inputs of [`config`] and [`request`] to begin with, by target and name.
pub fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let reference: String = crate::config::reference()
        .lines()
        .filter(|line| line.contains(" = "))
        .map(|line| format!("{}\n", line.trim_start_matches("# ")))
        .collect();
    seeds.push((
        "config",
        "reference".to_owned(),
        [&[0, 0], reference.as_bytes()].concat(),
    ));
    for (number, text) in [
        "sync_mode = \"interval\"\nsync_interval = \"1h\"\nsync_bytes = 1",
        "[otlp]\nendpoint = \"http://localhost:4317\"",
        "segment_bytes = \"64KiB\"\nlisten = \":0\"\nconsole = \"on\"",
        "segment_bytes = [1]\nsegmet_bytes = 1",
    ]
    .into_iter()
    .enumerate()
    {
        let layers = [1, 3, 3, b'1', b'h', b's', 1, 9, 2, b'1', b'B'];
        seeds.push((
            "config",
            format!("file-{number}"),
            [&layers[..], text.as_bytes()].concat(),
        ));
    }
    for (name, manifest) in manifests() {
        if name == "good" {
            let file = wald_proto::backup::encode(&manifest);
            let signed = [&file[..], &[7; 96]].concat();
            seeds.push(("manifest", "file".to_owned(), file));
            seeds.push(("manifest", "signed-file".to_owned(), signed));
        }
        seeds.push(("manifest", name, manifest.encode_to_vec()));
    }
    let record = |data: &'static [u8]| v1::Record {
        payload: Some(v1::record::Payload::Data(Bytes::from_static(data))),
        headers: vec![v1::Header {
            key: "k".to_owned(),
            value: Bytes::from_static(b"v"),
        }],
        ..v1::Record::default()
    };
    let condition = v1::AppendCondition {
        expected_lsn: Some(0),
        ..v1::AppendCondition::default()
    };
    let append = v1::AppendRequest {
        log: "a".to_owned(),
        record: Some(record(b"one")),
        condition: Some(condition.clone()),
        durability: 2,
        ..v1::AppendRequest::default()
    };
    let part = |log: &str| v1::LogBatch {
        log: log.to_owned(),
        records: vec![record(b"one"), record(b"two")],
        condition: Some(condition.clone()),
        ..Default::default()
    };
    let commit = v1::CursorCommit {
        log: "a".to_owned(),
        cursor: "c".to_owned(),
        lsn: 1,
        ..v1::CursorCommit::default()
    };
    let batch = v1::AppendBatchRequest {
        batches: vec![part("a"), part("b")],
        cursors: vec![commit.clone()],
        ..v1::AppendBatchRequest::default()
    };
    let config = v1::LogConfig {
        sync_mode: 5,
        compression: 2,
        ..v1::LogConfig::default()
    };
    let messages = [
        append.encode_to_vec(),
        batch.encode_to_vec(),
        v1::ReadRequest {
            log: "a".to_owned(),
            view: 1,
            max_records: 5,
            ..Default::default()
        }
        .encode_to_vec(),
        v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Prefix("a".to_owned())),
            start: Some(v1::scan_request::Start::Lsn(1)),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::CreateLogRequest {
            log: "a".to_owned(),
            config: Some(config.clone()),
        }
        .encode_to_vec(),
        v1::UpdateLogRequest {
            log: "a".to_owned(),
            config: Some(config),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::CommitCursorRequest {
            commit: Some(commit),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::ListLogsRequest {
            prefix: "a".to_owned(),
            page_token: convert::page_token("a"),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::TrimRequest {
            log: "a".to_owned(),
            before_lsn: 1,
            ..Default::default()
        }
        .encode_to_vec(),
        v1::SyncRequest {
            target: 1,
            ..Default::default()
        }
        .encode_to_vec(),
        v1::ListProducersRequest {
            log: "a".to_owned(),
            page_size: 5,
            page_token: convert::page_token("o"),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::ForgetProducerRequest {
            log: "a".to_owned(),
            producer_id: "p".to_owned(),
            ..Default::default()
        }
        .encode_to_vec(),
        v1::AppendSessionRequest {
            request_id: 7,
            batch: Some(batch),
            ..v1::AppendSessionRequest::default()
        }
        .encode_to_vec(),
    ];
    for (which, message) in (0u8..).zip(messages) {
        seeds.push((
            "request",
            format!("kind-{which}"),
            [&[which], &message[..]].concat(),
        ));
    }
    seeds
}
