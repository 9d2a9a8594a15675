use std::os::fd::AsFd;
use std::time::Duration;

use tensorwire_device::Deadline;
use tensorwire_device::fd::{self, Address, Handshake, HandshakeStep, Listener, MAX_MESSAGE};
use tensorwire_device::host::private;
use tensorwire_device::subregion::part;

use super::frames::{Answer, Question};
use super::*;
use crate::config::Config;
use crate::watch::Watcher;

const LONG: Duration = Duration::from_secs(60);

fn soon() -> Deadline {
    Deadline::after(LONG)
}

fn patient() -> Patience<'static> {
    Patience { deadline: soon(), sensible: &|| true }
}

/// A process with a domain, as far as memory goes.
struct Process {
    share: Arc<Share>,
    watcher: Watcher,
    domain: Arc<Everything>,
    id: Id,
    secret: Secret,
}

/// A domain that lets everybody have what is offered in it, and counts guests.
struct Everything {
    share: Weak<Share>,
    id: Id,
    gone: Mutex<Vec<u64>>,
    guests: Arc<()>,
}

impl Domain for Everything {
    fn memory(&self, number: u64, _pass: &[u8]) -> Result<Arc<dyn Region>, (Reason, String)> {
        let found = self.share.upgrade().and_then(|share| share.offered(number, self.id));
        found.ok_or_else(|| (Reason::Gone, format!("no {number}")))
    }

    fn greet(&self, _peer: &Peer, hello: &[u8], fds: Vec<Fd>) -> Result<Welcome> {
        Ok(Welcome { body: hello.to_vec(), fds, guest: Box::new(self.guests.clone()) })
    }

    fn released(&self, number: u64) {
        self.gone.lock().unwrap().push(number);
    }
}

impl Process {
    fn start() -> Self {
        let share = Share::new(Id::random().unwrap(), &Arc::new(Devices::new()));
        let watcher = Watcher::start(&share, &Config::default()).unwrap();
        let (id, secret) = (Id::random().unwrap(), Secret::random().unwrap());
        let domain = Self::enter(&share, id, secret);
        Self { share, watcher, domain, id, secret }
    }

    fn enter(share: &Arc<Share>, id: Id, secret: Secret) -> Arc<Everything> {
        let (gone, guests) = (Mutex::default(), Arc::new(()));
        let domain = Arc::new(Everything { share: Arc::downgrade(share), id, gone, guests });
        let who: Arc<dyn Domain> = domain.clone();
        share.enter(id, secret, Arc::downgrade(&who));
        domain
    }

    fn whom(&self) -> Whom<'_> {
        let address = self.watcher.address();
        Whom { identity: self.share.identity(), address, domain: self.id, secret: &self.secret }
    }

    fn alloc(&self, bytes: usize) -> (Span, u64) {
        let span = Span::whole(self.share.devices().host().alloc(bytes).unwrap());
        let (number, start) = self.share.offer(&span, self.id).unwrap();
        assert_eq!(start, 0);
        (span, number)
    }

    /// What another process gets.
    fn ask(&self, by: &Share, number: u64) -> Result<Handle, Trouble> {
        by.reach(&self.whom(), patient())?.memory((self.id, &self.secret), number, &[], patient())
    }
}

fn settles(what: impl Fn() -> bool) {
    let end = soon();
    while !what() {
        assert!(!end.passed());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_is_asked_for_by_number() {
    let (owner, other) = (Process::start(), Process::start());
    let (span, number) = owner.alloc(64);
    let region = other.share.import(owner.ask(&other.share, number).unwrap()).unwrap();
    region.write(0, &[7]).unwrap();
    assert_eq!(span.to_vec().unwrap()[0], 7);
    let refused = owner.ask(&other.share, number + 1);
    assert!(matches!(refused, Err(Trouble::Refused(Reason::Gone, _))), "{refused:?}");
    // Of a part, the whole is lent.
    let half = part(span.region().clone(), 16..32).unwrap();
    let half = Span::new(half, 4..8).unwrap();
    assert_eq!(owner.share.offer(&half, owner.id), Some((number, 20)));
    assert_eq!(owner.share.offer(&Span::whole(private(64).unwrap()), owner.id), None);
}

#[test]
fn a_number_is_of_one_allocation_for_ever() {
    let owner = Process::start();
    let mut last = 0;
    for _ in 0..10 {
        let (span, number) = owner.alloc(64);
        assert_eq!(number, last + 1);
        let (named, offset) = owner.share.name(&span.slice(3..5).unwrap()).unwrap();
        assert_eq!((named.number, offset, named.len), (number, 3, span.region().len()));
        last = number;
    }
    owner.share.sweep(usize::MAX);
    assert_eq!(owner.share.exports.count(), 0);
    // The domain hears of each once.
    let mut gone = owner.domain.gone.lock().unwrap().clone();
    gone.sort_unstable();
    assert_eq!(gone, (1..=10).collect::<Vec<_>>());
}

/// A handle of a GPU says nothing without the process that made it.
#[test]
fn memory_of_a_gpu_has_an_exporter() {
    let handle = Handle::Gpu(GpuHandle::new([7; 16], 0, 64, Vec::new()));
    let error = Process::start().share.import(handle).unwrap_err();
    assert!(matches!(&error, Error::Misuse(_)) && error.to_string().contains("import_from"), "{error}");
}

/// Memory of other allocators comes as a new region each time; what it is called does not change.
#[test]
fn memory_of_others_keeps_its_number() {
    let (owner, other) = (Process::start(), Process::start());
    let (span, number) = owner.alloc(64);
    let handle = || owner.ask(&other.share, number).unwrap();
    let first = other.share.name(&Span::whole(other.share.import(handle()).unwrap())).unwrap();
    for _ in 0..10 {
        other.share.sweep(usize::MAX);
        assert_eq!(other.share.exports.count(), 0, "its region is gone");
        let again = other.share.name(&Span::whole(other.share.import(handle()).unwrap())).unwrap();
        assert_eq!(again, first);
    }
    // It is not the other process's to offer.
    assert_eq!(other.share.offer(&Span::whole(other.share.import(handle()).unwrap()), other.id), None);
    drop(span);
}

#[test]
fn one_connection_serves_all_domains() {
    let (owner, other) = (Process::start(), Process::start());
    let (second, secret) = (Id::random().unwrap(), Secret::random().unwrap());
    let _second = Process::enter(&owner.share, second, secret);
    let (span, number) = owner.alloc(64);
    let connection = other.share.reach(&owner.whom(), patient()).unwrap();
    let again = other.share.reach(&Whom { domain: second, secret: &secret, ..owner.whom() }, patient());
    assert!(Arc::ptr_eq(&connection, &again.unwrap()));
    // What is offered in one domain cannot be had in another, nor without its secret.
    let ask = |domain, secret: &Secret| connection.memory((domain, secret), number, &[], patient()).map(drop);
    let gone = |refused| matches!(refused, Err(Trouble::Refused(Reason::Gone, _)));
    let closed = |refused| matches!(refused, Err(Trouble::Refused(Reason::Closed, _)));
    assert!(gone(ask(second, &secret)) && ask(owner.id, &owner.secret).is_ok());
    assert!(closed(ask(owner.id, &secret)) && closed(ask(second, &owner.secret)));
    owner.share.offer(&span, second).unwrap();
    assert!(ask(second, &secret).is_ok());
    owner.share.leave(second);
    assert!(closed(ask(second, &secret)) && ask(owner.id, &owner.secret).is_ok());
}

/// A token may claim anybody's identity; what it leads to is not taken for that process.
#[test]
fn who_is_reached_elsewhere_is_another() {
    let (owner, other) = (Process::start(), Process::start());
    let elsewhere = Address::Abstract("tensorwire-elsewhere".into());
    let there = Whom { address: &elsewhere, ..owner.whom() };
    assert_ne!(there.lender(), owner.whom().lender());
    let connection = other.share.reach(&owner.whom(), patient()).unwrap();
    assert!(matches!(other.share.reach(&there, patient()), Err(Trouble::Unreachable(_))));
    // A process that answers with another identity is refused.
    let third = Whom { identity: other.share.identity(), ..owner.whom() };
    assert!(matches!(other.share.reach(&third, patient()), Err(Trouble::Nonsense(_))));
    drop(connection);
}

#[test]
fn guests_are_there_as_long_as_their_connection() {
    let (owner, other) = (Process::start(), Process::start());
    let guests = || Arc::strong_count(&owner.domain.guests) - 1;
    let connection = other.share.reach(&owner.whom(), patient()).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..2 {
        // A guest that comes again is the same guest.
        let (body, fds) =
            connection.greet((owner.id, &owner.secret), b"hello", &[null.as_fd(); 3], patient()).unwrap();
        assert_eq!((&body[..], fds.len(), guests()), (&b"hello"[..], 3, 1));
    }
    drop(connection);
    settles(|| guests() == 0);
    // With the last one, the thread is gone, and starts again.
    settles(|| owner.share.server.is_idle());
    let (_span, number) = owner.alloc(64);
    owner.ask(&other.share, number).unwrap();
}

#[test]
fn nonsense_costs_a_peer_its_connection_only() {
    let (owner, other) = (Process::start(), Process::start());
    let (_span, number) = owner.alloc(64);
    let me = other.share.identity();
    let connect = || fd::connect(owner.watcher.address(), owner.id, me, &owner.secret, soon()).unwrap();
    let request = |serial| {
        let pair = (me, owner.share.identity());
        frames::request(serial, (owner.id, &owner.secret), pair, Question::Memory(number, &[]))
    };
    let right = request(1);
    let long = vec![b'M'; MAX_MESSAGE];
    let frames: [&[u8]; 6] =
        [b"M", b"X12345678", &right[1..], &right[..right.len() - 1], &[&right[..], b"x"].concat(), &long];
    for frame in frames {
        let connection = connect();
        connection.send(frame, &[], soon()).unwrap();
        // It hears why.
        assert_eq!(connection.recv(soon()).unwrap().0[0], b'x');
        assert!(connection.recv(soon()).unwrap().0.is_empty(), "{frame:?}");
    }
    // Descriptors that nobody asked for are closed.
    let (connection, null) = (connect(), std::fs::File::open("/dev/null").unwrap());
    connection.send(&request(5), &[null.as_fd(); 3], soon()).unwrap();
    let (frame, fds) = connection.recv(soon()).unwrap();
    let answer = Answer::read(None, &frame, fds).unwrap();
    assert_eq!((answer.serial, answer.is_whole(), answer.result.is_ok()), (5, true, true));
    // A stranger does not come so far.
    let wrong = Secret::random().unwrap();
    let (address, unknown) = (owner.watcher.address(), Id::random().unwrap());
    assert!(fd::connect(address, owner.id, me, &wrong, soon()).is_err());
    assert!(fd::connect(address, unknown, me, &owner.secret, soon()).is_err());
    owner.ask(&other.share, number).unwrap();
}

/// One that asks and never listens, and many that do not even ask, leave room for the others.
#[test]
fn idle_and_deaf_peers_disturb_nobody() {
    let (owner, other) = (Process::start(), Process::start());
    let (span, number) = owner.alloc(64);
    let me = other.share.identity();
    let connect = || fd::connect(owner.watcher.address(), owner.id, me, &owner.secret, soon()).unwrap();
    let deaf = connect();
    let pair = (me, owner.share.identity());
    let frame = frames::request(1, (owner.id, &owner.secret), pair, Question::Memory(number, &[]));
    while deaf.send(&frame, &[], Deadline::after(Duration::from_millis(100))).is_ok() {}
    let idle: Vec<Connection> = (0..200).map(|_| connect()).collect();
    let region = other.share.import(owner.ask(&other.share, number).unwrap()).unwrap();
    region.write(0, &[5]).unwrap();
    assert_eq!(span.to_vec().unwrap()[0], 5);
    drop((deaf, idle));
    owner.ask(&other.share, number).unwrap();
}

/// A process that breaks the protocol when it is asked, once for each way: what it says, and with how many descriptors.
pub(crate) fn liar(listener: &Listener, identity: Id, secret: Secret, answers: Vec<(Vec<u8>, usize)>) {
    for (answer, count) in answers {
        // No other test opens this.
        let files: Vec<_> = (0..count).map(|_| std::fs::File::open("/dev/full").unwrap()).collect();
        let beside: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut step = loop {
            if let Some(stranger) = Handshake::accept(listener).unwrap() {
                break stranger;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let connection = loop {
            match step.step(identity, &|_| Some(secret)).unwrap() {
                HandshakeStep::More(more) => step = more,
                HandshakeStep::Done(_, connection) => break connection,
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        connection.recv(soon()).unwrap();
        connection.send(&answer, &beside, soon()).unwrap();
        // It says the same again and again, as long as somebody hears it.
        let _ = (0..100).all(|_| connection.send(&answer, &[], soon()).is_ok());
        // It says no more, and does not close.
        let _ = connection.recv(soon());
    }
}

/// Whatever a lender says, the one who asks has an answer at once.
#[test]
fn a_lender_that_lies_is_found_out() {
    let other = Process::start();
    let (identity, secret) = (Id::random().unwrap(), Secret::random().unwrap());
    let listener = Listener::bind(None).unwrap();
    let address = listener.address().clone();
    let memfd = Handle::decode(&[&[0][..], &64u64.to_le_bytes()].concat(), vec![]);
    assert!(memfd.is_err(), "a handle needs its descriptor");
    let body = [&[0][..], &64u64.to_le_bytes()].concat();
    let answer = |count: u32| {
        let head = crate::wire::Writer::new().u8(b'a').u64(1).u32(count);
        head.bytes(&body).finish()
    };
    // More descriptors than the handle can need, none at all, another answer, one of before, and no answer.
    let answers = vec![
        answer(2),
        answer(u32::MAX),
        answer(0),
        frames::refusal(9, Reason::Gone, "another"),
        frames::refusal(0, Reason::Gone, "one of before"),
        b"nonsense".to_vec(),
    ];
    let answers: Vec<_> = answers.into_iter().map(|answer| (answer, 0)).collect();
    let count = answers.len();
    let lies = std::thread::spawn(move || liar(&listener, identity, secret, answers));
    let domain = Id::random().unwrap();
    let whom = Whom { identity, address: &address, domain, secret: &secret };
    for _ in 0..count {
        let connection = other.share.reach(&whom, patient()).unwrap();
        let got = connection.memory((domain, &secret), 1, &[], patient());
        assert!(matches!(got, Err(Trouble::Nonsense(_))), "{got:?}");
    }
    lies.join().unwrap();
}
