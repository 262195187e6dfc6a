"""What follows from a machine, decided on descriptions of machines that are not here."""

import dataclasses

import pytest

from flux_ops.topology import Probe, decide, probe


def gpu(rank, index=None, **changes):
    """Rank `rank` of a good machine: every process sees all GPUs, and all reach each other."""
    made = Probe(
        rank=rank,
        version="0.1.0",
        host="node1",
        boot_id="b1",
        pid_namespace="pid:[1]",
        gpu_index=rank if index is None else index,
        gpu_uuid=f"uuid{rank}",
        gpu_name="H100",
        capability="9.0",
        peer_access={f"uuid{r}": True for r in range(4)},
    )
    return dataclasses.replace(made, **changes)


def cpu(rank, **changes):
    return dataclasses.replace(Probe(rank, "0.1.0", "node1", "b1", "pid:[1]"), **changes)


def test_a_good_machine():
    assert decide([gpu(r) for r in range(4)], "cuda") == ""
    assert decide([cpu(r) for r in range(4)], "cpu") == ""


def test_permuted_gpus_are_fine():
    assert decide([gpu(r, index=3 - r) for r in range(4)], "cuda") == ""


def test_ranks_may_share_gpus_up_to_a_number():
    def on(rank, index, allowed=2):
        return gpu(rank, index=index, gpu_uuid=f"uuid{index}", ranks_per_gpu=allowed)

    pairs = [on(r, r // 2) for r in range(4)]
    assert decide(pairs, "cuda") == ""
    with pytest.raises(ValueError, match=r"ranks 2 and 3 both use GPU 1.*allows 2"):
        decide([*pairs, on(4, 1)], "cuda")
    with pytest.raises(ValueError, match=r"ranks 0 and 1 both use GPU 0.*allows 1"):
        decide([*pairs[:3], on(3, 1, allowed=1)], "cuda")


def test_two_ranks_on_one_gpu_name_both_and_the_gpu():
    with pytest.raises(ValueError, match="ranks 0 and 2 both use GPU 0") as error:
        decide([gpu(0), gpu(1), gpu(2, index=0, gpu_uuid="uuid0")], "cuda")
    assert "uuid0" in str(error.value)
    assert "set_device" in str(error.value)


def test_each_process_sees_only_its_own_gpu():
    alone = [gpu(r, index=0, peer_access={f"uuid{r}": True}) for r in range(2)]
    reason = decide(alone, "cuda")
    assert "ranks 0 and 1" in reason
    assert "all GPUs visible" in reason


def test_a_gpu_out_of_sight():
    reason = decide([gpu(0), gpu(1, peer_access={"uuid1": True})], "cuda")
    assert "rank 1 does not see the GPU of rank 0" in reason


def test_blocking_launches_are_named():
    reason = decide([gpu(0), gpu(1, launches_block=True)], "cuda")
    assert "CUDA_LAUNCH_BLOCKING" in reason
    assert "rank 1" in reason


def test_no_peer_access_names_the_pair():
    blocked = {"uuid0": True, "uuid1": True, "uuid2": False}
    reason = decide([gpu(0), gpu(1, peer_access=blocked), gpu(2)], "cuda")
    assert "ranks 1 and 2" in reason
    assert "peer-to-peer" in reason


@pytest.mark.parametrize("make,kind", ((gpu, "cuda"), (cpu, "cpu")))
def test_other_host(make, kind):
    reason = decide([make(0), make(1), make(2, host="node2", boot_id="b2")], kind)
    assert "ranks 0 and 2 are on different hosts, node1 and node2" in reason
    assert decide([make(0), make(1, boot_id="b2")], kind) != ""


def test_other_pid_namespace():
    assert "namespaces" in decide([cpu(0), cpu(1, pid_namespace="pid:[2]")], "cpu")
    assert decide([gpu(0), gpu(1, pid_namespace="pid:[2]")], "cuda") == ""


def test_a_rank_without_kernels():
    reason = decide([gpu(0), gpu(1, why_not_cuda="nvcc was not found")], "cuda")
    assert "rank 1 has no CUDA kernels: nvcc was not found" in reason


@pytest.mark.parametrize("old", (0, 1, 2))
def test_a_gpu_that_the_kernels_are_not_built_for(old):
    probes = [gpu(r, **({"gpu_name": "A100", "capability": "8.0"} if r == old else {})) for r in range(3)]
    reason = decide(probes, "cuda")
    assert reason == (
        f"the CUDA kernels are built for compute capability 9.0 (H100, H200), and the GPU of rank {old} (A100) has 8.0"
    )


def test_unlike_versions():
    with pytest.raises(ValueError, match=r"rank 0 has 0\.1\.0, rank 1 has 0\.2\.0"):
        decide([cpu(0), cpu(1, version="0.2.0")], "cpu")


def test_a_real_probe_travels():
    mine = probe(3, "cpu", -1, "0.1.0", "no nvcc")
    assert Probe.from_json(mine.to_json()) == mine
    assert decide([mine, dataclasses.replace(mine, rank=4)], "cpu") == ""
