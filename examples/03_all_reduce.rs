//! Everybody gives numbers, everybody gets their sum.
#![allow(clippy::print_stdout)]

use tensorwire::{Group, ReduceOp};

fn main() -> tensorwire::Result<()> {
    // Rank, world and address come from the launcher: tensorwire run, torchrun, Slurm or MPI.
    let group = Group::from_env()?;
    // Memory of the group: the other ranks of this host reach it without a copy.
    let gradients = group.tensor(&vec![group.rank() as f32; 1 << 20])?;
    // In flight, while this thread does something else.
    let work = group.all_reduce(&gradients, ReduceOp::Sum).start()?;
    let settings = group.tensor(&[7, group.rank() as i64])?;
    work.wait()?;
    // A call that is waited for runs on this thread. A rank that dies is named in the error that all others get.
    group.broadcast(&settings, 0).wait()?;
    let (sum, settings) = (gradients.to_vec::<f32>()?[0], settings.to_vec::<i64>()?);
    println!("rank {} of {}: the sum is {sum}, the settings are {settings:?}", group.rank(), group.world());
    Ok(())
}
