"""Real Prometheus with the configuration of `deploy/`, in front of servers on this machine."""

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from scripts.ports import free_ports
from tests.deploy.tools import PROMETHEUS, load, program

START_S = 60.0

SHORTER = 60
"""Factor by which the windows and the times of rules are shorter in a test."""

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(?<=[\[ ])(\d+)([smhd])(?=\]| |$|\))")
"""Duration in PromQL. The names of recorded series end with one too, which stays."""


@dataclass
class Prometheus:
    """Running Prometheus server."""

    url: str
    http: aiohttp.ClientSession
    began_s: float = field(default_factory=time.time)

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the answer of the server's API."""
        async with self.http.get(f"{self.url}/api/v1/{path}", params=parameters) as reply:
            answer = await reply.json()
            assert answer["status"] == "success", answer
            return answer["data"]

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        result = (await self.get("query", query='ALERTS{alertstate="firing"}'))["result"]
        return {each["metric"]["alertname"] for each in result}

    async def has_data(self, expr: str) -> bool:
        """Return whether an expression had a value at any second since the start."""
        span = {"start": str(self.began_s), "end": str(time.time()), "step": "1"}
        result = (await self.get("query_range", query=expr, **span))["result"]
        return any(value != "NaN" for series in result for _, value in series["values"])

    async def labels_of(self, name: str) -> set[str]:
        """Return the labels of a metric over all its series."""
        series = await self.get("series", **{"match[]": name})
        return {label for each in series for label in each}


def shortened(rules: dict[str, Any]) -> dict[str, Any]:
    """Return a file of rules with shorter windows and times; thresholds stay."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = DURATION.sub(_shorter, rule["expr"])
            if "for" in rule:
                rule["for"] = DURATION.sub(_shorter, f" {rule['for']}").strip()
    return rules


def _shorter(duration: re.Match[str]) -> str:
    return f"{int(duration[1]) * UNITS_S[duration[2]] * 1000 // SHORTER}ms"


@asynccontextmanager
async def prometheus(
    folder: Path, targets: Mapping[str, Sequence[str]], admin_key: str
) -> AsyncIterator[Prometheus]:
    """Start Prometheus on a copy of the configuration with other addresses and shorter times.

    `targets` has the addresses of each job; those of the job `vllm` get the role `decode`.
    """
    configuration = folder / "prometheus"
    shutil.copytree(PROMETHEUS, configuration)
    (folder / "key").write_text(admin_key + "\n")
    main = configuration / "prometheus.yml"
    settings = load(main)
    settings["global"] = dict.fromkeys(settings["global"], "1s")
    for job in settings["scrape_configs"]:
        found = {"targets": list(targets[job["job_name"]])}
        if "file_sd_configs" in job:
            engines = [found | {"labels": {"role": "decode"}}]
            (configuration / "targets/engines.yaml").write_text(yaml.safe_dump(engines))
        else:
            job["authorization"]["credentials_file"] = str(folder / "key")
            job["static_configs"] = [found]
    main.write_text(yaml.safe_dump(settings))
    for name in settings["rule_files"]:
        rules = configuration / name
        rules.write_text(yaml.safe_dump(shortened(load(rules))))
    [port] = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={main}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as http:
            await _ready(process, http, f"http://127.0.0.1:{port}/-/ready")
            yield Prometheus(f"http://127.0.0.1:{port}", http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(
    process: asyncio.subprocess.Process, http: aiohttp.ClientSession, url: str
) -> None:
    async with asyncio.timeout(START_S):
        while process.returncode is None:
            try:
                async with http.get(url) as reply:
                    if reply.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise AssertionError("prometheus has ended")
