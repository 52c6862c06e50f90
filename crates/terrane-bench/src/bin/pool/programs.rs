//! The replayed sequences of allocations.

use terrane_bench::recorded;
use terrane_bench::replay::{Program, RandomRules, ReplayError, ServingRules};
use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_pool::SizeClasses;
use terrane_pool::adaptors::{TraceAction, TraceEvent, TraceTime};
use terrane_testkit::random::Seeded;

/// A KV block: 16 tokens, latent attention of 576 values of two bytes, and 8 layers.
const KV_BLOCK: ByteCount = ByteCount::kib(144);

/// Slabs of 64 such blocks: 9 MiB.
pub const KV_SLABS: SizeClasses = SizeClasses::ExactSlab { stride: KV_BLOCK, count: 64 };

/// All programs except [`kv_blocks`], with their names.
pub fn of_mixed_sizes() -> Result<Vec<(String, Program)>, ReplayError> {
    let random = [1, 4, 64].map(|mib| {
        // RMM's rules with N = 10,000.
        let rules = RandomRules {
            steps: 20_000,
            allocations: 10_000,
            largest: ByteCount::mib(mib),
            seed: u64::from(mib),
            ..RandomRules::default()
        };
        (format!("random to {mib} MiB"), Program::random(&rules))
    });
    let mut programs = Vec::from(random);
    programs.push(("mooncake".to_owned(), mooncake()?));
    programs.push(("recorded serving".to_owned(), recorded::serving()?));
    programs.push(("serving".to_owned(), Program::serving(&ServingRules::default())));
    Ok(programs)
}

/// Returns a size of Mooncake's allocator benchmark: 70 % of 4 KiB, 20 % of 256 KiB, 10 % of 3.12
/// MiB.
pub fn mooncake_size(random: &mut Seeded) -> u64 {
    match random.below(10) {
        0..7 => 4 << 10,
        7..9 => 256 << 10,
        _ => (312 << 20) / 100,
    }
}

/// Mooncake's mixed sizes: allocations until 1 GiB is live. Then random blocks are freed before
/// each allocation that would exceed 1 GiB.
fn mooncake() -> Result<Program, ReplayError> {
    let mut random = Seeded::new(7);
    let mut trace = Trace::default();
    let (mut live, mut live_bytes) = (Vec::new(), 0);
    for _ in 0..20_000 {
        let bytes = mooncake_size(&mut random);
        while live_bytes + bytes > 1 << 30 {
            let (block, bytes) = live.swap_remove(random.below(live.len()));
            live_bytes -= bytes;
            trace.free(block);
        }
        live_bytes += bytes;
        live.push((trace.allocate(bytes), bytes));
    }
    Program::from_events(trace.0.into_iter().map(Ok))
}

/// Requests that allocate KV blocks as they grow and free all of them at their end, with at most 16
/// GiB live.
pub fn kv_blocks() -> Result<Program, ReplayError> {
    let most = (16 << 30) / KV_BLOCK.get();
    let mut random = Seeded::new(11);
    let mut trace = Trace::default();
    let mut live = 0;
    let mut running: Vec<Vec<u64>> = Vec::new();
    for _ in 0..4_000 {
        let wanted = 1 + random.next_u64() % 512;
        while live + wanted > most {
            let ended = running.swap_remove(random.below(running.len()));
            live -= to_u64(ended.len());
            ended.into_iter().for_each(|block| trace.free(block));
        }
        live += wanted;
        running.push((0..wanted).map(|_| trace.allocate(KV_BLOCK.get())).collect());
    }
    Program::from_events(trace.0.into_iter().map(Ok))
}

/// The events that a tracing adaptor would record.
#[derive(Default)]
struct Trace(Vec<TraceEvent>);

impl Trace {
    fn allocate(&mut self, bytes: u64) -> u64 {
        let pointer = to_u64(self.0.len()) + 1;
        self.push(TraceAction::Allocate, pointer, bytes);
        pointer
    }

    fn free(&mut self, pointer: u64) {
        let allocated = ByteCount::new(pointer - 1).to_usize();
        let bytes = self.0.get(allocated).map_or(0, |event| event.size.get());
        self.push(TraceAction::Free, pointer, bytes);
    }

    fn push(&mut self, action: TraceAction, pointer: u64, bytes: u64) {
        let size = ByteCount::new(bytes);
        let time = TraceTime::default();
        self.0.push(TraceEvent { thread: 0, time, action, pointer, size, stream: 0 });
    }
}
