//! A store in a file, shared by all processes that open it.

pub(super) mod log;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tensorwire_device::Deadline;
use tensorwire_device::fd::Fd;

use super::engine::{Answer, Engine};
use super::{DEFAULT_TIMEOUT, Limits, Patience, Reply, Request, Store, barrier};
use crate::error::{Error, Result};
use crate::interrupt::Pace;

/// How long after its deadline a call may still wait for the file's lock.
const GRACE: Duration = Duration::from_secs(2);
/// The first pause between two looks at the file, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));
/// Bytes read at a time.
const CHUNK: usize = 256 << 10;

/// A store in a file.
///
/// The file is a log in the format of torch's FileStore. tensorwire and torch may use one file at the same time,
/// but torch does not know our queues. `flock` guards the file, and a process that waits looks at it every 10 ms.
/// So it works wherever the processes see the same file. The file is never compacted, and it stays when all
/// processes are gone. What an earlier run left in it counts, so remove the file or use a new name for each run.
/// Torch, however, removes the file when its last user of it ends.
///
/// A process that dies while it writes leaves a half record, which the next writer cuts off. A process that dies
/// inside a barrier stays counted there.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    shared: Mutex<View>,
    patience: Patience,
}

/// What this client has seen of the file.
#[derive(Debug)]
struct View {
    file: Arc<Fd<File>>,
    engine: Engine,
    /// Where the first record that was not seen starts.
    seen: u64,
}

impl FileStore {
    /// Opens the file, or makes it.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let view = View { file: open(&path)?, engine: empty(), seen: 0 };
        let store = Self { path, shared: Mutex::new(view), patience: Patience::new(DEFAULT_TIMEOUT) };
        store.reading(Deadline::after(DEFAULT_TIMEOUT), |_| ())?;
        Ok(store)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A forked child shares its parent's lock, which would then guard nothing: it opens the file anew.
    fn view(&self) -> Result<MutexGuard<'_, View>> {
        let mut view = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !view.file.is_ours() {
            view.file = open(&self.path)?;
        }
        Ok(view)
    }

    /// The view and the file's lock, which must go first. Asks again and again, because the system's waiting for a lock
    /// knows no deadline; meanwhile other threads have the view, because their deadlines may be nearer.
    fn locked(&self, how: FlockOperation, deadline: Deadline) -> Result<(MutexGuard<'_, View>, Lock)> {
        let started = Instant::now();
        let mut pace = Pace::since(started);
        let mut pause = Duration::from_micros(50);
        loop {
            let view = self.view()?;
            let file: &File = &view.file;
            match flock(file, how) {
                Ok(()) => {
                    let lock = Lock(view.file.clone());
                    return Ok((view, lock));
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => drop(view),
                Err(error) => return Err(self.failed("locking", error.into())),
            }
            let Some(left) = deadline.remaining() else {
                let doing = format!("waiting for the lock of the store's file {}", self.path.display());
                return Err(Error::timed_out(doing, started.elapsed(), "another process holds it"));
            };
            pace.look(Instant::now())?;
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    /// Reads what is new and looks at the whole.
    fn reading<T>(&self, deadline: Deadline, look: impl FnOnce(&mut Engine) -> T) -> Result<T> {
        let mut view = self.view()?;
        if self.size(&view)? == view.seen {
            return Ok(look(&mut view.engine));
        }
        drop(view);
        let (mut view, _lock) = self.locked(FlockOperation::NonBlockingLockShared, deadline)?;
        self.catch_up(&mut view)?;
        Ok(look(&mut view.engine))
    }

    /// Executes a request that changes something, and writes that down.
    fn writing(&self, request: &Request, deadline: Deadline) -> Result<Reply> {
        let (mut view, _lock) = self.locked(FlockOperation::NonBlockingLockExclusive, deadline)?;
        let view = &mut *view;
        self.catch_up(view)?;
        let size = self.size(view)?;
        if size > view.seen {
            tracing::warn!(
                path = %self.path.display(), offset = view.seen, bytes = size - view.seen,
                "a process died while it wrote to the store's file; its half record is cut off"
            );
            view.file.set_len(view.seen).map_err(|e| self.failed("cutting a half record off", e))?;
        }
        let reply = try_now(&mut view.engine, request.clone()).map_err(Error::Misuse)?;
        let value = key_of(request).and_then(|key| view.engine.value(key));
        let mut record = Vec::new();
        log::record(request, &reply, value, &mut record);
        if record.is_empty() {
            return Ok(reply);
        }
        // One write, so that a process that dies leaves all of it or a half record.
        match view.file.write_all_at(&record, view.seen) {
            Ok(()) => {
                view.seen += record.len() as u64;
                Ok(reply)
            }
            Err(error) => {
                // The change did not happen, so what was kept in mind is wrong: read it all again.
                let _ = view.file.set_len(view.seen);
                view.engine = empty();
                view.seen = 0;
                Err(self.failed("writing to", error))
            }
        }
    }

    /// Tries a request that may have to wait, until the deadline.
    fn waiting(&self, request: &Request, deadline: Deadline) -> Result<Reply> {
        let started = Instant::now();
        let mut pace = Pace::since(started);
        let mut pause = PAUSES.0;
        loop {
            let patience = at_least(deadline);
            let possible = self.reading(patience, |engine| match request {
                Request::Pop { key, .. } => (engine.queue_len(key) > 0).then_some(Ok(Reply::Nothing)),
                _ => {
                    let answer = engine.apply(0, request.clone(), &mut Vec::new());
                    if answer.is_none() {
                        engine.cancel(0);
                    }
                    answer
                }
            })?;
            let reply = match (possible, request) {
                (Some(_), Request::Pop { key, .. }) => {
                    // Another may have been faster.
                    self.writing(&Request::Pop { key: key.clone(), wait: false }, patience)?
                }
                (Some(answer), _) => answer.map_err(Error::Misuse)?,
                (None, _) => Reply::Nothing,
            };
            if reply != Reply::Nothing {
                return Ok(reply);
            }
            let Some(left) = deadline.remaining() else {
                let missing = self.reading(at_least(deadline), |engine| engine.lacks(request))?;
                return Err(Error::timed_out(super::purpose(request), started.elapsed(), missing));
            };
            pace.look(Instant::now())?;
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// The file's size, if it is still the one that others see.
    fn size(&self, view: &View) -> Result<u64> {
        let metadata = view.file.metadata().map_err(|e| self.failed("looking at", e))?;
        if metadata.nlink() == 0 {
            return Err(Error::misuse(format!("somebody removed the store's file {}", self.path.display())));
        }
        if metadata.len() < view.seen {
            return Err(Error::misuse(format!("somebody cut the store's file {} off", self.path.display())));
        }
        Ok(metadata.len())
    }

    /// Replays the whole records that were not seen.
    fn catch_up(&self, view: &mut View) -> Result<()> {
        let mut bytes = Vec::new();
        loop {
            let end = bytes.len();
            bytes.resize(end + CHUNK, 0);
            let read = match view.file.read_at(&mut bytes[end..], view.seen + end as u64) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(error) => return Err(self.failed("reading", error)),
            };
            bytes.truncate(end + read);
            let mut used = 0;
            loop {
                match log::next(&bytes[used..]) {
                    Ok(Some((change, len))) => {
                        used += len;
                        if let Some(change) = change {
                            // What was written down had been possible.
                            let _ = view.engine.apply(0, change, &mut Vec::new());
                        }
                    }
                    Ok(None) => break,
                    Err(why) => return Err(self.corrupt(view.seen + used as u64, &why)),
                }
            }
            bytes.drain(..used);
            view.seen += used as u64;
            if read == 0 {
                break;
            }
        }
        if view.seen == 0 && !bytes.is_empty() {
            return Err(self.corrupt(0, "it does not start with a whole record"));
        }
        Ok(())
    }

    fn corrupt(&self, offset: u64, why: &str) -> Error {
        Error::misuse(format!(
            "{} is not the file of a store, or damaged at byte {offset}: {why}; remove it or use another name",
            self.path.display()
        ))
    }

    fn failed(&self, doing: &str, error: io::Error) -> Error {
        Error::io(format!("{doing} the store's file {}", self.path.display()), error)
    }
}

impl Store for FileStore {
    fn call(&self, request: Request, deadline: Deadline) -> Result<Reply> {
        fits(&request).map_err(Error::Misuse)?;
        match &request {
            Request::Get(_) | Request::Wait(_) | Request::MultiGet(_) | Request::Pop { wait: true, .. } => {
                self.waiting(&request, deadline)
            }
            Request::Check(_) | Request::NumKeys | Request::ListKeys | Request::QueueLen(_) => {
                let answer = self.reading(at_least(deadline), |engine| try_now(engine, request.clone()))?;
                answer.map_err(Error::Misuse)
            }
            Request::Barrier { key, world } => {
                barrier::by_counters(self, key, *world, deadline).map(|()| Reply::Done)
            }
            _ => self.writing(&request, at_least(deadline)),
        }
    }

    fn timeout(&self) -> Duration {
        self.patience.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.patience.set(timeout);
    }

    fn clone_store(&self) -> Result<Arc<dyn Store>> {
        let clone = Self::open(&self.path)?;
        clone.set_timeout(self.timeout());
        Ok(Arc::new(clone))
    }
}

fn open(path: &Path) -> Result<Arc<Fd<File>>> {
    let doing = || format!("opening the store's file {}", path.display());
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|e| Error::io(doing(), e))?;
    if !file.metadata().map_err(|e| Error::io(doing(), e))?.is_file() {
        return Err(Error::misuse(format!("{} is not a file, a store cannot be kept in it", path.display())));
    }
    Ok(Arc::new(Fd::new(file)))
}

/// The file's lock, until it is dropped.
struct Lock(Arc<Fd<File>>);

impl Drop for Lock {
    fn drop(&mut self) {
        let file: &File = &self.0;
        if let Err(error) = flock(file, FlockOperation::Unlock) {
            tracing::error!(%error, "the lock of a store's file could not be given back");
        }
    }
}

/// The deadline, but with time enough to look at the file at all.
fn at_least(deadline: Deadline) -> Deadline {
    Ord::max(deadline, Deadline::after(GRACE))
}

fn empty() -> Engine {
    Engine::new(Limits { value: log::VALUE, ..Limits::none() })
}

/// The answer to a request that does not wait.
fn try_now(engine: &mut Engine, request: Request) -> Answer {
    engine
        .apply(0, request, &mut Vec::new())
        .unwrap_or_else(|| Err("a request that does not wait was parked".into()))
}

fn key_of(request: &Request) -> Option<&str> {
    match request {
        Request::Add(key, _) | Request::Append(key, _) | Request::CompareSet { key, .. } => Some(key),
        _ => None,
    }
}

fn fits(request: &Request) -> std::result::Result<(), String> {
    match request {
        Request::Set(key, value) | Request::Append(key, value) | Request::Push(key, value) => {
            log::fits(key, value)
        }
        Request::CompareSet { key, desired, .. } => log::fits(key, desired),
        Request::MultiSet(pairs) => pairs.iter().try_for_each(|(key, value)| log::fits(key, value)),
        Request::Add(key, _) | Request::Delete(key) => log::fits(key, b""),
        _ => Ok(()),
    }
}
