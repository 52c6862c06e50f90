//! How the two processes talk: decode's standard input and output, with lengths before the words.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::failure::Failure;

/// No word is longer: a layout's description takes some kilobytes.
const LONGEST: u32 = 64 << 20;

/// Both directions between the processes.
pub struct Channel<R, W> {
    input: R,
    output: W,
}

impl<R: Read, W: Write> Channel<R, W> {
    pub const fn new(input: R, output: W) -> Self {
        Self { input, output }
    }

    /// Sends bytes.
    pub fn send(&mut self, word: &[u8]) -> Result<(), Failure> {
        let mut write = || {
            let length = u32::try_from(word.len()).ok().filter(|length| *length <= LONGEST);
            let length = length.ok_or(io::ErrorKind::FileTooLarge)?;
            self.output.write_all(&length.to_le_bytes())?;
            self.output.write_all(word)?;
            self.output.flush()
        };
        write().map_err(Failure::Channel)
    }

    /// The next bytes.
    pub fn receive(&mut self) -> Result<Vec<u8>, Failure> {
        let mut read = || {
            let mut length = [0; 4];
            self.input.read_exact(&mut length)?;
            let length = u32::from_le_bytes(length);
            if length > LONGEST {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut word = Vec::new();
            self.input.by_ref().take(length.into()).read_to_end(&mut word)?;
            if word.len() < usize::try_from(length).unwrap_or(usize::MAX) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(word)
        };
        read().map_err(Failure::Channel)
    }

    /// Sends a value as JSON.
    pub fn tell(&mut self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_vec(value).map_err(|error| Failure::Channel(error.into()))?;
        self.send(&text)
    }

    /// The next value.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let text = self.receive()?;
        serde_json::from_slice(&text).map_err(|error| Failure::Channel(error.into()))
    }
}
