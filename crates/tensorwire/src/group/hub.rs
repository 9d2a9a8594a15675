//! Groups that span hosts. Rank 0 is the hub of a star. Here the leaders of the other hosts find it and connect to
//! it.

use std::net::{IpAddr, SocketAddr};

use tensorwire_device::secret::Id;

use crate::error::{Error, PeerFaultKind, Result};
use crate::group::same_host::{Finder, Hosts};
use crate::link::address;
use crate::watch::leaders::{self, Hub, Meeting};
use crate::watch::star::Star;

/// Connects the leaders of several hosts: all to rank 0.
pub(super) fn connect(finder: &Finder<'_>, all: &Hosts, route: Option<IpAddr>) -> Result<Option<Star>> {
    let leads = all.map.iter().any(|ranks| ranks[0] == finder.rank);
    if all.map.len() < 2 || !leads {
        return Ok(None);
    }
    if finder.context.config().strict && !all.reasons.is_empty() {
        let why = all.reasons.join("; ");
        return Err(Error::Unsupported {
            what: "shared memory between all ranks of this machine".into(),
            need: "private connections (TENSORWIRE_STRICT is set)".into(),
            have: why,
        });
    }
    let (domain, context) = (finder.domain(), finder.context);
    let (watcher, office, timeout) = (context.watcher(), context.office()?, finder.timeout);
    let identity_of = |rank: usize| (finder.roster.members[rank].identity, rank);
    if finder.rank != 0 {
        let [hub, me] = [0, finder.rank].map(|rank| &finder.roster.members[rank].place.boot);
        let addresses = address::worth_a_try(await_hub(finder)?, hub == me);
        let interrupted = || finder.still_waits_for(&[0]);
        let meeting = Meeting { watcher, office, domain, timeout, interrupted: &interrupted };
        let link = leaders::reach(&meeting, &addresses, identity_of(0), finder.grace)?;
        return Ok(Some(Star::new(domain.id, false, vec![link])));
    }
    let leaders: Vec<(Id, usize)> = all.map[1..].iter().map(|ranks| identity_of(ranks[0])).collect();
    let ranks: Vec<usize> = leaders.iter().map(|(_, rank)| *rank).collect();
    let interrupted = || finder.still_waits_for(&ranks);
    let meeting = Meeting { watcher, office, domain, timeout, interrupted: &interrupted };
    let hub = Hub::open(&meeting)?;
    let addresses = address::own(context.config(), route, office.port())?;
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    say_hub(finder, &addresses)?;
    let links = hub.gather(&meeting, &leaders, finder.deadline);
    let links = links.map_err(|error| unreachable_hub(error, &list.join(", "), &all.reasons))?;
    finder.own.store.delete(HUB)?;
    Ok(Some(Star::new(domain.id, true, links)))
}

const HUB: &str = "hub";

/// Rank 0 says where it is reached.
pub(super) fn say_hub(finder: &Finder<'_>, addresses: &[SocketAddr]) -> Result<()> {
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    finder.own.set(HUB, list.join(" ").as_bytes())
}

/// Where rank 0 is reached.
pub(super) fn await_hub(finder: &Finder<'_>) -> Result<Vec<SocketAddr>> {
    parse_addresses(&finder.await_key(HUB, 0)?)
}

/// What to do about other hosts that did not come.
fn unreachable_hub(error: Error, addresses: &str, reasons: &[String]) -> Error {
    let Error::TimedOut { doing, after, mut missing, ranks } = error else { return error };
    missing.push_str(&format!(
        " to rank 0 at {addresses}; set TENSORWIRE_ADDRESS there to an address that they reach"
    ));
    if !reasons.is_empty() {
        missing
            .push_str(", or TENSORWIRE_SOCKET_DIR for ranks of one machine in separate network namespaces; ");
        missing.push_str(&format!("memory is not shared with {}", reasons.join(" and with ")));
    }
    Error::timed_out(doing, after, missing).about(ranks)
}

pub(super) fn parse_addresses(bytes: &[u8]) -> Result<Vec<SocketAddr>> {
    let text = String::from_utf8_lossy(bytes);
    let addresses = address::from_text(&text);
    if addresses.is_empty() {
        return Err(Error::peer(
            PeerFaultKind::Misbehaved,
            "rank 0",
            Some(0),
            format!("it published no address ({text:?})"),
        ));
    }
    Ok(addresses)
}
