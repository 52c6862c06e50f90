//! The command, run as users run it.
