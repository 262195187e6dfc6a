"""Rank processes for the tests: spawned once, then handed one function after another.

    ranks = Ranks(world=2, device="cpu")
    values = ranks.run(fn, *args)         # fn(ctx, *args) on every rank; raises RanksFailed if any rank did
    outcomes = ranks.outcomes(fn, *args)  # the same, but errors and deaths are returned, not raised
    ranks.close()

Functions and arguments travel by pickle, so a function has to be importable: module level, in a test module. A
watchdog bounds every call: when it fires, each rank that still works dumps its Python stacks, all are killed, and the
report shows who hung where. A rank never outlives the test process.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import faulthandler
import multiprocessing
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import connection

import torch
import torch.distributed as dist

WATCHDOG_S = 100.0  # below pytest-timeout's 120 s, which has less to say
GRACE_S = 25.0  # how long the others may go on after the first rank has failed
START_S = 120.0

# The first import of torch costs seconds: one server process pays for it, the ranks are forked from it. It touches no
# GPU, so each rank can still choose its own.
_processes = multiprocessing.get_context("forkserver")
_preload = ["torch", "torch.distributed", "numpy", "sympy"]
if not os.path.exists("/dev/nvidiactl"):
    _preload += ["torch._dynamo", "torch.testing._internal.optests"]  # slow to import, and they ask CUDA for devices
_processes.set_forkserver_preload(_preload)


@dataclasses.dataclass
class Outcome:
    """What one rank made of a call."""

    rank: int
    status: str = "hung"  # "ok", "error", "died" or "hung"
    value: object = None
    kinds: tuple = ()  # class names of the exception, most derived first
    message: str = ""
    trace: str = ""
    seconds: float = 0.0

    def describe(self):
        head = f"---- rank {self.rank}: {self.status} after {self.seconds:.1f} s"
        return head if self.status == "ok" else f"{head}\n{self.trace or self.message}".rstrip()


class RanksFailed(AssertionError):
    def __init__(self, what, outcomes, logs):
        parts = [what, *(o.describe() for o in outcomes if o.status != "ok")]
        fine = [str(o.rank) for o in outcomes if o.status == "ok"]
        if fine:
            parts.append(f"---- fine: rank {', '.join(fine)}")
        parts += [f"---- output of rank {rank}\n{text}" for rank, text in logs.items() if text]
        super().__init__("\n".join(parts))
        self.outcomes = outcomes


@dataclasses.dataclass
class Context:
    """What a function that runs on a rank knows of its place."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def stall(self, seconds):
        """Be late: on the GPU only the stream is, as a slow kernel would make it."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * 1.7e9))
        else:
            time.sleep(seconds)

    def sync(self):
        if self.is_cuda:
            torch.cuda.synchronize()


class Ranks:
    """`world` processes in one process group: gloo for device "cpu", NCCL for "cuda". NCCL takes one rank a GPU only:
    where there are more ranks than GPUs, and FLUX_RANKS_PER_GPU allows it, it is gloo again.

    `env` holds environment variables, the same on each rank, or a list with one dict per rank. `set_device=False`
    leaves out torch.cuda.set_device, `init_group=False` the process group.
    """

    def __init__(self, world, device="cpu", env=None, *, set_device=True, init_group=True, group_timeout=60.0):
        self.world = world
        self.device = device
        self._env = env if isinstance(env, list) else [dict(env or {})] * world
        self._options = {"set_device": set_device, "init_group": init_group, "group_timeout": group_timeout}
        self._members = []
        self._folder = None
        self.starts = 0

    def start(self):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="flux_ranks_"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.starts += 1
        for rank in range(self.world):
            ours, theirs = _processes.Pipe()
            args = (
                rank,
                self.world,
                self.device,
                self._env[rank],
                self._store.port,
                theirs,
                self._folder,
                self._options,
            )
            process = _processes.Process(target=_serve, args=args, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        outcomes = self._collect(START_S)
        if any(o.status != "ok" for o in outcomes):
            failure = RanksFailed(f"{self.world} ranks on {self.device} did not start", outcomes, self._logs())
            self.close()
            raise failure

    def outcomes(self, fn, *args, timeout=WATCHDOG_S, grace=GRACE_S, **kwargs):
        """Run fn(ctx, *args, **kwargs) on every rank and return one Outcome per rank."""
        if not self._members:
            self.start()
        for _, pipe in self._members:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((fn, args, kwargs))
        outcomes = self._collect(timeout, grace)
        if not all(o.status == "ok" or "AssertionError" in o.kinds for o in outcomes):
            self._captured = self._logs()
            self.close()  # the ranks may be out of step now: the next call gets fresh ones
        return outcomes

    def run(self, fn, *args, **kwargs):
        """Run fn(ctx, *args, **kwargs) on every rank and return the list of results."""
        outcomes = self.outcomes(fn, *args, **kwargs)
        if any(o.status != "ok" for o in outcomes):
            logs = self._logs() if self._members else self._captured
            raise RanksFailed(f"{fn.__name__} failed with {self.world} ranks on {self.device}", outcomes, logs)
        return [o.value for o in outcomes]

    def close(self):
        for process, pipe in self._members:
            pipe.close()
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process, _ in self._members:
            process.join(10)
        self._members = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.close()

    def pids(self):
        return [process.pid for process, _ in self._members]

    def _collect(self, timeout, grace=GRACE_S):
        """Wait for one answer per rank: all of them, or until the watchdog fires."""
        started = time.monotonic()
        deadline = started + timeout
        outcomes = [Outcome(rank) for rank in range(self.world)]
        waiting = dict(enumerate(self._members))
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            sources = {}
            for rank, (process, pipe) in waiting.items():
                sources[pipe] = rank
                sources[process.sentinel] = rank
            for source in connection.wait(list(sources), timeout=left):
                rank = sources[source]
                if rank not in waiting:
                    continue
                outcomes[rank] = self._receive(rank)
                del waiting[rank]
                if outcomes[rank].status != "ok":
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting:
            outcomes[rank].trace = self._stacks(rank)
            outcomes[rank].seconds = time.monotonic() - started
        return outcomes

    def _receive(self, rank):
        process, pipe = self._members[rank]
        try:
            if pipe.poll(0):
                return pipe.recv()
        except (EOFError, ConnectionResetError):
            pass
        process.join(5)
        return Outcome(rank, "died", message=f"exit code {process.exitcode}", trace=self._read(rank, "stacks"))

    def _stacks(self, rank):
        """Ask a hung rank for the stacks of all its Python threads."""
        process, _ = self._members[rank]
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            if text := self._read(rank, "stacks"):
                return text
        return "no stack: the process doesn't answer signals"

    def _read(self, rank, kind, limit=6000):
        path = self._folder / f"{kind}.{rank}"
        return path.read_text(errors="replace")[-limit:].strip() if path.exists() else ""

    def _logs(self):
        return {rank: self._read(rank, "log", 2000) for rank in range(self.world)}


def _serve(rank, world, device, env, port, pipe, folder, options):
    """The life of a rank."""
    os.setpgid(0, 0)
    _die_with_parent()
    os.environ.update(env)
    with open(folder / f"log.{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stacks = open(folder / f"stacks.{rank}", "w")  # noqa: SIM115 (faulthandler keeps the descriptor)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    def begin():
        ctx = Context(rank, world, torch.device("cpu"))
        torch.set_num_threads(1)
        backend = "gloo"
        if device == "cuda":
            from flux_ops import shared_gpu  # now: it reads the environment

            ctx.device, backend = shared_gpu.device_and_backend(rank, world)
            if options["set_device"]:
                torch.cuda.set_device(ctx.device)
            else:
                ctx.device = torch.device("cuda", torch.cuda.current_device())
            torch.backends.cuda.matmul.allow_tf32 = True  # the data of references is exact in TF32
        if options["init_group"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                backend=backend,
                store=dist.TCPStore("127.0.0.1", port, is_master=False),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=options["group_timeout"]),
                device_id=ctx.device if backend == "nccl" and options["set_device"] else None,
            )
        return ctx

    ctx = _answer(pipe, rank, begin, keep=True)
    while ctx is not None:
        try:
            fn, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            break
        _answer(pipe, rank, lambda: fn(ctx, *args, **kwargs))  # noqa: B023 (called at once)
    os._exit(0)  # no orderly farewell: peers may be gone already


def _answer(pipe, rank, call, keep=False):
    """Run `call` and send the parent what became of it. With `keep`, the value stays here."""
    outcome, value = Outcome(rank), None
    started = time.monotonic()
    try:
        value = call()
        outcome.status, outcome.value = "ok", None if keep else value
    except BaseException as error:  # noqa: BLE001 (the parent raises it)
        outcome.status = "error"
        outcome.kinds = tuple(c.__name__ for c in type(error).__mro__)
        outcome.message = str(error)
        outcome.trace = traceback.format_exc()
    outcome.seconds = time.monotonic() - started
    sys.stdout.flush()
    try:
        pipe.send(outcome)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:  # noqa: BLE001 (a value that can't be pickled)
        pipe.send(Outcome(rank, "error", kinds=(type(error).__name__,), message=str(error), trace=repr(error)))
    return value


def _die_with_parent():
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
