//! Profiles of machines: the files of `src/data/machines`.

macro_rules! entry {
    ($name:literal) => {
        ($name, include_str!(concat!("../data/machines/", $name, ".json")))
    };
}

/// Name and contents of each file, by name.
pub(super) const FILES: [(&str, &str); 16] = [
    entry!("a10"),
    entry!("a100"),
    entry!("a100-40gb"),
    entry!("b200"),
    entry!("cpu"),
    entry!("gb200"),
    entry!("gh200"),
    entry!("h100"),
    entry!("h100-nvl"),
    entry!("h100-pcie"),
    entry!("h200"),
    entry!("h200-nvl"),
    entry!("l4"),
    entry!("l40s"),
    entry!("rtx-pro-6000"),
    entry!("t4"),
];
