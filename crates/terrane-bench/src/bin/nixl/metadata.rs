//! Layouts as bytes, and from bytes.

use std::io::Write;

use anyhow::{Context as _, Result, ensure};
use nixl_sys::RegistrationHandle;
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_nixl::Agent;

use crate::MOST_TIME;
use crate::agents::{Agents, First, Times, over_sets};
use crate::ours::{agent, layout};
use crate::raw::{Bare, Span, UCX};
use crate::turns::{in_turns, timed};

/// What a description and its reading may take.
const MOST_MILLISECONDS: f64 = 1.0;

const EXPORT: &str = "export of 80 layers";
const FIRST: &str = "import of 80 layers, the agent's first connection";
const CONNECTING: &str = "import of 80 layers, connecting";
const NEW_KEYS: &str = "import of 80 layers, connected, with new keys";
const KNOWN: &str = "import of 80 layers, all of it known";

/// What a case takes of each set of agents.
#[derive(Default)]
struct Sets {
    export: Vec<f64>,
    first: Vec<Times<1>>,
    connecting: Vec<Times<1>>,
    new_keys: Vec<Times<1>>,
    known: Vec<f64>,
}

/// Exports a layout of Llama 3.1 70B with a region a layer, and imports it: by an agent that has connected to
/// nobody yet; from a peer that NIXL does not know any more, to which that connects; with keys that NIXL is
/// told of, from one that it is connected to; and once more, so that NIXL is told nothing.
pub fn measure<W: Write>(
    agents: Agents,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let beside = |case| format!("{case}, beside NIXL");
    let (connecting, new_keys) = (beside(CONNECTING), beside(NEW_KEYS));
    let cases = [EXPORT, FIRST, CONNECTING, &connecting, NEW_KEYS, &new_keys, KNOWN];
    if !cases.into_iter().any(|case| reporter.wants(case)) {
        return Ok(());
    }
    let mut sets = Sets::default();
    // Each connection that is closed leaves a descriptor open with NIXL 1.5.1; they go with the set's agents.
    for first in agents.sets() {
        let rig = Rig::new(agents, first, settings)?;
        sets.export.push(rig.export(settings)?);
        sets.first.push(rig.connecting(&Settings {
            warm_up: 0,
            repeats: 1,
            ..settings.clone()
        })?);
        sets.connecting.push(rig.connecting(settings)?);
        sets.new_keys.push(rig.new_keys(settings)?);
        sets.known.push(rig.known(settings)?);
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
    // Takes NIXL longer than any limit of ours.
    let first = row(FIRST, first).beside("nixl-sys", raw_first * 1e3);
    reporter.report(&first.at_least(1.0 / MOST_TIME))?;
    for (case, value, raw) in
        [(CONNECTING, connecting, raw_connecting), (NEW_KEYS, new_keys, raw_new_keys)]
    {
        let row = row(&beside(case), value).beside("nixl-sys", raw * 1e3);
        reporter.report(&row.without_target("the same case has a limit in the row before"))?;
    }
    Ok(())
}

/// A set of agents, and layouts whose owners have described them to the others.
struct Rig {
    // Registrations with the bindings go before the memory, and the memory before its agent.
    raw: Raw,
    here: Agent,
    /// As many as there are rounds, and one that is imported already when their turn comes.
    exported: Vec<Vec<u8>>,
    layouts: Vec<PhysicalLayout>,
    there: Agent,
    first: First,
}

/// The same memory, as the bindings are told of it.
struct Raw {
    here: Bare,
    /// How to connect to the agent over there, with the keys of the first layout.
    connecting: Vec<u8>,
    /// The keys of each layout after that.
    keys: Vec<Vec<u8>>,
    _registered: Vec<RegistrationHandle>,
    there: Bare,
}

impl Rig {
    fn new(agents: Agents, first: First, settings: &Settings) -> Result<Self> {
        let config = LayoutConfig::builder()
            // Of one block, as there are many layouts: what describes one does not grow with its blocks.
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
        let ((here, there), raw) = agents.start(|| {
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
        let raw = Raw::new(raw, &layouts)?;
        Ok(Self { raw, here, exported, layouts, there, first })
    }

    fn first_layout(&self) -> Result<(&PhysicalLayout, &[u8])> {
        let layout = self.layouts.first().context("there is a layout")?;
        Ok((layout, self.exported.first().context("it is exported")?))
    }

    fn export(&self, settings: &Settings) -> Result<f64> {
        let (layout, _) = self.first_layout()?;
        let [median] = in_turns(
            settings,
            self.first,
            [&mut || {
                let (taken, _) = timed(|| Ok(self.there.export(layout)?))?;
                Ok(taken)
            }],
        )?;
        Ok(median)
    }

    /// Before each turn NIXL forgets the peer, which is not counted.
    fn connecting(&self, settings: &Settings) -> Result<Times<1>> {
        let (_, exported) = self.first_layout()?;
        let Raw { here, there, connecting, .. } = &self.raw;
        let [terrane, raw] = in_turns(
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
        Ok(Times { terrane, bindings: [raw] })
    }

    /// Each turn imports a layout that lies in a registration of its own, of a peer of which another one
    /// is imported and stays so, as those of earlier turns do.
    fn new_keys(&self, settings: &Settings) -> Result<Times<1>> {
        let Raw { here, there, connecting, keys, .. } = &self.raw;
        let (_, exported) = self.first_layout()?;
        let mut imported = vec![self.here.import(exported)?];
        here.load(there, connecting)?;
        let (mut exported, mut keys) = (self.exported.iter().skip(1), keys.iter());
        let [terrane, raw] = in_turns(
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
        Ok(Times { terrane, bindings: [raw] })
    }

    /// What is imported drops at once, and with it the peer ends. NIXL goes on knowing it, so that the
    /// next import takes it up without telling NIXL anything.
    fn known(&self, settings: &Settings) -> Result<f64> {
        let (_, exported) = self.first_layout()?;
        drop(self.here.import(exported)?);
        let [median] = in_turns(
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

    /// Closes the one connection that there is: had there been none, nothing would have been connected to.
    fn disconnect(&self) -> Result<()> {
        let closed = self.here.disconnect();
        ensure!(closed == 1, "{closed} connections were closed, not the one to the peer");
        Ok(())
    }
}

impl Raw {
    fn new((here, there): (Bare, Bare), layouts: &[PhysicalLayout]) -> Result<Self> {
        let (mut connecting, mut keys, mut registered) = (None, Vec::new(), Vec::new());
        for layout in layouts {
            // One for all regions.
            let span =
                Span::registered(layout.regions().first().context("a layout has a region")?)?;
            registered.push(there.register(&span)?);
            // Of the first layout alone, as nothing else is registered yet.
            match connecting {
                Some(_) => keys.push(there.keys(&span)?),
                None => connecting = Some(there.metadata()?),
            }
        }
        let connecting = connecting.context("there is a layout")?;
        Ok(Self { here, connecting, keys, _registered: registered, there })
    }
}
