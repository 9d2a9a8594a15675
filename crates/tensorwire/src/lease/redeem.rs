//! Redeeming: a holder is lent memory.

use std::sync::Arc;
use std::time::Duration;

use tensorwire_device::fd::Fd;
use tensorwire_device::handle::GpuHandle;
use tensorwire_device::subregion::keeping;
use tensorwire_device::{Abort, Deadline, DeviceId, Handle, Queue, Region, Span};

use super::holder::{Hold, Lender, ring};
use super::meet::{fetch, lender};
use super::{Inner, Leases, Loan, Token, at};
use crate::error::{Error, PeerFaultKind, Result};
use crate::share::{root, start_in};

impl Leases {
    /// Maps the memory of a token and counts it as held. With a queue, that waits for the data, until its abort
    /// word is set or, without one, the owner is gone; otherwise this call does.
    pub(crate) fn redeem(
        &self,
        token: &Token,
        queue: Option<(&mut dyn Queue, Option<&Abort>)>,
        deadline: Deadline,
    ) -> Result<Loan> {
        let inner = &self.0;
        let lender = lender(inner, token, deadline)?;
        let hold = Arc::new(lender.redeem(token, deadline)?);
        let region = ready(inner, &hold, token, queue, deadline).inspect_err(|_| hold.take_back())?;
        Ok(Loan { inner: inner.clone(), span: Span::whole(region), hold })
    }

    /// The file of a token, which uses the token up.
    pub(crate) fn redeem_file(&self, token: &Token, deadline: Deadline) -> Result<Fd> {
        let lender = lender(&self.0, token, deadline)?;
        let hold = lender.redeem(token, deadline)?;
        file_of(&self.0, &lender, token, deadline).inspect_err(|_| hold.take_back())
    }

    /// Uses a token up without its memory.
    pub(crate) fn discard(&self, token: &Token, deadline: Deadline) -> Result<()> {
        lender(&self.0, token, deadline)?.redeem(token, deadline).map(drop)
    }
}

/// The memory of a loan, mapped and ready.
fn ready(
    inner: &Inner,
    hold: &Arc<Hold>,
    token: &Token,
    queue: Option<(&mut dyn Queue, Option<&Abort>)>,
    deadline: Deadline,
) -> Result<Arc<dyn Region>> {
    let lender = &hold.lender;
    let (root, start) = map(inner, lender, token, deadline)?;
    at("redeem: mapped");
    if let Some(flag) = lender.points.flag(token.ready).filter(|flag| !flag.reached(token.ready.value)) {
        match queue {
            Some((queue, Some(abort))) => queue.wait(&flag, token.ready.value, abort, deadline)?,
            Some((queue, None)) => {
                lender.wait_on(&inner.points, queue, (&flag, token.ready.value), deadline)?;
            }
            None => flag.wait(token.ready.value, &lender.abort, deadline).map_err(|error| match error {
                tensorwire_device::Error::TimedOut => Error::timed_out(
                    format!("redeeming {token:?}"),
                    Duration::ZERO,
                    format!("the device of process {} has not come so far", lender.pid),
                ),
                _ => lender.check().err().unwrap_or_else(|| error.into()),
            })?,
        }
    }
    at("redeem: ready");
    Ok(keeping(root, start..start + token.len, Box::new(hold.clone()))?)
}

/// The mapping that the memory of a token lies in, and where it begins there.
fn map(
    inner: &Inner,
    lender: &Lender,
    token: &Token,
    deadline: Deadline,
) -> Result<(Arc<dyn Region>, usize)> {
    let memory = &token.memory;
    if token.len == 0 {
        return Ok((inner.share.devices().open(&memory.device)?.alloc(0)?, 0));
    }
    // Memory of this process is where it is. Parts of one allocation may have been granted one by one.
    if let Some(span) = own(inner, lender, token) {
        let root = root(span.region()).clone();
        let start = start_in(&root, &span);
        return Ok((root, start));
    }
    let known = inner.share.mapping(lender.id, memory.number);
    if let Some(region) = known.filter(|it| it.device() == memory.device && it.len() == memory.len) {
        return Ok((region, token.offset));
    }
    let handle = fetch(lender, token, deadline)?;
    let (device, whole) = match &handle {
        Handle::Gpu(GpuHandle { device, chunks, .. }) => {
            (DeviceId::Gpu(*device), chunks.iter().map(|chunk| chunk.size).sum())
        }
        other => (DeviceId::Host, other.len()),
    };
    if device != memory.device || whole != memory.len {
        let text = format!("its token promises {token:?}, and its handle {whole} bytes on {device}");
        return Err(lender.blame(PeerFaultKind::Misbehaved, &text));
    }
    inner.give_up(std::time::Instant::now());
    let wanted = token.offset..token.offset + token.len;
    let (root, start) = inner.share.map_fetched(lender.id, memory.number, handle, wanted)?;
    // The thread gives it up some day.
    ring(&inner.bell);
    Ok((root, token.offset - start))
}

/// The memory of a token that this process has granted itself.
fn own(inner: &Inner, lender: &Lender, token: &Token) -> Option<Span> {
    if lender.connection.is_some() || token.key != inner.key_of(token.slot, token.generation) {
        return None;
    }
    let (span, number) = inner.owner().memory(token.slot, token.generation)?;
    (number == token.memory.number && span.len() == token.len).then_some(span)
}

/// The file behind a token, as long as promised now.
fn file_of(inner: &Inner, lender: &Lender, token: &Token, deadline: Deadline) -> Result<Fd> {
    let handle = match own(inner, lender, token) {
        Some(span) => root(span.region()).export()?,
        None => fetch(lender, token, deadline)?,
    };
    let Handle::File { fd, len } = handle else {
        return Err(Error::misuse(format!("{token:?} is not for a file: redeem it for its memory")));
    };
    let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io("looking at a file that was lent", e))?;
    if len != token.memory.len || u64::try_from(stat.st_size).is_ok_and(|size| size < len as u64) {
        let text = format!("its token promises {token:?}, and its file has {} bytes", stat.st_size);
        return Err(lender.blame(PeerFaultKind::Misbehaved, &text));
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Terms;

    /// An owner that has closed the connection counts nothing any more: it is met anew.
    #[test]
    fn an_owner_that_hung_up_is_met_anew() {
        let soon = || Deadline::after(Duration::from_secs(60));
        let context = || crate::Context::new(crate::Config::default()).unwrap();
        let (owner, holder) = (context(), context());
        let lease = owner.grant(&owner.alloc(64).unwrap(), &Terms::default()).unwrap();
        let loan = holder.redeem(lease.token(), soon()).unwrap();
        assert_eq!(lease.holders().len(), 1);
        let lender = &loan.hold.lender;
        // A process that sends nonsense loses its connection.
        rustix::io::write(lender.connection.as_ref().unwrap().socket(), b"nonsense").unwrap();
        let end = soon();
        while loan.inner.holding().lender(&lease.token().issuer).is_some() || !lease.holders().is_empty() {
            assert!(!end.passed());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(lender.check(), Err(Error::Peer(_))));
        let again = holder.redeem(lease.token(), soon()).unwrap();
        assert!(!Arc::ptr_eq(&again.hold.lender, lender));
        assert_eq!(lease.holders().len(), 1);
    }

    /// A token is good for its own grant, however well its holder guesses the numbers of others.
    #[test]
    fn a_token_is_no_key_to_other_grants() {
        let soon = || Deadline::after(Duration::from_secs(60));
        let context = || crate::Context::new(crate::Config::default()).unwrap();
        let (owner, holder) = (context(), context());
        let grant = |byte| {
            let span = owner.alloc(64).unwrap();
            span.write(0, &[byte]).unwrap();
            owner.grant(&span, &Terms::default()).unwrap()
        };
        let (mine, other) = (grant(1), grant(2));
        let (right, wanted) = (mine.token(), other.token());
        let memory = |token: &Token| Token { memory: token.memory.clone(), ..right.clone() };
        let shorter = Token { len: 32, ..right.clone() };
        let elsewhere = Token { offset: 32, ..shorter.clone() };
        let forged = [
            shorter,
            elsewhere,
            Token { slot: wanted.slot, generation: wanted.generation, ..right.clone() },
            Token { slot: wanted.slot, generation: wanted.generation, ..memory(wanted) },
            memory(wanted),
        ];
        for forged in &forged {
            for context in [&holder, &owner] {
                let error = context.redeem(forged, soon()).unwrap_err();
                assert!(matches!(&error, Error::Peer(_)), "{error}");
            }
        }
        assert_eq!((other.holders().len(), mine.holders().len()), (0, 0));
        let loan = holder.redeem(right, soon()).unwrap();
        assert_eq!(loan.span().to_vec().unwrap()[0], 1);
        // What is mapped already is no way around it.
        drop(holder.redeem(wanted, soon()).unwrap());
        assert!(holder.redeem(&memory(wanted), soon()).is_err());
    }
}
