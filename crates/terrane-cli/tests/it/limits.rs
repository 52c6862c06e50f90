//! Limits of the system that are really set, in the reports of `doctor` and `plan`.

use std::process::{Command, Output};

use serde_json::Value;

use crate::support::PROGRAM;

/// The output of a shell script. `None`, with a printed skip, if the system refused to set its
/// limit.
fn shell(test: &str, needs: Needs, script: &str, arguments: &[&str]) -> Option<Output> {
    let output = output(needs, script, arguments);
    output.inspect_err(|reason| eprintln!("skipped: {test}: {reason}")).ok()
}

/// The script exits with 9 if the system refused to set its limit. Any other status that is not the
/// command's causes a panic. `$T` is the command, and the other arguments are `$1`, `$2` and so on.
fn output(needs: Needs, script: &str, arguments: &[&str]) -> Result<Output, String> {
    let start = match needs {
        Needs::Nothing => r#"exec sh -c "$0" sh "$@""#,
        Needs::Namespace => r#"unshare -rm true || exit 9; exec unshare -rm sh -c "$0" sh "$@""#,
    };
    let mut command = Command::new("sh");
    command.args(["-c", start, script]).args(arguments).env("T", PROGRAM);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        // Statuses of the command are at most 5.
        Some(0..=5) if !output.stdout.is_empty() => Ok(output),
        Some(9) => Err(error.trim().replace('\n', " ")),
        _ => panic!("{}: {error}", output.status),
    }
}

/// The kind of namespace that a script needs.
enum Needs {
    Nothing,
    /// A user namespace and a mount namespace.
    Namespace,
}

/// The JSON values that a script printed.
fn values(output: &Output) -> Vec<Value> {
    let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
    values.collect::<Result<_, _>>().unwrap()
}

fn finding<'a>(report: &'a Value, key: &str) -> &'a Value {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().find(|finding| finding["key"] == key).unwrap_or_else(|| panic!("{report:#}"))
}

fn limit<'a>(plan: &'a Value, part: &str) -> &'a Value {
    let limits = plan["limits"].as_array().unwrap();
    let found = limits.iter().find(|limit| limit["limit"].as_str().unwrap().contains(part));
    found.unwrap_or_else(|| panic!("no limit of {part}: {limits:?}"))
}

/// A control group below that of this process, with a limit of 256 MiB. The script always removes
/// it.
const REAL_GROUP: &str = r#"
own=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
if [ -n "$own" ]; then
    group=/sys/fs/cgroup/memory$own/terrane-test-$$ file=memory.limit_in_bytes
else
    group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/terrane-test-$$ file=memory.max
fi
mkdir "$group" || exit 9
trap 'rmdir "$group"' EXIT
echo 268435456 > "$group/$file" || exit 9
sh -c 'echo $$ > "$1/cgroup.procs"' sh "$group" || exit 9
sh -c 'echo $$ > "$1/cgroup.procs" && exec "$T" doctor --json' sh "$group" || exit
sh -c 'echo $$ > "$1/cgroup.procs" && exec "$T" plan llama-3.1-8b --host 1GiB --here --json' sh "$group"
"#;

#[test]
fn the_memory_of_a_control_group_is_a_limit() {
    let test = "the_memory_of_a_control_group_is_a_limit";
    let Some(output) = shell(test, Needs::Nothing, REAL_GROUP, &[]) else { return };
    let [doctor, plan] = values(&output).try_into().unwrap();
    let group = finding(&doctor, "control-group");
    assert_eq!(group["status"], "partial");
    assert!(group["detail"].as_str().unwrap().starts_with("256 MiB of memory, of "), "{group}");
    let remedy = group["remedy"].as_str().unwrap();
    assert!(remedy.contains("docker run --memory"), "{group}");
    // This machine may also have a limit of processors.
    let has_processors = group["detail"].as_str().unwrap().contains("processors");
    assert_eq!(remedy.contains("docker run --cpus"), has_processors, "{group}");
    let available = limit(&plan, "host memory that is available");
    assert!(available["available"].as_u64().unwrap() <= 256 << 20, "{available}");
    assert!(available["remedy"].as_str().unwrap().contains("memory.max"), "{available}");
}

/// The files of a version 2 control group, in a namespace of this process.
const GROUP_OF_A_CONTAINER: &str = r#"
mount -t tmpfs tmpfs /sys/fs/cgroup || exit 9
cd /sys/fs/cgroup
echo 1073741824 > memory.max
echo 805306368 > memory.current
echo 'inactive_file 0' > memory.stat
echo '50000 100000' > cpu.max
exec "$T" doctor --json --require control-group
"#;

#[test]
fn the_processors_of_a_control_group_are_a_limit() {
    let test = "the_processors_of_a_control_group_are_a_limit";
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    if !groups.lines().any(|line| line.starts_with("0::")) {
        return eprintln!("skipped: {test}: the kernel has no control groups of version 2");
    }
    let Some(output) = shell(test, Needs::Namespace, GROUP_OF_A_CONTAINER, &[]) else { return };
    assert_eq!(output.status.code(), Some(3));
    let [doctor] = values(&output).try_into().unwrap();
    let group = finding(&doctor, "control-group");
    let detail = group["detail"].as_str().unwrap();
    assert!(detail.starts_with("1 GiB of memory, of "), "{group}");
    assert!(detail.contains("; the time of 0.50 processors, of "), "{group}");
    let remedy = group["remedy"].as_str().unwrap();
    assert!(remedy.contains("memory.max") && remedy.contains("docker run --cpus"), "{group}");
    let memory = finding(&doctor, "memory")["detail"].as_str().unwrap();
    assert!(memory.starts_with("256 MiB available"), "{memory}");
}

/// Small file systems at `$1` and at `/dev/shm`.
const SMALL_TMPFS: &str = r#"
mount -t tmpfs -o size=512k tmpfs "$1" && mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 9
"$T" doctor "$1" --json || exit
exec "$T" plan llama-3.1-8b --host 1GiB --disk "$1:1GiB" --here --check --json
"#;

#[test]
fn a_small_tmpfs_is_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let test = "a_small_tmpfs_is_a_limit";
    let Some(output) = shell(test, Needs::Namespace, SMALL_TMPFS, &[path]) else { return };
    assert_eq!(output.status.code(), Some(4));
    let [doctor, plan] = values(&output).try_into().unwrap();
    let shm = finding(&doctor, "shm");
    assert_eq!((&shm["status"], &shm["detail"]), (&"partial".into(), &"64 MiB free".into()));
    let directory = finding(&doctor, "directory");
    assert_eq!(
        (&directory["status"], &directory["subject"]),
        (&"refused".into(), &path.into()),
        "{directory}"
    );
    assert!(directory["detail"].as_str().unwrap().contains("1 MiB"), "{directory}");
    assert_eq!(limit(&plan, "/dev/shm")["available"], 64 << 20);
    assert_eq!(limit(&plan, &format!("free space in {path}"))["available"], 512 << 10);
}

#[test]
fn a_limit_of_the_length_of_files_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let script = "ulimit -f 100 && exec \"$T\" doctor \"$1\" --json";
    let test = "a_limit_of_the_length_of_files_is_reported";
    let output = shell(test, Needs::Nothing, script, &[path]).unwrap();
    let [doctor] = values(&output).try_into().unwrap();
    let directory = finding(&doctor, "directory");
    assert_eq!(directory["status"], "refused", "{directory}");
    assert!(directory["detail"].as_str().unwrap().contains("RLIMIT_FSIZE"), "{directory}");
}

#[test]
fn only_a_refusal_of_the_system_is_skipped() {
    let refused = output(Needs::Nothing, "mkdir /proc/no || exit 9", &[]).unwrap_err();
    assert!(refused.contains("/proc/no"), "{refused}");
    for script in ["echo it crashed >&2; kill -SEGV $$", "echo it crashed >&2; exit 101", "exit 0"]
    {
        let ended = std::panic::catch_unwind(|| output(Needs::Nothing, script, &[]));
        let panic = ended.unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("it crashed") || script == "exit 0", "{text}");
    }
}
