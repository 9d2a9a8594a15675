//! A worker that talks to another one of this process, and what loading the library does to a process.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::load::disposition;
use super::*;
use crate::device::Device;
use crate::host::Host;
use crate::span::Span;

/// No message is longer in these tests.
const MOST: usize = 4 << 20;
const LONG: Duration = Duration::from_secs(60);

/// The library, where there is one: the system's, or that of the active Python environment.
fn ucx() -> Option<&'static Ucx> {
    let folders = folders();
    Ucx::load(&folders).inspect_err(|error| println!("skipped: {error}")).ok()
}

fn folders() -> Vec<PathBuf> {
    std::env::var_os("VIRTUAL_ENV").map(|env| python_folders(&PathBuf::from(env))).unwrap_or_default()
}

/// Two workers, of which one thread takes turns.
fn turn(workers: &mut [&mut Worker], mut until: impl FnMut(usize, Event) -> bool) {
    let end = Instant::now() + LONG;
    loop {
        let mut enough = false;
        for (index, worker) in workers.iter_mut().enumerate() {
            worker.progress();
            for event in worker.events() {
                enough |= until(index, event);
            }
        }
        if enough {
            return;
        }
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}

#[test]
fn messages_of_all_sizes() {
    let Some(ucx) = ucx() else { return };
    let (mut here, mut there) = (Worker::new(ucx, MOST).unwrap(), Worker::new(ucx, MOST).unwrap());
    let memory = || Span::whole(Host.alloc(MOST).unwrap());
    let (from, to) = (memory(), memory());
    let (of_from, of_to) = (here.register(from.clone()).unwrap(), there.register(to.clone()).unwrap());
    let way = here.connect(&there.address().unwrap()).unwrap();
    for (number, len) in [0, 1, 100, 5000, 70_000, 1 << 20, MOST].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + number) as u8).collect();
        from.write(0, &bytes).unwrap();
        to.write(0, &vec![0; len]).unwrap();
        let body = match number % 2 {
            0 => Body::Bytes(bytes.clone()),
            _ => Body::Part(from.slice(0..len).unwrap(), of_from),
        };
        here.send(way, &[number as u8; 10], body, 5).unwrap();
        let (mut gone, mut got, mut offers) = (false, None, Vec::new());
        while !gone || got.is_none() {
            turn(&mut [&mut here, &mut there], |index, event| {
                match event {
                    Event::Done { token: 5, result, body } if index == 0 => {
                        result.unwrap();
                        assert!(body.is_some());
                        gone = true;
                    }
                    Event::Came { head, bytes } => {
                        assert_eq!((index, &head[..]), (1, &[number as u8; 10][..]));
                        got = Some(bytes);
                    }
                    Event::Offered { head, offer, len } => {
                        assert_eq!((index, &head[..]), (1, &[number as u8; 10][..]));
                        offers.push((offer, len));
                    }
                    Event::Done { token: 6, result, body: Some(Body::Part(span, _)) } => {
                        result.unwrap();
                        got = Some(span.to_vec().unwrap());
                    }
                    other => panic!("{other:?}"),
                }
                true
            });
            for (offer, offered) in offers.drain(..) {
                assert_eq!(offered, len);
                // What does not fit is refused, and the offer stays.
                assert!(there.receive(offer, Body::Bytes(vec![0; len - 1]), 7).is_err());
                there.receive(offer, Body::Part(to.slice(0..len).unwrap(), of_to), 6).unwrap();
            }
        }
        assert!(got.unwrap() == bytes, "{len} bytes");
    }
    assert_eq!(here.under_way(), 0);
    // Memory that is not registered any more cannot be sent from.
    here.unregister(of_from);
    assert!(here.send(way, b"", Body::Part(from, of_from), 5).is_err());
    here.disconnect(way, false, 9);
    turn(&mut [&mut here, &mut there], |_, event| matches!(event, Event::Done { token: 9, .. }));
}

/// One that is too long is dropped, and so is one that nobody wants.
#[test]
fn messages_that_nobody_takes() {
    let Some(ucx) = ucx() else { return };
    let (mut here, mut there) = (Worker::new(ucx, MOST).unwrap(), Worker::new(ucx, 1 << 20).unwrap());
    let way = here.connect(&there.address().unwrap()).unwrap();
    here.send(way, b"too long", Body::Bytes(vec![1; 3 << 20]), 1).unwrap();
    here.send(way, b"refused", Body::Bytes(vec![2; 1 << 20]), 2).unwrap();
    here.send(way, b"taken", Body::Bytes(vec![3; 10]), 3).unwrap();
    let (mut gone, mut refused, mut taken) = (0, Vec::new(), false);
    while gone < 3 || !taken {
        turn(&mut [&mut here, &mut there], |_, event| {
            match event {
                Event::Done { .. } => gone += 1,
                Event::Came { head, .. } => {
                    assert_ne!(head, b"too long");
                    taken |= head == b"taken";
                }
                Event::Offered { head, offer, .. } => {
                    assert_eq!(head, b"refused");
                    refused.push(offer);
                }
                Event::Lost { why, .. } => panic!("{why}"),
            }
            true
        });
        for offer in refused.drain(..) {
            there.refuse(offer);
            assert!(there.receive(offer, Body::Bytes(vec![0; 1 << 20]), 4).is_err());
        }
    }
}

/// Each function of the library fails: an error, or an end that says so, and nothing that is touched afterwards.
#[test]
fn each_call_fails() {
    let Some(ucx) = ucx() else { return };
    for call in Ucx::calls() {
        let failing = ucx.failing(call);
        let mut there = Worker::new(ucx, MOST).unwrap();
        let tried = (|| -> Result<()> {
            let mut here = Worker::new(failing, MOST)?;
            here.address()?;
            let memory = Span::whole(Host.alloc(MOST)?);
            let number = here.register(memory.clone())?;
            let way = here.connect(&there.address()?)?;
            here.send(way, b"head", Body::Part(memory, number), 1)?;
            for _ in 0..100 {
                here.progress();
                there.progress();
                for event in here.events() {
                    if let Event::Done { token: 1, result: Err(_), body } = event {
                        assert!(body.is_some());
                    }
                }
            }
            here.arm()?;
            Ok(())
        })();
        let text = tried.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.is_empty() || text.starts_with(call), "{call}: {text}");
        let fallible = ["init", "create", "get_address", "get_efd", "_arm", "mem_map", "set_am"];
        assert!(!text.is_empty() || !fallible.iter().any(|part| call.contains(part)), "{call}");
        there.progress();
    }
}

#[test]
fn an_endpoint_of_a_worker_that_is_gone() {
    let Some(ucx) = ucx() else { return };
    let (mut here, mut there) = (Worker::new(ucx, MOST).unwrap(), Worker::new(ucx, MOST).unwrap());
    let way = here.connect(&there.address().unwrap()).unwrap();
    here.send(way, b"", Body::Bytes(vec![1; 8]), 1).unwrap();
    turn(&mut [&mut here, &mut there], |_, event| matches!(event, Event::Came { .. }));
    drop(there);
    let end = Instant::now() + LONG;
    // It is lost, or what is sent to it ends in an error: when, is for the transport to find out.
    let mut over = false;
    while !over {
        assert!(Instant::now() < end);
        over = here.send(way, b"", Body::Bytes(vec![1; 8 << 10]), 2).is_err();
        here.progress();
        over |= here
            .events()
            .iter()
            .any(|event| matches!(event, Event::Lost { .. } | Event::Done { token: 2, result: Err(_), .. }));
    }
}

/// A part of this test runs in a process of its own: the library patches and handles in the moment in which it is loaded.
#[test]
fn loading_changes_nothing() {
    if std::env::var_os("UCX_LOADED_ALONE").is_none() {
        let test = "ucx::tests::loading_changes_nothing";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env("UCX_LOADED_ALONE", "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let handlers = || -> Vec<_> {
        (1..=libc::SIGRTMAX()).map(|signal| disposition(signal).map(|now| now.sa_sigaction)).collect()
    };
    let functions = [
        libc::mmap as *const u8,
        libc::munmap as *const u8,
        libc::mremap as *const u8,
        libc::madvise as *const u8,
        libc::brk as *const u8,
        libc::shmat as *const u8,
        libc::shmdt as *const u8,
    ];
    // SAFETY: code can be read, and no function of libc is shorter than its first instructions.
    let code = || functions.map(|function| unsafe { function.cast::<[u8; 8]>().read_unaligned() });
    let variables = || std::env::vars_os().collect::<Vec<_>>();
    // A thread changes handlers of its own: libc has made its first one by now.
    std::thread::spawn(|| {}).join().unwrap();
    let before = (handlers(), code(), variables());
    let Some(ucx) = ucx() else { return };
    let worker = Worker::new(ucx, MOST).unwrap();
    assert_eq!(before.0, handlers());
    assert_eq!(before.1, code());
    assert_eq!(before.2, variables());
    drop(worker);
    assert_eq!(before.0, handlers());
    // The same library again.
    assert!(std::ptr::eq(Ucx::load(&[]).unwrap(), ucx));
}

#[test]
fn without_the_library() {
    let folder = std::env::temp_dir().join(format!("no-ucx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libucp.so.0"), "no library").unwrap();
    let error = load::find_in(&[folder.join("libucp.so.0"), "libucp-is-not-there.so".into()]).unwrap_err();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = error.to_string();
    assert!(text.contains("needs libucp 1.13 or newer"), "{text}");
    assert!(text.contains("no-ucx-") && text.contains("libucp-is-not-there"), "{text}");
    // A library of another kind.
    let error = load::find_in(&["libc.so.6".into()]).unwrap_err();
    assert!(error.to_string().contains("it has no ucp_get_version"), "{error}");
}

#[test]
fn an_old_version() {
    for (version, fits) in
        [([1, 12, 1], false), ([0, 99, 0], false), ([2, 0, 0], false), ([1, 13, 0], true), ([1, 99, 9], true)]
    {
        assert_eq!(load::fits(version), fits, "{version:?}");
    }
}
