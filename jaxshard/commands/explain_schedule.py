"""`explain --schedule`: the pipeline of a configuration, drawn, with its bubble counted and by formula."""

import math
from pathlib import Path
from typing import Any

from jaxshard.config import Config
from jaxshard.console import Console
from jaxshard.errors import InputError
from jaxshard.models.presets import architecture
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import open_devices, parse_mesh, resolve_mesh
from jaxshard.parallel.resolve import zero_stage
from jaxshard.parallel.schedule import Schedule, bubble_formula, bubble_fraction
from jaxshard.planner.confirm import tokenizer_size
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.program import check_fit
from jaxshard.views.schedule_draw import draw_png, draw_text, sentences
from jaxshard.xla.absent import shape_for
from jaxshard.xla.hardware import parse_target


def show_schedule(config: Config, target: str, console: Console, png: str | None) -> dict[str, Any]:
    """Draws the pipeline; nothing is compiled.

    Args:
        config: whose mesh, batch and schedule count.
        target: hardware, for meshes that leave an axis open.
        png: folder for pipeline.png, or None.

    Raises:
        InputError: there are no stages, or what `plan_pipeline` refuses.
    """
    schedule = schedule_of(config, target)
    console.drawing(draw_text(schedule, console.width))
    for sentence in sentences(schedule):
        console.line(sentence)
    if png:
        file = Path(png) / "pipeline.png"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            draw_png(schedule, file)
        except OSError as error:
            raise InputError(f"--png {png}: cannot be written ({error.strerror}); name another folder") from None
        console.line(f"picture: {file}")
    return facts(schedule)


def schedule_of(config: Config, target: str = "local") -> Schedule:
    """The table that the train step of a configuration would run.

    Raises:
        InputError: there are no stages, or the sizes do not fit.
    """
    shape = _shape(config, target)
    if shape.stage == 1:
        raise InputError(
            f"explain --schedule: mesh {shape} has no pipeline to draw; split the layers over stages with --mesh "
            "pp=2,dp=2"
        )
    arch = architecture(config.model, tokenizer_size(config), config.data.seq_len)
    check_fit(config, arch, shape)
    plan = plan_pipeline(config, zero_stage(config, shape), arch, shape)
    assert plan is not None, "stages make a pipeline"
    return plan.schedule


def facts(schedule: Schedule) -> dict[str, Any]:
    """The figures as `--json` prints them."""
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "forward_halves": schedule.forward_halves,
        "backward_halves": schedule.backward_halves,
        "saved_inputs": schedule.saved_slots,
        "bubble_counted": bubble_fraction(schedule),
        "bubble_formula": bubble_formula(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks),
    }


def _shape(config: Config, target: str) -> MeshShape:
    """The mesh; devices are counted only where an axis is left open or a target is named."""
    sizes = list(parse_mesh(config.mesh).values())
    if target.strip().lower() != "local":
        return shape_for(parse_target(target), config.mesh)
    if -1 in sizes:
        return resolve_mesh(config.mesh, len(open_devices(config.mesh, config.devices, config.fake_devices)))
    return resolve_mesh(config.mesh, math.prod(sizes))
