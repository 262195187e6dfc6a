"""Whether the ranks of a group reach each other's memory: probing reads the machine, deciding is a pure function."""

import dataclasses
import json
import os
import pathlib
import socket

import torch

from flux_ops.config import settings

CAPABILITY = "9.0"  # that csrc/kernels is built for


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one rank knows of its place."""

    rank: int
    version: str  # of flux_ops
    host: str
    boot_id: str  # tells hosts of one name apart
    pid_namespace: str
    why_not_cuda: str = ""  # why this rank has no CUDA kernels
    gpu_index: int = -1
    gpu_uuid: str = ""
    gpu_name: str = ""
    capability: str = ""  # of the GPU
    launches_block: bool = False  # a kernel that waits for its peers would keep this rank from serving them
    peer_access: dict[str, bool] = dataclasses.field(default_factory=dict)  # by UUID of each visible GPU
    ranks_per_gpu: int = 1  # that this rank allows

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Probe":
        return Probe(**json.loads(text))


def probe(rank: int, device_type: str, device_index: int, version: str, why_not_cuda: str) -> Probe:
    boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id")
    base = Probe(
        rank=rank,
        version=version,
        host=socket.gethostname(),
        boot_id=boot_id.read_text().strip() if boot_id.exists() else "",
        pid_namespace=os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        why_not_cuda=why_not_cuda,
    )
    if device_type != "cuda":
        return base
    properties = torch.cuda.get_device_properties(device_index)
    access = {}
    for other in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(other).uuid)
        access[uuid] = other == device_index or torch.cuda.can_device_access_peer(device_index, other)
    return dataclasses.replace(
        base,
        gpu_index=device_index,
        gpu_uuid=str(properties.uuid),
        gpu_name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        ranks_per_gpu=settings.ranks_per_gpu,
        launches_block=os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        peer_access=access,
    )


def decide(probes: list[Probe], device_type: str) -> str:
    """Why the ranks can't share memory on this kind of device, as a clause; empty if they can.

    Raises ValueError for what no strategy can run: more ranks on one GPU than may share it, or unlike versions.
    """
    first = probes[0]
    for p in probes:
        if p.version != first.version:
            raise ValueError(
                f"the ranks run unlike versions of flux_ops: rank {first.rank} has {first.version}, rank {p.rank} has "
                f"{p.version}."
            )
    allowed = min(p.ranks_per_gpu for p in probes)
    for a, b in _pairs(probes) if device_type == "cuda" else ():
        if a.gpu_uuid == b.gpu_uuid and sum(p.gpu_uuid == a.gpu_uuid for p in probes) > allowed:
            raise ValueError(
                f"ranks {a.rank} and {b.rank} both use GPU {a.gpu_index} ({a.gpu_name}, {a.gpu_uuid}); each rank needs "
                "a GPU of its own: call torch.cuda.set_device(local_rank) before anything else. (FLUX_RANKS_PER_GPU, "
                f"for tests, allows {allowed}.)"
            )
    for p in probes:
        if device_type == "cuda" and p.why_not_cuda:
            return f"rank {p.rank} has no CUDA kernels: {p.why_not_cuda}"
        if device_type == "cuda" and p.capability != CAPABILITY:
            return (
                f"the CUDA kernels are built for compute capability {CAPABILITY} (H100, H200), and the GPU of rank "
                f"{p.rank} ({p.gpu_name}) has {p.capability}"
            )
        if p.launches_block:
            return f"rank {p.rank} has CUDA_LAUNCH_BLOCKING set, and kernels that wait for peers can't be serialised"
    for a, b in _pairs(probes):
        why_not = _why_not_connected(a, b, device_type)
        if why_not:
            return why_not
    return ""


def _pairs(probes: list[Probe]):
    return ((a, b) for i, a in enumerate(probes) for b in probes[i + 1 :])


def _why_not_connected(a: Probe, b: Probe, device_type: str) -> str:
    pair = f"ranks {a.rank} and {b.rank}"
    if (a.host, a.boot_id) != (b.host, b.boot_id):
        return f"{pair} are on different hosts, {a.host} and {b.host}"
    if device_type == "cpu":
        if a.pid_namespace != b.pid_namespace:
            return f"{pair} are in different process-id namespaces, so they can't map each other's memory"
        return ""
    if a.gpu_index == b.gpu_index and a.gpu_uuid != b.gpu_uuid:
        return (
            f"{pair} use different GPUs under the same number {a.gpu_index}, because each process sees only some of "
            "them; launch every rank with all GPUs visible (the same CUDA_VISIBLE_DEVICES) and call "
            "torch.cuda.set_device(local_rank)"
        )
    for p, q in ((a, b), (b, a)):
        if q.gpu_uuid not in p.peer_access:
            return (
                f"rank {p.rank} does not see the GPU of rank {q.rank}; launch every rank with all GPUs visible (the "
                "same CUDA_VISIBLE_DEVICES)"
            )
        if not p.peer_access[q.gpu_uuid]:
            return (
                f"{pair} have no peer-to-peer access: GPU {p.gpu_index} ({p.gpu_name}) can't reach GPU {q.gpu_index} "
                f"({q.gpu_name})"
            )
    return ""
