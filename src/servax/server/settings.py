"""What a server can be told: on the command line, in a file, in the environment; the first that says it is heard."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from servax.core.errors import ServaxError, UsageError
from servax.core.units import duration_text, parse_duration, parse_size, size_text

PREFIX = "SERVAX_"
"""Of environment variables: `SERVAX_MAX_BODY` is `--max-body`."""

FILE_VARIABLE = "SERVAX_CONFIG"
"""Names the file where `--config` does not."""

_SECRET = ("api_key", "admin_key")
"""Settings that only the environment gives: others are read by whoever lists processes or files."""


def _parsed(parse: Callable[[Any], Any]) -> BeforeValidator:
    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except ServaxError as error:
            raise ValueError(f"{error.what}; expected {error.expected}") from error

    return BeforeValidator(validate)


def _list(value: Any) -> Any:
    """A list, also from one text: `a,b`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _words(value: Any) -> Any:
    """A list, also from one text with spaces, where commas have a meaning of their own: `batch=1,8 length=32`."""
    return value.split() if isinstance(value, str) else value


def _delay(value: Any) -> float | None:
    return None if value is None or value == "adaptive" else parse_duration(value)


def _period(value: Any) -> float | None:
    """A time in which something has to happen: with none at all it never could."""
    if value is None:
        return None
    seconds = parse_duration(value)
    if not seconds > 0:
        raise UsageError("the time has to be above 0", expected="such as 30s")
    return seconds


def _origin(value: str) -> str:
    match = _ORIGIN.fullmatch(value)
    if value != "*" and (match is None or (match[1], match[2]) in _OWN_PORTS):
        raise UsageError(
            "this is no origin as a browser sends it",
            expected="SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path, a closing slash or the "
            "scheme's own port: https://app.example.com; or * for every origin",
        )
    return value


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_OWN_PORTS = (("http", "80"), ("https", "443"))
"""Ports that a browser leaves out."""

Size = Annotated[int, _parsed(parse_size), Field(ge=1)]
Duration = Annotated[float, _parsed(parse_duration)]
Period = Annotated[float, _parsed(_period)]
Origin = Annotated[str, _parsed(_origin)]
Port = Annotated[int, Field(ge=0, le=65535)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_list)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


class Settings(BaseSettings):
    """Every setting of `servax serve`, by the name of its option; checked, in bytes and seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    targets: Words = ()
    name: str | None = None
    require: str | None = None
    platform: str | None = None
    model: str | None = None
    no_executables: bool = False
    checkpoint: str | None = None
    select: str | None = None
    step: str | None = None
    item: str | None = None
    dtype: str | None = None
    weights: str | None = None
    bucket: Words = ()
    bucket_file: str | None = None
    cache_dir: str = "~/.cache/servax"

    host: str = "127.0.0.1"
    http: Port = 8000
    grpc: Annotated[int, Field(ge=-1, le=65535)] = 8001
    metrics: Port | None = None
    tfserving_http: Port | None = None
    tfserving_grpc: Port | None = None

    max_delay: Annotated[float | None, _parsed(_delay)] = None
    max_queue: Annotated[int, Field(ge=1)] = 4096
    max_queue_bytes: Size = 1 << 30
    max_body: Size = 64 << 20
    body_timeout: Period = 30.0
    max_connections: Annotated[int, Field(ge=1)] | None = None
    idle_timeout: Period = 75.0
    drain_timeout: Duration = 30.0
    threads: Annotated[int, Field(ge=1)] | None = None
    record_shapes: Path | None = None

    policy: str = "latest:1"
    label: Texts = ()
    split: str | None = None
    poll: Annotated[float | None, _parsed(_period)] = None
    swap: Literal["keep-both", "unload-first"] = "keep-both"
    control: Literal["none", "explicit"] = "none"
    load: Texts = ()

    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    api_key: SecretStr | None = None
    admin_key: SecretStr | None = None
    open_health: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    cors_origin: Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_list)] = ()

    access_log: bool = True
    log_format: Literal["logfmt", "json"] = "logfmt"
    timings: bool = True
    triton_metrics: bool = False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `resolve` has put together."""
        return (init_settings,)

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key belong together: one of them is not given")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls-client-ca needs tls-cert and tls-key")
        if self.load and self.control != "explicit":
            raise ValueError("load needs control explicit: without it every model is loaded")
        return self


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with where each came from.

    Attributes:
      settings: checked.
      origins: by name: `--http`, `SERVAX_HTTP`, the file's path, or `default`.
    """

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of each, as people write them; what is secret is not shown."""
        return [
            (_dashed(name), _text(name, value), self.origins[name])
            for name, value in ((each, getattr(self.settings, each)) for each in Settings.model_fields)
        ]


def resolve(given: Mapping[str, Any], *, file: str | os.PathLike[str] | None = None) -> Resolved:
    """The settings that hold: `given`, over the file's, over `SERVAX_*` in the environment, over defaults.

    Args:
      given: by name, what the command line says.
      file: TOML, with the options' names as keys; `SERVAX_CONFIG` names it where this does not.

    Raises:
      UsageError: a setting is unknown, cannot be read or contradicts another; all of them are listed.
    """
    file = file or os.environ.get(FILE_VARIABLE)
    sources: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [
        (_environment(), lambda name: PREFIX + name.upper()),
        (_file(file), lambda name: f"{file}"),
        (given, lambda name: f"--{_dashed(name)}"),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for source, called in sources:
        values |= source
        origins |= {name: called(name) for name in source}
    return Resolved(_checked(values, origins), origins)


def make(**given: Any) -> Settings:
    """Settings of these values and defaults alone, for a server in a program of the user's own.

    Raises:
      UsageError: one cannot be used, or contradicts another.
    """
    return _checked(given, {})


def _checked(values: Mapping[str, Any], origins: Mapping[str, str]) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        faults = [_fault(each, origins) for each in error.errors()]
        raise UsageError("settings cannot be used:\n  " + "\n  ".join(faults)) from None


def _environment() -> dict[str, Any]:
    source = EnvSettingsSource(Settings)
    return {name: value for name, value in source().items() if name in Settings.model_fields}


def _file(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    if path is None:
        return {}
    where = os.fspath(path)
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the file of settings cannot be read", where=where, seen=str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError("the file of settings is not TOML", where=where, seen=str(error)) from error
    values = {key.replace("-", "_"): value for key, value in content.items()}
    known = [name for name in Settings.model_fields if name not in _SECRET]
    if unknown := [key for key in values if key not in known]:
        close = [near for key in unknown for near in difflib.get_close_matches(key, known, 1)]
        raise UsageError(
            "the file has settings that there are not",
            where=where,
            seen=", ".join(map(_dashed, unknown)),
            expected=", ".join(map(_dashed, close or known)),
            remedy="keys belong into a file of their own or the environment" if set(unknown) & set(_SECRET) else None,
        )
    return values


def _fault(error: Any, origins: Mapping[str, str]) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    seen = "" if name in _SECRET else f"; seen {error['input']!r}"
    origin = origins.get(name, name)
    named = origin if origin in (name, f"--{_dashed(name)}", PREFIX + name.upper()) else f"{_dashed(name)} in {origin}"
    return f"{named}: {message}{seen}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _text(name: str, value: Any) -> str:
    if name == "max_delay" and value is None:
        return "adaptive"
    if value is None or value == ():
        return "-"
    if name in _SECRET:
        return "********"
    if name in ("max_body", "max_queue_bytes"):
        return size_text(value)
    if isinstance(value, float):
        return duration_text(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
