"""The server under load, on loopback only: throughput, latency, memory, and clients that behave badly.

    python benchmarks/serving.py --run runs/demo --streams 8 64 --seconds 60

It starts `gnnlm serve` itself, on a free port. First one request at a time, then as many streams at once as named, each
for a bounded time; then good requests beside slow readers, clients that hang up, bodies of 100 MB and slowloris.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import arguments, open_run, report

WORDS = 12  # of a prompt
LARGE = 100_000_000  # bytes
MOST = 512  # streams, whatever is asked for: this is a measurement, not an attack


@dataclass
class Load:
    """What was seen of a number of requests."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def case(self, name: str) -> dict[str, Any]:
        def at(values: list[float], percent: float) -> float:
            return float(np.percentile(values, percent)) if values else 0.0

        return {
            "case": name,
            "requests": sum(self.statuses.values()),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            **{f"first_p{p}": at(self.first, p) for p in (50, 95, 99)},
            **{f"whole_p{p}": at(self.whole, p) for p in (50, 95, 99)},
            "statuses": dict(self.statuses),
        }


@contextmanager
def server(run: str, *options: str) -> Iterator[tuple[str, int]]:
    """`gnnlm serve` on loopback; its address and its process."""
    command = [sys.executable, "-c", "from gnnlm.cli import main; main()", "serve", run, "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready: "):
        raise SystemExit(f"the server did not start: {line}")
    try:
        yield line.split()[1], process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()


def resident(pid: int) -> int:
    """Bytes of memory that a process has now; 0 where that cannot be seen."""
    status = Path(f"/proc/{pid}/status")
    if not status.is_file():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def prompts_of(client: httpx.AsyncClient, count: int) -> list[str]:
    """Beginnings of sentences of the store's documents: where a book is used."""
    listed = (await client.get("/v1/documents", params={"limit": 50})).json()["data"]
    rng, found = random.Random(0), list[str]()
    for document in listed:
        text = (await client.get("/v1/documents/text", params={"name": document["name"]})).json()["text"].split()
        found += [" ".join(text[at : at + WORDS]) for at in range(0, max(1, len(text) - WORDS), 40)]
    return rng.choices(found, k=count)


async def one(
    client: httpx.AsyncClient, load: Load, body: dict[str, Any], pause: float = 0.0, part: float = 1.0
) -> None:
    """One stream; `pause` is slept after each chunk, and it is left after a `part` of its tokens."""
    began, first, tokens = time.perf_counter(), None, 0
    try:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            status = str(answer.status_code)
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                value = json.loads(line[6:])
                if "error" in value:
                    status = f"error in stream: {value['error']['code']}"
                    continue
                count = (
                    len((value["choices"][0].get("logprobs") or {"tokens": []})["tokens"]) if value["choices"] else 0
                )
                first = time.perf_counter() - began if count and first is None else first
                tokens += count
                if tokens >= part * body["max_tokens"] and part < 1:
                    status = "left"
                    break
                if pause:
                    await asyncio.sleep(pause)
    except httpx.HTTPError as error:
        status = type(error).__name__
    load.statuses[status] += 1
    load.tokens += tokens
    if status == "200" and first is not None:
        load.first.append(first)
        load.whole.append(time.perf_counter() - began)


async def loaded(address: str, streams: int, seconds: float, tokens: int, prompts: list[str], model: str) -> Load:
    """So many streams at once, each starting anew when it is finished, for a time."""
    load, began = Load(), time.perf_counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def again(number: int, client: httpx.AsyncClient) -> None:
        turn = number
        while time.perf_counter() - began < seconds:
            prompt = prompts[turn % len(prompts)]
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0}
            await one(client, load, body)
            turn += streams
            if load.statuses["429"]:
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as client:
        await asyncio.gather(*(again(number, client) for number in range(streams)))
    load.seconds = time.perf_counter() - began
    return load


async def abused(address: str, seconds: float, tokens: int, prompts: list[str], model: str) -> dict[str, Load]:
    """Good requests beside bad clients, for a time."""
    found = {name: Load() for name in ("good", "slow readers", "hang up", "large bodies", "slowloris")}
    began = time.perf_counter()
    end = began + seconds
    base: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0, "logprobs": 0}

    async def good(number: int, client: httpx.AsyncClient, name: str, **how: float) -> None:
        while time.perf_counter() < end:
            await one(client, found[name], {**base, "prompt": prompts[number % len(prompts)]}, **how)
            number += 7

    async def large(client: httpx.AsyncClient, known: bool) -> None:
        async def parts() -> Any:
            for _ in range(LARGE // 100_000):
                yield b"x" * 100_000

        while time.perf_counter() < end:
            length = {"Content-Length": str(LARGE)} if known else {}
            try:
                headers = {"Content-Type": "application/json", **length}
                answer = await client.post("/v1/completions", content=parts(), headers=headers)
                found["large bodies"].statuses[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                found["large bodies"].statuses[type(error).__name__] += 1
            await asyncio.sleep(0.5)

    async def slowloris() -> None:
        host, port = address.removeprefix("http://").split(":")
        while time.perf_counter() < end:
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(OSError):
                for byte in b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.5)
                    if reader.at_eof() or time.perf_counter() > end:
                        break
            found["slowloris"].statuses["closed by the server" if reader.at_eof() else "open at the end"] += 1
            writer.close()

    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        work = [good(number, client, "good") for number in range(4)]
        work += [good(number, client, "slow readers", pause=0.2) for number in range(4)]
        work += [good(number, client, "hang up", part=0.4) for number in range(4)]
        work += [large(client, known) for known in (True, False)]
        work += [slowloris() for _ in range(16)]
        await asyncio.gather(*work)
    for load in found.values():
        load.seconds = time.perf_counter() - began  # what has begun is waited for
    return found


async def measured(args: Any, address: str, pid: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        prompts = await prompts_of(client, 64)
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
    model = f"{name}:{args.predictor}" if args.predictor else name
    await loaded(address, 2, 1.0, 8, prompts, model)  # warm
    started, cases = resident(pid), []
    single = 0.0
    for streams in [1, *(min(MOST, count) for count in args.streams)]:
        load = await loaded(address, streams, args.seconds, args.tokens, prompts, model)
        case = load.case(f"{streams} at once")
        single = single or case["tokens_per_second"]
        case["beside_one"] = case["tokens_per_second"] / single if single else 0.0
        case["memory_mb"] = resident(pid) / 1e6
        cases.append(case)
        print(f"{case['case']}: {case['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    for name, load in (await abused(address, args.seconds, args.tokens, prompts, model)).items():
        cases.append({**load.case(f"bad clients: {name}"), "beside_one": 0.0, "memory_mb": resident(pid) / 1e6})
    wrong = {
        status: count
        for case in cases
        for status, count in case["statuses"].items()
        if status.startswith("5") or status.startswith("error")
    }
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        alive = (await client.get("/readyz")).status_code == 200
    return cases, {"server_errors": wrong, "alive": alive, "memory_before_mb": started / 1e6}


def main() -> None:
    parser = arguments("The server under load: throughput, latency, memory, bad clients.")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64], help="streams at once (default: 8 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each case (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--predictor", help="base, knn, gnn or gnn_knn (default: the best)")
    parser.add_argument("--batch", type=int, default=16, help="texts that the server writes at once")
    args = parser.parse_args()
    open_run(args.run)
    with server(args.run, "--batch", str(args.batch)) as (address, pid):
        cases, more = asyncio.run(measured(args, address, pid))
    report("serving, on loopback; seconds", cases, args.json, **more)


if __name__ == "__main__":
    main()
