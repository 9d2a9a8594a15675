//! What the fuzzers call. Their corpora are replayed by the tests below, too.

use super::card::{Card, Verdict};
use super::same_host::{decode, encode};
use crate::wire::Reader;

/// Any bytes as what another process leaves in the store: what is understood comes out again as it was.
pub fn cards(data: &[u8]) {
    if let Ok(Ok(card)) = Card::from_bytes(data) {
        assert_eq!(card.to_bytes(), data);
    }
    if let Ok(verdict) = Verdict::from_bytes(data) {
        let bytes = verdict.to_bytes();
        assert!(Verdict::from_bytes(&bytes).is_ok_and(|again| again.to_bytes() == bytes));
    }
    if let Ok(ranks) = decode(data) {
        assert_eq!(encode(&ranks), data);
    }
    let _ = super::report::read(&mut Reader::new(data));
    let _ = super::hub::parse_addresses(data);
}

/// Any bytes as what the leader of another host sends.
pub fn links(data: &[u8]) {
    crate::watch::star::fuzz_link(data);
}

#[cfg(test)]
mod tests {
    use crate::store::fuzz::tests::replay;

    #[test]
    fn corpus_of_cards() {
        replay("group_cards", super::cards);
    }

    #[test]
    fn corpus_of_links() {
        replay("group_links", super::links);
    }
}
