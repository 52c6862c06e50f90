"""Runs the code and the commands on the pages in `docs/engines`, and checks the options."""

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import types

import numpy
import pytest

import adapters
import cuda_driver
import terrane_kv
from engines import installed, tables

PAGES = os.path.join(os.path.dirname(__file__), "../../../docs/engines")
# Sizes on the pages, and the sizes for a test, because a store reserves its space on disk.
SMALLER = {"64 << 30": "96 << 20", "500 << 30": "96 << 20", "8 << 30": "16 << 20", "32 << 30": "16 << 20"}
SHAPE = (2, 64, 4, 2, 8)


def sections(page):
    with open(os.path.join(PAGES, page), encoding="utf-8") as file:
        return file.read().split("\n## ")


def blocks_of(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def blocks(page, language):
    return blocks_of("\n## ".join(sections(page)), language)


def torch():
    """The parts of PyTorch on the CPU that the pages use."""
    module = types.ModuleType("torch")
    module.uint8 = numpy.uint8

    class Tensor:
        def __init__(self, *shape, dtype):
            self.array = numpy.zeros(shape, dtype=dtype)

        def numpy(self):
            return self.array

    module.zeros = Tensor
    return module


async def run(code, namespace, page):
    for before, after in SMALLER.items():
        code = code.replace(before, after)
    # A page uses one folder for each store, because the stores before it stay open.
    code = code.replace('"/nvme/', f'"{namespace["folder"]}/')
    compiled = compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, namespace)
    if inspect.iscoroutine(result):
        await result


@pytest.mark.parametrize("page", ["pytorch.md", "kvbm.md"])
def test_the_code_of_a_page_runs(directory, monkeypatch, page):
    try:
        driver = cuda_driver.Driver()
    except cuda_driver.CudaMissing as missing:
        pytest.skip(str(missing))
    monkeypatch.setitem(sys.modules, "torch", torch())
    with cuda_driver.tensors(driver, 2, SHAPE) as on_device:
        namespace = {"folder": directory, "cuda_tensors": on_device}
        if page == "kvbm.md":
            namespace["tensors"] = on_device

        async def all_of_them():
            stores = []
            for section in sections(page):
                # A section continues from the first code block of the page, which opens a store.
                scope = dict(namespace)
                for code in blocks_of(section, "python"):
                    await run(code, scope, page)
                    stores.append(scope["store"])
                if "store" not in namespace:
                    namespace.update(scope)
            for store in stores:
                store.close()

        asyncio.run(all_of_them())


@pytest.mark.parametrize("page", ["kvbm.md"])
def test_the_commands_of_a_page_run(directory, page):
    commands = [line[2:] for block in blocks(page, "console") for line in block.splitlines()]
    assert commands and all(command.startswith("terrane ") for command in commands)
    scripts = os.path.dirname(sys.executable)
    for command in commands:
        words = shlex.split(command.replace("/nvme/kv", directory))
        done = subprocess.run([os.path.join(scripts, words[0]), *words[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def configs(page):
    """The JSON options for vLLM on a page."""
    for block in blocks(page, "text"):
        for text in re.findall(r"--kv-transfer-config '(.*?)'", block, re.DOTALL):
            config = json.loads(text)
            if config["kv_connector"] == "OffloadingConnector":
                yield config["kv_connector_extra_config"]


@pytest.mark.parametrize("page", ["vllm.md", "kvbm.md"])
def test_the_options_of_a_page_are_those_of_the_tier(page):
    with installed("vllm", adapters.newest("vllm")):
        from terrane_kv import folders
        from terrane_kv.vllm import TerraneOffloadingSpec, TerraneTier

        found = list(configs(page))
        assert found
        for config in found:
            assert config["spec_name"] == TerraneOffloadingSpec.__name__
            assert config.get("copy_engine", "terrane") == "terrane"
            for tier in config["secondary_tiers"]:
                assert tier.pop("type") == "terrane"
                inspect.signature(TerraneTier.__init__).bind_partial(**tier)
                assert folders.capacity_bytes(tier["capacity"]) > config["cpu_bytes_to_use"]


def test_the_options_for_lmcache_and_sglang_are_json_and_name_our_classes():
    (lmcache,) = (json.loads(text) for text in re.findall(r"--l2-adapter '(.*?)'", "".join(blocks("lmcache.md", "text")), re.DOTALL))
    text = "".join(blocks("sglang.md", "text"))
    (sglang,) = (json.loads(it) for it in re.findall(r"extra-config '(.*?)'", text, re.DOTALL))
    with installed("lmcache", adapters.newest("lmcache")), installed("sglang", adapters.newest("sglang")):
        for options in (lmcache, sglang):
            module = __import__(options["module_path"], fromlist=["it"])
            made = getattr(module, options["class_name"])
            if options is lmcache:
                inspect.signature(made).bind(**options["adapter_params"])
    assert terrane_kv.__version__


def test_the_options_for_sglang_s_linker_have_its_form_and_name_our_class():
    text = "".join(blocks("sglang.md", "text"))
    (config,) = (json.loads(it) for it in re.findall(r"linker-config '(.*?)'", text, re.DOTALL))
    newest = adapters.newest("sglang")
    interfaces = tables("sglang")[newest]["interfaces"]
    form = interfaces["sglang.srt.mem_cache.unified_cache.linker_config"]["UnifiedCacheLinkerConfig"]["class"]
    assert config.keys() == {name for name, _, _ in form["fields"]}
    with installed("sglang", newest):
        module = __import__(config["linker_module_path"], fromlist=["it"])
        getattr(module, config["linker"])._check(config["linker_extra_config"])


def test_the_page_of_the_engines_own_tests_names_each_of_them(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(__file__), "../engines"))
    import lmcache_tests
    import vllm_tests
    import vllm_worker_tests

    expected = {
        name: verdict if verdict in (vllm_tests.RUN, vllm_tests.ADAPTED) else f"not applicable: {verdict}"
        for name, verdict in (vllm_tests.FS_TIER | vllm_worker_tests.TESTS).items()
    }
    expected |= lmcache_tests.NOT_APPLICABLE
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", "\n## ".join(sections("upstream-tests.md")), re.MULTILINE)
    assert dict(rows) == expected
