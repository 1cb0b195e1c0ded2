"""The doctor's proofs fail where the engine or a kernel is broken: faults are put in, on one and on two ranks."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from engine import distributed


def proved(fault, names):
    """Outcomes of the named checks with a fault put in: name -> status."""
    from engine.doctor import examination, kernels, proofs

    folder = Path(distributed.broadcast_object(tempfile.mkdtemp()))
    stages = proofs.StageProofs()
    checks = {
        **kernels.KERNELS,
        **{f"stage {stage}": lambda stage=stage: stages.follows_twin(stage) for stage in proofs.STAGES},
        "alike": stages.stages_alike,
        "resume": lambda: proofs.resumes_alike(2, folder),
    }
    examined = examination.Examination(folder / "doctor.json", limit=100, leave=sys.exit)
    undo = FAULTS[fault]()
    try:
        for name in names:
            examined.check(name, checks[name])
    finally:
        undo()
    return {outcome.name: (outcome.status, outcome.text) for outcome in examined.outcomes}


def replaced(owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, new(old))
    return lambda: setattr(owner, name, old)


def kernel(name, new):
    def put_in():
        from models.mmdet_setup import import_mmdet

        import_mmdet()
        import mmcv.ops  # noqa: F401

        return replaced(sys.modules["mmcv._ext"], name, new)

    return put_in


def wrong_mu():
    """mu drifts by a part in a thousand at each window."""
    from engine.optim.agvm import Modulator

    def new(old):
        def update(self, *args):
            done = old(self, *args)
            self.mu["neck"] *= 1.001
            return done

        return update

    return replaced(Modulator, "update", new)


def forgotten_state():
    """A resumed run does not get AGVM's factors back."""
    from engine.optim.agvm import AGVMOptimizer

    return replaced(AGVMOptimizer, "load_agvm_state_dict", lambda old: lambda self, state: None)


def error_on_all():
    from engine.doctor import kernels

    def new(old):
        def broken(*args):
            raise RuntimeError("no kernel image is available")

        return broken

    return replaced(kernels, "_compare", new)


FAULTS = {
    "none": lambda: lambda: None,
    "nms": kernel("nms", lambda old: lambda *args, **more: old(*args, **more)[:-1]),
    "attention": kernel("ms_deform_attn_forward", lambda old: lambda *args, **more: old(*args, **more) * 1.001),
    "mu": wrong_mu,
    "state": forgotten_state,
    "error": error_on_all,
}


STAGES = ["stage 0", "stage 1", "stage 2", "stage 3", "alike"]


@pytest.mark.parametrize("world, names", [(1, ["nms", "focal loss", *STAGES, "resume"]), (3, ["stage 1", "stage 3"])])
def test_all_pass_on_one_rank_and_on_an_odd_number(ranks, world, names):
    first, *others = ranks.run(proved, world, "none", names)
    assert {status for status, _ in first.values()} == {"PASS"}, first
    assert all(other == first for other in others)  # ranks agree, to the letter


def test_a_broken_kernel_fails_and_the_others_pass(ranks):
    found = ranks.run(proved, 1, "nms", ["roi_align", "nms"])[0]
    assert [found[name][0] for name in ("roi_align", "nms")] == ["PASS", "FAIL"]
    found = ranks.run(proved, 1, "attention", ["deformable attention", "focal loss"])[0]
    assert [found[name][0] for name in ("deformable attention", "focal loss")] == ["FAIL", "PASS"]


def test_a_wrong_factor_fails(ranks):
    found = ranks.run(proved, 2, "mu", ["stage 2", "alike"])[0]
    assert found["stage 2"][0] == "FAIL" and re.search(r"mu \d\.\de-03", found["stage 2"][1])
    assert found["alike"] == ("SKIP", "stage 0, 1, 3 did not end")


def test_a_resume_that_forgets_fails(ranks):
    (status, text), *_ = ranks.run(proved, 2, "state", ["resume"])[0].values()
    assert status == "FAIL" and "mu differs" in text


def test_an_error_fails_one_check_and_not_the_next(ranks):
    found = ranks.run(proved, 2, "error", ["roi_align", "nms"])[1]
    assert found["roi_align"] == ("FAIL", "RuntimeError: no kernel image is available")
    assert found["nms"][0] == "PASS"
