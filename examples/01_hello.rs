//! Who is there? Run it with: cargo run --release -- run -n 3 -- cargo run --quiet --example 01_hello
use tensorwire::Group;

fn main() -> tensorwire::Result<()> {
    // Rank, world and address come from the launcher: tensorwire run, torchrun, Slurm or MPI.
    let group = Group::from_env()?;

    if group.rank() == 0 {
        for (rank, member) in group.members().iter().enumerate() {
            println!("rank {rank} is process {} on {}", member.pid, member.host);
        }
    }

    // Everybody waits for everybody. A rank that dies is named in the error that the others get.
    group.barrier()?;
    println!("rank {} of {} is done", group.rank(), group.world());
    Ok(())
}
