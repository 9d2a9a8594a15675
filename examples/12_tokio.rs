//! Works are futures: a task awaits a collective and a message beside other things, under tokio or any other runtime.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use tensorwire::{Group, ReduceOp};

fn main() -> tensorwire::Result<()> {
    let group = Group::from_env()?;
    // One thread is enough: while a work is awaited, the thread is free.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime,
        Err(error) => return Err(tensorwire::Error::io("starting tokio", error)),
    };
    runtime.block_on(step(&group))?;
    group.close()
}

async fn step(group: &Group) -> tensorwire::Result<()> {
    let gradients = group.tensor(&vec![1.0_f32; 1 << 20])?;
    let sum = group.all_reduce(&gradients, ReduceOp::Sum).start()?;
    // Each rank gives its number to the next one.
    let (next, last) =
        ((group.rank() + 1) % group.world(), (group.rank() + group.world() - 1) % group.world());
    let (own, number) = (group.tensor(&[group.rank() as i64])?, group.tensor(&[-1_i64])?);
    let sent = group.send(&own, next).start()?;
    let received = group.recv(&number, last).start()?;
    // A receive that is not awaited any more is withdrawn, and its message is not lost.
    let received = tokio::time::timeout(Duration::from_secs(30), received).await;
    let Ok(received) = received else {
        println!("rank {} has heard nothing", group.rank());
        return Ok(());
    };
    received?;
    let (sum, sent) = tokio::join!(sum, sent);
    sum?;
    sent?;
    let (sum, number) = (gradients.to_vec::<f32>()?[0], number.to_vec::<i64>()?[0]);
    println!("rank {}: the sum is {sum}, and rank {number} says hello", group.rank());
    Ok(())
}
