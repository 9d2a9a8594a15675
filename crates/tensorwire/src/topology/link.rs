//! The way between two devices, in the words of nvidia-smi.

use std::fmt;

use super::pci::PciPath;

/// How two devices reach each other, from near to far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Link {
    /// They are the same.
    Same,
    /// Over so many NVLinks.
    NvLink(u32),
    /// Below one PCIe switch, or in one slot.
    Pix,
    /// Through several PCIe switches, but no host bridge.
    Pxb,
    /// Through a host bridge, which is in the processor.
    Phb,
    /// Through two host bridges of one NUMA node.
    Node,
    /// Through the interconnect between NUMA nodes.
    Sys,
}

impl Link {
    /// By PCI alone, for two paths with their NUMA nodes. `single` says that the machine has no more than one node.
    pub(super) fn by_pci(
        (one, one_node): (&PciPath, Option<u32>),
        (two, two_node): (&PciPath, Option<u32>),
        single: bool,
    ) -> Self {
        let common = one.common(two);
        let (left, right) = (one.parts().len() - common, two.parts().len() - common);
        match common {
            _ if left == 0 && right == 0 && common > 0 => Self::Same,
            0 if single || (one_node.is_some() && one_node == two_node) => Self::Node,
            0 => Self::Sys,
            // All they share is the host bridge.
            1 => Self::Phb,
            // Each side has its own port of the switch and the device itself below what they share.
            _ if left <= 2 && right <= 2 => Self::Pix,
            _ => Self::Pxb,
        }
    }

    /// What it means, in one line.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Same => "itself",
            Self::NvLink(_) => "over this many NVLinks",
            Self::Pix => "below one PCIe switch",
            Self::Pxb => "through several PCIe switches, no host bridge",
            Self::Phb => "through a PCIe host bridge (the processor)",
            Self::Node => "through several host bridges of one NUMA node",
            Self::Sys => "across NUMA nodes",
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same => f.pad("X"),
            Self::NvLink(count) => f.pad(&format!("NV{count}")),
            Self::Pix => f.pad("PIX"),
            Self::Pxb => f.pad("PXB"),
            Self::Phb => f.pad("PHB"),
            Self::Node => f.pad("NODE"),
            Self::Sys => f.pad("SYS"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(one: &str, two: &str, nodes: (Option<u32>, Option<u32>)) -> Link {
        Link::by_pci((&PciPath::parse(one), nodes.0), (&PciPath::parse(two), nodes.1), false)
    }

    #[test]
    fn every_word_of_the_legend() {
        let same = (Some(0), Some(0));
        let gpu = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0";
        for (other, nodes, link) in [
            (gpu, same, Link::Same),
            ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", same, Link::Pix),
            ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.1", same, Link::Pix),
            ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:02.0/0000:1b:00.0/0000:1c:00.0", same, Link::Pxb),
            ("pci0000:16/0000:16:02.0/0000:20:00.0", same, Link::Phb),
            ("pci0000:40/0000:40:01.0/0000:41:00.0", same, Link::Node),
            ("pci0000:40/0000:40:01.0/0000:41:00.0", (Some(0), Some(1)), Link::Sys),
            ("pci0000:40/0000:40:01.0/0000:41:00.0", (None, None), Link::Sys),
        ] {
            assert_eq!(between(gpu, other, nodes), link, "{other}");
            assert_eq!(between(other, gpu, (nodes.1, nodes.0)), link, "{other}, the other way");
        }
    }

    #[test]
    fn functions_of_one_card_are_near() {
        let path = |function| format!("pci0000:16/0000:16:01.0/0000:17:00.{function}");
        assert_eq!(between(&path(0), &path(1), (None, None)), Link::Pix);
    }

    #[test]
    fn a_machine_of_one_node_has_no_far_side() {
        let (one, two) =
            (PciPath::parse("pci0000:00/0000:00:05.0"), PciPath::parse("pci0001:00/0001:00:00.0"));
        assert_eq!(Link::by_pci((&one, None), (&two, None), true), Link::Node);
        // Without any path nothing is the same.
        let none = PciPath::default();
        assert_eq!(Link::by_pci((&none, None), (&none, None), true), Link::Node);
    }

    #[test]
    fn links_are_ordered_from_near_to_far() {
        assert!(Link::Same < Link::NvLink(1) && Link::NvLink(18) < Link::Pix && Link::Phb < Link::Sys);
    }
}
