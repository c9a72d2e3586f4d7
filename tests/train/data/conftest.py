"""Tiny stand-ins for the published files and the servers they come from."""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor
from torchvision.datasets import MNIST, FashionMNIST

from mprun.train.data import sources

TRAIN, TEST = 20, 10


def images(samples: int, offset: int) -> Tensor:
    """Images [N, 28, 28] of bytes, each pixel telling which one it is."""
    return ((torch.arange(samples * 28 * 28) + offset) % 251).to(torch.uint8).view(-1, 28, 28)


def labels(samples: int) -> Tensor:
    """Classes [N] of bytes: 0, 1, ..., 9, 0, ..."""
    return (torch.arange(samples) % 10).to(torch.uint8)


def idx(values: Tensor) -> bytes:
    """Bytes in the format of the published files: a magic number, the sizes, the values."""
    header = (0x0800 | values.dim(), *values.shape)
    return b"".join(n.to_bytes(4, "big") for n in header) + values.numpy().tobytes()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a small MNIST, by name: what is expected of them, and of FashionMNIST's."""
    contents = {
        "train-images-idx3-ubyte": idx(images(TRAIN, 0)),
        "train-labels-idx1-ubyte": idx(labels(TRAIN)),
        "t10k-images-idx3-ubyte": idx(images(TEST, 100)),
        "t10k-labels-idx1-ubyte": idx(labels(TEST)),
    }
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    for name in sources.SHA256:
        monkeypatch.setitem(sources.SHA256, name, sums)
    for name, data in contents.items():
        monkeypatch.setitem(sources.SIZE_BYTES, name, len(data))
    return contents


@pytest.fixture
def root(tmp_path: Path, published: dict[str, bytes]) -> Path:
    """A data folder with the small MNIST in it."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, data in published.items():
        (raw / name).write_bytes(data)
    return tmp_path / "data"


class Server(ThreadingHTTPServer):
    """Serves `files` by name on the loopback interface and keeps the names it was asked for."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        time.sleep(0.02)  # long enough for a second download to meet the first
        if name not in self.server.files:
            return self.send_error(404)
        data = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets where the sets are downloaded from, with no proxy between."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def set_url(url: str) -> None:
        for name in sources.MIRRORS:
            monkeypatch.setitem(sources.MIRRORS, name, (url,))

    return set_url


@pytest.fixture
def server(
    published: dict[str, bytes], mirror: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A server of the small MNIST, which torchvision downloads from."""
    packed = {f"{name}.gz": gzip.compress(data) for name, data in published.items()}
    sums = [(name, hashlib.md5(data).hexdigest()) for name, data in packed.items()]
    for kind in (MNIST, FashionMNIST):
        monkeypatch.setattr(kind, "resources", sums)
    with Server(packed) as running:
        mirror(running.url)
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def no_network(published: dict[str, bytes], mirror: Callable[[str], None]) -> None:
    """Downloads go to a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    mirror(f"http://127.0.0.1:{port}/")


@pytest.fixture
def silent_server(
    published: dict[str, bytes], mirror: Callable[[str], None]
) -> Iterator[socket.socket]:
    """Downloads go to a server that takes connections and never answers: its socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mirror(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        yield listening


@pytest.fixture
def real_root() -> Path:
    """The folder of the real files, as the environment names it."""
    folder = os.environ.get("MPRUN_DATA")
    if folder is None:
        pytest.skip("MPRUN_DATA is not set: no real MNIST and FashionMNIST files to test with")
    for name in sources.SHA256:
        if not sources.is_complete(name, Path(folder)):
            pytest.skip(f"MPRUN_DATA={folder} lacks files of {name}")
    return Path(folder)
