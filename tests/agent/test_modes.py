"""Tests of the agent mode that environment variables request."""

import pytest

from worker_agent.modes import requested_mode


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, None),
        ({"EPLB_AGENT_SERVICE": "  "}, None),
        ({"EPLB_AGENT_SERVICE": "eplb:50551"}, "full"),
        ({"EPLB_AGENT_MODE": "full", "EPLB_AGENT_SERVICE": "eplb:50551"}, "full"),
        ({"EPLB_AGENT_MODE": "Policy"}, "policy"),
        ({"EPLB_AGENT_MODE": "policy", "EPLB_AGENT_SERVICE": "eplb:50551"}, "policy"),
        ({"EPLB_AGENT_MODE": "observe"}, "observe"),
    ],
)
def test_two_environment_variables_determine_the_mode(environment, mode):
    assert requested_mode(environment) == mode


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"EPLB_AGENT_MODE": "full"}, "needs a service; set EPLB_AGENT_SERVICE"),
        ({"EPLB_AGENT_MODE": "polici"}, "'polici'; set it to observe, policy or full"),
    ],
)
def test_a_mode_that_cannot_run_is_rejected(environment, message):
    with pytest.raises(ValueError, match=message):
        requested_mode(environment)
