"""Client of a comparison: sends workloads, and reads streamed answers."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from epd.tools.bench.answer import Answer, read_answer, read_events
from epd.tools.bench.compare.workloads import Question, Workload

MODEL = "compared"
"""Name of the model in requests."""
TIMEOUT = aiohttp.ClientTimeout(total=600)
STORE_TRIES = 40
"""Requests, a second apart, until the proxy knows the store of its servers."""


async def run_workload(url: str, workload: Workload) -> tuple[Sequence[Answer], float]:
    """Return the answers in the order of the questions, and the seconds that all took."""
    answers: list[list[Answer]] = [[] for _ in workload.conversations]
    waiting = iter(zip(workload.conversations, answers, strict=True))
    async with _session() as session, asyncio.TaskGroup() as clients:

        async def converse() -> None:
            for conversation, got in waiting:
                for question in conversation:
                    got.append(await _ask(session, url, question))

        started_s = time.perf_counter()
        tasks = [clients.create_task(converse()) for _ in range(workload.at_once)]
        await asyncio.wait(tasks)
        took_s = time.perf_counter() - started_s
    return [answer for conversation in answers for answer in conversation], took_s


async def warm_up(url: str, questions: Sequence[Question], *, has_store: bool) -> str:
    """Send the questions; with a store, repeat one until it is a hit. Return what went wrong."""
    async with _session() as session:
        for question in questions:
            answer = await _ask(session, url, question)
            if answer.error:
                return f"the first requests failed: {answer.status} {answer.error}"
        for _ in range(STORE_TRIES if has_store else 0):
            answer = await _ask(session, url, questions[0])
            if answer.items.startswith("hit=1"):
                return ""
            await asyncio.sleep(1)
    return "a repeated picture was no hit of the store" if has_store else ""


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0))


async def _ask(session: aiohttp.ClientSession, url: str, question: Question) -> Answer:
    """Return an answer at temperature 0; its `seconds` are those to the first token."""
    body = orjson.dumps(
        {
            "model": MODEL,
            "messages": question.messages,
            "max_tokens": question.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    events, first_s, started_s = list[Any](), 0.0, time.perf_counter()
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as reply:
            if not reply.ok:
                return Answer(reply.status, error=(await reply.text())[:200])
            async for line in reply.content:
                events += read_events(line)
                if not first_s and b'"logprob":' in line:
                    first_s = time.perf_counter() - started_s
            answer = read_answer(events, reply.headers.get("x-epd-items", ""), first_s)
            if not answer.error and len(answer.tokens) < question.tokens:
                return Answer(200, error=f"{len(answer.tokens)} of {question.tokens} tokens")
            return answer
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        return Answer(0, error=f"{type(error).__name__}: {error}")
