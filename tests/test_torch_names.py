"""The private names of torch that `_torch` gathers: each test fails when torch renames one, or means something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rag_explain
from rag_explain import _torch

aten = torch.ops.aten
# Operations are torch's public language, whatever their names begin with; the table of handlers runs every one of them.
_OPERATIONS = re.compile(r"aten\._\w+")
_PRIVATE = re.compile(
    r"torch\.(?:\w+\.)*_\w+|\b_schema\b|\b_overloadname\b|(?<!_torch)\.decompose\(|\b_version\b|\b_compiled_call_impl\b"
)


class _Seen(_torch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operations_and_is_gone_afterwards():
    assert _torch.current_dispatch_mode() is None
    with _Seen() as mode:
        assert _torch.current_dispatch_mode() is mode
        torch.ones(2) + 1
    assert _torch.current_dispatch_mode() is None
    assert mode.names[-1] == "aten::add.Tensor"


def test_torch_still_asks_a_mode_whether_dynamo_should_be_skipped():
    assert TorchDispatchMode._should_skip_dynamo() is True
    assert _torch.DispatchMode._should_skip_dynamo() is False


def test_parameters_have_names_defaults_and_say_whether_they_are_written():
    names = [parameter.name for parameter in _torch.parameters(aten.slice.Tensor)]
    assert names == ["self", "dim", "start", "end", "step"]
    defaults = [p.default_value for p in _torch.parameters(aten.slice.Tensor) if p.has_default_value()]
    assert defaults == [0, None, None, 1]
    assert [_torch.is_written(p) for p in _torch.parameters(aten.add_.Tensor)] == [True, False, False]
    assert not any(_torch.is_written(p) for p in _torch.parameters(aten.slice.Tensor))
    assert _torch.is_mutable(aten.add_.Tensor)
    assert not _torch.is_mutable(aten.add.Tensor)


def test_the_overload_of_the_same_name():
    assert _torch.overload(aten.add, aten.add_.Scalar) is aten.add.Scalar
    assert _torch.overload(aten.relu, aten.add_.Scalar) is None


def test_composite_operations_come_apart():
    assert _torch.is_composite(aten.layer_norm.default)
    assert not _torch.is_composite(aten.native_layer_norm.default)
    x = torch.randn(3, 4)
    with torch.inference_mode(), _Seen() as mode:
        out = _torch.decompose(aten.layer_norm.default, (x, [4]), {})
    assert mode.names == ["aten::native_layer_norm"]
    assert torch.allclose(out, nn.functional.layer_norm(x, [4]))


def test_writes_are_counted():
    x = torch.zeros(2)
    before = _torch.written([x])
    assert _torch.written([x]) == before
    x.add_(1)
    after = _torch.written([x])
    assert after != before
    x.data = torch.ones(2)
    assert _torch.written([x]) != after


def test_what_a_module_keeps_its_parts_and_hooks_in():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    parameters, buffers, modules = _torch.parts(module[0])
    assert list(parameters) == ["weight", "bias"]
    assert "running_mean" in buffers
    assert list(_torch.parts(module)[2].values()) == [module[0]]
    assert not modules
    handles = [module.register_forward_pre_hook(lambda *a: None), module.register_forward_hook(lambda *a: None)]
    assert list(map(len, _torch.forward_hooks(module))) == [1, 1]
    for handle in handles:
        handle.remove()
    assert list(map(len, _torch.forward_hooks(module))) == [0, 0]


def test_a_compiled_module_runs_its_own_forward_again():
    module = nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module.compile(backend=lambda graph, inputs: pytest.fail("compiled code ran"))
    assert module._compiled_call_impl is not None
    _torch.uncompile(module)
    module(torch.zeros(1, 2))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
def test_onednn_multiplies_in_any_layout_as_torch_does():
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(40, 60, generator=generator)
    deep = wide.view(5, 8, 60)
    flat = (wide, wide[:, :20], wide[:, ::3], wide.T, wide[:1], wide[:0], wide[0].expand(9, -1))
    for left in (*flat, deep, deep.transpose(0, 1), deep[:1].expand(3, -1, -1)):
        for right in (torch.randn(left.shape[-1], 7, generator=generator), wide[:, : left.shape[-1]].T):
            exact = left.double() @ right.double()
            assert torch.allclose(_torch.onednn_product(left, right).double(), exact, rtol=1e-5, atol=1e-5)


def test_onednn_is_asked_only_for_what_it_can_do_and_where_it_is_switched_on(monkeypatch):
    x = torch.zeros(2, 2)
    assert _torch.has_onednn(x) == torch.backends.mkldnn.is_available()
    assert not _torch.has_onednn(x.double())
    assert not _torch.has_onednn(x.to("meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not _torch.has_onednn(x)


def test_private_names_are_used_nowhere_else():
    folder = Path(rag_explain.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        if path.name != "_torch.py":
            text = _OPERATIONS.sub("", path.read_text(encoding="utf-8"))
            found |= {name for name in _PRIVATE.findall(text) if not name.startswith("torch.ops")}
    assert not found
