"""The comparator names the first difference in causal order, and never calls nothing "identical"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_det.errors import FormatError
from megatron_det.formats import manifest
from megatron_det.formats.digest import digest_array
from megatron_det.formats.ledger import LedgerWriter, read_run
from megatron_det.formats.scalars import of_python
from megatron_det.verify.compare import compare


def weight(rows=range(6)):
    array = np.array(list(rows), dtype=np.uint16)
    return digest_array(array, "bfloat16", array.shape).as_value()


BASE = {
    "data/mb0/tokens": weight(),
    "rng/cuda": weight(),
    "state/param/w": weight(),
    "state/exp_avg/w": weight(),
    "state/lr/group0": of_python(0.5),
    "num/loss/lm loss": of_python(2.0),
    "after/param/w": weight(),
}


def record(directory: Path, *, ranks=3, steps=4, changes=None, env="1", run="r") -> Path:
    """``changes``: {(iteration, rank): {name: value or None}}."""
    for rank in range(ranks):
        writer = LedgerWriter(directory, rank, ranks, run)
        for iteration in range(1, steps + 1):
            items = {**BASE, **(changes or {}).get((iteration, rank), {})}
            writer.step(iteration, 8 * iteration, [(n, v) for n, v in items.items() if v is not None])
        writer.close()
        head = {"active": True, "level": "run", "device": "cuda", "waived": [], "chaos": None}
        manifest.write(directory, rank, {**head, "sections": {"env": {"A": env}}})
    return directory


@pytest.fixture
def difference(tmp_path):
    def find(changes, **kwargs):
        a, b = record(tmp_path / "a"), record(tmp_path / "b", changes=changes, **kwargs)
        return compare(read_run(a), read_run(b))

    return find


def test_identical(difference):
    assert difference({}).identical


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("data/mb0/tokens", "data differ"),
        ("rng/cuda", "RNG differs"),
        ("state/param/w", "state differs"),
        ("num/loss/lm loss", "numbers differ"),
        ("after/param/w", "numbers differ"),
    ],
)
def test_cause_follows_from_what_differs_first(difference, name, cause):
    later = {n: weight([9]) for n in list(BASE)[list(BASE).index(name) :] if n != "state/lr/group0"}
    found = difference({(3, 1): later, (4, 0): later})
    assert (found.first.iteration, found.first.rank, found.first.quantity) == (3, 1, name)
    assert found.first.cause == cause


def test_data_on_one_rank_comes_before_numbers_on_another(difference):
    found = difference({(2, 0): {"num/loss/lm loss": of_python(3.0)}, (2, 2): {"data/mb0/tokens": weight([1])}})
    assert (found.first.rank, found.first.cause) == (2, "data differ")
    assert [d.rank for d in found.candidates] == [2, 0], "every rank's candidate is listed"


def test_schedule_comes_before_weights(difference):
    changed = {"state/param/w": weight([1]), "state/lr/group0": of_python(0.25)}
    found = difference({(1, 0): {"state/param/w": weight([1])}, (1, 1): changed})
    assert (found.first.rank, found.first.quantity) == (1, "state/lr/group0")


def test_one_ulp_and_signed_zero(difference):
    up = of_python(float(np.nextafter(2.0, 3.0)))
    assert difference({(4, 2): {"num/loss/lm loss": up}}).first.ulp == 1


def test_other_order(difference):
    assert "other order" in difference({(1, 0): {"state/param/w": weight(reversed(range(6)))}}).first.note


def test_moments_are_named(difference):
    assert "optimizer moments" in difference({(1, 0): {"state/exp_avg/w": weight([9, 1, 2, 3, 4, 5])}}).first.note


def test_structure(difference):
    assert "structure differs" in difference({(1, 0): {"state/param/w": None}}).first.note


def test_environment_comes_before_any_number(difference):
    found = difference({(1, 0): {"num/loss/lm loss": of_python(3.0)}}, env="2")
    assert not found.identical
    assert found.as_dict()["first_difference"]["cause"] == "environment differs"


def test_other_world_size_or_no_common_iteration_is_an_error(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", ranks=2)
    with pytest.raises(FormatError, match="world sizes"):
        compare(read_run(a), read_run(b))
    with pytest.raises(FormatError, match="iterations"):
        compare(read_run(a), read_run(a), first=9)


def test_lengths_are_said(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", steps=2)
    found = compare(read_run(a), read_run(b))
    assert found.identical
    assert "only a recorded iterations 3..4" in found.notices


def cli(*words):
    return subprocess.run(
        [sys.executable, "-m", "megatron_det.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_command_line(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", changes={(3, 0): {"rng/cuda": weight([1])}})
    assert cli("compare", str(a), str(a)).returncode == 0
    differs = cli("compare", str(a), str(b))
    assert differs.returncode == 1
    assert "iteration 3, rank 0: rng/cuda" in differs.stdout
    assert cli("compare", str(a), str(b), "--to", "2").returncode == 0
    missing = cli("compare", str(a), str(tmp_path / "none"))
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


def test_needs_neither_torch_nor_megatron(tmp_path):
    record(tmp_path / "a")
    code = (
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'megatron', 'triton'): raise ImportError('walled: ' + name)\n"
        "sys.meta_path.insert(0, Wall())\n"
        "from megatron_det.cli import app\n"
        "app(['compare', sys.argv[1], sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    wall = subprocess.run([sys.executable, "-c", code.replace("from megatron_det.cli import app", "import torch")],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "walled" in wall.stderr, "the control: the wall stands"


def lines(directory: Path, iterations, items, evaluations=()) -> Path:
    writer = LedgerWriter(directory, 0, 1, "r")
    for iteration in iterations:
        writer.step(iteration, 8 * iteration, items)
    for iteration, number in evaluations:
        writer.evaluation(iteration, [("num/validation/loss", of_python(number))])
    writer.close()
    return directory


def judged(a: Path, b: Path):
    return compare(read_run(a), read_run(b), with_manifests=False)


def test_a_name_that_comes_twice_hides_nothing(tmp_path):
    sides = []
    for first in (1.0, 2.0):
        items = [("num/x", of_python(first)), ("num/x", of_python(7.0))]
        sides.append(lines(tmp_path / str(first), (1, 2), items))
    assert judged(sides[0], sides[1]).first.quantity == "num/x"
    assert judged(sides[0], sides[0]).identical, "the control"


def test_an_iteration_in_between_that_one_run_lacks(tmp_path):
    items = [("num/x", of_python(1.0))]
    found = judged(lines(tmp_path / "a", (1, 2, 3, 4), items), lines(tmp_path / "b", (1, 2, 4), items))
    assert (found.first.iteration, found.first.a, found.first.b) == (3, "recorded", "absent")
    assert "structure differs" in found.first.note


def test_an_iteration_that_both_runs_skip_is_no_difference(tmp_path):
    items = [("num/x", of_python(1.0))]
    assert judged(lines(tmp_path / "a", (1, 2, 4), items), lines(tmp_path / "b", (1, 2, 4), items)).identical


def test_evaluations_are_paired_by_iteration(tmp_path):
    items = [("num/x", of_python(1.0))]
    a = lines(tmp_path / "a", (1, 2, 3, 4), items, [(2, 1.0), (4, 1.0)])
    b = lines(tmp_path / "b", (1, 2, 3, 4), items, [(4, 9.0)])
    assert (judged(a, b).first.iteration, judged(a, b).first.quantity) == (4, "num/validation/loss")
    c = lines(tmp_path / "c", (1, 2, 3, 4), items, [(2, 1.0)])
    assert judged(a, c).identical
    assert judged(a, c).notices == ["rank 0: only a recorded an evaluation at iteration 4"]
