//! Calls to a server of tensorwire: one exchange each, by the rules of `Request`.

use tensorwire_device::Deadline;

use super::super::wire::{self, Frame};
use super::super::{Reply, Request, name_missing};
use super::connection::Connection;
use super::{GRACE, at_least};
use crate::error::{Error, Result};
use crate::interrupt::{self, is_interrupt};

/// Keys that are asked for one by one when a wait has failed.
const ASKED: usize = 1024;

/// Executes a request.
pub(super) fn execute(connection: &mut Connection, request: Request, deadline: Deadline) -> Result<Reply> {
    let patience = at_least(deadline);
    connection.begin();
    if let Request::Pop { wait: false, .. } = &request {
        return super::torch::try_pop(connection, request, patience);
    }
    let frame = Frame::Operation { strict: true, request };
    connection.push(&frame);
    let Frame::Operation { request, .. } = frame else {
        return Err(Error::bug("a frame of a request without one"));
    };
    connection.send(patience)?;
    if !request.waits() {
        let status = connection.byte(patience)?;
        let result = read(connection, &request, status, patience)?;
        connection.end();
        return result;
    }
    let status = match connection.byte_by(deadline) {
        Err(error) if is_interrupt(&error) => {
            interrupt::without(|| withdraw(connection, &request));
            return Err(error);
        }
        status => status?,
    };
    if let Some(status) = status {
        let result = read(connection, &request, status, patience)?;
        connection.end();
        return result;
    }
    cancel(connection, &request)
}

/// Takes a wait back whose caller does not want its answer any more.
fn withdraw(connection: &mut Connection, request: &Request) {
    // A value that came meanwhile is somebody else's then, though it has lost its place in the queue.
    if let (Ok(Reply::Value(value)), Request::Pop { key, .. }) = (cancel(connection, request), request) {
        let back = Request::Push(key.clone(), value);
        if let Err(error) = execute(connection, back, Deadline::after(GRACE)) {
            tracing::warn!("a value of the store's queue {key:?} is lost: {error}");
        }
    }
}

/// Takes a wait back. The server may have answered meanwhile: then that counts, for a popped value must not get lost.
fn cancel(connection: &mut Connection, request: &Request) -> Result<Reply> {
    let grace = Deadline::after(GRACE);
    connection.push(&Frame::CancelWait);
    connection.send(grace)?;
    let status = connection.byte(grace)?;
    if status == wire::STATUS_CANCELED {
        let missing = missing(connection, request, grace)?;
        connection.end();
        return Err(Error::timed_out("", GRACE, missing));
    }
    let result = read(connection, request, status, grace)?;
    if connection.byte(grace)? == wire::STATUS_CANCELED {
        connection.end();
    }
    result
}

/// What follows a status byte. The outer error is the connection's, the inner one the server's answer.
fn read(
    connection: &mut Connection,
    request: &Request,
    status: u8,
    deadline: Deadline,
) -> Result<Result<Reply>> {
    match status {
        wire::STATUS_DONE => Ok(Ok(connection.reply(request, deadline)?)),
        // The server names keys as they are on the wire, with torch's slash.
        wire::STATUS_REFUSED => Ok(Err(Error::Misuse(connection.text(deadline)?.replace("\"/", "\"")))),
        other => Err(connection.nonsense(&format!("an answer with the status {other}"))),
    }
}

/// Names the keys that a wait lacked.
pub(super) fn missing(connection: &mut Connection, request: &Request, deadline: Deadline) -> Result<String> {
    let keys: &[String] = match request {
        Request::Get(key) => std::slice::from_ref(key),
        Request::Wait(keys) | Request::MultiGet(keys) => &keys[..keys.len().min(ASKED)],
        _ => return Ok("nobody came in time".into()),
    };
    for key in keys {
        connection.push_request(false, Request::Check(vec![key.clone()]));
    }
    connection.send(deadline)?;
    let mut missing = Vec::new();
    for key in keys {
        if connection.byte(deadline)? != wire::STATUS_DONE {
            missing.push(key.trim_start_matches('/').to_owned());
        }
    }
    Ok(name_missing(&missing))
}
