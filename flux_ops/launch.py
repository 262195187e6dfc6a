"""One process per rank: under torchrun, or started here by running the same command once per rank."""

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from flux_ops import shared_gpu

STACKS_SIGNAL = signal.SIGUSR1  # a rank that gets it prints its stacks


@dataclasses.dataclass
class Place:
    """Where a rank runs. `control` is a gloo group: it carries Python objects, and works when the GPU doesn't."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup | None
    group: dist.ProcessGroup | None = None  # the group itself; None: all ranks

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def sync(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def everyone(self, value):
        """The values of all ranks, on all ranks."""
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def say(self, *lines):
        if self.rank == 0:
            print(*lines, flush=True)


def add_arguments(parser):
    """Where the ranks run, as options; `settle` fills in what is not given."""
    parser.add_argument("--device", default="", choices=("", "cpu", "cuda"))
    parser.add_argument("--world", type=int, default=0, help="ranks; default: all GPUs, or 2 CPU processes")


def settle(args):
    """All GPUs if there are at least two, else two CPU processes, where neither the arguments nor a launcher say."""
    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus > 1 else "cpu")
    started = int(os.environ["WORLD_SIZE"]) if under_launcher() else 0
    args.world = args.world or started or (gpus if args.device == "cuda" else 2)
    if args.world < 1:
        reason = f"{args.world} ranks on {args.device}: there is no GPU here, or --world is negative."
        raise SystemExit(refuse(getattr(args, "command", "launch"), reason))


def refuse(command, reason):
    """Say why `python -m flux_ops COMMAND` can't run; returns its exit status."""
    print(f"flux_ops {command}: error: {reason}", file=sys.stderr)
    return 2


def under_launcher():
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(world, limit_s):
    """Run this very command as `world` ranks. Returns the exit status; no rank is left behind."""
    spec = sys.modules["__main__"].__spec__  # of a module that was started with -m
    started = ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]] if spec else sys.argv
    # The ranks' store is served here, at a port that the system picks: one that is free now may not be free for rank 0.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # how torchrun says so
    if world > 1:
        shared.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    sys.stdout.flush()  # what has been said comes ahead of what the ranks say, in a pipe, too
    ranks = [
        subprocess.Popen([sys.executable, *started], env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(world)
    ]
    deadline = time.monotonic() + limit_s
    try:
        while any(p.poll() is None for p in ranks):
            failed = [p for p in ranks if p.poll()]
            if failed:
                deadline = min(deadline, time.monotonic() + 5)  # the others may still have something to say
            if time.monotonic() > deadline:
                if not failed:
                    print(f"No end after {limit_s:.0f} s: stopping the ranks.", file=sys.stderr)
                for p in ranks:
                    if p.poll() is None:
                        p.send_signal(STACKS_SIGNAL)
                time.sleep(0.5)
                break
            time.sleep(0.02)
        return next((p.returncode for p in ranks if p.poll()), 0 if all(p.poll() == 0 for p in ranks) else 1)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
            p.wait()


@contextlib.contextmanager
def joined(device_type):
    """Join the process group as the environment says; leave it at the end."""
    faulthandler.register(STACKS_SIGNAL)
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: don't outlive the launcher
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    backend = "gloo"
    if device_type == "cuda":
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        device, backend = shared_gpu.device_and_backend(int(os.environ.get("LOCAL_RANK", rank)), local_world)
        torch.cuda.set_device(device)
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend, timeout=datetime.timedelta(seconds=90), device_id=device if backend == "nccl" else None
    )
    try:
        yield Place(rank, world, device, dist.new_group(backend="gloo"))
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def watch(seconds):
    """From now on: if this rank is not done, or watched anew, in time, it prints its stacks and exits."""
    faulthandler.dump_traceback_later(seconds, exit=True)
