//! A directory: direct I/O, unnamed files, preallocation.

use std::error::Error;
use std::path::Path;

use terrane_core::{Allocate, ByteCount, Capability, Memory, RegionRequest};
use terrane_storage::{DiskAllocator, DiskOptions};

use super::finding::Finding;
use super::host::free_bytes;

/// The keys of the findings about a directory that can be used.
const KEYS: [&str; 3] = ["direct-io", "unnamed-file", "preallocation"];

const REMEDY: &str = "create the directory, make it writable, free space in it, or use another one";

pub(crate) fn findings(directory: &Path) -> Vec<Finding> {
    let subject = directory.display().to_string();
    let findings = match probe(directory) {
        Ok(findings) => findings,
        Err(error) => {
            let mut findings = vec![Finding::refused("directory", error, REMEDY)];
            // `--require` must not take another directory's findings for this one's.
            findings.extend(KEYS.map(|key| {
                Finding::refused(key, "unknown, because the directory cannot be used", REMEDY)
            }));
            findings
        }
    };
    findings.into_iter().map(|finding| finding.about(&subject)).collect()
}

fn probe(directory: &Path) -> Result<Vec<Finding>, String> {
    let allocator =
        DiskAllocator::new(directory, DiskOptions::default()).map_err(|e| e.to_string())?;
    // The first file has one byte. A larger file shows whether blocks are reserved.
    let request = RegionRequest::new(ByteCount::mib(1)).labelled("probe");
    // The cause names the limit. The error itself would suggest another tier.
    let file = allocator
        .allocate(&request)
        .map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))?;
    let mut findings = Vec::new();
    if let Some(bytes) = free_bytes(directory) {
        findings.push(Finding::granted("directory", format!("{} free", ByteCount::new(bytes))));
    }
    for mut finding in Finding::of_report(&file.capabilities(), name) {
        if finding.key == "direct-io"
            && let Some(direct) = file.handle().direct
        {
            finding.detail = format!(
                "offsets at multiples of {}, memory of {}",
                direct.offset_alignment, direct.memory_alignment
            );
        }
        findings.push(finding);
    }
    Ok(findings)
}

fn name(capability: &Capability) -> Option<(&'static str, &'static str)> {
    Some(match capability {
        Capability::DirectIo => (
            "direct-io",
            "use ext4 or XFS on a local disk; reads and writes go through the page cache here",
        ),
        Capability::UnnamedFile => (
            "unnamed-file",
            "use ext4, XFS or tmpfs; files are created with a name and unlinked at once here",
        ),
        Capability::Preallocation => {
            ("preallocation", "use ext4 or XFS; a write may find the disk full here")
        }
        _ => return None,
    })
}
