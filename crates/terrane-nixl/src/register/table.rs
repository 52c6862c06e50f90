//! The registered descriptors, each registered only once.
//!
//! The bindings deregister a descriptor with every backend at once, including backends that another
//! registration uses. NIXL compares descriptors by their numbers. With two registrations of one
//! span, the first drop would deregister the backends of the other. Therefore a descriptor of
//! several registrations is registered once, and deregistered when the last of them drops.
//!
//! NIXL finds the registration of a piece of memory in a list sorted by address. It looks only at
//! the last registration that begins at or before the piece. A short registration within a longer
//! one hides the bytes behind it. Therefore:
//!
//! - a span within a registered span uses that registration, and keeps it;
//! - a registration that would hide bytes is refused ([`Refusal::Overlap`]);
//! - requests keep each registration that NIXL could use for them, until they have ended.
//!
//! A registration is used for a further span only while a live registration covers the span. Other
//! bytes of it may have been freed, and may belong to other memory now. If NIXL could use it for
//! such bytes of a new registration, the new one is refused.
//!
//! For a registration with several backends, NIXL reports only that one of them accepted. The table
//! then queries each backend. NIXL answers such a query from any registration that covers the
//! descriptor. If an older one covers it, the table registers with each backend separately.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::descriptor::Descriptor;
use super::refusal::Refusal;
use crate::agent::backend::Backend;
use crate::agent::config::BackendRequirement;
use crate::agent::options::naming;
use crate::bindings::status::Status;

/// The registrations of an agent.
///
/// Its lock is taken before the bindings' lock, and never within it.
#[derive(Debug, Default)]
pub(crate) struct RegistrationTable {
    pub(super) entries: FxHashMap<Descriptor, Entry>,
    /// Changes whenever a backend gets or loses a descriptor.
    version: u64,
}

/// A descriptor that NIXL has.
#[derive(Debug, Default)]
pub(super) struct Entry {
    users: SmallVec<[User; 2]>,
    /// The number of transfers whose requests may use it.
    transfers: usize,
    /// The backends that have it, by their indices in the agent.
    backends: SmallVec<[usize; 2]>,
    /// The handles deregister when they drop. Each removes the descriptor from all backends that
    /// have it, so the others find none. There are several if backends were added one by one.
    pub(super) handles: SmallVec<[nixl_sys::RegistrationHandle; 1]>,
}

/// The registrations of one span with one backend that use an entry. The entry covers the span.
#[derive(Debug)]
struct User {
    span: Descriptor,
    backend: usize,
    count: usize,
}

/// One use of an entry, which keeps it registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryUse {
    entry: Descriptor,
    kind: UseKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UseKind {
    /// By a registration of this span with this backend.
    Registration {
        span: Descriptor,
        backend: usize,
    },
    Transfer,
}

/// A backend with which to register, and the outcome.
pub(super) struct BackendAttempt<'a> {
    /// Its index in the agent.
    pub(super) index: usize,
    pub(super) backend: &'a Backend,
    pub(super) requirement: BackendRequirement,
    /// The descriptor to register, which is registered later; or the refusal.
    pub(super) outcome: Result<Descriptor, Refusal>,
}

impl BackendAttempt<'_> {
    fn is_for(&self, descriptor: &Descriptor) -> bool {
        self.outcome.as_ref() == Ok(descriptor)
    }
}

impl EntryUse {
    /// Whether this is a transfer's use of `entry`.
    pub(super) fn is_of_transfer(&self, entry: &Descriptor) -> bool {
        self.kind == UseKind::Transfer && self.entry == *entry
    }
}

impl RegistrationTable {
    /// Registers a descriptor for one more user with the requested backends. A backend that has a
    /// registration for it is not called. Returns the uses, which are none if all backends refused.
    pub(super) fn hold(
        &mut self,
        agent: &nixl_sys::Agent,
        descriptor: &Descriptor,
        attempts: &mut [BackendAttempt<'_>],
    ) -> SmallVec<[EntryUse; 2]> {
        let mut uses: SmallVec<[EntryUse; 2]> = SmallVec::new();
        for attempt in attempts.iter_mut().filter(|attempt| attempt.is_for(descriptor)) {
            let backend = attempt.index;
            let known = self.entry_for(descriptor, backend);
            if let Some(registered) = self.overlap(descriptor, known.as_ref(), backend) {
                attempt.outcome = Err(Refusal::Overlap { requested: *descriptor, registered });
            } else if let Some(entry) = known {
                self.add_user(&entry, descriptor, backend, &mut uses);
            }
        }
        let needs_entry = |attempt: &BackendAttempt<'_>| {
            attempt.is_for(descriptor) && !has_backend(&uses, attempt.index)
        };
        if !attempts.iter().any(needs_entry) {
            return uses;
        }
        let is_covered = |attempt: &BackendAttempt<'_>| {
            needs_entry(attempt) && self.covers(descriptor, attempt.index)
        };
        let one_by_one = attempts.iter().any(is_covered);
        let entry = self.entries.entry(*descriptor).or_default();
        let group = if one_by_one { 1 } else { attempts.len().max(1) };
        for group in attempts.chunks_mut(group) {
            entry.register(agent, descriptor, group, &uses);
        }
        self.version += 1;
        for attempt in attempts.iter().filter(|attempt| attempt.is_for(descriptor)) {
            if !has_backend(&uses, attempt.index) {
                self.add_user(descriptor, descriptor, attempt.index, &mut uses);
            }
        }
        if self.entries.get(descriptor).is_some_and(Entry::is_unused) {
            self.entries.remove(descriptor);
        }
        uses
    }

    /// Removes one use. The last one deregisters under the table's lock: a handle must not
    /// deregister another thread's new registration. Returns the error if that failed.
    pub(super) fn release(&mut self, used: &EntryUse) -> Option<nixl_sys::NixlError> {
        let entry = self.entries.get_mut(&used.entry)?;
        match used.kind {
            UseKind::Transfer => entry.transfers = entry.transfers.saturating_sub(1),
            UseKind::Registration { span, backend } => {
                if let Some(user) = entry.user_mut(&span, backend) {
                    user.count = user.count.saturating_sub(1);
                }
                entry.users.retain(|user| user.count > 0);
            }
        }
        if !entry.is_unused() {
            return None;
        }
        self.version += 1;
        let handles = self.entries.remove(&used.entry).map(|entry| entry.handles);
        // The bindings drop NIXL's own status. They fail only if they could not call NIXL, for lack
        // of memory.
        let handles = handles.unwrap_or_default();
        handles.into_iter().filter_map(|mut handle| handle.deregister().err()).last()
    }

    /// Keeps an entry registered for a transfer. `None` if there is none.
    pub(super) fn hold_for_transfer(&mut self, entry: &Descriptor) -> Option<EntryUse> {
        self.entries.get_mut(entry)?.transfers += 1;
        Some(EntryUse { entry: *entry, kind: UseKind::Transfer })
    }

    /// Changes whenever a backend gets or loses a descriptor.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The entries of a backend that have any byte of the spans. NIXL uses no others for them.
    pub(crate) fn overlapping(&self, spans: &[Descriptor], backend: usize) -> Vec<Descriptor> {
        let of_backend = self.entries.iter().filter(|(_, entry)| entry.backends.contains(&backend));
        let overlapping =
            of_backend.filter(|(entry, _)| spans.iter().any(|span| entry.overlaps(span)));
        overlapping.map(|(entry, _)| *entry).collect()
    }

    /// Whether each entry of a backend that shares bytes with the span has one of these registered
    /// spans as a user. NIXL's result for the span is then valid as long as they are registered.
    pub(crate) fn has_only(&self, own: &[Descriptor], span: &Descriptor, backend: usize) -> bool {
        let mut entries = self.entries.iter();
        entries.all(|(other, entry)| {
            let is_own = |user: &User| user.backend == backend && own.contains(&user.span);
            !entry.backends.contains(&backend)
                || !other.overlaps(span)
                || entry.users.iter().any(is_own)
        })
    }

    /// The descriptor that NIXL has for a registered span with a backend.
    pub(crate) fn entry_of(&self, span: &Descriptor, backend: usize) -> Option<Descriptor> {
        let mut entries = self.entries.iter();
        let is_of = |user: &User| user.backend == backend && user.span == *span;
        entries.find(|(_, entry)| entry.users.iter().any(is_of)).map(|(entry, _)| *entry)
    }

    /// The entry that a further registration of a span with a backend uses: first that of its other
    /// registrations, so that they all keep the same one; then its own; then any that a live
    /// registration proves to be valid for it.
    fn entry_for(&self, span: &Descriptor, backend: usize) -> Option<Descriptor> {
        let has_live = |(descriptor, entry): &(&Descriptor, &Entry)| {
            descriptor.covers(span) && entry.backends.contains(&backend) && entry.is_valid_for(span)
        };
        self.entry_of(span, backend).or_else(|| {
            let own = self.entries.get_key_value(span).filter(has_live);
            own.or_else(|| self.entries.iter().find(has_live)).map(|(entry, _)| *entry)
        })
    }

    /// The registration due to which a span cannot be registered with a backend: NIXL would not find
    /// all bytes of one of the two, or could use the other one for bytes that it no longer has. The
    /// span is to use `known`, or a new entry of its own.
    fn overlap(
        &self,
        span: &Descriptor,
        known: Option<&Descriptor>,
        backend: usize,
    ) -> Option<Descriptor> {
        let mut of_backend =
            self.entries.iter().filter(|(_, entry)| entry.backends.contains(&backend));
        if let Some(known) = known {
            let hides = |other: &&Descriptor| *other != known && other.hides_bytes_of(span, known);
            return of_backend.map(|(other, _)| other).find(hides).copied();
        }
        if self.entries.get(span).is_some_and(|own| !own.is_valid_for(span)) {
            // NIXL cannot have it twice.
            return Some(*span);
        }
        of_backend.find_map(|(other, entry)| {
            let shared = other.shared_with(span)?;
            // For bytes of the span, NIXL uses no registration that begins before it.
            let is_invalid = other.address >= span.address && !entry.is_valid_for(&shared);
            if is_invalid || other.hides_bytes_of(span, span) {
                return Some(*other);
            }
            let is_hidden =
                |user: &&User| user.backend == backend && span.hides_bytes_of(&user.span, other);
            entry.users.iter().find(is_hidden).map(|user| user.span)
        })
    }

    fn add_user(
        &mut self,
        entry: &Descriptor,
        span: &Descriptor,
        backend: usize,
        uses: &mut SmallVec<[EntryUse; 2]>,
    ) {
        let Some(known) = self.entries.get_mut(entry) else { return };
        match known.user_mut(span, backend) {
            Some(user) => user.count += 1,
            None => known.users.push(User { span: *span, backend, count: 1 }),
        }
        let kind = UseKind::Registration { span: *span, backend };
        uses.push(EntryUse { entry: *entry, kind });
    }

    /// Whether a backend has a descriptor that covers this one.
    fn covers(&self, descriptor: &Descriptor, backend: usize) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|(other, entry)| other.covers(descriptor) && entry.backends.contains(&backend))
    }
}

/// Whether a registration has found an entry for a backend.
fn has_backend(uses: &[EntryUse], backend: usize) -> bool {
    uses.iter().any(|used| match used.kind {
        UseKind::Registration { backend: of, .. } => of == backend,
        UseKind::Transfer => false,
    })
}

impl Entry {
    fn is_unused(&self) -> bool {
        self.users.is_empty() && self.transfers == 0
    }

    /// Whether a live registration proves that these bytes are still the registered ones.
    fn is_valid_for(&self, bytes: &Descriptor) -> bool {
        self.users.iter().any(|user| user.span.covers(bytes))
    }

    fn user_mut(&mut self, span: &Descriptor, backend: usize) -> Option<&mut User> {
        self.users.iter_mut().find(|user| user.span == *span && user.backend == backend)
    }

    /// Registers a descriptor with those backends of a group that need it and have no use of
    /// another. In a group of several, none may have a descriptor that covers it. Records refusals.
    fn register(
        &mut self,
        agent: &nixl_sys::Agent,
        descriptor: &Descriptor,
        group: &mut [BackendAttempt<'_>],
        uses: &[EntryUse],
    ) {
        let is_missing = |attempt: &&mut BackendAttempt<'_>| {
            attempt.is_for(descriptor) && !has_backend(uses, attempt.index)
        };
        let mut missing: SmallVec<[&mut BackendAttempt<'_>; 2]> =
            group.iter_mut().filter(is_missing).collect();
        let register =
            |options: &nixl_sys::OptArgs| agent.register_memory(descriptor, Some(options));
        let registered = match missing.as_slice() {
            [] => return,
            [alone] => register(alone.backend.options()),
            several => naming(several.iter().map(|attempt| &attempt.backend.raw))
                .and_then(|options| register(&options)),
        };
        let is_alone = missing.len() == 1;
        for attempt in &mut missing {
            let refused = match &registered {
                Err(error) => Some(Status::of(error)),
                Ok(_) if is_alone || is_registered(agent, descriptor, attempt.backend) => None,
                Ok(_) => Some(Status::Backend),
            };
            match refused {
                Some(status) => attempt.outcome = Err(Refusal::Status(status)),
                None => self.backends.push(attempt.index),
            }
        }
        // Kept even if no backend accepted: its drop removes the descriptor from every backend.
        if let Ok(handle) = registered {
            self.handles.push(handle);
        }
    }
}

/// Whether NIXL reports that a backend has a descriptor that covers this one.
pub(super) fn is_registered(
    agent: &nixl_sys::Agent,
    descriptor: &Descriptor,
    backend: &Backend,
) -> bool {
    let Ok(mut list) = nixl_sys::XferDescList::new(descriptor.memory.into_raw()) else {
        return false;
    };
    list.add_desc(descriptor.address, descriptor.length, descriptor.device);
    // Prepared for the agent itself, which has an empty name. Released at once, while the agent
    // lives.
    agent.prepare_xfer_dlist("", &list, Some(backend.options())).is_ok()
}
