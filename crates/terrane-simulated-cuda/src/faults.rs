//! Faults that a test requests.

use crate::code::{Code, Outcome};

/// A call that will fail.
#[derive(Debug)]
struct Failing {
    function: String,
    /// The number of calls that succeed before.
    spared: u64,
    code: Code,
    /// Whether every later call fails as well.
    for_good: bool,
}

/// A context that will be lost.
#[derive(Debug)]
struct Losing {
    context: u64,
    /// The number of operations that run before.
    spared: u64,
    code: Code,
}

#[derive(Debug, Default)]
pub struct Faults {
    failing: Vec<Failing>,
    losing: Vec<Losing>,
}

impl Faults {
    /// Makes the call of `function` after `spared` further calls return `code`.
    pub fn fail(&mut self, function: &str, spared: u64, code: Code) {
        let function = function.to_owned();
        self.failing.push(Failing { function, spared, code, for_good: false });
    }

    /// Makes every later call of `function` return `code`.
    pub fn refuse(&mut self, function: &str, code: Code) {
        let function = function.to_owned();
        self.failing.push(Failing { function, spared: 0, code, for_good: true });
    }

    /// Makes the operation of `context` after `spared` further operations lose the context with
    /// `code`.
    pub fn lose(&mut self, context: u64, spared: u64, code: Code) {
        self.losing.push(Losing { context, spared, code });
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The number of requested faults that have not occurred.
    pub fn pending(&self) -> usize {
        self.failing.len() + self.losing.len()
    }

    /// Records a call.
    ///
    /// # Errors
    ///
    /// The code that the call must return.
    pub fn call(&mut self, function: &str) -> Outcome {
        let Some(index) = self.failing.iter().position(|failing| failing.function == function)
        else {
            return Ok(());
        };
        match self.failing.get_mut(index) {
            Some(failing) if failing.spared > 0 => {
                failing.spared -= 1;
                Ok(())
            }
            Some(Failing { code, for_good: true, .. }) => Err(*code),
            _ => Err(self.failing.remove(index).code),
        }
    }

    /// Records an operation that is about to run.
    ///
    /// # Errors
    ///
    /// The code with which its context is lost.
    pub fn operation(&mut self, context: u64) -> Outcome {
        let Some(index) = self.losing.iter().position(|losing| losing.context == context) else {
            return Ok(());
        };
        match self.losing.get_mut(index) {
            Some(losing) if losing.spared > 0 => {
                losing.spared -= 1;
                Ok(())
            }
            _ => Err(self.losing.remove(index).code),
        }
    }
}
