"""What collectives cost: bytes over links, by ring or tree, inside a host or slice and across.

A group is a mesh axis: its members are `stride` devices apart, so that min(size, node / stride) share the first node
(a host of GPUs, a slice of TPU chips). Sizes may be numpy arrays: one entry a layout.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxshard.analysis.efficiency import Constants, Software
from jaxshard.xla.hardware import Measured, Target

Number = Any
"""int, float or numpy array: formulas take both."""


@dataclass(frozen=True)
class Fabric:
    """The two networks of a target, one direction, bytes a second that one device can send."""

    node: int
    """Devices joined by the fast links."""
    fast: float
    """Inside a node: over the switch, or around one dimension of a torus (both directions)."""
    slow: float
    """Between nodes."""
    edge: float = math.inf
    """Torus: devices along one dimension; a larger group uses more dimensions, and their links."""
    dims: int = 1
    """Torus: dimensions."""
    start: float | None = None
    """Measured seconds of a collective besides hops and bytes; None takes the constant, as for `hop`."""
    hop: float | None = None
    """Measured seconds of one step of a ring or tree."""

    def fast_bandwidth(self, members: Number) -> Number:
        """Bytes a second of one member of a group of `members` in a node."""
        if math.isinf(self.edge):
            return self.fast
        steps = np.ceil(np.log(np.maximum(members, 2)) / math.log(max(self.edge, 2)) - 1e-9)
        return self.fast * np.clip(steps, 1, self.dims)


def fabric(target: Target) -> Fabric:
    """Networks of a target. A torus whose rings do not close has half the bandwidth around a dimension.

    TPU rings close in whole cubes of 4x4x4 (v4, v5p) and in 16x16 (v5e, v6e) (cloud.google.com/tpu/docs).
    """
    chip = target.chip
    if chip.link.shape != "torus":
        return with_measured(
            Fabric(target.devices_per_host, chip.link.bandwidth, chip.network.bandwidth), target.measured
        )
    edge = round(target.count ** (1 / chip.dims))
    closed = min(target.topology) >= (4 if chip.dims == 3 else 16)
    around = chip.link.bandwidth * (2 if closed else 1)
    return with_measured(Fabric(target.count, around, chip.network.bandwidth, max(2, edge), chip.dims), target.measured)


def with_measured(net: Fabric, measured: Measured | None) -> Fabric:
    """The same networks with what was measured; the shares that collectives reach of a datasheet are taken out."""
    if measured is None:
        return net
    c = Constants()
    fast = measured.fast / c.fast_links if measured.fast else net.fast
    slow = measured.slow / c.slow_links if measured.slow else net.slow
    return replace(net, fast=fast, slow=slow, start=measured.start, hop=measured.hop)


@dataclass(frozen=True)
class Group:
    """Members of a collective."""

    size: Number
    inside: Number
    """Members in one node."""

    @property
    def nodes(self) -> Number:
        return self.size / self.inside


def group(fabric: Fabric, size: Number, stride: Number) -> Group:
    """The members of a mesh axis of `size` whose neighbours are `stride` devices apart."""
    return Group(size, np.minimum(size, (fabric.node - 1) // np.maximum(stride, 1) + 1))


def ring_bytes(size: Number, payload: Number) -> Number:
    """Bytes that each member of a ring all-reduce sends: 2 (n-1)/n x payload (Patarasuk and Yuan 2009)."""
    return 2 * (size - 1) / size * payload


def all_reduce(g: Group, payload: Number, net: Fabric, c: Constants, software: Software) -> Number:
    """Seconds to all-reduce `payload` bytes per member.

    Inside the node a reduce-scatter and an all-gather, between them an all-reduce of each member's part across nodes,
    where all members of the group in a node use their own network card: 2 (k-1)/k x payload over the fast links, and
    2 (m-1)/m x payload / k over the slow ones, k members in each of m nodes. Steps: the shorter of ring and tree inside
    a node (a tree moves 2 x payload), a tree across nodes.
    """
    k, m = g.inside, g.nodes
    hop = c.hop if net.hop is None else net.hop
    fast = c.fast_links * net.fast_bandwidth(k)
    slow = c.slow_links * net.slow * k
    ring = ring_bytes(k, payload) / fast + 2 * (k - 1) * hop
    tree = 2 * payload / fast + 2 * np.log2(np.maximum(k, 1)) * hop
    inside = np.where(k > 1, np.minimum(ring, tree), 0.0)
    across = np.where(m > 1, ring_bytes(m, payload) / np.maximum(slow, 1e-9) + 2 * np.log2(m) * hop, 0.0)
    return np.where(g.size > 1, inside + across + start(net, c, software), 0.0)


def reduce_scatter(g: Group, payload: Number, net: Fabric, c: Constants, software: Software) -> Number:
    """Seconds to reduce-scatter `payload` bytes per member, or to all-gather to `payload` bytes: half an all-reduce."""
    full = all_reduce(g, payload, net, c, software)
    return np.where(g.size > 1, (full - start(net, c, software)) / 2 + start(net, c, software), 0.0)


def send(payload: Number, crosses: Number, net: Fabric, c: Constants, software: Software) -> Number:
    """Seconds to send `payload` bytes to the neighbouring stage; `crosses`: it lies in another node."""
    rate = np.where(crosses, c.slow_links * net.slow, c.fast_links * net.fast)
    hop = c.hop if net.hop is None else net.hop
    return payload / np.maximum(rate, 1e-9) + hop + start(net, c, software) * (0 if software.eager else 1)


def start(net: Fabric, c: Constants, software: Software) -> float:
    """Seconds that any collective takes besides moving bytes."""
    if net.start is not None:
        return net.start
    return c.rendezvous if software.rendezvous is None else software.rendezvous
