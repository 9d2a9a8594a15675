//! Where a process is reached from other hosts.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tensorwire_device::Deadline;

use crate::config::Config;
use crate::error::{Error, Result};

/// How many addresses are tried.
const MOST: usize = 64;

/// Where other hosts may reach this one; the best guess first. A wrong one does no harm: whoever answers there
/// cannot prove that it knows the secret.
pub(crate) fn own(config: &Config, route: Option<IpAddr>, port: u16) -> Result<Vec<SocketAddr>> {
    let mut addresses: Vec<SocketAddr> = match &config.address {
        Some(name) => {
            let found = resolve(name, port)?;
            if found.is_empty() {
                return Err(Error::misuse(format!(
                    "TENSORWIRE_ADDRESS is {name:?}, which is no address, and no host of that name is known here"
                )));
            }
            found
        }
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
pub(crate) fn resolve(name: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let soon = Deadline::after(Duration::from_secs(3));
    Ok(crate::store::resolve(name, port, soon)?.unwrap_or_default())
}

/// As text, at most so many bytes of it: the last ones are left out.
pub(crate) fn to_text(addresses: &[SocketAddr], most: usize) -> String {
    let mut text = String::new();
    for address in addresses {
        let next = address.to_string();
        if text.len() + 1 + next.len() > most {
            break;
        }
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(&next);
    }
    text
}

/// Those at which a process may be reached. Loopback is worth a try only if it is on this machine.
pub(crate) fn worth_a_try(mut addresses: Vec<SocketAddr>, same_machine: bool) -> Vec<SocketAddr> {
    addresses.retain(|address| same_machine || !address.ip().is_loopback());
    addresses
}

pub(crate) fn from_text(text: &str) -> Vec<SocketAddr> {
    text.split(' ').take(MOST).filter_map(|part| part.parse().ok()).collect()
}
