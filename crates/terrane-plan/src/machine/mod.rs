//! Descriptions of machines: devices, host, disks, and rates.

mod table;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, nearest};

/// The known facts about a machine. A missing field limits nothing and predicts nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// A short name.
    pub name: String,
    /// A descriptive name.
    pub title: String,
    /// One device. Each tensor-parallel rank has one of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceFacts>,
    /// The host's memory and its limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostFacts>,
    /// The file systems.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskFacts>,
    /// The rates of copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// The origin of each figure.
    pub sources: Vec<String>,
    /// The date of the description, `YYYY-MM-DD`.
    pub date: String,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// The rate of its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes_per_second: Option<f64>,
}

/// The host's memory, and the limits of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostFacts {
    /// All memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The memory that is available under the machine's and the control group's limits, without
    /// free huge pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_bytes: Option<u64>,
    /// All huge pages of 2 MiB, free or in use: `vm.nr_hugepages`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_pages: Option<u64>,
    /// Reserved huge pages of 2 MiB that are free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_huge_pages: Option<u64>,
    /// The bytes that a process may lock (`RLIMIT_MEMLOCK`); absent if unlimited or unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memlock_bytes: Option<u64>,
    /// The bytes that are free in `/dev/shm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shm_bytes: Option<u64>,
}

/// A file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFacts {
    /// A directory in it.
    pub directory: String,
    /// The bytes that are free for this user.
    pub free_bytes: u64,
    /// The number of the file system (`st_dev`), if it is known. Directories of one file system
    /// share its free bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<u64>,
}

/// Rates of copies, with their origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// The name of the calibration, or of the published figures.
    pub name: String,
    /// Whether the rates were measured. Published peaks are limits: a copy takes at least that
    /// long.
    pub is_measured: bool,
    /// From pinned memory to the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_device: Option<CopyCost>,
    /// From the device to pinned memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_host: Option<CopyCost>,
    /// From host memory to host memory; bytes copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within_host: Option<CopyCost>,
    /// From the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_read: Option<CopyCost>,
    /// To the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_write: Option<CopyCost>,
    /// Host memory that is mapped and then populated by all processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_touch: Option<CopyCost>,
    /// Pinned memory: mapped, touched and registered with the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_bring_up: Option<CopyCost>,
}

/// The cost of a copy, or of preparing memory: a fixed time, and a rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyCost {
    /// The time for zero bytes.
    pub fixed_seconds: f64,
    /// The rate of the bytes.
    pub bytes_per_second: f64,
}

impl CopyCost {
    /// The time of these bytes, in seconds.
    #[must_use]
    pub fn seconds(&self, bytes: u64) -> f64 {
        self.fixed_seconds + bytes as f64 / self.bytes_per_second
    }
}

/// The names of the profiles, ascending.
pub fn published_machines() -> impl Iterator<Item = &'static str> {
    table::FILES.iter().map(|&(name, _)| name)
}

impl Machine {
    /// A profile by its name.
    ///
    /// # Errors
    ///
    /// [`PlanError::UnknownMachine`] with the nearest name.
    pub fn published(name: &str) -> Result<Self, PlanError> {
        let lowercase = name.to_lowercase();
        match table::FILES.iter().find(|(file, _)| *file == lowercase) {
            Some((_, text)) => Self::from_json(name, text.as_bytes()),
            None => Err(PlanError::UnknownMachine {
                name: name.to_owned(),
                nearest: nearest(name, published_machines()),
                known: published_machines().collect(),
            }),
        }
    }

    /// Parses the description of a machine in JSON. `name` is used in errors only.
    ///
    /// # Errors
    ///
    /// [`PlanError::Machine`] with the missing or unknown field, and its line.
    /// [`PlanError::OutOfRange`] if a rate is below 1 byte per second, or a time is negative.
    pub fn from_json(name: &str, text: &[u8]) -> Result<Self, PlanError> {
        let machine: Self = serde_json::from_slice(text)
            .map_err(|source| PlanError::Machine { name: name.to_owned(), source })?;
        machine.check()?;
        Ok(machine)
    }

    /// The description as JSON. A rate that is not a number becomes `null`.
    ///
    /// # Errors
    ///
    /// [`PlanError::Machine`] if the serialisation fails.
    pub fn to_json(&self) -> Result<String, PlanError> {
        serde_json::to_string_pretty(self)
            .map_err(|source| PlanError::Machine { name: self.name.clone(), source })
    }

    /// Refuses rates below 1 byte per second, and negative times.
    fn check(&self) -> Result<(), PlanError> {
        let is_rate = |rate: f64| rate.is_finite() && rate >= 1.0;
        let expected = "rates of at least 1 byte per second, and times of at least 0";
        let refused = PlanError::OutOfRange { name: "a rate of the machine", value: 0, expected };
        let memory = self.device.as_ref().and_then(|device| device.memory_bytes_per_second);
        if !memory.is_none_or(is_rate) {
            return Err(refused);
        }
        let Some(rates) = &self.rates else { return Ok(()) };
        let costs = [
            rates.to_device,
            rates.to_host,
            rates.within_host,
            rates.disk_read,
            rates.disk_write,
            rates.first_touch,
            rates.pinned_bring_up,
        ];
        let is_positive = |cost: CopyCost| {
            let (rate, fixed) = (cost.bytes_per_second, cost.fixed_seconds);
            is_rate(rate) && fixed.is_finite() && fixed >= 0.0
        };
        if costs.into_iter().flatten().all(is_positive) {
            return Ok(());
        }
        Err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_of_the_folder_is_read_and_has_its_sources() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/data/machines");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        files.sort();
        assert_eq!(files, published_machines().collect::<Vec<_>>());
        assert!(files.len() >= 12);
        for name in files {
            let machine = Machine::published(&name).unwrap();
            assert_eq!(machine.name, name);
            assert!(!machine.sources.is_empty() && machine.date.len() == 10, "{name}");
            assert_eq!(
                Machine::from_json("again", machine.to_json().unwrap().as_bytes()).unwrap(),
                machine
            );
        }
    }

    #[test]
    fn a_file_that_lacks_a_field_or_has_another_is_refused_by_its_name() {
        let lacking =
            Machine::from_json("mine.json", br#"{"name": "mine", "sources": [], "date": ""}"#);
        let text = lacking.unwrap_err().to_string();
        assert!(text.contains("missing field `title`") && text.contains("mine.json"), "{text}");
        let unknown = br#"{"name": "m", "title": "m", "gpus": 8, "sources": [], "date": ""}"#;
        let text = Machine::from_json("mine.json", unknown).unwrap_err().to_string();
        assert!(text.contains("unknown field `gpus`"), "{text}");
        let text = Machine::published("h20").unwrap_err().to_string();
        assert!(text.contains("did you mean \"h200\""), "{text}");
        let slow =
            br#"{"name": "m", "title": "m", "sources": [], "date": "", "rates": {"name": "r",
            "is_measured": true, "to_host": {"fixed_seconds": 0, "bytes_per_second": 0}}}"#;
        assert!(Machine::from_json("m", slow).unwrap_err().to_string().contains("at least 1 byte"));
        let slow =
            br#"{"name": "m", "title": "m", "sources": [], "date": "", "device": {"name": "d",
            "memory_bytes": 1, "memory_bytes_per_second": -1}}"#;
        assert!(Machine::from_json("m", slow).unwrap_err().to_string().contains("at least 1 byte"));
    }
}
