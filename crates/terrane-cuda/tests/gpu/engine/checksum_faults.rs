//! Checksums of transfers that fail, are cancelled, or have to begin again.
