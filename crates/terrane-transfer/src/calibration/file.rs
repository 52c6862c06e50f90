//! The file of a calibration.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrane_core::BoxedCause;

use crate::calibration::error::CalibrationError;
use crate::calibration::path::{CopyPath, Direction};
use crate::calibration::{Calibration, PathCost};

/// The version of the format. Only this version is accepted. Version 1 had one direction for both
/// ways between devices.
const FORMAT: u32 = 2;

#[derive(Serialize, Deserialize)]
struct CalibrationFile {
    format: u32,
    device: String,
    driver: String,
    costs: Vec<CostEntry>,
}

#[derive(Serialize, Deserialize)]
struct CostEntry {
    direction: String,
    path: String,
    fixed_ns: f64,
    per_piece_ns: f64,
    per_short_piece_ns: f64,
    bytes_per_second: f64,
}

/// The defect of a file.
#[derive(Debug, thiserror::Error)]
enum Defect {
    #[error("its format is {found}, and this version reads {FORMAT}; measure again")]
    Format { found: u32 },
    #[error("`{name}` is no {what} of this version; measure again")]
    Unknown { what: &'static str, name: String },
    #[error("{value} is no plausible {what}; measure again")]
    Implausible { what: &'static str, value: f64 },
}

pub(crate) fn read(path: &Path) -> Result<Calibration, CalibrationError> {
    let text = std::fs::read_to_string(path).map_err(BoxedCause::from);
    text.and_then(|text| parse(&text)).map_err(|cause| failed(path, cause))
}

pub(crate) fn write(calibration: &Calibration, path: &Path) -> Result<(), CalibrationError> {
    let replace = || {
        let text = serde_json::to_string_pretty(&CalibrationFile::of(calibration))?;
        let (mut file, beside) = create_beside(path)?;
        let written = file
            .write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&beside, path));
        written.inspect_err(|_| {
            // The first error is returned.
            let _ = std::fs::remove_file(&beside);
        })?;
        Ok::<_, BoxedCause>(())
    };
    replace().map_err(|cause| failed(path, cause))
}

/// Creates a file in the folder of `path`, so that a rename stays within the file system.
///
/// The name is predictable, so an existing file of that name must not be opened. `O_EXCL` opens no
/// existing file, and follows no symbolic link.
fn create_beside(path: &Path) -> std::io::Result<(File, PathBuf)> {
    /// More than the files of dead processes and of concurrent writers.
    const MAX_NAMES: usize = 1024;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    let mut exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
    for _ in 0..MAX_NAMES {
        // Relaxed: the number only has to be unique in this process.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}-{number}.new", std::process::id()));
        match options.open(&beside) {
            Ok(file) => return Ok((file, beside.into())),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => exists = error,
            Err(error) => return Err(error),
        }
    }
    Err(exists)
}

fn failed(path: &Path, cause: BoxedCause) -> CalibrationError {
    CalibrationError::File { path: path.to_owned(), source: Arc::from(cause) }
}

fn parse(text: &str) -> Result<Calibration, BoxedCause> {
    /// The field that every format has.
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }

    let head: Head = serde_json::from_str(text)?;
    if head.format != FORMAT {
        return Err(Defect::Format { found: head.format }.into());
    }
    let file: CalibrationFile = serde_json::from_str(text)?;
    // A path that the file does not mention keeps the built-in figures.
    let mut calibration =
        Calibration { device: file.device, driver: file.driver, ..Calibration::built_in() };
    for entry in file.costs {
        let (direction, path, cost) = entry.check()?;
        calibration.set(direction, path, cost);
    }
    Ok(calibration)
}

impl CalibrationFile {
    fn of(calibration: &Calibration) -> Self {
        let entries = Direction::ALL.into_iter().flat_map(|direction| {
            CopyPath::ALL.into_iter().filter_map(move |path| {
                let cost = calibration.cost(direction, path)?;
                Some(CostEntry {
                    direction: direction_name(direction).to_owned(),
                    path: path.name().to_owned(),
                    fixed_ns: cost.fixed.as_secs_f64() * 1e9,
                    per_piece_ns: cost.per_piece_ns,
                    per_short_piece_ns: cost.per_short_piece_ns,
                    bytes_per_second: cost.bytes_per_second,
                })
            })
        });
        Self {
            format: FORMAT,
            device: calibration.device.clone(),
            driver: calibration.driver.clone(),
            costs: entries.collect(),
        }
    }
}

impl CostEntry {
    fn check(&self) -> Result<(Direction, CopyPath, PathCost), Defect> {
        let direction = Direction::ALL.into_iter().find(|d| direction_name(*d) == self.direction);
        let Some(direction) = direction else {
            return Err(Defect::Unknown { what: "direction", name: self.direction.clone() });
        };
        let Some(path) = CopyPath::ALL.into_iter().find(|path| path.name() == self.path) else {
            return Err(Defect::Unknown { what: "path", name: self.path.clone() });
        };
        let time = |what, value: f64| {
            let plausible = (0.0..=1e9).contains(&value);
            plausible.then_some(value).ok_or(Defect::Implausible { what, value })
        };
        let fixed = time("fixed cost in nanoseconds", self.fixed_ns)?;
        let value = self.bytes_per_second;
        if !(1e6..=1e15).contains(&value) {
            return Err(Defect::Implausible { what: "rate in bytes a second", value });
        }
        let cost = PathCost {
            fixed: Duration::try_from_secs_f64(fixed * 1e-9).unwrap_or_default(),
            per_piece_ns: time("cost of a piece in nanoseconds", self.per_piece_ns)?,
            per_short_piece_ns: time("cost of a piece in nanoseconds", self.per_short_piece_ns)?,
            bytes_per_second: value,
        };
        Ok((direction, path, cost))
    }
}

const fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::ToDevice => "to device",
        Direction::ToHost => "to host",
        Direction::WithinDevice => "within device",
        Direction::ToPeer => "to peer",
        Direction::FromPeer => "from peer",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_calibration_is_loaded_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let calibration = Calibration::built_in();
        for _ in 0..2 {
            write(&calibration, &path).unwrap();
            assert_eq!(read(&path).unwrap(), calibration);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside");
    }

    #[test]
    fn concurrent_saves_leave_one_complete_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let calibration = Calibration::built_in();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        write(&calibration, &path).unwrap();
                        assert_eq!(read(&path).unwrap(), calibration);
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside");
    }

    #[test]
    fn saving_opens_no_existing_file() {
        /// More links than the names that concurrent tests of this process use.
        const LINKS: usize = 512;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        // Links under the next names, to a file and to a missing file, whatever number the next
        // name has.
        for number in 0..LINKS {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{}-{number}.new", std::process::id()));
            let to = if number % 2 == 0 { victim.clone() } else { folder.path().join("nowhere") };
            std::os::unix::fs::symlink(to, name).unwrap();
        }
        write(&Calibration::built_in(), &path).unwrap();
        assert_eq!(read(&path).unwrap(), Calibration::built_in());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert!(!folder.path().join("nowhere").exists());
        assert!(!path.is_symlink());
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            LINKS + 2,
            "the links are there"
        );
    }

    #[test]
    fn paths_that_a_file_omits_have_built_in_figures() {
        let mut file = CalibrationFile::of(&Calibration::built_in());
        file.costs.clear();
        let parsed = parse(&serde_json::to_string(&file).unwrap()).unwrap();
        assert_eq!(parsed, Calibration::built_in());
    }

    #[test]
    fn an_invalid_calibration_is_refused_with_its_defect() {
        let good = serde_json::to_value(CalibrationFile::of(&Calibration::built_in())).unwrap();
        let refusal = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut changed = good.clone();
            change(&mut changed);
            parse(&changed.to_string()).unwrap_err().to_string()
        };
        for format in [1, 3] {
            let error = refusal(&|file| file["format"] = format.into());
            assert!(error.contains(&format!("format is {format}")), "{error}");
        }
        assert!(refusal(&|file| file["costs"][0]["path"] = "lift".into()).contains("`lift`"));
        assert!(refusal(&|file| file["costs"][0]["direction"] = "up".into()).contains("`up`"));
        for (field, value) in
            [("bytes_per_second", 0.0), ("fixed_ns", -1.0), ("per_piece_ns", 1e30)]
        {
            let error = refusal(&|file| file["costs"][3][field] = value.into());
            assert!(error.contains("plausible"), "{field}: {error}");
        }
        assert!(parse("{").is_err());
        for garbage in ["null", "1e999", "-1", "1e300"] {
            let text = good.to_string().replacen("55000000000.0", garbage, 1);
            assert!(parse(&text).is_err(), "{garbage}");
        }
        let error = read(Path::new("/nonexistent/calibration.json")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/calibration.json"), "{error}");
    }
}
