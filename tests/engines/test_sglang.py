"""Real SGLang, balanced by the agent, answers what SGLang answers alone; its layers switch while it does."""

import pytest

from tests.engines.environments import SGLANG_0523
from tests.engines.sglang_run import ON_CPU, SglangRun, make_sglang_site
from tests.engines.test_vllm import WITHOUT_WEIGHTS, heat_arrived, in_engine, same_answers, switched

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TWO_TENSOR_RANKS = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4}
TWO_ATTENTION_RANKS = TWO_TENSOR_RANKS | {"attn_dp_size": 2}
"""Each with requests of its own, whose tokens are gathered before they are routed."""
PARALLEL = pytest.mark.parametrize(
    "parallel", [TWO_TENSOR_RANKS, TWO_ATTENTION_RANKS], ids=["tp2", "attention-dp2"]
)
LOAD = {"requests": 8, "max_tokens": 120, "rounds": 4}
DEALING = "--window-steps 32 --decision-interval 32 --report-steps 8 --par-threshold 1.0 --min-gain 0.0 --split deal"


@pytest.fixture(scope="session")
def sglang_site(tmp_path_factory):
    """For ``PYTHONPATH``."""
    return make_sglang_site(tmp_path_factory.mktemp("sglang"))


@pytest.fixture
def run_sglang(sglang_site, checkpoint, tmp_path):
    """Starts engines; those still running are ended with the test."""
    runs = []

    def start(options, name="balanced", **environment):
        run = SglangRun(sglang_site, tmp_path / name, checkpoint, options, **environment)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.stop()


@pytest.fixture(scope="module")
def alone():
    """Answers of the untouched engine on one rank; made once."""
    made = []

    def answers(run_sglang):
        made[:] = made or run_sglang(LOAD, name="alone").answers()
        return made

    return answers


@PARALLEL
@pytest.mark.parametrize("service", [DEALING], indirect=True)
def test_answers_are_the_same_over_many_switches(parallel, run_sglang, alone, service):
    expected = alone(run_sglang)
    agent = {"EPLB_AGENT_SERVICE": service.address, "EPLB_AGENT_DEPLOYMENT": "default"}
    balanced = run_sglang(LOAD | {"engine": parallel}, **agent)
    same_answers(balanced.answers(), expected)
    heat_arrived(switched(service, 20, balanced.tail()), service)


@PARALLEL
@pytest.mark.parametrize("service", [DEALING], indirect=True)
def test_tables_that_change_without_weights_are_seen(parallel, run_sglang, alone, service):
    expected = alone(run_sglang)
    agent = WITHOUT_WEIGHTS | {"EPLB_AGENT_SERVICE": service.address}
    broken = run_sglang(LOAD | {"engine": parallel}, **agent)
    assert [ids for ids, _ in broken.answers()] != [ids for ids, _ in expected]


def test_with_eplb_off_there_is_nothing_to_balance(run_sglang, alone, service):
    expected = alone(run_sglang)
    answers = run_sglang(LOAD, EPLB_AGENT_SERVICE=service.address).answers()
    assert answers == expected


def test_a_combination_that_cannot_be_balanced_ends_the_engine_with_the_reason(run_sglang):
    refused = TWO_TENSOR_RANKS | {"ep_dispatch_algorithm": "fake"}
    run = run_sglang(LOAD | {"engine": refused}, EPLB_AGENT_SERVICE="127.0.0.1:1")
    said = run.failure()
    assert "--ep-dispatch-algorithm fake" in said
    assert "unset EPLB_AGENT_SERVICE" in said


def test_an_unknown_release_ends_the_engine_and_leaves_it_as_it_is(sglang_site):
    check = (
        "import sglang.version; sglang.version.__version__ = '0.6.0'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "try: load_plugins()\n"
        "finally: print('hooks of the agent', [one for one in HookRegistry._hooks if 'ModelRunner' in one])"
    )
    done = in_engine(SGLANG_0523, sglang_site, check, EPLB_AGENT_SERVICE="127.0.0.1:1", **ON_CPU)
    assert done.returncode == 1, done.stderr
    assert "hooks of the agent []" in done.stdout
    assert "SGLang 0.6.0" in done.stderr
    assert "0.5.23" in done.stderr
