"""The catalogue: well formed, every proof exists, and a recorded step holds nothing that nobody has looked at."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from dense_support import config, megatron
from test_specs import LAYER_NORM, MOE, batch, from_builder, step
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_det.contract import catalogue
from megatron_det.errors import FormatError

TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world():
    with megatron():
        yield


class Recording(TorchDispatchMode):
    """The names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [{}, {"attention_dropout": 0.0, "mtp_num_layers": 1}, LAYER_NORM, MOE])
def test_a_recorded_step_holds_nothing_unknown(world, more):
    positions = "learned_absolute" if more is LAYER_NORM else "rope"
    model = from_builder(config(**more), position_embedding_type=positions)
    data = batch()
    with Recording() as recording:
        step(model, data)
    assert len(recording.seen) > 40
    assert catalogue.unknown(recording.seen) == []


def test_a_new_operation_is_found():
    """The injected fault: an operation with atomics slips into the path."""
    with Recording() as recording:
        torch.zeros(3).scatter_reduce_(0, torch.tensor([0, 0]), torch.ones(2), "sum")
        torch.zeros(3).index_put_((torch.tensor([1, 1]),), torch.ones(2), accumulate=True)
    assert {"scatter_reduce_", "index_put_"} <= recording.seen
    assert {"scatter_reduce_", "index_put_"} <= set(catalogue.unknown(recording.seen))


def test_every_proof_exists():
    for operation in catalogue.operations().values():
        file, _, function = operation.test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, operation.test


def test_explain():
    text = catalogue.explain("embedding")
    assert "level layout" in text and "test_embedding.py" in text
    assert catalogue.explain("aten.index_copy_") == text
    assert "refused: " in catalogue.explain("mla-rope-fused")
    with pytest.raises(FormatError, match="cross-entropy"):
        catalogue.explain("no-such-thing")


def test_the_weakest_link():
    assert catalogue.weakest(["embedding", "norm", "matmul"]).id == "matmul"
    assert catalogue.weakest(["matmul", "mamba"]).id == "mamba"


GOOD = 'schema = 1\n[[operation]]\nid = "a"\nwhat = "w"\nlevel = "run"\nwhy = "y"\ntest = "t::u"\naten = ["mm"]\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("schema = 2", "schema 2"),
        ("schema = ", "Invalid"),
        (GOOD.replace("run", "sure"), "known level"),
        (GOOD.replace('why = "y"\n', ""), "known level"),
        (GOOD + 'refused = "r"\n', "known level"),
        (GOOD.replace('test = "t::u"\n', ""), "no test"),
        (GOOD + 'colour = "red"\n', "unknown colour"),
        (GOOD + GOOD.removeprefix("schema = 1\n"), "a twice"),
        (GOOD + GOOD.removeprefix("schema = 1\n").replace('"a"', '"b"'), "aten mm in a and in b"),
    ],
)
def test_a_catalogue_that_cannot_be_read_is_refused(text, found):
    assert catalogue.read(GOOD)["a"].aten == ("mm",)
    with pytest.raises(FormatError, match=found):
        catalogue.read(text)
