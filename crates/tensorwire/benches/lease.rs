//! What a loan costs between two processes: granted, sent, redeemed (mapped already), released, and heard of.
//! One line of JSON for each figure. `cargo bench -p tensorwire --bench lease`
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorwire::device::fd::Connection;
use tensorwire::device::{Device, Queue};
use tensorwire::{Config, Context, Deadline, DeviceId, Span, Terms, Token};

/// Rounds of one figure.
const ROUNDS: usize = 3000;

/// The medium: a socket whose reader sleeps, or one whose reader looks again and again.
#[derive(Clone, Copy, PartialEq)]
enum Medium {
    Sleeps,
    Looks,
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn main() {
    let context = Context::new(Config::default()).unwrap();
    match process::role().as_deref() {
        Some("looks") => return holder(&context, Medium::Looks),
        Some(_) => return holder(&context, Medium::Sleeps),
        None => {}
    }
    let devices = context.all_devices();
    for (role, reader) in [("looks", "a reader that looks"), ("sleeps", "a reader that sleeps")] {
        for device in &devices {
            let on = if device.id() == DeviceId::Host { "the host" } else { "a GPU" };
            for (size, bytes) in [("4 KiB", 4096), ("1 GiB", 1 << 30)] {
                let Ok(span) = device.take(bytes).map(Span::whole) else { continue };
                let (each, first) = measure(&context, device, &span, role);
                let what = format!("{size} of {on}, {reader}");
                println!(
                    "{}",
                    serde_json::json!({ "what": what, "first_us": first, "round_trip_us": each, "rounds": ROUNDS })
                );
            }
        }
    }
}

/// The queue of a GPU; the host needs none.
fn queue(device: &dyn Device) -> Option<Box<dyn Queue>> {
    (device.id() != DeviceId::Host).then(|| device.queue().unwrap())
}

fn measure(context: &Context, device: &Arc<dyn Device>, span: &Span, role: &str) -> (f64, f64) {
    let home = process::Home::open();
    let mut child = process::Child::start(home.invite(&mut process::command(role)));
    let connection = home.answer().unwrap();
    // It opens its devices first.
    recv(&connection, Medium::Sleeps);
    let mut queue = queue(&**device);
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let lease = match &mut queue {
            Some(queue) => context.grant_after(span, &Terms::default(), &mut **queue).unwrap(),
            None => context.grant(span, &Terms::default()).unwrap(),
        };
        connection.send(&lease.token().to_bytes(), &[], soon()).unwrap();
        lease.wait(soon()).unwrap();
        times.push(begin.elapsed().as_secs_f64() * 1e6);
        drop(lease);
    }
    connection.send(b"over", &[], soon()).unwrap();
    child.succeed();
    let first = times[0];
    times.sort_by(f64::total_cmp);
    ((times[ROUNDS / 2] * 100.0).round() / 100.0, first.round())
}

fn recv(connection: &Connection, medium: Medium) -> Vec<u8> {
    if medium == Medium::Sleeps {
        return connection.recv(soon()).unwrap().0;
    }
    loop {
        if let Some((frame, _)) = connection.try_recv().unwrap() {
            return frame;
        }
    }
}

/// The other process.
fn holder(context: &Context, medium: Medium) {
    let home = process::call_home().unwrap();
    let mut queues: Vec<(DeviceId, Box<dyn Queue>)> =
        context.all_devices().iter().filter_map(|device| Some((device.id(), queue(&**device)?))).collect();
    home.send(b"ready", &[], soon()).unwrap();
    loop {
        let frame = recv(&home, medium);
        if frame == b"over" {
            return;
        }
        let token = Token::from_bytes(&frame).unwrap();
        match queues.iter_mut().find(|(id, _)| id == token.device()) {
            Some((_, queue)) => {
                let loan = context.redeem_on(&token, &mut **queue, soon()).unwrap();
                loan.release_after(&mut **queue).unwrap();
            }
            None => drop(context.redeem(&token, soon()).unwrap()),
        }
    }
}
