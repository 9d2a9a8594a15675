//! The pool on memory of the host, and on a GPU where there is one.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod process;

use std::any::Any;
use std::sync::{Arc, Mutex};

use tensorwire_device::cuda::Gpu;
use tensorwire_device::host::Host;
use tensorwire_device::pool::Pool;
use tensorwire_device::{Caching, Device, DeviceId, Error, Handle, Queue, Region, Result, Span};

/// The devices that are here.
fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices: Vec<Arc<dyn Device>> = vec![Arc::new(Host)];
    match Gpu::open(0) {
        Ok(gpu) => devices.push(Arc::new(gpu)),
        Err(error) => process::skip(error),
    }
    devices
}

#[test]
fn blocks_are_apart_and_come_back() {
    for device in devices() {
        let pool = Pool::new(device);
        let lengths = [0, 1, 511, 512, 513, 100_000, 1 << 20, (1 << 20) + 1, 5 << 20, 20 << 20, 40 << 20];
        let blocks: Vec<_> = lengths.iter().map(|&len| pool.alloc(len).unwrap()).collect();
        for (index, (block, len)) in blocks.iter().zip(lengths).enumerate() {
            assert_eq!((block.len(), block.addr() % 512), (len, 0));
            block.write(0, &vec![index as u8; len]).unwrap();
            assert!(block.write(len, &[0]).is_err() && block.read(len, &mut [0]).is_err());
        }
        for (index, (block, len)) in blocks.iter().zip(lengths).enumerate() {
            assert!(Span::whole(block.clone()).to_vec().unwrap() == vec![index as u8; len], "{len} bytes");
        }
        let full = pool.stats();
        assert_eq!(full.blocks, lengths.len());
        assert!(full.used <= full.held && full.misses < lengths.len() as u64, "{full:?}");
        drop(blocks);
        let empty = pool.stats();
        assert_eq!((empty.used, empty.blocks, empty.held, empty.most), (0, 0, full.held, full.used));
        // The same again needs no new segment.
        let _again: Vec<_> = lengths.iter().map(|&len| pool.alloc(len).unwrap()).collect();
        assert_eq!(pool.stats().misses, full.misses);
        assert_eq!(pool.trim(), 0, "all segments are in use");
        drop(_again);
        assert_eq!((pool.trim(), pool.stats().held, pool.stats().segments), (full.held, 0, 0));
    }
}

#[test]
fn a_queue_keeps_its_blocks() {
    for device in devices() {
        let pool = Pool::new(device);
        let mut queue = pool.device().queue().unwrap();
        let from = pool.alloc(1 << 20).unwrap();
        from.write(0, &[5; 1 << 20]).unwrap();
        let into = pool.alloc(1 << 20).unwrap();
        queue
            .copy(Span::whole(into.clone()).view(), Span::whole(from.clone()).view(), Caching::Keep)
            .unwrap();
        drop(from);
        // Were the block given out again now, the copy might see this.
        pool.alloc(1 << 20).unwrap().write(0, &[6; 1 << 20]).unwrap();
        let abort = tensorwire_device::Abort::local();
        queue.finish(&abort, process::soon()).unwrap();
        assert!(Span::whole(into).to_vec().unwrap() == vec![5; 1 << 20]);
        drop(queue);
    }
}

#[test]
fn blocks_of_a_gpu_are_shared_as_parts() {
    let Ok(gpu) = Gpu::open(0) else { return };
    let pool = Pool::new(Arc::new(gpu.clone()));
    let (first, second) = (pool.alloc(3000).unwrap(), pool.alloc(3000).unwrap());
    first.write(0, &[1; 3000]).unwrap();
    second.write(0, &[2; 3000]).unwrap();
    let again = gpu.import(second.export().unwrap()).unwrap();
    assert!(Span::whole(again.clone()).to_vec().unwrap() == [2; 3000]);
    drop((first, second));
    drop(pool);
    again.write(0, &[3; 3000]).unwrap();
}

#[test]
fn impossible_lengths_are_refused() {
    let pool = Pool::new(Arc::new(Host));
    for len in [usize::MAX, isize::MAX as usize + 1] {
        assert!(matches!(pool.alloc(len), Err(Error::Misuse(text)) if text.contains(&len.to_string())));
    }
    assert_eq!(pool.stats().blocks, 0);
}

/// A device with little memory.
#[derive(Debug)]
struct Small {
    left: Arc<Mutex<usize>>,
}

/// Gives its bytes back.
struct Taken(Arc<Mutex<usize>>, usize);

impl Drop for Taken {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += self.1;
    }
}

impl Device for Small {
    fn id(&self) -> DeviceId {
        DeviceId::Host
    }

    fn alloc(&self, len: usize) -> Result<Arc<dyn Region>> {
        let mut left = self.left.lock().unwrap();
        if len > *left {
            let need = format!("{len} bytes of free memory");
            return Err(Error::Unsupported { what: "an allocation".into(), need, have: left.to_string() });
        }
        *left -= len;
        let memory = Host.alloc(len)?;
        let keep = Box::new((memory.clone(), Taken(self.left.clone(), len)));
        // SAFETY: `memory` holds it and travels inside `keep`.
        unsafe { Host.adopt(memory.addr(), len, keep) }
    }

    fn import(&self, handle: Handle) -> Result<Arc<dyn Region>> {
        Host.import(handle)
    }

    unsafe fn adopt(
        &self,
        addr: usize,
        len: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn Region>> {
        // SAFETY: the caller's promise.
        unsafe { Host.adopt(addr, len, keep) }
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Host.queue()
    }
}

#[test]
fn pressure_is_told_before_segments_go() {
    let left = Arc::new(Mutex::new(70 << 20));
    let pool = Pool::new(Arc::new(Small { left: left.clone() }));
    let lent = Arc::new(Mutex::new(Some(pool.alloc(30 << 20).unwrap())));
    drop(pool.alloc(10 << 20).unwrap());
    assert_eq!(pool.stats().held, 40 << 20);
    let told = Arc::new(Mutex::new(Vec::new()));
    let (asked, lender, other) = (told.clone(), lent.clone(), pool.clone());
    pool.on_pressure(Box::new(move |bytes| {
        asked.lock().unwrap().push((bytes, other.stats().held));
        lender.lock().unwrap().take().map_or(0, |region| region.len())
    }));
    // Neither the rest nor what is cached is enough: the hook must give its block back first.
    let large = pool.alloc(60 << 20).unwrap();
    assert_eq!(*told.lock().unwrap(), [(60 << 20, 40 << 20)], "asked once, with everything still there");
    assert_eq!((pool.stats().held, pool.stats().blocks), (60 << 20, 1));
    // Now nothing helps, and the error has the sizes.
    let error = pool.alloc(60 << 20).unwrap_err().to_string();
    assert!(error.contains(&(60 << 20).to_string()) && error.contains("1 blocks in use"), "{error}");
    drop(large);
    // A segment as large as it must be, where one of the usual size does not fit.
    pool.trim();
    *left.lock().unwrap() = 10 << 20;
    let odd = pool.alloc(8 << 20).unwrap();
    assert_eq!(pool.stats().held, 8 << 20);
    drop(odd);
}
