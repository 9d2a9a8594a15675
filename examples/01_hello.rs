//! Who is there, and is everybody ready?
#![allow(clippy::print_stdout)]

use tensorwire::Group;

fn main() -> tensorwire::Result<()> {
    // Rank, world and address come from the launcher: tensorwire run, torchrun, Slurm or MPI.
    let group = Group::from_env()?;
    if group.rank() == 0 {
        for member in group.members() {
            println!("rank {} is process {} on {}", member.rank, member.pid, member.host);
        }
    }

    // A rank that dies before it comes here is named in the error that all others get.
    group.barrier().wait()?;
    println!("rank {} of {}: everybody is here", group.rank(), group.world());
    Ok(())
}
