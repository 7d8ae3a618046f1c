"""A device of torch's own kind that every machine has: memory apart, two indices, every transfer counted, a limit.

`install()` builds it from `device.cpp` (about half a minute, once for each version of torch and of the source) and
registers it under the name "toy". torch then refuses to mix it with the CPU, as it does with a graphics card.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

NAME = "toy"
# What is counted, in the order of the source: tensors moved to the device, from it, between its indices; numbers read
# from it; operations whose result has a size that the host waits for; operations.
COUNTS = ("in", "out", "across", "scalar", "size", "operation")
_SOURCE = Path(__file__).with_name("device.cpp")
_MODELS = {"transformers", "sentence_transformers"}
_PACKAGE = Path(__file__).parents[3] / "rag_explain"


class NoDevice(Exception):
    """The device cannot be built here; the text says why."""


@dataclass
class Seen:
    """What happened on the device in a block: counts by kind, and for each transfer the line of ours that made it."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[tuple[str, str, int]] = field(default_factory=list)  # kind, "module.py:line in function", bytes

    def __getitem__(self, kind: str) -> int:
        return self.counts[kind]

    def at(self, *kinds: str) -> Counter[str]:
        """How often each line did something of these kinds."""
        return Counter(f"{kind}: {line}" for kind, line, _ in self.lines if kind in kinds)

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[kind]} {kind}" for kind in COUNTS)


def build() -> None:
    """Build the device where that was not done yet; `NoDevice` says why it cannot be had."""
    _library()


@cache
def install() -> str:
    """Build and register the device; its name. `NoDevice` says why it cannot be had."""
    import torch

    extension = _extension()
    torch.utils.rename_privateuse1_backend(NAME)
    extension.register_device()
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    return NAME


@contextmanager
def watched(*, lines: bool = True, operations: bool = False) -> Iterator[Seen]:
    """Count what happens on the device in the block, in all threads; with `lines`, also where.

    With `operations` every operation by its name, and not only what the host waits for.
    """
    extension, seen = _extension(), Seen()
    before = extension.counts()

    def note(kind: int, size: int, name: str) -> None:
        here = name if COUNTS[kind] == "operation" else f"{_line()}{name and f' ({name})'}"
        seen.lines.append((COUNTS[kind], here, size))

    if lines:
        extension.watch(note, operations)
    try:
        yield seen
    finally:
        extension.watch(None, False)
        seen.counts.update(
            {kind: now - then for kind, now, then in zip(COUNTS, extension.counts(), before, strict=True)}
        )


@contextmanager
def limited(room: int, index: int = 0) -> Iterator[None]:
    """In the block the device has room for this many bytes beside what it holds already."""
    extension = _extension()
    extension.set_limit(index, extension.allocated(index) + room)
    try:
        yield
    finally:
        extension.set_limit(index, 0)


def allocated(index: int = 0) -> int:
    """Bytes that are in use on the device."""
    size: int = _extension().allocated(index)
    return size


def peak(index: int = 0) -> int:
    """The most bytes that were in use since `reset_peak`."""
    size: int = _extension().peak(index)
    return size


def reset_peak(index: int = 0) -> None:
    _extension().reset_peak(index)


def _line() -> str:
    """The line of the library that runs (of whatever else, where there is none), and the model's own code below it."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).parent != _SOURCE.parent]
    frames = [frame for frame in frames if frame.name not in ("__torch_dispatch__", "__torch_function__", "record")]
    last = max((at for at, one in enumerate(frames) if _PACKAGE in Path(one.filename).parents), default=len(frames) - 1)
    owns = [Path(one.filename).stem for one in frames[last:] if _MODELS.intersection(Path(one.filename).parts)]
    line = f"{Path(frames[last].filename).name}:{frames[last].lineno} in {frames[last].name}"
    return f"{line}, where the model's own {owns[-1]} runs" if owns else line


@cache
def _library() -> Path:
    """The built device, in a folder of its own for each version of what it is made of."""
    import torch

    key = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    folders = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(tempfile.gettempdir())]
    for root in folders:
        folder = root / f"rag_explain_test_device_{os.getuid()}" / key
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            library = folder / f"toy_device{sysconfig.get_config_var('EXT_SUFFIX')}"
            if library.exists():  # where nothing can be written any more, too
                return library
            with FileLock(folder / "lock"):  # workers side by side: one builds, the others wait for it
                if not library.exists():
                    _build(library)
            return library
    raise NoDevice(f"no folder to build the test device in: tried {' and '.join(map(str, folders))}")


@cache
def _extension() -> Any:
    spec = importlib.util.spec_from_file_location("toy_device", _library())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build(library: Path) -> None:
    """One call of the compiler; the file appears when it is whole."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoDevice("there is no C++ compiler on this machine: the test device cannot be built")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise NoDevice(f"Python's headers are not in {headers}: the test device cannot be built")
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include", headers]
    abi = int(torch.compiled_with_cxx11_abi())
    partly = library.with_suffix(".part")
    command = [
        *(compiler, "-shared", "-fPIC", "-std=c++20", "-O1", "-w", str(_SOURCE), "-o", str(partly)),
        *(f"-isystem{path}" for path in includes),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DTORCH_EXTENSION_NAME=toy_device", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *(f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDevice(f"the test device cannot be built with {compiler}: {done.stderr.strip()[-2000:]}")
    partly.rename(library)


def _module(extension: Any) -> types.ModuleType:
    """What torch and others ask a device's own module, `torch.toy`."""
    import torch

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(extension.current())
        return device if isinstance(device, int) else (torch.device(device).index or 0)

    def memory_info(device: Any = None) -> tuple[int, int]:
        index = index_of(device)
        total = extension.limit(index) or 2**40
        return total - extension.allocated(index), total

    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: int(extension.current()),
        set_device=lambda device: extension.set_current(index_of(device)),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=memory_info,
        memory_allocated=lambda device=None: int(extension.allocated(index_of(device))),
        max_memory_allocated=lambda device=None: int(extension.peak(index_of(device))),
        reset_peak_memory_stats=lambda device=None: extension.reset_peak(index_of(device)),
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        _is_in_bad_fork=lambda: False,
    )
    return module
