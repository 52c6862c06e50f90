//! Registration with the real library. The tests query the library's own records.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Capability, CapabilityStatus, Limits, Memory,
    Region, RegionRequest, Register, RegisterError, Span, StorageKind, delegate_memory,
};
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, LayoutPlan,
};
use terrane_storage::{DiskAllocator, DiskFile, DiskOptions};
use terrane_testkit::conformance::registrar::Probe;
use terrane_testkit::conformance::{RegistrarFixture, check_registrar};
use terrane_testkit::memory::{HeapAllocator, HeapMemory};
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_testkit::permutations;
use terrane_transfer::Endpoint;

use super::descriptor::Descriptor;
use super::refusal::Refusal;
use crate::agent::Agent;
use crate::agent::builder::AgentBuilder;
use crate::agent::config::{BackendConfig, BackendRequirement, FileAccess};

fn backend(name: &str) -> BackendConfig {
    match name {
        // POSIX allocates its I/Os beforehand, which is slow for the default number.
        "POSIX" => BackendConfig::new(name).parameter("ios_pool_size", "64"),
        _ => BackendConfig::new(name),
    }
}

fn agent(backends: &[&str]) -> Agent {
    let builder = AgentBuilder::unnamed().progress_thread(None);
    let add = |builder: AgentBuilder, name: &&str| builder.backend(backend(name));
    backends.iter().fold(builder, add).build().unwrap()
}

/// Queries NIXL. The probe keeps NIXL's agent alive, but not Terrane's. So registrations that end
/// with Terrane's agent were deregistered one by one.
fn probe(agent: &Agent) -> Probe {
    let raw = agent.raw().clone();
    let backends: Vec<_> = agent
        .created_backends()
        .iter()
        .map(|b| (b.name.clone(), b.memory.clone(), b.file_access))
        .collect();
    Arc::new(move |span: &Span| {
        let answers = backends.iter().filter_map(|(name, memory, access)| {
            let descriptor = Descriptor::of(span, *access).unwrap();
            memory.contains(&descriptor.memory).then(|| has(&raw, name.as_str(), &descriptor))
        });
        let answers: Vec<_> = answers.collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "backends disagree");
        answers[0]
    })
}

fn has(raw: &nixl_sys::Agent, backend: &str, descriptor: &Descriptor) -> bool {
    let mut options = nixl_sys::OptArgs::new().unwrap();
    options.add_backend(&raw.get_backend(backend).unwrap()).unwrap();
    let mut list = nixl_sys::XferDescList::new(descriptor.memory.into_raw()).unwrap();
    list.add_desc(descriptor.address, descriptor.length, descriptor.device);
    raw.prepare_xfer_dlist("", &list, Some(&options)).is_ok()
}

struct Host(&'static [&'static str]);

impl RegistrarFixture for Host {
    type Registrar = Agent;
    type Memory = HeapMemory;

    fn registrar(&self) -> Agent {
        agent(self.0)
    }

    fn memory(&self, _: &Agent) -> HeapMemory {
        HeapAllocator::system().allocate(&RegionRequest::new(ByteCount::kib(8))).unwrap()
    }

    fn foreign(&self) -> Option<Region> {
        // UCX accepts device memory.
        (!self.0.contains(&"UCX")).then(device_memory)
    }

    fn probe(&self, agent: &Agent) -> Probe {
        probe(agent)
    }
}

fn device_memory() -> Region {
    let request = RegionRequest::new(ByteCount::kib(8));
    Region::new(HeapAllocator::simulated_device(0).allocate(&request).unwrap())
}

#[test]
fn agents_with_one_backend_conform() {
    check_registrar(&Host(&["UCX"]));
    check_registrar(&Host(&["POSIX"]));
}

#[test]
fn agents_with_several_backends_conform() {
    check_registrar(&Host(&["UCX", "POSIX"]));
}

struct Files(DiskAllocator, FileAccess);

impl RegistrarFixture for Files {
    type Registrar = Agent;
    type Memory = DiskFile;

    fn registrar(&self) -> Agent {
        let posix = backend("POSIX").file_access(self.1);
        AgentBuilder::unnamed().backend(backend("UCX")).backend(posix).build().unwrap()
    }

    fn memory(&self, _: &Agent) -> DiskFile {
        self.0.allocate(&RegionRequest::new(ByteCount::kib(8))).unwrap()
    }

    fn foreign(&self) -> Option<Region> {
        None
    }

    fn probe(&self, agent: &Agent) -> Probe {
        probe(agent)
    }
}

fn files(directory: &tempfile::TempDir) -> DiskAllocator {
    DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap()
}

#[test]
fn files_conform() {
    let directory = tempfile::tempdir().unwrap();
    check_registrar(&Files(files(&directory), FileAccess::Buffered));
}

#[test]
fn files_conform_by_their_direct_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    if files.capabilities().status(&Capability::DirectIo) == Some(&CapabilityStatus::Granted) {
        check_registrar(&Files(files, FileAccess::Direct));
    } else {
        let report = files.capabilities();
        eprintln!("skipped: files_conform_by_their_direct_descriptor: {report}");
    }
}

/// 5 blocks of 3 layers of K and V.
fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(5)
        .num_layers(3)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

/// Memory that records at its release whether NIXL still has it. It is host memory, or a file. The
/// descriptors of a file are closed then, and their numbers belong to other files.
struct Witness {
    memory: Region,
    probe: Probe,
    released: Released,
}

/// For each released witness, whether NIXL still had it.
type Released = Arc<Mutex<Vec<bool>>>;

impl Drop for Witness {
    fn drop(&mut self) {
        let registered = (self.probe)(&Span::of(&self.memory));
        self.released.lock().unwrap().push(registered);
    }
}

impl std::fmt::Debug for Witness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Witness").field(&self.memory).finish()
    }
}

// SAFETY: every result is that of the memory, which is neither moved nor dropped before `self`.
unsafe impl Memory for Witness {
    delegate_memory!(self, self.memory);
}

/// The source of the witnesses' memory.
type Source<'a> = &'a (dyn Fn(&RegionRequest) -> Region + Sync);

fn host(request: &RegionRequest) -> Region {
    Region::new(HeapAllocator::system().allocate(request).unwrap())
}

/// A value that a user may drop, in any order.
type Droppable = Box<dyn Send>;

/// The agent, and every value that can own registered memory: that of two witnesses, which has no
/// other owner.
fn droppables(agent: Agent, source: Source<'_>, released: &Released) -> Vec<Droppable> {
    let probe = probe(&agent);
    let witness = |bytes| {
        let memory = source(&RegionRequest::new(bytes).aligned_to(Alignment::PAGE));
        Witness { memory, probe: Arc::clone(&probe), released: Arc::clone(released) }
    };
    let plan = LayoutPlan::new(&config(), LayoutKind::FullyContiguous, Limits::NONE).unwrap();
    let adopted = LayoutBuilder::new(config())
        .fully_contiguous()
        .adopt_memory([witness(plan.base_bytes())])
        .register(&agent)
        .build()
        .unwrap();
    let view = adopted.regions()[0].clone();
    let endpoint = Endpoint::new(adopted).unwrap();
    let twice = Region::new(witness(ByteCount::kib(8)));
    let first = agent.register(twice.clone()).unwrap();
    let registrar = agent.registrar([("POSIX", BackendRequirement::Required)]).unwrap();
    let second = Region::new(registrar.register(twice).unwrap());
    assert!([&view, &second].iter().all(|region| probe(&region.span())));
    vec![
        Box::new((agent, registrar)),
        Box::new(view),
        Box::new(endpoint),
        Box::new(first),
        Box::new(second),
    ]
}

fn drop_in_order(mut droppables: Vec<Option<Droppable>>, order: &[usize], elsewhere: bool) {
    for place in order {
        let thing = droppables[*place].take().unwrap();
        if elsewhere {
            std::thread::scope(|scope| {
                scope.spawn(move || drop(thing));
            });
        } else {
            drop(thing);
        }
    }
}

/// Drops in every order, half of them on other threads. Several orders run at a time, because POSIX
/// waits for the kernel when it ends.
fn check_orders(backends: &[&str], source: Source<'_>) {
    permutations::for_each(5, |number, order| {
        let released = Released::default();
        let agent = agent(backends);
        let name = agent.name().clone();
        let droppables = droppables(agent, source, &released).into_iter().map(Some).collect();
        drop_in_order(droppables, order, number % 2 == 1);
        let seen = released.lock().unwrap().clone();
        assert_eq!(seen, [false, false], "in the order {order:?}, NIXL had released memory");
        // The name is free once the last value has dropped.
        drop(AgentBuilder::new(name).build().unwrap());
    });
}

#[test]
fn memory_is_deregistered_before_its_release_in_every_order_of_drops() {
    check_orders(&["POSIX"], &host);
}

#[test]
fn the_order_of_drops_does_not_matter_to_ucx() {
    check_orders(&["UCX", "POSIX"], &host);
}

#[test]
fn files_are_deregistered_before_they_are_closed_in_every_order_of_drops() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    check_orders(&["POSIX"], &|request| Region::new(files.allocate(request).unwrap()));
}

#[test]
fn two_backends_are_registered_together_and_deregistered_together() {
    let agent = agent(&["UCX", "POSIX"]);
    let memory = Host(&[]).memory(&agent);
    let registered = agent.register(memory).unwrap();
    assert_eq!(registered.record().accepted().count(), 2);
    assert_eq!(handles(&agent), [1]);
    // A second registration of the same span calls no backend.
    let again = agent.register(Region::new(registered)).unwrap();
    assert_eq!(again.record().accepted().count(), 2);
    assert_eq!(handles(&agent), [1]);
    // Nor does that of a part.
    let whole = Region::new(again);
    let part = whole.view(ByteCount::ZERO, ByteCount::kib(4)).unwrap();
    let part = agent.register(part).unwrap();
    assert_eq!(part.record().accepted().count(), 2);
    assert_eq!(handles(&agent), [1]);
    drop((whole, part));
    assert!(handles(&agent).is_empty());
}

#[test]
fn a_backend_that_joins_later_registers_alone() {
    let agent = agent(&["UCX", "POSIX"]);
    let is_registered = probe(&agent);
    let [ucx, posix] = ["UCX", "POSIX"]
        .map(|name| agent.registrar([(name, BackendRequirement::IfSupported)]).unwrap());
    let memory = Region::new(Host(&[]).memory(&agent));
    let first = ucx.register(memory.clone()).unwrap();
    let accepted: Vec<_> = first.record().accepted().cloned().collect();
    assert_eq!(accepted, ["UCX".into()]);
    let second = posix.register(memory.clone()).unwrap();
    assert!(is_registered(&memory.span()));
    drop(first);
    assert!(is_registered(&memory.span()), "one registration ended the other");
    drop(second);
    assert!(!is_registered(&memory.span()));
}

fn descriptor(memory: &Region) -> Descriptor {
    Descriptor::of(&memory.span(), FileAccess::Buffered).unwrap()
}

/// The two ranges of a registration that NIXL's lookup does not permit.
#[track_caller]
fn refused(agent: &Agent, memory: &Region) -> [Descriptor; 2] {
    let failed = agent.register(memory.clone()).unwrap_err();
    let RegisterError::Refused { backends, .. } = &failed.cause else { panic!("{}", failed.cause) };
    let refusals: Vec<Refusal> = backends
        .iter()
        .map(|outcome| *outcome.refusal.as_ref().unwrap().downcast_ref().unwrap())
        .collect();
    let Refusal::Overlap { requested, registered } = refusals[0] else { panic!("{refusals:?}") };
    assert!(refusals.iter().all(|refusal| *refusal == refusals[0]), "{refusals:?}");
    let message = failed.cause.to_string();
    assert!([requested, registered].iter().all(|d| message.contains(&d.to_string())), "{message}");
    [requested, registered]
}

#[test]
fn a_part_uses_the_registration_of_the_whole() {
    let agent = agent(&["UCX", "POSIX"]);
    let is_registered = probe(&agent);
    let slab = host(&RegionRequest::new(ByteCount::kib(256)));
    let inner = slab.view(ByteCount::kib(64), ByteCount::kib(4)).unwrap();
    let behind = slab.view(ByteCount::kib(128), ByteCount::kib(4)).unwrap();
    let whole = agent.register(slab.clone()).unwrap();
    let part = agent.register(inner.clone()).unwrap();
    assert_eq!(handles(&agent), [1]);
    assert!(is_registered(&behind.span()), "the part hides the bytes behind it");
    drop(whole);
    assert!(is_registered(&part.record().span));

    // The rest may belong to other memory by now, so it is not used for further registrations.
    assert_eq!(refused(&agent, &slab), [descriptor(&slab); 2]);
    let first = slab.view(ByteCount::ZERO, ByteCount::kib(4)).unwrap();
    assert_eq!(refused(&agent, &first), [descriptor(&first), descriptor(&slab)]);
    let registered = agent.register(behind).unwrap();
    // NIXL could not report which backend accepted, so each was called separately.
    assert_eq!(handles(&agent), [1, 2]);
    let before = slab.view(ByteCount::kib(32), ByteCount::kib(4)).unwrap();
    assert_eq!(refused(&agent, &before), [descriptor(&before), descriptor(&inner)]);
    drop(part);
    assert_eq!(handles(&agent), [2]);
    drop((agent.register(before).unwrap(), registered));
    assert!(handles(&agent).is_empty());
}

#[test]
fn a_whole_around_a_registered_part_is_refused() {
    let agent = agent(&["UCX", "POSIX"]);
    let slab = host(&RegionRequest::new(ByteCount::kib(256)));
    let inner = slab.view(ByteCount::kib(64), ByteCount::kib(4)).unwrap();
    let part = agent.register(inner.clone()).unwrap();
    assert_eq!(refused(&agent, &slab), [descriptor(&slab), descriptor(&inner)]);
    drop(part);
    drop(agent.register(slab).unwrap());
    assert!(handles(&agent).is_empty());
}

/// A step of the next test: registers units of the memory, or drops a registration.
#[derive(Clone, Debug)]
enum Step {
    Register { start: u32, units: u32 },
    Drop(prop::sample::Index),
}

/// Whatever else is registered and dropped.
#[test]
fn nixl_finds_all_bytes_of_every_registration() {
    const UNITS: u32 = 6;
    let agent = agent(&["UCX", "POSIX"]);
    let is_registered = probe(&agent);
    let slab = host(&RegionRequest::new(ByteCount::kib(UNITS)));
    let view = |start, units| slab.view(ByteCount::kib(start), ByteCount::kib(units)).unwrap();
    let register = (0..UNITS, 1..=UNITS)
        .prop_map(|(start, units)| Step::Register { start, units: units.min(UNITS - start) });
    let step = prop_oneof![3 => register, 2 => any::<prop::sample::Index>().prop_map(Step::Drop)];
    let steps = prop::collection::vec(step, 1..24);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let run = runner.run(&steps, |steps| {
        let mut live = Vec::new();
        for step in steps {
            match step {
                Step::Drop(index) if !live.is_empty() => {
                    drop(live.swap_remove(index.index(live.len())));
                }
                Step::Drop(_) => {}
                Step::Register { start, units } => match agent.register(view(start, units)) {
                    Ok(registered) => live.push((registered, start, units)),
                    Err(_) => drop(refused(&agent, &view(start, units))),
                },
            }
            for (_, start, units) in &live {
                for first in *start..start + units {
                    for last in first..start + units {
                        let piece = view(first, last + 1 - first);
                        prop_assert!(is_registered(&piece.span()), "{first} to {last}");
                    }
                }
            }
        }
        drop(live);
        prop_assert!(handles(&agent).is_empty());
        Ok(())
    });
    run.unwrap();
}

/// The number of handles of each descriptor, in ascending order.
fn handles(agent: &Agent) -> Vec<usize> {
    let table = agent.registrations().lock().unwrap();
    let mut counts: Vec<usize> = table.entries.values().map(|entry| entry.handles.len()).collect();
    counts.sort_unstable();
    counts
}

/// Returns the same region for every request.
struct OnePart(Region);

// SAFETY: the tests place one layout in it.
unsafe impl Allocate for OnePart {
    type Memory = Region;

    fn kind(&self) -> StorageKind {
        self.0.kind()
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, _: &RegionRequest) -> Result<Region, AllocateError> {
        Ok(self.0.clone())
    }
}

#[test]
fn a_layout_in_a_file_reaches_the_bytes_at_its_offsets() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent(&["POSIX"]);
    let request = RegionRequest::new(ByteCount::kib(256));
    let file = Region::new(files(&directory).allocate(&request).unwrap());
    // The layout begins 64 KiB into the file.
    let part = OnePart(file.view(ByteCount::kib(64), ByteCount::kib(128)).unwrap());
    let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
    let layout = builder.allocate(&part).register(&agent).build().unwrap();
    let registrations = layout.registrations();
    assert_eq!(registrations.len(), 1, "one base registration: {registrations:?}");
    let record = &registrations[0].record;
    assert_eq!((registrations[0].first_region, registrations[0].last_region), (0, 2));
    assert_eq!(record.span.location.as_file().unwrap().offset, ByteCount::kib(64));
    for region in layout.regions() {
        assert!(record.span.covers(&region.span()), "{region:?}");
    }

    // NIXL writes a piece to the file position that the layout returns.
    let piece = layout.span(3, 1, 1).unwrap();
    let source = agent.register(Host(&[]).memory(&agent)).unwrap();
    let from = Span { length: piece.length, ..Span::of(&source) };
    let length = piece.length.to_usize();
    let written = vec![0xA5; length];
    // SAFETY: the memory is alive and no other code uses it.
    unsafe { InProcess.write(from.location, &written) }.unwrap();
    write_with_nixl(&agent, &from, &piece);
    let offset = piece.location.as_file().unwrap().offset.get();
    let mut bytes = vec![0; file.length().to_usize()];
    // SAFETY: the file is open and no other code writes to it.
    unsafe { InProcess.read(file.location(), &mut bytes) }.unwrap();
    let offset = usize::try_from(offset).unwrap();
    let inside = offset..offset + length;
    for (at, byte) in bytes.iter().enumerate() {
        let expected = if inside.contains(&at) { 0xA5 } else { 0 };
        assert_eq!(*byte, expected, "byte {at} of the file; the piece is {inside:?}");
    }
}

/// Writes one span to another span of the same agent, and waits.
fn write_with_nixl(agent: &Agent, from: &Span, to: &Span) {
    let list = |span| {
        let descriptor = Descriptor::of(span, FileAccess::Buffered).unwrap();
        let mut list = nixl_sys::XferDescList::new(descriptor.memory.into_raw()).unwrap();
        list.add_desc(descriptor.address, descriptor.length, descriptor.device);
        list
    };
    let (raw, name) = (agent.raw(), agent.name().as_str());
    let request =
        raw.create_xfer_req(nixl_sys::XferOp::Write, &list(from), &list(to), name, None).unwrap();
    let mut in_progress = raw.post_xfer_req(&request, None).unwrap();
    while in_progress {
        std::thread::yield_now();
        in_progress = !raw.get_xfer_status(&request).unwrap().is_success();
    }
}
