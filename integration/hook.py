"""One hook into SGLang, as the table in `hooks` and each module that adds to it write it down."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType


class Hook(NamedTuple):
    """`parameters`: those of the target that the hook relies on, in order."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    parameters: tuple[str, ...]
