//! The Wald daemon.

fn main() {}
