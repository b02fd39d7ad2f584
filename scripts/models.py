"""headrace models: the default models on this machine."""

import sys

from runtime import model_files
from runtime.settings import Settings


def pull(settings: Settings) -> int:
    """Fetches what is missing, saying so on stderr."""
    for download in model_files.DEFAULTS:
        folder = model_files.ensure(download, lambda line: print(line, file=sys.stderr, flush=True), settings.models)
        print(folder)
    return 0


def show(settings: Settings) -> int:
    """Prints one line a model: its name, whether it is here, its folder."""
    for download in model_files.DEFAULTS:
        here = model_files.is_whole(settings.models / download.name, download)
        print(f"{download.name}\t{'here' if here else 'missing'}\t{settings.models / download.name}")
    return 0
