//! Adaptors that count: budgets, statistics, traces, and tables of live blocks.

pub(crate) mod budget;
pub(crate) mod limit;
pub(crate) mod snapshot;
pub(crate) mod statistics;
pub(crate) mod tags;
pub(crate) mod trace;
