//! A panic on a thread of the engine never goes unnoticed.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

use super::*;
use crate::api::engine::{Append as _, Operate as _};
use crate::api::ticket::block_on;
use crate::base::metrics::{Observer, Worker};
use crate::disk::DiskCall;
use crate::engine::LocalEngine;

/// Name of the threads that panic as soon as they use the disk or the clock. Only the test below
/// sets it.
static TRAPPED: Mutex<&str> = Mutex::new("");

fn trap() {
    let trapped = *TRAPPED.lock();
    let thread = std::thread::current();
    let name = thread.name().unwrap_or_default();
    let is_it = || name.starts_with(&format!("wald-{trapped}"));
    assert!(trapped.is_empty() || !is_it(), "a trap on {name}");
}

fn trap_call(_: &DiskCall<'_>) -> bool {
    trap();
    false
}

struct TrappedClock(Arc<TestClock>);

impl Clock for TrappedClock {
    fn now(&self) -> Timestamp {
        trap();
        self.0.now()
    }

    fn monotonic(&self) -> Instant {
        trap();
        self.0.monotonic()
    }
}

#[derive(Default)]
struct Counted(Mutex<Vec<Worker>>);

impl Observer for Counted {
    fn panicked(&self, worker: Worker) {
        self.0.lock().push(worker);
    }
}

struct Trapped {
    engine: Arc<LocalEngine>,
    counted: Arc<Counted>,
}

impl Trapped {
    fn new(worker: Worker) -> Self {
        *TRAPPED.lock() = worker.name();
        let disk = SimDisk::new();
        disk.fail_call(trap_call, u64::MAX, 0);
        let config = StorageConfig {
            scrub_bytes_per_second: 1 << 30,
            retention_interval: Duration::from_millis(1),
            ..small_config()
        };
        let counted = Arc::new(Counted::default());
        let (engine, _) = LocalEngine::open(
            Arc::new(disk),
            config,
            Arc::new(TrappedClock(TestClock::new())),
            Arc::clone(&counted) as Arc<dyn Observer>,
        )
        .unwrap();
        Self { engine, counted }
    }

    /// Fills several segments, so that there is something to index and to sort. Appends may be
    /// refused.
    fn fill(&self) {
        for _ in 0..8 {
            let data = vec![1; 20 << 10];
            let batch = batch(&[("a", &[&data])]);
            drop(
                self.engine
                    .submit(None, batch, Some(Durability::Durable))
                    .wait(),
            );
        }
    }

    /// Reason why the journal failed.
    fn failure(&self) -> String {
        let (sender, failed) = mpsc::channel();
        let engine = Arc::clone(&self.engine);
        let wait = move || drop(sender.send(block_on(engine.failed()).to_string()));
        crate::base::threads::start("test", wait).unwrap();
        let within = Duration::from_secs(60);
        failed.recv_timeout(within).expect("the journal fails")
    }

    /// Ends the engine, threads included, and returns the panics that were counted.
    fn end(self) -> Vec<Worker> {
        let Self { engine, counted } = self;
        let (sender, ended) = mpsc::channel();
        let drop_engine = move || {
            drop(engine);
            let _ = sender.send(());
        };
        crate::base::threads::start("test", drop_engine).unwrap();
        let within = Duration::from_secs(60);
        ended.recv_timeout(within).expect("all threads end");
        *TRAPPED.lock() = "";
        std::mem::take(&mut *counted.0.lock())
    }
}

#[test]
fn a_panic_of_any_engine_thread_is_counted_and_ends_its_work() {
    for worker in Worker::ALL {
        let trapped = Trapped::new(worker);
        match worker {
            Worker::Reader => {
                let backup = || block_on(trapped.engine.backup(HashSet::new())).is_ok();
                assert!(catch_unwind(AssertUnwindSafe(backup)).is_err());
                // The thread goes on, and so does the engine.
                *TRAPPED.lock() = "";
                assert!(backup());
                trapped.fill();
                assert!(!trapped.engine.statistics().journal_failed);
            }
            Worker::Verify => {
                let mut verification = trapped.engine.verify(None, 0).unwrap();
                let mut told = || block_on(verification.next());
                let error = std::iter::from_fn(&mut told).find_map(Result::err).unwrap();
                assert!(
                    error.to_string().contains("a trap on wald-verify"),
                    "{error}"
                );
            }
            _ => {
                trapped.fill();
                let failure = trapped.failure();
                let expected = format!("engine thread \"{}\"", worker.name());
                assert!(failure.contains(&expected), "{failure}");
                assert!(failure.contains("a trap on"), "{failure}");
                let answer = trapped.engine.submit(None, batch(&[("a", &[b"x"])]), None);
                assert!(answer.wait().is_err());
            }
        }
        let counted = trapped.end();
        assert!(!counted.is_empty(), "{worker:?}");
        assert!(counted.iter().all(|found| *found == worker), "{counted:?}");
    }
}
