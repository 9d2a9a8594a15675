//! Numbers that docs state and the code decides: each sentence stands beside the line of code that it speaks of. Whoever changes
//! one of them changes the other, and this list. The costs of algorithms have a test of their own (`collective/plan/tests/costs.rs`).
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

/// A file of docs, what it says, a file below `crates`, and what that says.
const ALL: &[(&str, &str, &str, &str)] = &[
    (
        "links.md",
        "each for at most 3 seconds",
        "tensorwire/src/link/office.rs",
        "ATTEMPT: Duration = Duration::from_secs(3)",
    ),
    ("links.md", "in pieces of at most 1 MiB", "tensorwire/src/link/frame.rs", "PIECE: usize = 1 << 20"),
    (
        "links.md",
        "after 10 seconds if it says nothing",
        "tensorwire/src/link/meet.rs",
        "PATIENCE: Duration = Duration::from_secs(10)",
    ),
    ("links.md", "blocks of up to 64 KiB", "tensorwire/src/link/seal.rs", "BLOCK: usize = 65535"),
    ("leases.md", "3,583 points", "tensorwire/src/lease/points.rs", "LINES: usize = 4096"),
    ("leases.md", "3,583 points", "tensorwire/src/lease/points.rs", "ABORTS: usize = 512"),
    (
        "leases.md",
        "(`lifetime`, ten minutes",
        "tensorwire/src/lease/terms.rs",
        "LIFETIME: Duration = Duration::from_secs(600)",
    ),
    ("leases.md", "2 MiB for small blocks", "device/src/pool.rs", "SMALL: usize = 2 << 20"),
    ("leases.md", "16 MiB for larger ones", "device/src/pool.rs", "LARGE: usize = 16 << 20"),
    (
        "leases.md",
        "stays for two seconds after its last loan",
        "tensorwire/src/share/mappings.rs",
        "LINGER: Duration = Duration::from_secs(2)",
    ),
    (
        "leases.md",
        "in one process | 262,144 |",
        "tensorwire/src/lease/book.rs",
        "SLOTS: usize = if cfg!(loom) { 64 } else { 1 << 18 }",
    ),
    (
        "symmetric.md",
        "above 32 KiB for each block",
        "device/src/cuda/kernels/mod.rs",
        "FUSED_BYTES: usize = 32 << 10",
    ),
    (
        "cuda.md",
        "thread looks every 2 ms",
        "device/src/cuda/reaper.rs",
        "LOOK: Duration = Duration::from_millis(2)",
    ),
    (
        "cuda.md",
        "due for 50 ms",
        "device/src/cuda/reaper.rs",
        "PATIENCE: Duration = Duration::from_millis(50)",
    ),
    (
        "cuda.md",
        "for up to 30 us",
        "tensorwire/src/collective/queued.rs",
        "GLANCE: Duration = Duration::from_micros(30)",
    ),
    (
        "algorithms.md",
        "in pieces of 8 MiB",
        "tensorwire/src/collective/plan/direct.rs",
        "PIECE: usize = if cfg!(test) { 128 } else { 8 << 20 }",
    ),
    ("algorithms.md", "are more than 256 GiB", "tensorwire/src/ranks/memory.rs", "MOST: usize = 256 << 30"),
    (
        "algorithms.md",
        "breaks the group",
        "tensorwire/src/collective/cancel.rs",
        "LEAVE: Duration = Duration::from_secs(1)",
    ),
    (
        "algorithms.md",
        "for five seconds at most",
        "tensorwire/src/collective/mismatch.rs",
        "GATHER: Duration = Duration::from_secs(5)",
    ),
    (
        "algorithms.md",
        "for work for 50 us",
        "device/src/host/helper.rs",
        "LOOK: Duration = Duration::from_micros(50)",
    ),
    (
        "design.md",
        "(500 us where cores are to spare",
        "tensorwire/src/shm/cores.rs",
        "SPARE: Duration = Duration::from_micros(500)",
    ),
    (
        "design.md",
        "1 us where ranks share them",
        "tensorwire/src/shm/cores.rs",
        "CROWDED: Duration = Duration::from_micros(1)",
    ),
    ("pipes.md", "its small store (16 MiB)", "tensorwire/src/pipe/listener.rs", "bytes: 16 << 20"),
    (
        "pipes.md",
        "connects up to 16 processes at a time",
        "tensorwire/src/pipe/listener.rs",
        "AT_A_TIME: usize = 16",
    ),
    (
        "pipes.md",
        "up to 256 that nobody has accepted",
        "tensorwire/src/pipe/listener.rs",
        "WAITING: usize = 256",
    ),
    ("pipes.md", "up to 1 MiB of metadata", "tensorwire/src/pipe/descriptor.rs", "METADATA: usize = 1 << 20"),
    ("pipes.md", "16,384 payloads", "tensorwire/src/pipe/descriptor.rs", "MOST: usize = 1 << 14"),
    (
        "pipes.md",
        "up to 4 KiB, 64 KiB in a message",
        "tensorwire/src/pipe/channel/basic.rs",
        "SMALL: usize = 4 << 10",
    ),
    (
        "pipes.md",
        "up to 4 KiB, 64 KiB in a message",
        "tensorwire/src/pipe/channel/basic.rs",
        "BESIDE: usize = 64 << 10",
    ),
    ("pipes.md", "from 1 MiB on", "tensorwire/src/pipe/send.rs", "LARGE: usize = 1 << 20"),
    ("pipes.md", "head of 512 bytes", "tensorwire/src/pipe/descriptor.rs", "HEAD: usize = 512"),
    (
        "algorithms.md",
        "remembers 4096 sets of allocations",
        "tensorwire/src/share/adopted.rs",
        "MOST: usize = 4096",
    ),
    (
        "leases.md",
        "of one grant, in one process | 65,535 |",
        "tensorwire/src/lease/book.rs",
        "pub(super) loans: u16",
    ),
    (
        "leases.md",
        "one slot is used for | 4,294,967,295;",
        "tensorwire/src/lease/book.rs",
        "Self { generation: (word >> 32) as u32",
    ),
    (
        "topology.md",
        "`--measure` copies 64 MiB and 8 bytes",
        "cli/src/topo/measure.rs",
        "LARGE: usize = 64 << 20",
    ),
    ("topology.md", "`--measure` copies 64 MiB and 8 bytes", "cli/src/topo/measure.rs", "SMALL: usize = 8;"),
    (
        "design.md",
        "a few times in 100 ms",
        "tensorwire/src/interrupt.rs",
        "SLICE: Duration = Duration::from_millis(25)",
    ),
    (
        "python.md",
        "by `KeyboardInterrupt` within 100 ms",
        "tensorwire/src/interrupt.rs",
        "SLICE: Duration = Duration::from_millis(25)",
    ),
];

#[test]
fn docs_say_what_the_code_decides() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let docs = crates.parent().unwrap().join("docs");
    // Lines may break anywhere.
    let read = |path: &Path| {
        let text =
            std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let mut wrong = Vec::new();
    for (page, says, file, decides) in ALL {
        if !read(&docs.join(page)).contains(says) {
            wrong.push(format!("docs/{page} does not say {says:?} ({file}: {decides})"));
        }
        if !read(&crates.join(file)).contains(decides) {
            wrong.push(format!("crates/{file} does not have {decides:?} (docs/{page}: {says})"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
