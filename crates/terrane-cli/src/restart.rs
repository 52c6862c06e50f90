//! How the command starts itself in a child process.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::Command;

/// How to start the command in a child process: the program, and the arguments before its own.
#[derive(Clone, Debug)]
pub struct Restart {
    program: PathBuf,
    arguments: Vec<OsString>,
    python: OsString,
}

impl Restart {
    /// The executable of this process, without further arguments.
    #[must_use]
    pub fn of_this_executable() -> Self {
        // Without /proc, the shell's search path finds the program.
        Self::new(std::env::current_exe().unwrap_or_else(|_| "terrane".into()), [])
    }

    /// A program with its first arguments, such as an interpreter and `-m` with a module.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        let (program, arguments) = (program.into(), arguments.into_iter().collect());
        Self { program, arguments, python: "python3".into() }
    }

    /// Sets the interpreter for scripts, unless an option names another one. A Python package
    /// passes the interpreter of this process. The default is `python3` from the shell's search
    /// path.
    #[must_use]
    pub fn within_python(self, python: impl Into<OsString>) -> Self {
        Self { python: python.into(), ..self }
    }

    pub(crate) fn python(&self) -> &OsStr {
        &self.python
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}
