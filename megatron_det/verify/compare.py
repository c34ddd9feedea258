"""Compares two recorded runs: manifests first, then the ledgers, and names the first difference.

*First* on a rank means first in the causal order of its own record (data, rng, state, num, after). There is no order
between ranks: every rank that differs in the earliest iteration gives its candidate, and the headline is the one whose
phase comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_det.errors import FormatError
from megatron_det.formats import manifest as manifests
from megatron_det.formats.ledger import RankLedger, RunLedger
from megatron_det.formats.scalars import show, ulp_distance
from megatron_det.verify.portable import pair as fold

PHASES = ("data", "rng", "state", "num", "after")
CAUSES = {
    "data": "data differ",
    "rng": "RNG differs",
    "state": "state differs",
    "num": "numbers differ",
    "after": "numbers differ",
}
MEANING = {
    "environment differs": "The runs did not stand on the same ground: make these equal first, then look at numbers.",
    "data differ": "The step was given other samples or tokens: look at the sampler, the data files, the position.",
    "RNG differs": "A random stream stood elsewhere just before the first forward: a restore was skipped, or something "
    "drew in between.",
    "state differs": "Weights, optimizer state or schedule were different before the step began: look at the load, or "
    "at what wrote to them since the last step.",
    "numbers differ": "The step began equal and ended different: an operation or a collective gave other bits.",
}
OPTION_KINDS = ("lr", "weight_decay", "scheduler", "group_step", "loss_scale")
ABSENT = {"t": "none"}


@dataclass(frozen=True)
class Difference:
    """The first difference of one rank."""

    iteration: int
    rank: int
    quantity: str
    cause: str
    a: str
    b: str
    ulp: int | None
    note: str
    all_quantities: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        return dict(Counter(name.split("/", 1)[0] for name in self.all_quantities))


@dataclass
class Comparison:
    """Verdict on two runs over the iterations that both recorded."""

    iterations: list[int]
    environment: list[manifests.Difference] = field(default_factory=list)
    first: Difference | None = None
    candidates: list[Difference] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not self.environment and self.first is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": "identical" if self.identical else "differs",
            "iterations": [self.iterations[0], self.iterations[-1]],
            "environment": [asdict(d) for d in self.environment],
            "first_difference": headline(self),
            "other_ranks": [{"rank": d.rank, "quantity": d.quantity} for d in self.candidates if d is not self.first],
            "notices": self.notices,
        }


def headline(comparison: Comparison) -> dict[str, Any] | None:
    """The first difference as JSON: an environment difference comes before any number."""
    if comparison.environment:
        d = comparison.environment[0]
        cause = "environment differs"
        where = {"iteration": None, "rank": None, "quantity": f"{d.section}/{d.key}", "ulp": None, "note": ""}
        values = {"a": repr(d.a), "b": repr(d.b), "meaning": MEANING[cause], "all_quantities": []}
        return {**where, "cause": cause, **values}
    if comparison.first is None:
        return None
    return {**asdict(comparison.first), "meaning": MEANING[comparison.first.cause]}


def compare(
    a: RunLedger,
    b: RunLedger,
    first: int | None = None,
    last: int | None = None,
    with_manifests: bool = True,
    portable: bool = False,
) -> Comparison:
    """Compares iterations ``first`` to ``last`` (default: all that both recorded).

    ``portable``: the runs may differ in bucket size, overlap or placement; see ``verify.portable``. Differences of
    their arguments are then said, not judged.

    Raises: FormatError when world sizes differ or no iteration is common: that is never "identical".
    """
    if a.world_size != b.world_size:
        raise _cannot(a, b, f"world sizes {a.world_size} and {b.world_size}", "one ledger per rank on both sides")
    common = sorted(set(a.iterations()) & set(b.iterations()))
    chosen = [i for i in common if (first is None or i >= first) and (last is None or i <= last)]
    if not chosen:
        found = f"iterations {_span(a.iterations())} and {_span(b.iterations())}"
        raise _cannot(a, b, found, "iterations that both runs recorded" + _range(first, last))
    comparison = Comparison(chosen)
    if portable:
        a, b, said = fold(a, b)
        comparison.notices += said
    comparison.notices += [f"a: {text}" for text in a.torn()] + [f"b: {text}" for text in b.torn()]
    comparison.notices += _lengths(a, b, first, last)
    if with_manifests:
        _compare_manifests(a, b, comparison)
    if portable:
        changed = [d.key for d in comparison.environment if d.section == "args" and d.key != "digest"]
        comparison.environment = [d for d in comparison.environment if d.section != "args"]
        comparison.notices.append("changed arguments: " + (", ".join(changed) or "none"))
    for iteration in _between(a, b, chosen):
        if iteration not in common:
            comparison.first = _one_sided(a, iteration)
            comparison.candidates = [comparison.first]
            break
        found_here = [d for rank in sorted(a.ranks) if (d := _rank(a.ranks[rank], b.ranks[rank], iteration))]
        if found_here:
            comparison.candidates = sorted(found_here, key=_priority)
            comparison.first = comparison.candidates[0]
            break
    else:
        _compare_evaluations(a, b, comparison)
    return comparison


def _between(a: RunLedger, b: RunLedger, chosen: list[int]) -> list[int]:
    """What either run recorded from the first to the last compared iteration: none of it is passed over."""
    either = set(a.iterations()) | set(b.iterations())
    return sorted(i for i in either if chosen[0] <= i <= chosen[-1])


def _one_sided(a: RunLedger, iteration: int) -> Difference:
    x, y = ("recorded", "absent") if iteration in a.iterations() else ("absent", "recorded")
    note = "structure differs: only one run recorded this iteration"
    return Difference(iteration, min(a.ranks), "data/iteration", CAUSES["data"], x, y, None, note, ("data/iteration",))


def _by_name(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by name. A name that comes again is kept under ``name (2)``: no value hides another."""
    values: dict[str, Any] = {}
    count: Counter[str] = Counter()
    for name, value in items:
        count[name] += 1
        values[name if count[name] == 1 else f"{name} ({count[name]})"] = value
    return values


def _cannot(a: RunLedger, b: RunLedger, found: str, needed: str) -> FormatError:
    return FormatError.of(
        "DET-COMPARE", f"{a.directory} and {b.directory}", found=found, needed=needed,
        why="Nothing could be compared, which is not the same as equal.", do="compare two runs of one configuration.",
    )  # fmt: skip


def _span(iterations: list[int]) -> str:
    return f"{iterations[0]}..{iterations[-1]}" if iterations else "none"


def _range(first: int | None, last: int | None) -> str:
    return f" between {first} and {last}" if first is not None or last is not None else ""


def _lengths(a: RunLedger, b: RunLedger, first: int | None, last: int | None) -> Iterable[str]:
    for name, one, other in (("a", a, b), ("b", b, a)):
        only = [i for i in one.iterations() if i not in set(other.iterations())]
        only = [i for i in only if (first is None or i >= first) and (last is None or i <= last)]
        if only:
            yield f"only {name} recorded iterations {_span(only)}"


def _compare_manifests(a: RunLedger, b: RunLedger, comparison: Comparison) -> None:
    for rank in sorted(a.ranks):
        one, other = manifests.read(a.directory, rank), manifests.read(b.directory, rank)
        comparison.environment += [d for d in manifests.compare(one, other) if d not in comparison.environment]
        for name, side in (("a", one), ("b", other)):
            if side.get("chaos"):
                comparison.notices.append(f"{name}, rank {rank}: a fault was injected on purpose: {side['chaos']}")
        if rank == 0 and "cpu-standin" in (one.get("device"), other.get("device")):
            comparison.notices.append("CPU stand-in: says nothing about GPU kernels")


def _phase(name: str) -> int:
    phase = name.split("/", 1)[0]
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _causal(name: str) -> tuple[int, int]:
    """Phases in their order; within one, the schedule before the tensors."""
    parts = name.split("/")
    return _phase(name), 0 if len(parts) > 1 and parts[1] in OPTION_KINDS else 1


def _priority(difference: Difference) -> tuple[int, int, int]:
    return *_causal(difference.quantity), difference.rank


def _rank(a: RankLedger, b: RankLedger, iteration: int) -> Difference | None:
    """The first difference of one rank in one iteration, with the names of all."""
    one, other = _by_name(a.steps[iteration]), _by_name(b.steps[iteration])
    if a.consumed[iteration] != b.consumed[iteration]:
        text = f"{a.consumed[iteration]} and {b.consumed[iteration]} samples consumed"
        return Difference(iteration, a.rank, "data/consumed_samples", CAUSES["data"], str(a.consumed[iteration]),
                          str(b.consumed[iteration]), None, text, ("data/consumed_samples",))  # fmt: skip
    names = [*one, *(name for name in other if name not in one)]
    wrong = [name for name in names if one.get(name) != other.get(name)]
    if not wrong:
        return None
    name = min(wrong, key=_causal)
    x, y = one.get(name, ABSENT), other.get(name, ABSENT)
    cause = CAUSES.get(name.split("/", 1)[0], "numbers differ")
    return Difference(
        iteration, a.rank, name, cause, show(x), show(y), ulp_distance(x, y), _note(x, y, wrong), tuple(wrong)
    )


def _note(x: dict[str, Any], y: dict[str, Any], wrong: list[str]) -> str:
    """What the pair of values itself says."""
    if ABSENT in (x, y):
        return "structure differs: only one side has it"
    if x.get("t") != y.get("t"):
        return f"kind differs: {x.get('t')} and {y.get('t')}"
    if x.get("t") == "digest":
        if (x["dtype"], x["shape"]) != (y["dtype"], y["shape"]):
            return "dtype or shape differs"
        if x["blind"] == y["blind"]:
            return "same values, other order"
    kinds = {name.split("/")[1] for name in wrong if name.startswith("state/")}
    if kinds and kinds <= {"exp_avg", "exp_avg_sq", "step", "group_step"}:
        return "optimizer moments: weights are equal, what the optimizer remembers is not"
    return ""


def _evaluations(ledger: RankLedger, chosen: range) -> dict[tuple[int, int], dict[str, Any]]:
    """Validation metrics by iteration and by their number within it (validation, then test)."""
    count: Counter[int] = Counter()
    found = {}
    for iteration, items in ledger.evaluations:
        count[iteration] += 1
        if iteration in chosen:
            found[iteration, count[iteration]] = _by_name(items)
    return found


def _compare_evaluations(a: RunLedger, b: RunLedger, comparison: Comparison) -> None:
    """Validation metrics of the iterations in question. A run that ended before its last evaluation is no difference
    of numbers: what only one side has is said."""
    chosen = range(comparison.iterations[0], comparison.iterations[-1] + 1)
    candidates = []
    for rank in sorted(a.ranks):
        one, other = _evaluations(a.ranks[rank], chosen), _evaluations(b.ranks[rank], chosen)
        for key in sorted(set(one) ^ set(other)):
            side = "a" if key in one else "b"
            comparison.notices.append(f"rank {rank}: only {side} recorded an evaluation at iteration {key[0]}")
        for key in sorted(set(one) & set(other)):
            left, right = one[key], other[key]
            wrong = [n for n in {**left, **right} if left.get(n) != right.get(n)]
            if wrong:
                x, y = left.get(wrong[0], ABSENT), right.get(wrong[0], ABSENT)
                note = "validation, after equal training steps"
                candidates.append(Difference(key[0], rank, wrong[0], CAUSES["num"], show(x), show(y),
                                             ulp_distance(x, y), note, tuple(wrong)))  # fmt: skip
                break
    earliest = min((d.iteration for d in candidates), default=None)
    comparison.candidates = [d for d in candidates if d.iteration == earliest]
    comparison.first = comparison.candidates[0] if comparison.candidates else None
