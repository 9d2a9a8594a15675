use std::io::Write;
use std::net::TcpStream;

use tensorwire_device::secret::Secret;

use super::*;
use crate::config::Config;
use crate::devices::Devices;
use crate::share::Share;

const PATIENCE: Duration = Duration::from_secs(60);

/// What a process has once, for one that is leader of a host.
struct Process {
    watcher: Watcher,
    office: Arc<Office>,
    identity: Id,
}

impl Process {
    fn start() -> Self {
        let share = Share::new(Id::random().unwrap(), &Arc::new(Devices::new()));
        let watcher = Watcher::start(&share, &Config::default()).unwrap();
        let identity = share.identity();
        Self { watcher, office: Arc::new(Office::open(identity).unwrap()), identity }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.office.port()))
    }

    fn meeting(&self, id: Id, secret: Secret, sealed: bool) -> Meeting<'_> {
        Meeting {
            watcher: &self.watcher,
            office: &self.office,
            domain: Domain { id, identity: self.identity, secret, sealed },
            timeout: PATIENCE,
            interrupted: &|| Ok(()),
        }
    }

    fn trunks(&self) -> usize {
        self.watcher.shared.lock().trunks.numbers().len()
    }
}

/// Forms a group of two leaders.
fn form(id: Id, hub: &Process, spoke: &Process) {
    let secret = Secret::random().unwrap();
    for process in [hub, spoke] {
        process.watcher.open(id, secret).unwrap();
    }
    let opened = Hub::open(&hub.meeting(id, secret, false)).unwrap();
    std::thread::scope(|scope| {
        let gathered = scope.spawn(|| {
            let meeting = hub.meeting(id, secret, false);
            opened.gather(&meeting, &[(spoke.identity, 1)], Deadline::after(PATIENCE)).unwrap()
        });
        let meeting = spoke.meeting(id, secret, false);
        reach(&meeting, &[hub.address()], (hub.identity, 0), Deadline::after(PATIENCE)).unwrap();
        assert_eq!(gathered.join().unwrap().len(), 1);
    });
}

fn eventually(what: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !what() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whichever of the two is the hub. The last group that is closed takes the connection along.
#[test]
fn two_leaders_have_one_trunk() {
    let (one, two) = (Process::start(), Process::start());
    let groups: Vec<Id> = (0..100).map(|number| Id([number; 16])).collect();
    for (at, group) in groups.iter().enumerate() {
        match at % 2 {
            0 => form(*group, &one, &two),
            _ => form(*group, &two, &one),
        }
        assert_eq!((one.trunks(), two.trunks()), (1, 1), "after {at} groups");
    }
    for (at, group) in groups.iter().enumerate() {
        assert_eq!((one.trunks(), two.trunks()), (1, 1), "{at} are closed");
        one.watcher.close(*group);
        if at < 99 {
            two.watcher.close(*group);
        }
    }
    two.watcher.close(groups[99]);
    eventually(|| one.trunks() + two.trunks() == 0);
}

/// A group that forms just when the last one before it ends gets its trunk: that one, or another.
#[test]
fn a_group_forms_while_another_ends() {
    let (one, two) = (Process::start(), Process::start());
    for number in 0..200 {
        let group = Id([number; 16]);
        form(group, &one, &two);
        // One of them may hear of the end of the trunk before it asks, while it waits, or not yet.
        match number % 2 {
            0 => one.watcher.close(group),
            _ => two.watcher.close(group),
        }
        match number % 2 {
            0 => two.watcher.close(group),
            _ => one.watcher.close(group),
        }
    }
    eventually(|| one.trunks() + two.trunks() == 0);
}

/// Strangers that are silent, talk nonsense, or do not know the secret keep nobody from meeting.
#[test]
fn strangers_at_the_hub() {
    [false, true].into_iter().for_each(strangers);
}

fn strangers(sealed: bool) {
    let (hub, leader, other) = (Process::start(), Process::start(), Process::start());
    let (group, secret, wrong) = (Id([1; 16]), Secret::random().unwrap(), Secret::random().unwrap());
    let connect = || TcpStream::connect(hub.address()).unwrap();
    let silent: Vec<TcpStream> = (0..20).map(|_| connect()).collect();
    let nonsense: [&[u8]; 4] = [&[0, 0], &[0xff; 100], b"GET / HTTP/1.1\r\n\r\n", &[6, 0, b't', b'w']];
    let rude: Vec<TcpStream> = nonsense
        .iter()
        .map(|bytes| {
            let mut stranger = connect();
            stranger.write_all(bytes).unwrap();
            stranger
        })
        .collect();
    for process in [&hub, &leader, &other] {
        process.watcher.open(group, secret).unwrap();
    }
    let opened = Hub::open(&hub.meeting(group, secret, sealed)).unwrap();
    std::thread::scope(|scope| {
        let gathered = scope.spawn(|| {
            let meeting = hub.meeting(group, secret, sealed);
            opened.gather(&meeting, &[(leader.identity, 5)], Deadline::after(PATIENCE)).unwrap()
        });
        let end = Instant::now() + PATIENCE;
        // Why it is not reached. A hub that is not on a core for so long is asked again.
        let refused = |meeting: &Meeting<'_>, whom| loop {
            let soon = Deadline::after(Duration::from_millis(500));
            let text = reach(meeting, &[hub.address()], (whom, 0), soon).unwrap_err().to_string();
            if !text.contains("it does not answer") {
                break text;
            }
            assert!(Instant::now() < end, "{text}");
        };
        let reached = |process: &Process| {
            let meeting = process.meeting(group, secret, sealed);
            reach(&meeting, &[hub.address()], (hub.identity, 0), Deadline::after(PATIENCE)).unwrap()
        };
        let text = refused(&leader.meeting(group, wrong, sealed), hub.identity);
        assert!(text.contains("does not know the group's secret"), "{text}");
        // The right secret, but no leader that is waited for: others go on.
        reached(&other);
        let text = refused(&leader.meeting(group, secret, sealed), Id([8; 16]));
        assert!(text.contains("is another process"), "{text}");
        reached(&leader);
        assert_eq!(gathered.join().unwrap().len(), 1);
    });
    drop((silent, rude));
}

/// A process that has a trunk with the hub still has to know the secret of a group that it asks for.
#[test]
fn a_trunk_alone_opens_no_group() {
    let (hub, leader) = (Process::start(), Process::start());
    form(Id([1; 16]), &hub, &leader);
    let (group, secret, wrong) = (Id([2; 16]), Secret::random().unwrap(), Secret::random().unwrap());
    hub.watcher.open(group, secret).unwrap();
    leader.watcher.open(group, wrong).unwrap();
    let meeting = hub.meeting(group, secret, false);
    let _opened = Hub::open(&meeting).unwrap();
    let soon = Deadline::after(Duration::from_millis(500));
    // At no address: only the trunk is there.
    let error = reach(&leader.meeting(group, wrong, false), &[], (hub.identity, 0), soon).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert_eq!((hub.trunks(), leader.trunks()), (1, 1));
}
