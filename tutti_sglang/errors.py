"""Every error this package raises on purpose.

    TuttiError
    ├── ConfigError (ValueError)      a setting is unknown, malformed or contradicts another
    ├── StoreError (OSError)          a storage directory cannot be used
    │   ├── ForeignStoreError         … because it is not a store, or belongs to another store or format
    │   └── CapacityError             … because there is no room for even one segment
    ├── EngineError (RuntimeError)    an I/O engine cannot start or has been closed
    ├── UnsupportedError              SGLang was asked for something that this tier cannot serve
    ├── RankError                     the ranks of a server do not agree, so none of them attaches
    └── HookError                     a hook into SGLang did not take

A message says what is wrong, the likely cause and the next command. I/O errors of single objects are not exceptions:
they are misses.
"""


class TuttiError(Exception):
    """Root of all errors of this package; `hint` names the setting or command that helps."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}. {hint}" if hint else message)
        self.hint = hint


class ConfigError(TuttiError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


class StoreError(TuttiError, OSError):
    """A storage directory cannot be used."""


class ForeignStoreError(StoreError):
    """The directory is not a store, or belongs to another store or format."""


class CapacityError(StoreError):
    """There is no room for even one segment."""


class EngineError(TuttiError, RuntimeError):
    """An I/O engine cannot start or has been closed."""


class UnsupportedError(TuttiError):
    """SGLang was asked for something that this tier cannot serve."""


class RankError(TuttiError):
    """The ranks of a server do not agree, so none of them attaches."""


class HookError(TuttiError):
    """A hook into SGLang did not take."""
