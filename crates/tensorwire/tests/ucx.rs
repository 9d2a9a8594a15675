//! Messages by UCX, beside those of tests/p2p.rs: who has it and who has not, jobs with a key, and the transports that run here.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod messages;
mod ranks;

use std::sync::Arc;
use std::time::Duration;

use messages::{bytes_of, empty, fill, tensor};
use ranks::{KEY, LONG, Placement, Process, Rank, Ranks, all_succeed, on_threads, outcome, say};
use tensorwire::config::{Key, LinkKind, Seal};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, Dtype, Group, Result};

/// Groups of two ranks that are threads, each on a host of its own, with these settings.
fn form(links: [LinkKind; 2], seal: Option<Seal>) -> Vec<Result<Group>> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(2, |rank| {
        let mut config = Config::default();
        config.host = Some(format!("host{rank}"));
        config.heartbeat = Duration::from_secs(30);
        config.link = links[rank];
        config.key = seal.map(|_| Key::new(KEY).unwrap());
        config.seal = seal.unwrap_or_default();
        let context = Context::new(config).unwrap();
        Group::builder().context(&context).timeout(LONG).from_store(store.clone(), rank, 2)
    })
}

/// Messages of several sizes, both ways at once.
fn talk(group: &Group) {
    let (me, other) = (group.rank() as u64, 1 - group.rank());
    for (tag, len) in (0..).zip([1, 4000, 100_000, 300_000, 20 << 20]) {
        let mine = tensor(group, &fill(len, tag << 8 | me), Dtype::U8);
        let into = empty(group, len);
        let sent = group.send(&mine, other).tag(tag).start().unwrap();
        group.recv(&into, other).tag(tag).wait().unwrap();
        sent.wait().unwrap();
        assert!(bytes_of(&into) == fill(len, tag << 8 | other as u64));
    }
}

fn there() -> bool {
    Placement::Ucx.is_there()
}

#[test]
fn a_job_with_a_key() {
    if !there() {
        return;
    }
    let groups: Vec<Group> =
        form([LinkKind::Ucx; 2], Some(Seal::Control)).into_iter().map(Result::unwrap).collect();
    on_threads(2, |rank| {
        talk(&groups[rank]);
        let text = groups[rank].explain();
        assert!(
            text.contains("; messages by UCX ") && text.contains(", not sealed (TENSORWIRE_SEAL=control)"),
            "{text}"
        );
        assert!(!text.contains("not by UCX:"), "{text}");
    });
    for end in form([LinkKind::Ucx; 2], Some(Seal::All)) {
        let error = end.map(drop).unwrap_err().to_string();
        assert!(error.contains("UCX does not seal what it carries"), "{error}");
    }
    // Nobody asked for UCX: it is not used, and that is said.
    let groups: Vec<Group> =
        form([LinkKind::Auto; 2], Some(Seal::All)).into_iter().map(Result::unwrap).collect();
    on_threads(2, |rank| {
        talk(&groups[rank]);
        let text = groups[rank].explain();
        assert!(text.contains("; messages by TCP to ") && text.contains(", sealed\n"), "{text}");
        assert!(text.contains("go by TCP and not by UCX: UCX does not seal what it carries"), "{text}");
    });
}

#[test]
fn without_an_rdma_device() {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        println!("skipped: there is an RDMA device here");
        return;
    }
    for (link, why) in
        [(LinkKind::Auto, "there is no RDMA device here"), (LinkKind::Tcp, "TENSORWIRE_LINK=tcp")]
    {
        let groups: Vec<Group> = form([link; 2], None).into_iter().map(Result::unwrap).collect();
        on_threads(2, |rank| {
            talk(&groups[rank]);
            let text = groups[rank].explain();
            assert!(text.contains(&format!("go by TCP and not by UCX: {why}\n")), "{text}");
        });
    }
}

/// Ranks with other settings hear of each other at the first message.
#[test]
fn another_setting() {
    if !there() {
        return;
    }
    let groups: Vec<Group> =
        form([LinkKind::Ucx, LinkKind::Tcp], None).into_iter().map(Result::unwrap).collect();
    on_threads(2, |rank| {
        let (group, other) = (&groups[rank], 1 - rank);
        let error = match rank {
            0 => group.send(&empty(group, 8), other).wait().unwrap_err(),
            _ => group
                .recv(&empty(group, 8), other)
                .deadline(tensorwire::Deadline::after(Duration::from_secs(2)))
                .wait()
                .unwrap_err(),
        };
        let text = error.to_string();
        assert!(text.contains(&format!("rank {other}")), "{text}");
        if rank == 0 {
            assert!(
                text.contains("(host host1, pid ") && text.contains("TENSORWIRE_LINK=ucx is set here"),
                "{text}"
            );
        }
    });
    let groups: Vec<Group> =
        form([LinkKind::Tcp, LinkKind::Ucx], None).into_iter().map(Result::unwrap).collect();
    on_threads(2, |rank| {
        let group = &groups[rank];
        if rank == 0 {
            // It may have gone before the other side says no.
            let _ = group.send(&empty(group, 8), 1).wait();
            return;
        }
        let error = group.recv(&empty(group, 8), 0).wait().unwrap_err().to_string();
        assert!(error.contains("rank 0 (host host0, pid ") && error.contains("it sends by TCP"), "{error}");
    });
}

/// The settings of UCX are the user's.
fn by_transports(test: &str, transports: &str) {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        talk(&group);
        assert!(group.explain().contains("; messages by UCX "));
        group.barrier().wait().unwrap();
        return;
    }
    if !there() {
        return;
    }
    let ranks = Ranks::start_with(test, 2, |rank, command| {
        let mut command = Placement::Ucx.command(rank, command);
        command.env("UCX_TLS", transports);
        command
    });
    all_succeed(ranks.ranks);
}

#[test]
fn by_tcp() {
    by_transports("by_tcp", "tcp");
}

#[test]
fn by_shared_memory() {
    by_transports("by_shared_memory", "self,sm,tcp");
}

/// The loader finds a file first that is no library.
#[test]
fn no_libucp() {
    if let Some(rank) = Rank::of_this_process() {
        say(&outcome(&rank.try_group(LONG).map(drop)));
        return;
    }
    let folder = std::env::temp_dir().join(format!("no-libucp-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libucp.so.0"), "no library").unwrap();
    let Ranks { mut ranks, server: _server } = Ranks::start_with("no_libucp", 2, |rank, command| {
        let mut command = Placement::Ucx.command(rank, command);
        if rank == 1 {
            command.env("LD_LIBRARY_PATH", &folder).env_remove("VIRTUAL_ENV").env_remove("CONDA_PREFIX");
        } else {
            command.env("TENSORWIRE_LINK", "tcp");
        }
        command
    });
    let heard: Vec<String> = ranks.iter_mut().map(Process::hear).collect();
    ranks.into_iter().for_each(Process::expect_success);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(heard[1].contains("UCX is not available here: needs libucp 1.13 or newer"), "{}", heard[1]);
    assert!(heard[0].contains("rank 1 (host alone1, pid "), "{}", heard[0]);
}
