"""The type stubs match the native module."""

import ast
import inspect
import pathlib

import terrane_kv
from terrane_kv import _native


def stubs():
    path = pathlib.Path(terrane_kv.__file__).parent / "_native.pyi"
    return ast.parse(path.read_text(encoding="utf-8"))


def test_each_class_has_the_methods_that_its_stub_names_and_no_others():
    classes = {node.name: node for node in stubs().body if isinstance(node, ast.ClassDef)}
    # A protocol that only type checkers use.
    del classes["SupportsDlpack"]
    assert set(classes) == {name for name, it in vars(_native).items() if inspect.isclass(it)}
    implicit = {"__new__", "__module__", "__doc__", "__weakref__", "__init__", "__dict__", "__repr__"}
    for name, node in classes.items():
        named = {it.name for it in node.body if isinstance(it, ast.FunctionDef)} - implicit
        found = set(vars(getattr(_native, name))) - implicit
        assert named == found, name


def test_each_public_method_has_a_docstring():
    for name in terrane_kv.__all__:
        it = getattr(terrane_kv, name)
        if not inspect.isclass(it):
            continue
        assert it.__doc__, name
        for method, body in vars(it).items():
            if not method.startswith("_") and type(body).__name__ != "getset_descriptor":
                assert body.__doc__, f"{name}.{method}"
