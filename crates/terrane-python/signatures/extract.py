"""Extracts the tables of the engines' interfaces from their published sources, with `ast` alone.

usage: extract.py --sources FOLDER [--check]

Downloads the files that `sources.json` pins to FOLDER, unless they exist, and checks the hashes. Writes one table for
each engine beside this file. With --check it compares the tables instead of writing them.
"""

import argparse
import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile

from engines import ATTRIBUTES, CALLS, MODULES

HERE = os.path.dirname(os.path.abspath(__file__))


def index():
    """The package index that pip is configured to use."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if configured:
        return configured
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


def download(engine, file):
    """Downloads one file of a project. pip cannot fetch a source distribution without building it."""
    page = f"{index().rstrip('/')}/{engine}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(page, headers=accept), timeout=60) as answer:
        files = json.load(answer)["files"]
    for found in files:
        if found["filename"] == file:
            url = urllib.parse.urljoin(page, found["url"])
            with urllib.request.urlopen(url, timeout=300) as answer:
                return answer.read()
    raise SystemExit(f"the package index has no file {file} of {engine}")


def provide(engine, source, folder):
    """The path of a source, which is downloaded once and verified each time."""
    path = os.path.join(folder, source["file"])
    if not os.path.exists(path):
        print(f"downloading {source['file']}", file=sys.stderr, flush=True)
        content = download(engine, source["file"])
        with open(path + ".new", "wb") as file:
            file.write(content)
        os.replace(path + ".new", path)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source["sha256"]:
        os.remove(path)
        raise SystemExit(f"{source['file']} has the hash {digest}; {source['sha256']} is pinned")
    return path


class Archive:
    """The source files of a wheel or of a source distribution, by their path below the import root."""

    def __init__(self, path):
        self.files = {}
        wanted = {name for engine in CALLS.values() for name in engine}
        wanted |= {f"{name.replace('.', '/')}.py" for all in MODULES.values() for name in all}
        if path.endswith(".whl"):
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name in wanted:
                        self.files[name] = wheel.read(name).decode()
            return
        with tarfile.open(path) as source:
            for member in source:
                name = member.name.partition("/")[2]
                if name in wanted:
                    self.files[name] = io.TextIOWrapper(source.extractfile(member)).read()

    def parse(self, name):
        return ast.parse(self.files[name]) if name in self.files else None


def parameters(arguments):
    """The parameters of a function: [name, kind, whether it has a default]."""
    positional = arguments.posonlyargs + arguments.args
    first_default = len(positional) - len(arguments.defaults)
    rows = []
    for at, argument in enumerate(positional):
        kind = "positional" if at < len(arguments.posonlyargs) else "any"
        rows.append([argument.arg, kind, at >= first_default])
    if arguments.vararg:
        rows.append([arguments.vararg.arg, "*", True])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        rows.append([argument.arg, "keyword", default is not None])
    if arguments.kwarg:
        rows.append([arguments.kwarg.arg, "**", True])
    return rows


def constant(node):
    """The value of a constant expression, or None."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def function(node):
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return {"parameters": parameters(node.args), "decorators": decorators}


def klass(node):
    """Describes a class: bases, decorators, methods, and fields with whether they have a default."""
    described = {
        "bases": [ast.unparse(base) for base in node.bases],
        "decorators": [ast.unparse(decorator) for decorator in node.decorator_list],
        "fields": [],
        "methods": {},
    }
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            described["methods"][statement.name] = function(statement)
        elif isinstance(statement, ast.AnnAssign):
            kind = ast.unparse(statement.annotation)
            default = statement.value is not None and "init=False" not in ast.unparse(statement.value)
            hidden = statement.value is not None and "init=False" in ast.unparse(statement.value)
            if not hidden:
                described["fields"].append([statement.target.id, kind, default])
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            described["fields"].append([statement.targets[0].id, None, constant(statement.value)])
    if node.name in ATTRIBUTES:
        described["attributes"] = attributes(node)
    return described


def attributes(node):
    """The attributes of `self` that the constructor assigns."""
    constructor = next(it for it in node.body if getattr(it, "name", None) == "__init__")
    targets = (it.targets if isinstance(it, ast.Assign) else [it.target] for it in ast.walk(constructor)
               if isinstance(it, (ast.Assign, ast.AnnAssign)))
    names = {target.attr for some in targets for target in some if isinstance(target, ast.Attribute)}
    return sorted(names)


def interfaces(archive, engine):
    """Each recorded name of each module. If a release lacks a name, its value is null."""
    tables = {}
    for module, names in MODULES[engine].items():
        tree = archive.parse(f"{module.replace('.', '/')}.py")
        table = dict.fromkeys(names)
        for statement in tree.body if tree else []:
            name = getattr(statement, "name", None)
            if isinstance(statement, ast.ClassDef) and name in table:
                table[name] = {"class": klass(statement)}
            elif isinstance(statement, ast.FunctionDef) and name in table:
                table[name] = {"function": function(statement)}
            elif isinstance(statement, ast.Assign):
                target = ast.unparse(statement.targets[0])
                if target in table:
                    table[target] = {"value": constant(statement.value)}
        tables[module] = table
    return tables


def receiver(call):
    """The receiver of a call, as in CALLS, and the method's name."""
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value), call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id + "(", "__init__"
    return None, None


def calls(archive, engine):
    """The calls of Terrane's objects: class, method, number of positional arguments, names of keywords."""
    found = set()
    for file, receivers in CALLS[engine].items():
        tree = archive.parse(file)
        for node in ast.walk(tree) if tree else []:
            if not isinstance(node, ast.Call):
                continue
            text, method = receiver(node)
            for wanted, ours in receivers:
                if text == wanted:
                    stars = any(isinstance(argument, ast.Starred) for argument in node.args)
                    keywords = tuple(keyword.arg or "**" for keyword in node.keywords)
                    found.add((ours, method, -1 if stars else len(node.args), keywords, file))
    columns = ("ours", "method", "positional", "keywords", "file")
    return [dict(zip(columns, row)) for row in sorted(found)]


def table(engine, sources, folder):
    versions = {}
    for source in sources:
        archive = Archive(provide(engine, source, folder))
        versions[source["version"]] = {
            "interfaces": interfaces(archive, engine),
            "calls": calls(archive, engine),
        }
    return lines(versions) + "\n"


def lines(value, depth=0):
    """JSON with one line for each recorded name and each call."""
    if isinstance(value, dict) and depth < 4 and not {"class", "function", "value"} & value.keys():
        rows = [f"{json.dumps(name)}: {lines(item, depth + 1)}" for name, item in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list) and depth == 2:
        rows, opening, closing = [json.dumps(item, default=list) for item in value], "[", "]"
    else:
        return json.dumps(value, default=list)
    indent = "\n" + " " * (depth + 1)
    return f"{opening}{indent}{(',' + indent).join(rows)}{indent[:-1]}{closing}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", required=True, help="where downloads are kept")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    os.makedirs(arguments.sources, exist_ok=True)
    with open(os.path.join(HERE, "sources.json"), encoding="utf-8") as file:
        pinned = json.load(file)
    for engine, sources in pinned.items():
        path = os.path.join(HERE, f"{engine}.json")
        text = table(engine, sources, arguments.sources)
        if arguments.check:
            with open(path, encoding="utf-8") as file:
                if file.read() != text:
                    raise SystemExit(f"{path} differs from the sources; run `cargo xtask python signatures`")
            continue
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
