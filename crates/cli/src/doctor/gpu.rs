//! GPUs, their libraries, and RDMA. Doctor loads NVML and CUDA and asks them. It looks for the files of the other
//! libraries and says where they are.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use tensorwire::device::Error;
use tensorwire::device::cuda::{self, OLDEST_DRIVER};
use tensorwire::device::gpu::Probe;
use tensorwire::device::nvml::Nvml;
use tensorwire::topology::sysfs::{names, text};

use super::report::Finding;

pub(super) fn probe() -> Vec<Finding> {
    let mut findings = vec![driver(), device_files(), nvml(), cuda()];
    for (name, file, without) in [
        ("NCCL", "libnccl.so.2", "optional: install nvidia-nccl, or PyTorch, which brings it"),
        ("verbs", "libibverbs.so.1", "install libibverbs1 (rdma-core) to use RDMA"),
    ] {
        findings.push(library(name, file, without));
    }
    findings.extend([fabric(), mps()]);
    findings.extend(rdma());
    findings.push(ucx());
    findings.push(gpu_direct());
    findings
}

fn driver() -> Finding {
    match text("/proc/driver/nvidia/version") {
        Some(version) => Finding::ok("GPU driver", version.lines().next().unwrap_or_default()),
        None if Path::new("/sys/module/amdgpu").exists() => {
            Finding::off("GPU driver", "amdgpu").because("only NVIDIA GPUs are known here")
        }
        None => Finding::off("GPU driver", "none")
            .because("no NVIDIA driver is loaded: /proc/driver/nvidia is missing"),
    }
}

/// What our kernels need, and what is here.
fn cuda() -> Finding {
    let (version, release) = OLDEST_DRIVER;
    let need = format!("at least driver {release} (CUDA {}.{})", version / 1000, version % 1000 / 10);
    let here = cuda::driver_version().and_then(|version| Ok((version, cuda::count()?)));
    match here {
        Ok(((major, minor), 0)) => Finding::warn("CUDA driver", format!("CUDA {major}.{minor}, no GPU"))
            .because("the process may see none: look at CUDA_VISIBLE_DEVICES"),
        Ok(((major, minor), gpus)) => {
            let finding =
                format!("CUDA {major}.{minor}, {gpus} GPU{}; {need}", if gpus == 1 { "" } else { "s" });
            match (major * 1000 + minor * 10) as i32 >= version {
                true => Finding::ok("CUDA driver", finding),
                false => Finding::warn("CUDA driver", finding).because("it is too old for our kernels"),
            }
        }
        Err(Error::Unsupported { have, .. }) => {
            Finding::off("CUDA driver", have).because(format!("needs {need}"))
        }
        Err(error) => Finding::warn("CUDA driver", error.to_string()).because(format!("needs {need}")),
    }
}

fn device_files() -> Finding {
    let is_gpu = |name: &&String| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let files = names("/dev");
    let gpus: Vec<&str> = files.iter().filter(is_gpu).map(String::as_str).collect();
    if gpus.is_empty() {
        return Finding::off("GPU devices", "none")
            .because("no /dev/nvidia0; in a container start it with its GPUs");
    }
    let missing =
        ["nvidiactl", "nvidia-uvm"].into_iter().filter(|needed| !files.iter().any(|file| file == needed));
    let missing: Vec<&str> = missing.collect();
    match missing.as_slice() {
        [] => Finding::ok("GPU devices", gpus.join(", ")),
        missing => Finding::warn("GPU devices", gpus.join(", "))
            .because(format!("/dev/{} is missing, so CUDA will not start", missing.join(" and /dev/"))),
    }
}

/// The management library; it says which driver is really loaded.
fn nvml() -> Finding {
    let asked =
        Nvml::open().and_then(|nvml| Ok((nvml.driver()?, nvml.compute_version().ok(), nvml.gpus()?.len())));
    match asked {
        Ok((driver, compute, gpus)) => {
            let compute = compute.map_or(String::new(), |(major, minor)| format!(", CUDA {major}.{minor}"));
            let gpus = if gpus == 1 { "1 GPU".into() } else { format!("{gpus} GPUs") };
            Finding::ok("NVML", format!("driver {driver}{compute}, {gpus}; see tensorwire topo"))
        }
        Err(Error::Unsupported { need, have, .. }) => {
            Finding::off("NVML", have).because(format!("needs {need}; without it NVLinks are not told"))
        }
        Err(error) => Finding::warn("NVML", "does not answer").because(error),
    }
}

fn library(name: &'static str, file: &str, without: &str) -> Finding {
    match find_library(file) {
        Some(path) => Finding::ok(name, format!("{}, not loaded", path.display())),
        None => Finding::off(name, format!("{file} not found")).because(without),
    }
}

/// Where the loader would look, and where containers and Python packages put them.
fn find_library(file: &str) -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty()).collect();
    let arch = std::env::consts::ARCH;
    folders
        .extend([format!("/usr/lib/{arch}-linux-gnu"), format!("/lib/{arch}-linux-gnu")].map(PathBuf::from));
    let usual =
        ["/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"];
    folders.extend(usual.map(PathBuf::from));
    folders.push("/usr/lib/wsl/lib".into());
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
        let lib = PathBuf::from(environment).join("lib");
        let pythons = names(&lib);
        folders.extend(pythons.iter().map(|python| lib.join(python).join("site-packages/nvidia/nccl/lib")));
    }
    in_loader_cache(file)
        .or_else(|| folders.into_iter().map(|folder| folder.join(file)).find(|path| path.exists()))
}

/// The cache ends in a table of strings, among them the whole paths.
fn in_loader_cache(file: &str) -> Option<PathBuf> {
    let cache = fs::read("/etc/ld.so.cache").ok()?;
    let ending = format!("/{file}");
    let found = cache.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    found
        .filter(|text| text.starts_with('/') && text.ends_with(&ending))
        .map(PathBuf::from)
        .find(|path| path.exists())
}

/// Multi-node NVLink: handles may cross hosts through an IMEX channel.
fn fabric() -> Finding {
    let channels = names("/dev/nvidia-caps-imex-channels");
    match channels.as_slice() {
        [] => Finding::off("fabric (IMEX)", "no channel")
            .because("fabric handles need multi-node NVLink and its daemon"),
        channels => Finding::fact("fabric (IMEX)", channels.join(", ")),
    }
}

fn mps() -> Finding {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    match Path::new(&folder).join("control").exists() {
        true => Finding::fact("MPS", format!("control pipe in {}", folder.display())),
        false => Finding::off("MPS", "not running").because("processes that share a GPU are time-sliced"),
    }
}

/// The library that carries messages between hosts where it is chosen (docs/links.md).
fn ucx() -> Finding {
    match tensorwire::ucx_library() {
        Ok((version, place)) => Finding::ok("UCX", format!("{version}, {place}")),
        Err(tensorwire::Error::Unsupported { need, have, .. }) => {
            Finding::off("UCX", have).because(format!("optional, to use RDMA between hosts: needs {need}"))
        }
        Err(error) => Finding::warn("UCX", error.to_string()).because("messages between hosts go by TCP"),
    }
}

fn rdma() -> Vec<Finding> {
    let devices = names("/sys/class/infiniband");
    if devices.is_empty() {
        return vec![Finding::off("RDMA", "no device").because("/sys/class/infiniband is empty or missing")];
    }
    let verbs = names("/dev/infiniband");
    let usable = verbs.iter().filter(|name| name.starts_with("uverbs"));
    let usable = usable.filter(|name| {
        OpenOptions::new().read(true).write(true).open(format!("/dev/infiniband/{name}")).is_ok()
    });
    let usable = usable.count();
    let mut findings: Vec<Finding> = devices.iter().flat_map(|device| ports(device)).collect();
    if usable == 0 {
        findings.push(
            Finding::warn("RDMA access", "no /dev/infiniband/uverbs can be opened")
                .because("in a container pass the devices on: --device=/dev/infiniband"),
        );
    }
    findings
}

fn ports(device: &str) -> Vec<Finding> {
    let folder = format!("/sys/class/infiniband/{device}/ports");
    let port = |number: &String| {
        let field = |name: &str| text(format!("{folder}/{number}/{name}")).unwrap_or_else(|| "?".into());
        let state = field("state");
        let state = state.split(": ").last().unwrap_or_default().to_owned();
        let value = format!("port {number} {state}, {}, {}", field("link_layer"), field("rate"));
        let name = format!("RDMA {device}");
        if state == "ACTIVE" {
            Finding::ok(name, value)
        } else {
            Finding::off(name, value).because("the link is down")
        }
    };
    names(&folder).iter().map(port).collect()
}

/// A NIC reaches GPU memory through a module of the driver's, or through dma-buf.
fn gpu_direct() -> Finding {
    let name = "GPUDirect RDMA";
    let peermem =
        Path::new("/sys/module/nvidia_peermem").exists() || Path::new("/sys/module/nv_peer_mem").exists();
    let nothing = names("/sys/class/infiniband").is_empty() || !Path::new("/proc/driver/nvidia").exists();
    match (nothing, peermem) {
        (true, _) => Finding::off(name, "no").because("needs an RDMA device and an NVIDIA driver"),
        (false, true) => Finding::ok(name, "nvidia-peermem is loaded"),
        (false, false) => Finding::fact(name, "nvidia-peermem is not loaded")
            .because("dma-buf does it too with an open kernel driver and Linux 5.12; only trying tells"),
    }
}
