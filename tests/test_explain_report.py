"""The report of `explain`: one page that needs nothing but itself, and its pictures as PNG."""

import html.parser
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxshard
from jaxshard.commands.explain import Explanation, explain_config
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.parallel.schedule import make
from jaxshard.views import report
from jaxshard.views.pictures import COLOURS, MOST_HALVES, _ink, bars, mesh_picture, pipeline_picture, write_png
from jaxshard.xla.compile import SpmdWarning

TINY = Config(
    model=ModelConfig(family="gpt2", d_model=32, n_layers=2, n_heads=2, d_ff=64),
    data=DataConfig(seq_len=16),
    **grouped(mesh="pp=2,dp=2", zero=1, global_batch=8, microbatches=2),
)


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explain_config(TINY)


@pytest.fixture(scope="module")
def page(found) -> str:
    return report.page(found)


class Checker(html.parser.HTMLParser):
    """Every element is closed where it should be; `meta`, `rect` and the like stand alone."""

    ALONE = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def elements(page: str) -> list[tuple[str, dict]]:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker.seen


def drawings(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, re.S)


def test_the_page_parses_and_fits_a_phone(page):
    seen = elements(page)
    assert ("meta", {"name": "viewport", "content": "width=device-width,initial-scale=1"}) in seen
    tables = page.count("<table>")
    assert tables == page.count('<div class="wide"><table>') >= 4  # a wide table scrolls, the page does not
    assert all('style="max-width:' in svg and "viewBox" in svg for svg in drawings(page))
    assert page.count("<td ") == page.count(" data-name=")  # cells of a card say what they are
    for svg in bars([("a", [("x", 1.0)])], "s", 1.0), *(svg for svg in drawings(page) if 'aria-label="bars"' in svg):
        assert float(re.findall(r'viewBox="0 0 (\d+)', svg)[0]) <= 358  # 390 less the margins


def test_a_picture_that_has_to_scroll_says_so(page):
    assert "Swipe the picture" in report._long(pipeline_picture(make("1f1b", 2, 4)))
    assert "Swipe" not in report._long(bars([("a", [("x", 1.0)])], "s", 1.0))
    assert page.count("Swipe the picture") == 1  # the pipeline's
    table = report._table(("reason", "bytes"), [("r", "3 B"), ("s", "-")], numbers=(1,), keys=(1,))
    assert '<td class="n key" data-name="bytes">3 B</td>' in table and '<td class="n key no"' in table


def test_the_page_needs_nothing_but_itself(page):
    for tag, attributes in elements(page):
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base"), tag
        assert not {"src", "href", "srcset", "data", "action", "xlink:href"} & set(attributes), (tag, attributes)
    assert not re.search(r"https?:|//\w|url\(|@import", page)


def test_a_reference_outside_would_be_seen(page):
    with pytest.raises(AssertionError):
        test_the_page_needs_nothing_but_itself(page.replace("</body>", '<img src="a.png"></img></body>'))


def test_the_page_has_every_part(page):
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == [
        "Verdict",
        "Mesh",
        "What travels, and why",
        "Bytes by axes, of one step",
        "Memory of one device",
        "State of one device under ZeRO 0 to 3",
        "Pipeline",
        "Which device holds which slice",
    ]
    assert "pipeline send" in page and "ZeRO-1 (this)" in page and "Bubble by formula: (S-1)/(M+S-1) = 1/3" in page


def test_light_and_dark_are_both_readable(page):
    assert "color-scheme:light dark" in page and "prefers-color-scheme:dark" in page
    luminance = lambda c: np.dot(
        [((int(c[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5)], (0.2126, 0.7152, 0.0722)
    )
    for fill in COLOURS:  # WCAG 2: 4.5 for text
        low, high = sorted((luminance(fill), luminance(_ink(fill))))
        assert (high + 0.05) / (low + 0.05) >= 4.5, fill
    texts = [item for svg in drawings(page) for item in ElementTree.fromstring(svg) if item.tag == "text"]
    assert {item.attrib["fill"] for item in texts} <= {"currentColor", "#ffffff", "#000000"}


def test_slices_name_the_devices_that_hold_them(found):
    """Compared with where jax puts an array of that sharding."""
    program = found.program
    number = {device: index for index, device in enumerate(program.layout.mesh.devices.flat)}
    shardings = jax.tree_util.tree_leaves_with_path(program.layout.parameters)
    drawn = report.slices(program)
    for (path, sharding), shape in zip(shardings, jax.tree.leaves(program.abstract.params), strict=True):
        array = jax.device_put(np.zeros(shape.shape, np.float32), sharding)
        svg = ElementTree.fromstring(drawn[jax.tree_util.keystr(path, simple=True, separator=".")])
        titles = [title.text or "" for title in svg.iter("title")]
        told = {}
        for title in titles:
            where, _, devices = title.partition("]: ")
            told |= {int(device): where[1:] for device in re.findall(r"\d+", devices)}
        for shard in array.addressable_shards:
            cuts = (cut.indices(n)[:2] for cut, n in zip(shard.index, array.shape, strict=True))
            words = ", ".join(
                "all" if cut == (0, n) else f"{cut[0]}:{cut[1]}" for cut, n in zip(cuts, array.shape, strict=True)
            )
            assert told[number[shard.device]] == words
        assert len(titles) == len({str(shard.index) for shard in array.addressable_shards})


def test_the_ledger_adds_up(found, page):
    total = sum(row.total for row in found.rows)
    summary = page[page.index("What travels") : page.index("Each collective")]
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    cells = re.findall(r">([\d.,]+) (B|KiB|MiB)</td></tr>", summary)
    assert sum(float(a.replace(",", "")) * units[unit] for a, unit in cells) == pytest.approx(total, rel=1e-3)


def test_what_is_wrong_with_memory_is_said(found, capsys):
    lost = SpmdWarning("dot.1", "", "{devices=[2,1]}", "{replicated}", "a warning")
    bad = replace(found, usable=1024, warnings=(lost,))
    bad.show()
    out = capsys.readouterr().out
    for text in (out, report.page(bad)):
        assert "does not fit" in text and "1.00 KiB may be used" in text
        assert "gives up on dot.1" in text
    assert found.fits and not bad.fits and bad.to_dict()["fits"] is False
    assert "does not fit" not in report.page(found)


@pytest.mark.parametrize("share,asks", [(0.74, False), (0.76, True)])
def test_more_than_jaxs_own_share_of_a_gpu_is_said(found, capsys, share, asks):
    replace(found, platform="gpu", usable=round(0.9 * found.memory.peak / share)).show()
    assert ("env XLA_PYTHON_CLIENT_MEM_FRACTION=0.9" in capsys.readouterr().out) == asks


def test_every_picture_becomes_a_png(found, tmp_path):
    files = found.pictures(tmp_path / "new")
    names = {file.stem for file in files}
    assert names >= {"mesh", "axes", "memory", "zero", "pipeline", "slices-blocks.attention.query"}
    assert len(files) == 5 + len(jax.tree.leaves(found.program.abstract.params))
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_png_has_its_boxes_where_the_drawing_has_them(tmp_path):
    svg = '<svg viewBox="0 0 200 100"><rect x="100" y="0" width="100" height="50" fill="#ff0000"/></svg>'
    write_png(svg, tmp_path / "a.png", dots=100)
    image = matplotlib.image.imread(tmp_path / "a.png")
    assert image.shape[:2] == (100, 200)
    red = (image[..., 0] > 0.9) & (image[..., 1] < 0.1)
    assert red[10:40, 110:190].all() and not red[60:].any() and not red[:, :90].any()


def test_a_long_pipeline_is_drawn_in_part_and_a_large_mesh_too():
    short, long = pipeline_picture(make("1f1b", 2, 4)), pipeline_picture(make("1f1b", 2, 400))
    assert "middle left out" in long and "middle left out" not in short
    assert long.count("<rect") == 2 * MOST_HALVES + 3
    assert short.count("<title>bubble</title>") == 4 and short.count("<title>forward of microbatch 3</title>") == 2
    assert "drawn in part: 8 x 64 x 1 devices in all" in mesh_picture({"dp": 64, "tp": 8})


def test_small_bars_are_written_in_smaller_units():
    svg = bars([("a", [("x", 3 * 2**30)]), ("b", [("x", 12)]), ("c", [("x", 2**20)]), ("d", [])], "GiB", 2**30)
    words = [item.text for item in ElementTree.fromstring(svg) if item.tag == "text"]
    assert {"3.00 GiB", "12 B", "1.00 MiB", "0.00 GiB"} <= set(words)
    assert "0.01 s" in bars([("a", [("x", 0.008)])], "s", 1.0)


def test_a_function_of_ones_own_has_a_page_too(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("rows", "columns")))
    found = jaxshard.explain(jax.jit(lambda x: x.sum()), x)
    found.report(tmp_path / "own.html")
    page = (tmp_path / "own.html").read_text()
    elements(page)
    assert "columns = 2 across, rows = 4 down" in page and "Pipeline" not in page
    assert {file.stem for file in found.pictures(tmp_path)} == {"mesh", "axes", "memory"}
    assert math.prod(found.sizes.values()) == 8
