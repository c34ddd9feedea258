"""Who is added to whom, when: the two orders of a sum over logical ranks, as data.

``tree``    neighbours first: (x0 + x1) + (x2 + x3) …; the odd one out is carried up. The default, and what later levels
            build on: a block of 2**k ranks that starts at a multiple of 2**k is a subtree of its own, so a sum that is
            made node by node has the bits of the flat one
``linear``  ((x0 + x1) + x2) + x3 …

A plan is a list of ``(into, other)`` pairs of positions: ``x[into] = x[into] + x[other]``; the result is in ``x[0]``.
For five ranks the tree is ``(0, 1) (2, 3) (0, 2) (0, 4)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

ORDERS = ("tree", "linear")
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


def blocks(nodes: Sequence[str]) -> int | None:
    """Ranks per node when a sum may be made node by node and keep the bits of the flat tree; else None.

    ``nodes[r]`` names the node of logical rank r. The ranks of each node must be consecutive, equally many on each node
    and a power of two: then each node is a subtree, and the tree over the nodes' sums is the rest of the flat tree.
    More than one node and more than one rank per node are needed, otherwise there is nothing to gain.
    """
    many = nodes.count(nodes[0]) if nodes else 0
    if many < 2 or many & (many - 1) or many == len(nodes) or len(nodes) % many:
        return None
    heads = [nodes[low] for low in range(0, len(nodes), many)]
    together = all(nodes[rank] == heads[rank // many] for rank in range(len(nodes)))
    return many if together and len(set(heads)) == len(heads) else None
