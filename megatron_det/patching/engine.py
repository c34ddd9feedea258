"""Replacing symbols of other packages: all or nothing, counted, and undone to the exact identities.

A ``Patch`` names its target ``package.module:Qual.name``. ``make(original, ran)`` returns the replacement and must
call ``ran()`` each time the replacement runs: a patch that never ran is found by its count, not by hope.
Copies of the symbol in other modules (``from x import f``) are rebound and undone too.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from megatron_det.errors import PatchError

Make = Callable[[Any, Callable[[], None]], Any]


@dataclass(frozen=True)
class Patch:
    """One replacement. ``stack`` allows another patch of the same plan on the same target (outermost last)."""

    id: str
    target: str
    make: Make
    why: str
    reaches: str = ""
    leaves_alone: str = ""
    upstream: str = ""
    drop_when: str = ""
    stack: bool = False

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Rebinding:
    """One attribute that was set: where, to what, and what was there before."""

    patch: str
    holder: Any
    attribute: str
    old: Any
    new: Any
    inherited: bool

    def undo(self) -> None:
        if self.inherited:
            delattr(self.holder, self.attribute)
        else:
            setattr(self.holder, self.attribute, self.old)

    @property
    def where(self) -> str:
        return f"{getattr(self.holder, '__name__', self.holder)}.{self.attribute}"


@dataclass
class Applied:
    """What was applied. ``undo`` restores every identity, last first."""

    patches: list[Patch] = field(default_factory=list)
    rebindings: list[Rebinding] = field(default_factory=list)
    counter: Counter[str] = field(default_factory=Counter)
    waiting: list[Patch] = field(default_factory=list)

    def undo(self) -> None:
        """Raises: PatchError when another plan replaced one of these targets later and is still applied."""
        self.waiting.clear()
        for patch in self.patches:
            _refuse_undo_below(patch, self.patches)
        while self.rebindings:
            self.rebindings.pop().undo()
        for patch in self.patches:
            _owners[patch.target].remove(patch)
        self.patches.clear()

    def counts(self) -> dict[str, int]:
        return {patch.id: self.counter[patch.id] for patch in self.patches}

    def never_ran(self) -> list[str]:
        return [patch.id for patch in self.patches if not self.counter[patch.id]]

    def log(self) -> list[dict[str, str]]:
        return [{"id": r.patch, "where": r.where, "old": _name(r.old), "new": _name(r.new)} for r in self.rebindings]


def apply(patches: Iterable[Patch], into: Applied | None = None) -> Applied:
    """Applies all patches, or none. Raises: PatchError for a missing target or two plugins on one symbol."""
    applied = into if into is not None else Applied()
    done_before, patches_before = len(applied.rebindings), len(applied.patches)
    places = _Places()
    try:
        for patch in patches:
            _apply_one(patch, applied, places)
    except BaseException:
        while len(applied.rebindings) > done_before:
            applied.rebindings.pop().undo()
        for patch in applied.patches[patches_before:]:
            _owners[patch.target].remove(patch)
        del applied.patches[patches_before:]
        raise
    return applied


def apply_when_imported(patches: Iterable[Patch], into: Applied | None = None) -> Applied:
    """Applies each patch as soon as its module is imported (at once when it is already there).

    A patch that still waits when ``undo`` is called is never applied.
    """
    applied = into if into is not None else Applied()
    plan = list(patches)
    apply([patch for patch in plan if patch.module in sys.modules], applied)
    waiting: dict[str, list[Patch]] = {}
    for patch in plan:
        if patch not in applied.patches:
            waiting.setdefault(patch.module, []).append(patch)
            applied.waiting.append(patch)
    for module, group in waiting.items():

        def hook(_: ModuleType, group: list[Patch] = group) -> None:
            due = [patch for patch in group if any(patch is w for w in applied.waiting)]
            applied.waiting[:] = [w for w in applied.waiting if not any(w is patch for patch in due)]
            apply(due, applied)

        wrapt.register_post_import_hook(hook, module)
    return applied


def resolve(target: str) -> tuple[Any, str, Any]:
    """``package.module:Qual.name`` -> (holder, attribute, value). Raises: ImportError, AttributeError."""
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in parents:
        holder = getattr(holder, name)
    return holder, attribute, getattr(holder, attribute)


def _apply_one(patch: Patch, applied: Applied, places: _Places) -> None:
    try:
        holder, attribute, original = resolve(patch.target)
    except (ImportError, AttributeError) as error:
        raise PatchError.of(
            "DET-PATCH-TARGET",
            f"patch {patch.id}",
            found=f"no {patch.target} ({error})",
            needed="the symbol that this patch was written for",
            why="Another release moved or removed it; training without the patch would break a promise.",
            do="use a supported version (see the README), or report the release that you use.",
        ) from error
    _refuse_second(patch)

    def ran() -> None:
        applied.counter[patch.id] += 1

    replacement = patch.make(original, ran)
    inherited = isinstance(holder, type) and attribute not in vars(holder)
    _bind(applied, Rebinding(patch.id, holder, attribute, original, replacement, inherited))
    if isinstance(holder, ModuleType):
        for module, name in places.copies(original):
            if not (module is holder and name == attribute):
                _bind(applied, Rebinding(patch.id, module, name, original, replacement, inherited=False))
        places.moved(original, replacement)
    applied.patches.append(patch)
    _owners.setdefault(patch.target, []).append(patch)


_owners: dict[str, list[Patch]] = {}  # who holds a target now, in all plans of this process


def _refuse_second(patch: Patch) -> None:
    others = _owners.get(patch.target, [])
    if others and not (patch.stack or all(p.stack for p in others)):
        raise PatchError.of(
            "DET-PATCH-TWICE",
            f"patch {patch.id}",
            found=f"{patch.target} is already replaced by {others[0].id}",
            needed="one owner per symbol",
            why="The second would silently change what the first one promises.",
            do="remove one of the two plugins.",
        )


def _refuse_undo_below(patch: Patch, mine: list[Patch]) -> None:
    top = _owners[patch.target][-1]
    if not any(top is p for p in mine):
        raise PatchError.of(
            "DET-PATCH-ORDER",
            f"undo of patch {patch.id}",
            found=f"{top.id} of another plan lies on top of it on {patch.target}",
            needed="undo in the reverse order of apply",
            why="The later undo would bring this replacement back for ever.",
            do="undo the other plan first.",
        )


def _bind(applied: Applied, rebinding: Rebinding) -> None:
    old = rebinding.old
    if isinstance(rebinding.holder, type):  # keep staticmethod / property objects as they were
        old = vars(rebinding.holder).get(rebinding.attribute, old)
    setattr(rebinding.holder, rebinding.attribute, rebinding.new)
    applied.rebindings.append(
        Rebinding(rebinding.patch, rebinding.holder, rebinding.attribute, old, rebinding.new, rebinding.inherited)
    )


class _Places:
    """Where functions and classes stand as global names of imported modules; one walk serves a whole plan."""

    def __init__(self) -> None:
        self._names: dict[int, set[tuple[str, str]]] = {}
        self._modules = 0

    def copies(self, original: Any) -> list[tuple[ModuleType, str]]:
        """Global names that are this very function or class now."""
        if not (callable(original) and hasattr(original, "__name__")):
            return []
        if self._modules != len(sys.modules):
            self._modules, self._names = len(sys.modules), self._walk()
        known = self._names.get(id(original), set())
        return [
            (module, name)
            for key, name in sorted(known)
            if isinstance(module := sys.modules.get(key), ModuleType) and vars(module).get(name) is original
        ]

    def moved(self, original: Any, replacement: Any) -> None:
        """The names of ``original`` now hold ``replacement``: a patch stacked on this one finds them there."""
        self._names[id(replacement)] = self._names.get(id(original), set())

    @staticmethod
    def _walk() -> dict[int, set[tuple[str, str]]]:
        names: dict[int, set[tuple[str, str]]] = {}
        for key, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not key.startswith("megatron_det"):
                for name, value in list(vars(module).items()):
                    if callable(value):
                        names.setdefault(id(value), set()).add((key, name))
        return names


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__name__)}"
