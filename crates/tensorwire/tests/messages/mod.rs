//! Tensors of known bytes, and random messages against a plain model of them. A file that uses it also has `mod ranks`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use tensorwire::{Dtype, Group, Span, Tensor};

use crate::ranks::random::Random;

/// A flat tensor with these bytes.
pub fn tensor(group: &Group, bytes: &[u8], dtype: Dtype) -> Tensor {
    let span = Span::whole(group.context().host().alloc(bytes.len()).unwrap());
    span.write(0, bytes).unwrap();
    Tensor::flat(span, dtype).unwrap()
}

pub fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    tensor.span().to_vec().unwrap()
}

pub fn empty(group: &Group, len: usize) -> Tensor {
    tensor(group, &vec![0; len], Dtype::U8)
}

/// Bytes that belong to one message only.
pub fn fill(len: usize, key: u64) -> Vec<u8> {
    // Large ones repeat it. A prime, so that a piece in a wrong place is seen.
    const BLOCK: usize = 65521;
    let mut random = Random(key);
    let mut bytes = vec![0; len.min(BLOCK)];
    for chunk in bytes.chunks_mut(8) {
        let word = random.next().to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    if len > BLOCK {
        bytes = bytes.repeat(len.div_ceil(BLOCK));
        bytes.truncate(len);
    }
    bytes
}

/// A tensor in memory of some layout, and how to read it back.
struct Laid {
    tensor: Tensor,
    step: usize,
}

impl Laid {
    fn new(group: &Group, bytes: &[u8], dtype: Dtype, random: &mut Random) -> Self {
        let (step, item) = (1 + random.below(3), dtype.size());
        let count = bytes.len() / item;
        let mut spread = vec![0xee; bytes.len() * step];
        for (index, element) in bytes.chunks(item).enumerate() {
            spread[index * step * item..][..item].copy_from_slice(element);
        }
        let flat = tensor(group, &spread, dtype);
        // Two dimensions where they come out even, so that not all layouts are of one.
        let tensor = match count.is_multiple_of(4) && random.below(2) == 0 {
            true => Tensor::strided(
                flat.span().clone(),
                dtype,
                &[count / 4, 4],
                &[4 * step as isize, step as isize],
            ),
            false => Tensor::strided(flat.span().clone(), dtype, &[count], &[step as isize]),
        };
        Self { tensor: tensor.unwrap(), step }
    }

    fn bytes(&self) -> Vec<u8> {
        let item = self.tensor.dtype().size();
        let all = bytes_of(&self.tensor);
        let mut bytes = Vec::new();
        for (index, element) in all.chunks(item).enumerate() {
            match index % self.step {
                0 => bytes.extend_from_slice(element),
                // What lies between the elements is left alone.
                _ => assert!(element.iter().all(|&byte| byte == 0xee)),
            }
        }
        bytes
    }
}

struct Message {
    key: u64,
    from: usize,
    to: usize,
    tag: u64,
    len: usize,
    dtype: Dtype,
}

/// Tags from here on are received from any rank.
const ANY: u64 = 100;

fn scenario(seed: u64, turn: u64, world: usize) -> Vec<Message> {
    let mut random = Random(seed);
    let any_len = random.below(20_000) / 8 * 8;
    (0..40)
        .map(|index| {
            let any = random.below(4) == 0;
            let bits = random.below(21);
            let dtype = [Dtype::U8, Dtype::F32, Dtype::Complex128][random.below(3)];
            Message {
                key: seed << 32 | index,
                from: random.below(world),
                to: random.below(world),
                // A rank may be one scenario ahead of another, which must not receive from any rank what is not of its own.
                tag: turn * 1000 + if any { ANY + random.below(2) as u64 } else { random.below(4) as u64 },
                len: if any { any_len } else { random.below(1 << bits) / dtype.size() * dtype.size() },
                dtype: if any { Dtype::F64 } else { dtype },
            }
        })
        .collect()
}

/// Random messages, 40 for each seed, sent and received in random order, against the plain model: each rank has one queue for
/// each sender and tag.
pub fn like_the_model(group: &Group, seeds: Range<u64>) {
    let (me, world) = (group.rank(), group.world());
    // Tags do not depend on the seeds, so that groups with other seeds have other messages with the same tags.
    for (turn, seed) in seeds.enumerate() {
        let messages = scenario(seed, turn as u64, world);
        let mut random = Random(seed << 8 | me as u64);
        let mine = messages.iter().filter(|message| message.from == me);
        let sent: Vec<_> = mine
            .map(|message| {
                let laid = Laid::new(group, &fill(message.len, message.key), message.dtype, &mut random);
                group.send(&laid.tensor, message.to).tag(message.tag).start().unwrap()
            })
            .collect();
        let mut model: HashMap<(usize, u64), VecDeque<&Message>> = HashMap::new();
        let mut wanted: Vec<&Message> = messages.iter().filter(|message| message.to == me).collect();
        for message in &wanted {
            model.entry((message.from, message.tag)).or_default().push_back(message);
        }
        random.shuffle(&mut wanted);
        let mut started = Vec::new();
        for message in wanted {
            let nothing = vec![0; message.len];
            let next = |model: &mut HashMap<_, VecDeque<&Message>>, from: usize, tag: u64| {
                let message: &Message = model.get_mut(&(from, tag)).unwrap().pop_front().unwrap();
                (message.len, message.dtype, fill(message.len, message.key))
            };
            if message.tag % 1000 >= ANY {
                let into = Laid::new(group, &nothing, message.dtype, &mut random);
                let from = match random.below(2) {
                    0 => group.recv_any(&into.tensor).tag(message.tag).wait().unwrap(),
                    _ => group.recv_any(&into.tensor).tag(message.tag).start().unwrap().wait().unwrap(),
                };
                assert!(into.bytes() == next(&mut model, from, message.tag).2, "seed {seed}");
                continue;
            }
            let (len, dtype, bytes) = next(&mut model, message.from, message.tag);
            let into = Laid::new(group, &vec![0; len], dtype, &mut random);
            match random.below(2) {
                0 => {
                    group.recv(&into.tensor, message.from).tag(message.tag).wait().unwrap();
                    assert!(into.bytes() == bytes, "seed {seed}");
                }
                _ => {
                    let work = group.recv(&into.tensor, message.from).tag(message.tag).start().unwrap();
                    started.push((work, into, bytes));
                }
            }
        }
        for (work, into, bytes) in started {
            work.wait().unwrap();
            assert!(into.bytes() == bytes, "seed {seed}");
        }
        for work in sent {
            work.wait().unwrap();
        }
    }
    group.barrier().wait().unwrap();
}
