//! The TCP ports that a process listens at, and those that it is connected with.
#![allow(dead_code, unreachable_pub)]

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where a process of this machine is reached that listens: at loopback, or at the one address that it listens at.
pub fn listening(pid: u32) -> Vec<SocketAddr> {
    // 0A is LISTEN.
    table(pid, "0A").into_iter().map(|(here, _)| here).collect()
}

/// The other ends of the connections that a process has.
pub fn connected(pid: u32) -> Vec<SocketAddr> {
    // 01 is ESTABLISHED.
    table(pid, "01").into_iter().map(|(_, there)| there).collect()
}

/// Both ends of a process's sockets in a state.
fn table(pid: u32, wanted: &str) -> Vec<(SocketAddr, SocketAddr)> {
    let own = sockets(pid);
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let [_, local, remote, state, _, _, _, _, _, inode, ..] = fields[..]
                && state == wanted
                && own.contains(inode)
                && let Some(ends) = parse(local).zip(parse(remote))
            {
                found.push(ends);
            }
        }
    }
    found
}

/// The inodes of a process's sockets.
fn sockets(pid: u32) -> HashSet<String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let inode = |link: std::path::PathBuf| {
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    links.filter_map(inode).collect()
}

/// "0100007F:1F90": words in the order of this machine.
fn parse(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words: Option<Vec<u32>> =
        (0..ip.len() / 8).map(|at| u32::from_str_radix(&ip[at * 8..][..8], 16).ok()).collect();
    let bytes: Vec<u8> = words?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip = match (<[u8; 4]>::try_from(&bytes[..]), <[u8; 16]>::try_from(&bytes[..])) {
        (Ok(four), _) => IpAddr::from(four),
        (_, Ok(sixteen)) => IpAddr::from(sixteen),
        _ => return None,
    };
    let ip = match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}
