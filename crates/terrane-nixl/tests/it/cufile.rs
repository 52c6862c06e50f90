//! The reasons for which tests of GDS may be skipped.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use terrane_core::RegisterError;
use terrane_nixl::{MemoryType, Refusal, Status};

use crate::reasons::{Driver, is_backend_failure, unknown_drive};

#[test]
fn cufile_may_stay_closed_if_it_can_copy_neither_directly_nor_through_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let [module, configuration] =
        ["nvidia-fs", "cufile.json"].map(|file| directory.path().join(file));
    let reason = |forced: Option<&str>| {
        let (nvidia_fs, forced) = (module.clone(), forced.map(str::to_owned));
        Driver { nvidia_fs, forced, configuration: configuration.clone() }.reason()
    };
    let said = reason(None).unwrap();
    assert!(said.contains("nvidia-fs is not loaded") && said.contains("cufile.json"), "{said}");
    assert!(reason(Some("false")).is_some());
    assert_eq!(reason(Some("TRUE")), None);
    for (text, allows) in [
        ("{\"properties\": {\"allow_compat_mode\": false}}", false),
        ("{\"properties\": {\n// \"allow_compat_mode\": true\n}}", false),
        ("{\n  // allows it\n  \"properties\": {\"allow_compat_mode\" : true}}", true),
    ] {
        fs::write(&configuration, text).unwrap();
        assert_eq!(reason(None).is_none(), allows, "{text}");
    }
    fs::remove_file(&configuration).unwrap();
    fs::write(&module, "").unwrap();
    assert_eq!(reason(None), None, "with the module, cuFile opens or is broken");
}

#[test]
fn a_drive_is_unknown_if_udev_names_no_file_system_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let (udev, file) = (directory.path(), directory.path().join("file"));
    fs::write(&file, "").unwrap();
    let drive = fs::metadata(&file).unwrap().dev();
    let name = format!("b{}:{}", libc::major(drive), libc::minor(drive));
    let says_of_entry = |wanted: &str| {
        let said = unknown_drive(udev, &file).unwrap();
        assert!(said.contains(&name) && said.contains(wanted), "{said}");
    };
    says_of_entry("udev has no entry of its drive");
    let entry: PathBuf = udev.join(&name);
    fs::write(&entry, "I:1234\nE:ID_PART_TABLE_TYPE=gpt\nE:ID_FS_TYPE_OF=xfs\n").unwrap();
    says_of_entry("udev names no file system");
    fs::write(&entry, "I:1234\nE:ID_FS_TYPE=ext4\nE:ID_FS_USAGE=filesystem\n").unwrap();
    assert_eq!(unknown_drive(udev, &file), None);
}

#[test]
fn only_a_backend_that_failed_may_have_been_refused_by_cufile() {
    let failed = |cause: Refusal| RegisterError::RequiredBackend {
        agent: "agent".into(),
        backend: "GDS".into(),
        source: Box::new(cause),
    };
    assert!(is_backend_failure(&failed(Refusal::Status(Status::Backend))));
    for ours in [
        Refusal::Status(Status::InvalidParameter),
        Refusal::Status(Status::Bindings),
        Refusal::MemoryType { memory: MemoryType::File },
        Refusal::NoDirectDescriptor,
        Refusal::Descriptor(-1),
        Refusal::Empty,
    ] {
        assert!(!is_backend_failure(&failed(ours)), "{ours}");
    }
}
