//! `compose`: Terrane beside crates that use cudarc in other ways than it does itself.
//!
//! Features of a dependency are united over a whole build. cudarc does not compile with two
//! versions of CUDA or two ways of linking, so a serving engine whose other crates name theirs can
//! use Terrane only if Terrane names none. Crates like theirs are generated, each a workspace of
//! its own under `target/compose`, and checked with Terrane's facade beside them; the crates
//! themselves are not built, as some need CUDA's compiler for that.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::command::Tool;
use crate::workspace::Workspace;

/// A crate in the same build as Terrane.
struct Neighbour {
    name: &'static str,
    /// Its requirement on cudarc.
    version: &'static str,
    /// The features of cudarc that it names, without the default ones.
    features: &'static [&'static str],
    /// The item of cudarc that it uses.
    uses: &'static str,
}

const NEIGHBOURS: [Neighbour; 3] = [
    // candle-core 0.11.1 with its feature `cuda`. Its version of CUDA comes from the build system,
    // and it is linked; where nvcc is missing, only another crate's fallback lets it compile.
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
    // Another one, linked.
    Neighbour {
        name: "explicit-version-linked",
        version: "0.19.4",
        features: &["std", "driver", "cublas", "cuda-13000", "dynamic-linking"],
        uses: "cudarc::cublas::CudaBlas",
    },
];

/// Checks each neighbour with Terrane beside it.
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
    println!("compose: Terrane builds beside {} uses of cudarc", NEIGHBOURS.len());
    Ok(())
}

fn generate(workspace: &Workspace, neighbour: &Neighbour, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("Cargo.toml"), manifest(workspace.root(), neighbour))?;
    fs::write(folder.join("src/lib.rs"), source(neighbour))?;
    // The versions that the workspace is tested with; what only the neighbour needs is added.
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

/// A crate that names both, so that neither is left out of the build.
fn source(neighbour: &Neighbour) -> String {
    format!(
        "//! Generated: Terrane beside another user of cudarc.\n\
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
