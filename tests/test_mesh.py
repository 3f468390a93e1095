"""The mesh: its text form, its errors, and the order of devices on it."""

import subprocess
import sys

import jax
import pytest

from jaxshard.errors import InputError
from jaxshard.parallel.axes import AXES, MeshShape
from jaxshard.parallel.mesh import build_mesh, open_devices, parse_mesh, resolve_mesh


def test_short_and_long_names():
    assert parse_mesh("dp=4,tp=2") == parse_mesh("data=4, model=2") == {"data": 4, "model": 2}
    assert resolve_mesh("replica=2,pp=2,tp=2", 8) == MeshShape(replica=2, stage=2, model=2)


def test_one_axis_may_take_the_rest():
    assert resolve_mesh("dp=-1,tp=2", 8).data == 4
    assert resolve_mesh(None, 8) == MeshShape(data=8)
    assert str(MeshShape(data=4, model=2)) == "dp=4,tp=2" and str(MeshShape()) == "dp=1"


@pytest.mark.parametrize(
    "text, part",
    [
        ("dp=4,tp", "axis=size"),
        ("auto", "auto is for train"),
        ("dp=4,tb=2", "did you mean 'tp'"),
        ("dp=4,data=2", "twice"),
        ("dp=x", "'x'"),
        ("dp=0", "1 or more"),
        ("dp=-2", "1 or more"),
        ("dp=-1,tp=-1", "only one axis"),
        ("dp=3,tp=2", "3 x 2 = 6 devices, and there are 8; what fits: --mesh dp=4,tp=2"),
        ("dp=-1,tp=3", "3 devices or a multiple"),
        ("", "axis=size"),
    ],
)
def test_what_does_not_fit_is_said(text, part):
    with pytest.raises(InputError) as error:
        resolve_mesh(text, 8) if text else parse_mesh("dp=4,,tp=2")
    assert part in str(error.value)


def test_model_is_innermost():
    mesh = build_mesh(MeshShape(replica=2, data=2, model=2), jax.devices())
    assert mesh.axis_names == AXES
    assert [device.id for device in mesh.devices[0, 0, 0]] == [0, 1]
    assert mesh.devices[1, 0, 0, 0].id == 4


def test_fewer_devices_than_faked_are_taken_from_the_front():
    jax.devices()
    assert [device.id for device in open_devices("dp=2", "cpu", None)] == [0, 1]
    assert len(open_devices("dp=-1", "cpu", 4)) == 4


def test_more_than_a_running_backend_has_are_refused():
    jax.devices()
    with pytest.raises(InputError, match=r"16 faked CPU devices.*runs with 8.*JAX_NUM_CPU_DEVICES=16"):
        open_devices("dp=16", "cpu", None)


def test_fakes_and_accelerators_exclude_each_other():
    with pytest.raises(InputError, match="drop one"):
        open_devices("dp=2", "gpu", 2)


def test_devices_are_faked_in_a_fresh_process():
    code = "from jaxshard.parallel.mesh import open_devices\nprint(len(open_devices('dp=3,tp=2', 'cpu', None)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"
