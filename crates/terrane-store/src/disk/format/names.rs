//! The names of a catalog's files.

/// The file that the owner locks. It is empty.
pub(crate) const LOCK: &str = "lock";

/// The file that says who the owner is.
pub(crate) const OWNER: &str = "owner";

/// A file that lives for a moment, to see which owner the file system gives to new files.
pub(crate) const PROBE: &str = "owner.probe";

/// Both superblocks.
pub(crate) const SUPERBLOCKS: [&str; 2] = ["superblock.a", "superblock.b"];

const JOURNAL: &str = "journal.";
const CHECKPOINT: &str = "checkpoint.";
const ASIDE: &str = ".new";

/// A file by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Journal(u64),
    Checkpoint(u64),
    /// A checkpoint that was never finished.
    Unfinished(u64),
}

/// The name of a journal.
pub(crate) fn journal(number: u64) -> String {
    format!("{JOURNAL}{number}")
}

/// The name of a checkpoint.
pub(crate) fn checkpoint(number: u64) -> String {
    format!("{CHECKPOINT}{number}")
}

/// The name of a checkpoint while it is written.
pub(crate) fn unfinished(number: u64) -> String {
    format!("{CHECKPOINT}{number}{ASIDE}")
}

const STRIPE: &str = "stripe.";

/// The name of the file that says which directory of a striped store this is.
pub(crate) fn stripe(index: u32) -> String {
    format!("{STRIPE}{index:03}")
}

/// The index of a directory, from the name of its [`stripe`] file.
pub(crate) fn parse_stripe(name: &str) -> Option<u32> {
    let index = name.strip_prefix(STRIPE)?.parse().ok()?;
    (stripe(index) == name).then_some(index)
}

/// The file that a name belongs to. Other names are `None`.
pub(crate) fn parse(name: &str) -> Option<Name> {
    if let Some(number) = name.strip_prefix(JOURNAL) {
        return number_of(number).map(Name::Journal);
    }
    let rest = name.strip_prefix(CHECKPOINT)?;
    match rest.strip_suffix(ASIDE) {
        Some(number) => number_of(number).map(Name::Unfinished),
        None => number_of(rest).map(Name::Checkpoint),
    }
}

/// The numbers of files are lower.
pub(crate) const NUMBERS: u64 = 1 << 62;

/// A number as this module writes it: without a sign or leading zeros, from 1 on.
fn number_of(text: &str) -> Option<u64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    let number = text.parse().ok().filter(|_| is_plain)?;
    (1..NUMBERS).contains(&number).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for number in [1, 10, (1 << 62) - 1] {
            assert_eq!(parse(&journal(number)), Some(Name::Journal(number)));
            assert_eq!(parse(&checkpoint(number)), Some(Name::Checkpoint(number)));
            assert_eq!(parse(&unfinished(number)), Some(Name::Unfinished(number)));
        }
    }

    #[test]
    fn names_of_stripe_files_come_back() {
        for index in [1, 12, 999, 1000, u32::MAX] {
            assert_eq!(parse_stripe(&stripe(index)), Some(index));
        }
        for name in ["stripe.1", "stripe.0001", "stripe.+01", "stripe.", "stripe.00x", "slab.0.001"]
        {
            assert_eq!(parse_stripe(name), None, "{name}");
        }
    }

    #[test]
    fn other_names_are_left_alone() {
        for name in [
            "journal.",
            "journal.0",
            "journal.01",
            "journal.+1",
            "journal.-1",
            "journal.1.new",
            "journal.1x",
            "journal.18446744073709551616",
            "journal.18446744073709551615",
            "checkpoint.new",
            "checkpoint..new",
            "slab.0.000",
            "",
            "JOURNAL.1",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
