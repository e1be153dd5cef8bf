"""Flags go before the environment, that before the file, that before defaults; nothing unknown slips through."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb_core.cost.curve import write_curves
from eplb_service.control.server.settings import ServiceSettings, SettingsError, load_settings
from tests.cost.curves import H200


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "eplb.yaml"
    path.write_text("window_steps: 30\nseed: 3\nreport_steps: 5\n")
    return path


def test_each_source_goes_before_the_next(config: Path) -> None:
    environment = {"EPLB_WINDOW_STEPS": "20", "EPLB_SEED": "2", "EPLB_INSECURE": "true"}
    settings = load_settings({"window_steps": 10, "policy": None}, config, environment)
    assert (settings.window_steps, settings.seed, settings.report_steps) == (10, 2, 5)
    assert settings.insecure
    assert load_settings({}, config, {"EPLB_REPORT_STEPS": "auto"}).report_steps == "auto"
    assert load_settings({}, config, {"EPLB_REPORT_STEPS": "64"}).report_steps == 64
    assert settings.policy == ServiceSettings.model_fields["policy"].default


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in ServiceSettings.model_fields.values())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("windowsteps: 3", "unknown setting 'windowsteps'; did you mean 'window_steps'?"),
        ("qqq: 3", "unknown setting 'qqq'; `eplb serve --help` lists"),
        ("- 3", "must consist of 'key: value' lines"),
        ("a: [", "is not YAML"),
        ("window_steps: many", r"setting window_steps: .* \(got 'many'\)"),
    ],
)
def test_a_file_that_will_not_do(config: Path, content: str, says: str) -> None:
    config.write_text(content)
    with pytest.raises(SettingsError, match=says) as refused:
        load_settings({}, config)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_and_one_that_is_empty(config: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*nowhere"):
        load_settings({}, config.parent / "nowhere")
    config.write_text("")
    assert load_settings({}, config) == load_settings({})


def test_unknown_variables_are_refused_but_not_those_of_agents() -> None:
    load_settings({}, environment={"EPLB_AGENT_DEPLOYMENT": "x", "EPLB_ADDRESS": "y", "PATH": "z"})
    with pytest.raises(SettingsError, match="EPLB_WINDOWSTEPS; did you mean 'EPLB_WINDOW_STEPS'"):
        load_settings({}, environment={"EPLB_WINDOWSTEPS": "3"})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"window_steps": 0}, r"setting window_steps: .* \(got 0\)"),
        ({"listen": "nowhere"}, "setting listen: an address is host:port"),
        ({"page": "9465"}, "setting page: an address is host:port"),
        ({"listen": "127.0.0.1:70000"}, "setting listen: an address is host:port"),
        ({"policy": "best"}, "policy is 'best'; choose one of none"),
        ({"tls_cert": "cert.pem"}, "tls_cert and tls_key must be set together"),
        ({"auth_token": ""}, "auth_token is empty"),
        ({"par_threshold": float("nan")}, "par_threshold"),
        ({"report_steps": "0"}, r"setting report_steps: a report has 1 to 1024 steps, or auto \(got '0'\)"),
        (
            {"report_steps": "many"},
            r"setting report_steps: a report has 1 to 1024 steps, or auto \(got 'many'\)",
        ),
    ],
)
def test_values_that_will_not_do(flags: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_settings(flags)


def test_the_token_is_in_no_text_of_the_settings() -> None:
    assert "hunter2" not in repr(load_settings({"auth_token": "hunter2"}))


def test_the_planner_gets_what_was_set() -> None:
    planner = load_settings({"policy": "deepseek", "max_layers": 4, "seed": 9}).planner()
    assert (planner.policy, planner.max_layers, planner.seed) == ("deepseek", 4, 9)


def test_a_cost_curve_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    write_curves(path, [H200])
    assert load_settings({"cost_curve": str(path)}).planner().cost_curve == H200
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({"cost_curve": str(tmp_path / "none.json")})
