//! A server whose process has no file descriptors left. It changes the limit of the whole process, so it is alone here.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but not in what tests call

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use tensorwire::store::wire::{self, Frame};
use tensorwire::store::{Limits, TcpServer};

#[test]
fn serves_those_who_are_in_and_takes_the_others_later() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut clients: VecDeque<TcpStream> = (0..20).map(|_| connect()).collect();
    let next = File::open("/dev/null").unwrap().as_raw_fd();
    let mut limit = getrlimit(Resource::Nofile);
    // Two for the server itself, eight for clients.
    limit.current = Some(next as u64 + 10);
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut limits = Limits::default();
    limits.connections = 100;
    let _server = TcpServer::adopt(listener, limits).unwrap();
    clients.iter().take(8).for_each(ping);
    // One after the other leaves, and with it two descriptors: its end and the server's.
    while let Some(client) = clients.pop_front() {
        ping(&client);
    }
}

fn ping(mut client: &TcpStream) {
    let mut bytes = Vec::new();
    wire::encode(&Frame::Validate(wire::MAGIC), &mut bytes);
    wire::encode(&Frame::Ping(5), &mut bytes);
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.write_all(&bytes).unwrap();
    let mut echo = [0; 4];
    client.read_exact(&mut echo).unwrap();
    assert_eq!(u32::from_le_bytes(echo), 5);
}
