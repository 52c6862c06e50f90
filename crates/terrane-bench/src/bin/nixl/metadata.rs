//! Export and import of layouts.

use std::io::Write;

use anyhow::{Context as _, Result, ensure};
use nixl_sys::RegistrationHandle;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_nixl::Agent;

use crate::MOST_TIME;
use crate::agents::{Agents, First, Times, over_sets};
use crate::bindings::{Bare, Span, UCX};
use crate::interleave::{interleaved, timed};
use crate::terrane::{agent, layout};

/// The maximum time to write and read a description.
const MOST_MILLISECONDS: f64 = 1.0;

const EXPORT: &str = "export of 80 layers";
const FIRST: &str = "import of 80 layers, the agent's first connection";
const CONNECTING: &str = "import of 80 layers, connecting";
const NEW_KEYS: &str = "import of 80 layers, connected, with new keys";
const KNOWN: &str = "import of 80 layers, all of it known";

/// The times of a case, one for each set of agents.
#[derive(Default)]
struct Sets {
    export: Vec<f64>,
    first: Vec<Times<1>>,
    connecting: Vec<Times<1>>,
    new_keys: Vec<Times<1>>,
    known: Vec<f64>,
}

/// Exports a layout of Llama 3.1 70B with one region per layer, and imports it in four ways:
///
/// - by an agent without any connection;
/// - from a peer that NIXL has forgotten, so that the import connects;
/// - from a connected peer, with keys that are new to NIXL;
/// - once more, so that the import makes no call of NIXL.
pub fn measure<W: Write>(
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let compared = |case| format!("{case}, compared with NIXL");
    let (connecting, new_keys) = (compared(CONNECTING), compared(NEW_KEYS));
    let cases = [EXPORT, FIRST, CONNECTING, &connecting, NEW_KEYS, &new_keys, KNOWN];
    if !cases.into_iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let mut sets = Sets::default();
    // With NIXL 1.5.1, each closed connection leaves a descriptor open. The descriptors are closed
    // with the agents of the set.
    for first in agents.sets() {
        let setup = Setup::new(agents, first, settings)?;
        sets.export.push(setup.export(settings)?);
        sets.first.push(setup.connecting(&Settings {
            warm_up: 0,
            repeats: 1,
            ..settings.clone()
        })?);
        sets.connecting.push(setup.connecting(settings)?);
        sets.new_keys.push(setup.new_keys(settings)?);
        sets.known.push(setup.known(settings)?);
    }
    let (first, [raw_first]) = over_sets(&sets.first)?;
    let (connecting, [raw_connecting]) = over_sets(&sets.connecting)?;
    let (new_keys, [raw_new_keys]) = over_sets(&sets.new_keys)?;
    let over = |medians: &[f64]| Spread::of(medians).context("there is a set of agents");
    let row = |case: &str, value: Spread| {
        Measurement::new(case, value.scaled(1e3), "ms", Direction::LowerIsBetter)
    };
    for (case, value) in [
        (EXPORT, over(&sets.export)?),
        (CONNECTING, connecting),
        (NEW_KEYS, new_keys),
        (KNOWN, over(&sets.known)?),
    ] {
        reporter.report(&row(case, value).within(MOST_MILLISECONDS))?;
    }
    // The bindings alone take longer than the limit, so their time is the baseline.
    let first = row(FIRST, first).with_baseline("nixl-sys", raw_first * 1e3);
    reporter.report(&first.at_least(1.0 / MOST_TIME))?;
    for (case, value, bindings) in
        [(CONNECTING, connecting, raw_connecting), (NEW_KEYS, new_keys, raw_new_keys)]
    {
        let row = row(&compared(case), value).with_baseline("nixl-sys", bindings * 1e3);
        reporter.report(&row.without_target("the same case has a limit in the row before"))?;
    }
    Ok(())
}

/// A set of agents, and layouts that their owners have exported.
struct Setup {
    // The registrations with the bindings drop before the memory, and the memory before its agent.
    bindings: Bindings,
    here: Agent,
    /// One for each round, and one that is already imported when a round begins.
    exported: Vec<Vec<u8>>,
    layouts: Vec<PhysicalLayout>,
    there: Agent,
    first: First,
}

/// The same memory for the bindings.
struct Bindings {
    here: Bare,
    /// The addresses of the remote agent, and the keys of the first layout.
    connecting: Vec<u8>,
    /// The keys of each layout after that.
    keys: Vec<Vec<u8>>,
    _registered: Vec<RegistrationHandle>,
    there: Bare,
}

impl Setup {
    fn new(agents: Agents, first: First, settings: &Settings) -> Result<Self> {
        let config = LayoutConfig::builder()
            // One block is enough, because a description does not grow with the number of blocks.
            .num_blocks(1)
            .num_layers(80)
            .outer_dim(2)
            .page_size(16)
            .inner_dim(1024)
            .element(ElementFormat::Width(2))
            .build()?;
        let pair = |name: &str, agents| agent(&format!("terrane-{name}"), UCX, agents);
        let raw_pair = |name: &str, agents| Bare::new(&format!("raw-{name}"), UCX, agents);
        let answering = agents.answering();
        let ((here, there), bindings) = agents.start(|| {
            first.create(
                || Ok((pair("importer", agents)?, pair("exporter", answering)?)),
                || Ok((raw_pair("importer", agents)?, raw_pair("exporter", answering)?)),
            )
        })?;
        let rounds = settings.warm_up + settings.repeats.max(1);
        let layouts = (0..=rounds).map(|_| layout(&there, config, LayoutKind::ALL[2]));
        let layouts = layouts.collect::<Result<Vec<_>>>()?;
        let exported = layouts.iter().map(|layout| there.export(layout));
        let exported = exported.collect::<Result<_, _>>()?;
        let bindings = Bindings::new(bindings, &layouts)?;
        Ok(Self { bindings, here, exported, layouts, there, first })
    }

    fn first_layout(&self) -> Result<(&PhysicalLayout, &[u8])> {
        let layout = self.layouts.first().context("there is a layout")?;
        Ok((layout, self.exported.first().context("it is exported")?))
    }

    fn export(&self, settings: &Settings) -> Result<f64> {
        let (layout, _) = self.first_layout()?;
        let [median] = interleaved(
            settings,
            self.first,
            [&mut || {
                let (taken, _) = timed(|| Ok(self.there.export(layout)?))?;
                Ok(taken)
            }],
        )?;
        Ok(median)
    }

    /// Measures imports that connect. Before each import, NIXL forgets the peer; that time is not
    /// counted.
    fn connecting(&self, settings: &Settings) -> Result<Times<1>> {
        let (_, exported) = self.first_layout()?;
        let Bindings { here, there, connecting, .. } = &self.bindings;
        let [terrane, bindings] = interleaved(
            settings,
            self.first,
            [
                &mut || {
                    let (taken, imported) = timed(|| Ok(self.here.import(exported)?))?;
                    drop(imported);
                    self.disconnect()?;
                    Ok(taken)
                },
                &mut || {
                    let (taken, ()) = timed(|| here.load(there, connecting))?;
                    here.forget(there)?;
                    Ok(taken)
                },
            ],
        )?;
        Ok(Times { terrane, bindings: [bindings] })
    }

    /// Measures imports of a layout with a separate registration, from a connected peer. Another
    /// layout of that peer stays imported, as do those of earlier rounds.
    fn new_keys(&self, settings: &Settings) -> Result<Times<1>> {
        let Bindings { here, there, connecting, keys, .. } = &self.bindings;
        let (_, exported) = self.first_layout()?;
        let mut imported = vec![self.here.import(exported)?];
        here.load(there, connecting)?;
        let (mut exported, mut keys) = (self.exported.iter().skip(1), keys.iter());
        let [terrane, bindings] = interleaved(
            settings,
            self.first,
            [
                &mut || {
                    let bytes = exported.next().context("there is a layout for each round")?;
                    let (taken, layout) = timed(|| Ok(self.here.import(bytes)?))?;
                    imported.push(layout);
                    Ok(taken)
                },
                &mut || {
                    let keys = keys.next().context("there are keys for each round")?;
                    let (taken, ()) = timed(|| here.load(there, keys))?;
                    Ok(taken)
                },
            ],
        )?;
        drop(imported);
        here.forget(there)?;
        self.disconnect()?;
        Ok(Times { terrane, bindings: [bindings] })
    }

    /// Measures imports without any call of NIXL. Each import drops at once, and its peer with it,
    /// but NIXL still knows the peer.
    fn known(&self, settings: &Settings) -> Result<f64> {
        let (_, exported) = self.first_layout()?;
        drop(self.here.import(exported)?);
        let [median] = interleaved(
            settings,
            self.first,
            [&mut || {
                let (taken, _) = timed(|| Ok(self.here.import(exported)?))?;
                Ok(taken)
            }],
        )?;
        self.disconnect()?;
        Ok(median)
    }

    /// Closes the only connection. Fails if there was none, because then the import had not
    /// connected.
    fn disconnect(&self) -> Result<()> {
        let closed = self.here.disconnect();
        ensure!(closed == 1, "{closed} connections were closed, not the one to the peer");
        Ok(())
    }
}

impl Bindings {
    fn new((here, there): (Bare, Bare), layouts: &[PhysicalLayout]) -> Result<Self> {
        let (mut connecting, mut keys, mut registered) = (None, Vec::new(), Vec::new());
        for layout in layouts {
            // One registration for all regions.
            let span =
                Span::registered(layout.regions().first().context("a layout has a region")?)?;
            registered.push(there.register(&span)?);
            // Only the first layout is registered at this point.
            match connecting {
                Some(_) => keys.push(there.keys(&span)?),
                None => connecting = Some(there.metadata()?),
            }
        }
        let connecting = connecting.context("there is a layout")?;
        Ok(Self { here, connecting, keys, _registered: registered, there })
    }
}
