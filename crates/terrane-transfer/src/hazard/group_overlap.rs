//! Cache groups that share memory: the proof that only blocks of equal number share bytes.

use smallvec::SmallVec;
use terrane_core::convert::to_u64;
use terrane_core::{AddressSpace, Alignment, Memory, Span};
use terrane_layout::{Axis, PhysicalLayout, RegionOffset, Section};

/// The maximum number of windows of one group, so that comparing two groups takes milliseconds.
const MAX_WINDOWS: u64 = 1024;

/// Layouts that cannot be endpoints of one set, and the reason.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct GroupsRefused {
    /// The layouts, as they were given.
    pub layouts: Vec<PhysicalLayout>,
    /// The reason. Groups are counted from 0, in the order in which they were given.
    pub reason: GroupRefusal,
}

/// Drops the layouts and returns the reason.
impl From<GroupsRefused> for GroupRefusal {
    fn from(refused: GroupsRefused) -> Self {
        refused.reason
    }
}

/// The reason why layouts cannot be endpoints of one set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupRefusal {
    /// Two groups have different numbers of blocks, so they cannot share block ids.
    #[error(
        "group {first} has {first_blocks} blocks and group {second} has {second_blocks}; groups that \
         share block ids need equally many"
    )]
    UnequalBlockCounts {
        /// One group.
        first: usize,
        /// The other group.
        second: usize,
        /// The blocks of the first group.
        first_blocks: u32,
        /// The blocks of the second group.
        second_blocks: u32,
    },
    /// Two blocks of different numbers may share bytes. Gaps between a section's rows within a
    /// block count as bytes of the block.
    #[error(
        "block {first_block} of group {first} and block {second_block} of group {second} share \
         bytes, and only blocks of equal number may; give both groups the same start and the same \
         stride of blocks"
    )]
    BlocksOverlap {
        /// One group.
        first: usize,
        /// The other group.
        second: usize,
        /// The block of the first group.
        first_block: u32,
        /// The block of the second group.
        second_block: u32,
    },
    /// The blocks of two groups have different strides within the same bytes.
    #[error(
        "groups {first} and {second} share bytes, and their strides of blocks are {first_stride} and \
         {second_stride} bytes; give both groups the same stride"
    )]
    StridesDiffer {
        /// One group.
        first: usize,
        /// The other group.
        second: usize,
        /// Bytes from a block of the first group to the next block.
        first_stride: u64,
        /// Bytes from a block of the second group to the next block.
        second_stride: u64,
    },
    /// A group has too many windows to compare.
    #[error(
        "each block of group {group} consists of {windows} separate windows, and at most {MAX_WINDOWS} \
         are compared; make blocks the outermost axis of each region"
    )]
    TooScattered {
        /// The group.
        group: usize,
        /// The windows.
        windows: u64,
    },
    /// Two groups are in one file. One would be accessed with buffered I/O, and the other with
    /// direct I/O.
    #[error(
        "groups {first} and {second} are in one file, and only one of them can use direct I/O \
         (alignments {first_alignment} and {second_alignment}); give both the same alignment"
    )]
    FileAccessDiffers {
        /// One group.
        first: usize,
        /// The other group.
        second: usize,
        /// The alignment of the first group.
        first_alignment: Alignment,
        /// The alignment of the second group.
        second_alignment: Alignment,
    },
    /// An endpoint outside the set owns some of the bytes.
    #[error(
        "{} at {} of {} memory, in group {group}, are in use by another endpoint; drop that one \
         first, or create all of them with one call of Endpoint::of_groups",
        .span.length, .span.location, .span.kind
    )]
    BytesInUse {
        /// The group.
        group: usize,
        /// The span that contains bytes in use.
        span: Span,
    },
}

/// Proves for each pair of layouts that blocks with different ids share no byte. Each layout comes
/// with the memory that its blocks use.
pub(crate) fn check(
    layouts: &[PhysicalLayout],
    extents: &[SmallVec<[Span; 1]>],
) -> Result<(), GroupRefusal> {
    let mut groups = layouts.iter().zip(extents).enumerate();
    while let Some((first, (a, of_a))) = groups.next() {
        for (second, (b, of_b)) in groups.clone() {
            let [first_blocks, second_blocks] = [a, b].map(|it| it.geometry().num_blocks());
            if first_blocks != second_blocks {
                return Err(GroupRefusal::UnequalBlockCounts {
                    first,
                    second,
                    first_blocks,
                    second_blocks,
                });
            }
            let [first_alignment, second_alignment] = [a, b].map(PhysicalLayout::alignment_class);
            if are_in_one_file(a, b) && direct_access(a) != direct_access(b) {
                return Err(GroupRefusal::FileAccessDiffers {
                    first,
                    second,
                    first_alignment,
                    second_alignment,
                });
            }
            if of_a.iter().any(|a| of_b.iter().any(|b| a.overlaps(b))) {
                check_windows([(first, a), (second, b)])?;
            }
        }
    }
    Ok(())
}

fn check_windows(groups: [(usize, &PhysicalLayout); 2]) -> Result<(), GroupRefusal> {
    let [(first, a), (second, b)] = groups;
    let (of_a, of_b) = (windows_of(first, a)?, windows_of(second, b)?);
    let mut pairs = of_a.iter().flat_map(|a| of_b.iter().map(move |b| (a, b)));
    pairs.try_for_each(|(a, b)| a.apart(b, first, second))
}

fn are_in_one_file(a: &PhysicalLayout, b: &PhysicalLayout) -> bool {
    let spaces = |layout: &PhysicalLayout| -> Vec<AddressSpace> {
        let spaces = layout.regions().iter().map(|region| region.location().position().space);
        spaces.filter(|space| matches!(space, AddressSpace::File(_))).collect()
    };
    let others = spaces(b);
    spaces(a).iter().any(|space| others.contains(space))
}

/// An engine decides by these whether it uses direct I/O. Alignment beyond a page does not matter.
fn direct_access(layout: &PhysicalLayout) -> (bool, Alignment) {
    let mut files = layout.regions().iter().filter_map(|region| region.location().as_file());
    let has_direct = files.all(|position| position.file.direct.is_some());
    (has_direct, layout.alignment_class().min(Alignment::PAGE))
}

/// Equal windows at equal distances: block `first + i` has a window of `bytes` bytes at `start + i
/// · stride`.
#[derive(Clone, Copy, Debug)]
struct Windows {
    space: AddressSpace,
    start: i128,
    bytes: i128,
    first: i128,
    count: i128,
    /// Meaningless for one window.
    stride: i128,
}

impl Windows {
    fn end(&self) -> i128 {
        let far = if self.count > 1 { (self.count - 1) * self.stride } else { 0 };
        self.start + far + self.bytes
    }

    /// Fails if windows of different blocks, of the groups `first` and `second`, share a byte.
    fn apart(&self, other: &Self, first: usize, second: usize) -> Result<(), GroupRefusal> {
        let are_apart =
            self.space != other.space || self.end() <= other.start || other.end() <= self.start;
        if are_apart {
            return Ok(());
        }
        // Blocks and strides come from a layout, so they fit.
        let [first_stride, second_stride] =
            [self, other].map(|it| u64::try_from(it.stride).unwrap_or(u64::MAX));
        let block = |number: i128| u32::try_from(number).unwrap_or(u32::MAX);
        let blocks_overlap = |one, another| {
            let (first_block, second_block) = (block(one), block(another));
            Err(GroupRefusal::BlocksOverlap { first, second, first_block, second_block })
        };
        let stride = match (self.count, other.count) {
            (1, 1) if self.first == other.first => return Ok(()),
            (1, 1) => return blocks_overlap(self.first, other.first),
            (_, 1) => self.stride,
            (1, _) => other.stride,
            _ if self.stride == other.stride => self.stride,
            _ => {
                return Err(GroupRefusal::StridesDiffer {
                    first,
                    second,
                    first_stride,
                    second_stride,
                });
            }
        };
        // The position of block 0. Block `b` of this group and block `c` of the other group overlap
        // if `ahead - self.bytes < (b - c) · stride < ahead + other.bytes`.
        let origin = |it: &Self| it.start - it.first * stride;
        let ahead = origin(other) - origin(self);
        let least = (ahead - self.bytes).div_euclid(stride) + 1;
        let most = (ahead + other.bytes - 1).div_euclid(stride);
        let [last, other_last] = [self, other].map(|it| it.first + it.count - 1);
        let least = least.max(self.first - other_last);
        let most = most.min(last - other.first);
        let apart_by = if least == 0 { 1 } else { least };
        if apart_by > most {
            return Ok(());
        }
        let other_block = other.first.max(self.first - apart_by);
        blocks_overlap(other_block + apart_by, other_block)
    }
}

/// A dimension outside of a block's window.
struct Repeat {
    count: u32,
    step: RegionOffset,
    /// The block ids from one position to the next; 0 within a block.
    blocks: u32,
}

/// All windows of a group's blocks.
fn windows_of(group: usize, layout: &PhysicalLayout) -> Result<Vec<Windows>, GroupRefusal> {
    let mut found = Vec::new();
    for section in layout.geometry().sections() {
        let (bytes, repeats) = window_of(section);
        let factors = repeats.iter().map(|repeat| u64::from(repeat.count));
        let windows = factors.fold(1, u64::saturating_mul);
        let total = windows.saturating_add(to_u64(found.len()));
        if total > MAX_WINDOWS {
            return Err(GroupRefusal::TooScattered { group, windows: total });
        }
        let begin = RegionOffset { region: section.first_region(), offset: section.offset() };
        let mut begins = vec![(begin, 0_u32)];
        for Repeat { count, step, blocks } in repeats {
            let repeated = begins.iter().flat_map(|&(begin, block)| {
                (0..count).map(move |position| {
                    (begin.plus(step.times(position.into())), block + position * blocks)
                })
            });
            begins = repeated.collect();
        }
        let inner = section.steps(Axis::Block).inner();
        for (begin, first) in begins {
            // The geometry has checked that this position exists.
            let Some(location) = layout.location_at(begin) else { continue };
            let place = location.position();
            found.push(Windows {
                space: place.space,
                start: place.start.into(),
                bytes: bytes.into(),
                first: first.into(),
                count: inner.count.into(),
                stride: inner.stride.into(),
            });
        }
    }
    Ok(found)
}

/// The bytes of a section's window in a block, and the outer dimensions that repeat it.
fn window_of(section: &Section) -> (u64, Vec<Repeat>) {
    let [(in_group, block), (count, step)] = section.steps(Axis::Block).parts();
    let mut bytes = section.element_bytes().get();
    let mut repeats = vec![Repeat { count, step, blocks: in_group }];
    let others = Axis::ALL.into_iter().filter(|&axis| axis != Axis::Block);
    let parts = others.flat_map(|axis| section.steps(axis).parts());
    for (count, step) in parts.filter(|(count, _)| *count > 1) {
        // Strides are nested: a dimension with a smaller stride is within the block's window.
        if step.region == 0 && (in_group == 1 || step.offset < block.offset) {
            bytes += step.offset * u64::from(count - 1);
        } else {
            repeats.push(Repeat { count, step, blocks: 0 });
        }
    }
    (bytes, repeats)
}
