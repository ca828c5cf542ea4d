//! Machines that are lost with their disks, at random points of random work. A bucket keeps the shipped parts.
//!
//! `WALD_MACHINES` sets the number of lost machines, `WALD_SEED` runs one seed only.

use super::power_cut::simulate;
use super::simulation::{Run, Verdict};

#[test]
fn nothing_replicated_is_lost_with_the_machine_and_the_rest_is_named() {
    let machines = super::power_cut::setting("WALD_MACHINES").unwrap_or(400);
    let all = simulate("lost_machines", Run::replicated, |all| {
        all.machines >= machines
    });
    assert_eq!(all.verdict, Verdict::default());
    assert!(
        all.machines >= 10 && all.named_lost > 0 && all.uploads > 0,
        "{all}"
    );
}
