"""Linear layers through oneDNN's prepacked operators: for CPUs without AVX2, and without a compiler."""

import ctypes

import torch

from inflight.execution.weights.prepacked_linear import PrepackedLinear, WeightLayout


class OneDnnLinear(PrepackedLinear):
    """A layer in the layout that oneDNN prefers here."""

    def _prepack(self, weight: torch.Tensor) -> None:
        """See `PrepackedLinear`."""
        self.prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `PrepackedLinear`."""
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` of at least one row, `[…, in]` to `[…, out]`."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.prepacked, self.bias, self.activation, [], self.variant
        )
        return out

    def layout(self) -> WeightLayout | None:
        """See `PrepackedLinear`."""
        return read_layout(self.prepacked)


def read_layout(prepacked: torch.Tensor) -> WeightLayout | None:
    """The layout of a matrix `[rows, columns]` that oneDNN has prepacked; None if its descriptor is not the one of
    oneDNN's version 3.

    The descriptor (`dnnl_memory_desc`, as oneDNN serialises it) gives the strides of blocks, and each block's
    dimensions from outermost to innermost, each a part of a dimension of the matrix.
    """
    description = torch.ops.mkldnn._get_mkldnn_serialized_md(prepacked).numpy().tobytes()
    words = memoryview(description[: len(description) // 8 * 8]).cast("q")
    max_dims, shape = 12, tuple(prepacked.shape)
    if len(words) < 77 or tuple(words[1:3]) != shape or words[52] > max_dims or words[38] != 0:
        return None
    num_inner, sizes, dims = words[52], list(words[53:65]), list(words[65:77])
    places = []
    for dim, length in enumerate(shape):
        index, place = torch.arange(length), torch.zeros(length, dtype=torch.int64)
        stride = 1
        for size, its_dim in reversed(list(zip(sizes[:num_inner], dims[:num_inner], strict=True))):
            if its_dim == dim:
                place += index % size * stride
                index = index // size
            stride *= size
        places.append(place + index * words[40 + dim])
    num_bytes = torch.ops.mkldnn._nbytes(prepacked)
    if int(places[0].max() + places[1].max()) * prepacked.dtype.itemsize >= num_bytes:
        return None
    memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(prepacked))
    return WeightLayout(torch.frombuffer(memory, dtype=prepacked.dtype), *places)
