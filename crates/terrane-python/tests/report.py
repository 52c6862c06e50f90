"""A pytest plugin: a report in the form of Terrane's other test runners."""

import os
import time


class Report:
    """Prints one line for each test, and the reason of each skipped test."""

    def __init__(self):
        self.passed = self.failed = 0
        self.started = time.monotonic()
        self.texts = []

    def line(self, name, outcome):
        print(f"test {name} ... {outcome}", flush=True)

    def pytest_collection_finish(self, session):
        folder = os.path.dirname(session.items[0].path) if session.items else os.path.dirname(__file__)
        near = os.path.relpath(folder)
        print(f"Running {folder if near == '.' else near}", flush=True)
        print(f"running {len(session.items)} tests", flush=True)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed += 1
            self.line(report.nodeid, "FAILED")
            self.texts.append((report.nodeid, report.longreprtext))
        elif report.skipped:
            # All tests of a file.
            print(f"skipped: {report.nodeid.removesuffix('.py')}: {report.longrepr[2]}", flush=True)

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.replace(".py::", "::")
        if report.failed:
            self.failed += 1
            self.line(name, "FAILED")
            self.texts.append((name, report.longreprtext + "".join(text for _, text in report.sections)))
        elif report.skipped:
            self.line(name, "ok")
            print(f"skipped: {name}: {report.longrepr[2]}", flush=True)
        elif report.when == "call":
            self.passed += 1
            self.line(name, "ok")

    def pytest_sessionfinish(self):
        for name, text in self.texts:
            print(f"---- {name} ----\n{text}", flush=True)
        took = time.monotonic() - self.started
        print(
            f"test result: {'FAILED' if self.failed else 'ok'}. {self.passed} passed; {self.failed} failed; "
            f"0 ignored; 0 measured; 0 filtered out; finished in {took:.2f}s",
            flush=True,
        )


def pytest_addoption(parser):
    parser.addoption("--report-lines", action="store_true", help="prints the report in the form of Terrane's other test runners; use with `-p no:terminal`")


def pytest_configure(config):
    if config.getoption("--report-lines"):
        config.pluginmanager.register(Report())
