//! What is there as long as a GPU is open: its context, our kernels, and the desk at which the host reads and writes.

use std::ffi::{CString, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::clock::{Clock, WORD};
use super::driver::{Address, Context, Driver, Event, Function, Module, Stream};
use super::gpu::Entered;
use super::kernels;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::sync::{AtomicBool, Ordering};

/// Bytes through which memory is read and written by the host.
const STAGING: usize = 4 << 20;
/// How long a read or write by the host may take: nothing that other processes do delays it.
const PATIENCE: Duration = Duration::from_secs(60);

/// A context that was retained, and what was made in it so far. All of it goes with this.
#[derive(Debug)]
pub(super) struct OpenContext {
    driver: &'static Driver,
    device: c_int,
    context: Context,
    module: Option<Module>,
    functions: Vec<Function>,
    desk: Mutex<Desk>,
    clock: Option<Clock>,
    /// Events to be used again.
    events: Mutex<Vec<Event>>,
    /// Whether a copy of the host's was given up that may still be under way.
    late: AtomicBool,
}

/// What reads and writes by the host need; one at a time.
#[derive(Debug, Default)]
struct Desk {
    stream: Option<Stream>,
    event: Option<Event>,
    staging: usize,
}

impl OpenContext {
    /// Makes the context this process's, loads the kernels, and launches each of them once.
    pub(super) fn new(driver: &'static Driver, device: c_int, compute: (i32, i32)) -> Result<Self> {
        let context = driver.retain_primary(device)?;
        let mut opened = Self {
            driver,
            device,
            context,
            module: None,
            functions: Vec::new(),
            desk: Mutex::default(),
            clock: None,
            events: Mutex::default(),
            late: AtomicBool::new(false),
        };
        let _entered = opened.enter()?;
        let image = kernels::image(compute)?;
        // SAFETY: an image of our own, whole.
        let module = unsafe { driver.load_module(&image) }?;
        opened.module = Some(module);
        for name in kernels::ENTRIES {
            let name = CString::new(name).map_err(|_| Error::bug("a kernel's name"))?;
            // SAFETY: the module was just loaded.
            opened.functions.push(unsafe { driver.function(module, &name) }?);
        }
        let desk = opened.desk.get_mut().unwrap_or_else(PoisonError::into_inner);
        let stream = *desk.stream.insert(driver.stream(true)?);
        desk.event = Some(driver.event()?);
        desk.staging = driver.alloc_pinned(STAGING + WORD)?;
        // The first launch of a kernel may load it, and that must not happen behind a wait.
        for function in &opened.functions {
            // SAFETY: with these arguments every kernel does nothing.
            unsafe { driver.launch(*function, (1, 32), &kernels::NOTHING, stream) }?;
        }
        // Behind them a comparison of clocks would say nothing.
        opened.settle(&*opened.sit_down()?, |_| Ok(()))?;
        let (copy, word) = (opened.function(kernels::COPY)?, opened.word());
        opened.clock = word.map(|word| {
            // SAFETY: this kernel, and the word behind the staging memory; all of it goes with this.
            unsafe { Clock::new(driver, stream, copy, word) }
        });
        Ok(opened)
    }

    pub(super) fn context(&self) -> Context {
        self.context
    }

    /// Makes the context the thread's for as long as the result lives.
    pub(super) fn enter(&self) -> Result<Entered> {
        Entered::into(self.driver, self.context)
    }

    /// A kernel by its name.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let place = kernels::ENTRIES.iter().position(|entry| *entry == name);
        let function = place.and_then(|place| self.functions.get(place)).copied();
        function.ok_or_else(|| Error::bug(format!("there is no kernel {name}")))
    }

    /// Where the clocks are compared: behind the staging memory. A driver of tests has none.
    fn word(&mut self) -> Option<usize> {
        let staging = self.desk.get_mut().unwrap_or_else(PoisonError::into_inner).staging;
        (staging != 0).then_some(staging + STAGING)
    }

    /// What is to be added to the GPU's time, to make it that of the host. The thread is in the context.
    pub(super) fn clock_offset(&self) -> Option<u64> {
        self.clock.as_ref()?.offset(self.driver)
    }

    /// An event that nobody uses. The thread is in the context.
    pub(super) fn take_event(&self) -> Result<Event> {
        let spare = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        spare.map_or_else(|| self.driver.event(), Ok)
    }

    /// Gives one back.
    pub(super) fn give_event(&self, event: Event) {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Whether memory must not be given back, because a copy that was given up may still use it.
    pub(super) fn is_late(&self) -> bool {
        self.late.load(Ordering::Acquire) && self.sit_down().is_err()
    }

    /// Copies memory out, through the staging memory. The thread is in the context.
    ///
    /// # Safety
    /// `from..from + into.len()` is memory of the GPU.
    pub(super) unsafe fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        let desk = self.sit_down()?;
        let mut at = from;
        for part in into.chunks_mut(STAGING) {
            self.settle(&desk, |stream| {
                // SAFETY: the caller's promise; the staging memory is ours alone, and large enough for a part.
                unsafe { self.driver.copy(desk.staging as Address, at, part.len(), stream) }
            })?;
            // SAFETY: as above; the copy is done.
            unsafe { part.as_mut_ptr().copy_from_nonoverlapping(desk.staging as *const u8, part.len()) };
            at += part.len() as Address;
        }
        Ok(())
    }

    /// Copies memory in, through the staging memory. The thread is in the context.
    ///
    /// # Safety
    /// `to..to + from.len()` is memory of the GPU.
    pub(super) unsafe fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        let desk = self.sit_down()?;
        let mut at = to;
        for part in from.chunks(STAGING) {
            // SAFETY: as in `read`.
            unsafe { (desk.staging as *mut u8).copy_from_nonoverlapping(part.as_ptr(), part.len()) };
            self.settle(&desk, |stream| {
                // SAFETY: as in `read`.
                unsafe { self.driver.copy(at, desk.staging as Address, part.len(), stream) }
            })?;
            at += part.len() as Address;
        }
        Ok(())
    }

    /// Sets memory to zero. The thread is in the context.
    ///
    /// # Safety
    /// `at..at + len` is memory of the GPU.
    pub(super) unsafe fn clear(&self, at: Address, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let desk = self.sit_down()?;
        // SAFETY: the caller's promise.
        self.settle(&desk, |stream| unsafe { self.driver.fill(at, 0, len, stream) })
    }

    /// The desk, once what was given up there is done.
    fn sit_down(&self) -> Result<MutexGuard<'_, Desk>> {
        let desk = self.desk.lock().unwrap_or_else(PoisonError::into_inner);
        if self.late.load(Ordering::Acquire) {
            // SAFETY: the event lives as long as we do.
            if !desk.event.is_some_and(|event| unsafe { self.driver.is_over(event) }) {
                return Err(Error::TimedOut);
            }
            self.late.store(false, Ordering::Release);
        }
        Ok(desk)
    }

    /// Queues something and waits until it is done.
    fn settle(&self, desk: &Desk, queue: impl FnOnce(Stream) -> Result<()>) -> Result<()> {
        let (Some(stream), Some(event)) = (desk.stream, desk.event) else {
            return Err(Error::bug("a GPU that was not opened to its end"));
        };
        queue(stream)?;
        // SAFETY: stream and event live as long as we do.
        unsafe { self.driver.record(event, stream) }?;
        let deadline = Deadline::after(PATIENCE);
        let mut looks = 0_u32;
        // SAFETY: as above.
        while !unsafe { self.driver.is_done(event) }? {
            looks += 1;
            if looks.is_multiple_of(64) {
                if deadline.passed() {
                    self.late.store(true, Ordering::Release);
                    return Err(Error::TimedOut);
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for OpenContext {
    fn drop(&mut self) {
        let desk = self.desk.get_mut().unwrap_or_else(PoisonError::into_inner);
        let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Ok(_entered) = Entered::into(self.driver, self.context) {
            // SAFETY: our own, used no more: whoever works with them holds this. What fails now fails because the
            // process ends, and then the driver takes everything back.
            unsafe {
                for event in events.drain(..).chain(desk.event.take()) {
                    let _ = self.driver.destroy_event(event);
                }
                if let Some(stream) = desk.stream.take() {
                    let _ = self.driver.destroy_stream(stream);
                }
                if desk.staging != 0 {
                    let _ = self.driver.free_pinned(desk.staging);
                }
                if let Some(module) = self.module.take() {
                    let _ = self.driver.unload_module(module);
                }
            }
        }
        // SAFETY: retained once, by `new`, and used no more.
        let _ = unsafe { self.driver.release_primary(self.device) };
    }
}
