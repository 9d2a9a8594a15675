//! Where ranks of other hosts are reached, what is done when an address does not work, and when a process has no descriptor
//! for a connection. Hosts are network namespaces where these are permitted, and labels.
#![allow(clippy::unwrap_used, clippy::panic)]

#[allow(unreachable_pub)]
#[path = "lease_peer/limits.rs"]
mod limits;
mod messages;
mod net;
mod ranks;

use std::time::Duration;

use limits::{fill_descriptors_but, limit};
use messages::{bytes_of, empty, fill, tensor};
use net::flow::{blames, flow};
use net::namespaces::{Family, Hosts, label};
use ranks::{LONG, Placement, Process, Rank, Ranks, await_parent, describe, outcome, say};
use rustix::process::Resource;
use tensorwire::{Deadline, Dtype, Group};

/// Messages there and back between two ranks.
fn exchange(group: &Group) {
    let (me, other) = (group.rank(), 1 - group.rank());
    let (own, into) = (tensor(group, &fill(100_000, me as u64), Dtype::U8), empty(group, 100_000));
    let sent = group.send(&own, other).start().unwrap();
    group.recv(&into, other).wait().unwrap();
    sent.wait().unwrap();
    assert!(bytes_of(&into) == fill(100_000, other as u64));
}

/// An address that swallows packets stands before one that works. The messages come, and it is said which way they took, and why.
#[test]
fn an_address_that_swallows_packets() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        exchange(&group);
        say(&group.explain().replace('\n', " | "));
        await_parent();
        return;
    }
    let Some(hosts) = Hosts::new(1, Family::V4) else { return };
    let swallowing = hosts.swallowing(0);
    // Both are in one network, so that loopback works.
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("an_address_that_swallows_packets", 2, |rank, command| {
            let mut command = hosts.command(0, &command);
            command.env("TENSORWIRE_HOST", label(rank)).env("TENSORWIRE_ADDRESS", &swallowing);
            command
        });
    for rank in &mut ranks {
        let text = rank.hear();
        let (_, way) = text.split_once("messages by TCP to 127.0.0.1:").unwrap_or_else(|| panic!("{text}"));
        assert!(way.contains(&format!("(not by {swallowing}:")), "{text}");
    }
    ranks.iter_mut().for_each(Process::let_go);
    ranks.into_iter().for_each(Process::expect_success);
}

/// Nobody can connect to rank 1, which can connect to rank 0: messages that way come, and others are an error that says what was tried.
#[test]
fn a_port_that_is_blocked_one_way() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let (small, me) = (empty(&group, 8), group.rank());
        match me {
            1 => group.send(&small, 0).wait().unwrap(),
            _ => group.recv(&small, 1).wait().unwrap(),
        }
        if me == 0 {
            let by = Deadline::after(LONG);
            say(&describe(&group.send(&empty(&group, 64 << 20), 1).tag(1).deadline(by).wait().unwrap_err()));
        }
        await_parent();
        return;
    }
    let Some(hosts) = Hosts::new(2, Family::V4) else { return };
    let refusing = hosts.refusing();
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("a_port_that_is_blocked_one_way", 2, |rank, command| {
            let mut command = hosts.command(rank, &command);
            if rank == 1 {
                command.env("TENSORWIRE_ADDRESS", &refusing);
            }
            command
        });
    let (heard, pid) = (ranks[0].hear(), ranks[1].pid());
    blames(&heard, &[(1, 1, pid)]);
    assert!(heard.contains(&format!("it could not be reached ({refusing}:")), "{heard}");
    assert!(heard.contains("set TENSORWIRE_ADDRESS there"), "{heard}");
    ranks.iter_mut().for_each(Process::let_go);
    ranks.into_iter().for_each(Process::expect_success);
}

/// Nobody can connect to rank 0: no group is formed, and all ranks hear where they tried.
#[test]
fn a_hub_that_nobody_reaches() {
    if let Some(rank) = Rank::of_this_process() {
        say(&outcome(&rank.try_group(Duration::from_secs(5))));
        await_parent();
        return;
    }
    let Some(hosts) = Hosts::new(2, Family::V4) else { return };
    let refusing = hosts.refusing();
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("a_hub_that_nobody_reaches", 2, |rank, command| {
            let mut command = hosts.command(rank, &command);
            command.env("TENSORWIRE_ADDRESS", &refusing);
            command
        });
    let heard = ranks.iter_mut().map(Process::hear).collect::<Vec<_>>();
    assert!(heard.iter().all(|text| text.starts_with("TimedOut") || text.starts_with("Failed")), "{heard:?}");
    assert!(heard[1].contains(&refusing) && heard[1].contains("TENSORWIRE_ADDRESS"), "{heard:?}");
    ranks.iter_mut().for_each(Process::let_go);
    ranks.into_iter().for_each(Process::expect_success);
}

/// A cable that is down for longer than half the heartbeat, and shorter than all of it: all goes on, or each end blames the other.
#[test]
fn a_cable_that_is_down_for_most_of_the_heartbeat() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        flow(&group);
        // The other one may need to hear it over a cable that was down.
        await_parent();
        return;
    }
    let Some(hosts) = Hosts::new(2, Family::V4) else { return };
    let test = "a_cable_that_is_down_for_most_of_the_heartbeat";
    let Ranks { mut ranks, server: _server } = Ranks::start_with(test, 2, |rank, command| {
        let mut command = hosts.command(rank, &command);
        command.env("TENSORWIRE_HEARTBEAT", "4");
        command
    });
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "flows");
    }
    hosts.unplug(1);
    std::thread::sleep(Duration::from_secs(3));
    hosts.plug_in(1);
    ranks.iter_mut().for_each(Process::let_go);
    let pids = [ranks[0].pid(), ranks[1].pid()];
    for (me, other) in [(0, 1), (1, 0)] {
        let heard = ranks[me].hear();
        if heard != "ok" {
            blames(&heard, &[(other, other, pids[other])]);
        }
    }
    ranks.into_iter().for_each(Process::expect_success);
}

/// A process without a descriptor for a moment takes connections of other hosts a moment later. One that wants to make one says
/// whose fault it is.
#[test]
fn no_descriptor_for_a_connection() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let (small, other) = (empty(&group, 8), 1 - group.rank());
        if group.rank() == 1 {
            let files = fill_descriptors_but(0);
            let error = group.send(&small, 0).tag(1).deadline(Deadline::after(LONG)).wait().unwrap_err();
            limit(Resource::Nofile, None);
            assert!(error.to_string().contains("Too many open files"), "{error}");
            drop(files);
            // It can be sent later.
            group.send(&small, 0).tag(2).wait().unwrap();
            let files = fill_descriptors_but(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    limit(Resource::Nofile, None);
                    drop(files);
                });
                group.recv(&small, 0).tag(3).deadline(Deadline::after(LONG)).wait().unwrap();
            });
            group.store().set("over", b"").unwrap();
        } else {
            group.recv(&small, other).tag(2).wait().unwrap();
            group.send(&small, other).tag(3).wait().unwrap();
            group.store().get("over").unwrap();
        }
        return;
    }
    let hosts = |rank: usize, command| Placement::Apart.command(rank, command);
    Ranks::start_with("no_descriptor_for_a_connection", 2, hosts)
        .ranks
        .into_iter()
        .for_each(Process::expect_success);
}
