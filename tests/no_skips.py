"""`pytest --no-skips`: a skipped test fails the run. Where everything is installed, a skip is a test that nobody runs."""

from typing import Any

import pytest

# Of the run; not pytest's own number for failures, which may be run again (Makefile): a skip is none.
SKIPPED = 6


class NoSkips:
    def __init__(self) -> None:
        self.skipped: list[str] = []

    def _note(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped.append(f"{report.nodeid}: {why}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.skipped and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = SKIPPED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.skipped:
            terminalreporter.section("skipped, and --no-skips was given", red=True)
            for line in self.skipped:
                terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run")


def pytest_configure(config: pytest.Config) -> None:
    # With several processes the one that gathers the reports decides.
    if config.getoption("--no-skips") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(NoSkips())
