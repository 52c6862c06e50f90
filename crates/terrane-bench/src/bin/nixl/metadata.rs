//! Layouts as bytes, and from bytes.

use std::io::Write;

use anyhow::Result;
use terrane_bench::{Direction, Measurement, Reporter, Settings};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind};

use crate::agents::Agents;
use crate::ours::{agent, layout};
use crate::raw::UCX;

/// What a description and its reading may take.
const MOST_MILLISECONDS: f64 = 1.0;

/// Exports a layout of Llama 3.1 70B with a region a layer, and imports it: as the first of its
/// peer, to which that connects, and as another one of a peer that is known.
pub fn measure<W: Write>(
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    const CASES: [&str; 3] = [
        "export of 80 layers",
        "import of 80 layers, from a new peer",
        "import of 80 layers, from a known peer",
    ];
    if !CASES.iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let config = LayoutConfig::builder()
        .num_blocks(16)
        .num_layers(80)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2))
        .build()?;
    let (here, there) = agents.start(|| {
        let here = agent("terrane-importer", UCX, agents)?;
        Ok((here, agent("terrane-exporter", UCX, agents.answering())?))
    })?;
    let exported = layout(&there, config, LayoutKind::ALL[2])?;
    let other = layout(&there, config, LayoutKind::ALL[2])?;
    let (bytes, others) = (there.export(&exported)?, there.export(&other)?);
    let mut failed = None;
    let mut check = |error: Option<anyhow::Error>| failed = failed.take().or(error);

    let export = settings.time(|| check(there.export(&exported).err().map(Into::into)));
    // What was imported drops at once, and with it the peer is forgotten.
    let first = settings.time(|| check(here.import(&bytes).err().map(Into::into)));
    let _known = here.import(&others)?;
    let further = settings.time(|| check(here.import(&bytes).err().map(Into::into)));
    if let Some(error) = failed {
        return Err(error);
    }
    for (case, seconds) in CASES.into_iter().zip([export, first, further]) {
        let milliseconds = seconds.scaled(1e3);
        reporter.report(
            &Measurement::new(case, milliseconds, "ms", Direction::LowerIsBetter)
                .within(MOST_MILLISECONDS),
        )?;
    }
    Ok(())
}
