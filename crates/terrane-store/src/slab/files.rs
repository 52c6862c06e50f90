//! Slab files: their names, slots, and syncs.
