"""A trainer beside a server, which gets new weights from it by each of SGLang's routes."""

import base64
import contextlib
import pickle
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.integration.server import Server
from tutti_sglang.integration.launch import free_port

GROUP = "trainer"


class Trainer:
    """Sends weights to a server by each of SGLang's routes."""

    def __init__(self, server: Server, checkpoint: Path) -> None:
        self._server, self._checkpoint = server, checkpoint
        self._group: Any = None

    def update(self, route: str, **fields: Any) -> tuple[int, str]:
        """With what lies in the checkpoint now. `fields`: flush_cache, weight_version. The answer to the update."""
        return {"disk": self._disk, "tensor": self._tensor, "distributed": self._distributed, "ipc": self._ipc}[route](
            fields
        )

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return self._server.ask("POST", path, body)

    def _tensors(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self._checkpoint / "model.safetensors")

    def _disk(self, fields: dict[str, Any]) -> tuple[int, str]:
        return self._post("/update_weights_from_disk", {"model_path": str(self._checkpoint), **fields})

    def _ipc(self, fields: dict[str, Any]) -> tuple[int, str]:
        handles = {f"GPU-{platform.machine()}": str(self._checkpoint / "model.safetensors")}
        return self._post("/update_weights_from_ipc", {"zmq_handles": handles, **fields})

    def _tensor(self, fields: dict[str, Any]) -> tuple[int, str]:
        payload = base64.b64encode(pickle.dumps([*self._tensors().items()])).decode()
        with self._session():
            return self._post("/update_weights_from_tensor", {"serialized_named_tensors": [payload], **fields})

    def _distributed(self, fields: dict[str, Any]) -> tuple[int, str]:
        self._group = self._group or self._join()
        tensors = self._tensors()
        shapes = [[*tensor.shape] for tensor in tensors.values()]
        body = {"names": [*tensors], "dtypes": ["float32"] * len(tensors), "shapes": shapes, "group_name": GROUP}
        with self._session(), _beside(lambda: self._post("/update_weights_from_distributed", body | fields)) as answer:
            for tensor in tensors.values():
                torch.distributed.broadcast(tensor, src=0, group=self._group)
        return answer[0]

    def _join(self) -> Any:
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        body = place | {"group_name": GROUP, "backend": "gloo"}
        with _beside(lambda: self._post("/init_weights_update_group", body)) as answer:
            address = f"tcp://127.0.0.1:{port}"
            group = init_custom_process_group("gloo", address, world_size=2, rank=0, group_name=GROUP)
        assert answer[0][0] == 200, answer
        return group

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        assert self._post("/begin_weight_update", {})[0] == 200
        yield
        assert self._post("/end_weight_update", {})[0] == 200


@contextlib.contextmanager
def _beside(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """What `call` returned in another thread, once the block has ended."""
    answer: list[Any] = []
    thread = threading.Thread(target=lambda: answer.append(call()))
    thread.start()
    yield answer
    thread.join()
