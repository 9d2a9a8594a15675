//! Leases where things go wrong: owners that are stopped, processes without descriptors or address space, other users,
//! namespaces, forks, and many threads at once.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "lease_peer/mod.rs"]
mod lease_peer;
#[path = "../../device/tests/process/mod.rs"]
mod process;

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lease_peer::{
    LONG, MemoryKind, Peer, byte, context, fill_descriptors_but, limit, memory, namespaces, settles, soon,
    usage,
};
use process::{Child, TempDir, command, command_under, skip};
use rustix::process::{Resource, Signal};
use tensorwire::device::subregion::keeping;
use tensorwire::{Config, Context, Deadline, Lease, Loan, Span, Terms, Token};

/// What other processes do.
#[test]
fn child() {
    match process::role().as_deref() {
        Some("runs out of descriptors") => run_out_of_descriptors(),
        Some("runs out of address space") => run_out_of_address_space(),
        Some("is another user") => redeem_as_another_user(),
        Some("serves in a socket directory") => {
            let context = context_in(std::env::var("TW_DIR").unwrap().into());
            lease_peer::serve(&context, MemoryKind::Host);
        }
        Some("forks") => fork_as_a_holder(),
        Some(role) => lease_peer::run(role),
        None => {}
    }
}

fn short() -> Deadline {
    Deadline::after(Duration::from_millis(300))
}

fn peer() -> Peer {
    Peer::start(MemoryKind::Host).warm()
}

#[test]
fn a_stopped_owner_holds_nobody_up() {
    let (us, them) = (context(), peer());
    let pid = them.child.pid().to_string();
    let first = them.grants(5000, 1).unwrap();
    let again = them.grants_again().unwrap();
    let loan = us.redeem(&first, soon()).unwrap();
    let (second, third) = (them.grants(6000, 2).unwrap(), them.grants(6000, 3).unwrap());
    them.stop();

    // What is mapped works, and may be redeemed again.
    loan.span().write(0, &[9]).unwrap();
    let more = us.redeem(&again, short()).unwrap();
    assert_eq!(byte(more.span()), 9);
    drop(more);
    // What is not has a deadline; for a process that never met the owner, too.
    let stranger = context();
    for context in [&us, &us, &stranger] {
        let error = context.redeem(&second, short()).unwrap_err();
        assert!(error.is_timeout() && error.to_string().contains(&pid), "{error}");
    }
    // A thread that waits long does not hold up one that does not.
    let patient = {
        let (us, second) = (us.clone(), second.clone());
        std::thread::spawn(move || us.redeem(&second, soon()).map(|loan| byte(loan.span())))
    };
    std::thread::sleep(Duration::from_millis(50));
    let begin = Instant::now();
    let error = us.redeem(&third, short()).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains(&pid), "{error}");
    assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
    assert!(!patient.is_finished());
    drop(loan);

    them.signal(Signal::CONT);
    // Answers to what was given up long ago are not taken for others.
    assert_eq!(patient.join().unwrap().unwrap(), 2);
    for (token, value) in [(&third, 3), (&second, 2)] {
        assert_eq!(byte(us.redeem(token, soon()).unwrap().span()), value);
    }
    assert_eq!(byte(stranger.redeem(&third, soon()).unwrap().span()), 3);
    them.drop_leases().unwrap();
    settles(|| them.stats().unwrap().0, 0);
}

/// A request that was given up is answered later, and another one asked meanwhile.
#[test]
fn a_late_answer_is_not_taken_for_another() {
    let (us, them) = (context(), peer());
    drop(us.redeem(&them.grants(10, 0).unwrap(), soon()).unwrap());
    let tokens: Vec<Token> = (1..5).map(|value| them.grants(6000, value).unwrap()).collect();
    them.stop();
    us.redeem(&tokens[0], short()).unwrap_err();
    them.signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(50));
    for (index, token) in tokens.iter().enumerate().rev() {
        assert_eq!(usize::from(byte(us.redeem(token, soon()).unwrap().span())), index + 1);
    }
}

/// A redemption that fails is none: the token is as good as before, also when its owner has dropped the lease.
#[test]
fn a_failed_redemption_uses_nothing_up() {
    let (us, them) = (context(), peer());
    drop(us.redeem(&them.grants(10, 0).unwrap(), soon()).unwrap());
    let tokens = [them.grants(6000, 5).unwrap(), them.grants(6000, 6).unwrap()];
    them.drop_leases().unwrap();
    them.stop();
    for token in &tokens {
        assert!(us.redeem(token, short()).unwrap_err().is_timeout());
    }
    them.signal(Signal::CONT);
    assert_eq!(them.stats().unwrap().0, 2);
    assert_eq!(byte(us.redeem(&tokens[0], soon()).unwrap().span()), 5);
    settles(|| them.stats().unwrap().0, 1);
    // One that is not wanted is used up without its memory.
    us.discard(&tokens[1], soon()).unwrap();
    settles(|| them.stats().unwrap().0, 0);
    assert!(us.discard(&tokens[1], soon()).unwrap_err().to_string().contains("over"));
}

/// A holder that is stopped in the middle of anything holds up nobody but itself.
#[test]
fn a_stopped_holder_holds_nobody_up() {
    let us = context();
    for step in 2..9 {
        let (stopped, other) = (peer(), peer());
        let grant = |value| us.grant(&memory(&us, 5000, value), &Terms::default()).unwrap();
        let (first, second) = (grant(1), grant(2));
        let tokens = [first.token().clone(), second.token().clone()];
        assert_eq!(other.redeem(&tokens[1]), Ok(2));
        drop((first, second));
        stopped.stops_at(step).unwrap();
        stopped.say(b'r', &tokens[0].to_bytes()).unwrap();
        stopped.say(b'd', &[]).unwrap();
        settles(|| stopped.is_stopped(), true);
        // What others release is heard, and what they redeem is there.
        other.release_last().unwrap();
        settles(|| us.lease_stats().unwrap().granted.1 <= 5000, true);
        let third = grant(3);
        assert_eq!(other.redeem(third.token()), Ok(3));
        other.release_last().unwrap();
        third.wait(soon()).unwrap();
        drop(third);
        stopped.signal(Signal::CONT);
        assert_eq!(stopped.hear(), Ok(vec![1]));
        stopped.hear().unwrap();
        settles(|| us.lease_stats().unwrap().granted, (0, 0));
    }
}

#[test]
fn out_of_descriptors() {
    Child::start(&mut command("runs out of descriptors")).succeed();
}

fn run_out_of_descriptors() {
    let (them, us, fresh) = (peer(), context(), context());
    drop(us.redeem(&them.grants(10, 0).unwrap(), soon()).unwrap());
    let (first, second) = (them.grants(5000, 1).unwrap(), them.grants(5000, 2).unwrap());
    // The mapping of the first loan goes by itself.
    settles(|| us.mapped().0, 3);
    let span = memory(&us, 100, 1);
    // Who lends memory has a descriptor for the thread that answers for it, from the first grant on.
    drop(us.grant(&span, &Terms::default()).unwrap());
    let before = usage();
    for few in [0, 1, 2, 3, 5, 8] {
        let files = fill_descriptors_but(few);
        // Memory that is not mapped yet; first contact of another context, as a holder and as an owner.
        let mut errors = Vec::new();
        errors.extend(us.redeem(&first, soon()).err());
        errors.extend(fresh.redeem(&second, soon()).err());
        errors.extend(fresh.grant(&span, &Terms::default()).err());
        errors.extend(us.alloc(100).err());
        drop(files);
        limit(Resource::Nofile, None);
        assert!(few > 0 || errors.len() == 4, "{errors:?}");
        for error in errors {
            assert!(error.to_string().contains("ulimit -n"), "with {few} left: {error}");
        }
        // What one owner granted works without new descriptors, full or not.
        drop(us.grant(&span, &Terms::default().uses(0)).unwrap());
        if few == 0 {
            assert_eq!(usage(), before, "nothing is half there");
        }
    }
    assert_eq!(byte(us.redeem(&first, soon()).unwrap().span()), 1);
    assert_eq!(byte(fresh.redeem(&second, soon()).unwrap().span()), 2);

    // Now the owner has none.
    let third = them.grants(5000, 3).unwrap();
    them.ask(b'n', &[0]).unwrap();
    let error = us.redeem(&third, soon()).unwrap_err().to_string();
    assert!(error.contains("ulimit -n") && error.contains(&them.child.pid().to_string()), "{error}");
    // A stranger does not come in; it has a deadline.
    let stranger = context();
    let begin = Instant::now();
    stranger.redeem(&third, short()).unwrap_err();
    assert!(begin.elapsed() < LONG / 2);
    them.ask(b'N', &[]).unwrap();
    for few in [1, 2, 3, 4, 5, 6, 8] {
        them.ask(b'n', &[few]).unwrap();
        // Perhaps it comes in, perhaps not; and it always gets an answer.
        if let Err(error) = context().redeem(&third, Deadline::after(Duration::from_secs(2))) {
            let text = error.to_string();
            assert!(text.contains("ulimit -n") || error.is_timeout(), "with {few} left: {text}");
        }
        them.ask(b'N', &[]).unwrap();
    }
    for context in [&us, &stranger, &fresh] {
        assert_eq!(byte(context.redeem(&third, soon()).unwrap().span()), 3);
    }
    them.drop_leases().unwrap();
    settles(|| them.stats().unwrap().0, 0);
}

#[test]
fn out_of_address_space() {
    Child::start(&mut command("runs out of address space")).succeed();
}

fn run_out_of_address_space() {
    let (them, us, fresh) = (peer(), context(), context());
    drop(us.redeem(&them.grants(10, 0).unwrap(), soon()).unwrap());
    let (large, small) = (them.grants(64 << 20, 7).unwrap(), them.grants(5000, 2).unwrap());
    settles(|| us.mapped().0, 3);
    let before = usage();
    limit(Resource::As, Some(1 << 20));
    let errors = [
        us.redeem(&large, soon()).unwrap_err().to_string(),
        // A book and a row have no room, either; and no thread has.
        fresh.redeem(&small, soon()).unwrap_err().to_string(),
        us.alloc(32 << 20).unwrap_err().to_string(),
    ];
    limit(Resource::As, None);
    assert!(errors.iter().all(|error| error.contains("ulimit -v")), "{errors:?}");
    assert_eq!(usage(), before, "nothing is half mapped");
    assert_eq!(byte(us.redeem(&large, soon()).unwrap().span()), 7);
    assert_eq!(byte(fresh.redeem(&small, soon()).unwrap().span()), 2);
    them.drop_leases().unwrap();
    settles(|| them.stats().unwrap().0, 0);
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can start a process of another user");
    }
    let us = context();
    let lease = us.grant(&memory(&us, 10, 1), &Terms::default()).unwrap();
    // Nobody else may look into a build folder of root's, so the child runs a copy.
    let dir = TempDir::open_to_all();
    let copy = dir.path().join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let wrapper = ["/bin/sh", "-c", "shift; exec \"$TW_COPY\" \"$@\"", "sh"];
    let token: String = lease.token().to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut other = command_under(&wrapper, "is another user");
    other.env("TW_COPY", &copy).env("TW_TOKEN", token).current_dir("/").uid(65533).gid(65533);
    Child::start(&mut other).succeed();
    assert_eq!(us.lease_stats().unwrap().holders, 0);
}

fn redeem_as_another_user() {
    let text = std::env::var("TW_TOKEN").unwrap();
    let byte = |index: usize| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..text.len() / 2).map(byte).collect();
    let us = context();
    let error = us.redeem(&Token::from_bytes(&bytes).unwrap(), soon()).unwrap_err().to_string();
    assert!(error.contains("uid"), "{error}");
    assert_eq!(us.mapped(), (0, 0));
}

#[test]
fn across_pid_namespaces() {
    let Some(wrapper) = namespaces(&["--pid", "--fork", "--kill-child", "--mount-proc"]) else { return };
    let us = context();
    let mut them = Peer::start_with(&mut command_under(&wrapper, &MemoryKind::Host.role()), None);
    // Both ways.
    let lease = us.grant(&memory(&us, 10, 4), &Terms::default()).unwrap();
    assert_eq!(them.redeem(lease.token()), Ok(4));
    let loan = us.redeem(&them.grants(5000, 5).unwrap(), soon()).unwrap();
    assert_eq!(byte(loan.span()), 5);
    // And its death is heard, by its pidfd: the pid that it calls its own is another process's here.
    them.child.kill();
    lease.wait(soon()).unwrap();
    assert_eq!(byte(loan.span()), 5);
    settles(|| us.lease_stats().unwrap().holders, 0);
}

/// A context that listens in a directory.
fn context_in(dir: PathBuf) -> Arc<Context> {
    let mut config = Config::default();
    config.socket_dir = Some(dir);
    Context::new(config).unwrap()
}

#[test]
fn across_network_namespaces() {
    let Some(wrapper) = namespaces(&["--net"]) else { return };
    let dir = TempDir::new();
    // The order to redeem comes through the directory in any case.
    let start = |role: &str| {
        let mut command = command_under(&wrapper, role);
        Peer::start_with(command.env("TW_DIR", dir.path()), Some(dir.path()))
    };
    let us = context_in(dir.path().into());
    let lease = us.grant(&memory(&us, 10, 4), &Terms::default()).unwrap();
    let them = start("serves in a socket directory");
    assert_eq!(them.redeem(lease.token()), Ok(4));
    let token = them.grants(5000, 5).unwrap();
    // Where the owner listens counts, not where the holder does.
    for context in [&us, &context()] {
        assert_eq!(byte(context.redeem(&token, soon()).unwrap().span()), 5);
    }
    them.drop_all().unwrap();
    lease.wait(soon()).unwrap();
    them.leave();

    let them = start(&MemoryKind::Host.role());
    let us = context();
    let lease = us.grant(&memory(&us, 10, 4), &Terms::default()).unwrap();
    let theirs = them.grants(5000, 5).unwrap();
    for error in
        [them.redeem(lease.token()).unwrap_err().text(), us.redeem(&theirs, soon()).unwrap_err().to_string()]
    {
        assert!(error.contains("network namespace") && error.contains("TENSORWIRE_SOCKET_DIR"), "{error}");
    }
    them.leave();
}

/// Forks; the child runs `body` and ends with its result. Gives the child's exit code.
fn forked(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child only runs `body`, which does what works after a fork in a process with threads under glibc, and
    // leaves by _exit.
    let child = match unsafe { libc::fork() } {
        0 => {
            let code = body();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        child => child,
    };
    assert!(child > 0, "fork failed");
    let end = Instant::now() + LONG;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            return if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
        }
        if Instant::now() > end {
            // SAFETY: the child is ours and not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the forked child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_forked_child_disturbs_nobody() {
    Child::start(&mut command("forks")).succeed();
}

fn fork_as_a_holder() {
    let (us, them) = (context(), peer());
    let mut loan = Some(us.redeem(&them.grants(5000, 5).unwrap(), soon()).unwrap());
    let token = them.grants_again().unwrap();
    them.drop_leases().unwrap();
    let span = memory(&us, 10, 1);
    let mut lease = Some(us.grant(&span, &Terms::default()).unwrap());
    assert_eq!(them.redeem(lease.as_ref().unwrap().token()), Ok(1));

    // Again and again while a thread keeps the locks busy: they may be held for ever in the child.
    let stop = Arc::new(AtomicBool::new(false));
    let busy = std::thread::spawn({
        let (us, stop) = (us.clone(), stop.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                drop(us.grant(&span, &Terms::default().uses(0)).unwrap());
            }
        }
    });
    for round in 0..20 {
        let code = forked(|| {
            let mine = lease.take().unwrap();
            let refused = [
                us.redeem(&token, short()).map(drop),
                us.discard(&token, short()),
                us.lease_stats().map(drop),
                us.collect().map(drop),
                mine.renew(Duration::from_secs(1)),
                mine.wait(short()),
                us.renew(mine.token(), Duration::from_secs(1)),
            ];
            if let Some(wrong) = refused.iter().position(|result| {
                !result.as_ref().is_err_and(|error| error.to_string().contains("parent process"))
            }) {
                return 1 + wrong as i32;
            }
            if !mine.holders().is_empty() || us.outstanding().is_some() {
                return 20;
            }
            let mine = (loan.take().unwrap(), mine);
            if round % 2 == 0 {
                drop(mine);
            }
            0
        });
        assert_eq!(code, 0);
    }
    stop.store(true, Ordering::Relaxed);
    busy.join().unwrap();

    // What the children dropped is still held by their parent, and lent by it.
    assert_eq!(byte(loan.as_ref().unwrap().span()), 5);
    assert_eq!(them.stats().unwrap().0, 2);
    assert_eq!(lease.as_ref().unwrap().holders().len(), 1);
    loan = None;
    settles(|| them.stats().unwrap().0, 1);
    drop(us.redeem(&token, soon()).unwrap());
    settles(|| them.stats().unwrap().0, 0);
    them.release_last().unwrap();
    lease.as_ref().unwrap().wait(soon()).unwrap();
    lease = None;
    assert!(loan.is_none() && lease.is_none());
}

/// A grant, as a plain model sees it.
#[derive(Default)]
struct Counted {
    redeemed: AtomicUsize,
    /// Whether its memory has been let go.
    over: AtomicBool,
}

/// Says when the memory of a grant is let go.
struct Over(Arc<Vec<Counted>>, usize);

impl Drop for Over {
    fn drop(&mut self) {
        self.0[self.1].over.store(true, Ordering::SeqCst);
    }
}

/// Many threads of two processes' worth of contexts redeem and release the same and different tokens, while the owner drops
/// leases and grants anew. A plain counter for each grant says what must be: memory is never over while it is held, every
/// use that is waited for takes place, and nothing is left.
#[test]
fn many_threads_at_once() {
    const THREADS: usize = 6;
    const ROUNDS: usize = 200;
    const USES: u16 = 3;
    let (owner, others) = (context(), [context(), context()]);
    let counts: Arc<Vec<Counted>> = Arc::new((0..ROUNDS).map(|_| Counted::default()).collect());
    let open: Arc<Mutex<Vec<(usize, Token)>>> = Arc::default();
    let ended = Arc::new(AtomicBool::new(false));
    let redeemed = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (counts, open, ended, redeemed) =
                (counts.clone(), open.clone(), ended.clone(), redeemed.clone());
            // Some redeem in the owner's own context.
            let us = [&others[0], &others[1], &owner][thread % 3].clone();
            std::thread::spawn(move || {
                let mut held: Vec<(usize, Loan)> = Vec::new();
                let mut turn = thread;
                while !ended.load(Ordering::Acquire) || !held.is_empty() {
                    turn =
                        turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let choice = {
                        let open = open.lock().unwrap();
                        (!open.is_empty()).then(|| open[(turn >> 33) % open.len()].clone())
                    };
                    // More often than is waited for, but not for ever.
                    let choice = choice.filter(|(grant, _)| {
                        counts[*grant].redeemed.load(Ordering::SeqCst) < 4 * usize::from(USES)
                    });
                    if let Some((grant, token)) = choice.filter(|_| held.len() < 4) {
                        match us.redeem(&token, soon()) {
                            Ok(loan) => {
                                assert_eq!(byte(loan.span()), grant as u8, "other memory");
                                counts[grant].redeemed.fetch_add(1, Ordering::SeqCst);
                                redeemed.fetch_add(1, Ordering::Relaxed);
                                held.push((grant, loan));
                            }
                            Err(error) => assert!(error.to_string().contains("the token is over"), "{error}"),
                        }
                    }
                    let enough = held.len() >= 4 || turn >> 40 & 1 == 0 || ended.load(Ordering::Acquire);
                    if enough && !held.is_empty() {
                        let (grant, loan) = held.remove(0);
                        assert_eq!(byte(loan.span()), grant as u8, "it was let go while it was held");
                        assert!(!counts[grant].over.load(Ordering::SeqCst));
                    }
                }
            })
        })
        .collect();
    let mut leases: Vec<(usize, Lease)> = Vec::new();
    for grant in 0..ROUNDS {
        let (region, over) = (memory(&owner, 64, grant as u8).region().clone(), Over(counts.clone(), grant));
        let span = Span::whole(keeping(region, 0..64, Box::new(over)).unwrap());
        let lease = owner.grant(&span, &Terms::default().uses(USES)).unwrap();
        drop(span);
        open.lock().unwrap().push((grant, lease.token().clone()));
        leases.push((grant, lease));
        if leases.len() >= 8 {
            let (grant, lease) = leases.remove(grant % 8);
            // Dropped with its token on the way (who comes may still redeem it as often as was said), or waited for.
            if grant % 2 == 1 {
                lease.wait(soon()).unwrap();
                assert!(counts[grant].redeemed.load(Ordering::SeqCst) >= usize::from(USES));
                assert!(!counts[grant].over.load(Ordering::SeqCst), "its owner has it still");
            }
        }
        // Tokens that are over are tried as well, but not only.
        let mut open = open.lock().unwrap();
        if open.len() > 16 {
            open.retain(|(grant, _)| {
                let Counted { redeemed, over } = &counts[*grant];
                !over.load(Ordering::SeqCst) || redeemed.load(Ordering::SeqCst) + grant % 7 < 8
            });
        }
    }
    leases.into_iter().for_each(|(_, lease)| lease.wait(soon()).unwrap());
    // The rest of the uses.
    settles(|| owner.lease_stats().unwrap().waiting.0, 0);
    ended.store(true, Ordering::Release);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    settles(|| owner.lease_stats().unwrap().granted, (0, 0));
    assert!(redeemed.load(Ordering::Relaxed) >= ROUNDS * usize::from(USES));
    settles(|| counts.iter().filter(|count| !count.over.load(Ordering::SeqCst)).count(), 0);
    assert!(counts.iter().all(|count| count.redeemed.load(Ordering::SeqCst) >= usize::from(USES)));
}
