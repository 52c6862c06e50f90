//! The settings of `TERRANE_SIMULATED_CUDA`.

/// In which order, and how early, work of different streams runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Work runs when it is submitted, if nothing that it waits for is missing.
    Eager,
    /// Work runs when somebody waits for it or asks about it, one step each time, and nothing but
    /// what that work needs.
    Lazy,
    /// Steps of any stream that is ready, drawn by the seed, at every call and in the background.
    #[default]
    Random,
}

/// The simulated machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many devices there are.
    pub devices: u32,
    /// The bytes of memory that each has.
    pub memory: u64,
    /// Where the drawing begins.
    pub seed: u64,
    /// In which order work runs.
    pub policy: Policy,
    /// Whether one device's kernels reach another's memory, once that is enabled.
    pub peers: bool,
    /// Whether work also runs after a while without calls. Without it, a single thread sees the same
    /// run for the same seed, and one that only reads memory waits without end.
    pub background: bool,
}

impl Default for Config {
    fn default() -> Self {
        let policy = Policy::default();
        Self { devices: 2, memory: 1 << 30, seed: 0, policy, peers: true, background: true }
    }
}

impl Config {
    /// Reads `TERRANE_SIMULATED_CUDA`: settings separated by commas, each of them optional.
    ///
    /// `devices=2` (0 to 16), `memory=1GiB` (a number, or one with `KiB`, `MiB`, `GiB`),
    /// `seed=7`, `policy=random` (or `lazy`, `eager`), `peers=on` (or `off`),
    /// `background=on` (or `off`).
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
            let refused = || format!("TERRANE_SIMULATED_CUDA: `{setting}` is not understood");
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

/// The most memory that a device may be said to have: what is reserved is a multiple of it.
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
    fn what_is_not_understood_is_named() {
        for text in ["devices", "devices=99", "memory=1TB", "policy=fast", "colour=red", "seed=-1"]
        {
            assert!(Config::parse(text).unwrap_err().contains(text), "{text}");
        }
    }
}
