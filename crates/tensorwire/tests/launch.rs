//! Launchers' variables and addresses, in processes that really have them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::process::Command;
use std::time::Duration;

use ranks::{LONG, Rank, Ranks, await_parent, outcome, say};
use tensorwire::Group;

/// All that a launcher around these tests may have set.
const LAUNCHERS: [&str; 24] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
];

fn clean(mut command: Command) -> Command {
    LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
    command
}

/// What a rank does that was started by a launcher.
fn body() {
    let group = Group::builder().timeout(LONG).from_env().unwrap();
    say(&format!("rank {} of {} in {}", group.rank(), group.world(), group.name()));
    group.barrier().wait().unwrap();
    group.split(Some(0), 0).unwrap().unwrap().barrier().wait().unwrap();
    // The rank that serves the store must not go before the others are done with it.
    group.barrier().wait().unwrap();
}

/// Starts `world` ranks with variables each and gives what they say.
fn start(test: &str, world: usize, vars: impl Fn(usize) -> Vec<(&'static str, String)>) -> Vec<String> {
    let all = Ranks::start_with(test, world, |rank, command| {
        let mut command = clean(command);
        command.envs(vars(rank));
        command
    });
    let mut said = Vec::new();
    for mut rank in all.ranks {
        said.push(rank.hear());
        rank.expect_success();
    }
    said
}

fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn text(number: usize) -> String {
    number.to_string()
}

fn all_of(world: usize, name: &str) -> Vec<String> {
    (0..world).map(|rank| format!("rank {rank} of {world} in {name}")).collect()
}

#[test]
fn torchrun_where_rank_0_serves() {
    if Rank::of_this_process().is_some() {
        return body();
    }
    let port = free_port();
    let said = start("torchrun_where_rank_0_serves", 3, |rank| {
        vec![
            ("RANK", text(rank)),
            ("WORLD_SIZE", "3".into()),
            ("LOCAL_RANK", text(rank)),
            ("LOCAL_WORLD_SIZE", "3".into()),
            ("MASTER_ADDR", "localhost".into()),
            ("MASTER_PORT", port.clone()),
        ]
    });
    assert_eq!(said, all_of(3, "world"));
}

#[test]
fn torchrun_where_its_agent_serves() {
    if Rank::of_this_process().is_some() {
        return body();
    }
    // One store for all attempts, as the agent has it; groups of the second do not meet those of the first.
    let agent = tensorwire::store::TcpServer::bind("127.0.0.1:0").unwrap();
    for attempt in 0..2 {
        let said = start("torchrun_where_its_agent_serves", 2, |rank| {
            vec![
                ("RANK", text(rank)),
                ("WORLD_SIZE", "2".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("MASTER_PORT", agent.local_addr().port().to_string()),
                ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
                ("TORCHELASTIC_RUN_ID", "job".into()),
                ("TORCHELASTIC_RESTART_COUNT", text(attempt)),
            ]
        });
        assert_eq!(said, all_of(2, &format!("world@job.{attempt}")));
    }
}

#[test]
fn slurm() {
    if Rank::of_this_process().is_some() {
        return body();
    }
    let said = start("slurm", 2, |rank| {
        vec![
            ("SLURM_PROCID", text(rank)),
            ("SLURM_NTASKS", "2".into()),
            ("SLURM_LOCALID", text(rank)),
            ("SLURM_JOB_ID", format!("{}.slurm", std::process::id())),
            ("SLURM_JOB_NODELIST", "localhost".into()),
        ]
    });
    assert_eq!(said, all_of(2, "world"));
}

#[test]
fn open_mpi() {
    if Rank::of_this_process().is_some() {
        return body();
    }
    let port = free_port();
    let said = start("open_mpi", 2, |rank| {
        vec![
            ("OMPI_COMM_WORLD_RANK", text(rank)),
            ("OMPI_COMM_WORLD_SIZE", "2".into()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", text(rank)),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2".into()),
            ("MASTER_PORT", port.clone()),
        ]
    });
    assert_eq!(said, all_of(2, "world"));
}

#[test]
fn pmi() {
    if Rank::of_this_process().is_some() {
        return body();
    }
    let port = free_port();
    let said = start("pmi", 2, |rank| {
        vec![
            ("PMI_RANK", text(rank)),
            ("PMI_SIZE", "2".into()),
            ("MPI_LOCALRANKID", text(rank)),
            ("MPI_LOCALNRANKS", "2".into()),
            ("MASTER_PORT", port.clone()),
        ]
    });
    assert_eq!(said, all_of(2, "world"));
}

#[test]
fn addresses() {
    if let Some(rank) = Rank::of_this_process() {
        let builder = || Group::builder().timeout(LONG);
        let url = std::env::var("TEST_URL").unwrap();
        let group = builder().from_url(&url, Some(rank.rank), Some(rank.world)).unwrap();
        group.barrier().wait().unwrap();
        // The same with the numbers in the address, and another name.
        let numbers =
            format!("{}?rank={}&world_size={}", std::env::var("TEST_URL_2").unwrap(), rank.rank, rank.world);
        builder().name("other").from_url(&numbers, None, None).unwrap().barrier().wait().unwrap();
        let error = builder().from_url(&numbers, Some(7), None).unwrap_err();
        assert!(error.to_string().contains("rank is 7 in the call"), "{error}");
        group.barrier().wait().unwrap();
        return;
    }
    let file = std::env::temp_dir().join(format!("tensorwire-launch-{}", std::process::id()));
    let file_url = format!("file://{}", file.display());
    for urls in [
        [format!("tcp://127.0.0.1:{}", free_port()), file_url.clone()],
        [file_url, format!("tcp://[::1]:{}", free_port())],
    ] {
        if urls[1].contains("[::1]") && std::net::TcpListener::bind("[::1]:0").is_err() {
            ranks::skip("there is no IPv6 loopback");
            continue;
        }
        let all = Ranks::start_with("addresses", 2, |_, command| {
            let mut command = clean(command);
            command.env("TEST_URL", &urls[0]).env("TEST_URL_2", &urls[1]);
            command
        });
        for rank in all.ranks {
            rank.expect_success();
        }
        assert!(!file.exists(), "the last one to close a file removes it");
    }
}

/// Two processes that both are rank 0 and would serve the store: all hear of it, long before the deadline.
#[test]
fn two_that_would_serve() {
    if let Some(rank) = Rank::of_this_process() {
        let url = std::env::var("TEST_URL").unwrap();
        // The second one comes when the first one serves.
        if rank.rank == 2 {
            await_parent();
        }
        say("coming");
        let group = Group::builder().timeout(LONG).from_url(&url, Some(rank.rank % 2), Some(3));
        return say(&outcome(&group));
    }
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let Ranks { mut ranks, server: _server } = Ranks::start_with("two_that_would_serve", 3, |_, command| {
        let mut command = clean(command);
        command.env("TEST_URL", &url);
        command
    });
    for rank in &mut ranks[..2] {
        assert_eq!(rank.hear(), "coming");
    }
    let address = url.trim_start_matches("tcp://");
    while std::net::TcpStream::connect(address).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    ranks[2].let_go();
    assert_eq!(ranks[2].hear(), "coming");
    for rank in &mut ranks {
        let heard = rank.hear();
        println!("{}: {heard}", rank.rank);
        assert!(heard.contains("rank 0") && !heard.contains("timed out"), "{heard}");
    }
    for rank in ranks {
        rank.expect_success();
    }
}

/// Each of these gets an error that names the variable, and gets it at once.
#[test]
fn contradictions() {
    if Rank::of_this_process().is_some() {
        return say(&outcome(&Group::builder().timeout(Duration::from_secs(3)).from_env()));
    }
    let torch = |changes: &[(&'static str, &str)]| {
        let mut vars =
            vec![("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")];
        for change in changes {
            vars.retain(|(name, _)| *name != change.0);
            vars.push((change.0, change.1));
        }
        vars.retain(|(_, value)| !value.is_empty());
        vars.into_iter().map(|(name, value)| (name, value.to_owned())).collect::<Vec<_>>()
    };
    let cases: [(&[(&'static str, &str)], &str); 10] = [
        (&[("WORLD_SIZE", "")], "WORLD_SIZE is not set"),
        (&[("RANK", "")], "RANK is not set"),
        (&[("MASTER_PORT", "")], "MASTER_PORT is not set"),
        (&[("MASTER_ADDR", "")], "MASTER_ADDR is not set"),
        (&[("MASTER_PORT", "abc")], "MASTER_PORT=abc"),
        (&[("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "1")], "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1"),
        (&[("TENSORWIRE_FOO", "1")], "TENSORWIRE_FOO is not a variable of tensorwire"),
        (&[("TENSORWIRE_TIMEOUT", "-3")], "TENSORWIRE_TIMEOUT=-3"),
        (&[("TENSORWIRE_STRICT", "maybe")], "TENSORWIRE_STRICT=maybe"),
        (&[("RANK", ""), ("WORLD_SIZE", "")], "no launcher has told this process its rank"),
    ];
    for (changes, wanted) in cases {
        let said = start("contradictions", 1, |_| torch(changes));
        println!("{changes:?}: {}", said[0]);
        assert!(said[0].starts_with("Misuse | ") && said[0].contains(wanted), "{}", said[0]);
    }
    // A rank outside of its world is told to the others too, by way of their store.
    let port = free_port();
    let vars = |rank: usize| {
        let rank = ["0", "5"][rank];
        torch(&[("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", &port)])
    };
    let said = start("contradictions", 2, vars);
    println!("{said:#?}");
    assert!(said[0].starts_with("Incompatible") && said[0].contains("rank 5 of a world of 2"), "{}", said[0]);
    assert!(said[1].starts_with("Misuse") && said[1].contains("rank 5 of a world of 2"), "{}", said[1]);
}

/// An error that rank 0 finds reaches the others, though it serves the store and ends right after.
#[test]
fn the_server_of_the_store_stays_until_all_have_heard() {
    if let Some(rank) = Rank::of_this_process() {
        let url = std::env::var("TEST_URL").unwrap();
        let world = if rank.rank == 2 { 4 } else { 3 };
        say(&outcome(&Group::builder().timeout(LONG).from_url(&url, Some(rank.rank), Some(world))));
        return;
    }
    let url = format!("tcp://127.0.0.1:{}", free_port());
    let said =
        start("the_server_of_the_store_stays_until_all_have_heard", 3, |_| vec![("TEST_URL", url.clone())]);
    for text in said {
        println!("{text}");
        assert!(text.starts_with("Incompatible") && text.contains("was told a world of 4"), "{text}");
    }
}
