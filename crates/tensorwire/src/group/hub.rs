//! Groups that span hosts. Rank 0 is the hub of a star. Here the leaders of the other hosts find it and connect to
//! it.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::secret::Id;

use crate::config::Config;
use crate::error::{Error, PeerFaultKind, Result};
use crate::group::same_host::{Finder, Hosts};
use crate::watch::star::{self, Star};

/// Connects the leaders of several hosts: all to rank 0.
pub(super) fn connect(finder: &Finder<'_>, hosts: &Hosts, route: Option<IpAddr>) -> Result<Option<Star>> {
    let leads = hosts.map.iter().any(|ranks| ranks[0] == finder.rank);
    if hosts.map.len() < 2 || !leads {
        return Ok(None);
    }
    if finder.context.config().strict && !hosts.reasons.is_empty() {
        let why = hosts.reasons.join("; ");
        return Err(Error::Unsupported {
            what: "shared memory between all ranks of this machine".into(),
            need: "private connections (TENSORWIRE_STRICT is set)".into(),
            have: why,
        });
    }
    let (id, secret, identity) = (finder.roster.id, &finder.roster.secret, finder.context.identity());
    let identity_of = |rank: usize| (finder.roster.members[rank].identity, rank);
    if finder.rank != 0 {
        let addresses = parse_addresses(&finder.await_key(HUB, 0)?)?;
        let interrupted = || finder.still_waits_for(&[0]);
        let meeting =
            star::Meeting { group: id, identity, secret, timeout: finder.timeout, interrupted: &interrupted };
        let link = star::reach(&meeting, &addresses, identity_of(0), finder.grace)?;
        return Ok(Some(Star::new(false, vec![link])));
    }
    let listener = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0"));
    let listener = listener.map_err(|e| Error::io("listening for other hosts", e))?;
    let port = listener.local_addr().map_err(|e| Error::io("listening for other hosts", e))?.port();
    let addresses = own_addresses(finder.context.config(), route, port)?;
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    finder.store.set(HUB, list.join(" ").as_bytes())?;
    let leaders: Vec<(Id, usize)> = hosts.map[1..].iter().map(|ranks| identity_of(ranks[0])).collect();
    let ranks: Vec<usize> = leaders.iter().map(|(_, rank)| *rank).collect();
    let interrupted = || finder.still_waits_for(&ranks);
    let meeting =
        star::Meeting { group: id, identity, secret, timeout: finder.timeout, interrupted: &interrupted };
    let links = star::gather(&meeting, &listener, &leaders, finder.deadline);
    let links = links.map_err(|error| unreachable_hub(error, &list.join(", "), &hosts.reasons))?;
    finder.store.delete(HUB)?;
    Ok(Some(Star::new(true, links)))
}

const HUB: &str = "hub";

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

/// Where other hosts may reach this one; the best guess first. A wrong one does no harm: whoever answers there
/// cannot prove that it knows the secret.
fn own_addresses(config: &Config, route: Option<IpAddr>, port: u16) -> Result<Vec<SocketAddr>> {
    let mut addresses: Vec<SocketAddr> = match &config.address {
        Some(name) => resolve(name, port)?,
        None => {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            route.map(|ip| SocketAddr::new(ip, port)).into_iter().chain(resolve(&host, port)?).collect()
        }
    };
    addresses.push(SocketAddr::from(([127, 0, 0, 1], port)));
    let mut unique: Vec<SocketAddr> = Vec::new();
    for address in addresses {
        if !unique.contains(&address) && !address.ip().is_unspecified() {
            unique.push(address);
        }
    }
    Ok(unique)
}

/// The addresses of a host, or none where looking them up fails or takes too long.
pub(super) fn resolve(name: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let soon = Deadline::after(Duration::from_secs(3));
    Ok(crate::store::resolve(name, port, soon)?.unwrap_or_default())
}

pub(super) fn parse_addresses(bytes: &[u8]) -> Result<Vec<SocketAddr>> {
    let text = String::from_utf8_lossy(bytes);
    let addresses: Vec<SocketAddr> = text.split(' ').take(64).filter_map(|part| part.parse().ok()).collect();
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
