"""Which variables of the environment make several processes one program, and what is said of those that do not."""

import pytest

from jaxshard.commands import cli
from jaxshard.errors import InputError
from jaxshard.parallel.distributed import join_processes, launch_arguments

SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "node[1-4]",
}
OPEN_MPI_5 = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPEN_MPI = OPEN_MPI_5 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}


def test_who_joins_whom():
    by_hand = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert launch_arguments({}) is None
    assert launch_arguments(by_hand) == {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
    assert launch_arguments(dict.fromkeys(("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), "1")) is None
    assert launch_arguments(SLURM) == {"cluster_detection_method": "slurm"}
    assert launch_arguments(SLURM | PMI) == {"cluster_detection_method": "slurm"}, "srun speaks PMI too"
    assert launch_arguments(OPEN_MPI) == {"cluster_detection_method": "ompi"}
    assert launch_arguments(OPEN_MPI | SLURM) == {"cluster_detection_method": "ompi"}, "mpirun uses srun"
    here = {"coordinator_address": "a:1", "num_processes": 4, "process_id": 3}
    for each, local in ((OPEN_MPI_5, 1), (OPEN_MPI_5 | SLURM, 1), (SLURM, 0), (PMI, 1)):
        found = launch_arguments(each | {"JAX_COORDINATOR_ADDRESS": "a:1"})
        assert found == here | {"local_device_ids": [local]}
    chosen = OPEN_MPI_5 | {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_LOCAL_DEVICE_IDS": "0,1"}
    assert launch_arguments(chosen) == here
    assert launch_arguments(SLURM | by_hand) == launch_arguments(by_hand)
    for wrong in (
        {"JAX_PROCESS_ID": "2"},
        {"JAX_PROCESS_ID": "x"},
        {"JAX_NUM_PROCESSES": ""},
        {"JAX_COORDINATOR_ADDRESS": "a"},
    ):
        with pytest.raises(InputError):
            launch_arguments(by_hand | wrong)


@pytest.mark.parametrize(
    ("variables", "without", "change", "said"),
    [
        (
            OPEN_MPI_5,
            "",
            {},
            "(OMPI_COMM_WORLD_SIZE=4), but OMPI_MCA_orte_hnp_uri is not set (Open MPI 5 sets it no lon",
        ),
        (OPEN_MPI_5 | SLURM, "", {}, "but OMPI_MCA_orte_hnp_uri is not set"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", {}, "but OMPI_COMM_WORLD_RANK is not set: start it with mpirun of Open MPI"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", {}, "but OMPI_COMM_WORLD_LOCAL_RANK is not set: give every process"),
        (OPEN_MPI, "", {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4, which must be from 0 to 3"),
        (OPEN_MPI, "", {"OMPI_MCA_orte_hnp_uri": "1.0;usock"}, "'1.0;usock' names no address"),
        (
            SLURM,
            "SLURM_STEP_NODELIST",
            {},
            "srun started 4 processes (SLURM_STEP_NUM_TASKS=4), but SLURM_STEP_NODELIST",
        ),
        (SLURM, "", {"SLURM_STEP_NODELIST": ""}, "but SLURM_STEP_NODELIST is not set: give every process JAX_COORDIN"),
        (SLURM, "SLURM_LOCALID", {"SLURM_JOB_ID": ""}, "but SLURM_LOCALID and SLURM_JOB_ID are not set"),
        (SLURM, "SLURM_PROCID", {}, "but SLURM_PROCID is not set: start it with srun, or unset SLURM_STEP_NUM_TASKS"),
        (SLURM, "", {"SLURM_NTASKS": "8"}, "but SLURM_NTASKS=8: the variables are of two jobs"),
        (
            PMI,
            "",
            {},
            "(PMI_SIZE=4), but it does not tell jax where the first of them is: give every process JAX_COORDI",
        ),
        (PMI | SLURM, "", {"PMI_SIZE": "8"}, "mpiexec of MPICH or Intel MPI started 8 processes"),
        (PMI, "PMI_RANK", {"JAX_COORDINATOR_ADDRESS": "a:1"}, "but PMI_RANK is not set"),
    ],
)
def test_variables_that_are_incomplete_or_contradict_each_other_are_named(variables, without, change, said):
    environment = {name: value for name, value in (variables | change).items() if name != without}
    with pytest.raises(InputError) as refused:
        launch_arguments(environment)
    assert said in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 330


def test_variables_that_pass_are_those_by_which_jax_knows_the_launcher(monkeypatch):
    from jax._src.clusters import ClusterEnv

    known = {each.name: each for each in ClusterEnv._cluster_types}
    for variables in (SLURM, OPEN_MPI):
        method = launch_arguments(variables)
        assert method is not None
        jaxs = known[method["cluster_detection_method"]]
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            assert jaxs.is_env_present() and (jaxs.get_process_count(), jaxs.get_process_id()) == (4, 3)
            assert jaxs.get_local_process_id() == int(variables.get("SLURM_LOCALID", 1))


@pytest.mark.parametrize(
    "name, others",
    [
        ("JAX_NUM_PROCESSES", {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "1"}),
        ("JAX_PROCESS_ID", {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}),
        ("SLURM_STEP_NUM_TASKS", {}),
        ("SLURM_PROCID", SLURM),
        ("OMPI_COMM_WORLD_SIZE", {}),
        ("OMPI_COMM_WORLD_RANK", OPEN_MPI),
        ("PMI_RANK", PMI | {"JAX_COORDINATOR_ADDRESS": "a:1"}),
    ],
)
def test_a_launchers_variable_that_is_no_number_is_named_with_its_value(name, others, monkeypatch, capsys):
    for each, value in (others | {name: "two"}).items():
        monkeypatch.setenv(each, value)
    assert cli.run(["collectives", "--mesh", "dp=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: the environment says {name}='two', which must be a whole number")
    assert error.count("\n") == 1


def test_devices_that_cannot_be_shared_are_refused_before_anyone_waits(monkeypatch):
    for name, value in (("COORDINATOR_ADDRESS", "nowhere:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(InputError, match=r"3 CPU devices cannot be shared equally by 2 processes.*--mesh dp=4"):
        join_processes("dp=3", "cpu", None)
