"""What `attach` refuses, and the first window's check of the layout."""

import pytest
import torch
import torch.distributed as dist
from agvm_harness import Case, Tiny, build, close, micro_batch, take_step

from engine.zero import support


def attach_error(case):
    torch.manual_seed(1)
    engine, optimizer = build(case, Tiny(), attach=False)
    try:
        optimizer.attach(engine)
        return None
    except ValueError as error:
        return str(error)
    finally:
        close(engine, optimizer)


def attach_errors(cases):
    return [attach_error(case) for case in cases]


def test_unsupported_features_are_refused_by_name(ranks):
    cases = {
        "fp16 at stage 0": Case(0, 2, precision="fp16"),
        "elastic_checkpoint": Case(2, 2, zero={"elastic_checkpoint": True}),
        "managed_gradient_accumulation": Case(2, 2, config={"managed_gradient_accumulation": False}),
        "DeepCompile": Case(2, 2, config={"compile": {"deepcompile": True}}),
        "set gradient_accumulation_steps to 2": Case(2, 1),
    }
    for words, error in zip(cases, ranks.run(attach_errors, 1, list(cases.values()))[0]):
        assert error is not None and words in error, (words, error)


# Features that need GPUs, NVMe or other models to switch on: the engine says it has one, and attach has to refuse it.
CLAIMED = {
    "mixture of experts": ("engine", "has_moe_layers", True),
    "pipeline parallelism": ("engine", "pipeline_parallelism", True),
    "sequence parallelism": ("engine", "sequence_parallel_size", 2),
    "tensor or model parallelism": ("engine", "mpu", object()),
    "hpZ": ("zero", "zero_hpz_partition_size", 2),
    "quantized gradients": ("zero", "zero_quantized_gradients", True),
    "ZenFlow": ("call", "zenflow_config", object()),
    "SuperOffload": ("offload", "super_offload", True),
    "optimizer offload to NVMe": ("device", "nvme", None),
    "partial optimizer offload": ("offload", "zero_partial_offload", 0.5),
    "gradient_allreduce_op sum": ("engine", "gradient_average", False),
}


def claimed_features():
    from types import SimpleNamespace

    torch.manual_seed(1)
    engine, optimizer = build(Case(2, 2), Tiny(), attach=False)
    support.refuse_unsupported(engine, "AGVM")  # as it is, it is supported
    errors = {}
    for feature, (where, name, value) in CLAIMED.items():

        class Claims:
            """The engine with one more feature."""

            def __getattr__(self, attribute):
                return getattr(engine, attribute)

        claims, zero = Claims(), engine._config.zero_config.model_copy()
        claims._config = SimpleNamespace(zero_config=zero)
        if where == "engine":
            setattr(claims, name, value)
        elif where == "zero":
            setattr(zero, name, value)
        else:
            if where != "call":
                device = name if where == "device" else "cpu"
                object.__setattr__(zero, "offload_optimizer", SimpleNamespace(device=device))
            if where != "device":
                setattr(claims, name, lambda value=value: value)
        try:
            support.refuse_unsupported(claims, "AGVM")
            errors[feature] = "accepted"
        except ValueError as error:
            errors[feature] = str(error)
    close(engine, optimizer)
    return errors


def test_every_feature_that_bends_gradients_is_refused(ranks):
    for feature, error in ranks.run(claimed_features, 1)[0].items():
        assert error.startswith(f"AGVM does not support {feature}"), (feature, error)


def wrong_attachments():
    torch.manual_seed(1)
    errors = []
    engine, optimizer = build(Case(1, 2), Tiny())
    other_engine, other = build(Case(1, 2), Tiny(), attach=False)
    for wrong in (
        lambda: optimizer.attach(engine),
        lambda: other.attach(engine),
        lambda: other.attach(other_engine, bucket_size=0),
        lambda: engine.coalesce_grad_reduction(),
    ):
        with pytest.raises(ValueError) as error:
            wrong()
        errors.append(str(error.value))
    close(engine, optimizer)
    close(other_engine, other)
    return errors


def test_attach_once_and_to_its_own_engine(ranks):
    twice, foreign, empty, coalesced = ranks.run(wrong_attachments, 1)[0]
    assert (
        "attached already" in twice
        and "not the engine's" in foreign
        and "bucket_size must be a whole number >= 1" in empty
        and "AGVM does not support engine.coalesce_grad_reduction()" in coalesced
    )


def misread_layout(stage, name="gradient"):
    """One fragment read one element off, as another DeepSpeed version might lay it out."""
    torch.manual_seed(1)
    case = Case(stage, 2, rule="sgd")
    model = Tiny()
    engine, optimizer = build(case, model)
    layout = optimizer._attachment.layout
    right, last = getattr(layout, name), layout.fragments[-1]
    setattr(layout, name, lambda f: right(f).roll(1) if f == last else right(f))
    try:
        for step in range(1, 4):
            take_step(engine, case, step)
        return None
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        close(engine, optimizer)


def misread_layouts(cases):
    return [misread_layout(*case) for case in cases]


def test_the_first_window_notices_a_layout_read_wrongly(ranks):
    import deepspeed

    # Also of the gradients so far, which give the first half's share.
    cases = [(0,), (1,), (2,), (3,), (2, "reduced_so_far"), (3, "reduced_so_far")]
    for answers in zip(*ranks.run(misread_layouts, 2, cases)):
        assert all(f"DeepSpeed {deepspeed.__version__}" in (answer or "") for answer in answers), answers


def wrong_number_of_backwards(stage):
    torch.manual_seed(1)
    case = Case(stage, 2, rule="sgd", agvm={"tau": 1})
    engine, optimizer = build(case, Tiny())
    take_step(engine, case, 1)
    mu = optimizer.mu
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*micro_batch(2, dist.get_rank())))
    engine.step()
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return mu, state


def wrong_numbers_of_backwards(stages):
    return [wrong_number_of_backwards(stage) for stage in stages]


def test_a_step_with_another_number_of_backwards_is_not_measured(ranks):
    for mu, state in ranks.run(wrong_numbers_of_backwards, 2, (0, 2, 3))[0]:
        assert (state["windows"], state["discarded"], state["mu"]) == (1, 1, mu)


def test_another_version_is_said_to_be_untried(caplog):
    support.note_version("0.19.3")
    assert not caplog.records
    support.note_version("0.21.0")
    assert "0.21.0" in caplog.text
