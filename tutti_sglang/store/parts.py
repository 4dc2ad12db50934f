"""What an open store consists of; `opening.py` puts it together, everything else takes from it."""

import threading
from dataclasses import dataclass, field

from tutti_sglang.config import Config
from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.staging import Staging
from tutti_sglang.engine.window import Window
from tutti_sglang.metrics import Metrics
from tutti_sglang.store.accepted import Accepted
from tutti_sglang.store.admission import Admission
from tutti_sglang.store.doubts import Doubts
from tutti_sglang.store.drives import Drive
from tutti_sglang.store.hits import Hits
from tutti_sglang.store.index import Index
from tutti_sglang.store.index_drive import IndexDrive
from tutti_sglang.store.outcome import Ledger
from tutti_sglang.store.owners import Owners
from tutti_sglang.store.pins import Pins
from tutti_sglang.store.report import Reporter
from tutti_sglang.store.segments import Segments
from tutti_sglang.store.space import Space
from tutti_sglang.store.sums import SumFiles


@dataclass(frozen=True)
class Parts:
    """`index_dir`: descriptor of the index directory; `engine_note`: which engine, and why not a better one; `spaces`:
    by number; `gone`: set once the index was deleted under us, and all there is left to do is to miss."""

    config: Config
    index_dir: int
    index: Index
    index_drive: IndexDrive
    owners: Owners
    drives: dict[int, Drive]
    engine: Engine
    engine_note: str
    staging: Staging
    segments: Segments
    sums: SumFiles
    metrics: Metrics
    reporter: Reporter
    ledger: Ledger
    accepted: Accepted
    doubts: Doubts
    hits: Hits
    admission: Admission
    window: Window
    pins: Pins = field(default_factory=Pins)
    spaces: dict[int, Space] = field(default_factory=dict)
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def capacity(self) -> int:
        """Bytes that the store may use, on all drives."""
        return sum(drive.limit for drive in self.drives.values())

    @property
    def verifying(self) -> bool:
        """Whether objects carry checksums and are compared with them."""
        return self.config.checksum == "on"

    @property
    def syncing(self) -> bool:
        """Whether data is on the disk before its record is published."""
        return self.config.fsync != "none"
