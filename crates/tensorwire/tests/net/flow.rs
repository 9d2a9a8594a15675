//! Two ranks whose messages flow, and what they say when something is done to them. A file that uses it also has
//! `mod messages`.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tensorwire::{Dtype, Group};

use super::namespaces::{Hosts, label};
use super::proxy::{Proxy, Way};
use crate::messages::{bytes_of, empty, fill, tensor};
use crate::ranks::{FILE, Process, Rank, Ranks, await_parent, describe, say};

const MIB: usize = 1 << 20;

/// Wants an outcome to blame one of these ranks by its name, its host and its pid.
pub fn blames(heard: &str, ranks: &[(usize, usize, u32)]) {
    let named = ranks
        .iter()
        .any(|&(rank, host, pid)| heard.contains(&format!("rank {rank} (host {}, pid {pid})", label(host))));
    assert!(named, "{heard} should name one of {ranks:?}");
}

/// Two ranks send each other messages at once until the parent says enough, and say how that ended.
pub fn flow(group: &Group) {
    let enough = Arc::new(AtomicBool::new(false));
    let told = enough.clone();
    std::thread::spawn(move || {
        await_parent();
        told.store(true, Ordering::SeqCst);
    });
    let (me, other) = (group.rank(), 1 - group.rank());
    for round in 0u64.. {
        let len = [8, 3000, 3 * MIB][round as usize % 3];
        let expected = |from: usize, first: u8| {
            let mut bytes = fill(len, round << 8 | from as u64);
            bytes[0] = first;
            bytes
        };
        // Rank 0 says in each message whether it is the last.
        let last = u8::from(me == 0 && enough.load(Ordering::SeqCst));
        let (own, into) = (tensor(group, &expected(me, last), Dtype::U8), empty(group, len));
        let exchanged = group.send(&own, other).start().and_then(|sent| {
            group.recv(&into, other).wait()?;
            sent.wait()
        });
        if let Err(error) = exchanged {
            return say(&describe(&error));
        }
        let got = bytes_of(&into);
        if got != expected(other, got[0]) {
            return say("wrong bytes");
        }
        if last == 1 || (me == 1 && got[0] == 1) {
            return say("ok");
        }
        if round == 5 {
            say("flows");
        }
    }
}

/// What two ranks say whose network cuts or flips at some byte, from the first on.
pub fn hurt(
    test: &str,
    hosts: &mut Hosts,
    cases: &[(Way, u64)],
    key: Option<&str>,
    hurt: fn(&Proxy, Way, u64),
) {
    for &(way, at) in cases {
        let proxy = hosts.proxy();
        hurt(&proxy, way, at);
        let start = |rank: usize, command: Command| {
            let mut command = hosts.command(rank, &command);
            // Each case has a store of its own.
            let store = command.get_envs().find(|(name, _)| *name == FILE).unwrap().1.unwrap();
            let store = format!("{}-{way:?}-{at}", store.to_string_lossy());
            command.env(FILE, store).env("TENSORWIRE_HEARTBEAT", "2");
            command.envs(key.map(|key| ("TENSORWIRE_KEY", key)));
            command
        };
        let Ranks { mut ranks, server: _server } = Ranks::start_with(test, 2, start);
        let pids = [ranks[0].pid(), ranks[1].pid()];
        for me in 0..2 {
            let other = 1 - me;
            loop {
                let heard = ranks[me].hear();
                match heard.as_str() {
                    "flows" => {
                        proxy.await_hurt();
                        ranks.iter_mut().for_each(Process::let_go);
                        continue;
                    }
                    "ok" => {}
                    // Only headers are checked, where nothing is sealed.
                    "wrong bytes" => assert!(test.contains("flip") && key.is_none()),
                    // Before the group is formed nobody has a pid yet.
                    _ if heard.starts_with("not formed: ") => {
                        let named = heard.contains(&format!("rank {other}")) || heard.contains("hosts");
                        assert!(named, "{heard}");
                    }
                    _ => blames(&heard, &[(other, other, pids[other])]),
                }
                println!("{test}, {way:?} {at}, rank {me}: {heard}");
                break;
            }
        }
        proxy.await_hurt();
        ranks.into_iter().for_each(Process::expect_success);
    }
}

pub fn flow_if_formed(rank: &Rank) {
    match rank.try_group(Duration::from_secs(6)) {
        Ok(group) => flow(&group),
        Err(error) => say(&format!("not formed: {}", describe(&error))),
    }
    // The group is closed: the other one need not wait for its deadline.
    await_parent();
}
