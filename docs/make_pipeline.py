"""Regenerates the pictures and tables of docs/pipeline.md: python docs/make_pipeline.py"""

import re
from pathlib import Path

from jaxshard.parallel.schedule import bubble_fraction, make, step_cost
from jaxshard.views.schedule_draw import draw_png, draw_text

FOLDER = Path(__file__).parent
PICTURES = {"gpipe": ("gpipe", 4, 8, 1), "1f1b": ("1f1b", 4, 8, 1), "interleaved": ("interleaved", 4, 8, 2)}
COLUMNS = {"GPipe": ("gpipe", 1), "1F1B": ("1f1b", 1), "V=2": ("interleaved", 2), "V=4": ("interleaved", 4)}
LAYERS = 32
"""Layers of the model in the zero-bubble table; its memory grows with them, that of the others does not."""


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bubbles_and_memory() -> str:
    """Bubble and saved inputs, counted from the tables."""
    rows = []
    for S in (2, 4, 8):
        for M in (4, 8, 16, 32, 64):
            tables = [make(name, S, M, V) for name, V in COLUMNS.values()]
            rows.append([str(S), str(M), *(f"{bubble_fraction(t):.1%}, {t.saved_slots}" for t in tables)])
    return _table(["S", "M", *COLUMNS], rows)


def zero_bubble() -> str:
    """Step time (forwards of a microbatch through a stage) and inputs kept, with a split backward on paper."""
    rows = []
    for S in (2, 4, 8):
        for M in (8, 16, 64):
            one, two, four = make("1f1b", S, M), make("interleaved", S, M, 2), make("interleaved", S, M, 4)
            kept, twice = 4 * M + 3 * (S - 1), 6 * M + 3 * (S - 1)
            cells = [f"{4 * M + 4 * (S - 1)}, {one.saved_slots}", f"{kept}, {one.saved_slots + 16 * LAYERS}"]
            cells += [f"{twice}, {one.saved_slots}", *(f"{step_cost(t):g}, {t.saved_slots}" for t in (two, four))]
            rows.append([str(S), str(M), *cells])
    return _table(["S", "M", "1F1B", "split, pairs kept", "split, recomputed twice", "V=2", "V=4"], rows)


def drawing() -> str:
    """A small table as the terminal shows it."""
    lines = draw_text(make("interleaved", 2, 4, 2)).plain.splitlines()
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


def render(text: str) -> str:
    """The document with what stands between its markers replaced."""
    for name, part in (("bubbles", bubbles_and_memory), ("zero-bubble", zero_bubble), ("drawing", drawing)):
        pattern = rf"(<!-- {name} -->\n)(?:(?!<!--).*\n)*(<!-- end -->)"
        text, found = re.subn(pattern, lambda match, part=part: f"{match[1]}{part()}\n{match[2]}", text)
        assert found == 1, f"marker {name}"
    return text


def main() -> None:
    page = FOLDER / "pipeline.md"
    page.write_text(render(page.read_text()))
    for name, sizes in PICTURES.items():
        draw_png(make(*sizes), FOLDER / f"pipeline_{name}.png", dots=90)


if __name__ == "__main__":
    main()
