//! The meeting: every operation begins with it, on the hosts. Each rank says in its progress line what it came for and what
//! memory it offers. Ranks that are missing, or came for something else, are found here. All ranks see the same answers, and
//! so agree on the way.

use std::time::Instant;
use tensorwire_device::{Deadline, Dtype, Span};

use super::buffer::Buffer;
use super::exec::Executor;
use super::lines::Stop;
use super::offer::Accepted;
use super::operation::Operation;
use super::plan::Counts;
use super::runner::Met;
use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::shm::control::HALF;
use crate::shm::kind::{Detour, Kind, Path};

impl Executor {
    /// The sizes of all parts, which each rank knows only of its own.
    pub(super) fn agree_on_sizes(
        &mut self,
        group: &Ranks,
        operation: &mut Operation,
        time: (Instant, Deadline),
    ) -> Result<()> {
        let Some(uneven) = operation.uneven() else { return Ok(()) };
        let row = uneven.given.len() * 8;
        if self.sizes.is_none() {
            let region = tensorwire_device::host::private(row + row * group.world())?;
            self.sizes = Some(Span::whole(region));
        }
        let Some(sizes) = self.sizes.clone() else { return Ok(()) };
        let bytes: Vec<u8> = uneven.given.iter().flat_map(|&bytes| (bytes as u64).to_le_bytes()).collect();
        sizes.write(0, &bytes)?;
        let mut exchange = Operation::new(Kind::Sizes, Dtype::I64);
        exchange.late = operation.late;
        exchange.counts = Counts::Even(row);
        exchange.input = Buffer::of([sizes.slice(0..row)?]);
        exchange.output = Buffer::of([sizes.slice(row..sizes.len())?]);
        self.next(group, &exchange, time)?;
        let mut all = vec![0; row * group.world()];
        sizes.read(row, &mut all)?;
        let words = all.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        operation.counts =
            Counts::Matrix(words.map(|word| usize::try_from(word).unwrap_or(usize::MAX)).collect());
        // All ranks know all sizes now: all refuse a path that is too small for them, or none.
        operation.check(group.world())
    }

    /// Meets the other ranks, and agrees with them on the way. Where the size leaves no choice, the first step of the plan is
    /// the meeting.
    #[inline(always)]
    pub(super) fn meet(&mut self, group: &Ranks, met: &mut Met<'_>, deadline: Deadline) -> Result<(), Stop> {
        let operation = met.operation;
        let lines = &mut self.lines;
        lines.point(operation.kind, 0);
        lines.join(deadline)?;
        lines.say_header(lines.number)?;
        operation.check_sizes(group, lines.me, lines.world)?;
        if met.shape.announced {
            let device = match operation.gpu() {
                Some(gpu) => lines.control.gpu_index(gpu)?,
                None => 0,
            };
            let queued = operation.gpu().is_some();
            let mut offer = operation.offer(group, lines.me, device)?;
            if queued && offer.refused.is_none() {
                self.reached.note(&mut offer);
            }
            lines.control.region().write(lines.payload_at(lines.me), &offer.to_bytes())?;
            let reached = match offer.refused {
                Some(why) if !queued => Err((lines.me, why)),
                refused => {
                    lines.signal(self.runner.queue(), 1)?;
                    lines.wait_all(self.runner.queue(), 1, deadline)?;
                    met.signalled = true;
                    match (lines.odd_one(), operation.path, refused) {
                        // Offers are not looked at: who goes on may write over them.
                        (Some(place), ..) => Err((place, Detour::Mixed)),
                        (_, Some(path), _) if path != Path::Direct => {
                            met.host_alone(path);
                            return Ok(());
                        }
                        (_, _, Some(why)) => Err((lines.me, why)),
                        _ => {
                            let queue = self.runner.queue();
                            match lines.accept(group, queue, &mut met.shape, queued, deadline)? {
                                Accepted::Direct(peers, layout) => {
                                    let shape = &met.shape;
                                    let needed =
                                        [shape.all_given(lines.me) > 0, shape.all_taken(lines.me) > 0];
                                    if queued && offer.reached != [layout; 2] {
                                        self.reached.confirm(&offer, needed, layout);
                                    }
                                    Ok(peers)
                                }
                                Accepted::Not(place, why) => {
                                    if place == lines.me && why == Detour::Unshareable {
                                        self.reached.refuse(&offer);
                                    }
                                    Err((place, why))
                                }
                            }
                        }
                    }
                }
            };
            match reached {
                Ok(reached) => {
                    (met.path, met.peers) = (Path::Direct, reached);
                    self.record.iter_mut().for_each(|record| self.recorder.via(record, met.path));
                }
                Err((place, why)) => {
                    let own = if place == lines.me || why == Detour::Mixed { why } else { Detour::Other };
                    self.record.iter_mut().for_each(|record| self.recorder.not_direct(record, own));
                    not_direct(group, operation, place, why)?;
                    // Others may still look at what this rank has offered in its line.
                    if queued && why != Detour::Mixed && met.path == Path::Inline {
                        met.host_alone(Path::OneShot);
                        self.record.iter_mut().for_each(|record| self.recorder.via(record, met.path));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Met<'_> {
    /// Tensors of GPUs take a path of the host.
    fn host_alone(&mut self, path: Path) {
        self.path = path;
        self.shape.inline = path == Path::Inline;
        if path == Path::OneShot {
            self.shape.window = HALF;
        }
    }
}

/// Refuses to go another way than straight between tensors, where the caller or strict mode asks for that.
fn not_direct(group: &Ranks, operation: &Operation, place: usize, why: Detour) -> Result<()> {
    let asked = match (operation.path, group.context.config().strict) {
        (Some(Path::Direct), _) => "it was asked for",
        // What we made for the caller, the caller cannot make better.
        (None, true) if !operation.made_here => "TENSORWIRE_STRICT is set",
        _ => return Ok(()),
    };
    Err(Error::Unsupported {
        what: format!("the direct path for {} ({asked})", operation.kind),
        need: match operation.gpu() {
            Some(_) => {
                "tensors on GPUs, in memory that can be given to other processes, on every rank".into()
            }
            None => "tensors in memory that alloc() of a group or context gave, on every rank".into(),
        },
        have: format!("of {}: {}", group.who(place), why.reason()),
    })
}
