//! The unique encoding of a geometry, for fingerprints and descriptions.
//!
//! All numbers are little-endian and have a fixed length.
//!
//! | bytes | content |
//! |---|---|
//! | 1 | version: 2 |
//! | 1 | exponent of the block alignment |
//! | 1 | number of sections |
//! | each section | [its name](write_section), element, position, and the strides of five axes |
//! | 4 | number of runs of regions of one length |
//! | 12 per run | regions (4) and bytes of each (8) |

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::{Alignment, ByteCount};

use super::Geometry;
use super::axis::{Axis, SectionName};
use super::decode_error::{DecodeError, EncodedCount};
use super::section::Section;
use super::steps::{AxisSteps, Step};

/// The version that is written, and the only one that is read.
pub(crate) const VERSION: u8 = 2;

/// The bytes of the strides of one axis.
const AXIS_BYTES: usize = 28;

/// The reader's limits. An encoding that exceeds one is refused before memory is allocated for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeometryLimits {
    /// Blocks.
    pub blocks: u32,
    /// Sections of a block. No block has more than 16.
    pub sections: u32,
    /// Regions.
    pub regions: u32,
}

impl Geometry {
    /// The bytes of this geometry: its version, every section with its strides, and the lengths of
    /// all regions. Equal geometries have equal bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(64 + 192 * self.sections().len());
        let exponent = u8::try_from(self.block_alignment().log2()).unwrap_or(u8::MAX);
        let sections = u8::try_from(self.sections().len()).unwrap_or(u8::MAX);
        encoded.extend([VERSION, exponent, sections]);
        for section in self.sections() {
            write_section(section, &mut encoded);
        }
        let mut runs: Vec<(u32, u64)> = Vec::new();
        for region in 0..self.region_count() {
            let bytes = self.region_bytes(region).get();
            match runs.last_mut() {
                Some((count, last)) if *last == bytes => *count += 1,
                _ => runs.push((1, bytes)),
            }
        }
        encoded.extend(u32::try_from(runs.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (count, bytes) in runs {
            encoded.extend(count.to_le_bytes());
            encoded.extend(bytes.to_le_bytes());
        }
        encoded
    }

    /// Decodes the output of [`encode`](Self::encode). Any other input is an error.
    ///
    /// No byte is trusted. Counts are compared with `limits` and with the remaining input. The
    /// strides pass the same proof as those of [`from_sections_in`](Self::from_sections_in).
    ///
    /// # Errors
    ///
    /// [`DecodeError`] names the invalid byte, count or strides.
    pub fn decode(bytes: &[u8], limits: &GeometryLimits) -> Result<Self, DecodeError> {
        let mut input = Input { bytes, offset: 0 };
        let version = input.byte()?;
        if version != VERSION {
            return Err(DecodeError::Version { version });
        }
        let exponent = input.byte()?;
        let alignment = 1_u64
            .checked_shl(exponent.into())
            .and_then(|power| Alignment::new(power).ok())
            .ok_or(DecodeError::NoSuchAlignment { exponent })?;
        let count = input.byte()?;
        within(EncodedCount::Sections, count.into(), limits.sections)?;
        let mut sections = Vec::new();
        for _ in 0..count {
            let section = input.section()?;
            within(EncodedCount::Blocks, section.steps(Axis::Block).count(), limits.blocks)?;
            sections.push(section);
        }
        let regions = input.regions(limits)?;
        input.end()?;
        let geometry = Self::from_sections_in(sections, &regions)?;
        Ok(geometry.with_block_alignment(alignment))
    }
}

fn within(what: EncodedCount, count: u64, limit: u32) -> Result<(), DecodeError> {
    if count > limit.into() {
        return Err(DecodeError::OverLimit { what, count, limit: limit.into() });
    }
    Ok(())
}

/// Writes the name ([`SectionName::encode`]) and the bytes of an element (4). Then come
/// whether heads are stated (1), the first region (4), the offset (8), and the steps of each axis.
/// The steps are regions (4), outer count (4) and stride (8), inner count (4) and stride (8).
fn write_section(section: &Section, encoded: &mut Vec<u8>) {
    section.name().encode(encoded);
    let element = u32::try_from(section.element_bytes().get()).unwrap_or(u32::MAX);
    encoded.extend(element.to_le_bytes());
    encoded.push(section.states_heads().into());
    encoded.extend(section.first_region().to_le_bytes());
    encoded.extend(section.offset().to_le_bytes());
    for axis in Axis::ALL {
        // Strides without meaning are normalised, so that a layout has one encoding.
        let steps = section.steps(axis).normal();
        encoded.extend(steps.regions().to_le_bytes());
        for step in [steps.outer(), steps.inner()] {
            encoded.extend(step.count.to_le_bytes());
            encoded.extend(step.stride.to_le_bytes());
        }
    }
}

/// The remaining input.
struct Input<'a> {
    bytes: &'a [u8],
    /// The position of the remaining input.
    offset: usize,
}

impl<'a> Input<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let truncated = self.truncated(N);
        let (&taken, rest) = self.bytes.split_first_chunk::<N>().ok_or(truncated)?;
        self.bytes = rest;
        self.offset += N;
        Ok(taken)
    }

    fn take_slice(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let truncated = self.truncated(length);
        let (taken, rest) = self.bytes.split_at_checked(length).ok_or(truncated)?;
        self.bytes = rest;
        self.offset += length;
        Ok(taken)
    }

    fn truncated(&self, needed: usize) -> DecodeError {
        DecodeError::Truncated { offset: self.offset, needed, actual: self.bytes.len() }
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn section(&mut self) -> Result<Section, DecodeError> {
        let length = self.byte()?;
        let name = String::from_utf8_lossy(self.take_slice(length.into())?);
        let name = SectionName::new(&name)?;
        let element_bytes = self.u32()?;
        let offset = self.offset;
        let states_heads = match self.byte()? {
            0 => false,
            1 => true,
            value => return Err(DecodeError::Flag { offset, value }),
        };
        let (region, at) = (self.u32()?, self.u64()?);
        let mut section = Section::new(name, element_bytes).at(region, at);
        for axis in Axis::ALL {
            let steps = self.steps()?;
            if axis == Axis::Head && !states_heads {
                if steps.count() != 1 {
                    let offset = self.offset - AXIS_BYTES;
                    return Err(DecodeError::NotCanonical { offset });
                }
            } else {
                section = section.axis(axis, steps);
            }
        }
        Ok(section)
    }

    fn steps(&mut self) -> Result<AxisSteps, DecodeError> {
        let offset = self.offset;
        let regions = self.u32()?;
        let outer = Step::new(self.u32()?, self.u64()?);
        let inner = Step::new(self.u32()?, self.u64()?);
        let steps = AxisSteps::of_parts(outer, inner, regions);
        // In one region, an axis has two parts only if it needs two strides.
        let is_split = regions > 0 || steps == AxisSteps::split(outer, inner);
        if !is_split || steps != steps.normal() {
            return Err(DecodeError::NotCanonical { offset });
        }
        Ok(steps)
    }

    fn regions(&mut self, limits: &GeometryLimits) -> Result<Vec<ByteCount>, DecodeError> {
        let runs = self.u32()?;
        within(EncodedCount::Regions, runs.into(), limits.regions)?;
        let mut regions: Vec<ByteCount> = Vec::new();
        for _ in 0..runs {
            let offset = self.offset;
            let (count, bytes) = (self.u32()?, ByteCount::new(self.u64()?));
            if count == 0 || regions.last() == Some(&bytes) {
                return Err(DecodeError::NotCanonical { offset });
            }
            let before = to_u64(regions.len());
            within(EncodedCount::Regions, before + u64::from(count), limits.regions)?;
            regions.resize(regions.len() + to_usize(count.into()), bytes);
        }
        Ok(regions)
    }

    fn end(&self) -> Result<(), DecodeError> {
        match self.bytes.len() {
            0 => Ok(()),
            extra => Err(DecodeError::TrailingBytes { offset: self.offset, extra }),
        }
    }
}

#[cfg(test)]
mod tests;
