"""Why a model file cannot be loaded. All of these are the operator's to mend: another file, or a whole one.

WeightsError
├── DamagedFile                 missing, truncated, not a model, or a size that contradicts another
├── UnsupportedModel            an architecture or feature that the model code does not compute
├── UnsupportedQuantisation     a tensor stored in a form that is not read
└── TensorsMismatch             tensors missing, left over or of the wrong shape
"""

from collections.abc import Iterable
from pathlib import Path


class WeightsError(Exception):
    """A model file cannot be loaded; the message names the file and what is wrong with it."""


class DamagedFile(WeightsError):
    """The file ends early, is not there, is no model file, or contradicts itself."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is damaged or not a model file: {what}")


class UnsupportedModel(WeightsError):
    """The file is fine; the model in it is of a kind that is not computed here."""

    def __init__(self, path: Path, what: str, supported: Iterable[str] = ()) -> None:
        known = ", ".join(supported)
        super().__init__(f"{path}: {what} is not supported" + (f"; supported: {known}" if known else ""))


class UnsupportedQuantisation(WeightsError):
    """A tensor is stored in a form that is not read."""

    def __init__(self, path: Path, tensor: str, form: str) -> None:
        super().__init__(f"{path}: tensor {tensor} is stored as {form}, which is not read")


class TensorsMismatch(WeightsError):
    """The tensors in the file are not the ones that the model needs."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
