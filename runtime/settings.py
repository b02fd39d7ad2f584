"""Every setting of every process: HEADRACE_* variables, then headrace.toml, then the defaults below.

A key that no setting has is an error that names the nearest one: a typing mistake must not turn a rail off in silence.
"""

import difflib
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings import SettingsError as DictSettingError

from schemas.envelope import Action, RuleGroup

PREFIX = "HEADRACE_"
# Variables with our prefix that are not settings: the set-up scripts and the tests read them.
NOT_SETTINGS = ("HEADRACE_TEST_", "HEADRACE_TORCH_")


DEFAULT_OUTPUT_RAILS: dict[RuleGroup, Action] = {"secrets": "redact", "personal": "redact"}


class SettingsError(Exception):
    """A setting is unknown or has a value that cannot be; the message names it and what is right."""


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headrace"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


class Settings(BaseSettings):
    """What an operator can set; each field is HEADRACE_<NAME> in the environment and <name> in headrace.toml."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, toml_file="headrace.toml", extra="forbid", frozen=True)

    # where things are
    home: Path = Path(".headrace")  # state: broker store, passages, logs
    models: Path = Field(default_factory=lambda: _cache_folder() / "models")
    nats_url: str = "nats://127.0.0.1:4222"
    broker_memory_mb: int = Field(default=1024, ge=64)  # of the embedded broker: token logs live there
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    # the gateway
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    listen_fd: int | None = Field(default=None, ge=3)  # an open listener of the supervisor's, in place of host and port
    deadline_ms: int = Field(default=600_000, ge=1)  # of a request that names none
    keepalive_s: float = Field(default=5.0, gt=0)  # a silent stream gets a comment this often
    requests_max: int = Field(default=1000, ge=1)  # in flight at one gateway

    # rails: what the server does at least; a request may ask for more, never for less
    rails_input: dict[RuleGroup, Action] = Field(default_factory=dict)
    rails_output: dict[RuleGroup, Action] = Field(default_factory=lambda: dict(DEFAULT_OUTPUT_RAILS))

    # the engine
    model: str = Field(default="smollm2-135m", min_length=1, max_length=200)  # the id that clients name
    model_path: Path | None = None  # None: the default model
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    threads: int | None = Field(default=None, ge=1)  # None: all cores
    cache_tokens: int = Field(default=32_768, ge=256)  # positions of the paged key-value cache
    slots: int = Field(default=32, ge=1, le=1024)  # sequences that a step may hold
    step_tokens: int = Field(default=512, ge=16)  # token budget of a step

    # headrace up
    engines: int = Field(default=1, ge=1, le=64)  # engine processes on this machine: two outlive each other

    # every worker
    worker_slots: int = Field(default=256, ge=1)  # requests that a rails, guard or retrieval worker holds at once
    drain_s: float = Field(default=20.0, gt=0)  # how long a process that was told to stop finishes its work

    @field_validator("home", "models", mode="after")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then headrace.toml."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @classmethod
    def load(cls, **flags: object) -> Self:
        """The settings in force; SettingsError names an unknown key or a wrong value. A flag that is None was not given."""
        _refuse_unknown(cls)
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]
        except DictSettingError as error:
            raise SettingsError(f"{error}; a setting with parts is written as JSON") from error
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "settings"
            raise SettingsError(f"setting {name}: {first['msg']} (got {first.get('input')!r})") from error

    def environment(self) -> dict[str, str]:
        """These settings as variables for a child process."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {PREFIX + name.upper(): _as_variable(value) for name, value in values.items()}


def _as_variable(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _refuse_unknown(cls: type[Settings]) -> None:
    known = set(cls.model_fields)
    named = [
        (name, name[len(PREFIX) :].lower())
        for name in os.environ
        if name.startswith(PREFIX) and not name.startswith(NOT_SETTINGS)
    ]
    named += [(f"headrace.toml: {key}", key) for key in _toml_keys()]
    for shown, key in named:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise SettingsError(f"unknown setting {shown}; the nearest known one is {near[0]}")


def _toml_keys() -> list[str]:
    path = Path("headrace.toml").resolve()
    try:
        return list(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        return []
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
