//! Configures agents by environment variables.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use terrane_core::BackendName;

use super::builder::AgentBuilder;
use super::config::{BackendConfig, BackendRequirement, FileAccess, Parameter};
use crate::error::NixlError;

/// The prefix of all settings.
const PREFIX: &str = "TERRANE_NIXL_";
/// The prefix of one backend's settings. The rest of the variable's name is the backend's name,
/// unchanged.
const PARAMETERS: &str = "TERRANE_NIXL_PARAMETERS_";
const FILE_ACCESS: &str = "TERRANE_NIXL_FILE_ACCESS_";

const BACKENDS: &str = "TERRANE_NIXL_BACKENDS";
const REQUIRED: &str = "TERRANE_NIXL_REQUIRED";
const AGENT: &str = "TERRANE_NIXL_AGENT";
const PROGRESS: &str = "TERRANE_NIXL_PROGRESS";
const TELEMETRY: &str = "TERRANE_NIXL_TELEMETRY";

const A_LIST: &str = "names of backends, separated by commas";
const PAIRS: &str = "`key=value` pairs, separated by semicolons, where `\\;` and `\\\\` stand for \
                     a semicolon and a backslash, and `!key=value` sets an unchecked parameter";

impl AgentBuilder {
    /// Creates a builder from the environment.
    ///
    /// | variable | value | if not set, or empty |
    /// |---|---|---|
    /// | `TERRANE_NIXL_BACKENDS` | names of backends, in the order in which registrations try them: `UCX,GDS_MT` | none |
    /// | `TERRANE_NIXL_REQUIRED` | the backends that [must accept](BackendConfig::required) every registration | none |
    /// | `TERRANE_NIXL_PARAMETERS_`*NAME* | parameters of the backend *NAME*: `key=value;key=value` | none |
    /// | `TERRANE_NIXL_FILE_ACCESS_`*NAME* | `buffered` or `direct`: [which descriptor it uses for files](FileAccess) | as for [`BackendConfig::file_access`] |
    /// | `TERRANE_NIXL_AGENT` | the agent's name | a name that is unique across processes |
    /// | `TERRANE_NIXL_PROGRESS` | `off`, or the delay of the [progress thread](Self::progress_thread) in microseconds | `1000` |
    /// | `TERRANE_NIXL_TELEMETRY` | `on` or `off` | `off` |
    ///
    /// The name of a backend follows `PARAMETERS_` or `FILE_ACCESS_`, underscores included:
    /// `TERRANE_NIXL_PARAMETERS_GDS_MT`. Within a parameter's value, `\;` is a semicolon and `\\` a
    /// backslash; the key ends at the first `=`. A key with `!` before it is an [unchecked
    /// parameter](BackendConfig::unchecked_parameter).
    ///
    /// Only this function reads the crate's own variables, and nothing in the crate calls it.
    ///
    /// # Errors
    ///
    /// [`NixlError::InvalidVariable`], [`NixlError::UnknownVariable`] and
    /// [`NixlError::VariableWithoutBackend`] name the variable.
    pub fn from_env() -> Result<Self, NixlError> {
        Self::from_variables(std::env::vars_os())
    }

    /// Like [`from_env`](Self::from_env), with the given variables instead of the process's
    /// environment. Variables that do not begin with `TERRANE_NIXL_` are ignored.
    ///
    /// ```
    /// use terrane_nixl::AgentBuilder;
    ///
    /// let builder = AgentBuilder::from_variables([
    ///     ("TERRANE_NIXL_BACKENDS", "UCX,GDS_MT"),
    ///     ("TERRANE_NIXL_PARAMETERS_GDS_MT", "thread_count=8"),
    /// ])?;
    /// assert_eq!(builder.backends()[1].name().as_str(), "GDS_MT");
    ///
    /// let error = AgentBuilder::from_variables([("TERRANE_NIXL_BACKEND", "UCX")]).unwrap_err();
    /// assert!(error.to_string().contains("TERRANE_NIXL_BACKEND"));
    /// # Ok::<(), terrane_nixl::NixlError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`from_env`](Self::from_env).
    pub fn from_variables<K: Into<OsString>, V: Into<OsString>>(
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, NixlError> {
        let settings = settings(variables)?;
        let mut builder = match value(&settings, AGENT) {
            Some(name) => Self::new(name),
            None => Self::unnamed(),
        };
        builder.telemetry = match value(&settings, TELEMETRY) {
            None | Some("off") => false,
            Some("on") => true,
            Some(other) => return Err(invalid(TELEMETRY, other, "`on` or `off`")),
        };
        match value(&settings, PROGRESS) {
            None => {}
            Some("off") => builder.progress = None,
            Some(delay) => {
                let expected = "`off`, or a number of microseconds";
                let delay = delay.parse().map_err(|_| invalid(PROGRESS, delay, expected))?;
                builder.progress = Some(Duration::from_micros(delay));
            }
        }
        builder.backends = backends(&settings)?;
        Ok(builder)
    }
}

type Settings = BTreeMap<String, String>;

/// Returns the variables with the prefix. An unknown one is an error.
fn settings<K: Into<OsString>, V: Into<OsString>>(
    variables: impl IntoIterator<Item = (K, V)>,
) -> Result<Settings, NixlError> {
    let exact = [BACKENDS, REQUIRED, AGENT, PROGRESS, TELEMETRY];
    let mut settings = Settings::new();
    for (name, value) in variables {
        let name = name.into().to_string_lossy().into_owned();
        if !name.starts_with(PREFIX) {
            continue;
        }
        let of_a_backend = [PARAMETERS, FILE_ACCESS]
            .iter()
            .any(|prefix| name.strip_prefix(prefix).is_some_and(is_backend_name));
        if !of_a_backend && !exact.contains(&name.as_str()) {
            return Err(NixlError::UnknownVariable { name });
        }
        let value = value
            .into()
            .into_string()
            .map_err(|value| invalid(&name, &value.to_string_lossy(), "text in UTF-8"))?;
        settings.insert(name, value);
    }
    Ok(settings)
}

/// The value of a variable; `None` if it is empty.
fn value<'s>(settings: &'s Settings, name: &str) -> Option<&'s str> {
    settings.get(name).map(String::as_str).filter(|value| !value.is_empty())
}

fn invalid(name: &str, value: &str, expected: &'static str) -> NixlError {
    NixlError::InvalidVariable { name: name.to_owned(), value: value.to_owned(), expected }
}

fn is_backend_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn list<'s>(settings: &'s Settings, name: &str) -> Result<Vec<&'s str>, NixlError> {
    let Some(text) = value(settings, name) else { return Ok(Vec::new()) };
    let names: Vec<_> = text.split(',').map(str::trim).collect();
    if names.iter().all(|name| is_backend_name(name)) {
        Ok(names)
    } else {
        Err(invalid(name, text, A_LIST))
    }
}

fn backends(settings: &Settings) -> Result<Vec<BackendConfig>, NixlError> {
    let mut backends: Vec<_> =
        list(settings, BACKENDS)?.into_iter().map(BackendConfig::new).collect();
    for backend in list(settings, REQUIRED)? {
        configured(&mut backends, REQUIRED, backend)?.requirement = BackendRequirement::Required;
    }
    for (name, value) in settings {
        if let Some(backend) = name.strip_prefix(PARAMETERS) {
            let parameters = parameters(value).ok_or_else(|| invalid(name, value, PAIRS))?;
            configured(&mut backends, name, backend)?.parameters = parameters;
        } else if let Some(backend) = name.strip_prefix(FILE_ACCESS) {
            let backend = configured(&mut backends, name, backend)?;
            match value.as_str() {
                "" => {}
                "buffered" => backend.file_access = FileAccess::Buffered,
                "direct" => backend.file_access = FileAccess::Direct,
                _ => return Err(invalid(name, value, "`buffered` or `direct`")),
            }
        }
    }
    Ok(backends)
}

/// The configuration of the backend that a variable names.
fn configured<'b>(
    backends: &'b mut [BackendConfig],
    name: &str,
    backend: &str,
) -> Result<&'b mut BackendConfig, NixlError> {
    let missing = || NixlError::VariableWithoutBackend {
        name: name.to_owned(),
        backend: BackendName::from(backend),
    };
    backends.iter_mut().find(|config| config.name.as_str() == backend).ok_or_else(missing)
}

/// Parses `key=value;key=value`; `None` if the text does not have that form.
fn parameters(text: &str) -> Option<Vec<Parameter>> {
    let mut pairs = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            ';' => pairs.push(String::new()),
            '\\' => match characters.next()? {
                escaped @ (';' | '\\') => pairs.last_mut()?.push(escaped),
                _ => return None,
            },
            plain => pairs.last_mut()?.push(plain),
        }
    }
    let pair = |pair: &String| {
        let (key, value) = pair.split_once('=')?;
        let (key, checked) = match key.trim().strip_prefix('!') {
            Some(key) => (key, false),
            None => (key.trim(), true),
        };
        let parameter = Parameter { key: key.to_owned(), value: value.to_owned(), checked };
        (!key.is_empty()).then_some(parameter)
    };
    // A semicolon at the end starts no parameter.
    pairs.iter().filter(|pair| !pair.trim().is_empty()).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<AgentBuilder, NixlError> {
        AgentBuilder::from_variables(variables.iter().copied())
    }

    #[test]
    fn an_empty_environment_configures_an_agent_without_backends() {
        let builder = read(&[("PATH", "/bin"), ("TERRANE_NIXL_BACKENDS", "")]).unwrap();
        assert!(builder.backends.is_empty());
        assert_eq!(builder.progress, Some(Duration::from_millis(1)));
        assert!(!builder.telemetry);
        assert_ne!(builder.name, read(&[]).unwrap().name);
    }

    #[test]
    fn each_setting_is_read() {
        let builder = read(&[
            ("TERRANE_NIXL_AGENT", "decode-3"),
            ("TERRANE_NIXL_PROGRESS", "250"),
            ("TERRANE_NIXL_TELEMETRY", "on"),
        ])
        .unwrap();
        assert_eq!(builder.name.as_str(), "decode-3");
        assert_eq!(builder.progress, Some(Duration::from_micros(250)));
        assert!(builder.telemetry);
        let builder = read(&[("TERRANE_NIXL_PROGRESS", "off")]).unwrap();
        assert_eq!(builder.progress, None);
    }

    #[test]
    fn names_with_underscores_differ_from_their_prefixes() {
        let builder = read(&[
            ("TERRANE_NIXL_BACKENDS", "UCX, GDS_MT"),
            ("TERRANE_NIXL_REQUIRED", "GDS_MT"),
            ("TERRANE_NIXL_PARAMETERS_GDS_MT", "thread_count=8;max=a=b;"),
            ("TERRANE_NIXL_PARAMETERS_UCX", r"ucx_devices=mlx5_0:1,mlx5_1:1;!path=C\\x\;y"),
            ("TERRANE_NIXL_FILE_ACCESS_GDS_MT", "buffered"),
        ])
        .unwrap();
        let expected = [
            BackendConfig::new("UCX")
                .parameter("ucx_devices", "mlx5_0:1,mlx5_1:1")
                .unchecked_parameter("path", r"C\x;y"),
            BackendConfig::new("GDS_MT")
                .parameter("thread_count", "8")
                .parameter("max", "a=b")
                .required()
                .file_access(FileAccess::Buffered),
        ];
        assert_eq!(builder.backends, expected);
        let error = read(&[
            ("TERRANE_NIXL_BACKENDS", "GDS"),
            ("TERRANE_NIXL_PARAMETERS_GDS_MT", "thread_count=8"),
        ])
        .unwrap_err();
        let message = error.to_string();
        assert!(message.contains("GDS_MT"), "{message}");
        assert!(matches!(error, NixlError::VariableWithoutBackend { .. }), "{message}");
    }

    #[test]
    fn unknown_variables_are_refused_by_name() {
        for (name, value) in [
            ("TERRANE_NIXL_BACKENDS", "UCX,,POSIX"),
            ("TERRANE_NIXL_BACKENDS", "UCX POSIX"),
            ("TERRANE_NIXL_PROGRESS", "-1"),
            ("TERRANE_NIXL_TELEMETRY", "yes"),
            ("TERRANE_NIXL_PARAMETERS_UCX", "num_workers"),
            ("TERRANE_NIXL_PARAMETERS_UCX", "=4"),
            ("TERRANE_NIXL_PARAMETERS_UCX", r"path=C:\dir"),
            ("TERRANE_NIXL_PARAMETERS_UCX", "path=end\\"),
            ("TERRANE_NIXL_FILE_ACCESS_UCX", "DIRECT"),
        ] {
            let error = if name == BACKENDS {
                read(&[(name, value)])
            } else {
                read(&[(BACKENDS, "UCX"), (name, value)])
            };
            let error = error.unwrap_err();
            assert!(error.to_string().starts_with(name), "{name}={value}: {error}");
            assert!(matches!(error, NixlError::InvalidVariable { .. }), "{error}");
        }
        for name in ["TERRANE_NIXL_", "TERRANE_NIXL_UCX", "TERRANE_NIXL_PARAMETERS_"] {
            let error = read(&[(BACKENDS, "UCX"), (name, "")]).unwrap_err();
            assert!(matches!(error, NixlError::UnknownVariable { .. }), "{name}: {error}");
        }
    }
}
