"""The option reuse_memory: the next step reuses a program's memory, and no other tensors are allocated from it."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.reused_memory import LIBRARY
from tests.limits import WAIT_LIMIT_S
from tests.reference import assert_matches

MB = 1 << 20

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    assert LIBRARY.wait(), LIBRARY.failure


_BEFORE = SimpleNamespace(in_use=0)


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Each test begins without free blocks, and does not count blocks that tests of other files still use."""
    gc.collect()
    LIBRARY.functions.trim()
    _BEFORE.in_use = 0
    _BEFORE.in_use = held()[0]
    LIBRARY.functions.add_program()
    yield
    gc.collect()
    LIBRARY.functions.remove_program()


def held() -> tuple[int, int]:
    """The bytes of blocks in use since the test began, and of free blocks."""
    counts = (ctypes.c_int64 * 2)()
    LIBRARY.functions.count_bytes(ctypes.addressof(counts), ctypes.addressof(counts) + 8)
    return counts[0] - _BEFORE.in_use, counts[1]


def allocator() -> int:
    """The address of PyTorch's current CPU allocator."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    get = c10._ZN3c1015GetCPUAllocatorEv
    get.restype = ctypes.c_void_p
    address: int = get()
    return address


class Wide(nn.Module):
    """Activations of 0.5 MB for each row of 16."""

    def __init__(self, width: int = 8192) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).exp())


def step(module: nn.Module, rows: int = 64) -> torch.Tensor:
    module.zero_grad()
    y = module(torch.randn(rows, 16))
    y.square().mean().backward()
    return y


def inside(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor allocated while a program runs."""
    LIBRARY.functions.begin_run()
    try:
        return make()
    finally:
        LIBRARY.functions.end_run()


def test_the_next_step_reuses_a_steps_memory() -> None:
    module = ORTModule(Wide(), process_wide="reuse_memory")
    for _ in range(6):
        step(module)
    in_all = sum(held())
    assert held()[1] > 2 * MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(module)
    assert sum(held()) == in_all
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # a step writes to 1500 pages of 4 KB


def test_memory_is_returned_with_the_module() -> None:
    module = ORTModule(Wide(), process_wide="reuse_memory")
    for _ in range(3):
        step(module)
    assert held()[1] > 0
    del module
    gc.collect()
    assert held() == (0, 0)


def test_results_of_a_program_stay_valid() -> None:
    module = ORTModule(Wide(), process_wide="reuse_memory")
    module(torch.randn(64, 16))
    kept = []
    for _ in range(8):
        module.zero_grad()
        x = torch.randn(512, 16, requires_grad=True)
        y = module(x)
        y.sum().backward()
        tensors = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
        kept.append((tensors, [t.clone() for t in tensors]))
    for tensors, copies in kept:
        assert all(map(torch.equal, tensors, copies))


def test_tensors_outlive_the_module() -> None:
    module = ORTModule(Wide(), process_wide="reuse_memory")
    step(module)
    y = inside(lambda: torch.full((MB,), 3.0))
    del module
    gc.collect()
    assert held()[0] >= 4 * MB
    assert (y == 3).all()
    del y
    assert held()[0] == 0


def test_tensors_outside_programs_are_from_pytorchs_allocator() -> None:
    inside(lambda: torch.empty(MB))
    assert held()[1] >= 4 * MB
    before = held()
    other = torch.empty(MB)
    assert held() == before
    del other
    assert held() == before


def test_small_tensors_are_from_pytorchs_allocator() -> None:
    tensors = [inside(lambda: torch.empty(1000)), inside(lambda: torch.empty(0))]
    assert held() == (0, 0)
    del tensors


@pytest.mark.parametrize("width", [8, 8192])
def test_programs_of_small_tensors_do_not_use_the_allocator(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []
    functions = LIBRARY.functions
    both = SimpleNamespace(**{**vars(functions), "begin_run": lambda: entered.append(True), "end_run": lambda: None})
    monkeypatch.setattr(LIBRARY, "functions", both)
    step(ORTModule(Wide(width), process_wide="reuse_memory"))
    assert len(entered) == (2 if width > 8 else 0)


@pytest.mark.parametrize("options", [{}, {"kernels": "pytorch", "process_wide": "reuse_memory"}])
def test_without_the_option_or_compiled_kernels_the_allocator_is_not_installed(options: dict[str, bool]) -> None:
    LIBRARY.functions.remove_program()
    before = allocator()
    module = ORTModule(Wide(), **options)
    for _ in range(3):
        step(module)
    assert allocator() == before
    LIBRARY.functions.add_program()
    assert held() == (0, 0)


def test_the_allocator_is_removed_with_the_last_module_and_tensor() -> None:
    LIBRARY.functions.remove_program()
    before = allocator()
    modules = [ORTModule(Wide(), process_wide="reuse_memory") for _ in range(2)]
    step(modules[0])
    ours = allocator()
    assert ours != before
    step(modules[1])
    modules.pop()
    gc.collect()
    assert allocator() == ours
    kept = inside(lambda: torch.full((MB,), 3.0))
    modules.clear()
    gc.collect()
    assert allocator() == ours
    assert (kept == 3).all()
    del kept
    assert allocator() == before
    step(again := ORTModule(Wide(), process_wide="reuse_memory"))
    assert allocator() == ours
    del again
    gc.collect()
    assert allocator() == before
    LIBRARY.functions.add_program()


def test_blocks_are_reused_for_slightly_smaller_tensors() -> None:
    del_me = inside(lambda: torch.empty(10 * MB // 4))
    address = del_me.data_ptr()
    del del_me
    assert inside(lambda: torch.empty(9 * MB // 4)).data_ptr() == address
    assert held()[1] >= 10 * MB


def test_varying_sizes_do_not_accumulate_memory() -> None:
    """At most 5/4 of the peak in use and 16 MB, whatever the sizes were."""
    most = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        counts = torch.randint(1, 30, (4,), generator=generator).tolist()
        tensors = [inside(lambda c=c: torch.empty(c * MB // 4)) for c in counts]
        most = max(most, sum(t.nbytes for t in tensors))
        assert sum(held()) <= 1.25 * most + 16 * MB + 4 * 2**13
        del tensors


def test_idle_blocks_are_returned() -> None:
    inside(lambda: torch.empty(20 * MB // 4))
    assert held()[1] >= 20 * MB
    for _ in range(100):
        inside(lambda: torch.empty(MB // 4))
    assert held()[1] < 2 * MB


def test_an_error_in_a_program_ends_its_run() -> None:
    def fail() -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        inside(fail)
    torch.empty(MB)
    assert held() == (0, 0)


def test_out_of_memory_is_pytorchs_error() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        inside(lambda: torch.empty(1 << 60, dtype=torch.int8))
    inside(lambda: torch.empty(MB))
    assert held()[1] >= 4 * MB


def test_other_uses_of_a_storage() -> None:
    x = inside(lambda: torch.arange(MB, dtype=torch.float32))
    x.untyped_storage().resize_(8 * MB)
    assert x[MB - 1] == MB - 1
    x.share_memory_()
    assert x[7] == 7
    y = inside(lambda: torch.ones(MB))
    array = y.numpy()
    del y
    assert array.sum() == MB


def test_convolutions_inside_and_outside_programs() -> None:
    """OneDNN allocates memory from PyTorch's allocator, and may free it at any time."""
    eager = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())
    ours = ORTModule(eager, process_wide="reuse_memory")
    for size in (20, 33, 20, 47):
        x = torch.randn(4, 3, size, size)
        assert_matches(ours(x), eager, x)
        ours(x).sum().backward()


def test_threads() -> None:
    modules = [ORTModule(Wide(), process_wide="reuse_memory") for _ in range(3)]
    results: list[torch.Tensor] = []

    def work(module: nn.Module) -> None:
        torch.manual_seed(1)
        results.extend(step(module, rows).detach() for rows in (16, 64, 32, 48) * 5)

    threads = [threading.Thread(target=work, args=(m,)) for m in modules]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 60
    assert all(t.isfinite().all() for t in results)
    results.clear()  # on another thread than made them
    modules.clear()
    gc.collect()
    assert held() == (0, 0)


def test_a_forked_child_can_allocate() -> None:
    x = inside(lambda: torch.ones(8192))  # small enough for one thread: OpenMP's others are not in the child
    child = os.fork()
    if child == 0:
        del x
        y = inside(lambda: torch.ones(8192))
        os._exit(0 if y.sum() == 8192 and held()[0] > 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert x.sum() == 8192


def test_a_profiler_sees_the_tensors() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        x = inside(lambda: torch.empty(MB))
        del x
    sizes = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert (sizes["aten::empty"], sizes["[memory]"]) == (4 * MB, -4 * MB)


@pytest.mark.slow
def test_a_process_ends_with_tensors_alive() -> None:
    source = (
        "import torch\n"
        "from onnxtrain.execute.reused_memory import LIBRARY\n"
        "assert LIBRARY.wait()\n"
        "LIBRARY.functions.add_program()\n"
        "LIBRARY.functions.begin_run()\n"
        "x = torch.ones(1 << 20)\n"
        "print(x.sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1048576.0\n"), done.stderr
