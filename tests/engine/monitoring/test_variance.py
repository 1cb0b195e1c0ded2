"""Variances read from records: matched axes, seeds together, the table's means by hand."""

import json
import math
from argparse import Namespace

import pytest
from PIL import Image

from engine.errors import UserError
from engine.monitoring.variance import by_seed, matched_end, read_variances, summary, title
from engine.monitoring.variance_picture import draw_variance


def write_run(
    folder, *, steps, per_epoch, seed=0, batch=8, phi=lambda step: 0.5, mu=1.0, anchor=None, start=0, head="head"
):
    folder.mkdir()
    params = {} if anchor is None else {"anchor": anchor}
    (folder / "config.json").write_text(
        json.dumps(
            {"train_batch_size": batch, "optimizer": {"params": params}, "run": {"seed": seed, "work_dir": str(folder)}}
        )
    )
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "epoch": step / per_epoch, "loss": 1.0, "mu": {"backbone": 1.0, head: mu}}
            if step % 2 == 0 and step > start:
                record["phi"] = {"backbone": 1.0, head: phi(step)}
            file.write(json.dumps(record) + "\n")
    return read_variances(folder)


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / "small-seed0", steps=80, per_epoch=20),
        write_run(tmp_path / "small-seed1", steps=80, per_epoch=20, seed=1),
        write_run(tmp_path / "large", steps=20, per_epoch=5, batch=32, mu=2.0),
    ]


def test_seeds_of_one_run_share_a_column_and_its_title(runs):
    groups = by_seed(runs)
    assert [[run.run.name for run in group] for group in groups] == [["small-seed0", "small-seed1"], ["large"]]
    assert [title(group) for group in groups] == ["small (2 seeds)", "large"]


def test_the_matched_axis_ends_with_the_shortest_run(runs, tmp_path):
    assert matched_end(runs, "step") == 20 and matched_end(runs, "epoch") == 4
    short = write_run(tmp_path / "short", steps=30, per_epoch=20)
    assert matched_end([*runs, short], "epoch") == 1.5


@pytest.mark.parametrize("axis, first, end", [("step", 32, 20), ("epoch", 1.6, 1)])
def test_a_run_that_measures_nothing_until_the_matched_end_is_named(tmp_path, axis, first, end):
    from launch.plot import _plot

    runs = [
        write_run(tmp_path / "short", steps=20, per_epoch=20),
        write_run(tmp_path / "late", steps=80, per_epoch=20, start=30),
    ]
    with pytest.raises(UserError) as caught:
        _plot(Namespace(runs=[run.run for run in runs], matched=[axis], smooth=0.0, out=str(tmp_path / "picture.png")))
    assert str(caught.value) == (
        f"{runs[1].run} has its first gradient variance at {axis} {first}, after the end of the shortest run ({end}): "
        f"train it with optimizer.params.start_step=0, or leave the matched {axis}s out"
    )
    assert not (tmp_path / "picture.png").exists()
    _plot(Namespace(runs=[run.run for run in runs], matched=[], smooth=0.0, out=str(tmp_path / "picture.png")))


def test_half_a_line_at_the_end_is_left_out_and_a_broken_one_before_it_named(tmp_path):
    run = write_run(tmp_path / "run", steps=10, per_epoch=5)
    records = tmp_path / "run" / "metrics.jsonl"
    whole = records.read_text()
    records.write_text(whole + whole.splitlines()[-1][:30])
    assert read_variances(run.run) == run
    records.write_text(whole + whole[:30] + "\n\n")
    assert read_variances(run.run) == run
    records.write_text(whole[:30] + "\n" + whole)
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1 is not JSON \(.*\): remove the line$"):
        read_variances(run.run)


def test_the_legend_names_the_modules_of_all_columns(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    runs = [
        write_run(tmp_path / name, steps=10, per_epoch=5, head=f"{name}_head", batch=batch)
        for batch, name in enumerate(("rpn", "bbox", "mask"), 8)
    ]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    draw_variance(runs, tmp_path / "picture.png")
    legend = drawn[0].axes[2].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["backbone", "rpn_head", "bbox_head", "mask_head"]
    assert len({line.get_color() for line in legend.get_lines()}) == 4


def test_the_table_takes_the_second_half_up_to_the_matched_end(tmp_path):
    run = write_run(tmp_path / "run", steps=40, per_epoch=10, phi=lambda step: 0.25 if step <= 20 else 0.01, mu=2.0)
    # Up to step 20 windows are 2..20, the second half begins at 11: all 0.25 there, and times mu^2 = 4 it is 1.
    head = summary([[run]], "step", 20).splitlines()[-1].split()
    assert head == ["head", "0.2500", "0.25", "1.0000", "1.00"]
    # Up to epoch 3 (step 30) it begins at step 16: 0.25 three times (16, 18, 20), 0.01 five times.
    mean = math.exp((3 * math.log(0.25) + 5 * math.log(0.01)) / 8)
    assert summary([[run]], "epoch", 3).splitlines()[-1].split()[1] == f"{mean:.4f}"


def test_the_anchor_is_the_runs_own(tmp_path):
    run = write_run(tmp_path / "run", steps=10, per_epoch=10, anchor="head")
    backbone = summary([[run]]).splitlines()[1].split()
    assert backbone[1:4] == ["backbone", "1.0000", "2.00"]


def test_a_column_per_group_and_rows_for_each_axis(runs, tmp_path):
    def size(chosen, axes=()):
        return Image.open(draw_variance(chosen, tmp_path / "picture.png", axes=axes)).size

    plain, seeds, both = size(runs[:1]), size(runs[:2]), size(runs)
    assert seeds == plain  # two seeds, one column; one row, as nothing is modulated
    assert both[0] == 2 * plain[0] and both[1] > 2 * plain[1]
    assert size(runs, ("step", "epoch"))[1] > 1.8 * both[1]


def test_a_run_without_measurements_is_refused(tmp_path):
    for more in ("", ', "phi": {"backbone": "nan"}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "epoch": 0.1, "loss": 1.0{more}}}\n')
        with pytest.raises(UserError, match="no gradient variances"):
            read_variances(tmp_path)


def test_a_row_shows_the_highest_of_its_runs(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    runs = [
        write_run(tmp_path / "low", steps=10, per_epoch=5, phi=lambda step: 0.1),
        write_run(tmp_path / "high", steps=10, per_epoch=5, batch=32, phi=lambda step: 0.9, mu=3.0),
    ]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    draw_variance(runs, tmp_path / "picture.png")
    phi, effective, mu = [drawn[0].axes[row * 2].get_ylim() for row in range(3)]
    assert phi[0] == effective[0] == mu[0] == 0
    assert phi[1] > 1.0 and effective[1] > 8.1 and mu[1] > 3.0
