"""Each linear operation against its transpose, and its production form against its plain one."""

from __future__ import annotations

import pytest
import torch

from rag_explain.linear import operations as ops
from rag_explain.linear import rearrangements as moves
from rag_explain.linear.affine_map import AffineMap
from rag_explain.linear.workspace import Workspace

F = torch.float64


def _rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F, generator=torch.Generator().manual_seed(sum(shape)))


def _case(kind, shape, *in_shapes, **settings):
    operation = kind(inputs=tuple(range(len(in_shapes))), output=9, shape=shape, **settings)
    return pytest.param(operation, in_shapes, id=kind.__name__)


PICKED = torch.tensor([[[0, 2, 2, 1]], [[1] * 4]])
CASES = [
    _case(moves.View, (6, 4), (2, 3, 4), in_shape=(2, 3, 4)),
    _case(moves.Permute, (4, 2, 3), (2, 3, 4), dims=(2, 0, 1)),
    _case(moves.Rearrange, (2, 3, 4), (3, 1), in_shape=(3, 1), function=lambda x: x.expand(2, 3, 4)),
    _case(moves.Slice, (2, 2, 4), (2, 5, 4), in_shape=(2, 5, 4), dim=1, start=1, stop=5, step=2),
    _case(ops.Scale, (2, 3, 4), (2, 3, 4), in_shape=(2, 3, 4), factor=_rand(2, 3, 4)),
    _case(ops.Scale, (2, 3, 4), (3, 1), in_shape=(3, 1), factor=_rand(2, 1, 4)),
    _case(ops.Linear, (6, 5), (6, 4), weight=_rand(4, 5)),
    _case(ops.MixLeft, (3, 5, 2), (3, 4, 2), matrix=_rand(3, 5, 4)),
    _case(ops.MixRight, (3, 4, 5), (3, 4, 2), matrix=_rand(3, 2, 5)),
    _case(ops.Sum, (2, 3, 4), (2, 3, 4), (2, 3, 4), in_shapes=((2, 3, 4), (2, 3, 4)), signs=(1.0, -2.0)),
    _case(ops.Sum, (2, 3, 4), (3, 4), (2, 1, 1), in_shapes=((3, 4), (2, 1, 1)), signs=(-1.0, 0.5)),
    _case(ops.Sum, (2, 3, 4), (4,), in_shapes=((4,),), signs=(1.0,)),
    _case(ops.Reduce, (2, 4), (2, 3, 4), in_shape=(2, 3, 4), dims=(1,), factor=0.5),
    _case(ops.Reduce, (2, 1, 1), (2, 3, 4), in_shape=(2, 3, 4), dims=(1, 2), factor=1.0),
    _case(ops.Pool, (2, 4), (2, 3, 4), in_shape=(2, 3, 4), weights=_rand(2, 3)),
    _case(ops.Pool, (2, 4), (6, 4), in_shape=(6, 4), weights=_rand(2, 3)),
    _case(ops.Center, (2, 3, 4), (2, 3, 4), inverse=_rand(2, 3, 1), weight=_rand(4)),
    _case(ops.CenterProject, (2, 3, 4), (2, 3, 4), factor=_rand(2, 3, 4), normalised=_rand(2, 3, 4)),
    _case(ops.SoftmaxJacobian, (2, 3, 4), (2, 3, 4), probabilities=torch.softmax(_rand(2, 3, 4), -1), dim=2),
    _case(moves.Rearrange, (2, 1, 4), (2, 3, 4), in_shape=(2, 3, 4), function=lambda x: x.gather(1, PICKED)),
    _case(moves.Concatenate, (2, 6, 4), (2, 1, 4), (2, 2, 4), dim=1, sizes=(1, -3, 2)),
    _case(moves.Rearrange, (4, 3), (3, 3), in_shape=(3, 3), function=lambda x: x[torch.tensor([2, 0, 0, 1])]),
]


@pytest.mark.parametrize(("operation", "in_shapes"), CASES)
def test_pull_is_the_transpose_of_push(operation, in_shapes):
    tangents = [_rand(7, *shape) for shape in in_shapes]
    cotangent = _rand(7, *operation.shape)
    pushed = operation.push(*tangents)
    assert pushed.shape == cotangent.shape
    pulled = operation.pull(cotangent)
    assert [tuple(part.shape[1:]) for part in pulled] == list(in_shapes)
    there = (pushed * cotangent).flatten(1).sum(dim=1)
    back = sum((part * t).flatten(1).sum(dim=1) for part, t in zip(pulled, tangents, strict=True))
    assert torch.allclose(there, back, atol=1e-12)


@pytest.mark.parametrize("spent", [True, False])
@pytest.mark.parametrize(("operation", "in_shapes"), CASES)
def test_the_production_form_gives_the_same(operation, in_shapes, spent):
    tangents = [_rand(7, *shape) for shape in in_shapes]
    expected = operation.push(*tangents)
    given = [tangent.clone() for tangent in tangents]
    assert torch.allclose(operation.run(Workspace(), [spent] * len(given), *given), expected, atol=1e-12)
    if not spent:
        assert all(torch.equal(a, b) for a, b in zip(tangents, given, strict=True))


def test_a_workspace_lends_the_same_memory_again():
    space = Workspace()
    like = torch.empty(0)
    first = space.take(like, 2, 3)
    address = first.data_ptr()
    assert space.take(like, 3, 2).data_ptr() != address
    space.give(first.view(6)[2:])  # any view will do
    assert space.take(like, 6).data_ptr() == address


def test_push_leaves_the_callers_tangents_alone():
    scale = ops.Scale(inputs=(0,), output=1, shape=(1, 2, 3), in_shape=(1, 2, 3), factor=_rand(1, 2, 3))
    reduce = ops.Reduce(inputs=(1,), output=2, shape=(1, 3), in_shape=(1, 2, 3), dims=(1,), factor=1.0)
    frozen = AffineMap([scale, reduce], 0, 2, _rand(1, 2, 3), _rand(1, 3))
    tangents = _rand(4, 1, 2, 3)
    before = tangents.clone()
    out = frozen.push(tangents)
    assert torch.equal(tangents, before)
    assert torch.allclose(out, (before * scale.factor).sum(dim=2))
