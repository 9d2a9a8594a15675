//! The records of a store's file, without the file.
//!
//! A record is a u32 length and a key, a u32 length and a value, in the machine's byte order, as torch's FileStore
//! writes them. The first byte of a key says what the record does. Torch reads over those it does not know.

use super::super::{Reply, Request};

/// Sets a value.
const SET: char = '/';
/// Deletes a value: the key of the value follows, with its slash.
const DELETE: char = '-';
/// Appends to a queue; ours.
const PUSH: char = '+';
/// Takes the oldest of a queue; ours.
const POP: char = '~';
/// Keys by which torch counts who uses the file.
const TORCH: [&str; 2] = ["refcount/", "cleanup/"];

/// The longest key.
const KEY: usize = 64 << 10;
/// The longest value.
pub(super) const VALUE: usize = 1 << 30;

/// A change that a record stands for, and how long it is. `None`: there is no whole record yet. An error: these bytes
/// will never be one.
pub(in super::super) fn next(bytes: &[u8]) -> Result<Option<(Option<Request>, usize)>, String> {
    let Some((key, at)) = field(bytes, 0, KEY, "key")? else {
        // What is there of the key must look like one, so that a file of something else is not taken for cut off.
        return match bytes.get(4) {
            Some(first) if !is_first_byte(*first) => Err("a key that no store writes".into()),
            _ => Ok(None),
        };
    };
    let key = std::str::from_utf8(key).map_err(|_| "a key that is not UTF-8".to_owned())?;
    let Some((value, end)) = field(bytes, at, VALUE, "value")? else { return Ok(None) };
    let change = if let Some(name) = key.strip_prefix(SET) {
        Some(Request::Set(name.to_owned(), value.to_vec()))
    } else if let Some(name) = tagged(key, DELETE) {
        Some(Request::Delete(name))
    } else if let Some(name) = tagged(key, PUSH) {
        Some(Request::Push(name, value.to_vec()))
    } else if let Some(name) = tagged(key, POP) {
        Some(Request::Pop { key: name, wait: false })
    } else if TORCH.contains(&key.trim_start_matches(DELETE)) {
        None
    } else {
        return Err(format!("the key {key:?}, which no store writes"));
    };
    Ok(Some((change, end)))
}

/// Appends the records of what a request changed. `value` is the key's value afterwards.
pub(super) fn record(request: &Request, reply: &Reply, value: Option<&[u8]>, out: &mut Vec<u8>) {
    match request {
        Request::Set(key, value) => put(out, SET, key, value),
        Request::MultiSet(pairs) => pairs.iter().for_each(|(key, value)| put(out, SET, key, value)),
        Request::Add(key, _) | Request::Append(key, _) => put(out, SET, key, value.unwrap_or_default()),
        Request::CompareSet { key, desired, .. }
            if *reply == Reply::Value(desired.clone()) && value.is_some() =>
        {
            put(out, SET, key, desired);
        }
        Request::Delete(key) if *reply == Reply::Truth(true) => put(out, DELETE, &format!("/{key}"), b""),
        Request::Push(key, value) => put(out, PUSH, &format!("/{key}"), value),
        Request::Pop { key, .. } if matches!(reply, Reply::Value(_)) => {
            put(out, POP, &format!("/{key}"), b"")
        }
        _ => {}
    }
}

/// Refuses what a record cannot hold.
pub(super) fn fits(key: &str, value: &[u8]) -> Result<(), String> {
    if key.len() + 2 > KEY {
        return Err(format!("a key of {} bytes: a file store takes at most {}", key.len(), KEY - 2));
    }
    if value.len() > VALUE {
        return Err(format!("a value of {} bytes: a file store takes at most {VALUE}", value.len()));
    }
    Ok(())
}

fn put(out: &mut Vec<u8>, tag: char, key: &str, value: &[u8]) {
    // `fits` has seen both.
    out.extend_from_slice(&(key.len() as u32 + 1).to_ne_bytes());
    out.push(tag as u8);
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(&(value.len() as u32).to_ne_bytes());
    out.extend_from_slice(value);
}

/// A field and where it ends.
fn field<'a>(
    bytes: &'a [u8],
    at: usize,
    most: usize,
    what: &str,
) -> Result<Option<(&'a [u8], usize)>, String> {
    let Some(len) = bytes.get(at..at + 4).and_then(|len| len.try_into().ok()).map(u32::from_ne_bytes) else {
        return Ok(None);
    };
    let len = len as usize;
    if len > most {
        return Err(format!("a {what} of {len} bytes"));
    }
    Ok(bytes.get(at + 4..at + 4 + len).map(|field| (field, at + 4 + len)))
}

/// The name behind a tag and the slash that torch gives every key of a user.
fn tagged(key: &str, tag: char) -> Option<String> {
    key.strip_prefix(tag)?.strip_prefix('/').map(str::to_owned)
}

fn is_first_byte(byte: u8) -> bool {
    [SET, DELETE, PUSH, POP].iter().any(|tag| *tag as u8 == byte)
        || TORCH.iter().any(|own| own.as_bytes().first() == Some(&byte))
}
