//! The superblock: 4096 bytes that say whose store this is, and which epoch its records have.
//!
//! There are two copies. A change writes and syncs one, then the other, so that one is whole at any
//! time. The copy with the higher generation counts. The checksum is at the end: a write that is
//! torn at a sector leaves a copy that is old, new, or damaged.

use std::fmt;

use terrane_core::convert::to_u64;

use crate::disk::error::{CatalogError, FieldDifference};
use crate::disk::format::bytes::{array_at, crc, put, u16_at, u32_at, u64_at};
use crate::disk::format::namespace::{GroupSlots, MOST_GROUPS, MOST_SLOT_BYTES, Namespace};
use crate::disk::stripes::Placement;

/// The bytes of a superblock.
pub(crate) const SUPERBLOCK: usize = 4096;

/// The version of the format of all files of a store.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"TRSTORE\n";
const HEAD: usize = 64;
/// The bytes of a group's entry.
const GROUP_BYTES: usize = 32;
const END: usize = SUPERBLOCK - 8;

/// The key of a store's hash of keys. It is not printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The content of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub generation: u64,
    pub epoch: u64,
    pub secret: Secret,
    pub namespace: Namespace,
    pub groups: Vec<GroupSlots>,
    pub placement: Placement,
}

/// The meaning of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Valid(Box<Superblock>),
    /// A superblock of another version.
    Version(u32),
    /// A whole superblock that an older build wrote, with more groups or larger slots than the limits.
    TooMuch(Box<CatalogError>),
    /// It does not begin as a superblock does.
    Foreign,
    /// It was cut short or damaged.
    Damaged,
}

impl Superblock {
    /// Checks that the namespace and the groups fit.
    ///
    /// # Errors
    ///
    /// Returns [`CatalogError::TooManyGroups`], [`CatalogError::SlotTooLarge`] or
    /// [`CatalogError::NamespaceTooLong`] if they do not.
    pub(crate) fn check(namespace: &Namespace, groups: &[GroupSlots]) -> Result<(), CatalogError> {
        if groups.len() > MOST_GROUPS {
            let (groups, limit) = (groups.len(), MOST_GROUPS);
            return Err(CatalogError::TooManyGroups { groups, limit });
        }
        let is_too_large = |(_, group): &(usize, &GroupSlots)| group.slot_bytes > MOST_SLOT_BYTES;
        if let Some((group, &GroupSlots { slot_bytes, .. })) =
            groups.iter().enumerate().find(is_too_large)
        {
            return Err(CatalogError::SlotTooLarge { group, slot_bytes, limit: MOST_SLOT_BYTES });
        }
        let texts = namespace.fields().iter().flat_map(|(name, value)| [name.len(), value.len()]);
        let texts: usize = texts.chain([namespace.name().len()]).map(|length| length + 2).sum();
        let needed = groups.len().saturating_mul(GROUP_BYTES).saturating_add(texts);
        let limit = END - HEAD;
        if needed > limit {
            return Err(CatalogError::NamespaceTooLong { groups: groups.len(), needed, limit });
        }
        Ok(())
    }

    /// The bytes of a superblock whose namespace and groups fit.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SUPERBLOCK];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &FORMAT_VERSION.to_le_bytes());
        put(&mut bytes, 12, &length_of(self.groups.len()));
        put(&mut bytes, 14, &length_of(self.namespace.fields().len()));
        put(&mut bytes, 16, &self.generation.to_le_bytes());
        put(&mut bytes, 24, &self.epoch.to_le_bytes());
        put(&mut bytes, 32, &self.secret.0);
        put(&mut bytes, 48, &self.placement.directories.to_le_bytes());
        put(&mut bytes, 52, &self.placement.alignment.to_le_bytes());
        let mut at = HEAD;
        for group in &self.groups {
            put(&mut bytes, at, &group.slot_bytes.to_le_bytes());
            put(&mut bytes, at + 8, &group.slots.to_le_bytes());
            put(&mut bytes, at + 16, &group.fingerprint);
            at += GROUP_BYTES;
        }
        let mut add = |text: &str| {
            put(&mut bytes, at, &length_of(text.len()));
            put(&mut bytes, at + 2, text.as_bytes());
            at += 2 + text.len();
        };
        add(self.namespace.name());
        for (name, value) in self.namespace.fields() {
            add(name);
            add(value);
        }
        let sum = crc(&bytes[..END]);
        put(&mut bytes, END, &sum.to_le_bytes());
        bytes
    }

    /// Decodes the first bytes of a file.
    pub(crate) fn decode(bytes: &[u8]) -> Found {
        let begins = bytes.get(..MAGIC.len());
        match begins {
            Some(magic) if magic == MAGIC => {}
            // A file whose first sector was never written.
            None | Some([0, 0, 0, 0, 0, 0, 0, 0]) => return Found::Damaged,
            Some(_) => return Found::Foreign,
        }
        let Some(bytes) = bytes.first_chunk::<SUPERBLOCK>() else { return Found::Damaged };
        if crc(&bytes[..END]) != u64_at(bytes, END) {
            return Found::Damaged;
        }
        match u32_at(bytes, 8) {
            FORMAT_VERSION => {}
            version => return Found::Version(version),
        }
        let Some(block) = decode_body(bytes) else { return Found::Damaged };
        match Self::check(&block.namespace, &block.groups) {
            Ok(()) => Found::Valid(Box::new(block)),
            Err(error) => Found::TooMuch(Box::new(error)),
        }
    }

    /// The fields in which the store differs from what its opener asks for. The numbers of slots may
    /// differ.
    pub(crate) fn differences(
        &self,
        namespace: &Namespace,
        groups: &[GroupSlots],
    ) -> Vec<FieldDifference> {
        let mut found = Vec::new();
        let mut compare = |field: String, stored: Option<String>, requested: Option<String>| {
            if stored != requested {
                found.push(FieldDifference { field, stored, requested });
            }
        };
        let text = |text: &str| Some(text.to_owned());
        compare("folder".into(), text(self.namespace.name()), text(namespace.name()));
        let value = |namespace: &Namespace, name: &str| {
            namespace
                .fields()
                .iter()
                .find(|(other, _)| other == name)
                .map(|(_, value)| value.clone())
        };
        for (name, stored) in self.namespace.fields() {
            compare(name.clone(), text(stored), value(namespace, name));
        }
        for (name, requested) in namespace.fields() {
            if value(&self.namespace, name).is_none() {
                compare(name.clone(), None, text(requested));
            }
        }
        let count = |groups: &[GroupSlots]| Some(groups.len().to_string());
        compare("groups".into(), count(&self.groups), count(groups));
        for (index, (stored, requested)) in self.groups.iter().zip(groups).enumerate() {
            let bytes = |group: &GroupSlots| Some(group.slot_bytes.to_string());
            compare(format!("group {index}: slot bytes"), bytes(stored), bytes(requested));
            let print = |group: &GroupSlots| {
                Some(format!("{:032x}", u128::from_le_bytes(group.fingerprint)))
            };
            compare(format!("group {index}: fingerprint"), print(stored), print(requested));
        }
        found
    }
}

/// A length of 16 bits. Longer ones do not fit in a superblock.
fn length_of(count: usize) -> [u8; 2] {
    u16::try_from(count).unwrap_or(u16::MAX).to_le_bytes()
}

fn decode_body(bytes: &[u8; SUPERBLOCK]) -> Option<Superblock> {
    let (groups, fields) = (u16_at(bytes, 12), u16_at(bytes, 14));
    let mut rest = bytes.get(HEAD..END)?;
    // Without a capacity: a superblock may state more groups than fit in it.
    let mut slots = Vec::new();
    for _ in 0..groups {
        let (group, behind) = rest.split_at_checked(GROUP_BYTES)?;
        rest = behind;
        slots.push(GroupSlots {
            slot_bytes: u64_at(group, 0),
            slots: u32_at(group, 8),
            fingerprint: array_at(group, 16),
        });
    }
    let mut text = || {
        let (length, behind) = rest.split_at_checked(2)?;
        let (text, behind) = behind.split_at_checked(usize::from(u16_at(length, 0)))?;
        rest = behind;
        std::str::from_utf8(text).ok().map(str::to_owned)
    };
    let name = text()?;
    let mut namespace = Vec::new();
    for _ in 0..fields {
        namespace.push((text()?, text()?));
    }
    let (generation, epoch) = (u64_at(bytes, 16), u64_at(bytes, 24));
    let placement = Placement { directories: u32_at(bytes, 48), alignment: u32_at(bytes, 52) };
    // They only grow, by one a change: larger numbers were never written.
    let is_possible = generation.max(epoch) < 1 << 62 && to_u64(slots.len()) == u64::from(groups);
    (is_possible && placement.is_possible()).then_some(Superblock {
        generation,
        epoch,
        secret: Secret(array_at(bytes, 32)),
        namespace: Namespace::new(name, namespace).ok()?,
        groups: slots,
        placement,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(slot_bytes: u64) -> GroupSlots {
        GroupSlots { slot_bytes, slots: 100, fingerprint: [7; 16] }
    }

    fn block() -> Superblock {
        let namespace = Namespace::new("model", [("model", "m"), ("rank", "0")]).unwrap();
        let groups = vec![group(4096), group(8192)];
        let (secret, placement) = (Secret([9; 16]), Placement { directories: 2, alignment: 8192 });
        Superblock { generation: 3, epoch: 2, secret, namespace, groups, placement }
    }

    #[test]
    fn superblocks_come_back() {
        let block = block();
        let bytes = block.bytes();
        assert_eq!(bytes.len(), SUPERBLOCK);
        assert_eq!(Superblock::decode(&bytes), Found::Valid(Box::new(block)));
    }

    #[test]
    fn each_changed_byte_is_found() {
        let bytes = block().bytes();
        for at in 0..SUPERBLOCK {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            let expected = if at < 8 { Found::Foreign } else { Found::Damaged };
            assert_eq!(Superblock::decode(&damaged), expected, "byte {at}");
        }
        for length in [0, 7, 8, 512, 4095] {
            assert_eq!(Superblock::decode(&bytes[..length]), Found::Damaged, "{length}");
        }
        assert_eq!(Superblock::decode(&[0; SUPERBLOCK]), Found::Damaged);
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = block().bytes();
        put(&mut bytes, 8, &2_u32.to_le_bytes());
        let sum = crc(&bytes[..END]);
        put(&mut bytes, END, &sum.to_le_bytes());
        assert_eq!(Superblock::decode(&bytes), Found::Version(2));
    }

    #[test]
    fn impossible_content_with_a_true_checksum_is_damage() {
        let whole = block().bytes();
        let changes: [(usize, &[u8]); 10] = [
            (12, &[0xff, 0xff]),
            (12, &[65, 0]),
            (14, &[0xff, 0xff]),
            (16, &[0xff; 8]),
            (24, &[0xff; 8]),
            // Alignments of slots: no power of two, less than a page, and 32 MiB.
            (52, &[1, 0x20, 0, 0]),
            (52, &[0, 8, 0, 0]),
            (52, &[0, 0, 0, 2]),
            (HEAD + 2 * GROUP_BYTES, &[0xff, 0xff]),
            (HEAD + 2 * GROUP_BYTES + 2, b"/"),
        ];
        for (at, change) in changes {
            let mut bytes = whole.clone();
            put(&mut bytes, at, change);
            let sum = crc(&bytes[..END]);
            put(&mut bytes, END, &sum.to_le_bytes());
            assert_eq!(Superblock::decode(&bytes), Found::Damaged, "{at}");
        }
    }

    #[test]
    fn a_whole_superblock_beyond_the_limits_is_not_damaged() {
        let limit = MOST_SLOT_BYTES;
        let large = CatalogError::SlotTooLarge { group: 0, slot_bytes: 1 << 32, limit };
        let many = CatalogError::TooManyGroups { groups: 65, limit: MOST_GROUPS };
        for (groups, error) in [(vec![group(1 << 32)], large), (vec![group(1); 65], many)] {
            let bytes = Superblock { groups, ..block() }.bytes();
            assert_eq!(Superblock::decode(&bytes), Found::TooMuch(Box::new(error)));
        }
    }

    #[test]
    fn too_much_is_refused_with_the_limit() {
        let fields = (0..8).map(|number| (format!("field {number}"), "x".repeat(512)));
        let namespace = Namespace::new("model", fields).unwrap();
        let error = Superblock::check(&namespace, &[]).unwrap_err();
        assert!(matches!(error, CatalogError::NamespaceTooLong { limit: 4024, .. }), "{error}");
        let groups = vec![group(1); 65];
        let error = Superblock::check(&block().namespace, &groups).unwrap_err();
        let expected = CatalogError::TooManyGroups { groups: 65, limit: 64 };
        assert_eq!(error, expected);
        assert_eq!(Superblock::check(&block().namespace, &groups[..64]), Ok(()));
        let error = Superblock::check(&block().namespace, &[group(1), group(1 << 32)]).unwrap_err();
        assert!(matches!(error, CatalogError::SlotTooLarge { group: 1, .. }), "{error}");
    }

    #[test]
    fn each_difference_is_named() {
        let other = Namespace::new("other", [("engine", "e"), ("rank", "1")]).unwrap();
        let mut groups = block().groups;
        groups[0].slots = 7;
        assert_eq!(block().differences(&block().namespace, &groups), []);
        groups[1].slot_bytes = 1;
        groups[0].fingerprint = [8; 16];
        let found = block().differences(&other, &groups);
        let fields: Vec<&str> = found.iter().map(|found| found.field.as_str()).collect();
        let expected =
            ["folder", "model", "rank", "engine", "group 0: fingerprint", "group 1: slot bytes"];
        assert_eq!(fields, expected);
        let found = block().differences(&block().namespace, &groups[..1]);
        assert_eq!(found[0].field, "groups");
    }
}
