//! Messages between hosts when things go wrong. Hosts are labels over loopback, and network namespaces where these are
//! permitted. Whatever happens: the right bytes, or an error that names a rank and its host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[path = "ranks/fork.rs"]
mod forks;
mod messages;
mod net;
mod ranks;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forks::{code_of, fork};
use messages::{bytes_of, empty, fill, like_the_model, tensor};
use net::flow::{blames, flow, flow_if_formed, hurt};
use net::namespaces::{Family, Hosts, label};
use net::ports::listening;
use net::proxy::{Forward, Proxy, Way};
use ranks::random::Random;
use ranks::{LONG, Placement, Process, Rank, Ranks, await_parent, describe, on_threads, outcome, say};
use rustix::process::{Signal, getpid, kill_process};
use tensorwire::interrupt::with_interrupt;
use tensorwire::store::{Reply, Request, Store};
use tensorwire::{Deadline, Dtype, Error, Group, Tensor, Work};

const MIB: usize = 1 << 20;
/// More than all buffers on its way hold.
const HUGE: usize = 64 * MIB;

fn within(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

/// Waits until a message has begun to come into a tensor of zeros, or its receive is over. The message begins with something
/// else.
fn await_begin(work: &Work, into: &Tensor) {
    let end = Instant::now() + LONG;
    let mut head = [0; 8];
    loop {
        let over = work.is_over();
        into.span().read(0, &mut head).unwrap();
        if over || head != [0; 8] {
            return;
        }
        assert!(Instant::now() < end, "no byte has come");
        std::thread::yield_now();
    }
}

/// "rank 1 (host a, pid 7)".
fn name_of(group: &Group, rank: usize) -> String {
    let member = &group.members()[rank];
    format!("rank {rank} (host {}, pid {})", member.host, member.pid)
}

// On labels: on one host, apart and in pairs

/// Receives that are withdrawn in the middle of a large message: nothing is lost, and what lies behind it passes.
fn withdrawn(group: &Group) {
    const WAYS: u64 = 4;
    if group.rank() == 0 {
        for way in 0..WAYS {
            let first = empty(group, HUGE);
            group.barrier().wait().unwrap();
            // Whether somebody was told that it came.
            let told = match way {
                0 => {
                    let work = group.recv(&first, 1).tag(way).start().unwrap();
                    await_begin(&work, &first);
                    drop(work);
                    false
                }
                1 => {
                    let any = group.recv_any(&first).tag(way).start().unwrap();
                    await_begin(any.work(), &first);
                    !any.work().withdraw()
                }
                2 => {
                    let error = group.recv(&first, 1).tag(way).deadline(within(5)).wait().err();
                    let named = |error: &Error| error.to_string().contains(&name_of(group, 1));
                    assert!(error.iter().all(|error| error.is_timeout() && named(error)), "{error:?}");
                    error.is_none()
                }
                _ => {
                    let enough = Rc::new(|| Err(Error::Interrupted("enough".into())));
                    let error = with_interrupt(enough, || group.recv(&first, 1).tag(way).wait()).err();
                    assert!(error.iter().all(|error| matches!(error, Error::Interrupted(_))), "{error:?}");
                    error.is_none()
                }
            };
            assert!(!told || way > 1);
            let seen = bytes_of(&first);
            let small = empty(group, 8);
            group.recv(&small, 1).tag(100 + way).wait().unwrap();
            assert_eq!(bytes_of(&small), fill(8, 100 + way));
            if told {
                assert!(seen == fill(HUGE, way), "way {way}");
            } else {
                let into = empty(group, HUGE);
                assert_eq!(group.recv_any(&into).tag(way).wait().unwrap(), 1);
                assert!(bytes_of(&into) == fill(HUGE, way), "way {way}");
            }
            assert!(bytes_of(&first) == seen, "way {way}: its tensor is the caller's again");
            let error = group.recv(&small, 1).tag(way).deadline(within(1)).wait().unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains(&name_of(group, 1)), "{error}");
        }
    } else {
        for way in 0..WAYS {
            let large = tensor(group, &fill(HUGE, way), Dtype::U8);
            let small = tensor(group, &fill(8, 100 + way), Dtype::U8);
            let works = [(&large, way), (&small, 100 + way)]
                .map(|(tensor, tag)| group.send(tensor, 0).tag(tag).start().unwrap());
            group.barrier().wait().unwrap();
            works.iter().for_each(|work| work.wait().unwrap());
        }
    }
    group.barrier().wait().unwrap();
}

on_hosts!(withdrawn_half_way, 2, withdrawn);

/// Many tags, received in other orders than they were sent in: first what all fits beside each other, then what does not.
fn many_tags(group: &Group) {
    let (me, world) = (group.rank(), group.world());
    for (round, (count, len)) in [(200u64, 3000), (30, 300_000)].into_iter().enumerate() {
        let key = |from: usize, to: usize, tag: u64| tag << 16 | (from << 8 | to << 4 | round) as u64;
        let others = || (0..world).filter(|&other| other != me);
        let sent: Vec<Work> = (0..count)
            .flat_map(|tag| others().map(move |to| (tag, to)))
            .map(|(tag, to)| {
                let own = tensor(group, &fill(len, key(me, to, tag)), Dtype::U8);
                group.send(&own, to).tag(tag).start().unwrap()
            })
            .collect();
        let mut wanted: Vec<_> = (0..count).flat_map(|tag| others().map(move |from| (tag, from))).collect();
        Random(me as u64).shuffle(&mut wanted);
        // The last first, and the rest at once.
        let (waited, started) = wanted.split_at(wanted.len() / 2);
        let into = empty(group, len);
        for &(tag, from) in waited {
            group.recv(&into, from).tag(tag).wait().unwrap();
            assert!(bytes_of(&into) == fill(len, key(from, me, tag)), "tag {tag} from {from}");
        }
        let works: Vec<_> = started
            .iter()
            .map(|&(tag, from)| {
                let into = empty(group, len);
                (group.recv(&into, from).tag(tag).start().unwrap(), into, tag, from)
            })
            .collect();
        for (work, into, tag, from) in works {
            work.wait().unwrap();
            assert!(bytes_of(&into) == fill(len, key(from, me, tag)), "tag {tag} from {from}");
        }
        sent.iter().for_each(|work| work.wait().unwrap());
    }
    group.barrier().wait().unwrap();
}

on_hosts!(many_tags_out_of_order, 3, many_tags);

/// Every rank sends a large message to every other before it receives any.
fn all_send_first(group: &Group) {
    let (me, world, len) = (group.rank(), group.world(), 6 * MIB);
    let key = |from: usize, to: usize| (1 + from) as u64 * 100 + to as u64;
    let own: Vec<Tensor> = (0..world).map(|to| tensor(group, &fill(len, key(me, to)), Dtype::U8)).collect();
    for started in [true, false] {
        let into: Vec<Tensor> = (0..world).map(|_| empty(group, len)).collect();
        let others = || (0..world).filter(|&other| other != me);
        let receive = || others().for_each(|from| group.recv(&into[from], from).wait().unwrap());
        if started {
            let sent: Vec<Work> = others().map(|to| group.send(&own[to], to).start().unwrap()).collect();
            receive();
            sent.iter().for_each(|work| work.wait().unwrap());
        } else {
            std::thread::scope(|scope| {
                others().for_each(|to| {
                    let own = &own[to];
                    scope.spawn(move || group.send(own, to).wait().unwrap());
                });
                receive();
            });
        }
        others().for_each(|from| assert!(bytes_of(&into[from]) == fill(len, key(from, me))));
    }
    group.barrier().wait().unwrap();
}

on_hosts!(everyone_sends_first, 4, all_send_first);

/// Several groups of the same ranks, used at once by threads: 1000 random messages against the model, with the same tags in all
/// groups.
fn groups_at_once(group: &Group) {
    let me = group.rank();
    let same = group.split(Some(1), 0).unwrap().unwrap();
    let reversed = group.split(Some(1), -(me as i64)).unwrap().unwrap();
    let across = group.split(Some((me % 2) as u64), 0).unwrap().unwrap();
    assert_eq!((reversed.rank(), across.rank()), (group.world() - 1 - me, me / 2));
    let groups = [group, &same, &reversed, &across];
    // 40 messages each, and others in each group: one that came in a wrong group would be seen.
    let seeds = [0..7, 7..13, 13..19, 19..25];
    on_threads(groups.len(), |index| like_the_model(groups[index], seeds[index].clone()));
    // The groups go one after the other, and those that stay go on.
    for index in [1, 3, 2] {
        let into = empty(group, MIB);
        groups[index].clone().close().unwrap();
        let other = (me + 1) % group.world();
        let sent = group.send(&tensor(group, &fill(MIB, me as u64), Dtype::U8), other).start().unwrap();
        let from = (me + group.world() - 1) % group.world();
        group.recv(&into, from).wait().unwrap();
        sent.wait().unwrap();
        assert!(bytes_of(&into) == fill(MIB, from as u64));
        let error = outcome(&groups[index].send(&into, 0).wait());
        assert!(error.contains("the group was closed on this rank"), "{error}");
    }
    group.barrier().wait().unwrap();
}

on_hosts!(several_groups, 4, groups_at_once);

/// Who closes a group with messages pending is named to all who wait for it, wherever they are. What it sent before comes.
fn one_leaves(group: &Group) {
    let small = empty(group, 4);
    let leaver = 1;
    if group.rank() == leaver {
        for to in [0, 2] {
            group.send(&tensor(group, &[7; 4], Dtype::U8), to).tag(1).wait().unwrap();
            group.recv(&small, to).tag(2).wait().unwrap();
        }
        // From itself, so that it does not take what others send.
        let pending = group.recv(&empty(group, HUGE), leaver).tag(9).start().unwrap();
        let offered = group.send(&empty(group, HUGE), 2).tag(9).start().unwrap();
        group.clone().close().unwrap();
        for ended in [pending.wait(), offered.wait()] {
            assert!(outcome(&ended).contains("given up: its group is being closed"), "{ended:?}");
        }
        return;
    }
    let (large, into) = (empty(group, HUGE), empty(group, 4));
    let wanted = group.recv(&into, leaver).tag(4).start().unwrap();
    group.send(&small, leaver).tag(2).wait().unwrap();
    let offered = group.send(&large, leaver).tag(3).start();
    let waited = group.recv(&empty(group, 4), leaver).tag(5).wait();
    for ended in [offered.and_then(|work| work.wait()), wanted.wait(), waited] {
        let text = outcome(&ended);
        assert!(text.starts_with(&format!("Left 1 | {} left", name_of(group, leaver))), "{text}");
    }
    group.recv(&into, leaver).tag(1).wait().unwrap();
    assert_eq!(bytes_of(&into), [7; 4]);
    // The two that stay go on.
    let other = 2 - group.rank();
    let sent = group.send(&large, other).tag(6).start().unwrap();
    group.recv(&empty(group, HUGE), other).tag(6).wait().unwrap();
    sent.wait().unwrap();
}

on_hosts!(closed_with_messages_pending, 3, one_leaves);

/// A send that times out in the middle of a message to a rank that is stopped. The receiver, which has a part, never sees
/// it; the receive gets the next message, whole, and messages go in both directions.
fn times_out_half_way(test: &str, hosts: Placement) {
    // The rank must be stopped before it has all of it.
    const LEN: usize = 4 * HUGE;
    let message = |number: u64| fill(LEN, number);
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let other = 1 - rank.rank;
        let large = tensor(&group, &message(1), Dtype::U8);
        let (small, into) = (tensor(&group, &[5; 8], Dtype::U8), empty(&group, 8));
        if rank.rank == 0 {
            group.barrier().wait().unwrap();
            let end = group.send(&large, 1).tag(1).deadline(within(3000)).wait();
            // From here on the memory is the caller's.
            large.span().write(0, &vec![0xdd; LEN]).unwrap();
            say(&outcome(&end));
            await_parent();
            group.send(&small, 1).tag(2).wait().unwrap();
            group.send(&tensor(&group, &message(2), Dtype::U8), 1).tag(1).wait().unwrap();
            group.recv(&large, 1).tag(1).wait().unwrap();
            assert!(bytes_of(&large) == message(3));
            // And again, with a large one each way at once.
            let sent = group.send(&tensor(&group, &message(4), Dtype::U8), 1).tag(3).start().unwrap();
            group.recv(&large, 1).tag(3).wait().unwrap();
            sent.wait().unwrap();
            assert!(bytes_of(&large) == message(5));
        } else {
            large.span().write(0, &vec![0; LEN]).unwrap();
            let work = group.recv(&large, 0).tag(1).start().unwrap();
            group.barrier().wait().unwrap();
            await_begin(&work, &large);
            kill_process(getpid(), Signal::STOP).unwrap();
            say("goes on");
            group.recv(&into, 0).tag(2).wait().unwrap();
            assert_eq!(bytes_of(&into), [5; 8]);
            work.wait().unwrap();
            assert!(bytes_of(&large) == message(2));
            group.send(&tensor(&group, &message(3), Dtype::U8), 0).tag(1).wait().unwrap();
            let sent = group.send(&tensor(&group, &message(5), Dtype::U8), 0).tag(3).start().unwrap();
            group.recv(&large, 0).tag(3).wait().unwrap();
            sent.wait().unwrap();
            assert!(bytes_of(&large) == message(4));
        }
        for tag in 1..4 {
            let error = group.recv(&into, other).tag(tag).deadline(within(1)).wait().unwrap_err();
            assert!(error.is_timeout() && error.to_string().contains(&name_of(&group, other)), "{error}");
        }
        group.barrier().wait().unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with(test, 2, |rank, command| hosts.command(rank, command));
    let heard = ranks[0].hear();
    assert!(heard.starts_with("TimedOut | ") && heard.contains("send to rank 1 with tag 1"), "{heard}");
    assert!(
        heard.contains("rank 1 (host ") && heard.contains(&format!("pid {})", ranks[1].pid())),
        "{heard}"
    );
    assert!(!heard.contains("no longer possible"), "{heard}");
    await_stop(&ranks[1]);
    ranks[1].signal(Signal::CONT);
    assert_eq!(ranks[1].hear(), "goes on");
    ranks.into_iter().for_each(Process::expect_success);
}

in_places!(a_send_that_times_out_half_way, times_out_half_way, together Together, apart Apart);

fn await_stop(rank: &Process) {
    let (stat, end) = (format!("/proc/{}/stat", rank.pid()), Instant::now() + LONG);
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        assert!(Instant::now() < end, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// As processes, on labels and in namespaces

/// Where the ranks of a test are.
enum Stage {
    Labels,
    Namespaces(Hosts),
}

impl Stage {
    fn command(&self, host: usize, command: Command, heartbeat: &str) -> Command {
        let mut command = match self {
            Self::Labels => command,
            Self::Namespaces(hosts) => hosts.command(host, &command),
        };
        command.env("TENSORWIRE_HOST", label(host)).env("TENSORWIRE_HEARTBEAT", heartbeat);
        command
    }

    /// Starts ranks, each on the host of this number.
    fn start(&self, test: &str, hosts: &[usize], heartbeat: &str) -> Ranks {
        Ranks::start_with(test, hosts.len(), |rank, command| self.command(hosts[rank], command, heartbeat))
    }
}

/// Both ranks of a host are stopped while large messages go between them and the ranks of another host; then they are killed,
/// or stay so.
fn lost_host(test: &str, stage: &Stage, killed: bool) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let large = empty(&group, HUGE);
        let own = tensor(&group, &fill(HUGE, 1), Dtype::U8);
        match rank.rank {
            0 | 1 => {
                let works = match rank.rank {
                    0 => [group.send(&own, 2).start().unwrap(), group.recv(&large, 3).start().unwrap()],
                    _ => [group.recv(&large, 2).start().unwrap(), group.send(&own, 3).start().unwrap()],
                };
                say("waits");
                works.iter().for_each(|work| say(&outcome(&work.wait())));
                say(&outcome(&group.recv_any(&empty(&group, 8)).tag(5).wait()));
                say(&outcome(&group.send(&large, 2).wait()));
                say(&outcome(&group.barrier().wait()));
                await_parent();
            }
            2 => {
                // Behind the receive nothing is called that waits for the thread in the background, which may have all by then.
                let _sent = group.send(&own, 1).start().unwrap();
                let work = group.recv(&large, 0).start().unwrap();
                await_begin(&work, &large);
                kill_process(getpid(), Signal::STOP).unwrap();
                await_parent();
            }
            _ => {
                say("stays out");
                await_parent();
            }
        }
        return;
    }
    // Beats are not what tells of a death.
    let hosts = [0, 0, 1, 1];
    let Ranks { mut ranks, server: _server } = stage.start(test, &hosts, if killed { "100" } else { "3" });
    for rank in [0, 1] {
        assert_eq!(ranks[rank].hear(), "waits");
    }
    assert_eq!(ranks[3].hear(), "stays out");
    ranks[3].signal(Signal::STOP);
    await_stop(&ranks[2]);
    let lost = [2, 3].map(|rank| (rank, 1, ranks[rank].pid()));
    if killed {
        ranks[2..].iter_mut().for_each(Process::kill);
    }
    for (rank, process) in ranks[..2].iter_mut().enumerate() {
        for index in 0..5 {
            let heard = process.hear();
            // What rank 2 sends may have come whole before it stopped.
            if heard == "ok" && (rank, index) == (1, 0) {
                continue;
            }
            assert!(heard.starts_with("Died "), "{heard}");
            blames(&heard, &lost);
        }
    }
    ranks.truncate(2);
    ranks.into_iter().for_each(Process::expect_success);
}

#[test]
fn a_killed_host() {
    lost_host("a_killed_host", &Stage::Labels, true);
}

#[test]
fn a_stopped_host() {
    lost_host("a_stopped_host", &Stage::Labels, false);
}

#[test]
fn a_killed_host_on_a_network() {
    let test = "a_killed_host_on_a_network";
    on_a_network(2, Family::V4, |stage| lost_host(test, stage, true));
}

#[test]
fn a_stopped_host_on_a_network() {
    let test = "a_stopped_host_on_a_network";
    on_a_network(2, Family::V4, |stage| lost_host(test, stage, false));
}

/// Makes hosts, unless this is a rank on one.
fn on_a_network(count: usize, family: Family, body: impl FnOnce(&Stage)) {
    if Rank::of_this_process().is_some() {
        return body(&Stage::Labels);
    }
    if let Some(hosts) = Hosts::new(count, family) {
        body(&Stage::Namespaces(hosts));
    }
}

/// Two ranks on two hosts whose messages flow while the parent does something. Wants them to end well.
fn flows_through(test: &str, stage: &Stage, heartbeat: &str, act: impl FnOnce(&mut [Process])) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        flow(&group);
        // Both have all before one leaves: a farewell may not come over a cable that was down.
        group.store().set(&format!("over {}", rank.rank), b"").unwrap();
        group.store().get(&format!("over {}", 1 - rank.rank)).unwrap();
        return;
    }
    let Ranks { mut ranks, server: _server } = stage.start(test, &[0, 1], heartbeat);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "flows");
    }
    act(&mut ranks);
    ranks.iter_mut().for_each(Process::let_go);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ok");
    }
    ranks.into_iter().for_each(Process::expect_success);
}

/// Two ranks on two hosts whose messages flow until the parent does something. Wants each to blame the other.
fn flows_until(test: &str, stage: &Stage, heartbeat: &str, act: impl FnOnce(&mut [Process])) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        flow(&group);
        say(&outcome(&group.recv(&empty(&group, 8), 1 - rank.rank).tag(7).wait()));
        await_parent();
        return;
    }
    let Ranks { mut ranks, server: _server } = stage.start(test, &[0, 1], heartbeat);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "flows");
    }
    act(&mut ranks);
    let pids = [ranks[0].pid(), ranks[1].pid()];
    for (me, other) in [(0, 1), (1, 0)] {
        for _ in 0..2 {
            blames(&ranks[me].hear(), &[(other, other, pids[other])]);
        }
    }
    ranks.into_iter().for_each(Process::expect_success);
}

#[test]
fn a_rank_that_is_stopped_for_a_while() {
    flows_through("a_rank_that_is_stopped_for_a_while", &Stage::Labels, "8", |ranks| {
        ranks[1].signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(2));
        ranks[1].signal(Signal::CONT);
    });
}

#[test]
fn a_cable_that_is_down_for_a_while() {
    on_a_network(2, Family::V4, |stage| {
        flows_through("a_cable_that_is_down_for_a_while", stage, "15", |_| {
            // TCP tries again after 0.2, 0.6, 1.4, 3.0 and 6.2 s: half the heartbeat at most, and time to be heard.
            let Stage::Namespaces(hosts) = stage else { return };
            hosts.unplug(1);
            std::thread::sleep(Duration::from_millis(2500));
            hosts.plug_in(1);
        });
    });
}

#[test]
fn a_cable_that_is_down_for_long() {
    on_a_network(2, Family::V4, |stage| {
        flows_until("a_cable_that_is_down_for_long", stage, "2", |_| {
            let Stage::Namespaces(hosts) = stage else { return };
            hosts.unplug(1);
        });
    });
}

/// Hosts that have addresses of IPv6 only.
#[test]
fn ipv6_alone() {
    on_a_network(3, Family::V6, |stage| {
        if let Some(rank) = Rank::of_this_process() {
            let group = rank.group();
            like_the_model(&group, 0..2);
            group.barrier().wait().unwrap();
            return;
        }
        let all = stage.start("ipv6_alone", &[0, 1, 2, 2], "30");
        all.ranks.into_iter().for_each(Process::expect_success);
    });
}

/// The same with IPv4.
#[test]
fn ipv4_alone() {
    on_a_network(3, Family::V4, |stage| {
        if let Some(rank) = Rank::of_this_process() {
            let group = rank.group();
            like_the_model(&group, 0..2);
            group.barrier().wait().unwrap();
            return;
        }
        let all = stage.start("ipv4_alone", &[0, 1, 2, 2], "30");
        all.ranks.into_iter().for_each(Process::expect_success);
    });
}

// Through a proxy

#[test]
fn a_slow_network() {
    through_proxy("a_slow_network", "30", |proxy| {
        proxy.delay(Duration::from_millis(5));
        let passed = proxy.passed(Way::There) + proxy.passed(Way::Back);
        proxy.await_passed(passed + 4 * MIB as u64);
    });
}

#[test]
fn a_network_that_stalls_for_a_while() {
    through_proxy("a_network_that_stalls_for_a_while", "8", |proxy| {
        proxy.stall();
        std::thread::sleep(Duration::from_secs(2));
        proxy.go_on();
    });
}

/// Starts two ranks that talk through a proxy, does something to it, and wants the ranks to end well.
fn through_proxy(test: &str, heartbeat: &str, act: impl FnOnce(&Proxy)) {
    if Rank::of_this_process().is_some() {
        return flows_through(test, &Stage::Labels, heartbeat, |_| {});
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let proxy = hosts.proxy();
    flows_through(test, &Stage::Namespaces(hosts), heartbeat, |_| {
        assert!(proxy.passed(Way::There) > 0, "nothing goes through the proxy");
        act(&proxy);
    });
}

#[test]
fn a_network_that_stalls() {
    let test = "a_network_that_stalls";
    if Rank::of_this_process().is_some() {
        return flows_until(test, &Stage::Labels, "2", |_| {});
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let proxy = hosts.proxy();
    flows_until(test, &Stage::Namespaces(hosts), "2", |_| proxy.stall());
}

#[test]
fn a_connection_that_is_cut() {
    if let Some(rank) = Rank::of_this_process() {
        return flow_if_formed(&rank);
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let cases = [
        (Way::There, 1),
        (Way::Back, 30),
        (Way::There, 2000),
        // A connection carries messages one way. Back come only the answers of its beginning, and beats.
        (Way::Back, 150),
        (Way::There, 1_000_001),
        (Way::There, 12_345_678),
    ];
    hurt("a_connection_that_is_cut", &mut hosts, &cases, None, Proxy::cut_at);
}

#[test]
fn a_byte_that_is_flipped() {
    if let Some(rank) = Rank::of_this_process() {
        return flow_if_formed(&rank);
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let cases =
        [(Way::There, 3), (Way::Back, 20), (Way::There, 400), (Way::Back, 150), (Way::There, 5_000_000)];
    hurt("a_byte_that_is_flipped", &mut hosts, &cases, None, Proxy::flip_at);
}

// The tools themselves

#[test]
fn the_proxy_does_what_it_says() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (at, to) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
    let proxy = Proxy::start(vec![Forward { listener, to }]);
    std::thread::spawn(move || {
        for socket in server.incoming().map_while(Result::ok) {
            std::thread::spawn(move || std::io::copy(&mut &socket, &mut &socket));
        }
    });
    let call = || {
        let socket = TcpStream::connect(at).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket
    };
    let echo = |socket: &mut TcpStream, bytes: &[u8]| {
        socket.write_all(bytes).unwrap();
        let mut got = vec![0; bytes.len()];
        socket.read_exact(&mut got).map(|()| got)
    };
    let mut socket = call();
    proxy.delay(Duration::from_millis(1));
    assert_eq!(echo(&mut socket, &[1; 1000]).unwrap(), [1; 1000]);
    proxy.await_passed(2000);
    proxy.flip_at(Way::There, 1005);
    proxy.flip_at(Way::Back, 1007);
    assert_eq!(echo(&mut socket, &[2; 10]).unwrap(), [2, 2, 2, 2, 2, 0x12, 2, 0x12, 2, 2]);
    // Nothing comes while it stalls, and all of it afterwards.
    proxy.stall();
    socket.write_all(&[3; 10]).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(socket.read(&mut [0; 10]).is_err());
    socket.set_read_timeout(Some(LONG)).unwrap();
    proxy.go_on();
    let mut got = [0; 10];
    socket.read_exact(&mut got).unwrap();
    assert_eq!((got, proxy.passed(Way::Back)), ([3; 10], 1020));
    // What is before the cut comes.
    proxy.cut_at(Way::Back, 1025);
    socket.write_all(&[4; 10]).unwrap();
    let mut got = Vec::new();
    let _ = socket.read_to_end(&mut got);
    assert_eq!(got, [4; 5]);
    assert_eq!(echo(&mut call(), &[5; 10]).unwrap(), [5; 10]);
}

#[test]
fn ports_are_found() {
    let own = || listening(std::process::id());
    for (at, reached) in [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "::1")] {
        let Ok(listener) = TcpListener::bind(at) else {
            ranks::skip(&format!("{at} cannot be listened at"));
            continue;
        };
        let wanted = SocketAddr::new(reached.parse().unwrap(), listener.local_addr().unwrap().port());
        assert!(own().contains(&wanted), "{wanted} is not in {:?}", own());
        assert_eq!(attack(wanted).len(), attacks().len());
        drop(listener);
        assert!(!own().contains(&wanted));
    }
}

/// Ranks on hosts that are namespaces meet, through a proxy; a cable that is out is seen; and all of it goes.
#[test]
fn namespaces_are_hosts() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        assert_eq!(group.hosts(), [vec![0, 1], vec![2]]);
        group.barrier().wait().unwrap();
        say("met");
        let end = loop {
            if let Err(error) = group.barrier().wait() {
                break error;
            }
        };
        say(&describe(&end));
        return await_parent();
    }
    let Some(mut hosts) = Hosts::new(2, Family::V6) else { return };
    let folder = hosts.folder().to_owned();
    let proxy = hosts.proxy();
    let stage = Stage::Namespaces(hosts);
    let Ranks { mut ranks, server: _server } = stage.start("namespaces_are_hosts", &[0, 0, 1], "2");
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "met");
    }
    assert!(proxy.passed(Way::There) > 0 && proxy.passed(Way::Back) > 0);
    let Stage::Namespaces(hosts) = &stage else { return };
    hosts.unplug(1);
    let pids: Vec<u32> = ranks.iter().map(Process::pid).collect();
    for (me, others) in [(0, vec![(2, 1, pids[2])]), (1, vec![(2, 1, pids[2])]), (2, vec![(0, 0, pids[0])])] {
        blames(&ranks[me].hear(), &others);
    }
    ranks.into_iter().for_each(Process::expect_success);
    drop((proxy, stage));
    assert!(!folder.exists());
    let own = format!("{}-", folder.file_name().unwrap().to_str().unwrap());
    let left = std::fs::read_dir("/run/netns").unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.into_iter().any(|name| name.to_str().is_some_and(|name| name.starts_with(&own))));
}

// Strangers, forks, what is left

/// What a stranger may say to a port.
fn attacks() -> Vec<Vec<u8>> {
    let mut random = Random(1);
    let garbage: Vec<u8> = (0..60_000).map(|_| random.next() as u8).collect();
    vec![
        // A port scan.
        Vec::new(),
        vec![0],
        // Half a frame: lengths of two, four and eight bytes, and not all that they promise.
        [&64u16.to_le_bytes()[..], &[1; 10]].concat(),
        [&64u32.to_le_bytes()[..], &[1; 10]].concat(),
        [&64u64.to_le_bytes()[..], &[1; 10]].concat(),
        // Hostile lengths.
        vec![0xff; 8],
        vec![0xff; 200],
        [&u64::from(u32::MAX).to_le_bytes()[..], &[0; 64]].concat(),
        [&(1u64 << 62).to_be_bytes()[..], &[0; 64]].concat(),
        [&0u64.to_le_bytes()[..], &[0; 64]].concat(),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        garbage,
    ]
}

/// Says all of it to a port; gives the connections, which stay open.
fn attack(address: SocketAddr) -> Vec<TcpStream> {
    let connect = |bytes: Vec<u8>| {
        let mut socket = TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok()?;
        socket.set_write_timeout(Some(Duration::from_secs(1))).ok()?;
        // The port may hang up, or take no more.
        let _ = socket.write_all(&bytes);
        Some(socket)
    };
    attacks().into_iter().filter_map(connect).collect()
}

/// Peak of the memory that a process had at once, in KiB.
fn peak(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

/// A store that answers late. A rank that has it is late wherever it must ask, so that others listen for it for long.
#[derive(Debug)]
struct Late(Arc<dyn Store>);

impl Store for Late {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply, Error> {
        std::thread::sleep(Duration::from_millis(30));
        self.0.call(request, deadline)
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.0.set_timeout(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>, Error> {
        Ok(Arc::new(Self(self.0.clone_store()?)))
    }
}

/// Strangers at the ports of ranks, while these form their group and while they talk.
#[test]
fn strangers_at_the_ports() {
    let test = "strangers_at_the_ports";
    if let Some(mut rank) = Rank::of_this_process() {
        if rank.rank == 1 {
            rank.store = Arc::new(Late(rank.store));
        }
        return flow(&rank.group());
    }
    let Ranks { mut ranks, server: _server } = Stage::Labels.start(test, &[0, 1], "30");
    let pids = [ranks[0].pid(), ranks[1].pid()];
    let flows = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let forming = scope.spawn(|| {
            let (mut ports, end) = (Vec::new(), Instant::now() + LONG);
            let alive = || pids.iter().all(|pid| peak(*pid).is_some());
            while !flows.load(Ordering::SeqCst) && Instant::now() < end && alive() {
                for address in pids.into_iter().flat_map(listening) {
                    // What it opened is closed again, so that the scan goes on and on.
                    attack(address);
                    ports.push(address);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            ports
        });
        for rank in &mut ranks {
            assert_eq!(rank.hear(), "flows");
        }
        flows.store(true, Ordering::SeqCst);
        let mut ports = forming.join().unwrap();
        ports.sort_unstable();
        ports.dedup();
        println!("ports while the group formed: {ports:?}");
        assert!(!ports.is_empty(), "nothing was attacked");
    });
    let before = pids.map(|pid| peak(pid).unwrap());
    let ports: Vec<_> = pids.into_iter().flat_map(listening).collect();
    println!("ports afterwards: {ports:?}");
    let open: Vec<_> = (0..10).flat_map(|_| &ports).flat_map(|&address| attack(address)).collect();
    for (pid, before) in pids.into_iter().zip(before) {
        let after = peak(pid).unwrap();
        assert!(after < before + (128 << 10), "{before} KiB before, {after} KiB after");
    }
    // They still talk, with all of these connections open.
    ranks.iter_mut().for_each(Process::let_go);
    for rank in &mut ranks {
        assert_eq!(rank.hear(), "ok");
    }
    drop(open);
    ranks.into_iter().for_each(Process::expect_success);
}

/// A forked child cannot use the group or its connections and does not disturb them. A child that outlives its rank does not
/// make the rank look alive.
#[test]
fn a_forked_child() {
    let test = "a_forked_child";
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let other = 1 - rank.rank;
        let exchange = |number: u64| {
            let (own, into) = (tensor(&group, &fill(MIB, number), Dtype::U8), empty(&group, MIB));
            let sent = group.send(&own, other).start().unwrap();
            group.recv(&into, other).wait().unwrap();
            sent.wait().unwrap();
            assert!(bytes_of(&into) == fill(MIB, number));
        };
        exchange(1);
        let (pending, into) = (empty(&group, MIB), empty(&group, MIB));
        let work = group.recv(&pending, other).tag(2).start().unwrap();
        if rank.rank == 0 {
            let child = fork(|| {
                let calls = [
                    group.send(&into, 1).wait(),
                    group.recv(&into, 1).wait(),
                    group.recv_any(&into).wait().map(drop),
                    group.send(&into, 1).start().map(drop),
                    group.check(),
                ];
                let refused = |call: &Result<(), Error>| matches!(call, Err(error) if error.to_string().contains("parent process"));
                calls.iter().position(|call| !refused(call)).map_or(0, |index| 1 + index as i32)
            });
            assert_eq!(code_of(child), 0, "the number of a call that was not refused");
            // One that ends without a word, with all that it has a copy of.
            assert_eq!(code_of(fork(|| 0)), 0);
        }
        exchange(3);
        group.send(&tensor(&group, &fill(MIB, 4), Dtype::U8), other).tag(2).wait().unwrap();
        work.wait().unwrap();
        assert!(bytes_of(&pending) == fill(MIB, 4));
        if rank.rank == 0 {
            let worker = fork(|| {
                std::thread::sleep(Duration::from_secs(600));
                0
            });
            say(&worker.to_string());
            return await_parent();
        }
        say("waits");
        say(&outcome(&group.recv(&into, 0).tag(5).wait()));
        return;
    }
    let Ranks { mut ranks, server: _server } = Stage::Labels.start(test, &[0, 1], "100");
    let worker = rustix::process::Pid::from_raw(ranks[0].hear().parse().unwrap()).unwrap();
    assert_eq!(ranks[1].hear(), "waits");
    let pid = ranks[0].pid();
    ranks[0].kill();
    let heard = ranks[1].hear();
    assert!(kill_process(worker, Signal::KILL).is_ok(), "the worker was alive all the time");
    assert!(heard.starts_with("Died 0 | "), "{heard}");
    blames(&heard, &[(0, 0, pid)]);
    ranks.remove(1).expect_success();
}

/// Groups that are closed leave no descriptor and no thread, with messages pending or not.
fn leaves_nothing(test: &str, hosts: Placement) {
    if let Some(rank) = Rank::of_this_process() {
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        let round = |number: usize| {
            let builder = Group::builder().timeout(LONG).name(format!("round {number}"));
            let group = builder.from_store(rank.store.clone(), rank.rank, rank.world).unwrap();
            let part = group.split(Some((rank.rank % 2) as u64), 0).unwrap().unwrap();
            like_the_model(&group, 0..1);
            let other = (rank.rank + 1) % rank.world;
            let _sent = group.send(&empty(&group, 8 * MIB), other).tag(7777).start().unwrap();
            let _wanted = group.recv(&empty(&group, 8), other).tag(8888).start().unwrap();
            group.barrier().wait().unwrap();
            part.close().unwrap();
            drop(group);
        };
        round(0);
        let before = [count("fd"), count("task")];
        (1..6).for_each(round);
        let end = Instant::now() + LONG;
        let after = || [count("fd"), count("task")];
        while after().iter().zip(before).any(|(after, before)| *after > before) {
            assert!(Instant::now() < end, "descriptors and threads: {before:?} before, {:?} after", after());
            std::thread::sleep(Duration::from_millis(5));
        }
        return;
    }
    let ranks = Ranks::start_with(test, 4, |rank, command| hosts.command(rank, command));
    ranks.ranks.into_iter().for_each(Process::expect_success);
}

in_places!(nothing_is_left, leaves_nothing, together Together, apart Apart, pairs Pairs);

// What a reader found who looked for faults

/// A message that was sent comes, even if its receive is posted when its sender has long left.
fn receives_from_one_that_left(group: &Group) {
    if group.rank() == 1 {
        group.send(&tensor(group, &[7; 4], Dtype::U8), 0).wait().unwrap();
        group.clone().close().unwrap();
        group.store().set("left", b"").unwrap();
        return;
    }
    group.store().get("left").unwrap();
    // Heard of by way of the other host's leader.
    let error = outcome(&group.send(&empty(group, HUGE), 1).wait());
    assert!(error.starts_with("Left 1 | "), "{error}");
    let into = empty(group, 4);
    group.recv(&into, 1).wait().unwrap();
    assert_eq!(bytes_of(&into), [7; 4]);
    let error = outcome(&group.recv(&into, 1).wait());
    assert!(error.starts_with("Left 1 | "), "{error}");
}

on_hosts!(a_message_of_one_that_left, 2, receives_from_one_that_left);

/// Receives that are posted while another one is listened for are heard, too: started, and of several threads.
fn hears_all(group: &Group) {
    let (one, two) = (empty(group, 4), empty(group, 4));
    if group.rank() == 0 {
        // Both ways are there.
        for from in [1, 2] {
            group.recv(&one, from).wait().unwrap();
        }
        let first = group.recv(&one, 1).start().unwrap();
        // The thread in the background sleeps by now, most likely.
        std::thread::sleep(Duration::from_millis(200));
        let second = group.recv(&two, 2).start().unwrap();
        group.store().set("posted", b"").unwrap();
        second.wait().unwrap();
        group.store().set("second", b"").unwrap();
        first.wait().unwrap();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| group.recv(&one, 1).wait());
            std::thread::sleep(Duration::from_millis(200));
            let second = scope.spawn(|| {
                let end = group.recv(&two, 2).wait();
                group.store().set("fourth", b"").unwrap();
                end
            });
            std::thread::sleep(Duration::from_millis(200));
            group.store().set("waiting", b"").unwrap();
            second.join().unwrap().unwrap();
            first.join().unwrap().unwrap();
        });
        return;
    }
    group.send(&one, 0).wait().unwrap();
    // The first rank sends only when what the second one sent has come.
    let after = if group.rank() == 1 { ["second", "fourth"] } else { ["posted", "waiting"] };
    for key in after {
        group.store().get(key).unwrap();
        group.send(&one, 0).wait().unwrap();
    }
}

on_hosts!(all_are_heard, 3, hears_all);

/// Who aborts and closes at once is heard with the reason, not with the farewell.
fn aborts(group: &Group) {
    let last = group.world() - 1;
    if group.rank() == last {
        (0..last).for_each(|to| group.send(&empty(group, 4), to).wait().unwrap());
        group.barrier().wait().unwrap();
        // The others are out of it.
        (0..last).for_each(|from| group.recv(&empty(group, 4), from).tag(1).wait().unwrap());
        group.abort("the true reason");
        group.clone().close().unwrap();
        return;
    }
    group.recv(&empty(group, 4), last).wait().unwrap();
    group.barrier().wait().unwrap();
    group.send(&empty(group, 4), last).tag(1).wait().unwrap();
    let error = outcome(&group.recv(&empty(group, 4), last).wait());
    assert!(error.contains("the true reason"), "{error}");
}

on_hosts!(a_reason_comes_before_a_farewell, 4, aborts);
