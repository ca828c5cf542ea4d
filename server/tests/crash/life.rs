//! One life of the daemon under load, from start to crash, over and over on one directory.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use wald_proto::v1::Visibility;
use wald_proto::v1::wal_service_client::WalServiceClient;

use super::contents;
use super::ledger::{Counts, Crash, Ledger};
use super::reader::Reader;
use super::writer::{self, Load, Writer};
use crate::support::Daemon;

const WRITERS: usize = 16;
/// They share connections.
const CONNECTIONS: usize = 4;
/// Whatever is waited for comes sooner, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The users of a store, and their knowledge of it.
pub(crate) struct Users {
    ledger: Arc<Mutex<Ledger>>,
    writers: Vec<Writer>,
    readers: Vec<Reader>,
    new: bool,
}

/// A daemon under load.
pub(crate) struct Life {
    pub(crate) daemon: Daemon,
    pub(crate) load: Arc<Load>,
    writers: Vec<JoinHandle<Writer>>,
    readers: Vec<JoinHandle<Reader>>,
}

impl Users {
    pub(crate) fn new(random: &mut StdRng) -> Self {
        let writer = |number| Writer::new(number, StdRng::seed_from_u64(random.random()));
        Self {
            ledger: Arc::default(),
            writers: (0..WRITERS).map(writer).collect(),
            readers: vec![
                Reader::new(Visibility::Durable),
                Reader::new(Visibility::Written),
            ],
            new: true,
        }
    }

    /// Compares the state after a start with all knowledge.
    pub(crate) async fn check(&mut self, daemon: &Daemon, crash: Crash) {
        if self.new {
            contents::create(daemon, writer::logs(WRITERS)).await;
            self.new = false;
        } else {
            let epochs = self.ledger.lock().ended_epochs();
            let found = contents::read(daemon, &epochs).await;
            self.ledger.lock().check(&found, crash);
            for reader in &mut self.readers {
                reader.check(daemon, &found, crash).await;
            }
        }
        let epoch = daemon.start["recovery_epoch"].as_u64().unwrap();
        self.ledger.lock().begins(epoch);
    }

    /// Everyone begins.
    pub(crate) async fn begin(&mut self, daemon: Daemon) -> Life {
        let load = Arc::new(Load {
            ledger: Arc::clone(&self.ledger),
            acks: Semaphore::new(0),
            durable_acks: Semaphore::new(0),
            full: Semaphore::new(0),
            weak_only: AtomicBool::new(false),
        });
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(WalServiceClient::new(channel(&daemon).await));
        }
        let mut clients = clients.iter().cycle().cloned();
        let mut readers = Vec::new();
        for (reader, wal) in self.readers.drain(..).zip(&mut clients) {
            readers.push(tokio::spawn(reader.follow(wal)));
        }
        let mut writers = Vec::new();
        for (writer, wal) in self.writers.drain(..).zip(&mut clients) {
            writers.push(tokio::spawn(writer.run(wal, Arc::clone(&load))));
        }
        Life {
            daemon,
            load,
            writers,
            readers,
        }
    }

    /// The daemon of this life was killed.
    pub(crate) async fn end(&mut self, life: Life) {
        life.daemon.ended().await;
        for writer in life.writers {
            self.writers.push(told(writer).await);
        }
        for reader in life.readers {
            self.readers.push(told(reader).await);
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.ledger.lock().counts()
    }

    /// Records that readers were shown, and how many of these a crash took.
    pub(crate) fn shown(&self) -> (u64, u64) {
        let shown = |sum: (u64, u64), reader: &Reader| (sum.0 + reader.shown, sum.1 + reader.lost);
        self.readers.iter().fold((0, 0), shown)
    }
}

/// A channel to the daemon whose calls end soon after the daemon, also if another process gets its port and
/// never answers.
async fn channel(daemon: &Daemon) -> Channel {
    let address = daemon.start["grpc"].as_str().unwrap();
    Channel::from_shared(format!("http://{address}"))
        .unwrap()
        .connect_timeout(PATIENCE / 6)
        .http2_keep_alive_interval(PATIENCE / 6)
        .keep_alive_timeout(PATIENCE / 3)
        .keep_alive_while_idle(true)
        .connect()
        .await
        .unwrap()
}

/// Waits for the user of a daemon that is gone, whose client must report its end.
async fn told<T>(user: JoinHandle<T>) -> T {
    let in_time = tokio::time::timeout(PATIENCE, user).await;
    in_time
        .expect("a call to a daemon that is gone ends")
        .unwrap()
}

/// Waits for `count` acks, or refusals.
pub(crate) async fn wait_for(what: &Semaphore, count: u64) {
    let all = what.acquire_many(u32::try_from(count).unwrap());
    let in_time = tokio::time::timeout(PATIENCE, all).await;
    in_time.expect("the daemon answers").unwrap().forget();
}
