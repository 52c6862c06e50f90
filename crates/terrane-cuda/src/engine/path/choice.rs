//! The choice of a transfer's path: the one with the smallest predicted cost.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use terrane_transfer::calibration::{Calibration, CopyPath, Direction};

/// The properties of a transfer that determine its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) direction: Direction,
    pub(crate) bytes: u64,
    /// Stretches that are contiguous at both ends.
    pub(crate) runs: u64,
    /// Pieces that a kernel copies one by one.
    pub(crate) cells: u64,
    /// Stretches that are contiguous at the packed end; `None` if the transfer cannot be staged.
    pub(crate) stretches: Option<u64>,
    /// Whether kernels can access both ends.
    pub(crate) kernels: bool,
    /// Whether the driver copies many runs in one call.
    pub(crate) batches: bool,
}

/// A path, and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Choice {
    pub(crate) path: CopyPath,
    pub(crate) predicted: Duration,
    pub(crate) reason: ChoiceReason,
}

/// Why a path was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ChoiceReason {
    /// The options allow no other path.
    Forced,
    /// No other path can copy this.
    OnlyPath,
    /// The cost of the path, in seconds, was compared with that of the next one.
    Compared { chosen: (CopyPath, f64), next: (CopyPath, f64) },
}

/// Times are in whole microseconds.
impl fmt::Display for ChoiceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (chosen, next) = match self {
            Self::Forced => return f.write_str("the only path allowed"),
            Self::OnlyPath => return f.write_str("the only path there is"),
            Self::Compared { chosen, next } => (chosen, next),
        };
        let micros = |seconds| duration(seconds).as_micros();
        write!(f, "{} {} µs, {} {} µs", chosen.0, micros(chosen.1), next.0, micros(next.1))?;
        // Then the next path was not taken, because it needs another call.
        f.write_str(if next.1 < chosen.1 { " plus one more driver call" } else { "" })
    }
}

/// The time that a driver call (a launch or a copy) takes on the submitting thread.
const CALL: f64 = 4e-6;

/// The extra cost of a path besides the transfer's time. The staged path needs one more call than
/// the other paths, on a busy thread, and a buffer. So it must be faster by this amount.
fn overhead(path: CopyPath) -> f64 {
    if path == CopyPath::Staged { CALL } else { 0.0 }
}

/// Runs with at least this mean length are long: at half of it, a copy for each run loses a tenth.
const LONG: u64 = 1 << 20;

impl Shape {
    /// The paths that may copy this, with the number of pieces that each handles one by one; `None`
    /// if it cannot copy this.
    fn candidates(&self) -> [(CopyPath, Option<u64>); 4] {
        use Direction::{FromPeer, ToDevice, ToHost, ToPeer, WithinDevice};
        // The two paths of driver copies differ only in name: one name means that its runs are long.
        let is_long = self.bytes >= LONG.saturating_mul(self.runs) || self.runs <= 1;
        let copies = if is_long { CopyPath::Contiguous } else { CopyPath::CopyEach };
        let kernel = match self.direction {
            ToDevice | ToHost => CopyPath::Direct,
            WithinDevice => CopyPath::Relayout,
            ToPeer | FromPeer => CopyPath::Peer,
        };
        [
            (copies, Some(self.runs)),
            (CopyPath::Batched, self.batches.then_some(self.runs)),
            (kernel, self.kernels.then_some(self.cells)),
            (CopyPath::Staged, self.stretches),
        ]
    }

    /// The number of pieces on a forced path; `None` if it cannot copy this.
    fn pieces(&self, path: CopyPath) -> Option<u64> {
        if matches!(path, CopyPath::Contiguous | CopyPath::CopyEach) {
            return Some(self.runs);
        }
        self.candidates().into_iter().find(|(candidate, _)| *candidate == path)?.1
    }

    /// The path to take; `None` if the forced path cannot copy this.
    pub(crate) fn choose(
        &self,
        calibration: &Calibration,
        corrections: &Corrections,
        forced: Option<CopyPath>,
    ) -> Option<Choice> {
        let seconds = |path: CopyPath, pieces: u64| {
            let cost = calibration.cost(self.direction, path)?;
            Some(cost.predict(self.bytes, pieces) * corrections.factor(self.direction, path))
        };
        if let Some(path) = forced {
            let predicted = seconds(path, self.pieces(path)?).map_or(Duration::ZERO, duration);
            return Some(Choice { path, predicted, reason: ChoiceReason::Forced });
        }
        let mut best: Option<(CopyPath, f64)> = None;
        let mut second: Option<(CopyPath, f64)> = None;
        for (path, pieces) in self.candidates() {
            let Some(found) = pieces.and_then(|pieces| seconds(path, pieces)) else { continue };
            let is_better = |than: Option<(CopyPath, f64)>| {
                than.is_none_or(|(other, least)| found + overhead(path) < least + overhead(other))
            };
            if is_better(best) {
                second = best.replace((path, found));
            } else if is_better(second) {
                second = Some((path, found));
            }
        }
        let chosen = best?;
        let reason = match second {
            Some(next) => ChoiceReason::Compared { chosen, next },
            None => ChoiceReason::OnlyPath,
        };
        Some(Choice { path: chosen.0, predicted: duration(chosen.1), reason })
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 2)
}

/// The ratio of measured to predicted times, within a quarter.
#[derive(Debug)]
pub(crate) struct Corrections {
    /// The bits of floats.
    factors: [[AtomicU64; CopyPath::ALL.len()]; Direction::ALL.len()],
    learns: bool,
}

/// The weight of the latest transfer. It is small, so that one delayed transfer changes little.
const WEIGHT: f64 = 0.125;
/// The fraction of a path's correction that each transfer by another path removes.
const DECAY: f64 = 1.0 / 32.0;
/// The limit of a correction. It is the amount by which one path may overtake another if the
/// calibration is right about both and an external cause delays one.
const BOUND: f64 = 1.25;
/// Smaller transfers measure latency rather than a path's rate.
const MIN_SAMPLE_BYTES: u64 = 4 << 20;

impl Corrections {
    pub(crate) fn new(learns: bool) -> Self {
        let row = || std::array::from_fn(|_| AtomicU64::new(1_f64.to_bits()));
        Self { factors: std::array::from_fn(|_| row()), learns }
    }

    fn slot(&self, direction: Direction, path: CopyPath) -> Option<&AtomicU64> {
        self.factors.get(direction.index())?.get(path.index())
    }

    fn factor(&self, direction: Direction, path: CopyPath) -> f64 {
        // Relaxed here and below: an estimate, which orders nothing.
        self.slot(direction, path).map_or(1.0, |slot| f64::from_bits(slot.load(Ordering::Relaxed)))
    }

    /// Learns from a transfer that did not share the wire with another.
    ///
    /// Nothing is learned between devices: a manager compares the engines of both devices there.
    /// The engine that no longer copies would not learn that its device is idle again.
    pub(crate) fn record(
        &self,
        direction: Direction,
        path: CopyPath,
        bytes: u64,
        predicted: Duration,
        took: Duration,
    ) {
        let is_sampled = bytes >= MIN_SAMPLE_BYTES && !predicted.is_zero() && !took.is_zero();
        if !self.learns || direction.has_peer() || !is_sampled {
            return;
        }
        let Some(slot) = self.slot(direction, path) else { return };
        let old = f64::from_bits(slot.load(Ordering::Relaxed));
        // The prediction already contained the factor.
        let latest = old * took.as_secs_f64() / predicted.as_secs_f64();
        let new = old + (latest.clamp(1.0 / BOUND, BOUND) - old) * WEIGHT;
        // If two threads record at once, one update is lost, which is harmless.
        slot.store(new.to_bits(), Ordering::Relaxed);
        // The correction of an unused path decays, so that the path is tried again.
        for other in CopyPath::ALL.into_iter().filter(|other| *other != path) {
            let Some(slot) = self.slot(direction, other) else { continue };
            let factor = f64::from_bits(slot.load(Ordering::Relaxed));
            slot.store((factor + (1.0 - factor) * DECAY).to_bits(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_transfer::calibration::PathCost;

    fn shape(direction: Direction, blocks: u64, layers: u64, piece: u64) -> Shape {
        let cells = blocks * layers * 2;
        Shape {
            direction,
            bytes: cells * piece,
            runs: cells,
            cells,
            stretches: Some(blocks),
            kernels: true,
            batches: true,
        }
    }

    fn chosen(shape: &Shape) -> CopyPath {
        let choice = shape.choose(&Calibration::built_in(), &Corrections::new(true), None);
        choice.unwrap().path
    }

    #[test]
    fn large_transfers_are_staged_and_small_ones_are_direct() {
        for direction in [Direction::ToDevice, Direction::ToHost] {
            for (layers, piece) in [(92, 2048), (94, 4096), (80, 8192), (32, 32_768), (32, 131_072)]
            {
                let whole = (256 << 20) / (layers * 2 * piece) + 1;
                assert_eq!(chosen(&shape(direction, whole, layers, piece)), CopyPath::Staged);
                let one = shape(direction, 1, layers, piece);
                if one.bytes < 8 << 20 {
                    assert_eq!(chosen(&one), CopyPath::Direct, "{direction:?} {piece}");
                }
            }
        }
    }

    #[test]
    fn contiguous_blocks_are_copied_by_the_driver() {
        let mut contiguous = shape(Direction::ToHost, 64, 32, 32_768);
        (contiguous.runs, contiguous.cells, contiguous.stretches) = (1, 64, Some(1));
        assert_eq!(chosen(&contiguous), CopyPath::Contiguous);
        contiguous.direction = Direction::WithinDevice;
        assert_eq!(chosen(&contiguous), CopyPath::Contiguous);
        assert_eq!(chosen(&shape(Direction::WithinDevice, 512, 80, 8192)), CopyPath::Relayout);
    }

    #[test]
    fn a_path_with_one_more_call_must_be_faster_by_its_cost() {
        let mut calibration = Calibration::built_in();
        let shape = shape(Direction::ToDevice, 1, 64, 8192);
        let direct = *calibration.cost(Direction::ToDevice, CopyPath::Direct).unwrap();
        let time = direct.predict(shape.bytes, shape.cells);
        let mut staged_in = |micros: f64| {
            // All costs are fixed costs, so that the prediction is exactly this number.
            let cost = PathCost {
                fixed: duration(time + micros * 1e-6),
                per_piece_ns: 0.0,
                per_short_piece_ns: 0.0,
                bytes_per_second: 1e18,
            };
            calibration.set(Direction::ToDevice, CopyPath::Staged, cost);
            shape.choose(&calibration, &Corrections::new(false), None).unwrap()
        };
        let choice = staged_in(-3.5);
        assert_eq!(choice.path, CopyPath::Direct);
        let reason = choice.reason.to_string();
        assert!(reason.ends_with(" µs plus one more driver call"), "{reason}");
        let choice = staged_in(-4.5);
        assert_eq!(choice.path, CopyPath::Staged);
        let reason = choice.reason.to_string();
        assert!(reason.ends_with(" µs"), "{reason}");
    }

    #[test]
    fn a_path_that_cannot_copy_a_transfer_is_not_chosen() {
        let mut shape = shape(Direction::ToHost, 64, 32, 32_768);
        (shape.kernels, shape.stretches, shape.batches) = (false, None, false);
        assert_eq!(chosen(&shape), CopyPath::CopyEach);
        let (calibration, corrections) = (Calibration::built_in(), Corrections::new(false));
        for path in [CopyPath::Direct, CopyPath::Staged, CopyPath::Batched, CopyPath::Peer] {
            assert_eq!(shape.choose(&calibration, &corrections, Some(path)), None);
        }
        let forced = shape.choose(&calibration, &corrections, Some(CopyPath::Contiguous)).unwrap();
        assert_eq!(forced.path, CopyPath::Contiguous);
    }

    #[test]
    fn the_reason_has_both_figures() {
        let choice = shape(Direction::ToHost, 512, 32, 32_768)
            .choose(&Calibration::built_in(), &Corrections::new(true), None)
            .unwrap();
        let reason = choice.reason.to_string();
        assert!(reason.starts_with("staged "), "{reason}");
        assert_eq!(reason.matches("µs").count(), 2, "{reason}");
    }

    #[test]
    fn reasons_contain_times_in_whole_microseconds() {
        let (chosen, next) = ((CopyPath::Staged, 4_880e-6), (CopyPath::Direct, 5e-3));
        let reason = ChoiceReason::Compared { chosen, next };
        assert_eq!(reason.to_string(), "staged 4880 µs, direct kernel 5000 µs");
        let next = (CopyPath::Direct, 0.0);
        let reason = ChoiceReason::Compared { chosen, next };
        assert_eq!(
            reason.to_string(),
            "staged 4880 µs, direct kernel 0 µs plus one more driver call"
        );
    }

    #[test]
    fn slow_transfers_between_devices_do_not_change_predictions() {
        let corrections = Corrections::new(true);
        let (predicted, took) = (Duration::from_millis(1), Duration::from_millis(2));
        for direction in [Direction::ToPeer, Direction::FromPeer] {
            corrections.record(direction, CopyPath::Peer, 1 << 30, predicted, took);
            assert_eq!(corrections.factor(direction, CopyPath::Peer), 1.0);
        }
    }

    #[test]
    fn corrections_of_predictions_are_bounded() {
        let corrections = Corrections::new(true);
        let (direction, path) = (Direction::ToHost, CopyPath::Staged);
        for _ in 0..100 {
            let predicted = duration(1e-3 * corrections.factor(direction, path));
            corrections.record(direction, path, 1 << 30, predicted, Duration::from_secs(1));
        }
        let factor = corrections.factor(direction, path);
        assert!((1.2..=BOUND).contains(&factor), "{factor}");
        corrections.record(
            direction,
            CopyPath::Direct,
            100,
            Duration::from_micros(1),
            Duration::MAX,
        );
        assert_eq!(corrections.factor(direction, CopyPath::Direct), 1.0);
    }
}
