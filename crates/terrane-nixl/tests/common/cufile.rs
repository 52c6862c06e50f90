//! The reasons why cuFile may refuse on this machine, each with its evidence. A test may be skipped
//! for them. Any other refusal is a defect of this crate, or must be explained.

use std::error::Error;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use terrane_core::RegisterError;
use terrane_nixl::{Refusal, Status};

/// The settings that cuFile reads when its driver opens.
pub struct Driver {
    /// The path by which the kernel module `nvidia-fs` is visible.
    pub nvidia_fs: PathBuf,
    /// The value of `CUFILE_FORCE_COMPAT_MODE`.
    pub forced: Option<String>,
    /// The configuration.
    pub configuration: PathBuf,
}

impl Driver {
    /// Reads the settings of this machine and this process.
    #[expect(clippy::disallowed_methods, reason = "cuFile reads these variables")]
    pub fn here() -> Self {
        let configuration = std::env::var_os("CUFILE_ENV_PATH_JSON");
        Self {
            nvidia_fs: PathBuf::from("/proc/driver/nvidia-fs"),
            forced: std::env::var("CUFILE_FORCE_COMPAT_MODE").ok(),
            configuration: configuration.unwrap_or_else(|| "/etc/cufile.json".into()).into(),
        }
    }

    /// The reason why it cannot open, if it cannot: it can copy neither directly nor through the
    /// host.
    pub fn reason(&self) -> Option<String> {
        let forced = self.forced.as_deref().is_some_and(|value| value.eq_ignore_ascii_case("true"));
        if self.nvidia_fs.exists() || forced || allows_the_host(&self.configuration) {
            return None;
        }
        Some(format!(
            "nvidia-fs is not loaded, and {} does not allow cuFile to go through the host",
            self.configuration.display()
        ))
    }
}

/// Whether a configuration of cuFile permits copies through the host.
fn allows_the_host(configuration: &Path) -> bool {
    let Ok(text) = fs::read_to_string(configuration) else { return false };
    // JSON with comments, which have separate lines.
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let bare: String =
        lines.flat_map(str::chars).filter(|letter| !letter.is_whitespace()).collect();
    bare.contains(r#""allow_compat_mode":true"#)
}

/// The folder in which udev keeps a file for each drive.
pub const UDEV: &str = "/run/udev/data";

/// The reason why cuFile cannot determine this file's file system, if there is one. `udev` is
/// [`UDEV`].
pub fn unknown_drive(udev: &Path, file: &Path) -> Option<String> {
    let drive = match fs::metadata(file) {
        Ok(metadata) => metadata.dev(),
        Err(error) => panic!("{}: {error}", file.display()),
    };
    let entry = udev.join(format!("b{}:{}", libc::major(drive), libc::minor(drive)));
    let said = match fs::read_to_string(&entry) {
        Ok(said) => said,
        Err(error) => {
            return Some(format!("udev has no entry of its drive: {}: {error}", entry.display()));
        }
    };
    let names_it = said.lines().any(|line| line.starts_with("E:ID_FS_TYPE="));
    (!names_it).then(|| format!("udev names no file system of its drive in {}", entry.display()))
}

/// Whether a registration failed because every called backend failed, as backends do if cuFile
/// refuses a file.
pub fn is_backend_failure(error: &(dyn Error + 'static)) -> bool {
    if let Some(refusal) = error.downcast_ref() {
        return matches!(refusal, Refusal::Status(Status::Backend));
    }
    if let Some(RegisterError::Refused { backends, .. }) = error.downcast_ref() {
        let mut causes = backends.iter().filter_map(|outcome| outcome.refusal.as_ref());
        return causes.all(|cause| is_backend_failure(&**cause));
    }
    error.source().is_some_and(is_backend_failure)
}
