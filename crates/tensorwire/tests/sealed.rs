//! What ranks of a job with a key say to ranks of other hosts: nobody between them reads it, and nobody changes it unseen. All
//! tests of messages run sealed, too (`tests/p2p.rs`, `tests/links.rs`).
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod messages;
mod net;
mod ranks;

use std::sync::Arc;
use std::time::Duration;

use messages::{bytes_of, empty, tensor};
use net::flow::{flow_if_formed, hurt};
use net::namespaces::{Family, Hosts};
use net::proxy::{Proxy, Way};
use ranks::{KEY, Process, Rank, Ranks, await_parent, describe, on_threads, outcome, say};
use tensorwire::config::{Key, Seal};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, Dtype, Error, Group, PeerFaultKind, Result};

/// A byte that changes on its way is found, wherever it is: in the hello, in the greeting, in a block or in its length.
#[test]
fn a_byte_that_is_flipped() {
    if let Some(rank) = Rank::of_this_process() {
        return flow_if_formed(&rank);
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let there = [3, 100, 160, 300, 400, 5_000_000, 5_000_001].map(|at| (Way::There, at));
    let back = [20, 120, 170].map(|at| (Way::Back, at));
    hurt("a_byte_that_is_flipped", &mut hosts, &[&there[..], &back].concat(), Some(KEY), Proxy::flip_at);
}

#[test]
fn a_connection_that_is_cut() {
    if let Some(rank) = Rank::of_this_process() {
        return flow_if_formed(&rank);
    }
    let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
    let cases = [(Way::There, 150), (Way::Back, 150), (Way::There, 1_000_001), (Way::There, 12_345_678)];
    hurt("a_connection_that_is_cut", &mut hosts, &cases, Some(KEY), Proxy::cut_at);
}

const TENSOR: &[u8] = b"what is in the tensor is nobody's business";
const REASON: &str = "a reason that names the customer";

/// Who listens on the network sees what is not sealed, and nothing else.
#[test]
fn nobody_listens() {
    if let Some(rank) = Rank::of_this_process() {
        let group = rank.group();
        let other = 1 - rank.rank;
        let (own, into) =
            (tensor(&group, &TENSOR.repeat(2000), Dtype::U8), empty(&group, TENSOR.len() * 2000));
        let sent = group.send(&own, other).start().unwrap();
        group.recv(&into, other).wait().unwrap();
        sent.wait().unwrap();
        assert_eq!(bytes_of(&into), bytes_of(&own));
        group.barrier().wait().unwrap();
        if rank.rank == 1 {
            group.abort(REASON);
        }
        say(&outcome(&group.recv(&into, other).wait()));
        await_parent();
        return;
    }
    for (key, seal, reads) in [
        (None, None, (true, true)),
        (Some(KEY), Some("control"), (true, false)),
        (Some(KEY), None, (false, false)),
    ] {
        let Some(mut hosts) = Hosts::new(2, Family::V4) else { return };
        let proxy = hosts.proxy();
        proxy.keep();
        let Ranks { mut ranks, server: _server } = Ranks::start_with("nobody_listens", 2, |rank, command| {
            let mut command = hosts.command(rank, &command);
            command.envs(key.map(|key| ("TENSORWIRE_KEY", key)));
            command.envs(seal.map(|seal| ("TENSORWIRE_SEAL", seal)));
            command
        });
        for rank in &mut ranks {
            let heard = rank.hear();
            assert!(heard.contains(REASON), "{heard}");
        }
        let seen = (proxy.has_seen(TENSOR), proxy.has_seen(REASON.as_bytes()));
        assert_eq!(seen, reads, "key {key:?}, seal {seal:?}");
        ranks.iter_mut().for_each(Process::let_go);
        ranks.into_iter().for_each(Process::expect_success);
    }
}

fn form(seals: &[Seal]) -> Vec<Result<Group>> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    on_threads(seals.len(), |rank| {
        let mut config = Config::default();
        config.host = Some(format!("host{rank}"));
        config.key = Some(Key::new(KEY).unwrap());
        config.seal = seals[rank];
        let context = Context::new(config).unwrap();
        let builder = Group::builder().context(&context).timeout(Duration::from_secs(30));
        builder.from_store(store.clone(), rank, seals.len())
    })
}

/// All ranks hear who seals what.
#[test]
fn ranks_that_seal_different_things() {
    for (odd, seals) in
        [(2, [Seal::All, Seal::All, Seal::Control]), (1, [Seal::Control, Seal::All, Seal::Control])]
    {
        for error in form(&seals).into_iter().map(|group| group.map(drop).unwrap_err()) {
            let text = describe(&error);
            let Error::Peer(fault) = &error else { panic!("{text}") };
            assert_eq!(fault.kind, PeerFaultKind::Incompatible, "{text}");
            let theirs = format!(
                "rank {odd} (host host{odd}, pid {}) has TENSORWIRE_SEAL={}",
                std::process::id(),
                seals[odd]
            );
            assert!(text.contains(&theirs), "{text}");
            assert!(
                text.contains(&format!("rank 0 (host host0, pid {}) has {}", std::process::id(), seals[0])),
                "{text}"
            );
        }
    }
}

/// Groups say what they do.
#[test]
fn explain_says_what_is_sealed() {
    for (seal, says) in [(Seal::All, "sealed"), (Seal::Control, "not sealed (TENSORWIRE_SEAL=control)")] {
        let groups: Vec<Group> = form(&[seal; 2]).into_iter().map(Result::unwrap).collect();
        on_threads(2, |rank| {
            let text = groups[rank].explain();
            assert!(text.contains("messages by TCP to ") && text.contains(&format!(", {says}\n")), "{text}");
        });
    }
}
