"""Which models an engine can balance is read from its registry and from what its classes inherit, wherever they are."""

import pytest

from tools.model_families import PAGE, _releases, sglang_models, vllm_models

REGISTRY = """
_TEXT_GENERATION_MODELS: dict[str, tuple[str, str]] = {
    "MixForCausalLM": ("mix", "MixForCausalLM"),
    "ChildForCausalLM": ("child", "Child"),
    "PlainMoeForCausalLM": ("plain", "PlainMoeForCausalLM"),
    "DenseForCausalLM": ("dense", "DenseForCausalLM"),
}
_MULTIMODAL_MODELS = {"Other": ("mix", "MixForCausalLM")}
"""
MODELS = {
    "mix": "from x import FusedMoE\n\n\nclass MixForCausalLM(\n    nn.Module,\n    MixtureOfExperts,\n):\n    pass\n",
    "child": "class Child(base.MixForCausalLM):\n    pass\n",
    "plain": "from x import FusedMoE\n\n\nclass PlainMoeForCausalLM(nn.Module):\n    a = 1\n",
    "dense": "class DenseForCausalLM(DenseForCausalLM, nn.Module):\n    pass\n",
}


@pytest.fixture
def written(tmp_path):
    """Writes modules below a folder, and returns where an engine's source begins."""

    def write(folder, modules):
        (tmp_path / folder).mkdir(parents=True)
        for name, text in modules.items():
            (tmp_path / folder / f"{name}.py").write_text(text)
        return tmp_path

    return write


def test_vllm_balances_what_inherits_from_its_protocol(written):
    source = written("vllm/model_executor/models", {"registry": REGISTRY, **MODELS})
    assert dict(vllm_models(source)) == {
        "MixForCausalLM": True,
        "ChildForCausalLM": True,
        "PlainMoeForCausalLM": False,
    }


def test_sglang_balances_what_hands_its_experts_out(written):
    known = "class A(nn.Module):\n    x = FusedMoE\n\n    def routed_experts_weights_of_layer(self):\n        pass\n"
    modules = {
        "a": f"{known}\n\nclass B(A):\n    pass\n\n\nclass BNextN(A):\n    pass\n\n\nEntryClass = [A, B, BNextN]\n",
        "c": "class C(nn.Module):\n    x = FusedMoE\n\n\nEntryClass = C\n",
    }
    assert dict(sglang_models(written("sglang/srt/models", modules))) == {"A": True, "B": True, "C": False}


def test_releases_are_a_range_and_a_model_may_be_absent():
    engine = {"0.23.0": {"A": False}, "0.24.0": {"A": True}, "0.25.0": {"A": True, "B": False}}
    assert [_releases(name, engine) for name in "ABC"] == ["0.24 to 0.25", "no", ""]


def test_the_page_has_the_models_that_are_asked_about_most():
    rows = dict(
        line.strip("| ").split(" | ")[:2] for line in PAGE.read_text().splitlines() if line.startswith("| ")
    )
    assert rows["GptOssForCausalLM"] == rows["OlmoeForCausalLM"] == rows["Qwen2MoeForCausalLM"] == "no"
    assert rows["Qwen3MoeForCausalLM"] == rows["DeepseekV3ForCausalLM"] == "0.23 to 0.33"
