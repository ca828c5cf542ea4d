//! Power cuts at random points of random work. Cuts inside recovery, rolls, checkpoints and the recycling of
//! files come more often than by chance.
//!
//! `WALD_CUTS` sets the number of power cuts, `WALD_SEED` runs one seed only.

use super::cipher::TestKeys;
use super::simulation::{Counts, Faults, Run, Verdict};

const LIVES: u32 = 8;

pub(super) fn setting(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok())
}

/// Runs one seed after the other until `done`. Prints how to repeat a seed that failed.
pub(super) fn simulate(
    test: &str,
    begin: impl Fn(u64) -> Run,
    mut done: impl FnMut(&Counts) -> bool,
) -> Counts {
    let mut all = Counts::default();
    let only = setting("WALD_SEED");
    let mut seed = only.unwrap_or(0);
    let mut failed = Vec::new();
    loop {
        let mut run = begin(seed);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.run(LIVES)));
        all.add(&run.counts);
        if outcome.is_err() {
            eprintln!("repeat with: WALD_SEED={seed} cargo test -p wald-storage {test}");
            failed.push(seed);
        }
        if only.is_some() || done(&all) || failed.len() >= 10 {
            break;
        }
        seed += 1;
    }
    println!("{} seeds\n{all}", seed + 1);
    assert_eq!(failed, Vec::<u64>::new(), "seeds that failed");
    assert_eq!(all.verdict, Verdict::default());
    all
}

#[test]
fn nothing_durable_is_lost_and_nothing_is_half_there_after_any_power_cut() {
    let cuts = setting("WALD_CUTS").unwrap_or(2_000);
    let mut told = 0;
    let begin = |seed| Run::new(seed, Faults::default());
    let all = simulate("power_cut", begin, |all| {
        let now = all.cuts.cuts();
        if now >= told + 50_000 {
            told = now;
            eprintln!("{all}");
        }
        now >= cuts
    });
    let cuts = all.cuts.cuts();
    // None in n trials: the rate is below 3/n with a confidence of 95 %.
    println!(
        "0 of {cuts} power cuts took anything: fewer than {:.1e} do",
        3.0 / cuts as f64
    );
    let least = match cuts {
        1_000_000.. => 1000,
        1_000.. => 5,
        _ => 0,
    };
    let promised = all.cuts.promised();
    assert!(
        promised.iter().all(|inside| *inside >= least),
        "{promised:?}"
    );
}

/// Random work, and faults, with a cipher that has keys only for logs whose keys were prepared.
#[test]
fn every_append_to_an_encrypted_store_finds_the_key_of_its_log() {
    let faults = Faults {
        failing_calls: 40,
        failing_flushes: 40,
    };
    let begin = |seed| {
        let mut run = Run::new(seed, faults);
        run.config.cipher = Some(TestKeys::prepared());
        run
    };
    let all = simulate("finds_the_key", begin, |all| {
        all.kills + all.cuts.cuts() >= 200
    });
    assert!(all.failures > 0);
}

/// Flushes and other calls fail, and power cuts come: the journal fails, and no record acknowledged as
/// durable is lost, with or without a power cut.
#[test]
fn failing_calls_and_flushes_take_nothing_durable_with_them() {
    let faults = Faults {
        failing_calls: 40,
        failing_flushes: 40,
    };
    let ends = setting("WALD_FAILS").unwrap_or(500);
    let begin = |seed| Run::new(seed, faults);
    let all = simulate("failing", begin, |all| all.kills + all.cuts.cuts() >= ends);
    assert!(ends < 500 || all.failures > 0);
}

#[test]
fn the_same_seed_makes_the_same_calls_and_leaves_the_same_bytes() {
    for seed in 0..20 {
        let [one, other] = [(); 2].map(|()| {
            let faults = Faults {
                failing_calls: 30,
                failing_flushes: 30,
            };
            let mut run = Run::new(seed, faults);
            if run.config.cipher.is_some() {
                run.config.cipher = Some(TestKeys::counting());
            }
            run.disk.trace_calls(true);
            run.run(3);
            (run.disk.trace(), run.disk.fingerprint(), run.counts)
        });
        let calls = one.0.1.iter().zip(&other.0.1);
        for (number, (one, other)) in calls.enumerate() {
            assert_eq!(one, other, "call {number} of seed {seed}");
        }
        assert!(one == other, "seed {seed}");
    }
}
