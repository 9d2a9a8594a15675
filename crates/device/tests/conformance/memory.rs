//! Allocation, bounds, sharing and adoption.

use std::sync::Arc;
use std::sync::Mutex;

use tensorwire_device::{Caching, Error, Span};

use super::{Subject, bytes_of, noise};

pub fn new_memory_is_zeroed_and_as_long_as_asked(subject: &Subject) {
    for len in [0, 1, 63, 64, 4096, 64 * 1024 + 1, 64 << 20] {
        let region = subject.device.alloc(len).unwrap();
        assert_eq!((region.len(), region.is_empty()), (len, len == 0));
        assert_eq!(region.device(), subject.device.id());
        assert!(bytes_of(&region) == vec![0; len], "{len} bytes");
        let written = noise(1021, 1).into_iter().cycle().take(len.min(1 << 20)).collect::<Vec<_>>();
        region.write(len - written.len(), &written).unwrap();
        assert!(bytes_of(&region).ends_with(&written), "{len} bytes");
    }
}

pub fn impossible_lengths_are_refused(subject: &Subject) {
    for len in [usize::MAX, isize::MAX as usize + 1, isize::MAX as usize] {
        let error = subject.device.alloc(len).unwrap_err();
        assert!(error.to_string().contains(&len.to_string()), "{error}");
    }
}

pub fn reads_and_writes_stay_inside(subject: &Subject) {
    let region = subject.filled(&[1, 2, 3]);
    let span = Span::whole(region.clone());
    let mut into = [9; 2];
    for (offset, inside) in [(0, true), (1, true), (2, false), (3, false), (usize::MAX, false)] {
        assert_eq!(region.read(offset, &mut into).is_ok(), inside, "at {offset}");
        assert_eq!(span.read(offset, &mut into).is_ok(), inside, "at {offset}");
        assert_eq!(region.write(offset, &into).is_ok(), inside, "at {offset}");
        assert_eq!(span.write(offset, &into).is_ok(), inside, "at {offset}");
    }
    assert_eq!((bytes_of(&region), into), (vec![1, 2, 3], [2, 3]));
    // Nothing may be read or written at the end, but not beyond it.
    assert!(region.read(3, &mut []).is_ok() && region.write(3, &[]).is_ok());
    let error = region.read(4, &mut []).unwrap_err();
    assert!(matches!(error, Error::Misuse(_)) && error.to_string().contains("3 bytes"), "{error}");
}

#[allow(clippy::reversed_empty_ranges)] // that is what is tested
pub fn spans_stay_inside(subject: &Subject) {
    let region = subject.filled(&noise(100, 3));
    let span = Span::new(region.clone(), 10..90).unwrap();
    let part = span.slice(20..30).unwrap();
    assert_eq!((part.offset(), part.len(), part.is_empty()), (30, 10, false));
    assert_eq!(part.to_vec().unwrap(), noise(100, 3)[30..40]);
    assert!(Arc::ptr_eq(part.region(), &region));
    part.write(9, &[200]).unwrap();
    assert_eq!(bytes_of(&region)[39], 200);
    // A span ends where it ends, although the region goes on.
    assert!(part.write(10, &[1]).is_err() && part.read(9, &mut [0; 2]).is_err());
    for range in [0..81, 81..81, 5..4, 0..usize::MAX, usize::MAX..usize::MAX, usize::MAX..0] {
        let error = span.slice(range).unwrap_err();
        assert!(matches!(error, Error::Misuse(_)) && error.to_string().contains("80 bytes"), "{error}");
    }
    assert!(Span::new(region.clone(), 0..101).is_err() && Span::new(region, 100..100).unwrap().is_empty());
    assert!(span.slice(80..80).unwrap().to_vec().unwrap().is_empty());
}

pub fn an_import_is_the_same_memory(subject: &Subject) {
    let first = subject.filled(&noise(5000, 1));
    let handle = first.export().unwrap();
    assert_eq!((handle.len(), handle.is_empty(), handle.fd().is_some()), (5000, false, true));
    let second = subject.device.import(handle).unwrap();
    assert!(bytes_of(&second) == noise(5000, 1));
    second.write(4999, &[77]).unwrap();
    first.write(0, &[78]).unwrap();
    assert_eq!((bytes_of(&first)[4999], bytes_of(&second)[0]), (77, 78));
    // What was imported may be shared again.
    let third = subject.device.import(second.export().unwrap()).unwrap();
    assert!(bytes_of(&third) == bytes_of(&first));
}

pub fn an_import_outlives_the_first_region(subject: &Subject) {
    let first = subject.filled(&noise(4096, 2));
    let second = subject.device.import(first.export().unwrap()).unwrap();
    let span = Span::new(second, 1..4096).unwrap();
    drop(first);
    assert!(span.to_vec().unwrap() == noise(4096, 2)[1..]);
}

pub fn an_import_of_another_length_is_refused(subject: &Subject) {
    let region = subject.filled(&noise(8192, 1));
    for promised in [0, 1, 8191, 8193, 4096, usize::MAX, isize::MAX as usize] {
        let tensorwire_device::Handle::Memfd { fd, .. } = region.export().unwrap() else { return };
        let error =
            subject.device.import(tensorwire_device::Handle::Memfd { fd, len: promised }).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("8192") && text.contains(&promised.to_string()), "{text}");
    }
}

pub fn empty_memory_may_be_shared(subject: &Subject) {
    let region = subject.device.alloc(0).unwrap();
    let other = subject.device.import(region.export().unwrap()).unwrap();
    assert!(other.is_empty() && other.read(0, &mut []).is_ok() && other.read(0, &mut [0]).is_err());
    let mut queue = subject.queue();
    queue.copy(Span::whole(other).view(), Span::whole(region).view(), Caching::Keep).unwrap();
}

/// Counts how often it is dropped.
struct Kept(Arc<Mutex<u32>>);

impl Drop for Kept {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += 1;
    }
}

pub fn adopted_memory_is_kept_exactly_as_long_as_used(subject: &Subject) {
    let owner = subject.filled(&noise(300, 4));
    let drops = Arc::new(Mutex::new(0));
    let keep = Box::new((Kept(drops.clone()), owner.clone()));
    // SAFETY: memory of this device that `owner`, which travels inside `keep`, holds; nobody refers to it.
    let region = unsafe { subject.device.adopt(owner.addr() + 100, 100, keep) }.unwrap();
    assert_eq!(
        (region.len(), region.addr(), region.device()),
        (100, owner.addr() + 100, subject.device.id())
    );
    assert!(bytes_of(&region) == noise(300, 4)[100..200]);
    assert!(region.read(99, &mut [0; 2]).is_err());
    region.write(99, &[1]).unwrap();
    assert_eq!(bytes_of(&owner)[199], 1);
    let span = Span::new(region.clone(), 5..6).unwrap();
    drop(region);
    assert_eq!(*drops.lock().unwrap(), 0);
    drop(span.clone());
    assert_eq!(*drops.lock().unwrap(), 0);
    drop(span);
    assert_eq!(*drops.lock().unwrap(), 1);
}

pub fn adopted_memory_is_shared_or_the_reason_is_given(subject: &Subject) {
    let owner = subject.filled(&noise(200, 8));
    // SAFETY: memory of this device that `owner` holds; nobody refers to it.
    let region = unsafe { subject.device.adopt(owner.addr() + 10, 64, Box::new(owner.clone())) }.unwrap();
    match region.export() {
        Ok(handle) => {
            let again = subject.device.import(handle).unwrap();
            assert!(bytes_of(&again) == noise(200, 8)[10..74]);
        }
        Err(Error::Unsupported { need, have, .. }) => assert!(!need.is_empty() && have.contains("64 bytes")),
        Err(other) => panic!("{other:?}"),
    }
}

pub fn impossible_memory_is_not_adopted(subject: &Subject) {
    let drops = Arc::new(Mutex::new(0));
    let cases =
        [(0, 1), (usize::MAX, 2), (usize::MAX - 10, 20), (4096, usize::MAX), (4096, isize::MAX as usize + 1)];
    for (addr, len) in cases {
        // SAFETY: it must be refused, so no byte of it is touched.
        let refused = unsafe { subject.device.adopt(addr, len, Box::new(Kept(drops.clone()))) };
        assert!(matches!(refused, Err(Error::Misuse(_))), "{len} bytes at {addr:#x}");
    }
    assert_eq!(*drops.lock().unwrap(), cases.len() as u32);
    // An empty tensor has no address.
    // SAFETY: no bytes.
    let nothing = unsafe { subject.device.adopt(0, 0, Box::new(())) }.unwrap();
    assert!(nothing.is_empty() && Span::whole(nothing).to_vec().unwrap().is_empty());
}
