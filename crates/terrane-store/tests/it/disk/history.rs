//! A log of changes, and the states that a crash can leave of it.

use std::collections::{BTreeMap, BTreeSet};

const SECTOR: u64 = 512;

/// The content of the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    pub names: BTreeMap<String, usize>,
    pub inodes: Vec<Vec<u8>>,
}

impl Image {
    pub fn file(&self, name: &str) -> Option<&Vec<u8>> {
        self.inodes.get(*self.names.get(name)?)
    }

    pub fn file_mut(&mut self, name: &str) -> &mut Vec<u8> {
        let inode = *self.names.get(name).unwrap_or_else(|| panic!("no {name}"));
        &mut self.inodes[inode]
    }

    pub fn insert(&mut self, name: &str, bytes: Vec<u8>) {
        self.inodes.push(bytes);
        self.names.insert(name.to_owned(), self.inodes.len() - 1);
    }
}

/// A change, or a note of the test.
#[derive(Clone, Debug)]
pub enum Change<N> {
    Create {
        name: String,
        inode: usize,
    },
    Rename {
        from: String,
        to: String,
        inode: usize,
    },
    Unlink {
        name: String,
    },
    /// `extends` says whether the file is longer afterwards.
    Write {
        inode: usize,
        offset: u64,
        bytes: Vec<u8>,
        extends: bool,
    },
    SetLength {
        inode: usize,
        length: u64,
    },
    SyncData {
        inode: usize,
    },
    SyncDirectory,
    Note(N),
}

/// A log from a state on.
#[derive(Clone, Debug)]
pub struct History<N> {
    pub base: Image,
    pub log: Vec<Change<N>>,
}

/// A part of a change that a crash keeps or loses by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A whole change.
    Change(usize),
    /// The bytes of a write within one sector: from, to.
    Sector(usize, usize, usize),
    /// The length of a file after a write.
    Length(usize),
}

impl Unit {
    const fn change(self) -> usize {
        match self {
            Self::Change(at) | Self::Sector(at, _, _) | Self::Length(at) => at,
        }
    }
}

impl<N> History<N> {
    /// The parts of the first `end` changes that a crash may lose.
    pub fn pending(&self, end: usize) -> Vec<Unit> {
        let mut units = Vec::new();
        let (mut synced, mut names_synced) = (BTreeSet::new(), false);
        for (at, change) in self.log[..end].iter().enumerate().rev() {
            match change {
                Change::SyncData { inode } => {
                    synced.insert(*inode);
                }
                Change::SyncDirectory => names_synced = true,
                Change::Create { .. } | Change::Rename { .. } | Change::Unlink { .. } => {
                    if !names_synced {
                        units.push(Unit::Change(at));
                    }
                }
                Change::SetLength { inode, .. } if !synced.contains(inode) => {
                    units.push(Unit::Change(at));
                }
                Change::Write { inode, offset, bytes, extends } if !synced.contains(inode) => {
                    if *extends {
                        units.push(Unit::Length(at));
                    }
                    units.extend(sectors(at, *offset, bytes.len()));
                }
                Change::SetLength { .. } | Change::Write { .. } | Change::Note(_) => {}
            }
        }
        units.reverse();
        units
    }

    /// The disk after a crash that kept `kept` of the pending parts of the first `end` changes.
    pub fn crash(&self, end: usize, pending: &[Unit], kept: impl Fn(usize) -> bool) -> Image {
        let mut image = self.base.clone();
        let mut lost: BTreeMap<usize, Vec<(Unit, bool)>> = BTreeMap::new();
        for (index, unit) in pending.iter().enumerate() {
            lost.entry(unit.change()).or_default().push((*unit, kept(index)));
        }
        for (at, change) in self.log[..end].iter().enumerate() {
            match lost.get(&at) {
                None => apply(&mut image, change),
                Some(parts) => apply_parts(&mut image, change, parts),
            }
        }
        image
    }
}

fn sectors(at: usize, offset: u64, length: usize) -> Vec<Unit> {
    let mut units = Vec::new();
    let mut from = 0;
    while from < length {
        let position = offset + from as u64;
        let to = length.min(from + usize::try_from(SECTOR - position % SECTOR).unwrap());
        units.push(Unit::Sector(at, from, to));
        from = to;
    }
    units
}

pub fn apply<N>(image: &mut Image, change: &Change<N>) {
    match change {
        Change::Create { name, inode } => {
            grow(image, *inode);
            image.names.insert(name.clone(), *inode);
        }
        Change::Rename { from, to, inode } => {
            if image.names.get(from) == Some(inode) {
                image.names.remove(from);
            }
            grow(image, *inode);
            image.names.insert(to.clone(), *inode);
        }
        Change::Unlink { name } => {
            image.names.remove(name);
        }
        Change::Write { inode, offset, bytes, .. } => {
            write(image, *inode, usize::try_from(*offset).unwrap(), bytes);
        }
        Change::SetLength { inode, length } => {
            grow(image, *inode);
            image.inodes[*inode].resize(usize::try_from(*length).unwrap(), 0);
        }
        Change::SyncData { .. } | Change::SyncDirectory | Change::Note(_) => {}
    }
}

fn apply_parts<N>(image: &mut Image, change: &Change<N>, parts: &[(Unit, bool)]) {
    for (unit, kept) in parts {
        if !kept {
            continue;
        }
        match (unit, change) {
            (Unit::Sector(_, from, to), Change::Write { inode, offset, bytes, .. }) => {
                let offset = usize::try_from(*offset).unwrap();
                write(image, *inode, offset + from, &bytes[*from..*to]);
            }
            (Unit::Length(_), Change::Write { inode, offset, bytes, .. }) => {
                let end = usize::try_from(*offset).unwrap() + bytes.len();
                grow(image, *inode);
                let file = &mut image.inodes[*inode];
                file.resize(file.len().max(end), 0);
            }
            _ => apply(image, change),
        }
    }
}

fn grow(image: &mut Image, inode: usize) {
    let length = image.inodes.len().max(inode + 1);
    image.inodes.resize(length, Vec::new());
}

fn write(image: &mut Image, inode: usize, offset: usize, bytes: &[u8]) {
    grow(image, inode);
    let file = &mut image.inodes[inode];
    file.resize(file.len().max(offset + bytes.len()), 0);
    file[offset..offset + bytes.len()].copy_from_slice(bytes);
}
