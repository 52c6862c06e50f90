//! The path of a plan's bytes to and from files.

use std::borrow::Cow;
use std::fmt;

use terrane_core::{Alignment, Location, StorageKind};

use super::segments::Segments;
use crate::engine::declined::Declined;
use crate::engine::quote::Decision;
use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;
use crate::side::{Ends, Side};

/// The alignment of bounce buffers, and of requests for a part of a longer run. Disks need 512
/// bytes or 4 KiB.
pub(super) const REQUESTS: Alignment = Alignment::PAGE;

/// The maximum number of runs of broken-up pieces in one transfer. Each takes 40 bytes, and as much
/// again while the runs are sorted.
const MOST_BROKEN_RUNS: u64 = 1 << 24;

/// The kinds of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileFlow {
    Read,
    Write,
    BetweenFiles,
}

/// How a plan is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskRoute {
    pub(super) flow: FileFlow,
    /// How the file of each end is accessed: source, destination.
    reach: Ends<FileReach>,
    /// Whether bytes are copied through a bounce buffer.
    pub(super) staged: bool,
    pub(super) selection: Selection,
    /// The segments, which determine whether an optional buffer is worth its copy.
    pub(super) segments: Segments,
    /// Whether at least half of the memory is registered with the queue, which has its own rates.
    pub(super) registered: bool,
}

/// The reason why bytes are copied through a buffer or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Selection {
    /// The alignment requires it.
    Alignment,
    /// Pieces are broken up, and too short for separate requests.
    BrokenPieces,
    /// Both are possible, and this one has not been measured yet.
    ToBeMeasured,
    /// Both are possible, and this one was measured to be faster.
    Faster,
}

/// How the files of one end are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileReach {
    /// Direct I/O, with buffers of this alignment.
    Direct(Alignment),
    /// Through the page cache: a file has no direct I/O, or the end is not a file.
    NotOffered,
    /// Through the page cache: pieces do not begin and end at the alignment of direct I/O.
    Misaligned { pieces: Alignment, needed: Alignment },
    /// Through the page cache: direct I/O needs a stricter alignment than that of the engine's
    /// requests and buffers.
    TooStrict { needed: Alignment },
}

impl DiskRoute {
    /// Chooses the route of a plan.
    ///
    /// Parts of pieces are copied through the engine's buffers. In the file they must be aligned
    /// like whole pieces, otherwise they are declined: a file's pages must not be accessed with
    /// both direct and buffered I/O.
    ///
    /// # Errors
    ///
    /// [`Declined::Kinds`] if no file takes part, or if an end is neither a file nor host memory;
    /// [`Declined::TooManyRuns`] if pieces are broken up into too many runs to list;
    /// [`Declined::BrokenPieces`] if their parts are not aligned for direct I/O.
    pub(super) fn of(plan: &TransferPlan) -> Result<Self, Declined> {
        let (source, destination) = (plan.source(), plan.destination());
        let is_disk = |end: &Endpoint| end.kind() == StorageKind::Disk;
        let flow = match (is_disk(source), is_disk(destination)) {
            (true, true) => FileFlow::BetweenFiles,
            (true, false) if destination.kind().is_host() => FileFlow::Read,
            (false, true) if source.kind().is_host() => FileFlow::Write,
            _ => return Err(Declined::Kinds),
        };
        let reach = Ends { source, destination }.map(reach);
        if plan.breaks_pieces() {
            let (runs, limit) = (plan.run_count(), MOST_BROKEN_RUNS);
            if runs > limit {
                return Err(Declined::TooManyRuns { runs, limit });
            }
            let is_reached = |side: Side, reach, alignment| {
                !matches!(reach, FileReach::Direct(_))
                    || alignment >= needed_in_files(plan.end(side))
            };
            // Between files, each run is written to its own position.
            let written = match flow {
                FileFlow::BetweenFiles => plan.run_alignment(Side::Destination),
                FileFlow::Read | FileFlow::Write => plan.alignment(Side::Destination),
            };
            if !is_reached(Side::Source, reach.source, plan.alignment(Side::Source))
                || !is_reached(Side::Destination, reach.destination, written)
            {
                return Err(Declined::BrokenPieces);
            }
        }
        let is_too_loose = |end: &Endpoint, reach| match reach {
            FileReach::Direct(needed) => end.alignment() < needed,
            _ => false,
        };
        let staged = match flow {
            FileFlow::Read => is_too_loose(destination, reach.source),
            FileFlow::Write => is_too_loose(source, reach.destination),
            FileFlow::BetweenFiles => true,
        } || plan.breaks_pieces();
        let selection =
            if plan.breaks_pieces() { Selection::BrokenPieces } else { Selection::Alignment };
        let segments = match flow {
            FileFlow::Read => Segments::of(plan, Side::Destination, Side::Source),
            FileFlow::Write => Segments::of(plan, Side::Source, Side::Destination),
            FileFlow::BetweenFiles => Segments::Long,
        };
        Ok(Self { flow, reach, staged, selection, segments, registered: false })
    }

    fn reach(&self, side: Side) -> FileReach {
        *self.reach.get(side)
    }

    /// Whether the file at `side` is accessed with direct I/O.
    pub(super) fn is_direct(&self, side: Side) -> bool {
        matches!(self.reach(side), FileReach::Direct(_))
    }

    /// The end whose file order the requests follow.
    pub(super) fn file_side(&self) -> Side {
        match self.flow {
            FileFlow::Read | FileFlow::BetweenFiles => Side::Source,
            FileFlow::Write => Side::Destination,
        }
    }

    /// The end in memory; `None` between files.
    pub(super) fn memory_side(&self) -> Option<Side> {
        match self.flow {
            FileFlow::Read => Some(Side::Destination),
            FileFlow::Write => Some(Side::Source),
            FileFlow::BetweenFiles => None,
        }
    }

    /// Whether bytes that need no buffer could be copied through one.
    pub(super) fn could_be_staged(&self) -> bool {
        self.flow != FileFlow::BetweenFiles && self.is_direct(self.file_side()) && !self.staged
    }

    /// Whether bytes that need no buffer are copied through one.
    pub(super) fn is_staged_by_choice(&self) -> bool {
        self.staged && matches!(self.selection, Selection::ToBeMeasured | Selection::Faster)
    }

    /// The same route, with or without a buffer, for this reason.
    pub(super) fn selected(self, staged: bool, selection: Selection) -> Self {
        Self { staged, selection, ..self }
    }
}

impl Decision for DiskRoute {
    fn path(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.label())
    }

    fn label(&self) -> &'static str {
        let file_is_direct = self.is_direct(self.file_side());
        match (self.flow, file_is_direct, self.staged) {
            (FileFlow::BetweenFiles, ..) => {
                match (file_is_direct, self.is_direct(Side::Destination)) {
                    (true, true) => "direct read and write",
                    (true, false) => "direct read, buffered write",
                    (false, true) => "buffered read, direct write",
                    (false, false) => "buffered read and write",
                }
            }
            (_, true, false) => "direct vectored",
            (_, true, true) => "direct staged",
            (_, false, _) => "buffered",
        }
    }

    fn reason(&self) -> Cow<'_, str> {
        if self.flow == FileFlow::BetweenFiles {
            let why = |side, name| match self.reach(side) {
                FileReach::Direct(_) => String::new(),
                buffered => format!("; in the {name}, {buffered}"),
            };
            let (source, destination) =
                (why(Side::Source, "source"), why(Side::Destination, "destination"));
            return format!("through the engine's buffers{source}{destination}").into();
        }
        match self.selection {
            Selection::Alignment => {}
            Selection::BrokenPieces => return "tokens or heads are re-laid in buffers".into(),
            Selection::ToBeMeasured => {
                return format!("{}, and this path is being measured", self.segments).into();
            }
            Selection::Faster => {
                return format!("{}, and this path was faster here", self.segments).into();
            }
        }
        match (self.reach(self.file_side()), self.staged) {
            (FileReach::Direct(_), false) => "pieces are aligned in file and memory".into(),
            (FileReach::Direct(_), true) => {
                "pieces are aligned in the file, but not in memory".into()
            }
            (buffered, _) => buffered.to_string().into(),
        }
    }
}

impl fmt::Display for FileReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct(_) => f.pad("the file has direct I/O"),
            Self::NotOffered => f.pad("the file has no direct I/O"),
            Self::Misaligned { pieces, needed } => {
                write!(f, "pieces are aligned to {pieces}, and direct I/O needs {needed}")
            }
            Self::TooStrict { needed } => {
                write!(f, "direct I/O needs {needed}, and requests are aligned to {REQUESTS}")
            }
        }
    }
}

/// The strictest alignment that direct I/O needs in any of the end's files.
fn needed_in_files(end: &Endpoint) -> Alignment {
    let needed = end.bases().iter().filter_map(|base| match base {
        Location::File(position) => Some(position.file.direct?.offset_alignment),
        _ => None,
    });
    needed.max().unwrap_or(Alignment::BYTE)
}

/// How the files of `end` are accessed: directly if all of them have direct I/O and every piece is
/// aligned for it.
fn reach(end: &Endpoint) -> FileReach {
    let mut strictest = Alignment::BYTE;
    for base in end.bases() {
        let Location::File(position) = base else { return FileReach::NotOffered };
        let Some(direct) = position.file.direct else { return FileReach::NotOffered };
        let needed = direct.offset_alignment.max(direct.memory_alignment);
        if needed > REQUESTS {
            return FileReach::TooStrict { needed };
        }
        if end.alignment() < direct.offset_alignment {
            let (pieces, needed) = (end.alignment(), direct.offset_alignment);
            return FileReach::Misaligned { pieces, needed };
        }
        strictest = strictest.max(direct.memory_alignment);
    }
    FileReach::Direct(strictest)
}
