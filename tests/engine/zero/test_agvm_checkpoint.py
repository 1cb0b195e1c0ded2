"""The engine's own checkpoints carry mu and the counters: an interrupted run is an uninterrupted one."""

import shutil
import tempfile

import torch
import torch.distributed as dist
from agvm_harness import Case, Tiny, build, close, full_weights, take_step


def interrupt(case, folder):
    """Train 9 steps with a break after 4, in a new engine; and 9 without."""
    outcome = []
    for breaks in ((), (4,)):
        torch.manual_seed(1)
        engine, optimizer = build(case, Tiny())
        for step in range(1, 10):
            take_step(engine, case, step)
            if step in breaks:
                engine.save_checkpoint(folder, client_state={"mine": step})
                saved = optimizer.agvm_state_dict()
                close(engine, optimizer)
                torch.manual_seed(2)
                engine, optimizer = build(case, Tiny())
                path, client_state = engine.load_checkpoint(folder)
                assert path is not None and client_state["mine"] == 4
                assert optimizer.agvm_state_dict() == saved
                assert [g["module"] for g in optimizer.param_groups] == [
                    "backbone",
                    "backbone",
                    "neck",
                    "neck",
                    "head",
                    "head",
                ]
        outcome.append((full_weights(engine), optimizer.agvm_state_dict(), optimizer.phi))
        close(engine, optimizer)
    (weights, state, phi), (weights2, state2, phi2) = outcome
    return max(float((a - b).abs().max()) for a, b in zip(weights, weights2)), state == state2, phi == phi2


def interrupt_all(cases):
    results = []
    for case in cases:
        box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        results.append(interrupt(case, box[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
    return results


def test_an_interrupted_run_is_the_uninterrupted_one(ranks):
    cases = [Case(s, 1, rule=rule, agvm={"tau": 2}) for s, rule in ((0, "sgd"), (1, "adamw"), (2, "sgd"), (3, "adamw"))]
    cases += [Case(1, 1, precision="bf16", agvm={"tau": 2})]
    for case, answer in zip(cases, ranks.run(interrupt_all, 2, cases)[0]):
        assert answer == (0.0, True, True), (case, answer)


def warm_start():
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    torch.manual_seed(1)
    case = Case(2, 1, agvm={"tau": 1})
    engine, optimizer = build(case, Tiny())
    take_step(engine, case, 1)
    engine.save_checkpoint(box[0], "tag")
    moved = optimizer.mu
    close(engine, optimizer)
    engine, optimizer = build(case, Tiny())
    engine.load_checkpoint(box[0], load_module_only=True)
    fresh = [optimizer.mu]
    engine.load_checkpoint(box[0], "tag", True, False)  # the same by position: no optimizer states
    fresh.append(optimizer.mu)
    engine.load_checkpoint(box[0], "tag", True, True)
    fresh.append(optimizer.mu)
    close(engine, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
    return moved, fresh


def test_loading_weights_only_leaves_mu_at_one(ranks):
    moved, (module_only, by_position, everything) = ranks.run(warm_start, 2)[0]
    assert set(moved.values()) != {1.0} and everything == moved
    assert set(module_only.values()) == set(by_position.values()) == {1.0}
