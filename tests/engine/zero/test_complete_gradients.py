"""Missing gradients count as zero, alike at every stage and on any number of ranks."""

import deepspeed
import pytest
import torch
from torch import nn

from engine import distributed
from engine.zero.complete_gradients import CompleteGradients
from engine.zero.whole_parameters import keep_whole, whole_state


class TwoHeads(nn.Module):
    """`sometimes` is entered by some ranks only, `rarely` in some steps only, `never` never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.always = nn.Linear(7, 9), nn.Linear(9, 5)
        self.sometimes, self.rarely, self.never = nn.Linear(9, 5), nn.Linear(9, 5), nn.Linear(3, 3)
        self.gradients = CompleteGradients(self)

    def forward(self, x, *, sometimes, rarely, broken):
        touched = self.gradients.touch()
        hidden = torch.relu(self.body(x))
        loss = self.always(hidden).square().mean()
        if sometimes:
            loss = loss + self.sometimes(hidden).square().mean()
        if rarely:
            loss = loss + self.rarely(hidden).abs().mean()
        if broken:
            loss = loss * float("nan")
        agreed = self.gradients.complete(loss, touched, counts=not broken)
        assert agreed.broken == (1 if broken else agreed.broken)
        return agreed.loss


def train(stages):
    results = []
    for stage in stages:
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        world, rank = distributed.world_size(), distributed.rank()
        zero = {"stage": stage, "reduce_bucket_size": 60}
        if stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 4 // world,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": zero,
            },
        )
        keep_whole(engine, ["sometimes"])
        generator = torch.Generator().manual_seed(5)
        for step in range(6):
            inputs = torch.randn(4, 4, 7, generator=generator)
            for k in range(4 // world):
                j = k * world + rank
                loss = engine(
                    inputs[j],
                    sometimes=(step + j) % 2 == 0 and step != 2,
                    rarely=step != 3,
                    broken=step == 4 and j == 1,
                )
                engine.backward(loss)
                model.gradients.release()
                engine.step()
        results.append({name: value.clone() for name, value in whole_state(model)})
        engine.destroy()
    return results


def by_hand():
    """The same by plain torch: micro-gradients averaged over four, zeros where there is none."""
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        inputs = torch.randn(4, 4, 7, generator=generator)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for j in range(4):
            if step == 4 and j == 1:
                continue
            hidden = torch.relu(model.body(inputs[j]))
            loss = model.always(hidden).square().mean()
            if (step + j) % 2 == 0 and step != 2:
                loss = loss + model.sometimes(hidden).square().mean()
            if step != 3:
                loss = loss + model.rarely(hidden).abs().mean()
            (loss / 4).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_missing_gradients_are_zero_at_every_stage(ranks, world):
    expected = by_hand()
    for stage, weights in enumerate(ranks.run(train, world, (0, 1, 2, 3))[0]):
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=1e-6, atol=1e-7), f"{name} at stage {stage}"
