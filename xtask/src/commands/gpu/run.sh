#!/bin/sh
# Runs tests, examples, the calibration, benchmarks and the sanitizer on a GPU.
# `cargo xtask gpu bundle` builds the bundle. It needs no Rust, only a POSIX shell, awk and tar. See `./run.sh --help`.
set -u

usage() {
    cat <<'END'
usage: run.sh [OPTIONS] [-- ARGUMENTS OF THE BENCHMARKS]

Without options, runs every test binary one test at a time, the tests with PyTorch, the examples, and
the calibration.

  --bench          also runs the benchmarks, including those of NIXL, the rates of the kernels, and
                   `terrane bench movers` with PyTorch
  --sanitize       also runs compute-sanitizer (memcheck, racecheck) on the tests of the kernels
  --only PART      runs only one of tests, interop, python, example, remote, calibrate, bench, bench-nixl,
                   kernel-rates, movers, sanitize
  --filter TEXT    runs only tests whose name contains TEXT
  --json FILE      writes the results of bench and bench-nixl to FILE, one JSON object per line
  --timeout N      kills a program after N seconds (default 300; 900 for interop and python, 1500 for
                   a benchmark)
  --logs DIRECTORY writes the full output of every program there (default: a new temporary directory)

The arguments after -- are passed to bench and bench-nixl. Both accept --filter TEXT, --check, --smoke,
--warm-up N and --repeats N. Their --help lists the other options; select the program with --only.

A part that cannot run is counted as skipped, with its reason. The last line is
`N passed, N failed, N skipped`. The exit status is 0 if nothing failed.
END
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 2
only='' bench=no sanitize=no filter='' json='' limit='' logs=''
need() { [ "$1" -ge 2 ] || { echo "run.sh: $2 needs a value" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
    case $1 in
        --bench) bench=yes ;;
        --sanitize) sanitize=yes ;;
        --only) need $# "$1"; only=$2; shift ;;
        --filter) need $# "$1"; filter=$2; shift ;;
        --json) need $# "$1"; json=$2; shift ;;
        --timeout) need $# "$1"; limit=$2; shift ;;
        --logs) need $# "$1"; logs=$2; shift ;;
        --help|-h) usage; exit 0 ;;
        --) shift; break ;;
        *) echo "run.sh: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
case $only in
    ''|tests|interop|python|example|remote|calibrate|bench|bench-nixl|kernel-rates|movers|sanitize) ;;
    *) echo "run.sh: --only knows no part \`$only\`; see --help" >&2; exit 2 ;;
esac
case $limit in
    *[!0-9]*) echo "run.sh: --timeout takes whole seconds" >&2; exit 2 ;;
esac
if [ -z "$logs" ]; then
    logs=$(mktemp -d) || exit 2
else
    mkdir -p "$logs" || exit 2
fi
if [ -n "$json" ]; then
    : >"$json" || exit 2
fi
passed=0 failed=0
skips=$logs/skipped
: >"$skips"

wants() {
    if [ -n "$only" ]; then [ "$only" = "$1" ]; return; fi
    case $1 in
        bench | bench-nixl | kernel-rates | movers) [ $bench = yes ] ;;
        sanitize) [ $sanitize = yes ] ;;
        *) true ;;
    esac
}

skip() { echo "skipped: $1: $2" | tee -a "$skips"; }

# limited SECONDS COMMAND...: ends the command after this time (status 124, or 137 if it had to be killed).
if command -v timeout >/dev/null 2>&1; then
    limited() { timeout --kill-after=10 "$@"; }
else
    echo "\`timeout\` is not installed: programs that hang are not ended"
    limited() { shift; "$@"; }
fi

machine() {
    echo "== machine"
    echo "host: $(uname -n), $(uname -srm), $(getconf _NPROCESSORS_ONLN 2>/dev/null) processors," \
        "$(awk '/^MemTotal:/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo 2>/dev/null) of memory"
    awk -F': *' '/^model name/ {print "processor: " $2; exit}' /proc/cpuinfo 2>/dev/null
    if command -v nvidia-smi >/dev/null 2>&1; then
        fields=index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current
        nvidia-smi --query-gpu=$fields --format=csv 2>&1
    else
        echo "device: nvidia-smi is not installed"
    fi
    if [ -r "$here/VERSION" ]; then echo "bundle: $(cat "$here/VERSION")"; fi
    echo "logs: $logs"
}

# Reads the output of libtest (one thread, without capture). Writes one line for each test to RESULTS:
# `passed NAME`, `failed NAME`, or `skipped NAME`. Writes the reasons of skips to SKIPS. Prints the
# output of failed tests.
#
# The block of a test is the text after its `test NAME ... `. Its result is at the end of the last line
# of the block that ends with a result. If the binary was ended or crashed, the running test failed.
# The awk program has no apostrophe, and its variables are from the environment, because awk would
# interpret escapes in values of -v.
read_results='
function finish(   i, result, text) {
    if (name == "") return
    result = "failed"
    text = ""
    for (i = 1; i <= lines; i++) {
        text = text block[i] "\n"
        if (block[i] ~ /^    /) continue
        if (block[i] ~ /ok$/) result = "passed"
        else if (block[i] ~ /FAILED$/) result = "failed"
        else if (block[i] ~ /^ignored/) {
            result = "skipped"
            reason = substr(block[i], 8)
            sub(/^[, ]+/, "", reason)
            print "skipped: " name ": " (reason == "" ? "ignored" : reason) >> ENVIRON["SKIPS"]
        }
    }
    if (last && ENVIRON["STATUS"] != 0 && ENVIRON["STATUS"] != 101) {
        result = "failed"
        text = text "the test binary ended here with status " ENVIRON["STATUS"] "\n"
    }
    if (result == "passed")
        for (i = 1; i <= lines; i++)
            if (block[i] ~ /^skipped: [^:]+(::[^:]+)*: ./) {
                result = "skipped"
                print block[i] >> ENVIRON["SKIPS"]
            }
    print result " " name >> ENVIRON["RESULTS"]
    if (result == "failed") printf "---- FAILED: %s\n%s----\n", name, text
    name = ""
}
BEGIN { while ((getline line < ENVIRON["NAMES"]) > 0) known[line] = 1 }
{
    if ($1 == "test" && ($2 in known) && !($2 in seen) && $0 ~ /^test [^ ]+( - should panic)? \.\.\. ?/) {
        finish()
        name = $2
        seen[name] = 1
        lines = 0
        sub(/^test [^ ]+( - should panic)? \.\.\. ?/, "")
    }
    block[++lines] = $0
}
END { last = 1; finish() }
'

lines() { awk 'END {print NR}' "$1"; }
count() { awk -v what="$1" '$1 == what {n++} END {print n + 0}' "$2"; }

# suite LABEL LOG FILTER COMMAND...: runs a test binary, directly or under a tool.
suite() {
    label=$1 log=$2 FILTER=$3
    export FILTER
    shift 3
    # Scratch files of this suite: the names of the remaining tests, and their results.
    NAMES=$logs/names RESULTS=$logs/results SKIPS=$skips output=$logs/output
    export NAMES RESULTS SKIPS
    : >"$log"
    : >"$RESULTS"
    # The last argument is the binary. It lists its tests without the tool.
    for binary; do :; done
    if ! "$binary" --list --format terse >"$output" 2>&1; then
        cat "$output"
        echo "$label: cannot start (status $?)"
        failed=$((failed + 1))
        return
    fi
    awk '/: test$/ {sub(/: test$/, ""); print}' "$output" |
        awk '{ if (ENVIRON["FILTER"] == "" || index($0, ENVIRON["FILTER"])) print }' >"$NAMES"
    if [ ! -s "$NAMES" ]; then
        skip "$label" "no test's name contains \`$FILTER\`"
        return
    fi
    begin=$(date +%s)
    while [ -s "$NAMES" ]; do
        # Runs tests by their exact names, so that the remaining tests run after a crash.
        # shellcheck disable=SC2046 # Names of tests have no spaces.
        limited "${limit:-300}" "$@" --exact --test-threads=1 --nocapture \
            $(cat "$NAMES") >"$output" 2>&1
        status=$?
        cat "$output" >>"$log"
        before=$(lines "$RESULTS")
        STATUS=$status awk "$read_results" "$output"
        if [ "$(lines "$RESULTS")" -eq "$before" ]; then
            cat "$output"
            echo "failed ($label)" >>"$RESULTS"
            echo "$label: ended with status $status before a test began"
            break
        fi
        case $status in
            0 | 101) ;;
            # Ended, crashed, or the error status of the sanitizer (99), even if each test passed.
            *) echo "$label: status $status; continuing with the remaining tests" ;;
        esac
        awk 'FILENAME == ENVIRON["RESULTS"] {done[$2] = 1; next} !($0 in done)' \
            "$RESULTS" "$NAMES" >"$NAMES.left"
        if [ "$(lines "$NAMES")" -eq "$(lines "$NAMES.left")" ]; then
            echo "failed ($label)" >>"$RESULTS"
            echo "$label: runs the same tests again"
            break
        fi
        mv "$NAMES.left" "$NAMES"
    done
    end=$(date +%s)
    p=$(count passed "$RESULTS") f=$(count failed "$RESULTS") s=$(count skipped "$RESULTS")
    passed=$((passed + p)) failed=$((failed + f))
    echo "$label: $p passed, $f failed, $s skipped, in $((end - begin)) s"
}

run_tests() {
    echo "== tests"
    for binary in "$here"/tests/*; do
        [ -x "$binary" ] || continue
        suite "tests/${binary##*/}" "$logs/${binary##*/}.log" "$filter" "$binary"
    done
    # Each line begins with a date and a process.
    cat "$logs"/cufile*.log 2>/dev/null | awk '/ ERROR / {sub(/.* ERROR */, ""); if (!seen[$0]++) print "cufile: " $0}'
}

# add_up LABEL STATUS: counts the results of Python tests. Their log has libtest's format.
add_up() {
    log=$logs/$1.log
    counts=$(sed -n 's/^test result: [a-zA-Z]*\. \([0-9]*\) passed; \([0-9]*\) failed.*/\1 \2/p' "$log")
    p=${counts% *} f=${counts#* }
    if [ -z "$counts" ]; then p=0 f=1; fi
    grep '^skipped: ' "$log" >>"$skips"
    if [ "$f" -ne 0 ] || [ "$2" -ne 0 ]; then cat "$log"; fi
    if [ "$f" -eq 0 ] && [ "$2" -ne 0 ]; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    echo "$1: $p passed, $f failed"
}

# Tensors to and from PyTorch, if it is installed. The Python tests report in libtest's format.
run_interop() {
    echo "== interop"
    if [ ! -d "$here/interop" ]; then
        skip interop "this bundle has no such tests"
        return
    fi
    if ! python3 -c 'import torch' >/dev/null 2>&1; then
        skip interop "no python3 with PyTorch is installed"
        return
    fi
    limited "${limit:-900}" env LD_LIBRARY_PATH="$own_path" \
        python3 "$here/interop/run.py" "$here/interop/library.so" \
        --tests "$here/interop/gpu" --filter "$filter" >"$logs/interop.log" 2>&1
    status=$?
    add_up interop $status
}

# The tests of the Python package with PyTorch's CUDA tensors and with the driver, by the bundle's pytest.
run_python() {
    echo "== python"
    if [ ! -r "$here/python.tar.gz" ]; then
        skip python "this bundle has no Python package"
        return
    fi
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        skip python "no python3 of version 3.11 or newer is installed"
        return
    fi
    package=$logs/python
    if ! { mkdir -p "$package" && tar -xzf "$here/python.tar.gz" -C "$package"; }; then
        echo "run.sh: cannot unpack python.tar.gz" >&2
        failed=$((failed + 1))
        return
    fi
    limited "${limit:-900}" env LD_LIBRARY_PATH="$own_path" PYTHONDONTWRITEBYTECODE=1 \
        PYTHONPATH="$package/site" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
        python3 -m pytest --report-lines -p no:cacheprovider -p no:terminal -k "$filter" \
        "$package/tests" >"$logs/python.log" 2>&1
    status=$?
    # 5: the filter matches no test.
    if [ $status -eq 5 ]; then status=0; fi
    add_up python $status
}

run_sanitizer() {
    echo "== sanitizer"
    sanitizer=$(command -v compute-sanitizer || true)
    if [ -z "$sanitizer" ] && [ -x /usr/local/cuda/bin/compute-sanitizer ]; then
        sanitizer=/usr/local/cuda/bin/compute-sanitizer
    fi
    for tool in memcheck racecheck; do
        if [ -z "$sanitizer" ]; then
            skip "sanitize/$tool" "compute-sanitizer is not installed"
            continue
        fi
        for binary in "$here"/tests/*; do
            [ -x "$binary" ] || continue
            # Only some binaries have tests of kernels.
            "$binary" --list --format terse 2>/dev/null | grep -q "kernels::" || continue
            suite "sanitize/$tool/${binary##*/}" "$logs/$tool-${binary##*/}.log" \
                "${filter:-kernels::}" \
                "$sanitizer" --tool $tool --error-exitcode 99 --target-processes all "$binary"
        done
    done
}

# program LABEL LOG OUT SECONDS COMMAND...: runs a program. It passed if its status is 0 and it printed
# something. It is skipped if its status is 3 (the machine lacks a requirement) or if it measured nothing.
# Standard output is appended to OUT while the program runs, and is in LOG.out afterwards.
program() {
    label=$1 log=$2 out=$3
    shift 3
    begin=$(date +%s)
    if [ "$out" != "$json" ]; then : >"$out"; fi
    before=$(wc -c <"$out")
    limited "$@" >>"$out" 2>"$log.err"
    status=$?
    end=$(date +%s)
    tail -c "+$((before + 1))" "$out" >"$log.out"
    cat "$log.out" "$log.err" >"$log"
    cat "$log"
    case $status in
        0)
            grep '^skipped: ' "$log.err" >>"$skips"
            reason=$(sed -n 's/^nothing to measure: //p' "$log.out")
            if [ -n "$reason" ]; then
                skip "$label" "$reason"
            elif [ -s "$log.out" ]; then
                passed=$((passed + 1))
                echo "$label: passed, in $((end - begin)) s"
            elif grep -q '^skipped: ' "$log.err"; then
                echo "$label: skipped"
            else
                skip "$label" "it measured nothing, because no case was selected"
            fi ;;
        3)
            # The first line has the missing requirement. A cause may follow.
            skip "$label" "$(awk '{sub(/^(error|  caused by): /, ""); printf "%s%s", (NR > 1 ? ": " : ""), $0}' "$log.err")" ;;
        *)
            failed=$((failed + 1))
            echo "$label: FAILED with status $status, after $((end - begin)) s" ;;
    esac
}

# benchmark NAME ARGUMENTS...: runs a benchmark suite. With --json, prints the missed targets.
benchmark() {
    name=$1
    shift
    echo "== $name"
    if [ -z "$json" ]; then
        program "$name" "$logs/$name.log" "$logs/$name.out" "${limit:-1500}" "$here/$name" "$@"
        return
    fi
    program "$name" "$logs/$name.log" "$json" "${limit:-1500}" "$here/$name" --json "$@"
    own=$logs/$name.log.out
    echo "$name: missed $(grep -c '"ok":false' "$own") of $(grep -c '"target":[0-9]' "$own") targets"
    grep '"ok":false' "$own" |
        sed 's/.*"case":"\([^"]*\)".*"ratio":\([^,]*\),"target":\([^,]*\),.*/missed: \1: ratio \2 of \3/'
}

# `terrane bench movers`: methods to copy blocks. PyTorch's methods are a separate result. The JSON has the
# reason of each method that was not measured.
run_movers() {
    echo "== movers"
    limited "${limit:-300}" "$here/terrane" doctor --require gpu >"$logs/doctor.log" 2>&1
    status=$?
    if [ $status -eq 3 ]; then
        skip movers "$(tail -n 1 "$logs/doctor.log")"
        return
    fi
    before=$passed
    program movers "$logs/movers.log" "$logs/movers.json" "${limit:-1500}" \
        env LD_LIBRARY_PATH="$own_path" \
        "$here/terrane" bench movers llama-3.1-8b --python python3 --json
    if [ "$passed" -eq "$before" ]; then return; fi
    reason=$(awk '/"case": ".*: PyTorch"/ {getline; sub(/^ *"reason": "/, ""); sub(/"$/, ""); print}' \
        "$logs/movers.json")
    case $reason in
        '')
            if grep -q '"case": ".*PyTorch, copy_' "$logs/movers.json"; then
                passed=$((passed + 1))
                echo "movers/pytorch: passed"
            else
                failed=$((failed + 1))
                echo "movers/pytorch: FAILED: neither times nor a reason"
            fi ;;
        *'cannot import torch'* | *'finds no GPU'* | *'could not be started'*)
            skip movers/pytorch "$reason" ;;
        *)
            failed=$((failed + 1))
            echo "movers/pytorch: FAILED: $reason" ;;
    esac
}

# The library path of the machine, for PyTorch, which has its own libraries.
own_path=${LD_LIBRARY_PATH-}

# NIXL, for the parts below, with the libraries of the CUDA toolkit that it needs.
unpack_nixl() {
    [ -r "$here/nixl.tar.gz" ] || return
    nixl=$logs/nixl
    if ! { mkdir -p "$nixl" && tar -xzf "$here/nixl.tar.gz" -C "$nixl"; }; then
        echo "run.sh: cannot unpack nixl.tar.gz; tests of NIXL will fail" >&2
        return
    fi
    LD_LIBRARY_PATH=$nixl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
    # Without the kernel module nvidia-fs, GDS can copy through the host if configured. Then each I/O of
    # a batch needs a bounce buffer, and a submit with too few free buffers never returns.
    if [ -z "${CUFILE_ENV_PATH_JSON-}" ] && [ ! -e /proc/driver/nvidia-fs ]; then
        CUFILE_ENV_PATH_JSON=$logs/cufile.json CUFILE_FORCE_COMPAT_MODE=true
        printf '{"logging": {"dir": "%s", "level": "INFO"},\n "properties": {%s}}\n' "$logs" \
            '"allow_compat_mode": true, "posix_pool_slab_count": [512, 512, 32]' \
            >"$CUFILE_ENV_PATH_JSON"
        export CUFILE_ENV_PATH_JSON CUFILE_FORCE_COMPAT_MODE
    fi
    echo "cufile: ${CUFILE_ENV_PATH_JSON:-/etc/cufile.json}," \
        "nvidia-fs is $([ -e /proc/driver/nvidia-fs ] || echo 'not ')loaded," \
        "udev is $([ -d /run/udev/data ] || echo 'not ')there," \
        "files are in $(df -PT "${TMPDIR:-/tmp}" 2>/dev/null | awk 'NR == 2 {print $2 " at " $7}')"
}

machine
unpack_nixl
if wants tests; then run_tests; fi
if wants interop; then run_interop; fi
if wants python; then run_python; fi
if wants sanitize; then run_sanitizer; fi
if wants example; then
    echo "== example"
    program example "$logs/example.log" "$logs/example.out" "${limit:-300}" \
        "$here/offload" --require gpu
fi
# Two processes with one device, and two with host memory.
if wants remote && [ -x "$here/remote" ]; then
    echo "== remote"
    for tier in device pinned; do
        for mode in write read; do
            program "remote/$tier/$mode" "$logs/remote-$tier-$mode.log" "$logs/remote.out" \
                "${limit:-300}" "$here/remote" --tier $tier --mode $mode
        done
    done
fi
if wants calibrate; then
    echo "== calibrate"
    program calibrate "$logs/calibrate.log" "$logs/calibrate.out" "${limit:-300}" \
        "$here/calibrate" --output "$logs/calibration.json"
fi
if wants bench; then benchmark bench "$@"; fi
if wants bench-nixl && [ -x "$here/bench-nixl" ]; then benchmark bench-nixl "$@"; fi
if wants kernel-rates && [ -x "$here/kernel-rates" ]; then
    echo "== kernel-rates"
    program kernel-rates "$logs/kernel-rates.log" "$logs/kernel-rates.out" "${limit:-300}" \
        "$here/kernel-rates"
fi
if wants movers && [ -x "$here/terrane" ]; then run_movers; fi

echo "== sum"
cat "$skips"
echo "$passed passed, $failed failed, $(lines "$skips") skipped"
[ "$failed" -eq 0 ]
