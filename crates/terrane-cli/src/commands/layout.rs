//! `terrane layout`: the positions of a block's bytes in each tier, and the runs of transfers.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use terrane_core::Requirement;
use terrane_layout::LayoutPlan;
use terrane_plan::{GroupPlan, Plan, PlanRequest, TierKind};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use crate::commands::files;
use crate::commands::model::ModelArguments;
use crate::error::{ExitStatus, Failure};
use crate::measure;
use crate::output::Output;
use crate::table::wrap;

/// The arguments of `terrane layout`.
#[derive(Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    /// The group of caches, counted from 0; all groups if not set
    #[arg(long, value_name = "N")]
    group: Option<usize>,
    /// The tiers to draw
    #[arg(long, value_delimiter = ',', default_value = "device,host,disk")]
    tiers: Vec<Tier>,
    /// Number of blocks in the drawn layouts
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    blocks: u32,
    /// Writes an SVG for each tier to this folder
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

/// The kinds of tier that are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    Device,
    Host,
    Disk,
}

impl Tier {
    fn kind(self) -> TierKind {
        match self {
            Self::Device => TierKind::Device,
            Self::Host => TierKind::Host,
            Self::Disk => TierKind::Disk,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
        }
    }
}

pub(crate) fn run(arguments: &Arguments, output: &mut Output<'_>) -> Result<ExitStatus, Failure> {
    let request = arguments.model.request()?;
    let groups = Plan::new(&request)?.groups;
    let chosen: Vec<usize> = match arguments.group {
        Some(group) if group >= groups.len() => {
            let text = format!(
                "there is no group {group}; the model has {}, counted from 0",
                groups.len()
            );
            return Err(Failure::Usage(text));
        }
        Some(group) => vec![group],
        None => (0..groups.len()).collect(),
    };
    for number in chosen {
        let Some(group) = groups.get(number) else { continue };
        output.text(&format!("group {number}: {}, {} layers\n", group.kind, group.layers))?;
        let layouts = layouts(arguments, &request, number)?;
        for (tier, layout) in &layouts {
            let picture = layout.geometry().picture();
            output.text(&format!("\n{}\n{}", title(*tier), indented(&picture.to_string())))?;
            if let Some(folder) = &arguments.svg {
                let file = folder.join(format!("group{number}-{}.svg", tier.name()));
                files::write(&file, &picture.to_svg())?;
            }
        }
        output.text(&runs(&layouts, group)?)?;
    }
    Ok(ExitStatus::Success)
}

fn layouts(
    arguments: &Arguments,
    request: &PlanRequest,
    group: usize,
) -> Result<Vec<(Tier, LayoutPlan)>, Failure> {
    let mut layouts = Vec::new();
    for &tier in &arguments.tiers {
        let layout = request.layouts(tier.kind(), arguments.blocks)?.into_iter().nth(group);
        layouts.extend(layout.map(|layout| (tier, layout)));
    }
    Ok(layouts)
}

fn title(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device: a region for each layer, as vLLM allocates it",
        Tier::Host => "host: a block is contiguous",
        Tier::Disk => "disk: a block is contiguous, at a multiple of 4,096 bytes",
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {}\n", line.chars().take(78).collect::<String>())).collect()
}

/// The runs of one block between each two tiers, from the transfer manager's explanation. The
/// layout of the device is built in system memory, with the same geometry, so no GPU is needed.
fn runs(layouts: &[(Tier, LayoutPlan)], group: &GroupPlan) -> Result<String, Failure> {
    let manager = TransferManager::with_default_engines()?;
    let mut text = String::new();
    // A layout of real blocks may be large, but its pages are never touched.
    let mut endpoints = Vec::new();
    for (tier, layout) in layouts {
        endpoints.push((*tier, endpoint(*tier, layout)?));
    }
    for pair in endpoints.windows(2) {
        let [(from, source), (to, destination)] = pair else { continue };
        for (names, source, destination) in
            [((from, to), source, destination), ((to, from), destination, source)]
        {
            let explanation =
                manager.explain(&Transfer::new(source, destination).blocks(&[0], &[0]))?;
            let runs = match explanation.runs {
                1 => "one run".to_owned(),
                runs => format!("{runs} runs of {} on average", explanation.mean_run()),
            };
            let (from, to) = (names.0.name(), names.1.name());
            let (bytes, pieces) = (explanation.bytes, explanation.pieces);
            let line = format!("{from} to {to}: {bytes} in {pieces} pieces becomes {runs}");
            text.push_str(&wrap(&line, "  "));
            if *names.0 != Tier::Device && *names.1 != Tier::Device {
                text.push_str(&wrap(&format!("  explain: {explanation}"), "    "));
            }
        }
    }
    if text.is_empty() {
        return Ok(text);
    }
    let head = format!("\ntransfers of one block of {} bytes\n", group.block_bytes);
    Ok(format!("{head}{text}\n"))
}

fn endpoint(tier: Tier, layout: &LayoutPlan) -> Result<Endpoint, Failure> {
    let geometry = layout.geometry();
    if tier == Tier::Disk {
        // No data is written, so the file stays sparse.
        let options = DiskOptions { preallocate: Requirement::Off, ..DiskOptions::default() };
        measure::endpoint(geometry, &DiskAllocator::new(&std::env::temp_dir(), options)?)
    } else {
        let options = SystemOptions {
            first_touch: terrane_storage::FirstTouch::None,
            ..SystemOptions::default()
        };
        measure::endpoint(geometry, &SystemAllocator::new(options))
    }
}
