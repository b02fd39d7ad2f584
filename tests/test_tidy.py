"""The repository keeps its own rules: import directions, homes of libraries, files that somebody uses, no machine's paths."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "runtime", "gateway", "workers", "scripts")
# Who may import whom; each worker is a package of its own here.
ALLOWED = {
    "schemas": {"schemas"},
    "runtime": {"schemas", "runtime"},
    "gateway": {"schemas", "runtime", "gateway"},
    "workers.engine": {"schemas", "runtime", "workers.engine"},
    "workers.retrieval": {"schemas", "runtime", "workers.retrieval"},
    "workers.guardrail": {"schemas", "runtime", "workers.guardrail"},
    "scripts": {*PACKAGES, "workers.engine", "workers.retrieval", "workers.guardrail"},
}
# Libraries that live in one place.
HOMES = {
    "nats": {"runtime/nats_bus.py", "runtime/nats_pull.py", "runtime/streams.py"},
    "weaviate": {"workers/retrieval/store_weaviate.py"},
    "lancedb": {"workers/retrieval/store_lancedb.py"},
    "flash_attn": {"workers/engine/attention/flash.py"},
}
PURE_ENGINE = ("request", "blocks", "prefixes", "waiting", "scheduler", "plan", "detokenizer", "finish")
REGISTRIES = ("pypi" + ".org", "python" + "hosted", "registry" + ".npmjs", "deb" + ".debian")


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "workers" and len(parts) > 1 else parts[0]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_run_one_way(path: Path) -> None:
    own = package_of(module_of(path))
    for name in imports_of(path):
        if name.split(".")[0] in PACKAGES and own in ALLOWED:
            assert package_of(name) in ALLOWED[own] or name == "workers", f"{path} imports {name}"


@pytest.mark.parametrize("library", HOMES)
def test_a_library_lives_in_its_home(library: str) -> None:
    users = {str(p.relative_to(ROOT)) for p in sources() if any(n.split(".")[0] == library for n in imports_of(p))}
    assert users <= HOMES[library]


@pytest.mark.parametrize("name", PURE_ENGINE)
def test_a_pure_engine_file_imports_no_torch(name: str) -> None:
    assert not {n.split(".")[0] for n in imports_of(ROOT / "workers" / "engine" / f"{name}.py")} & {"torch", "numpy"}


def test_every_file_says_what_it_is() -> None:
    empty = [str(p) for p in sources() if p.name != "__init__.py" and not ast.get_docstring(ast.parse(p.read_text()))]
    assert empty == []


def test_every_module_is_used() -> None:
    """A module that no other file names is dead."""
    named = "\n".join(p.read_text() for p in [*sources(), *sorted((ROOT / "tests").rglob("*.py")), ROOT / "pyproject.toml"])
    dead = [module_of(p) for p in sources() if p.name != "__init__.py" and not re.search(rf"\b{p.stem}\b", _without(p, named))]
    assert dead == []


def _without(path: Path, text: str) -> str:
    return text.replace(path.read_text(), "")


def test_no_registry_and_no_machine_is_named() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_bytes().decode(errors="replace")
        assert not any(host in text for host in REGISTRIES), name
        assert not re.search(r"/work/(main|shared)|/root/", text) or name == "tests/test_tidy.py", name
