//! `nixl`: the NIXL that Terrane is tested with, and libclang, which the bindings need to build.
//!
//! Both are from their wheels on PyPI and are unpacked under `target/nixl`. Every command that
//! builds or runs code with NIXL uses this module's environment, and fetches the wheels if
//! necessary.

pub mod bindings;
mod closure;
pub mod verbs;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::Package;

use self::closure::closure;
use crate::command::{Tool, environment};
use crate::pypi::{self, Wheels};
use crate::workspace::Workspace;

/// The options of `cargo xtask nixl`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Prints only the lines that set the variables, for `eval "$(cargo xtask nixl --print-env)"`
    #[arg(long)]
    print_env: bool,
    /// Runs the tests of NIXL with the RDMA libraries of the unpacked packages in DIR
    #[arg(long, value_name = "DIR", conflicts_with = "print_env")]
    pub with_verbs: Option<PathBuf>,
    /// Checks `terrane-nixl` with the lowest and the highest supported release of its bindings
    #[arg(long, conflicts_with_all = ["print_env", "with_verbs"])]
    pub bindings: bool,
}

/// The release of the library. A test compares it with the locked release of nixl-sys.
const VERSION: &str = "1.5.1";

const WHEELS: Wheels = Wheels {
    name: "NIXL 1.5.1 with libclang and two libraries of CUDA",
    requirements: "nixl-cu12==1.5.1 \
        --hash=sha256:a02005f84e498641b8fe02d058fdc6762c99edf7ae6430176d2d16fa57f4fb93 \
        --hash=sha256:98d4b169813a5110842aefc383ba3bf259a886cd09cc9d54c7a6db69bb36de4d\n\
        nvidia-cuda-runtime-cu12==12.9.79 \
        --hash=sha256:25bba2dfb01d48a9b59ca474a1ac43c6ebf7011f1b0b8cc44f54eb6ac48a96c3 \
        --hash=sha256:83469a846206f2a733db0c42e223589ab62fd2fabac4432d2f8802de4bded0a4\n\
        nvidia-cufile-cu12==1.14.1.1 \
        --hash=sha256:9552e2231792e94b1ff17bc99e958cc0e6bbbaa4a9d91fa2dbeed97716628fe6 \
        --hash=sha256:8dea77590761e02cb6dd955a57cb6414c58aa3cb1b7adbf9919869a11509cf65\n\
        libclang==18.1.1 \
        --hash=sha256:c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b \
        --hash=sha256:54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592\n",
    members: &[
        IN_WHEEL,
        // Dependencies of these libraries, whose run path names this folder.
        "nixl_cu12.libs/lib",
        "nixl_cu12.libs/ucx/lib",
        CUDA_IN_WHEELS[0],
        CUDA_IN_WHEELS[1],
        CLANG_IN_WHEEL,
        RELEASE,
    ],
    revision: 5,
};

/// The folder of the wheel with the libraries and, below it, the plugins.
const IN_WHEEL: &str = ".nixl_cu12.mesonpy.libs/";
/// The libraries of the CUDA toolkit that UCX and GDS need. Without libcudart, UCX cannot observe
/// allocations and treats most device memory as host memory.
const CUDA_IN_WHEELS: [&str; 2] =
    ["nvidia/cuda_runtime/lib/libcudart.so.12", "nvidia/cufile/lib/libcufile.so.0"];
/// The folder of the wheel with libclang.
const CLANG_IN_WHEEL: &str = "libclang-18.1.1.data/platlib/clang/native/";

/// The file from which a probe reads the release of the library.
pub const RELEASE: &str = "nixl_cu12-1.5.1.dist-info/METADATA";

/// The crate with the bindings.
const BINDINGS: &str = "nixl-sys";

/// The crate that uses the bindings.
const CRATE: &str = "terrane-nixl";

/// The library that the bindings load.
const LIBRARY: &str = "libnixl_capi.so";

/// The libraries of libnl: the prefix of the wheel's files, and the name that programs of the
/// machine load.
const NETLINK: [(&str, &str); 2] =
    [("libnl-3-", "libnl-3.so.200"), ("libnl-route-3-", "libnl-route-3.so.200")];

/// The plugins that Terrane uses. The others need object stores and special networks.
const PLUGINS: [&str; 4] = ["UCX", "POSIX", "GDS", "GDS_MT"];

/// With this value of the variable, commands use the machine's NIXL and fetch nothing.
const CHOICE: (&str, &str) = ("TERRANE_NIXL", "system");

/// The files that `cargo xtask nixl` provided.
pub struct Nixl {
    folder: PathBuf,
}

/// Provides both, and prints the variables for use outside `cargo xtask`.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    let nixl = provide(workspace)?;
    if !arguments.print_env {
        println!("NIXL {VERSION} and libclang are in {}", nixl.folder.display());
        println!("`cargo xtask` uses them by itself; elsewhere, set");
    }
    for (name, value) in nixl.variables() {
        println!("export {name}={}", quoted(&value.to_string_lossy()));
    }
    let libraries = quoted(&nixl.libraries().to_string_lossy());
    println!("export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}");
    Ok(())
}

/// Sets the variables by which `tool` finds libclang in builds, and its programs find NIXL.
///
/// With `TERRANE_NIXL=system`, the machine's NIXL is used and nothing changes.
pub fn with_nixl(workspace: &Workspace, tool: Tool) -> Result<Tool> {
    if environment(CHOICE.0).as_deref() == Some(CHOICE.1) {
        return Ok(tool);
    }
    let nixl = provide(workspace)?;
    let tool = nixl.variables().iter().fold(tool, |tool, (name, value)| tool.env(name, value));
    Ok(tool.library_path(&nixl.libraries()))
}

/// Does the same if one of `packages` can use NIXL.
pub fn with_nixl_for(workspace: &Workspace, tool: Tool, packages: &[&Package]) -> Result<Tool> {
    if packages.iter().any(|package| workspace.reaches(package, BINDINGS)) {
        return with_nixl(workspace, tool);
    }
    Ok(tool)
}

/// The folder of both. It does not depend on `CARGO_TARGET_DIR`, because Cargo's configuration
/// cannot.
fn folder(workspace: &Workspace) -> PathBuf {
    workspace.root().join("target/nixl")
}

/// Fetches both if necessary.
pub fn provide(workspace: &Workspace) -> Result<Nixl> {
    let folder = folder(workspace);
    pypi::provide(workspace, &WHEELS, &folder, |folder| arrange(workspace, folder))?;
    let nixl = Nixl { folder };
    nixl.link_compiler()?;
    Ok(nixl)
}

impl Nixl {
    /// The folder of the library. Its plugins are in the folder `plugins` below.
    pub fn libraries(&self) -> PathBuf {
        self.folder.join("lib")
    }

    /// The folder of all files. Loaded libraries find the others by relative paths.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folders with libraries: NIXL, its plugins, their dependencies, and UCX's modules.
    fn places(&self) -> [PathBuf; 4] {
        let (own, others) = (self.libraries(), self.folder.join("nixl_cu12.libs"));
        [own.clone(), own.join("plugins"), others.clone(), others.join("ucx")]
    }

    /// Returns all files that are loaded when Terrane uses NIXL with the modules of UCX that
    /// `with_module` selects.
    pub fn loaded(
        &self,
        workspace: &Workspace,
        with_module: impl Fn(&str) -> bool,
    ) -> Result<BTreeSet<PathBuf>> {
        let [own, plugins, others, modules] = self.places();
        let mut roots = vec![own.join(LIBRARY)];
        roots.extend(PLUGINS.map(|plugin| plugins.join(format!("libplugin_{plugin}.so"))));
        for library in &roots {
            if !library.is_file() {
                bail!("the wheel of NIXL {VERSION} holds no {}", library.display());
            }
        }
        roots.extend(files(&modules)?.into_iter().filter(|module| {
            module.file_name().is_some_and(|name| with_module(&name.to_string_lossy()))
        }));
        closure(workspace, &[own, others], roots)
    }

    /// Returns the variables for the build of the bindings: libclang, and a compiler for its
    /// headers, which the wheel of libclang lacks.
    fn variables(&self) -> [(&'static str, PathBuf); 2] {
        [("LIBCLANG_PATH", self.folder.join("clang")), ("CLANG_PATH", self.compiler())]
    }

    fn compiler(&self) -> PathBuf {
        self.folder.join("clang/c++")
    }

    /// Links the machine's compiler to the fixed path in `.cargo/config.toml`.
    fn link_compiler(&self) -> Result<()> {
        let link = self.compiler();
        if link.exists() {
            return Ok(());
        }
        let path = environment("PATH").unwrap_or_default();
        let mut found = path.split(':').map(|folder| Path::new(folder).join("g++"));
        let compiler = found
            .find(|program| program.is_file())
            .context("the bindings of NIXL need g++; install it (`apt-get install g++`)")?;
        // The link may exist and be dangling, and another process may create it at the same time.
        let fresh = link.with_extension(std::process::id().to_string());
        symlink(&compiler, &fresh)
            .and_then(|()| fs::rename(&fresh, &link))
            .with_context(|| format!("cannot link {}", link.display()))
    }
}

/// Gives the unpacked files short names, and removes the files that no plugin needs.
fn arrange(workspace: &Workspace, folder: &Path) -> Result<()> {
    for (from, to) in [(IN_WHEEL, &folder.join("lib")), (CLANG_IN_WHEEL, &folder.join("clang"))] {
        let from = folder.join(from.trim_end_matches('/'));
        fs::rename(&from, to).with_context(|| format!("the wheels hold no {}", from.display()))?;
    }
    // In NIXL's folder, where the plugins search for them.
    for library in CUDA_IN_WHEELS.map(|library| folder.join(library)) {
        let name = library.file_name().context("a library has a name")?;
        let to = folder.join("lib").join(name);
        fs::rename(&library, to)
            .with_context(|| format!("the wheels hold no {}", library.display()))?;
    }
    let nixl = Nixl { folder: folder.to_owned() };
    let wanted = nixl.loaded(workspace, is_transport)?;
    for place in nixl.places() {
        for file in files(&place)?.iter().filter(|file| !wanted.contains(*file)) {
            fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
    }
    // For UCX's modules. They search UCX's folder, and have no path to NIXL's.
    let runtime = "libcudart.so.12";
    let link = folder.join("nixl_cu12.libs").join(runtime);
    symlink(Path::new("../lib").join(runtime), &link)
        .with_context(|| format!("cannot link {}", link.display()))?;
    link_netlink(folder)?;
    for emptied in ["libclang-18.1.1.data", "nvidia"].map(|name| folder.join(name)) {
        fs::remove_dir_all(&emptied)
            .with_context(|| format!("cannot remove {}", emptied.display()))?;
    }
    Ok(())
}

/// Links the wheel's libnl under the names of the machine's libnl, in a folder that the loader
/// searches first.
///
/// UCX's module for EFA loads the machine's verbs library, which loads libnl by these names. A
/// second libnl in the process would call functions of the first one and crash at exit. With the
/// links, the loader finds the libnl that is already loaded.
fn link_netlink(folder: &Path) -> Result<()> {
    let libraries = files(&folder.join("nixl_cu12.libs"))?;
    for (prefix, name) in NETLINK {
        let mut names = libraries.iter().filter_map(|library| library.file_name());
        let own = names
            .find(|own| own.to_string_lossy().starts_with(prefix))
            .with_context(|| format!("the wheel of NIXL {VERSION} holds no {prefix}*"))?;
        let link = folder.join("lib").join(name);
        symlink(Path::new("../nixl_cu12.libs").join(own), &link)
            .with_context(|| format!("cannot link {}", link.display()))?;
    }
    Ok(())
}

/// Whether a file is a module of UCX that transfers bytes. Other modules measure or describe.
pub fn is_transport(name: &str) -> bool {
    (name.starts_with("libuct_") || name.starts_with("libucm_")) && name.contains(".so")
}

/// Returns the files of a folder, without its subfolders.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<PathBuf>>>()?;
    Ok(paths.into_iter().filter(|path| path.is_file()).collect())
}

/// Quotes text for a POSIX shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_that_of_the_bindings() {
        let workspace = Workspace::load().unwrap();
        let lock = fs::read_to_string(workspace.root().join("Cargo.lock")).unwrap();
        let locked = format!("name = \"{BINDINGS}\"\nversion = \"{VERSION}\"\n");
        assert!(lock.contains(&locked), "Cargo.lock has another release of {BINDINGS}");
        assert!(WHEELS.requirements.starts_with(&format!("nixl-cu12=={VERSION} ")));
        assert!(WHEELS.name.contains(VERSION));
        assert!(RELEASE.contains(&format!("-{VERSION}.")));
    }

    /// Cargo's configuration has the same paths, so that plain cargo also builds the bindings.
    #[test]
    fn cargo_is_configured_as_the_commands_are() {
        let workspace = Workspace::load().unwrap();
        let config = fs::read_to_string(workspace.root().join(".cargo/config.toml")).unwrap();
        let folder = folder(&workspace).strip_prefix(workspace.root()).unwrap().to_owned();
        let nixl = Nixl { folder };
        let library = ("NIXL_CAPI_LIBRARY", nixl.libraries().join(LIBRARY));
        for (name, value) in nixl.variables().into_iter().chain([library]) {
            let line = format!("{name} = {{ value = {value:?}, relative = true }}\n");
            assert!(config.contains(&line), "{line} is not in\n{config}");
        }
    }

    #[test]
    fn cargo_finds_what_the_commands_fetch_wherever_it_builds() {
        let target = tempfile::tempdir().unwrap();
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["commands::nixl::tests::cargo_is_configured_as_the_commands_are", "--exact"])
            .env("CARGO_TARGET_DIR", target.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn the_wheels_libnl_has_the_names_of_the_machines() {
        let folder = tempfile::tempdir().unwrap();
        let (own, others) = (folder.path().join("lib"), folder.path().join("nixl_cu12.libs"));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&others).unwrap();
        let missing = link_netlink(folder.path()).unwrap_err();
        assert!(missing.to_string().contains("libnl-3-"), "{missing}");
        for (prefix, _) in NETLINK {
            fs::write(others.join(format!("{prefix}0123.so.200.26.0")), prefix).unwrap();
        }
        link_netlink(folder.path()).unwrap();
        for (prefix, name) in NETLINK {
            assert_eq!(fs::read_to_string(own.join(name)).unwrap(), prefix);
        }
    }

    #[test]
    fn each_architecture_has_a_hash() {
        for package in WHEELS.requirements.lines() {
            assert_eq!(package.matches("--hash=sha256:").count(), 2, "{package}");
        }
    }

    #[test]
    fn quoted_values_are_unchanged_by_a_shell() {
        assert_eq!(quoted("/a b"), "'/a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }

    #[test]
    fn modules_are_distinguished_from_tools() {
        assert!(is_transport("libuct_cuda.so.0.0.0") && is_transport("libucm_cuda.so.0.0.0"));
        assert!(!is_transport("libucx_perftest_cuda.so.0.0.0") && !is_transport("libuct_cuda.la"));
    }
}
