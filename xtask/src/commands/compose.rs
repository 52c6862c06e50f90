//! `compose`: Terrane in the same build as crates that use cudarc with other features.
//!
//! Cargo unites the features of a dependency over a whole build. cudarc does not compile with two
//! versions of CUDA or two ways of linking. Crates of a serving engine may select both, so Terrane
//! must select neither. This command generates crates with such features, in separate
//! workspaces under `target/compose`, and checks each together with Terrane's facade. It does not
//! build the real crates, because some of them need CUDA's compiler.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::command::Tool;
use crate::workspace::Workspace;

/// A generated crate in the same build as Terrane.
struct Neighbour {
    name: &'static str,
    /// Its requirement on cudarc.
    version: &'static str,
    /// The features of cudarc that the crate selects, without the default ones.
    features: &'static [&'static str],
    /// The item of cudarc that the crate uses.
    uses: &'static str,
}

const NEIGHBOURS: [Neighbour; 3] = [
    // The features of candle-core 0.11.1 with `cuda`. Its build system sets the version of CUDA,
    // and it links CUDA. Without nvcc, it compiles only with another crate's fallback.
    Neighbour {
        name: "as-candle-core",
        version: "0.19.10",
        features: &[
            "std",
            "cublas",
            "cublaslt",
            "curand",
            "driver",
            "nvrtc",
            "f16",
            "f8",
            "cuda-version-from-build-system",
            "dynamic-linking",
        ],
        uses: "cudarc::cublas::CudaBlas",
    },
    // An explicit version of CUDA, loaded at run time.
    Neighbour {
        name: "explicit-version-loaded",
        version: "0.19.4",
        features: &["std", "driver", "nvrtc", "cuda-12080", "dynamic-loading"],
        uses: "cudarc::nvrtc::Ptx",
    },
    // Another explicit version, linked.
    Neighbour {
        name: "explicit-version-linked",
        version: "0.19.4",
        features: &["std", "driver", "cublas", "cuda-13000", "dynamic-linking"],
        uses: "cudarc::cublas::CudaBlas",
    },
];

/// Checks each generated crate together with Terrane.
pub fn run(workspace: &Workspace) -> Result<()> {
    for neighbour in &NEIGHBOURS {
        let folder = workspace.target().join("compose").join(neighbour.name);
        generate(workspace, neighbour, &folder)
            .with_context(|| format!("cannot write {}", folder.display()))?;
        println!("compose: {}, cudarc with {}", neighbour.name, neighbour.features.join(", "));
        Tool::cargo(workspace)
            .args(["check", "--quiet", "--manifest-path"])
            .arg(folder.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(workspace.target().join("compose/target"))
            .run()?;
    }
    println!("compose: Terrane builds with {} other uses of cudarc", NEIGHBOURS.len());
    Ok(())
}

fn generate(workspace: &Workspace, neighbour: &Neighbour, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("Cargo.toml"), manifest(workspace.root(), neighbour))?;
    fs::write(folder.join("src/lib.rs"), source(neighbour))?;
    // The versions that the workspace is tested with. Cargo adds the other dependencies of the
    // generated crate.
    fs::copy(workspace.root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    Ok(())
}

fn manifest(root: &Path, neighbour: &Neighbour) -> String {
    let Neighbour { name, version, features, .. } = neighbour;
    format!(
        "[package]\n\
         name = {name:?}\n\
         version = \"0.0.0\"\n\
         edition = \"2024\"\n\
         publish = false\n\
         \n\
         [workspace]\n\
         \n\
         [dependencies]\n\
         terrane = {{ path = {:?} }}\n\
         cudarc = {{ version = {version:?}, default-features = false, features = {features:?} }}\n",
        root.join("crates/terrane"),
    )
}

/// Returns the source of a crate that uses both, so that the build includes both.
fn source(neighbour: &Neighbour) -> String {
    format!(
        "//! Generated: Terrane and another user of cudarc.\n\
         pub use {} as Theirs;\n\
         pub use cudarc::driver::CudaContext;\n\
         \n\
         /// Both libraries, on one device.\n\
         pub fn both() -> Result<terrane::cuda::Availability, terrane::cuda::CudaError> {{\n\
         \x20   terrane::cuda::probe()\n\
         }}\n",
        neighbour.uses,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_both_crates_and_is_a_workspace_of_its_own() {
        let text = manifest(Path::new("/a b"), &NEIGHBOURS[1]);
        for line in [
            "[workspace]",
            "terrane = { path = \"/a b/crates/terrane\" }",
            "features = [\"std\", \"driver\", \"nvrtc\", \"cuda-12080\", \"dynamic-loading\"] }",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_neighbours_differ_in_what_cannot_be_united() {
        let features = |word: &str| -> Vec<&str> {
            let all = NEIGHBOURS.iter().flat_map(|neighbour| neighbour.features);
            all.copied().filter(|feature| feature.starts_with(word)).collect()
        };
        assert_eq!(
            features("cuda-"),
            ["cuda-version-from-build-system", "cuda-12080", "cuda-13000"]
        );
        assert_eq!(features("dynamic-"), ["dynamic-linking", "dynamic-loading", "dynamic-linking"]);
    }
}
