//! Cores, vector units, NUMA nodes, huge pages.

use rustix::thread::sched_getaffinity;
use tensorwire::topology::sysfs::text;

use super::report::{Finding, bytes};

pub(super) fn probe() -> Vec<Finding> {
    let mut findings = vec![
        Finding::fact("processor", model()),
        cores(),
        Finding::fact("vector units", simd()),
        Finding::fact(
            "NUMA nodes",
            text("/sys/devices/system/node/online")
                .map_or_else(|| "not told".into(), |nodes| format!("online: {nodes}")),
        ),
        memory(),
    ];
    findings.extend(huge_pages());
    findings
}

/// The processor's name.
pub(crate) fn model() -> String {
    let info = text("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| std::env::consts::ARCH.into(), |(_, name)| name.to_owned())
}

fn cores() -> Finding {
    let online = text("/sys/devices/system/cpu/online").unwrap_or_else(|| "unknown".into());
    match sched_getaffinity(None) {
        Ok(allowed) => Finding::fact("cores", format!("{} allowed (online: {online})", allowed.count())),
        Err(errno) => Finding::warn("cores", format!("online: {online}")).because(errno),
    }
}

#[cfg(target_arch = "x86_64")]
fn simd() -> String {
    let units = [
        ("AVX2", std::arch::is_x86_feature_detected!("avx2")),
        ("FMA", std::arch::is_x86_feature_detected!("fma")),
        ("F16C", std::arch::is_x86_feature_detected!("f16c")),
        ("AVX-512F", std::arch::is_x86_feature_detected!("avx512f")),
        ("AVX-512BW", std::arch::is_x86_feature_detected!("avx512bw")),
        ("AVX-512 BF16", std::arch::is_x86_feature_detected!("avx512bf16")),
        ("AVX-512 FP16", std::arch::is_x86_feature_detected!("avx512fp16")),
    ];
    let there: Vec<&str> = units.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    if there.is_empty() { "SSE2".into() } else { there.join(", ") }
}

#[cfg(not(target_arch = "x86_64"))]
fn simd() -> String {
    if cfg!(target_arch = "aarch64") { "NEON".into() } else { "unknown".into() }
}

fn memory() -> Finding {
    match (meminfo("MemTotal:"), meminfo("MemAvailable:")) {
        (Some(total), Some(free)) => {
            Finding::fact("memory", format!("{}, {} available", bytes(total), bytes(free)))
        }
        _ => Finding::warn("memory", "unknown").because("/proc/meminfo is not readable"),
    }
}

/// Bytes behind a key of /proc/meminfo.
fn meminfo(key: &str) -> Option<u64> {
    let info = text("/proc/meminfo")?;
    let mut fields = info.lines().find_map(|line| line.strip_prefix(key))?.split_whitespace();
    let number: u64 = fields.next()?.parse().ok()?;
    Some(if fields.next() == Some("kB") { number * 1024 } else { number })
}

fn huge_pages() -> Vec<Finding> {
    let mode = |file: &str| {
        let text = text(format!("/sys/kernel/mm/transparent_hugepage/{file}"))?;
        let chosen = text.split('[').nth(1)?.split(']').next()?;
        Some(chosen.to_owned())
    };
    let mut findings = Vec::new();
    findings.push(match mode("enabled") {
        None => Finding::off("huge pages", "none").because("the kernel has no transparent huge pages"),
        Some(mode) => Finding::fact("huge pages", format!("{mode} for private memory")),
    });
    if let Some(mode) = mode("shmem_enabled") {
        findings.push(match mode.as_str() {
            "never" | "deny" => Finding::off("huge shared pages", mode)
                .because("shared regions get small pages; set shmem_enabled to advise for fewer page faults"),
            _ => Finding::fact("huge shared pages", mode),
        });
    }
    if let (Some(total), Some(free), Some(size)) =
        (meminfo("HugePages_Total:"), meminfo("HugePages_Free:"), meminfo("Hugepagesize:"))
    {
        findings
            .push(Finding::fact("huge pages reserved", format!("{total} of {}, {free} free", bytes(size))));
    }
    findings
}
