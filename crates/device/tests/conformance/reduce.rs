//! What a reduction refuses, and that it writes where it should. The numbers themselves are checked by the
//! golden vectors.

use tensorwire_device::{Caching, Dtype, Error, Queue, ReduceOp, Result, RowPlan, Span, View};

use super::{Subject, noise};

/// Reduces spans.
fn reduce(
    queue: &mut dyn Queue,
    op: ReduceOp,
    dtype: Dtype,
    inputs: &[&Span],
    outputs: &[&Span],
) -> Result<()> {
    let inputs: Vec<View<'_>> = inputs.iter().map(|span| span.view()).collect();
    let outputs: Vec<View<'_>> = outputs.iter().map(|span| span.view()).collect();
    queue.reduce(op, dtype, &inputs, &outputs, Caching::Keep)
}

/// Elements that can be added as numbers.
type Add = fn(&[u8], &[u8]) -> Vec<u8>;

/// What goes past the caches is the same as what does not, wherever the outputs lie in their cache lines, also in
/// place, and nothing beside them is written.
pub fn results_past_the_caches_are_the_same_at_any_place(subject: &Subject) {
    let mut queue = subject.queue();
    let bytes: Add = |a, b| a.iter().zip(b).map(|(a, b)| a.wrapping_add(*b)).collect();
    let words: Add = |a, b| {
        let word = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().unwrap());
        a.chunks(4).zip(b.chunks(4)).flat_map(|(a, b)| word(a).wrapping_add(word(b)).to_le_bytes()).collect()
    };
    // The outputs: apart, as far from a line as the first or otherwise, and one in place of an input.
    let places: [&[usize]; 6] = [&[0], &[64, 0], &[4, 68, 5], &[63, 0, 64], &[1, 3], &[60, 124, 60, 12]];
    for (count, places, in_place, caching) in [0, 1, 5, 1023, 1024, 1025, 2500, 5000]
        .into_iter()
        .flat_map(|count| places.map(|places| (count, places)))
        .flat_map(|(count, places)| [(count, places, false), (count, places, true)])
        .flat_map(|(count, places, in_place)| {
            [Caching::Bypass, Caching::Give].map(|caching| (count, places, in_place, caching))
        })
    {
        for (dtype, add) in [(Dtype::U8, bytes), (Dtype::I32, words)] {
            let len = count * dtype.size();
            let data: Vec<_> = (0..3).map(|rank| noise(len, rank)).collect();
            let sum = add(&add(&data[0], &data[1]), &data[2]);
            let lay = |place: usize, bytes: &[u8]| {
                let all = subject.span(&[&vec![7; place][..], bytes, &[7; 70]].concat());
                (all.slice(place..place + len).unwrap(), all)
            };
            let inputs: Vec<_> = data.iter().zip([0, 1, 36]).map(|(data, place)| lay(place, data)).collect();
            let mut outputs: Vec<_> = places.iter().map(|&place| lay(place, &noise(len, 9))).collect();
            if in_place {
                outputs.push(inputs[1].clone());
            }
            let from: Vec<_> = inputs.iter().map(|(part, _)| part.view()).collect();
            let into: Vec<_> = outputs.iter().map(|(part, _)| part.view()).collect();
            queue.reduce(ReduceOp::Sum, dtype, &from, &into, caching).unwrap();
            for (part, all) in &outputs {
                let (all, start) = (all.to_vec().unwrap(), part.offset());
                let what = format!("{count} {dtype} at {places:?}, {start}");
                assert!(all[start..start + len] == sum, "{what}");
                assert!(all[..start].iter().chain(&all[start + len..]).all(|&byte| byte == 7), "{what}");
            }
        }
    }
}

/// Every row is a reduction of the rows that the plan names, bit by bit, for all types and operations, at any place; an
/// average is divided by what the caller says.
pub fn rows_are_reductions_of_rows(subject: &Subject) {
    let mut queue = subject.queue();
    let counts = [5usize, 0, 3, 9];
    let named: [&[(usize, usize)]; 7] = [
        &[(0, 0)],
        &[(0, 1), (2, 0), (3, 8)],
        &[(3, 3), (0, 2)],
        &[(2, 2)],
        &[(3, 0), (3, 0)],
        &[(0, 4), (2, 1), (3, 7), (0, 3), (3, 6)],
        &[(3, 1)],
    ];
    let mut plan = RowPlan::new(&counts).unwrap();
    named.iter().for_each(|from| plan.push(from.iter().copied()).unwrap());
    let pairs = Dtype::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (op, dtype)));
    for (op, dtype) in pairs.filter(|(op, dtype)| op.check(*dtype).is_ok()) {
        for (width, places) in [(1, [0; 5]), (3, [0; 5]), (16, [16; 5]), (64, [0, 1, 2, 3, 5]), (65, [32; 5])]
        {
            let row = width * dtype.size();
            let lay = |bytes: &[u8], place: usize| {
                let all = subject.span(&[&vec![7; place][..], bytes, &[7; 40]].concat());
                (all.slice(place..place + bytes.len()).unwrap(), all)
            };
            let inputs: Vec<_> = (0..counts.len())
                .map(|input| {
                    // Small numbers of all types: which NaN comes is not said. Bools are 0 or 1.
                    let mask = if dtype == Dtype::Bool { 1 } else { 0x3f };
                    let noise = noise(counts[input] * row, input as u32);
                    lay(&noise.iter().map(|byte| byte & mask).collect::<Vec<_>>(), places[input]).0
                })
                .collect();
            let (into, all) = lay(&vec![0; named.len() * row], places[4]);
            let views: Vec<View<'_>> = inputs.iter().map(Span::view).collect();
            queue.reduce_rows(op, dtype, 3, &views, &plan, into.view()).unwrap();
            let (got, start) = (all.to_vec().unwrap(), into.offset());
            let what = format!("{op} of {width} {dtype}");
            let beside = got[..start].iter().chain(&got[start + into.len()..]);
            assert!(beside.into_iter().all(|&byte| byte == 7), "{what}");
            for (index, from) in named.iter().enumerate() {
                // So many inputs that an average is divided alike.
                let wanted = if op == ReduceOp::Avg { 3 } else { from.len() };
                if wanted != from.len() {
                    continue;
                }
                let parts: Vec<_> =
                    from.iter().map(|&(i, r)| inputs[i].slice(r * row..(r + 1) * row).unwrap()).collect();
                let parts: Vec<_> = parts.iter().collect();
                let expected = subject.span(&vec![1; row]);
                reduce(&mut *queue, op, dtype, &parts, &[&expected]).unwrap();
                let got = &got[start + index * row..start + (index + 1) * row];
                assert!(got == expected.to_vec().unwrap(), "{what}, row {index} at {places:?}");
            }
        }
    }
}

/// Rows that do not fit, and an output that overlaps an input.
pub fn rows_that_do_not_fit_are_refused(subject: &Subject) {
    let mut queue = subject.queue();
    let (input, output) = (subject.span(&[1; 8]), subject.span(&[0; 4]));
    let mut plan = RowPlan::new(&[2]).unwrap();
    plan.push([(0, 0), (0, 1)]).unwrap();
    let mut run = |op, dtype, of, inputs: &[View<'_>], output: View<'_>| {
        queue.reduce_rows(op, dtype, of, inputs, &plan, output)
    };
    let (sum, f32) = (ReduceOp::Sum, Dtype::F32);
    run(sum, f32, 2, &[input.view()], output.view()).unwrap();
    assert!(run(sum, Dtype::F64, 2, &[input.view()], output.view()).is_err());
    assert!(run(sum, f32, 0, &[input.view()], output.view()).is_err());
    assert!(run(sum, f32, 2, &[], output.view()).is_err());
    assert!(run(sum, f32, 2, &[output.view()], subject.span(&[0; 4]).view()).is_err());
    assert!(run(sum, f32, 2, &[input.view()], input.slice(4..8).unwrap().view()).is_err());
    assert!(run(ReduceOp::Band, f32, 2, &[input.view()], output.view()).is_err());
}

pub fn many_inputs_and_outputs(subject: &Subject) {
    let mut queue = subject.queue();
    for (inputs, outputs) in [(16, 16), (64, 64), (65, 1), (3, 65), (128, 100)] {
        let all = subject.span(&[1; 300 * 8]);
        let parts: Vec<_> = (0..300).map(|part| all.slice(part * 8..part * 8 + 8).unwrap()).collect();
        let from: Vec<_> = parts[..inputs].iter().collect();
        let into: Vec<_> = parts[200..200 + outputs].iter().collect();
        reduce(&mut *queue, ReduceOp::Sum, Dtype::U8, &from, &into).unwrap();
        let written = |part: usize| (200..200 + outputs).contains(&part);
        let expected = (0..300).flat_map(|part| [if written(part) { inputs as u8 } else { 1 }; 8]);
        assert!(all.to_vec().unwrap().into_iter().eq(expected), "{inputs} to {outputs}");
    }
}

pub fn lengths_must_agree(subject: &Subject) {
    let mut queue = subject.queue();
    let (eight, seven) = (subject.span(&[1; 8]), subject.span(&[2; 7]));
    let mut sum = |dtype, inputs: &[&Span], outputs: &[&Span]| {
        reduce(&mut *queue, ReduceOp::Sum, dtype, inputs, outputs)
    };
    for refused in [
        sum(Dtype::I8, &[], &[&eight]),
        sum(Dtype::I8, &[&eight, &seven], &[&eight]),
        sum(Dtype::I8, &[&eight], &[&seven]),
        sum(Dtype::I16, &[&seven], &[&seven]),
        sum(Dtype::Complex128, &[&eight], &[&eight]),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Misuse(_)) && error.to_string().contains("SUM"), "{error}");
    }
    assert_eq!((eight.to_vec().unwrap(), seven.to_vec().unwrap()), (vec![1; 8], vec![2; 7]));
    // No element is a number of elements, too.
    let nothing = subject.span(&[]);
    for dtype in Dtype::ALL {
        sum(dtype, &[&nothing, &nothing], &[&nothing]).unwrap();
    }
}

pub fn overlap_is_refused(subject: &Subject) {
    let mut queue = subject.queue();
    let before = noise(64, 9);
    let all = subject.span(&before);
    let part = |from: usize| all.slice(from..from + 16).unwrap();
    let (a, b, far) = (part(0), part(4), part(32));
    for (inputs, outputs) in [
        (vec![&a], vec![&b]),
        (vec![&b], vec![&a]),
        (vec![&a, &b], vec![&a]),
        (vec![&far], vec![&a, &b]),
        (vec![&far], vec![&a, &a]),
    ] {
        let error = reduce(&mut *queue, ReduceOp::Sum, Dtype::I32, &inputs, &outputs).unwrap_err();
        assert!(error.to_string().contains("overlap"), "{error}");
    }
    // The same memory behind two mappings cannot be seen, but the same span in another object can.
    assert!(reduce(&mut *queue, ReduceOp::Sum, Dtype::I32, &[&a, &a.clone()], &[&far]).is_ok());
    all.write(0, &before).unwrap();
    // Neighbours do not overlap.
    reduce(&mut *queue, ReduceOp::Sum, Dtype::I32, &[&part(0), &part(32)], &[&part(16), &part(48)]).unwrap();
}

pub fn meaningless_pairs_are_refused_before_a_byte_moves(subject: &Subject) {
    let mut queue = subject.queue();
    let (from, into) = (noise(64, 1), noise(64, 2));
    let (input, output) = (subject.span(&from), subject.span(&into));
    let mut refused = 0;
    for (op, dtype) in ReduceOp::ALL.into_iter().flat_map(|op| Dtype::ALL.map(|dtype| (op, dtype))) {
        if op.check(dtype).is_ok() {
            continue;
        }
        let error = reduce(&mut *queue, op, dtype, &[&input, &input], &[&output]).unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(op.name()) && text.contains(dtype.name()), "{text}");
        assert!(output.to_vec().unwrap() == into && input.to_vec().unwrap() == from, "{text}");
        refused += 1;
    }
    // AVG and PREMUL_SUM of 8 integers and of bool, MIN and MAX of 3 complex, BAND, BOR and BXOR of 12 others.
    assert_eq!(refused, 2 * 9 + 2 * 3 + 3 * 12);
}

pub fn one_pass_to_several_outputs_and_in_place(subject: &Subject) {
    let mut queue = subject.queue();
    let ints = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let count = 1000;
    let a: Vec<i32> = (0..count).collect();
    let b: Vec<i32> = (0..count).map(|value| value * 3 - 50).collect();
    let sum = ints(&a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>());
    // One byte off, so that no element is aligned.
    let shifted = |values: &[i32]| subject.span(&[&[0][..], &ints(values), &[0]].concat());
    let (a, b, c) = (shifted(&a), shifted(&b), shifted(&vec![0; count as usize]));
    let inner = |span: &Span| span.slice(1..span.len() - 1).unwrap();
    reduce(&mut *queue, ReduceOp::Sum, Dtype::I32, &[&inner(&a), &inner(&b)], &[&inner(&b), &inner(&c)])
        .unwrap();
    for span in [&b, &c] {
        let bytes = span.to_vec().unwrap();
        assert!(bytes[1..bytes.len() - 1] == sum && bytes[0] == 0 && bytes[bytes.len() - 1] == 0);
    }
    // And of one input: a copy.
    reduce(&mut *queue, ReduceOp::Sum, Dtype::I32, &[&inner(&b)], &[&inner(&a)]).unwrap();
    assert!(inner(&a).to_vec().unwrap() == sum);
}
