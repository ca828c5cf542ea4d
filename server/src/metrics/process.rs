//! The usual `process_*` metrics, with help texts that are questions as everywhere else.

use prometheus::core::{Collector, Desc};
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::{Counter, MetricFamily};
use rustix::time::{ClockId, clock_gettime};

/// The library rounds it down to whole seconds, which is a rate of nothing or too much.
const CPU: &str = "process_cpu_seconds_total";

/// Names and questions. A metric that a newer library adds keeps the library's text.
const QUESTIONS: [(&str, &str); 7] = [
    (
        CPU,
        "Processor time of the daemon in seconds, user and system.",
    ),
    (
        "process_max_fds",
        "Maximum number of open file descriptors of the daemon.",
    ),
    (
        "process_open_fds",
        "Open file descriptors. Near process_max_fds connections and reads fail.",
    ),
    (
        "process_resident_memory_bytes",
        "Resident memory of the daemon in bytes.",
    ),
    (
        "process_start_time_seconds",
        "Time of the daemon's start in seconds since 1970. A change is a restart.",
    ),
    ("process_threads", "Threads of the daemon."),
    (
        "process_virtual_memory_bytes",
        "Reserved address space in bytes. Maps of segments count, held in memory or not.",
    ),
];

/// Processor time of this process in seconds.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    // Exact to microseconds for the next 200 years.
    #[allow(clippy::cast_precision_loss, reason = "see above")]
    let (seconds, nanos) = (time.tv_sec as f64, time.tv_nsec as f64);
    seconds + nanos / 1e9
}

/// The library's collector, queried again at each scrape.
pub(super) struct Process(ProcessCollector);

impl Process {
    pub(super) fn new() -> Self {
        Self(ProcessCollector::for_self())
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.0.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = self.0.collect();
        for family in &mut families {
            if family.name() == CPU {
                let mut counter = Counter::default();
                counter.set_value(cpu_seconds());
                for metric in family.mut_metric() {
                    metric.set_counter(counter.clone());
                }
            }
            let question = QUESTIONS.iter().find(|(name, _)| *name == family.name());
            if let Some((_, question)) = question {
                family.set_help((*question).to_owned());
            }
        }
        families
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_told_in_parts_of_a_second() {
        let process = Process::new();
        let before = cpu_seconds();
        let families = process.collect();
        let after = cpu_seconds();
        let family = families.iter().find(|family| family.name() == CPU).unwrap();
        let shown = family.get_metric()[0].get_counter().get_value();
        assert!(
            (before..=after).contains(&shown),
            "{before} {shown} {after}"
        );
    }
}
