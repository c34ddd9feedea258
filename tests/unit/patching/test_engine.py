"""Patches are applied all or nothing, reach copies of the name, are counted, and undone to the exact identities."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_det.errors import PatchError
from megatron_det.patching.engine import Patch, apply, apply_when_imported


@pytest.fixture
def host(monkeypatch):
    """Two modules: ``host_a`` with a function and a class, ``host_b`` with a copy of the function's name."""
    a, b = types.ModuleType("host_a"), types.ModuleType("host_b")

    def work(x):
        return x + 1

    class Base:
        def method(self):
            return "base"

        @staticmethod
        def fixed():
            return "fixed"

    class Child(Base):
        pass

    a.work, a.Base, a.Child, b.alias = work, Base, Child, work
    monkeypatch.setitem(sys.modules, "host_a", a)
    monkeypatch.setitem(sys.modules, "host_b", b)
    return a, b


def doubling(original, ran):
    def replaced(*args):
        ran()
        return 2 * original(*args)

    return replaced


def patch(target="host_a:work", make=doubling, **kwargs):
    return Patch(kwargs.pop("id", target), target, make, why="test", **kwargs)


def test_reaches_copies_counts_and_undoes(host):
    a, b = host
    original = a.work
    applied = apply([patch()])
    assert (a.work(1), b.alias(1)) == (4, 4)
    assert applied.counts() == {"host_a:work": 2}
    assert {entry["where"] for entry in applied.log()} == {"host_a.work", "host_b.alias"}
    applied.undo()
    assert a.work is original
    assert b.alias is original


def test_never_ran(host):
    applied = apply([patch()])
    assert applied.never_ran() == ["host_a:work"]
    applied.undo()


def test_inherited_method_and_staticmethod(host):
    a, _ = host
    before = dict(vars(a.Base))
    static = patch("host_a:Base.fixed", lambda original, ran: staticmethod(original))
    applied = apply([patch("host_a:Child.method"), static])
    assert a.Child().method() == "basebase"
    assert a.Base().method() == "base", "the parent is left alone"
    applied.undo()
    assert "method" not in vars(a.Child)
    assert dict(vars(a.Base)) == before


def test_all_or_nothing(host):
    a, b = host
    original = a.work
    with pytest.raises(PatchError, match="DET-PATCH-TARGET"):
        apply([patch(), patch("host_a:absent")])
    assert a.work is original
    assert b.alias is original


def test_two_plugins_on_one_symbol(host):
    with pytest.raises(PatchError, match="DET-PATCH-TWICE"):
        apply([patch(id="one"), patch(id="two")])
    applied = apply([patch(id="one"), patch(id="two", stack=True)])
    assert (host[0].work(1), host[1].alias(1)) == (8, 8), "copies get both"
    applied.undo()
    assert host[1].alias(1) == 2


def test_waits_for_the_import(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("def work(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    applied = apply_when_imported([patch("late_module:work")])
    assert "late_module" not in sys.modules
    import late_module

    assert late_module.work(3) == 6
    applied.undo()
    assert late_module.work(3) == 3
    del sys.modules["late_module"]


def test_undone_before_the_import_stays_undone(tmp_path, monkeypatch):
    (tmp_path / "later_module.py").write_text("def work(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    applied = apply_when_imported([patch("later_module:work")])
    applied.undo()
    import later_module

    assert later_module.work(3) == 3
    assert applied.rebindings == []
    del sys.modules["later_module"]


def test_two_plans_on_one_symbol(host):
    a, _ = host
    original = a.work
    first = apply([patch(id="one")])
    with pytest.raises(PatchError, match="DET-PATCH-TWICE"):
        apply([patch(id="two")])
    assert a.work(1) == 4, "the refused plan left nothing"
    second = apply([patch(id="two", stack=True)])
    with pytest.raises(PatchError, match="DET-PATCH-ORDER"):
        first.undo()
    assert a.work(1) == 8, "the refused undo changed nothing"
    second.undo()
    first.undo()
    assert a.work is original
    apply([patch(id="two")]).undo()
