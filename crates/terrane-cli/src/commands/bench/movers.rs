//! The suite `movers`: methods to copy blocks between a device and pinned memory.

use std::ffi::OsStr;

use terrane_cuda::CopyPath;
use terrane_transfer::TransferError;

use super::Options;
use super::report::{Case, NotMeasured, Report};
use super::suites::{Progress, report, shapes};
use crate::error::Failure;
use crate::measure::bus::Bus;
use crate::measure::{Shape, pytorch, times_interleaved};

/// The methods of engines, each with its path. Terrane's own method has no fixed path.
const MOVERS: [(&str, Option<CopyPath>); 5] = [
    ("a copy for each run", Some(CopyPath::CopyEach)),
    ("batched copies", Some(CopyPath::Batched)),
    ("kernel in place", Some(CopyPath::Direct)),
    ("staged", Some(CopyPath::Staged)),
    ("ours", None),
];

fn direction(to_host: bool) -> &'static str {
    if to_host { "to pinned" } else { "to device" }
}

pub(super) fn movers(
    options: &Options,
    python: &OsStr,
    progress: &mut Progress,
) -> Result<Report, Failure> {
    let (model, shapes) = shapes(options)?;
    let mut report = report("movers", model, "device 0".to_owned(), options);
    for (group, shape) in shapes {
        for (mover, path) in MOVERS {
            let bus = Bus::new(&shape, path)?;
            report.subject = bus.device_name().to_owned();
            // The limit is one contiguous copy, on any path that the engine chooses.
            let limit_bus = if path.is_some() { Some(Bus::new(&shape, None)?) } else { None };
            let limit = limit_bus.as_ref().unwrap_or(&bus);
            for to_host in [true, false] {
                let case = format!("{}, {}: {mover}", group.kind, direction(to_host));
                progress.case(&case);
                if let Err(error) = bus.explained(to_host) {
                    let reason = not_available(error)?;
                    report.not_measured.push(NotMeasured { case, reason });
                    continue;
                }
                let pass = || bus.pass(to_host);
                let (time, limit) =
                    times_interleaved(options.passes, pass, || limit.contiguous(to_host))?;
                report.cases.push(Case::rate(case, shape.bytes(), time, ("one copy", limit)));
            }
        }
        progress.case(&format!("{}: PyTorch", group.kind));
        add_pytorch(&mut report, &group.kind, &shape, python);
    }
    Ok(report)
}

/// The reason why a path is not available: a driver without batched copies, or without kernels.
/// Other errors end the suite.
fn not_available(error: Failure) -> Result<String, Failure> {
    match error {
        Failure::Transfer(error @ TransferError::NoEngine { .. }) => {
            Ok(format!("this path is not available here: {error}"))
        }
        other => Err(other),
    }
}

/// Adds the PyTorch methods. They run in a separate process with its own limit. The memory of the
/// other methods is free by now.
fn add_pytorch(report: &mut Report, group: &str, shape: &Shape, python: &OsStr) {
    let measured = match pytorch::run(python, shape, report.passes, "cuda:0") {
        Ok(measured) => measured,
        Err(reason) => {
            let case = format!("{group}: PyTorch");
            return report.not_measured.push(NotMeasured { case, reason });
        }
    };
    for row in measured.rows {
        let (time, limit) = row.times();
        let case = format!("{group}, {}: {}", direction(row.to_host), row.name);
        report.cases.push(Case::rate(case, shape.bytes(), time, ("one copy", limit)));
    }
    let note = format!("PyTorch {}; each layer has one tensor of blocks", measured.version);
    if !report.notes.contains(&note) {
        report.notes.push(note);
    }
}

#[cfg(test)]
mod tests {
    use terrane_core::StorageKind;

    use super::*;

    #[test]
    fn only_a_path_that_is_not_available_is_left_out() {
        let (from, to) = (StorageKind::Pinned, StorageKind::System);
        let none = TransferError::NoEngine { from, to, declined: Vec::new() };
        let reason = not_available(none.into()).unwrap();
        assert!(
            reason.starts_with("this path is not available here: no engine copies"),
            "{reason}"
        );
        let other = not_available(TransferError::EngineStopped.into());
        assert!(matches!(other, Err(Failure::Transfer(TransferError::EngineStopped))));
    }
}
