//! A bare loop to compare messages by UCX with: two processes, a worker each, and nothing but active messages of the same bytes.

use std::collections::VecDeque;
use std::time::Instant;

use tensorwire::device::ucx::{Body, Event, Ucx, Worker};
use tensorwire::store::{Store, TcpStore};

use crate::bench::peers::PATIENCE;
use crate::bench::placement::Turn;
use crate::exit::Failure;

/// The longest message that is taken.
const MOST: usize = 1 << 30;

/// A worker of UCX and its way to the partner's.
#[derive(Debug)]
pub(super) struct UcxLine {
    worker: Worker,
    way: u64,
    token: u64,
    /// Messages that have come and were not read.
    inbox: VecDeque<Event>,
}

impl UcxLine {
    /// Both say in the bench's store where their workers are reached.
    pub(super) fn open(store: &TcpStore, rank: usize, turn: Turn) -> Result<Option<Self>, Failure> {
        let (Turn::Send(other) | Turn::Recv(other)) = turn else { return Ok(None) };
        // It is kept where it was found.
        tensorwire::ucx_library()?;
        let mut worker = Worker::new(Ucx::load(&[]).map_err(failed)?, MOST).map_err(failed)?;
        store.set(&format!("ucx/{rank}"), &worker.address().map_err(failed)?)?;
        let way = worker.connect(&store.get(&format!("ucx/{other}"))?).map_err(failed)?;
        Ok(Some(Self { worker, way, token: 0, inbox: VecDeque::new() }))
    }

    /// Sends bytes, and gives them back when they may be changed.
    pub(super) fn write(&mut self, data: Vec<u8>) -> Result<Vec<u8>, Failure> {
        self.token += 1;
        self.worker.send(self.way, &[], Body::Bytes(data), self.token).map_err(failed)?;
        self.done()
    }

    /// Receives as many bytes into these.
    pub(super) fn read(&mut self, mut data: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let begin = Instant::now();
        loop {
            match self.inbox.pop_front() {
                Some(Event::Came { bytes, .. }) if bytes.len() == data.len() => {
                    data.copy_from_slice(&bytes);
                    return Ok(data);
                }
                Some(Event::Offered { offer, len, .. }) if len == data.len() => {
                    self.token += 1;
                    self.worker.receive(offer, Body::Bytes(data), self.token).map_err(failed)?;
                    return self.done();
                }
                Some(other) => return Err(failed(format!("{other:?} came"))),
                None => drop(self.turn(begin)?),
            }
        }
    }

    /// Waits until the call with the last token is over, for its memory.
    fn done(&mut self) -> Result<Vec<u8>, Failure> {
        let begin = Instant::now();
        loop {
            if let Some(data) = self.turn(begin)? {
                return Ok(data);
            }
        }
    }

    /// Goes on with everything: the memory of the call with the last token, once it is over.
    fn turn(&mut self, begin: Instant) -> Result<Option<Vec<u8>>, Failure> {
        if !self.worker.progress() && begin.elapsed() > PATIENCE {
            return Err(failed("the partner does not answer"));
        }
        let mut data = None;
        for event in self.worker.events() {
            match event {
                Event::Done { token, result, body } if token == self.token => {
                    result.map_err(failed)?;
                    if let Some(Body::Bytes(bytes)) = body {
                        data = Some(bytes);
                    }
                }
                Event::Lost { why, .. } => return Err(failed(why)),
                Event::Done { .. } => {}
                message => self.inbox.push_back(message),
            }
        }
        Ok(data)
    }
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("the bare loop of UCX: {why}"))
}
