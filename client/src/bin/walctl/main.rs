//! The `walctl` command.

fn main() {}
