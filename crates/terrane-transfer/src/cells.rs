//! How pieces are broken up where the two ends do not hold whole ones in the same order.

use std::ops::Range;

use terrane_layout::{LayoutConfig, TokenOrder};

/// The heads that one end has of what is copied.
pub(crate) struct HeadsOfEnd<'a> {
    pub(crate) config: &'a LayoutConfig,
    pub(crate) heads: Range<u32>,
}

/// Part of a piece, as equal rows of equal cells, each of which is contiguous at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cells {
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    /// The bytes of a cell.
    pub(crate) bytes: u64,
    pub(crate) source: CellsOfEnd,
    pub(crate) destination: CellsOfEnd,
}

/// Where the cells of a piece lie at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellsOfEnd {
    /// Of the first, from the beginning of the piece.
    pub(crate) offset: u64,
    pub(crate) row_stride: u64,
    pub(crate) column_stride: u64,
    /// What every stretch that is contiguous at this end, whatever the other one does, begins and
    /// ends at a multiple of, counted from the beginning of the piece: the bits of all of them.
    pub(crate) stretch_bits: u64,
}

impl Cells {
    /// The cells of each piece, or `None` if whole pieces are copied as they are.
    ///
    /// Both ends have been checked: as many tokens, as many heads of equal length, within range.
    /// Nothing overflows, as every product is at most the bytes of a piece.
    pub(crate) fn new(source: &HeadsOfEnd<'_>, destination: &HeadsOfEnd<'_>) -> Option<Self> {
        // Of rows whose heads are not stated only whole pieces are copied.
        destination.config.num_heads()?;
        let head = source.config.head_bytes()?.get();
        let tokens = source.config.page_size();
        let mut cells = Self {
            rows: tokens,
            columns: source.heads.end - source.heads.start,
            bytes: head,
            source: CellsOfEnd::new(source, head),
            destination: CellsOfEnd::new(destination, head),
        };
        // Heads that touch at both ends are one cell, and so are tokens, in whichever order.
        cells.join_columns();
        cells.join_rows();
        cells.join_columns();
        let is_whole = |end: &HeadsOfEnd<'_>| end.config.piece_bytes().get() == cells.bytes;
        (!(is_whole(source) && is_whole(destination))).then_some(cells)
    }

    /// The cells of a piece.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.columns)
    }

    /// The bytes of all cells of a piece.
    pub(crate) fn piece_bytes(&self) -> u64 {
        self.count() * self.bytes
    }

    /// The offsets of a cell from the beginnings of its piece at both ends, by its number. They
    /// are numbered in the order of the destination.
    pub(crate) fn offsets(&self, index: u64) -> [u64; 2] {
        let (row, column) = if self.rows_are_outermost() {
            let columns = u64::from(self.columns);
            (index / columns, index % columns)
        } else {
            let rows = u64::from(self.rows);
            (index % rows, index / rows)
        };
        [&self.source, &self.destination]
            .map(|end| end.offset + row * end.row_stride + column * end.column_stride)
    }

    /// Calls `each` with the offsets of every cell, in the order of their numbers.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, u64)) {
        let rows = (self.rows, self.source.row_stride, self.destination.row_stride);
        let columns = (self.columns, self.source.column_stride, self.destination.column_stride);
        let (outer, inner) =
            if self.rows_are_outermost() { (rows, columns) } else { (columns, rows) };
        let (mut source, mut destination) = (self.source.offset, self.destination.offset);
        for _ in 0..outer.0 {
            let (mut from, mut to) = (source, destination);
            for _ in 0..inner.0 {
                each(from, to);
                from += inner.1;
                to += inner.2;
            }
            source += outer.1;
            destination += outer.2;
        }
    }

    fn rows_are_outermost(&self) -> bool {
        self.destination.row_stride >= self.destination.column_stride
    }

    fn join_columns(&mut self) {
        let touches = |end: &CellsOfEnd| end.column_stride == self.bytes;
        if self.columns == 1 || (touches(&self.source) && touches(&self.destination)) {
            self.bytes *= u64::from(self.columns);
            self.columns = 1;
        }
    }

    fn join_rows(&mut self) {
        let touches = |end: &CellsOfEnd| end.row_stride == self.bytes;
        if self.rows == 1 || (touches(&self.source) && touches(&self.destination)) {
            self.bytes *= u64::from(self.rows);
            self.rows = 1;
        }
    }
}

impl CellsOfEnd {
    /// Rows are tokens and columns are heads.
    fn new(end: &HeadsOfEnd<'_>, head: u64) -> Self {
        let tokens = u64::from(end.config.page_size());
        let all = u64::from(end.config.num_heads().unwrap_or(1));
        let first = u64::from(end.heads.start);
        let count = u64::from(end.heads.end) - first;
        match end.config.token_order() {
            TokenOrder::TokenMajor => Self {
                offset: first * head,
                row_stride: all * head,
                column_stride: head,
                stretch_bits: if count == all {
                    tokens * all * head
                } else {
                    (first * head) | (count * head) | (all * head)
                },
            },
            TokenOrder::HeadMajor => Self {
                offset: first * tokens * head,
                row_stride: head,
                column_stride: tokens * head,
                stretch_bits: (first * tokens * head) | (count * tokens * head),
            },
        }
    }
}
