#!/usr/bin/env python3
"""Lists the model types that vLLM serves, from its source distribution and transformers' wheel.

    python3 list_served.py vllm-0.33.0.tar.gz transformers-5.23.0-py3-none-any.whl > served.json

Both files come from PyPI; neither package is imported. vLLM's registry lists architectures, and
transformers maps an architecture to a model type. vLLM adds its own configurations. If neither
knows an architecture, its code is on a model hub, and this script does not know its model type.
"""

import ast
import json
import re
import sys
import tarfile
import zipfile

# Sections of the registry whose models generate text, and so keep a cache between steps.
SECTIONS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")

# A word that a model's module contains if its layers have such a state or cache.
CACHES = {
    "attention": r"\bAttention\(",
    "chunked": r"ChunkedLocalAttention",
    "latent": r"\b(MLAAttention|MultiHeadLatentAttentionWrapper|MLAModules)\b",
    "indexer": r"\b(Sparse)?(AttnIndexer|Indexer)\b",
    "state": r"MambaStateShapeCalculator|\bMambaMixer2?\b",
    "cross": r"CrossAttention\(",
}


class Archive:
    """The text files of a wheel or of a source distribution."""

    def __init__(self, path, wanted):
        self.files = {}
        if path.endswith(".whl"):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if wanted(name):
                        self.files[name] = archive.read(name).decode()
        else:
            with tarfile.open(path) as archive:
                for member in archive:
                    name = member.name.partition("/")[2]
                    if member.isfile() and wanted(name):
                        self.files[name] = archive.extractfile(member).read().decode()


def assigned(text, name):
    """The value assigned to a name at the top of a module, as a tree."""
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value


def pairs(tree):
    """The pairs of constants in a dictionary, a list of pairs, or a call with either."""
    if isinstance(tree, ast.Dict):
        for key, value in zip(tree.keys, tree.values):
            if key is None:
                continue
            try:
                yield ast.literal_eval(key), ast.literal_eval(value)
            except ValueError:
                continue
    elif isinstance(tree, ast.Call):
        for argument in tree.args:
            yield from pairs(argument)
        for keyword in tree.keywords:
            if keyword.arg is None:
                yield from pairs(keyword.value)
            elif isinstance(keyword.value, ast.Constant):
                yield keyword.arg, keyword.value.value
    elif isinstance(tree, ast.List):
        for item in tree.elts:
            try:
                key, value = ast.literal_eval(item)
            except ValueError:
                continue
            yield key, value


def types_of_architectures(transformers, vllm):
    """Architecture to model types."""
    types = {}
    auto = "transformers/models/auto/modeling_auto.py"
    for name in re.findall(r"^(MODEL\w*_MAPPING_NAMES)\b", transformers.files[auto], re.M):
        for tree in assigned(transformers.files[auto], name):
            for model_type, architectures in pairs(tree):
                if isinstance(architectures, str):
                    architectures = (architectures,)
                for architecture in architectures:
                    types.setdefault(architecture, set()).add(model_type)
    configs = vllm.files["vllm/transformers_utils/config.py"]
    for tree in assigned(configs, "_ARCHITECTURE_TO_MODEL_TYPE"):
        for architecture, model_type in pairs(tree):
            types.setdefault(architecture, set()).add(model_type)
    # A configuration class and an architecture with the same stem belong together.
    stems = {}
    for tree in assigned(configs, "_CONFIG_REGISTRY"):
        for model_type, config in pairs(tree):
            stems.setdefault(stem(config.removesuffix("Config")), set()).add(model_type)
            stems.setdefault(stem(model_type), set()).add(model_type)
    mappings = transformers.files["transformers/models/auto/auto_mappings.py"]
    for tree in assigned(mappings, "CONFIG_MAPPING_NAMES"):
        for model_type, config in pairs(tree):
            stems.setdefault(stem(model_type), set()).add(model_type)
            stems.setdefault(stem(config.removesuffix("Config")), set()).add(model_type)
    return types, stems


def stem(name):
    """A name without the endings that state the model's purpose, and without punctuation."""
    name = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel)$", "", name)
    return re.sub(r"[^a-z0-9]", "", name.lower())


def caches_of(vllm, module):
    """The kinds of caches that a model's module names."""
    if module.startswith("vllm.models."):
        prefix = module.replace(".", "/")
        texts = [text for name, text in vllm.files.items() if name.startswith(prefix)]
    else:
        texts = [vllm.files.get(f"vllm/model_executor/models/{module}.py", "")]
    return sorted(k for k, p in CACHES.items() if any(re.search(p, text) for text in texts))


def main(vllm_path, transformers_path):
    vllm = Archive(
        vllm_path,
        lambda name: name.endswith(".py")
        and name.startswith(
            ("vllm/models/", "vllm/model_executor/models/", "vllm/transformers_utils/")
        ),
    )
    transformers = Archive(transformers_path, lambda name: "/models/auto/" in name)
    types, stems = types_of_architectures(transformers, vllm)
    served, nameless = {}, {}
    registry = vllm.files["vllm/model_executor/models/registry.py"]
    for section in SECTIONS:
        for tree in assigned(registry, section):
            for architecture, (module, _) in pairs(tree):
                entry = {"module": module, "caches": caches_of(vllm, module)}
                if section == "_MULTIMODAL_MODELS":
                    entry["multimodal"] = True
                known = types.get(architecture) or stems.get(stem(architecture))
                if not known:
                    nameless[architecture] = entry
                for model_type in known or ():
                    served.setdefault(model_type, {})[architecture] = entry
    def lines(entries):
        return ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(entries.items()))

    sources = json.dumps([re.sub(r".*/", "", path) for path in (vllm_path, transformers_path)])
    print(f'{{\n "sources": {sources},\n "model_types": {{\n{lines(served)}\n }},')
    print(f' "architectures_without_a_known_type": {{\n{lines(nameless)}\n }}\n}}')


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
