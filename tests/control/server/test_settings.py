"""Settings take precedence in the order flags, environment, file, defaults. Unknown settings are rejected."""

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


def test_flags_override_the_environment_and_the_environment_overrides_the_file(config: Path) -> None:
    environment = {"EPLB_WINDOW_STEPS": "20", "EPLB_SEED": "2", "EPLB_INSECURE": "true"}
    settings = load_settings({"window_steps": 10, "policy": None}, config, environment)
    assert (settings.window_steps, settings.seed, settings.report_steps) == (10, 2, 5)
    assert settings.insecure
    assert load_settings({}, config, {"EPLB_REPORT_STEPS": "auto"}).report_steps == "auto"
    assert load_settings({}, config, {"EPLB_REPORT_STEPS": "64"}).report_steps == 64
    assert settings.policy == ServiceSettings.model_fields["policy"].default


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("windowsteps: 3", "unknown setting 'windowsteps'; did you mean 'window_steps'?"),
        ("qqq: 3", "unknown setting 'qqq'; `eplb serve --help` lists"),
        ("- 3", "must consist of 'key: value' lines"),
        ("a: [", "is not valid YAML"),
        ("window_steps: many", r"setting window_steps: .* \(got 'many'\)"),
    ],
)
def test_an_invalid_settings_file_is_rejected(config: Path, content: str, message: str) -> None:
    config.write_text(content)
    with pytest.raises(SettingsError, match=message) as error:
        load_settings({}, config)
    assert "\n" not in str(error.value)


def test_a_missing_settings_file_is_rejected_and_an_empty_one_is_accepted(config: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*nowhere"):
        load_settings({}, config.parent / "nowhere")
    config.write_text("")
    assert load_settings({}, config) == load_settings({})


def test_unknown_variables_are_rejected_except_agent_variables() -> None:
    load_settings({}, environment={"EPLB_AGENT_DEPLOYMENT": "x", "EPLB_ADDRESS": "y", "PATH": "z"})
    with pytest.raises(SettingsError, match="EPLB_WINDOWSTEPS; did you mean 'EPLB_WINDOW_STEPS'"):
        load_settings({}, environment={"EPLB_WINDOWSTEPS": "3"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"window_steps": 0}, r"setting window_steps: .* \(got 0\)"),
        ({"listen": "nowhere"}, "setting listen: expected host:port"),
        ({"page": "9465"}, "setting page: expected host:port"),
        ({"listen": "127.0.0.1:70000"}, "setting listen: expected host:port"),
        ({"policy": "best"}, "policy is 'best'; choose one of none"),
        ({"tls_cert": "cert.pem"}, "tls_cert and tls_key must be set together"),
        ({"auth_token": ""}, "auth_token is empty"),
        ({"par_threshold": float("nan")}, "par_threshold"),
        ({"report_steps": "0"}, r"setting report_steps: expected 1 to 1024 steps, or auto \(got '0'\)"),
        (
            {"report_steps": "many"},
            r"setting report_steps: expected 1 to 1024 steps, or auto \(got 'many'\)",
        ),
    ],
)
def test_invalid_values_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(flags)


def test_the_settings_text_does_not_contain_the_token() -> None:
    assert "hunter2" not in repr(load_settings({"auth_token": "hunter2"}))


def test_planner_settings_are_passed_to_the_planner() -> None:
    planner = load_settings({"policy": "deepseek", "max_layers": 4, "seed": 9}).planner()
    assert (planner.policy, planner.max_layers, planner.seed) == ("deepseek", 4, 9)


def test_a_cost_curve_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    write_curves(path, [H200])
    assert load_settings({"cost_curve": str(path)}).planner().cost_curve == H200
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({"cost_curve": str(tmp_path / "none.json")})
