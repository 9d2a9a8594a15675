//! Everybody gives numbers, everybody gets their sum; one operation is in flight while the next is prepared.
#![allow(clippy::print_stdout)]

use tensorwire::{Group, ReduceOp};

fn main() -> tensorwire::Result<()> {
    let group = Group::from_env()?;
    let (rank, world) = (group.rank(), group.world());

    // Memory of the group: the other ranks of this host reach it without a copy.
    let gradients = group.tensor(&vec![rank as f32; 1 << 20])?;
    let work = group.all_reduce(&gradients, ReduceOp::Sum).start()?;

    // The operation runs while this thread does something else.
    let settings = group.tensor(&[rank as i64 * 100, 7])?;
    work.wait()?;

    // A call that is waited for runs on this thread.
    group.broadcast(&settings, 0).wait()?;

    let sum: f32 = (0..world).map(|rank| rank as f32).sum();
    assert!(gradients.to_vec::<f32>()?.iter().all(|&value| value == sum));
    assert_eq!(settings.to_vec::<i64>()?, [0, 7]);
    println!("rank {rank} of {world}: the sum is {sum}");
    Ok(())
}
