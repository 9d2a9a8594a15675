//! How the watcher answers `tensorwire status`, where that cannot open the control regions itself. A process of the
//! same user may ask. The watcher sends it the control regions of this process's groups, without staging memory.
//!
//! Frames begin with a mark and a kind:
//!
//! | kind | body | meaning |
//! |---|---|---|
//! | SELF | pid, count, keys | who answers, and the memory of its groups: device and inode of each |
//! | PART | which, offset, bytes | a piece of one of them; pieces that hold only zeros are left out |
//! | END | | that was all |
//! | BUSY | | too many ask at once |
//!
//! The watcher sends an answer piece by piece, between its other duties. So a process that asks often, or does not
//! listen, cannot keep the watcher from these duties.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorwire_device::fd::Inquiry;

use crate::error::{Error, PeerFaultKind, Result};
use crate::shm::control::Control;
use crate::shm::record::read_quietly;
use crate::wire::{Reader, Writer};

/// Answers at one time.
pub(super) const MAX_ANSWERS: usize = 4;

/// How long one may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The memory behind a control region: device and inode.
pub(crate) type Key = (u64, u64);

const MARK: [u8; 4] = *b"twst";
const SELF: u8 = 1;
const PART: u8 = 2;
const END: u8 = 3;
const BUSY: u8 = 4;

/// Bytes of a piece.
const PIECE: usize = 32 << 10;

/// Pieces looked at before the watcher turns to something else.
const AT_ONCE: usize = 32;

/// The most groups that are told of.
const MAX_GROUPS: usize = 2048;

/// The most bytes that are kept of an answer.
const MAX_HEARD: usize = 512 << 20;

fn frame(kind: u8) -> Writer {
    Writer::new().fixed(&MARK).u8(kind)
}

/// Tells a process that asks to come back later.
pub(super) fn refuse(inquiry: &Inquiry) {
    // It may be gone already.
    let _ = inquiry.try_send(&frame(BUSY).finish());
}

/// An answer that is being given.
#[derive(Debug)]
pub(super) struct Answer {
    inquiry: Inquiry,
    pub(super) until: Instant,
    /// A group that is closed meanwhile is not held open.
    groups: Vec<(Key, Weak<Control>)>,
    /// The next piece: of which group, from where.
    next: Option<(usize, usize)>,
    /// Frames that are made and not sent.
    pending: Vec<Vec<u8>>,
}

impl Answer {
    pub(super) fn new(inquiry: Inquiry, groups: impl Iterator<Item = Arc<Control>>) -> Self {
        let key = |control: &Arc<Control>| control.region().export().ok()?.key().ok()?;
        let groups: Vec<(Key, Weak<Control>)> = groups
            .filter_map(|control| Some((key(&control)?, Arc::downgrade(&control))))
            .take(MAX_GROUPS)
            .collect();
        let head = frame(SELF).u32(std::process::id()).u32(groups.len() as u32);
        let head = groups.iter().fold(head, |head, ((device, inode), _)| head.u64(*device).u64(*inode));
        let until = Instant::now() + PATIENCE;
        Self { inquiry, until, groups, next: Some((0, 0)), pending: vec![head.finish()] }
    }

    /// Sends as much as there is room for, within measure. Gives whether that was all.
    pub(super) fn go_on(&mut self) -> Result<bool> {
        for _ in 0..AT_ONCE {
            if let Some(frame) = self.pending.last() {
                if !self.inquiry.try_send(frame)? {
                    return Ok(false);
                }
                self.pending.pop();
            } else if !self.look() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes the next frame, if the next piece needs one. Gives whether there was anything to do.
    fn look(&mut self) -> bool {
        let Some((group, offset)) = self.next else { return false };
        let Some((_, control)) = self.groups.get(group) else {
            self.next = None;
            self.pending.push(frame(END).finish());
            return true;
        };
        let control = control.upgrade();
        let end = control.as_ref().map_or(0, |control| control.map().slot(0));
        let len = end.saturating_sub(offset).min(PIECE);
        if let Some(control) = control.filter(|_| len > 0) {
            self.next = Some((group, offset + len));
            let bytes = read_quietly(&control, offset, len).unwrap_or_default();
            if bytes.iter().any(|&byte| byte != 0) {
                let part = frame(PART).u32(group as u32).u64(offset as u64).fixed(&bytes);
                self.pending.push(part.finish());
            }
        } else {
            self.next = Some((group + 1, 0));
        }
        true
    }
}

impl AsFd for Answer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inquiry.as_fd()
    }
}

/// An answer as it is heard.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// The other process's pid as it sees itself, once it has said so.
    pub(crate) pid: Option<u32>,
    pub(crate) keys: Vec<Key>,
    /// Pieces by group and number.
    pieces: HashMap<(usize, usize), Vec<u8>>,
    total: usize,
    /// Whether it has said everything.
    pub(crate) complete: bool,
    /// Whether it has no time.
    pub(crate) busy: bool,
}

impl Heard {
    /// Takes a frame. Any bytes may come.
    pub(crate) fn hear(&mut self, bytes: &[u8]) -> Result<()> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>()? != MARK {
            return Err(strange("an answer that is not one"));
        }
        match reader.u8()? {
            SELF if self.pid.is_none() => {
                self.pid = Some(reader.u32()?);
                let count = reader.count(16)?;
                self.keys = (0..count).map(|_| Ok((reader.u64()?, reader.u64()?))).collect::<Result<_>>()?;
                reader.end()
            }
            PART => {
                let (group, offset) = (reader.u32()? as usize, reader.u64()?);
                let piece = &bytes[bytes.len().min(HEAD)..];
                let offset = usize::try_from(offset).map_err(|_| strange("a piece out of place"))?;
                self.total = self.total.saturating_add(piece.len());
                if group >= self.keys.len() || !offset.is_multiple_of(PIECE) || piece.len() > PIECE {
                    return Err(strange("a piece out of place"));
                }
                if self.total > MAX_HEARD {
                    return Err(strange("too long an answer"));
                }
                self.pieces.insert((group, offset / PIECE), piece.to_vec());
                Ok(())
            }
            END => {
                self.complete = true;
                reader.end()
            }
            BUSY => {
                self.busy = true;
                reader.end()
            }
            _ => Err(strange("a frame of an unknown kind")),
        }
    }

    /// Copies from the memory of a group; what was not told is zero. Gives whether any of it was told.
    pub(crate) fn read(&self, group: usize, at: usize, into: &mut [u8]) -> bool {
        let mut told = false;
        let mut done = 0;
        while done < into.len() {
            let here = at.saturating_add(done);
            let step = (PIECE - here % PIECE).min(into.len() - done);
            if let Some(piece) = self.pieces.get(&(group, here / PIECE)) {
                if !told {
                    into.fill(0);
                }
                told = true;
                let from = piece.get(here % PIECE..).unwrap_or_default();
                let count = from.len().min(step);
                into[done..done + count].copy_from_slice(&from[..count]);
            }
            done += step;
        }
        told
    }
}

/// Bytes of a PART before its piece.
const HEAD: usize = 4 + 1 + 4 + 8;

fn strange(what: &str) -> Error {
    Error::peer(PeerFaultKind::Misbehaved, "a process that was asked for its state", None, what)
}
