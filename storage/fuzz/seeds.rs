//! Writes the first inputs into `corpus`, cut out of a store that the engine made.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut seeds = wald_storage::fuzzing::table_seeds();
    for (name, seed) in wald_storage::fuzzing::recovery_seeds() {
        seeds.push(("recovery", name, seed));
    }
    for (name, seed) in wald_storage::fuzzing::backup_seeds() {
        seeds.push(("backup", name, seed));
    }
    for (name, seed) in wald_storage::fuzzing::cursor_seeds() {
        seeds.push(("cursor", name, seed));
    }
    for (target, name, seed) in &seeds {
        std::fs::create_dir_all(corpus.join(target))?;
        std::fs::write(corpus.join(target).join(name), seed)?;
    }
    println!("{} inputs", seeds.len());
    Ok(())
}
