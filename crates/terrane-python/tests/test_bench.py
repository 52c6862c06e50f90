"""The benchmark runs, and removes its files."""

import os
import subprocess
import sys

from terrane_kv import bench


def test_the_benchmark_prints_a_line_for_each_case_and_leaves_nothing(directory):
    options = ["--chunk", "65536", "--chunks", "8", "--requests", "1", "2"]
    command = [sys.executable, "-m", "terrane_kv.bench", directory, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    first = lines.pop(0)
    assert first.startswith("checksum: ") and "a stored key" in first and "an absent one" in first
    assert len(lines) == 4 and all("buffered" in line and "terrane" in line for line in lines)
    assert os.listdir(directory) == []


def test_six_rounds_have_every_order_of_three_backends():
    made = dict.fromkeys("abc")
    orders = {"".join(name for name, _ in bench.in_order(made, number)) for number in range(6)}
    assert len(orders) == 6


def test_each_of_seven_backends_comes_first_and_last_in_fourteen_rounds():
    rounds = [[name for name, _ in bench.in_order(dict.fromkeys("abcdefg"), number)] for number in range(14)]
    assert {names[0] for names in rounds} == {names[-1] for names in rounds} == set("abcdefg")
