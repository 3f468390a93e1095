"""Targets by name, and the figures behind them."""

import pytest

from jaxshard.errors import InputError
from jaxshard.xla.hardware import CHIPS, GIB, chip_of, parse_target


@pytest.mark.parametrize(
    ("text", "count", "topology", "hosts"),
    [
        ("h100:8", 8, (1, 8), 1),
        ("h100:64", 64, (8, 8), 8),
        ("A100:3", 3, (1, 3), 1),
        ("b200:72", 72, (9, 8), 9),
        ("v5e:1x1", 1, (1, 1), 1),
        ("v5e:2x4", 8, (2, 4), 1),
        ("v6e:16x16", 256, (16, 16), 64),
        ("v4:2x2x1", 4, (2, 2, 1), 1),
        ("v5p:4x4x8", 128, (4, 4, 8), 32),
        ("cpu:6", 6, (1, 6), 1),
    ],
)
def test_targets(text, count, topology, hosts):
    target = parse_target(text)
    assert (target.count, target.topology, target.hosts) == (count, topology, hosts)
    assert target.absent == (target.chip.name != "cpu")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h10:8", ["unknown chip 'h10'", "did you mean 'h100'", "v5p", "local"]),
        ("h100:12", ["12 GPUs", "h100:8 or h100:16"]),
        ("h100", ["h100:8"]),
        ("h100:0", ["h100:8"]),
        ("h100:9999999999", ["h100:8"]),
        ("v5e:3x5", ["v5e:2x4 or v5e:4x4"]),
        ("v5e:16", ["v5e:4x4"]),
        ("v5p:4x4", ["3D", "v5p:2x2x4"]),
        ("v4:4x4x6", ["v4:4x4x4 or v4:4x4x8"]),
        ("v5p:64x64x64", ["v5p:16x16x24"]),
        ("cpu", ["cpu:8"]),
        ("local:4", ["takes no size"]),
        ("", ["unknown chip ''"]),
    ],
)
def test_bad_targets_are_one_line_with_the_nearest_name(text, parts):
    with pytest.raises(InputError) as error:
        parse_target(text)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def test_every_nearest_name_exists():
    for text in ["v5e:7x7", "v6e:1x3", "v4:3x3x3", "v5p:100x1x1", "h100:13", "a100:9"]:
        with pytest.raises(InputError) as error:
            parse_target(text)
        names = [word.strip(";") for word in str(error.value).split("nearest: ")[1].split(" ") if ":" in word]
        assert names
        for name in names:
            assert parse_target(name).count > 0


def test_figures_are_physical_and_sourced():
    for name, chip in CHIPS.items():
        assert chip.source
        assert chip.link.source
        assert chip.network.source
        if name == "cpu":
            continue
        assert 100e12 < chip.bf16_flops < 3e15
        assert 16 * GIB <= chip.memory_bytes < 256 * GIB
        share = chip.usable_bytes / chip.memory_bytes
        assert share == pytest.approx(0.9) if chip.platform == "gpu" else 0.95 < share <= 1
        assert 0.5e12 < chip.memory_bandwidth < 10e12
        assert chip.network.bandwidth < chip.link.bandwidth * chip.link.links < chip.memory_bandwidth
        assert chip.dims == (0 if chip.platform == "gpu" else chip.link.links // 2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("cpu", "cpu"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_chip_of_device_kind(kind, name):
    chip = chip_of(kind)
    assert (chip.name if chip else None) == name


def test_local_is_the_devices_present():
    target = parse_target("local")
    assert (target.name, target.chip.name, target.absent) == ("local", "cpu", False)
    assert target.count == target.topology[0] * target.topology[1]


def test_network_can_be_replaced():
    target = parse_target("h100:16").with_network(25e9 / 8)
    assert target.chip.network.bandwidth == 25e9 / 8
    assert target.chip.network.name == "25 Gbit/s"
    assert target.chip.link == CHIPS["h100"].link
