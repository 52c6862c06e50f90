//! Measures the rate of the copy kernels, beside the driver's contiguous copy of the same number of
//! bytes.
//!
//! `cargo run --release -p terrane-cuda --example kernel_rates -- [MiB] [rounds]`
//!
//! Medians of alternating runs, in GB/s of bytes copied, by the device's clock.

#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use std::error::Error;
use std::ptr::NonNull;

use terrane_core::{Allocate, ByteCount, DeviceId, HostAddress, Location, Memory, RegionRequest};
use terrane_cuda::{
    BlockIds, Context, DeviceAllocator, DeviceMemory, Event, GridLaunch, Kernels, LaunchEnd,
    PinnedAllocator, PinnedMemory, PinnedOptions, Stream, Timing,
};

type Failure = Box<dyn Error>;

/// Layers, outers, and the bytes of a piece.
const PIECES: [(u32, u32, u64); 6] = [
    (92, 2, 2 << 10),
    (94, 2, 4 << 10),
    (80, 2, 8 << 10),
    (61, 1, 18 << 10),
    (32, 2, 32 << 10),
    (32, 2, 128 << 10),
];

/// Tokens and heads of a block of 32 layers. The copy swaps these two axes.
const TOKENS: u32 = 16;
const HEADS: u32 = 8;

fn main() -> Result<(), Failure> {
    let mut numbers = std::env::args().skip(1).map_while(|argument| argument.parse().ok());
    let bytes = ByteCount::mib(numbers.next().unwrap_or(512));
    let rounds = usize::try_from(numbers.next().unwrap_or(11))?;
    terrane_cuda::probe().map_err(|reason| format!("nothing to measure: {reason}"))?;
    let rates = Rates::new(bytes, rounds)?;
    for figures in rates.kernels.figures()? {
        println!("{figures:?}");
    }
    let (device, pinned) = (rates.device[0].address().get(), rates.alias);
    let packed = rates.device[1].address().get();
    let everywhere = 2 * rates.context.device().multiprocessors;

    let on_device = rates.contiguous(rates.device[0].location(), rates.device[1].location())?;
    let out = rates.contiguous(rates.device[0].location(), rates.pinned.location())?;
    let back = rates.contiguous(rates.pinned.location(), rates.device[0].location())?;
    println!(
        "contiguous: {on_device:.0} on the device, {out:.1} to pinned memory, {back:.1} from it"
    );
    for piece in PIECES {
        let (layers, outers, length) = piece;
        let ids = rates.scattered(u64::from(layers) * u64::from(outers) * length)?;
        let grid = rates.relayout(piece, &ids, device, packed);
        let (all, few) = (rates.kernel(&grid, everywhere)?, rates.kernel(&grid, 24)?);
        let grid = rates.relayout(piece, &ids, device, pinned);
        let direct = rates.kernel(&grid, 32)?;
        let grid = GridLaunch { source: grid.destination, destination: grid.source, ..grid };
        let from_pinned = rates.kernel(&grid, 32)?;
        println!(
            "{length:>7} bytes: {all:.0} ({:.3}) on the device, {few:.0} by 24 blocks; by 32, \
             {direct:.1} ({:.3}) to pinned memory, {from_pinned:.1} ({:.3}) from it",
            all / on_device,
            direct / out,
            from_pinned / back
        );
    }
    for length in [64, 128, 256] {
        let there = rates.transposition(length, device, packed);
        let again = GridLaunch { source: there.destination, destination: there.source, ..there };
        let (there, again) = (rates.kernel(&there, everywhere)?, rates.kernel(&again, everywhere)?);
        println!(
            "{length:>7} bytes: {there:.0} ({:.3}) token-major to head-major, {again:.0} ({:.3}) back",
            there / on_device,
            again / on_device
        );
    }
    Ok(())
}

/// Memory at both ends, the stream and the events of the measurement.
struct Rates {
    context: Context,
    kernels: Kernels,
    stream: Stream,
    events: [Event; 2],
    device: [DeviceMemory; 2],
    pinned: PinnedMemory,
    /// The device's addresses of the pinned memory.
    alias: u64,
    bytes: ByteCount,
    rounds: usize,
}

impl Rates {
    fn new(bytes: ByteCount, rounds: usize) -> Result<Self, Failure> {
        let context = Context::primary(DeviceId::new(0))?;
        let device = DeviceAllocator::new(&context);
        let request = RegionRequest::new(bytes);
        let pinned =
            PinnedAllocator::new(&context, PinnedOptions::default())?.allocate(&request)?;
        let alias = pinned.device_alias().ok_or("the device cannot reach pinned memory")?.get();
        Ok(Self {
            kernels: Kernels::load(&context)?,
            stream: Stream::new(&context)?,
            events: [Event::new(&context, Timing::On)?, Event::new(&context, Timing::On)?],
            device: [device.allocate(&request)?, device.allocate(&request)?],
            pinned,
            alias,
            bytes,
            rounds: rounds.max(1),
            context,
        })
    }

    /// The median rate of `copy`, which moves this many bytes.
    fn rate(
        &self,
        bytes: ByteCount,
        submit: impl Fn() -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let [before, after] = &self.events;
        let mut times = Vec::new();
        // The first round is a warm-up.
        for _ in 0..=self.rounds {
            before.record(&self.stream)?;
            submit()?;
            after.record(&self.stream)?;
            after.wait()?;
            times.push(after.elapsed_since(before)?);
        }
        times.remove(0);
        times.sort_unstable();
        let median = times.get(times.len() / 2).ok_or("no rounds")?;
        Ok(bytes.get() as f64 / median.as_secs_f64() / 1e9)
    }

    fn contiguous(&self, from: Location, to: Location) -> Result<f64, Failure> {
        self.rate(self.bytes, || {
            // SAFETY: both spans have this many bytes, live until the event completes, and are not
            // used otherwise.
            Ok(unsafe { self.stream.copy(from, to, self.bytes) }?)
        })
    }

    fn kernel(&self, grid: &GridLaunch, thread_blocks: u32) -> Result<f64, Failure> {
        let counts = [grid.pairs, grid.layers, grid.outers, grid.rows, grid.columns];
        let cells: u64 = counts.into_iter().map(u64::from).product();
        self.rate(ByteCount::new(cells * grid.bytes), || {
            // SAFETY: the cells are within the memory of both ends. That memory lives until the
            // event completes, and is not used otherwise.
            Ok(unsafe { self.kernels.copy(&self.stream, grid, thread_blocks) }?)
        })
    }

    /// The scattered ids of the blocks of this length, in device memory.
    fn scattered(&self, block: u64) -> Result<DeviceMemory, Failure> {
        let count = u32::try_from(self.bytes.get() / block)?;
        // A stride through all block ids. It visits each id once, unless the stride divides their
        // number.
        let step = if count % 97 == 0 { 1 } else { 97 };
        let ids: Vec<u32> = (0..u64::from(count))
            .map(|pair| u32::try_from(pair * step % u64::from(count)))
            .collect::<Result<_, _>>()?;
        let length = ByteCount::from_usize(size_of_val(ids.as_slice()));
        let memory = DeviceAllocator::new(&self.context).allocate(&RegionRequest::new(length))?;
        let from = HostAddress::new(NonNull::from(ids.as_slice()).cast::<u8>());
        // SAFETY: both have this many bytes, and live until the stream has been synchronised.
        unsafe { self.stream.copy(Location::Host(from), memory.location(), length) }?;
        self.stream.synchronize()?;
        Ok(memory)
    }

    /// Copies scattered blocks of a layer-separate layout to contiguous blocks.
    fn relayout(
        &self,
        (layers, outers, bytes): (u32, u32, u64),
        ids: &DeviceMemory,
        from: u64,
        to: u64,
    ) -> GridLaunch {
        let block = u64::from(layers) * u64::from(outers) * bytes;
        let pairs = u32::try_from(self.bytes.get() / block).unwrap_or(0);
        let of_layer = u64::from(outers) * bytes;
        let mut grid = GridLaunch { pairs, layers, outers, bytes, ..GridLaunch::default() };
        grid.source = LaunchEnd {
            base: from,
            block_ids: BlockIds::Listed,
            blocks: ids.address().get(),
            block_stride: of_layer,
            layer_stride: u64::from(pairs) * of_layer,
            outer_stride: bytes,
            ..LaunchEnd::default()
        };
        grid.destination = LaunchEnd {
            base: to,
            block_stride: block,
            layer_stride: of_layer,
            outer_stride: bytes,
            ..LaunchEnd::default()
        };
        grid
    }

    /// Copies token-major blocks to head-major blocks.
    fn transposition(&self, bytes: u64, from: u64, to: u64) -> GridLaunch {
        let piece = u64::from(TOKENS) * u64::from(HEADS) * bytes;
        let (layers, outers) = (32, 2);
        let layer = u64::from(outers) * piece;
        let block = u64::from(layers) * layer;
        let pairs = u32::try_from(self.bytes.get() / block).unwrap_or(0);
        let end = |base, row_stride, column_stride| LaunchEnd {
            base,
            block_stride: block,
            layer_stride: layer,
            outer_stride: piece,
            row_stride,
            column_stride,
            ..LaunchEnd::default()
        };
        GridLaunch {
            pairs,
            layers,
            outers,
            rows: TOKENS,
            columns: HEADS,
            bytes,
            source: end(from, u64::from(HEADS) * bytes, bytes),
            destination: end(to, bytes, u64::from(TOKENS) * bytes),
            ..GridLaunch::default()
        }
    }
}
