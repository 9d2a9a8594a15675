//! What the fuzzers call. Their corpora are replayed by the tests below, too.

use super::card::{Card, Verdict};
use super::same_host::{decode, decode_map, encode, encode_map};
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
    if let Ok(map) = decode_map(data) {
        assert_eq!(encode_map(&map), data);
    }
    let _ = super::report::read(&mut Reader::new(data));
    let _ = super::hub::parse_addresses(data);
}

/// Any bytes as a value with a proof.
pub fn proofs(data: &[u8]) {
    crate::link::key::fuzz(data);
}

/// Any bytes as what a sealed connection brings.
pub fn seals(data: &[u8]) {
    crate::link::seal::fuzz(data);
}

/// Any bytes as what the leader of another host sends.
pub fn links(data: &[u8]) {
    crate::link::trunk::fuzz(data);
    crate::watch::star::fuzz(data);
    crate::collective::fuzz_far(data);
}

/// Any bytes as heads of messages from another host.
pub fn messages(data: &[u8]) {
    crate::link::frame::fuzz(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::fuzz::tests::replay;

    #[test]
    fn corpus_of_cards() {
        replay("group_cards", super::cards);
    }

    /// What a new version of the protocol does not understand any more finds nothing.
    #[test]
    fn the_corpus_is_of_this_version() {
        let read = |name: &str| {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/group_cards/");
            std::fs::read(format!("{folder}{name}")).unwrap()
        };
        assert!(matches!(Card::from_bytes(&read("card")), Ok(Ok(_))));
        assert!(matches!(Verdict::from_bytes(&read("formed")), Ok(Verdict::Formed { .. })));
        assert!(decode_map(&read("map")).is_ok());
    }

    #[test]
    fn corpus_of_proofs() {
        replay("group_proofs", super::proofs);
    }

    #[test]
    fn corpus_of_seals() {
        replay("group_seals", super::seals);
    }

    #[test]
    fn corpus_of_messages() {
        replay("group_messages", super::messages);
    }

    #[test]
    fn corpus_of_links() {
        replay("group_links", super::links);
    }
}
