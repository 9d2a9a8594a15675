//! What runs out first: locked memory, descriptors, /dev/shm, the cgroup's memory.

use std::fs;
use std::path::PathBuf;

use rustix::fs::statvfs;
use rustix::process::{Resource, getrlimit};
use tensorwire::topology::sysfs::text;

use super::report::{Finding, bytes};

pub(super) fn probe() -> Vec<Finding> {
    vec![locked_memory(), descriptors(), dev_shm(), cgroup_memory(), cgroup_cpu()]
}

fn locked_memory() -> Finding {
    let name = "locked memory";
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok(name, "unlimited"),
        Some(limit) if limit >= 1 << 30 => Finding::ok(name, bytes(limit)),
        Some(limit) => Finding::warn(name, bytes(limit))
            .because("pinning memory for a NIC may fail; raise it with ulimit -l, or --ulimit memlock=-1"),
    }
}

fn descriptors() -> Finding {
    let name = "open files";
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.map_or("unlimited".into(), |limit| limit.to_string());
    match limit.current {
        None => Finding::ok(name, "unlimited"),
        Some(soft) if soft >= 4096 => Finding::ok(name, format!("{soft} (hard limit {hard})")),
        Some(soft) => Finding::warn(name, format!("{soft} (hard limit {hard})"))
            .because("a store with many clients needs more; raise it with ulimit -n"),
    }
}

fn dev_shm() -> Finding {
    let finding = match statvfs("/dev/shm") {
        Ok(shm) => {
            let (size, free) = (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize);
            Finding::fact("/dev/shm", format!("{}, {} free", bytes(size), bytes(free)))
        }
        Err(errno) => Finding::fact("/dev/shm", format!("not there: {errno}")),
    };
    finding.because("tensorwire does not use it: its memory has no name and no mount")
}

/// The first level of the own cgroup that limits it; memfds count there too.
fn cgroup_memory() -> Finding {
    let name = "cgroup memory";
    match cgroup_value("memory.max", |value| value != "max") {
        Some(limit) => {
            Finding::fact(name, limit.parse().map_or(limit, bytes)).because("shared memory counts too")
        }
        None => Finding::ok(name, "no limit"),
    }
}

fn cgroup_cpu() -> Finding {
    let name = "cgroup CPU";
    let value = cgroup_value("cpu.max", |value| !value.starts_with("max"));
    let parsed = value.as_ref().and_then(|value| {
        let (quota, period) = value.split_once(' ')?;
        Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
    });
    match (parsed, value) {
        (Some(cores), _) => Finding::warn(name, format!("{cores:.1} cores"))
            .because("ranks that wait for each other stand still together when the quota is used up"),
        (None, Some(value)) => Finding::fact(name, value),
        (None, None) => Finding::ok(name, "no limit"),
    }
}

fn cgroup_value(file: &str, limits: impl Fn(&str) -> bool) -> Option<String> {
    let line = text("/proc/self/cgroup")?;
    let path = line.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = PathBuf::from("/sys/fs/cgroup");
    let own = root.join(path);
    let levels = own.ancestors().take_while(|level| level.starts_with(&root));
    levels
        .filter_map(|level| fs::read_to_string(level.join(file)).ok())
        .map(|value| value.trim().to_owned())
        .find(|value| limits(value))
}
