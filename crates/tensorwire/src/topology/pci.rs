//! The way from a host bridge down to a device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a device sits: its host bridge, the bridges below that, and itself, as sysfs names them:
/// `pci0000:16/0000:16:01.0/0000:17:00.0`. Empty where it is on no PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Default, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct PciPath(Vec<String>);

impl PciPath {
    /// Takes the parts of a path that are PCI: what is above the host bridge and below the device is left out.
    pub fn parse(path: &str) -> Self {
        let parts = path.split('/').filter(|part| is_bridge(part) || is_address(part));
        Self(parts.map(str::to_ascii_lowercase).collect())
    }

    /// The device's own address.
    pub fn address(&self) -> Option<&str> {
        self.0.last().map(String::as_str)
    }

    /// All parts, from the top.
    pub fn parts(&self) -> &[String] {
        &self.0
    }

    /// The host bridge, where it is known.
    pub fn bridge(&self) -> Option<&str> {
        self.0.first().filter(|part| is_bridge(part)).map(String::as_str)
    }

    /// How many whole parts two ways have in common, from the top. Parts, not letters: `0000:1a` and `0000:1b` share
    /// nothing.
    pub fn common(&self, other: &Self) -> usize {
        self.0.iter().zip(&other.0).take_while(|(one, two)| one == two).count()
    }
}

impl fmt::Display for PciPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("/"))
    }
}

impl From<String> for PciPath {
    fn from(text: String) -> Self {
        Self::parse(&text)
    }
}

impl From<PciPath> for String {
    fn from(path: PciPath) -> Self {
        path.to_string()
    }
}

/// `pci0000:16`.
fn is_bridge(part: &str) -> bool {
    let numbers = part.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
    numbers.is_some_and(|(domain, bus)| is_hex(domain, 4) && is_hex(bus, 2))
}

/// `0000:17:00.0`.
fn is_address(part: &str) -> bool {
    let mut numbers = part.split([':', '.']);
    let fields = [numbers.next(), numbers.next(), numbers.next(), numbers.next()];
    let lengths = [4, 2, 2, 1];
    let sound =
        fields.iter().zip(lengths).all(|(field, length)| field.is_some_and(|text| is_hex(text, length)));
    sound && numbers.next().is_none()
}

/// Domains may have more digits than four.
fn is_hex(text: &str, at_least: usize) -> bool {
    (at_least..=8).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pci_parts_are_kept() {
        let path = PciPath::parse("/sys/devices/pci0000:00/0000:00:03.0/virtio0/net/eth0");
        assert_eq!(path.to_string(), "pci0000:00/0000:00:03.0");
        assert_eq!((path.bridge(), path.address()), (Some("pci0000:00"), Some("0000:00:03.0")));
        let below_vmbus =
            "/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0";
        assert_eq!(PciPath::parse(below_vmbus).to_string(), "pci0001:00/0001:00:00.0");
        assert_eq!(PciPath::parse("/sys/devices/virtual/net/lo"), PciPath::default());
        assert_eq!(PciPath::parse("pci10000:E1/10000:E1:00.0").address(), Some("10000:e1:00.0"));
    }

    #[test]
    fn parts_count_and_letters_do_not() {
        let parse = PciPath::parse;
        assert_eq!(parse("pci0000:1a/0000:1a:00.0").common(&parse("pci0000:1b/0000:1b:00.0")), 0);
        assert_eq!(parse("pci0000:10/0000:10:01.0").common(&parse("pci0000:10/0000:10:01.1")), 1);
        assert_eq!(parse("0000:17:00.0").bridge(), None);
    }
}
