"""Runs every test_*.py in this file's folder, with the report of Terrane's other test runners.

usage: run.py LIBRARY [--filter TEXT] [--tests FOLDER]
"""

import argparse
import os
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


class Report(unittest.TestResult):
    """Prints one line for each test, and the reason of each skipped test."""

    passed = 0

    @staticmethod
    def name(test):
        return test.id().replace(".", "::")

    def line(self, test, outcome):
        print(f"test {self.name(test)} ... {outcome}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1
        self.line(test, "ok")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line(test, "ok")
        print(f"skipped: {self.name(test)}: {reason}", flush=True)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.line(test, "FAILED")

    def addError(self, test, error):
        super().addError(test, error)
        self.line(test, "FAILED")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.line(subtest, "FAILED")


def chosen(suite, text):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from chosen(test, text)
        elif text in Report.name(test) or type(test).__name__ == "_FailedTest":
            yield test


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--filter", default="", help="only tests whose name contains this")
    parser.add_argument("--tests", default=HERE, help="the folder of the tests")
    arguments = parser.parse_args()
    os.environ["TERRANE_PROOF_LIBRARY"] = os.path.abspath(arguments.library)
    sys.path.insert(0, HERE)
    found = unittest.TestLoader().discover(arguments.tests)
    tests = list(chosen(found, arguments.filter))
    print(f"Running {os.path.relpath(arguments.tests)}", flush=True)
    print(f"running {len(tests)} tests", flush=True)
    report, started = Report(), time.monotonic()
    unittest.TestSuite(tests).run(report)
    wrong = report.failures + report.errors
    for test, trace in wrong:
        print(f"---- {Report.name(test)} ----\n{trace}", flush=True)
    print(
        f"test result: {'FAILED' if wrong else 'ok'}. {report.passed} passed; "
        f"{len(wrong)} failed; 0 ignored; 0 measured; 0 filtered out; "
        f"finished in {time.monotonic() - started:.2f}s",
        flush=True,
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
