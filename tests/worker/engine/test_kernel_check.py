"""A worker whose device computes attention wrongly must not answer with it."""

import pytest

from kernels import dispatch, plain
from tests.worker.engine.tiny import load_tiny
from worker.engine import kernel_check
from worker.engine.engine import Engine, EngineError


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setattr(dispatch, "_native", True)


def errors(monkeypatch, *results):
    remaining = list(results)

    def attention_error(*shape):
        result = remaining.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(kernel_check, "attention_error", attention_error)


@pytest.mark.parametrize("first", [0.5, float("nan"), RuntimeError("does not compile")])
def test_wrong_kernels_are_replaced_by_the_plain_ones(smollm2, monkeypatch, first):
    errors(monkeypatch, first, 1e-6)
    Engine.load(smollm2, "smollm2-135m-instruct", None)
    assert dispatch.backend() is plain


def test_every_format_of_the_model_is_checked(smollm2, tmp_path, monkeypatch):
    errors(monkeypatch, 1e-6, 0.5, 1e-6, 1e-6)
    tiny = load_tiny(tmp_path, smollm2, "qwen2")
    assert {shape.format for shape in tiny.shapes} == {"int4c", "k8v4"}
    kernel_check.check_kernels(tiny)
    assert dispatch.backend() is plain


def test_a_device_that_computes_nothing_right_is_refused(smollm2, monkeypatch):
    errors(monkeypatch, 0.5, 0.5)
    with pytest.raises(EngineError, match="answers would be wrong"):
        Engine.load(smollm2, "smollm2-135m-instruct", None)


def test_right_kernels_stay(smollm2):
    Engine.load(smollm2, "smollm2-135m-instruct", None)
    assert dispatch.backend() is not plain
