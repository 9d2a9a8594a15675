//! Which host this is, and what of it a container hides.

use std::fs;
use std::path::Path;

use tensorwire::topology::sysfs::{names, text};

use super::report::Finding;

pub(super) fn probe() -> Vec<Finding> {
    let uname = rustix::system::uname();
    let lossy = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let mut findings = vec![
        Finding::fact("kernel", format!("{} {}", lossy(uname.release()), lossy(uname.machine()))),
        boot_id(),
        host_name(&lossy(uname.nodename())),
        Finding::fact("interfaces", names("/sys/class/net").join(", ")),
        Finding::fact("container", container()),
        user_namespace(),
    ];
    for (name, file) in [("PID namespace", "pid"), ("mount namespace", "mnt"), ("network namespace", "net")] {
        findings.push(namespace(name, file));
    }
    findings.push(ptrace());
    findings
}

fn boot_id() -> Finding {
    match text("/proc/sys/kernel/random/boot_id") {
        Some(id) => Finding::ok("boot id", id),
        None => Finding::fail("boot id", "not readable")
            .because("ranks find out by it that they share a host: mount /proc with sys"),
    }
}

/// Ranks on other hosts are told this host's address; a name that means loopback is no use to them.
fn host_name(name: &str) -> Finding {
    let hosts = text("/etc/hosts").unwrap_or_default();
    let line = hosts
        .lines()
        .find(|line| line.split('#').next().unwrap_or("").split_whitespace().any(|word| word == name));
    match line.and_then(|line| line.split_whitespace().next()) {
        Some(address) if address.starts_with("127.") || address == "::1" => {
            Finding::warn("host name", format!("{name} is {address} in /etc/hosts"))
                .because("other hosts cannot use it; with several hosts set TENSORWIRE_ADDRESS")
        }
        _ => Finding::fact("host name", name),
    }
}

fn container() -> String {
    let files = [("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")];
    let by_file = files.iter().find(|(path, _)| Path::new(path).exists()).map(|(_, name)| (*name).to_owned());
    let by_variable = || std::env::var("container").ok().filter(|name| !name.is_empty());
    let kubernetes = std::env::var_os("KUBERNETES_SERVICE_HOST").map(|_| "Kubernetes".to_owned());
    kubernetes.or(by_file).or_else(by_variable).unwrap_or_else(|| "none seen".into())
}

fn user_namespace() -> Finding {
    let map = text("/proc/self/uid_map").unwrap_or_default();
    let fields: Vec<&str> = map.split_whitespace().collect();
    match fields.as_slice() {
        [] => Finding::warn("user namespace", "no uid is mapped")
            .because("every uid reads as the overflow uid here"),
        ["0", "0", "4294967295"] => Finding::fact("user namespace", "all uids are as outside"),
        [inside, outside, count] => Finding::fact(
            "user namespace",
            format!("{count} uids from {inside} are {outside} and up outside"),
        ),
        _ => Finding::fact("user namespace", "several ranges of uids are mapped"),
    }
}

fn namespace(name: &str, file: &str) -> Finding {
    match fs::read_link(format!("/proc/self/ns/{file}")) {
        Ok(link) => {
            Finding::fact(name, link.display().to_string().trim_matches(|c: char| !c.is_ascii_digit()))
        }
        Err(error) => Finding::warn(name, "unknown").because(error),
    }
}

fn ptrace() -> Finding {
    let value = match text("/proc/sys/kernel/yama/ptrace_scope").as_deref() {
        Some("0") => "allowed between processes of a user (scope 0)",
        Some("1") => "only of own children (Yama scope 1)",
        Some("2") => "only with CAP_SYS_PTRACE (Yama scope 2)",
        Some("3") => "never (Yama scope 3)",
        Some(_) => "unknown Yama scope",
        None => "not restricted by Yama",
    };
    Finding::fact("ptrace", value).because("tensorwire does not need it")
}
