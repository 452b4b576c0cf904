# SPDX-License-Identifier: Apache-2.0
"""``rbln::linear`` and ``rbln::gated_linear``: a matrix product with what surrounds it."""

from torch import Tensor
from torch.nn import functional

from rbln_host.ops.activation import activate, check_activation, check_halves, gate
from rbln_host.ops.library import define


def _linear_meta(
    input_NK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    residual_NO: Tensor | None,
    activation: str,
) -> Tensor:
    check_linear(input_NK, weight_OK, bias_O, residual_NO, activation)
    return input_NK.new_empty((*input_NK.shape[:-1], weight_OK.shape[0]))


def _gated_linear_meta(
    input_NK: Tensor, weight_GK: Tensor, bias_G: Tensor | None, activation: str
) -> Tensor:
    check_gated_linear(input_NK, weight_GK, bias_G, activation)
    return input_NK.new_empty((*input_NK.shape[:-1], weight_GK.shape[0] // 2))


@define(
    "linear(Tensor input_NK, Tensor weight_OK, Tensor? bias_O, Tensor? residual_NO, "
    "str activation) -> Tensor",
    meta=_linear_meta,
)
def linear(
    input_NK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    residual_NO: Tensor | None,
    activation: str,
) -> Tensor:
    """``activation(input @ weight.T + bias) + residual``, computed in fp32 and rounded once.

    Shapes: ``input_NK`` ``[..., K]``, ``weight_OK`` ``[O, K]``, ``bias_O`` ``[O]``,
    ``residual_NO`` and the result ``[..., O]``; all of one dtype. Raises ValueError for other
    shapes or dtypes and for an activation not in ``ACTIVATIONS``.
    """
    _check("linear", input_NK, weight_OK, bias_O)
    _check_residual(input_NK, residual_NO, (*input_NK.shape[:-1], weight_OK.shape[0]))
    output_NO = activate(product(input_NK, weight_OK, bias_O), activation)
    if residual_NO is not None:
        output_NO = output_NO + residual_NO.float()
    return output_NO.to(input_NK.dtype).contiguous()


@define(
    "gated_linear(Tensor input_NK, Tensor weight_GK, Tensor? bias_G, str activation) -> Tensor",
    meta=_gated_linear_meta,
)
def gated_linear(
    input_NK: Tensor, weight_GK: Tensor, bias_G: Tensor | None, activation: str
) -> Tensor:
    """``activation(gate) * up`` of ``input @ weight.T + bias``, in fp32 and rounded once.

    Shapes: ``input_NK`` ``[..., K]``, ``weight_GK`` ``[2 * I, K]`` (the rows of the gate first),
    ``bias_G`` ``[2 * I]``, result ``[..., I]``; all of one dtype. Raises ValueError as
    :func:`linear` does.
    """
    _check("gated_linear", input_NK, weight_GK, bias_G)
    check_halves("gated_linear", weight_GK.shape[0])
    gated_NI = gate(product(input_NK, weight_GK, bias_G), activation)
    return gated_NI.to(input_NK.dtype).contiguous()


def product(input_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """``input @ weight.T + bias`` in fp32."""
    bias = None if bias_O is None else bias_O.float()
    return functional.linear(input_NK.float(), weight_OK.float(), bias)


def check_linear(
    input_NK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None,
    residual_NO: Tensor | None,
    activation: str,
) -> None:
    """ValueError for operands that :func:`linear` does not take."""
    check_activation(activation)
    _check("linear", input_NK, weight_OK, bias_O)
    _check_residual(input_NK, residual_NO, (*input_NK.shape[:-1], weight_OK.shape[0]))


def check_gated_linear(
    input_NK: Tensor, weight_GK: Tensor, bias_G: Tensor | None, activation: str
) -> None:
    """ValueError for operands that :func:`gated_linear` does not take."""
    check_activation(activation)
    _check("gated_linear", input_NK, weight_GK, bias_G)
    check_halves("gated_linear", weight_GK.shape[0])


def _check(operator: str, input_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> None:
    fits = (
        weight_OK.dim() == 2
        and input_NK.dim() > 0
        and input_NK.shape[-1] == weight_OK.shape[1]
        and (bias_O is None or tuple(bias_O.shape) == (weight_OK.shape[0],))
    )
    dtypes = {tensor.dtype for tensor in (input_NK, weight_OK, bias_O) if tensor is not None}
    if not fits or len(dtypes) > 1:
        bias = "none" if bias_O is None else f"{bias_O.dtype} {tuple(bias_O.shape)}"
        raise ValueError(
            f"{operator}: input {input_NK.dtype} {tuple(input_NK.shape)}, weight "
            f"{weight_OK.dtype} {tuple(weight_OK.shape)} and bias {bias} do not fit"
        )


def _check_residual(input_NK: Tensor, residual_NO: Tensor | None, shape: tuple[int, ...]) -> None:
    if residual_NO is None:
        return
    if tuple(residual_NO.shape) != shape or residual_NO.dtype != input_NK.dtype:
        raise ValueError(
            f"linear: the residual is {residual_NO.dtype} {tuple(residual_NO.shape)}, "
            f"not {input_NK.dtype} {shape}"
        )
