"""A real HTTP server that embeds as OpenAI's does, over a model that is really computed, with faults on demand."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

Embed = Callable[[list[str]], NDArray[Any]]
KEY = "sk-a-very-secret-key-0123456789"


class EmbeddingServer:
    """Answers POST /v1/embeddings; each of `faults`, in their order, spoils the next call.

    Faults: "429", "429 after 0.02", "500", "slow", "reordered", "wide" (another number of dimensions), "ragged",
    "short" (a vector is missing), "base64", "no json", "quota", "400", "307", "drop" (the connection is closed).
    """

    def __init__(self, embed: Embed, faults: Sequence[str] = (), key: str | None = KEY) -> None:
        self.embed, self.faults, self.key = embed, list(faults), key
        self.calls: list[dict[str, Any]] = []  # of every call that came in, as it was sent
        self.paths: set[str] = set()
        self.at_once, self.most_at_once = 0, 0
        self.lock = threading.Lock()
        self.release = threading.Event()  # set when the server ends: nothing slow outlives it
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def texts(self) -> list[str]:
        """All texts that were sent, each retry again."""
        return [text for call in self.calls for text in call["input"]]

    def answer(self, asked: dict[str, Any], fault: str) -> dict[str, Any]:
        with self.lock:
            vectors = np.asarray(self.embed(asked["input"]), np.float32)
        if fault == "wide":
            vectors = np.hstack([vectors, vectors])
        items: list[dict[str, Any]] = [
            {"object": "embedding", "index": index, "embedding": vector.tolist()}
            for index, vector in enumerate(vectors)
        ]
        if fault == "base64":
            for item, vector in zip(items, vectors, strict=True):
                item["embedding"] = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        if fault == "ragged":
            items[-1]["embedding"].append(0.5)
        if fault == "short":
            items.pop()
        if fault == "reordered":
            items.reverse()
        return {"object": "list", "model": asked["model"], "data": items, "usage": {"prompt_tokens": 1}}

    @contextmanager
    def running(self) -> Iterator[EmbeddingServer]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.release.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class Client:
    """Asks a server for vectors as a framework's object does: one call for each list, and the last word is an error."""

    def __init__(self, server: EmbeddingServer) -> None:
        self.url = f"{server.url}/embeddings"
        self.key = server.key

    def __call__(self, texts: list[str]) -> list[list[float]]:
        asked = json.dumps({"model": "tiny", "input": texts}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with urlopen(Request(self.url, asked, headers)) as answer:
            found = sorted(json.load(answer)["data"], key=lambda one: one["index"])
        return [one["embedding"] for one in found]


def _handler(server: EmbeddingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked["input"] = [asked["input"]] if isinstance(asked["input"], str) else asked["input"]
            with server.lock:
                server.calls.append(asked)
                server.paths.add(self.path)
                fault = server.faults.pop(0) if server.faults else ""
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            try:
                self.reply(asked, fault)
            except (BrokenPipeError, ConnectionResetError):  # the caller did not wait
                self.close_connection = True

        def reply(self, asked: dict[str, Any], fault: str) -> None:
            if self.path.partition("?")[0] != "/v1/embeddings":
                return self.say(404, {"error": {"message": f"no {self.path}"}})
            if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                sent = self.headers.get("Authorization")
                return self.say(401, {"error": {"message": f"Incorrect API key provided: {sent}", "code": "bad_key"}})
            if fault.startswith("429"):
                after = fault.removeprefix("429").removeprefix(" after ")
                return self.say(429, {"error": {"message": "slow down"}}, {"Retry-After": after} if after else {})
            if fault == "quota":
                return self.say(429, {"error": {"message": "you pay", "code": "insufficient_quota"}})
            if fault in ("500", "400"):
                return self.say(int(fault), {"error": f"it is {fault}"})
            if fault == "307":
                return self.say(307, {}, {"Location": f"{server.url}/elsewhere"})
            if fault == "drop":
                self.done()
                self.close_connection = True
                return self.connection.close()
            if fault == "slow":
                server.release.wait(60)  # until the test ends
            if fault == "at once":
                time.sleep(0.1)
            return self.say(200, "nothing" if fault == "no json" else server.answer(asked, fault))

        def say(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
            body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.done()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def done(self) -> None:
            """Before the caller can know it, and call again."""
            with server.lock:
                server.at_once -= 1

        def log_message(self, *values: Any) -> None:
            """Nothing: the calls are remembered."""

    return Handler
