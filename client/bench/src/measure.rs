//! Running loads: threads that connect, a common begin, an end, and the resources used between.
//!
//! ```text
//! threads: connect ── ready ──▶ │ warm-up │ window │ answers still to come, teardown
//! here:               scrape at its begin ┘        └ scrape at its end
//! ```
//!
//! Each thread is an event loop with its share of the connections, as the server's are.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use wald_client::Dialer;

use crate::caller::{Load, LoadCaller};
use crate::connection::Connection;
use crate::fan_out;
use crate::figure::{Figure, Measurement, Second};
use crate::gate::{Due, Gate, pace};
use crate::record::{Percentiles, SharedRecorder, WindowCounts};
use crate::server::{Scrape, ServerUse};
use crate::session::{self, LoadSession};
use crate::spec::{Extent, LoadKind, MeasureWindow, Spec};
use crate::stream;

/// The server under load.
#[derive(Debug, Clone)]
pub(crate) struct LoadTarget {
    pub(crate) dialer: Dialer,
    /// Address of its metrics, if known.
    pub(crate) metrics: Option<String>,
}

impl LoadTarget {
    pub(crate) fn scrape(&self) -> Result<Option<Scrape>> {
        let token = self.dialer.authorization();
        let take = |url| Scrape::take(url, token.as_ref());
        self.metrics.as_deref().map(take).transpose()
    }
}

/// Duration, and detail of the measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MeasurePlan {
    pub(crate) warm_up: Duration,
    pub(crate) extent: Extent,
    /// Whether to keep a figure of each second.
    pub(crate) series: bool,
}

/// Values that a thread needs once all are ready.
struct Begin {
    gate: Arc<Gate>,
    shared: SharedRecorder,
    seen: SharedRecorder,
    due: Option<UnboundedReceiver<Due>>,
}

/// A thread with its share of a load.
struct LoadWorker {
    thread: JoinHandle<Result<()>>,
    begin: Sender<Begin>,
}

/// A load that runs.
struct Running {
    spec: Spec,
    gate: Arc<Gate>,
    workers: Vec<(JoinHandle<Result<()>>, SharedRecorder, SharedRecorder)>,
    pacer: Option<JoinHandle<()>>,
}

/// Runs the loads at the same time.
pub(crate) fn measure(
    target: &LoadTarget,
    specs: &[Spec],
    plan: &MeasurePlan,
) -> Result<Measurement> {
    let epoch = Instant::now();
    let (ended, ends) = channel();
    let mut ready = Vec::new();
    for spec in specs {
        ready.push(connect(target, spec, epoch, &ended)?);
    }
    drop(ended);
    let start = Instant::now();
    let begin = start + plan.warm_up;
    let running: Vec<Running> = specs
        .iter()
        .zip(ready)
        .map(|(spec, workers)| set_off(spec, workers, plan, start, begin))
        .collect::<Result<_>>()?;

    std::thread::sleep(begin.saturating_duration_since(Instant::now()));
    let before = (target.scrape()?, processor_time());
    let end = match plan.extent {
        Extent::For(time) => Some(begin + time),
        Extent::Count(_) => None,
    };
    let series = watch(target, &running, &ends, begin, end, plan.series)?;
    let after = (processor_time(), target.scrape()?);
    let figures: Vec<Figure> = running
        .into_iter()
        .map(|running| finish(running, begin, end))
        .collect::<Result<_>>()?;

    let server = match (&before.0, &after.1) {
        (Some(before), Some(after)) => {
            Some(ServerUse::between(before, after).context("these are not the metrics of Wald")?)
        }
        _ => None,
    };
    let records: u64 = figures.iter().map(|figure| figure.records).sum();
    Ok(Measurement {
        client_cpu_seconds: (after.0 - before.1).as_secs_f64(),
        server_cpu_seconds_per_million_records: server
            .as_ref()
            .filter(|_| records > 0)
            .map(|used| used.cpu_seconds / records as f64 * 1e6),
        server,
        figures,
        series,
    })
}

/// Processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Starts the threads of a load; they are connected when this returns.
fn connect(
    target: &LoadTarget,
    spec: &Spec,
    epoch: Instant,
    ended: &Sender<()>,
) -> Result<Vec<LoadWorker>> {
    let load = Load::new(spec, epoch);
    let connections = spec.used_connections();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match spec.work {
        // One clock hand-off less between appender and follower; followers should leave the
        // processors to the others.
        LoadKind::Follow | LoadKind::Followers => 1,
        _ => connections.min(cores),
    };
    let (ready, all_ready) = channel();
    let mut workers = Vec::new();
    for index in 0..threads {
        let share = LoadShare {
            dialer: target.dialer.clone(),
            load: Arc::clone(&load),
            numbers: (index..connections).step_by(threads).collect(),
            connections,
        };
        let (begin, begins) = channel();
        let (ready, ended) = (ready.clone(), ended.clone());
        let thread = std::thread::Builder::new()
            .name(format!("bench-{index}"))
            .spawn(move || {
                let done = share.run(&ready, &begins);
                let _ = ended.send(());
                done
            })?;
        workers.push(LoadWorker { thread, begin });
    }
    drop(ready);
    for _ in 0..threads {
        // Gone: a thread failed, and says why.
        if all_ready.recv().is_err() {
            break;
        }
    }
    if let Some(at) = workers
        .iter()
        .position(|worker| worker.thread.is_finished())
    {
        return Err(match workers.swap_remove(at).thread.join() {
            Ok(Err(error)) => error,
            _ => anyhow!("a thread ended before it began"),
        });
    }
    Ok(workers)
}

fn set_off(
    spec: &Spec,
    ready: Vec<LoadWorker>,
    plan: &MeasurePlan,
    start: Instant,
    begin: Instant,
) -> Result<Running> {
    let gate = Arc::new(Gate::new(begin, plan.extent));
    let window: MeasureWindow = gate.window(spec.rate.is_some());
    let mut workers = Vec::new();
    let mut told: Vec<UnboundedSender<Due>> = Vec::new();
    for LoadWorker { thread, begin } in ready {
        let shared = SharedRecorder::new(window, plan.series);
        let seen = SharedRecorder::new(window, false);
        let due = spec.rate.map(|_| {
            let (sender, due) = unbounded_channel();
            told.push(sender);
            due
        });
        let sent = begin.send(Begin {
            gate: Arc::clone(&gate),
            shared: shared.clone(),
            seen: seen.clone(),
            due,
        });
        ensure!(sent.is_ok(), "a thread ended before it began");
        workers.push((thread, shared, seen));
    }
    let pacer = match spec.rate {
        Some(rate) => {
            let gate = Arc::clone(&gate);
            let named = std::thread::Builder::new().name("bench-pacer".to_owned());
            Some(named.spawn(move || pace(&gate, start, rate, &told))?)
        }
        None => None,
    };
    Ok(Running {
        spec: spec.clone(),
        gate,
        workers,
        pacer,
    })
}

/// Waits for the end of the window, or of all threads; looks at each second if asked to.
fn watch(
    target: &LoadTarget,
    running: &[Running],
    ends: &Receiver<()>,
    begin: Instant,
    end: Option<Instant>,
    series: bool,
) -> Result<Vec<Second>> {
    let mut seconds = Vec::new();
    let (mut next, mut last) = (begin, begin);
    loop {
        if series {
            next += Duration::from_secs(1);
        }
        let until = match (series, end) {
            (true, Some(end)) => Some(next.min(end)),
            (true, None) => Some(next),
            (false, end) => end,
        };
        let over = loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let ended = match left {
                Some(left) => ends.recv_timeout(left),
                None => ends.recv().map_err(RecvTimeoutError::from),
            };
            match ended {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => break false,
                Err(RecvTimeoutError::Disconnected) => break true,
            }
        };
        if series {
            seconds.push(second(target, running, begin, &mut last)?);
        }
        if over || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(seconds);
        }
    }
}

/// The figures since `last`, which is about a second ago.
fn second(
    target: &LoadTarget,
    running: &[Running],
    begin: Instant,
    last: &mut Instant,
) -> Result<Second> {
    let mut counted = WindowCounts::new();
    for (_, shared, _) in running.iter().flat_map(|running| &running.workers) {
        if let Some(second) = shared.lock().take_second() {
            counted.add(&second);
        }
    }
    let now = Instant::now();
    let span = (now - std::mem::replace(last, now)).as_secs_f64().max(1e-9);
    let times = Percentiles::of(&counted.times);
    let scrape = target.scrape()?;
    let gauge = |name: &str| scrape.as_ref().and_then(|scrape| scrape.sum(name));
    Ok(Second {
        at: (now - begin).as_secs_f64(),
        acks_per_second: counted.calls as f64 / span,
        records_per_second: counted.records as f64 / span,
        p50_us: times.as_ref().map(|times| times.p50),
        p999_us: times.as_ref().map(|times| times.p999),
        rss_bytes: gauge("process_resident_memory_bytes"),
        descriptors: gauge("process_open_fds"),
    })
}

fn finish(running: Running, begin: Instant, end: Option<Instant>) -> Result<Figure> {
    if let Some(pacer) = running.pacer {
        pacer.join().map_err(|_| anyhow!("the pacer panicked"))?;
    }
    let (mut counted, mut delivered) = (WindowCounts::new(), WindowCounts::new());
    let mut errors = std::collections::BTreeMap::new();
    let mut records_in_all = 0;
    for (thread, shared, seen) in running.workers {
        thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        let recorder = shared.lock();
        counted.add(&recorder.counted);
        records_in_all += recorder.all_records;
        for (error, count) in &recorder.errors {
            *errors.entry(error.clone()).or_default() += count;
        }
        delivered.add(&seen.lock().counted);
    }
    let by_due = running.gate.window(running.spec.rate.is_some()).by_due;
    let time = match end {
        // In an open loop late answers count, so their time does.
        Some(end) if by_due => counted.last.unwrap_or(end).max(end) - begin,
        Some(end) => end - begin,
        None => counted
            .last
            .unwrap_or(begin)
            .saturating_duration_since(begin),
    };
    if counted.records == 0
        && let Some((error, _)) = errors.first_key_value()
    {
        return Err(anyhow!("nothing was answered: {error}"));
    }
    let mut figure = Figure::new(&running.spec, time, &counted, Some(&delivered));
    figure.records_in_all = records_in_all;
    figure.errors = errors;
    Ok(figure)
}

/// The part of a load that one thread does.
struct LoadShare {
    dialer: Dialer,
    load: Arc<Load>,
    /// Numbers of its connections.
    numbers: Vec<usize>,
    connections: usize,
}

impl LoadShare {
    fn run(self, ready: &Sender<()>, begins: &Receiver<Begin>) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let connections = runtime.block_on(async {
            let mut connections = Vec::new();
            for _ in &self.numbers {
                connections.push(Connection::open(&self.dialer).await?);
            }
            anyhow::Ok(connections)
        })?;
        let _ = ready.send(());
        // Gone: another thread failed.
        let Ok(begin) = begins.recv() else {
            return Ok(());
        };
        runtime.block_on(Box::pin(self.work(&connections, begin)))
    }

    /// Number of the load's calls that the connection `number` has under way.
    fn on(&self, number: usize) -> usize {
        let all = self.load.spec.in_flight.max(1);
        all / self.connections + usize::from(number < all % self.connections)
    }

    async fn work(&self, connections: &[Connection], begin: Begin) -> Result<()> {
        let Begin {
            gate,
            shared,
            seen,
            due,
        } = begin;
        let load = &self.load;
        match load.spec.work {
            LoadKind::Session => {
                let sessions: Vec<LoadSession> = self
                    .numbers
                    .iter()
                    .map(|number| LoadSession::new(load, &shared, &gate, self.on(*number)))
                    .collect();
                if let Some(due) = due {
                    tokio::spawn(hand_out(due, sessions.clone()));
                }
                session::all(&sessions, connections).await;
            }
            LoadKind::Scan => {
                let mut scans = tokio::task::JoinSet::new();
                for (connection, number) in connections.iter().zip(&self.numbers) {
                    for _ in 0..self.on(*number) {
                        scans.spawn(stream::scan(
                            Arc::clone(load),
                            connection.clone(),
                            Arc::clone(&gate),
                            shared.clone(),
                        ));
                    }
                }
                while scans.join_next().await.is_some() {}
            }
            LoadKind::Followers => {
                let mut followers = tokio::task::JoinSet::new();
                for (connection, number) in connections.iter().zip(&self.numbers) {
                    for _ in 0..self.on(*number) {
                        followers.spawn(fan_out::follow(
                            Arc::clone(load),
                            connection.clone(),
                            Arc::clone(&gate),
                            shared.clone(),
                        ));
                    }
                }
                while let Some(ended) = followers.join_next().await {
                    ended??;
                }
            }
            LoadKind::Follow => {
                let callers = self.callers(connections, &shared);
                let load = Arc::clone(load);
                stream::follow(load, connections, gate, shared, seen, callers, due).await?;
            }
            LoadKind::Append | LoadKind::Batch | LoadKind::Read => {
                stream::write(self.callers(connections, &shared), &gate, due).await;
            }
        }
        Ok(())
    }

    fn callers(&self, connections: &[Connection], shared: &SharedRecorder) -> Vec<LoadCaller> {
        let all = self.load.spec.in_flight.max(1);
        let mut callers = Vec::new();
        for (connection, number) in connections.iter().zip(&self.numbers) {
            for nth in 0..self.on(*number) {
                let index = nth * self.connections + number;
                callers.push(LoadCaller::new(&self.load, connection, shared, index, all));
            }
        }
        callers
    }
}

/// Sends due calls to the sessions in turn.
async fn hand_out(mut due: UnboundedReceiver<Due>, sessions: Vec<LoadSession>) {
    let mut turn = sessions.iter().cycle();
    while let Some(due) = due.recv().await {
        if let Some(session) = turn.next() {
            session.tell(Some(due));
        }
    }
    for session in &sessions {
        session.tell(None);
    }
}
