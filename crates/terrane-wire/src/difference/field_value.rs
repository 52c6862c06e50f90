//! The values of fields.

use std::fmt;

use terrane_core::{Alignment, ByteCount};
use terrane_layout::{AxisSteps, Step};

/// The value of a field of a geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FieldValue {
    /// The geometry does not state it.
    NotStated,
    /// Whether it exists.
    Present(bool),
    /// A number.
    Number(u64),
    /// A number of bytes.
    Bytes(ByteCount),
    /// An alignment.
    Alignment(Alignment),
    /// Whether its bytes are contiguous.
    Contiguous(bool),
    /// The strides of an axis.
    Steps {
        /// The groups of positions.
        outer: Step,
        /// The number of regions from one group to the next.
        regions: u32,
        /// The positions of a group.
        inner: Step,
    },
}

impl FieldValue {
    /// The steps of an axis. The stride of a single step is normalised, because it has no effect.
    pub(super) fn steps(steps: &AxisSteps) -> Self {
        let normal = |step: Step| if step.count == 1 { Step::ONE } else { step };
        Self::Steps {
            outer: normal(steps.outer()),
            regions: steps.regions(),
            inner: normal(steps.inner()),
        }
    }
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStated => f.pad("not stated"),
            Self::Present(true) => f.pad("present"),
            Self::Present(false) => f.pad("absent"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Bytes(bytes) => write!(f, "{} B", bytes.get()),
            Self::Alignment(alignment) => write!(f, "{alignment}"),
            Self::Contiguous(true) => f.pad("contiguous"),
            Self::Contiguous(false) => f.pad("in parts"),
            Self::Steps { outer, regions, inner } => {
                let one = |f: &mut fmt::Formatter<'_>, step: &Step| match step.count {
                    1 => f.write_str("1 position"),
                    count => write!(f, "{count} positions {} B apart", step.stride),
                };
                match (outer.count, regions) {
                    (1, _) => one(f, inner),
                    (groups, 0) => {
                        write!(f, "{groups} groups {} B apart of ", outer.stride)?;
                        one(f, inner)
                    }
                    (groups, regions) => {
                        write!(f, "{groups} groups {regions} regions apart of ")?;
                        one(f, inner)
                    }
                }
            }
        }
    }
}
