"""Shipped curves are labelled as estimates, and unknown names are rejected with a list of the supported ones."""

from __future__ import annotations

import pytest

from eplb_core.cost.devices import (
    GPUS,
    MODELS,
    DeviceError,
    estimated_curve,
    knee_tokens,
    model_shape,
)


def test_deepseek_v3_has_the_measured_curve() -> None:
    curve = estimated_curve("H100", "DeepSeek-V3")
    assert (curve.floor_us, curve.read_us, curve.launch_us, curve.slope_us) == (21.1, 16.1, 10.2, 0.0584)
    assert curve.source.startswith("estimate")
    assert model_shape("deepseek-v3").bytes_per_expert == 3 * 7168 * 2048


def test_other_models_are_scaled_by_bytes_and_operations() -> None:
    measured = estimated_curve("h200", "deepseek-v3")
    scaled = estimated_curve("h200", "qwen3-235b-a22b")
    # bf16 weights have twice the bytes and are multiplied at half the rate.
    assert scaled.read_us == pytest.approx(measured.read_us * 2 * 4096 * 1536 / (7168 * 2048))
    assert scaled.slope_us == pytest.approx(measured.slope_us * 2 * 4096 * 1536 / (7168 * 2048))
    assert "scaled to Qwen/Qwen3-235B-A22B" in scaled.source


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_every_device_has_a_curve_for_every_model(gpu: str, model: str) -> None:
    curve = estimated_curve(gpu, model)
    assert 0 <= curve.launch_us <= curve.read_us
    assert curve.source.startswith("estimate")
    assert curve.slope_us > 0


@pytest.mark.parametrize(
    ("gpu", "model", "message"),
    [
        ("a100", "deepseek-v3", "--gpu 'a100' is unknown; choose one of h100"),
        ("h100", "gpt-5", "--model 'gpt-5'"),
    ],
)
def test_unknown_names_are_rejected_and_the_supported_ones_are_listed(
    gpu: str, model: str, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        estimated_curve(gpu, model)


@pytest.mark.parametrize(
    ("device", "knee"),
    [
        ("NVIDIA H100 80GB HBM3", 101),
        ("NVIDIA H200", 102),
        ("Ascend910B3", 150),
        ("Ascend910_9392", 176),
        ("NVIDIA A100-SXM4-80GB", None),
        ("", None),
    ],
)
def test_the_knee_follows_from_the_device_name_in_torch(device: str, knee: int | None) -> None:
    tokens = knee_tokens(device, model_shape("deepseek-v3").bytes_per_expert)
    assert (None if tokens is None else round(tokens)) == knee


def test_the_knee_is_unknown_if_the_size_of_an_expert_is_unknown() -> None:
    assert knee_tokens("Ascend910B3", 0) is None
