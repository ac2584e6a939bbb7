"""Replace a program by its artifact, once that is compiled, computes the same and is faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onnxtrain.errors import GraphError
from onnxtrain.execute.boundary import RandomState, random_state
from onnxtrain.execute.inductor_program.call import ArtifactCall, load
from onnxtrain.execute.inductor_program.request import ArgumentSpec, ProgramRequest
from onnxtrain.execute.inductor_program.split import Split, split
from onnxtrain.execute.kernel_annotations import inductor_compiles
from onnxtrain.execute.program import Program, Results, Run, drain
from onnxtrain.execute.regions.build import build, refuse
from onnxtrain.execute.tolerance import differs_grossly
from onnxtrain.log import LOG, warn
from onnxtrain.native import background
from onnxtrain.native.build import BuildError
from onnxtrain.options import Options
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat.tensors import storage_id

_CALLS = 20  # of a program before it is compiled
MAKES_PROGRAMS = "onnxtrain compiles "  # begins the names of threads that do
_TRIALS = 10  # timed calls of the artifact and of the program


def watch(
    program: Program,
    options: Options,
    device: torch.device,
    make_views: Callable[[Part], Program],
    frees_arguments: bool,
) -> InductorProgram | None:
    """Run a program by Inductor, if it compiles whole programs (`inductor_compiles`).

    Args:
        program: its `run` is replaced.
        options: see `onnxtrain.options`.
        device: that it runs on.
        make_views: makes the program of `Split.views`.
        frees_arguments: whether the program holds the only references to its arguments, as in backward.

    Returns:
        None if the program stays as it is.
    """
    if inductor_compiles(options, device) != "programs":
        return None
    try:
        parts = split(program.part)
    except GraphError as reason:
        LOG.info("%s is not compiled by Inductor: %s", program.filename, reason)
        return None
    return InductorProgram(program, parts, device, make_views, frees_arguments)


class InductorProgram:
    """The successive `run` functions of a program, numbered as in the package's docstring.

    Attributes:
        call: the call of the artifact, once it is compiled.
        chosen: "artifact" or "program", once the two have been timed; None before.
        refused: why the program stays as it is; "" if it does not.
    """

    def __init__(
        self,
        program: Program,
        parts: Split,
        device: torch.device,
        make_views: Callable[[Part], Program],
        frees_arguments: bool,
    ) -> None:
        self._frees_arguments = frees_arguments
        self._program, self._parts, self._device, self._make_views = program, parts, device, make_views
        self._ordinary: Run = program.run
        self._run: Run = self._counting
        self._num_calls = 0
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()  # the module may be called by several threads
        self._seconds: dict[str, list[float]] = {"artifact": [], "program": []}
        self.call: ArtifactCall | None = None
        self.chosen: str | None = None
        self.refused = ""
        program.run = self.run

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        return self._run(tensors, sizes_in)

    # 1: count calls

    def _counting(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        self._num_calls += 1
        if self._num_calls >= _CALLS:
            self._start(tensors, tuple(sizes_in))
        return self._ordinary(drain(tensors), sizes_in)

    # 2: compile

    def _start(self, tensors: Sequence[torch.Tensor], sizes_in: Sequence[int]) -> None:
        with self._lock:
            if self.thread is None:
                self._run = self._ordinary
                typical = [ArgumentSpec.from_tensor(tensor) for tensor in tensors]
                name = f"{MAKES_PROGRAMS}{self._program.filename}"
                self.thread = threading.Thread(target=self._prepare, args=(typical, sizes_in), name=name, daemon=True)
                self.thread.start()

    def _prepare(self, arguments: Sequence[ArgumentSpec], sizes_in: Sequence[int]) -> None:
        """Compile the program, off the main thread: it takes minutes, of which little is work of this process."""
        request: ProgramRequest | None = None
        try:
            with background.throttled():
                request = ProgramRequest(self._parts.computed, arguments, sizes_in, self._device)
            ((_, library),) = build([request])
            if isinstance(library, BuildError):
                raise library
            artifact, stored = load(library)  # the first time, this imports Inductor
            with background.throttled():
                views = self._make_views(self._parts.views).run
            self.call = ArtifactCall(self._parts, request.layout, artifact, stored, views)
            self._run = self._comparing
        except (BuildError, GraphError) as reason:
            self.refused = str(reason)
            if request is None:
                LOG.info("%s is not compiled by Inductor: %s", self._program.filename, reason)
            else:
                refuse(request, self.refused)

    # 3: compare

    def _comparing(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        """Run both on the same arguments and random state; the results are the program's."""
        tensors = list(tensors)
        assert self.call is not None
        with self._lock:
            if self.chosen is not None or self.refused or not self.call.takes(tensors, sizes_in):
                return self._ordinary(drain(tensors), sizes_in)
            before = random_state(tensors)
            try:
                results, sizes_out = self.call.run(list(tensors), sizes_in)
                after = random_state(tensors)
                _set_random_state(before)
                expected, expected_sizes = self._ordinary(tensors, sizes_in)
                difference = _difference(results, expected, tensors)
                if not difference and (sizes_out != expected_sizes or not _same_state(after, random_state(tensors))):
                    difference = "it computes other sizes, or leaves the random generators in another state"
            except Exception as error:  # noqa: BLE001  # of a program that may be wrong, or too little memory for both
                results = expected = ()
                self._refuse(f"{type(error).__name__}: {error}")
                _set_random_state(before)
                return self._ordinary(drain(tensors), sizes_in)
            if difference:
                self._refuse(difference)
            else:
                self._run = self._timing
        return expected, expected_sizes

    def _refuse(self, reason: str) -> None:
        self.refused, self.call, self._run = reason, None, self._ordinary
        warn(f"{self._program.filename} is not run by Inductor: {reason}")

    # 4: time both

    def _timing(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        call = self.call
        if call is None or not call.takes(tensors, sizes_in):
            return self._ordinary(drain(tensors), sizes_in)
        by_artifact, by_program = self._seconds.values()
        is_artifact = len(by_program) >= len(by_artifact)
        start = _time_on(self._device)
        run = self._by_artifact if is_artifact else self._drained
        result = run(tensors, sizes_in)
        (by_artifact if is_artifact else by_program).append(_time_on(self._device) - start)
        if len(by_program) >= _TRIALS:
            self._choose()
        return result

    def _choose(self) -> None:
        by_artifact, by_program = map(min, self._seconds.values())
        LOG.info(
            "%s: %.2f ms compiled by Inductor, %.2f ms as PyTorch's operators",
            self._program.filename,
            by_artifact * 1e3,
            by_program * 1e3,
        )
        self.chosen = "artifact" if by_artifact < by_program else "program"
        self._run = self._compiled if self.chosen == "artifact" else self._ordinary

    # 5: the artifact

    def _compiled(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        call = self.call
        if call is None or not call.takes(tensors, sizes_in):
            return self._ordinary(drain(tensors), sizes_in)
        return self._by_artifact(tensors, sizes_in)

    def _by_artifact(self, tensors: list[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        """Run the artifact. After an error it is not used any more; if the arguments still exist, the program runs."""
        assert self.call is not None
        held = () if self._frees_arguments else tuple(tensors)
        try:
            return self.call.run(tensors, sizes_in)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
            if not held:
                raise
            return self._ordinary(held, sizes_in)

    def _drained(self, tensors: list[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        return self._ordinary(drain(tensors), sizes_in)


def _time_on(device: torch.device) -> float:
    """Return the time at which the device has done all earlier work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    for device, on_gpu in state[1]:
        torch.cuda.set_rng_state(on_gpu, device)


def _same_state(a: RandomState, b: RandomState) -> bool:
    pairs = [(a[0], b[0]), *((x, y) for (_, x), (_, y) in zip(a[1], b[1], strict=True))]
    return all(torch.equal(x, y) for x, y in pairs)


def _difference(results: Sequence[Any], expected: Sequence[Any], inputs: Sequence[torch.Tensor]) -> str:
    """Return how the artifact's results differ from the program's beyond rounding; "" if they do not."""
    own = {storage_id(tensor) for tensor in inputs}
    finite = [t[t.isfinite()] for t in expected if _is_float(t)]
    largest = max((t.abs().max().item() for t in finite if t.numel()), default=0.0)
    eps = max((torch.finfo(t.dtype).eps for t in (*expected, *inputs) if _is_float(t)), default=0.0)
    seen: dict[int, int] = {}
    for index, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got is None or want is None:
            if got is not want:
                return f"result {index} is missing"
            continue
        if (got.shape, got.stride(), got.dtype) != (want.shape, want.stride(), want.dtype):
            return (
                f"expected result {index} of {want.dtype} {list(want.shape)} with strides {want.stride()}, "
                f"got {got.dtype} {list(got.shape)} with strides {got.stride()}"
            )
        shares = storage_id(got) if storage_id(got) in own else seen.setdefault(storage_id(got), index)
        shared = storage_id(want) if storage_id(want) in own else seen.setdefault(storage_id(want), index)
        if want.numel() and shares != shared:
            return f"result {index} shares memory with another result or an argument"
        if differs_grossly(got, want, largest, eps):
            return f"result {index} differs"
    return ""


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
