"""Compares the times that `terrane plan` predicts with those that `terrane bench` measures, on this machine.

    python3 crates/terrane-cli/tests/predictions.py PROGRAM [DIRECTORY]

Needs an NVIDIA driver for the copies of the bus. Without one, only memory and the directory are compared. Exits with
1
if the prediction of a transfer of at least 256 MiB is off by more than 10 %, or of pinned memory by more than 25 %.
"""

import json
import os
import subprocess
import sys
import tempfile

MODEL = "llama-3.1-8b"
BYTES_A_TOKEN = 131_072
MIB = 1 << 20
SIZES = [256 * MIB, 1024 * MIB, 2048 * MIB]
# The prediction, the suite and the case that measure it, and the largest error; without one, it is only printed.
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


def main():
    program = sys.argv[1]
    directory = sys.argv[2] if len(sys.argv) > 2 else "."
    with tempfile.TemporaryDirectory() as folder:
        machine = os.path.join(folder, "machine.json")
        doctor = [program, "doctor", directory, "--measure", "--json", "--machine-file", machine]
        report, error = run(doctor)
        if error:
            sys.exit(error)
        for row in report["measured"]:
            print(json.dumps(row))
        missed = 0
        print(f"{'':36} {'MiB':>5} {'PREDICTED':>11} {'MEASURED':>11} {'OFF':>8}")
        for size in SIZES:
            plan = [program, "plan", MODEL, "--machine", machine, "--json"]
            plan += ["--gpu-mem", str(size), "--host", str(size), "--disk", f"{directory}:{size}"]
            plan += ["--context", str(size // BYTES_A_TOKEN), "--users", "1"]
            predicted, error = run(plan)
            if error:
                sys.exit(error)
            predicted = {row["what"]: row for row in predicted["predictions"]}
            options = [MODEL, "--size", str(size), "--passes", "5", "--json"]
            suites = {"gpu": [], "host": [], "disk": [directory]}
            suites = {name: run([program, "bench", name, *place, *options]) for name, place in suites.items()}
            for what, suite, case, most in ROWS:
                measured, error = suites[suite]
                cases = [] if error else [c for c in measured["cases"] if c["case"] == case]
                if what not in predicted or not cases:
                    print(f"{what:36} {size // MIB:5} not compared: {error or 'no prediction'}")
                    continue
                expected = predicted[what]["seconds"]
                seconds = cases[0]["bytes"] / (cases[0]["value"]["median"] * 1e9)
                off = expected / seconds - 1
                is_missed = most is not None and abs(off) > most
                missed += is_missed
                mark = "  MISSED" if is_missed else ""
                times = f"{expected * 1e3:8.2f} ms {seconds * 1e3:8.2f} ms"
                print(f"{what:36} {size // MIB:5} {times} {off * 100:+7.1f} %{mark}")
    sys.exit(1 if missed else 0)


main()
