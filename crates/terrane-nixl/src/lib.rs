//! The NIXL boundary: agents, backends, registration, metadata, and the remote copy engine.
