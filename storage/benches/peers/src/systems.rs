//! The systems that are compared.

mod fjall;
mod ironwal;
mod okaywal;
mod raft_engine;
mod wald;
mod walrus;

use crate::store::{Role, System};

const ALL: &[Role] = &[Role::Append, Role::Get, Role::Scan, Role::Open];

/// The first system is the baseline for the others.
pub static SYSTEMS: [System; 10] = [
    System {
        name: "wald",
        about: "one append after another on each thread; records are decoded with prost",
        roles: ALL,
        flush: wald::flush,
        open: wald::open,
    },
    System {
        name: "wald, 256 in flight",
        about: "acks are taken as they come, up to 256 in flight on each thread",
        roles: &[Role::Append],
        flush: wald::flush,
        open: wald::open_pipelined,
    },
    System {
        name: "wald, mmap",
        about: "finished segments are mapped",
        roles: &[Role::Get, Role::Scan],
        flush: wald::flush,
        open: wald::open_mapped,
    },
    System {
        name: "wald, stored",
        about: "verified bytes as they are stored, which is what the daemon sends; records are not decoded",
        roles: &[Role::Scan],
        flush: wald::flush,
        open: wald::open_stored,
    },
    System {
        name: "ironwal",
        about: "a directory for each log",
        roles: ALL,
        flush: ironwal::flush,
        open: ironwal::open,
    },
    System {
        name: "ironwal, mmap",
        about: "segments are mapped",
        roles: &[Role::Get, Role::Scan],
        flush: ironwal::flush,
        open: ironwal::open_mapped,
    },
    System {
        name: "raft-engine",
        about: "a region for each log; not compressed",
        roles: ALL,
        flush: raft_engine::flush,
        open: raft_engine::open,
    },
    System {
        name: "okaywal",
        about: "one log only: a chunk for each record, never checkpointed",
        roles: ALL,
        flush: okaywal::flush,
        open: okaywal::open,
    },
    System {
        name: "fjall",
        about: "one keyspace, keys are (log, number)",
        roles: ALL,
        flush: fjall::flush,
        open: fjall::open,
    },
    System {
        name: "walrus",
        about: "a topic for each log; a reader consumes",
        roles: ALL,
        flush: walrus::flush,
        open: walrus::open,
    },
];
