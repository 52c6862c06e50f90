"""Compares the times that `terrane plan` predicts with those that `terrane bench` measures, on this machine.

    python3 crates/terrane-cli/tests/predictions.py PROGRAM [DIRECTORY] [ROUNDS]

A round measures the machine with `doctor --measure` before and after the benchmarks of each size, and compares them with
the mean of both predictions. Disks that several machines share change their rate from minute to minute. The median of
a row's signed errors counts: it is the bias of the prediction. The range of the errors is printed too.

Needs an NVIDIA driver for the copies of the bus. Without a driver, only memory and the directory are compared. Exits
with 1 if the median of a transfer of at least 256 MiB is over 10 %, or that of bringing up pinned memory over 25 %. Also
exits with 1 if a row was measured in some rounds only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

MODEL = "llama-3.1-8b"
BYTES_A_TOKEN = 131_072
MIB = 1 << 20
SIZES = [256 * MIB, 1024 * MIB, 2048 * MIB]
# The row of the plan, the suite and the case that measure it, and the largest error. Without a limit, a row is a remark.
ROWS = [
    ("a context, device to host", "gpu", "full attention: device to pinned", 0.10),
    ("a context, host to device", "gpu", "full attention: pinned to device", 0.10),
    ("bring-up of the pinned host tier", "gpu", "bring-up of pinned memory", 0.25),
    ("first touch of the host tier", "host", "first touch of system memory", None),
    ("a context, host to disk", "disk", "full attention: write", 0.10),
    ("a context, disk to host", "disk", "full attention: read", 0.10),
]


def run(arguments):
    ended = subprocess.run(arguments, capture_output=True, text=True)
    if ended.returncode != 0:
        return None, ended.stderr.strip()
    return json.loads(ended.stdout), None


def calibrate(program, directory, machine):
    """Measures the machine, and writes its rates to a file."""
    _, error = run([program, "doctor", directory, "--measure", "--json", "--machine-file", machine])
    if error:
        sys.exit(error)


def predicted_seconds(program, directory, machine, size):
    plan = [program, "plan", MODEL, "--machine", machine, "--json"]
    plan += ["--gpu-mem", str(size), "--host", str(size), "--disk", f"{directory}:{size}"]
    plan += ["--context", str(size // BYTES_A_TOKEN), "--users", "1"]
    report, error = run(plan)
    if error:
        sys.exit(error)
    return {row["what"]: row["seconds"] for row in report["predictions"]}


def measured_seconds(program, directory, size):
    """The seconds of each row, or why it was not measured."""
    options = [MODEL, "--size", str(size), "--passes", "5", "--json"]
    suites = {"gpu": [], "host": [], "disk": [directory]}
    reports = {name: run([program, "bench", name, *place, *options]) for name, place in suites.items()}
    rows = {}
    for what, suite, case, _ in ROWS:
        report, error = reports[suite]
        cases = [] if error else [row for row in report["cases"] if row["case"] == case]
        rows[what] = cases[0]["bytes"] / (cases[0]["value"]["median"] * 1e9) if cases else error or "not measured"
    return rows


def main():
    program = sys.argv[1]
    directory = sys.argv[2] if len(sys.argv) > 2 else "."
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    if rounds < 1:
        sys.exit(f"{rounds} rounds were asked for; at least one is needed")
    errors, reasons = {}, {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            machine = os.path.join(folder, "machine.json")
            calibrate(program, directory, machine)
            for size in SIZES:
                before = predicted_seconds(program, directory, machine, size)
                measured = measured_seconds(program, directory, size)
                calibrate(program, directory, machine)
                after = predicted_seconds(program, directory, machine, size)
                predicted = {what: (before[what] + after[what]) / 2 for what in before.keys() & after.keys()}
                for what, seconds in measured.items():
                    if what in predicted and isinstance(seconds, float):
                        errors.setdefault((what, size), []).append(predicted[what] / seconds - 1)
                    else:
                        reasons[what, size] = "no prediction" if what not in predicted else seconds
    missed = 0
    print(f"{'predicted / measured - 1':36} {'MiB':>5} {'ROUNDS':>6} {'MEDIAN':>8} {'LEAST':>8} {'MOST':>8}")
    for what, _, _, most in ROWS:
        for size in SIZES:
            off = errors.get((what, size))
            if not off:
                print(f"{what:36} {size // MIB:5} not compared: {reasons[what, size]}")
                continue
            median = statistics.median(off)
            is_missed = most is not None and (abs(median) > most or len(off) < rounds)
            missed += is_missed
            figures = "".join(f" {value * 100:+7.1f}%" for value in (median, min(off), max(off)))
            reason = f" ({reasons[what, size]})" if len(off) < rounds else ""
            print(f"{what:36} {size // MIB:5} {len(off):6}{figures}{'  MISSED' if is_missed else ''}{reason}")
    sys.exit(1 if missed else 0)


main()
