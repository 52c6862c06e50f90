//! The suites that users run.

use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use terrane_plan::{GroupPlan, Plan};

use super::Options;
use super::report::{Case, Report};
use crate::error::Failure;
use crate::measure::bus::Bus;
use crate::measure::disk::DiskCase;
use crate::measure::host::{Filled, HostCase, touch_once};
use crate::measure::store::StoreCase;
use crate::measure::{Shape, Spread, times, times_interleaved};

/// A progress bar on standard error, if it is a terminal.
pub(super) struct Progress(ProgressBar);

impl Progress {
    pub(super) fn new(is_shown: bool) -> Self {
        let bar = ProgressBar::new_spinner();
        bar.set_draw_target(if is_shown {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        });
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub(super) fn case(&mut self, name: &str) {
        self.0.set_message(name.to_owned());
        self.0.tick();
    }

    pub(super) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// The groups of the model, each with as many blocks as fit in a number of bytes.
pub(super) fn shapes(options: &Options) -> Result<(String, Vec<(GroupPlan, Shape)>), Failure> {
    let request = options.model.request()?;
    let plan = Plan::new(&request)?;
    let mut shapes = Vec::new();
    for (number, group) in plan.groups.into_iter().enumerate() {
        let shape = Shape::of_group(&request, number, options.size)?;
        shapes.extend(shape.map(|shape| (group, shape)));
    }
    let ranks = if request.tensor_parallel == 1 {
        String::new()
    } else {
        format!(", rank of {}", request.tensor_parallel)
    };
    Ok((format!("{}{ranks}", request.model.name()), shapes))
}

/// A report without cases.
pub(super) fn report(suite: &str, model: String, subject: String, options: &Options) -> Report {
    Report {
        schema: "terrane.bench/1".to_owned(),
        suite: suite.to_owned(),
        model,
        subject,
        passes: options.passes,
        cases: Vec::new(),
        not_measured: Vec::new(),
        notes: Vec::new(),
    }
}

pub(super) fn host(options: &Options, progress: &mut Progress) -> Result<Report, Failure> {
    let (model, shapes) = shapes(options)?;
    let mut report = report("host", model, "system memory".to_owned(), options);
    for (group, shape) in shapes {
        let name = |what: &str| format!("{}: {what}", group.kind);
        progress.case(&name("copies"));
        let mut case = HostCase::new(&shape)?;
        report.subject = format!("system memory, {} threads", case.threads());
        let bytes = shape.bytes();
        let (stored, limit) = compare(options, &mut case, HostCase::store, HostCase::memcpy)?;
        report.cases.push(Case::rate(name("layers to blocks"), bytes, stored, ("memcpy", limit)));
        let (loaded, limit) = compare(options, &mut case, HostCase::load, HostCase::memcpy)?;
        report.cases.push(Case::rate(name("blocks to layers"), bytes, loaded, ("memcpy", limit)));
        let (one, limit) =
            compare(options, &mut case, HostCase::one_block, HostCase::memcpy_of_one_block)?;
        report.cases.push(Case::time(
            name("one block"),
            shape.block_bytes(),
            one,
            ("memcpy", limit),
        ));
    }
    progress.case("first touch");
    let passes = options.passes.min(5);
    let mut filled = Filled::new(options.size);
    let (touched, limit) =
        times_interleaved(passes, || touch_once(options.size), || filled.fill())?;
    let name = "first touch of system memory";
    report.cases.push(Case::rate(name, options.size.get(), touched, ("memset", limit)));
    Ok(report)
}

type HostPass = fn(&mut HostCase) -> Result<f64, Failure>;

fn compare(
    options: &Options,
    case: &mut HostCase,
    pass: HostPass,
    limit: HostPass,
) -> Result<(Spread, Spread), Failure> {
    let shared = std::cell::RefCell::new(case);
    times_interleaved(
        options.passes,
        || pass(&mut shared.borrow_mut()),
        || limit(&mut shared.borrow_mut()),
    )
}

pub(super) fn disk(
    options: &Options,
    directory: &Path,
    depth: u32,
    progress: &mut Progress,
) -> Result<Report, Failure> {
    let (model, shapes) = shapes(options)?;
    let subject = format!("{}, depth {depth}", directory.display());
    let mut report = report("disk", model, subject, options);
    for (group, shape) in shapes {
        progress.case(&format!("{}: writing the file", group.kind));
        let mut case = DiskCase::new(&shape, directory, depth)?;
        report.notes.push(format!("{}: {}", group.kind, case.engine_path()?));
        // The first passes write blocks that are only reserved, and let the engine measure its
        // paths.
        for is_write in [true, false, true, false] {
            case.pass(is_write)?;
        }
        for (is_write, word) in [(true, "write"), (false, "read")] {
            let name = format!("{}: {word}", group.kind);
            progress.case(&name);
            let bytes = shape.bytes();
            let shared = std::cell::RefCell::new(&mut case);
            let pass = || shared.borrow_mut().pass(is_write);
            let raw = || shared.borrow().raw(is_write);
            let (measured, raw) = times_interleaved(options.passes, pass, raw)?;
            // fio needs a second to start, so only a few passes are run.
            let fio = (0..options.passes.min(3)).map(|_| shared.borrow().fio(is_write));
            let fio = fio.collect::<Result<Vec<f64>, String>>();
            let missing = fio.as_ref().err().map(|reason| format!("raw loop ({reason})"));
            let limit_name = missing.as_deref().unwrap_or("raw loop");
            report.cases.push(Case::rate(&name, bytes, measured, (limit_name, raw)));
            if let Ok(rates) = fio {
                let limit = Spread::of(rates.iter().map(|rate| bytes as f64 / rate).collect());
                let compared = format!("{name}, compared with fio");
                report.cases.push(Case::rate(compared, bytes, measured, ("fio", limit)));
            }
            let one = times(options.passes, || shared.borrow_mut().one_block(is_write))?;
            report.cases.push(Case::time(
                format!("{name} of one block"),
                shape.block_bytes(),
                one,
                ("raw, of many", of_one_block(raw, &shape)),
            ));
        }
    }
    Ok(report)
}

/// The time of one block as a share of the time of all blocks.
fn of_one_block(all: Spread, shape: &Shape) -> Spread {
    all.scaled(shape.block_bytes() as f64 / shape.bytes() as f64)
}

pub(super) fn store(
    options: &Options,
    directory: &Path,
    progress: &mut Progress,
) -> Result<Report, Failure> {
    let (model, shapes) = shapes(options)?;
    let mut report = report("store", model, directory.display().to_string(), options);
    for (group, shape) in shapes {
        let name = |what: &str| format!("{}: {what}", group.kind);
        progress.case(&name("puts"));
        let mut raw = DiskCase::new(&shape, directory, 32)?;
        // The first write to reserved blocks is slower.
        raw.pass(true)?;
        let mut case = StoreCase::new(&shape, directory)?;
        let bytes = shape.bytes();
        let (put, limit) = times_interleaved(options.passes, || case.put(), || raw.raw(true))?;
        report.cases.push(Case::rate(name("put"), bytes, put, ("raw loop", limit)));
        progress.case(&name("gets"));
        case.put_all()?;
        let (get, limit) = times_interleaved(options.passes, || case.get(), || raw.raw(false))?;
        report.cases.push(Case::rate(name("get"), bytes, get, ("raw loop", limit)));
        let one = times(options.passes, || case.get_one())?;
        report.cases.push(Case::time(
            name("get of one block"),
            shape.block_bytes(),
            one,
            ("raw, of many", of_one_block(limit, &shape)),
        ));
    }
    report.notes.push("puts end when the bytes are written, not when they are durable".to_owned());
    Ok(report)
}

pub(super) fn gpu(options: &Options, progress: &mut Progress) -> Result<Report, Failure> {
    let (model, shapes) = shapes(options)?;
    let mut report = report("gpu", model, "device 0".to_owned(), options);
    for (number, (group, shape)) in shapes.into_iter().enumerate() {
        progress.case(&format!("{}: copies", group.kind));
        let bus = Bus::new(&shape, None)?;
        report.subject = bus.device_name().to_owned();
        for (to_host, word) in [(true, "device to pinned"), (false, "pinned to device")] {
            let name = format!("{}: {word}", group.kind);
            progress.case(&name);
            let (measured, limit) = times_interleaved(
                options.passes,
                || bus.pass(to_host),
                || bus.contiguous(to_host),
            )?;
            report.cases.push(Case::rate(&name, shape.bytes(), measured, ("one copy", limit)));
            report.notes.push(format!("{name}: {}", bus.explained(to_host)?));
            let one = times(options.passes, || bus.one_block(to_host))?;
            report.cases.push(Case::time(
                format!("{name}, one block"),
                shape.block_bytes(),
                one,
                ("share of one copy", of_one_block(limit, &shape)),
            ));
        }
        let contiguous = || Ok(bus.contiguous(true)? + bus.contiguous(false)?);
        let (both, limit) = times_interleaved(options.passes, || bus.both(), contiguous)?;
        let case = format!("{}: both ways at once", group.kind);
        report.cases.push(Case::rate(
            case,
            shape.bytes() * 2,
            both,
            ("one after the other", limit),
        ));
        if number == 0 {
            progress.case("bring-up of pinned memory");
            let passes = options.passes.min(5);
            let size = options.size;
            let (pinned, touched) =
                times_interleaved(passes, || bus.bring_up(size), || touch_once(size))?;
            let bytes = options.size.get();
            report.cases.push(Case::rate(
                "bring-up of pinned memory",
                bytes,
                pinned,
                ("first touch", touched),
            ));
        }
    }
    Ok(report)
}
