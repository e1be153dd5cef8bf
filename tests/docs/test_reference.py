"""Tests that the reference lists every command, option, setting and variable, and the runbook every alert."""

import ast
import inspect
import re
from pathlib import Path

import yaml

from eplb_service.cli.main import COMMANDS
from eplb_service.control.core import health
from eplb_service.control.server.settings import ServiceSettings
from eplb_service.telemetry.metrics import Metrics, declared_series
from tools.docs_reference.command_line import cli_page, commands
from tools.docs_reference.hook import on_page_markdown
from tools.docs_reference.metrics import metrics_page
from tools.docs_reference.settings import settings_page
from tools.docs_reference.site_pages import site_links
from worker_agent.settings import AgentSettings

ROOT = Path(__file__).parents[2]
CLI = cli_page()
SETTINGS = settings_page()


def is_a_sentence(text: str) -> bool:
    return text[:1].isupper() and text.endswith(".")


def test_every_command_has_a_section_with_its_options():
    sections = dict(zip(*[iter(re.split(r"^## (.*)$", CLI, flags=re.MULTILINE)[1:])] * 2, strict=True))
    listed = list(commands())
    assert [command.name for command in listed] == list(sections)
    assert {command.name.split()[1] for command in listed} == set(COMMANDS)
    for command in listed:
        for option in command.options:
            assert is_a_sentence(option.help), (command.name, option.flags)
            for flag in option.flags:
                assert f"`{flag}`" in sections[command.name], (command.name, flag)


def test_every_setting_and_environment_variable_is_listed():
    for settings, prefix in ((ServiceSettings, "EPLB_"), (AgentSettings, "EPLB_AGENT_")):
        for name, field in settings.model_fields.items():
            assert is_a_sentence(field.description), name
            assert f"| `{name}` | `{prefix}{name.upper()}` |" in SETTINGS
    named = {
        variable
        for package in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent", "deploy")
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".yaml", ".yml"}
        for variable in re.findall(r"\bEPLB_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
    } - {"EPLB_AGENT", "EPLB_POLICIES"}  # EPLB_POLICIES is a name in vLLM
    assert {"EPLB_ADDRESS", "EPLB_CONFIG", "EPLB_LISTEN"} <= named
    assert {variable for variable in named if f"`{variable}`" not in SETTINGS} == set()


def test_settings_are_listed_with_their_bounds_and_defaults():
    assert "| `min_gain` | `EPLB_MIN_GAIN` | number, ≥ 0.0 | `0.01` |" in SETTINGS
    assert "| `deal_width` | `EPLB_DEAL_WIDTH` | integer, ≥ 1, ≤ 64 | `16` |" in SETTINGS
    assert "| `window_steps` | `EPLB_WINDOW_STEPS` | integer, ≥ 1, ≤ 65536 | `512` |" in SETTINGS
    assert "| `--window-steps` `N` | `512` |" in CLI


def test_every_metric_is_listed_with_its_labels_and_meaning():
    page = metrics_page()
    metrics = Metrics()
    for family in metrics.registry.collect():
        if "_process_" not in family.name:
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"| `{name}` | {family.type} | " in page
    assert "| `eplb_par_realised` | gauge | `deployment`, `layer` | Peak-to-average ratio of a layer" in page
    rows = [row for group in declared_series().values() for row in group]
    assert page.count("\n| `eplb_") == len(rows) > 50
    assert all(text for *_, text in rows)


def test_every_alert_is_in_the_runbook():
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    runbook = (ROOT / "docs/runbook.md").read_text()
    of_alerts = runbook.partition("## Alerts")[2].partition("## Problems")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", of_alerts, re.MULTILINE)) == alerts


def test_every_problem_is_in_the_runbook():
    source = inspect.getsource(health.problems)
    texts = {
        constant.value.strip(" :,")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.JoinedStr, ast.Return))
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str) and len(constant.value) > 8
    }
    assert len(texts) >= 5
    of_problems = (ROOT / "docs/runbook.md").read_text().partition("## Problems")[2]
    assert {text for text in texts if text not in of_problems} == set()


def test_links_of_root_pages_are_converted_for_the_site():
    text = "[a](docs/faults.md) [b](CHANGELOG.md) [c](deploy/) [d](https://x.org)"
    assert site_links(text) == "[a](faults.md) [b](changelog.md) c [d](https://x.org)"


def test_the_adapter_page_shows_the_tested_example():
    page = on_page_markdown((ROOT / "docs/adapter.md").read_text())
    assert (ROOT / "examples/toy_host.py").read_text() in page
