"""Prints the cost model of docs/collectives.md: milliseconds of one all-reduce by plan, on paper.

python scripts/cost_model.py --bytes 64M --near-gbs 450 --far-gbs 50
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Machine:
    """Bytes per second of one GPU's links, seconds of one trip and of one message, bytes per second of its memory."""

    near: float
    far: float
    near_trip: float
    far_trip: float
    message: float
    memory: float
    per_node: int

    def link(self, ranks: int) -> tuple[float, float]:
        return (self.near, self.near_trip) if ranks <= self.per_node else (self.far, self.far_trip)


def ring(m: Machine, n: int, s: float) -> float:
    """The vendor's ring: 2 (N-1)/N S on the slowest link, 2 (N-1) trips."""
    width, trip = m.link(n)
    return 2 * (n - 1) / n * s / width + 2 * (n - 1) * trip


def pieces(m: Machine, n: int, s: float) -> float:
    """All-to-all, ordered sum, all-gather: the ring's volume, two trips, N-1 messages each."""
    width, trip = m.link(n)
    return 2 * (n - 1) / n * s / width + 2 * (trip + (n - 1) * m.message) + (1 + 1 / n) * s / m.memory


def whole(m: Machine, n: int, s: float) -> float:
    """Everybody sends the whole to everybody: (N-1) S, one trip."""
    width, trip = m.link(n)
    return (n - 1) * s / width + trip + (n - 1) * m.message + (n + 1) * s / m.memory


def by_node(m: Machine, n: int, s: float, wide: float = 1.0) -> float:
    """Inside the node on the near links, then S / L between nodes; partial sums are ``wide`` times as long."""
    inside, nodes = m.per_node, n // m.per_node
    near = 2 * (inside - 1) / inside * s / m.near + 2 * (m.near_trip + (inside - 1) * m.message)
    far = (1 + wide) * (nodes - 1) / nodes * s / inside / m.far + 2 * (m.far_trip + (nodes - 1) * m.message)
    return near + far + (1 + 2 * wide / inside) * s / m.memory


def threshold(m: Machine, n: int) -> float:
    """Bytes at which ``whole`` and ``pieces`` cost the same (docs: S = trip_bytes N / ((N-1)(N-2)))."""
    width, trip = m.link(n)
    return (trip + (n - 1) * m.message) * width * n / ((n - 1) * (n - 2)) if n > 2 else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="64M")
    parser.add_argument("--near-gbs", type=float, default=450, help="inside a node, GB/s per GPU and direction")
    parser.add_argument("--far-gbs", type=float, default=50, help="between nodes, GB/s per GPU and direction")
    parser.add_argument("--near-trip-us", type=float, default=10)
    parser.add_argument("--far-trip-us", type=float, default=20)
    parser.add_argument("--message-us", type=float, default=1.0, help="of starting one send and receive")
    parser.add_argument("--memory-gbs", type=float, default=3000)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 16384])
    wish = parser.parse_args()
    size = float(wish.bytes[:-1]) * UNITS[wish.bytes[-1]]
    m = Machine(wish.near_gbs * 1e9, wish.far_gbs * 1e9, wish.near_trip_us * 1e-6, wish.far_trip_us * 1e-6,
                wish.message_us * 1e-6, wish.memory_gbs * 1e9, wish.per_node)  # fmt: skip
    print("| GPUs | ring (ms) | pieces | whole to all | node by node | whole pays up to |")
    print("|---|---|---|---|---|---|")
    for n in wish.ranks:
        node = f"{1e3 * by_node(m, n, size):.2f}" if n > m.per_node else "-"
        row = [f"{1e3 * cost(m, n, size):.2f}" for cost in (ring, pieces, whole)]
        print(f"| {n} | {row[0]} | {row[1]} | {row[2]} | {node} | {threshold(m, n) / 1024:.0f} KiB |")


if __name__ == "__main__":
    main()
