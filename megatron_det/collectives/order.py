"""Who is added to whom, when: the two orders of a sum over logical ranks, as data.

``linear``  ((x0 + x1) + x2) + x3 …
``tree``    neighbours first: (x0 + x1) + (x2 + x3) …; the odd one out is carried up. With 2**k ranks per node the tree
            over all ranks contains the tree of every node, so a hierarchical sum has the bits of the flat one.

A plan is a list of ``(into, other)`` pairs of positions: ``x[into] = x[into] + x[other]``; the result is in ``x[0]``.
"""

from __future__ import annotations

from functools import cache

ORDERS = ("linear", "tree")
Plan = tuple[tuple[int, int], ...]


@cache
def plan(ranks: int, order: str) -> Plan:
    """The additions for so many ranks. Raises: ValueError for an unknown order or no ranks."""
    if ranks < 1 or order not in ORDERS:
        raise ValueError(f"no order {order!r} over {ranks} ranks; orders: {', '.join(ORDERS)}")
    if order == "linear":
        return tuple((0, other) for other in range(1, ranks))
    steps: list[tuple[int, int]] = []
    alive = list(range(ranks))
    while len(alive) > 1:
        steps += [(alive[i], alive[i + 1]) for i in range(0, len(alive) - 1, 2)]
        alive = alive[::2]
    return tuple(steps)
