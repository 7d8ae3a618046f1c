"""Every private name of torch that this package uses. A test notices when torch renames one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

Arguments = tuple[Any, ...]


class DispatchMode(TorchDispatchMode):
    """A mode that sees every tensor operation of this thread. torch.compile never meets one: recorded code is eager."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against compiled code costs as much as looking an operation up


class FunctionMode(TorchFunctionMode):
    """A mode that sees every function and method of torch that Python calls in this thread."""


# The methods that hand out what a tensor holds without an operation that a dispatch mode would see.
READERS = frozenset(
    (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage)
)


def hands_out_values(func: Any) -> bool:
    """Whether the operation hands out what its tensors hold, or results of a size that they decide."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def draws(func: Any) -> bool:
    """Whether the operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def current_dispatch_mode() -> Any:
    """The innermost dispatch mode of this thread; None where there is none."""
    return torch.utils._python_dispatch._get_current_dispatch_mode()


def parameters(func: Any) -> tuple[Any, ...]:
    """The formal arguments of an operation, in order: each has a name, and a default value where it is optional."""
    return tuple(func._schema.arguments)


def is_mutable(func: Any) -> bool:
    """Whether the operation writes into one of its arguments."""
    return bool(func._schema.is_mutable)


def is_written(parameter: Any) -> bool:
    """Whether an operation writes into this one of its formal arguments."""
    return parameter.alias_info is not None and bool(parameter.alias_info.is_write)


def overload(packet: Any, like: Any) -> Any:
    """The overload of `packet` that has the same name as the overload `like` of another packet; None without one."""
    return getattr(packet, like._overloadname, None)


def is_composite(func: Any) -> bool:
    """Whether the operation is made of other operations, into which `decompose` takes it apart."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def decompose(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run the operations that a composite operation is made of, one by one."""
    return func.decompose(*args, **kwargs)


def written(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Changes when one of these gets other memory, or when torch sees it being written to (not through `.data`)."""
    counted = [tensor._version for tensor in tensors if not tensor.is_inference()]
    return counted, list(map(Tensor.data_ptr, tensors))


def has_onednn(x: Tensor) -> bool:
    """Whether oneDNN is there for a product with this matrix, and people have not switched it off."""
    return x.is_cpu and x.dtype == torch.float32 and _HAS_ONEDNN and bool(torch.backends.mkldnn.enabled)


_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """left (..., k) @ right (k, o): on AMD's processors in less than half of the time that `torch.mm` takes."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return product


PARTS = ("_parameters", "_buffers", "_modules")


def parts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps its parameters, its buffers and its modules: its attributes of the names above."""
    return module._parameters, module._buffers, module._modules


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Where a module keeps the hooks that run when it is called."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_made() -> int:
    """How many hooks were registered in this process so far: as long as it is the same, no module got one."""
    return RemovableHandle.next_id


COMPILED = "_compiled_call_impl"  # the attribute in which a module keeps its compiled form


def uncompile(module: nn.Module) -> None:
    """Make a module run its own `forward`, also where `module.compile()` was called."""
    setattr(module, COMPILED, None)
