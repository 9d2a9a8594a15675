//! Sizes as arguments give them and as tables show them.

/// The sizes of `8..128M` (each twice the one before), of `1K..16Mx4` (each four times), or of a list `1K,64K,1M`.
pub(crate) fn parse(text: &str) -> Result<Sizes, String> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            None => sizes.push(size(part)?),
            Some((from, rest)) => {
                let (to, factor) = match rest.split_once('x') {
                    None => (rest, 2),
                    Some((to, factor)) => (to, factor.parse().map_err(|_| wrong(text))?),
                };
                let (from, to) = (size(from)?, size(to)?);
                if factor < 2 || from == 0 || from > to {
                    return Err(wrong(text));
                }
                let all = std::iter::successors(Some(from), |size| size.checked_mul(factor));
                sizes.extend(all.take_while(|size| *size <= to));
            }
        }
    }
    Ok(Sizes(sizes))
}

/// What `--sizes` gives.
#[derive(Debug, Clone)]
pub(crate) struct Sizes(pub(crate) Vec<usize>);

/// One size.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let plain = text.trim().to_ascii_uppercase();
    let plain = plain.strip_suffix("IB").or_else(|| plain.strip_suffix('B')).unwrap_or(&plain).trim();
    let (digits, shift) = match plain.chars().last() {
        Some('K') => (&plain[..plain.len() - 1], 10),
        Some('M') => (&plain[..plain.len() - 1], 20),
        Some('G') => (&plain[..plain.len() - 1], 30),
        _ => (plain, 0),
    };
    let number: usize = digits.trim().parse().map_err(|_| wrong(text))?;
    // Beyond it no machine has the memory, and counts of elements would no longer fit a C int.
    number
        .checked_mul(1 << shift)
        .filter(|bytes| *bytes <= 4 << 30)
        .ok_or_else(|| format!("{text} is more than 4 GiB for each rank"))
}

fn wrong(text: &str) -> String {
    format!("{text:?} is no size; sizes are given as 8..128M, 1K..16Mx4 or 1K,64K,1M")
}

/// A size in the unit that suits it, to a tenth: the sizes of three ranks, say, are not round.
pub(crate) fn show(bytes: usize) -> String {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let tenths = |shift: u32| (bytes as f64 / f64::from(1u32 << shift) * 10.0).round();
    let unit = units.into_iter().rev().find(|(_, shift)| tenths(*shift) >= 10.0);
    match unit {
        Some((unit, shift)) => format!("{} {unit}", tenths(shift) / 10.0),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double() {
        assert_eq!(parse("8..64").unwrap().0, [8, 16, 32, 64]);
        assert_eq!(parse("1K..1Mx32").unwrap().0, [1 << 10, 1 << 15, 1 << 20]);
        assert_eq!(parse("8..128M").unwrap().0.last(), Some(&(128 << 20)));
    }

    #[test]
    fn lists_and_units() {
        assert_eq!(parse("8,1K,1KiB,2mb").unwrap().0, [8, 1024, 1024, 2 << 20]);
    }

    #[test]
    fn what_is_no_size_is_said() {
        for text in ["", "x", "1..", "0..8", "8..4", "1..8x1", "-1", "1T", "99999999999999999999"] {
            assert!(parse(text).unwrap_err().contains("size"), "{text}");
        }
        assert!(parse("5G").unwrap_err().contains("4 GiB"));
    }

    #[test]
    fn shown_in_their_unit() {
        assert_eq!([8, 1024, 3 << 20, 1 << 30].map(show), ["8 B", "1 KiB", "3 MiB", "1 GiB"]);
        assert_eq!([1_048_572, 1536].map(show), ["1 MiB", "1.5 KiB"]);
    }
}
