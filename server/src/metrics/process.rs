//! The usual `process_*` metrics, with help texts that are questions as everywhere else.

use prometheus::core::{Collector, Desc};
use prometheus::process_collector::ProcessCollector;
use prometheus::proto::MetricFamily;

/// Names and questions. A metric that a newer library adds keeps the library's text.
const QUESTIONS: [(&str, &str); 7] = [
    (
        "process_cpu_seconds_total",
        "How many seconds of processor time has the daemon used, user and system?",
    ),
    (
        "process_max_fds",
        "How many file descriptors may the daemon have open?",
    ),
    (
        "process_open_fds",
        "How many file descriptors are open? Near process_max_fds connections and reads fail.",
    ),
    (
        "process_resident_memory_bytes",
        "How much memory does the daemon hold?",
    ),
    (
        "process_start_time_seconds",
        "When did the daemon start, in seconds since 1970? A change is a restart.",
    ),
    ("process_threads", "How many threads does the daemon have?"),
    (
        "process_virtual_memory_bytes",
        "How much address space is reserved? Maps of segments count, held in memory or not.",
    ),
];

/// The library's collector, asked anew at each scrape.
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
            let question = QUESTIONS.iter().find(|(name, _)| *name == family.name());
            if let Some((_, question)) = question {
                family.set_help((*question).to_owned());
            }
        }
        families
    }
}
