"""The files for service managers and dashboards: in the form that these read, and about what is there."""

from __future__ import annotations

import json
import plistlib
import re
from configparser import ConfigParser
from pathlib import Path

import pytest

from api.metrics import ServiceCollector

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_launchd_agent_runs_up_and_waits_for_its_end() -> None:
    agent = plistlib.loads((DEPLOY / "ai.longleaf.plist").read_bytes())
    assert agent["ProgramArguments"][1:] == ["up"]
    assert agent["ExitTimeOut"] > 35
    assert agent["Umask"] == 0o077


@pytest.mark.parametrize(("file", "command"), [("longleaf", "up"), ("longleaf-worker", "worker")])
def test_the_systemd_units_run_their_command_and_wait_for_its_end(file: str, command: str) -> None:
    unit = ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / f"{file}.service")
    assert unit["Service"]["ExecStart"].endswith(f"/longleaf {command}")
    # Only the supervisor, or the worker's parent, is told to stop: it stops the others in order.
    assert unit["Service"]["KillMode"] == "mixed"
    assert int(unit["Service"]["TimeoutStopSec"]) > 35


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"longleaf_\w+", target["expr"])
    }
    source = Path(ServiceCollector.collect.__code__.co_filename).read_text()
    there = set(re.findall(r'"(longleaf_\w+)"', source))
    assert shown == there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
