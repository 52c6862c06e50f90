//! Selects the debugging adaptors around an upstream, in code or by the environment.

use std::ffi::OsString;
use std::sync::Arc;

use terrane_core::Allocate;

use super::guard::{Guard, GuardLog};
use super::poison::{Fill, Poison, PoisonBytes};
use crate::adaptors::compose::erased::{AnyUpstream, Erased};
use crate::error::PoolError;
use crate::streams::fence::StreamId;

/// The debugging adaptors to put around an upstream. By default, none.
///
/// ```
/// use terrane_core::{Allocate, ByteCount, RegionRequest};
/// use terrane_pool::adaptors::{DebugOptions, FillHost};
/// use terrane_pool::{HeapAllocator, StreamId};
///
/// let options = DebugOptions::from_env()?;
/// let (source, log) = options.around(HeapAllocator, FillHost, StreamId::new(0));
/// let block = source.allocate(&RegionRequest::new(ByteCount::kib(4)))?;
/// assert_eq!(log.is_some(), options.guard);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DebugOptions {
    /// Whether a [`Guard`] detects overlaps and writes out of bounds.
    pub guard: bool,
    /// The bytes that a [`Poison`] fills memory with; `None` for no poison.
    pub poison: Option<PoisonBytes>,
}

impl DebugOptions {
    /// The variable that enables a guard: `1` or `0`.
    pub const GUARD: &'static str = "TERRANE_GUARD";
    /// The variable that enables poison: `1` for the default bytes, `0` for none, or two bytes in
    /// hexadecimal digits, such as `ff,de`. The first is for allocation, the second for free.
    pub const POISON: &'static str = "TERRANE_POISON";

    /// Reads the options from the variables [`GUARD`](Self::GUARD) and [`POISON`](Self::POISON). A
    /// variable that is empty or not set enables nothing.
    ///
    /// The crate reads the environment only here, and never calls this itself.
    ///
    /// # Errors
    ///
    /// [`PoolError::InvalidVariable`] for a value that is not valid.
    pub fn from_env() -> Result<Self, PoolError> {
        #[expect(clippy::disallowed_methods, reason = "a documented `from_env`")]
        Self::from_variables(std::env::var_os)
    }

    /// Like [`from_env`](Self::from_env), with other variables than those of the process.
    ///
    /// # Errors
    ///
    /// As for [`from_env`](Self::from_env).
    pub fn from_variables(
        variable: impl Fn(&'static str) -> Option<OsString>,
    ) -> Result<Self, PoolError> {
        let read = |name: &'static str| {
            let value = variable(name).unwrap_or_default();
            value.into_string().map_err(|value| PoolError::InvalidVariable {
                name,
                value: value.to_string_lossy().into_owned(),
            })
        };
        let (guard, poison) = (read(Self::GUARD)?, read(Self::POISON)?);
        let invalid = |name, value| PoolError::InvalidVariable { name, value };
        Ok(Self {
            guard: match guard.as_str() {
                "" | "0" => false,
                "1" => true,
                _ => return Err(invalid(Self::GUARD, guard)),
            },
            poison: match poison.as_str() {
                "" | "0" => None,
                "1" => Some(PoisonBytes::default()),
                bytes => {
                    let bytes = PoisonBytes::parse(bytes);
                    Some(bytes.ok_or_else(|| invalid(Self::POISON, poison))?)
                }
            },
        })
    }

    /// Puts the chosen adaptors around `upstream`, and returns the log of the guard if there is
    /// one. They write through `fill`, in the order of `stream`. The guard is outside the poison.
    /// So it writes its canaries after the fill on allocation, and checks them before the fill on
    /// free.
    #[must_use]
    pub fn around<A>(
        &self,
        upstream: A,
        fill: impl Fill,
        stream: StreamId,
    ) -> (AnyUpstream, Option<GuardLog>)
    where
        A: Allocate + Send + Sync + 'static,
        A::Memory: 'static,
    {
        let fill: Arc<dyn Fill> = Arc::new(fill);
        let poisoned = match self.poison {
            Some(bytes) => {
                Erased::shared(Poison::through(upstream, Arc::clone(&fill), bytes, stream))
            }
            None => Erased::shared(upstream),
        };
        if !self.guard {
            return (poisoned, None);
        }
        let guard = Guard::through(poisoned, fill, stream);
        let log = guard.log().clone();
        (Erased::shared(guard), Some(log))
    }
}

impl PoisonBytes {
    /// Two bytes in hexadecimal digits, with a comma between them.
    fn parse(text: &str) -> Option<Self> {
        let (allocated, freed) = text.split_once(',')?;
        let byte = |digits: &str| u8::from_str_radix(digits, 16).ok();
        Some(Self { allocated: byte(allocated)?, freed: byte(freed)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(guard: &'static str, poison: &'static str) -> Result<DebugOptions, PoolError> {
        DebugOptions::from_variables(|name| match name {
            DebugOptions::GUARD => Some(guard.into()),
            DebugOptions::POISON => Some(poison.into()),
            _ => None,
        })
    }

    #[test]
    fn variables_say_what_stands_around() {
        assert_eq!(DebugOptions::from_variables(|_| None).unwrap(), DebugOptions::default());
        assert_eq!(read("", "0").unwrap(), DebugOptions::default());
        let poison = Some(PoisonBytes::default());
        assert_eq!(read("1", "1").unwrap(), DebugOptions { guard: true, poison });
        let poison = Some(PoisonBytes { allocated: 0x0c, freed: 0xa0 });
        assert_eq!(read("0", "0c,A0").unwrap(), DebugOptions { guard: false, poison });
    }

    #[test]
    fn invalid_variables_are_refused_by_name_and_value() {
        for (guard, poison, wrong) in [
            ("yes", "", DebugOptions::GUARD),
            ("", "ff", DebugOptions::POISON),
            ("", "ff,100", DebugOptions::POISON),
        ] {
            let error = read(guard, poison).unwrap_err();
            let PoolError::InvalidVariable { name, value } = &error else { panic!("{error}") };
            assert_eq!(*name, wrong);
            assert!([guard, poison].contains(&value.as_str()), "{error}");
        }
    }
}
