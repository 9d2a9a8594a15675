//! What processes need to share host memory. Each part is tried with a small example.

use std::io::{IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Stdio;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::{ClockId, futex};
use tensorwire::topology::sysfs::text;

use super::report::Finding;
use crate::this_program;

const PAGE: u64 = 4096;

pub(super) fn probe() -> Vec<Finding> {
    vec![
        tried("memfd", sealed_memfd().map(|_| "created, allocated and sealed".into())),
        tried("fd passing", pass_descriptor().map(|()| "a memfd crossed a socket (SCM_RIGHTS)".into())),
        abstract_socket(),
        same_user(),
        tried("pidfd", see_death().map(|()| "the end of a process was seen".into())),
        futex_waitv(),
        tried("loopback TCP", loopback().map(|port| format!("127.0.0.1, port {port} was free"))),
    ]
}

fn tried(name: &str, result: Result<String, String>) -> Finding {
    match result {
        Ok(value) => Finding::ok(name, value),
        Err(reason) => Finding::fail(name, "does not work").because(reason),
    }
}

/// Memory as regions have it: really there, and sealed against a change of its size.
fn sealed_memfd() -> Result<OwnedFd, String> {
    let fd = memfd_create("tensorwire-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|errno| format!("memfd_create: {errno}"))?;
    fallocate(&fd, FallocateFlags::empty(), 0, PAGE).map_err(|errno| format!("fallocate: {errno}"))?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(|errno| format!("F_ADD_SEALS: {errno}"))?;
    match rustix::fs::ftruncate(&fd, 0) {
        Err(Errno::PERM) => Ok(fd),
        other => Err(format!("a sealed memfd could be resized ({other:?})")),
    }
}

fn pass_descriptor() -> Result<(), String> {
    let io = |doing: &'static str| move |error| format!("{doing}: {error}");
    let memory = sealed_memfd()?;
    let (left, right) = UnixStream::pair().map_err(|error| format!("socketpair: {error}"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memory.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(&left, &[IoSlice::new(&[1])], &mut control, SendFlags::empty()).map_err(io("sendmsg"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&right, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(io("recvmsg"))?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let received = received.ok_or("the descriptor was dropped on the way")?;
    let inode = |fd: &OwnedFd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino)).map_err(io("fstat"));
    if inode(&received)? == inode(&memory)? { Ok(()) } else { Err("another descriptor arrived".into()) }
}

/// Where it does not work, a folder for sockets does.
fn abstract_socket() -> Finding {
    let name = "abstract sockets";
    match connect_abstract() {
        Ok(_) => Finding::ok(name, "bound, connected"),
        Err(error) => Finding::warn(name, error).because("set TENSORWIRE_SOCKET_DIR to a folder of your own"),
    }
}

fn connect_abstract() -> std::io::Result<(UnixStream, UnixStream)> {
    let unique = format!("tensorwire-doctor-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(unique)?;
    let listener = UnixListener::bind_addr(&address)?;
    let near = UnixStream::connect_addr(&address)?;
    Ok((near, listener.accept()?.0))
}

/// A peer is let in by its uid, which the kernel tells. It cannot tell one that has no number here.
fn same_user() -> Finding {
    let name = "peer credentials";
    let credentials = UnixStream::pair().map_err(|error| error.to_string()).and_then(|(near, far)| {
        // Held until the kernel was asked.
        let _far = far;
        rustix::net::sockopt::socket_peercred(&near).map_err(|errno| errno.to_string())
    });
    let overflow = text("/proc/sys/kernel/overflowuid").and_then(|uid| uid.parse().ok()).unwrap_or(65534);
    match credentials {
        Err(reason) => Finding::fail(name, "not told by the kernel").because(reason),
        Ok(peer) if peer.uid.as_raw() == overflow => {
            Finding::fail(name, format!("uid {overflow} (overflow)")).because(
                "this user has no number in its user namespace, so peers cannot be told apart: map the uid",
            )
        }
        Ok(peer) if peer.uid != rustix::process::getuid() => Finding::fail(name, "another uid than ours"),
        Ok(peer) => Finding::ok(name, format!("uid {}", peer.uid.as_raw())),
    }
}

/// Starts a process that ends at once, and sees it end by its pidfd.
fn see_death() -> Result<(), String> {
    let io = |doing: &'static str| move |error| format!("{doing}: {error}");
    let mut child = this_program::command()
        .arg("--version")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| format!("starting a process: {error}"))?;
    let pid = Pid::from_raw(child.id() as i32).ok_or("a process without a number")?;
    let seen = pidfd_open(pid, PidfdFlags::empty()).map_err(io("pidfd_open")).and_then(|pidfd| {
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        match poll(&mut fds, Some(&patience)).map_err(io("poll"))? {
            0 => Err("the pidfd of an ended process did not become readable".into()),
            _ => Ok(()),
        }
    });
    if seen.is_err() {
        let _ = child.kill();
    }
    let _ = child.wait();
    seen
}

/// Asked to wait for nothing, the call says that this is nonsense, if it exists.
fn futex_waitv() -> Finding {
    let name = "futex_waitv";
    match futex::waitv(&[], futex::WaitvFlags::empty(), None, ClockId::Monotonic) {
        Err(Errno::INVAL) => Finding::ok(name, "there"),
        Err(Errno::NOSYS) => Finding::off(name, "not there").because("needs Linux 5.16"),
        Err(Errno::PERM) => Finding::off(name, "forbidden").because("a seccomp filter refuses it"),
        other => Finding::off(name, "unexpected").because(format!("{other:?}")),
    }
}

fn loopback() -> Result<u16, String> {
    let io = |error: std::io::Error| error.to_string();
    let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    let mut near = TcpStream::connect(address).map_err(io)?;
    near.write_all(&[1]).map_err(io)?;
    Ok(address.port())
}
