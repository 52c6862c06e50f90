//! The channel between the two processes: messages with a length prefix on decode's standard input
//! and output.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;

/// The maximum length of a message. A layout's description has some kilobytes.
const MAX_MESSAGE_BYTES: u32 = 64 << 20;

/// Both directions of the channel.
pub struct Channel<R, W> {
    input: R,
    output: W,
}

impl<R: Read, W: Write> Channel<R, W> {
    pub const fn new(input: R, output: W) -> Self {
        Self { input, output }
    }

    /// Sends a message.
    pub fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        let mut write = || {
            let length =
                u32::try_from(message.len()).ok().filter(|length| *length <= MAX_MESSAGE_BYTES);
            let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
            self.output.write_all(&length.to_le_bytes())?;
            self.output.write_all(message)?;
            self.output.flush()
        };
        write().map_err(Failure::Channel)
    }

    /// Receives the next message.
    pub fn receive(&mut self) -> Result<Vec<u8>, Failure> {
        let mut read = || {
            let mut length = [0; 4];
            self.input.read_exact(&mut length)?;
            let length = u32::from_le_bytes(length);
            if length > MAX_MESSAGE_BYTES {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut message = Vec::new();
            self.input.by_ref().take(length.into()).read_to_end(&mut message)?;
            if message.len() < usize::try_from(length).unwrap_or(usize::MAX) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(message)
        };
        read().map_err(Failure::Channel)
    }

    /// Sends a value as JSON.
    pub fn send_json(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_vec(value).map_err(|error| Failure::Channel(error.into()))?;
        self.send(&text)
    }

    /// Receives the next value as JSON.
    pub fn receive_json<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let text = self.receive()?;
        serde_json::from_slice(&text).map_err(|error| Failure::Channel(error.into()))
    }
}
