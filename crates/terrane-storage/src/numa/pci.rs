//! Addresses of PCI devices.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function: domain, bus, device and function.
///
/// Some libraries print the domain with eight digits (`00000000:3B:00.0`). Sysfs uses four
/// (`0000:3b:00.0`), and users often omit it (`3b:00.0`). The parser accepts all three forms.
/// `Display` uses the form of sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The domain, or segment.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus, below 32.
    pub device: u8,
    /// The function of the device, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = InvalidPciAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| InvalidPciAddress { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.trim().rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let hex = |digits: &str, limit: u32| {
        let is_hex = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
        u32::from_str_radix(digits, 16).ok().filter(|&n| is_hex && n <= limit)
    };
    let byte = |digits: &str, limit: u8| u8::try_from(hex(digits, u32::from(limit))?).ok();
    Some(PciAddress {
        domain: hex(domain, u32::MAX)?,
        bus: byte(bus, 0xff)?,
        device: byte(device, 0x1f)?,
        function: byte(function, 7)?,
    })
}

/// A text that is not the address of a PCI device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no PCI address; write domain:bus:device.function in hexadecimal, 0000:3b:00.0"
)]
pub struct InvalidPciAddress {
    /// The text.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_forms_are_one_address() {
        for text in ["00000000:3B:00.0", "0000:3b:00.0", "3b:00.0"] {
            let address: PciAddress = text.parse().unwrap();
            assert_eq!(address.to_string(), "0000:3b:00.0");
        }
        let wide: PciAddress = "00010000:01:1f.7".parse().unwrap();
        assert_eq!(wide.to_string(), "10000:01:1f.7");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "3b", "3b:00", "0000:3b:20.0", "0000:3b:00.8", "x:3b:00.0", "+1:3b:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text:?}");
        }
    }
}
