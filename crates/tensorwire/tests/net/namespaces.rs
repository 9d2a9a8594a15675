//! Hosts as network namespaces. Each has one cable to a switch, which is a bridge in a namespace of its own: nothing is
//! made in the namespace of the machine, and all of it goes with the namespaces.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::proxy::{Forward, Proxy};
use crate::ranks::{FILE, behind, skip};

/// Names of namespaces: this, the pid of the test, a number, and which host it is.
const PREFIX: &str = "tensorwire-net-";
/// Processes on these hosts listen at no other ports, and call from no others.
const PORTS: std::ops::RangeInclusive<u16> = 20000..=20063;

/// Which addresses the hosts have beside loopback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// Some hosts and what joins them. They are removed when this is dropped.
pub struct Hosts {
    name: String,
    count: usize,
    family: Family,
    proxied: bool,
    /// Where the store of the ranks is: cables that are down do not cut them off from it.
    folder: PathBuf,
}

impl Hosts {
    /// Makes so many hosts. Nothing, and a printed reason, where that is not permitted.
    pub fn new(count: usize, family: Family) -> Option<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        sweep();
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(&folder).unwrap();
        let hosts = Self { name, count, family, proxied: false, folder };
        match hosts.build() {
            Ok(()) => Some(hosts),
            Err(reason) => {
                skip(&format!("hosts as network namespaces cannot be made: {reason}"));
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        let switch = self.switch();
        let mut lines = vec![format!("netns add {switch}")];
        lines.extend((0..self.count).map(|host| format!("netns add {}", self.namespace(host))));
        ip(&[], &lines)?;
        let mut lines = vec![
            "link set lo up".to_owned(),
            "link add switch type bridge mcast_snooping 0".to_owned(),
            "link set switch up".to_owned(),
        ];
        for host in 0..self.count {
            let namespace = self.namespace(host);
            lines.push(format!("link add port{host} type veth peer name eth0 netns {namespace}"));
            lines.push(format!("link set port{host} master switch up"));
        }
        // The proxy is at the switch: it has an address for each host.
        lines.extend((0..self.count).map(|host| match self.family {
            Family::V4 => format!("addr add {}/24 dev switch", self.middle(host)),
            Family::V6 => format!("addr add {}/64 dev switch nodad", self.middle(host)),
        }));
        ip(&["-n", &switch], &lines)?;
        for host in 0..self.count {
            let address = match self.family {
                Family::V4 => format!("addr add {}/24 dev eth0", self.own(host)),
                Family::V6 => format!("addr add {}/64 dev eth0 nodad", self.own(host)),
            };
            let lines = ["link set lo up".to_owned(), address, "link set eth0 up".to_owned()];
            ip(&["-n", &self.namespace(host)], &lines)?;
            let range = format!("{} {}", PORTS.start(), PORTS.end());
            let path = "/proc/sys/net/ipv4/ip_local_port_range";
            inside(&self.namespace(host), || std::fs::write(path, range))
                .map_err(|error| format!("{path}: {error}"))?;
        }
        Ok(())
    }

    /// A rank's command on a host. It meets the others at a file.
    pub fn command(&self, host: usize, command: &Command) -> Command {
        let address = if self.proxied { self.middle(host) } else { self.own(host) };
        let mut command = behind(&["ip", "netns", "exec", &self.namespace(host)], command);
        command.env("TENSORWIRE_HOST", label(host)).env("TENSORWIRE_ADDRESS", address);
        command.env(FILE, self.folder.join("store"));
        command
    }

    /// From now on ranks say that they are at the proxy, which forwards what it hears to them.
    pub fn proxy(&mut self) -> Proxy {
        self.proxied = true;
        let mut forwards = Vec::new();
        for host in 0..self.count {
            forwards.extend(PORTS.map(|port| (self.middle(host), self.own(host), port)));
        }
        inside(&self.switch(), || {
            let forwards = forwards.iter().map(|(from, to, port)| {
                let at = |ip: &String| std::net::SocketAddr::new(ip.parse().unwrap(), *port);
                Forward { listener: std::net::TcpListener::bind(at(from)).unwrap(), to: at(to) }
            });
            Proxy::start(forwards.collect())
        })
    }

    /// Where their store is; its name is that of the hosts.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Pulls a host's cable out of the switch.
    pub fn unplug(&self, host: usize) {
        ip(&["-n", &self.switch()], &[format!("link set port{host} down")]).unwrap();
    }

    /// Puts it back.
    pub fn plug_in(&self, host: usize) {
        ip(&["-n", &self.switch()], &[format!("link set port{host} up")]).unwrap();
    }

    /// An address in the network of a host that swallows all packets.
    pub fn swallowing(&self, host: usize) -> String {
        let address = "10.231.7.250";
        assert_eq!(self.family, Family::V4);
        // Nobody has this address of Ethernet, and nobody needs to be asked for it.
        let line = format!("neigh replace {address} lladdr 02:00:00:00:fa:11 dev eth0 nud permanent");
        ip(&["-n", &self.namespace(host)], &[line]).unwrap();
        address.into()
    }

    /// An address in the network of the hosts where nobody listens.
    pub fn refusing(&self) -> String {
        self.middle(0)
    }

    /// A host's own address.
    fn own(&self, host: usize) -> String {
        match self.family {
            Family::V4 => format!("10.231.7.{}", 1 + host),
            Family::V6 => format!("fd07:7e50::{}", 1 + host),
        }
    }

    /// The address at the switch that stands for a host.
    fn middle(&self, host: usize) -> String {
        match self.family {
            Family::V4 => format!("10.231.7.{}", 101 + host),
            Family::V6 => format!("fd07:7e50::{}", 101 + host),
        }
    }

    fn namespace(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        remove(&self.name);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The label of a host.
pub fn label(host: usize) -> String {
    format!("net{host}")
}

/// Runs something in a namespace; what it starts and opens stays there.
fn inside<T: Send>(namespace: &str, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let file = std::fs::File::open(Path::new("/run/netns").join(namespace)).unwrap();
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network))
                .unwrap();
            body()
        });
        thread.join().unwrap()
    })
}

/// Removes what tests have left that were killed.
fn sweep() {
    let is_left = |name: &str| {
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists())
    };
    for name in names("/run/netns").into_iter().filter(|name| is_left(name)) {
        let _ = ip(&[], &[format!("netns delete {name}")]);
    }
    let folder = std::env::temp_dir();
    for name in names(&folder).into_iter().filter(|name| is_left(name)) {
        let _ = std::fs::remove_dir_all(folder.join(name));
    }
}

/// Removes all namespaces of some hosts.
fn remove(hosts: &str) {
    for name in names("/run/netns").into_iter().filter(|name| name.starts_with(&format!("{hosts}-"))) {
        let _ = ip(&[], &[format!("netns delete {name}")]);
    }
}

fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Runs commands of `ip`, one a line.
fn ip(options: &[&str], lines: &[String]) -> Result<(), String> {
    let mut command = Command::new("ip");
    command.args(options).args(["-batch", "-"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("ip: {error}"))?;
    let mut input = child.stdin.take().unwrap();
    // Where it fails early it reads no more; its status says so.
    let _ = input.write_all(format!("{}\n", lines.join("\n")).as_bytes());
    drop(input);
    let output = child.wait_with_output().unwrap();
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip: {}", String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "))),
    }
}
