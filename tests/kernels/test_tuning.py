"""How the fastest plan is chosen, kept and found again. Times are made up, but for one test's."""

import json
import math
import platform

import mlx.core as mx
import pytest

from kernels import metal, tuning
from kernels.metal import Launcher, Plan
from kernels.tuning import Shape, fastest, make_cases, time_plan, tune
from tests.metal.as_mlx import EmulatedMetal

SHAPE = Shape(num_q_heads=4, num_kv_heads=2, head_dim=64)
BEST = Plan.candidates()[5]


class Clock:
    """Seconds that pass only when a candidate is timed."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_fastest_candidate_is_chosen():
    times = {"a": 3.0, "b": 1.0, "c": 2.0}
    assert fastest(list(times), times.__getitem__, budget_s=5.0) == "b"


def test_equal_candidates_leave_the_first():
    assert fastest(["a", "b"], lambda candidate: 1.0, budget_s=5.0) == "a"


def test_a_candidate_that_fails_is_skipped():
    def time_of(candidate):
        if candidate == "broken":
            raise RuntimeError("unable to build the pipeline")
        return 1.0

    assert fastest(["broken", "sound"], time_of, budget_s=5.0) == "sound"


def test_where_every_candidate_fails_there_is_no_choice():
    def time_of(candidate):
        raise RuntimeError("no device")

    assert fastest(["a", "b"], time_of, budget_s=5.0) is None


@pytest.mark.parametrize(("each_s", "timed", "chosen"), [(1.0, 3, "a"), (3.0, 2, None), (6.0, 1, None)])
def test_no_candidate_begins_after_the_budget(each_s, timed, chosen):
    """Half a comparison is no result: the ones not timed may be faster."""
    clock, asked = Clock(), []

    def time_of(candidate):
        asked.append(candidate)
        clock.now += each_s
        return each_s

    assert fastest(["a", "b", "c"], time_of, budget_s=5.0, clock=clock) == chosen
    assert len(asked) == timed


@pytest.fixture
def on_metal(monkeypatch):
    """Metal stands in as this device's backend, and BEST for the fastest plan. Gives the plans timed."""
    timed = []

    def time_of(launcher, cases, plan):
        timed.append(plan)
        return 1.0 if plan == BEST else 2.0

    launcher = Launcher(plan=Plan(threadgroups=512))
    monkeypatch.setattr(tuning, "backend", lambda format: metal)
    monkeypatch.setattr(metal, "launcher", lambda: launcher)
    monkeypatch.setattr(tuning, "make_cases", lambda *args: [])
    monkeypatch.setattr(tuning, "time_plan", time_of)
    return timed


def test_what_was_found_is_used_and_not_timed_again(on_metal, tmp_path):
    tune(SHAPE, tmp_path / "tuning")
    assert on_metal == Plan.candidates()
    assert metal.launcher().plan == BEST
    metal.launcher().plan = Plan()
    tune(SHAPE, tmp_path / "tuning")
    assert on_metal == Plan.candidates()
    assert metal.launcher().plan == BEST


def test_another_shape_is_timed_by_itself(on_metal, tmp_path):
    tune(SHAPE, tmp_path)
    tune(Shape(8, 2, 64), tmp_path)
    tune(Shape(4, 2, 64, "int8"), tmp_path)
    assert len(on_metal) == 3 * len(Plan.candidates())
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["device", "mlx", "kernels"])
def test_another_device_or_version_is_a_miss(on_metal, monkeypatch, tmp_path, name):
    tune(SHAPE, tmp_path)
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    identity = tuning._identity(SHAPE)
    monkeypatch.setattr(tuning, "_identity", lambda shape: identity | {name: "another"})
    tune(SHAPE, tmp_path)
    assert len(on_metal) == 2 * len(Plan.candidates())
    # Nor does a file's name decide: what stands in it does.
    assert tuning.read(path, record | {name: "another"}) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"plan": 5}', "\x00\xff", '{"plan": {"threadgroups": 256}}']
)
def test_a_damaged_file_is_timed_again_and_replaced(on_metal, tmp_path, content):
    tune(SHAPE, tmp_path)
    (path,) = tmp_path.iterdir()
    sound = path.read_text()
    path.write_text(content)
    metal.launcher().plan = Plan()
    tune(SHAPE, tmp_path)
    assert len(on_metal) == 2 * len(Plan.candidates())
    assert metal.launcher().plan == BEST
    assert path.read_text() == sound
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "plan", [{"threadgroups": 0, "max_splits": 64}, {"threadgroups": 256}, {"warps": 3}, "fast"]
)
def test_a_plan_that_is_no_candidate_is_not_believed(on_metal, tmp_path, plan):
    tune(SHAPE, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"plan": plan}))
    tune(SHAPE, tmp_path)
    assert metal.launcher().plan == BEST


def test_without_a_result_the_default_stays_and_nothing_is_kept(on_metal, monkeypatch, tmp_path):
    def fails(*args):
        metal.launcher().plan = BEST
        raise RuntimeError("out of memory")

    for seam in ("time_plan", "make_cases"):
        monkeypatch.setattr(tuning, seam, fails)
        tune(SHAPE, tmp_path)
        assert metal.launcher().plan == Plan(threadgroups=512)
    assert list(tmp_path.iterdir()) == []


def test_without_a_budget_the_default_stays(on_metal, tmp_path):
    tune(SHAPE, tmp_path, budget_s=-1.0)
    assert on_metal == []
    assert metal.launcher().plan == Plan(threadgroups=512)


def test_a_folder_that_cannot_be_written_costs_only_the_file(on_metal, tmp_path):
    (tmp_path / "file").write_text("")
    tune(SHAPE, tmp_path / "file" / "tuning")
    assert metal.launcher().plan == BEST


@pytest.mark.skipif(mx.metal.is_available(), reason="a Mac's GPU has plans to choose from")
def test_a_device_with_nothing_to_choose_is_left_alone(tmp_path):
    tune(SHAPE, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not mx.metal.is_available() and platform.machine() != "x86_64",
    reason="no Apple GPU, and the emulator runs x86-64 code",
)
def test_plans_are_timed_on_real_calls():
    make = mx.fast.metal_kernel if mx.metal.is_available() else EmulatedMetal().metal_kernel
    launcher = Launcher(make)
    cases = make_cases(launcher, SHAPE, num_blocks=(3, 1), batches=(1, 2))
    assert [(q.shape[0], view.num_blocks) for q, view in cases] == [(1, 3), (2, 3), (1, 1), (2, 1)]
    for plan in (Plan(1, 1), Plan(256, 64)):
        assert 0 < time_plan(launcher, cases, plan) < math.inf
        assert launcher.plan == plan
