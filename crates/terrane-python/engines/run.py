"""Runs the engines' own tests with Terrane's classes instead of the engines'.

usage: run.py --sources FOLDER --work FOLDER [--rivals | --gpu]

The tests come from the source distributions that `signatures/sources.json` pins: all three releases of vLLM, and the
newest of LMCache. `vllm_tests.py` and `lmcache_tests.py` list the tests that run, and the reason for each other test.

With --gpu it runs only vLLM's tests of its offloading worker, on a machine with a GPU. `vllm_worker_tests.py` lists them.

With --rivals it runs no test. It extracts SGLang's file backend from the newest wheel, for `python -m
terrane_kv.bench`, and prints the folders for PYTHONPATH: the extracted one, and vLLM's newest source.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
SIGNATURES = os.path.join(os.path.dirname(HERE), "signatures")
# The folder of the plugin `report`.
TESTS = os.path.join(os.path.dirname(HERE), "tests")

VLLM = ["test_fs_tier.py", "test_tiering_offloading.py"]


def unpacked(source, sources, work):
    """The folder of an unpacked source distribution."""
    sys.path.insert(0, SIGNATURES)
    from extract import provide

    engine = source["file"].partition("-")[0]
    folder = os.path.join(work, source["file"].removesuffix(".tar.gz"))
    if not os.path.isdir(folder):
        with tarfile.open(provide(engine, source, sources)) as archive:
            archive.extractall(work, filter="data")
    return folder


# The modules of SGLang's file backend, and the only function that they use from a module that imports the engine.
SGLANG = [
    "sglang/srt/environ.py",
    "sglang/srt/mem_cache/hicache_storage.py",
    "sglang/srt/mem_cache/storage/file/lru_file_evictor.py",
]
SGLANG_FUNCTION = ("sglang/srt/utils/common.py", "human_readable_int")


def sglang_file_backend(source, sources, work):
    """A folder with the modules of SGLang's file backend, without the `__init__.py` files that import the engine."""
    sys.path.insert(0, SIGNATURES)
    from extract import provide

    folder = os.path.join(work, source["file"].split("-cp")[0])
    with zipfile.ZipFile(provide("sglang", source, sources)) as wheel:
        for name in SGLANG:
            wheel.extract(name, folder)
        name, wanted = SGLANG_FUNCTION
        text = wheel.read(name).decode()
    found = next(it for it in ast.parse(text).body if isinstance(it, ast.FunctionDef) and it.name == wanted)
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        # Its annotations may name modules that are not imported here.
        file.write("from __future__ import annotations\n\n" + ast.get_source_segment(text, found))
    return folder


def run(plugin, paths, tests):
    """Runs pytest, and returns whether all tests passed."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([HERE, TESTS, *paths, *([before] if before else [])])
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-p", plugin]
    command += ["-p", "report", "--report-lines", "-p", "no:terminal"]
    command += ["-o", "tmp_path_retention_policy=none", "--rootdir", os.path.dirname(tests[0]), *tests]
    return subprocess.run(command, env=environment, cwd=os.path.dirname(tests[0]), check=False).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", required=True, help="where downloads are kept")
    parser.add_argument("--work", required=True, help="where they are unpacked")
    parser.add_argument("--rivals", action="store_true", help="only SGLang's file backend and vLLM's source")
    parser.add_argument("--gpu", action="store_true", help="only vLLM's tests that need a GPU")
    arguments = parser.parse_args()
    for folder in (arguments.sources, arguments.work):
        os.makedirs(folder, exist_ok=True)
    with open(os.path.join(SIGNATURES, "sources.json"), encoding="utf-8") as file:
        pinned = json.load(file)
    if arguments.rivals:
        sglang = sglang_file_backend(pinned["sglang"][0], arguments.sources, arguments.work)
        print(os.pathsep.join([unpacked(pinned["vllm"][0], arguments.sources, arguments.work), sglang]))
        return
    passed = True
    for source in pinned["vllm"]:
        print(f"vLLM {source['version']}", flush=True)
        folder = unpacked(source, arguments.sources, arguments.work)
        if arguments.gpu:
            passed &= run("vllm_worker_tests", [folder], [os.path.join(folder, "tests/v1/kv_offload/cpu/test_gpu_worker.py")])
            continue
        tests = os.path.join(folder, "tests/v1/kv_offload/tiering")
        passed &= run("vllm_tests", [folder], [os.path.join(tests, name) for name in VLLM])
    if arguments.gpu:
        sys.exit(0 if passed else 1)
    newest = pinned["lmcache"][0]
    print(f"LMCache {newest['version']}", flush=True)
    # Import LMCache from its wheel, which has the native modules.
    folder = unpacked(newest, arguments.sources, arguments.work)
    # If it ran in the source folder, the test would import the sources, which are not built.
    copied = os.path.join(arguments.work, "lmcache-tests")
    os.makedirs(copied, exist_ok=True)
    name = "test_native_connector_l2_adapter.py"
    test = shutil.copy(os.path.join(folder, "tests/v1/distributed", name), copied)
    passed &= run("lmcache_tests", [], [test])
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
