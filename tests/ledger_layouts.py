"""Layouts whose traffic is compared with theory, by name. Tiny models: sizes do not matter to the rules."""

import pytest

from jaxshard.commands.explain import Explanation, explain_program
from jaxshard.config import Config, DataConfig, ModelConfig, OptimConfig, grouped
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.planner.confirm import compiler_missing
from jaxshard.training.program import Program, build_program
from jaxshard.xla.absent import devices_for, mesh_for
from jaxshard.xla.compile import Compiled, compile_for
from jaxshard.xla.hardware import parse_target

LLAMA = {
    "family": "llama",
    "d_model": 128,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 4,
    "head_dim": 32,
    "d_ff": 384,
    "vocab_size": 1000,
}
GPT2 = {"family": "gpt2", "d_model": 128, "n_layers": 3, "n_heads": 8, "d_ff": 512, "vocab_size": 1000}


def config(mesh, zero=0, model=None, optim="adamw", pack=True, **train):
    return Config(
        model=ModelConfig(**(LLAMA if model is None else model)),
        data=DataConfig(seq_len=64, pack=pack),
        optim=OptimConfig(name=optim),
        **grouped(mesh=mesh, zero=zero, **{"global_batch": 16, "precision": "bf16"} | train),
    )


SP = {"sequence_parallel": True}
FULL_KV = LLAMA | {"n_kv_heads": 8}
MIXED_KV = LLAMA | {"d_model": 192, "n_heads": 12, "n_kv_heads": 3, "d_ff": 512}
"""On tp=4 each device has 3 query heads, of one kv head or of two; keys are shaped like a device's queries."""
PADDED = LLAMA | {"d_model": 160, "n_layers": 2, "head_dim": 64, "n_kv_heads": 1, "vocab_size": 1024}
"""On dp=4 a TPU scatters keys [160, 64] in parts of 48 rows, not 40."""
CUT = GPT2 | {"d_model": 200, "n_layers": 1, "n_heads": 5, "d_ff": 800, "vocab_size": 2500}
"""On dp=8 a TPU gathers the table [2560, 200] as [8, 320, 200]."""
FAST = {
    "ddp": config("dp=8"),
    "zero 3 with tp": config("dp=4,tp=2", 3),
    "zero 1, deferred, sp": config("dp=2,tp=4", 1, accumulation=2, **SP),
    "hsdp zero 3, accumulation, sp": config("replica=2,dp=2,tp=2", 3, accumulation=2, **SP),
}
SLOW = {
    "zero 1": config("dp=8", 1),
    "zero 2": config("dp=8", 2),
    "zero 3": config("dp=8", 3),
    "ddp, deferred": config("dp=8", accumulation=2),
    "zero 1, deferred": config("dp=8", 1, accumulation=2),
    "zero 2, accumulation": config("dp=8", 2, accumulation=2),
    "zero 3, accumulation": config("dp=8", 3, accumulation=2),
    "ddp with tp": config("dp=4,tp=2"),
    "zero 1 with tp": config("dp=4,tp=2", 1),
    "zero 2 with tp": config("dp=4,tp=2", 2),
    "tp": config("tp=8", model=FULL_KV),
    "tp, dots": config("tp=8", model=FULL_KV, remat="dots"),
    "tp, full": config("tp=8", model=FULL_KV, remat="full"),
    "tp, named": config("tp=8", model=FULL_KV, remat="names:residual,attention"),
    "tp sp": config("tp=8", model=FULL_KV, **SP),
    "tp sp, dots": config("tp=8", model=FULL_KV, remat="dots", **SP),
    "tp sp, full": config("tp=8", model=FULL_KV, remat="full", **SP),
    "zero 3, dots": config("dp=8", 3, remat="dots"),
    "zero 3, full": config("dp=8", 3, remat="full"),
    "zero 3, offload": config("dp=8", 3, remat="offload"),
    "tp, shared kv heads": config("tp=8", remat="full"),
    "zero 1 with tp, mixed kv heads": config("dp=2,tp=4", 1, MIXED_KV),
    "zero 3 with tp sp, full": config("dp=2,tp=4", 3, remat="full", **SP),
    "zero 2 with tp, accumulation, full": config("dp=2,tp=4", 2, accumulation=2, remat="full"),
    "replicas": config("replica=2,dp=4"),
    "hsdp zero 1": config("replica=2,dp=4", 1),
    "hsdp zero 3": config("replica=2,dp=4", 3, remat="full"),
    "hsdp zero 1, deferred": config("replica=2,dp=4", 1, accumulation=2),
    "gpt2 ddp with tp": config("dp=4,tp=2", model=GPT2),
    "gpt2 zero 3 with tp": config("dp=4,tp=2", 3, model=GPT2),
    "gpt2 tp sp": config("tp=8", model=GPT2, **SP),
    "gpt2 zero 3, full": config("dp=8", 3, model=GPT2, remat="full"),
    "fp32": config("dp=4,tp=2", 3, precision="fp32"),
    "fp16": config("dp=4,tp=2", 1, precision="fp16"),
    "pure-bf16": config("dp=8", 2, precision="pure-bf16"),
    "loss in chunks": config("dp=4,tp=2", 3, loss_chunk=16),
    "adafactor": config("dp=4,tp=2", 3, optim="adafactor"),
    "lion": config("dp=8", 1, optim="lion"),
    "optimizer in host memory": config("dp=8", 1, offload="optimizer"),
    "dropout": config("dp=4,tp=2", 2, model=LLAMA | {"dropout": 0.1}),
    "one document a row": config("dp=4,tp=2", 3, pack=False),
}

DEEP = LLAMA | {"n_layers": 8}
SMALL = LLAMA | {"n_layers": 2}


def pipeline(mesh, zero=0, model=None, **train):
    return config(mesh, zero, DEEP if model is None else model, **({"microbatches": 4} | train))


PIPELINES = {
    "gpipe": pipeline("pp=4,dp=2", schedule="gpipe"),
    "1f1b, zero 1": pipeline("pp=2,dp=2,tp=2", 1),
    "interleaved, tp": pipeline("pp=2,dp=2,tp=2", virtual_stages=2),
    "interleaved, zero 1, sp, accumulation": pipeline(
        "pp=2,dp=2,tp=2", 1, virtual_stages=2, accumulation=2, microbatches=2, **SP
    ),
    "1f1b, tp sp, full": pipeline("pp=4,tp=2", remat="full", **SP),
    "1f1b, wide tp sp": pipeline("pp=2,tp=4", model=SMALL, **SP),
    "gpipe, wide tp sp, single layers": pipeline("pp=2,tp=4", model=SMALL, schedule="gpipe", remat="full", **SP),
    "1f1b, zero 2": pipeline("pp=2,dp=4", 2),
    "gpipe, zero 2 with tp": pipeline("pp=2,dp=2,tp=2", 2, schedule="gpipe"),
    "1f1b, zero 3": pipeline("pp=2,dp=4", 3),
    "1f1b, zero 3 with tp, full": pipeline("pp=2,dp=2,tp=2", 3, remat="full"),
    "1f1b, zero 3 gathered once": pipeline("pp=2,dp=4", 3, pipeline_gather="step"),
    "interleaved, zero 3": pipeline("pp=2,dp=4", 3, virtual_stages=2),
    "interleaved, zero 3 with tp, single layers": pipeline(
        "pp=2,dp=2,tp=2", 3, LLAMA | {"n_layers": 4}, virtual_stages=2, remat="full"
    ),
    "gpt2 1f1b, zero 1": pipeline("pp=2,dp=2,tp=2", 1, model=GPT2 | {"n_layers": 8}),
}

ALL = FAST | SLOW | PIPELINES
"""What benchmarks/ledger.py compares."""
_ALIKE = ("zero 2", "zero 1 with tp", "tp, named", "tp, dots", "tp sp, dots", "zero 3, dots", "zero 3, offload", "lion")
TESTED = {name: case for name, case in ALL.items() if name not in _ALIKE}
"""What the tests compare: the others are very like one of these."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of CPU and GPU compilers: machine code, which nobody runs here, is not optimised; collectives are."""


def program_for(case: Config, target: str) -> Program:
    """The program of a layout; the test is skipped where the target's compiler is missing."""
    hardware = parse_target(target)
    missing = compiler_missing(hardware)
    if missing:
        pytest.skip(missing)
    mesh = mesh_for(hardware, resolve_mesh(case.mesh, hardware.count))
    return build_program(case, devices_for(hardware), mesh=mesh)


def ledger(program: Program, target: str) -> Explanation:
    """What is explained of a program, compiled quickly."""
    hardware = parse_target(target)
    options = None if hardware.chip.platform == "tpu" else QUICK
    batch, low = program.abstract_batch(), (program.offloaded, False)
    compiled = compile_for(
        hardware, program.step, program.abstract, batch, host=(low, low), buffers=False, options=options
    )
    assert isinstance(compiled, Compiled)
    return explain_program(program, compiled)


def agreeing(case: Config, target: str) -> Explanation:
    """The ledger of a layout, after checking that what is found is what is expected."""
    found = ledger(program_for(case, target), target)
    assert found.check is not None
    assert (found.check.missing, found.check.unexpected, found.check.undone) == ((), (), ())
    assert found.warnings == ()
    return found
