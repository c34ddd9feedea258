"""Cross entropy: bits, closeness, smoothing as Megatron has it, a vocabulary split over three ranks."""

from __future__ import annotations

import math
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from dense_support import bits, config, gradients, megatron, replays, threads

from megatron_det.errors import Refused
from megatron_det.kernels import cross_entropy as kernel
from megatron_det.kernels.tree import pairs

U = 2.0**-24


def drawn(*shape: int, words: int, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(4)
    logits = (torch.randn(*shape, words, generator=draw) * 4).to(dtype)
    return logits, torch.randint(0, words, shape, generator=draw)


def whole(logits: torch.Tensor, target: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    top = kernel.top(logits)
    return kernel.loss(kernel.sums(logits, target, top, smoothing > 0), smoothing, logits.shape[1])


def test_the_example_of_the_docstring():
    loss = whole(torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1]))
    assert abs(loss.item() - math.log(4 / 3)) < 4 * U


def test_a_row_does_not_depend_on_the_others(monkeypatch):
    logits, target = drawn(37, words=301)
    all_rows = whole(logits, target)
    assert bits(whole(logits[5:6], target[5:6])) == bits(all_rows[5:6])
    monkeypatch.setattr(kernel, "CHUNK", 700)
    assert bits(whole(logits, target)) == bits(all_rows), "chunks are no order"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_fp64(smoothing, dtype):
    words = 500
    logits, target = drawn(64, words=words, dtype=dtype)
    wide = logits.double().requires_grad_()
    share = smoothing * words / (words - 1)
    logs = torch.log_softmax(wide, -1)
    exact = -(1 - share) * logs.gather(1, target.unsqueeze(1)).squeeze(1) - share * logs.mean(-1)
    grad = torch.rand(64, generator=torch.Generator().manual_seed(9)) + 0.5
    exact.backward(grad.double())
    steps = math.ceil(math.log2(words)) + 8
    spread = (wide.detach().amax(-1) - wide.detach().amin(-1)) + math.log(words) + 1
    assert ((whole(logits, target, smoothing).double() - exact).abs() <= steps * U * spread).all()
    top = kernel.top(logits)
    total = kernel.sums(logits, target, top, smoothing > 0)[0]
    found = kernel.gradient(logits, target, top, total, grad, smoothing, words)
    assert found.dtype == dtype
    last = 2.0**-8 if dtype == torch.bfloat16 else U
    inner = steps * U * (1 + spread.unsqueeze(1))
    assert ((found.double() - wide.grad).abs() <= (inner + last * wide.grad.abs() / grad.unsqueeze(1)) * 2).all()


@pytest.fixture(scope="module")
def world():
    with megatron():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_replays_with_and_without_recompute(world, dtype):
    from megatron_det.modules.cross_entropy import vocab_parallel_cross_entropy

    logits, target = drawn(40, 3, words=700, dtype=dtype)
    before = bits(logits)

    def run(recompute: bool = False) -> bytes:
        return bits(*gradients(vocab_parallel_cross_entropy, logits, target, recompute=recompute))

    seen = replays(run)
    assert len(seen) == 1
    assert {run(recompute=True)} == seen
    with threads(1):
        assert {run()} == seen
    assert bits(logits) == before


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_megatrons_formula_and_its_side_effect(world, smoothing):
    """Control: Megatron's own gives the same up to rounding, and leaves other logits behind."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as theirs

    from megatron_det.modules.cross_entropy import vocab_parallel_cross_entropy as ours

    logits, target = drawn(20, 2, words=96)
    a, da = gradients(lambda x, t: theirs(x.clone(), t, smoothing), logits, target)
    b, db = gradients(lambda x, t: ours(x, t, smoothing), logits, target)
    assert (a - b).abs().max() <= 100 * U * 30
    assert (da - db).abs().max() <= 100 * U * 4
    changed = logits.clone()
    theirs(changed, target)
    assert bits(changed) != bits(logits)
    with pytest.raises(Refused, match="DET-SMOOTHING"):
        ours(logits, target, 1.0)


def test_one_row_on_one_and_two_threads(world):
    """Control: a sum to a single element follows the threads in Megatron's; ours does not."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as theirs

    from megatron_det.modules.cross_entropy import DetLoss

    loss = DetLoss(torch.distributed.group.WORLD)
    different = {"theirs": 0, "ours": 0}
    for words in range(200_001, 200_013):
        logits, target = drawn(1, 1, words=words)
        seen = []
        for count in (1, 2):
            with threads(count):
                kinds = (lambda x, t: theirs(x.clone(), t)), (lambda x, t: loss(t, x))
                seen.append([bits(*gradients(kind, logits, target)) for kind in kinds])
        different["theirs"] += seen[0][0] != seen[1][0]
        different["ours"] += seen[0][1] != seen[1][1]
    assert different["theirs"] > 0
    assert different["ours"] == 0
    assert loss.runs == {"loss": 24}


def split_worker(rank: int, ranks: int, port: int, words: int) -> None:
    """One share of a vocabulary: loss and gradient as one process computes them from all shares."""
    from megatron.core import parallel_state

    from megatron_det.modules.cross_entropy import vocab_parallel_cross_entropy
    from megatron_det.modules.embedding import DetVocabParallelEmbedding

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group = torch.distributed.group.WORLD
    logits, target = drawn(11, 2, words=words)
    shares = logits.chunk(ranks, -1)
    for smoothing in (0.0, 0.1):
        mine = shares[rank].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, target, smoothing, group)
        loss.sum().backward()
        flat = [share.reshape(22, -1) for share in shares]
        top = torch.stack([kernel.top(x) for x in flat]).amax(0)
        here = [target.reshape(-1) - r * words // ranks for r in range(ranks)]
        parts = [kernel.sums(x, t, top, smoothing > 0) for x, t in zip(flat, here, strict=True)]
        total = pairs(torch.stack(parts))
        assert bits(loss) == bits(kernel.loss(total, smoothing, words)), "the same on every rank"
        one = torch.ones(22)
        expected = kernel.gradient(flat[rank], here[rank], top, total[0], one, smoothing, words)
        assert bits(mine.grad) == bits(expected)
    torch.manual_seed(0)
    conf = config(tensor_model_parallel_size=ranks, num_attention_heads=6, num_query_groups=3, hidden_size=36)
    table = DetVocabParallelEmbedding(words, 8, init_method=torch.nn.init.normal_, config=conf, tp_group=group)
    table(target).sum().backward()
    torch.manual_seed(0)
    full = torch.empty(words, 8)
    torch.nn.init.normal_(full)
    assert bits(table(target)) == bits(full[target])
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_a_vocabulary_over_three_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(split_worker, args=(3, port, 96), nprocs=3)
