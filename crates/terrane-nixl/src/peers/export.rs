//! Exports: the data by which a peer reaches a layout.

use nixl_sys::RegDescList;
use rustc_hash::FxHashSet;
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{BackendName, Memory, RegistrationRecord, Span};
use terrane_layout::PhysicalLayout;
use terrane_wire::{LayoutDescriptor, RegionDescriptor};

use super::error::ExportError;
use super::metadata::Metadata;
use super::metadata::coverage::uncovered;
use super::metadata::parts::MetadataParts;
use super::spaces::space_of;
use crate::agent::Agent;
use crate::agent::backend::Backend;
use crate::agent::config::FileAccess;
use crate::agent::options::naming;
use crate::bindings::process;
use crate::bindings::status::Status;
use crate::register::descriptor::Descriptor;

impl Agent {
    /// Describes a layout that is registered with this agent as bytes, for peers to
    /// [`import`](Self::import).
    ///
    /// It offers only the layout's blocks. However, a peer with the export can reach all
    /// registrations that contain the blocks, also a longer one that they use.
    ///
    /// A peer reads and writes exported blocks without notice to this process, so this process does
    /// not track its transfers. The two sides must agree on when each of them uses a block.
    /// [Notifications](Self::notifications) report the arrival of bytes.
    ///
    /// # Errors
    ///
    /// - [`ExportError::NotRegistered`], [`ExportError::NotCovered`] and
    ///   [`ExportError::RegistrationGone`] if the layout is not, not wholly, or no longer
    ///   registered with this agent.
    /// - [`ExportError::NoBackend`] if peers cannot reach it through any backend.
    /// - [`ExportError::NotOurs`] for a peer's layout.
    /// - [`ExportError::Metadata`] and [`ExportError::Wire`] if NIXL or the encoding fails.
    pub fn export(&self, layout: &PhysicalLayout) -> Result<Vec<u8>, ExportError> {
        Ok(self.describe(layout)?.encode()?)
    }

    /// Describes a layout that is registered with this agent, with all data by which a peer reaches
    /// it. [`export`](Self::export) encodes this description as bytes.
    ///
    /// # Errors
    ///
    /// As for [`export`](Self::export).
    pub fn describe(&self, layout: &PhysicalLayout) -> Result<LayoutDescriptor, ExportError> {
        process::check()?;
        let storage = layout.storage_kind();
        let geometry = layout.geometry();
        let mut registered: Vec<RegistrationRecord> = Vec::new();
        let mut of_regions = Vec::with_capacity(layout.regions().len());
        for (number, region) in (0_u32..).zip(layout.regions()) {
            // Bytes of an adopted region beyond the layout's blocks are not offered.
            let used = Span { length: geometry.region_bytes(number), ..region.span() };
            let known = registered.iter().position(|record| record.span.covers(&used));
            // A registration of the previous region and of this one is the base allocation's.
            let index = match known {
                Some(index) => index,
                None => {
                    registered.push(self.registration_of(number, region, &used)?);
                    registered.len() - 1
                }
            };
            of_regions.push((used, index));
        }

        let no_backend = || ExportError::NoBackend { agent: self.name().clone(), storage };
        let failed = |error| ExportError::Metadata {
            agent: self.name().clone(),
            status: Status::of(&error),
        };
        let connection = self.connection_metadata().map_err(failed)?;
        let reached = Metadata::parse(&connection).ok().map(|metadata| metadata.connections);
        let is_reached =
            |name: &str| reached.as_ref().is_none_or(|all| all.iter().any(|c| c.backend == name));
        let mut backends = self.created_backends().iter().enumerate().filter(|(_, backend)| {
            is_reached(backend.name.as_str())
                && registered.iter().all(|record| record.accepted_by(&backend.name))
        });
        let Some(first) = backends.next() else { return Err(no_backend()) };
        let access = first.1.file_access;
        let entries = self.entries_of(&registered, first).ok_or_else(no_backend)?;
        // NIXL returns the data of one list of descriptors. Backends that have the layout under
        // other descriptors are not offered: other descriptors of files, or longer registrations.
        let has_same = |backend: &(usize, &Backend)| {
            self.entries_of(&registered, *backend).as_ref() == Some(&entries)
        };
        let backends: Vec<&Backend> = std::iter::once(first)
            .chain(backends.filter(has_same))
            .map(|(_, backend)| backend)
            .collect();

        let options = naming(backends.iter().map(|backend| &backend.raw)).map_err(failed)?;
        let Some(memory) = entries.first().map(|entry| entry.memory) else {
            return Err(no_backend());
        };
        let mut keys = RegDescList::new(memory.into_raw()).map_err(failed)?;
        let mut listed: FxHashSet<Descriptor> = FxHashSet::default();
        for entry in entries.iter().filter(|entry| listed.insert(**entry)) {
            keys.add_desc(entry.address, entry.length, entry.device);
        }
        let keys = self.raw().get_local_partial_md(&keys, Some(&options)).map_err(failed)?;

        let mut regions = Vec::with_capacity(of_regions.len());
        for (used, index) in of_regions {
            let Some(record) = registered.get(index) else { return Err(no_backend()) };
            regions.push(described(&used, access, record).ok_or_else(no_backend)?);
        }
        if reached.is_some() {
            self.check_own_keys(&regions, &backends, &keys)?;
        }
        let parts = MetadataParts { connection: &connection, keys: &keys };
        let metadata = parts.join().ok_or_else(no_backend)?;
        let (geometry, agent) = (geometry.clone(), self.name().clone());
        Ok(LayoutDescriptor::new(geometry, storage, agent, metadata, regions)?)
    }

    /// The descriptors that NIXL has for these registrations with a backend. A registration within
    /// a longer one has the descriptor of that one.
    fn entries_of(
        &self,
        registered: &[RegistrationRecord],
        (index, backend): (usize, &Backend),
    ) -> Option<Vec<Descriptor>> {
        let table = lock(self.registrations());
        let entry = |record: &RegistrationRecord| {
            let span = Descriptor::of(&record.span, backend.file_access).ok()?;
            // NIXL returns no key for a registration that has ended.
            Some(table.entry_of(&span, index).unwrap_or(span))
        };
        registered.iter().map(entry).collect()
    }

    /// Describes any memory that is registered with this agent, for example a view of a layout: its
    /// location, and the backends that accepted it.
    ///
    /// # Errors
    ///
    /// [`ExportError::NotRegistered`], [`ExportError::NotCovered`], [`ExportError::NotOurs`] for a
    /// peer's memory.
    pub fn describe_memory(&self, memory: &dyn Memory) -> Result<RegionDescriptor, ExportError> {
        let span = Span::of(memory);
        let not_ours = || ExportError::NotOurs { storage: span.kind };
        let record = self.registration_of(0, memory, &span)?;
        let access = |name: &BackendName| {
            self.created_backends().iter().find(|b| b.name == *name).map(|b| b.file_access)
        };
        let access = record.accepted().find_map(access).ok_or_else(not_ours)?;
        described(&span, access, &record).ok_or_else(not_ours)
    }

    /// The registration with this agent that covers `used`, which is a part of `memory`.
    fn registration_of(
        &self,
        region: u32,
        memory: &dyn Memory,
        used: &Span,
    ) -> Result<RegistrationRecord, ExportError> {
        if matches!(used.kind, terrane_core::StorageKind::Remote(_)) {
            return Err(ExportError::NotOurs { storage: used.kind });
        }
        let (mut found, mut covering) = (Vec::new(), None);
        memory.visit_registrations(&mut |record| {
            if record.agent == *self.name() && record.span.covers(used) && covering.is_none() {
                covering = Some(record.clone());
            }
            found.push(record.agent.clone());
        });
        let agent = self.name().clone();
        match covering {
            Some(record) => Ok(record),
            None if found.contains(&agent) => Err(ExportError::NotCovered { region, agent }),
            None => Err(ExportError::NotRegistered { region, agent, found }),
        }
    }

    /// Checks that NIXL has returned keys for all regions. For memory that is no longer registered,
    /// it returns neither a key nor an error. This occurs if an owner's record is out of date.
    fn check_own_keys(
        &self,
        regions: &[RegionDescriptor],
        backends: &[&Backend],
        keys: &[u8],
    ) -> Result<(), ExportError> {
        let registration_ended =
            |region| ExportError::RegistrationGone { region, agent: self.name().clone() };
        let keys = Metadata::parse(keys).map_err(|_| registration_ended(0))?;
        let mut missing = None;
        for backend in backends {
            match uncovered(regions, &backend.name, &keys.memory) {
                None => return Ok(()),
                Some(region) => missing = missing.max(Some(region)),
            }
        }
        Err(registration_ended(missing.unwrap_or_default()))
    }

    /// The connection data of this agent, for all of its backends that can be reached.
    pub(super) fn connection_metadata(&self) -> Result<Vec<u8>, nixl_sys::NixlError> {
        // NIXL returns it for an empty list, of any memory type.
        let nothing = RegDescList::new(nixl_sys::MemType::Dram)?;
        self.raw().get_local_partial_md(&nothing, None)
    }
}

/// A span of a registration, as peers see it.
fn described(
    span: &Span,
    access: FileAccess,
    record: &RegistrationRecord,
) -> Option<RegionDescriptor> {
    let place = Descriptor::of(span, access).ok()?;
    let (space, address) = (space_of(span, place.device)?, to_u64(place.address));
    Some(RegionDescriptor::new(space, address, span.length, record.accepted().cloned()))
}
