//! Which ranks share a host: labels, namespaces, users; and life and death between hosts.
//!
//! Labels split the ranks of this machine into hosts that talk over loopback. Tests that need rights which are not there
//! say so and pass.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::exit)]

#[path = "net/ports.rs"]
mod ports;
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ranks::{
    FILE, LONG, Process, Rank, Ranks, await_parent, behind, context_on, on_threads, outcome, say, skip, works,
};
use rustix::process::Signal;
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Deadline, Error, Group, PeerFaultKind};

/// Forms a group of threads with a label for each rank.
fn labelled(labels: &[&str]) -> Vec<Group> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(labels.len(), |rank| {
        let builder = Group::builder().context(&context_on(labels[rank])).timeout(LONG);
        builder.from_store(store.clone(), rank, labels.len()).unwrap()
    })
}

#[test]
fn labels_split_hosts() {
    let cases: [(&[&str], &[&[usize]]); 4] = [
        (&["a", "b"], &[&[0], &[1]]),
        (&["a", "b", "a", "b"], &[&[0, 2], &[1, 3]]),
        (&["a", "a", "b", "c", "b"], &[&[0, 1], &[2, 4], &[3]]),
        (&["c", "b", "a"], &[&[0], &[1], &[2]]),
    ];
    for (labels, hosts) in cases {
        let groups = labelled(labels);
        on_threads(labels.len(), |rank| {
            let group = &groups[rank];
            assert_eq!(group.hosts(), hosts, "rank {rank} of {labels:?}");
            assert_eq!(group.members()[rank].host, labels[rank]);
            for _ in 0..50 {
                group.barrier().wait().unwrap();
            }
            let other = hosts.iter().find(|host| !host.contains(&rank)).unwrap()[0];
            let text = group.explain();
            let wanted = format!("{}: network: another host label", group.members()[other]);
            assert!(text.contains(&wanted), "{text}");
        });
    }
}

#[test]
fn sub_groups_across_hosts() {
    let groups = labelled(&["a", "a", "b", "b"]);
    on_threads(4, |rank| {
        let group = &groups[rank];
        let across = group.split(Some((rank % 2) as u64), 0).unwrap().unwrap();
        assert_eq!(across.hosts(), [[0], [1]]);
        let within = group.subgroup(if rank < 2 { &[1, 0] } else { &[3, 2] }).unwrap();
        assert_eq!(within.hosts(), [[0, 1]]);
        for _ in 0..10 {
            across.barrier().wait().unwrap();
            within.barrier().wait().unwrap();
            group.barrier().wait().unwrap();
        }
    });
}

/// What the threads of this process have done: how many there are, and how often one has gone to sleep.
fn threads() -> (usize, u64) {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let slept = tasks.filter_map(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        count.trim().parse::<u64>().ok()
    });
    let slept: Vec<u64> = slept.collect();
    (slept.len(), slept.iter().sum())
}

/// A hundred sub-groups of two hosts cost a process what one costs: a connection, no thread, and few moments of a core.
#[test]
fn sub_groups_share_what_a_process_has() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let mut parts = Vec::new();
        let mut part = || {
            let part = group.split(Some((rank.rank % 2) as u64), 0).unwrap().unwrap();
            assert_eq!(part.hosts().len(), 2);
            parts.push(part);
        };
        part();
        // The leaders of a group that does something together have a connection for each direction.
        group.barrier().wait().unwrap();
        // Each group has a connection of its own to the store.
        let store = std::env::var(ranks::PORT).unwrap().parse::<u16>().unwrap();
        let connected = || {
            let all = ports::connected(std::process::id()).into_iter();
            all.filter(|there| there.port() != store).collect::<Vec<_>>()
        };
        let before = (connected(), threads().0);
        (1..100).for_each(|_| part());
        group.barrier().wait().unwrap();
        let after = (connected(), threads().0);
        let (start, slept) = (Instant::now(), threads().1);
        std::thread::sleep(Duration::from_secs(4));
        let a_second = (threads().1 - slept) as f64 / start.elapsed().as_secs_f64();
        say(&format!("{before:?} | {after:?} | {a_second:.1} times a second"));
        await_parent();
        // The leader of a host also has those of the group itself, which may be with the same process.
        let own = if rank.rank % 2 == 0 { 3 } else { 1 };
        assert_eq!((before.0.len(), after.0.len()), (own, own));
        assert_eq!(before.1, after.1, "threads");
        assert!(a_second <= 10.0, "{a_second}");
        for part in &parts {
            part.barrier().wait().unwrap();
        }
        return;
    }
    let test = "sub_groups_share_what_a_process_has";
    let ranks = Ranks::start_with(test, 4, |rank, mut command| {
        command.env("TENSORWIRE_HOST", ["a", "b"][rank / 2]);
        command
    });
    let mut ranks = ranks.ranks;
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("rank {}: {heard}", rank.rank);
        rank.let_go();
    }
    ranks.into_iter().for_each(Process::expect_success);
}

#[test]
fn a_split_names_all_missing_ranks_of_all_hosts() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let groups = on_threads(4, |rank| {
        let builder = Group::builder().context(&context_on(["a", "a", "b", "a"][rank]));
        builder.timeout(Duration::from_secs(3)).from_store(store.clone(), rank, 4).unwrap()
    });
    let error = groups[0].split(Some(1), 0).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert_eq!(error.ranks(), [1, 2, 3]);
    let (text, members) = (error.to_string(), groups[0].members());
    // Of ranks of this host it is known what they do.
    for rank in [1, 3] {
        assert!(text.contains(&format!("for {}, which ", members[rank])), "{text}");
    }
    assert!(text.contains(&format!("; {} has not called split()", members[2])), "{text}");
    assert_eq!(text.matches("the time-out is that of the group").count(), 1, "{text}");
}

#[test]
fn abort_crosses_hosts() {
    for by in 0..5 {
        let groups = labelled(&["a", "a", "b", "c", "b"]);
        let ends = on_threads(5, |rank| {
            if rank == by {
                groups[rank].abort("enough");
            }
            groups[rank].barrier().wait().unwrap_err()
        });
        for (rank, error) in ends.iter().enumerate() {
            let who = if rank == by { "this rank".to_owned() } else { groups[0].members()[by].to_string() };
            let wanted = format!("{who} called abort(): enough");
            assert!(matches!(error, Error::Aborted(text) if *text == wanted), "{error}");
        }
    }
}

#[test]
fn closing_in_any_order_across_hosts() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
        let mut groups: Vec<Option<Group>> = labelled(&["a", "a", "b", "b"]).into_iter().map(Some).collect();
        for rank in order {
            groups[rank].take().unwrap().close().unwrap();
            for group in groups.iter().flatten() {
                group.check().unwrap();
            }
        }
    }
}

#[test]
fn who_leaves_is_named_across_hosts() {
    for leaver in 0..4 {
        let groups: Vec<_> = labelled(&["a", "a", "b", "b"])
            .into_iter()
            .map(|group| std::sync::Mutex::new(Some(group)))
            .collect();
        let ends = on_threads(4, |rank| {
            let group = groups[rank].lock().unwrap().take().unwrap();
            if rank == leaver {
                group.close().unwrap();
                return None;
            }
            Some(group.barrier().wait().unwrap_err())
        });
        for error in ends.into_iter().flatten() {
            let Error::Peer(fault) = &error else { panic!("{error}") };
            assert_eq!((fault.kind, fault.rank), (PeerFaultKind::Left, Some(leaver)), "{error}");
        }
    }
}

#[test]
fn a_barrier_across_hosts_that_timed_out_is_over_for_all() {
    let groups = labelled(&["a", "b", "b"]);
    let soon = || Deadline::after(Duration::from_millis(200));
    let at_hub = groups[0].barrier().deadline(soon()).wait().unwrap_err();
    let at_spoke = groups[1].barrier().deadline(soon()).wait().unwrap_err();
    println!("hub: {at_hub}\nspoke: {at_spoke}");
    assert!(
        at_hub.is_timeout() && at_hub.to_string().contains(&groups[0].members()[1].to_string()),
        "{at_hub}"
    );
    assert!(at_spoke.to_string().contains(&groups[0].members()[2].to_string()), "{at_spoke}");
    let late = groups[2].barrier().wait().unwrap_err();
    assert!(late.is_timeout(), "{late}");
    on_threads(3, |rank| groups[rank].barrier().wait().unwrap());
}

// Processes

/// Ranks with labels; `victim` stays out of the barrier that the others wait in.
fn body(rank: &Rank, victim: usize) {
    let group = rank.group();
    if rank.rank == victim {
        say("ready");
        await_parent();
        std::process::exit(0);
    }
    say("waits");
    say(&outcome(&group.barrier().wait()));
    say(&outcome(&group.barrier().wait()));
    await_parent();
}

fn start(test: &str, labels: &[&str], heartbeat: &str) -> Ranks {
    let mut all = Ranks::start_with(test, labels.len(), |rank, mut command| {
        command.env("TENSORWIRE_HOST", labels[rank]).env("TENSORWIRE_HEARTBEAT", heartbeat);
        command
    });
    for rank in &mut all.ranks {
        rank.hear();
    }
    all
}

fn end_of(test: &str, labels: &[&str], victim: usize, heartbeat: &str, end: impl FnOnce(&mut Process)) {
    let Ranks { mut ranks, server: _server } = start(test, labels, heartbeat);
    let mut dying = ranks.remove(victim);
    let (pid, since) = (dying.pid(), Instant::now());
    end(&mut dying);
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("{test}, rank {}: {:?}: {heard}", rank.rank, since.elapsed());
        // How it was killed is known on its own host, and on others where somebody on that host could tell.
        let wanted = format!("Died {victim} | rank {victim} (host {}, pid {pid}) ", labels[victim]);
        let did = heard.strip_prefix(&wanted).unwrap_or_default();
        assert!(did.starts_with("died") || did.starts_with("was killed by SIG"), "{heard}");
        assert_eq!(rank.hear(), heard);
    }
    for rank in ranks {
        rank.expect_success();
    }
}

const FIVE: [&str; 5] = ["a", "a", "b", "b", "c"];

#[test]
fn death_of_the_hub() {
    match Rank::of_this_process() {
        Some(rank) => body(&rank, 0),
        None => end_of("death_of_the_hub", &FIVE, 0, "30", Process::kill),
    }
}

#[test]
fn death_of_a_leader_elsewhere() {
    match Rank::of_this_process() {
        Some(rank) => body(&rank, 2),
        None => end_of("death_of_a_leader_elsewhere", &FIVE, 2, "30", Process::kill),
    }
}

#[test]
fn death_of_another_rank_elsewhere() {
    match Rank::of_this_process() {
        Some(rank) => body(&rank, 3),
        None => end_of("death_of_another_rank_elsewhere", &FIVE, 3, "30", Process::kill),
    }
}

#[test]
fn a_silent_host_counts_as_dead() {
    match Rank::of_this_process() {
        Some(rank) => body(&rank, 2),
        None => {
            // A stopped process keeps its connections open; only silence tells. It shares its host with nobody.
            end_of("a_silent_host_counts_as_dead", &["a", "a", "b"], 2, "2", |rank| {
                rank.signal(Signal::STOP)
            });
        }
    }
}

// Namespaces and users

/// The last rank is to be killed; the others share memory with it and hear of its death.
fn shares_memory(rank: &Rank) {
    shares(rank, |_| {});
}

/// The same, and the ranks give each other descriptors.
fn shares_memory_and_files(rank: &Rank) {
    shares(rank, |group| {
        let own = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(group.all_gather_fds(&own).wait().unwrap().len(), group.world());
        group.send_fd(&own, (group.rank() + 1) % group.world()).wait().unwrap();
        group.recv_fd((group.rank() + group.world() - 1) % group.world()).wait().unwrap();
    });
}

fn shares(rank: &Rank, what: impl Fn(&Group)) {
    let group = rank.group();
    if group.hosts().len() > 1 {
        say(&group.explain().replace('\n', ";"));
        return;
    }
    what(&group);
    group.barrier().wait().unwrap();
    say("formed");
    if rank.rank + 1 == rank.world {
        // Killing what wraps this process kills it too, but its input may be closed a moment earlier.
        await_parent();
        std::process::exit(1);
    }
    say(&outcome(&group.barrier().wait()));
    await_parent();
}

fn in_wrappers(test: &str, wrappers: &[&[&str]], vars: &[(&str, &str)]) {
    for wrapper in wrappers {
        if !wrapper.is_empty() && !works(wrapper) {
            return skip(&format!("{} is not permitted", wrapper.join(" ")));
        }
    }
    let world = wrappers.len();
    let Ranks { mut ranks, server: _server } = Ranks::start_with(test, world, |rank, command| {
        let mut command = if wrappers[rank].is_empty() { command } else { behind(wrappers[rank], &command) };
        command.envs(vars.iter().copied());
        command
    });
    let heard: Vec<String> = ranks.iter_mut().map(Process::hear).collect();
    assert_eq!(heard, vec!["formed"; world]);
    let since = Instant::now();
    ranks.remove(world - 1).kill();
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("{test}, rank {}: {:?}: {heard}", rank.rank, since.elapsed());
        assert!(heard.starts_with(&format!("Died {} |", world - 1)), "{heard}");
    }
    for rank in ranks {
        rank.expect_success();
    }
}

const PID_NAMESPACE: &[&str] = &["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];

#[test]
fn separate_pid_namespaces() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory_and_files(&rank);
    }
    in_wrappers("separate_pid_namespaces", &[&[], PID_NAMESPACE, PID_NAMESPACE], &[]);
}

/// /proc shows the pids of another namespace: they must not be taken for those of the ranks.
#[test]
fn a_pid_namespace_with_a_foreign_proc() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory_and_files(&rank);
    }
    let foreign = &["unshare", "--pid", "--fork", "--kill-child"][..];
    in_wrappers("a_pid_namespace_with_a_foreign_proc", &[foreign, foreign, foreign], &[]);
}

#[test]
fn a_user_namespace() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory_and_files(&rank);
    }
    let mapped =
        &["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"][..];
    in_wrappers("a_user_namespace", &[mapped, mapped], &[]);
}

#[test]
fn a_small_dev_shm_or_none() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory(&rank);
    }
    let mounts =
        |script: &'static str| -> Vec<&'static str> { vec!["unshare", "--mount", "sh", "-c", script, "sh"] };
    let small = mounts("mount -t tmpfs -o size=64m none /dev/shm && exec \"$@\"");
    let none = mounts("mount -t tmpfs -o size=4k,ro none /dev/shm && exec \"$@\"");
    in_wrappers("a_small_dev_shm_or_none", &[&small, &none, &[]], &[]);
}

const NET_NAMESPACE: &[&str] = &["unshare", "--net"];

#[test]
fn separate_network_namespaces_with_a_socket_directory() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory_and_files(&rank);
    }
    let dir = Folder::new();
    let file = dir.0.join("store");
    let vars = [(FILE, file.to_str().unwrap()), ("TENSORWIRE_SOCKET_DIR", dir.0.to_str().unwrap())];
    let wrappers = [NET_NAMESPACE, &[], NET_NAMESPACE];
    in_wrappers("separate_network_namespaces_with_a_socket_directory", &wrappers, &vars);
}

/// Without one the ranks can reach each other in no way; the error says what was tried.
#[test]
fn separate_network_namespaces_without_one() {
    if let Some(rank) = Rank::of_this_process() {
        say(&outcome(&rank.try_group(Duration::from_secs(3))));
        return;
    }
    if !works(NET_NAMESPACE) {
        return skip("unshare --net is not permitted");
    }
    let dir = Folder::new();
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("separate_network_namespaces_without_one", 2, |_, command| {
            let mut command = behind(NET_NAMESPACE, &command);
            command.env(FILE, dir.0.join("store"));
            command
        });
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("rank {}: {heard}", rank.rank);
        assert!(heard.starts_with("TimedOut | "), "{heard}");
        assert!(heard.contains("connecting the hosts of a group"), "{heard}");
    }
}

#[test]
fn another_user_shares_no_memory() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        group.barrier().wait().unwrap();
        say(&group.explain().replace('\n', ";"));
        assert_eq!(group.hosts(), [[0], [1]]);
        group.barrier().wait().unwrap();
        return;
    }
    let other = &["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"][..];
    if !works(other) {
        return skip("setpriv --reuid is not permitted, or the other user cannot read this program");
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("another_user_shares_no_memory", 2, |rank, command| {
            if rank == 1 { behind(other, &command) } else { command }
        });
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("{heard}");
        assert!(
            heard.contains("runs as uid 0, this one as uid 12345; they must be the same user"),
            "{heard}"
        );
    }
    for rank in ranks {
        rank.expect_success();
    }
}

/// A user may have only so many descriptors under way at once; a leader that hands more round waits.
#[test]
fn few_descriptors() {
    if let Some(rank) = Rank::of_this_process() {
        return shares_memory(&rank);
    }
    let few = ["prlimit", "--nofile=40:40", "setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"];
    in_wrappers("few_descriptors", &[&few[..]; 12], &[]);
}

/// The same in strict mode is an error, on every rank.
#[test]
fn strict_mode_refuses_to_share_no_memory() {
    if let Some(rank) = Rank::of_this_process() {
        say(&outcome(&rank.try_group(LONG)));
        return;
    }
    let other = &["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"][..];
    if !works(other) {
        return skip("setpriv --reuid is not permitted, or the other user cannot read this program");
    }
    let Ranks { mut ranks, server: _server } =
        Ranks::start_with("strict_mode_refuses_to_share_no_memory", 4, |rank, command| {
            let mut command = if rank > 1 { behind(other, &command) } else { command };
            command.env("TENSORWIRE_STRICT", "1");
            command
        });
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("rank {}: {heard}", rank.rank);
        assert!(heard.contains("TENSORWIRE_STRICT is set"), "{heard}");
        assert!(heard.contains("uid 12345"), "{heard}");
    }
}

/// A folder that goes with the test.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new() -> Self {
        let id = tensorwire::device::Id::random().unwrap();
        let path = std::env::temp_dir().join(format!("tensorwire-hosts-{id}"));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
