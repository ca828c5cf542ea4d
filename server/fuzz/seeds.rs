//! Writes inputs to begin with into `corpus`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let seeds = wald_server_fuzz::seeds();
    for (target, name, seed) in &seeds {
        std::fs::create_dir_all(corpus.join(target))?;
        std::fs::write(corpus.join(target).join(name), seed)?;
    }
    println!("{} inputs", seeds.len());
    Ok(())
}
