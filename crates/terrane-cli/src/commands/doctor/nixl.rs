//! Examines NIXL and its plugins. It runs in a child process, because a plugin may hang or crash.

use super::probe::ProbeResult;

/// Probes NIXL, if this program is built with it.
#[cfg(feature = "nixl")]
pub(crate) fn probe() -> ProbeResult {
    use std::time::Instant;

    use super::finding::Finding;

    let begun = Instant::now();
    let installation = match terrane_nixl::probe() {
        Ok(installation) => installation,
        Err(error) => {
            let remedy = "pip install nixl-cu12==1.5.1, and set LD_LIBRARY_PATH to the folder of \
                          libnixl_capi.so";
            let findings = vec![Finding::refused("nixl", error.to_string(), remedy)];
            return ProbeResult { findings, ..ProbeResult::default() };
        }
    };
    let version = installation.package_version();
    let version = version
        .map_or_else(|| "version unknown".to_owned(), |version| format!("version {version}"));
    let detail = format!("{version}, {}", installation.library().display());
    let mut findings = vec![Finding::granted("nixl", detail)];
    for plugin in installation.plugins() {
        let finding = match plugin.check() {
            Ok(()) => Finding::granted("nixl-plugin", "can be loaded"),
            Err(error) => Finding::refused(
                "nixl-plugin",
                error.to_string(),
                "install the libraries that it names",
            ),
        };
        findings.push(finding.about(plugin.name().to_string()));
    }
    ProbeResult {
        findings,
        start_seconds: Some(begun.elapsed().as_secs_f64()),
        ..ProbeResult::default()
    }
}

/// Reports that this program is built without NIXL.
#[cfg(not(feature = "nixl"))]
pub(crate) fn probe() -> ProbeResult {
    use super::finding::Finding;

    let remedy = "in a checkout, run cargo run -p terrane-cli --features nixl -- doctor";
    let findings = vec![Finding::refused("nixl", "built without NIXL", remedy)];
    ProbeResult { findings, ..ProbeResult::default() }
}
