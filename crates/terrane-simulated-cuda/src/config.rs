//! The settings of `TERRANE_SIMULATED_CUDA`.

/// The order in which work of different streams runs, and how early.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Work runs when it is submitted, unless it must wait for other work.
    Eager,
    /// Work runs when a call waits for it or queries it, one step at a time, together with the work
    /// that it needs.
    Lazy,
    /// Each call, and the background thread, runs steps of ready streams that the seed selects.
    #[default]
    Random,
}

/// The simulated machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The number of devices.
    pub devices: u32,
    /// The bytes of memory of each device.
    pub memory: u64,
    /// The seed of all random choices.
    pub seed: u64,
    /// The order in which work runs.
    pub policy: Policy,
    /// Whether kernels of one device can access another device's memory, once access is enabled.
    pub peers: bool,
    /// Whether work also runs after a while without calls. Without this, a single thread gets the
    /// same run for the same seed, and a thread that only reads memory waits forever.
    pub background: bool,
}

impl Default for Config {
    fn default() -> Self {
        let policy = Policy::default();
        Self { devices: 2, memory: 1 << 30, seed: 0, policy, peers: true, background: true }
    }
}

impl Config {
    /// Reads `TERRANE_SIMULATED_CUDA`: optional settings, separated by commas.
    ///
    /// `devices=2` (0 to 16), `memory=1GiB` (a number, optionally with `KiB`, `MiB` or `GiB`),
    /// `seed=7`, `policy=random` (or `lazy`, `eager`), `peers=on` (or `off`), `background=on` (or
    /// `off`).
    ///
    /// # Errors
    ///
    /// The unknown setting.
    pub fn from_env() -> Result<Self, String> {
        #[expect(clippy::disallowed_methods, reason = "the documented place that reads it")]
        match std::env::var("TERRANE_SIMULATED_CUDA") {
            Ok(text) => Self::parse(&text),
            Err(_) => Ok(Self::default()),
        }
    }

    /// Reads the settings from a text, as [`from_env`](Self::from_env) does.
    ///
    /// # Errors
    ///
    /// The unknown setting.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut config = Self::default();
        for setting in text.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
            let refused = || format!("TERRANE_SIMULATED_CUDA: the setting `{setting}` is unknown");
            let (key, value) = setting.split_once('=').ok_or_else(refused)?;
            match (key.trim(), value.trim()) {
                ("devices", count) => {
                    config.devices = count.parse().ok().filter(|&n| n <= 16).ok_or_else(refused)?;
                }
                ("memory", size) => {
                    config.memory = bytes(size).filter(|&n| n <= MOST).ok_or_else(refused)?;
                }
                ("seed", seed) => config.seed = seed.parse().map_err(|_| refused())?,
                ("policy", "eager") => config.policy = Policy::Eager,
                ("policy", "lazy") => config.policy = Policy::Lazy,
                ("policy", "random") => config.policy = Policy::Random,
                ("peers", "on") => config.peers = true,
                ("peers", "off") => config.peers = false,
                ("background", "on") => config.background = true,
                ("background", "off") => config.background = false,
                _ => return Err(refused()),
            }
        }
        Ok(config)
    }
}

/// The maximum memory of a device. The reserved address range is a multiple of it.
const MOST: u64 = 1 << 40;

fn bytes(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("", 0)];
    let (number, shift) =
        units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))?;
    number.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read() {
        assert_eq!(Config::parse(""), Ok(Config::default()));
        let config = Config::parse("devices=3, memory=64MiB,seed=9,policy=lazy,peers=off").unwrap();
        let (memory, policy) = (64 << 20, Policy::Lazy);
        let expected =
            Config { devices: 3, memory, seed: 9, policy, peers: false, background: true };
        assert_eq!(config, expected);
        assert_eq!(Config::parse("memory=123").unwrap().memory, 123);
    }

    #[test]
    fn unknown_settings_are_named() {
        for text in ["devices", "devices=99", "memory=1TB", "policy=fast", "colour=red", "seed=-1"]
        {
            assert!(Config::parse(text).unwrap_err().contains(text), "{text}");
        }
    }
}
