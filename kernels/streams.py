"""Pages between host memory and paged pools on a stream of their own: all is enqueued, and events say when it is over.

The same code runs on a GPU and, without any overlap, on the CPU, whose streams and events torch has for such use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_sglang import memory
from tutti_sglang.errors import EngineError
from tutti_sglang.kernels.pack import Pack, Paged, TorchPack, TritonPack
from tutti_sglang.memory import Addresses

_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class Mark:
    """A point on a stream. What it `keeps` lives as long."""

    def __init__(self, event: Any, keeps: object = None) -> None:
        self._event, self._keeps = event, keeps

    def wait(self) -> None:
        """What is enqueued next on the caller's current stream comes after it. Does not wait."""
        self._event.wait()

    def done(self) -> bool:
        """Whether it is over."""
        return bool(self._event.query())


class PoolStream:
    """For one thread at a time. Every call makes the device current on its thread: the driver knows none there."""

    def __init__(self, device: torch.device, make: type[Pack] | None = None) -> None:
        """`make`: instead of Triton's kernel on a GPU, and of its twin elsewhere."""
        self.device = device
        self._make = make or (TritonPack if device.type == "cuda" else TorchPack)
        self._module: Any = torch.get_device_module(device)
        with self._here():
            self._stream = self._module.Stream()

    def pack(self, tensors: Sequence[Paged]) -> Pack:
        """What moves the pages of a pool."""
        with self._on_it():
            return self._make(tensors, self.device)

    def follow(self, *streams: Any) -> None:
        """What is enqueued from now on comes after what the caller's current stream and these hold by now."""
        with self._here():
            for stream in (self._module.current_stream(), *streams):
                if stream is not None:
                    self._stream.wait_stream(stream)

    def pages(self, indices: torch.Tensor, page_size: int) -> torch.Tensor:
        """(n * page_size,) token slots of whole pages → (n,) page numbers; nothing comes back to the host."""
        with self._on_it():
            return indices.reshape(-1, page_size)[:, 0] // page_size

    def some(self, pages: torch.Tensor, which: npt.NDArray[np.int64]) -> torch.Tensor:
        """Those of (n,) page numbers."""
        if len(which) == len(pages):
            return pages
        with self._on_it():
            return pages[torch.from_numpy(which).to(self.device)]

    def upload(self, rows: Addresses) -> torch.Tensor:
        """(n, T) addresses, where a kernel finds them."""
        host = torch.from_numpy(np.ascontiguousarray(rows).view(np.int64).copy())
        with self._on_it():
            if self.device.type == "cuda":
                host = host.pin_memory()  # else the copy would wait
            return host.to(self.device, non_blocking=True)

    def scatter(self, pack: Pack, pages: torch.Tensor, tensors: slice, source: torch.Tensor) -> Mark:
        """Host memory at `source` ((n, T), uploaded) → those tensors of the pages. One launch."""
        with self._on_it():
            pack.scatter(pages, source[:, tensors], tensors.start, sums=False)
            event = self._module.Event()
            event.record(self._stream)
        return Mark(event, (pages, source))

    def land(
        self, pack: Pack, pages: torch.Tensor, tensors: slice, source: torch.Tensor, *, sums: bool
    ) -> npt.NDArray[np.uint64]:
        """Memory of the device at `source` ((n, t), uploaded) → those tensors of the pages. Returns when they are
        there: (n, t, blocks) block sums of the very bytes, as of Pack; without `sums` there are no blocks."""
        with self._on_it():
            found = pack.scatter(pages, source, tensors.start, sums=sums).cpu()
            self._await()
        return np.asarray(found.numpy().view(np.uint64))

    def fill(self, region: torch.Tensor, rows: Addresses, source: Addresses, sizes: npt.NDArray[np.int64]) -> None:
        """Host memory at `source` → `rows` ((n, t) addresses, (t,) bytes each) within `region`, memory of the device as
        bytes. Returns when they are there; one copy for each."""
        with self._on_it():
            for targets, sources in zip(rows.tolist(), source.tolist(), strict=True):
                for target, start, size in zip(targets, sources, sizes.tolist(), strict=True):
                    at = target - region.data_ptr()
                    region[at : at + size].copy_(torch.from_numpy(memory.view(start, size)))
            self._await()

    def gather(self, pack: Pack, pages: torch.Tensor, target: torch.Tensor) -> None:
        """All tensors of the pages → host memory at `target`. Returns when they are there."""
        with self._on_it():
            pack.gather(pages, target, sums=False)
            self._await()

    def _await(self) -> None:
        """On the stream: what is enqueued by now is over."""
        event = self._module.Event()
        event.record(self._stream)
        event.synchronize()

    def _here(self) -> Any:
        return self._module.device(self.device) if self.device.type == "cuda" else self._module.stream(None)

    def _on_it(self) -> Any:
        return self._module.stream(self._stream)  # of CUDA: makes its device current too


def register(device: torch.device, address: int, size: int) -> None:
    """Let kernels of `device` read and write host memory. EngineError says what the driver said: without it nothing
    works, and nothing else is tried."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the first call of a process makes the context
        status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if status not in (0, _ALREADY_REGISTERED):
        raise EngineError(
            f"CUDA does not pin {size} bytes of host memory: error {status} of cudaHostRegister",
            "Lower preload and staging_size, or raise `ulimit -l`",
        )


def unregister(device: torch.device, address: int) -> None:
    """No kernel is given this memory any more."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)


def check(stream: PoolStream, pack: Pack, rows: Addresses, sizes: npt.NDArray[np.int64]) -> None:
    """Move page 0, which is nobody's, there and back through the registered memory at (2, T) `rows`. EngineError when
    other bytes come back."""
    first, second = rows[:1], rows[1:]
    rng = np.random.default_rng(0)
    for address, size in zip(first[0].tolist(), sizes.tolist(), strict=True):
        memory.view(address, size)[:] = rng.integers(256, size=size, dtype=np.uint8)
    page = torch.zeros(1, dtype=torch.int64, device=stream.device)
    stream.follow()
    stream.scatter(pack, page, slice(0, len(sizes)), stream.upload(first))
    stream.gather(pack, page, stream.upload(second))
    for source, came, size in zip(first[0].tolist(), second[0].tolist(), sizes.tolist(), strict=True):
        if not (memory.view(source, size) == memory.view(came, size)).all():
            raise EngineError(f"Bytes that went through {stream.device} came back as others")
