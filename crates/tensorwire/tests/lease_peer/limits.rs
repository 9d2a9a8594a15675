//! Descriptors and address space that a process may have, and those that it has used up.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Allows this process so much more of something than it has now; the most again with nothing.
pub fn limit(resource: Resource, more: Option<u64>) {
    let limit = getrlimit(resource);
    let current = more.map_or(limit.maximum, |more| {
        let now = match resource {
            Resource::Nofile => highest_fd() + 1,
            _ => address_space(),
        };
        Some(now + more)
    });
    setrlimit(resource, Rlimit { current, ..limit }).unwrap();
}

fn highest_fd() -> u64 {
    let names = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().file_name());
    let open: Vec<u64> = names.map(|name| name.to_str().unwrap().parse().unwrap()).collect();
    // The one that lists them is gone again. Gaps would be room.
    let open: Vec<u64> = open.into_iter().filter(|fd| is_open(*fd)).collect();
    open.into_iter().max().unwrap()
}

fn is_open(fd: u64) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok_and(|to| !to.starts_with("/proc"))
}

fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

/// Takes all descriptors but a few.
pub fn fill_descriptors_but(few: u8) -> Vec<std::fs::File> {
    limit(Resource::Nofile, Some(u64::from(few)));
    let all = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok());
    let mut files: Vec<_> = all.collect();
    files.truncate(files.len().saturating_sub(usize::from(few)));
    files
}
