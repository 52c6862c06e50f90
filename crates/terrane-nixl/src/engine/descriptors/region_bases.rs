//! The bases of an end's regions in NIXL's terms, computed once for each endpoint.

use std::sync::{Arc, Mutex};

use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{ByteCount, Location, Span};
use terrane_layout::Geometry;
use terrane_transfer::Endpoint;

use crate::agent::Agent;
use crate::agent::backend::Backend;
use crate::agent::config::FileAccess;
use crate::bindings::memory_type::MemoryType;
use crate::peers::spaces::device_of;
use crate::register::descriptor::Descriptor;
use crate::register::table::RegistrationTable;

/// The memory type of an end, and the bases of its regions for each backend.
#[derive(Debug)]
pub(in crate::engine) struct RegionBases {
    pub(in crate::engine) memory: MemoryType,
    /// For each backend of the agent, in order: the base of each region; `None` if the backend does
    /// not have all regions.
    bases: Box<[Option<Box<[RegionBase]>>]>,
    /// Whether any backend has any region.
    pub(in crate::engine) is_registered: bool,
    overlapping: Mutex<Option<Overlapping>>,
}

/// The registrations that NIXL could use for the regions.
#[derive(Debug)]
struct Overlapping {
    /// The version of the agent's registrations.
    version: u64,
    /// The backend's index in the agent.
    backend: usize,
    entries: Arc<[Descriptor]>,
}

/// The start of a region in NIXL's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct RegionBase {
    /// An address, or a position in a file.
    pub(in crate::engine) address: u64,
    /// The ordinal of a device, the descriptor of a file, 0 for host memory.
    pub(in crate::engine) device: u64,
}

impl RegionBases {
    /// The bases of an end in local memory or a local file, in the registrations of the agent.
    pub(in crate::engine) fn local(agent: &Agent, endpoint: &Endpoint) -> Option<Self> {
        let layout = endpoint.layout();
        let geometry = layout.geometry();
        let registrations = layout.registrations();
        let spans: Vec<Span> = (0_u32..)
            .zip(layout.regions())
            .map(|(number, region)| Span {
                length: geometry.region_bytes(number),
                ..Span::of(region)
            })
            .collect();
        let memory = Descriptor::memory_of(spans.first()?).ok()?;
        Some(Self::of_each_backend(agent, memory, |backend| {
            let accepted = |number: u32, span: &Span| {
                registrations.iter().any(|found| {
                    (found.first_region..=found.last_region).contains(&number)
                        && found.record.agent == *agent.name()
                        && found.record.span.covers(span)
                        && found.record.accepted_by(&backend.name)
                })
            };
            let base = |(number, span): (u32, &Span)| {
                accepted(number, span).then(|| base(span, backend.file_access)).flatten()
            };
            (0_u32..).zip(&spans).map(base).collect()
        }))
    }

    /// The bases of an end in a peer's memory, for the backends that accepted it according to the
    /// peer. Backends with other names cannot reach it.
    pub(in crate::engine) fn remote(agent: &Agent, endpoint: &Endpoint) -> Option<Self> {
        let (memory, _) = device_of(endpoint.base(0)?.as_remote()?.space)?;
        let registrations = endpoint.layout().registrations();
        let base = |location: &Location| {
            let at = location.as_remote()?;
            let (_, device) = device_of(at.space)?;
            Some(RegionBase { address: at.address, device })
        };
        let bases: Option<Box<[RegionBase]>> = endpoint.bases().iter().map(base).collect();
        let regions = endpoint.bases().len();
        Some(Self::of_each_backend(agent, memory, |backend| {
            let accepted = |number: u32| {
                registrations.iter().any(|found| {
                    (found.first_region..=found.last_region).contains(&number)
                        && found.record.accepted_by(&backend.name)
                })
            };
            let all = (0_u32..).take(regions).all(accepted);
            bases.clone().filter(|_| all)
        }))
    }

    fn of_each_backend(
        agent: &Agent,
        memory: MemoryType,
        bases: impl Fn(&Backend) -> Option<Box<[RegionBase]>>,
    ) -> Self {
        let bases: Box<[_]> = agent.created_backends().iter().map(bases).collect();
        let is_registered = bases.iter().any(Option::is_some);
        Self { memory, bases, is_registered, overlapping: Mutex::default() }
    }

    /// The bases of the regions for a backend; `None` if it does not have all regions.
    pub(in crate::engine) fn of_backend(&self, backend: usize) -> Option<&[RegionBase]> {
        self.bases.get(backend)?.as_deref()
    }

    /// The regions in NIXL's terms, for a backend; none if it does not have all regions.
    pub(in crate::engine) fn regions(
        &self,
        backend: usize,
        geometry: &Geometry,
    ) -> impl Iterator<Item = Descriptor> {
        let bases = self.of_backend(backend).unwrap_or_default();
        (0_u32..).zip(bases).map(|(number, base)| Descriptor {
            memory: self.memory,
            address: ByteCount::new(base.address).to_usize(),
            length: geometry.region_bytes(number).to_usize(),
            device: base.device,
        })
    }

    /// The registrations of the agent that NIXL could use for the regions. The result is kept while
    /// no registration changes.
    pub(in crate::engine) fn overlapping(
        &self,
        table: &RegistrationTable,
        backend: usize,
        geometry: &Geometry,
    ) -> Arc<[Descriptor]> {
        let mut known = lock(&self.overlapping);
        let version = table.version();
        if let Some(known) = &*known
            && (known.version, known.backend) == (version, backend)
        {
            return Arc::clone(&known.entries);
        }
        let regions: Vec<Descriptor> = self.regions(backend, geometry).collect();
        let entries: Arc<[Descriptor]> = table.overlapping(&regions, backend).into();
        *known = Some(Overlapping { version, backend, entries: Arc::clone(&entries) });
        entries
    }

    /// The base of a region for a backend.
    pub(in crate::engine) fn base(&self, backend: usize, region: u32) -> Option<RegionBase> {
        self.of_backend(backend)?.get(ByteCount::new(region.into()).to_usize()).copied()
    }
}

fn base(span: &Span, access: FileAccess) -> Option<RegionBase> {
    let descriptor = Descriptor::of(span, access).ok()?;
    let address = to_u64(descriptor.address);
    Some(RegionBase { address, device: descriptor.device })
}
