//! The two ends of a transfer.

/// An end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that is read.
    Source,
    /// The end that is written.
    Destination,
}

terrane_core::display_names!(Side {
    Self::Source => "source",
    Self::Destination => "destination",
});

impl Side {
    /// Both sides, the source first.
    pub const BOTH: [Self; 2] = [Self::Source, Self::Destination];

    /// The other side.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// A value for each end of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ends<T> {
    /// The value for the end that is read.
    pub source: T,
    /// The value for the end that is written.
    pub destination: T,
}

impl<T> Ends<T> {
    /// The value for one side.
    #[inline]
    pub const fn get(&self, side: Side) -> &T {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    /// References to both values.
    #[inline]
    pub const fn as_ref(&self) -> Ends<&T> {
        Ends { source: &self.source, destination: &self.destination }
    }

    /// The results of a function of each value, the source's first.
    #[inline]
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> Ends<U> {
        let source = change(self.source);
        Ends { source, destination: change(self.destination) }
    }

    /// Both values of two pairs of ends.
    #[inline]
    pub fn zip<U>(self, other: Ends<U>) -> Ends<(T, U)> {
        Ends {
            source: (self.source, other.source),
            destination: (self.destination, other.destination),
        }
    }
}

impl<T> IntoIterator for Ends<T> {
    type Item = T;
    type IntoIter = std::array::IntoIter<T, 2>;

    /// The source's value comes first.
    fn into_iter(self) -> Self::IntoIter {
        [self.source, self.destination].into_iter()
    }
}
